"""The occurrences of a run for detection, read column by column, so that a hundred million of them fit in memory.

Losses before and after are held; gradient norms, entropies, the other signal and the losses in between are read from
their files each time they are used. The result is the one that the tables as a whole would give. Rows that do not make
up whole rollouts, or tables that do not match, are left to `Occurrences.from_checkpoints`, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.detect.halves import Halves, selected_prompts
from rocktokens.detect.occurrences import SIGNALS, Array, Occurrences, left_out
from rocktokens.detect.scored import Layout, ScoredStep
from rocktokens.detect.settings import DetectConfig
from rocktokens.remarks import Remark
from rocktokens.run import Run

# Shapes: M rows of the run, R rollouts, P prompts, V token types.
MAX_TOKEN_ID = 50_000_000


class ReadOnDemand(Mapping[Any, Array]):
    """Columns by name; each is read anew when it is asked for, and not kept."""

    def __init__(self, readers: dict[Any, Callable[[], Array]]) -> None:
        self._readers = readers

    def __getitem__(self, name: Any) -> Array:
        return self._readers[name]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, name: object) -> bool:
        return name in self._readers


def read_halves(run: Run, config: DetectConfig) -> Halves | None:
    """Both halves of the run's occurrences; None where they have to be read as whole tables."""
    scored = {step: ScoredStep(run, step) for step in run.steps()}
    wanted = {"token_id", config.signal}
    if not scored or not all(one.files and wanted <= one.columns() for one in scored.values()):
        return None
    layouts = {step: one.layout() for step, one in scored.items()}
    found = {step: layout for step, layout in layouts.items() if layout is not None}
    last = max(scored)
    if len(found) < len(scored) or any(layout.names != found[last].names for layout in found.values()):
        return None
    if any(not np.array_equal(layout.size_R, found[last].size_R) for layout in found.values()):
        return None
    table = _Table(scored, found, config)
    token_M = table.tokens()
    if token_M is None or token_M.min() < 0 or token_M.max() > MAX_TOKEN_ID:
        return None
    return table.halves(token_M)


class _Table:
    """All checkpoints of a run, their rows in the order of rollouts and positions."""

    def __init__(self, scored: dict[int, ScoredStep], layouts: dict[int, Layout], config: DetectConfig) -> None:
        self.scored, self.layouts, self.config = scored, layouts, config
        self.steps = sorted(scored)
        self.first, self.last = self.steps[0], self.steps[-1]
        self.other = next(name for name in SIGNALS if name != config.signal)
        layout = layouts[self.last]
        self.size_R = layout.size_R
        self.prompt_ids = sorted({prompt for prompt, _ in layout.names})
        code_of = {prompt: code for code, prompt in enumerate(self.prompt_ids)}
        self.prompt_R = np.array([code_of[prompt] for prompt, _ in layout.names], np.int32)
        self.rollout_ids = pa.array([rollout for _, rollout in layout.names])

    def read(self, step: int, name: str, dtype: object = np.float32) -> Array:
        """A column of one checkpoint."""
        return self.scored[step].read(name, self.layouts[step], dtype)

    def tokens(self) -> Array | None:
        """The token ids, (M,); None where checkpoints were scored on different ones."""
        token_M = self.read(self.last, "token_id", np.int32)
        same = all(np.array_equal(self.read(step, "token_id", np.int32), token_M) for step in self.steps[:-1])
        return token_M if same else None

    def recorded(self, step: int, name: str) -> bool:
        """Whether a checkpoint has the column, with anything in it."""
        return name in self.scored[step].columns() and self.scored[step].any_finite(name)

    def halves(self, token_M: Array) -> Halves | None:
        """Both halves; None where no prompt has a finite loss."""
        losses = {step: self.read(step, self.config.signal) for step in {self.first, self.last}}
        finite_M = np.isfinite(losses[self.last])
        for loss_M in losses.values():
            finite_M &= np.isfinite(loss_M)
        others = {step for step in (self.first, self.last) if self.recorded(step, self.other)}
        for step in self.steps[1:-1]:
            finite_M &= np.isfinite(self.read(step, self.config.signal))
        for step in others:
            finite_M &= np.isfinite(self.read(step, self.other))
        if not finite_M.any():
            return None
        token_ids_V = _distinct(token_M)
        code = np.zeros(int(token_M.max()) + 1, np.int32)
        code[token_ids_V] = np.arange(len(token_ids_V), dtype=np.int32)
        prompt_M = np.repeat(self.prompt_R, self.size_R)
        chosen_P = selected_prompts(_distinct(prompt_M[finite_M]), len(self.prompt_ids), self.config)
        del prompt_M
        remarks = () if finite_M.all() else (left_out(finite_M),)
        common = _Common(self, losses, others, finite_M, token_M, token_ids_V, code, remarks)
        return Halves(common.half(chosen_P), common.half(~chosen_P))


