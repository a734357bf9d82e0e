"""What must change nothing in fused_divergence, over drawn shapes, options and weights."""

from __future__ import annotations

import torch
from cases import Case, assert_matches, make_case
from hypothesis import given
from hypothesis import strategies as st

from rocktokens.divergence.fused import KINDS, Divergence

PER_ROW = Divergence._fields[1:]


@st.composite
def cases(draw, min_rows: int = 1) -> Case:
    """Any kind, family options and shapes; logits from nearly uniform to very sharp."""
    options = {
        "kind": draw(st.sampled_from(KINDS)),
        "beta": draw(st.floats(0.05, 0.95)),
        "temperature": draw(st.sampled_from([1.0, 0.6, 2.0])),
        "student_softcap": draw(st.sampled_from([None, 4.0])),
        "teacher_softcap": draw(st.sampled_from([None, 6.0])),
        "student_scale": draw(st.sampled_from([1.0, 0.5])),
    }
    return make_case(
        draw(st.integers(0, 10_000)),
        rows=draw(st.integers(min_rows, 12)),
        vocabulary=draw(st.integers(1, 40)),
        student_width=draw(st.integers(1, 8)),
        teacher_width=draw(st.integers(1, 8)),
        spread=draw(st.sampled_from([0.01, 1.0, 5.0])),
        **options,
    )


def weights(rows: int) -> st.SearchStrategy[torch.Tensor]:
    """Weights, or a mask, of which some are 0 and the sum is not."""
    sizes = {"min_size": rows, "max_size": rows}
    numbers = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), **sizes)
    return st.one_of(numbers, st.lists(st.booleans(), **sizes)).filter(any).map(torch.tensor)


def subset(case: Case, rows) -> Case:
    """The same models on some of the rows."""
    return Case(
        case.student_hidden[rows], case.student_head, case.teacher_hidden[rows], case.teacher_head, case.tokens[rows],
        case.options,
    )  # fmt: skip


def close(got: torch.Tensor, want: torch.Tensor, name: str = "") -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6, equal_nan=True, msg=lambda text: f"{name}: {text}")


def same(got, want) -> None:
    """Loss, every per-row measure and every gradient."""
    (result, grads), (expected, expected_grads) = got, want
    close(result.loss, expected.loss, "loss")
    for name in PER_ROW:
        close(getattr(result, name), getattr(expected, name), name)
    for name in expected_grads:
        close(grads[name], expected_grads[name], name)


@given(cases(min_rows=2), st.data())
def test_row_order_and_batch_split_are_irrelevant(case, data):
    """Two micro-batches of shuffled rows that share the denominator add up to the whole; losses and gradients alike."""
    rows = len(case.tokens)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    cut, weight_N = data.draw(st.integers(1, rows - 1)), data.draw(weights(rows))
    whole, grads = case.run(weight_N=weight_N)
    parts = [
        subset(case, part).run(weight_N=weight_N[part], denominator=weight_N.sum())
        for part in (order[:cut], order[cut:])
    ]
    close(sum(result.loss for result, _ in parts), whole.loss)
    close(sum(part["head"] for _, part in parts), grads["head"])
    close(torch.cat([part["hidden"] for _, part in parts]), grads["hidden"][order])
    for name in PER_ROW:
        close(torch.cat([getattr(result, name) for result, _ in parts]), getattr(whole, name)[order], name)


@given(cases(), st.data())
def test_relabelling_the_vocabulary_is_irrelevant(case, data):
    order = torch.tensor(data.draw(st.permutations(range(len(case.student_head)))))
    result, grads = case.run()
    relabelled = Case(
        case.student_hidden,
        case.student_head[order],
        case.teacher_hidden,
        case.teacher_head[order],
        order.argsort()[case.tokens],
        case.options,
    )
    relabelled_result, relabelled_grads = relabelled.run()
    relabelled_grads["head"] = relabelled_grads["head"][order.argsort()]
    same((relabelled_result, relabelled_grads), (result, grads))


@given(cases(), st.integers(0, 9), st.booleans())
def test_vocabulary_padding_is_irrelevant(case, extra, on_student):
    """Whatever stands in the rows that one model has and the other lacks."""
    want = case.run()
    side = "student_head" if on_student else "teacher_head"
    head = getattr(case, side)
    setattr(case, side, torch.cat([head, torch.full((extra, head.shape[1]), 50.0)]))
    result, grads = case.run()
    padding = grads["head"][len(head) :] if on_student else torch.zeros(0)
    assert (padding == 0).all()
    grads["head"] = grads["head"][: len(head)]
    same((result, grads), want)


@given(cases(), st.data())
def test_weight_zero_equals_row_removed(case, data):
    weight_N = data.draw(weights(len(case.tokens)))
    kept = weight_N.nonzero().squeeze(1)
    result, grads = case.run(weight_N=weight_N)
    removed, removed_grads = subset(case, kept).run(weight_N=weight_N[kept])
    close(result.loss, removed.loss)
    close(grads["head"], removed_grads["head"])
    close(grads["hidden"], torch.zeros_like(grads["hidden"]).index_copy(0, kept, removed_grads["hidden"]))
    for name in PER_ROW:
        close(getattr(result, name)[kept], getattr(removed, name), name)
        assert getattr(result, name)[weight_N == 0].isnan().all()


@given(cases(), st.data(), st.sampled_from([None, 1, 3, 100]), st.booleans(), st.sampled_from([None, 11.0]))
def test_everything_equals_the_oracle(case, data, chunk, with_bias, denominator):
    """Every output and every gradient, with and without a bias, in any chunks; what came in stays as it was."""
    tensors = ("student_hidden", "student_head", "teacher_hidden", "teacher_head")
    if data.draw(st.booleans()):  # rows that do not lie one after the other in memory
        for name in tensors:
            setattr(case, name, getattr(case, name).t().contiguous().t())
    before = {name: getattr(case, name).clone() for name in tensors}
    options = {"chunk": chunk, "weight_N": data.draw(weights(len(case.tokens))), "denominator": denominator}
    if with_bias:
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
        for name in ("student_bias", "teacher_bias"):
            options[name] = torch.randn(len(case.student_head), generator=generator)
    assert_matches(case, rtol=1e-4, atol=1e-5, **options)
    assert all(torch.equal(getattr(case, name), was) for name, was in before.items())
    assert (case.run(**options | {"weight_N": None})[0].value_N >= 0).all()


@given(cases())
def test_without_tokens_there_is_no_token_telemetry(case):
    result, _ = case.run(token_N=None)
    assert (result.log_ratio_N, result.student_logprob_N, result.teacher_logprob_N) == (None, None, None)
    close(result.value_N, case.run()[0].value_N)
