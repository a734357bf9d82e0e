"""Detection as a whole: planted truth, null, known answers, bad input, tables."""

import io

import corpora
import numpy as np
import oracles_detect as oracle
import pyarrow as pa
import pytest
from rich.console import Console

from rocktokens.detect.halves import split_halves
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.rocks import burden_from_counts, detect_rocks
from rocktokens.detect.scores import base_sums, excess_test, ranks_within, score
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.sweep import SweepRow, choose_k
from rocktokens.detect.terminal import render
from rocktokens.errors import ConfigError, DataError
from rocktokens.tables import TABLES

QUICK = {"resamples": 200}


@pytest.fixture(scope="module")
def planted():
    return oracle.simulate(np.random.default_rng(0))


@pytest.fixture(scope="module")
def report(planted):
    return detect_rocks(planted[0], config=DetectConfig(k=8))


def test_planted_rocks_are_found_by_every_definition_that_looks_beyond_frequency(planted, report):
    for definition in ("certified", "context", "excess"):
        assert set(report.sets[definition].tolist()) == set(planted[1].tolist())


def test_frequent_types_are_no_rocks_by_context_and_excess():
    columns, rocks, _ = oracle.simulate(np.random.default_rng(1), rock_share=0.02, rock_loss=1.5, num_prompts=400)
    report = detect_rocks(columns, config=DetectConfig(k=8, **QUICK))
    found = {name: len(set(rocks.tolist()) & set(token_ids.tolist())) for name, token_ids in report.sets.items()}
    assert found["burden"] < 8  # the most frequent types carry more loss than rare rocks
    assert found["excess"] == 8
    assert found["context"] > found["burden"]


def test_scores_equal_the_oracle(planted, rng):
    columns = {name: column[:3000] for name, column in planted[0].items()}
    occurrences = Occurrences.from_table(columns)
    vector_VH = rng.standard_normal((len(occurrences.token_ids_V), 16)).astype(np.float32)
    scores = score(occurrences, DetectConfig(), vector_VH, gamma=0.4)[0]
    tokens, post = columns["token_id"], columns["loss_post"]
    at = scores.thresholds
    assert at.tau_post == pytest.approx(max(np.quantile(post, 0.8), post.mean()))
    persistent = (post >= np.float32(at.tau_post)) & (columns["loss_pre"] >= np.float32(at.tau_pre))
    vectors = dict(zip(occurrences.token_ids_V.tolist(), vector_VH))
    rho = oracle.consistency(columns["rollout_id"], columns["position"], tokens, persistent, vectors, 4, 0.4)
    ccr = oracle.ccr(tokens, persistent & (rho >= 0.1))
    burden, excess = oracle.burden(tokens, post), oracle.excess(tokens, post)
    for v, token in enumerate(occurrences.token_ids_V.tolist()):
        assert scores.r_V[v] == pytest.approx(burden[token])
        assert scores.excess_V[v] == pytest.approx(excess[token], abs=1e-3)
        assert scores.ccr_V[v] == pytest.approx(ccr[token])
        assert scores.r_ctx_V[v] == pytest.approx(burden[token] * ccr[token])


def test_nothing_is_declared_when_losses_are_shuffled_within_prompts():
    rng = np.random.default_rng(17)
    declared = 0
    for seed in range(40):
        columns, _, _ = oracle.simulate(rng, num_prompts=40, num_rollouts=1, length=60, num_types=80)
        occurrences = Occurrences.from_table(oracle.shuffle_within_prompts(rng, columns))
        config = DetectConfig(resamples=300, seed=seed)
        selection = split_halves(occurrences, config).selection
        vector_VH = np.ones((len(occurrences.token_ids_V), 4), np.float32)
        sums = base_sums(selection, config, ranks=True)
        declared += excess_test(score(selection, config, vector_VH, gamma=0.0, sums=sums)[0], config).declared_V.any()
    assert declared <= 5  # P(more than 5 of 40 at 5 %) = 1.4 %


def test_excess_is_not_declared_for_another_shape_of_losses_with_the_same_mean():
    """Ranks see another shape; a rank is no cost, and the contrast of losses must reject."""
    rng = np.random.default_rng(3)
    columns, _ = corpora.other_shapes(rng, 60)
    report = detect_rocks(columns, config=DetectConfig(**QUICK))
    types = report.types_table().to_pydict()
    assert min(types["excess_rank_p"]) <= 0.05
    assert not any(types["in_excess"])


def test_ranks_within_prompts_share_ties():
    ranks = ranks_within(np.array([1, 1, 0, 0, 0, 0]), np.array([5.0, 1.0, 2.0, 2.0, 0.0, 9.0]))
    np.testing.assert_allclose(ranks, [0.25, -0.25, 0, 0, -0.375, 0.375])


