"""Scoring in numbered parts: what a kill may cost, and what several processes share out.

A part is so many rollouts under every checkpoint of a group, with one pass of the teacher. Its tables are written when
it is whole. Gradients of the last checkpoint are summed by each process over its parts and written after each, with the
numbers of the parts that are in them, so that no part is added twice. The first process puts everything together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from rocktokens.geometry.gradients import GradientGeometry
from rocktokens.geometry.settings import GeometryConfig
from rocktokens.progress import progress
from rocktokens.ranks import ranks, wait_for
from rocktokens.run import Run
from rocktokens.score.settings import ScoreConfig
from rocktokens.stage import Parts, Stage
from rocktokens.tables import OCCURRENCES, TOP_TOKENS
from rocktokens.values import Json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rocktokens.models.pair import Pair
    from rocktokens.score.scoring import Rollout, ScoreFacts

log = logging.getLogger(__name__)

# Rollouts of one part. It does not depend on the batch size, with another of which a stopped stage may go on.
PART_ROLLOUTS = 256


class ScoreParts:
    """One group of checkpoints that is scored beside the teacher."""

    def __init__(
        self, run: Run, stages: dict[int, Stage], models: Pair, config: ScoreConfig, served: Json | None = None
    ) -> None:
        self.run, self.stages, self.models, self.config = run, stages, models, config
        self.served = served or {}
        """Facts of a served teacher, for the manifest."""
        self.parts = {step: stage.parts("scores") for step, stage in stages.items()}
        self.last = max([0, *run.checkpoints()])
        self.gradients = Gradients(self.parts[self.last], models.vocabulary) if self._gathers() else None
        self.facts: dict[int, list[ScoreFacts]] = {step: [] for step in stages}
        self.top = _top_tokens(run, config, models.vocabulary)

    def _gathers(self) -> bool:
        return self.config.gradients and self.last in self.stages

    def score(self, rollouts: Sequence[Rollout], students: dict[int, PreTrainedModel]) -> None:
        """Score this process's parts; the first process waits for the others' and finishes the checkpoints."""
        groups = [rollouts[start : start + PART_ROLLOUTS] for start in range(0, len(rollouts), PART_ROLLOUTS)]
        with progress(f"scoring checkpoint {', '.join(map(str, students))}", len(rollouts), "rollouts") as advance:
            for number, group in enumerate(groups):
                missing = {step: students[step] for step in students if not self.parts[step].has(_name(number))}
                if not missing:
                    advance.resumed(len(group))
                elif ranks().owns(number):
                    self._score_part(number, group, missing, advance)
        if ranks().is_first:
            for step in students:
                for number in range(len(groups)):
                    part = _name(number)
                    wait_for(lambda: self.parts[step].has(part), f"part {part} of checkpoint {step}")  # noqa: B023
                self._finish(step, len(groups))

    def _score_part(
        self,
        number: int,
        rollouts: Sequence[Rollout],
        students: dict[int, PreTrainedModel],
        advance: Callable[[int], None],
    ) -> None:
        from rocktokens.score.scoring import score as score_rollouts

        tables: dict[int, list[pa.Table]] = {step: [OCCURRENCES.empty_table()] for step in students}
        tops: dict[int, list[pa.Table]] = {step: [TOP_TOKENS.empty_table()] for step in students}
        gathers = self.gradients is not None and self.last in students and number not in self.gradients.numbers
        facts = score_rollouts(
            rollouts,
            students,
            self.models.teacher_source(),
            eos_ids=self.models.eos_ids,
            vocabulary=self.models.vocabulary,
            write=lambda step, table: tables[step].append(table.select(OCCURRENCES.names).cast(OCCURRENCES)),
            token_budget=self.config.token_budget,
            chunk=self.config.chunk,
            observers={self.last: self.gradients.update} if gathers and self.gradients is not None else None,
            top=None if self.top is None else self.top(lambda step, table: tops[step].append(_top_rows(table))),
            progress=advance,
        )
        if gathers and self.gradients is not None:
            self.gradients.keep(number)
        for step in students:
            self.facts[step].append(facts[step])
            if self.top is not None:
                self._write(step, f"top-{_name(number)}", pa.concat_tables(tops[step]))
            self._write(step, _name(number), pa.concat_tables(tables[step]))

    def _write(self, step: int, name: str, table: pa.Table) -> None:
        self.run.write(self.parts[step].path(name), table)

    def _finish(self, step: int, count: int) -> None:
        """Put a checkpoint's parts in place of its old occurrences and record it."""
        run, parts = self.run, self.parts[step]
        run.clear_new_occurrences(step)
        run.link_parts("occurrences", step, [self._file(parts, _name(number)) for number in range(count)])
        if self.top is not None:
            run.link_parts("top_tokens", step, [self._file(parts, f"top-{_name(number)}") for number in range(count)])
        run.reopen(f"score/step={step}")
        run.replace_occurrences(step)
        if self.gradients is not None and step == self.last:
            run.write_tensors("gradients", self.gradients.gathered().state())
        found = run.query(
            f"select rollout_id, count(*) as bad from occurrences where step = {step} and not isfinite(kl) "
            "group by rollout_id order by rollout_id"
        )
        bad = dict(zip(found["rollout_id"].to_pylist(), found["bad"].to_pylist()))
        if bad:
            first = next(iter(bad))
            log.warning(
                "checkpoint %d gave NaN or infinite logits at %d occurrences of %d rollouts, first in rollout %s (%d); "
                "their rows are kept, marked by NaN",
                step,
                sum(bad.values()),
                len(bad),
                first,
                bad[first],
            )
        rows = run.query(f"select count(*) as n from occurrences where step = {step}")["n"][0].as_py()
        padded = sum(own.padded_tokens for own in self.facts[step])
        real = sum(own.real_tokens for own in self.facts[step])
        self.stages[step].finish(
            {
                "occurrences": int(rows),
                "invalid": sum(bad.values()),
                "invalid_rollouts": sorted(bad)[:20],
                "padding_share": round(padded / max(padded + real, 1), 4),
                **self.served,
            }
        )

    def _file(self, parts: Parts, name: str) -> Path:
        return self.run.path / f"{parts.path(name)}.parquet"


