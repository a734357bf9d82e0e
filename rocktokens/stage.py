"""The one rule for what is fresh, for every stage.

    stage = Stage(run, "detect", {"detect": config}, inputs={"occurrences": digest(...)})
    if not stage.due(again):
        return run                       # complete; it has said so
    ...                                  # validate and compute everything, then
    stage.publish({"types": table}, facts)   # write under draft names, swap, record

A stage is complete if its settings and the digests of everything it read are those recorded when it finished, and what
it wrote is still there. Where something changed, the stage says what. It runs again by itself, unless that would throw
work away that the user did not ask to lose (`guards`): then it refuses and names `--again`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rocktokens.errors import ConfigError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import MANIFEST, Run, differences, digest, digest_of_value, open_run
from rocktokens.settings import C, from_manifest, is_granted, refuse_code, to_mapping
from rocktokens.values import Json

log = logging.getLogger(__name__)

Guard = Literal["settings", "inputs"]
SHOWN = 4  # changes named in a message


class Stage:
    """One stage of one run: what it is set to, what it reads, and whether what is recorded still holds.

    Args:
        run: the run it works on.
        name: its name in the manifest: its command, or command/part.
        settings: section → configuration dataclass or plain mapping. The sections go to the manifest's `config`, too.
        inputs: what it reads → digest (see `inputs_of`). None: cannot be told now, and counts as unchanged.
        guards: changes after which the stage refuses to run again without `--again`.
        checks_outputs: whether the stage runs again when a table that it wrote is missing or damaged.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        settings: Mapping[str, Any],
        inputs: Mapping[str, str | None],
        *,
        guards: tuple[Guard, ...] = (),
        checks_outputs: bool = True,
    ) -> None:
        self.run, self.name, self.guards, self.checks_outputs = run, name, guards, checks_outputs
        self.command, self.inputs = name.partition("/")[0], dict(inputs)
        plain = {key: to_mapping(own) if dataclasses.is_dataclass(own) else own for key, own in settings.items()}
        self.settings: Json = json.loads(json.dumps(plain, default=str))  # as the manifest will give them back

    @property
    def key(self) -> str:
        """A digest of settings and inputs: parts of an unfinished stage belong to it."""
        return digest_of_value([self.settings, self.inputs])

    def changed_settings(self) -> list[str]:
        """Settings that differ from those of the recorded stage, each as “a.b was 1, now 2”."""
        record, config = self._record(), self.run.manifest["config"]
        # What was made by hand is believed where it does not say.
        known = record.get("settings") or {name: config.get(name, own) for name, own in self.settings.items()}
        return list(differences("", known, self.settings))

    def changed_inputs(self) -> list[str]:
        """Names of inputs that are not what the recorded stage read."""
        known = self._record().get("inputs", self.inputs)
        pairs = {name: (known.get(name, ""), self.inputs.get(name, "")) for name in sorted({*known, *self.inputs})}
        return [name for name, (old, new) in pairs.items() if old != new and old is not None and new is not None]

    def damaged_outputs(self) -> list[str]:
        """Tables that the recorded stage wrote and that are gone or damaged."""
        return self.run.damaged_files(self.name) if self.checks_outputs else []

    def is_complete(self) -> bool:
        """Whether the stage is recorded, with these settings and inputs, and what it wrote is there."""
        changed = self.changed_settings() or self.changed_inputs() or self.damaged_outputs()
        return self.run.done(self.name) and not changed

    def due(self, again: bool = False) -> bool:
        """Whether the stage has to run. Says why it runs again or why not; RunError where it must be asked for."""
        if again or not self.run.done(self.name):
            return True
        settings, inputs, damaged = self.changed_settings(), self.changed_inputs(), self.damaged_outputs()
        changes = [*settings, *(f"{name} has changed" for name in inputs), *(f"{name} is damaged" for name in damaged)]
        if not changes:
            log.info("%s: %s is complete; nothing to do", self.run.path, self.name)
            self.remove_parts()
            return False
        said = "; ".join(changes[:SHOWN]) + (f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else "")
        if (settings and "settings" in self.guards) or (inputs and "inputs" in self.guards):
            raise RunError(
                f"{self.run.path}: {self.name} is complete, but {said}. Pass --again to `rocktokens {self.command} "
                f"{shlex.quote(str(self.run.path))}` to replace its result, repeat the first command to keep it, or "
                "choose another directory."
            )
        log.info("%s: %s runs again: %s", self.run.path, self.name, said)
        return True

    def publish(self, tables: Mapping[str, pa.Table], facts: dict[str, object] | None = None) -> None:
        """Put the stage's tables in place of the old ones, whole, record it as complete, and remove its parts."""
        self.run.write_all(tables, stage=self.name)
        self.finish(facts)
        self.remove_parts()

    def finish(self, facts: Json | None = None) -> None:
        """Record the stage as complete, with its settings and what it read."""
        self.run.manifest["config"].update(self.settings)
        of_study = self.run.manifest.get("study", {})
        for section in of_study.keys() & self.settings.keys():  # the next command begins with these
            of_study[section] |= self.settings[section]
        record = {"settings": self.settings, "inputs": self.inputs}
        self.run.manifest["records"][self.name] = record
        self.run.finish(self.name, facts)

    @property
    def parts(self) -> Path:
        """Where jobs write the parts of this stage; those of other settings or inputs are never taken."""
        return self.run.path / f"{self.command}.parts" / self.key

    def remove_parts(self) -> None:
        """Remove the parts of this stage, once what they made up is recorded."""
        shutil.rmtree(self.parts.parent, ignore_errors=True)

    def _record(self) -> Json:
        return self.run.manifest["records"].get(self.name, {})


# ---------------------------------------------------------------- what a stage reads


