"""The command line as a user meets it, with right and with wrong input."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from small_runs import save_pair

from rocktokens import Run, open_run
from rocktokens.cli import main, parse, prepare, stage_command
from rocktokens.errors import RunError
from rocktokens.jobs import Place
from rocktokens.prompts.tasks import part_of
from rocktokens.settings import field_types
from rocktokens.study import STAGES, StudyConfig, _recording, load_settings, recipes


def rocktokens(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process (a fresh one would spend seconds on imports alone)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return subprocess.CompletedProcess(words, int(stop.value.code or 0), out.getvalue(), err.getvalue())


def refused(result: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    """One clear sentence, no traceback, the right exit status."""
    said = result.stderr + result.stdout
    assert result.returncode == status, said
    assert "Traceback" not in said
    for part in parts:
        assert part in said


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pair")
    save_pair(home, prompts=12)
    return home


def flags(pair: Path) -> list[str]:
    return [
        *("--pair.student", str(pair / "student"), "--pair.teacher", str(pair / "teacher")),
        *("--prompts", str(pair / "prompts.jsonl"), "--prompts.checker", "exact"),
        *("--rollouts.max-new-tokens", "12", "--rollouts.num-rollouts", "2"),
    ]


@pytest.fixture(scope="module")
def scored(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "scored"
    for words in (["sample", run, *flags(pair)], ["score", run]):
        result = rocktokens(*words)
        assert result.returncode == 0, result.stderr
    return run


def test_detect_from_the_shell(scored: Path, tmp_path: Path) -> None:
    result = rocktokens("detect", scored, "--k", "3", "--resamples", "100")
    assert result.returncode == 0, result.stderr
    assert len(open_run(scored).rocks()) <= 3
    assert rocktokens("geometry", scored).returncode == 0
    part = next((scored / "occurrences").rglob("*.parquet"))
    out = tmp_path / "foreign"
    result = rocktokens("detect", "--occurrences", part, "--out", out, "--resamples", "100")
    assert result.returncode == 0, result.stderr
    assert len(open_run(out).types()) > 0


def asked(*words: str | Path) -> Any:
    """The command that words ask for, without running it."""
    return parse([str(word) for word in words])


@pytest.mark.parametrize(
    ("words", "found", "value"),
    [
        ("study --distill.steps 10", "distill.steps", 10),
        ("distill RUN --distill.steps 10", "distill.steps", 10),
        ("distill RUN --steps 10", "distill.steps", 10),
        ("distill RUN --steps=10 --selector.name freeze", "distill.selector.name", "freeze"),
        ("score RUN --no-gradients", "score.gradients", False),
        ("score RUN --score.no-gradients", "score.gradients", False),
        ("compare RUN --problems 9", "compare.problems", 9),
        ("distill RUN --problems 9", "problems", 9),
        ("sample RUN --prompts mine.jsonl", "prompts.source", "mine.jsonl"),
        ("sample RUN --prompts=mine.jsonl", "prompts.source", "mine.jsonl"),
        ("distill --steps 10 RUN", "path", Path("RUN")),
        ("study --path RUN arithmetic", "path", Path("RUN")),
        ("study --distill.steps 7 market", "prompts.source", "market"),
        ("study --quick", "path", Path("runs/arithmetic-quick")),
        ("study market --quick", "prompts.source", "market"),
        ("study --quick --distill.steps 5", "distill.steps", 5),
        ("study qwen --pair.student a.gguf", "pair.dtype", "bfloat16"),
        ("study qwen --pair.student a.gguf", "pair.student", "a.gguf"),
    ],
)
def test_flags_and_recipes(words: str, found: str, value: object) -> None:
    command = asked(*words.split())
    for name in found.split("."):
        command = getattr(command, name)
    assert command == value


def test_a_studys_file_serves_every_command(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("distill: {steps: 7}\ndetect: {k: 3}\nproblems: 11\n")
    assert asked("study", config).distill.steps == 7
    assert asked("study", config, "--distill.steps", "8").distill.steps == 8
    own = parse(["distill", "RUN"], str(config))
    assert (own.distill.steps, own.problems) == (7, 11)
    assert parse(["distill", "RUN", "--steps", "8"], str(config)).distill.steps == 8
    assert parse(["detect", "RUN"], str(config)).detect.k == 3
    assert parse(["sample", "RUN"], str(config)).detection_prompts is None
    refused(rocktokens("distill", tmp_path, "--config"), 2, "--config")
    refused(rocktokens("distill", tmp_path, "--workers", "x"), 2, "--workers")
    config.write_text("distil: {steps: 7}\n")
    refused(rocktokens("distill", tmp_path, "--config", config), 2, "did you mean 'distill'")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("sampel", "sample"),
        ("sample", "RUN"),
        ("distill run --stepz 3", "--steps"),
        ("study --distil.steps 3", "--distill.steps"),
        ("detect run --detect.kk 3", "--k"),
        ("study arithmetik", "arithmetic"),
        ("detect --occurrences x", "--out"),
        ("sample run --workers 0", "workers takes"),
        ("import slim x.pt --tokenizer t --out r", "slime"),
        ("import slime x.pt", "--tokenizer"),
    ],
)
def test_wrong_usage_ends_with_status_two_and_names_the_remedy(words: str, near: str) -> None:
    refused(rocktokens(*words.split()), 2, near)


def test_where_shared_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    found = {words: prepare(["score", "RUN", *words.split()])[1] for words in ("", "--workers 2", "--ray auto")}
    assert found == {"": Place(ray="head:6379"), "--workers 2": Place(workers=2), "--ray auto": Place(ray="auto")}
    monkeypatch.delenv("RAY_ADDRESS")
    assert prepare(["score", "RUN"])[1] is None
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    refused(rocktokens("detect", "RUN"), 2, "--workers", "--ray")


def test_ctrl_c_ends_with_one_sentence(scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rocktokens.detect.stage.detect_rocks", pressed)
    refused(rocktokens("detect", scored, "--again"), 130, "rocktokens: stopped")


def test_help_is_made_from_the_registry() -> None:
    text = " ".join(rocktokens("--help").stdout.replace("│", " ").split())
    for spec in STAGES.values():
        assert spec.help in text
    short, whole = rocktokens("study", "--help").stdout, rocktokens("study", "--help-all").stdout
    for words in ("RECIPE", "--quick", "--dry-run", "--pair.student", "--prompts.source"):
        assert words in short
    assert "--compare.resamples" not in short
    assert "--compare.resamples" in whole
    flags = {"detect": "--kappa", "score": "--no-gradients Do not gather", "knockout": "--baseline.problems"}
    for name, flag in flags.items():
        assert flag in " ".join(rocktokens(name, "--help").stdout.replace("│", " ").split())


def test_every_stage_takes_what_the_registry_says() -> None:
    """Parameters in the registry are parameters of the function, and the settings of its own command."""
    for spec in STAGES.values():
        module, _, name = spec.work.partition(":")
        known = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert next(iter(known)) == "path"
        assert set(spec.arguments) <= set(known), spec.name
        assert set(spec.arguments.values()) <= set(field_types(StudyConfig))
        assert spec.shared or "place" not in known, spec.name
        command = stage_command(spec)(path=Path("RUN"))
        assert set(spec.arguments.values()) <= set(vars(command))


def test_the_schema_and_json_are_json(scored: Path) -> None:
    assert "StudyConfig" in json.loads(rocktokens("schema").stdout)["$defs"]
    found = json.loads(rocktokens("score", scored, "--json").stdout)
    assert set(found) >= {"score", "score/step=0"}


# ---------------------------------------------------------------- a study and its run


def test_a_study_continues_without_its_flags(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "mine", {"distill": {}})
    config = dataclasses.replace(recipes()["arithmetic"](), path=run.path, problems=7)
    with _recording(config, "sample"):
        run.finish("sample", {})
    assert "path" not in open_run(run.path).manifest["study"]
    assert load_settings(run.path) == config
    again = asked("study", run.path)
    assert (again.path, again.problems) == (run.path, 7)
    assert asked("study", run.path, "--problems", "9").problems == 9
    with pytest.raises(RunError), _recording(dataclasses.replace(config, problems=9), "score"):
        raise RunError("refused")
    assert load_settings(run.path) == config
    # In a run of single commands the settings of its stages serve.
    run = Run.create(tmp_path / "other", {"pair": {"student": "s", "teacher": "t"}, "distill": {"steps": 12}})
    found = load_settings(run.path)
    assert (found.pair.teacher, found.distill.steps) == ("t", 12)


@pytest.mark.parametrize(("words", "name"), [(["qwen"], "qwen"), (["market"], "market"), ([], "arithmetic")])
def test_quick_ends_with_the_whole_study_of_the_same_recipe(words, name, monkeypatch, tmp_path) -> None:
    said: dict = {}
    monkeypatch.setattr("rocktokens.cli.study", lambda config, **more: said.update(more))
    Run.create(tmp_path / "run", {})
    asked("study", *words, "--quick", "--path", tmp_path / "run").run()
    assert said["note"].endswith(f"The whole study: rocktokens study {name}.")
    assert "60 steps of" in said["note"]
    assert "2 regimes × 1 seed, 30 steps, 200 prompts" in said["note"]


def test_a_dry_run_says_what_it_would_take_and_does_nothing(tmp_path: Path) -> None:
    text = rocktokens("study", "--quick", "--dry-run", "--path", tmp_path / "run").stdout
    assert not (tmp_path / "run").exists()
    for words in ("time ", "memory ", "disk ", "150 for detection", *STAGES, "Nothing was run"):
        assert words in text


@pytest.mark.parametrize("rows", [20, 600])
def test_a_dry_run_promises_what_the_file_has(tmp_path: Path, rows: int) -> None:
    pair, prompts = save_pair(tmp_path / "pair", prompts=rows)
    words = [
        "--pair.student",
        pair.student,
        "--pair.teacher",
        pair.teacher,
        "--prompts",
        prompts.source,
        "--prompts.checker",
        "exact",
    ]
    text = rocktokens("study", "--quick", "--dry-run", "--path", tmp_path / "run", *words).stdout
    detection = sum(
        part_of(json.loads(line)["prompt"]) == "detection" for line in Path(prompts.source).read_text().splitlines()
    )
    assert f"{min(detection, 150)} for detection" in " ".join(text.split())
    assert f"{min(detection, 150)} prompts × " in " ".join(text.split())


RECIPES = sorted((Path(__file__).parents[1] / "examples" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_file_is_a_study(file: Path) -> None:
    study = asked("study", file)
    assert study.pair.student
    assert study.pair.teacher
    assert study.distill.max_new_tokens <= study.rollouts.max_new_tokens
    assert study.path.parts[0] == "runs"
    rollouts = study.distill.prompts_per_step * study.distill.rollouts_per_prompt
    for processes in (1, 8):
        assert rollouts % processes == 0
        assert rollouts // processes % (study.distill.micro_batch or 1) == 0
    # Grafts on servers need a teacher that generates; the file's comment has the command.
    assert "--servers.student" not in file.read_text() or "generates" in file.read_text()
