"""Mistakes that were made in other projects, each a named test: the naive way fails here, ours does not."""

from __future__ import annotations

import numpy as np
import oracles
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from cases import as_numpy, from_logits, make_case
from tiny import VOCABULARY, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rocktokens.divergence.fused import fused_divergence
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Request
from rocktokens.sample.rollouts import RolloutRows, sample_rollouts
from rocktokens.sample.sampler import Sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.scoring import Rollout, score

# --- the loss ---


def test_loss_averaged_per_micro_batch():
    """verl #7200: every micro-batch divided by its own count, so the step's loss grew with the number of them."""
    case = make_case(rows=8)
    whole = case.run()[0].loss.item()
    sizes = [1, 2, 5]
    parts = [slice(0, 1), slice(1, 3), slice(3, 8)]

    def micro_batch(rows: slice, **options) -> float:
        return fused_divergence(
            case.student_hidden[rows], case.student_head, case.teacher_hidden[rows], case.teacher_head, **options
        ).loss.item()

    summed_means = sum(micro_batch(rows) for rows in parts)
    averaged_means = summed_means / len(parts)
    assert summed_means > 2 * whole
    assert abs(averaged_means - whole) > 1e-3
    assert sum(micro_batch(rows, denominator=sum(sizes)) for rows in parts) == pytest.approx(whole, rel=1e-5)


def test_ignored_rows_are_left_out_of_loss_count_and_gradient():
    """Liger #974: ignore_index was accepted and unused."""
    case = make_case(rows=6)
    weight_N = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    result, grads = case.run(weight_N=weight_N)
    assert result.loss.item() == pytest.approx(case.oracle().value[[0, 2, 5]].mean(), rel=1e-5)
    assert (grads["hidden"][weight_N == 0] == 0).all()


def test_forward_kl_is_not_a_cross_entropy():
    """torchtune's ForwardKLLoss is -sum q log p: for a perfect student it is the teacher's entropy, not 0.

    It has the same gradient, so training hides it; ranking tokens by it ranks the teacher's entropy.
    """
    case = make_case(rows=200, vocabulary=50, spread=2.0, kind="forward_kl")
    case.teacher_hidden, case.teacher_head = case.student_hidden, case.student_head
    result, _ = case.run()
    log_p_NV = F.log_softmax(case.student_hidden @ case.student_head.T, -1)
    cross_entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
    torch.testing.assert_close(cross_entropy_N, result.teacher_entropy_N, rtol=1e-4, atol=1e-5)
    assert cross_entropy_N.mean() > 1
    assert result.value_N.max() < 1e-6


def test_a_difference_of_log_probabilities_is_not_the_divergence():
    """The paper has one name for both. Their means agree over tokens drawn from the student, not row by row."""
    student, teacher = np.log([[0.5, 0.3, 0.2]]), np.log([[0.2, 0.3, 0.5]])
    result, _ = from_logits(np.repeat(student, 3, 0), np.repeat(teacher, 3, 0), tokens=[0, 1, 2]).run()
    assert result.log_ratio_N[1].abs() < 1e-6
    assert result.log_ratio_N[2] < 0 < result.value_N[2]
    mean_ratio = (torch.tensor([0.5, 0.3, 0.2]) * result.log_ratio_N).sum()
    torch.testing.assert_close(mean_ratio, result.value_N[0])


def test_the_temperature_given_is_the_temperature_used():
    """tinker-cookbook's on-policy recipe accepts a temperature and ignores it."""
    values = [make_case(temperature=t, spread=3.0).run()[0].value_N for t in (1.0, 2.0)]
    assert (values[0] - values[1]).abs().min() > 1e-3


# --- precision ---


def test_bf16_log_softmax_spoils_the_gradient_of_a_converging_student():
    """The differences that are left to learn are smaller than bfloat16's rounding of a log-probability."""
    case = make_case(rows=32, vocabulary=200, student_width=32, spread=3.0)
    nudge = 0.01 * torch.randn(case.student_hidden.shape, generator=torch.Generator().manual_seed(1))
    case.teacher_hidden, case.teacher_head = case.student_hidden + nudge, case.student_head
    oracle = case.oracle()

    student_NV = (case.student_hidden @ case.student_head.T).bfloat16().requires_grad_()
    log_p_NV = F.log_softmax(student_NV, -1)
    log_q_NV = F.log_softmax((case.teacher_hidden @ case.teacher_head.T).bfloat16(), -1)
    (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1).mean().backward()
    naive_NH = student_NV.grad.float() @ case.student_head

    def error(gradient: torch.Tensor) -> float:
        return float(np.linalg.norm(as_numpy(gradient) - oracle.grad_hidden) / np.linalg.norm(oracle.grad_hidden))

    assert error(naive_NH) > 0.3
    assert error(case.run()[1]["hidden"]) < 1e-3


