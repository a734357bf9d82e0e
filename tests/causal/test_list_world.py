"""A world in numpy with a stumbling block and its alternative among the rocks: the list holds exactly the neutral ones.

A response is a Markov chain: marker, opener, key, echo, lead, result. All choices but the key are hidden: the student
draws them at random, the teacher has habits. Markers and openers matter to nobody. After the lead S the result is often
wrong. An echo that is not the key's own is wrong, too: banning one of two echoes changes nothing, yet learning them
would pay. Ids and habits are drawn from the seed; margin and numbers were fixed before the first run.
"""

from __future__ import annotations

import markov
import numpy as np

from rocktokens.bypass import decide
from rocktokens.causal.baseline import Bench, Work
from rocktokens.causal.census import BannedSet
from rocktokens.causal.graft import Grafts, graft_candidates, graft_table
from rocktokens.causal.knockout import knockout_census
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig

EPSILON = 0.05
BASE = BaselineConfig(problems=800, max_new_tokens=12)
STEPS = (("M1", "M2", "M3", "M4"), ("O1", "O2"), ("K1", "K2"), ("E1", "E2"), ("S", "L"), ("R", "W"))
NEUTRAL = {"M1", "M2", "M3", "M4", "O1", "O2"}
ROCKS = NEUTRAL | {"E1", "E2", "S", "L"}


def drawn_world(seed):
    """Ids by name, and the transition matrices of student and teacher."""
    rng = np.random.default_rng(seed)
    names = [name for step in STEPS for name in step]
    ids = dict(zip(names, (1 + rng.permutation(len(names))).tolist()))
    student, teacher = np.zeros((2, len(names) + 1, len(names) + 1))
    for before, after in zip((("",), *STEPS), (*STEPS, ("",))):
        own = [ids.get(name, markov.EOS) for name in after]
        for name in before:
            row = ids.get(name, markov.EOS)
            student[row, own] = rng.dirichlet(np.full(len(own), 20.0))
            teacher[row, own] = rng.dirichlet(np.full(len(own), 1.0))
    rows = student[:, ids["S"]] > 0
    student[np.ix_(rows, [ids["S"], ids["L"]])] = 0.3, 0.7
    for matrix in (student, teacher):
        rows = student[:, ids["K1"]] > 0
        matrix[np.ix_(rows, [ids["K1"], ids["K2"]])] = 0.5  # the prompt's: nobody's choice
        matrix[ids["S"], [ids["R"], ids["W"]]] = 0.1, 0.9
        matrix[ids["L"], [ids["R"], ids["W"]]] = 0.95, 0.05
    for key, echo in (("K1", "E1"), ("K2", "E2")):
        student[ids[key], [ids["E1"], ids["E2"]]] = 0.5
        teacher[ids[key], [ids["E1"], ids["E2"]]] = 0.05
        teacher[ids[key], ids[echo]] = 0.95
    return ids, student, teacher


def test_the_list_holds_exactly_the_neutral_ones():
    ids, student, teacher = drawn_world(31)
    names = {token: name for name, token in ids.items()}

    def check(text, answer):
        words = text.split()
        return "R" in words and ("K1" in words) == ("E1" in words)

    def decode(tokens):
        return " ".join(names.get(token, "") for token in tokens)

    engine, prompts = markov.MarkovEngine(student), markov.prompts(800)
    sets = [BannedSet(f"token:{ids[name]}", "token", ids[name], name, (ids[name],)) for name in sorted(ROCKS)]
    census = knockout_census(
        engine,
        prompts,
        sets,
        decode=decode,
        checker=check,
        config=KnockoutConfig(epsilon=EPSILON, until="budget", placebo_share=0.0, resamples=1000),
        baseline=BASE,
    ).census
    verdicts = {result.banned.token: result.verdict for result in census.results}
    assert verdicts["S"] == "Strong Stumbling Block"
    assert verdicts["L"] == "Strong Pillar"
    neutral = {name for name, verdict in verdicts.items() if verdict == "Proven Neutral"}
    assert neutral == NEUTRAL | {"E1", "E2"}

    work = Work(True, Bench(engine, decode, check, lambda *rules: markov.MarkovGrafter(student, teacher, *rules)))
    grafts = Grafts(work, prompts, len(student), GraftConfig(problems=800, resamples=1000), BASE)
    rocks, candidates = ([ids[name] for name in sorted(own)] for own in (ROCKS, neutral))
    grafts.add({"rocks": rocks})
    tested = graft_candidates(grafts, rocks, candidates, [markov.EOS], EPSILON)
    assert len(tested) <= 6
    members = {"rocks": rocks, **{arm: own for arm, (own, _) in tested.items()}}
    table = graft_table(grafts.rows, [], members, {arm: beside for arm, (_, beside) in tested.items()})
    assert not any(set(own) & {ids["E1"], ids["E2"]} == {ids["E1"]} for own, _ in tested.values())  # one choice
    costly = [
        {"token_id": ids[name], "token": name, "class": "rock", "declared": True, "confirmed": True}
        | {"cost_share": 0.1, "verdict": verdicts[name], "delta": None, "fall": None}
        for name in sorted(ROCKS)
    ]
    sets_of_rows = [row for row in table.to_pylist() if row["members"]]
    found = {row["token"]: row for row in decide(costly, sets_of_rows, epsilon=EPSILON)}
    assert {name for name, row in found.items() if row["decision"] == "skip"} == NEUTRAL
    reasons = {name: found[name]["reason"] for name in ("S", "L", "E1", "E2")}
    assert reasons == {"S": "stumbling block", "L": "pillar", "E1": "would gain", "E2": "would gain"}