@dataclass(frozen=True)
class _Common:
    """What both halves are cut from."""

    table: _Table
    losses: dict[int, Array]
    others: set[int]
    """Checkpoints that recorded the other signal."""
    finite_M: Array
    token_M: Array
    token_ids_V: Array
    code: Array
    """Type of every token id."""
    remarks: tuple[Remark, ...]

    def half(self, chosen_P: Array) -> Occurrences:
        """The occurrences of some prompts."""
        table, steps = self.table, self.table.steps
        kept_R = chosen_P[table.prompt_R]
        kept_M = np.repeat(kept_R, table.size_R)
        finite_m = self.finite_M[kept_M]
        complete = bool(finite_m.all())
        measured: Array | slice = slice(None) if complete else finite_m
        size_R = table.size_R[kept_R]
        layouts = {step: layout.of(kept_R) for step, layout in table.layouts.items()}

        def reader(step: int, name: str) -> Callable[[], Array]:
            return lambda: table.scored[step].read(name, layouts[step], np.float32)[measured]

        losses = {step: loss_M[kept_M][measured] for step, loss_M in self.losses.items()}
        by_step: dict[Any, Callable[[], Array]] = {}
        for step in steps if len(steps) > 1 else []:
            by_step[step] = partial(losses.__getitem__, step) if step in losses else reader(step, table.config.signal)
        return Occurrences(
            token_ids_V=self.token_ids_V,
            type_M=self.code[self.token_M[kept_M]],
            rollout_M=np.repeat(np.flatnonzero(kept_R).astype(np.int32), size_R),
            position_M=_positions(size_R),
            row_N=None if complete else np.flatnonzero(finite_m).astype(np.int32),
            prompt_N=np.repeat(table.prompt_R[kept_R], size_R)[measured],
            loss_post_N=losses[table.last],
            loss_pre_N=losses[table.first] if len(steps) > 1 else None,
            extras=ReadOnDemand(self._extras(reader)),
            entropies=ReadOnDemand(self._entropies(reader)),
            loss_by_step=ReadOnDemand(by_step),
            prompt_ids=pa.array(table.prompt_ids),
            rollout_ids=table.rollout_ids,
            rollout_prompt_R=table.prompt_R,
            num_left_out=len(finite_m) - int(finite_m.sum()),
            remarks=self.remarks,
        )

    def _extras(self, reader: Callable[[int, str], Callable[[], Array]]) -> dict[Any, Callable[[], Array]]:
        table = self.table
        found = {"grad_norm": reader(table.last, "grad_norm")} if table.recorded(table.last, "grad_norm") else {}
        if table.last in self.others:
            found["other_post"] = reader(table.last, table.other)
            if table.first in self.others and table.first != table.last:
                found["other_pre"] = reader(table.first, table.other)
        return found

    def _entropies(self, reader: Callable[[int, str], Callable[[], Array]]) -> dict[Any, Callable[[], Array]]:
        table = self.table
        sources = {
            "teacher_entropy": (table.last, "teacher_entropy"),
            "student_entropy": (table.last, "student_entropy"),
        }
        sources |= {"student_entropy_pre": (table.first, "student_entropy")} if table.first != table.last else {}
        return {name: reader(*source) for name, source in sources.items() if table.recorded(*source)}


def _positions(size_R: Array) -> Array:
    """0 up to the size of each rollout, rollout by rollout; in 16 bits where they hold it."""
    start_R = (np.cumsum(size_R) - size_R).astype(np.int32)
    position_M = np.arange(size_R.sum(), dtype=np.int32)
    position_M -= np.repeat(start_R, size_R)
    return position_M.astype(np.int16) if size_R.max() < 2**15 else position_M


def _distinct(value_M: Array) -> Array:
    """Distinct values of a column of small numbers, ascending."""
    seen = np.zeros(int(value_M.max()) + 1, bool)
    seen[value_M] = True
    return np.flatnonzero(seen)
