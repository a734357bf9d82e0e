"""Accuracy on held-out problems while a model trains: the same problems and the same sampling seeds every time.

So two evaluations differ by what was learned and not by the draw. This module is given a sampler and an answer checker;
it knows neither models nor tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rocktokens.core.seeds import derive_seed
from rocktokens.core.stats import Estimate, mean_estimate, wilson_interval
from rocktokens.errors import DataError
from rocktokens.lm.checkers import Checker
from rocktokens.lm.tasks import Prompt

# sample(prompt_ids, seeds, length limit) -> responses as token ids
Sample = Callable[[Sequence[Sequence[int]], Sequence[int], int], list[list[int]]]


class Evaluator:
    """Held-out problems with a fixed seed for every rollout."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        check: Checker,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        num_rollouts: int = 1,
        seed: int = 0,
        batch_size: int = 256,
    ) -> None:
        self.prompts = [prompt for prompt in prompts if prompt.answer is not None]
        if not self.prompts:
            raise DataError("none of the held-out problems has an answer; accuracy cannot be measured")
        self.check, self.tokenizer = check, tokenizer
        self.max_new_tokens, self.num_rollouts = max_new_tokens, num_rollouts
        self.seed, self.batch_size = seed, batch_size

    def correct(self, sample: Sample, part: int = 0, parts: int = 1) -> np.ndarray:
        """Share of right answers for each problem of one part (every `parts`-th problem)."""
        mine = self.prompts[part::parts]
        jobs = [(prompt, rollout) for prompt in mine for rollout in range(self.num_rollouts)]
        right: list[bool] = []
        for start in range(0, len(jobs), self.batch_size):
            batch = jobs[start : start + self.batch_size]
            seeds = [derive_seed(self.seed, "evaluate", prompt.prompt_id, rollout) for prompt, rollout in batch]
            responses = sample([prompt.prompt_ids for prompt, _ in batch], seeds, self.max_new_tokens)
            texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
            right += [self.check(text, prompt.answer or "") for text, (prompt, _) in zip(texts, batch)]
        return np.asarray(right, float).reshape(len(mine), self.num_rollouts).mean(1)

    def accuracy(self, sample: Sample, accelerator: Any = None) -> Estimate:
        """Accuracy with its 95 % interval over problems; ranks share the work."""
        if accelerator is None or accelerator.num_processes == 1:
            share_P = self.correct(sample)
        else:
            share_P = self._over_ranks(sample, accelerator)
        if self.num_rollouts == 1:
            return wilson_interval(int(share_P.sum()), len(share_P))
        if np.ptp(share_P) == 0:
            return wilson_interval(round(share_P.sum()), len(share_P))
        return mean_estimate(share_P, rng=np.random.default_rng(derive_seed(self.seed, "interval")))

    def _over_ranks(self, sample: Sample, accelerator: Any) -> np.ndarray:
        part, parts = accelerator.process_index, accelerator.num_processes
        own = self.correct(sample, part, parts)
        whole = torch.full((-(-len(self.prompts) // parts),), torch.nan, device=accelerator.device)
        whole[: len(own)] = torch.from_numpy(own).float()
        gathered = accelerator.gather(whole).cpu().numpy().astype(float)
        return gathered[~np.isnan(gathered)]
