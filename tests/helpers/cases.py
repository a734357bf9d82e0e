"""Random inputs for the divergence tests: torch tensors from a seed, and both sides called with the same arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracles
import torch
from torch import Tensor

from rocktokens.divergence.fused import Divergence, fused_divergence


@dataclass
class Case:
    """Hidden states and heads of a student and a teacher of different widths, and the options of one call."""

    student_hidden: Tensor
    student_head: Tensor
    teacher_hidden: Tensor
    teacher_head: Tensor
    tokens: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **extra: Any) -> tuple[Divergence, dict[str, Tensor]]:
        """Call ours and take the gradients of hidden states, head and, if given, bias."""
        options = {**self.options, **extra}
        leaves = {"hidden": self.student_hidden, "head": self.student_head}
        if options.get("student_bias") is not None:
            leaves["bias"] = options["student_bias"]
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
        if "bias" in leaves:
            options["student_bias"] = leaves["bias"]
        options.setdefault("token_N", self.tokens)
        result = fused_divergence(leaves["hidden"], leaves["head"], self.teacher_hidden, self.teacher_head, **options)
        result.loss.backward()
        return result, {name: leaf.grad for name, leaf in leaves.items()}

    def oracle(self, **extra: Any) -> SimpleNamespace:
        """The same call in float64 numpy."""
        options = {**self.options, **extra}
        options.pop("chunk", None)
        options["weights"] = options.pop("weight_N", None)
        options["tokens"] = options.pop("token_N", self.tokens)
        plain = {name: as_numpy(given) if isinstance(given, Tensor) else given for name, given in options.items()}
        arrays = (self.student_hidden, self.student_head, self.teacher_hidden, self.teacher_head)
        return oracles.divergence(*map(as_numpy, arrays), **plain)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """float64 for anything real, whatever the storage (numpy has no bfloat16)."""
    tensor = tensor.detach().cpu()
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def make_case(
    seed: int = 0,
    *,
    rows: int = 7,
    vocabulary: int = 23,
    student_width: int = 6,
    teacher_width: int = 9,
    spread: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:
    """A case of which both models are random; `spread` is the standard deviation of the logits."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    return Case(
        draw(rows, student_width).to(dtype),
        (draw(vocabulary, student_width) * spread / student_width**0.5).to(dtype),
        draw(rows, teacher_width).to(dtype),
        (draw(vocabulary, teacher_width) * spread / teacher_width**0.5).to(dtype),
        torch.randint(vocabulary, (rows,), generator=g),
        options,
    )


def from_logits(student_logits: Any, teacher_logits: Any, tokens: Any = None, **options: Any) -> Case:
    """A case whose logits are exactly these: the head is the identity."""
    student = torch.as_tensor(student_logits, dtype=torch.float32)
    teacher = torch.as_tensor(teacher_logits, dtype=torch.float32)
    tokens = torch.zeros(len(student), dtype=torch.long) if tokens is None else torch.as_tensor(tokens)
    return Case(student, torch.eye(student.shape[1]), teacher, torch.eye(teacher.shape[1]), tokens, options)


def assert_matches(case: Case, *, rtol: float = 2e-5, atol: float = 2e-6, **extra: Any) -> None:
    """Every output and every gradient of ours against the oracle."""
    ours, grads = case.run(**extra)
    oracle = case.oracle(**extra)
    weight_N = {**case.options, **extra}.get("weight_N")
    kept = slice(None) if weight_N is None else as_numpy(weight_N) != 0
    np.testing.assert_allclose(as_numpy(ours.loss), oracle.loss, rtol=rtol, atol=atol)
    for name in ours._fields[1:]:
        got, want = getattr(ours, name), getattr(oracle, name.removesuffix("_N"))
        if got is not None:
            np.testing.assert_allclose(as_numpy(got[kept]), want[kept], rtol=rtol, atol=atol, err_msg=name)
    for name, grad in grads.items():
        np.testing.assert_allclose(as_numpy(grad), getattr(oracle, f"grad_{name}"), rtol=rtol, atol=atol, err_msg=name)
