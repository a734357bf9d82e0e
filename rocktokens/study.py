"""The registry of stages, the study that runs them in order, its settings and its recipes.

`STAGES` is the only list of stages: the command line, the help, the order of a study, its dry run and the docs are made
from it. A stage's function is imported when it runs, so that help and mistakes answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import logging
import os
import shutil
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from rocktokens.causal.settings import BaselineConfig, BypassConfig, GraftConfig, KnockoutConfig
from rocktokens.compare.settings import CompareConfig
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.jobs import Place, forget, keeping_workers, num_gpus
from rocktokens.models.settings import PairConfig
from rocktokens.progress import clock, stages
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.settings import ScoreConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import Count, Pair, Settings, field_types, from_mapping, without_permissions
from rocktokens.train.settings import DistillConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What the command line, the study and the docs know of a stage."""

    name: str
    help: str
    work: str  # package.module:function; its first parameter is the run directory
    takes: str  # its other parameters, each a field of StudyConfig: the field's name, or parameter=field
    section: str = ""  # its own settings, whose flags need no prefix on its own command; unset: those of its name
    reads: str  # what it rests on: where one of these has changed, the stage is done again
    asks: tuple[Literal["student", "teacher"], ...] = ()  # whose servers it asks, where they are named
    shared: bool = False  # whether its work is a list of jobs, done where --workers and --ray say
    needs_answers: bool = False  # whether it measures accuracy, and is left out where the prompts have no answers
    # Expected work, in rollouts sampled from the student; the factors were measured on the built-in world.
    size: Callable[[StudyConfig], float] = lambda c: 1.0
    is_fixed: bool = False  # whether its time hardly depends on the settings
    does: Callable[[StudyConfig], str]  # what it will do with these settings, in a few words

    @property
    def arguments(self) -> dict[str, str]:
        """Parameter of the function → field of StudyConfig."""
        return dict((part.split("=") * 2)[:2] for part in self.takes.split())

    def load(self, settings: Mapping[str, Any], **options: Any) -> Callable[[Path], Any]:
        """The stage's function with its settings, and with those of the options (place, again, ...) that it has."""
        module, _, name = self.work.partition(":")
        function = getattr(importlib.import_module(module), name)
        known = set(inspect.signature(function).parameters) - {"path"}
        given = {parameter: settings[section] for parameter, section in self.arguments.items()}
        more = {name: value for name, value in {**settings, **options}.items() if name in known and name not in given}
        return functools.partial(function, **given, **more)


def _trained(config: StudyConfig, steps: int) -> float:
    """Rollouts of a training; each is sampled, scored by the teacher and learned from."""
    return 2.5 * steps * config.distill.prompts_per_step * config.distill.rollouts_per_prompt


def _detection(config: StudyConfig) -> int:
    """Rollouts that rocks are looked for on, as far as the settings say."""
    return (config.detection_prompts or config.prompts.limit or 0) * config.rollouts.num_rollouts


