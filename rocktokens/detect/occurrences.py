"""Scored occurrences: read by DuckDB from Parquet or Arrow, summed by (group, type) as a `group by`.

A source is one table per checkpoint, scored on the same rollouts, or one table from another trainer. Its rows are put
into one canonical order, by group, prompt, rollout and position, so that no result depends on how they were split.
What the rest of detection calls a prompt is a group of prompts where prompts have one: halves, tests and bootstraps go
by what is independent. Only the neighbours that H1 compares a type with are those of the prompt itself.
Type, rollout, position and the losses before and after stay in memory, 24 bytes a row with an index; other columns are
read when they are asked for. Rows without a finite loss stay as context of their neighbours and are not measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from rocktokens.errors import DataError

# Shapes: M recorded rows, N measured rows (their losses are finite), R rollouts, V token types, P prompts,
# S pairs of a prompt and a type that occurs in it.
Array = NDArray[Any]
SIGNALS = ("kl", "log_ratio")
KEYS = ("prompt_id", "rollout_id", "position", "token_id")
BATCH_ROWS, BLOCK_ROWS = 1_000_000, 1_000_000  # rows that are read, and added up, at a time


def rng_for(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for every purpose: using one leaves the others as they are."""
    return np.random.default_rng([seed, *purpose.encode()])


@dataclass(frozen=True)
class Pairs:
    """Sums over the occurrences of each type within each prompt; only pairs that occur are held."""

    num_types: int
    num_prompts: int
    type_S: Array
    prompt_S: Array
    n_S: Array
    loss_S: Array
    above_S: Array
    """Sum over the occurrences of (loss − mean loss of the other types in the same prompt and fifth of the rollout)."""
    pre_S: Array | None = None
    """Loss before OPD; None where it was not recorded."""
    late_S: Array | None = None
    """Loss at the checkpoint that begins the last third of training; None where no checkpoint lies between."""
    late_share: float = 0.0
    """Share of training after that checkpoint."""

    @property
    def prompts_V(self) -> Array:
        """Number of prompts that each type occurs in."""
        return np.bincount(self.type_S, minlength=self.num_types)

    def by_type(self, value_S: Array) -> Array:
        """Sums over prompts."""
        return np.bincount(self.type_S, weights=value_S, minlength=self.num_types)

    def by_prompt(self, value_S: Array) -> Array:
        """Sums over types."""
        return np.bincount(self.prompt_S, weights=value_S, minlength=self.num_prompts)