def inputs_of(
    run: Run,
    *,
    files: tuple[str, ...] = (),
    stages: tuple[str, ...] = (),
    models: Mapping[str, str] | None = None,
    prompts: PromptsConfig | None = None,
) -> dict[str, str | None]:
    """Digests of what a stage reads, by name.

    Args:
        run: the run.
        files: files and directories of the run, e.g. rollouts.parquet.
        stages: other stages, by what they recorded.
        models: role → directory, hub name or .gguf file; one that is not on this disk cannot be told.
        prompts: where prompts come from; a built-in task or hub dataset is told by the settings.
    """
    found: dict[str, str | None] = {name: digest(run.path / name) or "absent" for name in files}
    found |= {f"stage {name}": run.mark(name) or "absent" for name in stages}
    found |= {role: digest(Path(source)) if source else None for role, source in (models or {}).items()}
    if prompts is not None:
        found["prompts"] = digest(Path(prompts.source)) if prompts.source.endswith(".jsonl") else None
    return found


def stale_stages(run: Run) -> list[str]:
    """Complete stages of which a file or another stage that they read has changed since, directly or further down."""
    stale: set[str] = set()

    def has_changed(label: str, before: object) -> bool:
        """Whether an input that lies in the run, a file or a stage, is not what it was; models are not looked at."""
        if label.startswith("stage "):
            stage = label.removeprefix("stage ")
            return stage in stale or (run.mark(stage) or "absent") != before
        if label == "occurrences" and any(name.startswith("score/") for name in stale):
            return True
        in_run = "." in label or label in ("occurrences", "telemetry")
        return in_run and (digest(run.path / label) or "absent") != before

    for _ in run.manifest["stages"]:  # as often as a change can pass from stage to stage
        for name, record in run.manifest["records"].items():
            if any(has_changed(label, before) for label, before in record["inputs"].items()):
                stale.add(name)
    return sorted(stale)


# ---------------------------------------------------------------- which pair, prompts and student a run names


def resolve(path: Path, pair: PairConfig, prompts: PromptsConfig) -> tuple[PairConfig, PromptsConfig]:
    """Fill in pair and prompts: from the run that is there; for a new run, a built-in task's own pair.

    Inside an existing run the built-in pair is never filled in: its rollouts would be those of another pair.
    """
    from rocktokens.world import get_world, world_names

    if not (path / MANIFEST).exists():
        if pair.student or pair.teacher:
            return pair, prompts
        near = difflib.get_close_matches(prompts.source, world_names(), n=1, cutoff=0.75)
        if near and near[0] != prompts.source:  # a mistyped world rather than a file without its pair
            raise ConfigError(f"there are no prompts called {prompts.source!r}; did you mean {near[0]!r}?")
        if near:
            world = get_world(prompts.source)
            pair = dataclasses.replace(pair, student=str(world.student_path), teacher=str(world.teacher_path))
        return pair, prompts
    run = open_run(path)
    if not pair.student and not pair.teacher:
        pair = dataclasses.replace(pair_of(run), threads=pair.threads)
    pair = dataclasses.replace(
        pair,
        trust_remote_code=pair.trust_remote_code or is_granted("model code"),
        allow_pickle=pair.allow_pickle or is_granted("pickle"),
    )
    if prompts == PromptsConfig():
        prompts = prompts_of(run)
    return pair, prompts


def open_with(path: Path, pair: PairConfig, prompts: PromptsConfig) -> Run:
    """The run with this pair and these prompts, made if it is not there; RunError where it has others.

    How answers are checked may be said later of a run that a trainer made, until its rollouts are sampled.
    """
    if (path / MANIFEST).exists():
        run, own = open_run(path), to_mapping(prompts)
        if "trainer" in run.manifest["config"] and not run.done("sample") and prompts != PromptsConfig():
            run.manifest["config"]["prompts"] = own
            run.save()
    return Run.create(path, {"pair": to_mapping(pair), "prompts": to_mapping(prompts)})


def pair_of(run: Run) -> PairConfig:
    """The pair that a run names."""
    own = _named(run, PairConfig, "pair", "--pair.student and --pair.teacher")
    return dataclasses.replace(own, trust_remote_code=is_granted("model code"), allow_pickle=is_granted("pickle"))


def prompts_of(run: Run) -> PromptsConfig:
    """The prompts that a run names."""
    own = _named(run, PromptsConfig, "prompts", "--prompts.source FILE.jsonl")
    refuse_code(str(run.path), "answer checker", own.checker)
    return own


def _named(run: Run, kind: type[C], section: str, flags: str) -> C:
    if section not in run.manifest["config"]:
        made = "a trainer or a table of occurrences made it"
        raise RunError(f"{run.path} names no {section}: {made}. Name the {section} with {flags}.")
    return from_manifest(kind, run.manifest["config"][section], section)


def student_source(run: Run, pair: PairConfig, checkpoint: str) -> str:
    """Where the asked-for student lies: a kept checkpoint, or the pair's own."""
    kept = run.checkpoints()
    if checkpoint == "last" and not kept and run.done("distill"):
        raise RunError(
            f"{run.path} kept no checkpoint of its training, so there is no trained student to look at. Train again "
            "with options=RockOptions(keep_at=None), which keeps the first and the last, or keep_at=(0, 100, ...)"
        )
    if checkpoint in ("student", "teacher") or (checkpoint == "last" and not kept):
        return pair.student
    step = kept[-1] if checkpoint == "last" else int(checkpoint) if checkpoint.isdecimal() else None
    if step not in kept:
        raise ConfigError(
            f"checkpoint must be last, student, teacher or one of {kept or 'none kept yet'}, got {checkpoint!r}"
        )
    return str(run.checkpoint(step))