def test_identical_models_have_no_rocks(planted):
    columns = {**planted[0], "loss_pre": np.zeros(12000), "loss_post": np.zeros(12000)}
    report = detect_rocks(columns, config=DetectConfig(k=8, **QUICK))
    assert all(len(token_ids) == 0 for token_ids in report.sets.values())
    assert any("no rock can be declared: the total loss is not positive" in note for note in report.notes)
    assert report.types_table().num_rows == 200
    Console(quiet=True).print(render(report))


def test_choice_and_measurement_share_no_prompt(planted):
    halves = split_halves(Occurrences.from_table(planted[0]), DetectConfig())
    chosen, measured = set(halves.selection.prompt_N.tolist()), set(halves.measurement.prompt_N.tolist())
    assert not chosen & measured
    assert len(chosen) == len(measured) == 30


def test_numbers_come_from_the_measured_half_alone(planted):
    """Losses of the measured half may change: what is chosen does not."""
    columns = planted[0]
    occurrences = Occurrences.from_table(columns)
    measured = np.isin(columns["prompt_id"], np.unique(split_halves(occurrences, DetectConfig()).measurement.prompt_N))
    config = DetectConfig(k=8, **QUICK)
    plain = detect_rocks(columns, config=config)
    doubled = detect_rocks({**columns, "loss_post": np.where(measured, 2, 1) * columns["loss_post"]}, config=config)
    for definition in plain.sets:
        assert plain.sets[definition].tolist() == doubled.sets[definition].tolist()
    one, two = plain.types_table().to_pydict(), doubled.types_table().to_pydict()
    np.testing.assert_allclose(2 * np.array(one["r"]), two["r"], rtol=1e-5)


def test_footprint_adds_up(planted, report):
    columns, rocks, _ = planted
    found = report.footprints["context"]
    rock_N = np.isin(columns["token_id"], rocks)
    assert found.share_positions.value == pytest.approx(rock_N.mean(), abs=0.02)
    assert found.share_positions.low < found.share_positions.value < found.share_positions.high
    assert found.enrichment.value == pytest.approx(found.share_loss.value / found.share_positions.value)
    assert found.share_grad.value < found.share_loss.value  # grad_norm is the root of the loss here
    assert found.share_types == 8 / 200
    assert report.density.share_R.mean() == pytest.approx(found.share_positions.value, abs=1e-6)
    assert report.footprints["control"].share_positions.value == pytest.approx(found.share_positions.value, rel=0.02)
    assert report.footprints["control"].enrichment.value < 1
    assert sum(row.share_loss for row in report.clusters) == pytest.approx(found.share_loss.value)


def test_sensitivity_moves_every_threshold_one_step_either_way(report):
    rows = {(row.parameter, row.step, row.definition): row for row in report.sensitivity}
    for parameter in ("tau", "gamma", "eta", "window", "k"):
        assert {(parameter, -1, "context"), (parameter, 1, "excess")} <= set(rows)
    for parameter in ("kappa", "q", "tau", "gamma", "eta", "window"):
        assert {(parameter, -1, "certified"), (parameter, 1, "certified")} <= set(rows)
    assert rows["kappa", -1, "certified"].value == pytest.approx(0.65)
    assert rows["q", 1, "certified"].value == pytest.approx(0.2)
    assert rows["base", 0, "context"].jaccard == 1.0
    assert rows["gamma", -1, "context"].value < report.thresholds.gamma < rows["gamma", 1, "context"].value
    assert rows["eta", -1, "context"].value == pytest.approx(0.05)
    assert rows["window", 1, "context"].value == 5
    assert rows["tau", -1, "context"].value < rows["tau", 1, "context"].value
    assert rows["k", -1, "burden"].k == 6
    assert rows["k", 1, "burden"].k == 10
    assert all(row.jaccard == 1.0 for row in report.sensitivity if row.definition == "burden" and row.parameter != "k")


def test_sweep_knows_stability_and_coverage(report):
    rows = [row for row in report.sweep if row.definition == "context"]
    coverage = [row.coverage for row in rows]
    assert coverage == sorted(coverage)
    at_eight = next(row for row in rows if row.k == 8)
    assert at_eight.stability > 0.9
    eligible = max(row.num_rocks for row in rows)
    assert at_eight.chance == pytest.approx(8 / (2 * eligible - 8))  # among the types that can be rocks at all


def row(k, stability, chance=0.0):
    return SweepRow("context", k, k, stability, stability, 0.5, chance)


