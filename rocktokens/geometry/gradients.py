"""Gradient geometry in bounded memory: which way do a token type's gradients point, and how much do they pull?

g_u = p_u (log p_u − log q_u − kl) is the exact gradient of reverse KL in the student's logits. Gradients stream
through once; per token type only their sum is kept: exactly for vocabularies up to 8k, above that as a sketch (signs
and a folding of the vocabulary, both random and seeded), whose cosines err by at most 0.02 in 95 of 100 cases at the
default width. This module knows tensors, not models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rocktokens.errors import DataError
from rocktokens.stats import Floats as Array
from rocktokens.stats import mann_whitney

# Shapes: N rows, V vocabulary, D width kept (V, or the sketch's), T token types with a gradient of their own.
METRICS = ("mean_grad_norm", "cos_balanced", "cos_global", "cos_others", "contrib", "grad_share")


@torch.no_grad()
def logit_gradient(student_logprob_NV: Tensor, teacher_logprob_NV: Tensor) -> Tensor:
    """Gradient of KL(student ‖ teacher) in the student's logits; what the student never emits contributes 0."""
    student, teacher = student_logprob_NV.float(), teacher_logprob_NV.float()
    p_NV = student.exp()
    ratio_NV = torch.where(p_NV > 0, student - teacher, torch.zeros_like(student))
    kl_N1 = (p_NV * ratio_NV).sum(-1, keepdim=True)
    return p_NV * (ratio_NV - kl_N1)


class Folding:
    """A count sketch by folding: permute the vocabulary, flip signs, and add up stretches of the sketch's width.

    Inner products are kept in expectation; the cosine of two vectors errs by about (1 − cos²) / sqrt(width).
    """

    def __init__(self, vocab_size: int, width: int, seed: int) -> None:
        rng = np.random.default_rng([seed, vocab_size, width])
        self.width = width
        self.padding = -vocab_size % width
        self.order_V = torch.from_numpy(rng.permutation(vocab_size))
        self.sign_V = torch.from_numpy(rng.integers(0, 2, vocab_size).astype(np.float32) * 2 - 1)

    def __call__(self, grad_NV: Tensor) -> Tensor:
        mixed_NV = grad_NV[:, self.order_V] * self.sign_V
        padded = torch.nn.functional.pad(mixed_NV, (0, self.padding))
        return padded.view(len(grad_NV), -1, self.width).sum(1)


@dataclass(frozen=True)
class GeometryResult:
    """Per token type, in ascending token id."""

    token_id_T: Array
    count_T: Array
    mean_grad_norm_T: Array
    """‖ḡ_v‖, the norm of the mean gradient."""
    cos_balanced_T: Array
    """Cosine of ḡ_v with Σ_v ḡ_v."""
    cos_global_T: Array
    """Cosine of ḡ_v with the sum over all occurrences."""
    cos_others_T: Array
    """Cosine of ḡ_v with Σ_v ḡ_v without its own share."""
    contrib_T: Array
    """n_v ‖ḡ_v‖ cos(ḡ_v, Σ_v ḡ_v)."""
    grad_share_T: Array
    """Share of Σ ‖g_i‖ over all occurrences."""
    position_share_T: Array
    sketched: bool
    num_pooled_types: int
    """Types beyond the limit: in the totals, without a gradient of their own."""

    def table(self, groups: Mapping[str, Array] | None = None) -> pa.Table:
        """One row per token type, with the group it belongs to."""
        group = np.full(len(self.token_id_T), "other", dtype=object)
        for name, token_ids in (groups or {}).items():
            group[np.isin(self.token_id_T, token_ids)] = name
        columns = {"token_id": pa.array(self.token_id_T), "group": pa.array(group.tolist())}
        columns["count"] = pa.array(self.count_T)
        for name in (*METRICS, "position_share"):
            values_T = getattr(self, f"{name}_T")
            columns[name] = pa.array(values_T, mask=~np.isfinite(values_T))
        return pa.table(columns)


