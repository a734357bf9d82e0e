"""Configurations from YAML and back: what is wrong is refused by name, and what is right survives the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import ConfigError
from rocktokens.models.settings import PairConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.settings import from_mapping, load_yaml, to_mapping


def test_round_trip_keeps_what_decides_the_result() -> None:
    config = RolloutConfig(num_rollouts=7, temperature=0.5, top_p=0.9, batch_size=3)
    again = from_mapping(RolloutConfig, to_mapping(config))
    assert again == RolloutConfig(num_rollouts=7, temperature=0.5, top_p=0.9)  # the batch size decides nothing


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting rollouts\.temprature; did you mean 'temperature'"):
        from_mapping(RolloutConfig, {"temprature": 1.0}, "rollouts.")


def test_unknown_key_with_nothing_near_lists_all() -> None:
    with pytest.raises(ConfigError, match="there are: student, teacher"):
        from_mapping(PairConfig, {"zzz": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_rollouts": "four"}, "num_rollouts cannot be 'four'; it takes a whole number"),
        ({"num_rollouts": True}, "num_rollouts cannot be True"),
        ({"greedy": 1}, "greedy cannot be 1; it takes true or false"),
        ({"top_k": 1.5}, "top_k cannot be 1.5; it takes a whole number or nothing"),
        ({"temperature": 0}, "for greedy decoding pass greedy=True"),
    ],
)
def test_bad_values_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(RolloutConfig, values)


def test_choices_are_listed() -> None:
    with pytest.raises(ConfigError, match="burden, context, excess"):
        from_mapping(DetectConfig, {"definition": "loss"})


def test_whole_numbers_become_floats_where_floats_are_meant() -> None:
    assert isinstance(from_mapping(RolloutConfig, {"temperature": 2}).temperature, float)


@pytest.mark.parametrize("text", ["", "# nothing here\n", "---\n", "null\n"])
def test_an_empty_file_does_not_start_what_nobody_asked_for(tmp_path, text):
    (tmp_path / "empty.yaml").write_text(text)
    with pytest.raises(ConfigError, match="holds no setting"):
        load_yaml(tmp_path / "empty.yaml")


def test_yaml_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_yaml(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("pair: [1, 2")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_yaml(broken)
    broken.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="must hold sections"):
        load_yaml(broken)
