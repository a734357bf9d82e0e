"""Is detection calibrated? Simulations with a known truth, saved with their circumstances.

kinds      six kinds of corpora (tests/helpers/corpora.py) of 200 and of 60 prompts, 200 corpora each: false discovery
           rate and recall of `certified`, at most 0.10 and at least 0.9 (four rocks) and 0.8 (graded rocks).
harder     kinds that each break an assumption, the same way: near-copies of prompts with and without groups, costly
           positions, 20,000 types.
tails      types that have fallen by 40 or 50 %, but in rare large losses: heavy tails and spikes of the loss before.
curves     thirty costly types that learn by exponential and power-law curves of many paces and floors, at 200, 60 and
           20 prompts: a rock loses less than a quarter in the run and in three more.
null       200 corpora in which no type costs more than another (losses shuffled within prompts; or two identical
           models that differ by rounding): how often is a costly type declared? At most 5 %.
concentrated  500 corpora in which one position in fifty, or in five hundred, carries most of the loss: how often do
           95 % intervals hold the truth at 20, 30, 50 and 100 measured prompts?
coverage   500 corpora with prompt-level correlation: how often do 95 % intervals hold the truth? 93 to 97 %.
           Beside them, the plain percentile bootstrap on the same corpora.
regression a run in which nothing learns: what the naive comparison reports, what ours does; and the figure.

    python benchmarks/detect_calibration.py [kinds harder tails curves null concentrated coverage regression]

Writes docs/results/detect_calibration.json and docs/results/regression_to_the_mean.json, a plotly figure:
`plotly.io.read_json(path).show()`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import corpora  # noqa: E402
import harder_corpora  # noqa: E402
import plotly.graph_objects as go  # noqa: E402
import pyarrow as pa  # noqa: E402
from oracles_detect import shuffle_within_prompts, simulate  # noqa: E402

from rocktokens.detect.certified import DECLARED, TypeTests, confirm, declare, falls  # noqa: E402
from rocktokens.detect.measures import footprints  # noqa: E402
from rocktokens.detect.occurrences import Occurrences, rng_for  # noqa: E402
from rocktokens.detect.rocks import detect_rocks  # noqa: E402
from rocktokens.detect.settings import DetectConfig  # noqa: E402
from rocktokens.stats import bootstrap_sums, resample_counts, wilson_interval  # noqa: E402

RESULTS = ROOT / "docs" / "results"
PROMPTS = (30, 60, 100, 200)
NUM_CORPORA = 200


def truth_of_declared(columns: dict, rocks: list[int], seed: int) -> dict[str, float]:
    """False discovery proportion and recall of the declared and of the confirmed rocks of one corpus."""
    config = DetectConfig(seed=seed)
    by_step = columns if 0 in columns else {0: columns}
    occurrences = Occurrences.read({step: pa.table(own) for step, own in by_step.items()})
    chosen, measured = (TypeTests.of(half.pairs(), config.kappa) for half in occurrences.halves(seed))
    class_V = declare(chosen, config.q)
    rock_V, confirmed_V = np.isin(class_V, DECLARED), confirm(class_V, measured, config.q)
    facts = {}
    for name, mask_V in (("declared", rock_V), ("confirmed", rock_V & confirmed_V)):
        named = set(occurrences.token_ids_V[mask_V].tolist())
        facts[f"{name}_false"] = len(named - set(rocks)) / max(1, len(named))
        facts[f"{name}_any_false"] = float(bool(named - set(rocks)))
        facts[f"{name}_recall"] = len(named & set(rocks)) / len(rocks) if rocks else float("nan")
        facts[f"{name}_number"] = float(len(named))
    return facts


def one(job: tuple[str, int, int]) -> dict[str, float]:
    """One corpus of a kind, by its name, its number of prompts and its seed."""
    kind, num_prompts, seed = job
    make = (corpora.KINDS | harder_corpora.HARDER | harder_corpora.CURVED)[kind]
    columns, rocks = make(np.random.default_rng([11, seed, num_prompts, *kind.encode()]), num_prompts)
    return truth_of_declared(columns, rocks, seed)


def kinds(
    which: Iterable[str] = tuple(corpora.KINDS), sizes: Iterable[int] = (200, 60), num_corpora: int = NUM_CORPORA
) -> dict[str, dict]:
    """False discovery rate and recall by kind of corpus and number of prompts."""
    found = {}
    with ProcessPoolExecutor(2) as pool:
        for kind, num_prompts in product(which, sizes):
            jobs = [(kind, num_prompts, seed) for seed in range(num_corpora)]
            row = {"corpora": num_corpora, **_means(list(pool.map(one, jobs, chunksize=5)))}
            found[f"{kind}, {num_prompts} prompts"] = row
            print("kinds", kind, num_prompts, row, flush=True)
    return found


def _means(rows: list[dict[str, float]]) -> dict[str, float | None]:
    """Means, and twice their standard errors for the declared set."""
    found: dict[str, float | None] = {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        found[name] = None if np.isnan(values).all() else round(float(values.mean()), 4)
        if name in ("declared_false", "declared_recall") and found[name] is not None:
            found[f"{name}_error"] = round(float(2 * values.std() / np.sqrt(len(values))), 4)
    return found


def harder() -> dict[str, dict]:
    """Kinds that break an assumption."""
    return kinds([kind for kind in harder_corpora.HARDER if kind not in harder_corpora.TAILS])


def tails() -> dict[str, dict]:
    """Types whose fall lies in rare large losses before."""
    return kinds(harder_corpora.TAILS)


def curves() -> dict[str, dict]:
    """Learning curves: a false rock would lose a quarter within three more runs, or has lost one."""
    return kinds(tuple(harder_corpora.CURVED), (200, 60, 20))


def concentrated(num_corpora: int = 500) -> dict[str, dict]:
    """Coverage where one position in fifty, and one in five hundred, carries most of the loss, by measured prompts."""
    found = {}
    for rarity, num_prompts in product((1, 10), (20, 30, 50, 100)):
        hits, drawn = defaultdict(int), defaultdict(int)
        for seed in range(num_corpora):
            rng = np.random.default_rng([12, seed, num_prompts, rarity])
            columns, own, truths = harder_corpora.concentrated(rng, num_prompts, rarity, 0.7 if rarity == 1 else 1.2)
            occurrences = Occurrences.from_table(columns)
            sets = {"rocks": (np.isin(columns["token_id"], own), len(own))}
            unit_P = np.arange(num_prompts)
            measured = footprints(occurrences, sets, 300, unit_P, DetectConfig(seed=seed))[0]
            v = int(np.searchsorted(occurrences.token_ids_V, own[0]))
            fall = falls(occurrences.pairs(), non_negative=True)
            ends = {name: measured[name][1:3] for name in truths if name != "fall"}
            ends["fall"] = (fall.low_V[v], fall.high_V[v])
            for name, truth in truths.items():
                drawn[name] += 1
                hits[name] += bool(ends[name][0] <= truth <= ends[name][1])
        for name, hit in hits.items():
            share = wilson_interval(hit, drawn[name])
            label = f"one in {50 * rarity}: {name}, {num_prompts} measured prompts"
            found[label] = {"share": share.value, "interval": share[1:3]}
            print("concentrated", label, round(share.value, 3), flush=True)
    return found


def null(num_corpora: int = 200) -> dict[str, object]:
    """Share of corpora without rocks in which a costly type is declared."""
    found = {}
    for kind, num_prompts in (("shuffled", 60), ("shuffled", 200), ("rounding", 60)):
        rng = np.random.default_rng([1, num_prompts, len(kind)])
        declared = 0
        for seed in range(num_corpora):
            columns, _, _ = simulate(rng, num_prompts=num_prompts, prompt_sd=0.8, num_types=300)
            if kind == "shuffled":
                columns = shuffle_within_prompts(rng, columns)
            else:
                noise = np.abs(rng.normal(0, 1e-7, len(columns["loss_post"])))
                columns |= {"loss_post": noise, "loss_pre": np.abs(rng.normal(0, 1e-7, len(noise)))}
            half = Occurrences.from_table(columns).halves(seed)[0]
            declared += bool((declare(TypeTests.of(half.pairs(), 0.75), 0.10) != "").any())
        share = wilson_interval(declared, num_corpora)
        found[f"{kind}, {num_prompts} prompts"] = {
            "declared": declared,
            "corpora": num_corpora,
            "share": share.value,
            "interval": share[1:3],
        }
        print("null", kind, num_prompts, declared, "of", num_corpora, flush=True)
    return found


def population(num_prompts: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A corpus from one and the same population of types; prompts differ in difficulty and topic."""
    columns, rocks, _ = simulate(
        np.random.default_rng([4, seed]), num_prompts=num_prompts, prompt_sd=0.6, types_rng=np.random.default_rng(5)
    )
    return columns, rocks


