"""The command line: flags become a configuration, the configuration goes to a stage. It decides nothing.

Nothing heavy is imported before a command is known to be valid, so that help and mistakes answer at once.
Exit status: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
import typing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from rocktokens import __version__
from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.jobs import Place, refuse_torchrun

SHARED = ("study", "sample", "score", "knockout", "graft", "compare")  # commands that take --workers and --ray
# Command → what it does: the first line of its class in commands.py, which help does not import (a test compares them).
SUMMARIES = {
    "study": "Run all stages in order, from distillation to the report: `study [RUN | RECIPE | FILE.yaml]`.",
    "check": "Look for what silently ruins distillation, in a pair, its prompts, servers or a run: `check [RUN]`.",
    "distill": "Distil the student on its own rollouts, with a weight and a record for every token.",
    "sample": "Sample rollouts of the student into a run.",
    "score": "Score a run's rollouts: the exact cost of every sampled token, at every kept checkpoint.",
    "detect": "Find the rocks of a scored run, or of a table of occurrences (--occurrences FILE --out DIR).",
    "geometry": "Say which way the token types' gradients point and how much they pull.",
    "knockout": "Ban the candidates one at a time and say what each ban does to accuracy.",
    "graft": "Let the teacher draw the rocks in the student's place: what learning them perfectly would gain.",
    "bypass": "Say which costly token types training may skip, which it must not, and why.",
    "compare": "Train the regimes from one start and say what leaving out the rocks costs and saves.",
    "export": "Write a run's bypass list, or its rocks, in the form that another trainer reads.",
    "report": "Write a run's report: one HTML file that holds everything, and its figures beside it.",
    "view": "Show a run, while it trains too, or the runs of a folder, on 127.0.0.1.",
    "import": "Turn another trainer's dump into a run: `import FORMAT FILES --tokenizer NAME --out RUN`.",
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `rocktokens` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_main(arguments))
    except ConfigError as error:
        print(f"rocktokens: {error}", file=sys.stderr)
        sys.exit(2)
    except RockTokensError as error:
        print(f"rocktokens: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("rocktokens: stopped; the same command goes on where it was", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a path that no stage touched through runs/files.py
        where = f"{error.filename}: "[:300] if error.filename else ""
        print(f"rocktokens: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except MemoryError:
        print("rocktokens: out of memory; use smaller batches, a smaller model or fewer prompts", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if os.environ.get("ROCKTOKENS_TRACEBACK"):
            raise
        print(f"rocktokens: {_unexpected(error)}", file=sys.stderr)
        sys.exit(1)


def _unexpected(error: Exception) -> str:
    """An unexpected error as one sentence, with what helps to fix it."""
    import traceback

    place = traceback.extract_tb(error.__traceback__)[-1]
    said = (str(error).splitlines() or [""])[0][:300]
    return (
        f"this should not have happened: {type(error).__name__}: {said} ({Path(place.filename).name}, line "
        f"{place.lineno}). Nothing that was complete is lost. ROCKTOKENS_TRACEBACK=1 shows the whole trace; please "
        "report it with the command."
    )


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"rocktokens {__version__}")
        return 0
    place, arguments = _place_of(arguments)
    name, *rest = arguments or [""]
    if name not in SUMMARIES and name not in _commands():
        near = difflib.get_close_matches(name, SUMMARIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`rocktokens --help` lists them"
        raise ConfigError(f"there is no command {name!r}; {hint}")
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun starts `distill` once a process
    level = logging.INFO if is_first else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr, force=True)
    for noisy in ("httpx", "transformers", "datasets", "absl"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if name in ("geometry", "report"):  # small matrices, no model: more threads than one only wait
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    elif name == "detect":  # it shares its work out over the cores itself; a product of matrices is one core's
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if {"-h", "--help"} & set(rest) and "--help-all" not in rest:
        from rocktokens.everyday import everyday_help
        from rocktokens.recipes import recipes

        short = everyday_help(name, _commands()[name], recipes())
        if short is not None:
            print(short)
            return 0
    from rocktokens.permissions import ALLOW_CODE, granting, permissions_of

    words = ["--help" if word == "--help-all" else word for word in rest if word != ALLOW_CODE]
    command = _parse(name, words)
    if name != "distill":
        refuse_torchrun()
    permitted = permissions_of(command, allow_code=ALLOW_CODE in rest)
    with granting(*permitted):
        command.run(place) if name in SHARED else command.run()
    return 0


def _commands() -> dict[str, type]:
    from rocktokens.commands import COMMANDS

    return COMMANDS


def _place_of(words: list[str]) -> tuple[Place | None, list[str]]:
    """What --workers N and --ray ADDRESS say, wherever they stand, and the words without them; None: nothing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--ray")
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError:
        raise ConfigError("--workers takes a number of processes, --ray the address of a cluster or auto") from None
    asked = found.workers is not None or found.ray is not None
    return Place(found.workers if found.workers is not None else 1, found.ray) if asked else None, rest