# --- vocabulary ---


@pytest.mark.parametrize("filling", ["zeros", "the other model's logits"])
def test_vocabulary_padding_rows_leak_no_probability(filling):
    """Filled with zero logits (Liger) or with the other model's, padding takes probability from real tokens."""
    case = make_case(rows=10, vocabulary=40)  # identical models, of which the teacher's head has 8 more rows
    noise = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    case.teacher_hidden, case.teacher_head = case.student_hidden, torch.cat([case.student_head, noise])
    student_NV = case.student_hidden @ case.student_head.T
    teacher_NV = case.teacher_hidden @ case.teacher_head.T
    extra_NV = torch.zeros(10, 8) if filling == "zeros" else teacher_NV[:, 40:]
    if filling != "zeros":  # the same student: a constant changes no softmax, but the borrowed rows do not follow
        student_NV = student_NV + 3.0
    student, teacher = as_numpy(torch.cat([student_NV, extra_NV], 1)), as_numpy(teacher_NV)
    naive = [oracles.reverse_kl(*map(oracles.probabilities, rows)) for rows in zip(student, teacher)]
    assert min(naive) > 1e-3
    result, grads = case.run()
    assert result.value_N.max() < 1e-6
    assert grads["head"].abs().max() < 1e-6


def test_top_k_divergence_can_be_negative_where_the_full_one_is_not():
    """verl #7856: the sum over the teacher's top k went below 0, was clamped, and 89 % of steps had no gradient."""
    student, teacher = np.array([0.55, 0.43, 0.01, 0.01]), np.array([0.4, 0.3, 0.15, 0.15])
    top_2 = np.argsort(-teacher)[:2]
    assert np.sum(teacher[top_2] * np.log(teacher[top_2] / student[top_2])) < 0
    result, _ = from_logits(np.log([student]), np.log([teacher]), kind="forward_kl").run()
    assert result.value_N.item() == pytest.approx(oracles.forward_kl(student, teacher), rel=1e-5)
    assert result.grad_norm_N.item() > 0.1


def test_a_ban_on_the_output_head_leaks_under_soft_capping():
    """-inf becomes -cap, and the token keeps probability: bans belong after the cap, in the sampler.

    Scoring must not turn such a logit into NaN either.
    """
    bias = torch.zeros(4)
    bias[2] = -torch.inf
    result, _ = from_logits(
        torch.zeros(1, 4), torch.zeros(1, 4), tokens=[2], student_bias=bias, teacher_bias=bias,
        student_softcap=2.0, teacher_softcap=2.0,
    ).run()  # fmt: skip
    assert result.student_logprob_N.exp().item() == pytest.approx(np.exp(-2) / (3 + np.exp(-2)), rel=1e-5)
    assert result.value_N.item() < 1e-6


# --- from the sampler to the scorer ---


def score_all(rollouts, student, teacher, **options) -> list[dict]:
    """Scored rows in the order of rollouts and positions."""
    parts: list[pa.Table] = []
    options = {"eos_ids": (1,), "vocabulary": VOCABULARY, **options}
    score(rollouts, {0: student}, teacher, write=lambda step, table: parts.append(table), **options)
    return pa.concat_tables(parts).sort_by([("rollout_id", "ascending"), ("position", "ascending")]).to_pylist()


def test_prompt_and_padding_are_not_counted():
    """optipfair #34: unmasked padding reversed an ablation's conclusion."""
    student, teacher = tiny_model(), tiny_model(seed=1)
    short, long = Rollout("p", "a", (3, 4), (5, 6)), Rollout("p", "b", (7, 8, 9, 10), (11, 12, 13))
    together = score_all([short, long], student, teacher)
    assert [(row["rollout_id"], row["position"], row["token_id"]) for row in together] == [
        ("a", 0, 5), ("a", 1, 6), ("b", 0, 11), ("b", 1, 12), ("b", 2, 13),
    ]  # fmt: skip
    alone = score_all([short], student, teacher)
    assert [row["kl"] for row in together[:2]] == pytest.approx([row["kl"] for row in alone], rel=1e-4)

    padded = torch.tensor([[3, 4, 5, 6, 0, 0, 0], [7, 8, 9, 10, 11, 12, 13]])
    with torch.no_grad():
        s, t = (F.log_softmax(model(padded).logits, -1) for model in (student, teacher))
    naive = (s.exp() * (s - t)).sum(-1).mean().item()
    assert abs(naive - np.mean([row["kl"] for row in together])) > 0.05


