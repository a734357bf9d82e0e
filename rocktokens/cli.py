"""The command line: flags become a configuration, the configuration goes to the pipeline. It decides nothing.

Nothing heavy is imported before a command is known to be valid, so that help and mistakes answer at once.
Exit status: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from rocktokens import __version__
from rocktokens.config import (
    BaselineConfig,
    DetectConfig,
    DistillConfig,
    GeometryConfig,
    GraftConfig,
    KnockoutConfig,
    PairConfig,
    PromptsConfig,
    RolloutConfig,
    ScoreConfig,
)
from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.study import StudyConfig, recipes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StudyCommand(StudyConfig):
    """Run the whole story: distil, sample, score, find the rocks; `study RECIPE` or `study config.yaml`."""

    def run(self) -> None:
        from rocktokens.study import study

        study(_part(StudyConfig, self))


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Say whether a student and a teacher fit, and what a run will need."""

    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)

    def run(self) -> None:
        from rocktokens.check import check

        check(self.pair, self.prompts, self.rollouts)


@dataclass(frozen=True, kw_only=True)
class DistillCommand(DistillConfig):
    """Distil the student on its own rollouts, with a weight and a record for every token."""

    path: Path
    """The run directory; made if it is not there."""
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    problems: int = 200
    """Held-out problems on which accuracy is measured while training."""
    again: bool = False
    """Start over although the stage is complete; what rested on it is removed."""

    def run(self) -> None:
        from rocktokens.pipeline import distill

        config = _part(DistillConfig, self)
        run = distill(self.path, self.pair, self.prompts, config, problems=self.problems, again=self.again)
        print(f"run: {run.path}")


@dataclass(frozen=True, kw_only=True)
class SampleCommand:
    """Sample rollouts of the student into a run."""

    path: Path
    """The run directory; made if it is not there."""
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    checkpoint: str = "last"
    """Who writes: last (kept checkpoint, else the student), student, teacher, or a step."""
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self) -> None:
        from rocktokens.pipeline import sample

        run = sample(self.path, self.pair, self.prompts, self.rollouts, checkpoint=self.checkpoint, again=self.again)
        _say_facts(run, "sample")


@dataclass(frozen=True, kw_only=True)
class ScoreCommand:
    """Score a run's rollouts: the exact cost of every sampled token, at every kept checkpoint."""

    path: Path
    """The run directory."""
    checkpoints: str = "all"
    """all kept checkpoints, or their steps as a comma-separated list."""
    token_budget: int = ScoreConfig.token_budget
    """Padded tokens in one forward pass; sets the memory scoring takes."""
    chunk: int | None = None
    """Rows of logits that exist at once; unset: chosen for the vocabulary."""
    gradients: bool = True
    """Gather the last checkpoint's gradients per token type on the way, for `geometry`."""
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self) -> None:
        from rocktokens.pipeline import score

        config = ScoreConfig(
            checkpoints=self.checkpoints, token_budget=self.token_budget, chunk=self.chunk, gradients=self.gradients
        )
        run = score(self.path, config, again=self.again)
        _say_facts(run, *(f"score/step={step}" for step in run.facts("score")["steps"]))


@dataclass(frozen=True, kw_only=True)
class DetectCommand(DetectConfig):
    """Find the rocks of a scored run, or of anybody's occurrences (--occurrences FILE --out DIR)."""

    path: Path | None = None
    """The run directory."""
    occurrences: Path | None = None
    """A Parquet file with rollout_id, position, token_id and loss, in place of a run."""
    out: Path | None = None
    """Where the results for --occurrences go."""
    tokenizer: str | None = None
    """Tokenizer that names the tokens of --occurrences: a directory or hub name."""
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self) -> None:
        from rocktokens.finding import detect, detect_table

        config = _part(DetectConfig, self)
        if self.occurrences is not None:
            if self.out is None:
                raise ConfigError("say where the results go: --out DIRECTORY")
            run = detect_table(self.occurrences, self.out, config, tokenizer=self.tokenizer)
        elif self.path is None:
            raise ConfigError(
                "which run? Say `rocktokens detect DIRECTORY`, or give --occurrences FILE --out DIRECTORY"
            )
        else:
            run = detect(self.path, config, again=self.again)
        print(f"run: {run.path}")


@dataclass(frozen=True, kw_only=True)
class GeometryCommand(GeometryConfig):
    """Say which way the token types' gradients point and how much they pull."""

    path: Path
    """The run directory."""
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self) -> None:
        from rocktokens.finding import geometry

        print(f"run: {geometry(self.path, _part(GeometryConfig, self), again=self.again).path}")


@dataclass(frozen=True, kw_only=True)
class KnockoutCommand(KnockoutConfig):
    """Ban the candidates one at a time and say what each ban does to accuracy."""

    path: Path
    """The run directory."""
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self) -> None:
        from rocktokens.causal import knockout

        print(f"run: {knockout(self.path, _part(KnockoutConfig, self), self.baseline, again=self.again).path}")


