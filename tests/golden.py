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
    for name in sorted(folders):
        if (run / name).is_dir() and name in ("compare", "parts", ".parts"):
            continue  # what a stage works with, not what it publishes
        source = str(run / name) if (run / name).is_file() else str(run / name / "**" / "*.parquet")
        table = duckdb.sql(f"select * from read_parquet('{source}', hive_partitioning = true, union_by_name = true)")
        columns = {}
        for column, kind in zip(table.columns, table.types):
            if any(word in column for word in TIMES):
                continue
            values = [row[0] for row in table.select(f'"{column}"').fetchall()]
            known = [value for value in values if value is not None]
            if str(kind) in ("DOUBLE", "FLOAT", "INTEGER", "BIGINT", "SMALLINT", "TINYINT", "BOOLEAN", "UINTEGER"):
                finite = [float(value) for value in known if math.isfinite(value)]
                numbers = [
                    math.fsum(finite),
                    math.fsum(v * v for v in finite),
                    *((min(finite), max(finite)) if finite else ()),
                ]
                columns[column] = [len(values), len(values) - len(finite), *(float(f"{v:.9g}") for v in numbers)]
            else:
                texts = sorted(json.dumps(value, default=str, sort_keys=True) for value in known)
                columns[column] = [
                    len(values),
                    len(values) - len(known),
                    hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16],
                ]
        found[name.removesuffix(".parquet")] = columns
    return found


def differences(old: dict, new: dict) -> list[str]:
    """One line per table or column that is not the same; numbers within 1e-6 are."""
    lines = []
    for table in sorted(old.keys() | new.keys()):
        if table not in old or table not in new:
            lines.append(f"{table}: {'new' if table not in old else 'gone'}")
            continue
        for column in sorted(old[table].keys() | new[table].keys()):
            a, b = old[table].get(column), new[table].get(column)
            if a is None or b is None:
                lines.append(f"{table}.{column}: {'new' if a is None else 'gone'}")
            elif len(a) != len(b) or any(
                x != y
                if isinstance(x, str) or isinstance(y, str)
                else not math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)
                for x, y in zip(a, b)
            ):
                lines.append(f"{table}.{column}: {a} → {b}")
    return lines


def study(name: str, path: Path) -> None:
    """Make one of the golden studies."""
    words = [sys.executable, "-m", "rocktokens.cli", "study", *STUDIES[name].split(), "--path", str(path)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main(action: str, name: str, made: str | None = None) -> None:
    """`made`: a finished run to describe instead of making one."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(made) if made else Path(folder) / name
        if not made:
            study(name, run)
        file, tables = GOLDEN / f"{name}.json", describe(run)
        if action == "record":
            GOLDEN.mkdir(exist_ok=True)
            version = json.loads((run / "run.json").read_text()).get("versions", {})
            file.write_text(
                json.dumps(
                    {"machine": platform.processor() or platform.machine(), "versions": version, "tables": tables},
                    indent=0,
                )
            )
            return
        lines = differences(json.loads(file.read_text())["tables"], tables)
        print("\n".join(lines) or "no difference")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
