"""Occurrences as columns: what detection reads, whoever recorded it.

Rows come from the tables of a run (one per checkpoint, scored on the same rollouts) or from anybody's table with
rollout_id, position, token_id and loss. They are put into one canonical order, by rollout and position, so that
nothing later can depend on how rows were split into parts. Rows without a finite loss stay as context of their
neighbours and leave every measurement. This module opens no file and knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rocktokens.errors import DataError
from rocktokens.remarks import Remark, in_words

# Shapes: M recorded rows, N measured rows (their losses are finite), V token types.
from rocktokens.values import Row

Array = NDArray[Any]
SIGNALS = ("kl", "log_ratio")
KEYS = ("rollout_id", "position", "token_id")
ENTROPIES = ("teacher_entropy", "student_entropy", "student_entropy_pre")


@dataclass(frozen=True)
class Occurrences:
    """Measured occurrences in canonical order, with the recorded rows around them.

    A prompt's occurrences lie together, and so do a rollout's. The columns in `extras`, `entropies` and `loss_by_step`
    may be read from a file each time they are asked for: take one, use it, let it go.
    """

    token_ids_V: Array
    """Token id of every type observed, ascending; `type_M` indexes it."""
    type_M: Array
    rollout_M: Array
    position_M: Array
    row_N: Array | None
    """Where each measured occurrence lies among the recorded rows; None where every row is measured."""
    prompt_N: Array
    loss_post_N: Array
    loss_pre_N: Array | None = None
    extras: Mapping[str, Array] = field(default_factory=dict)
    """Where recorded: grad_norm; other_post and other_pre, the signal that is not ranked (log_ratio beside kl)."""
    entropies: Mapping[str, Array] = field(default_factory=dict)
    loss_by_step: Mapping[int, Array] = field(default_factory=dict)
    """Loss of the same occurrences at every checkpoint, where there are several."""
    prompt_ids: pa.Array | None = None
    rollout_ids: pa.Array | None = None
    rollout_prompt_R: Array | None = None
    num_prompts: int = 0
    num_left_out: int = 0
    remarks: tuple[Remark, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks as sentences."""
        return in_words(self.remarks)

    def __len__(self) -> int:
        return len(self.loss_post_N)

    @property
    def type_N(self) -> Array:
        """Type of each measured occurrence, as an index into `token_ids_V`."""
        return self.type_M if self.row_N is None else self.type_M[self.row_N]

    def rows(self, index: Array) -> Array:
        """The recorded rows of some of the measured occurrences."""
        return index if self.row_N is None else self.row_N[index]

    def among(self, types: Array) -> Array:
        """Mask of the measured occurrences of some types."""
        wanted_V = np.zeros(len(self.token_ids_V), bool)
        wanted_V[types] = True
        return wanted_V[self.type_N]

    @property
    def rollout_N(self) -> Array:
        """Rollout of each measured occurrence."""
        return self.rollout_M if self.row_N is None else self.rollout_M[self.row_N]

    @property
    def grad_norm_N(self) -> Array | None:
        """Norm of the gradient at each measured occurrence, where it was recorded."""
        return self.extras.get("grad_norm")

    @property
    def other_post_N(self) -> Array | None:
        """The signal that is not ranked, after OPD, where it was recorded."""
        return self.extras.get("other_post")

    @property
    def other_pre_N(self) -> Array | None:
        """The signal that is not ranked, before OPD, where it was recorded."""
        return self.extras.get("other_pre")

    def take(self, chosen_N: Array) -> Occurrences:
        """Some of the measured occurrences, in their order; the rows around them stay."""
        rows = np.arange(len(self.type_M), dtype=np.int32) if self.row_N is None else self.row_N
        return replace(self, **{**self._measured(chosen_N), "row_N": rows[chosen_N]})

    def of_prompts(self, chosen_P: Array) -> Occurrences:
        """The occurrences of some prompts, given as a mask over prompt codes, with their own rows alone."""
        if self.rollout_prompt_R is None:
            raise DataError("these occurrences do not say which prompt a rollout belongs to")
        kept_M = chosen_P[self.rollout_prompt_R][self.rollout_M]
        kept_N, row_N = kept_M if self.row_N is None else kept_M[self.row_N], None
        num_left_out = int(kept_M.sum()) - int(kept_N.sum())
        if self.row_N is not None and num_left_out:
            row_N = (np.cumsum(kept_M, dtype=np.int32) - 1)[self.row_N[kept_N]]
        rows = {name: getattr(self, name)[kept_M] for name in ("type_M", "rollout_M", "position_M")}
        changed = {**self._measured(kept_N), **rows, "row_N": row_N, "num_prompts": 0, "num_left_out": num_left_out}
        return replace(self, **changed)

    def _measured(self, chosen_N: Array) -> Row:
        """Every column of measured occurrences at the chosen ones."""
        changed: Row = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_N") and value is not None:
                changed[item.name] = value[chosen_N]
            elif isinstance(value, Mapping):
                changed[item.name] = {key: column[chosen_N] for key, column in value.items()}
        return changed

    def other_signal(self) -> Occurrences | None:
        """The same occurrences ranked by the other signal, where it was recorded."""
        post_N = self.other_post_N
        if post_N is None:
            return None
        return replace(self, loss_post_N=post_N, loss_pre_N=self.other_pre_N, extras={}, loss_by_step={})

    @classmethod
    def from_table(cls, table: pa.Table | Mapping[str, Any], *, signal: str = "kl") -> Occurrences:
        """From one table of anybody's: rollout_id, position, token_id and loss (or loss_post, or a signal's name).

        Where there are: loss_pre, prompt_id, grad_norm, teacher_entropy, student_entropy, student_entropy_pre.
        """
        columns = _columns(table)
        loss = next((name for name in ("loss_post", "loss", signal) if name in columns), None)
        missing = [name for name in KEYS if name not in columns]
        if missing or loss is None:
            missing += [] if loss else ["loss"]
            raise DataError(f"occurrences lack the columns {missing}; there are {sorted(columns)}")
        losses = {"loss_post": columns[loss]}
        losses |= {"loss_pre": columns["loss_pre"]} if "loss_pre" in columns else {}
        other = next(name for name in SIGNALS if name != signal)
        losses |= {"other_post": columns[other]} if loss == signal and other in columns else {}
        extras = {name: columns[name] for name in ("grad_norm", *ENTROPIES) if name in columns}
        return _assemble(columns, losses, extras, {})

    @classmethod
    def from_checkpoints(cls, by_step: Mapping[int, pa.Table], *, signal: str = "kl") -> Occurrences:
        """From the tables of a run, one per checkpoint: the first step is pre, the last is post.

        All must hold the same occurrences; they are joined on prompt, rollout and position, in whatever order.
        """
        if not by_step:
            raise DataError("no scored checkpoint: run `rocktokens score` first")
        steps = sorted(by_step)
        post = _columns(by_step[steps[-1]])
        missing = [name for name in (*KEYS, signal) if name not in post]
        if missing:
            raise DataError(f"step {steps[-1]} lacks the columns {missing}; there are {sorted(post)}")
        other = next(name for name in SIGNALS if name != signal)
        losses, loss_by_step = {"loss_post": post[signal]}, {}
        extras: Row = {}
        losses |= {"other_post": post[other]} if other in post else {}
        extras |= {name: post[name] for name in ("grad_norm", "teacher_entropy", "student_entropy") if name in post}
        for step in steps[:-1]:
            wanted = [name for name in (signal, other, "student_entropy") if name in by_step[step].column_names]
            found = _join(post, _columns(by_step[step]), wanted, step, steps[-1])
            loss_by_step[step] = found[signal]
            if step == steps[0]:
                losses["loss_pre"] = found[signal]
                losses |= {"other_pre": found[other]} if other in found else {}
                extras |= {"student_entropy_pre": found["student_entropy"]} if "student_entropy" in found else {}
        if loss_by_step:
            loss_by_step[steps[-1]] = losses["loss_post"]
        return _assemble(post, losses, extras, loss_by_step)


