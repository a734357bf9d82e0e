"""Write the generated pages of docs/reference: commands and settings from the registry, tables from their schema.

    python docs/make_reference.py            # or `make docs`, which also builds the site

`tests/test_docs.py` fails where a page differs from what this script would write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rocktokens.settings import IMMATERIAL, PERMISSION, field_docs, field_types, takes
from rocktokens.study import STAGES, StudyConfig
from rocktokens.tables import TABLES

FOLDER = Path(__file__).parent / "reference"


def commands() -> str:
    """One row per stage in the order of a study."""
    lines = [
        "# Commands",
        "",
        "`rocktokens study` runs these stages in this order. Each is a command of its own: `rocktokens STAGE RUN`.",
        "`rocktokens COMMAND --help` lists the flags; [settings](settings.md) describes every one of them.",
        "",
        "| stage | what it does | what it reads | shared out by `--workers` and `--ray` |",
        "|---|---|---|---|",
    ]
    for spec in STAGES.values():
        lines.append(f"| `{spec.name}` | {spec.help} | {spec.reads} | {'yes' if spec.shared else 'no'} |")
    return "\n".join(lines) + "\n"


def sections(kind: type, name: str = "") -> Iterator[str]:
    """The settings of one class as a table, then those of the sections inside it."""
    docs, types = field_docs(kind), field_types(kind)
    rows, inside = [], []
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(types[item.name]):
            inside.append((types[item.name], f"{name}.{item.name}".lstrip(".")))
            continue
        default = item.default if item.default is not dataclasses.MISSING else item.default_factory()
        flag = f"--{name}.{item.name}".replace("--.", "--").replace("_", "-")
        shown = (
            "unset"
            if default in (None, (), "")
            else " ".join(map(str, default))
            if isinstance(default, tuple)
            else default
        )
        marks = {IMMATERIAL: " Changes speed or memory only.", PERMISSION: " Never taken from a run."}
        note = "".join(text for mark, text in marks.items() if mark in item.metadata)
        rows.append(f"| `{flag}` | {takes(types[item.name])} | `{shown}` | {docs.get(item.name, '')}{note} |")
    if rows:
        title = name or "study"
        about = " ".join((kind.__doc__ or "").split())
        yield (
            f"## {title}\n\n{about}\n\n| flag | takes | default | meaning |\n|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    for part, own in inside:
        yield from sections(part, own)


def settings() -> str:
    """Every setting of a study."""
    top = """# Settings

Every setting is a flag, a key of a YAML file (`rocktokens study FILE.yaml`) and a field in Python. On a stage's own
command its section's prefix may be left out. `rocktokens schema` prints the same as JSON Schema, which editors use to
complete YAML files.

"""
    return top + "\n".join(sections(StudyConfig))


def tables(before: str) -> str:
    """The page's own introduction, up to the overview, then one section per table."""
    rows = "".join(f"| [`{name}`](#{name}) | `rocktokens {own.stage}` | {own.row} |\n" for name, own in TABLES.items())
    parts = [f"| table | written by | content |\n|---|---|---|\n{rows}"]
    for name, own in TABLES.items():
        lines = [f"## {name}\n", f"`{own.path}`, {own.row}.\n", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column.name}` | {column.type} | {column.meaning} |" for column in own.columns]
        parts.append("\n".join(lines) + "\n")
    return before.partition("| table | written by")[0] + "\n".join(parts)


def pages() -> dict[Path, str]:
    """Each generated page's text."""
    schema = FOLDER / "schema.md"
    return {
        FOLDER / "commands.md": commands(),
        FOLDER / "settings.md": settings(),
        schema: tables(schema.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
