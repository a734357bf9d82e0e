"""SQL over a run's tables, shut in: one SELECT, the run's own files, nothing written.

Names of tables and values in them are somebody else's text: identifiers are quoted, values are bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocktokens.errors import DataError, RunError
from rocktokens.files import first_line

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

FOLDERS = ("occurrences", "telemetry", "top_tokens")


def query(path: Path, sql: str, parameters: Sequence[Any], verify: Callable[[Path], None]) -> pa.Table:
    """The answer of DuckDB; every table that the query mentions is a view.

    Args:
        path: the run directory.
        sql: one SELECT statement; values that are not ours go in as `?`.
        parameters: what the question marks stand for.
        verify: called with every file before it is read; raises where it is damaged.
    """
    import duckdb

    with duckdb.connect() as connection:
        try:
            for name, source in _views(path, sql, verify):
                connection.execute(f"create view {_identifier(name)} as select * from {source}")
            _shut_in(connection, path)
            statements = connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise DataError("the query failed: only one SELECT statement is allowed")
            return connection.sql(sql, params=list(parameters)).to_arrow_table()
        except duckdb.CatalogException as error:
            raise RunError(f"{path}: {first_line(error)}; the stage that writes it has not run") from error
        except (duckdb.InvalidInputException, duckdb.IOException) as error:
            raise DataError(f"a table of {path} cannot be read: {first_line(error)}") from error
        except duckdb.Error as error:
            raise DataError(f"the query failed: {first_line(error)}") from error


def _views(path: Path, sql: str, verify: Callable[[Path], None]) -> Iterator[tuple[str, str]]:
    """Name and source of every table that the query mentions; a damaged table must not hide the others."""
    for table in sorted(path.glob("*.parquet")):
        if table.stem.lower() in sql.lower():
            verify(table)
            yield table.stem, f"read_parquet({_literal(_escape(table))})"
    for folder in FOLDERS:
        parts = sorted(path.glob(f"{folder}/step=*/*.parquet")) if folder in sql.lower() else []
        for part in parts:
            verify(part)
        if parts:
            pattern = _literal(f"{_escape(path)}/{folder}/step=*/*.parquet")
            yield folder, f"read_parquet({pattern}, hive_partitioning = true, hive_types = {{'step': bigint}})"


def _shut_in(connection: DuckDBPyConnection, path: Path) -> None:
    """From here on DuckDB reads files of this run only."""
    forms = sorted({str(path), str(path.resolve()), _escape(path)})
    connection.execute(f"set allowed_directories = [{', '.join(_literal(f'{form}/') for form in forms)}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")


def _escape(path: Path) -> str:
    """A path taken literally; DuckDB reads every path as a pattern."""
    return "".join(f"[{letter}]" if letter in "[*?" else letter for letter in str(path))


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
