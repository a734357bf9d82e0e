"""Divergence from a teacher of whom only the k most probable tokens of each position are known: an approximation.

The rest of the teacher's probability is one bucket, spread over the other tokens as the student spreads its own. The
divergence from that distribution is the divergence over k + 1 buckets, which is never larger than the true one and may
be far below it. Log-probabilities of the sampled token are exact. Whoever uses this must say so beside the numbers.

Shapes: N response positions, K known tokens of a position, R rows of one block, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocktokens.divergence.fused import Divergence, Head
from rocktokens.divergence.heads import logits_
from rocktokens.divergence.measures import LOG_ZERO, Rule, log_softmax_, measure_
from rocktokens.models.states import Sequences

# Numbers of one block of logits: 64 MB.
BLOCK_ELEMENTS = 16_000_000
LEAST_TAIL = 1e-8  # probability of the bucket at least: what is left of 1 after rounding may be negative


@dataclass(frozen=True)
class TopK:
    """Known log-probabilities of a teacher; the sampled token is among them. -1 fills up positions that know fewer."""

    token_NK: Tensor
    logprob_NK: Tensor


class TopKSource(ABC):
    """A teacher that tells its most probable tokens, and nothing else."""

    ahead = True
    k: int

    @property
    @abstractmethod
    def context(self) -> int | None:
        """Tokens that a sequence may have; None where no limit is known."""

    @abstractmethod
    def response_top(self, sequences: Sequences) -> TopK:
        """What is known at each response position, sequence after sequence."""

    @property
    def approximation(self) -> str:
        """What to say beside every number that rests on it."""
        return (
            f"approximate: of the teacher only the {self.k} most probable tokens of each position are known, the rest "
            "is one bucket; divergences are too small, by much at some positions"
        )


@torch.inference_mode()
def top_k_divergence(
    student_NH: Tensor,
    head: Head,
    known: TopK,
    token_N: Tensor,
    vocabulary: int,
    observe: Callable[[Tensor, Tensor], None] | None = None,
) -> Divergence:
    """Reverse KL over the known tokens and one bucket, with what `fused_divergence` records of every row."""
    device, number = head.weight_VH.device, len(token_N)
    size = max(1, BLOCK_ELEMENTS // vocabulary)
    parts: list[list[Tensor]] = []
    for start in range(0, number, size):
        rows = slice(start, start + size)
        token_R = token_N[rows].to(device)
        s_RV = torch.empty(len(token_R), vocabulary, device=device)
        logits_(s_RV, student_NH[rows].to(device), head)
        log_softmax_(s_RV, head.softcap, 1.0)
        t_RV = spread(s_RV, known.token_NK[rows].to(device), known.logprob_NK[rows].to(device))
        own_R, their_R = (x_RV.gather(1, token_R[:, None])[:, 0].clone() for x_RV in (s_RV, t_RV))
        found = measure_(s_RV.clamp_(min=LOG_ZERO), t_RV, torch.empty_like(s_RV), Rule("reverse_kl", 0.0))
        if observe is not None:
            observe(token_R, found.grad_RV)
        norm_R = torch.linalg.vector_norm(found.grad_RV, dim=1)
        parts.append([*found[:3], own_R, their_R, norm_R])
    value, own_entropy, their_entropy, own, their, norm = (torch.cat(column) for column in zip(*parts))
    return Divergence(value.sum(), value, own - their, own, their, own_entropy, their_entropy, norm)


def spread(s_RV: Tensor, token_RK: Tensor, logprob_RK: Tensor) -> Tensor:
    """Log-probabilities of the teacher: the known ones, and the rest of its mass as the student spreads its own."""
    known_RK = (token_RK >= 0) & (token_RK < s_RV.shape[1])
    at_RK = token_RK.clamp(0, s_RV.shape[1] - 1)
    mass_R = torch.where(known_RK, logprob_RK.double().exp(), 0.0).sum(1)
    tail_R = (1 - mass_R).clamp(min=LEAST_TAIL).log()
    rest_RV = s_RV.double().exp()
    row_n, column_n = known_RK.nonzero(as_tuple=True)
    place = (row_n, at_RK[row_n, column_n])
    rest_RV[place] = 0.0
    own_R = rest_RV.sum(1).clamp(min=1e-300).log()
    t_RV = s_RV + (tail_R - own_R).float()[:, None]
    t_RV[place] = logprob_RK[row_n, column_n].float()
    return t_RV.clamp_(min=LOG_ZERO)