def test_auto_k_is_the_largest_stable_one():
    rows = [row(5, 0.6), row(10, 0.9), row(20, 0.71), row(50, 0.69), row(100, 0.65)]
    assert choose_k(rows, "context", "auto", 0.7, 1000, 500) == (20, None)
    assert choose_k(rows, "context", 50, 0.7, 1000, 500) == (50, None)


def test_auto_k_is_not_fooled_by_overlap_of_few_types():
    rows = [row(5, 0.8, 5 / 75), row(20, 0.75, 20 / 60), row(40, 1.0, 1.0)]
    assert choose_k(rows, "context", "auto", 0.7, 40, 30)[0] == 5


def test_auto_k_stays_among_eligible_types():
    """Beyond the eligible types every set is the same, which is no sign of stability."""
    beyond = SweepRow("context", 20, 12, 1.0, 1.0, 0.5, 1.0)
    assert choose_k([row(5, 0.1), row(10, 0.2), beyond], "context", "auto", 0.7, 1000, 500)[0] == 0


def test_auto_k_leaves_out_types_that_are_merely_frequent():
    rows = [row(5, 0.9), row(10, 0.95), row(20, 0.99)]
    assert choose_k(rows, "context", "auto", 0.7, 1000, num_costly=12)[0] == 10


def test_auto_k_says_when_nothing_is_stable():
    k, note = choose_k([row(5, 0.1), row(10, 0.2)], "context", "auto", 0.7, 1000, 500)
    assert k == 0
    assert note.code == "no_stable_k"


def test_auto_k_is_reported(planted):
    report = detect_rocks(planted[0], config=DetectConfig(**QUICK))
    at = next(r for r in report.sweep if r.definition == "context" and r.k == report.ks["context"])
    assert at.stability >= 0.7
    assert report.ks["excess"] == len(report.sets["excess"])
    assert report.k == report.ks["certified"] == len(report.rocks)


def test_tables_have_the_columns_of_the_design(report):
    wanted = "token_id token cluster count loss_pre loss_post r ccr r_ctx excess excess_low grad_share"
    wanted += " in_burden in_context in_excess in_certified class confirmed p_costly p_stagnant fall fall_low fall_high"
    types = report.types_table()
    assert set(wanted.split()) <= set(types.column_names)
    assert types["in_certified"].to_pylist() == [True] * 8 + [False] * 192
    assert types["rank_certified"].to_pylist()[:8] == list(range(1, 9))
    assert types["class"].to_pylist()[:8] == ["rock"] * 8
    assert {"k", "stability", "coverage"} <= set(report.sweep_table().column_names)
    assert {"parameter", "step", "jaccard", "enrichment"} <= set(report.sensitivity_table().column_names)
    assert {"group", "arm", "change", "change_low", "p_value"} <= set(report.persistence_table().column_names)
    for name, table in report.tables().items():
        assert isinstance(table, pa.Table)
        assert set(table.column_names) <= set(TABLES[name].schema.names), name
        assert not any(pa.types.is_null(field.type) for field in table.schema), name
    assert report.facts()["rocks"] == report.rocks.tolist()


def test_the_terminal_table_names_the_rocks(report):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(report))
    text = console.export_text()
    assert f"#{report.rocks[0]}" in text
    assert "enrichment" in text
    assert "control" in text