def _columns(table: pa.Table | Mapping[str, Any]) -> Row:
    names = table.column_names if isinstance(table, pa.Table) else list(table)
    return {name: table[name] for name in names}


def _arrow(column: Any, name: str) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    array = array if isinstance(array, pa.Array) else pa.array(array)
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if array.null_count:
        raise DataError(f"column {name} has {array.null_count} empty values")
    return array


def _numbers(column: Any) -> Array:
    """A numeric column as numpy; empty values of floats become NaN."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return np.asarray(column)


def _recorded(column: Any) -> bool:
    return bool(np.isfinite(_numbers(column).astype(np.float64)).any())


def _factorise(column: Any, name: str) -> tuple[Array, pa.Array]:
    """(codes, values in ascending order): codes do not depend on the order of rows."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "iu" and len(column) and column.min() >= 0:
        values, code_N = _unique_codes(column, int(column.max()) + 1)
        return code_N, pa.array(values)
    encoded = _arrow(column, name).dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order))


def _rollout_codes(columns: Mapping[str, Any]) -> tuple[Array, Array, pa.Array, pa.Array]:
    """Codes of rollouts (a number may recur under another prompt) and prompts, with their names."""
    rollout_N, rollout_ids = _factorise(columns["rollout_id"], "rollout_id")
    if "prompt_id" not in columns:
        return rollout_N, rollout_N, rollout_ids, rollout_ids
    prompt_N, prompt_ids = _factorise(columns["prompt_id"], "prompt_id")
    pair_N = prompt_N.astype(np.int64) * len(rollout_ids) + rollout_N
    used, code_N = _unique_codes(pair_N, len(prompt_ids) * len(rollout_ids))
    return code_N, prompt_N, rollout_ids.take(pa.array(used % len(rollout_ids))), prompt_ids


