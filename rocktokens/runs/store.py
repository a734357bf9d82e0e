"""A run is a directory: a manifest and Parquet that DuckDB reads where it lies.

Every file is written under a draft name and renamed when it is whole; the manifest is written last. So what the
manifest lists exists and is complete, and a killed run goes on where it stopped. This room knows tables and stages;
it does not know what they mean.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.errors import DataError, RunError
from rocktokens.runs.schema import OCCURRENCES, RANKED_BY, SCHEMA_VERSION, TOP_TOKENS, table_of

MANIFEST = "run.json"
DRAFT = f"{MANIFEST}.tmp"
# Rows buffered before a Parquet part is written: about 50 MB.
PART_ROWS = 1_000_000


class Run:
    """A run directory. Open one with `open_run`, start or continue one with `Run.create`."""

    def __init__(self, path: str | Path, manifest: dict[str, Any]) -> None:
        self.path = Path(path)
        self.manifest = manifest

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any] | None = None) -> Run:
        """Start a run, or go on with the one that is there if it was made with the same configuration.

        `config` holds one entry per section. A section the run already has must be the same; new ones are added.
        """
        path, config = Path(path), json.loads(json.dumps(config or {}, default=str))
        if (path / MANIFEST).exists():
            run = open_run(path)
            known = run.manifest["config"]
            if not any(item.name not in (MANIFEST, DRAFT) for item in path.iterdir()):
                known.update(config)  # nothing was made yet (the first command failed early): nothing to protect
                run._save()
            for section in sorted(known.keys() & config.keys()):
                difference = _first_difference(section, known[section], config[section])
                if difference is not None:
                    raise RunError(
                        f"{path} was made with another configuration: {difference}. "
                        "Choose another directory, or repeat the first command to go on."
                    )
            if config.keys() - known.keys():
                known.update({section: config[section] for section in config.keys() - known.keys()})
                run._save()
            return run
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; a run is a directory. Choose another path.")
        if path.exists() and any(item.name != DRAFT for item in path.iterdir()):
            raise RunError(f"{path} is not empty and holds no {MANIFEST}; choose another directory for the run")
        run = cls(path, {"schema_version": SCHEMA_VERSION, "config": config, "versions": _versions(), "stages": {}})
        try:
            path.mkdir(parents=True, exist_ok=True)
            run._save()
        except OSError as error:
            raise RunError(f"cannot write to {path}: {error.strerror}. Choose a directory you can write to.") from error
        return run

    def _save(self) -> None:
        draft = self.path / DRAFT
        try:
            with draft.open("w") as file:
                json.dump(self.manifest, file, indent=2, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path / MANIFEST)
        except OSError as error:
            raise RunError(
                f"cannot write {self.path / MANIFEST}: {error.strerror}; free some space, then repeat"
            ) from error

    def describe(self, sections: dict[str, Any]) -> None:
        """Add sections to the configuration; those that are there stay as they are."""
        self.manifest["config"] = json.loads(json.dumps({**sections, **self.manifest["config"]}, default=str))
        self._save()

    def finish(self, stage: str, facts: dict[str, Any] | None = None) -> None:
        """Record a stage as complete. Written last and atomically: what is not listed here does not exist."""
        self.manifest["stages"][stage] = facts or {}
        self._save()

    def reopen(self, stage: str) -> None:
        """Forget that a stage was completed, so that it runs again."""
        if self.manifest["stages"].pop(stage, None) is not None:
            self._save()

    def done(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return stage in self.manifest["stages"]

    def facts(self, stage: str) -> dict[str, Any]:
        """What a completed stage recorded about itself."""
        if not self.done(stage):
            raise RunError(
                f"{self.path} has no completed stage {stage!r}; run `rocktokens {stage.split('/')[0]}` first"
            )
        return self.manifest["stages"][stage]

    def mark(self, stage: str) -> str | None:
        """A digest of what a stage recorded. A stage that rests on another keeps its mark, and so sees it change."""
        if not self.done(stage):
            return None
        text = json.dumps(self.facts(stage), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def rests_on(self, stage: str, other: str) -> bool:
        """Whether a completed stage read the other as it is now; older runs, which did not say, are believed."""
        return self.facts(stage).get(f"mark_{other}", self.mark(other)) == self.mark(other)

    # Tables

    def write(self, name: str, table: pa.Table) -> Path:
        """Write NAME.parquet whole, in place of what was there; columns as runs/schema.py has them."""
        path = self.path / f"{name}.parquet"
        known = table_of(name)
        table = table if known is None else known.conform(table)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_parquet(table, path)
        return path

    def write_tensors(self, name: str, tensors: dict[str, Any]) -> Path:
        """Write NAME.safetensors whole, in place of what was there."""
        from safetensors.torch import save_file

        path = self.path / f"{name}.safetensors"
        draft = _draft(path)
        save_file(tensors, draft)
        draft.replace(path)
        return path

    def has(self, name: str) -> bool:
        """Whether NAME.parquet exists."""
        return (self.path / f"{name}.parquet").exists()

    def read(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """NAME.parquet as an Arrow table."""
        path = self.path / f"{name}.parquet"
        if not path.exists():
            raise RunError(f"{self.path} has no {name}.parquet; the stage that writes it has not run")
        return _read_parquet(path, columns)

    def steps(self) -> list[int]:
        """Checkpoints whose occurrences are recorded, in order."""
        return sorted(int(path.name.removeprefix("step=")) for path in (self.path / "occurrences").glob("step=*"))

    def part_writer(self, step: int, *, part: str = "", part_rows: int = PART_ROWS) -> PartWriter:
        """Writes occurrences of one checkpoint in parts; `part` tells apart ranks side by side.

        Use it as a `with` block, or flush it at the end.
        """
        return PartWriter(self.path / "occurrences" / f"step={step}", OCCURRENCES, prefix=part, part_rows=part_rows)

    def telemetry_writer(self, step: int, *, part: str = "") -> PartWriter:
        """The same for one training step's own rollouts: other texts at every step, unlike `occurrences`."""
        return PartWriter(self.path / "telemetry" / f"step={step}", OCCURRENCES, prefix=part)

    def top_token_writer(self, step: int, *, part: str = "") -> PartWriter:
        """Writes the most probable tokens at the positions of the shown rollouts, in parts; flush it at the end."""
        return PartWriter(self.path / "top_tokens" / f"step={step}", TOP_TOKENS, prefix=part)

    def clear_occurrences(self, step: int) -> None:
        """Remove a checkpoint's occurrences and top tokens (those of a stage that did not complete)."""
        for folder in ("occurrences", "top_tokens"):
            shutil.rmtree(self.path / folder / f"step={step}", ignore_errors=True)

    def occurrences(self, sql: str | None = None) -> pa.Table:
        """All occurrences, with their checkpoint as `step`; or the answer to a query over the view `occurrences`."""
        return self.query(sql or "select * from occurrences")

    def query(self, sql: str) -> pa.Table:
        """Ask DuckDB; every table of the run is a view, the scored checkpoints `occurrences`, training `telemetry`."""
        import duckdb

        with duckdb.connect() as connection:
            try:
                for path in sorted(self.path.glob("*.parquet")):
                    if path.stem in sql.lower():  # a damaged table must not hide the others
                        connection.execute(f"create view {path.stem} as select * from read_parquet({_quote(path)})")
                for folder in ("occurrences", "telemetry", "top_tokens"):
                    if folder in sql.lower() and any(self.path.glob(f"{folder}/step=*/*.parquet")):
                        parts = _quote(self.path, f"/{folder}/step=*/*.parquet")
                        connection.execute(
                            f"create view {folder} as select * from "
                            f"read_parquet({parts}, hive_partitioning = true, hive_types = {{'step': bigint}})"
                        )
                return connection.sql(sql).to_arrow_table()
            except duckdb.CatalogException as error:
                raise RunError(f"{self.path}: {_first_line(error)}; the stage that writes it has not run") from error
            except (duckdb.InvalidInputException, duckdb.IOException) as error:
                raise DataError(f"a table of {self.path} cannot be read: {_first_line(error)}") from error
            except duckdb.Error as error:
                raise DataError(f"the query failed: {_first_line(error)}") from error

    def types(self) -> pa.Table:
        """One row a token type, as `detect` wrote it."""
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
        return sorted(int(path.name.removeprefix("step=")) for path in (self.path / "checkpoints").glob("step=*"))


