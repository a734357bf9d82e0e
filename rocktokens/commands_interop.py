"""The commands `import`, `export` and `doctor`. Dataclasses like those of commands.py; nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from rocktokens.errors import ConfigError, DataError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.train.settings import DistillConfig


@dataclass(frozen=True, kw_only=True)
class ImportCommand:
    """Turn another trainer's dump into a run: `import FORMAT FILES --tokenizer NAME --out RUN`."""

    format: Annotated[Positional[str], arg(metavar="FORMAT")]
    """slime, prime-rl, trl, verl or jsonl; docs/other-trainers.md says how to get each."""
    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILES")]
    """Files, or directories that are searched for the format's files."""
    tokenizer: str | None = None
    """Tokenizer of the model that was trained: a directory or hub name."""
    out: Path | None = None
    """Directory of the new run."""
    no_detect: bool = False
    """Do not detect costly token types and do not write the report."""

    def run(self) -> None:
        from rocktokens.interop.import_ import import_dump

        if self.tokenizer is None or self.out is None:
            raise ConfigError(
                "say which tokenizer the ids belong to and where the run goes: --tokenizer NAME --out RUN"
            )
        run = import_dump(self.format, self.files, self.tokenizer, self.out, detect=not self.no_detect)
        facts = run.facts("import")
        print(f"import: {facts['rollouts']} rollouts, {facts['tokens']} tokens, steps {facts['steps']}")
        print(f"run: {run.path}")


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Look for what silently ruins distillation, in a pair, its prompts, a run or an imported dump: `doctor [RUN]`."""

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
    top_k: int | None = None
    """Also say how many tokens a clamped top-k loss would leave without gradient."""

    def run(self) -> None:
        from rocktokens.check.doctor import Probe, doctor
        from rocktokens.check.doctor_terminal import findings_table
        from rocktokens.progress import console

        if self.probe < 0:
            raise ConfigError(f"probe must be at least 0, got {self.probe}")
        probe = Probe(self.probe, self.learning_rate, self.top_k, self.servers)
        findings = doctor(self.path, self.pair, self.prompts, self.rollouts, probe)
        console().print(findings_table(findings))
        faults = [finding.check for finding in findings if finding.status == "wrong"]
        if faults:
            raise DataError(f"{len(faults)} of {len(findings)} checks found a fault: {', '.join(faults)}")
        print(f"no fault in {sum(finding.status in ('fine', 'note') for finding in findings)} checks")


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a run's bypass list, or its rocks, in the form that another trainer reads."""

    path: Annotated[Positional[Path], arg(metavar="DIRECTORY")]
    """The run directory, or a bypass.json."""
    format: Literal["ids", "json", "csv", "trl", "verl"] = "ids"
    """ids: one token id per line; json: everything; csv: one row per costly type; trl and verl: for those trainers."""
    list: Literal["bypass", "rocks"] = "bypass"
    """bypass: what training may skip, as `bypass` decided; rocks: what `detect` declared, skipped at your own risk."""
    out: Path | None = None
    """The file to write; unset: beside the list."""

    def run(self) -> None:
        from rocktokens.interop.export import export

        print(f"list: {export(self.path, self.format, self.out, listed=self.list)}")