def _unique_codes(value_N: Array, bound: int) -> tuple[Array, Array]:
    """Distinct values ascending, and each row's index among them; by a table where that fits, else by sorting."""
    if bound > 50_000_000:
        distinct, code_N = np.unique(value_N, return_inverse=True)
        return distinct, code_N.astype(np.int32)
    seen = np.zeros(bound, bool)
    seen[value_N] = True
    code = np.cumsum(seen, dtype=np.int32) - 1
    return np.flatnonzero(seen), code[value_N]


def _join(post: Mapping[str, Any], pre: Mapping[str, Any], wanted: list[str], step: int, last: int) -> dict[str, Array]:
    """Columns of an earlier checkpoint in the row order of the last one."""
    keys = [name for name in ("prompt_id", "rollout_id", "position") if name in post]
    missing = [name for name in (*keys, "token_id", *wanted[:1]) if name not in pre]
    if missing:
        raise DataError(f"step {step} lacks the columns {missing}, which step {last} has")
    order: Array | slice = slice(None)
    same = all(_arrow(post[name], name).equals(_arrow(pre[name], name)) for name in keys)
    if not same:
        names = [f"k{i}" for i in range(len(keys))]
        left = pa.table([_arrow(post[k], k) for k in keys], names=names)
        left = left.append_column("row", pa.array(np.arange(len(left))))
        right = pa.table([_arrow(pre[k], k) for k in keys], names=names)
        right = right.append_column("found", pa.array(np.arange(len(right))))
        joined = left.join(right, keys=names, join_type="inner").sort_by("row")
        if len(joined) != len(left) or len(right) != len(left):
            raise DataError(
                f"step {step} and step {last} share {len(joined)} of {len(right)} and {len(left)} occurrences; "
                "all checkpoints must be scored on the same rollouts: run `rocktokens score --checkpoints all`"
            )
        order = joined["found"].to_numpy()
    if not np.array_equal(_numbers(pre["token_id"])[order], _numbers(post["token_id"])):
        raise DataError(f"step {step} and step {last} have other tokens at the same positions: another tokenizer?")
    return {name: _numbers(pre[name])[order] for name in wanted}


