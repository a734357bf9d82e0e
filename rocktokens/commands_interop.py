"""The commands `import` and `export`. Dataclasses like those of commands.py; nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from rocktokens.errors import ConfigError


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
