"""A run is a directory: a manifest and Parquet that DuckDB reads where it lies.

Every file is written under a draft name and renamed when it is whole; the manifest is written last. So what the
manifest lists exists and is complete, and a killed run continues. It does not know what tables and stages mean.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from rocktokens.display import Displayed
from rocktokens.errors import DataError, RunError
from rocktokens.files import (
    digest,
    digest_of_value,
    drafting,
    failing,
    is_draft,
    reading,
    write_text,
    writing,
)
from rocktokens.lock import LOCK
from rocktokens.manifest import MANIFEST, read_manifest
from rocktokens.ranks import SIGNS, ranks
from rocktokens.sql import query
from rocktokens.table_files import (
    PART_ROWS,
    PartWriter,
    link_all,
    read_parquet,
    read_schema,
    write_draft,
    write_parquet,
)
from rocktokens.tables import OCCURRENCES, RANKED_BY, SCHEMA_VERSION, table_of
from rocktokens.values import Json

log = logging.getLogger(__name__)

SCORED = ("occurrences", "top_tokens")  # folders with one directory per scored checkpoint


class Run(Displayed):
    """A run directory. Open one with `open_run`, start or continue one with `Run.create`."""

    def __init__(self, path: str | Path, manifest: Json) -> None:
        self.path, self.manifest = Path(path), manifest
        self._written: set[Path] = set()
        """Files written since the last stage was recorded."""

    @classmethod
    def create(cls, path: str | Path, config: Json | None = None) -> Run:
        """Start a run, or go on with the one that is there if it was made with the same configuration.

        `config` holds one entry per section. A section the run already has must be the same; new ones are added.
        """
        path, config = Path(path), json.loads(json.dumps(config or {}, default=str))
        if (path / MANIFEST).exists():
            run = open_run(path)
            known = run.manifest["config"]
            if not any(item.name != MANIFEST for item in _content(path)):
                known.update(config)  # nothing was made yet (the first command failed early): nothing to protect
                run.save(only_first=True)
            for section in sorted(known.keys() & config.keys()):
                difference = _first_difference(section, known[section], config[section])
                if difference is not None:
                    raise RunError(
                        f"{path} was made with another configuration: {difference}. "
                        "Choose another directory, or repeat the first command to go on."
                    )
            if config.keys() - known.keys():
                known.update({section: config[section] for section in config.keys() - known.keys()})
                run.save(only_first=True)
            return run
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; a run is a directory. Choose another path.")
        if path.exists() and _content(path):
            raise RunError(f"{path} is not empty and holds no {MANIFEST}; choose another directory for the run")
        run = cls(path, {"schema_version": SCHEMA_VERSION, "config": config, "versions": _versions(), "stages": {}})
        run.save()
        return run

    def save(self, *, only_first: bool = False) -> None:
        """Write the manifest, whole, in place of the one that is there; of several processes only by the first."""
        if ranks().is_first or not only_first:
            write_text(self.path / MANIFEST, json.dumps(self.manifest, indent=2, allow_nan=False))

    def describe(self, sections: Json) -> None:
        """Add sections to the configuration; those that are there stay as they are."""
        self.manifest["config"] = json.loads(json.dumps({**sections, **self.manifest["config"]}, default=str))
        self.save()

    def finish(self, stage: str, facts: Json | None = None) -> None:
        """Record a stage as complete. Written last and atomically: what is not listed here does not exist.

        What the stage wrote through this object is listed with its size and digest, so that damage is noticed.
        """
        if not (self.path / MANIFEST).exists():
            raise RunError(f"{self.path / MANIFEST} is gone: the run was moved or deleted while {stage} worked on it")
        stages, files = dict(self.manifest["stages"]), self._files()
        stages[stage] = facts or {}
        for path in self._written:
            name = str(path.relative_to(self.path))
            found = None if ".parts/" in name else digest(path)  # parts are removed when their stage is complete
            if found is not None:
                files[name] = {"size": path.stat().st_size, "digest": found, "stage": stage}
        before = self.manifest
        self.manifest = {**before, "stages": stages, "files": files} if files else {**before, "stages": stages}
        try:
            self.save()
        except BaseException:
            self.manifest = before
            raise
        self._written.clear()

    def reopen(self, stage: str) -> None:
        """Forget that a stage was completed, so that it runs again."""
        if self.manifest["stages"].pop(stage, None) is not None:
            self.manifest.get("records", {}).pop(stage, None)
            self._forget_files(lambda known: known.get("stage") == stage)
            self.save()

    def forget_stages(self) -> None:
        """Forget that any stage was completed."""
        self.manifest = {**self.manifest, "stages": {}, "records": {}, "files": {}}
        self.save()

    def adopt(self, other: Run, stage: str) -> None:
        """Record a stage as another run recorded it, whose files have been moved here."""
        known = other.manifest
        self.manifest["config"].update(known["config"])
        self.manifest.setdefault("records", {}).update(known.get("records", {}))
        self.manifest["files"] = {**self._files(), **other._files()}
        self.finish(stage, other.facts(stage))

    def _files(self) -> Json:
        known = self.manifest.get("files", {})
        return dict(known) if isinstance(known, dict) else {}

    def _forget_files(self, which: Callable[[Json], bool]) -> None:
        kept = {name: known for name, known in self._files().items() if not (isinstance(known, dict) and which(known))}
        if "files" in self.manifest:
            self.manifest["files"] = kept

    def done(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return stage in self.manifest["stages"]

    def facts(self, stage: str) -> Json:
        """What a completed stage recorded about itself."""
        if not self.done(stage):
            raise RunError(
                f"{self.path} has no completed stage {stage!r}; run `rocktokens {stage.split('/')[0]}` first"
            )
        return self.manifest["stages"][stage]

    def mark(self, stage: str) -> str | None:
        """A digest of what a stage recorded. A stage that rests on another keeps its mark, and so sees it change."""
        return digest_of_value(self.facts(stage)) if self.done(stage) else None

    # Tables

    def write(self, name: str, table: pa.Table) -> Path:
        """Write NAME.parquet whole, in place of what was there; columns as runs/schema.py has them."""
        path = self.path / f"{name}.parquet"
        write_parquet(_conforming(name, table), path)
        self._written.add(path)
        return path

    def write_all(self, tables: Mapping[str, pa.Table], *, stage: str) -> None:
        """Write tables of a stage beside the old ones, forget that the stage was complete, then swap them in."""
        with ExitStack() as drafts:
            waiting = [(drafts.enter_context(drafting(self.path / f"{name}.parquet")), name) for name in tables]
            for draft, name in waiting:
                with failing(self.path / f"{name}.parquet"):
                    write_draft(_conforming(name, tables[name]), draft)
            self.reopen(stage)
            for draft, name in waiting:
                path = self.path / f"{name}.parquet"
                with failing(path):
                    draft.replace(path)
                self._written.add(path)

    def write_tensors(self, name: str, tensors: Json) -> Path:
        """Write NAME.safetensors whole, in place of what was there."""
        from safetensors.torch import save_file

        path = self.path / f"{name}.safetensors"
        with writing(path) as draft:
            save_file(tensors, draft)
        self._written.add(path)
        return path

    def has(self, name: str) -> bool:
        """Whether NAME.parquet exists."""
        return (self.path / f"{name}.parquet").exists()

    def read(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """NAME.parquet as an Arrow table."""
        path = self.path / f"{name}.parquet"
        if not path.exists():
            raise RunError(f"{self.path} has no {name}.parquet; the stage that writes it has not run")
        self.verify(path)
        return read_parquet(path, columns, self._remedy(path))

    def read_tensors(self, name: str) -> Json:
        """NAME.safetensors as a mapping of tensors."""
        from safetensors.torch import load_file

        path = self.path / f"{name}.safetensors"
        self.verify(path)
        with reading(path, self._remedy(path)):
            return load_file(path)

    def verify(self, path: Path) -> None:
        """Refuse a file whose bytes are not those that its stage wrote.

        Only a file of the recorded size counts as damaged: one of another size was replaced on purpose, or is cut short
        and cannot be read at all.
        """
        known = self._files().get(str(path.relative_to(self.path)))
        if path in self._written or not path.exists():
            return
        known = known if isinstance(known, dict) else {}
        if path.stat().st_size == known.get("size") and digest(path) != known.get("digest"):
            raise DataError(f"{path} is damaged: its content is not what was written; {self._remedy(path)}")
        self._verify_columns(path)

    def _verify_columns(self, path: Path) -> None:
        """Refuse a table of this run whose columns hold values of another kind than runs/schema.py says."""
        known = table_of(str(path.relative_to(self.path)).removesuffix(".parquet")) if path.is_file() else None
        if known is not None and path.suffix == ".parquet":
            with reading(path, self._remedy(path)):
                wrong = known.misfit(read_schema(path))
            if wrong:
                raise DataError(f"{path} is damaged: {wrong}; {self._remedy(path)}")

    def damaged_files(self, stage: str) -> list[str]:
        """Files that a stage wrote and that are gone, or hold something else at the same size."""
        found = []
        for name, known in self._files().items():
            if isinstance(known, dict) and known.get("stage") == stage:
                path = self.path / name
                size = path.stat().st_size if path.is_file() else None
                if size is None or (size == known.get("size") and digest(path) != known.get("digest")):
                    found.append(name)
        return sorted(found)

    def _remedy(self, path: Path) -> str:
        known = self._files().get(str(path.relative_to(self.path)), {})
        stage = str(known.get("stage", "") if isinstance(known, dict) else "").split("/")[0]
        return f"run `rocktokens {stage} {self.path} --again`" if stage else "remove it and run its stage again"

    def steps(self) -> list[int]:
        """Checkpoints whose occurrences are recorded, in order."""
        return _steps_in(self.path / "occurrences")

    def part_writer(self, step: int, *, part: str = "", part_rows: int = PART_ROWS) -> PartWriter:
        """Writes occurrences of one checkpoint in parts; flush it at the end.

        Args:
            step: the checkpoint.
            part: tells apart ranks that write side by side.
            part_rows: rows of one Parquet file.
        """
        folder = self._step_folder("occurrences", step, False)
        return PartWriter(folder, OCCURRENCES, prefix=part, part_rows=part_rows, written=self._written)

    def telemetry_writer(self, step: int, *, part: str = "") -> PartWriter:
        """The same for one training step's own rollouts: other texts at every step, unlike `occurrences`."""
        folder = self._step_folder("telemetry", step, False)
        return PartWriter(folder, OCCURRENCES, prefix=part, written=self._written)

    def clear_occurrences(self, step: int) -> None:
        """Remove a checkpoint's occurrences and top tokens (those of a stage that did not complete)."""
        for folder in SCORED:
            shutil.rmtree(self._step_folder(folder, step, False), ignore_errors=True)

    def clear_new_occurrences(self, step: int) -> None:
        """Remove what a stopped stage wrote beside a checkpoint's occurrences and top tokens."""
        for folder in SCORED:
            shutil.rmtree(self._step_folder(folder, step, True), ignore_errors=True)

    def replace_occurrences(self, step: int) -> None:
        """Put the parts that were written beside in place of a checkpoint's occurrences and top tokens."""
        self.clear_occurrences(step)
        for folder in SCORED:
            new, final = self._step_folder(folder, step, True), self._step_folder(folder, step, False)
            if folder == "occurrences" or new.exists():
                with failing(final):
                    new.mkdir(parents=True, exist_ok=True)
                    new.replace(final)
            moved = {path for path in self._written if path.parent == new}
            self._written.difference_update(moved)
            self._written.update(final / path.name for path in moved)

    def link_parts(self, folder: str, step: int, files: Sequence[Path]) -> None:
        """Take finished parts over, beside a checkpoint's table, as part-00000.parquet and so on."""
        self._written.update(link_all(files, self._step_folder(folder, step, True)))

    def _step_folder(self, folder: str, step: int, beside: bool) -> Path:
        return self.path / folder / (f".new-step={step}" if beside else f"step={step}")

    def occurrences(self, sql: str | None = None) -> pa.Table:
        """All occurrences, with their checkpoint as `step`; or the answer to a query over the view `occurrences`."""
        return self.query(sql or "select * from occurrences")

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Ask DuckDB; every table of the run is a view, the scored checkpoints `occurrences`, training `telemetry`.

        Args:
            sql: a query; values that are not ours (ids, texts) go in as `?`.
            parameters: what the question marks stand for.
        """
        return query(self.path, sql, parameters, self.verify)

    def types(self) -> pa.Table:
        """One row per token type, as `detect` wrote it."""
        return self.read("types")

    def rocks(self, definition: str | None = None) -> pa.Table:
        """The rock token types by a definition (default: the one `detect` chose), largest first."""
        chosen = definition or self.facts("detect")["definition"]
        if chosen not in RANKED_BY:
            raise RunError(f"definition must be one of {', '.join(RANKED_BY)}, got {chosen!r}")
        return self.query(f"select * from types where in_{chosen} order by {RANKED_BY[chosen]} desc, token_id")

    def checkpoint(self, step: int) -> Path:
        """Directory of a kept checkpoint."""
        return self.path / "checkpoints" / f"step={step}"

    def checkpoints(self) -> list[int]:
        """Steps of the kept checkpoints, in order."""
        return _steps_in(self.path / "checkpoints")


def open_run(path: str | Path) -> Run:
    """Open an existing run directory."""
    path = Path(path)
    return Run(path, read_manifest(path))


def _conforming(name: str, table: pa.Table) -> pa.Table:
    """A table with its columns as runs/schema.py has them."""
    known = table_of(name)
    return table if known is None else known.conform(table)


def _steps_in(folder: Path) -> list[int]:
    names = (path.name.removeprefix("step=") for path in folder.glob("step=*"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _content(path: Path) -> list[Path]:
    """What lies in a directory, but for the lock and drafts that a killed process left."""
    return [item for item in path.iterdir() if item.name not in (LOCK, SIGNS) and not is_draft(item)]


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("rocktokens", "torch", "transformers", "trl", "pyarrow", "duckdb")}


def _first_difference(section: str, old: Any, new: Any) -> str | None:
    """The first of `differences`, or None."""
    return next(differences(section, old, new), None)


def differences(section: str, old: object, new: object) -> Iterator[str]:
    """What to tell of settings that differ.

    One that the old lacks is unset: an older version did not know it. One that the new lacks no longer decides results.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(new):
            yield from differences(f"{section}.{key}" if section else key, old.get(key), new[key])
    elif old != new:
        yield f"{section} was {old!r}, now {new!r}"
