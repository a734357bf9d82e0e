"""Stages on servers: the same commands with URLs; other models, short contexts and dead servers are refused by URL."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tiny
from standin_server import StandIn

from rocktokens.causal.graft import run_graft as graft
from rocktokens.causal.knockout import knockout
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.check import server_findings
from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.stage import compare
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import open_run
from rocktokens.sample import stage as sampling
from rocktokens.sample.settings import RolloutConfig
from rocktokens.sample.stage import sample
from rocktokens.score import stage as scoring
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.stage import score
from rocktokens.servers.settings import ServersConfig
from rocktokens.study import StudyConfig, require_servers, study
from rocktokens.train.settings import DistillConfig, OffPolicyConfig
from rocktokens.train.stage import distill

OTHER_STUDENT, OTHER_TEACHER = tiny.tiny_model(seed=99), tiny.tiny_model("qwen3", seed=98, width=48)
STUDENT, TEACHER = tiny.tiny_model(seed=5), tiny.tiny_model("qwen3", seed=6, width=48)
TRAINED = DistillConfig(steps=2, prompts_per_step=4, rollouts_per_prompt=2, max_new_tokens=8, keep=1)
ROLLOUTS = RolloutConfig(num_rollouts=2, max_new_tokens=10)


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[PairConfig, PromptsConfig]:
    """Both models on disk, and prompts with answers."""
    home = tmp_path_factory.mktemp("given")
    paths = [tiny.save_model(home / name, model) for name, model in (("student", STUDENT), ("teacher", TEACHER))]
    texts = [" ".join(f"w{token}" for token in ids) for ids in tiny.prompts(60, seed=3, shortest=3)]
    (home / "p.jsonl").write_text("\n".join(json.dumps({"prompt": text, "answer": "w9"}) for text in texts))
    prompts = PromptsConfig(source=str(home / "p.jsonl"), checker="regex", pattern=r"(w\d+)")
    return PairConfig(student=paths[0], teacher=paths[1]), prompts


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
def run(tmp_path_factory, given, student, states) -> Path:
    path = tmp_path_factory.mktemp("served") / "run"
    sample(path, *given, ROLLOUTS, servers=ServersConfig(student=(student.url,)))
    score(path, ScoreConfig(), servers=ServersConfig(teacher=(states.url,)))
    return path


def occurrences(path: Path) -> pa.Table:
    return open_run(path).query("select token_id, kl from occurrences order by rollout_id, position")


def test_sampling_on_a_server_and_the_local_score_of_its_rollouts(run, given, student, tmp_path):
    rollouts, local = open_run(run).read("rollouts"), tmp_path / "local"
    assert len(rollouts) == 120 <= len(student.requests)
    assert open_run(run).facts("sample")["served"] == "model"  # where the server says that it read the model
    sample(local, *given, ROLLOUTS)
    open_run(local).write("rollouts", rollouts)  # the same texts, scored here
    score(local, ScoreConfig(), again=True)
    ours, theirs = occurrences(local), occurrences(run)
    assert ours["token_id"].equals(theirs["token_id"])
    np.testing.assert_allclose(theirs["kl"], ours["kl"], atol=1e-4, rtol=0)
    assert not list(run.glob("*.parts"))


@pytest.mark.parametrize("stage", ["sample", "score"])
def test_a_server_that_dies_leaves_its_parts_and_another_model_may_not_continue(
    stage, run, given, tmp_path, monkeypatch
):
    monkeypatch.setattr(sampling, "PART_PROMPTS", 10)
    monkeypatch.setattr(scoring, "PART_ROLLOUTS", 20)
    path, scores = tmp_path / "run", stage == "score"
    if scores:
        sample(path, *given, ROLLOUTS)
        open_run(path).write("rollouts", open_run(run).read("rollouts"))

    def work(server: StandIn, **settings) -> None:
        servers = ServersConfig(**{"teacher" if scores else "student": (server.url,)}, **settings)
        if scores:
            score(path, ScoreConfig(), servers=servers)
        else:
            sample(path, *given, ROLLOUTS, servers=servers)

    right, wrong = (TEACHER, OTHER_TEACHER) if scores else (STUDENT, OTHER_STUDENT)
    with StandIn(right, pooling=scores, die_after=70) as dying, pytest.raises(RunError, match="Finished parts stay"):
        work(dying, retries=0)
    parts = len(list(path.glob(f"{stage}.parts/*/0*")))
    assert 1 <= parts < 6
    with StandIn(wrong, pooling=scores) as other, pytest.raises(ConfigError, match=f"{other.url} serves another model"):
        work(other)
    assert len(list(path.glob(f"{stage}.parts/*/0*"))) == parts
    with StandIn(right, pooling=scores) as server:
        work(server)
        asked = [body for body in server.requests if "prompt_logprobs" not in body]
        assert 120 - 20 * parts <= len(asked) <= 120 - 20 * parts + 5  # and some that ask who it is
    if scores:
        np.testing.assert_allclose(occurrences(path)["kl"], occurrences(run)["kl"], atol=1e-5, rtol=0)
    assert len(open_run(path).read("rollouts")) == 120


def test_knockouts_and_grafts_on_servers(run, student, writes, states):
    base = BaselineConfig(problems=20, rollouts=2, reuse_prompts=True)
    servers = ServersConfig(student=(student.url,), teacher=(writes.url, states.url))
    before = len(student.requests)
    knockout(run, KnockoutConfig(candidates=("w5", "w9"), controls=False, resamples=200), base, servers=servers)
    assert len(student.requests) > before
    assert len(set(open_run(run).read("knockouts")["arm"].to_pylist())) >= 2
    config = GraftConfig(problems=10, rocks=("w9", "w5"), clusters=False, resamples=200)
    graft(run, config, base, servers=servers)
    assert writes.requests
    assert {"rocks", "all"} <= set(open_run(run).read("grafts")["arm"].to_pylist())
    facts = open_run(run).facts("graft")
    assert (facts["served"], facts["teacher_served"]) == ("model", "model")


def test_a_teacher_that_gives_states_alone_does_not_sample(tmp_path, given, states):
    with pytest.raises(ConfigError, match="does not generate; add a server") as error:
        sample(tmp_path / "run", *given, ROLLOUTS, checkpoint="teacher",
               servers=ServersConfig(teacher=(states.url,)))  # fmt: skip
    assert states.url in str(error.value)


def test_a_short_context_and_nobody_are_refused_by_url(tmp_path, given, unused_port):
    for context in (16, 6):  # too short for a prompt with its rollout, and for some prompts alone
        with StandIn(STUDENT, context=context) as short:
            with pytest.raises(ConfigError, match="--max-model-len 24") as error:
                sample(tmp_path / "run", *given, ROLLOUTS, servers=ServersConfig(student=(short.url,)))
            assert short.url in str(error.value)
            assert not [body for body in short.requests if "prompt_logprobs" not in body]  # nothing was sampled
    nobody = f"http://127.0.0.1:{unused_port}"
    with pytest.raises(ConfigError, match=f"nobody answers at {nobody}"):
        sample(tmp_path / "run", *given, ROLLOUTS, servers=ServersConfig(student=(nobody,)))


def test_check_probes_servers(given, student, states):
    with StandIn(STUDENT, context=8) as short:
        servers = ServersConfig(student=(student.url, short.url), teacher=(states.url,))
        samples, fault, scores = server_findings(given[0], ROLLOUTS, servers)
    assert f"{student.url} serves the student and gives its rollouts" in samples.sentence
    assert f"{states.url} serves the teacher and gives its hidden states" in scores.sentence
    assert "context" in samples.number
    assert fault.status == "wrong"
    assert f"{short.url} takes 8 tokens" in fault.sentence


def test_a_served_teacher_trains_in_both_stages_if_one_of_its_servers_generates(tmp_path, given, states, writes):
    off = replace(TRAINED, off_policy=OffPolicyConfig(answers=8, batch=4))
    with pytest.raises(ConfigError, match=r"--servers\.teacher"):
        distill(tmp_path / "run", *given, off, problems=4, servers=ServersConfig(teacher=(states.url,)))
    before, servers = len(states.requests), ServersConfig(teacher=(states.url, writes.url))
    run = distill(tmp_path / "run", *given, off, problems=4, servers=servers)
    assert run.facts("distill")["steps"] == 2
    assert writes.requests
    assert len(states.requests) > before


@pytest.mark.parametrize("verify", [None, False])
def test_every_server_of_a_pool_is_recognised(tmp_path, given, student, states, verify):
    """One wrong server among right ones is named; the pool would send it a share of the requests."""
    off = replace(TRAINED, off_policy=OffPolicyConfig(answers=8, batch=4))  # for this the teacher writes, too
    for wrong, role, right, options, work in (
        (OTHER_STUDENT, "student", student, {}, partial(sample, rollouts=ROLLOUTS)),
        (OTHER_TEACHER, "teacher", states, {"pooling": True}, partial(distill, config=off)),
        (OTHER_TEACHER, "teacher", states, {}, partial(distill, config=off)),
    ):
        with StandIn(wrong, **options) as other:
            servers = ServersConfig(**{role: (right.url, other.url)}, verify=verify)
            with pytest.raises(ConfigError, match=f"{other.url} serves another model"):
                work(tmp_path / "run", *given, servers=servers)
            assert not [body for body in other.requests if "seed" in body]  # it wrote nothing
    assert not (tmp_path / "run").exists()


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


def test_a_context_too_short_to_train_or_to_compare_is_refused_before_anything_is_trained(tmp_path, given):
    path = tmp_path / "run"
    with StandIn(TEACHER, pooling=True, context=14) as short, pytest.raises(ConfigError, match="--max-model-len"):
        distill(path, *given, TRAINED, problems=4, servers=ServersConfig(teacher=(short.url,)))
    assert not path.exists()
    # Prompts of at most 14 tokens are trained with 8 more; the run's own rollouts are longer.
    distill(path, *given, TRAINED, problems=4)
    sample(path, PairConfig(), PromptsConfig(), RolloutConfig(num_rollouts=2, max_new_tokens=40))
    asked = CompareConfig(regimes=("uniform", "freeze_rocks"), rocks=(5, 6), seeds=1, problems=4, contexts=60)
    with StandIn(TEACHER, pooling=True, context=24) as short, pytest.raises(ConfigError, match="--max-model-len"):
        compare(path, asked, servers=ServersConfig(teacher=(short.url,)))
    assert not list(path.glob("compare/*/seed=*"))


def test_a_study_asks_the_servers_of_its_later_stages_before_the_first(tmp_path, given, states, unused_port):
    """Dead ones are refused by their URL; the model that they serve need not be the trained one yet."""
    nobody = f"http://127.0.0.1:{unused_port}"
    study_of = partial(StudyConfig, path=tmp_path / "run", pair=given[0], prompts=given[1], rollouts=ROLLOUTS)
    for stages, urls, says in (
        (("distill", "sample"), {"student": (nobody,)}, f"nobody answers at {nobody}"),
        (("distill", "knockout"), {"student": (nobody,)}, f"nobody answers at {nobody}"),
        (("sample", "score"), {"teacher": (nobody,)}, f"nobody answers at {nobody}"),
        (("knockout", "graft"), {"student": (nobody,), "teacher": (states.url,)}, "graft"),  # it does not generate
    ):
        with pytest.raises(ConfigError, match=says):
            study(study_of(stages=stages, servers=ServersConfig(**urls)))
        assert not (tmp_path / "run").exists()
    for stages in (("distill",), ("distill", "detect")):  # these do not ask a student
        require_servers(study_of(stages=stages, servers=ServersConfig(student=(nobody,))))
    with StandIn(OTHER_STUDENT) as other:
        servers = ServersConfig(student=(other.url,))
        require_servers(study_of(stages=("distill", "sample", "knockout"), servers=servers))
        assert not other.requests
