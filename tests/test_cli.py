"""The command line as a user meets it, with right and with wrong input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tiny import save_model, tiny_model, tiny_tokenizer

from rocktokens import open_run
from rocktokens.cli import main


def rocktokens(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process (a fresh one would spend seconds on imports alone)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return subprocess.CompletedProcess(words, int(stop.value.code or 0), out.getvalue(), err.getvalue())


def in_shell(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rocktokens.cli", *words], capture_output=True, text=True, timeout=120)


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
    """A student, a teacher with two padding rows more, and prompts."""
    home = tmp_path_factory.mktemp("pair")
    save_model(home / "student", tiny_model(seed=1))
    save_model(home / "teacher", tiny_model(seed=2, width=48, vocabulary=66))
    rows = [{"prompt": f"w{3 + i} w{4 + i} w{5 + i % 7}"} for i in range(12)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def flags(pair: Path) -> list[str]:
    return [
        *("--pair.student", str(pair / "student"), "--pair.teacher", str(pair / "teacher")),
        *("--prompts", str(pair / "prompts.jsonl"), "--rollouts.max-new-tokens", "12", "--rollouts.num-rollouts", "2"),
    ]


@pytest.fixture(scope="module")
def scored(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "scored"
    for words in (["sample", run, *flags(pair)], ["score", run]):
        result = rocktokens(*words)
        assert result.returncode == 0, result.stderr
    return run


def test_help_and_version_answer_at_once() -> None:
    for word in ("--help", "--version"):
        start = time.perf_counter()
        result = in_shell(word)
        assert result.returncode == 0
        assert time.perf_counter() - start < 2.0  # 0.06 s on a quiet machine; the promise is 0.5 s
    assert "rocktokens 0." in in_shell("--version").stdout


def test_a_run_from_the_shell(scored: Path) -> None:
    run = open_run(scored)
    assert run.done("sample")
    assert run.done("score")
    occurrences, rollouts = run.occurrences(), run.read("rollouts")
    assert len(rollouts) == 24
    assert len(occurrences) == sum(len(ids) for ids in rollouts["token_ids"].to_pylist())


def test_a_complete_stage_does_nothing_again(scored: Path) -> None:
    part = next((scored / "occurrences").rglob("*.parquet"))
    before = part.stat().st_mtime_ns
    result = rocktokens("score", scored)
    assert result.returncode == 0
    assert "nothing to do" in result.stderr
    assert part.stat().st_mtime_ns == before


def test_sampling_goes_on_where_it_stopped(pair: Path, scored: Path, tmp_path: Path) -> None:
    run = tmp_path / "again"
    assert rocktokens("sample", run, *flags(pair)).returncode == 0
    whole = open_run(run).read("rollouts")
    assert whole.equals(open_run(scored).read("rollouts"))  # the same settings give the same rollouts
    # As if killed after the first part: the manifest does not list the stage, and the part is there.
    manifest = json.loads((run / "run.json").read_text())
    del manifest["stages"]["sample"]
    (run / "run.json").write_text(json.dumps(manifest))
    (run / "rollouts.parquet").unlink()
    (run / "rollouts.parts").mkdir()
    pq.write_table(whole, run / "rollouts.parts" / "00000.parquet")
    assert rocktokens("sample", run, *flags(pair)).returncode == 0
    assert open_run(run).read("rollouts").equals(whole)


def test_check_says_that_the_pair_fits(pair: Path) -> None:
    result = rocktokens("check", *flags(pair)[:4])
    assert result.returncode == 0, result.stderr
    assert "The pair fits: 64 token types" in result.stdout
    assert "Memory" in result.stdout
    assert "Time" in result.stdout


def test_yaml_fills_the_configuration(pair: Path, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"pair: {{student: {pair / 'student'}, teacher: {pair / 'teacher'}}}\n"
        f"prompts: {{source: {pair / 'prompts.jsonl'}, limit: 2}}\n"
        "rollouts: {num_rollouts: 1, max_new_tokens: 5}\n"
    )
    run = tmp_path / "run"
    result = rocktokens("sample", run, "--config", config, "--rollouts.max-new-tokens", "3")
    assert result.returncode == 0, result.stderr
    rollouts = open_run(run).read("rollouts")
    assert len(rollouts) == 2
    assert max(map(len, rollouts["token_ids"].to_pylist())) <= 3  # a flag wins over the file
    config.write_text("rollouts: {temprature: 1}\n")
    refused(rocktokens("sample", run, "--config", config), 2, "rollouts.temprature", "did you mean 'temperature'")


def test_wrong_words_are_refused_with_the_nearest(pair: Path, tmp_path: Path) -> None:
    refused(rocktokens("sampel"), 2, "did you mean 'sample'")
    refused(rocktokens("sample"), 2, "Missing from rocktokens sample", "DIRECTORY")
    refused(rocktokens("sample", tmp_path / "x", "--rollouts.temprature", "1"), 2, "--rollouts.temperature")
    refused(rocktokens("sample", tmp_path / "x", *flags(pair), "--rollouts.temperature", "0"), 2, "temperature")


def test_a_missing_or_half_written_model(pair: Path, tmp_path: Path) -> None:
    teacher = ["--pair.teacher", str(pair / "teacher")]
    refused(rocktokens("check", "--pair.student", tmp_path / "none", *teacher), 2, "there is no directory")
    (tmp_path / "empty").mkdir()
    refused(rocktokens("check", "--pair.student", tmp_path / "empty", *teacher), 2, "holds no config.json")
    half = tmp_path / "half"
    save_model(half, tiny_model(seed=1))
    weights = half / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    words = ["sample", tmp_path / "run", "--pair.student", half, *teacher, "--prompts", pair / "prompts.jsonl"]
    refused(rocktokens(*words), 2, "half-written", str(half))


def test_pickled_weights_are_refused_unless_asked_for(pair: Path, tmp_path: Path) -> None:
    import torch

    model = tiny_model(seed=1)
    save_model(tmp_path / "pickled", model)
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    words = ["sample", tmp_path / "run", *flags(pair)]
    words[words.index(str(pair / "student"))] = str(tmp_path / "pickled")
    refused(rocktokens(*words), 2, "safetensors", "--pair.allow-pickle")
    assert rocktokens(*words, "--pair.allow-pickle").returncode == 0


def test_tokenizers_that_differ_are_refused(pair: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer()
    other.backend_tokenizer.model = type(other.backend_tokenizer.model)(
        {{"w9": "x9"}.get(word, word): number for word, number in other.get_vocab().items()}, unk_token="<pad>"
    )
    save_model(tmp_path / "other", tiny_model(seed=3), other)
    result = rocktokens("check", "--pair.student", pair / "student", "--pair.teacher", tmp_path / "other")
    refused(result, 2, "id 9 is 'w9' for the student, 'x9' for the teacher")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["no prompts"]),
        ('{"prompt": "w3"}\n{"prompt": \n', ["line 2", "not valid JSON"]),
        (json.dumps({"prompt": " ".join(["w5"] * 200)}) + "\n", ["context of 96 tokens", "200"]),
        ('{"question": "w3"}\n', ["'question'", "--prompts.prompt-field"]),
    ],
)
def test_bad_prompt_files(pair: Path, tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    words = ["sample", tmp_path / "run", *flags(pair)]
    words[words.index(str(pair / "prompts.jsonl"))] = str(tmp_path / "bad.jsonl")
    refused(rocktokens(*words), 1, *parts)


def test_a_run_made_with_another_configuration(pair: Path, scored: Path) -> None:
    result = rocktokens("sample", scored, *flags(pair), "--rollouts.seed", "9")
    refused(result, 1, "another configuration", "rollouts.seed was 0, now 9")


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    refused(rocktokens("score", tmp_path), 1, "is no run")
    (tmp_path / "notes.txt").write_text("mine")
    refused(rocktokens("sample", tmp_path), 1, "not empty")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_truncated_part_is_named(pair: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert rocktokens("sample", run, *flags(pair)).returncode == 0
    assert rocktokens("score", run).returncode == 0
    part = next((run / "occurrences").rglob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    refused(rocktokens("detect", run), 1, part.name)


def test_nan_logits_name_the_rollout_and_keep_the_row(pair: Path, tmp_path: Path) -> None:
    import torch

    run = tmp_path / "run"
    assert rocktokens("sample", run, *flags(pair)).returncode == 0
    # The student is damaged after it sampled: one token's embedding is NaN, and so is everything after that token.
    damaged = tiny_model(seed=1)
    token = open_run(run).read("rollouts")["token_ids"].to_pylist()[0][0]
    with torch.no_grad():
        damaged.get_input_embeddings().weight[token] = torch.nan
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"]["pair"]["student"] = save_model(tmp_path / "damaged", damaged)
    (run / "run.json").write_text(json.dumps(manifest))
    result = rocktokens("score", run)
    assert result.returncode == 0, result.stderr
    first = open_run(run).read("rollouts")["rollout_id"].to_pylist()[0]
    assert first in open_run(run).facts("score/step=0")["invalid_rollouts"]
    assert "NaN" in result.stderr
    rows = open_run(run).occurrences("select isnan(kl) as bad, count(*) as n from occurrences group by 1 order by 1")
    assert [row["bad"] for row in rows.to_pylist()] == [False, True]


def test_score_before_sample_says_what_to_run(tmp_path: Path) -> None:
    from rocktokens import Run

    Run.create(tmp_path / "fresh", {})
    refused(rocktokens("score", tmp_path / "fresh"), 1, "rocktokens sample")


def test_unknown_checkpoint_lists_those_there_are(scored: Path) -> None:
    refused(rocktokens("score", scored, "--checkpoints", "7"), 2, "no checkpoint 7; it has 0")


def test_detect_takes_all_cores_and_leaves_one_to_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    from rocktokens.parallel import num_threads

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for command, threads in (("detect", 8), ("geometry", 1)):
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            monkeypatch.setenv(variable, "")  # so that what the command sets is undone
            monkeypatch.delenv(variable)
        rocktokens(command, "--help")
        assert num_threads() == threads
        assert "1" in (os.environ.get("OPENBLAS_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rocktokens("detect", "--help")
    assert num_threads() == 3  # as told


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


def asked(*words: str | Path) -> object:
    """The command that words ask for, without running it."""
    from rocktokens.cli import _parse

    return _parse(str(words[0]), [str(word) for word in words[1:]])


def test_a_setting_has_one_flag_name_wherever_it_is_used() -> None:
    """Every section of a stage's command is a section of the study, with the same fields."""
    import dataclasses
    import typing

    from rocktokens.commands import COMMANDS

    from rocktokens.study import StudyConfig

    study = typing.get_type_hints(StudyConfig)
    for name, kind in COMMANDS.items():
        hints = typing.get_type_hints(kind)
        sections = {item.name: hints[item.name] for item in dataclasses.fields(kind) if item.name in study}
        assert all(study[section] == hint for section, hint in sections.items() if section != "path"), name
    for stage, section in (
        ("distill", "distill"),
        ("sample", "rollouts"),
        ("detect", "detect"),
        ("compare", "compare"),
    ):
        assert COMMANDS[stage].section == section
        assert typing.get_type_hints(COMMANDS[stage])[section] == study[section]


