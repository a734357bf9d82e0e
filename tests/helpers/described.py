"""What a run's tables hold against what tables.py says of them."""

from __future__ import annotations

from rocktokens.run import Run
from rocktokens.tables import TABLES, table_of

SCORED = ("occurrences", "telemetry", "top_tokens")


def differences(run: Run) -> list[str]:
    """Tables and columns that the schema does not describe, and columns that are empty without its saying so."""
    found = []
    for path in sorted(run.path.glob("*.parquet")):
        known = table_of(path.stem)
        if known is None:
            found.append(f"{path.stem}: no such table")
            continue
        table, meanings = run.read(path.stem), {column.name: column.meaning for column in known.columns}
        for name in table.column_names:
            if name not in meanings:
                if not (path.stem == "training" and name.startswith(("shadow_kept_", "overlap_"))):
                    found.append(f"{path.stem}.{name}: not described")
            elif len(table) and table[name].null_count == len(table) and "mpty" not in meanings[name]:
                found.append(f"{path.stem}.{name}: empty")
    found += [name for name in SCORED if (run.path / name).exists() and name not in TABLES]
    return found