def _parse(name: str, words: list[str]) -> Any:
    """Flags over the YAML file over the recipe over the defaults."""
    from rocktokens.commands import StudyCommand

    kind = _commands()[name]
    words = _place(kind, [_long_form(kind, word) for word in words])
    file, words = _config_file(words)
    default = None
    if kind is StudyCommand:
        asked = _tyro(name, [word for word in words if word not in ("-h", "--help")], StudyCommand())
        yaml, default = _recipe(asked.recipe) if asked.recipe else (None, None)
        file = file or yaml
        if asked.quick:
            default = _quick(default)
    return _tyro(name, words, _default(kind, file, default))


def _tyro(name: str, words: list[str], default: Any) -> Any:
    import tyro

    kind = _commands()[name]
    return tyro.cli(
        kind,
        args=words,
        default=default,
        prog=f"rocktokens {name}",
        description=kind.__doc__,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )


def _long_form(kind: type, word: str) -> str:
    """`--steps` as `--distill.steps` on the command `distill`; `--prompts FILE` as `--prompts.source FILE`."""
    flag, equals, value = word.partition("=")
    if flag == "--prompts":
        return f"--prompts.source{equals}{value}"
    section = getattr(kind, "section", None) or None
    if not flag.startswith("--") or section is None:
        return word
    field = flag[2:].partition(".")[0].removeprefix("no-").replace("-", "_")
    own = {item.name for item in fields(kind)}
    inner = {item.name for item in fields(typing.get_type_hints(kind)[section])}
    near = field in inner or difflib.get_close_matches(field, inner | own, n=1)[:1] in [[name] for name in inner]
    return f"--{section}.{word[2:]}" if near and field not in own else word  # tyro names the flag nearest to a typo


def _place(kind: type, words: list[str]) -> list[str]:
    """`--path RUN` as `RUN` where a command takes its run without a flag."""
    from tyro.conf import Positional

    hint = typing.get_type_hints(kind, include_extras=True).get("path")
    if Positional[str].__metadata__[0] not in getattr(hint, "__metadata__", ()):  # type: ignore[attr-defined]
        return words
    found = [word.removeprefix("--path=") for word in words]
    if "--path" in found[:-1]:
        found.remove("--path")
    return found


def _config_file(words: list[str]) -> tuple[str | None, list[str]]:
    """The file of --config, and the words without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError:
        raise ConfigError("--config needs a YAML file") from None
    return found.config, rest


def _default(kind: type, file: str | None, default: Any) -> Any:
    """What holds where no flag is given. A study's file serves every command: other stages' sections are ignored."""
    import tyro

    from rocktokens.settings import from_mapping, load_yaml
    from rocktokens.study_settings import StudyConfig

    values = load_yaml(file) if file else {}
    section, own = getattr(kind, "section", None) or None, {item.name for item in fields(kind)}
    if section is not None:
        inner = {item.name for item in fields(typing.get_type_hints(kind)[section])} - own
        short = {key: values.pop(key) for key in list(values) if key in inner}
        values |= {section: {**short, **(values.get(section) or {})}} if short else {}
    known = {item.name for item in fields(StudyConfig)} - own
    values = {key: value for key, value in values.items() if key not in known}
    needed = [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]
    return from_mapping(kind, values, default=default or kind(**dict.fromkeys(needed, tyro.MISSING)))


def _quick(default: Any) -> Any:
    """The settings of a quick study; of the built-in pair where nothing else is named."""
    from rocktokens.commands import StudyCommand
    from rocktokens.recipes import quick, recipes
    from rocktokens.study_settings import StudyConfig

    whole = recipes()["arithmetic"]()
    if default is not None:
        whole = StudyConfig(**{item.name: getattr(default, item.name) for item in fields(StudyConfig)})
    small = quick(whole)
    return StudyCommand(**{item.name: getattr(small, item.name) for item in fields(small)})


def _recipe(word: str) -> tuple[str | None, Any]:
    """What the first word of `study` names: a YAML file, a run to go on with, or a recipe."""
    if word.endswith((".yaml", ".yml")):
        return word, None
    from rocktokens.commands import StudyCommand
    from rocktokens.recipes import recipes

    if (Path(word) / "run.json").is_file():
        from rocktokens.study_plan import load_settings

        kept = load_settings(Path(word))
        return None, StudyCommand(**{item.name: getattr(kept, item.name) for item in fields(kept)})
    known = recipes()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}, or give a .yaml file or a run"
        raise ConfigError(f"there is no recipe {word!r}, and no run; {hint}")
    recipe = known[word]()
    return None, StudyCommand(**{item.name: getattr(recipe, item.name) for item in fields(recipe)})


def _help() -> str:
    width = max(map(len, SUMMARIES))
    lines = [f"  {name:{width}}  {said}" for name, said in SUMMARIES.items()]
    return "\n".join(
        [
            "rocktokens: which tokens on-policy distillation never fixes, what they cost, whether they matter.",
            "",
            "usage: rocktokens COMMAND [RUN] [--section.field value ...] [--config file.yaml] [--workers N | --ray A]",
            "",
            *lines,
            "",
            "`rocktokens COMMAND --help` lists a command's settings; `--version` prints the version. A stage's own",
            "settings may be named without their section: `rocktokens distill RUN --steps 10`. `--allow-code` lets",
            "this call run Python code that the settings or a run name (a checker, a selector, a model's own code).",
        ]
    )


if __name__ == "__main__":
    main()
