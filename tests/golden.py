"""Store what a run's tables hold, without times, and compare another run with it: did a refactoring change a number?

    python tests/golden.py record NAME      # makes the studies of tests/golden/NAME.json anew and writes the file
    python tests/golden.py compare NAME     # makes the study and lists every column that differs

Rollouts depend on the last bits of matrix products, so a file compares with runs of the same kind of machine only; it
names its machine. Recording is a decision of its own, never part of the test suite.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb

GOLDEN = Path(__file__).parent / "golden"
SMALL = (
    "market --distill.steps 24 --distill.keep 3 --problems 60 --detection-prompts 60 --baseline.problems 60 "
    "--knockout.top 20 --compare.steps 6 --compare.seeds 3 --compare.problems 60"
)
STUDIES = {"quick": "--quick", "market": SMALL}
TIMES = ("second", "time", "duration", "per_s", "bytes", "memory")


def describe(run: Path) -> dict[str, dict[str, list]]:
    """Per table and column: rows, nulls, and sum, least and greatest value, or a digest of the texts."""
    folders = {path.relative_to(run).parts[0] for path in run.rglob("*.parquet") if "checkpoints" not in path.parts}
    found = {}
    for name in sorted(folders - {"compare"}):  # compare/ is what the stage works with, not what it publishes
        source = str(run / name) if (run / name).is_file() else str(run / name / "**" / "*.parquet")
        table = duckdb.sql(f"select * from read_parquet('{source}', hive_partitioning = true, union_by_name = true)")
        columns = found[name.removesuffix(".parquet")] = {}
        for column, kind in zip(table.columns, table.types):
            if any(word in column for word in TIMES):
                continue
            values = [row[0] for row in table.select(f'"{column}"').fetchall()]
            known = [value for value in values if value is not None]
            if str(kind) in ("DOUBLE", "FLOAT", "INTEGER", "BIGINT", "SMALLINT", "TINYINT", "BOOLEAN", "UINTEGER"):
                known = [float(value) for value in known if math.isfinite(value)]
                ends = (min(known), max(known)) if known else ()
                content = [float(f"{v:.9g}") for v in (math.fsum(known), math.fsum(v * v for v in known), *ends)]
            else:
                texts = sorted(json.dumps(value, default=str, sort_keys=True) for value in known)
                content = [hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]]
            columns[column] = [len(values), len(values) - len(known), *content]
    return found


def differences(old: dict, new: dict) -> list[str]:
    """One line per table or column that is not the same; numbers within 1e-6 are."""
    old, new = ({(t, c): own for t, columns in tables.items() for c, own in columns.items()} for tables in (old, new))
    lines = []
    for table, column in sorted(old.keys() | new.keys()):
        a, b = (tables.get((table, column), ["absent"]) for tables in (old, new))
        if len(a) != len(b) or not all(
            x == y or (not {str} & {type(x), type(y)} and math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9))
            for x, y in zip(a, b)
        ):
            lines.append(f"{table}.{column}: {a} → {b}")
    return lines


def main(action: str, name: str, made: str | None = None) -> None:
    """`made`: a finished run to describe instead of making one."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(made or Path(folder) / name)
        if not made:
            words = [sys.executable, "-m", "rocktokens.cli", "study", *STUDIES[name].split(), "--path", str(run)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        file, tables = GOLDEN / f"{name}.json", describe(run)
        if action == "record":
            version = json.loads((run / "run.json").read_text())["versions"]
            machine = platform.processor() or platform.machine()
            file.write_text(json.dumps({"machine": machine, "versions": version, "tables": tables}, indent=0))
            return
        lines = differences(json.loads(file.read_text())["tables"], tables)
        print("\n".join(lines) or "no difference")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
