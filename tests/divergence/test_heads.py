"""The products that touch an output head: the faster ways in 16 bit against the plain ones in float32."""

from __future__ import annotations

import pytest
import torch
from cases import make_case

from rocktokens.divergence import fused as divergence
from rocktokens.divergence import heads
from rocktokens.divergence.fused import KINDS

needs_products = pytest.mark.skipif(
    not heads.has_bf16_products(), reason="this CPU has no bfloat16 products; runs where it has"
)


@pytest.fixture
def split(monkeypatch):
    """Small heads are multiplied like large ones."""
    monkeypatch.setattr(heads, "SPLIT_ELEMENTS", 0)


def case_and_its_widened_self(**options):
    options = {"rows": 40, "vocabulary": 3000, "student_width": 64, "teacher_width": 96, "spread": 4.0} | options
    case, wide = (make_case(dtype=torch.bfloat16, **options) for _ in range(2))
    for name in ("student_hidden", "student_head", "teacher_hidden", "teacher_head"):
        setattr(wide, name, getattr(wide, name).float())
    return case, wide


def assert_close_in_norm(got, want, tolerance):
    got, want = got.double(), want.double()
    assert (got - want).norm() <= tolerance * want.norm()


def test_a_head_wider_than_one_tile_equals_its_widened_self():
    case, wide = case_and_its_widened_self(vocabulary=2 * heads.WIDEN_COLUMNS + 5, rows=3)
    (got, grads), (want, want_grads) = case.run(), wide.run()
    torch.testing.assert_close(got.value_N, want.value_N)
    for name in grads:
        torch.testing.assert_close(grads[name], want_grads[name].bfloat16())


@needs_products
def test_sharp_rows_in_bf16_keep_the_divergence_within_a_hundred_thousandth(split):
    """Logits up to 45, where sixteen bits alone leave 1e-4 nats."""
    case, wide = case_and_its_widened_self(spread=10.0, vocabulary=20_000, student_width=256, teacher_width=256)
    for given in (case, wide):  # a teacher that is close to its student, as in distillation
        given.teacher_hidden, given.teacher_head = given.student_hidden, given.student_head
    case.teacher_hidden = (case.student_hidden * 1.1).bfloat16()
    wide.teacher_hidden = case.teacher_hidden.float()
    got, want = case.run()[0], wide.run()[0]
    assert want.value_N.mean() > 1e-3
    assert (got.value_N - want.value_N).abs().max() < 2e-5


@needs_products
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 16])
def test_split_products_equal_the_widened_head(split, kind, chunk):
    """KL within 1e-4 nats; gradients as close as the rounding of what goes out allows, for one chunk and for three."""
    case, wide = case_and_its_widened_self(kind=kind, chunk=chunk)
    weight_N = torch.rand(40, generator=torch.Generator().manual_seed(1)) + 0.5
    options = {"weight_N": weight_N, "denominator": 17.0, "temperature": 1.3, "student_scale": 0.7}
    options["student_bias"] = torch.randn(3000, generator=torch.Generator().manual_seed(3))
    (got, grads), (want, want_grads) = case.run(**options), wide.run(**options)
    for name in want._fields[1:]:
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-4)
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
    for name in ("hidden", "head"):
        assert grads[name].dtype == torch.bfloat16
        assert_close_in_norm(grads[name], want_grads[name], 4e-3)


@needs_products
def test_an_infinite_logit_of_a_split_product_spoils_no_other_row(split):
    case, wide = case_and_its_widened_self()
    for given in (case, wide):
        given.student_hidden[5] = 1e38
    got, want = case.run()[0], wide.run()[0]
    kept = torch.arange(40) != 5
    torch.testing.assert_close(got.value_N[kept], want.value_N[kept], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.value_N[5], want.value_N[5], equal_nan=True)


def test_the_cuda_path_equals_the_widened_head(monkeypatch):
    """The calls that CUDA takes, with products that a CPU has no `out_dtype` for, done here in float32."""
    mm, addmm = torch.mm, torch.addmm

    def mm_into(a, b, *, out_dtype=None, out=None):
        if out_dtype is None:
            return mm(a, b) if out is None else mm(a, b, out=out)
        result = mm(a.to(out_dtype), b.to(out_dtype))
        return result if out is None else out.copy_(result)

    def addmm_into(total, a, b, *, out_dtype, out):
        return out.copy_(addmm(total, a.to(out_dtype), b.to(out_dtype)))

    case, wide = case_and_its_widened_self()
    want, want_grads = wide.run(chunk=16)
    monkeypatch.setattr(heads, "_multiplies_bf16", lambda *given: all(t.dtype == torch.bfloat16 for t in given))
    monkeypatch.setattr(torch, "mm", mm_into)
    monkeypatch.setattr(torch, "addmm", addmm_into)
    got, grads = case.run(chunk=16)
    torch.testing.assert_close(got.value_N, want.value_N, rtol=1e-4, atol=1e-5)
    for name in grads:
        assert_close_in_norm(grads[name], want_grads[name], 4e-3)


@pytest.mark.parametrize("rows", [1, 5, 30])
def test_blocks_of_any_size_give_the_same_numbers(monkeypatch, rows):
    """A chunk is measured a few rows at a time; how many is a matter of the cache alone."""
    case = make_case(rows=30, vocabulary=100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(divergence, "BLOCK_ELEMENTS", 100 * rows)
    got, grads = case.run(chunk=20)
    monkeypatch.setattr(divergence, "BLOCK_ELEMENTS", 10**6)
    want, want_grads = case.run(chunk=20)
    for name in want._fields:
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-6, atol=1e-7)
    for name in grads:
        torch.testing.assert_close(grads[name], want_grads[name])
