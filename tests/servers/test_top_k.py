"""Scores from a teacher's most probable tokens and one bucket: the bucketed divergence, and said to be approximate."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from small_runs import DETECT, DISTILL, ROLLOUTS, save_pair
from standin_server import StandIn

from rocktokens.detect.stage import detect
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.models.pair import load_model
from rocktokens.models.states import Sequences
from rocktokens.report.stage import report
from rocktokens.run import open_run
from rocktokens.sample.stage import sample
from rocktokens.score.scoring import Rollout, score
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.stage import score as score_stage
from rocktokens.score.top_k import spread
from rocktokens.servers.pool import ServerPool
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.top_k import ServedTopK
from rocktokens.train.stage import distill

STUDENT, TEACHER = tiny.tiny_model(seed=1), tiny.tiny_model(seed=2, width=48)
CASES = [
    Rollout(f"p{i}", f"p{i}#0", prompt, answer)
    for i, (prompt, answer) in enumerate(zip(tiny.prompts(6, seed=3), tiny.prompts(6, seed=4, longest=20)))
]


def by_hand(p, q, k, token):
    """Divergence over the teacher's k likeliest tokens, the sampled one, and the rest as one bucket; plain sums."""
    known = sorted(range(len(q)), key=lambda u: -q[u])[:k]
    known = [*known, token] if token not in known else known
    tail_p, tail_q = (1 - math.fsum(x[u] for u in known) for x in (p, q))
    value = math.fsum(p[u] * math.log(p[u] / q[u]) for u in known)
    if len(known) < len(p):
        value += tail_p * math.log(tail_p / tail_q)
    return value


def measured(teacher, cases=CASES):
    parts: list[pa.Table] = []
    score(
        cases,
        {0: STUDENT},
        teacher,
        eos_ids=(1,),
        vocabulary=tiny.VOCABULARY,
        write=lambda _, table: parts.append(table),
    )
    return pa.concat_tables(parts).sort_by([("rollout_id", "ascending"), ("position", "ascending")])


@torch.inference_mode()
def laws(model, case):
    """Distributions that predict each response token, (T, V), in double precision."""
    ids = torch.tensor([case.prompt_ids + case.token_ids])
    probability = model(input_ids=ids).logits[0].double().softmax(-1).numpy()
    start = len(case.prompt_ids)
    return probability[start - 1 : -1]


@pytest.mark.parametrize("k", [1, 5, 40])
def test_scores_are_the_divergence_over_buckets(k):
    with StandIn(TEACHER) as server, ServerPool([server.url]) as pool:
        found = measured(ServedTopK(pool, k))
        assert {body["prompt_logprobs"] for body in server.requests} == {k}
        assert len(server.requests) == len(CASES)
    row = 0
    for case in CASES:
        for p, q, token in zip(laws(STUDENT, case), laws(TEACHER, case), case.token_ids):
            assert found["kl"][row].as_py() == pytest.approx(by_hand(p, q, k, token), rel=1e-3, abs=1e-4)
            assert found["log_ratio"][row].as_py() == pytest.approx(math.log(p[token] / q[token]), abs=2e-5)
            row += 1
    assert row == len(found)


def test_it_is_never_larger_than_the_truth_and_nears_it_with_k():
    exact = measured(TEACHER)
    gaps = []
    with StandIn(TEACHER) as server, ServerPool([server.url]) as pool:
        for k in (1, 8, 32, tiny.VOCABULARY):
            found = measured(ServedTopK(pool, k))
            short = exact["kl"].to_numpy() - found["kl"].to_numpy()
            assert short.min() > -1e-4
            gaps.append(float(short.mean()))
            for name in ("student_logprob", "teacher_logprob", "student_entropy"):
                np.testing.assert_allclose(found[name].to_numpy(), exact[name].to_numpy(), atol=1e-4)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.1
    assert gaps[-1] == pytest.approx(0, abs=1e-5)
    for name in ("teacher_entropy", "grad_norm"):  # all tokens are known: nothing is approximate
        np.testing.assert_allclose(found[name].to_numpy(), exact[name].to_numpy(), atol=1e-4)


