"""Forward + backward of the reverse KL from hidden states: ours with all telemetry, full logits, TRL's, Liger's.

One process each, same inputs, taking turns; median of 5; peak memory above the inputs.
    python benchmarks/divergence.py [--repeats 5] [--chunk 128] [--no-save]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import interleaved, save

SHAPES = [(2048, 49_152, 576, 576), (1024, 151_936, 1024, 2048)]  # N rows, V vocabulary, H student, G teacher


def inputs(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Hidden states and heads whose logits have the spread of a trained model's."""
    rows, vocabulary, student, teacher = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int, scale: float) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * scale

    student_hidden = normal(rows, student, scale=1.0).requires_grad_()
    student_head = normal(vocabulary, student, scale=2 / student**0.5).requires_grad_()
    teacher_hidden = normal(rows, teacher, scale=1.0)
    teacher_head = normal(vocabulary, teacher, scale=2 / teacher**0.5)
    token = torch.randint(vocabulary, (rows,), generator=generator)
    return student_hidden, student_head, teacher_hidden, teacher_head, token


def stepper(shape: tuple[int, ...], loss_of: Callable[..., torch.Tensor], threads: int | None) -> Callable[[], None]:
    if threads:
        torch.set_num_threads(threads)
    tensors = inputs(shape)

    def step() -> None:
        loss_of(*tensors).backward()
        tensors[0].grad = tensors[1].grad = None  # so that the next turn counts the gradients too

    return step


def ours(shape: tuple[int, ...], threads: int | None, chunk: int | None, dropped: float) -> Callable[[], None]:
    from rocktokens.core.divergence import fused_divergence

    weight = (torch.rand(shape[0], generator=torch.Generator().manual_seed(1)) >= dropped).float()
    weight_N = weight if dropped else None
    return stepper(
        shape,
        lambda hs, ws, ht, wt, token: (
            fused_divergence(hs, ws, ht, wt, token_N=token, weight_N=weight_N, chunk=chunk).loss
        ),
        threads,
    )


def full_logits(shape: tuple[int, ...], threads: int | None) -> Callable[[], None]:
    def loss(hs, ws, ht, wt, token):  # type: ignore[no-untyped-def]
        s = (hs @ ws.t()).float().log_softmax(-1)
        t = (ht @ wt.t()).float().log_softmax(-1)
        return (s.exp() * (s - t)).sum(-1).mean()

    return stepper(shape, loss, threads)


def trl(shape: tuple[int, ...], threads: int | None) -> Callable[[], None]:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(hs, ws, ht, wt, token):  # type: ignore[no-untyped-def]
        return ChunkedDivergenceFunction.apply(hs, ws, None, ht, wt, None, 1.0)[0].mean()

    return stepper(shape, loss, threads)


def liger(shape: tuple[int, ...], threads: int | None) -> Callable[[], None]:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=False)

    def loss(hs, ws, ht, wt, token):  # type: ignore[no-untyped-def]
        return module(hs, ws, ht, wt, token)

    return stepper(shape, loss, threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--shapes", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()

    results = {}
    for shape in (SHAPES[index] for index in options.shapes):
        contestants = {
            "ours": (ours, (shape, options.threads, options.chunk, 0.0)),
            "ours, 30 % of rows at weight 0": (ours, (shape, options.threads, options.chunk, 0.3)),
            "full logits": (full_logits, (shape, options.threads)),
            "TRL chunked": (trl, (shape, options.threads)),
            "Liger chunked": (liger, (shape, options.threads)),
        }
        if options.only:
            contestants = {name: c for name, c in contestants.items() if name in options.only}
        measured = interleaved(contestants, options.repeats)
        print(f"\n(N, V, H, G) = {shape}")
        print(f"{'':34}{'seconds':>9}{'min-max':>16}{'peak MB':>9}{'time/ours':>11}{'peak/ours':>11}")
        reference = measured.get("ours", next(iter(measured.values())))
        for name, row in measured.items():
            spread = f"{row['seconds_min']:.2f}-{row['seconds_max']:.2f}"
            ratio, memory = row["seconds"] / reference["seconds"], row["peak_mb"] / reference["peak_mb"]
            print(f"{name:34}{row['seconds']:9.2f}{spread:>16}{row['peak_mb']:9.0f}{ratio:11.2f}{memory:11.2f}")
        results["x".join(map(str, shape))] = measured
    if not options.no_save:
        save("divergence", results)


if __name__ == "__main__":
    main()
