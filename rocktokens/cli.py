"""The command line: tyro's subcommands over the registry of stages (study.STAGES) and a few commands that are no stage.

Flags stand above the YAML file of --config, the file above the recipe, the recipe above the defaults. On its own
command a stage's settings need no prefix: `rocktokens distill RUN --steps 10`, `rocktokens study --distill.steps 10`.
Exit status: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from msgspec import Meta
from tyro.conf import Positional, arg

from rocktokens import __version__
from rocktokens.errors import ConfigError, RockTokensError, printable
from rocktokens.jobs import Place, refuse_torchrun, torchrun_number
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import (
    ALLOW_CODE,
    Permission,
    field_docs,
    field_types,
    from_mapping,
    granting,
    load_yaml,
    refuse_code,
    schema,
)
from rocktokens.study import (
    STAGES,
    StageSpec,
    StudyConfig,
    dry_run,
    load_settings,
    quick,
    quick_note,
    recipes,
    recorded,
    study,
)
from rocktokens.train.settings import DistillConfig

ABOUT = """rocktokens: which tokens on-policy distillation never fixes, what they cost, whether they matter.

Anywhere on the line: --config FILE.yaml (settings by section and field), --workers N or --ray ADDRESS (where shared
work is done), --allow-code (run Python code that the settings or a run name: a checker, a selector, a model's own
code). `rocktokens study --help-all` lists every setting."""
RunPath = Annotated[Positional[Path], arg(metavar="RUN")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `rocktokens` command."""
    try:
        command, place, permitted = prepare(list(sys.argv[1:] if arguments is None else arguments))
        with granting(*permitted):
            command.run(place)
        sys.exit(0)
    except RockTokensError as error:
        print(f"rocktokens: {printable(error, 4000)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("rocktokens: stopped; the same command continues where it was", file=sys.stderr)
        sys.exit(130)  # as shells report a command that was interrupted
    except BrokenPipeError:
        pass  # the reader of our output has closed it, as `head` does
    except OSError as error:
        where = f"{error.filename}: "[:300] if error.filename else ""
        print(f"rocktokens: {where}{error.strerror or error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if os.environ.get("ROCKTOKENS_TRACEBACK"):
            raise
        extra = "cluster" if error.name == "ray" else "train"
        said = f'needs {error.name}, which is not installed: pip install "rocktokens[{extra}]"'
        print(f"rocktokens: this command {said}", file=sys.stderr)
    except MemoryError:
        print("rocktokens: out of memory; use smaller batches, a smaller model or fewer prompts", file=sys.stderr)
    except Exception as error:
        if os.environ.get("ROCKTOKENS_TRACEBACK"):
            raise
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {printable((str(error).splitlines() or [''])[0], 300)}"
        print(
            f"rocktokens: this should not have happened: {said} ({Path(place.filename).name}, line {place.lineno}). "
            "Nothing that was complete is lost. ROCKTOKENS_TRACEBACK=1 shows the trace; please report it.",
            file=sys.stderr,
        )
    sys.exit(1)


def prepare(words: list[str]) -> tuple[Any, Any, list[Permission]]:
    """(the command that the words ask for, where its shared work is done, what it may do)."""
    if words[:1] in (["-V"], ["--version"]):
        print(f"rocktokens {__version__}")
        sys.exit(0)
    everywhere = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    everywhere.add_argument("--config")
    everywhere.add_argument("--workers", type=int)
    everywhere.add_argument("--ray")
    everywhere.add_argument(ALLOW_CODE, action="store_true")
    try:
        flags, words = everywhere.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; --config takes a YAML file, --workers a number, --ray an address") from None
    level = logging.WARNING if torchrun_number() else logging.INFO  # say a thing once
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr, force=True)
    for noisy in ("httpx", "transformers", "datasets", "absl"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    os.environ["PYTHONSAFEPATH"] = "1"  # no process that we start imports from the current directory
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if words[:1] != ["distill"]:
        refuse_torchrun()
    command = parse(words, flags.config)
    place, ray = None, flags.ray
    if flags.workers is None and ray is None:
        ray = os.environ.get("RAY_ADDRESS")  # as in every program on Ray
    if flags.workers is not None or ray is not None:
        place = Place(1 if flags.workers is None else flags.workers, ray)
    return command, place, permissions_of(command, allow_code=flags.allow_code)


def permissions_of(command: object, *, allow_code: bool) -> list[Permission]:
    """What the words of this call permit; code that they name without --allow-code is refused."""
    named = [("answer checker", getattr(getattr(command, "prompts", None), "checker", ""))]
    distill = getattr(command, "distill", None)
    if isinstance(distill, DistillConfig):
        named += [("selector", name) for name in (distill.selector.name, *distill.shadows)]
    granted: list[Permission] = ["code"] if allow_code else []
    with granting(*granted):
        for what, name in named:
            refuse_code("the command line", what, name)
    pair = getattr(command, "pair", None)
    granted += ["model code"] if getattr(pair, "trust_remote_code", False) else []
    return granted + (["pickle"] if getattr(pair, "allow_pickle", False) else [])


def parse(words: list[str], file: str | None = None) -> Any:
    """The command that the words ask for, without running it."""
    words = ["--help"] if words in ([], ["help"]) else words
    name, asks_all = words[0], "--help-all" in words
    asks_help = asks_all or bool({"-h", "--help"} & set(words))
    words = ["--help" if word == "--help-all" else word for word in words]
    words = [f"--prompts.source{word[9:]}" if word.partition("=")[0] == "--prompts" else word for word in words]
    if name in STAGES:
        kind, section = stage_command(STAGES[name]), f"--{STAGES[name].section or name}."
        words = [f"--{word.removeprefix(section)}" if word.startswith(section) else word for word in words]
        given = load_yaml(file) if file else {}
        asked = _tyro(name, kind, words, _defaults(kind, {}, given))  # first for the run, whose settings are defaults
        known = recorded(asked.path) if asked.path is not None else {}
        return _tyro(name, kind, words, _defaults(kind, known, given)) if known else asked
    if name != "study":
        return _tyro(name, COMMANDS.get(name), words)
    whole = study_command(short=asks_help and not asks_all)
    asked = _tyro(name, whole, words)  # first for the recipe, whose settings are the defaults of the second
    config = named_study(asked.recipe, file)
    if asked.quick:
        config = quick(config or recipes()["arithmetic"]())
    return _tyro(name, whole, words, whole(**vars(config))) if config else asked


def _tyro(name: str, kind: Any, words: list[str], default: Any = None) -> Any:
    """Parse with tyro; only the command that is asked for has its flags, the others are there for help."""
    helps = {"study": StudyCommand.__doc__, **{spec.name: spec.help for spec in STAGES.values()}}
    helps |= {name: kind.__doc__ for name, kind in COMMANDS.items()}
    kinds = []
    for other, said in helps.items():
        stub = kind if other == name else make_dataclass(other, [])
        more = {"default": default} if default is not None and other == name else {}
        kinds.append(Annotated[stub, tyro.conf.subcommand(other, description=said, prefix_name=False, **more)])
    config = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    any_of: Any = Union[tuple(kinds)]  # noqa: UP007
    return tyro.cli(any_of, args=words, prog="rocktokens", description=ABOUT, config=config)


def _defaults(kind: type, recorded: dict[str, Any], given: dict[str, Any]) -> Any:
    """A stage's command from what its run recorded and, above it, a study's file; None where neither says anything.

    Sections of the file that belong to other stages are checked and not used.
    """
    names = [item.name for item in dataclasses.fields(kind) if item.name in recorded or item.name in given]
    own = from_mapping(StudyConfig, {name: recorded[name] for name in names if name in recorded})
    whole = from_mapping(StudyConfig, given, default=own)
    known = {name: getattr(whole, name) for name in names}
    if not known:
        return None
    needed = [item.name for item in dataclasses.fields(kind) if item.default is item.default_factory is MISSING]
    return kind(**{**dict.fromkeys(needed, tyro.MISSING), **known})


def named_study(word: str | None, file: str | None) -> StudyConfig | None:
    """What the first word of `study` names: a YAML file, a run to continue, or a recipe; None where there is none."""
    known, config = recipes(), None
    if word and word.endswith((".yaml", ".yml")):
        file = file or word
    elif word and (Path(word) / "run.json").is_file():
        config = load_settings(Path(word))
    elif word in known:
        config = known[word]()
    elif word:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}, or give a .yaml file or a run"
        raise ConfigError(f"there is no recipe {word!r}, and no run; {hint}")
    return from_mapping(StudyConfig, load_yaml(file), default=config) if file else config


# ---------------------------------------------------------------- stages as commands


@dataclass(frozen=True, kw_only=True)
class StageCommand:
    """A stage as a command; stages with flags that are no settings have a subclass below, by their name."""

    path: RunPath
    """The run directory; `distill` and `sample` make it."""
    again: bool = False
    """Run the stage again although it is complete."""
    json: bool = False
    """Print what was found as JSON, and everything else on standard error."""

    def run(self, place: Any = None) -> None:
        """Run the stage and say where it is."""
        name = type(self).__name__
        stage = self.work(STAGES[name].load(vars(self), **({"place": place} if place else {})))
        with contextlib.redirect_stdout(sys.stderr if self.json else sys.stdout):
            run = stage(self.path)
            if not torchrun_number():
                if name in ("detect", "bypass", "compare"):
                    print(_verdict(run))
                print(f"run: {run.path}")
        if torchrun_number() is not None:  # every process leaves the group at the end
            from torch import distributed

            if distributed.is_initialized():  # a stage that was complete has started nothing
                distributed.destroy_process_group()
        if self.json:
            stages = run.manifest["stages"].items()
            found = {own: facts for own, facts in stages if own.split("/")[0] == name}
            print(json.dumps({"verdict": _verdict(run).json(), **found}, indent=2))

    def work(self, stage: Callable[[Path], Any]) -> Callable[[Path], Any]:
        """What to call with the run directory."""
        return stage


def _verdict(run: Any) -> Any:
    from rocktokens.facts import Facts
    from rocktokens.report.conclusions import verdict

    return verdict(Facts(run))


def stage_command(spec: StageSpec) -> type[StageCommand]:
    """The command of a stage: a run, the settings that it takes, and its own flags."""
    base = next((kind for kind in StageCommand.__subclasses__() if kind.__name__.lower() == spec.name), StageCommand)
    own, hints, docs = base.__dataclass_fields__, field_types(StudyConfig), field_docs(StudyConfig)
    members: list[Any] = []
    for name in (name for name in spec.arguments.values() if name not in own):
        hint, default = hints[name], StudyConfig.__dataclass_fields__[name].default
        if dataclasses.is_dataclass(hint):
            shown = Annotated[hint, arg(name="")] if name == (spec.section or spec.name) else hint  # type: ignore[valid-type]
            members.append((name, shown, field(default_factory=hint)))  # type: ignore[arg-type]
        else:
            members.append((name, Annotated[hint, arg(help=docs[name])], field(default=default)))
    return make_dataclass(spec.name, members, bases=(base,), frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Distill(StageCommand):
    more: Annotated[int, Meta(ge=1)] | None = None
    """Continue the complete training by this many steps: optimiser state and checkpoints stay, the schedule is
    stretched to the new end, and the stages after it are due."""


@dataclass(frozen=True, kw_only=True)
class Sample(StageCommand):
    checkpoint: str = "last"
    """Which model samples: last (kept checkpoint, else the student), student, teacher, or a step."""
    detection_prompts: Annotated[int, Meta(ge=1)] | None = None
    """Prompts at most; unset: as many as --prompts.limit says."""


@dataclass(frozen=True, kw_only=True)
class Detect(StageCommand):
    path: Annotated[Positional[Path | None], arg(metavar="[RUN]")] = None  # type: ignore[assignment]
    """The run directory."""
    occurrences: Path | None = None
    """A Parquet file with rollout_id, position, token_id and loss, in place of a run."""
    out: Path | None = None
    """For --occurrences: directory of the new run."""
    tokenizer: str | None = None
    """For --occurrences: tokenizer that names the tokens; a directory or hub name."""

    def work(self, stage: Callable[[Path], Any]) -> Callable[[Path], Any]:
        """Detection in a run, or in a table."""
        if self.path is not None and not (self.occurrences or self.out or self.tokenizer):
            return stage
        if self.path is not None or self.occurrences is None or self.out is None:
            raise ConfigError("detect takes RUN, or --occurrences FILE --out DIRECTORY [--tokenizer NAME]")
        from rocktokens.detect.stage import detect_table

        table, out, config = self.occurrences, self.out, vars(self)["detect"]
        return lambda _: detect_table(table, out, config, tokenizer=self.tokenizer, again=self.again)


@dataclass(frozen=True, kw_only=True)
class StudyCommand(StudyConfig):
    """Run all stages in order, from distillation to the report: `study [RUN | RECIPE | FILE.yaml]`."""

    recipe: Annotated[Positional[str | None], arg(metavar="[RUN | RECIPE | FILE.yaml]")] = None
    """A run to continue, a recipe (arithmetic, market, cornerstone, qwen), or a YAML file with settings."""
    quick: bool = False
    """A true but small study, about a minute on the built-in pair; its last lines say how small."""
    retest: bool = False
    """Once rocks are declared, train as many steps again and declare them again: what still is one then."""
    dry_run: bool = False
    """Say what the study would do and need (time, memory, disk, prompts), and do nothing."""
    json: bool = False
    """Print what was found as JSON, and everything else on standard error."""

    def run(self, place: Any = None) -> None:
        """Run the study, or say what it would do."""
        config = StudyConfig(**{item.name: getattr(self, item.name) for item in dataclasses.fields(StudyConfig)})
        if self.dry_run:
            print(*dry_run(config), sep="\n")
            return
        with contextlib.redirect_stdout(sys.stderr if self.json else sys.stdout):
            note = quick_note(config, self.recipe) if self.quick else None
            found = study(config, place=place, note=note, retest=self.retest)
        if self.json:
            print(json.dumps({"verdict": _verdict(found).json(), **found.manifest["stages"]}, indent=2))


def study_command(*, short: bool) -> type[StudyCommand]:
    """The command `study`; for its short help without the stages' settings, which the stages' own help lists."""
    hidden = [
        (name, Annotated[hint, tyro.conf.Suppress], field(default_factory=hint))  # type: ignore[arg-type]
        for name, hint in field_types(StudyConfig).items()
        if short and dataclasses.is_dataclass(hint) and name not in ("pair", "prompts")
    ]
    return make_dataclass("study", hidden, bases=(StudyCommand,), frozen=True, kw_only=True)


# ---------------------------------------------------------------- commands that are no stage


@dataclass(frozen=True, kw_only=True)
class Check:
    """Look for what silently ruins distillation, in a pair, its prompts, servers or a run: `check [RUN]`."""

    path: Annotated[Positional[Path | None], arg(metavar="[RUN]")] = None
    """A run, also one made by `import`; without it, the pair and the prompts alone."""
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    probe: Annotated[int, Meta(ge=0)] = 32
    """Prompts that both models answer, loaded in this process also where servers are named; 0: load no weights."""
    learning_rate: float = DistillConfig.learning_rate
    """The learning rate that is compared with the resolution of the weights."""
    json: bool = False
    """Print the findings as JSON."""

    def run(self, place: Any = None) -> None:
        """Print the findings."""
        from rocktokens.check import check, report

        how: dict[str, Any] = {"probe": self.probe, "learning_rate": self.learning_rate}
        report(check(self.path, self.pair, self.prompts, self.rollouts, self.servers, **how), as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class View:
    """Show a run, while it trains too, or the runs of a folder, on 127.0.0.1."""

    path: RunPath
    """A run directory, or a folder of them."""
    port: int = 8707
    """Port on 127.0.0.1; 0 takes a free one."""
    open_browser: bool = False
    """Also open the page in a browser."""

    def run(self, place: Any = None) -> None:
        """Serve until Ctrl-C."""
        from rocktokens.report.view import view

        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port takes a number from 0 to 65,535, got {self.port}")
        view(self.path, port=self.port, open_browser=self.open_browser)


@dataclass(frozen=True, kw_only=True)
class Import:
    """Turn another trainer's dump into a run: `import FORMAT FILES --tokenizer NAME --out RUN`."""

    format: Annotated[Positional[str], arg(metavar="FORMAT")]
    """slime, prime-rl, trl, verl or jsonl; docs/other-trainers.md says how to get each."""
    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILES")]
    """Files, or directories that are searched for the format's files."""
    tokenizer: str
    """Tokenizer of the model that was trained: a directory or hub name."""
    out: Path
    """Directory of the new run."""
    no_detect: bool = False
    """Do not detect costly token types and do not write the report."""

    def run(self, place: Any = None) -> None:
        """Import, and detect."""
        from rocktokens.interop.import_ import import_dump

        run = import_dump(self.format, self.files, self.tokenizer, self.out, detect=not self.no_detect)
        facts = run.facts("import")
        print(f"import: {facts['rollouts']} rollouts, {facts['tokens']} tokens, steps {facts['steps']}")
        print(f"run: {run.path}")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's bypass list, or its rocks, in the form that another trainer reads."""

    path: RunPath
    """The run directory, or a bypass.json."""
    format: Literal["ids", "json", "csv", "trl", "verl", "ms-swift", "slime"] = "ids"
    """ids: one token id per line; json: everything; csv: one row per costly type; the others: for those trainers."""
    list: Literal["bypass", "rocks"] = "bypass"
    """bypass: what training may skip, as `bypass` decided; rocks: what `detect` declared, skipped at your own risk."""
    out: Path | None = None
    """The file to write; unset: in the directory of the list."""

    def run(self, place: Any = None) -> None:
        """Write the file."""
        from rocktokens.interop.export import export

        print(f"list: {export(self.path, self.format, self.out, listed=self.list)}")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Print the JSON Schema of all settings, for editors and for other programs that write them."""

    def run(self, place: Any = None) -> None:
        """Print it."""
        print(json.dumps(schema(StudyConfig), indent=2))


COMMANDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in (Check, View, Import, Export, Schema)}

if __name__ == "__main__":
    main()
