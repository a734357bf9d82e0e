"""Random sequences of stage commands with random settings: the tables of stages that are complete never disagree."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from small_runs import DETECT, DISTILL, ROLLOUTS, distilled_run, joined, save_pair

from rocktokens.detect.stage import detect
from rocktokens.errors import RockTokensError
from rocktokens.geometry.stage import geometry
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import open_run
from rocktokens.sample.stage import sample
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.stage import score
from rocktokens.stage import stale_stages
from rocktokens.train.stage import distill

EMPTY = (PairConfig(), PromptsConfig())
again = st.booleans()


@contextlib.contextmanager
def quietly():
    """A refusal is an answer; anything else that is raised is a failure."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(RockTokensError),
    ):
        yield


class StageCommands(RuleBasedStateMachine):
    """One run and the commands of its stages, in any order."""

    @initialize()
    def start(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="machine-"))
        self.path = self.home / "run"
        with quietly():
            distilled_run(self.path, *save_pair(self.home / "pair"))

    def teardown(self) -> None:
        if hasattr(self, "home"):
            shutil.rmtree(self.home, ignore_errors=True)

    @rule(seed=st.integers(0, 1), again=again)
    def distill(self, seed: int, again: bool) -> None:
        with quietly():
            distill(self.path, *EMPTY, replace(DISTILL, seed=seed), problems=4, again=again)

    @rule(
        checkpoint=st.sampled_from(["last", "student", "teacher", "0", "99"]),
        limit=st.sampled_from([None, 4, 6]),
        batch=st.sampled_from([1, 64]),
        again=again,
    )
    def sample(self, checkpoint: str, limit: int | None, batch: int, again: bool) -> None:
        with quietly():
            rollouts = replace(ROLLOUTS, batch_size=batch)
            sample(self.path, *EMPTY, rollouts, checkpoint=checkpoint, limit=limit, again=again)

    @rule(checkpoints=st.sampled_from(["all", "0", "2", "99"]), gradients=st.booleans(), again=again)
    def score(self, checkpoints: str, gradients: bool, again: bool) -> None:
        with quietly():
            score(self.path, ScoreConfig(checkpoints=checkpoints, gradients=gradients), again=again)

    @rule(seed=st.integers(0, 1), again=again)
    def detect(self, seed: int, again: bool) -> None:
        with quietly():
            detect(self.path, replace(DETECT, seed=seed), again=again)

    @rule(again=again)
    def geometry(self, again: bool) -> None:
        with quietly():
            geometry(self.path, again=again)

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "path"):
            return
        run = open_run(self.path)
        fresh = set(run.manifest["stages"]) - set(stale_stages(run))
        assert not run.damaged_files("detect") or "detect" not in fresh
        scored = {f"score/step={step}" for step in run.steps()}
        if scored and scored | {"sample"} <= fresh:
            tokens = sum(map(len, run.read("rollouts")["token_ids"].to_pylist()))
            assert joined(run) == (tokens * len(scored), tokens * len(scored))
        if "detect" in fresh and run.steps():
            last = run.steps()[-1]
            counted = run.query("select sum(count_all) as n from types")["n"][0].as_py()
            there = run.query("select count(*) as n from occurrences where step = ?", [last])["n"][0].as_py()
            assert counted == there
        if {"geometry", "detect"} <= fresh:
            unknown = run.query("select count(*) as n from geometry where token_id not in (select token_id from types)")
            assert unknown["n"][0].as_py() == 0


TestStageCommands = StageCommands.TestCase
TestStageCommands.settings = settings(
    max_examples=4, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck)
)
