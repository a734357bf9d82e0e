"""The most probable tokens at shown positions, against the models' own full logits."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
from tiny import FAMILIES, VOCABULARY, tiny_model

from rocktokens.divergence.heads import Head, top_tokens
from rocktokens.score.scoring import Rollout, TopTokenRecorder, score
from rocktokens.tables import TOP_TOKENS


def kept(rollouts, shown, student, teacher, k=5):
    """What the recorder wrote, as rows by (step, rollout, position)."""
    parts = []
    recorder = TopTokenRecorder(shown, k, VOCABULARY, lambda step, table: parts.append((step, table)))
    students = {0: student, 7: teacher}
    options = {"eos_ids": (1,), "vocabulary": VOCABULARY, "token_budget": 48, "top": recorder}
    score(rollouts, students, teacher, write=lambda step, table: None, **options)
    assert all(table.cast(TOP_TOKENS).schema == TOP_TOKENS for _, table in parts)
    return {(step, row["rollout_id"], row["position"]): row for step, table in parts for row in table.to_pylist()}


def own_probabilities(model, rollout):
    with torch.no_grad():
        text = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        logits_TV = model(text).logits[0].double().numpy()
    return [oracles.probabilities(row) for row in logits_TV[len(rollout.prompt_ids) - 1 : -1]]


ROLLOUTS = [Rollout(f"p{i}", f"p{i}#0", (3 + i, 5, 9), tuple(range(4, 7 + i))) for i in range(5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_log_probabilities_are_those_of_the_models_own_logits(family):
    student, teacher = tiny_model(family), tiny_model(family, seed=1, width=48)
    rows = kept(ROLLOUTS, {"p1#0", "p4#0"}, student, teacher)
    assert {key[1] for key in rows} == {"p1#0", "p4#0"}
    assert {key[0] for key in rows} == {0, 7}
    for rollout in (ROLLOUTS[1], ROLLOUTS[4]):
        for who, model in (("student", student), ("teacher", teacher)):
            for position, p in enumerate(own_probabilities(model, rollout)):
                row = rows[0, rollout.rollout_id, position]
                best = sorted(range(len(p)), key=lambda token: -p[token])[:5]
                assert row[f"{who}_top_ids"] == best
                assert row[f"{who}_top_logprobs"] == pytest.approx([math.log(p[t]) for t in best], abs=1e-4)


def test_chunks_padding_rows_and_small_vocabularies(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH = torch.randn(50, 8, generator=generator), torch.randn(12, 8, generator=generator)
    whole = top_tokens(hidden_NH, Head(weight_VH), 4, vocabulary=9)
    assert int(whole.ids_NK.max()) < 9
    monkeypatch.setattr("rocktokens.divergence.heads.TOP_ELEMENTS", 9 * 7)
    parts = top_tokens(hidden_NH, Head(weight_VH), 4, vocabulary=9)
    assert torch.equal(whole.ids_NK, parts.ids_NK)
    assert torch.allclose(whole.logprobs_NK, parts.logprobs_NK, atol=1e-6)
    everything = top_tokens(hidden_NH, Head(weight_VH), 99, vocabulary=12)
    np.testing.assert_allclose(everything.logprobs_NK.exp().sum(1), 1, atol=1e-5)


def test_the_costliest_positions_of_one_checkpoint_are_kept_too(monkeypatch):
    monkeypatch.setattr("rocktokens.score.scoring.NUM_COSTLY", 3)
    student, teacher = tiny_model("llama"), tiny_model("llama", seed=1, width=48)
    parts, scored = [], []
    recorder = TopTokenRecorder(set(), 5, VOCABULARY, lambda step, table: parts.append((step, table)), costly_step=0)
    options = {"eos_ids": (1,), "vocabulary": VOCABULARY, "token_budget": 24, "top": recorder}
    write = lambda step, table: scored.extend({"step": step, **row} for row in table.to_pylist())  # noqa: E731
    score(ROLLOUTS, {0: student, 7: teacher}, teacher, write=write, **options)
    assert {step for step, _ in parts} == {0}
    rows = {(row["rollout_id"], row["position"]): row for _, table in parts for row in table.to_pylist()}
    costly = sorted((row for row in scored if row["step"] == 0), key=lambda row: -row["kl"])[:3]
    assert {(row["rollout_id"], row["position"]) for row in costly} <= set(rows)
    assert len(rows) < len(scored) / 2
    rollout = next(r for r in ROLLOUTS if r.rollout_id == costly[0]["rollout_id"])
    p = own_probabilities(teacher, rollout)[costly[0]["position"]]
    row = rows[costly[0]["rollout_id"], costly[0]["position"]]
    assert row["teacher_top_ids"] == sorted(range(len(p)), key=lambda token: -p[token])[:5]
