"""Knock-outs on a Markov chain and on a tiny pair: what is copied, resumed, refused, and what a kill costs."""

from __future__ import annotations

import json
import shutil

import markov
import numpy as np
import pyarrow as pa
import pytest
from causal_runs import make_tiny_run
from small_runs import save_pair
from tiny import CONTEXT, tiny_model

from rocktokens.causal.bans import make_sets, matched_controls, named_tokens
from rocktokens.causal.baseline import SHOWN_PROMPTS, Setup, asked_prompts, candidate_types, own_problems
from rocktokens.causal.census import BannedSet
from rocktokens.causal.knockout import knockout, knockout_census
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.errors import ConfigError, DataError
from rocktokens.models.pair import load_tokenizer
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.checkers import MathChecker, make_checker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import Prompt
from rocktokens.run import Run, open_run
from rocktokens.sample.sampler import Sampler
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import from_mapping, to_mapping
from rocktokens.stage import Stage
from rocktokens.tables import ROLLOUTS
from rocktokens.world import get_world

LIMIT = 6
CONFIG = KnockoutConfig(resamples=500)
BASE = BaselineConfig(problems=200, max_new_tokens=LIMIT)


def banned(*members, role="candidate"):
    return BannedSet(f"token:{members[0]}", "token", members[0], f"t{members[0]}", members, role)


def right_if_odd(text, answer):
    """A response is right if the number of its tokens is odd: any change of its course may change it."""
    return len(text.split()) % 2 == 1


def decode(token_ids):
    return " ".join(map(str, token_ids))


BUDGET = KnockoutConfig(until="budget", resamples=500, placebo_share=0.0)


def census(engine, sets, *, problems=200, config=CONFIG, base=BASE, **options):
    options = {"decode": decode, "checker": right_if_odd, "eos_ids": (0,), "config": config, **options}
    prompts = markov.prompts(problems) if isinstance(problems, int) else problems
    return knockout_census(engine, prompts, sets, baseline=base, **options)


def closed_form_effect(matrix, members):
    """Change of accuracy by the ban, from the two laws."""
    accuracy = [
        sum(p for path, p in markov.law(matrix, LIMIT, ban).items() if len(path) % 2 == 1) for ban in ((), members)
    ]
    return accuracy[1] - accuracy[0]


def test_the_census_finds_the_effect_that_the_laws_have():
    matrix, config = markov.chain(4), KnockoutConfig(until="budget", resamples=500)
    base = BaselineConfig(problems=1500, max_new_tokens=LIMIT)
    found = census(markov.MarkovEngine(matrix), [banned(2), banned(1, 3)], problems=1500, config=config, base=base)
    for result, members in zip(found.census.results, [(2,), (1, 3)]):
        error = result.sd / np.sqrt(result.num_problems)
        assert abs(result.delta - closed_form_effect(matrix, members)) < 4 * error
        assert result.low < result.delta < result.high


def test_only_rollouts_that_use_the_set_are_resumed_and_some_can_be_read():
    engine = markov.MarkovEngine(markov.chain(1))
    found = census(engine, [banned(3)], config=BUDGET)
    tokens = {row["rollout_id"]: row["token_ids"] for row in found.baseline.to_pylist()}
    rows = {row["rollout_id"]: row for row in found.knockouts.to_pylist()}
    assert {name: row["resumed_at"] for name, row in rows.items()} == {
        name: own.index(3) for name, own in tokens.items() if 3 in own
    }
    assert len(tokens) == 400
    assert found.census.results[0].num_used == len(rows)
    assert engine.num_requests == 400 + len(rows)
    shown = {name: row for name, row in rows.items() if row["token_ids"] is not None}
    assert 0 < len({row["prompt_id"] for row in shown.values()}) <= SHOWN_PROMPTS
    for name, row in shown.items():
        at = row["resumed_at"]
        assert row["token_ids"][:at] == tokens[name][:at]
        assert 3 not in row["token_ids"]


def test_without_exact_resumption_everything_is_generated_again_and_it_says_why(caplog):
    engine = markov.MarkovEngine(markov.chain(1), exact_resume=False)
    with caplog.at_level("INFO"):
        found = census(engine, [banned(3)], config=BUDGET)
    assert "generated in full" in caplog.text
    assert found.knockouts["resumed_at"].to_pylist() == [0] * 400


