"""Distillation with a served teacher trains what the local teacher trains, without the teacher in memory."""

from __future__ import annotations

import dataclasses

import distilling
import numpy as np
import pytest
import torch
from standin_server import StandIn

from rocktokens.errors import ConfigError
from rocktokens.models.pair import RemoteTeacher, head_of
from rocktokens.run import Run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.pool import ServerPool
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.states import ServedStates
from rocktokens.servers.vllm import VllmEngine
from rocktokens.train.distill import _vllm, distill
from rocktokens.train.settings import DistillConfig, OffPolicyConfig, VllmConfig
from rocktokens.train.trainer import RockDistillationTrainer

CONTEXT = 64


def served(server: StandIn, teacher, **settings) -> ServedStates:
    return ServedStates(ServerPool([server.url], ServersConfig(concurrency=4)), head_of(teacher), **settings)


def trained(path, teacher=None, states=None, **settings):
    args = distilling.arguments(path, max_steps=4)
    trainer = RockDistillationTrainer(
        distilling.student(),
        teacher,
        args,
        distilling.dataset(),
        processing_class=distilling.tokenizer(),
        **distilling.with_options({"generation": "ours", "teacher_states": states, **settings}),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(("wire", "tolerance"), [("float32", 1e-5), ("float16", 2e-3)])
def test_loss_and_weights_follow_the_local_teacher(tmp_path, wire, tolerance):
    local = trained(tmp_path / "local", distilling.teacher())
    teacher = distilling.teacher()
    with StandIn(teacher, pooling=True, context=CONTEXT) as server:
        remote = trained(tmp_path / "served", states=served(server, teacher, wire=wire))
        assert len(server.requests) == 4 * 16  # one request a rollout and step, and no more
    assert remote.teacher_model is None
    losses = [[row["loss"] for row in trainer.record.rows] for trainer in (local, remote)]
    np.testing.assert_allclose(losses[1], losses[0], atol=tolerance, rtol=0)
    distance = distilling.furthest(distilling.parameters(local), distilling.parameters(remote))
    assert distance < 20 * tolerance
    assert remote.record.rows[0]["flops_teacher"] == 0.0  # its backbone's work is the servers'


def test_selectors_that_need_losses_measure_with_the_served_teacher(tmp_path):
    from rocktokens.select.interface import make_selector

    teacher = distilling.teacher()
    local = trained(tmp_path / "local", distilling.teacher(), selector=make_selector("divergence", keep=0.5))
    with StandIn(teacher, pooling=True, context=CONTEXT) as server:
        remote = trained(
            tmp_path / "served", states=served(server, teacher), selector=make_selector("divergence", keep=0.5)
        )
    losses = [[row["loss"] for row in trainer.record.rows] for trainer in (local, remote)]
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-4, rtol=0)


def test_one_teacher_and_only_one(tmp_path):
    for both in ({}, {"teacher": distilling.teacher(), "states": object()}):
        with pytest.raises(ConfigError, match="one teacher is needed"):
            trained(tmp_path, **both)


def test_distill_with_a_served_teacher_in_both_stages(tmp_path):
    """The whole distillation, off-policy stage included: answers from a server that generates, states from another."""
    teacher = distilling.teacher()
    config = DistillConfig(
        steps=3,
        prompts_per_step=4,
        rollouts_per_prompt=2,
        max_new_tokens=8,
        keep=1,
        off_policy=OffPolicyConfig(answers=8, batch=4),
    )
    with (
        StandIn(teacher, pooling=True, context=CONTEXT) as states,
        StandIn(teacher, context=CONTEXT) as generates,
        ServerPool([generates.url]) as pool,
    ):

        def engine(rollouts: RolloutConfig) -> VllmEngine:
            return VllmEngine(pool, eos_ids=(distilling.EOS,), vocabulary=distilling.VOCABULARY)

        remote = RemoteTeacher(served(states, teacher), engine)
        pair = dataclasses.replace(distilling.pair(), teacher=None, remote=remote)
        found = distill(config, pair, distilling.prompts(16), Run.create(tmp_path / "run"), show=False)
        assert generates.requests
        assert states.requests
    assert found.facts["steps"] == 3


def test_without_a_server_that_generates_the_off_policy_stage_says_so(tmp_path):
    teacher = distilling.teacher()
    config = DistillConfig(steps=1, prompts_per_step=2, off_policy=OffPolicyConfig(answers=2, batch=2))
    with StandIn(teacher, pooling=True) as states:
        pair = dataclasses.replace(distilling.pair(), teacher=None, remote=RemoteTeacher(served(states, teacher)))
        with pytest.raises(ConfigError, match=r"--servers\.teacher"):
            distill(config, pair, distilling.prompts(8), Run.create(tmp_path / "run"), show=False)


def test_vllm_settings_reach_trl():
    from trl import DistillationConfig

    config = DistillConfig(
        generation="vllm",
        vllm=VllmConfig(url="http://gpu:8000", memory=0.5),
    )
    made = DistillationConfig("out", use_cpu=True, bf16=False, **_vllm(config))
    assert (made.use_vllm, made.vllm_mode, made.vllm_server_base_url) == (True, "server", "http://gpu:8000")
    assert made.vllm_gpu_memory_utilization == 0.5
    assert _vllm(DistillConfig()) == {"use_vllm": False}


def test_a_student_that_trains_has_float32_weights(tmp_path):
    import tiny

    from rocktokens.models.pair import load_pair
    from rocktokens.models.settings import PairConfig

    student = tiny.save_model(tmp_path / "s", tiny.tiny_model(seed=1).bfloat16())
    teacher = tiny.save_model(tmp_path / "t", tiny.tiny_model(seed=2).bfloat16())
    config = PairConfig(student=student, teacher=teacher, dtype="bfloat16")
    trains = load_pair(config, trains=True)
    assert {p.dtype for p in trains.student.parameters()} == {torch.float32}
    assert {p.dtype for p in trains.teacher.parameters()} == {torch.bfloat16}
    assert next(load_pair(config).student.parameters()).dtype == torch.bfloat16
