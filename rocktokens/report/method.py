"""The report's last section: method, settings, seeds, versions, commands, and what was left out.

Settings come from the manifest as they were used; commands are written so that repeating them makes the run again.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from rocktokens.facts import Facts, registry
from rocktokens.show import at_home, significant, visible
from rocktokens.values import Json

METHOD = (
    "Student samples rollouts; teacher and student are scored on the same prefixes at every kept checkpoint, from full "
    "distributions in float32. The loss is reverse KL per token, in nats.",
    "A rock is a token type whose loss is high before and after OPD and recurs in similar contexts. Rocks are chosen "
    "on one half of the prompts; every number about them is measured on the other half, with 95 % intervals from a "
    "bootstrap over prompts.",
    "Enrichment is the share of the loss over the share of the positions: 1 means merely frequent.",
    "A knock-out bans a token at inference and resumes the baseline where it was first used; a placebo arm resumes at "
    "the same places with nothing banned and gives the noise floor. Neutral is proven by an equivalence test, never "
    "assumed.",
)
THRESHOLDS = {"tau_pre": "τ pre", "tau_post": "τ post", "gamma": "γ", "eta": "η", "window": "w"}


def method(facts: Facts) -> Json:
    """What the section's template shows."""
    notes = [str(note) for stage in facts.stages for note in facts.stage(stage).get("notes") or []]
    sections = {name: facts.config[name] for name in facts.sections}
    settings = {visible(name): own if isinstance(own, dict) else {name: own} for name, own in sections.items()}
    return {
        "paragraphs": METHOD,
        "thresholds": _thresholds(facts),
        "notes": [visible(note) for note in dict.fromkeys([*notes, *facts.notes])],
        "commands": commands(facts),
        "settings": {name: _shown(values) for name, values in settings.items()},
        "tables": {
            "Seeds": _shown(dict(seeds("", sections))),
            "Versions": _shown(facts.run.manifest.get("versions", {})),
            "Stages": _shown({stage: _recorded(facts.stage(stage)) for stage in facts.stages}),
        },
    }


def _shown(values: Json) -> dict[str, str]:
    return {visible(str(key)): at_home(visible(str(value))) for key, value in values.items()}


def _thresholds(facts: Facts) -> str:
    found = {
        name: value for name, value in (facts.stage("detect").get("thresholds") or {}).items() if value is not None
    }
    if not found:
        return ""
    said = [f"{THRESHOLDS.get(name, name)} = {_short(value)}" for name, value in found.items()]
    return f"Thresholds in force: {', '.join(said)}; K = {facts.stage('detect').get('k')}, signal {facts.signal}."


def _short(value: Any) -> str:
    return significant(value).replace("\u202f", "") if isinstance(value, float) else str(value)


def _recorded(stage: Json) -> str:
    plain = {key: value for key, value in stage.items() if isinstance(value, str | int | float | bool)}
    return ", ".join(f"{key} {_short(value)}" for key, value in plain.items()) or "done"


def commands(facts: Facts) -> list[str]:
    """Commands that make this run, with the settings that differ from the defaults."""
    default = import_module("rocktokens.study").StudyConfig()
    lines = []
    for name, spec in registry().items():
        if name not in facts.stages:
            continue
        flags: list[str] = []
        for section in spec.arguments.values():
            # The census and the grafts each keep the settings of their own baseline.
            values = facts.config.get(f"{name}_{section}", facts.config.get(section))
            if isinstance(values, dict):
                usual = json.loads(json.dumps(dataclasses.asdict(getattr(default, section)), default=str))
                flags += _changed("" if section == spec.section else f"{section}.", values, usual)
        lines.append(at_home(visible(" ".join(["rocktokens", name, facts.place, shlex.join(flags)]).rstrip())))
    return lines or ["no stage has been recorded"]


def _changed(prefix: str, values: Mapping[str, Any], default: object) -> Iterator[str]:
    """Flags for what differs from the defaults, sections within sections too."""
    for name, value in values.items():
        usual = default.get(name) if isinstance(default, dict) else None
        flag = f"{prefix}{name}".replace("_", "-")
        if isinstance(value, dict):
            yield from _changed(f"{prefix}{name}.", value, usual)
        elif isinstance(value, bool) and value != usual:
            head, _, last = flag.rpartition(".")
            yield f"--{head}{'.' if head else ''}{'' if value else 'no-'}{last}"
        elif not isinstance(value, bool) and value is not None and value != usual and value != []:
            yield f"--{flag}"
            yield from map(str, value if isinstance(value, list) else [value])


def seeds(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Every seed among the settings."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from seeds(f"{prefix}{name}.", value)
        elif "seed" in name:
            yield prefix + name, value