def totals(columns: dict[str, np.ndarray], kind: np.ndarray) -> np.ndarray:
    """(loss, occurrences) of some types, then of all, per prompt on average."""
    own = np.isin(columns["token_id"], kind)
    loss = columns["loss_post"].astype(float)
    return np.array([loss[own].sum(), own.sum(), loss.sum(), len(loss)]) / (columns["prompt_id"].max() + 1)


def percentile(statistic, columns, counts_BU):
    """The plain bootstrap, for comparison."""
    drawn = [counts_BU @ column for column in columns]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nanquantile(statistic(*drawn), [0.025, 0.975])


def coverage(num_corpora: int = 500) -> dict[str, dict]:
    """How often intervals hold the truth, by quantity and number of prompts."""
    large, rocks = population(40_000, 10**6)
    by_count = np.bincount(large["token_id"], minlength=1000)
    common = np.setdiff1d(np.flatnonzero(by_count), rocks)
    common = common[np.argsort(-by_count[common])]
    types = {"a rock": rocks[0], "the most frequent type": common[0], "the 30th type": common[29]}
    shares = {"share_positions": (1, 3), "share_loss": (0, 2)}
    found: dict[str, dict] = {}
    for num_prompts in PROMPTS:
        hits, plain = defaultdict(int), defaultdict(int)
        truth_set = totals(large, rocks)
        truths = {name: truth_set[a] / truth_set[b] for name, (a, b) in shares.items()}
        truths["enrichment"] = truths["share_loss"] / truths["share_positions"]
        truth_of = {name: totals(large, np.array([token])) * num_prompts for name, token in types.items()}
        for seed in range(num_corpora):
            columns, _ = population(num_prompts, seed)
            occurrences = Occurrences.from_table(columns)
            config = DetectConfig(seed=seed)
            counts_BU = resample_counts(num_prompts, config.resamples, rng_for(seed, "resamples"))
            sets = {"rocks": (np.isin(columns["token_id"], rocks), 8)}
            measured = footprints(occurrences, sets, 200, np.arange(num_prompts), config)[0]
            for name, truth in truths.items():
                estimate = measured[name]
                hits[name] += bool(estimate.low <= truth <= estimate.high)
            parts = [*by_prompt(columns, np.isin(columns["token_id"], rocks)), *by_prompt(columns, True)]
            low, high = percentile(lambda s, n, t, m: (s / t) / (n / m), parts, counts_BU)
            plain["enrichment"] += bool(low <= truths["enrichment"] <= high)
            _types(columns, types, truth_of, counts_BU, hits, plain)
        for name, hit in hits.items():
            share = wilson_interval(hit, num_corpora)
            found[f"{name}, {num_prompts} prompts"] = {
                "covered": hit,
                "corpora": num_corpora,
                "share": share.value,
                "interval": share[1:3],
                "percentile_bootstrap": plain[name] / num_corpora if name in plain else None,
            }
        print("coverage", num_prompts, summary(found, num_prompts), flush=True)
    return found | {f"all, {n} prompts": summary(found, n) for n in PROMPTS}


