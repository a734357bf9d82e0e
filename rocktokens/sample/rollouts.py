"""Prompts in, rollouts out: who asks the engine, decodes what it wrote, and has the answers checked.

A rollout's seed derives from the run's seed, its prompt and its number, so adding prompts or rollouts changes none of
those there were. Rollouts travel as rows of `tables.ROLLOUTS`; their text is for people, their ids for the scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from rocktokens.errors import ConfigError, DataError
from rocktokens.models.pair import Pair
from rocktokens.prompts.checkers import Checker, check_all
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Continuation, Engine, Request, Rollout
from rocktokens.sample.sampler import Sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.seeds import derive_seed

READ_AT_ONCE = 256  # rollouts that are Python objects at a time


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
        Request(prompt.prompt_ids, config.max_new_tokens, derive_seed(config.seed, prompt.prompt_id, number))
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
    invalid = [row["rollout_id"] for row, answer in zip(rows, answers) if answer.invalid]
    if invalid and not any(answer.token_ids for answer in answers):
        raise DataError(
            f"the model gives NaN or infinite logits on every prompt, first on {invalid[0]}; check its weights"
        )
    return pa.Table.from_pylist(rows)


def rollout_row(
    prompt: Prompt, number: int, seed: int, answer: Continuation, *, text: str, correct: bool | None
) -> dict[str, object]:
    """One rollout as a row of the rollouts table; `correct` is None where nothing can be checked."""
    return {
        "prompt_id": prompt.prompt_id,
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
