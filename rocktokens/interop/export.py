"""The stage `export`: a run's bypass list, or its rocks, in the form that another trainer reads. It loads no model.

ids       one token id per line
json      bypass.json itself: ids, tokens, evidence, fingerprint of the tokenizer
csv       one row per costly token type, with its evidence and the decision
trl       JSON with the arguments for `RockDistillationTrainer` (a TRL DistillationTrainer)
verl      JSON with ids and weights for the losses that verl_plugin.py registers
ms-swift  a plug-in file with the ids inside, made from ms_swift.py.in
slime     a custom loss with the ids inside, made from slime.py.in

All but `ids` name the tokenizer's fingerprint. Rocks are not a bypass list: nothing says yet that they may be skipped,
and the file says so.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rocktokens.bypass import NAME, VERSION, BypassList, fingerprint, read_bypass
from rocktokens.errors import DataError
from rocktokens.interop.verl_plugin import WEIGHTS
from rocktokens.models.tokens import run_tokenizer
from rocktokens.run import open_run, reading, write_text
from rocktokens.show import to_csv

log = logging.getLogger(__name__)

Listed = Literal["bypass", "rocks"]
Format = Literal["ids", "json", "csv", "trl", "verl", "ms-swift", "slime"]
SUFFIX: dict[str, str] = {"ids": ".txt", "json": ".json", "csv": ".csv", "trl": ".trl.json", "verl": ".verl.json"}
SUFFIX |= {"ms-swift": "_ms_swift.py", "slime": "_slime.py"}  # no dot before: slime imports it by name
COLUMNS = (
    *("token_id", "token", "decision", "reason", "why", "class", "declared", "confirmed", "cost_share"),
    *("verdict", "delta", "delta_low", "delta_high", "fall", "fall_low", "fall_high"),
    *("graft", "graft_gain", "graft_gain_low", "graft_gain_high"),
)


def export(path: Path, form: Format, out: Path | None = None, *, listed: Listed = "bypass") -> Path:
    """Write a run's bypass list, or its rocks, for others.

    Args:
        path: the run directory, or a bypass.json.
        form: see the top of this module.
        out: the file to write; unset: beside the list, by its name and the format's.
        listed: which list.
    """
    found = read_bypass(path) if listed == "bypass" else rocks_of(path)
    folder = path if path.is_dir() else path.parent
    out = out or folder / f"{listed}{SUFFIX[form]}"
    if form == "json" and out == folder / NAME:
        return out  # it lies there already
    about = {  # what every form for a trainer holds
        "ids": list(found.ids),
        "tokens": list(found.tokens),
        "tokenizer": found.content.get("tokenizer"),
        "comparison": found.text,
    }
    contents: dict[str, object] = {
        "json": found.content,
        # RockDistillationTrainer(..., selector=make_selector(**selector))
        "trl": {"selector": {"name": "freeze", "rocks": list(found.ids)}, **about},
        # Loss weights by token id, for verl_plugin.py.
        "verl": {
            "format": WEIGHTS,
            "version": VERSION,
            "token_weights": {str(token_id): 0.0 for token_id in found.ids},
            "default_weight": 1.0,
            **about,
        },
    }
    if form in contents:
        text = json.dumps(contents[form], indent=2, ensure_ascii=False) + "\n"
    elif form == "csv":
        rows: Any = found.content.get("decisions", [])
        with reading(folder / NAME, "make it again with `rocktokens bypass`"):
            columns = {name: pa.array([row.get(name) for row in rows]) for name in COLUMNS}
            marks = pa.array([found.fingerprint] * len(rows), pa.string())
            text = to_csv(pa.table(columns | {"tokenizer": marks}))
    elif form in ("ms-swift", "slime"):
        text = Path(__file__).with_name(f"{form.replace('-', '_')}.py.in").read_text(encoding="utf-8")
        for name, value in {"IDS = []": list(found.ids), "FINGERPRINT = None": found.fingerprint}.items():
            text = text.replace(name, f"{name.split()[0]} = {value!r}", 1)
        text = text.replace('COMPARISON = ""', f"COMPARISON = {found.text!r}", 1)
    else:
        text = "".join(f"{token_id}\n" for token_id in found.ids)
    write_text(out, text)
    if not found.ids:
        log.warning("the list is empty: no token type may be skipped yet, and training with this file changes nothing")
    return out


def rocks_of(path: Path) -> BypassList:
    """A run's declared rocks in the form of a list; its costly types where the run cannot tell which of them learn."""
    run = open_run(path)
    kinds = "select token_id, token, class from types where class in ('{}') order by r desc, token_id"
    if not run.done("detect"):
        raise DataError(f"{path} has no rocks yet; run `rocktokens detect {path}` first")
    rows, kind = run.query(kinds.format("rock', 'rock so far")).to_pylist(), "rock"
    if not rows and not run.query("select 1 from types where loss_pre is not null limit 1").num_rows:
        rows, kind = run.query(kinds.format("costly")).to_pylist(), "costly"
    ids, tokens = [int(row["token_id"]) for row in rows], [str(row["token"]) for row in rows]
    named = run_tokenizer(run)
    mark = None if named is None else fingerprint(named.get_vocab())
    text = f"{kind} types; not a bypass list: not tested whether training may skip them"
    decisions = [{"token_id": row["token_id"], "token": row["token"], "class": kind} for row in rows]
    tokenizer = {"fingerprint": mark, "vocabulary": None if named is None else len(named.get_vocab())}
    content = {"format": "rocktokens rocks", "version": 1, "ids": ids, "tokens": tokens, "tokenizer": tokenizer}
    content |= {"comparison": {"status": "not compared", "text": text}, "decisions": decisions}
    return BypassList(tuple(ids), tuple(tokens), mark, "not compared", text, content)
