"""What the campaign's sweeps share: a finished small run, an attempt at a command, and the account of what held.

An attempt holds if the command ends by itself with status 0, 1 or 2 and no traceback, and if every stage that was
complete before is still listed and every table still readable, unless the attempt itself replaced or damaged it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import secrets
import shutil
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from small_runs import DETECT, DISTILL, ROLLOUTS, save_pair

from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.cli import main
from rocktokens.compare.settings import CompareConfig
from rocktokens.run import open_run
from rocktokens.score.settings import ScoreConfig

SHARE = float(os.environ.get("CAMPAIGN_SHARE", "1"))
PART, PARTS = (int(number) for number in os.environ.get("CAMPAIGN_PART", "1/1").split("/"))  # a campaign in pieces
SEED = int(os.environ.get("CAMPAIGN_SEED") or secrets.randbits(32))
COUNTS = os.environ.get("CAMPAIGN_COUNTS")
KEPT = Path(__file__).parent / "kept.json"

BASELINE = BaselineConfig(problems=6, rollouts=1, max_new_tokens=8)
KNOCKOUT = KnockoutConfig(candidates=("w7", "w9"), until="budget", resamples=100)
GRAFT = GraftConfig(problems=4, rocks=("w7",), clusters=False, resamples=100)
COMPARE = CompareConfig(
    regimes=("uniform", "freeze"),
    seeds=1,
    steps=2,
    evaluations=1,
    problems=4,
    rollouts=1,
    contexts=4,
    rocks=(7,),
    resamples=100,
)
STAGES = ("distill", "sample", "score", "detect", "geometry", "knockout", "graft", "compare", "report")


def run_stage(path: Path, name: str, pair: Any, prompts: Any) -> None:
    """One stage with the campaign's settings."""
    from rocktokens.causal import graft, knockout
    from rocktokens.compare import stage as compare
    from rocktokens.detect import stage as detect
    from rocktokens.geometry import stage as geometry
    from rocktokens.report import stage as report
    from rocktokens.sample import stage as sample
    from rocktokens.score import stage as score
    from rocktokens.train import stage as distill

    work: dict[str, Callable[[], object]] = {
        "distill": lambda: distill.distill(path, pair, prompts, DISTILL, problems=4),
        "sample": lambda: sample.sample(path, pair, prompts, ROLLOUTS, limit=8),
        "score": lambda: score.score(path, ScoreConfig()),
        "detect": lambda: detect.detect(path, DETECT),
        "geometry": lambda: geometry.geometry(path),
        "knockout": lambda: knockout.knockout(path, KNOCKOUT, BASELINE),
        "graft": lambda: graft.run_graft(path, GRAFT, BASELINE),
        "compare": lambda: compare.compare(path, COMPARE),
        "report": lambda: report.report(path),
    }
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        work[name]()


def pair_and_prompts(home: Path) -> tuple[Any, Any]:
    """A tiny pair on disk, with 80 prompts."""
    pair, prompts = save_pair(home / "pair", prompts=80)
    return pair, replace(prompts, checker="exact")


def finished_run(home: Path) -> Path:
    """A small study with every stage complete."""
    pair, prompts = pair_and_prompts(home)
    for name in STAGES:
        run_stage(home / "run", name, pair, prompts)
    return home / "run"


@dataclass
class Account:
    """Tried, held, failed, for one kind of attack."""

    kind: str
    tried: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def note(self, case: dict[str, Any], problem: str | None) -> None:
        """Count an attempt; `problem` says what went wrong."""
        self.tried += 1
        if problem:
            self.failures.append({"kind": self.kind, **case, "problem": problem})

    def close(self) -> None:
        """Print the counts, keep every failing case, and fail if there is one."""
        held = self.tried - len(self.failures)
        print(
            f"\n{self.kind}: tried {self.tried}, held {held}, failed {len(self.failures)} (seed {SEED}, share {SHARE})"
        )
        for failure in self.failures[:20]:
            print(f"  {json.dumps(failure)[:400]}")
        if COUNTS:
            with open(COUNTS, "a") as file:
                counts = {"kind": self.kind, "tried": self.tried, "held": held, "seed": SEED, "part": f"{PART}/{PARTS}"}
                file.write(json.dumps(counts) + "\n")
        if self.failures and SHARE == 1:
            known = json.loads(KEPT.read_text()) if KEPT.exists() else []
            KEPT.write_text(json.dumps([*known, *self.failures], indent=1) + "\n")
        assert not self.failures, f"{len(self.failures)} of {self.tried} attempts failed"


def chosen(cases: Iterable[Any], kind: str) -> list[Any]:
    """The share of the cases that this campaign tries, in a random order that its seed decides."""
    cases = list(cases)
    rng = random.Random(f"{SEED}/{kind}")
    rng.shuffle(cases)
    return cases[: max(1, round(SHARE * len(cases)))][PART - 1 :: PARTS]


def attempt(words: list[str]) -> tuple[int, str, str | None]:
    """A command in this process: exit status, what it said, and the problem if it did not end as promised."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException as error:  # whatever escapes is what the campaign looks for
        line = traceback.extract_tb(error.__traceback__)[-1]
        return (
            70,
            out.getvalue(),
            f"{type(error).__name__}: {str(error)[:200]} at {Path(line.filename).name}:{line.lineno}",
        )
    else:
        return 70, out.getvalue(), "the command returned without a status"
    said = out.getvalue()
    if "should not have happened" in said:
        return status, said, "caught at the last moment: " + said[-300:]
    if "Traceback (most recent call last)" in said:
        return status, said, "traceback: " + said[-300:]
    return status, said, None if status in (0, 1, 2) else f"status {status}"


def lost(path: Path, before: set[str], own: str | None) -> str | None:
    """What a refused command took away: stages that are not listed any more."""
    gone = before - set(open_run(path).manifest["stages"]) - {own or ""}
    return f"stages lost: {sorted(gone)}" if gone else None


def disagreement(path: Path) -> str | None:
    """Whether the tables of a run disagree: every occurrence must name the token that its rollout has there."""
    run = open_run(path)
    if run.done("score") and run.done("sample"):
        row = run.query(
            "select count(*) as n, count_if(o.token_id = r.token_ids[o.position + 1]) as same "
            "from occurrences o left join rollouts r using (rollout_id)"
        ).to_pylist()[0]
        if row["n"] != row["same"]:
            return f"{row['n'] - row['same']} of {row['n']} occurrences name another token than rollouts.parquet"
    return None


def copy_of(run: Path, target: Path) -> Path:
    """A fresh copy that an attempt may change; hard links would share damage."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(run, target))
