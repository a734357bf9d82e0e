"""Help in two levels: the flags of every day with an example, here; all of them by `--help-all`, from tyro.

What a flag does is read from the configuration's own docstrings, so nothing is said in two places.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing

EXAMPLES = {
    "study": (
        "rocktokens study --quick             a small study of the built-in pair",
        "rocktokens study --pair.student S --pair.teacher T --prompts FILE --path runs/mine",
        "rocktokens study runs/mine           go on with it; no flag needs repeating",
    ),
    "distill": ("rocktokens distill runs/mine --pair.student S --pair.teacher T --prompts FILE",),
    "sample": ("rocktokens sample runs/mine --max-new-tokens 1024",),
    "detect": ("rocktokens detect runs/mine", "rocktokens detect --occurrences my.parquet --out runs/mine"),
    "knockout": ("rocktokens knockout runs/mine --top 40",),
    "graft": ("rocktokens graft runs/mine --problems 300",),
    "compare": ("rocktokens compare runs/mine --seeds 3",),
}
# Command → its everyday settings; other commands are short enough to show whole.
EVERYDAY = {
    "study": (
        *("quick", "dry_run", "path", "pair.student", "pair.teacher", "prompts.source", "stages", "distill.steps"),
        *("distill.learning_rate", "distill.max_new_tokens", "rollouts.max_new_tokens", "detection_prompts"),
        *("baseline.problems", "knockout.top", "compare.regimes", "compare.seeds"),
    ),
    "distill": (
        *("pair.student", "pair.teacher", "prompts.source", "problems", "distill.steps", "distill.learning_rate"),
        *("distill.prompts_per_step", "distill.rollouts_per_prompt", "distill.max_new_tokens", "distill.keep"),
        *("distill.selector.name", "distill.evaluate_every", "distill.lora_rank", "again"),
    ),
    "sample": (
        *("pair.student", "pair.teacher", "prompts.source", "rollouts.num_rollouts", "rollouts.max_new_tokens"),
        *("rollouts.temperature", "rollouts.batch_size", "checkpoint", "again"),
    ),
    "detect": ("detect.definition", "detect.signal", "detect.k", "occurrences", "out", "tokenizer", "again"),
    "knockout": (
        *("knockout.top", "knockout.candidates", "knockout.kinds", "knockout.epsilon", "baseline.problems"),
        *("baseline.rollouts", "baseline.max_new_tokens", "baseline.greedy", "again"),
    ),
    "graft": ("graft.problems", "graft.rocks", "graft.clusters", "baseline.rollouts", "again"),
    "compare": (
        *("compare.regimes", "compare.seeds", "compare.steps", "compare.problems", "compare.rollouts"),
        *("compare.equal", "compare.until", "compare.margin", "compare.rocks", "results", "again"),
    ),
}


def everyday_help(name: str, kind: type, recipes: typing.Iterable[str] = ()) -> str | None:
    """The short help of a command, 80 columns wide; None where the command is short enough to show whole."""
    if name not in EVERYDAY:
        return None
    first = "[RUN | RECIPE | FILE.yaml]" if name == "study" else "RUN"
    lines = [f"usage: rocktokens {name} {first} [--section.field value ...]", ""]
    lines += textwrap.wrap((kind.__doc__ or "").splitlines()[0], 80)
    lines += ["", *(f"  {example}" for example in EXAMPLES.get(name, ())), ""]
    if name == "study":
        lines += ["  RUN                  A run to go on with.", f"  RECIPE               {', '.join(recipes)}"]
        lines += ["  --config FILE        Settings as YAML, by section and field."]
    section = getattr(kind, "section", None) or None
    for field in EVERYDAY[name]:
        found = setting(kind, field)
        if found is not None:
            lines += _entry(field, section, *found)
    lines += ["", f"`rocktokens {name} --help-all` lists every setting."]
    return "\n".join(lines)


def setting(kind: type, field: str) -> tuple[str, object] | None:
    """(what it does, its default) of a setting by its dotted name; None where there is no such setting."""
    owner, parts = kind, field.split(".")
    for part in parts[:-1]:
        inner = typing.get_type_hints(owner).get(part)
        if inner is None:
            return None
        owner = next((item for item in typing.get_args(inner) if isinstance(item, type)), inner)
    known = {item.name: item for item in dataclasses.fields(owner)}
    if parts[-1] not in known:
        return None
    said = next((docs[parts[-1]] for base in owner.__mro__ if parts[-1] in (docs := field_docs(base))), "")
    default = known[parts[-1]].default
    return said, None if default is dataclasses.MISSING else default


def field_docs(kind: type) -> dict[str, str]:
    """Field → the string below it in the class' source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return {}
    found = {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for item, below in itertools.pairwise(body):
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(text, ast.Constant):
            found[item.target.id] = " ".join(str(text.value).split())
    return found


def _entry(field: str, section: str | None, said: str, default: object) -> list[str]:
    short = field.removeprefix(f"{section}.") if section else field
    flag = "--prompts FILE" if short == "prompts.source" else f"--{short}".replace("_", "-")
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    hides = default is None or default is False or shown == "" or len(str(shown)) > 40
    text = said + ("" if hides else f" (default: {shown})")
    lines = textwrap.wrap(text, 56, break_long_words=False) or [""]
    head = f"  {flag:<20} "
    if len(flag) > 20:
        return [f"  {flag}", *(" " * 23 + line for line in lines)]
    return [head + lines[0], *(" " * 23 + line for line in lines[1:])]