@dataclass(frozen=True)
class GeometryConfig:
    """How gradients per token type are kept in bounded memory."""

    exact_vocab: int = 8192
    """Up to this many token types in the vocabulary, gradients are kept exactly."""
    sketch_dims: int = 16384
    """Width of the sketch of a gradient above that; cosines err by about 2 / sqrt(width) at 95 %."""
    max_types: int = 8192
    """Token types with a gradient of their own; later ones count in the totals only."""
    seed: int = 0
    """Seed of the sketch."""


class GradientGeometry:
    """Sums of gradients per token type, fed batch by batch; memory does not grow with occurrences."""

    def __init__(
        self, vocab_size: int, config: GeometryConfig | None = None, types: Sequence[int] | Array = ()
    ) -> None:
        self.config = config or GeometryConfig()
        self.vocab_size = vocab_size
        self.sketched = vocab_size > self.config.exact_vocab
        self.width = min(self.config.sketch_dims, vocab_size) if self.sketched else vocab_size
        self._fold = Folding(vocab_size, self.width, self.config.seed) if self.sketched else None
        self._slot_V = torch.full((vocab_size,), -1, dtype=torch.long)
        self._num_types = 0
        self._sum_TD = torch.zeros(0, self.width, dtype=torch.float32 if self.sketched else torch.float64)
        self._count_V = torch.zeros(vocab_size, dtype=torch.float64)
        self._norm_V = torch.zeros(vocab_size, dtype=torch.float64)
        self._total_D = torch.zeros(self.width, dtype=torch.float64)
        self._register(torch.as_tensor(np.asarray(types, np.int64)))

    @torch.no_grad()
    def update(self, token_N: Tensor, grad_NV: Tensor) -> None:
        """Add rows given their gradients in logit space; rows that are not finite are refused."""
        if grad_NV.ndim != 2 or grad_NV.shape != (len(token_N), self.vocab_size):
            raise DataError(f"gradients must be ({len(token_N)}, {self.vocab_size}), got {tuple(grad_NV.shape)}")
        token_N, grad_NV = token_N.cpu().long(), grad_NV.cpu()
        norm_N = torch.linalg.vector_norm(grad_NV, dim=1, dtype=torch.float64)
        if not bool(torch.isfinite(norm_N).all()):
            raise DataError(f"{int((~torch.isfinite(norm_N)).sum())} gradients are not finite; leave those rows out")
        self._count_V.index_add_(0, token_N, torch.ones_like(norm_N))
        self._norm_V.index_add_(0, token_N, norm_N)
        kept_ND = (self._fold(grad_NV.float()) if self._fold is not None else grad_NV).to(self._sum_TD.dtype)
        self._total_D += kept_ND.sum(0, dtype=torch.float64)
        self._add(token_N, kept_ND)

    def _add(self, token_N: Tensor, kept_ND: Tensor) -> None:
        """Add to the sums of those types that have one."""
        self._register(token_N)
        slot_N = self._slot_V[token_N]
        self._sum_TD.index_add_(0, slot_N[slot_N >= 0], kept_ND[slot_N >= 0])

    def _register(self, token_N: Tensor) -> None:
        """Give types a row of their own, first come first served, up to the limit."""
        new = torch.unique(token_N)
        new = new[self._slot_V[new] < 0][: self.config.max_types - self._num_types]
        self._slot_V[new] = torch.arange(self._num_types, self._num_types + len(new))
        self._num_types += len(new)
        if len(self._sum_TD) < self._num_types:  # in steps of a quarter: a copy at each, and little memory unused
            more = max(self._num_types - len(self._sum_TD), len(self._sum_TD) // 4)
            self._sum_TD = torch.cat([self._sum_TD, self._sum_TD.new_zeros(more, self.width)])

    def merge(self, other: GradientGeometry) -> None:
        """Add what another job gathered with the same settings."""
        if (other.vocab_size, other.config) != (self.vocab_size, self.config):
            raise DataError("gradients were gathered with another vocabulary or other settings; they do not add up")
        self._count_V += other._count_V
        self._norm_V += other._norm_V
        self._total_D += other._total_D
        theirs = torch.nonzero(other._slot_V >= 0).flatten()
        self._add(theirs, other._sum_TD[other._slot_V[theirs]])

    def state(self) -> dict[str, Tensor]:
        """What was gathered, as tensors for a file; `restore` takes them back."""
        return {
            "slot_V": self._slot_V.clone(),
            "count_V": self._count_V.clone(),
            "norm_V": self._norm_V.clone(),
            "total_D": self._total_D.clone(),
            "blocks_TD": self._sum_TD[: self._num_types].clone(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Tensor], config: GeometryConfig | None = None) -> GradientGeometry:
        """Continue with what another instance gathered under the same settings."""
        geometry = cls(len(state["slot_V"]), config)
        if state["blocks_TD"].shape[1] != geometry.width:
            raise DataError(
                f"gradients were gathered {state['blocks_TD'].shape[1]} wide, these settings ask for {geometry.width}; "
                "score again, or use the settings they were gathered with"
            )
        geometry._slot_V, geometry._sum_TD = state["slot_V"].clone(), state["blocks_TD"].clone()
        geometry._num_types = len(geometry._sum_TD)
        geometry._count_V, geometry._norm_V = state["count_V"].clone(), state["norm_V"].clone()
        geometry._total_D = state["total_D"].clone()
        return geometry

    def result(self) -> GeometryResult:
        """Norms, cosines and shares per type."""
        token_T = torch.nonzero((self._slot_V >= 0) & (self._count_V > 0)).flatten()
        if len(token_T) == 0:
            raise DataError("no gradients were given")
        slot_T, count_T, sum_TD = self._slot_V[token_T], self._count_V[token_T], self._sum_TD
        share = torch.zeros(len(sum_TD), dtype=torch.float64)
        share[slot_T] = 1.0 / count_T  # makes means of sums
        balanced_D = (share.to(sum_TD.dtype) @ sum_TD).double()
        norm_T = torch.linalg.vector_norm(sum_TD, dim=1, dtype=torch.float64)[slot_T] / count_T
        balanced_T, global_T = (
            (sum_TD @ sum_D.to(sum_TD.dtype)).double()[slot_T] / count_T for sum_D in (balanced_D, self._total_D)
        )
        others_T = (balanced_D.square().sum() - 2 * balanced_T + norm_T**2).clamp_min(0).sqrt()
        cos_balanced_T = balanced_T / (norm_T * balanced_D.norm())
        return GeometryResult(
            token_id_T=token_T.numpy(),
            count_T=count_T.long().numpy(),
            mean_grad_norm_T=norm_T.numpy(),
            cos_balanced_T=cos_balanced_T.numpy(),
            cos_global_T=(global_T / (norm_T * self._total_D.norm())).numpy(),
            cos_others_T=((balanced_T - norm_T**2) / (norm_T * others_T)).numpy(),
            contrib_T=(count_T * norm_T * cos_balanced_T).numpy(),
            grad_share_T=(self._norm_V[token_T] / self._norm_V.sum()).numpy(),
            position_share_T=(count_T / self._count_V.sum()).numpy(),
            sketched=self.sketched,
            num_pooled_types=int(((self._slot_V < 0) & (self._count_V > 0)).sum()),
        )


def gathered(files: Sequence[Path]) -> GradientGeometry:
    """The sum of what several jobs gathered, in the order of the files: the same bits whoever did them."""
    from safetensors.torch import load_file

    first, *others = (GradientGeometry.restore(load_file(file)) for file in files)
    for other in others:
        first.merge(other)
    return first


class GroupComparison(NamedTuple):
    """Two groups of token types on one measure."""

    metric: str
    first: str
    second: str
    median_first: float
    median_second: float
    share_larger: float
    """Share of pairs in which the first group's type is larger."""
    p_value: float


def compare_groups(result: GeometryResult, groups: Mapping[str, Array]) -> list[GroupComparison]:
    """Mann–Whitney between every two groups on every measure; groups without a measured type are left out."""
    rows = []
    for metric in METRICS:
        values_T = getattr(result, f"{metric}_T")
        found = {name: values_T[np.isin(result.token_id_T, ids)] for name, ids in groups.items()}
        found = {name: values[np.isfinite(values)] for name, values in found.items()}
        for first, second in combinations([name for name in groups if len(found[name])], 2):
            share, p_value = mann_whitney(found[first], found[second])
            medians = float(np.median(found[first])), float(np.median(found[second]))
            rows.append(GroupComparison(metric, first, second, *medians, share, p_value))
    return rows