@dataclass(frozen=True)
class Occurrences:
    """Measured occurrences in canonical order, with the recorded rows around them."""

    token_ids_V: Array
    """Token id of every type observed, ascending; `type_M` indexes it."""
    names_R: pa.Table
    """prompt_id and rollout_id of every rollout; `rollout_M` indexes it."""
    type_M: Array
    rollout_M: Array
    position_M: Array
    row_N: Array
    """Where each measured occurrence lies among the recorded rows."""
    prompt_N: Array
    """Group of each measured occurrence, from 0; a prompt without a group is one by itself."""
    own_N: Array
    """Prompt of each measured occurrence."""
    loss_post_N: Array
    loss_pre_N: Array | None
    columns: Mapping[str | int, Callable[[], Array]]
    """Columns of measured occurrences that are read on demand: grad_norm; other_post and other_pre, the signal that is
    not chosen (log_ratio beside kl); and by step, the loss at every checkpoint where there are several."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.loss_post_N)

    @property
    def type_N(self) -> Array:
        """Type of each measured occurrence, as an index into `token_ids_V`."""
        return self.type_M[self.row_N]

    @property
    def rollout_N(self) -> Array:
        """Rollout of each measured occurrence."""
        return self.rollout_M[self.row_N]

    @property
    def num_prompts(self) -> int:
        """Groups of prompts with a measured occurrence."""
        return int(self.prompt_N[-1]) + 1 if len(self) else 0

    @property
    def steps(self) -> list[int]:
        """The checkpoints, ascending, where there are several."""
        return sorted(key for key in self.columns if isinstance(key, int))

    def column(self, name: str | int) -> Array | None:
        """A column that is read on demand; None where it was not recorded."""
        return self.columns[name]() if name in self.columns else None

    def among(self, types: Array) -> Array:
        """Mask of the measured occurrences of some types."""
        wanted_V = np.zeros(len(self.token_ids_V), bool)
        wanted_V[types] = True
        return wanted_V[self.type_N]

    def halves(self, seed: int) -> tuple[Occurrences, Occurrences]:
        """Half of the prompts at random, with all their rollouts, and the other half."""
        number = self.num_prompts
        if number < 4:
            raise DataError(
                f"detection needs at least 4 prompts or groups, two to choose on and two to measure on; got {number}. "
                "Give prompt_id, or score more prompts."
            )
        chosen_P = np.zeros(number, bool)
        chosen_P[rng_for(seed, "halves").permutation(number)[: number // 2]] = True
        return self._of_prompts(chosen_P), self._of_prompts(~chosen_P)

    def _of_prompts(self, chosen_P: Array) -> Occurrences:
        """The occurrences of some prompts, which are numbered anew; recorded rows are shared."""
        kept_N = chosen_P[self.prompt_N]
        return replace(
            self,
            row_N=self.row_N[kept_N],
            prompt_N=(np.cumsum(chosen_P, dtype=np.int32) - 1)[self.prompt_N[kept_N]],
            own_N=self.own_N[kept_N],
            loss_post_N=self.loss_post_N[kept_N],
            loss_pre_N=None if self.loss_pre_N is None else self.loss_pre_N[kept_N],
            columns={name: _masked(read, kept_N) for name, read in self.columns.items()},
        )

    def on_other_signal(self) -> Occurrences | None:
        """The same occurrences by the other signal, where it was recorded."""
        post_N = self.column("other_post")
        if post_N is None:
            return None
        return replace(self, loss_post_N=post_N, loss_pre_N=self.column("other_pre"), columns={})

    def sums(self, columns: Mapping[str, Array], rows_n: Array | None = None) -> dict[str, Array]:
        """Number of occurrences `n` and sums of columns by (group, type), in the order of groups, then of types.

        Args:
            columns: one value per measured occurrence, or per row chosen.
            rows_n: the measured occurrences to add up; unset: all.
        """
        at = slice(None) if rows_n is None else rows_n
        return _added({"prompt": self.prompt_N[at], "type": self.type_N[at]}, columns)

    def pairs(self) -> Pairs:
        """Sums of the losses after OPD, before it, and at the start of the last third where they are known."""
        late, late_share = last_third(self.steps)
        columns = {"loss": self.loss_post_N}
        columns |= {} if self.loss_pre_N is None else {"pre": self.loss_pre_N}
        columns |= {} if late is None else {"late": self.columns[late]()}
        # Cells (c) of prompt, type and fifth of the rollout: what stands at costly positions has costly neighbours.
        last_R = np.append(np.flatnonzero(np.diff(self.rollout_M)), len(self.rollout_M) - 1)
        length_R = np.zeros(len(self.names_R), np.int64)
        length_R[self.rollout_M[last_R]] = self.position_M[last_R] + 1
        fifth_N = (5 * self.position_M[self.row_N].astype(np.int64) // length_R[self.rollout_N]).astype(np.int32)
        own_N = np.cumsum(np.diff(self.own_N, prepend=self.own_N[:1]) != 0, dtype=np.int32)
        cells = _added({"own": own_N, "type": self.type_N, "fifth": fifth_N}, columns)
        place_c = 5 * cells["own"] + cells["fifth"]
        mean_c, known_c = _others(place_c, cells["n"], cells["loss"], cells["n"], cells["loss"])
        # Where a fifth holds no other type, the whole prompt is compared with.
        start_c = np.flatnonzero(
            np.append(True, np.diff(cells["own"]) != 0) | np.append(True, np.diff(cells["type"]) != 0)
        )
        whole_c = np.repeat(np.arange(len(start_c)), np.diff(start_c, append=len(place_c)))
        n_c, loss_c = (np.add.reduceat(cells[name], start_c)[whole_c] for name in ("n", "loss"))
        wide_c, wide_known_c = _others(cells["own"], cells["n"], cells["loss"], n_c, loss_c)
        other_c = np.where(known_c, mean_c, wide_c)
        cells["above"] = np.where(known_c | wide_known_c, cells["loss"] - cells["n"] * other_c, 0.0)
        # From cells to (group, type).
        group_P = np.zeros(int(own_N[-1]) + 1, np.int64)
        group_P[own_N] = self.prompt_N
        key_c = group_P[cells["own"]] * len(self.token_ids_V) + cells["type"]
        order = np.argsort(key_c, kind="stable")
        start_S = np.flatnonzero(np.append(True, np.diff(key_c[order]) != 0))
        found = {name: np.add.reduceat(cells[name][order], start_S) for name in ("n", "above", *columns)}
        key_S = key_c[order][start_S]
        return Pairs(
            num_types=len(self.token_ids_V),
            num_prompts=self.num_prompts,
            type_S=key_S % len(self.token_ids_V),
            prompt_S=key_S // len(self.token_ids_V),
            n_S=found["n"],
            loss_S=found["loss"],
            above_S=found["above"],
            pre_S=found.get("pre"),
            late_S=found.get("late"),
            late_share=late_share,
        )

    @classmethod
    def from_table(cls, table: pa.Table | Mapping[str, Any], *, signal: str = "kl") -> Occurrences:
        """From one table of any origin: rollout_id, position, token_id and loss (or loss_post, or a signal's name).

        Where there are: loss_pre, prompt_id, grad_norm.
        """
        return cls.read({0: table if isinstance(table, pa.Table) else pa.table(dict(table))}, signal=signal)

    @classmethod
    def read(
        cls, by_step: Mapping[int, pa.Table | str], *, signal: str = "kl", groups: Mapping[str, str] | None = None
    ) -> Occurrences:
        """From one source per checkpoint, the first is pre, the last post: an Arrow table, or the SELECT for its rows.

        All must hold the same occurrences, in whatever order. `groups` names the group of prompts; a column group_id
        does the same.
        """
        if not by_step:
            raise DataError("no scored checkpoint: run `rocktokens score` first")
        try:
            return _Reader(by_step, signal, groups or {}).occurrences()
        except duckdb.Error as error:
            raise DataError(f"occurrences cannot be read: {str(error).splitlines()[0]}") from error


def _added(keys: Mapping[str, Array], columns: Mapping[str, Array]) -> dict[str, Array]:
    """Number of rows `n` and sums of columns by all keys, in their order; rows come in order of the first key."""
    table, (first, *_) = pa.table({**keys, **columns}), keys
    first_n, starts = table[first].to_numpy(), [0]
    while starts[-1] < len(table):  # whole prompts at a time, so that memory stays bounded
        last = first_n[min(starts[-1] + BLOCK_ROWS, len(table)) - 1]
        starts.append(int(np.searchsorted(first_n, last, side="right")))
    names = ", ".join(keys)
    added = "".join(f', sum("{name}"::double) as "{name}"' for name in columns)
    sql = f"select {names}, count(*) as n{added} from found group by {names} order by {names}"

    def add(part: tuple[int, int]) -> pa.Table:
        # One thread for each block: floating-point additions in one order, so a repeated run is the same to the bit.
        with duckdb.connect(config={"threads": 1}) as connection:
            connection.register("found", table.slice(part[0], part[1] - part[0]))
            return connection.sql(sql).to_arrow_table()

    summed = pa.concat_tables(for_each(add, list(pairwise(starts)) or [(0, 0)]))
    return {name: summed[name].to_numpy() for name in summed.column_names}


def _others(place_c: Array, n_c: Array, loss_c: Array, less_n_c: Array, less_c: Array) -> tuple[Array, Array]:
    """Mean loss of a place without the type's own rows, and whether it holds any others."""
    size = int(place_c.max(initial=-1)) + 1
    others_c = np.bincount(place_c, weights=n_c, minlength=size)[place_c] - less_n_c
    rest_c = np.bincount(place_c, weights=loss_c, minlength=size)[place_c] - less_c
    return rest_c / np.maximum(others_c, 1), others_c > 0


def for_each(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """What `work` returns for every item, computed on all cores; items do not share sums, so threads change no bit."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(limit) if limit.isdigit() and int(limit) else os.cpu_count()
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def _masked(read: Callable[[], Array], kept: Array | slice) -> Callable[[], Array]:
    """A column read on demand, with some of its rows."""
    return lambda: read()[kept]


def parquet(files: list[Path]) -> str:
    """The SELECT that gives the rows of some Parquet files; DuckDB reads every path as a pattern."""
    plain = ["".join(f"[{c}]" if c in "[*?" else c for c in str(file)).replace("'", "''") for file in files]
    listed = ", ".join(f"'{name}'" for name in plain)
    return f"select * from read_parquet([{listed}], union_by_name = true)"


def last_third(steps: list[int]) -> tuple[int | None, float]:
    """The last checkpoint that leaves at least a third of training, and the share it leaves; (None, 0) if none."""
    # Steps are whole numbers, so two thirds of the way may fall one step beyond a checkpoint meant to stand there.
    early = [step for step in steps[1:-1] if step - steps[0] <= 2 / 3 * (steps[-1] - steps[0]) + 1]
    return (early[-1], (steps[-1] - early[-1]) / (steps[-1] - steps[0])) if early else (None, 0.0)


class _Reader:
    """The tables of all checkpoints as views, and where their rows lie in canonical order."""

    def __init__(self, by_step: Mapping[int, pa.Table | str], signal: str, groups: Mapping[str, str]) -> None:
        # Columns are read once or twice: caching the files would only hold memory.
        self.connection = duckdb.connect(config={"enable_external_file_cache": "false"})
        self.steps = sorted(by_step)
        self.last = self.steps[-1]
        self.order: dict[int, Array | slice] = {}
        named = {step: self._view(step, by_step[step]) for step in self.steps}
        self.has_prompts = bool({"prompt_id", "prompt"} & set(named[self.last]))
        names = {"prompt": list(groups), "group_id": list(groups.values())}
        self.connection.register("groups", pa.table({key: pa.array(own, pa.string()) for key, own in names.items()}))
        self.has_groups = "group_id" in named[self.last]
        loss = next((name for name in ("loss_post", "loss", signal) if name in named[self.last]), "loss")
        missing = [name for name in (*KEYS[1:], loss) if name not in named[self.last]]
        for step in self.steps[:-1]:
            missing += [f"{name} at step {step}" for name in (*KEYS, loss) if name not in named[step]]
        if missing:
            raise DataError(f"occurrences lack the columns {missing}; there are {sorted(named[self.last])}")
        other = next(name for name in SIGNALS if name != signal)
        # What detection calls a column → the checkpoint and the name under which it lies there.
        places: dict[str | int, tuple[int, str]] = {"post": (self.last, loss), "grad_norm": (self.last, "grad_norm")}
        if loss == signal:
            places["other_post"] = (self.last, other)
        if len(self.steps) > 1:
            places |= {"pre": (self.steps[0], loss), "other_pre": (self.steps[0], other)}
            places |= {step: (step, loss) for step in self.steps}
        else:
            places["pre"] = (self.last, "loss_pre")
        self.places = {name: (step, column) for name, (step, column) in places.items() if column in named[step]}

    def _view(self, step: int, source: pa.Table | str) -> list[str]:
        """The rows of a checkpoint under the name step_N; a table without prompts has one for each rollout."""
        if isinstance(source, pa.Table):
            for at, field in enumerate(source.schema):
                if pa.types.is_dictionary(field.type):  # DuckDB would order them by their codes
                    source = source.set_column(at, field.name, source[field.name].cast(field.type.value_type))
            self.connection.register(f"given_{step}", source)
            source = f"from given_{step}"
        names = [str(name) for name, *_ in self.connection.sql(f"describe ({source})").fetchall()]
        if "prompt_id" not in names and "rollout_id" in names:
            own = "prompt::varchar" if "prompt" in names else "rollout_id"  # a prompt may be text, or TRL's messages
            source = f"select *, {own} as prompt_id from ({source})"
        self.connection.execute(f"create view step_{step} as {source}")
        return names

    def occurrences(self) -> Occurrences:
        """Canonical order, types, and the rows that can be measured."""
        finite = {step: self._checked(step) for step in self.steps}
        # Other trainers record one signal and few extras: a column that is empty throughout was not recorded.
        required = ("post", "pre", *self.steps)
        self.places = {n: at for n, at in self.places.items() if n in required or finite[at[0]][at[1]]}
        given = "min(group_id)" if self.has_groups else "null"
        # A prompt without a group is one by itself; groups come in the order of their first prompts.
        rollouts = self.connection.sql(
            f"with given as (select prompt_id, rollout_id, {given} as own_group from step_{self.last} group by all), "
            "named as (select *, coalesce('g' || min(own_group) over (partition by prompt_id), 'g' || group_id, "
            "'p' || prompt_id) as unit from given left join groups on prompt = prompt_id::varchar), "
            "placed as (select *, min(prompt_id) over (partition by unit) as first from named) "
            "select hash(prompt_id, rollout_id) as code, prompt_id, rollout_id, "
            "dense_rank() over (order by first, prompt_id) - 1 as own, dense_rank() over (order by first) - 1 as prompt"
            " from placed order by first, prompt_id, rollout_id"
        ).to_arrow_table()
        code_R = rollouts["code"].to_numpy()
        token_M, rollout_M, position_M = self._keys(self.last, code_R)
        for step in self.steps[:-1]:
            token_m, rollout_m, position_m = self._keys(step, code_R)
            if not (np.array_equal(rollout_m, rollout_M) and np.array_equal(position_m, position_M)):
                raise self._differ(step)
            if not np.array_equal(token_m, token_M):
                raise DataError(
                    f"step {step} and {self.last} have other tokens at the same positions: another tokenizer?"
                )
        distinct = f"select distinct token_id::integer as token from step_{self.last} order by token"
        token_ids_V = self.connection.sql(distinct).to_arrow_table()["token"].to_numpy()
        code = np.zeros(int(token_ids_V[-1]) + 1, np.int32)
        code[token_ids_V] = np.arange(len(token_ids_V), dtype=np.int32)
        finite_M = np.ones(len(token_M), bool)
        for name, (step, column) in self.places.items():
            if name != "grad_norm" and finite[step][column] < len(token_M):
                finite_M &= np.isfinite(self._read(name))
        row_N = np.flatnonzero(finite_M).astype(np.int32)
        if not len(row_N):
            raise DataError("no occurrence has a finite loss")
        own_N, prompt_N = (rollouts[n].to_numpy().astype(np.int32)[rollout_M[row_N]] for n in ("own", "prompt"))
        notes = []
        if len(row_N) < len(token_M):
            left_out = len(token_M) - len(row_N)
            notes.append(f"{left_out} of {len(token_M)} occurrences have no finite loss and are left out")
        if not self.has_prompts:
            notes.append("no prompt_id: every rollout counts as a prompt of its own, so intervals may be too narrow")
        at: Array | slice = slice(None) if len(row_N) == len(token_M) else finite_M
        return Occurrences(
            token_ids_V=token_ids_V,
            names_R=rollouts.select(["prompt_id", "rollout_id"]),
            type_M=code[token_M],
            rollout_M=rollout_M,
            position_M=position_M,
            row_N=row_N,
            # Numbered anew: a prompt may have no finite loss at all.
            prompt_N=np.cumsum(np.diff(prompt_N, prepend=prompt_N[:1]) > 0, dtype=np.int32),
            own_N=own_N,
            loss_post_N=self._read("post")[at],
            loss_pre_N=self._read("pre")[at] if "pre" in self.places else None,
            columns={n: _masked(partial(self._read, n), at) for n in self.places if n not in ("post", "pre")},
            notes=tuple(notes),
        )

    def _checked(self, step: int) -> dict[str, int]:
        """How many values of each column are finite; DataError where positions and token ids are not whole numbers."""
        names = sorted({column for at, column in self.places.values() if at == step})
        counted = [f'count(*) filter (isfinite(try_cast("{name}" as float))) as "{name}"' for name in names]
        for name in KEYS[2:]:
            value = f"try_cast({name} as double)"
            counted.append(f"count_if({value} is null or {value} < 0 or {value} <> floor({value})) as {name}")
        counted += [f"count(*) - count({name}) as {name}" for name in KEYS[:2]]
        sql = f"select count(*) as size, {', '.join(counted)} from step_{step}"
        found = self.connection.sql(sql).to_arrow_table().to_pylist()[0]
        if not found["size"]:
            raise DataError("no occurrences: the table has no rows")
        for name in KEYS[::-1]:
            if found[name]:
                wanted = "whole numbers >= 0" if name in KEYS[2:] else "names"
                raise DataError(f"column {name} must hold {wanted}; {found[name]} rows have something else, or nothing")
        return found

    def _keys(self, step: int, code_R: Array) -> tuple[Array, Array, Array]:
        """Token ids, rollouts and positions in canonical order, (M,) each; the order is kept for other columns."""
        wanted = {"position::integer": np.int32, "token_id::integer": np.int32}
        code_M, position_M, token_M = self._stream(step, {"hash(prompt_id, rollout_id)": np.uint64, **wanted})
        by_code = np.argsort(code_R)
        starts = np.flatnonzero(np.append(True, code_M[1:] != code_M[:-1]))  # rows of one rollout mostly lie together
        found = by_code[np.minimum(np.searchsorted(code_R[by_code], code_M[starts]), len(code_R) - 1)]
        if (code_R[found] != code_M[starts]).any():
            raise self._differ(step)
        rollout_M = np.repeat(found.astype(np.int32), np.diff(starts, append=len(code_M)))
        key_M = rollout_M.astype(np.int64) * (int(position_M.max()) + 1) + position_M
        order: Array | slice = slice(None)
        if not (key_M[1:] > key_M[:-1]).all():
            order = np.argsort(key_M, kind="stable")
            if (np.diff(key_M[order]) == 0).any():
                raise DataError(
                    "an occurrence is given twice: the same rollout_id and position; are rollout ids unique?"
                )
        self.order[step] = order
        return token_M[order], rollout_M[order], position_M[order]

    def _differ(self, step: int) -> DataError:
        return DataError(
            f"step {step} and step {self.last} hold different occurrences; all checkpoints must be scored on the same "
            "rollouts: run `rocktokens score --checkpoints all`"
        )

    def _read(self, name: str | int) -> Array:
        """A column in canonical order; what is empty or not a number is NaN."""
        step, column = self.places[name]
        (value_M,) = self._stream(step, {f'try_cast("{column}" as float)': np.float32})
        # Only losses decide what is measured: a gradient norm that is missing counts as none.
        return (np.nan_to_num(value_M, copy=False) if name == "grad_norm" else value_M)[self.order[step]]

    def _stream(self, step: int, wanted: Mapping[str, Any]) -> list[Array]:
        """Columns of one table in its own order, copied batch by batch so that no second copy of them exists."""
        size = self.connection.sql(f"select count(*) from step_{step}").fetchall()[0][0]
        columns = [np.empty(size, dtype) for dtype in wanted.values()]
        start = 0
        for batch in self.connection.sql(f"select {', '.join(wanted)} from step_{step}").to_arrow_reader(BATCH_ROWS):
            for column, part in zip(columns, batch.columns):
                column[start : start + len(part)] = part.to_numpy(zero_copy_only=False)
            start += len(batch)
        return columns
