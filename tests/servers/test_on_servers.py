"""Stages on servers: the same commands with URLs; other models, short contexts and dead servers are refused by URL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import tiny
from standin_server import StandIn

from rocktokens.causal.graft import run_graft as graft
from rocktokens.causal.knockout import knockout
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.check import server_findings
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.sample.stage import sample
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.stage import score
from rocktokens.servers.settings import ServersConfig
from rocktokens.study import StudyConfig, study
from rocktokens.train.settings import DistillConfig, OffPolicyConfig
from rocktokens.train.stage import distill

STUDENT, TEACHER = tiny.tiny_model(seed=5), tiny.tiny_model("qwen3", seed=6, width=48)
ROLLOUTS = RolloutConfig(num_rollouts=2, max_new_tokens=10)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> PairConfig:
    folder = tmp_path_factory.mktemp("pair")
    paths = [tiny.save_model(folder / name, model) for name, model in (("student", STUDENT), ("teacher", TEACHER))]
    return PairConfig(student=paths[0], teacher=paths[1])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> PromptsConfig:
    file: Path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    texts = [" ".join(f"w{token}" for token in ids) for ids in tiny.prompts(60, seed=3, shortest=3)]
    file.write_text("\n".join(json.dumps({"prompt": text, "answer": "w9"}) for text in texts))
    return PromptsConfig(source=str(file), checker="regex", pattern=r"(w\d+)")


@pytest.fixture(scope="module")
def student():
    with StandIn(STUDENT) as server:
        yield server


@pytest.fixture(scope="module")
def states():
    with StandIn(TEACHER, pooling=True) as server:
        yield server


@pytest.fixture(scope="module")
def writes():
    with StandIn(TEACHER) as server:
        yield server


@pytest.fixture(scope="module")
def run(tmp_path_factory, pair, prompts, student, states) -> Path:
    path = tmp_path_factory.mktemp("served") / "run"
    sample(path, pair, prompts, ROLLOUTS, servers=ServersConfig(student=(student.url,)))
    score(path, ScoreConfig(), servers=ServersConfig(teacher=(states.url,)))
    return path


def test_sample_on_a_server(run, student):
    rollouts = open_run(run).read("rollouts")
    assert len(rollouts) == 120
    assert len(student.requests) >= 120
    assert open_run(run).facts("sample")["served"] == "model"  # where the server says that it read the model
    assert max(map(len, rollouts["token_ids"].to_pylist())) <= 10


def test_score_with_a_served_teacher_is_the_local_score(run, pair, prompts, tmp_path):
    local = tmp_path / "local"
    sample(local, pair, prompts, ROLLOUTS)
    open_run(local).write("rollouts", open_run(run).read("rollouts"))  # the same texts, scored here
    score(local, ScoreConfig(), again=True)
    order = "select * from occurrences order by rollout_id, position"
    ours, theirs = open_run(local).query(order), open_run(run).query(order)
    assert ours["token_id"].equals(theirs["token_id"])
    np.testing.assert_allclose(theirs["kl"], ours["kl"], atol=1e-4, rtol=0)
    assert not list(run.glob("*.parts"))


def test_scoring_goes_on_inside_a_checkpoint(run, pair, prompts, tmp_path, monkeypatch):
    """The teacher's server dies in the middle of a checkpoint: finished parts are not asked for again."""
    from rocktokens.score import stage as score_stage

    monkeypatch.setattr(score_stage, "PART_ROLLOUTS", 20)
    path = tmp_path / "run"
    sample(path, pair, prompts, ROLLOUTS)
    open_run(path).write("rollouts", open_run(run).read("rollouts"))
    with StandIn(TEACHER, pooling=True, die_after=70) as dying, pytest.raises(RunError, match="Finished parts stay"):
        score(path, ScoreConfig(), servers=ServersConfig(teacher=(dying.url,), retries=0))
    parts = len(list(path.glob("score.parts/*/0*")))
    assert 1 <= parts < 6
    other, says = tiny.tiny_model("qwen3", seed=98, width=48), pytest.raises(ConfigError, match="serves another model")
    with StandIn(other, pooling=True) as server, says:
        score(path, ScoreConfig(), servers=ServersConfig(teacher=(server.url,)))
    with StandIn(TEACHER, pooling=True) as server:
        score(path, ScoreConfig(), servers=ServersConfig(teacher=(server.url,)))
        assert 120 - 20 * parts <= len(server.requests) <= 120 - 20 * parts + 5  # and some that ask who it is
    order = "select * from occurrences order by rollout_id, position"
    ours, theirs = open_run(path).query(order), open_run(run).query(order)
    assert ours["token_id"].equals(theirs["token_id"])
    np.testing.assert_allclose(ours["kl"], theirs["kl"], atol=1e-5, rtol=0)
    assert open_run(path).done("score")