def test_long_and_short_flags_mean_the_same(tmp_path: Path) -> None:
    assert asked("study", "--distill.steps", "10").distill.steps == 10
    assert asked("distill", tmp_path, "--distill.steps", "10").distill.steps == 10
    assert asked("distill", tmp_path, "--steps", "10").distill.steps == 10
    assert asked("distill", tmp_path, "--steps=10", "--selector.name", "freeze").distill.selector.name == "freeze"
    assert asked("score", tmp_path, "--no-gradients").score.gradients is False
    assert asked("score", tmp_path, "--score.no-gradients").score.gradients is False
    assert asked("compare", tmp_path, "--problems", "9").compare.problems == 9
    assert asked("distill", tmp_path, "--problems", "9").problems == 9
    assert asked("sample", tmp_path, "--prompts", "mine.jsonl").prompts.source == "mine.jsonl"


def test_the_run_may_stand_anywhere_among_the_flags(tmp_path: Path) -> None:
    assert asked("distill", "--steps", "10", tmp_path).path == tmp_path
    assert asked("study", "--path", tmp_path, "arithmetic").path == tmp_path
    assert asked("study", "--distill.steps", "7", "market").prompts.source == "market"


def test_a_studys_file_serves_every_command(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("distill: {steps: 7}\ndetect: {k: 3}\nproblems: 11\n")
    assert asked("study", config).distill.steps == 7
    assert asked("distill", tmp_path, "--config", config).distill.steps == 7
    assert asked("distill", tmp_path, "--config", config).problems == 11
    assert asked("distill", tmp_path, "--config", config, "--steps", "8").distill.steps == 8
    assert asked("detect", tmp_path, "--config", config).detect.k == 3
    config.write_text("steps: 7\n")
    assert asked("distill", tmp_path, "--config", config).distill.steps == 7
    refused(rocktokens("distill", tmp_path, "--config"), 2, "--config needs a YAML file")
    config.write_text("distil: {steps: 7}\n")
    refused(rocktokens("distill", tmp_path, "--config", config), 2, "did you mean 'distill'")


def test_flags_that_switch_off_say_so() -> None:
    """A setting that is on by default has a flag that begins with no-, and its help begins with "Do not"."""
    import dataclasses
    import typing

    from rocktokens.commands import COMMANDS

    def check(kind: type) -> int:
        hints, found = typing.get_type_hints(kind, include_extras=True), 0
        for item in dataclasses.fields(kind):
            inner = getattr(item, "default_factory", None)
            if dataclasses.is_dataclass(inner):
                found += check(inner)
            if item.default is True:
                said = [note.documentation for note in typing.get_args(hints[item.name])[1:]]
                assert said, f"{kind.__name__}.{item.name} needs Annotated[bool, Doc('Do not ...')]"
                assert said[0].startswith("Do not ")
                found += 1
        return found

    assert sum(map(check, COMMANDS.values())) >= 3
    for command, flag, said in (("score", "--score.no-gradients", "Do not gather"),):
        assert f"{flag} {said}" in " ".join(rocktokens(command, "--help").stdout.split())


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["distill", "run", "--stepz", "3"], "--distill.steps"),
        (["study", "--distil.steps", "3"], "--distill.steps"),
        (["detect", "run", "--detect.kk", "3"], "--detect.k"),
        (["study", "arithmetik"], "arithmetic"),
    ],
)
def test_wrong_flags_end_with_status_two_and_the_nearest_name(words: list[str], near: str) -> None:
    refused(rocktokens(*words), 2, near)


def test_help_says_of_every_command_what_its_class_says() -> None:
    from rocktokens.commands import COMMANDS

    from rocktokens.cli import SUMMARIES

    assert {name: kind.__doc__.splitlines()[0] for name, kind in COMMANDS.items()} == SUMMARIES
