"""The freshness rule holds for every setting of every stage, generated from the configuration tree."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

import pytest

from rocktokens.causal.graft_settings import GraftConfig
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.compare.settings import CompareConfig
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import ConfigError
from rocktokens.geometry.settings import GeometryConfig
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.settings import ScoreConfig
from rocktokens.settings import IMMATERIAL, PERMISSION
from rocktokens.stage import Stage
from rocktokens.train.settings import DistillConfig

CONFIGS = (
    PairConfig,
    PromptsConfig,
    DistillConfig,
    RolloutConfig,
    ScoreConfig,
    DetectConfig,
    GeometryConfig,
    BaselineConfig,
    KnockoutConfig,
    GraftConfig,
    CompareConfig,
)
OTHERS = (True, False, 1, 2, 3, 5, 8, 0.25, 0.5, 0.75, "another", ("another",), (7,), None)


def fits(hint: Any, value: Any) -> bool:
    """Whether a value has a type that the field takes."""
    from rocktokens.settings import _fits

    return _fits(hint, value)


def choices(hint: Any) -> list[Any]:
    """Values to try for a field: the words of its Literals first."""
    literals = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is Literal]
    words = [word for part in literals for word in typing.get_args(part)]
    return [*words, *((word,) for word in words), *OTHERS]


def changed_by(config: Any, name: str, hint: Any) -> Any | None:
    """The configuration with another valid value of one field; None where none of the tried ones is valid alone."""
    now = getattr(config, name)
    for value in choices(hint):
        if fits(hint, value) and value != now:
            try:
                return dataclasses.replace(config, **{name: value})
            except ConfigError:
                continue
    return None


def fields() -> list[Any]:
    found = []
    for kind in CONFIGS:
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            if not dataclasses.is_dataclass(hints[item.name]):
                found.append(pytest.param(kind, item, hints[item.name], id=f"{kind.__name__}.{item.name}"))
    return found


@pytest.mark.parametrize(("kind", "item", "hint"), fields())
def test_a_changed_setting_is_seen_unless_it_changes_no_result(kind, item, hint, tmp_path):
    before = kind()
    after = changed_by(before, item.name, hint)
    if after is None:
        pytest.skip(f"{item.name} has no other value that is valid by itself")
    Stage(Run.create(tmp_path / "run"), "work", {"work": before}, {}).finish()
    stage = Stage(open_run(tmp_path / "run"), "work", {"work": after}, {})
    ignored = item.metadata.get(IMMATERIAL) or item.metadata.get(PERMISSION)
    assert bool(stage.changed_settings()) != bool(ignored)
    assert stage.is_complete() == bool(ignored)


def test_nearly_every_setting_is_tried():
    tried = sum(changed_by(kind(), item.name, hint) is not None for kind, item, hint in (p.values for p in fields()))
    assert tried >= 0.9 * len(fields())