def test_a_first_use_at_the_end_of_the_context_has_no_placebo_and_does_not_crash():
    """A rollout that the context cut, and whose last token is the first use of a set: nothing can follow that use."""
    engine = Sampler(tiny_model("llama"), eos_ids=(1,), pad_id=2)
    problems = [Prompt(f"p{i}", tuple(3 + (i + j) % 50 for j in range(CONTEXT - 4)), "", "x") for i in range(12)]
    config = KnockoutConfig(until="budget", resamples=200, placebo_share=1.0)
    base = BaselineConfig(problems=12, max_new_tokens=20)
    sets = [banned(token) for token in range(3, 64)]
    found = census(engine, sets, problems=problems, config=config, base=base, eos_ids=(1,))
    before = {row["rollout_id"]: row for row in found.baseline.to_pylist()}
    rows = [row for row in found.knockouts.to_pylist() if row["arm"] == "placebo" and row["num_tokens"] == 0]
    assert rows  # some set's first use was the last token that the context allowed
    for row in rows:
        own = before[row["rollout_id"]]
        assert own["truncated"]
        assert len(own["token_ids"]) == 4
        assert row["correct"] == own["correct"]


def test_candidates_are_the_top_by_burden_and_every_declared_rock():
    types = [{"token_id": token, "r": burden} for token, burden in enumerate([1.0, 9.0, None, 5.0, 0.5, 5.0])]
    assert candidate_types(types, [], 3) == [1, 3, 5]
    assert candidate_types(types, [4, 3, 4], 3) == [1, 3, 5, 4]


def test_adding_problems_changes_no_rollout():
    """Seeds derive from the run's seed, set, rollout and arm alone."""
    few, many = (
        {
            (row["arm"], row["rollout_id"]): row
            for row in found.knockouts.drop_columns("token_ids").to_pylist()  # kept for the first problems only
        }
        for found in (
            census(markov.MarkovEngine(markov.chain(1)), [banned(3)], problems=count, config=BUDGET)
            for count in (60, 200)
        )
    )
    assert len(few) > 30
    assert all(many[key] == row for key, row in few.items())


@pytest.mark.parametrize(
    ("sets", "options", "error", "word"),
    [
        ([banned(0)], {}, ConfigError, "ends responses"),
        ([banned(1, 2, 3, 4, 5)], {"vocabulary": 5}, ConfigError, "every token type"),
        ([], {}, ConfigError, "nothing to ban"),
        ([banned(1)], {"checker": None}, DataError, "no meaning"),
        ([banned(1)], {"problems": [Prompt(f"p{i}", (0,), "", None) for i in range(9)]}, DataError, "0 of 9 prompts"),
    ],
)
def test_what_a_census_refuses(sets, options, error, word):
    with pytest.raises(error, match=word):
        census(markov.MarkovEngine(markov.chain(1)), sets, **options)


# ---------------------------------------------------------------- who is banned


TEXTS = {0: "<eos>", 1: "So", 2: " so", 3: " So", 4: "SO", 5: "Sol", 6: " ", 7: "7", 8: "\n"}


def test_names_become_ids():
    assert named_tokens(["So", "#7", "7"], TEXTS) == [1, 7]
    with pytest.raises(ConfigError, match="did you mean 'Sol'"):
        named_tokens(["Soll"], TEXTS)
    with pytest.raises(ConfigError, match="no token #99"):
        named_tokens(["#99"], TEXTS)
    with pytest.raises(ConfigError, match="several tokens: #1, #9"):
        named_tokens(["So"], {**TEXTS, 9: "So"})


def test_controls_are_as_frequent_as_the_rocks():
    count = {1: 100, 2: 10, 3: 90, 4: 11, 5: 1000, 6: 0}
    assert matched_controls([1, 2], count, count) == {1: 3, 2: 4}
    assert matched_controls([1, 2], count, count, exclude=[3]) == {1: 5, 2: 4}
    assert matched_controls([1], {1: 5}, {1: 5}) == {}


def test_sets_are_there_once():
    config = KnockoutConfig(kinds=("token", "family"), wider_sets_of="rocks")
    sets = make_sets([1, 7], config, TEXTS, eos_ids=(0,), rocks=[1], count={1: 9, 7: 8, 5: 9})
    assert [(s.set_id, s.members, s.role) for s in sets] == [
        ("token:1", (1,), "candidate"),
        ("token:7", (7,), "candidate"),
        ("family:1", (1, 2, 3, 4), "candidate"),
        ("token:5", (5,), "control"),
    ]
    with pytest.raises(ConfigError, match="window knock-outs need"):
        make_sets([1], KnockoutConfig(kinds=("window",)), TEXTS, eos_ids=(0,))


# ---------------------------------------------------------------- the stage, through the command line


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


def with_detection(path, rocks):
    """A run as `detect` leaves it: three candidates, three types that can be controls, and these rocks."""

    run = open_run(path)
    counts = {20: 90, 21: 80, 22: 70, 23: 88, 24: 79, 25: 71}
    columns = {"token_id": list(counts), "count": list(counts.values()), "place_context": [1, 2, 3, None, None, None]}
    run.write("types", pa.table({**columns, "r": [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]}))
    run.finish("detect", {"definition": "context", "rocks": rocks, "thresholds": {}})
    return path


