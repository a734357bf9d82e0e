"""Mistakes that were made in other projects, each a named test: the naive way fails here, ours does not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from cases import from_logits
from tiny import VOCABULARY, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Request
from rocktokens.sample.rollouts import RolloutRows, sample_rollouts
from rocktokens.sample.sampler import Sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.scoring import score


def test_a_ban_on_the_output_head_leaks_under_soft_capping():
    """-inf becomes -cap, and the token keeps probability: bans belong after the cap, in the sampler; no NaN either."""
    bias = torch.zeros(4)
    bias[2] = -torch.inf
    result, _ = from_logits(
        torch.zeros(1, 4), torch.zeros(1, 4), tokens=[2], student_bias=bias, teacher_bias=bias,
        student_softcap=2.0, teacher_softcap=2.0,
    ).run()  # fmt: skip
    assert result.student_logprob_N.exp().item() == pytest.approx(np.exp(-2) / (3 + np.exp(-2)), rel=1e-5)
    assert result.value_N.item() < 1e-6


def score_all(rollouts, student, teacher, **options) -> list[dict]:
    """Scored rows in the order of rollouts and positions."""
    parts: list[pa.Table] = []
    options = {"eos_ids": (1,), "vocabulary": VOCABULARY, **options}
    score(rollouts, {0: student}, teacher, write=lambda step, table: parts.append(table), **options)
    return pa.concat_tables(parts).sort_by([("rollout_id", "ascending"), ("position", "ascending")]).to_pylist()


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
