"""Forward + backward of the reverse KL from hidden states: ours with all telemetry, full logits, TRL's, Liger's.

One process each, same inputs, taking turns; median of 5; peak memory above the inputs. The Qwen shapes stand beside
their limit: the four matrix products that any full-vocabulary divergence with a gradient has to do, and nothing else.
TRL's chunked divergence is a Triton kernel on GPUs; here it runs its CPU path.
    python benchmarks/divergence.py qwen                # 0.5B <- 1.5B, float32 and bfloat16; to divergence_qwen.json
    python benchmarks/divergence.py small               # SmolLM2's shape and a wide one; to divergence.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import interleaved, save


@dataclass(frozen=True)
class Shape:
    """Rows, vocabulary, width of student and teacher, and the dtype of everything that comes in."""

    rows: int
    vocabulary: int
    student: int
    teacher: int
    dtype: str = "float32"

    @property
    def flops(self) -> float:
        """Both projections, and the student's two products of the gradient."""
        return 2.0 * self.rows * self.vocabulary * (3 * self.student + self.teacher)


SHAPES = {
    "small": [Shape(2048, 49_152, 576, 576), Shape(1024, 151_936, 1024, 2048)],
    "qwen": [Shape(384, 151_936, 896, 1536), Shape(384, 151_936, 896, 1536, "bfloat16")],
}


def inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Hidden states and heads whose logits have the spread of a trained model's."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, shape.dtype)

    def normal(*size: int, scale: float) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(dtype)

    student_hidden = normal(shape.rows, shape.student, scale=1.0).requires_grad_()
    student_head = normal(shape.vocabulary, shape.student, scale=2 / shape.student**0.5).requires_grad_()
    teacher_hidden = normal(shape.rows, shape.teacher, scale=1.0)
    teacher_head = normal(shape.vocabulary, shape.teacher, scale=2 / shape.teacher**0.5)
    token = torch.randint(shape.vocabulary, (shape.rows,), generator=generator)
    return student_hidden, student_head, teacher_hidden, teacher_head, token


def stepper(shape: Shape, loss_of: Callable[..., torch.Tensor], threads: int | None) -> Callable[[], None]:
    if threads:
        torch.set_num_threads(threads)
    tensors = inputs(shape)

    def step() -> None:
        loss_of(*tensors).backward()
        tensors[0].grad = tensors[1].grad = None  # so that the next turn counts the gradients too

    return step


def ours(shape: Shape, threads: int | None, chunk: int | None, dropped: float) -> Callable[[], None]:
    from rocktokens.divergence.fused import fused_divergence

    weight = (torch.rand(shape.rows, generator=torch.Generator().manual_seed(1)) >= dropped).float()
    weight_N = weight if dropped else None
    return stepper(
        shape,
        lambda hs, ws, ht, wt, token: (
            fused_divergence(hs, ws, ht, wt, token_N=token, weight_N=weight_N, chunk=chunk).loss
        ),
        threads,
    )


def bare_products(shape: Shape, threads: int | None) -> Callable[[], None]:
    """The limit: both projections and the two products of the gradient, in the dtype of the inputs."""
    if threads:
        torch.set_num_threads(threads)
    hs, ws, ht, wt, _ = (tensor.detach() for tensor in inputs(shape))

    def step() -> None:
        grad = ht @ wt.t()
        del grad
        grad = hs @ ws.t()
        grad @ ws
        grad.t() @ hs

    return step


def full_logits(shape: Shape, threads: int | None) -> Callable[[], None]:
    def loss(hs, ws, ht, wt, token):  # type: ignore[no-untyped-def]
        s = (hs @ ws.t()).float().log_softmax(-1)
        t = (ht @ wt.t()).float().log_softmax(-1)
        return (s.exp() * (s - t)).sum(-1).mean()

    return stepper(shape, loss, threads)


def trl(shape: Shape, threads: int | None) -> Callable[[], None]:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(hs, ws, ht, wt, token):  # type: ignore[no-untyped-def]
        return ChunkedDivergenceFunction.apply(hs, ws, None, ht, wt, None, 1.0)[0].mean()

    return stepper(shape, loss, threads)


