"""The stages that ask whether tokens matter: `knockout` and `graft`.

They read what a run has (pair, prompts, token types), call the rooms, keep every finished part on disk, and write
baseline.parquet, knockouts.parquet, census.parquet and grafts.parquet. They compute nothing themselves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.config import BaselineConfig, GraftConfig, KnockoutConfig, PairConfig, PromptsConfig, RolloutConfig
from rocktokens.errors import ConfigError, DataError
from rocktokens.progress import console, progress
from rocktokens.runs.schema import ROLLOUTS
from rocktokens.runs.store import Run, open_run
from rocktokens.settings import from_mapping, to_mapping

log = logging.getLogger(__name__)

SCORES = {"burden": "r", "context": "r_ctx", "excess": "excess_low"}


def knockout(path: Path, config: KnockoutConfig, baseline: BaselineConfig, *, again: bool = False) -> Run:
    """Ban every candidate in turn; writes the census and prints it."""
    run = open_run(path)
    wanted = {"knockout": to_mapping(config), "baseline": to_mapping(baseline)}
    if _is_done(run, "knockout", wanted, again):
        return run
    from rocktokens.core.census import Census
    from rocktokens.core.censusreport import census_facts, census_table, render
    from rocktokens.core.correlates import PREDICTORS, correlate
    from rocktokens.lm.knockout import check_sets, knockout_census

    parts = _Parts(run, "knockouts", wanted)
    run.reopen("knockout")
    if again:
        parts.clear()
    stand = _Stand.of(run, baseline)
    sets = _sets(run, config, stand)
    check_sets(sets, stand.pair.eos_ids, stand.pair.vocabulary)
    found = knockout_census(
        stand.engine,
        stand.problems,
        sets,
        decode=stand.decode,
        checker=stand.checker,
        eos_ids=stand.pair.eos_ids,
        vocabulary=stand.pair.vocabulary,
        config=config,
        baseline=stand.baseline,
        keep=parts.keep,
        bar=_bar,
    )
    census: Census = found.census
    for note in census.notes:
        log.warning("%s", note)
    predictors = _predictors(run)
    missing = [name for name in PREDICTORS if name not in predictors]
    if missing:
        log.info("predictors that the run does not have, left out: %s", ", ".join(missing))
    correlations = correlate(census, predictors)
    run.write("baseline", found.baseline.cast(ROLLOUTS))
    run.write("knockouts", found.knockouts)
    run.write("census", census_table(census, predictors))
    run.manifest["config"].update(wanted)
    run.finish("knockout", {**census_facts(census, correlations, missing), "mark_detect": run.mark("detect")})
    parts.clear()
    console().print(render(census, correlations))
    return run


def graft(path: Path, config: GraftConfig, baseline: BaselineConfig, *, again: bool = False) -> Run:
    """Let the teacher draw the rocks, and other sets; writes grafts.parquet, one row an arm, and prints it."""
    run = open_run(path)
    wanted = {"graft": to_mapping(config), "graft_baseline": to_mapping(baseline)}
    if _is_done(run, "graft", wanted, again):
        return run
    from rocktokens.core.graftreport import graft_table, render
    from rocktokens.lm.graft import graft as graft_sets
    from rocktokens.lm.grafter import GraftSampler
    from rocktokens.lm.rollouts import make_sampler

    parts = _Parts(run, "grafts", wanted)
    run.reopen("graft")
    if again:
        parts.clear()
    stand = _Stand.of(run, baseline)
    teacher = make_sampler(stand.pair, stand.rollouts, of_teacher=True)
    rocks, clusters = _rocks(run, config, stand), _clusters(run) if config.clusters else {}
    found = graft_sets(
        stand.engine,
        lambda rules, own: GraftSampler(stand.engine, teacher, rules, own),  # type: ignore[arg-type, return-value]
        stand.problems,
        rocks,
        vocabulary=stand.pair.vocabulary,
        decode=stand.decode,
        checker=stand.checker,
        clusters=clusters,
        config=config,
        baseline=stand.baseline,
        known=_known_rollouts(run, baseline),
        keep=parts.keep,
        bar=_bar,
    )
    types = run.types().to_pylist() if run.has("types") else []
    table = graft_table(found.rows, types, rocks, clusters)
    run.write("grafts", table)
    run.write("graft_rollouts", found.grafts)
    run.manifest["config"].update(wanted)
    gains = {row["arm"]: [row["gain"], row["gain_low"], row["gain_high"]] for row in table.to_pylist()}
    run.finish("graft", {"accuracy": found.accuracy, "gains": gains, "mark_detect": run.mark("detect")})
    parts.clear()
    console().print(render(table, found.accuracy))
    return run


def _is_done(run: Run, stage: str, wanted: dict[str, Any], again: bool) -> bool:
    same = all(run.manifest["config"].get(section) == json.loads(json.dumps(own)) for section, own in wanted.items())
    if run.done(stage) and same and run.rests_on(stage, "detect") and not again:
        log.info("%s: %s is complete; nothing to do", run.path, stage)
        return True
    return False


def _bar(description: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    return progress(description, total, "rollouts")


class _Parts:
    """Finished pieces of a stage on disk, under the settings and the detection they belong to."""

    def __init__(self, run: Run, name: str, wanted: dict[str, Any]) -> None:
        text = json.dumps([wanted, run.checkpoints(), run.mark("detect")], sort_keys=True, default=str)
        self.run, self.folder = run, f"{name}.parts"
        self.name = f"{self.folder}/{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"

    def keep(self, name: str, make: Callable[[], pa.Table]) -> pa.Table:
        """The part of that name, made and written if it is not there."""
        part = f"{self.name}/{name.replace(' ', '-')}"
        if not self.run.has(part):
            self.run.write(part, make())
        return self.run.read(part)

    def clear(self) -> None:
        """Remove the pieces; what they made up is written whole."""
        shutil.rmtree(self.run.path / self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _Stand:
    """What both stages stand on: models, problems, a sampler, answers to check."""

    pair: Any
    prompts: PromptsConfig
    baseline: BaselineConfig
    rollouts: RolloutConfig
    problems: list[Any]
    checker: Any
    engine: Any

    @classmethod
    def of(cls, run: Run, baseline: BaselineConfig) -> _Stand:
        from rocktokens.lm.baseline import answerable
        from rocktokens.lm.pair import load_pair
        from rocktokens.lm.rollouts import check_lengths, make_sampler
        from rocktokens.lm.tasks import make_checker
        from rocktokens.pipeline import student_source

        known = run.manifest["config"]
        if "pair" not in known or "prompts" not in known:
            raise DataError(f"{run.path} names no pair and no prompts; run `rocktokens sample` or `distill` first")
        pair_config = from_mapping(PairConfig, known["pair"])
        prompts = from_mapping(PromptsConfig, known["prompts"])
        if baseline.checkpoint == "teacher":
            raise ConfigError("knock-outs and grafts are of the student; checkpoint must be last, student or a step")
        checker = make_checker(prompts)
        answerable([], checker) if checker is None else None
        source = student_source(run, pair_config, baseline.checkpoint)
        pair = load_pair(dataclasses.replace(pair_config, student=source))
        limit = baseline.max_new_tokens or known.get("rollouts", known.get("distill", {})).get("max_new_tokens", 512)
        baseline = dataclasses.replace(baseline, max_new_tokens=limit)
        rollouts = RolloutConfig(
            max_new_tokens=limit,
            temperature=baseline.temperature,
            greedy=baseline.greedy,
            top_k=baseline.top_k,
            top_p=baseline.top_p,
            batch_size=baseline.batch_size,
        )
        problems = _problems(run, prompts, baseline, pair.tokenizer)
        engine = make_sampler(pair, rollouts)
        check_lengths(problems, engine.context)
        return cls(pair, prompts, baseline, rollouts, problems, checker, engine)

    def decode(self, token_ids: list[int]) -> str:
        """A response as the checker reads it."""
        return self.pair.tokenizer.decode(token_ids, skip_special_tokens=True)


def _problems(run: Run, prompts: PromptsConfig, baseline: BaselineConfig, tokenizer: Any) -> list[Any]:
    """Problems that neither training nor detection saw, unless the user says otherwise."""
    from rocktokens.lm.tasks import load_prompts
    from rocktokens.world import world_names

    source = baseline.source or prompts.source
    built_in = source in world_names()
    asked = dataclasses.replace(
        prompts,
        source=source,
        split=baseline.split or prompts.split,
        limit=baseline.problems if built_in else None,
        checker=prompts.checker,
    )
    own = baseline.source is None and baseline.split is None
    if own and not built_in and baseline.reuse_prompts:
        return load_prompts(asked, tokenizer)
    found = load_prompts(asked, tokenizer, part="causal" if own or built_in else None)
    used = set(run.read("rollouts", ["prompt_id"])["prompt_id"].to_pylist()) if run.has("rollouts") and own else set()
    fresh = [prompt for prompt in found if prompt.prompt_id not in used]
    if len(fresh) < 2:
        raise DataError(
            f"detection used all but {len(fresh)} of the prompts of {source} that are set aside for causal tests; name "
            "other problems with --baseline.source FILE, or pass --baseline.reuse-prompts"
        )
    if len(fresh) < baseline.problems:
        log.info(
            "%d problems are there for the causal tests, fewer than the %d asked for", len(fresh), baseline.problems
        )
    return fresh


def _sets(run: Run, config: KnockoutConfig, stand: _Stand) -> list[Any]:
    """What is banned: candidates named or from types.parquet, with windows, families, controls."""
    from rocktokens.lm.candidates import make_sets, named_tokens, texts_of

    texts = texts_of(stand.pair.tokenizer)
    types = run.types().to_pylist() if run.has("types") else []
    if config.candidates:
        candidates = named_tokens(config.candidates, texts, stand.pair.tokenizer)
    else:
        if not types:
            raise ConfigError(
                "the run has no types.parquet to take candidates from; run `rocktokens detect` first, or name them "
                "with --candidates"
            )
        candidates = _top(types, config, run)
        ends = [token for token in candidates if token in stand.pair.eos_ids]
        if ends:
            log.info("the end token is among the top %d and is not banned: no response could end", config.top)
        candidates = [token for token in candidates if token not in ends]
    detected = run.facts("detect") if run.done("detect") else {}
    thresholds = detected.get("thresholds", {})
    return make_sets(
        candidates,
        config,
        texts,
        eos_ids=stand.pair.eos_ids,
        rocks=detected.get("rocks", []),
        count={row["token_id"]: row.get("count_all", row["count"]) for row in types},
        occurrences=_occurrences(run) if "window" in config.kinds and run.steps() else None,
        tau=thresholds.get("tau_post"),
        width=thresholds.get("window", 4),
    )


def _top(types: Sequence[dict[str, Any]], config: KnockoutConfig, run: Run) -> list[int]:
    """The top token types by a definition: its rocks first, then by its score, then by burden."""
    definition = config.definition or (run.facts("detect")["definition"] if run.done("detect") else "context")
    score = SCORES[definition]

    def order(row: dict[str, Any]) -> tuple[float, float, float, int]:
        rank = row.get(f"rank_{definition}")
        own = row.get(score)
        return (
            float("inf") if rank is None else rank,
            float("inf") if own is None or not np.isfinite(own) else -own,
            -(row.get("r") or 0.0),
            row["token_id"],
        )

    return [row["token_id"] for row in sorted(types, key=order)[: config.top]]


def _occurrences(run: Run) -> dict[str, np.ndarray]:
    """Token, loss and rollout of every position at the last scored checkpoint, in order."""
    step = run.steps()[-1]
    table = run.query(
        f"select dense_rank() over (order by rollout_id) as rollout, token_id as token, kl as loss from occurrences "
        f"where step = {step} order by rollout_id, position"
    )
    return {name: table[name].to_numpy() for name in ("rollout", "token", "loss")}


def _predictors(run: Run) -> dict[str, dict[int, float]]:
    """The predictors that the run has, each as token id to number."""
    if not run.has("types"):
        return {}
    types = run.types().to_pylist()
    found: dict[str, dict[int, float]] = {}
    columns = {"frequency": "count", "rock_count": "rock_count", "rock_rate": "ccr"}
    columns |= {"loss_pre": "loss_pre", "loss_post": "loss_post"}
    for name, column in columns.items():
        known = {row["token_id"]: float(row[column]) for row in types if row.get(column) is not None}
        if known:
            found[name] = known
    if "loss_pre" in found and "loss_post" in found:
        both = found["loss_pre"].keys() & found["loss_post"].keys()
        found["improvement"] = {token: found["loss_pre"][token] - found["loss_post"][token] for token in sorted(both)}
    if run.steps():
        first, last = run.steps()[0], run.steps()[-1]
        table = run.query(
            "select token_id, step, avg(teacher_entropy) as teacher, avg(student_entropy) as student from occurrences "
            f"where step in ({first}, {last}) and not isnan(kl) group by all order by all"
        )
        for row in table.to_pylist():
            if row["step"] == last:
                found.setdefault("teacher_entropy", {})[row["token_id"]] = row["teacher"]
                found.setdefault("student_entropy_post", {})[row["token_id"]] = row["student"]
            if row["step"] == first and first != last:
                found.setdefault("student_entropy_pre", {})[row["token_id"]] = row["student"]
    return found


def _rocks(run: Run, config: GraftConfig, stand: _Stand) -> list[int]:
    from rocktokens.lm.candidates import named_tokens, texts_of

    if config.rocks:
        return named_tokens(config.rocks, texts_of(stand.pair.tokenizer), stand.pair.tokenizer)
    return [int(token) for token in run.rocks(config.definition)["token_id"].to_pylist()]


def _clusters(run: Run) -> dict[str, list[int]]:
    """Observed token types by cluster."""
    if not run.has("types"):
        return {}
    found: dict[str, list[int]] = {}
    for row in run.types().to_pylist():
        if row["cluster"] != "unknown":
            found.setdefault(row["cluster"], []).append(row["token_id"])
    return dict(sorted(found.items()))


def _known_rollouts(run: Run, baseline: BaselineConfig) -> dict[str, list[dict[str, Any]]]:
    """Baseline rollouts that the knock-out stage sampled, if it did so with the same settings."""
    if not run.done("knockout") or run.manifest["config"].get("baseline") != json.loads(
        json.dumps(to_mapping(baseline))
    ):
        return {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in run.read("baseline").to_pylist():
        rows.setdefault(row["prompt_id"], []).append(row)
    return rows