def test_a_census_follows_the_detection_it_rests_on(tiny_run, tmp_path, monkeypatch):

    config = KnockoutConfig(top=3, until="budget", resamples=200)
    base = BaselineConfig(problems=40, max_new_tokens=12, batch_size=32)
    fresh, changed = tmp_path / "fresh", tmp_path / "changed"
    shutil.copytree(tiny_run, fresh)
    shutil.copytree(tiny_run, changed)
    wanted = knockout(with_detection(fresh, [20, 21, 22]), config, base)
    with monkeypatch.context() as killed:  # as if it had been killed at the very end, with all its parts on disk
        killed.setattr(Stage, "remove_parts", lambda stage: None)
        first = knockout(with_detection(changed, [20]), config, base)
    assert sum(row["role"] == "control" for row in first.read("census").to_pylist()) == 1
    found = knockout(with_detection(changed, [20, 21, 22]), config, base)
    controls = [row for row in found.read("census").to_pylist() if row["role"] == "control"]
    assert len(controls) == 3
    for name in ("census", "knockouts", "baseline"):
        assert found.read(name).equals(wanted.read(name))
    facts = found.facts("knockout")
    assert knockout(changed, config, base).facts("knockout") == facts  # nothing to do


def test_what_the_stage_refuses(tiny_run, tmp_path):

    base = BaselineConfig(problems=20, max_new_tokens=8)
    with pytest.raises(ConfigError, match="ends responses"):
        knockout(tiny_run, KnockoutConfig(candidates=("<eos>",)), base)
    with pytest.raises(ConfigError, match="run `rocktokens detect` first"):
        knockout(tiny_run, KnockoutConfig(), base)
    with pytest.raises(ConfigError, match="checkpoint must be"):
        knockout(tiny_run, KnockoutConfig(candidates=("7",)), BaselineConfig(checkpoint="99"))


# ---------------------------------------------------------------- problems of one's own


@pytest.fixture
def own_prompts(tiny_run, tmp_path):
    """A run over a JSONL file of 200 problems; returns the run and its settings."""

    problems = get_world("arithmetic").problems("train", 200)
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems))
    prompts = PromptsConfig(source=str(file), checker="causal_runs:response_has_a_seven")
    pair = open_run(tiny_run).manifest["config"]["pair"]
    return Run.create(tmp_path / "run", {"pair": pair, "prompts": to_mapping(prompts)}), prompts, problems


def used_for_detection(run, prompt_ids):
    rows = [dict.fromkeys(ROLLOUTS.names) | {"prompt_id": name} for name in prompt_ids]
    run.write("rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS))


def test_problems_that_detection_used_are_left_out(own_prompts):

    run, prompts, _ = own_prompts
    pair = from_mapping(PairConfig, run.manifest["config"]["pair"])
    tokenizer = load_tokenizer(pair.student, pair)

    def problems(baseline: BaselineConfig):
        return own_problems(run, asked_prompts(prompts, baseline), baseline, tokenizer)

    share = problems(BASE)
    assert 10 < len(share) < 150  # the part that is set aside for causal tests
    used_for_detection(run, [problem.prompt_id for problem in share[:5]])
    assert problems(BASE) == share[5:]
    used_for_detection(run, [problem.prompt_id for problem in share])
    with pytest.raises(DataError, match="reuse-prompts"):
        problems(BASE)
    assert len(problems(BaselineConfig(reuse_prompts=True))) == 200
    assert len(problems(BaselineConfig(source="arithmetic", problems=30))) == 30
    assert len(problems(BaselineConfig(source=prompts.source, problems=30))) == 200


def test_another_source_has_its_own_checker_but_a_worlds_student_answers_files_in_its_language(tmp_path):
    pair, prompts = save_pair(tmp_path, prompts=12)
    file, legs, world = prompts.source, "reasoning-gym:leg_counting", get_world("arithmetic")
    for own, asked in (("arithmetic", file), (legs, file), (file, legs), ("arithmetic", legs)):
        config = {"pair": to_mapping(pair), "prompts": to_mapping(PromptsConfig(source=own))}
        run = Run.create(tmp_path / f"{len(list(tmp_path.iterdir()))}", config)
        setup = Setup.of(run, BaselineConfig(source=asked, problems=2, max_new_tokens=4), ServersConfig())
        check = make_checker(setup.opens["prompts"])
        if asked == file:
            assert check == world.check if own == "arithmetic" else isinstance(check, MathChecker)
        else:
            assert all(check(f"<answer>{prompt.answer}</answer>", prompt.answer) for prompt in setup.problems)
