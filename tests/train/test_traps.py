"""Mistakes that were made in other projects, each a named test: the naive way fails here, ours does not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from cases import from_logits, make_case
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
