"""Distillation with a served teacher trains what the local teacher trains, without the teacher in memory."""

from __future__ import annotations

import distilling
import numpy as np
import pytest
from standin_server import StandIn

from rocktokens.models.pair import head_of
from rocktokens.select.interface import make_selector
from rocktokens.servers.pool import ServerPool
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.states import ServedStates
from rocktokens.train.distill import _vllm
from rocktokens.train.settings import DistillConfig, VllmConfig
from rocktokens.train.trainer import RockDistillationTrainer

CONTEXT = 64
CHOOSING = {"name": "divergence", "keep": 0.5}  # measures losses before it chooses


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


@pytest.mark.parametrize(
    ("wire", "tolerance", "selector"),
    [("float32", 1e-5, {"name": "uniform"}), ("float16", 2e-3, {"name": "uniform"}), ("float32", 1e-4, CHOOSING)],
)
def test_loss_and_weights_follow_the_local_teacher(tmp_path, wire, tolerance, selector):
    local = trained(tmp_path / "local", distilling.teacher(), selector=make_selector(**selector))
    teacher = distilling.teacher()
    with StandIn(teacher, pooling=True, context=CONTEXT) as server:
        states = served(server, teacher, wire=wire)
        remote = trained(tmp_path / "served", states=states, selector=make_selector(**selector))
        assert len(server.requests) == 4 * 16  # one request a rollout and step, and no more
    assert remote.teacher_model is None
    losses = [[row["loss"] for row in trainer.record.rows] for trainer in (local, remote)]
    np.testing.assert_allclose(losses[1], losses[0], atol=tolerance, rtol=0)
    distance = distilling.furthest(distilling.parameters(local), distilling.parameters(remote))
    assert distance < 20 * tolerance
    assert remote.record.rows[0]["flops_teacher"] == 0.0  # its backbone's work is the servers'


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
