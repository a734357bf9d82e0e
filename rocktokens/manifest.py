"""Reading run.json: either it has the shape of a manifest of this version, or one sentence says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from rocktokens.errors import RunError
from rocktokens.files import first_line
from rocktokens.tables import SCHEMA_VERSION

MANIFEST = "run.json"
# Sections of the configuration that are read field by field.
SECTIONS = {
    *("pair", "prompts", "distill", "sample", "rollouts", "score", "detect", "geometry", "baseline", "knockout"),
    *("graft", "bypass", "compare"),
}


def read_manifest(path: Path) -> dict[str, object]:
    """The manifest of the run at `path`."""
    manifest_path = path / MANIFEST
    if not manifest_path.exists():
        raise RunError(f"{path} is no run: it holds no {MANIFEST}")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise RunError(
            f"{manifest_path} is not valid JSON (line {error.lineno}); restore it or start a new run"
        ) from error
    except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RunError(
            f"{manifest_path} cannot be read ({first_line(error)}); restore it or start a new run"
        ) from error
    if not isinstance(manifest, dict) or not {"schema_version", "config", "stages"} <= manifest.keys():
        raise RunError(f"{manifest_path} is not the manifest of a run; restore it or start a new run")
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise RunError(
            f"{path} has schema version {manifest['schema_version']}, this program reads {SCHEMA_VERSION}; "
            "use the rocktokens version that made it"
        )
    for section in ("config", "stages", "records", "files", "versions"):
        if not isinstance(manifest.get(section, {}), dict):
            raise RunError(f"{manifest_path}: {section} is not a mapping; restore it or start a new run")
    for what, entries in (("facts", manifest["stages"]), ("record", manifest.get("records", {}))):
        for stage, own in entries.items():
            parts = [
                own,
                *(own.get(part, {}) for part in ("settings", "inputs") if what == "record" and _is_mapping(own)),
            ]
            if not all(map(_is_mapping, parts)):
                raise RunError(
                    f"{manifest_path}: the {what} of {stage} is not a mapping; restore it or start a new run"
                )
    for section in SECTIONS & manifest["config"].keys():
        if not _is_mapping(manifest["config"][section]):
            raise RunError(f"{manifest_path}: config.{section} is not a mapping; restore it or start a new run")
    return manifest


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _refuse(constant: str) -> None:
    """NaN and infinities are no JSON, and no manifest of ours has them."""
    raise ValueError(f"{constant} is not a number in JSON")