def test_the_gradient_is_the_bucketed_divergences():
    """Against automatic differentiation of the divergence over buckets."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 12, generator=rng, dtype=torch.float64, requires_grad=True)
    q = torch.randn(3, 12, generator=rng, dtype=torch.float64).softmax(-1)
    token = q.topk(4, dim=-1).indices
    own = logits.log_softmax(-1)
    inside = torch.zeros_like(q, dtype=torch.bool).scatter(1, token, True)
    p = own.exp()
    known = (p * (own - q.log()) * inside).sum(1)
    tail_p, tail_q = (p * ~inside).sum(1), (q * ~inside).sum(1)
    (known + tail_p * (tail_p / tail_q).log()).sum().backward()
    t = spread(own.detach().float(), token, q.gather(1, token).log().float()).double()
    gap = own.detach() - t
    kl = (p.detach() * gap).sum(1, keepdim=True)
    torch.testing.assert_close(p.detach() * (gap - kl), logits.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(t.exp().sum(1), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.fixture
def sampled(tmp_path):
    pair, prompts = save_pair(tmp_path)
    sample(tmp_path / "run", pair, prompts, ROLLOUTS)
    return tmp_path / "run", pair, prompts


def test_a_run_says_everywhere_that_it_is_approximate(sampled):
    path, pair, _ = sampled
    with StandIn(load_model(pair.teacher, pair), root=pair.teacher) as server:
        with pytest.raises(ConfigError, match=r"gives hidden states.*--servers.top-k"):
            score_stage(path, ScoreConfig(), servers=ServersConfig(teacher=(server.url,)))
        score_stage(path, ScoreConfig(), servers=ServersConfig(teacher=(server.url,), top_k=5))
    run = open_run(path)
    assert "only the 5 most probable tokens" in run.facts("score/step=0")["approximate"]
    part = next((path / "occurrences" / "step=0").glob("*.parquet"))
    assert b"approximate" in pq.read_schema(part).metadata
    detect(path, DETECT)
    assert any("scores are approximate" in note for note in open_run(path).facts("detect")["notes"])
    report(path, images=False)
    assert "scores are approximate" in (path / "report.html").read_text()
    with pytest.raises(RunError, match="teacher_top_k was 5, now None"):
        score_stage(path, ScoreConfig())
    score_stage(path, ScoreConfig(), again=True)
    assert "approximate" not in open_run(path).facts("score/step=0")
    assert "approximate" not in json.dumps(open_run(path).manifest["stages"]["score/step=0"])


def test_servers_that_give_states_are_asked_for_them(sampled):
    path, pair, _ = sampled
    with StandIn(load_model(pair.teacher, pair), root=pair.teacher, pooling=True) as server:
        score_stage(path, ScoreConfig(), servers=ServersConfig(teacher=(server.url,), top_k=5))
    assert "approximate" not in open_run(path).facts("score/step=0")


def test_training_does_not_take_it(sampled, tmp_path):
    _, pair, prompts = sampled
    with (
        StandIn(load_model(pair.teacher, pair), root=pair.teacher) as server,
        pytest.raises(ConfigError, match="training needs the teacher's hidden states"),
    ):
        distill(tmp_path / "other", pair, prompts, DISTILL, servers=ServersConfig(teacher=(server.url,), top_k=5))


class Reply:
    url = "http://gpu:8000"

    def __init__(self, choice):
        self.choice = choice

    def json(self):
        return {"choices": [self.choice]}


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (None, "returned no log-probabilities"),
        ([None, {"3": {"logprob": -1.0}}], "tokens for rollout number 1"),
        ([None, None, {"9": {"logprob": -1.0}}, {"5": {"logprob": -1.0}}], "told 1 of 1 tokens"),
        ([None, None, {"4": {"logprob": float("nan")}}, {"5": {"logprob": -1.0}}], "not numbers"),
    ],
)
def test_damaged_replies_name_the_rollout(listed, said):
    source = ServedTopK.__new__(ServedTopK)
    source.k = 1
    with pytest.raises(DataError, match=said):
        source._read(Reply({"prompt_logprobs": listed}), (2, 3, 4, 5), 2, "number 1")


def test_a_context_without_room_for_one_more_is_refused():
    asked = Sequences((tuple(range(3, 11)),), (4,))
    with (
        StandIn(TEACHER, context=8) as server,
        ServerPool([server.url]) as pool,
        pytest.raises(ConfigError, match="--max-model-len 9"),
    ):
        ServedTopK(pool, 3).response_top(asked)


def test_k_is_a_number():
    with pytest.raises(ConfigError, match="top_k must be at least 1"):
        ServersConfig(top_k=0)