def test_knockout_on_a_server(run, student):
    before = len(student.requests)
    config = KnockoutConfig(candidates=("w5", "w9"), controls=False, resamples=200)
    knockout(
        run, config, BaselineConfig(problems=20, rollouts=2, reuse_prompts=True),
        servers=ServersConfig(student=(student.url,)),
    )  # fmt: skip
    assert len(student.requests) > before
    table = open_run(run).read("knockouts")
    assert pc.count_distinct(table["arm"]).as_py() >= 2


def test_grafts_on_servers(run, student, writes, states):
    servers = ServersConfig(student=(student.url,), teacher=(writes.url, states.url))
    graft(
        run, GraftConfig(problems=10, rocks=("w9", "w5"), clusters=False, resamples=200),
        BaselineConfig(problems=10, rollouts=1, reuse_prompts=True), servers=servers,
    )  # fmt: skip
    assert writes.requests
    arms = open_run(run).read("grafts")["arm"].to_pylist()
    assert {"rocks", "all"} <= set(arms)
    facts = open_run(run).facts("graft")
    assert (facts["served"], facts["teacher_served"]) == ("model", "model")


def test_a_teacher_that_gives_states_alone_does_not_sample(tmp_path, pair, prompts, states):
    with pytest.raises(ConfigError, match="does not generate; add a server") as error:
        sample(tmp_path / "run", pair, prompts, ROLLOUTS, checkpoint="teacher",
               servers=ServersConfig(teacher=(states.url,)))  # fmt: skip
    assert states.url in str(error.value)


def test_a_short_context_and_nobody_are_refused_by_url(tmp_path, pair, prompts, unused_port):
    for context in (16, 6):  # too short for a prompt with its rollout, and for some prompts alone
        with StandIn(STUDENT, context=context) as short:
            with pytest.raises(ConfigError, match="--max-model-len 24") as error:
                sample(tmp_path / "run", pair, prompts, ROLLOUTS, servers=ServersConfig(student=(short.url,)))
            assert short.url in str(error.value)
            assert not [body for body in short.requests if "prompt_logprobs" not in body]  # nothing was sampled
    nobody = f"http://127.0.0.1:{unused_port}"
    with pytest.raises(ConfigError, match=f"nobody answers at {nobody}"):
        sample(tmp_path / "run", pair, prompts, ROLLOUTS, servers=ServersConfig(student=(nobody,)))


def test_a_server_that_dies_leaves_its_parts_and_another_model_may_not_go_on(tmp_path, pair, prompts, monkeypatch):
    from rocktokens.sample import stage as stage

    monkeypatch.setattr(stage, "PART_PROMPTS", 10)
    path = tmp_path / "run"
    with StandIn(STUDENT, die_after=70) as dying, pytest.raises(RunError, match="Finished parts stay"):
        sample(path, pair, prompts, ROLLOUTS, servers=ServersConfig(student=(dying.url,), retries=0))
    parts = len(list(path.glob("sample.parts/*/0*.parquet")))
    assert 1 <= parts < 6
    with StandIn(tiny.tiny_model(seed=99)) as other, pytest.raises(ConfigError, match="another model") as error:
        sample(path, pair, prompts, ROLLOUTS, servers=ServersConfig(student=(other.url,)))
    assert other.url in str(error.value)
    assert len(list(path.glob("sample.parts/*/0*.parquet"))) == parts
    with StandIn(STUDENT) as again:
        sample(path, pair, prompts, ROLLOUTS, servers=ServersConfig(student=(again.url,)))
        assert len([body for body in again.requests if "prompt_logprobs" not in body]) <= 120 - 20 * parts + 5
    assert len(open_run(path).read("rollouts")) == 120


def test_check_probes_servers(pair, student, states):
    with StandIn(STUDENT, context=8) as short:
        servers = ServersConfig(student=(student.url, short.url), teacher=(states.url,))
        samples, fault, scores = server_findings(pair, ROLLOUTS, servers)
    assert f"{student.url} serves the student and gives its rollouts" in samples.sentence
    assert f"{states.url} serves the teacher and gives its hidden states" in scores.sentence
    assert "context" in samples.number
    assert fault.status == "wrong"
    assert f"{short.url} takes 8 tokens" in fault.sentence


