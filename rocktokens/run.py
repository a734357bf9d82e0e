"""A run is a directory: a manifest and Parquet that DuckDB reads where it lies.

Every file is written under a draft name and renamed when it is whole; the manifest, run.json, is written last. So what
it lists exists and is complete, and a killed run continues. One command at a time works on a run. `writing` and
`reading` are the two places where errors of the operating system and of file formats become RunError and DataError.
This module does not know what tables and stages mean.
"""

from __future__ import annotations

import errno
import functools
import glob
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.errors import DataError, RockTokensError, RunError
from rocktokens.tables import ORDERED_BY, SCHEMA_VERSION, TABLES, table_of
from rocktokens.values import Json

log = logging.getLogger(__name__)

MANIFEST, LOCK = "run.json", ".lock"
LOCKED = (
    "ROCKTOKENS_LOCK"  # environment variable: directory → device and inode, of the runs that this command has locked
)
SCORED = ("occurrences", "top_tokens")  # folders with one directory per scored checkpoint
STEP_FOLDERS = (*SCORED, "telemetry")
PACKAGES = ("rocktokens", "torch", "transformers", "trl", "pyarrow", "duckdb")
# A larger file is told apart by its size and evenly spaced blocks: reading 50 GB to say "nothing to do" takes minutes.
WHOLE_DIGEST_BYTES = 256 * 2**20
BLOCK_BYTES, BLOCKS = 2**20, 64
MOST_SHRUNK = 1000  # bytes of a table in memory for one in its file
FULL = (errno.ENOSPC, errno.EDQUOT)


# ---------------------------------------------------------------- files: written whole or not at all


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Errors of the operating system inside become RunError: what could not be written and what to do."""
    try:
        yield
    except Exception as error:
        text = str(error)  # torch and safetensors have errors of their own, and pyarrow puts the reason into the text
        foreign = type(error).__name__ == "SafetensorError" or "PytorchStreamWriter" in text
        if not isinstance(error, OSError) and not foreign and "inline_container" not in text:
            raise
        number = getattr(error, "errno", None)
        is_full = number in FULL or any(os.strerror(full) in text for full in FULL)
        remedy = "free some space" if is_full else "make it writable or choose another directory"
        reason = first_line(error) if number is None else os.strerror(number)
        raise RunError(f"cannot write {path}: {reason}; {remedy}, then repeat the command") from error


@contextmanager
def drafting(path: Path) -> Iterator[Path]:
    """Yields a name of this process's own to write under; what still has that name at the end is removed."""
    require_home(path)
    with failing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_drafts(path.parent, glob.escape(path.name))
    draft = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:6]}.tmp")
    try:
        yield draft
    finally:
        with suppress(OSError):  # the next process that writes this file removes it
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yields the draft to write, a file or folder; it takes the place of `path` when the block ends well."""
    with drafting(path) as draft, failing(path):
        yield draft
        draft.replace(path)  # atomic: a reader sees the old file or the new one


def remove_left_drafts(folder: Path, pattern: str = "*") -> None:
    """Remove the drafts in a folder, of files whose names fit the pattern, that ended processes left."""
    for left in folder.glob(f".{pattern}.*.tmp"):
        owner = left.name.removesuffix(".tmp").rpartition(".")[2].partition("-")[0]
        if not owner.isdigit() or int(owner) == os.getpid() or not psutil.pid_exists(int(owner)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, and to the disk before it takes the old one's place."""
    with writing(path) as draft, draft.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write a Parquet file whole, in place of what was there."""
    with writing(path) as draft:
        write_draft(table, draft)


def write_draft(table: pa.Table, draft: Path) -> None:
    """Write a Parquet file with a checksum for every page, under exactly this name."""
    # Parquet's min and max pass over NaN, and DuckDB concludes from them that no row is NaN: none for floats.
    plain = [field.name for field in table.schema if not pa.types.is_floating(field.type)]
    pq.write_table(table, draft, compression="zstd", write_statistics=plain, write_page_checksum=True)


def read_parquet(
    path: Path, columns: list[str] | None = None, remedy: str = "remove it and run its stage again"
) -> pa.Table:
    """A Parquet file as an Arrow table; DataError with the remedy where it is damaged."""
    with reading(path, remedy):
        require_room(pq.read_metadata(path), path.stat().st_size)
        return pq.read_table(path, columns=columns, page_checksum_verification=True)


def require_room(metadata: pq.FileMetaData, size: int) -> None:
    """Refuse a Parquet file of `size` bytes whose header promises rows that neither it nor the memory can hold."""
    held = 0
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        held += min([group.num_rows, *(group.column(at).num_values for at in range(group.num_columns))])
    if held < metadata.num_rows:
        raise ValueError(f"its header promises {metadata.num_rows:,} rows, and it holds {held:,}")
    # Real tables shrink by less than a thousand; 8 bytes for a value, whatever its type.
    promised = 8 * metadata.num_rows * metadata.num_columns
    if promised > max(MOST_SHRUNK * size, psutil.virtual_memory().total):
        raise ValueError(f"its header promises {metadata.num_rows:,} rows, more than the memory takes")


@contextmanager
def reading(path: Path, remedy: str = "remove it and run its stage again") -> Iterator[None]:
    """Whatever fails inside becomes DataError: the file is damaged, and what to do about it."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, a directory read as many files
            raise ValueError("it is not a regular file")
        yield
    except (RockTokensError, MemoryError, AssertionError):
        raise
    except Exception as error:
        said = f"is damaged and cannot be read ({first_line(error)})"
        if isinstance(error, FileNotFoundError | PermissionError):
            said = "is missing" if isinstance(error, FileNotFoundError) else "may not be read"
        raise DataError(f"{path} {said}; {remedy}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def digest(path: Path) -> str | None:
    """What a file or directory holds, in 16 letters; None where there is nothing.

    A directory's digest is over the names, sizes and contents of its files; drafts and hidden files do not count.
    """
    try:
        if not path.is_dir():
            return _file_digest(path) if path.is_file() else None
        parts = []
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in name.parts):
                parts.append(f"{name}:{file.stat().st_size}:{_file_digest(file)}")
        return digest_of_value(parts) if parts else None
    except OSError:
        return None