def _assemble(
    columns: Mapping[str, Any],
    losses: Mapping[str, Any],
    extras: Mapping[str, object],
    loss_by_step: Mapping[int, object],
) -> Occurrences:
    """Canonical order, types, and the rows that can be measured."""
    # Other trainers record one signal and few of the extras: a column that is empty throughout was not recorded.
    losses = {name: column for name, column in losses.items() if not name.startswith("other") or _recorded(column)}
    extras = {name: column for name, column in extras.items() if _recorded(column)}
    rollout_M, prompt_M, rollout_ids, prompt_ids = _rollout_codes(columns)
    if len(rollout_M) == 0:
        raise DataError("no occurrences: the table has no rows")
    if not isinstance(columns["token_id"], np.ndarray):
        _arrow(columns["token_id"], "token_id")
    position_M = _numbers(columns["position"]).astype(np.int64)
    token_M = _numbers(columns["token_id"]).astype(np.int64)
    if token_M.min() < 0 or position_M.min() < 0:
        raise DataError("token_id and position must be >= 0")
    order = _canonical_order(rollout_M, position_M)
    token_ids_V, type_M = _unique_codes(token_M, int(token_M.max()) + 1)
    measured = {name: _numbers(column).astype(np.float32)[order] for name, column in losses.items()}
    by_step = {step: _numbers(column).astype(np.float32)[order] for step, column in loss_by_step.items()}
    finite_M = np.ones(len(token_M), bool)
    for loss_M in (*measured.values(), *by_step.values()):
        finite_M &= np.isfinite(loss_M)
    keep: Array | slice = slice(None) if finite_M.all() else finite_M
    if not finite_M.any():
        raise DataError("no occurrence has a finite loss")
    rollout_prompt_R = np.zeros(len(rollout_ids), np.int32)
    rollout_prompt_R[rollout_M] = prompt_M
    prompt_N = prompt_M[order][keep]
    return Occurrences(
        token_ids_V=token_ids_V,
        type_M=type_M[order],
        rollout_M=rollout_M[order],
        position_M=position_M[order].astype(np.int32),
        row_N=None if finite_M.all() else np.flatnonzero(finite_M).astype(np.int32),
        prompt_N=prompt_N,
        **{f"{name}_N": column[keep] for name, column in measured.items() if name.startswith("loss")},
        extras={name: column[keep] for name, column in measured.items() if name.startswith("other")}
        | {name: _extra(extras[name], order, keep) for name in extras if name not in ENTROPIES},
        entropies={name: _extra(extras[name], order, keep) for name in ENTROPIES if name in extras},
        loss_by_step={step: column[keep] for step, column in by_step.items()},
        prompt_ids=prompt_ids,
        rollout_ids=rollout_ids,
        rollout_prompt_R=rollout_prompt_R,
        num_prompts=len(np.unique(prompt_N)),
        num_left_out=int((~finite_M).sum()),
        remarks=_remarks(columns, finite_M),
    )


def _canonical_order(rollout_M: Array, position_M: Array) -> Array | slice:
    key_M = rollout_M.astype(np.int64) * (int(position_M.max()) + 1) + position_M
    step_M = np.diff(key_M)
    if (step_M > 0).all():
        return slice(None)
    order = np.argsort(key_M, kind="stable")
    if (np.diff(key_M[order]) == 0).any():
        raise DataError("an occurrence is given twice: the same rollout_id and position; are rollout ids unique?")
    return order


def _extra(column: Any, order: Array | slice, keep: Array | slice) -> Array:
    return _numbers(column).astype(np.float32)[order][keep]


def left_out(finite_M: Array) -> Remark:
    """What to tell of rows without a finite loss."""
    return Remark("losses_not_finite", {"count": int((~finite_M).sum()), "of": len(finite_M)})


def _remarks(columns: Mapping[str, Any], finite_M: Array) -> tuple[Remark, ...]:
    remarks = []
    if not finite_M.all():
        remarks.append(left_out(finite_M))
    if "prompt_id" not in columns:
        remarks.append(Remark("no_prompt_id"))
    return tuple(remarks)
