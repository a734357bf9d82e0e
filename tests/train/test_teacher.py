"""A teacher that sharded training cannot hold is refused, and the words say why and where it should live."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import tiny
import torch

from rocktokens.errors import ConfigError
from rocktokens.train.teacher import LocalTeacher

MODEL = tiny.tiny_model()
BYTES = 4 * sum(p.numel() for p in MODEL.parameters())


def trainer(*, zero: int | None = None, fsdp: bool = False, device: str = "cpu") -> SimpleNamespace:
    """What of a trainer decides; sharding itself needs several devices."""
    return SimpleNamespace(
        is_deepspeed_enabled=zero is not None,
        is_fsdp_enabled=fsdp,
        args=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=zero)),
        teacher_model=MODEL,
        accelerator=SimpleNamespace(device=torch.device(device), unwrap_model=lambda model: model),
    )


def refused(says: str, **settings) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        LocalTeacher(trainer(**settings))
    for part in ("serve it", "--runner pooling", "--servers.teacher", "docs/scale.md"):
        assert part in str(error.value)


def test_zero_3_is_refused_and_its_lower_stages_are_not():
    refused("ZeRO-3 cuts the teacher's output head into pieces", zero=3)
    for settings in ({}, {"zero": 1}, {"zero": 2}):
        LocalTeacher(trainer(**settings))


def test_fsdp_refuses_a_teacher_that_fills_each_device(monkeypatch, caplog):
    memory = SimpleNamespace(total_memory=10 * BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    with caplog.at_level(logging.INFO):
        for device in ("cpu", "cuda"):
            LocalTeacher(trainer(fsdp=True, device=device))
    assert caplog.text.count("FSDP does not shard the teacher: each process holds all of it") == 2
    memory.total_memory = 2 * BYTES
    refused("FSDP does not shard the teacher, and its 0 GB would fill 50 % of every device", fsdp=True, device="cuda")