def summary(found: dict, num_prompts: int) -> dict[str, float]:
    """Mean, least and greatest coverage over the quantities, and the percentile bootstrap's mean."""
    rows = [row for name, row in found.items() if name.endswith(f", {num_prompts} prompts") and "covered" in row]
    shares = [row["share"] for row in rows]
    plain = [row["percentile_bootstrap"] for row in rows if row["percentile_bootstrap"] is not None]
    return {
        "share": float(np.mean(shares)),
        "least": min(shares),
        "greatest": max(shares),
        "percentile_bootstrap": float(np.mean(plain)),
    }


def by_prompt(columns, chosen_N) -> list[np.ndarray]:
    """Loss and number of the chosen occurrences of each prompt."""
    weights = (columns["loss_post"] * chosen_N, np.ones(len(columns["loss_post"])) * chosen_N)
    return [np.bincount(columns["prompt_id"], weights=weight) for weight in weights]


def _types(columns, types, truth_of, counts_BU, hits, plain) -> None:
    """Burden and mean loss of single types."""
    for name, token in types.items():
        own = by_prompt(columns, columns["token_id"] == token)
        if not own[1].any():
            continue
        loss, n = truth_of[name][:2]
        for quantity, statistic, sums, truth in (
            ("burden", lambda s: s, own[:1], loss),
            ("mean loss", lambda s, m: s / m, own, loss / n),
        ):
            interval = bootstrap_sums(statistic, sums, counts_BU)
            key = f"{quantity} of {name}"
            hits[key] += bool(interval.low_V[0] <= truth <= interval.high_V[0])
            low, high = percentile(statistic, sums, counts_BU)
            plain[key] += bool(low <= truth <= high)