STAGES: dict[str, StageSpec] = {
    spec.name: spec
    for spec in (
        StageSpec(
            name="distill",
            help="Distil the student on its own rollouts, with a weight and a record for every token.",
            work="rocktokens.train.stage:distill",
            takes="pair prompts config=distill problems servers",
            reads="the pair, the prompts",
            asks=("teacher",),
            size=lambda c: (
                _trained(c, c.distill.steps)
                + c.problems * c.distill.steps / (c.distill.evaluate_every or c.distill.steps)
                + (c.distill.off_policy.answers or 0) * c.distill.off_policy.epochs
            ),
            does=lambda c: (
                f"{c.distill.steps} steps of {c.distill.prompts_per_step * c.distill.rollouts_per_prompt} "
                f"rollouts, {c.distill.keep} checkpoints kept"
            ),
        ),
        StageSpec(
            name="sample",
            help="Sample rollouts of the student into a run.",
            work="rocktokens.sample.stage:sample",
            takes="pair prompts rollouts limit=detection_prompts servers",
            section="rollouts",
            reads="the pair, the prompts, the last checkpoint of distill",
            asks=("student",),
            shared=True,
            size=_detection,
            does=lambda c: (
                f"{c.detection_prompts or c.prompts.limit or 0} prompts × {c.rollouts.num_rollouts} rollouts "
                "of the last student"
            ),
        ),
        StageSpec(
            name="score",
            help="Score a run's rollouts: the exact cost of every sampled token, at every kept checkpoint.",
            work="rocktokens.score.stage:score",
            takes="config=score servers",
            reads="the rollouts of sample, the kept checkpoints, the teacher",
            asks=("teacher",),
            shared=True,
            size=lambda c: 0.5 * _detection(c) * (c.distill.keep + 1),
            does=lambda c: f"those rollouts under {c.distill.keep + 1} checkpoints and the teacher",
        ),
        StageSpec(
            name="detect",
            help="Find the rocks of a scored run, or of a table of occurrences (--occurrences FILE --out DIR).",
            work="rocktokens.detect.stage:detect",
            takes="config=detect",
            reads="the occurrences of score, else the telemetry of distill",
            is_fixed=True,
            size=lambda c: 1000.0,
            does=lambda c: "declares the rocks; loads no model",
        ),
        StageSpec(
            name="geometry",
            help="Say which way the token types' gradients point and how much they pull.",
            work="rocktokens.geometry.stage:geometry",
            takes="",
            reads="the gradients of score, the rocks of detect",
            is_fixed=True,
            does=lambda c: "gradients per token type; loads no model",
        ),
        StageSpec(
            name="knockout",
            help="Ban the candidates one at a time and say what each ban does to accuracy.",
            work="rocktokens.causal.knockout:knockout",
            takes="config=knockout baseline servers",
            reads="the rocks of detect, prompts that detection did not use, the last checkpoint",
            asks=("student",),
            shared=True,
            needs_answers=True,
            size=lambda c: c.baseline.problems * c.baseline.rollouts * (1 + 0.2 * c.knockout.top),
            does=lambda c: (
                f"bans up to {c.knockout.top} candidates, {c.baseline.problems} prompts × "
                f"{c.baseline.rollouts} rollouts"
            ),
        ),
        StageSpec(
            name="graft",
            help="Let the teacher draw the rocks in the student's place: what learning them perfectly would gain.",
            work="rocktokens.causal.graft:run_graft",
            takes="config=graft baseline servers",
            reads="the rocks of detect, the baseline of knockout, the last checkpoint, the teacher",
            asks=("student", "teacher"),
            shared=True,
            needs_answers=True,
            size=lambda c: 35.0 * min(c.graft.problems, c.baseline.problems),
            does=lambda c: f"lets the teacher draw the rocks, {min(c.graft.problems, c.baseline.problems)} prompts",
        ),
        StageSpec(
            name="bypass",
            help="Say which costly token types training may skip, which it must not, and why.",
            work="rocktokens.bypass:bypass",
            takes="config=bypass",
            reads="the tables of detect, knockout and graft",
            is_fixed=True,
            does=lambda c: "writes the list of what may be skipped",
        ),
        StageSpec(
            name="compare",
            help="Train the regimes from one start and say what leaving out the rocks costs and saves.",
            work="rocktokens.compare.stage:compare",
            takes="config=compare servers",
            reads="the settings and checkpoints of distill, the rollouts of sample, the rocks, the bypass list",
            asks=("teacher",),
            shared=True,
            needs_answers=True,
            size=lambda c: (
                len({"uniform", *c.compare.regimes})
                * c.compare.seeds
                * (
                    _trained(c, c.compare.steps or c.distill.steps)
                    + c.compare.problems * (c.compare.evaluations + c.compare.rollouts)
                )
            ),
            does=lambda c: (
                f"{len({'uniform', *c.compare.regimes})} regimes × {c.compare.seeds} "
                f"seed{'s' * (c.compare.seeds > 1)}, {c.compare.steps or c.distill.steps} steps, "
                f"{c.compare.problems} prompts"
            ),
        ),
        StageSpec(
            name="report",
            help="Write a run's report: one HTML file that holds everything, and its figures.",
            work="rocktokens.report.stage:report",
            takes="",
            reads="everything in the run",
            is_fixed=True,
            size=lambda c: 2500.0,
            does=lambda c: "writes report.html and the figures",
        ),
    )
}
StageName = Literal[tuple(STAGES)]  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Settings):
    """Distil, record what every token costs, find the rocks, test whether they matter, and report."""

    path: Path = field(default_factory=lambda: Path("runs/study"))
    """The run directory; made if it is not there."""
    stages: Annotated[tuple[StageName, ...], Meta(min_length=1)] = tuple(STAGES)  # type: ignore[valid-type]
    """Which stages to run, in their fixed order; those that are complete do nothing."""
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    problems: Count = 200
    """Held-out prompts on which accuracy is measured while training."""
    detection_prompts: Pair | None = 400
    """Held-out prompts on which rocks are looked for; unset: as many as --prompts.limit says."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    detect: DetectConfig = field(default_factory=DetectConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    knockout: KnockoutConfig = field(default_factory=KnockoutConfig)
    graft: GraftConfig = field(default_factory=GraftConfig)
    bypass: BypassConfig = field(default_factory=BypassConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

    def chosen(self) -> list[StageSpec]:
        """The stages to run, in order."""
        return [spec for spec in STAGES.values() if spec.name in self.stages]


# ---------------------------------------------------------------- running


def study(config: StudyConfig, *, place: Place | None = None, note: str | None = None, retest: bool = False) -> Any:
    """Run the chosen stages in order under one display, and close with what was found. Returns the run.

    Args:
        config: The settings of every stage.
        place: Where shared work is done; unset: one worker per core for a built-in pair, else one.
        note: What to say at the very end, such as what a quick study left out.
        retest: Once rocks are declared, train as many steps again and declare them again; what follows is of the
            student that comes out.
    """
    from rocktokens.facts import Facts
    from rocktokens.report.conclusions import found_by, summary
    from rocktokens.run import open_run, working_on

    start, path = time.monotonic(), config.path
    place, complete = place or fitting(config), _complete(path)
    require_servers(config)  # before the hours of the first stage
    sizes = {spec.name: 1.0 if spec.name in complete else spec.size(config) for spec in config.chosen()}
    with working_on(path), keeping_workers(), stages(sizes) as overall:
        chosen = config.chosen()
        declared = [spec.name for spec in chosen].index("detect") + 1 if retest else 0
        for number, spec in enumerate(chosen[:declared] + chosen):
            once_more = {}  # in the second round, unless an earlier call has continued the training
            if spec.name == "distill" and number >= declared > 0 and "steps_before" not in _complete(path)["distill"]:
                once_more = {"more": config.distill.steps}
            with overall.stage(spec.name), _recording(config, spec.name, note):
                if spec.needs_answers and not _has_answers(path):
                    log.info("no answers to check: %s is left out, accuracy has no meaning here", spec.name)
                else:
                    spec.load(vars(config), place=place, **once_more)(path)
            forget()  # the next stage may need the memory of this one's models
            if said := found_by(spec.name, Facts.of(path)):
                overall.say(f"  {said}")
    facts = Facts(open_run(path))
    print(f"\n{path}: {clock(time.monotonic() - start)} this time; intervals are 95 %")
    if note := note or facts.run.manifest.get("note"):
        print("\n".join(textwrap.wrap(note, 80)))
    print("", *summary(facts), sep="\n")
    return facts.run


def fitting(config: StudyConfig) -> Place:
    """Where a study works if its command does not say: for a built-in pair, which needs one thread, on every core."""
    from rocktokens.world import world_names

    is_built_in = config.prompts.source in world_names() and not (config.pair.student or config.pair.teacher)
    if not is_built_in or num_gpus() or config.servers.student or config.servers.teacher:
        return Place()  # any other pair is loaded once, unless the user says otherwise
    return Place(workers=min(len(os.sched_getaffinity(0)), 4) if hasattr(os, "sched_getaffinity") else 1)


def require_servers(config: StudyConfig) -> None:
    """Ask the servers of all stages now, and not after the hours before the stage that needs them."""
    from rocktokens.servers.connect import generating
    from rocktokens.servers.pool import ServerPool

    complete = _complete(config.path)
    pointless = "sample" in complete and not _has_answers(config.path)
    left = [s for s in config.chosen() if s.name not in complete and not (s.needs_answers and pointless)]
    if "graft" in [spec.name for spec in left] and config.servers.student and not generating(config.servers):
        raise ConfigError(
            "with --servers.student the stage graft needs a teacher's server that generates among --servers.teacher, "
            "and there is none; add one, leave graft out of --stages, or run it afterwards without --servers.student"
        )
    for role in ("student", "teacher"):
        urls = getattr(config.servers, role)
        if urls and any(role in spec.asks for spec in left):
            with ServerPool(urls, config.servers) as pool:
                pool.models()


def _complete(path: Path) -> dict[str, Any]:
    from rocktokens.run import MANIFEST, open_run

    return dict(open_run(path).manifest["stages"]) if (path / MANIFEST).exists() else {}


def _has_answers(path: Path) -> bool:
    facts = _complete(path).get("sample")
    return facts is None or bool(facts["checked"])


# ---------------------------------------------------------------- settings in the run


@contextmanager
def _recording(config: StudyConfig, stage: str, note: str | None = None) -> Iterator[None]:
    """Keep the study's settings, its note and the stage's seconds in the run once the stage has taken the settings.

    A command that is refused on a run with results leaves the settings of that run as they are.
    """
    from rocktokens.run import MANIFEST, open_run

    began, before, refused = time.monotonic(), _complete(config.path), False
    try:
        yield
    except RockTokensError:
        refused = True
        raise
    finally:
        if (config.path / MANIFEST).exists() and not (refused and before):
            run = open_run(config.path)
            seconds = run.manifest.setdefault("seconds", {})  # repeated work counts too
            if run.manifest["stages"] != before:  # a stage that was complete, or is left out, took no time
                seconds[stage] = round(seconds.get(stage, 0.0) + time.monotonic() - began, 1)
            values = without_permissions(StudyConfig, json.loads(json.dumps(dataclasses.asdict(config), default=str)))
            del values["path"]
            if values != run.manifest.get("study") or run.manifest["stages"] != before:
                run.manifest["study"] = values
                run.manifest |= {"note": note} if note else {}  # a quick study stays one, whatever continues it
                run.save()


def load_settings(path: Path) -> StudyConfig:
    """The settings of the study in a run."""
    return from_mapping(StudyConfig, {**recorded(path), "path": str(path)})


def recorded(path: Path) -> dict[str, Any]:
    """What a run has recorded of a study's settings, the defaults of every command on it; empty where there is no run.

    Those of its study, else of its stages. What permits code or pickles is asked for on the command line of every call
    and never taken from a run.
    """
    from rocktokens.run import MANIFEST, open_run

    if not (path / MANIFEST).exists():
        return {}
    manifest = open_run(path).manifest
    kept, config = dict(manifest["study"] if "study" in manifest else manifest["config"]), manifest["config"]
    if "evaluation" in config:  # two settings that stand under other names in the records of their stages
        kept["problems"] = config["evaluation"]["problems"]
    if "sample" in config:
        kept["detection_prompts"] = config["sample"]["limit"]
    names = field_types(StudyConfig).keys() - {"path"}
    return without_permissions(StudyConfig, {name: value for name, value in kept.items() if name in names})


# ---------------------------------------------------------------- dry run

SLOWER = 2.0  # sampling, scoring and training against one large matrix product: an estimate


def dry_run(config: StudyConfig) -> list[str]:
    """Lines that say what the study would do and take, estimated from the models' shapes; nothing is run."""
    import psutil

    from rocktokens.check import needs_of
    from rocktokens.models.pair import load_tokenizer
    from rocktokens.prompts.tasks import BUILT_IN_PROMPTS, is_endless, load_prompts, part_of
    from rocktokens.stage import resolve

    pair, prompts = resolve(config.path, config.pair, config.prompts)
    needs, complete, total = needs_of(pair, config.rollouts), _complete(config.path), 0.0
    steps, endless = config.distill.prompts_per_step * config.distill.steps, is_endless(prompts.source)
    uses = {
        "training (seen again after an epoch)": ("train", steps),
        "accuracy while training": ("detection", config.problems),
        "detection": (
            "detection",
            config.detection_prompts or prompts.limit or (BUILT_IN_PROMPTS if endless else 1 << 60),
        ),
        "census and grafts": ("causal", config.baseline.problems),
        "comparison": ("causal", config.compare.problems),
    }
    counts = {name: count for name, (_, count) in uses.items()}
    if not endless:  # a file has what it has
        found = load_prompts(replace(prompts, limit=None), load_tokenizer(pair.student, pair))
        has = Counter[str](part_of(prompt.text) for prompt in found)
        if "distill" not in {*config.stages, *complete}:
            has["detection"] = len(found)  # nothing has to be kept for training
        most = prompts.limit or len(found)
        counts = {name: min(count, has[part], most) for name, (part, count) in uses.items()}
    baseline = replace(config.baseline, problems=max(counts["census and grafts"], 2))
    compare = replace(config.compare, problems=max(counts["comparison"], 2))
    config = replace(config, detection_prompts=max(counts["detection"], 2), baseline=baseline, compare=compare)
    lines = [f"A study in {config.path}: student {pair.student}, teacher {pair.teacher}, prompts {prompts.source}.", ""]
    for spec in config.chosen():
        length = (config.distill if spec.name == "distill" else config.rollouts).max_new_tokens
        seconds = 5.0 if spec.is_fixed else SLOWER * needs.sample_seconds / 1000 * spec.size(config) * length
        total += 0.0 if spec.name in complete else seconds
        taking = "seconds" if spec.is_fixed else f"about {clock(seconds)}"
        lines.append(f"  {spec.name:9} {'complete' if spec.name in complete else taking}: {spec.does(config)}")
    memory = max(needs.score_bytes, needs.distill_bytes if "distill" in config.stages else 0)
    home = next(folder for folder in (config.path.absolute(), *config.path.absolute().parents) if folder.is_dir())
    disk = (config.distill.keep + 4) * 4 * needs.student_parameters  # 4: the last one, and one with Adam's moments
    lines += [
        "",
        f"  time      about {clock(total)} on this machine if every rollout is as long as allowed; a rough estimate",
        f"  memory    about {memory / 1e9:.2f} GB; {psutil.virtual_memory().available / 1e9:.1f} GB are free",
        f"  disk      about {disk / 1e9:.2f} GB for checkpoints; {shutil.disk_usage(home).free / 1e9:.1f} GB are free",
        "  prompts   " + "; ".join(f"{count} for {name}" for name, count in counts.items()),
        "",
        "Nothing was run: this was --dry-run.",
    ]
    wrap = {"subsequent_indent": " " * 12, "break_long_words": False}
    return [part for line in lines for part in textwrap.wrap(line, 80, **wrap) or [""]]  # type: ignore[arg-type]


