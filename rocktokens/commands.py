"""The commands as dataclasses: a stage's configuration, which run, and the call that does it. They decide nothing.

A setting has one flag name everywhere: `--distill.steps` for `study` and for `distill`. On its own command a stage's
section may be left out (`rocktokens distill RUN --steps 10`); `section` names it.

What a command needs is imported when it runs, so that help and mistakes answer at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from rocktokens.bypass.settings import BypassConfig
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.commands_interop import ExportCommand, ImportCommand
from rocktokens.compare.settings import CompareConfig
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import ConfigError
from rocktokens.geometry.settings import GeometryConfig
from rocktokens.jobs import Place
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.settings import ScoreConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.study_settings import StudyConfig
from rocktokens.train.settings import DistillConfig

RunPath = Annotated[Positional[Path], arg(metavar="DIRECTORY")]


@dataclass(frozen=True, kw_only=True)
class StudyCommand(StudyConfig):
    """Run all stages in order, from distillation to the report: `study [RUN | RECIPE | FILE.yaml]`."""

    recipe: Annotated[Positional[str | None], arg(metavar="[RUN | RECIPE | FILE.yaml]")] = None
    """A run to go on with, a recipe by name, or a YAML file with settings."""
    quick: bool = False
    """A true but small study, about a minute on the built-in pair; its last lines say what it left out."""
    dry_run: bool = False
    """Say what the study would do and need (time, memory, disk, prompts), and do nothing."""

    def run(self, place: Place | None = None) -> None:
        from rocktokens.recipes import quick_left_out

        config = StudyConfig(**{item.name: getattr(self, item.name) for item in fields(StudyConfig)})
        if self.dry_run:
            from rocktokens.study_plan import dry_run

            print("\n".join(dry_run(config)))
            return
        from rocktokens.study import study

        study(config, place=place, note=quick_left_out(self.recipe) if self.quick else None)


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Look for what silently ruins distillation, in a pair, its prompts, servers, a run or an imported dump."""

    path: Annotated[Positional[Path | None], arg(metavar="[DIRECTORY]")] = None
    """A run, also one made by `import`; without it, the pair and the prompts alone."""
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    probe: int = 32
    """Prompts that both models answer, loaded in this process also where servers are named; 0: load no weights."""
    learning_rate: float = DistillConfig.learning_rate
    """The learning rate that is compared with the resolution of the weights."""
    json: bool = False
    """Print the findings as JSON."""

    def run(self) -> None:
        from rocktokens.check.findings import report
        from rocktokens.check.stage import check

        how = {"probe": self.probe, "learning_rate": self.learning_rate}
        report(check(self.path, self.pair, self.prompts, self.rollouts, self.servers, **how), as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class DistillCommand:
    """Distil the student on its own rollouts, with a weight and a record for every token."""

    section: ClassVar[str] = "distill"
    path: RunPath
    """The run directory; made if it is not there."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    problems: int = 200
    """Held-out prompts on which accuracy is measured while training."""
    again: bool = False
    """Start over although the stage is complete; what rested on it is removed."""

    def run(self) -> None:
        from rocktokens.train.stage import distill

        how = {"problems": self.problems, "servers": self.servers, "again": self.again}
        run = distill(self.path, self.pair, self.prompts, self.distill, **how)  # type: ignore[arg-type]
        if os.environ.get("RANK", "0") == "0":  # torchrun starts this command once a process
            print(f"run: {run.path}")
        if "RANK" in os.environ:
            from rocktokens.train.trainer import processes

            processes().destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class SampleCommand:
    """Sample rollouts of the student into a run."""

    section: ClassVar[str] = "rollouts"
    path: RunPath
    """The run directory; made if it is not there."""
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    checkpoint: str = "last"
    """Which model samples: last (kept checkpoint, else the student), student, teacher, or a step."""
    detection_prompts: int | None = None
    """Prompts at most; unset: as many as --prompts.limit says."""
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self, place: Place | None = None) -> None:
        from rocktokens.sample.stage import sample

        run = sample(
            self.path,
            self.pair,
            self.prompts,
            self.rollouts,
            checkpoint=self.checkpoint,
            limit=self.detection_prompts,
            servers=self.servers,
            again=self.again,
            place=place or Place(),
        )
        _say_facts(run, "sample")


@dataclass(frozen=True, kw_only=True)
class ScoreCommand:
    """Score a run's rollouts: the exact cost of every sampled token, at every kept checkpoint."""

    section: ClassVar[str] = "score"
    path: RunPath
    """The run directory."""
    score: ScoreConfig = field(default_factory=ScoreConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self, place: Place | None = None) -> None:
        from rocktokens.score.stage import score

        run = score(self.path, self.score, servers=self.servers, again=self.again, place=place or Place())
        _say_facts(run, *(f"score/step={step}" for step in run.facts("score")["steps"]))


@dataclass(frozen=True, kw_only=True)
class DetectCommand:
    """Find the rocks of a scored run, or of a table of occurrences (--occurrences FILE --out DIR)."""

    section: ClassVar[str] = "detect"
    path: Annotated[Positional[Path | None], arg(metavar="[DIRECTORY]")] = None
    """The run directory."""
    detect: DetectConfig = field(default_factory=DetectConfig)
    occurrences: Path | None = None
    """A Parquet file with rollout_id, position, token_id and loss, in place of a run."""
    out: Path | None = None
    """Where the results for --occurrences go."""
    tokenizer: str | None = None
    """Tokenizer that names the tokens of --occurrences: a directory or hub name."""
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self) -> None:
        from rocktokens.detect.stage import detect, detect_table

        if self.path is not None and self.occurrences is None:
            if self.out is not None or self.tokenizer is not None:
                raise ConfigError("--out and --tokenizer belong to --occurrences; a run keeps its own")
            run = detect(self.path, self.detect, again=self.again)
        elif self.path is None and self.occurrences is not None and self.out is not None:
            run = detect_table(self.occurrences, self.out, self.detect, tokenizer=self.tokenizer, again=self.again)
        else:
            raise ConfigError("detect takes a run directory, or --occurrences FILE with --out DIR")
        print(f"run: {run.path}")