class Letters:
    """Only what detection asks of a tokenizer."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def decode(self, ids, skip_special_tokens=False):
        return "[bold]$" if ids[0] % 2 else "word"


def test_a_tokenizer_names_tokens_and_hostile_text_stays_text(planted):
    report = detect_rocks(planted[0], Letters(1000), DetectConfig(k=8, **QUICK))
    assert {row.cluster for row in report.clusters} == {"math", "content"}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(report))
    assert "[bold]$" in console.export_text()


def test_another_tokenizer_is_refused(planted):
    with pytest.raises(DataError, match="another tokenizer"):
        detect_rocks(planted[0], Letters(10))


def test_an_embedding_encodes_contexts(planted):
    embedding = np.random.default_rng(2).standard_normal((1000, 24))
    report = detect_rocks(planted[0], config=DetectConfig(k=8, **QUICK), embedding_VH=embedding)
    assert set(report.sets["context"].tolist()) == set(planted[1].tolist())


def test_one_checkpoint_skips_persistence_and_says_so(planted):
    columns = {name: column for name, column in planted[0].items() if name not in ("loss_pre", "grad_norm")}
    report = detect_rocks(columns, config=DetectConfig(k=8, **QUICK))
    assert report.persistence == []
    assert report.persistence_table().num_rows == 0
    assert any("persistence is skipped" in note for note in report.notes)
    assert any("without the loss before OPD" in note for note in report.notes)
    assert report.thresholds.tau_pre is None
    assert report.footprints["context"].share_grad is None
    assert set(report.sets["context"].tolist()) == set(planted[1].tolist())


def test_few_prompts_warn_and_too_few_are_refused(planted):
    few = planted[0]["prompt_id"] < 10
    report = detect_rocks({name: column[few] for name, column in planted[0].items()}, config=DetectConfig(k=3, **QUICK))
    assert any("only 5 prompts were measured" in note for note in report.notes)
    fewer = planted[0]["prompt_id"] < 3
    with pytest.raises(DataError, match="at least 4 prompts"):
        detect_rocks({name: column[fewer] for name, column in planted[0].items()})


def test_more_rocks_than_types(planted):
    report = detect_rocks(planted[0], config=DetectConfig(k=5000, **QUICK))
    assert report.ks["burden"] <= 200
    assert any("more than the" in note for note in report.notes)
    assert len(report.sets["burden"]) == report.ks["burden"]


def test_rows_without_a_loss_are_counted_and_left_out(planted):
    loss = planted[0]["loss_post"].copy()
    loss[::100] = np.nan
    report = detect_rocks({**planted[0], "loss_post": loss}, config=DetectConfig(k=8, **QUICK))
    assert report.num_left_out == 120
    assert report.num_occurrences == 11880
    assert any("120 of 12000" in note for note in report.notes)


def test_both_signals_are_compared(planted):
    columns = planted[0]
    noise = np.random.default_rng(4).normal(0, 0.3, 12000)
    base = {name: columns[name] for name in ("prompt_id", "rollout_id", "position", "token_id")}
    by_step = {
        step: pa.table({**base, "kl": columns[name], "log_ratio": columns[name] + noise})
        for step, name in ((0, "loss_pre"), (9, "loss_post"))
    }
    for signal in ("kl", "log_ratio"):
        occurrences = Occurrences.from_checkpoints(by_step, signal=signal)
        report = detect_rocks(occurrences, config=DetectConfig(k=8, signal=signal, **QUICK))
        overlap = {(o.first, o.second): o.jaccard for o in report.overlaps}
        other = "log_ratio" if signal == "kl" else "kl"
        assert overlap[f"context on {signal}", f"context on {other}"] > 0.7
        assert len(overlap) == 10


def test_published_counts_and_means_give_the_published_ranking(tmp_path, rng):
    path = tmp_path / "counts.csv"
    rows = [(i, int(n), float(m)) for i, n, m in zip(range(500), rng.integers(1, 9999, 500), rng.exponential(size=500))]
    path.write_text("id,count,mean\n" + "".join(f"{i},{n},{m!r}\n" for i, n, m in rows))
    table = np.genfromtxt(path, delimiter=",", names=True)
    token_ids, burdens = burden_from_counts(table["id"].astype(int), table["count"], table["mean"])
    expected = sorted(rows, key=lambda row: -row[1] * row[2])
    assert token_ids.tolist() == [row[0] for row in expected]
    assert burdens.tolist() == [row[1] * row[2] for row in expected]


def test_thresholds_as_numbers(planted):
    report = detect_rocks(planted[0], config=DetectConfig(k=8, tau_pre=0.9, tau_post=0.8, gamma=0.5, **QUICK))
    assert (report.thresholds.tau_pre, report.thresholds.tau_post, report.thresholds.gamma) == (0.9, 0.8, 0.5)


def test_prompts_beyond_the_limit_are_merged_into_groups(monkeypatch, planted):
    monkeypatch.setattr("rocktokens.detect.type_sums.MAX_UNITS", 12)
    occurrences = Occurrences.from_table(planted[0])
    sums = base_sums(occurrences, DetectConfig())
    assert sums.num_units == 12
    assert np.bincount(sums.unit_N, minlength=12).tolist() == [1000] * 12
    assert sums.totals["loss"].sum() == pytest.approx(planted[0]["loss_post"].sum(dtype=float))


@pytest.mark.parametrize(
    "setting",
    [
        {"k": 0},
        {"tau_quantile": 1.0},
        {"gamma": 2.0},
        {"eta": 0.0},
        {"window": 0},
        {"resamples": 10},
        {"kappa": 0.0},
        {"kappa": 1.5},
        {"q": 0.0},
        {"looks": 0},
        {"positions": -1},
        {"budget_prompts": 1},
    ],
)
def test_bad_settings_are_refused(setting):
    with pytest.raises(ConfigError):
        DetectConfig(**setting)
