"""fused_divergence against definitions, hand-computed numbers and everything that may be handed to it."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
import torch.nn.functional as F
from cases import as_numpy, from_logits, make_case
from torch.utils._python_dispatch import TorchDispatchMode

from rocktokens.divergence.fused import KINDS, fused_divergence
from rocktokens.divergence.measures import TopChoices
from rocktokens.errors import ConfigError

LN = math.log
INF = math.inf

# --- the oracle itself: its explicit Jacobians against central differences of its own definitions ---


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "todi"])  # its weights are detached: no such slope
def test_oracle_gradient_is_the_slope_of_its_value(kind, rng):
    student, head, teacher, teacher_head = (rng.normal(size=shape) for shape in [(2, 4), (5, 4), (2, 3), (5, 3)])
    bias = rng.normal(size=5)
    options = {"kind": kind, "beta": 0.3, "temperature": 1.7, "student_scale": 0.6, "student_softcap": 1.5}

    def loss(student, head, bias):
        return oracles.divergence(
            student, head, teacher, teacher_head, weights=[1.0, 0.4], student_bias=bias, **options
        )

    at = loss(student, head, bias)
    for position, gradient in enumerate((at.grad_hidden, at.grad_head, at.grad_bias)):
        arrays = [student, head, bias]
        for index in np.ndindex(arrays[position].shape):
            step = np.zeros_like(arrays[position])
            step[index] = 1e-5
            up, down = (
                [*arrays[:position], arrays[position] + sign * step, *arrays[position + 1 :]] for sign in (1, -1)
            )
            assert (loss(*up).loss - loss(*down).loss) / 2e-5 == pytest.approx(gradient[index], abs=1e-8)


# --- zero, sign, known answer ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_identical_models_cost_nothing_in_any_dtype(kind, dtype):
    case = make_case(kind=kind, spread=4.0, vocabulary=3_000, student_width=32, dtype=dtype)
    case.teacher_hidden, case.teacher_head = case.student_hidden, case.student_head
    result, grads = case.run()
    assert result.value_N.dtype == torch.float32
    assert max(result.value_N.max(), result.grad_norm_N.max(), grads["hidden"].abs().max()) < 1e-6
    assert result.log_ratio_N.abs().max() == 0
    assert grads["hidden"].dtype == grads["head"].dtype == dtype
    torch.testing.assert_close(result.student_entropy_N, result.teacher_entropy_N)


# Student (1/2, 1/2), teacher (1/4, 3/4), by hand.
BY_HAND = {
    ("reverse_kl", 0.5): (LN(4 / 3) / 2, LN(3) / 4 * math.sqrt(2)),
    ("forward_kl", 0.5): (LN(1 / 2) / 4 + LN(3 / 2) * 3 / 4, math.sqrt(2) / 4),
    ("jsd", 0.5): (
        (LN(2 / 3) / 4 + LN(6 / 5) * 3 / 4) / 2 + (LN(4 / 3) / 2 + LN(4 / 5) / 2) / 2,
        LN(5 / 3) / 8 * math.sqrt(2),
    ),
    ("jsd", 0.25): (
        (LN(4 / 7) / 4 + LN(4 / 3) * 3 / 4) / 4 + (LN(8 / 7) / 2 + LN(8 / 9) / 2) * 3 / 4,
        LN(9 / 7) * 3 / 16 * math.sqrt(2),
    ),
}


@pytest.mark.parametrize(("kind", "beta"), BY_HAND)
def test_known_answer(kind, beta):
    value, grad_norm = BY_HAND[kind, beta]
    case = from_logits([[0.0, 0.0]], [[LN(1 / 4), LN(3 / 4)]], tokens=[1], kind=kind, beta=beta)
    result, _ = case.run()
    wanted = {
        "value_N": value,
        "loss": value,
        "grad_norm_N": grad_norm,
        "student_logprob_N": LN(1 / 2),
        "teacher_logprob_N": LN(3 / 4),
        "log_ratio_N": LN(2 / 3),
        "student_entropy_N": LN(2),
        "teacher_entropy_N": LN(4) - 0.75 * LN(3),
    }
    assert {name: getattr(result, name).item() for name in wanted} == pytest.approx(wanted, rel=1e-6)


# --- against the oracle ---


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bit_inputs_equal_the_oracle_of_the_rounded_numbers(kind):
    """Inside is float32: the only error of bfloat16 is the rounding of what came in and of the gradients going out."""
    case = make_case(kind=kind, spread=3.0, dtype=torch.bfloat16)
    result, grads = case.run()
    oracle = case.oracle()
    np.testing.assert_allclose(as_numpy(result.value_N), oracle.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(as_numpy(grads["hidden"]), oracle.grad_hidden, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(as_numpy(grads["head"]), oracle.grad_head, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_vocabulary_keeps_its_precision(kind):
    """Sums over 152k tokens in order were too large by 7e-4 nats; pairwise ones keep to 2e-5 of the value."""
    case = make_case(kind=kind, rows=2, vocabulary=151_936, spread=3.0)
    result, _ = case.run()
    for i in range(2):
        student, teacher = (
            oracles.probabilities(oracles.head_logits(as_numpy(hidden[i]), as_numpy(head)))
            for hidden, head in ((case.student_hidden, case.student_head), (case.teacher_hidden, case.teacher_head))
        )
        assert result.value_N[i].item() == pytest.approx(oracles.MEASURES[kind](student, teacher), rel=2e-5)
        assert result.student_entropy_N[i].item() == pytest.approx(oracles.entropy(student), rel=2e-5)
        assert result.teacher_entropy_N[i].item() == pytest.approx(oracles.entropy(teacher), rel=2e-5)


# --- impossible tokens ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_impossible_on_both_sides_contributes_nothing(kind):
    """Both biases at -inf for some tokens equals a vocabulary without them."""
    gone = torch.tensor([2, 5, 22])
    stays = torch.tensor([v for v in range(23) if v not in gone])
    bias = torch.zeros(23).index_fill(0, gone, -INF)
    case = make_case(kind=kind, spread=2.0)
    case.tokens = stays[case.tokens % len(stays)]
    result, grads = case.run(student_bias=bias, teacher_bias=bias)
    small = make_case(kind=kind, spread=2.0)
    small.student_head, small.teacher_head = small.student_head[stays], small.teacher_head[stays]
    small.tokens = torch.searchsorted(stays, case.tokens)
    expected, expected_grads = small.run()
    for name in result._fields:
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), msg=name)
    torch.testing.assert_close(grads["hidden"], expected_grads["hidden"])
    torch.testing.assert_close(grads["head"][stays], expected_grads["head"])
    assert (grads["head"][gone] == 0).all()
    assert (grads["bias"][gone] == 0).all()


# Probabilities over three tokens of which one side rules out the last, and whether each kind is then infinite.
ONE_SIDED = {"reverse_kl": (False, True), "forward_kl": (True, False), "jsd": (False, False), "todi": (True, True)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("teacher_rules_out", [False, True], ids=["student", "teacher"])
def test_a_token_impossible_for_one_side_alone(kind, teacher_rules_out):
    wide, narrow = torch.tensor([[0.25, 0.25, 0.5]]), torch.tensor([0.0, 0.0, -INF])
    side = "teacher_bias" if teacher_rules_out else "student_bias"
    sides = (wide.log(), torch.zeros(1, 3)) if teacher_rules_out else (torch.zeros(1, 3), wide.log())
    result, grads = from_logits(*sides, kind=kind, **{side: narrow}).run()
    if ONE_SIDED.get(kind, (False, False))[teacher_rules_out]:
        assert result.value_N.item() == INF
        silent = kind in ("reverse_kl", "todi")
        assert result.loss.item() == (0 if silent else INF)
        assert (result.grad_norm_N.item() == INF) == silent
        if not silent:  # forward KL has a gradient all the same
            np.testing.assert_allclose(as_numpy(grads["bias"]), [0.25, 0.25, -0.5], atol=1e-6)
    else:
        p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
        expected = oracles.MEASURES[kind](*((q, p) if teacher_rules_out else (p, q)))
        assert result.value_N.item() == pytest.approx(expected, rel=1e-6)
    narrow_side = result.teacher_entropy_N if teacher_rules_out else result.student_entropy_N
    assert narrow_side.item() == pytest.approx(LN(2), rel=1e-6)
    assert all(torch.isfinite(grad).all() for grad in grads.values())


def test_a_large_finite_divergence_beside_an_impossible_token_is_not_called_infinite():
    bias = torch.tensor([0.0, 0.0, -INF])
    case = from_logits([[0.0, 0.0, 0.0]], [[0.0, -1e6, 0.0]], student_bias=bias, teacher_bias=bias)
    assert case.run()[0].value_N.item() == pytest.approx(5e5 - LN(2), rel=1e-5)


def test_under_a_soft_cap_an_infinite_bias_is_minus_the_cap():
    """So a ban does not belong there: the token keeps probability. Nor may it become NaN."""
    bias = torch.tensor([0.0, 0.0, -INF, 0.0])
    options = {"student_bias": bias, "teacher_bias": bias, "student_softcap": 2.0, "teacher_softcap": 2.0}
    result, _ = from_logits(torch.zeros(1, 4), torch.zeros(1, 4), tokens=[2], **options).run()
    assert result.student_logprob_N.exp().item() == pytest.approx(np.exp(-2) / (3 + np.exp(-2)), rel=1e-5)
    assert result.value_N.item() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_a_broken_row_spoils_no_other_row(kind, bad):
    """The teacher's logits of one row are not numbers: that row is marked, all others are as if it were not there."""
    case = make_case(kind=kind)
    whole, whole_grads = case.run()
    case.teacher_hidden = case.teacher_hidden.clone()
    case.teacher_hidden[3] = bad
    result, grads = case.run()
    others = torch.tensor([0, 1, 2, 4, 5, 6])
    for name in result._fields[1:]:
        torch.testing.assert_close(getattr(result, name)[others], getattr(whole, name)[others], msg=name)
    torch.testing.assert_close(grads["hidden"][others], whole_grads["hidden"][others])
    assert result.value_N[3].isnan()
    assert result.teacher_entropy_N[3].isnan()
    torch.testing.assert_close(result.student_entropy_N[3], whole.student_entropy_N[3])


