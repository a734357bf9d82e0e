"""What a trainer's run says about where it came from."""

from __future__ import annotations

import json
from pathlib import Path

import distilling
import pytest

from rocktokens import RockDistillationTrainer, Run, open_run
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.settings import from_mapping


@pytest.fixture
def saved(tmp_path):
    names = {}
    for name, model in (("student", distilling.student()), ("teacher", distilling.teacher())):
        model.save_pretrained(tmp_path / name)
        distilling.tokenizer().save_pretrained(tmp_path / name)
        names[name] = str(tmp_path / name)
    return names


def made(path, saved, **settings):
    run = Run.create(path / "run")
    args = distilling.arguments(path / "out")
    data = settings.pop("data", distilling.dataset())
    RockDistillationTrainer(saved["student"], saved["teacher"], args, data, run=run, **settings)
    return open_run(path / "run")


def test_the_run_names_pair_prompts_and_tokenizer(tmp_path, saved):
    config = made(tmp_path, saved).manifest["config"]
    pair, prompts = from_mapping(PairConfig, config["pair"]), from_mapping(PromptsConfig, config["prompts"])
    assert (pair.student, pair.teacher) == (saved["student"], saved["teacher"])
    lines = Path(prompts.source).read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == distilling.dataset()["prompt"]
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").exists()
    assert "float32" in config["trainer"]["precision"]


def test_a_run_that_names_its_pair_is_left_as_it_is(tmp_path, saved):
    pair = {"student": "a", "teacher": "b"}
    Run.create(tmp_path / "run", {"pair": pair})
    assert made(tmp_path, saved).manifest["config"] == {"pair": pair}


def test_models_without_a_name_are_not_given_one(tmp_path):
    config = made(
        tmp_path,
        {"student": distilling.student(), "teacher": distilling.teacher()},
        processing_class=distilling.tokenizer(),
    ).manifest["config"]
    assert "pair" not in config
    assert config["trainer"]["student"] == ""


def test_a_stream_of_prompts_is_not_read_for_the_record(tmp_path, saved):
    config = made(tmp_path, saved, data=distilling.dataset().to_iterable_dataset()).manifest["config"]
    assert "prompts" not in config
