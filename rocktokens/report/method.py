"""The report's last section: method, settings, seeds, versions, commands, and what was left out.

Settings come from the manifest as they were used; commands are written so that repeating them makes the run again.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from html import escape
from typing import Any

from rocktokens import study as configuration
from rocktokens.facts import Facts
from rocktokens.show import at_home, prose, significant, visible
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
# Command → sections whose fields are flags with the section in front, and those whose fields are flags by themselves.
COMMANDS = {
    "distill": (("pair", "prompts"), ("distill",)),
    "sample": (("pair", "prompts", "rollouts"), ()),
    "knockout": (("baseline",), ("knockout",)),
    "graft": (("graft_baseline",), ("graft",)),
}
KINDS = {
    kind.__name__.removesuffix("Config").lower(): kind
    for kind in vars(configuration).values()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type)
}
KINDS["rollouts"] = KINDS.get("rollout", configuration.RolloutConfig)


def method(facts: Facts) -> str:
    """HTML of the section."""
    text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in METHOD)
    notes = [note for stage in facts.stages for note in facts.stage(stage).get("notes") or []]
    notes += facts.notes
    said = "".join(f"<li>{prose(visible(str(note)))}</li>" for note in dict.fromkeys(notes))
    return (
        text
        + _thresholds(facts)
        + (f"<h3>To keep in mind</h3><ul>{said}</ul>" if said else "")
        + f"<h3>Commands</h3><pre>{escape(chr(10).join(commands(facts)))}</pre>"
        + "<h3>Settings</h3>"
        + _settings(facts)
        + f"<h3>Seeds</h3>{_pairs(seeds(facts))}"
        + f"<h3>Versions</h3>{_pairs(facts.run.manifest.get('versions', {}))}"
        + f"<h3>Stages</h3>{_pairs(_stages(facts))}"
    )


def _thresholds(facts: Facts) -> str:
    found = facts.stage("detect").get("thresholds")
    if not found:
        return ""
    names = {"tau_pre": "τ pre", "tau_post": "τ post", "gamma": "γ", "eta": "η", "window": "w"}
    said = ", ".join(
        f"{names.get(key, key)} = {value if isinstance(value, int) else significant(value)}"
        for key, value in found.items()
        if value is not None
    )
    k = facts.stage("detect").get("k")
    return f"<p>Thresholds in force: {escape(said)}; K = {k}, signal {escape(facts.signal)}.</p>"


def commands(facts: Facts) -> list[str]:
    """Commands that make this run: recorded ones, else rebuilt from the settings that differ from the defaults."""
    recorded = facts.run.manifest.get("commands")
    if isinstance(recorded, list) and recorded:
        return [_command(line if isinstance(line, str) else shlex.join(map(str, line))) for line in recorded]
    lines = []
    for stage in facts.stages:
        if "/" in stage:
            continue
        named, bare = COMMANDS.get(stage, ((), (stage,)))
        flags = [flag for section in named for flag in _flags(facts, section, f"{section.removeprefix('graft_')}.")]
        flags += [flag for section in bare for flag in _flags(facts, section, "")]
        lines.append(_command(" ".join(["rocktokens", stage, facts.place, shlex.join(flags)]).rstrip()))
    return lines or ["no stage has been recorded"]


def _command(line: str) -> str:
    return at_home(visible(line))


def _flags(facts: Facts, section: str, prefix: str) -> list[str]:
    values = facts.config.get(section)
    if not isinstance(values, dict):
        return []
    kind = KINDS.get(section.removeprefix("graft_"))
    default = json.loads(json.dumps(dataclasses.asdict(kind()), default=str)) if kind else {}
    return _changed(prefix, values, default)


def _changed(prefix: str, values: dict[str, object], default: object) -> list[str]:
    """Flags for what differs from the defaults, sections within sections too."""
    flags = []
    for name, value in values.items():
        usual = default.get(name) if isinstance(default, dict) else None
        if isinstance(value, dict):
            flags += _changed(f"{prefix}{name}.", value, usual)
        elif isinstance(value, bool):
            flags += [f"--{prefix}{'' if value else 'no-'}{name}".replace("_", "-")] if value != usual else []
        elif value is not None and value != usual and value != []:
            words = [str(item) for item in value] if isinstance(value, list) else [str(value)]
            flags += [f"--{prefix}{name}".replace("_", "-"), *words]
    return flags


def seeds(facts: Facts) -> dict[str, object]:
    """Every seed among the settings."""
    found: dict[str, object] = {}

    def walk(prefix: str, values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            elif "seed" in name:
                found[prefix + name] = value

    walk("", {section: facts.config[section] for section in facts.sections})
    return found


def _settings(facts: Facts) -> str:
    parts = []
    for section in facts.sections:
        values = facts.config[section]
        rows = values if isinstance(values, dict) else {section: values}
        title = escape(visible(str(section)))
        parts.append(f"<details><summary>{title}</summary>{_pairs(rows)}</details>")
    return "".join(parts) or "<p>No settings were recorded.</p>"


def _stages(facts: Facts) -> Json:
    found = {}
    for stage in facts.stages:
        short = {key: value for key, value in facts.stage(stage).items() if isinstance(value, str | int | float | bool)}
        found[stage] = ", ".join(f"{key} {_short(value)}" for key, value in short.items()) or "done"
    return found


def _short(value: Any) -> str:
    return significant(value).replace("\u202f", "") if isinstance(value, float) else str(value)


def _pairs(values: Json) -> str:
    rows = "".join(
        f"<tr><td>{escape(visible(str(key)))}</td><td><bdi>{escape(at_home(visible(str(value))))}</bdi></td></tr>"
        for key, value in values.items()
    )
    return (
        f'<div class="scroll"><table class="settings"><tbody>{rows}</tbody></table></div>' if rows else "<p>None.</p>"
    )