def test_an_infinite_row_has_weight_0_and_does_not_become_the_step(generator):
    """The loss and every gradient are those of the other rows alone; the row itself is still shown as infinite."""
    case = from_logits(torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator))
    case.teacher_head = torch.diag(torch.tensor([1.0, 1.0, 1.0, 2.0]))
    case.teacher_hidden[2, 3] = -3e38
    result, grads = case.run()
    without, expected = case.run(weight_N=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]))
    assert result.value_N[2] == INF
    # The row counts in the denominator, so that the others' gradients are what they are without it.
    torch.testing.assert_close(result.loss, without.loss * 4 / 5)
    for name in grads:
        torch.testing.assert_close(grads[name], expected[name] * 4 / 5, msg=name)
    alone = from_logits([[0.0, 0.0]], [[0.0, 0.0]], teacher_bias=torch.tensor([0.0, -INF]))
    only, only_grads = alone.run()
    assert only.loss.item() == 0
    assert not only_grads["hidden"].any()


def test_a_bias_longer_than_a_head_that_was_already_cut_is_cut_too():
    case = make_case()
    expected, expected_grads = case.run(student_bias=torch.arange(23.0) / 23)
    result, grads = case.run(student_bias=torch.cat([torch.arange(23.0) / 23, torch.ones(4)]))
    torch.testing.assert_close(result.value_N, expected.value_N)
    torch.testing.assert_close(grads["bias"], F.pad(expected_grads["bias"], (0, 4)))


