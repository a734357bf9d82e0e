"""Prompts in, rollouts out: ask the engine, decode what it wrote, check the answers; accuracy on held-out prompts.

A rollout's seed derives from the run's seed, its prompt and its number, so adding prompts or rollouts changes none of
those there were. Rollouts travel as rows of `tables.ROLLOUTS`; their text is for people, their ids for the scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rocktokens.errors import ConfigError, DataError
from rocktokens.models.pair import Pair
from rocktokens.prompts.checkers import Checker, check_all
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Continuation, Engine, Request, Rollout
from rocktokens.sample.sampler import Sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.seeds import derive_seed
from rocktokens.stats import Estimate, accuracy_estimate

if TYPE_CHECKING:
    from accelerate import Accelerator

READ_AT_ONCE = 256  # rollouts that are Python objects at a time
# sample(prompt_ids, seeds, length limit) -> rollouts as token ids
Sample = Callable[[Sequence[Sequence[int]], Sequence[int], int], list[list[int]]]


def make_sampler(pair: Pair, config: RolloutConfig, *, of_teacher: bool = False) -> Sampler:
    """The engine in this process that samples from one of a pair's models as a configuration says."""
    model = pair.teacher if of_teacher else pair.student
    if model is None:
        raise ConfigError(
            "the teacher is served with states only, and they cannot be sampled from; add the URL of a vLLM server "
            "that generates with it to --servers.teacher, or leave --servers.teacher out here"
        )
    return Sampler(
        model,
        eos_ids=pair.eos_ids,
        pad_id=pair.pad_id,
        vocabulary=pair.vocabulary,
        temperature=config.temperature,
        greedy=config.greedy,
        top_k=config.top_k,
        top_p=config.top_p,
        batch_size=config.batch_size,
    )


def requests_for(prompts: Sequence[Prompt], config: RolloutConfig) -> list[Request]:
    """Every rollout to sample, prompt by prompt."""
    return [
        Request(
            prompt.prompt_ids,
            config.max_new_tokens,
            derive_seed(config.seed, prompt.prompt_id, number),
            name=f"{prompt.prompt_id}#{number}",
        )
        for prompt in prompts
        for number in range(config.num_rollouts)
    ]


def sample_rollouts(
    engine: Engine,
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    checker: Checker | None,
    *,
    progress: Callable[[int], None] | None = None,
) -> pa.Table:
    """Sample, decode and check; `correct` is null where nothing can be checked."""
    requests = requests_for(prompts, config)
    answers = engine.generate(requests, progress=progress)
    jobs = [(prompt, number) for prompt in prompts for number in range(config.num_rollouts)]
    texts = [str(tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)) for answer in answers]
    checked = [i for i, (prompt, _) in enumerate(jobs) if checker is not None and prompt.answer is not None]
    pairs = [(texts[i], jobs[i][0].answer or "") for i in checked]
    correct = dict(zip(checked, check_all(checker, pairs))) if checker is not None else {}
    rows = [
        rollout_row(prompt, number, request.seed, answer, text=text, correct=correct.get(i))
        for i, ((prompt, number), request, answer, text) in enumerate(zip(jobs, requests, answers, texts))
    ]
    _refuse_broken(answers)
    return pa.Table.from_pylist(rows)


def _refuse_broken(answers: Sequence[Continuation]) -> None:
    """A single broken rollout is a row; a model that never gives a token is an error."""
    if any(answer.invalid for answer in answers) and not any(answer.token_ids for answer in answers):
        raise DataError("the model gives NaN or infinite logits on every prompt; check its weights")


def rollout_row(
    prompt: Prompt, number: int, seed: int, answer: Continuation, *, text: str, correct: bool | None
) -> dict[str, object]:
    """One rollout as a row of the rollouts table; `correct` is None where nothing can be checked."""
    return {
        "prompt_id": prompt.prompt_id,
        "group_id": prompt.group_id,
        "rollout_id": f"{prompt.prompt_id}#{number}",
        "prompt_ids": list(prompt.prompt_ids),
        "token_ids": list(answer.token_ids),
        "text": text,
        "answer": prompt.answer,
        "correct": correct,
        "truncated": answer.truncated,
        "seed": seed,
    }


def check_lengths(prompts: Sequence[Prompt], context: int | None) -> None:
    """Refuse prompts that leave no room for a response, naming the first."""
    if context is None:
        return
    long = [prompt for prompt in prompts if len(prompt.prompt_ids) >= context]
    if long:
        raise DataError(
            f"{len(long)} of {len(prompts)} prompts do not fit the model's context of {context} tokens; the first is "
            f"{long[0].prompt_id} with {len(long[0].prompt_ids)}. Shorten them or leave them out."
        )


class RolloutRows(Sequence[Rollout]):
    """Rows of a rollouts table as the scorer takes them; rollouts without a single token are left out.

    Made when a slice is asked for: as Python's numbers they take ten times as much memory.
    """

    def __init__(self, table: pa.Table) -> None:
        columns = table.select(["prompt_id", "rollout_id", "prompt_ids", "token_ids"])
        self._table = columns.filter(pc.greater(pc.list_value_length(columns["token_ids"]), 0))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, at: slice) -> list[Rollout]:  # type: ignore[override]
        start, stop, _ = at.indices(len(self))
        columns = [column.to_pylist() for column in self._table.slice(start, max(stop - start, 0)).columns]
        return [Rollout(prompt, rollout, tuple(ids), tuple(tokens)) for prompt, rollout, ids, tokens in zip(*columns)]

    def __iter__(self) -> Iterator[Rollout]:
        for start in range(0, len(self), READ_AT_ONCE):
            yield from self[start : start + READ_AT_ONCE]


def sample_with(engine: Engine) -> Sample:
    """The `Sample` function of an engine; refuses a model that gives NaN or infinite logits on every prompt."""

    def sample(prompts: Sequence[Sequence[int]], seeds: Sequence[int], limit: int) -> list[list[int]]:
        found = engine.generate([Request(tuple(ids), limit, seed) for ids, seed in zip(prompts, seeds)])
        _refuse_broken(found)
        return [list(rollout.token_ids) for rollout in found]

    return sample


class Evaluator:
    """Held-out prompts with a fixed seed for every rollout, so evaluations differ by what was learned, not the draw."""

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