def regression() -> dict[str, object]:
    """Nothing learns. The naive comparison, ours, and the A/A arm, for the rare high-loss group; with a figure."""
    columns, _, _ = simulate(np.random.default_rng(8), learning=1.0, num_prompts=200, num_types=400)
    config = DetectConfig(k=8)
    before, after = (half.pairs() for half in Occurrences.from_table(columns).halves(config.seed))
    first_V, second_V = (
        half.by_type(loss_S) / np.maximum(half.by_type(half.n_S), 1)
        for half, loss_S in ((before, before.pre_S), (after, after.loss_S))
    )
    enough_V = (before.by_type(before.n_S) >= 2) & (after.prompts_V > 0)
    chosen = np.argsort(-np.where(enough_V, first_V, -1))[8:108]
    rows = {
        "naive: chosen before, measured after on other texts": (
            float(first_V[chosen].mean()),
            float(second_V[chosen].mean()),
            None,
        )
    }
    names = {"checkpoint": "ours: same texts, not those chosen on", "aa_selected": "A/A: one checkpoint, two halves"}
    for row in detect_rocks(columns, config=config).tables["persistence"].to_pylist():
        if row["group"] == "rare high-loss" and row["arm"] in names:
            rows[names[row["arm"]]] = (row["before"], row["after"], (row["change_low"], row["change_high"]))
    regression_figure(rows).write_json(RESULTS / "regression_to_the_mean.json", pretty=True)
    return {name: {"before": b, "after": a, "change": a / b - 1, "interval": i} for name, (b, a, i) in rows.items()}


def regression_figure(rows: dict[str, tuple[float, float, tuple[float, float] | None]]) -> go.Figure:
    """Mean loss of the group at the first and the second measurement, one line a way of comparing."""
    figure = go.Figure()
    for name, (before, after, _) in rows.items():
        label = f"{name}<br>{100 * (after / before - 1):+.0f} %"
        figure.add_trace(go.Scatter(x=["first", "second"], y=[before, after], mode="lines+markers", name=label))
    figure.update_layout(
        title="Nothing learns here, yet a group chosen for its high loss looks better when measured elsewhere",
        yaxis_title="mean loss of the 100 rare high-loss types (nats)",
        xaxis_title="measurement",
        yaxis_rangemode="tozero",
    )
    return figure


def main() -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "detect_calibration.json"
    jobs = {
        "kinds": kinds,
        "harder": harder,
        "tails": tails,
        "curves": curves,
        "null": null,
        "concentrated": concentrated,
        "coverage": coverage,
        "regression": regression,
    }
    asked = ["git", "rev-parse", "--short", "HEAD"]  # at the start: what runs is what was loaded
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    for name in sys.argv[1:] or jobs:
        start = time.perf_counter()
        found = jobs[name]()
        result = json.loads(path.read_text()) if path.exists() else {}  # another process may have added to it
        result[name] = {
            "command": shlex.join(["python", "benchmarks/detect_calibration.py", name]),
            "commit": commit,
            "version": version("rocktokens"),
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.perf_counter() - start, 1),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "results": found,
        }
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