# --- weights and denominator ---


class _Recorder(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, its products, and the rows that go through a head."""

    def __init__(self):
        super().__init__()
        self.largest = self.products = self.projected_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default):
            self.products += 1
            self.projected_rows += len(args[0]) if args[1].shape[1] == VOCABULARY else 0
        return out


VOCABULARY, ROWS, WIDTH, CHUNK = 640, 256, 8, 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_tensor_of_rows_times_vocabulary_is_ever_made(kind, softcap):
    caps = {"student_softcap": softcap, "teacher_softcap": softcap}
    case = make_case(kind=kind, rows=ROWS, vocabulary=VOCABULARY, student_width=WIDTH, **caps)
    weight_N = torch.rand(ROWS) + 0.1
    weight_N[::4] = 0
    with _Recorder() as recorder:
        case.run(chunk=CHUNK, weight_N=weight_N)
    assert recorder.largest == CHUNK * VOCABULARY
    assert recorder.projected_rows == 2 * (ROWS - ROWS // 4)  # each head once, not again in the backward; no row of 0
    # Scoring runs under no_grad with parameters that would take gradients: it pays for the two projections only.
    head = torch.nn.Parameter(case.student_head)
    with torch.no_grad(), _Recorder() as scoring:
        fused_divergence(case.student_hidden, head, case.teacher_hidden, case.teacher_head, chunk=ROWS, **case.options)
    assert scoring.products == 2 < recorder.products


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_cross_entropy_is_added_to_the_loss_and_not_to_the_measures(kind):
    """Against torch's own cross-entropy, with a soft cap, a scale and weights of which one is 0."""
    family = {"student_softcap": 2.0, "student_scale": 0.7}
    case = make_case(kind=kind, chunk=3, **family)
    weight_N = torch.tensor([1.0, 0.0, 0.5, 1.5, 0.25, 2.0, 1.0])
    bias = torch.linspace(-1, 1, 23)
    plain, plain_grads = case.run(weight_N=weight_N, student_bias=bias)
    mixed, grads = case.run(weight_N=weight_N, student_bias=bias, cross_entropy=0.3)
    leaves = {"hidden": case.student_hidden, "head": case.student_head, "bias": bias}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    logits = 2.0 * torch.tanh(0.7 * (leaves["hidden"] @ leaves["head"].t() + leaves["bias"]) / 2.0)
    hard = (F.cross_entropy(logits, case.tokens, reduction="none") * weight_N).sum() / weight_N.sum()
    hard.backward()
    torch.testing.assert_close(mixed.loss, 0.7 * plain.loss + 0.3 * hard)
    for name, leaf in leaves.items():
        torch.testing.assert_close(grads[name], 0.7 * plain_grads[name] + 0.3 * leaf.grad, rtol=1e-4, atol=1e-6)
    for name in plain._fields[1:]:
        torch.testing.assert_close(getattr(mixed, name), getattr(plain, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("denominator", [None, 5.0])
def test_no_rows_and_no_weight_give_a_loss_of_zero_that_can_be_differentiated(kind, denominator):
    """A micro-batch of which every token is frozen must not stop a training step."""
    empty, grads = make_case(kind=kind, rows=0).run(denominator=denominator)
    assert empty.loss == 0
    assert empty.value_N.shape == (0,)
    assert (grads["head"] == 0).all()
    unweighted, grads = make_case(kind=kind).run(weight_N=torch.zeros(7), denominator=denominator)
    assert unweighted.loss == 0
    assert unweighted.value_N.isnan().all()
    assert (grads["head"] == 0).all()
    assert (grads["hidden"] == 0).all()


# --- observing gradients ---


def observed(case, **options):
    """Tokens and gradients as an observer sees them, over all chunks."""
    seen = []
    case.run(observe=lambda token_C, grad_CV: seen.append((token_C.clone(), grad_CV.clone())), **options)
    return (torch.cat(parts) for parts in zip(*seen))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [{}, {"student_softcap": 2.0, "student_scale": 0.7}], ids=str)
def test_an_observer_sees_every_rows_gradient_in_the_logits(kind, family):
    case = make_case(kind=kind, **family)
    weight_N = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.25, 2.0, 1.0])
    token_K, grad_KV = observed(case, weight_N=weight_N, chunk=2)
    kept = weight_N != 0
    assert torch.equal(token_K, case.tokens[kept])
    hidden = as_numpy(case.student_hidden[kept]), as_numpy(case.teacher_hidden[kept])
    for got, s, t in zip(as_numpy(grad_KV), *hidden):
        logits = oracles.head_logits(
            s, as_numpy(case.student_head), None, family.get("student_scale", 1.0), family.get("student_softcap")
        )
        student = oracles.probabilities(logits)
        teacher = oracles.probabilities(oracles.head_logits(t, as_numpy(case.teacher_head)))
        np.testing.assert_allclose(got, oracles.logit_gradient(student, teacher, kind), atol=1e-6)