def liger(shape: Shape, threads: int | None) -> Callable[[], None]:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=False)

    def loss(hs, ws, ht, wt, token):  # type: ignore[no-untyped-def]
        return module(hs, ws, ht, wt, token)

    return stepper(shape, loss, threads)


def largest_error(shape: Shape) -> dict[str, float]:
    """How far the divergences of 16-bit inputs lie from those of the same numbers in float32, and the naive error."""
    from rocktokens.divergence.fused import fused_divergence

    hs, ws, ht, wt, token = (tensor.detach() for tensor in inputs(shape))
    rows = slice(64)
    with torch.no_grad():
        got = fused_divergence(hs[rows], ws, ht[rows], wt, token_N=token[rows]).value_N
        wide = [tensor.float() for tensor in (hs[rows], ws, ht[rows], wt)]
        want = fused_divergence(*wide, token_N=token[rows]).value_N
        s, t = ((h[rows] @ w.t()).float().log_softmax(-1) for h, w in ((hs, ws), (ht, wt)))
        rounded = (s.exp() * (s - t)).sum(-1)
    return {
        "largest_kl_error": float((got - want).abs().max()),
        "largest_kl_error_of_bf16_logits": float((rounded - want).abs().max()),
        "mean_kl": float(want.mean()),
    }


def contestants(shape: Shape, kind: str, threads: int | None, chunk: int | None) -> dict[str, tuple[Callable, tuple]]:
    found: dict[str, tuple[Callable, tuple]] = {"ours": (ours, (shape, threads, chunk, 0.0))}
    if kind == "qwen":
        return found | {
            "bare products (limit)": (bare_products, (shape, threads)),
            "full logits": (full_logits, (shape, threads)),
            "TRL chunked": (trl, (shape, threads)),
        }
    return found | {
        "ours, 30 % of rows at weight 0": (ours, (shape, threads, chunk, 0.3)),
        "full logits": (full_logits, (shape, threads)),
        "TRL chunked": (trl, (shape, threads)),
        "Liger chunked": (liger, (shape, threads)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", choices=sorted(SHAPES), nargs="?", default="qwen")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()

    results = {}
    for shape in SHAPES[options.shapes]:
        chosen = contestants(shape, options.shapes, options.threads, options.chunk)
        if options.only:
            chosen = {name: c for name, c in chosen.items() if name in options.only}
        measured = interleaved(chosen, options.repeats)
        print(f"\n{shape}")
        print(f"{'':34}{'seconds':>9}{'min-max':>16}{'GFLOP/s':>9}{'peak MB':>9}{'time/ours':>11}{'peak/ours':>11}")
        reference = measured.get("ours", next(iter(measured.values())))
        for name, row in measured.items():
            spread = f"{row['seconds_min']:.2f}-{row['seconds_max']:.2f}"
            row["gflops"] = shape.flops / row["seconds"] / 1e9
            ratio, memory = row["seconds"] / reference["seconds"], row["peak_mb"] / max(reference["peak_mb"], 1.0)
            print(
                f"{name:34}{row['seconds']:9.2f}{spread:>16}{row['gflops']:9.0f}{row['peak_mb']:9.0f}"
                f"{ratio:11.2f}{memory:11.2f}"
            )
        entry: dict[str, object] = dict(measured)
        if "bare products (limit)" in measured and "ours" in measured:
            limit = measured["bare products (limit)"]
            entry["ours / limit"] = reference["seconds"] / limit["seconds"]
            entry["ours / limit, processor time"] = reference["cpu_seconds"] / limit["cpu_seconds"]
            print(f"ours / limit: {entry['ours / limit']:.2f}")
        if shape.dtype != "float32":
            entry["precision"] = largest_error(shape)
            print(entry["precision"])
        name = f"{shape.rows}x{shape.vocabulary}x{shape.student}x{shape.teacher}"
        results[name if shape.dtype == "float32" else f"{name}, {shape.dtype}"] = entry
    if not options.no_save:
        save("divergence" if options.shapes == "small" else "divergence_qwen", results)


if __name__ == "__main__":
    main()