def _name(number: int) -> str:
    return f"{number:05d}"


def _top_rows(table: pa.Table) -> pa.Table:
    return table.select(TOP_TOKENS.names).cast(TOP_TOKENS)


class Gradients:
    """Sums of the last checkpoint's gradients over this process's parts, kept beside them."""

    def __init__(self, parts: Parts, vocabulary: int) -> None:
        self.folder, self.vocabulary = parts.run.path / parts.name, vocabulary
        self.own = self.folder / f"gradients-{ranks().rank}.safetensors"
        self.numbers: set[int] = set()
        """Parts that are in some process's sums."""
        self._mine: list[int] = []
        self._sums = GradientGeometry(vocabulary)
        for file in sorted(self.folder.glob("gradients-*.safetensors")):
            sums, numbers = _read(file)
            self.numbers.update(numbers)
            if file == self.own:
                self._sums, self._mine = sums, numbers

    def update(self, token_N: torch.Tensor, grad_NV: torch.Tensor) -> None:
        """Add rows."""
        self._sums.update(token_N, grad_NV)

    def keep(self, number: int) -> None:
        """Write the sums, a part more in them."""
        from safetensors.torch import save_file

        from rocktokens.files import writing

        self._mine.append(number)
        self.numbers.add(number)
        with writing(self.own) as draft:
            save_file({**self._sums.state(), "numbers": torch.tensor(self._mine)}, draft)

    def gathered(self) -> GradientGeometry:
        """The sums of all processes, as they lie on disk."""
        total = GradientGeometry(self.vocabulary)
        for file in sorted(self.folder.glob("gradients-*.safetensors")):
            total.merge(_read(file)[0])
        return total


def _read(file: Path) -> tuple[GradientGeometry, list[int]]:
    from safetensors.torch import load_file

    state = load_file(file)
    numbers = state.pop("numbers").tolist()
    return GradientGeometry.restore(state, GeometryConfig()), numbers


def _top_tokens(run: Run, config: ScoreConfig, vocabulary: int) -> Any:
    """Keeps both models' most probable tokens for the rollouts that the report shows and the costliest positions."""
    from rocktokens.score.shown import shown_rollouts
    from rocktokens.score.top_tokens import TopTokenRecorder

    if not config.top:
        return None
    table = run.read("rollouts", ["rollout_id", "correct", "token_ids"])
    ids = table["rollout_id"].to_pylist()
    lengths = [len(tokens) for tokens in table["token_ids"]]
    shown = shown_rollouts(table["correct"].to_pylist(), lengths)
    last = max([0, *run.checkpoints()])
    chosen = [ids[place] for place in shown]
    return lambda write: TopTokenRecorder(chosen, config.top, vocabulary, write, costly_step=last)