def test_an_observer_is_not_shown_rows_without_a_gradient():
    student = torch.tensor([[0.0, -40.0], [0.0, 0.0]])
    case = from_logits(student, [[1.0, 0.0], [1.0, 0.0]], tokens=[0, 1])
    token_K, _ = observed(case)
    assert token_K.tolist() == [0, 1]
    token_K, _ = observed(case, teacher_bias=torch.tensor([0.0, -INF]))
    assert token_K.tolist() == []


# --- autograd ---


def test_only_what_asks_for_a_gradient_gets_one():
    case = make_case()
    _, grads = case.run()
    for own in (case.teacher_hidden, case.teacher_head):
        own.requires_grad_()
    hidden, head = case.student_hidden.clone().requires_grad_(), case.student_head.clone().requires_grad_()
    for leaf, arguments in ((hidden, (hidden, case.student_head)), (head, (case.student_hidden, head))):
        result = fused_divergence(*arguments, case.teacher_hidden, case.teacher_head, token_N=case.tokens)
        assert not any(getattr(result, name).requires_grad for name in result._fields[1:])
        (3.0 * result.loss + 1.0).backward()  # what comes after the loss is carried through
        torch.testing.assert_close(leaf.grad, 3.0 * grads["hidden" if leaf is hidden else "head"])
    assert (case.teacher_hidden.grad, case.teacher_head.grad) == (None, None)


