"""A census of outcomes that somebody else measured: known effects, its power, and what it cannot know."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as sps

from rocktokens.causal.census_report import census_table
from rocktokens.causal.knockout_terminal import summary
from rocktokens.causal.outcomes import KnockoutOutcomes, census_of_outcomes
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.errors import DataError

SETTINGS = KnockoutConfig(resamples=2000)


def outcomes(columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> KnockoutOutcomes:
    rows = [
        (name, f"p{place}", before, after)
        for name, (baseline_P, knocked_P) in columns.items()
        for place, (before, after) in enumerate(zip(baseline_P, knocked_P))
        if not np.isnan(before)
    ]
    candidate, prompt, before, after = zip(*rows)
    return KnockoutOutcomes.from_rows(candidate, prompt, np.array(before), np.array(after), {})


def baseline(num_prompts: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random(num_prompts) < 0.7).astype(float)


def test_a_pillar_a_stumbling_block_and_a_neutral_get_their_verdicts():
    base = baseline(1000)
    hurt, helped = base.copy(), base.copy()
    hurt[np.flatnonzero(base)[:100]] = 0
    helped[np.flatnonzero(base == 0)[:80]] = 1
    census = census_of_outcomes(outcomes({"1": (base, hurt), "2": (base, helped), "3": (base, base)}), SETTINGS)
    found = {result.banned.set_id: result for result in census.results}
    assert [found[name].verdict for name in "123"] == ["Strong Pillar", "Strong Stumbling Block", "Proven Neutral"]
    assert found["1"].delta == pytest.approx(-0.1)
    assert found["1"].low < -0.1 < found["1"].high < 0
    assert found["2"].delta == pytest.approx(0.08)
    assert (found["3"].delta, found["3"].num_changed) == (0.0, 0)
    assert -0.01 < found["3"].low <= 0 <= found["3"].high < 0.01
    assert census.accuracy.value == pytest.approx(base.mean())
    # The oracle of the sign test and of Bonferroni shares nothing with ours.
    assert found["1"].p_sign == pytest.approx(sps.binomtest(0, 100).pvalue)
    assert found["1"].p_bonferroni == pytest.approx(min(1.0, 3 * found["1"].p))


def test_noise_of_both_signs_is_undecided_and_the_power_says_so():
    base = baseline(500)
    noisy = base.copy()
    noisy[np.flatnonzero(base)[:30]], noisy[np.flatnonzero(base == 0)[:30]] = 0, 1
    result = census_of_outcomes(outcomes({"1": (base, noisy)}), SETTINGS).results[0]
    assert result.verdict == "Undecided"
    assert result.more_problems > 0
    sd = np.std(noisy - base, ddof=1)
    wanted = (sps.norm.isf(0.025) + sps.norm.ppf(0.8)) * sd / np.sqrt(500)
    assert result.detectable == pytest.approx(wanted, rel=0.02)
    assert result.detectable > 0.03


def test_without_any_effect_few_are_called_strong():
    rng = np.random.default_rng(2)
    base = baseline(300)
    columns = {}
    for number in range(60):
        after = base.copy()
        flipped = rng.choice(300, 30, replace=False)
        after[flipped] = (rng.random(30) < base[flipped].mean()).astype(float)
        before = base.copy()
        before[flipped] = (rng.random(30) < base[flipped].mean()).astype(float)
        columns[str(number)] = (before, after)
    census = census_of_outcomes(outcomes(columns), SETTINGS)
    strong = sum(result.verdict.startswith("Strong") for result in census.results)
    assert strong <= sps.binom.isf(0.001, 60, 0.05)
    assert any("baseline differs between candidates" in note for note in census.notes)


def test_candidates_tested_on_other_prompts_are_judged_by_their_own():
    base = baseline(400)
    few = np.where(np.arange(400) < 50, base, np.nan)
    hurt = np.where(base == 1, 0.0, base)
    census = census_of_outcomes(
        outcomes({"1": (base, base), "2": (few, np.where(np.isnan(few), np.nan, hurt))}), SETTINGS
    )
    found = {result.banned.set_id: result for result in census.results}
    assert (found["1"].num_problems, found["2"].num_problems) == (400, 50)
    assert found["2"].delta == pytest.approx(-base[:50].mean())
    assert found["2"].accuracy_with == pytest.approx(base[:50].mean())


def test_what_outcomes_do_not_tell_stays_unknown():
    base = baseline(50)
    census = census_of_outcomes(outcomes({"so": (base, base)}), SETTINGS)
    result = census.results[0]
    assert result.num_used is None
    assert np.isnan(result.used_share)
    assert np.isnan(result.placebo_floor)
    assert result.banned.token_id is None
    assert result.verdict != "Never Used"
    assert "Never Used" in census.notes[0]


def test_a_name_that_is_no_token_id_stays_a_name():
    base = baseline(20)
    names = ("99999999999999999999", "4294967296", "١٢", " So")
    census = census_of_outcomes(outcomes(dict.fromkeys(names, (base, base))), SETTINGS)
    assert [result.banned.token_id for result in census.results] == [None] * 4
    assert census_table(census)["token"].to_pylist() == list(names)


def test_a_single_prompt_is_refused():
    with pytest.raises(DataError, match="at least 2"):
        census_of_outcomes(outcomes({"1": (np.ones(1), np.zeros(1))}), SETTINGS)


def test_the_order_of_rows_changes_nothing():
    base = baseline(60)
    after = np.roll(base, 3)
    forward = census_of_outcomes(outcomes({"1": (base, after)}), SETTINGS).results[0]
    rows = [("1", f"p{place}", base[place], after[place]) for place in reversed(range(60))]
    candidate, prompt, before, knocked = zip(*rows)
    turned = KnockoutOutcomes.from_rows(candidate, prompt, np.array(before), np.array(knocked), {})
    again = census_of_outcomes(turned, SETTINGS).results[0]
    assert again.delta == pytest.approx(forward.delta)
    assert again.verdict == forward.verdict


def test_the_summary_says_rollouts_power_and_uneven_prompts():
    base = baseline(60)
    whole = outcomes({"1": (base, base)})
    census = census_of_outcomes(whole, KnockoutConfig(resamples=1000, power=0.5))
    said = " ".join(summary(census)).replace("\N{NO-BREAK SPACE}", " ")
    assert "60 prompts, 60 rollouts" in said
    assert "at 50 % power" in said
    assert "median of 1 set)" in said
    assert not any("different numbers" in note for note in census.notes)
    halves = base.copy()
    halves[0] = 0.5
    assert "rollouts" not in summary(census_of_outcomes(outcomes({"1": (halves, halves)}), SETTINGS))[0]


def test_candidates_on_different_numbers_of_prompts_are_remarked_on():
    base, fewer = baseline(60), baseline(60)
    fewer[20:] = np.nan
    census = census_of_outcomes(outcomes({"1": (base, base), "2": (fewer, fewer)}), SETTINGS)
    assert any("different numbers of prompts, 20 to 60" in note for note in census.notes)
    fewer[1:] = np.nan
    with pytest.raises(DataError, match="leave it out"):
        census_of_outcomes(outcomes({"1": (base, base), "2": (fewer, fewer)}), SETTINGS)