# ---------------------------------------------------------------- recipes


def recipes() -> dict[str, Callable[[], StudyConfig]]:
    """Every named study: a recipe is a function that returns a configuration."""
    from rocktokens.world import world_names

    worlds = {name: (lambda name=name: world_recipe(name)) for name in world_names()}  # type: ignore[misc]
    return {**worlds, "qwen": qwen_recipe}


def world_recipe(name: str) -> StudyConfig:
    """A built-in world: a tiny pair with planted truth, offline, minutes on two cores."""
    return StudyConfig(
        path=Path("runs") / name,
        prompts=PromptsConfig(source=name, limit=5000),
        distill=DistillConfig(learning_rate=3e-4, max_new_tokens=80, evaluate_every=50, telemetry_every=50),
        rollouts=RolloutConfig(max_new_tokens=80, batch_size=256),
        knockout=KnockoutConfig(top=40),
        graft=GraftConfig(problems=500),
        # Three seeds: fewer decide nothing. `rocktokens compare` takes all of the steps.
        compare=CompareConfig(regimes=("uniform", "freeze", "random"), seeds=3, steps=60, evaluations=2),
    )


QWEN_STUDENT = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
QWEN_TEACHER = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
QWEN_LENGTH = 64  # tokens; four rollouts of five are shorter (docs/results/qwen.md)
QWEN_TASK = ("min_terms=3", "max_terms=3", "min_digits=1", "max_digits=2")