def test_a_second_backward_and_a_derivative_of_the_gradient_are_refused():
    """The latter would silently be 0, and a gradient penalty would do nothing."""
    case = make_case()
    hidden = case.student_hidden.clone().requires_grad_()
    loss = fused_divergence(hidden, case.student_head, case.teacher_hidden, case.teacher_head).loss
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_degrade_it(kind):
    case = make_case(kind=kind, spread=4.0)
    expected, expected_grads = case.run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, grads = case.run()
    for name in result._fields:
        assert torch.equal(getattr(result, name), getattr(expected, name)), name
    assert torch.equal(grads["hidden"], expected_grads["hidden"])
    assert torch.equal(grads["head"], expected_grads["head"])


# --- bad arguments ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "kl"}, "reverse_kl"),
        ({"kind": "jsd", "beta": 0.0}, "forward_kl"),
        ({"temperature": 0.0}, "temperature"),
        ({"student_bias": torch.zeros(22)}, "student_bias"),
        ({"denominator": math.nan}, "denominator"),
        ({"weight_N": torch.ones(7, 1)}, "weight_N"),
        ({"weight_N": -torch.ones(7)}, "weight"),
        ({"token_N": torch.zeros(7)}, "token_N"),
        ({"token_N": torch.full((7,), -100)}, "got -100"),
        ({"token_N": None, "observe": print}, "token_N"),
        ({"top": TopChoices.empty(7, 24, torch.device("cpu"))}, "7 x 24"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        make_case().run(**options)


def test_tensors_that_do_not_fit_are_refused():
    for name, value in (("student_head", torch.zeros(23, 9)), ("teacher_hidden", torch.ones(7, 9, dtype=torch.long))):
        case = make_case()
        setattr(case, name, value)
        with pytest.raises(ConfigError):
            case.run()


# --- the most probable tokens ---


def rows_of(hidden, head):
    return [oracles.probabilities(oracles.head_logits(row, head.numpy())) for row in hidden.detach().double().numpy()]


@pytest.mark.parametrize("weighted", [False, True])
def test_top_choices_are_those_of_the_whole_distributions(weighted):
    case, weight = make_case(rows=9), torch.ones(9)
    weight[[2, 5]] = 0 if weighted else 1
    found = TopChoices.empty(9, 4, torch.device("cpu"))
    case.run(weight_N=weight, top=found, chunk=2)
    students, teachers = (
        rows_of(case.student_hidden, case.student_head),
        rows_of(case.teacher_hidden, case.teacher_head),
    )
    for row, (p, q) in enumerate(zip(students, teachers)):
        if weight[row] == 0:
            assert found.student_ids_NK[row].tolist() == [-1] * 4
            assert bool(found.teacher_logprobs_NK[row].isnan().all())
            continue
        best_p, best_q = np.argsort(-p)[:4], np.argsort(-q)[:4]
        assert found.student_ids_NK[row].tolist() == best_p.tolist()
        assert found.teacher_ids_NK[row].tolist() == best_q.tolist()
        np.testing.assert_allclose(found.student_logprobs_NK[row], np.log(p[best_p]), rtol=1e-4)
        np.testing.assert_allclose(found.teacher_at_student_NK[row], np.log(q[best_p]), rtol=1e-4)
        np.testing.assert_allclose(found.teacher_logprobs_NK[row], np.log(q[best_q]), rtol=1e-4)


# --- CUDA ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_equals_cpu(kind, dtype):
    """float32 to rounding; bfloat16 gradients pass through one bfloat16 rounding more on CUDA."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case = make_case(kind=kind, rows=50, vocabulary=1_000, student_width=64, teacher_width=96, spread=3.0, dtype=dtype)
    options = {"student_softcap": 20.0, "temperature": 1.3, "chunk": 16, "weight_N": torch.arange(50).float() % 3}
    expected, expected_grads = case.run(**options)
    for name in ("student_hidden", "student_head", "teacher_hidden", "teacher_head", "tokens"):
        setattr(case, name, getattr(case, name).cuda())
    result, grads = case.run(**options | {"weight_N": options["weight_N"].cuda()})
    for name in result._fields:
        torch.testing.assert_close(
            getattr(result, name).cpu(), getattr(expected, name), rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
        )
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for name in grads:
        scale = float(expected_grads[name].abs().max())
        torch.testing.assert_close(grads[name].cpu(), expected_grads[name], rtol=tolerance, atol=tolerance * scale)