class PartWriter:
    """Buffers rows and writes them as Parquet parts, each whole or absent."""

    def __init__(self, directory: Path, schema: pa.Schema, *, prefix: str = "", part_rows: int = PART_ROWS) -> None:
        self.directory, self.schema, self.part_rows = directory, schema, part_rows
        self.prefix = f"{prefix}-" if prefix else ""
        self.num_rows = 0
        self._tables: list[pa.Table] = []
        self._buffered = 0
        self._parts = 0

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            self.flush()

    def write(self, table: pa.Table) -> None:
        """Add rows; a part is written when enough have gathered."""
        self._tables.append(table.select(self.schema.names).cast(self.schema))
        self._buffered += len(table)
        self.num_rows += len(table)
        if self._buffered >= self.part_rows:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as a part."""
        if not self._buffered:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"part-{self.prefix}{self._parts:05d}.parquet"
        _write_parquet(pa.concat_tables(self._tables), path)
        self._tables, self._buffered, self._parts = [], 0, self._parts + 1


def open_run(path: str | Path) -> Run:
    """Open an existing run directory."""
    path = Path(path)
    manifest_path = path / MANIFEST
    if not manifest_path.exists():
        raise RunError(f"{path} is no run: it holds no {MANIFEST}")
    try:
        manifest = json.loads(manifest_path.read_text())
    except json.JSONDecodeError as error:
        raise RunError(
            f"{manifest_path} is not valid JSON (line {error.lineno}); restore it or start a new run"
        ) from error
    if not isinstance(manifest, dict) or not {"schema_version", "config", "stages"} <= manifest.keys():
        raise RunError(f"{manifest_path} is not the manifest of a run; restore it or start a new run")
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise RunError(
            f"{path} has schema version {manifest['schema_version']}, this program reads {SCHEMA_VERSION}; "
            "use the rocktokens version that made it"
        )
    return Run(path, manifest)


def _draft(path: Path) -> Path:
    """A name to write under; drafts of the same file that a killed process left are removed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def _write_parquet(table: pa.Table, path: Path) -> None:
    draft = _draft(path)
    try:
        # Parquet's min and max pass over NaN, and DuckDB concludes from them that no row is NaN: none for floats.
        plain = [field.name for field in table.schema if not pa.types.is_floating(field.type)]
        pq.write_table(table, draft, compression="zstd", write_statistics=plain)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path}: {error}; free some space or choose another directory, then repeat"
        ) from error


def _read_parquet(path: Path, columns: list[str] | None) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read ({_first_line(error)}); remove it and run its stage again") from error


def _quote(path: Path, pattern: str = "") -> str:
    """A path, taken literally, and a pattern below it, as a SQL string; DuckDB reads every path as a pattern."""
    literal = "".join(f"[{letter}]" if letter in "[*?" else letter for letter in str(path))
    return "'" + (literal + pattern).replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("rocktokens", "torch", "transformers", "trl", "pyarrow", "duckdb")}


def _first_difference(section: str, old: Any, new: Any) -> str | None:
    """What to tell of two settings that differ. One that is missing is unset: an older version did not know it."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = (_first_difference(f"{section}.{key}", old.get(key), new.get(key)) for key in sorted({*old, *new}))
        return next((difference for difference in found if difference is not None), None)
    return None if old == new else f"{section} was {old!r}, now {new!r}"
