"""A teacher that sharded training cannot hold is refused, and the words say where it should live."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny

from rocktokens.errors import ConfigError
from rocktokens.train.teacher import LocalTeacher


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_zero_3_is_refused_and_its_lower_stages_are_not(stage):
    """What of a trainer decides; sharding itself needs several devices."""
    trainer = SimpleNamespace(
        is_deepspeed_enabled=stage is not None,
        args=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage)),
        teacher_model=tiny.tiny_model(),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
    )
    if stage != 3:
        assert LocalTeacher(trainer).rows == tiny.VOCABULARY
        return
    with pytest.raises(ConfigError, match="ZeRO-3") as error:
        LocalTeacher(trainer)
    assert "--servers.teacher" in str(error.value)