def qwen_recipe() -> StudyConfig:
    """Two models that others trained apart, on a reasoning-gym task that was chosen by measurement (docs/qwen.md).

    Memory of the training, of 20 GB at most: the student's float32 weights, gradients and Adam moments (10 GB with a
    head of its own), the teacher in bfloat16 (3.6 GB), activations and rows of logits.
    """
    return StudyConfig(
        path=Path("runs") / "qwen",
        # Weights that are trained are float32 whatever this says; the teacher, and what only samples or scores, is not.
        pair=PairConfig(student=QWEN_STUDENT, teacher=QWEN_TEACHER, dtype="bfloat16"),
        prompts=PromptsConfig(source="reasoning-gym:chain_sum", options=QWEN_TASK, chat=True, limit=4000),
        problems=64,
        detection_prompts=400,
        distill=DistillConfig(
            steps=240,
            learning_rate=3e-6,  # by pilots: 1e-5 and 3e-5 lower the accuracy (docs/results/qwen.md)
            prompts_per_step=4,
            rollouts_per_prompt=2,
            max_new_tokens=QWEN_LENGTH,
            micro_batch=8,
            bf16=True,
            keep=6,
            save_every=10,
            evaluate_every=40,
            telemetry_every=10,
        ),
        rollouts=RolloutConfig(num_rollouts=1, max_new_tokens=QWEN_LENGTH, batch_size=64),
        score=ScoreConfig(token_budget=4096),
        detect=DetectConfig(k=100),
        baseline=BaselineConfig(problems=400, rollouts=1, batch_size=64),
        knockout=KnockoutConfig(top=100, kinds=("token", "window", "family"), wider_sets_of="rocks"),
        graft=GraftConfig(problems=200),
        compare=CompareConfig(
            # The bypass list where there is one, and what the paper would leave out.
            regimes=("uniform", "freeze", "freeze_rocks", "random"),
            definition="context",
            seeds=3,  # fewer decide nothing
            steps=40,
            evaluations=2,
            problems=200,
            rollouts=2,
            contexts=100,
        ),
    )


def quick_note(config: StudyConfig, recipe: str | None) -> str:
    """How small a quick study was, for its last lines; `recipe` is the word that the study was called with."""
    did = "; ".join(f"{spec.name}: {spec.does(config)}" for spec in config.chosen() if not spec.is_fixed)
    return (
        f"This was --quick, too small to see effects of few points ({did}). The whole study: rocktokens study "
        f"{recipe or 'arithmetic'}."
    )


def quick(config: StudyConfig) -> StudyConfig:
    """The same study, true but small: every stage runs, on as little data as still says something."""
    return replace(
        config,
        path=config.path.with_name(f"{config.path.name}-quick"),
        problems=100,
        detection_prompts=150,
        distill=replace(config.distill, steps=60, keep=3, evaluate_every=60, telemetry_every=20),
        baseline=replace(config.baseline, problems=150),
        knockout=replace(config.knockout, top=12, controls=False, resamples=2000),
        graft=replace(config.graft, problems=60, clusters=False, resamples=2000),
        compare=replace(
            config.compare,
            regimes=("uniform", "freeze_rocks"),
            seeds=1,
            steps=30,
            evaluations=1,
            problems=200,
            rollouts=2,
        ),
    )
