"""Parquet files of a run: whole or absent, with checksums, large ones in parts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.files import failing, reading, writing

# Rows buffered before a Parquet part is written: about 50 MB.
PART_ROWS = 1_000_000


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write a Parquet file whole, in place of what was there."""
    with writing(path) as draft:
        write_draft(table, draft)


def write_draft(table: pa.Table, draft: Path) -> None:
    """Write a Parquet file with a checksum for every page, under exactly this name."""
    # Parquet's min and max pass over NaN, and DuckDB concludes from them that no row is NaN: none for floats.
    plain = [field.name for field in table.schema if not pa.types.is_floating(field.type)]
    pq.write_table(table, draft, compression="zstd", write_statistics=plain, write_page_checksum=True)


def read_parquet(path: Path, columns: list[str] | None, remedy: str) -> pa.Table:
    """A Parquet file as an Arrow table; DataError with the remedy where it is damaged."""
    with reading(path, remedy):
        if path.is_dir():  # pyarrow would read the files in it, or none
            raise IsADirectoryError("it is a directory")
        return pq.read_table(path, columns=columns, page_checksum_verification=True)


def read_schema(path: Path) -> pa.Schema:
    """The columns of a Parquet file, without its rows."""
    return pq.read_schema(path)


def link_all(files: Sequence[Path], folder: Path) -> list[Path]:
    """Parquet files under new names, part-00000.parquet and so on, in another folder; their own names stay."""
    targets = [folder / f"part-{number:05d}.parquet" for number in range(len(files))]
    with failing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, target in zip(files, targets):
            try:
                os.link(file, target)
            except OSError:  # a file system without links
                shutil.copyfile(file, target)
    return targets


class PartWriter:
    """Buffers rows and writes them as Parquet parts, each whole or absent."""

    def __init__(
        self,
        directory: Path,
        schema: pa.Schema,
        *,
        prefix: str = "",
        part_rows: int = PART_ROWS,
        written: set[Path] | None = None,
    ) -> None:
        self.written = set() if written is None else written
        """The run's list of files that the next finished stage records."""
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
        path = self.directory / f"part-{self.prefix}{self._parts:05d}.parquet"
        write_parquet(pa.concat_tables(self._tables), path)
        self.written.add(path)
        self._tables, self._buffered, self._parts = [], 0, self._parts + 1