@dataclass(frozen=True, kw_only=True)
class GraftCommand(GraftConfig):
    """Let the teacher draw the rocks in the student's place: what learning them perfectly would gain."""

    path: Path
    """The run directory."""
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self) -> None:
        from rocktokens.causal import graft

        print(f"run: {graft(self.path, _part(GraftConfig, self), self.baseline, again=self.again).path}")


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write a run's report: one HTML file that holds everything, and its figures beside it."""

    path: Path
    """The run directory."""
    images: bool = True
    """Also write every figure as SVG and PNG, where a Chromium is at hand."""
    again: bool = False
    """Write the report again although nothing changed since."""

    def run(self) -> None:
        from rocktokens.reporting import report

        run = report(self.path, again=self.again, images=self.images)
        print(f"report: {run.path / 'report.html'}")


@dataclass(frozen=True, kw_only=True)
class ViewCommand:
    """Show a run's report, or the runs of a folder and any two of them side by side, on 127.0.0.1."""

    path: Path
    """A run directory, or a folder of them."""
    port: int = 8707
    """Port on 127.0.0.1; 0 takes a free one."""
    open_browser: bool = False
    """Also open the page in a browser."""

    def run(self) -> None:
        from rocktokens.report.view import view

        view(self.path, port=self.port, open_browser=self.open_browser)


COMMANDS: dict[str, type] = {
    "study": StudyCommand,
    "check": CheckCommand,
    "distill": DistillCommand,
    "sample": SampleCommand,
    "score": ScoreCommand,
    "detect": DetectCommand,
    "geometry": GeometryCommand,
    "knockout": KnockoutCommand,
    "graft": GraftCommand,
    "report": ReportCommand,
    "view": ViewCommand,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `rocktokens` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_main(arguments))
    except ConfigError as error:
        print(f"rocktokens: {error}", file=sys.stderr)
        sys.exit(2)
    except RockTokensError as error:
        print(f"rocktokens: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("rocktokens: stopped; the same command goes on where it was", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"rocktokens {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`rocktokens --help` lists them"
        raise ConfigError(f"there is no command {name!r}; {hint}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for noisy in ("httpx", "transformers", "datasets", "absl"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if name in ("detect", "geometry", "report"):  # small matrices, no model: more threads than one only wait
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _parse(name, rest).run()
    return 0


def _parse(name: str, rest: list[str]) -> Any:
    """Flags over the YAML file over the defaults."""
    import tyro

    from rocktokens.settings import from_mapping, load_yaml

    kind = COMMANDS[name]
    file, rest = _take_flag(rest, "--config")
    word, rest = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else (None, rest)
    default, values = None, {}
    if word is not None and kind is StudyCommand:
        file, default = _recipe(word)
    elif word is not None and "path" in _fields(kind):
        values["path"] = word
    elif word is not None:
        raise ConfigError(f"`rocktokens {name}` takes settings only, as --section.field value; got {word!r}")
    values |= load_yaml(file) if file else {}
    needs_path = any(item.name == "path" and item.default is MISSING for item in fields(kind))
    if needs_path and "path" not in values:
        if not {"-h", "--help"} & set(rest):
            raise ConfigError(f"which run? Say `rocktokens {name} DIRECTORY`")
        values["path"] = "RUN"
    default = from_mapping(kind, values, default=default)
    rest = ["--prompts.source" if word == "--prompts" else word for word in rest]
    return tyro.cli(
        kind,
        args=rest,
        default=default,
        prog=f"rocktokens {name}",
        description=kind.__doc__,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )


def _take_flag(words: list[str], flag: str) -> tuple[str | None, list[str]]:
    if flag not in words:
        return None, words
    at = words.index(flag)
    if at + 1 >= len(words):
        raise ConfigError(f"{flag} needs a file")
    return words[at + 1], words[:at] + words[at + 2 :]


def _recipe(word: str) -> tuple[str | None, Any]:
    """What the first word of `study` names: a YAML file, or a recipe."""
    if word.endswith((".yaml", ".yml")):
        return word, None
    known = recipes()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}, or give a .yaml file"
        raise ConfigError(f"there is no recipe {word!r}; {hint}")
    recipe = known[word]()
    return None, StudyCommand(**{item.name: getattr(recipe, item.name) for item in fields(recipe)})


def _part(kind: type[T], command: Any) -> T:
    """The stage's configuration out of a command that extends it."""
    return kind(**{name: getattr(command, name) for name in _fields(kind)})


def _fields(kind: type) -> set[str]:
    return {item.name for item in fields(kind)}  # type: ignore[arg-type]


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()]
    return "\n".join(
        [
            "rocktokens: which tokens on-policy distillation never fixes, what they cost, whether they matter.",
            "",
            "usage: rocktokens COMMAND [RUN] [--section.field value ...] [--config file.yaml]",
            "",
            *lines,
            "",
            "`rocktokens COMMAND --help` lists a command's settings; `--version` the version.",
        ]
    )


def _say_facts(run: Any, *stages: str) -> None:
    for stage in stages:
        facts = ", ".join(
            f"{key} {_short(value)}" for key, value in run.facts(stage).items() if value not in ([], None)
        )
        print(f"{stage}: {facts}")
    print(f"run: {run.path}")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
