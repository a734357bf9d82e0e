"""What describes a table of a run: columns with types and meanings, and the page that is made from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

STR, INT, INT32, FLOAT, FLOAT32, BOOL = pa.string(), pa.int64(), pa.int32(), pa.float64(), pa.float32(), pa.bool_()
IDS, LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.float32())


class Column(NamedTuple):
    """One column: its name, its Arrow type, and what it means in one sentence."""

    name: str
    type: pa.DataType
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table of a run."""

    stage: str
    """The command that writes it."""
    row: str
    """What one row is: "one row per …"."""
    columns: tuple[Column, ...]
    path: str = ""
    """File pattern below the run directory; empty: NAME.parquet."""
    more: str = ""
    """What further columns there may be, where their names depend on the settings."""

    @property
    def schema(self) -> pa.Schema:
        """The columns as Arrow sees them."""
        return pa.schema([(column.name, column.type) for column in self.columns])

    def conform(self, table: pa.Table) -> pa.Table:
        """The same rows with the documented columns first, in order and of their types; empty where not given."""
        given = set(table.column_names)
        arrays = {
            column.name: table[column.name].cast(column.type)
            if column.name in given
            else pa.nulls(len(table), column.type)
            for column in self.columns
        }
        return pa.table(arrays | {name: table[name] for name in table.column_names if name not in arrays})

    def misfit(self, schema: pa.Schema) -> str | None:
        """The first documented column that has values of another kind, in words; None where all fit."""
        for column in self.columns:
            place = schema.get_field_index(column.name)
            if place >= 0 and not _fits(schema.field(place).type, column.type):
                return f"column {column.name} holds {_kind(schema.field(place).type)}, not {_kind(column.type)}"
        return None


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a type can stand in a column of another: another width, or whole numbers among numbers."""
    if pa.types.is_null(found) or found == wanted:
        return True
    if _is_list(found) and _is_list(wanted):
        return _fits(found.value_type, wanted.value_type)
    return _kind(found) == _kind(wanted) or (_kind(found), _kind(wanted)) == ("whole numbers", "numbers")


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if _is_list(kind):
        return f"lists of {_kind(kind.value_type)}"
    names = (
        (pa.types.is_integer, "whole numbers"),
        (pa.types.is_floating, "numbers"),
        (pa.types.is_boolean, "true or false"),
        (pa.types.is_string, "text"),
        (pa.types.is_large_string, "text"),
    )
    return next((name for test, name in names if test(kind)), str(kind))


def columns(*groups: Column | tuple[str, pa.DataType, str] | Iterable[Column]) -> tuple[Column, ...]:
    """Columns one after the other; single ones may be given as (name, type, meaning)."""
    found: list[Column] = []
    for group in groups:
        if isinstance(group, tuple) and len(group) == 3 and isinstance(group[0], str):
            found.append(Column(*group))
        else:
            found += group  # type: ignore[arg-type]
    return tuple(found)


def interval(name: str, meaning: str) -> tuple[Column, ...]:
    """A value with the two ends of its 95 % interval, as three columns."""
    return (
        Column(name, FLOAT, meaning),
        Column(f"{name}_low", FLOAT, f"Lower end of the interval of {name}; empty where there is none."),
        Column(f"{name}_high", FLOAT, f"Upper end of the interval of {name}; empty where there is none."),
    )


def by_stage(prefix: str, stages: Iterable[str], meaning: str) -> tuple[Column, ...]:
    """One number per stage of a training step."""
    return tuple(Column(f"{prefix}_{stage}", FLOAT, meaning.format(stage)) for stage in stages)


PROMPT = Column("prompt_id", STR, "Identifier of the prompt.")
ROLLOUT = Column("rollout_id", STR, "Identifier of the rollout: prompt_id#number.")
TOKEN_ID = Column("token_id", INT, "Vocabulary id of the token type.")
SHARE_POSITIONS, SHARE_LOSS = "Share of all response positions.", "Share of the total loss."
ENRICHMENT = "Share of the loss divided by share of the positions; 1 means merely frequent."
ROLLOUT_COLUMNS = columns(
    PROMPT,
    ROLLOUT,
    ("prompt_ids", IDS, "Token ids of the prompt, as the model saw them."),
    ("token_ids", IDS, "Sampled token ids, the end token included."),
    ("text", STR, "The rollout decoded without special tokens, for people; nothing is computed from it but `correct`."),
    ("answer", STR, "Reference answer; empty where the prompt has none."),
    ("correct", BOOL, "Whether the rollout's answer is right; empty where nothing could be checked."),
    ("truncated", BOOL, "Whether the rollout was cut at the length limit."),
    ("seed", INT, "Seed of the rollout's random numbers."),
)

PAGE = """# The tables of a run

This page is generated from `rocktokens/tables.py` by `make docs`; change that file, not this page.

A run is a directory. `run.json` is its manifest: the configuration by section, versions, and every completed stage with
the facts that it recorded and the digests of what it read. It is written last and atomically, so a stage that it does
not list does not count. Everything else is Parquet (zstd), which DuckDB reads where it lies, and checkpoints in the
Hugging Face format (`checkpoints/step=N/`; step 0 is the student that on-policy distillation started from).

```python
from rocktokens import open_run

run = open_run("runs/arithmetic")
run.rocks()                                   # the rock token types, an Arrow table
run.occurrences("select token_id, avg(kl) from occurrences group by 1 order by 2 desc limit 10")
run.query("select verdict, count(*) from census group by 1")
```

Measures that are not finite (a model gave NaN) are kept as NaN in `occurrences` and counted in the manifest; in every
other table, what is not known is empty (null). Float columns carry no Parquet statistics, because these leave NaN out
and DuckDB would conclude that there is none. Every file is written under a draft name and renamed when it is whole, so
a killed command leaves either the old file or the new one. What the measures mean: [metrics.md](metrics.md).

Beside the tables: `gradients.safetensors` (sums of gradients per token type that `score` gathers for `geometry`),
`compare/REGIME/seed=N/` (each training of the comparison is a run of its own), `bypass.json`, `report.html` and
`figures/`.

"""


def as_markdown(tables: Mapping[str, Table]) -> str:
    """The reference page of all tables: an overview, then one section per table."""
    rows = "".join(
        f"| [`{name}`](#{name.replace('/', '')}) | `rocktokens {table.stage}` | {table.row} |\n"
        for name, table in tables.items()
    )
    sections = [f"| table | written by | content |\n|---|---|---|\n{rows}"]
    for name, table in tables.items():
        lines = [f"## {name}\n", f"`{table.path or f'{name}.parquet'}`, {table.row}.\n"]
        if table.more:
            lines.append(f"{table.more}\n")
        lines += ["| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column.name}` | {column.type} | {column.meaning} |" for column in table.columns]
        sections.append("\n".join(lines) + "\n")
    return PAGE + "\n".join(sections)
