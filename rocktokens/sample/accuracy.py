"""Accuracy of a model on held-out prompts: the same prompts and the same sampling seeds every time.

So two evaluations differ by what was learned and not by the draw. This module is given a sampler and an answer checker;
it knows neither models nor tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rocktokens.errors import DataError
from rocktokens.prompts.checkers import Checker, check_all
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Engine, Request
from rocktokens.seeds import derive_seed
from rocktokens.stats import Estimate, accuracy_estimate

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

# sample(prompt_ids, seeds, length limit) -> rollouts as token ids
Sample = Callable[[Sequence[Sequence[int]], Sequence[int], int], list[list[int]]]


def sample_with(engine: Engine) -> Sample:
    """The `Sample` function of an engine; refuses a model that gives NaN or infinite logits on every prompt."""

    def sample(prompts: Sequence[Sequence[int]], seeds: Sequence[int], limit: int) -> list[list[int]]:
        found = engine.generate([Request(tuple(ids), limit, seed) for ids, seed in zip(prompts, seeds)])
        if found and all(rollout.invalid and not rollout.token_ids for rollout in found):
            raise DataError("the model gives NaN or infinite logits on every prompt; check its weights")
        return [list(rollout.token_ids) for rollout in found]

    return sample


class Evaluator:
    """Held-out prompts with a fixed seed for every rollout."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        check: Checker,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int,
        num_rollouts: int = 1,
        seed: int = 0,
        batch_size: int = 256,
    ) -> None:
        self.prompts = [prompt for prompt in prompts if prompt.answer is not None]
        if not self.prompts:
            raise DataError("none of the held-out prompts has an answer; accuracy cannot be measured")
        self.check, self.tokenizer = check, tokenizer
        self.max_new_tokens, self.num_rollouts = max_new_tokens, num_rollouts
        self.seed, self.batch_size = seed, batch_size

    def correct(self, sample: Sample, part: int = 0, parts: int = 1) -> NDArray[np.float64]:
        """Share of right rollouts for each prompt of one part (every `parts`-th prompt)."""
        mine = self.prompts[part::parts]
        jobs = [(prompt, rollout) for prompt in mine for rollout in range(self.num_rollouts)]
        texts: list[str] = []
        for start in range(0, len(jobs), self.batch_size):
            batch = jobs[start : start + self.batch_size]
            seeds = [derive_seed(self.seed, "evaluate", prompt.prompt_id, rollout) for prompt, rollout in batch]
            rollouts = sample([prompt.prompt_ids for prompt, _ in batch], seeds, self.max_new_tokens)
            texts += self.tokenizer.batch_decode(rollouts, skip_special_tokens=True)
        pairs = [(text, prompt.answer or "") for text, (prompt, _) in zip(texts, jobs)]
        right = np.asarray(check_all(self.check, pairs), dtype=float)  # many at once, where the checker can
        return right.reshape(len(mine), self.num_rollouts).mean(axis=1)

    def accuracy(self, sample: Sample, accelerator: Accelerator | None = None) -> Estimate:
        """Accuracy with its 95 % interval over prompts; the processes of a training share the work."""
        parts = 1 if accelerator is None else accelerator.num_processes
        if accelerator is None or parts == 1:
            share_P = self.correct(sample)
        else:
            own = self.correct(sample, accelerator.process_index, parts)
            whole = torch.full((-(-len(self.prompts) // parts),), torch.nan, device=accelerator.device)
            whole[: len(own)] = torch.from_numpy(own).float()
            share_P = accelerator.gather(whole).cpu().numpy().astype(float)
            share_P = share_P[~np.isnan(share_P)]
        return accuracy_estimate(share_P, rng=np.random.default_rng(derive_seed(self.seed, "interval")))
