"""Settings: constraints in types, YAML and manifests and back, JSON Schema, and freshness for every field."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from rocktokens.compare.settings import CompareConfig
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import ConfigError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.settings import (
    IMMATERIAL,
    PERMISSION,
    field_docs,
    field_types,
    from_mapping,
    load_yaml,
    schema,
    to_mapping,
)
from rocktokens.stage import Stage
from rocktokens.study import StudyConfig
from rocktokens.train.settings import DistillConfig

SECTIONS = [hint for hint in field_types(StudyConfig).values() if dataclasses.is_dataclass(hint)]


def test_round_trip_keeps_what_decides_the_result() -> None:
    config = RolloutConfig(num_rollouts=7, temperature=0.5, top_p=0.9, batch_size=3)
    again = from_mapping(RolloutConfig, to_mapping(config))
    assert again == RolloutConfig(num_rollouts=7, temperature=0.5, top_p=0.9)  # the batch size decides nothing
    assert to_mapping(CompareConfig())["regimes"] == ["uniform", "freeze", "random"]
    assert to_mapping(StudyConfig())["path"] == "runs/study"


@pytest.mark.parametrize(
    ("kind", "values", "word"),
    [
        (RolloutConfig, {"num_rollouts": "four"}, r"rollouts.num_rollouts takes a whole number.* got 'four'"),
        (RolloutConfig, {"num_rollouts": True}, "num_rollouts"),
        (RolloutConfig, {"greedy": 1}, "true or false"),
        (RolloutConfig, {"top_k": 1.5}, "or nothing"),
        (RolloutConfig, {"temperature": 0}, "above 0"),
        (RolloutConfig, {"seed": -1}, "at least 0"),
        (RolloutConfig, {"temprature": 1.0}, "did you mean 'temperature'"),
        (RolloutConfig, {"greedy": True}, "all alike"),
        (PairConfig, {"zzz": 1}, "there are: student, teacher"),
        (PairConfig, {"threads": 99_999_999}, "at most"),
        (PromptsConfig, {"source": "\ud800"}, "text"),
        (PromptsConfig, {"source": "a\0b"}, "text"),
        (DetectConfig, {"definition": "loss"}, "certified, burden, context"),
        (DetectConfig, {"window": 100_000}, "at most 512"),  # 11 GB on a run of 600 rollouts
        (DistillConfig, {"learning_rate": float("nan")}, "learning_rate"),
        (DistillConfig, {"learning_rate": float("inf")}, "learning_rate"),
        (DistillConfig, {"learning_rate": "fast"}, "learning_rate"),
        (DistillConfig, {"selector": {"nam": "freeze"}}, r"selector\.nam"),
        (CompareConfig, {"regimes": []}, "regimes"),
        (StudyConfig, {"distill": 3}, "is a section"),
        (StudyConfig, {"stages": ["sampel"]}, "stages"),
    ],
)
def test_a_wrong_value_is_one_sentence(kind: type, values: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        from_mapping(kind, values)


def test_values_are_converted_to_the_type_of_the_field() -> None:
    assert isinstance(from_mapping(RolloutConfig, {"temperature": 2}).temperature, float)
    assert from_mapping(StudyConfig, {"path": "x", "stages": ["detect"]}).path == Path("x")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"", "nothing"),
        (b"# nothing here\n", "nothing"),
        (b"pair: [1, 2", "not valid YAML"),
        (b"- a\n- b\n", "must hold sections"),
        (b"distill:\n  steps: 3\ndistill:\n  steps: 4\n", "distill stands there twice"),
        (b"distill:\n  steps: 3\n  keep: 1\n  steps: 4\n", "steps stands there twice"),
        (b"a: caf\xe9\n", "not valid YAML"),
        (
            b"a0: &a0 [1, 1]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40)),
            "alias",
        ),
        (b"a: &a [*a]\n", "alias"),
    ],
)
def test_yaml_that_is_refused(tmp_path: Path, text: bytes, word: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=word):
        load_yaml(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path / "none.yaml")


def test_yaml_reads_an_exponent_without_a_dot_as_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("learning_rate: 1e-4\nreport_to: [1e-4x]\n")
    read = from_mapping(DistillConfig, load_yaml(tmp_path / "a.yaml"))
    assert (read.learning_rate, read.report_to) == (1e-4, ("1e-4x",))


def test_the_schema_describes_every_setting() -> None:
    found = schema(StudyConfig)
    json.dumps(found, allow_nan=False)
    rollouts = found["$defs"]["RolloutConfig"]
    assert rollouts["properties"]["num_rollouts"]["minimum"] == 1
    assert "description" in rollouts["properties"]["temperature"]
    assert rollouts["additionalProperties"] is False
    assert set(found["$defs"]["StudyConfig"]["properties"]) == set(field_types(StudyConfig))


def settings_of(kinds: list[Any]) -> list[Any]:
    """(class, field) of every setting that is no section."""
    found = []
    for kind in kinds:
        inner = [hint for hint in field_types(kind).values() if dataclasses.is_dataclass(hint)]
        own = [item for item in dataclasses.fields(kind) if field_types(kind)[item.name] not in inner]
        found += [pytest.param(kind, item, id=f"{kind.__name__}.{item.name}") for item in own] + settings_of(inner)
    return found


def other_value(kind: Any, item: Any) -> Any | None:
    """The class with another valid value of one field; None where no tried value is valid by itself."""
    hint = field_types(kind)[item.name]
    parts = (hint, *typing.get_args(hint), *(arg for part in typing.get_args(hint) for arg in typing.get_args(part)))
    words = [word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)]
    tries = (True, False, 1, 2, 3, 5, 8, 200, 0.25, 0.5, 0.75, "another", ("another",), (7,), None)
    for value in [*words, *((word,) for word in words), *tries]:
        try:
            if msgspec.convert(value, hint) != getattr(kind(), item.name):
                return dataclasses.replace(kind(), **{item.name: value})
        except (msgspec.ValidationError, ConfigError):
            continue
    return None


@pytest.mark.parametrize(("kind", "item"), settings_of(SECTIONS))
def test_a_changed_setting_is_seen_unless_it_changes_no_result(kind: Any, item: Any, tmp_path: Path) -> None:
    after = other_value(kind, item)
    assert item.name in field_docs(kind), "every setting has a docstring"
    if after is None:
        pytest.skip(f"{item.name} has no other value that is valid by itself")
    Stage(Run.create(tmp_path / "run"), "work", {"work": kind()}, {}).finish()
    stage = Stage(open_run(tmp_path / "run"), "work", {"work": after}, {})
    ignored = bool({IMMATERIAL, PERMISSION} & set(item.metadata))
    assert bool(stage.changed_settings()) != ignored
    assert stage.is_complete() == ignored
