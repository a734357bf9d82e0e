"""The command line: flags become a configuration, the configuration goes to the pipeline. It decides nothing.

Nothing heavy is imported before a command is known to be valid, so that help and mistakes answer at once.
Exit status: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from dataclasses import MISSING, fields
from typing import Any

from rocktokens import __version__
from rocktokens.commands import COMMANDS, StudyCommand, WorldCommand, fields_of
from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.recipes import recipes


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


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"rocktokens {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`rocktokens --help` lists them"
        raise ConfigError(f"there is no command {name!r}; {hint}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for noisy in ("httpx", "transformers", "datasets", "absl"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if name in ("detect", "geometry", "report"):  # small matrices, no model: more threads than one only wait
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _parse(name, rest).run()
    return 0


def _parse(name: str, rest: list[str]) -> Any:
    """Flags over the YAML file over the defaults."""
    import tyro

    from rocktokens.config.base import from_mapping, load_yaml

    kind = COMMANDS[name]
    file, rest = _take_flag(rest, "--config")
    word, rest = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else (None, rest)
    default, values = None, {}
    if word is not None and kind is StudyCommand:
        file, default = _recipe(word)
    elif kind is WorldCommand:
        if word != "build" and not {"-h", "--help"} & set(rest):
            raise ConfigError("say `rocktokens world build` or `rocktokens world build NAME`")
        if rest and not rest[0].startswith("-"):
            values["world"], rest = rest[0], rest[1:]
    elif word is not None and "path" in fields_of(kind):
        values["path"] = word
    elif word is not None:
        raise ConfigError(f"`rocktokens {name}` takes settings only, as --section.field value; got {word!r}")
    values |= load_yaml(file) if file else {}
    needs_path = any(item.name == "path" and item.default is MISSING for item in fields(kind))
    if needs_path and "path" not in values:
        if not {"-h", "--help"} & set(rest):
            raise ConfigError(f"which run? Say `rocktokens {name} DIRECTORY`")
        values["path"] = "RUN"
    default = from_mapping(kind, values, default=default)
    rest = ["--prompts.source" if word == "--prompts" else word for word in rest]
    return tyro.cli(
        kind,
        args=rest,
        default=default,
        prog=f"rocktokens {name}",
        description=kind.__doc__,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )


def _take_flag(words: list[str], flag: str) -> tuple[str | None, list[str]]:
    if flag not in words:
        return None, words
    at = words.index(flag)
    if at + 1 >= len(words):
        raise ConfigError(f"{flag} needs a file")
    return words[at + 1], words[:at] + words[at + 2 :]


def _recipe(word: str) -> tuple[str | None, Any]:
    """What the first word of `study` names: a YAML file, or a recipe."""
    if word.endswith((".yaml", ".yml")):
        return word, None
    known = recipes()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}, or give a .yaml file"
        raise ConfigError(f"there is no recipe {word!r}; {hint}")
    recipe = known[word]()
    return None, StudyCommand(**{item.name: getattr(recipe, item.name) for item in fields(recipe)})


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()]
    return "\n".join(
        [
            "rocktokens: which tokens on-policy distillation never fixes, what they cost, whether they matter.",
            "",
            "usage: rocktokens COMMAND [RUN] [--section.field value ...] [--config file.yaml]",
            "",
            *lines,
            "",
            "`rocktokens COMMAND --help` lists a command's settings; `--version` the version.",
        ]
    )


if __name__ == "__main__":
    main()
