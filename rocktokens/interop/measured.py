"""Tables that a user brings: counts and mean losses per token type. CSV or Parquet.

    counts = read_counts(Path("counts.csv"))           # token_id, count, mean_loss

Every fault of a file is named with its place before anything is computed from it. Column names are read without regard
to case, and spaces and hyphens count as underscores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from rocktokens.detect.counted import TypeCounts
from rocktokens.errors import DataError
from rocktokens.files import first_line

# What a column is called here → the names under which a file may have it.
COUNT_COLUMNS = {
    "token_id": ("token_id", "id"),
    "count": ("count", "frequency", "freq"),
    "mean_loss": ("mean_loss", "mean_kl", "kl"),
    "token": ("token", "token_string", "text"),
}
LARGEST = 2**53  # whole numbers above it are not exact as floating-point numbers
OPTIONAL = ("token",)


def read_counts(path: Path, *, signed: bool = False) -> TypeCounts:
    """Counts and mean losses per token type.

    Args:
        path: CSV or Parquet with token_id, count and mean_loss, one row per type; `token`, its text, is optional.
        signed: whether mean losses may be negative, as those of the sampled token's log-ratio.
    """
    table = _named(path, _read(path, COUNT_COLUMNS["token"]), COUNT_COLUMNS)
    token_id_V = _whole(path, table, "token_id")
    count_V = _whole(path, table, "count")
    loss_V = _numbers(path, table, "mean_loss")
    _refuse(path, token_id_V < 0, "token_id", token_id_V, "a token id is never negative")
    _refuse(path, count_V < 0, "count", count_V, "a count is never negative")
    if not signed:
        hint = "a KL divergence is never negative; for the mean log-ratio of sampled tokens pass --signal log_ratio"
        _refuse(path, loss_V < 0, "mean_loss", loss_V, hint)
    _refuse_repeated(path, [token_id_V.tolist()], "token_id", "add up the rows of a type first")
    if not count_V.any():
        raise DataError(f"{path}: every count is 0; there is nothing to measure")
    with np.errstate(over="ignore"):
        total = float(np.abs(count_V * loss_V).sum())
    if not np.isfinite(total) or float(count_V.astype(float).sum()) > LARGEST:
        raise DataError(
            f"{path}: counts times mean losses add up to more than a computer's numbers hold; mend the rows"
        )
    tokens = tuple(_texts(table["token"])) if "token" in table.column_names else None
    return TypeCounts(token_id_V, count_V, loss_V, tokens)


# ---------------------------------------------------------------- files


def _read(path: Path, texts: Sequence[str]) -> pa.Table:
    """The file's table; of a CSV, the columns with these names hold texts, whatever they look like (007, true)."""
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    kind = "CSV" if path.suffix.lower() in (".csv", ".tsv", ".txt") else "Parquet"
    try:
        if kind == "CSV":
            options = pa_csv.ParseOptions(
                delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True
            )
            with pa_csv.open_csv(path, parse_options=options) as begun:
                names = begun.schema.names
            kinds = {name: pa.string() for name in names if _plain(name) in texts}
            table = pa_csv.read_csv(
                path, parse_options=options, convert_options=pa_csv.ConvertOptions(column_types=kinds)
            )
        else:
            table = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as {kind}: {first_line(error)}") from error
    if not len(table):
        raise DataError(f"{path} holds no rows")
    return table


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _named(path: Path, table: pa.Table, wanted: Mapping[str, Sequence[str]]) -> pa.Table:
    """The wanted columns under our names; DataError where a required one is missing or there twice."""
    plain = [_plain(name) for name in table.column_names]
    found: dict[str, pa.ChunkedArray] = {}
    taken: set[int] = set()
    for name, aliases in wanted.items():
        places = [place for alias in aliases for place, own in enumerate(plain) if own == alias and place not in taken]
        if places and plain.count(plain[places[0]]) > 1:
            raise DataError(f"{path} has several columns {plain[places[0]]}; keep the one that is meant")
        if places:
            taken.add(places[0])
            column = table.column(places[0])
            found[name] = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        elif name not in OPTIONAL:
            have = ", ".join(map(repr, table.column_names))
            also = f" (or {', '.join(aliases[1:])})" if len(aliases) > 1 else ""
            raise DataError(f"{path} has no column {name}{also}. It has: {have}")
    return pa.table(found)


# ---------------------------------------------------------------- columns


def _numbers(path: Path, table: pa.Table, name: str) -> np.ndarray:
    column = table[name]
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    try:
        values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: column {name} must hold numbers ({first_line(error)})") from error
    _refuse(path, ~np.isfinite(values), name, values, "it must be a finite number; leave such rows out or mend them")
    return np.asarray(values, float)


def _whole(path: Path, table: pa.Table, name: str) -> np.ndarray:
    values = _numbers(path, table, name)
    bad = (values != np.floor(values)) | (np.abs(values) > LARGEST)
    _refuse(path, bad, name, values, "it must be a whole number, below 2^53")
    return values.astype(np.int64)


def _texts(column: pa.ChunkedArray) -> list[str]:
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        column = column.cast(pa.string())
    if pa.types.is_floating(column.type) and pc.all(pc.equal(pc.floor(column), column)).as_py():
        column = column.cast(pa.int64())  # ids that a spreadsheet wrote as 17.0
    return ["" if value is None or value != value else str(value) for value in column.to_pylist()]


def _refuse(path: Path, bad_N: np.ndarray, name: str, values_N: np.ndarray, why: str) -> None:
    places = np.flatnonzero(bad_N)
    if len(places):
        more = f" (and {len(places) - 1} more rows)" if len(places) > 1 else ""
        raise DataError(f"{path}, row {places[0] + 1}: {name} is {values_N[places[0]]}{more}; {why}")


def _refuse_repeated(path: Path, columns: list[list[str]] | list[list[int]], name: str, why: str) -> None:
    seen: dict[tuple[object, ...], int] = {}
    for row, key in enumerate(zip(*columns)):
        if key in seen:
            shown = " and ".join(map(str, key))
            raise DataError(f"{path}, row {row + 1}: {name} {shown} stands in row {seen[key] + 1} already; {why}")
        seen[key] = row
