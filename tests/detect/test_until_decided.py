"""Prompts are added until everything is decided, within a budget and a number of looks."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from tiny import save_model, tiny_model

from rocktokens import open_run
from rocktokens.cli import main
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.stage import more_prompts
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.study import study
from rocktokens.study_settings import StudyConfig
from rocktokens.until_decided import next_prompts, prompts_for_detection, until_decided


@pytest.fixture
def config(tmp_path):
    """A study of two tiny models on twelve prompts, of which detection first uses eight."""
    save_model(tmp_path / "student", tiny_model(seed=1))
    save_model(tmp_path / "teacher", tiny_model(seed=2, width=48))
    rows = [{"prompt": f"w{3 + i} w{4 + i} w{5 + i % 7}"} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return StudyConfig(
        path=tmp_path / "run",
        stages=("sample", "score", "detect"),
        pair=PairConfig(student=str(tmp_path / "student"), teacher=str(tmp_path / "teacher")),
        prompts=PromptsConfig(source=str(tmp_path / "prompts.jsonl")),
        rollouts=RolloutConfig(max_new_tokens=12, num_rollouts=2),
        detection_prompts=8,
        detect=DetectConfig(until_decided=True, looks=2, resamples=100),
    )


def unclear(run, prompts_needed):
    """The run as if some types were unclear and so many prompts would settle them."""
    facts = run.facts("detect")
    run.finish("detect", {**facts, "enough": {"num_unclear": 1, "num_in_reach": 1, "prompts_needed": prompts_needed}})


def test_prompts_are_added_once_and_stay(config):
    study(config)
    run = open_run(config.path)
    assert run.facts("detect")["num_prompts"] == 8
    assert run.facts("detect")["q"] == pytest.approx(0.05)  # two looks share 0.10
    unclear(run, 11)
    until_decided(config)
    facts = open_run(config.path).facts("detect")
    assert (facts["num_prompts"], facts["look"], facts["prompts_asked"]) == (11, 2, 11)
    assert prompts_for_detection(config) == 11
    study(config)  # a study that is started again keeps what was added
    assert open_run(config.path).facts("detect")["num_prompts"] == 11


def test_the_printed_command_adds_the_prompts(config):
    study(config)
    for words in more_prompts(config.path, 10).split(" && "):
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(words)[1:])
        assert not stop.value.code
    assert open_run(config.path).facts("detect")["num_prompts"] == 10
    assert more_prompts(config.path, None) is None


def test_no_more_looks_than_allowed_nor_prompts_than_there_is_money_for(config):
    facts = {"enough": {"num_unclear": 2, "num_in_reach": 2, "prompts_needed": 500}, "num_prompts": 100}
    assert next_prompts(facts, config) == 500
    tight = replace(config, detect=replace(config.detect, budget_prompts=300))
    assert next_prompts(facts, tight) == 300
    assert next_prompts({**facts, "num_prompts": 300}, tight) is None
    assert next_prompts({**facts, "look": 2}, config) is None
    settled = {"num_unclear": 0, "num_in_reach": 0, "prompts_needed": None}
    assert next_prompts({**facts, "enough": settled}, config) is None
