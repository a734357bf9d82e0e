"""Help in two levels, and the words of `study`: a run, a recipe, quick, a dry run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rocktokens.commands import COMMANDS
from rocktokens.everyday import EVERYDAY, everyday_help, field_docs, setting

from rocktokens.cli import _parse, main
from rocktokens.run import Run
from rocktokens.study import (
    SETTINGS,
    StudyConfig,
    disk_needed,
    load_settings,
    plan,
    prompts_needed,
    quick,
    recipes,
    save_settings,
)


def output(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(EVERYDAY))
def test_everyday_help_is_short_has_an_example_and_names_only_what_exists(name):
    text = everyday_help(name, COMMANDS[name], recipes())
    assert len(text.splitlines()) < 60
    assert "rocktokens" in text.split("usage:")[1].split("\n", 2)[2]
    assert f"rocktokens {name} --help-all" in text
    assert all(len(line) <= 90 for line in text.splitlines())
    for field in EVERYDAY[name]:
        found = setting(COMMANDS[name], field)
        assert found is not None, field
        assert found[0], f"{field} is not described"


def test_study_help_names_recipe_config_and_prompts(capsys):
    text = output(capsys, "study", "--help")
    for words in ("RECIPE", "--config FILE", "--prompts FILE", "--quick", "--dry-run", "--pair.student"):
        assert words in text
    assert len([line for line in text.splitlines() if line.startswith("  --")]) <= 18


def test_help_all_lists_every_setting(capsys):
    text = output(capsys, "study", "--help-all")
    assert "--compare.resamples" in text
    assert "--detect.gamma-share" in text


def test_docs_stand_below_their_fields():
    @dataclasses.dataclass
    class Example:
        a: int = 1
        """First
        of two."""
        b: int = 2

    assert field_docs(Example) == {"a": "First of two."}


def test_a_study_goes_on_without_its_flags(tmp_path):
    run = Run.create(tmp_path / "mine", {})
    config = _parse("study", ["--path", str(run.path), "--pair.student", "s", "--pair.teacher", "t", "--problems", "7"])
    save_settings(StudyConfig(**{item.name: getattr(config, item.name) for item in dataclasses.fields(StudyConfig)}))
    again = _parse("study", [str(run.path)])
    assert (again.path, again.pair.student, again.problems) == (run.path, "s", 7)
    assert _parse("study", [str(run.path), "--problems", "9"]).problems == 9


def test_without_a_record_of_the_study_the_stages_settings_serve(tmp_path):
    run = Run.create(tmp_path / "mine", {"pair": {"student": "s", "teacher": "t"}, "distill": {"steps": 12}})
    found = load_settings(run.path)
    assert (found.pair.teacher, found.distill.steps) == ("t", 12)
    assert not (run.path / SETTINGS).exists()


def test_a_damaged_record_is_named(tmp_path):
    run = Run.create(tmp_path / "mine", {})
    (run.path / SETTINGS).write_text("{")
    with pytest.raises(SystemExit) as end:
        main(["study", str(run.path)])
    assert end.value.code == 1


def test_quick_is_small_true_and_open_to_flags():
    config = _parse("study", ["--quick"])
    assert config.path == Path("runs/arithmetic-quick")
    assert config.stages == StudyConfig().stages
    assert config.distill.steps < recipes()["arithmetic"]().distill.steps
    assert _parse("study", ["market", "--quick"]).prompts.source == "market"
    assert _parse("study", ["--quick", "--distill.steps", "5"]).distill.steps == 5


@pytest.mark.parametrize(("words", "name"), [(["qwen"], "qwen"), (["market"], "market"), ([], "arithmetic")])
def test_quick_ends_with_the_whole_study_of_the_same_recipe(words, name, monkeypatch):
    said = {}
    monkeypatch.setattr("rocktokens.study.study", lambda config, **more: said.update(more))
    _parse("study", [*words, "--quick"]).run()
    assert said["note"].endswith(f"The whole study: rocktokens study {name}.")


def test_a_dry_run_says_what_it_would_take_and_does_nothing(tmp_path, capsys):
    text = output(capsys, "study", "--quick", "--dry-run", "--path", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    for words in ("time ", "memory ", "disk ", "prompts ", "distill", "compare", "Nothing was run"):
        assert words in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line and "/" not in line)


def test_plans_grow_with_the_settings(tmp_path):
    small = dataclasses.replace(quick(recipes()["arithmetic"]()), path=tmp_path / "run")
    large = dataclasses.replace(small, distill=dataclasses.replace(small.distill, steps=6000))
    seconds = [{item.name: item.seconds for item in plan(config)} for config in (small, large)]
    assert seconds[1]["distill"] > 10 * seconds[0]["distill"]
    assert disk_needed(large, 10**6) > disk_needed(small, 10**6)
    needed = prompts_needed(small)
    assert needed["detection"] == 150
    assert "comparison" not in prompts_needed(dataclasses.replace(small, stages=("sample",)))


def test_settings_are_plain_json(tmp_path):
    run = Run.create(tmp_path / "run", {})
    save_settings(dataclasses.replace(recipes()["arithmetic"](), path=run.path))
    kept = json.loads((run.path / SETTINGS).read_text())
    assert "path" not in kept
    assert dataclasses.replace(load_settings(run.path)) == dataclasses.replace(recipes()["arithmetic"](), path=run.path)
