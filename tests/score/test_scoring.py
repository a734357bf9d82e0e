"""Scoring against the models' own full logits: the right positions, the right numbers, nothing else."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pyarrow as pa
import pytest
import torch
from tiny import FAMILIES, VOCABULARY, prompts, scored, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rocktokens.errors import DataError
from rocktokens.models.states import LocalStates, RememberedStates
from rocktokens.score.scoring import Rollout, micro_batches, score
from rocktokens.tables import OCCURRENCES

EOS = 1


def make_rollouts(count: int = 9, *, vocabulary: int = VOCABULARY) -> list[Rollout]:
    """Random prompts and responses of mixed length; every other response ends with the end token."""
    heads = prompts(count, seed=0, vocabulary=vocabulary)
    bodies = prompts(count, seed=1, longest=20, vocabulary=vocabulary)
    return [
        Rollout(f"p{i // 2}", f"p{i // 2}#{i % 2}", head, body + (EOS,) * (i % 2))
        for i, (head, body) in enumerate(zip(heads, bodies))
    ]


def own_logits(model, rollout: Rollout) -> np.ndarray:
    """The model's own logits at every response position of one rollout, run alone without padding."""
    with torch.no_grad():
        text = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        logits_TV = model(text).logits[0].double().numpy()
    return logits_TV[len(rollout.prompt_ids) - 1 : -1, :VOCABULARY]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A student and a teacher of different widths, whose heads have different numbers of padding rows."""
    student = tiny_model(request.param, vocabulary=VOCABULARY + 16)
    return student, tiny_model(request.param, seed=1, width=48, vocabulary=VOCABULARY + 8)


@pytest.fixture(scope="module")
def llamas():
    return tiny_model("llama"), tiny_model("llama", seed=1, width=48)


# --- numbers ---


def test_every_column_equals_the_oracle_on_full_logits(pair):
    rollouts = make_rollouts()
    table = scored(rollouts, *pair, token_budget=64).to_pydict()
    row = 0
    for rollout in sorted(rollouts, key=lambda r: r.rollout_id):
        for position, (s, t) in enumerate(zip(own_logits(pair[0], rollout), own_logits(pair[1], rollout))):
            p, q, token = oracles.probabilities(s), oracles.probabilities(t), rollout.token_ids[position]
            expected = {
                "kl": oracles.reverse_kl(p, q),
                "log_ratio": oracles.log_ratio(p, q, token),
                "student_logprob": math.log(p[token]),
                "teacher_logprob": math.log(q[token]),
                "student_entropy": oracles.entropy(p),
                "teacher_entropy": oracles.entropy(q),
                "grad_norm": np.linalg.norm(oracles.logit_gradient(p, q, "reverse_kl")),
            }
            for name, want in expected.items():
                assert table[name][row] == pytest.approx(want, rel=1e-3, abs=1e-4), (name, rollout, position)
            assert table["rollout_id"][row] == rollout.rollout_id
            assert table["prompt_id"][row] == rollout.prompt_id
            assert table["position"][row] == position
            assert table["token_id"][row] == token
            assert table["is_eos"][row] == (token == EOS)
            row += 1
    assert row == len(table["kl"])


def test_what_all_prompts_begin_with_is_computed_once(pair):
    """One system message before every prompt; one prompt is nothing else. The numbers are those of whole texts."""
    student, teacher = pair
    common = prompts(1, seed=3, shortest=40, longest=40)[0]
    rests = prompts(20, seed=4, shortest=20, longest=20)
    rollouts = [Rollout(f"p{i}", f"p{i:02}", common + rest[: i % 8], rest[i % 8 :]) for i, rest in enumerate(rests)]
    computed = []
    handle = student.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        table = scored(rollouts, student, teacher, token_budget=4096)
    finally:
        handle.remove()
    shares = all(type(layer) is DynamicLayer for layer in DynamicCache(config=student.config).layers)
    # The prompt that is nothing but the beginning keeps its last token: its state predicts the first token.
    assert computed == ([39, 20 * 21] if shares else [20 * 60])
    want = [
        oracles.reverse_kl(oracles.probabilities(s), oracles.probabilities(t))
        for rollout in rollouts
        for s, t in zip(own_logits(student, rollout), own_logits(teacher, rollout))
    ]
    np.testing.assert_allclose(table["kl"].to_numpy(), want, rtol=1e-3, atol=1e-4)


# --- composition ---


@pytest.mark.parametrize("budget", [1, 40, 100, 10_000])
def test_the_token_budget_is_irrelevant(llamas, budget):
    rollouts = make_rollouts(15)
    expected, got = scored(rollouts, *llamas), scored(rollouts, *llamas, token_budget=budget)
    for name in OCCURRENCES.names:
        if name in OCCURRENCES.names[4:11]:
            np.testing.assert_allclose(got[name].to_numpy(), expected[name].to_numpy(), rtol=1e-3, atol=1e-5)
        else:
            assert got[name].to_pylist() == expected[name].to_pylist()


def test_several_students_beside_one_pass_of_the_teacher(llamas):
    student, teacher = llamas
    other = tiny_model("qwen3", seed=7)
    rollouts, parts, passes = make_rollouts(), {3: [], 8: []}, []
    handle = teacher.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    options = {"eos_ids": (EOS,), "vocabulary": VOCABULARY, "token_budget": 64}
    write = lambda step, table: parts[step].append(table)  # noqa: E731
    score(rollouts, {3: student, 8: other}, teacher, write=write, **options)
    handle.remove()
    assert len(passes) == len(parts[3]) > 1
    for step, model in ((3, student), (8, other)):
        table = pa.concat_tables(parts[step]).sort_by([("rollout_id", "ascending"), ("position", "ascending")])
        assert table.equals(scored(rollouts, model, teacher, token_budget=64))
        assert len(table) == sum(len(r.token_ids) for r in rollouts)


def test_an_observer_sees_the_gradient_of_every_occurrence(llamas):
    rollouts, seen = make_rollouts(), []
    table = scored(rollouts, *llamas, observers={0: lambda token, grad: seen.append((token.clone(), grad.clone()))})
    tokens, grads = (torch.cat(parts) for parts in zip(*seen))
    assert sorted(tokens.tolist()) == sorted(table["token_id"].to_pylist())
    norms = sorted(torch.linalg.vector_norm(grads, dim=1).tolist())
    np.testing.assert_allclose(norms, sorted(table["grad_norm"].to_pylist()), rtol=1e-5, atol=1e-6)


# --- work ---


@pytest.mark.parametrize("budget", [512, 2048, 8192])
def test_padding_is_under_a_tenth_of_the_work(budget, rng):
    """Lengths as rollouts have them: many short, a few at the limit."""
    lengths = np.clip(rng.lognormal(4.5, 0.8, 500).astype(int), 1, 512)
    rollouts = [Rollout("p", str(i), (3,) * int(rng.integers(5, 60)), (4,) * n) for i, n in enumerate(lengths)]
    batches = list(micro_batches(rollouts, budget))
    sizes = [[len(r.prompt_ids) + len(r.token_ids) for r in batch] for batch in batches]
    padded, real = sum(len(size) * max(size) for size in sizes), sum(map(sum, sizes))
    assert 1 - real / padded < 0.10
    assert all(len(size) * max(size) <= budget or len(size) == 1 for size in sizes)
    assert sorted(r.rollout_id for batch in batches for r in batch) == sorted(r.rollout_id for r in rollouts)


# --- broken models and bad rollouts ---


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_nan_logits_are_marked_and_spoil_no_other_rollout(who):
    """Token 63 has a broken embedding; attention spreads it over the one rollout that holds it, not to others."""
    student, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    good = make_rollouts(6, vocabulary=60)
    bad = Rollout("bad", "bad#0", (5, 6), (7, 8, 63, 9, 10))
    expected = scored([*good, bad], student, teacher)
    with torch.no_grad():
        (student if who == "student" else teacher).get_input_embeddings().weight[63] = math.nan
    got = scored([*good, bad], student, teacher)
    assert len(got) == len(expected)
    marked = [math.isnan(kl) for kl in got["kl"].to_pylist()]
    assert marked == [rollout_id == "bad#0" for rollout_id in got["rollout_id"].to_pylist()]
    assert [row["token_id"] for row in got.to_pylist() if row["rollout_id"] == "bad#0"] == list(bad.token_ids)
    kept = ~np.array(marked)
    np.testing.assert_allclose(got["kl"].to_numpy()[kept], expected["kl"].to_numpy()[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "response", "says"),
    [((), (3,), "p#7"), ((3,), (), "p#7"), ((3,), (VOCABULARY,), "64"), ((VOCABULARY + 5,), (3,), "69")],
)
def test_rollouts_that_cannot_be_scored_are_named(llamas, prompt, response, says):
    with pytest.raises(DataError, match=says):
        scored([*make_rollouts(2), Rollout("p", "p#7", prompt, response)], *llamas)


def test_rollouts_that_one_of_the_models_cannot_read_are_named(llamas):
    rollouts = [Rollout("p", "fits", (3,) * 6, (4,) * 6), Rollout("p", "long", (3,) * 6, (4,) * 7)]
    short = tiny_model("llama", max_position_embeddings=12)
    with pytest.raises(DataError, match="rollout long has 13 tokens with its prompt, the teacher reads 12"):
        scored(rollouts, llamas[0], short)
    with pytest.raises(DataError, match="the student of step 0 reads 12"):
        scored(rollouts, short, llamas[0])
    assert len(scored(rollouts[:1], llamas[0], short)) == 6


def test_states_that_are_asked_for_again_are_computed_once(llamas):
    student, teacher = llamas
    passes = []
    handle = teacher.base_model.register_forward_hook(lambda *args: passes.append(1))
    source, little = RememberedStates(LocalStates(teacher)), RememberedStates(LocalStates(teacher), most_bytes=10)
    first = scored(make_rollouts(), student, source)
    once = len(passes)
    assert scored(make_rollouts(), student, source).equals(first)
    assert len(passes) == once > 0
    scored(make_rollouts(), student, little)
    scored(make_rollouts(), student, little)
    assert len(passes) == 3 * once  # what does not fit is computed again
    handle.remove()
    assert first.equals(scored(make_rollouts(), student, teacher))
