"""Declared rocks: known answers against an oracle, classes, confirmation, calibration in small, bad input."""

import corpora
import numpy as np
import oracles_detect as oracle
import pyarrow as pa
import pytest
from rich.console import Console

from rocktokens import detect_rocks
from rocktokens.detect.certified import (
    DECLARED,
    LEVELLED,
    UNCLEAR,
    TypeTests,
    declare,
    enough_data,
    falls,
    p_above_neighbours,
    p_mean_positive,
    p_stagnant,
)
from rocktokens.detect.figures import render
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.settings import DetectConfig

QUICK = {"resamples": 200}
KAPPA, Q = 0.75, 0.10


@pytest.fixture(scope="module")
def small():
    columns, rocks = corpora.four_rocks(np.random.default_rng(1), 12)
    return {name: column[: 12 * 200] for name, column in columns.items()}, rocks


def sums_of(columns):
    return Occurrences.from_table(columns).pairs()


def declared_by(columns, seed=0):
    occurrences = Occurrences.from_table(columns)
    class_V = declare(TypeTests.of(occurrences.halves(seed)[0].pairs(), KAPPA), Q)
    return occurrences.token_ids_V[np.isin(class_V, DECLARED)]


def test_h1_and_h3_equal_the_oracle(small):
    columns, rocks = small
    ids = np.unique(columns["token_id"])
    sums = sums_of(columns)
    neighbours, stagnant = p_above_neighbours(sums), p_stagnant(sums, sums.pre_S, KAPPA)
    frequent = [token for token in ids if sums.prompts_V[np.searchsorted(ids, token)] >= 5][:12]
    for token in {*frequent, *rocks}:
        v = int(np.searchsorted(ids, token))
        contrast = oracle.contrasts(
            *(columns[name] for name in ("prompt_id", "position", "token_id", "loss_post")), token
        )
        left = oracle.leftovers(
            columns["prompt_id"], columns["token_id"], columns["loss_pre"], columns["loss_post"], token, KAPPA
        )
        assert neighbours[v] == pytest.approx(oracle.hall_p(contrast), rel=1e-4)
        assert stagnant[v] == pytest.approx(oracle.hall_p(left), rel=1e-4)


def test_no_p_is_smaller_than_flips_of_so_few_prompts_could_reach():
    number = np.array([4, 5, 8])
    p = p_mean_positive(np.ones(3), np.zeros(3), np.zeros(3), number)
    assert p.tolist() == [1.0, 2**-5, 2**-8]


def classes_corpus(falls_of, steps, num_prompts=80):
    """Costly types 0, 1, … with given losses over checkpoints relative to the last; cheap others that learn."""
    rng = np.random.default_rng(0)
    corpus = corpora.Corpus(rng, num_prompts)
    corpus.place(np.arange(len(falls_of)), 0.1)
    mean = np.full(corpus.num_types, 0.1)
    mean[: len(falls_of)] = 2.0
    level = mean[corpus.type_N] * corpus.hard_P[corpus.prompt_N] * rng.standard_exponential(len(corpus.type_N))
    curve = np.tile(np.geomspace(4, 1, len(steps)), (corpus.num_types, 1))
    curve[: len(falls_of)] = falls_of
    keys = dict(list(corpus.columns(level, level).items())[:4])  # without the losses
    return {step: pa.table({**keys, "kl": level * curve[corpus.type_N, i]}) for i, step in enumerate(steps)}