def _file_digest(path: Path) -> str:
    found = path.stat()
    return _known_digest(str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ino)


@functools.lru_cache(maxsize=4096)
def _known_digest(path: str, size: int, _mtime: int, _inode: int) -> str:
    """Computed once per process as long as size and time of the file stay."""
    found = hashlib.blake2b(str(size).encode(), digest_size=8)
    with open(path, "rb") as file:
        if size <= WHOLE_DIGEST_BYTES:
            while block := file.read(BLOCK_BYTES):
                found.update(block)
        else:
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
                found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()


def digest_of_value(value: object) -> str:
    """The digest of plain values: settings, facts."""
    text = json.dumps(value, sort_keys=True, default=str, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------- one command at a time


@contextmanager
def working_on(path: Path) -> Iterator[None]:
    """Hold the run at `path` inside the block; RunError where another command works on it.

    A killed process frees the lock; what RUN/.lock holds is for the message. Children of the command share it. Where
    the directory cannot be written no lock is needed.
    """
    from filelock import FileLock, Timeout

    own, file, is_new, before = str(path.resolve()), path / LOCK, not path.exists(), os.environ.get(LOCKED) or "{}"
    if own in json.loads(before):
        yield
        return
    refuse_strange(path)  # before anything in it is opened
    lock = FileLock(file, blocking=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        with reading(file):
            said = file.read_text(encoding="utf-8")[:300] or "another process"
        raise RunError(
            f"{path} is in use: {said} works on it. Wait until it has ended, or choose another directory for this run."
        ) from None
    except OSError:
        yield  # what writes next says why
        return
    os.environ[LOCKED] = json.dumps({**json.loads(before), own: _identity(path)})
    refused = False
    try:
        with suppress(OSError):  # a full disk: the lock holds all the same
            if file.stat().st_size:
                log.info("%s: the last command was stopped; this one continues", path)
                remove_left_drafts(path)
            words = " ".join(sys.argv[1:])[:200]
            _mark(file, f"process {os.getpid()} on {socket.gethostname()} (rocktokens {words})")
        yield
    except Exception as error:
        require_home(file)  # whatever fails in a run that is elsewhere by now has this reason
        refused = isinstance(error, RockTokensError | OSError)
        raise
    finally:
        with suppress(OSError, RunError):  # RunError: the run is elsewhere by now, and nothing here is ours
            require_home(file)
            _mark(file, "")
            # A command that was refused before it made anything leaves no directory, and no manifest to obey.
            if is_new and {item.name for item in path.iterdir()} <= {LOCK, *((MANIFEST,) if refused else ())}:
                shutil.rmtree(path)
        os.environ[LOCKED] = before
        lock.release()


def refuse_strange(path: Path) -> None:
    """Refuse a run in which something is neither a file nor a directory: a link would be written through, a pipe waited
    for."""
    for folder, folders, files in os.walk(path):
        for item in (os.path.join(folder, name) for name in (*folders, *files)):
            mode = os.lstat(item).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "symbolic link" if stat.S_ISLNK(mode) else "pipe, socket or device"
                raise RunError(f"{item} is a {kind}; a run holds files and directories only. Remove it.")


def _mark(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
    with open(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)


def _identity(path: Path) -> list[int] | None:
    """Device and inode of a directory: another one of the same name has others."""
    with suppress(OSError):
        return [path.stat().st_dev, path.stat().st_ino]
    return None


def require_home(path: Path) -> None:
    """Refuse to write below a run that was moved, deleted or replaced since this command began to work on it."""
    for own, known in json.loads(os.environ.get(LOCKED) or "{}").items():
        home = Path(own)
        if path.parent.resolve().is_relative_to(home) and _identity(home) != known:
            raise RunError(f"{home} was moved, deleted or replaced while this command worked on it; repeat the command")


# ---------------------------------------------------------------- the run


class Run:
    """A run directory. Open one with `open_run`, start or continue one with `Run.create`.

    The manifest holds `config` (settings by section), `versions`, `stages` (complete stages → what each found),
    `records` (complete stages → settings and inputs, by which a change is noticed) and `files` (tables → size, digest
    and the stage that wrote them).
    """

    def __init__(self, path: str | Path, manifest: Json) -> None:
        self.path, self.manifest = Path(path), manifest
        self._written: set[Path] = set()  # since the last stage was recorded
        self._home = _identity(self.path)  # None before a new run is saved for the first time

    @classmethod
    def create(cls, path: str | Path, config: Json | None = None) -> Run:
        """Start a run, or continue the one that is there: a section of `config` that it has must be the same."""
        path, config = Path(path), json.loads(json.dumps(config or {}, default=str))
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; a run is a directory. Choose another path.")
        found = [item.name for item in path.iterdir()] if path.exists() else []
        content = {name for name in found if name != LOCK and not name.endswith(".tmp")}
        if MANIFEST in content:
            run = open_run(path)
            known = run.manifest["config"]
            if content == {MANIFEST}:  # nothing was made yet (the first command failed early): nothing to protect
                known = run.manifest["config"] = {**known, **config}
                run.save()
            shared = {name: config[name] for name in config.keys() & known.keys()}
            for difference in differences("", known, shared):
                said = f"{path} was made with another configuration: {difference}"
                raise RunError(f"{said}. Choose another directory, or repeat the first command to continue.")
            run.describe(config)
            return run
        if content:
            raise RunError(f"{path} is not empty and holds no {MANIFEST}; choose another directory for the run")
        versions = {}
        for name in PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        empty: Json = {"stages": {}, "records": {}, "files": {}}
        run = cls(path, {"schema_version": SCHEMA_VERSION, "config": config, "versions": versions, **empty})
        run.save()
        return run

    def save(self) -> None:
        """Write the manifest, whole, with the digest by which `open_run` knows that nobody else has changed it."""
        if self._home is not None and self._home != _identity(self.path):
            raise RunError(f"{self.path} was moved, deleted or replaced since it was opened; repeat the command")
        plain = json.loads(json.dumps(self.manifest, allow_nan=False))  # as it will be read: numbers as keys are texts
        write_text(self.path / MANIFEST, json.dumps({**plain, "digest": digest_of_value(plain)}, indent=2))
        self._home = _identity(self.path)

    def describe(self, sections: Json) -> None:
        """Add sections to the configuration; those that are there stay as they are."""
        config = json.loads(json.dumps({**sections, **self.manifest["config"]}, default=str))
        if config != self.manifest["config"] or not (self.path / MANIFEST).exists():
            self.manifest["config"] = config
            self.save()

    def finish(self, stage: str, facts: Json | None = None) -> None:
        """Record a stage as complete. Written last and atomically: what is not listed here does not exist.

        What the stage wrote through this object is listed with its size and digest, so that damage is noticed.
        """
        for path in sorted(self._written):
            name, found = str(path.relative_to(self.path)), digest(path)
            if found is not None:
                self.manifest["files"][name] = {"size": path.stat().st_size, "digest": found, "stage": stage}
        self.manifest["stages"][stage] = facts or {}
        self.save()
        self._written.clear()

    def reopen(self, stage: str) -> None:
        """Forget that a stage was completed, so that it runs again."""
        if self.manifest["stages"].pop(stage, None) is not None:
            self.manifest["records"].pop(stage, None)
            files = self.manifest["files"].items()
            self.manifest["files"] = {name: known for name, known in files if known["stage"] != stage}
            self.save()

    def adopt(self, other: Run, stage: str) -> None:
        """Record a stage as another run recorded it, whose files have been moved here."""
        self.manifest["config"].update(other.manifest["config"])
        for kind in ("records", "files"):
            self.manifest[kind] |= other.manifest[kind]
        self.finish(stage, other.facts(stage))

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
        """Write NAME.parquet whole, in place of what was there; columns as tables.py has them."""
        self.write_all({name: table})
        return self.path / f"{name}.parquet"

    def write_all(self, tables: Mapping[str, pa.Table], *, stage: str = "") -> None:
        """Write tables under draft names, forget that their stage was complete, then swap them in."""
        with ExitStack() as drafts:
            waiting = {}
            for name, table in tables.items():
                path, known = self.path / f"{name}.parquet", table_of(name)
                waiting[path] = drafts.enter_context(drafting(path))
                with failing(path):
                    write_draft(table if known is None else known.conform(table), waiting[path])
            self.reopen(stage)  # killed from here on, the stage is not listed, and a repeat writes it anew
            for path, draft in waiting.items():
                with failing(path):
                    draft.replace(path)
                self._written.add(path)

    def write_part(self, step: int, table: pa.Table, *, folder: str = "occurrences", part: str = "00000") -> None:
        """Write rows of one checkpoint (telemetry: of one training step) as a part of their own.

        `part` tells apart the parts of one step, and the processes that write at the same time.
        """
        path, schema = self.path / folder / f"step={step}" / f"part-{part}.parquet", TABLES[folder].schema
        write_parquet(table.select(schema.names).cast(schema), path)
        self._written.add(path)

    def write_tensors(self, name: str, tensors: Json) -> None:
        """Write NAME.safetensors whole, in place of what was there."""
        from safetensors.torch import save_file

        path = self.path / f"{name}.safetensors"
        with writing(path) as draft:
            save_file(tensors, draft)
        self._written.add(path)

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

    def verify(self, path: Path) -> None:
        """Refuse a file whose bytes are not those that its stage wrote, or whose columns are not those of tables.py.

        Only a file of the recorded size counts as changed: one of another size was replaced on purpose, or is cut short
        and cannot be read at all.
        """
        name = str(path.relative_to(self.path))
        if path in self._written or not path.exists():
            return
        if self._is_changed(name, path):
            raise DataError(f"{path} is damaged: its content is not what was written; {self._remedy(path)}")
        known = table_of(name.removesuffix(".parquet")) if path.suffix == ".parquet" else None
        with reading(path, self._remedy(path)):
            metadata = pq.read_metadata(path) if path.suffix == ".parquet" else None
            if metadata is not None:
                require_room(metadata, path.stat().st_size)
            wrong = known and metadata and known.misfit(metadata.schema.to_arrow_schema())
        if wrong:
            raise DataError(f"{path} is damaged: {wrong}; {self._remedy(path)}")

    def damaged_files(self, stage: str) -> list[str]:
        """Files that a stage wrote and that are gone, or hold something else at the same size."""
        own = [name for name, known in self.manifest["files"].items() if known["stage"] == stage]
        return sorted(n for n in own if not (self.path / n).is_file() or self._is_changed(n, self.path / n))

    def _is_changed(self, name: str, path: Path) -> bool:
        known = self.manifest["files"].get(name, {})
        return path.stat().st_size == known.get("size") and digest(path) != known.get("digest")

    def _remedy(self, path: Path) -> str:
        known = self.manifest["files"].get(str(path.relative_to(self.path)), {"stage": ""})
        stage = known["stage"].split("/")[0]
        return f"run `rocktokens {stage} {self.path} --again`" if stage else "remove it and run its stage again"

    # Occurrences, one folder per checkpoint or training step

    def steps(self) -> list[int]:
        """Checkpoints whose occurrences are recorded, in order."""
        return _steps_in(self.path / "occurrences")

    def clear_occurrences(self, step: int) -> None:
        """Remove a checkpoint's occurrences and top tokens (those of a stage that did not complete)."""
        for folder in SCORED:
            shutil.rmtree(self.path / folder / f"step={step}", ignore_errors=True)

    def replace_occurrences(self, step: int, files: Mapping[str, Sequence[Path]], *, stage: str) -> None:
        """Put finished parts in place of a checkpoint's occurrences and top tokens: linked first, then swapped in.

        `files` names the parts of each folder, in order; `stage` is no longer complete before anything is replaced.
        """
        for folder, parts in files.items():
            new = self.path / folder / f".new-step={step}"
            require_home(new)
            shutil.rmtree(new, ignore_errors=True)
            with failing(new):
                new.mkdir(parents=True)
                for number, part in enumerate(parts):
                    try:
                        os.link(part, new / f"part-{number:05d}.parquet")
                    except OSError:  # a file system without links
                        shutil.copyfile(part, new / f"part-{number:05d}.parquet")
        self.reopen(stage)
        self.clear_occurrences(step)
        for folder in files:
            final = self.path / folder / f"step={step}"
            with failing(final):
                (self.path / folder / f".new-step={step}").replace(final)
            self._written.update(final.iterdir())

    def occurrences(self, sql: str | None = None) -> pa.Table:
        """All occurrences, with their checkpoint as `step`; or the answer to a query over the view `occurrences`."""
        return self.query(sql or "select * from occurrences")

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Ask DuckDB; every table of the run is a view, the scored checkpoints `occurrences`, training `telemetry`.

        One SELECT over the run's own files; nothing is written. Values that are not ours (ids, texts) go in as `?` and
        stand in `parameters`.
        """
        import duckdb

        with duckdb.connect() as connection:
            try:
                for name, source in self._views(sql):
                    connection.execute(f"create view {_quoted(name, chr(34))} as select * from {source}")
                homes = sorted({f"{form}/" for form in (str(self.path), str(self.path.resolve()), _escape(self.path))})
                connection.execute(f"set allowed_directories = [{', '.join(_quoted(home) for home in homes)}]")
                connection.execute("set enable_external_access = false")  # no other file, no network, no extension
                connection.execute("set lock_configuration = true")  # and no query that sets it back
                statements = connection.extract_statements(sql)
                if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                    raise DataError("the query failed: only one SELECT statement is allowed")
                return connection.sql(sql, params=list(parameters)).to_arrow_table()
            except duckdb.CatalogException as error:
                raise RunError(f"{self.path}: {first_line(error)}; the stage that writes it has not run") from error
            except duckdb.Error as error:
                raise DataError(f"the query of {self.path} failed: {first_line(error)}") from error

    def _views(self, sql: str) -> Iterator[tuple[str, str]]:
        """Name and source of every table that the query mentions; a damaged table must not hide the others."""
        asked = sql.lower()
        for table in sorted(self.path.glob("*.parquet")):
            if table.stem.lower() in asked:
                self.verify(table)
                yield table.stem, f"read_parquet({_quoted(_escape(table))})"
        for folder in STEP_FOLDERS:
            parts = sorted(self.path.glob(f"{folder}/step=*/*.parquet")) if folder in asked else []
            for part in parts:
                self.verify(part)
            if parts:
                pattern = _quoted(f"{_escape(self.path)}/{folder}/step=*/*.parquet")
                yield folder, f"read_parquet({pattern}, hive_partitioning = true, hive_types = {{'step': bigint}})"

    def groups(self, table: str = "rollouts") -> dict[str, str]:
        """Group of every prompt of a table with prompt_id: its group_id, or its own name where it has none.

        Halves, tests and bootstraps go by group. Runs of earlier versions and imported ones have no groups.
        """
        columns = pq.read_schema(self.path / f"{table}.parquet").names if self.has(table) else []
        found = self.read(table, [name for name in ("prompt_id", "group_id") if name in columns])
        prompts = found["prompt_id"].to_pylist()
        given = found["group_id"].to_pylist() if "group_id" in columns else prompts
        return {prompt: group or prompt for prompt, group in zip(prompts, given)}

    def types(self) -> pa.Table:
        """One row per token type, as `detect` wrote it."""
        return self.read("types")

    def rocks(self, definition: str | None = None) -> pa.Table:
        """The rock token types by a definition (default: the one `detect` chose), largest first."""
        chosen = definition or self.facts("detect")["definition"]
        if chosen not in ORDERED_BY:
            raise RunError(f"definition must be one of {', '.join(ORDERED_BY)}, got {chosen!r}")
        return self.query(f"select * from types where in_{chosen} order by {ORDERED_BY[chosen]} desc, token_id")

    def checkpoint(self, step: int) -> Path:
        """Directory of a kept checkpoint."""
        return self.path / "checkpoints" / f"step={step}"

    def checkpoints(self) -> list[int]:
        """Steps of the kept checkpoints, in order."""
        return _steps_in(self.path / "checkpoints")

    # In a notebook; the pictures are made by the report, which is found by its name.

    def _repr_html_(self) -> str:
        return str(import_module("rocktokens.report.notebook").run_html(self))

    def plot(self, name: str) -> Any:
        """A figure of the report by its name, e.g. `funnel`, as a plotly figure."""
        return import_module("rocktokens.report.notebook").plot(self, name)


def open_run(path: str | Path) -> Run:
    """Open an existing run directory; one sentence says what is wrong with its manifest."""
    path = Path(path)
    file = path / MANIFEST
    if not file.exists():
        raise RunError(f"{path} is no run: it holds no {MANIFEST}")
    try:
        with reading(file, "restore it or start a new run"):
            manifest = dict(json.loads(file.read_text(encoding="utf-8")))
            made_by = dict(manifest.get("versions", {})).get("rocktokens", "0.2")
            given, found = manifest.pop("digest", None), digest_of_value(manifest)  # fails for 1e999, too
    except DataError as error:
        raise RunError(str(error)) from error
    if manifest.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise RunError(f"{path} was made by rocktokens {made_by}; `pip install rocktokens=={made_by}` reads it")
    if given != found:
        raise RunError(f"{file} is damaged, or was edited by hand; restore it or start a new run")
    return Run(path, manifest)


def _steps_in(folder: Path) -> list[int]:
    names = (path.name.removeprefix("step=") for path in folder.glob("step=*"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _escape(path: Path) -> str:
    """A path taken literally; DuckDB reads every path as a pattern."""
    return "".join(f"[{letter}]" if letter in "[*?" else letter for letter in str(path))


def _quoted(text: str, mark: str = "'") -> str:
    return mark + text.replace(mark, mark * 2) + mark


def differences(section: str, old: object, new: object) -> Iterator[str]:
    """What to tell of settings that differ.

    One that the old lacks is unset: an older version did not know it. One that the new lacks no longer decides results.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(new):
            yield from differences(f"{section}.{key}" if section else key, old.get(key), new[key])
    elif old != new:
        yield f"{section} was {old!r}, now {new!r}"