def test_the_predicted_token_is_scored_not_the_one_conditioned_on():
    """ms-swift #8436 and the paper's own freeze: logits and labels one position apart."""
    student, teacher = tiny_model(), tiny_model(seed=1)
    rollout = Rollout("p", "p#0", (3, 4, 5), (6, 7, 8, 9))
    rows = score_all([rollout], student, teacher)
    text = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    with torch.no_grad():
        log_p_TV = F.log_softmax(student(text).logits[0], -1)
    right = [log_p_TV[column - 1, text[0, column]].item() for column in range(3, 7)]
    unshifted = [log_p_TV[column, text[0, column]].item() for column in range(3, 7)]
    assert [row["student_logprob"] for row in rows] == pytest.approx(right, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(right, unshifted)) > 0.5
    assert [row["token_id"] for row in rows] == [6, 7, 8, 9]


def test_the_end_token_counts_when_pad_is_eos():
    """TRL #6357: a mask made from the pad token's id drops the end token."""
    student, teacher = tiny_model(), tiny_model(seed=1)
    rollouts = [Rollout("p", "a", (3, 4), (5, 1)), Rollout("p", "b", (3, 4), (5, 6, 7, 8, 1))]
    rows = score_all(rollouts, student, teacher, eos_ids=(1,))
    assert [row["is_eos"] for row in rows] == [False, True, False, False, False, False, True]
    assert all(row["kl"] > 0 for row in rows)


def test_a_cut_rollout_gets_no_end_token():
    """KDFlow appended one, and taught the student to stop anywhere."""
    model = tiny_model()
    answers = Sampler(model, eos_ids=(1,), pad_id=1).generate([Request((3, 4), 6, seed) for seed in range(20)])
    cut = [answer for answer in answers if answer.truncated]
    assert cut
    assert all(1 not in answer.token_ids and len(answer.token_ids) == 6 for answer in cut)


def test_text_is_not_re_tokenised_between_sampler_and_scorer():
    """Ids that no tokenizer would produce from the text they decode to reach the scorer as they were drawn."""
    pieces = {"a": 0, "b": 1, "ab": 2, "<eos>": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(pieces, [("a", "b")], fuse_unk=True)), eos_token="<eos>", pad_token="<eos>"
    )
    student, teacher = tiny_model(vocabulary=4), tiny_model(vocabulary=4, seed=1)
    engine = Sampler(student, eos_ids=(3,), pad_id=3)
    asked = [Prompt("p", (0,), "a", None)]
    table = sample_rollouts(engine, asked, RolloutConfig(num_rollouts=20, max_new_tokens=10), tokenizer, None)
    drawn = {row["rollout_id"]: row["token_ids"] for row in table.to_pylist()}
    assert any(tokenizer(row["text"])["input_ids"] != row["token_ids"] for row in table.to_pylist())
    scored: dict[str, list[int]] = {}
    for row in score_all(RolloutRows(table), student, teacher, eos_ids=(3,), vocabulary=4):
        scored.setdefault(row["rollout_id"], []).append(row["token_id"])
    assert scored == drawn


def test_a_ban_does_not_leak_under_soft_capping():
    """On the output head -inf would become -cap; the sampler bans after the cap."""
    model = tiny_model("gemma2")
    free = Sampler(model, eos_ids=(0,), pad_id=2).generate([Request((3, 4), 10, seed) for seed in range(50)])
    common = max(range(VOCABULARY), key=lambda v: sum(answer.token_ids.count(v) for answer in free))
    banned = Sampler(model, eos_ids=(0,), pad_id=2).generate(
        [Request((3, 4), 10, seed, banned=(common,)) for seed in range(50)]
    )
    assert any(common in answer.token_ids for answer in free)
    assert not any(common in answer.token_ids for answer in banned)