def test_every_costly_type_has_a_class():
    by_step = classes_corpus(
        [
            [1.0, 1.0, 1.0, 1.0],  # never falls
            [4.0, 3.0, 2.0, 1.0],  # falls to the end
            [4.0, 1.0, 1.0, 1.0],  # fell, then stayed
            [1 / 0.75, 1.2, 1.1, 1.0],  # has fallen by exactly a quarter
            (0.4 ** -np.linspace(1, 0, 4)).tolist(),  # falls by 60 % at an even pace: each third by a quarter
        ],
        steps=[0, 100, 200, 300],
    )
    report = detect_rocks(Occurrences.read(by_step), config=DetectConfig(**QUICK))
    assert report.rocks.tolist() == [0]
    assert set(report.classes["learning"].tolist()) == {1, 4}
    assert report.classes[LEVELLED].tolist() == [2]
    assert report.classes["unclear"].tolist() == [3]
    assert report.confirmed.tolist() == [0]
    types = {row["token_id"]: row for row in report.tables["types"].to_pylist()}
    assert [types[kind]["fall"] for kind in (0, 1)] == pytest.approx([0.0, 0.75], abs=1e-4)
    assert (types[50]["class"], types[50]["confirmed"]) == (None, None)
    assert types[3]["prompts_needed"] is None or types[3]["prompts_needed"] > 80
    assert "1 rocks declared" in render(report).title


def test_a_rock_of_one_half_is_declared_and_not_confirmed():
    columns, rocks = corpora.four_rocks(np.random.default_rng(5), 100)
    measured = Occurrences.from_table(columns).halves(0)[1]
    prompts = measured.names_R["prompt_id"].to_numpy()[np.unique(measured.rollout_N)]
    hit = np.isin(columns["prompt_id"], prompts) & (columns["token_id"] == rocks[0])
    columns["loss_post"] = np.where(hit, 0.01, columns["loss_post"]).astype(np.float32)
    report = detect_rocks(columns, config=DetectConfig(**QUICK))
    assert set(report.rocks.tolist()) == set(rocks)
    assert set(report.confirmed.tolist()) == set(rocks) - {rocks[0]}


@pytest.mark.parametrize("kind", corpora.KINDS)
@pytest.mark.parametrize("num_prompts", [200, 60])
def test_calibration_in_small(kind, num_prompts):
    """The six kinds of corpora, 12 each; benchmarks/detect_calibration.py has 200 each."""
    false, found, planted = [], 0, 0
    for seed in range(12):
        columns, rocks = corpora.KINDS[kind](np.random.default_rng([seed, num_prompts]), num_prompts)
        named = set(declared_by(columns, seed).tolist())
        false.append(len(named - set(rocks)) / max(1, len(named)))
        found, planted = found + len(named & set(rocks)), planted + len(rocks)
    assert np.mean(false) <= 0.10
    if kind == "four rocks":
        assert found / planted >= 0.9
    if kind == "graded rocks":
        assert found / planted >= (0.9 if num_prompts == 200 else 0.7)


def test_without_the_loss_before_the_word_is_costly():
    columns, rocks = corpora.four_rocks(np.random.default_rng(3), 60)
    del columns["loss_pre"]
    report = detect_rocks(columns, config=DetectConfig(**QUICK))
    assert len(report.rocks) == 0
    assert set(report.classes["costly"].tolist()) == set(rocks)
    assert any("no rock can be declared" in note and "called costly" in note for note in report.notes)
    assert "rocks: not tested" in render(report).title
    types = report.tables["types"].to_pydict()
    assert set(types["class"]) == {"costly", None}
    assert types["p_stagnant"] == [None] * len(types["class"])
    assert types["fall"] == [None] * len(types["class"])


@pytest.mark.parametrize(("level", "rounding"), [(0.0, 0), (0.7, 0), (0.7, 6e-8)])
def test_losses_that_are_equal_or_differ_by_rounding_declare_nothing_and_say_so(level, rounding):
    columns, _ = corpora.null(np.random.default_rng(4), 40)
    noise_N = np.random.default_rng(0).integers(-1, 2, len(columns["loss_post"])) * np.float32(rounding)
    same = {name: np.float32(level) * (1 + noise_N) for name in ("loss_post", "loss_pre")}
    report = detect_rocks({**columns, **same}, config=DetectConfig(**QUICK))
    assert len(report.rocks) == 0
    assert not any(report.tables["types"]["class"].to_pylist())
    assert any("no rock can be declared" in note for note in report.notes)
    Console(quiet=True).print(render(report))