@dataclass(frozen=True, kw_only=True)
class GeometryCommand:
    """Say which way the token types' gradients point and how much they pull."""

    section: ClassVar[str] = "geometry"
    path: RunPath
    """The run directory."""
    geometry: GeometryConfig = field(default_factory=GeometryConfig)
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self) -> None:
        from rocktokens.geometry.stage import geometry

        print(f"run: {geometry(self.path, self.geometry, again=self.again).path}")


@dataclass(frozen=True, kw_only=True)
class KnockoutCommand:
    """Ban the candidates one at a time and say what each ban does to accuracy."""

    section: ClassVar[str] = "knockout"
    path: RunPath
    """The run directory."""
    knockout: KnockoutConfig = field(default_factory=KnockoutConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self, place: Place | None = None) -> None:
        from rocktokens.causal.knockout_stage import knockout

        print(f"run: {knockout(self.path, self.knockout, self.baseline, servers=self.servers, again=self.again).path}")


@dataclass(frozen=True, kw_only=True)
class GraftCommand:
    """Let the teacher draw the rocks in the student's place: what learning them perfectly would gain."""

    section: ClassVar[str] = "graft"
    path: RunPath
    """The run directory."""
    graft: GraftConfig = field(default_factory=GraftConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    again: bool = False
    """Run the stage again although it is complete."""

    def run(self, place: Place | None = None) -> None:
        from rocktokens.causal.graft_stage import graft

        print(f"run: {graft(self.path, self.graft, self.baseline, servers=self.servers, again=self.again).path}")


@dataclass(frozen=True, kw_only=True)
class BypassCommand:
    """Say which costly token types training may skip, which it must not, and why."""

    section: ClassVar[str] = "bypass"
    path: RunPath
    """The run directory."""
    bypass: BypassConfig = field(default_factory=BypassConfig)

    def run(self) -> None:
        from rocktokens.bypass.stage import bypass
        from rocktokens.bypass.store import NAME

        print(f"list: {bypass(self.path, self.bypass).path / NAME}")


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Train the regimes from one start and say what leaving out the rocks costs and saves."""

    section: ClassVar[str] = "compare"
    path: RunPath
    """The run directory."""
    compare: CompareConfig = field(default_factory=CompareConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    results: Path | None = None
    """Also write the comparison with its circumstances (command, versions, hardware, date) to this JSON file."""
    again: bool = False
    """Train every regime anew although the stage is complete."""

    def run(self, place: Place | None = None) -> None:
        from rocktokens.compare.stage import compare
        from rocktokens.compare.tables import require_writable, save_results

        require_writable(self.results)  # said before anything is trained
        run = compare(self.path, self.compare, servers=self.servers, again=self.again)
        if self.results is not None and run.done("compare"):
            save_results(run, self.results)
        print(f"run: {run.path}")


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write a run's report: one HTML file that holds everything, and its figures beside it."""

    path: RunPath
    """The run directory."""
    again: bool = False
    """Write the report again although nothing changed since."""

    def run(self) -> None:
        from rocktokens.report.stage import report

        run = report(self.path, again=self.again)
        print(f"report: {run.path / 'report.html'}")


@dataclass(frozen=True, kw_only=True)
class ViewCommand:
    """Show a run, while it trains too, or the runs of a folder, on 127.0.0.1."""

    path: RunPath
    """A run directory, or a folder of them."""
    port: int = 8707
    """Port on 127.0.0.1; 0 takes a free one."""
    open_browser: bool = False
    """Also open the page in a browser."""

    def run(self) -> None:
        from rocktokens.report.stage import decoder_of
        from rocktokens.report.view import view

        view(self.path, port=self.port, open_browser=self.open_browser, decoder=decoder_of)


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
    "bypass": BypassCommand,
    "compare": CompareCommand,
    "export": ExportCommand,
    "report": ReportCommand,
    "view": ViewCommand,
    "import": ImportCommand,
}


def _say_facts(run: Any, *stages: str) -> None:
    for stage in filter(run.done, stages):  # several processes: the first one knows and says it
        facts = ", ".join(
            f"{key} {_short(value)}" for key, value in run.facts(stage).items() if value not in ([], None)
        )
        print(f"{stage}: {facts}")
    print(f"run: {run.path}")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
