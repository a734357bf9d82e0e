"""What a report reads of a run: its tables, each optional as is every column, the manifest, tokens and rocks.

What is not there leaves out what needs it, and is named in `notes`. This module reads; it computes nothing that
detection or the census should have computed.
"""

from __future__ import annotations

import math
import shlex
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.errors import DataError, RockTokensError, RunError
from rocktokens.run import Run, first_line, open_run
from rocktokens.show import at_home, visible
from rocktokens.values import Json, Row

Found = TypeVar("Found")


def registry() -> dict[str, Any]:
    """The stages by name, in their order; found by its name, since the registry stands above all rooms."""
    stages: dict[str, Any] = import_module("rocktokens.study").STAGES
    return stages


class Facts:
    """A run, as the report reads it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.notes: list[str] = []
        """What was there but could not be used, to be named in the report."""
        self._tables: dict[str, pa.Table | None] = {}
        self.known: Json = {}
        """What functions marked `once` found."""

    @classmethod
    def of(cls, path: str | Path) -> Facts:
        """Open a run directory."""
        return cls(open_run(path))

    @property
    def name(self) -> str:
        """The run directory's name."""
        return self.run.path.resolve().name

    # Tables

    def table(self, name: str) -> pa.Table | None:
        """A table that is there and not empty; a damaged one is named and left out."""
        if name not in self._tables:
            try:
                found = self.run.read(name) if self.run.has(name) else None
            except (DataError, RunError) as error:
                self.notes.append(f"{name}.parquet was left out: {error}")
                found = None
            self._tables[name] = found if found is not None and len(found) else None
        return self._tables[name]

    def rows(self, name: str) -> list[Row]:
        """The rows of a table; none where there is none."""
        table = self.table(name)
        return [] if table is None else table.to_pylist()

    def columns(self, name: str) -> list[str]:
        """Columns of a table that may be too large to read whole; none where it is missing or damaged."""
        path = self.run.path / f"{name}.parquet"
        try:
            return pq.read_schema(path).names if path.exists() else []
        except (pa.ArrowInvalid, OSError) as error:
            self.notes.append(f"{name}.parquet was left out: {first_line(error)}")
            return []

    def lacks(self, table: pa.Table, figure: str, *columns: str) -> bool:
        """Whether a table lacks columns that a figure needs; if so, the report says which."""
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            self.notes.append(f"{figure} was left out: no column {', '.join(missing)}")
        return bool(missing)

    def ask(self, sql: str) -> list[Row]:
        """The rows of a query; none where a table or column is missing."""
        try:
            return self.run.query(sql).to_pylist()
        except (DataError, RunError) as error:
            self.notes.append(f"a question to the run was left out: {error}")
            return []

    # Manifest

    @property
    def config(self) -> Json:
        """Sections of the configuration."""
        return self.run.manifest.get("config", {})

    def stage(self, name: str) -> Json:
        """What a stage recorded about itself; empty where it did not run."""
        return self.run.manifest.get("stages", {}).get(name) or {}

    def ran(self, stage: str) -> bool:
        """Whether a stage is complete; an imported run holds rollouts and their scores without the stages."""
        there = {"score": lambda: bool(self.run.steps()), "sample": lambda: bool(self.columns("rollouts"))}
        return self.run.done(stage) or (stage in there and there[stage]())

    @property
    def stages(self) -> list[str]:
        """Completed stages in the order of a study, whatever order they were completed in."""
        known = list(registry())

        def place(stage: str) -> tuple[int, str, int]:
            base, _, step = stage.partition("/step=")
            return known.index(base) if base in known else len(known), base, int(step) if step.isdigit() else -1

        return sorted((stage for stage in self.run.manifest.get("stages", {}) if stage != "report"), key=place)

    @property
    def not_run(self) -> dict[str, str]:
        """Stages that this run has not completed, and what each does."""
        stages = {name: spec.help for name, spec in registry().items() if name != "report"}
        return {name: what for name, what in stages.items() if not self.ran(name)}

    # Commands that a reader can paste

    @property
    def has_models(self) -> bool:
        """Whether the run names a student and a teacher, so that stages that load them can be suggested."""
        pair = self.config.get("pair") or {}
        return bool(pair.get("student") and pair.get("teacher"))

    @property
    def place(self) -> str:
        """The run directory as a shell takes it: relative where the run lies below the working directory."""
        path = self.run.path.absolute()
        below = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        text = at_home(str(below))
        return text if text.startswith("~") and shlex.quote(text[1:]) == text[1:] else shlex.quote(str(below))

    def command(self, stage: str) -> str | None:
        """The command that runs a stage on this run; None where the run lacks the models it asks."""
        return f"rocktokens {stage} {self.place}" if self.has_models or not registry()[stage].asks else None

    # Tokens and rocks

    @cached_property
    def definition(self) -> str:
        """The definition by which rocks are called rocks here."""
        return self.stage("detect").get("definition") or self.config.get("detect", {}).get("definition") or "certified"

    @property
    def signal(self) -> str:
        """The loss that types are ordered by."""
        return self.stage("detect").get("signal") or "kl"

    @cached_property
    def types(self) -> list[Row]:
        """Token types, rocks first, each with a name."""
        table = self.table("types")
        if table is None or self.lacks(table, "the token types", "token_id"):
            return []
        return [{**row, "token": row.get("token") or f"#{row['token_id']}"} for row in table.to_pylist()]

    @cached_property
    def rocks(self) -> list[Json]:
        """Rows of the rocks by the chosen definition, best first."""
        own = [row for row in self.types if row.get(f"in_{self.definition}")]
        place = f"place_{self.definition}"
        return sorted(own, key=lambda row: (row.get(place) or math.inf, row["token_id"]))

    @property
    def rock_word(self) -> str:
        """What the found tokens are: costly without a loss before distillation, rock so far by two checkpoints."""
        if self.types and all(row.get("loss_pre") is None for row in self.types):
            return "costly"
        so_far = self.rocks and all(row.get("class") == "rock so far" for row in self.rocks)
        return "rock so far" if so_far else "rock"

    @cached_property
    def rock_ids(self) -> set[int]:
        """Token ids of the rocks."""
        return {row["token_id"] for row in self.rocks}

    @cached_property
    def texts(self) -> dict[int, str]:
        """Token id to its text, where detection named it."""
        return {row["token_id"]: row["token"] for row in self.types}

    def token(self, token_id: Any) -> str:
        """The text of a token id."""
        return self.texts.get(token_id, f"#{token_id}") if isinstance(token_id, int) else str(token_id)

    @cached_property
    def steps(self) -> list[int]:
        """Checkpoints that were scored, in order."""
        return self.run.steps()

    @property
    def pair(self) -> tuple[str, str]:
        """Names of student and teacher; of a path, its last two parts."""
        pair = self.config.get("pair", {})
        names = (str(pair.get(role, "")).replace("\\", "/").split("/") for role in ("student", "teacher"))
        student, teacher = (visible("/".join([part for part in parts if part][-2:])) for parts in names)
        return student.replace("∅", "not recorded"), teacher.replace("∅", "not recorded")


def once(make: Callable[[Facts], Found]) -> Callable[[Facts], Found]:
    """Compute a function of a run's facts once for the whole report."""

    @wraps(make)
    def kept(facts: Facts) -> Found:
        if make.__name__ not in facts.known:
            facts.known[make.__name__] = make(facts)
        return facts.known[make.__name__]

    return kept


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Values inside a run that have another type than its stages write become DataError: somebody changed them."""
    try:
        yield
    except RockTokensError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{path}: run.json or a table holds a value that no stage writes ({type(error).__name__}: "
            f"{first_line(error)}, {place.name}); restore it, or run its stage again with --again"
        ) from error