def test_context_consistency_filters_only_if_asked():
    columns, rocks = corpora.four_rocks(np.random.default_rng(7), 100)  # contexts are random: nothing recurs
    assert set(detect_rocks(columns, config=DetectConfig(**QUICK)).rocks.tolist()) == set(rocks)
    filtered = detect_rocks(columns, config=DetectConfig(consistent=True, **QUICK))
    assert set(filtered.rocks.tolist()) < set(rocks)


def test_falls_cover_and_never_exceed_what_is_possible():
    """Post and pre vary independently within prompts: 95 % intervals of the fall hold the truth."""
    hits = total = 0
    for seed in range(40):
        columns, _ = corpora.at_the_boundary(np.random.default_rng(seed), 60)
        sums = sums_of(columns)
        found = falls(sums, non_negative=True)
        loss_V, n_V = sums.by_type(sums.loss_S), sums.by_type(sums.n_S)
        costly = np.argsort(-loss_V / np.maximum(n_V, 1))[:8]
        hits += int(((found.low_V[costly] <= 0.25) & (found.high_V[costly] >= 0.25)).sum())
        total += 8
        known = np.isfinite(found.value_V)
        assert (found.high_V[known] <= 1).all()
        assert (found.low_V[known] <= found.value_V[known]).all()
    assert 0.90 <= hits / total <= 0.98


def test_intervals_end_where_the_possible_ends():
    columns, _ = corpora.four_rocks(np.random.default_rng(0), 8)
    report = detect_rocks(columns, config=DetectConfig(k=4, **QUICK))
    for row in report.tables["footprints"].to_pylist():
        for name in ("share_positions", "share_loss"):
            assert 0 <= row[f"{name}_low"] <= row[name] <= row[f"{name}_high"] <= 1
        assert 0 <= row["enrichment_low"] <= row["enrichment"]
    assert all(low is None or low >= 0 for low in report.tables["types"]["r_low"].to_pylist())


# Enough data?


def fallen_by(fall, num_prompts, seed):
    """One costly type that has fallen by so much; losses before and after vary independently."""
    rng = np.random.default_rng(seed)
    corpus = corpora.Corpus(rng, num_prompts)
    corpus.place(np.array([0]), 0.05)
    mean, ratio = corpus.constant(0.2), corpus.constant(0.4)
    mean[0], ratio[0] = 2.0, 1 - fall
    level = mean[corpus.type_N] * corpus.hard_P[corpus.prompt_N]
    size = len(level)
    pre = level / ratio[corpus.type_N] * rng.standard_exponential(size)
    return Occurrences.from_table(corpus.columns(level * rng.standard_exponential(size), pre))


def needed_at(fall, seed):
    """Classes on 30 prompts, and what it would take to settle them."""
    halves = [half.pairs() for half in fallen_by(fall, 60, seed).halves(seed)]
    class_V = declare(TypeTests.of(halves[0], KAPPA), Q)
    return class_V, enough_data(*halves, class_V, kappa=KAPPA, q=Q)[0]


def test_prompts_needed_are_about_what_settles_it():
    """A type that has fallen by 10 %: unclear at 30 prompts a half; at the number foretold it is mostly declared."""
    told = []
    for seed in range(12):
        class_V, found = needed_at(0.1, seed)
        if (class_V == UNCLEAR).any() and found["prompts_needed"] is not None:
            assert found["num_unclear"] >= found["num_in_reach"] >= 1
            assert found["prompts_needed"] > 60
            told.append(found["prompts_needed"])
    assert len(told) >= 4
    enough = int(np.median(told)) // 2
    more = [fallen_by(0.1, enough, [99, seed]).pairs() for seed in range(12)]
    assert np.mean([declare(TypeTests.of(pairs, KAPPA), Q)[0] in DECLARED for pairs in more]) >= 0.5


def test_a_fall_at_the_limit_is_out_of_reach():
    found = [enough for _, enough in (needed_at(0.25, seed) for seed in range(12)) if enough["num_unclear"] == 1]
    assert any(enough["prompts_needed"] is None and enough["num_in_reach"] == 0 for enough in found)
