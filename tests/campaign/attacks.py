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
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from small_runs import DETECT, DISTILL, ROLLOUTS, joined, save_pair

from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.cli import main
from rocktokens.compare.settings import CompareConfig
from rocktokens.run import open_run
from rocktokens.study import StudyConfig, study

SHARE = float(os.environ.get("CAMPAIGN_SHARE", "1"))
SEED = int(os.environ.get("CAMPAIGN_SEED") or secrets.randbits(32))
KEPT = Path(__file__).parent / "kept.json"


def small_study(home: Path) -> StudyConfig:
    """A study that takes seconds: a tiny pair on disk, 80 prompts, every stage small."""
    pair, prompts = save_pair(home / "pair", prompts=80)
    return StudyConfig(
        path=home / "run",
        pair=pair,
        prompts=prompts,
        problems=4,
        detection_prompts=8,
        distill=DISTILL,
        rollouts=ROLLOUTS,
        detect=DETECT,
        baseline=BaselineConfig(problems=6, rollouts=1, max_new_tokens=8),
        knockout=KnockoutConfig(candidates=("w7", "w9"), until="budget", resamples=100),
        graft=GraftConfig(problems=4, rocks=("w7",), clusters=False, resamples=100),
        compare=CompareConfig(
            regimes=("uniform", "freeze"), seeds=1, steps=2, evaluations=1, problems=4, rollouts=1, contexts=4,
            rocks=(7,), resamples=100,
        ),
    )  # fmt: skip


def run_stages(config: StudyConfig, *stages: str) -> None:
    """These stages of a study, without a word."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        study(replace(config, stages=stages))


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
        counts = f"tried {self.tried}, held {held}, failed {len(self.failures)}"
        print(f"\n{self.kind}: {counts} (seed {SEED}, share {SHARE})")
        for failure in self.failures[:20]:
            print(f"  {json.dumps(failure)[:400]}")
        if self.failures and SHARE == 1:
            known = json.loads(KEPT.read_text()) if KEPT.exists() else []
            KEPT.write_text(json.dumps([*known, *self.failures], indent=1) + "\n")
        assert not self.failures, f"{len(self.failures)} of {self.tried} attempts failed"


def chosen(cases: Iterable[Any], kind: str) -> list[Any]:
    """The share of the cases that this campaign tries, in a random order that its seed decides."""
    cases = list(cases)
    rng = random.Random(f"{SEED}/{kind}")
    rng.shuffle(cases)
    return cases[: max(1, round(SHARE * len(cases)))]


def attempt(words: list[str]) -> tuple[int, str, str | None]:
    """A command in this process: exit status, what it said, and the problem if it did not end as promised."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException as error:  # whatever escapes is what the campaign looks for
        return 70, out.getvalue(), escaped(error)
    said = out.getvalue()
    escapes = "should not have happened" in said or "Traceback (most recent call last)" in said
    return status, said, f"status {status}: {said[-300:]}" if escapes or status not in (0, 1, 2) else None


def escaped(error: BaseException) -> str:
    """An error that is none of ours, and where it was raised."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:200]} at {Path(line.filename).name}:{line.lineno}"


def lost(path: Path, before: set[str], own: str | None) -> str | None:
    """What a refused command took away: stages that are not listed any more."""
    gone = before - set(open_run(path).manifest["stages"]) - {own or ""}
    return f"stages lost: {sorted(gone)}" if gone else None


def disagreement(path: Path) -> str | None:
    """Whether the tables of a run disagree: every occurrence must name the token that its rollout has there."""
    run = open_run(path)
    if run.done("score") and run.done("sample"):
        count, same = joined(run)
        if count != same:
            return f"{count - same} of {count} occurrences name another token than rollouts.parquet"
    return None


def copy_of(run: Path, target: Path) -> Path:
    """A fresh copy that an attempt may change; hard links would share damage."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(run, target))