def test_every_server_of_a_pool_is_recognised(tmp_path, pair, prompts, student, states):
    """One wrong server among right ones is named; the pool would send it a share of the requests."""
    with StandIn(tiny.tiny_model(seed=99)) as other:
        for verify in (None, False):
            servers = ServersConfig(student=(student.url, other.url), verify=verify)
            with pytest.raises(ConfigError, match=f"{other.url} serves another model"):
                sample(tmp_path / "run", pair, prompts, ROLLOUTS, servers=servers)
    with StandIn(tiny.tiny_model("qwen3", seed=98, width=48), pooling=True) as other:
        servers = ServersConfig(teacher=(states.url, other.url))
        with pytest.raises(ConfigError, match=f"{other.url} serves another model"):
            distill(tmp_path / "trained", pair, prompts, DistillConfig(steps=1), servers=servers)


@pytest.mark.parametrize(
    ("trouble", "error", "says"),
    [
        ({"unit_norm": True}, ConfigError, "use_activation"),
        ({"pooling": False, "unknown": 501}, ConfigError, "--runner pooling"),
        ({"nan_states": True}, DataError, "not numbers"),
        ({"short_states": True}, DataError, "bytes of states"),
        ({"context": 12}, ConfigError, "--max-model-len"),
        ({"fail_first": 10_000}, RunError, "Finished parts stay"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_teacher_that_misbehaves_is_named_and_scores_stay(run, trouble, error, says):
    before = {path: path.read_bytes() for path in sorted(run.glob("occurrences/**/*.parquet"))}
    with StandIn(TEACHER, **{"pooling": True, **trouble}) as server:
        servers = ServersConfig(teacher=(server.url,), retries=0)
        with pytest.raises(error, match=says) as raised:
            score(run, ScoreConfig(), servers=servers, again=True)
        assert server.url in str(raised.value)
    assert {path: path.read_bytes() for path in sorted(run.glob("occurrences/**/*.parquet"))} == before
    assert open_run(run).done("score")


def test_scores_say_what_was_served_and_are_not_mixed_with_those_of_another_wire(run, states, tmp_path):
    path, facts = tmp_path / "run", open_run(run).facts("score/step=0")
    assert (facts["teacher_served"], facts["wire"]) == ("model", "float32")
    shutil.copytree(run, path)
    rounded = ServersConfig(teacher=(states.url,), wire="bfloat16")
    with pytest.raises(RunError, match="teacher_wire was None, now 'bfloat16'"):
        score(path, ScoreConfig(), servers=rounded)
    score(path, ScoreConfig(), servers=rounded, again=True)
    assert open_run(path).facts("score/step=0")["wire"] == "bfloat16"
    for exact in (ServersConfig(teacher=(states.url,)), None):
        with pytest.raises(RunError, match="teacher_wire was 'bfloat16', now None"):
            score(path, ScoreConfig(), servers=exact)


def test_a_training_refuses_a_short_context_before_it_starts(tmp_path, pair, prompts):
    with StandIn(TEACHER, pooling=True, context=14) as short:
        with pytest.raises(ConfigError, match="--max-model-len") as error:
            distill(
                tmp_path / "run", pair, prompts, DistillConfig(steps=1, prompts_per_step=4, max_new_tokens=40),
                problems=4, servers=ServersConfig(teacher=(short.url,)),
            )  # fmt: skip
        assert short.url in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_writes_must_be_the_one_whose_states_are_given(tmp_path, pair, prompts, states, writes):
    """Of a teacher's servers, those that generate are recognised too, loaded here or not."""
    off = OffPolicyConfig(answers=8, batch=4)
    config = DistillConfig(
        steps=2, prompts_per_step=4, rollouts_per_prompt=2, max_new_tokens=8, keep=1, save_every=1, off_policy=off
    )

    def train(path: Path, *urls: str, **settings) -> None:
        servers = ServersConfig(teacher=urls, retries=0, **settings)
        distill(path, pair, prompts, config, problems=4, servers=servers)

    with StandIn(tiny.tiny_model("qwen3", seed=98, width=48)) as other:
        for verify in (None, False):
            with pytest.raises(ConfigError, match=f"{other.url} serves another model"):
                train(tmp_path / "new", states.url, other.url, verify=verify)
        assert not [body for body in other.requests if "seed" in body]  # it wrote nothing
    assert not (tmp_path / "new").exists()
    path = tmp_path / "run"
    train(path, states.url, writes.url)
    assert open_run(path).facts("distill")["steps"] == 2


def test_a_study_says_at_once_that_grafts_on_servers_need_a_teacher_that_generates(tmp_path, pair, prompts, states):
    config = StudyConfig(
        path=tmp_path / "run",
        pair=pair,
        prompts=prompts,
        servers=ServersConfig(student=("http://127.0.0.1:1",), teacher=(states.url,)),
    )
    with pytest.raises(ConfigError, match="graft"):
        study(config)
    assert not (tmp_path / "run").exists()
