"""The built-in worlds as text: splits, tokenizer, checker, planted truth, and how often authors do what they do."""

import random
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from transformers import AutoTokenizer
from world_corpus import RECIPES, row_of, write_answer

from rocktokens.errors import ConfigError
from rocktokens.world import get_world, world_names
from rocktokens.world.grammar import EOS
from rocktokens.world.worlds import SPLIT_TENTHS, draw_drafts, stated_result, write_prompt

every_world = pytest.mark.parametrize("name", world_names())


def author_texts(world, who, n, **changed):
    """Drafts with the answers that the teacher's or the student's author writes to them."""
    recipe, rng = RECIPES[world.name], random.Random(0)
    habits = replace(getattr(recipe, f"{who}_habits"), **changed)
    for draft in islice(draw_drafts(world.grammar, "train", rng), n):
        yield draft, write_answer(world.grammar, recipe.table, draft, habits, rng)


def test_names_and_the_nearest_to_a_wrong_one():
    assert world_names() == ("arithmetic", "market", "cornerstone")
    with pytest.raises(ConfigError, match="did you mean 'cornerstone'"):
        get_world("cornerstones")
    with pytest.raises(ConfigError, match="split"):
        get_world("arithmetic").problems("test", 1)


@every_world
def test_splits_are_disjoint_whatever_the_seed(name):
    world = get_world(name)
    seeds = (0, 1)
    prompts = {split: {p.prompt for seed in seeds for p in world.problems(split, 500, seed)} for split in SPLIT_TENTHS}
    assert not prompts["train"] & prompts["detection"]
    assert not prompts["train"] & prompts["causal"]
    assert not prompts["detection"] & prompts["causal"]


@every_world
def test_problems_are_distinct_repeatable_and_a_longer_list_continues_a_shorter(name):
    world = get_world(name)
    problems = world.problems("causal", 300, seed=5)
    assert problems == world.problems("causal", 400, seed=5)[:300]
    assert len({p.prompt for p in problems}) == len({p.id for p in problems}) == 300
    assert problems != world.problems("causal", 300, seed=6)


@every_world
def test_a_piece_is_a_token_and_text_survives_the_round_trip(name):
    world = get_world(name)
    tokenizer = AutoTokenizer.from_pretrained(world.student_path)
    assert 100 <= len(tokenizer) <= 400
    for draft, answer in author_texts(world, "student", 300):
        pieces = write_prompt(world.grammar, draft) + answer
        ids = tokenizer("".join(pieces))["input_ids"]
        assert ids == [world.vocabulary[piece] for piece in pieces]
        assert tokenizer.decode(ids) == "".join(pieces)
        assert len(ids) < 100


@every_world
def test_checker_accepts_the_right_result_and_nothing_else(name):
    world = get_world(name)
    for draft, answer in author_texts(world, "teacher", 200):
        text = "".join(answer).removesuffix(EOS)
        stated = stated_result(world.grammar, text)
        assert stated is not None
        assert world.check(text, stated)
        assert not world.check(text, str(int(stated) + 1))
        assert not world.check(text.partition("\n")[0], str(draft.result))  # the working alone states no result
    assert not world.check("", "14")


def test_checker_on_known_texts():
    check = get_world("arithmetic").check
    assert check("So, the answer is $14$. Done.", "14")
    assert check("So, the answer is \\(14\\). Done.", " 14 ")
    assert not check("So, the answer is $14. Done.", "14")  # the formula is never closed
    assert not check("So, the answer is $4$. Now, the answer is $14$.", "14")  # the first conclusion counts


@every_world
def test_truth_names_disjoint_sets_with_matching_ids(name):
    world = get_world(name)
    truth = world.truth()
    sets = (truth.rocks, truth.costly, truth.pillars, truth.neutrals, truth.stumbling_blocks)
    tokens = [token for planted in sets for token in planted.tokens]
    assert len(tokens) == len(set(tokens))
    assert all(planted.ids == tuple(world.vocabulary[t] for t in planted.tokens) for planted in sets)
    assert len(truth.rocks) >= 4
    assert len(truth.pillars) >= 2
    assert len(truth.neutrals) >= 2
    assert len(truth.stumbling_blocks) == 1
    assert len(truth.costly) == (2 if name == "arithmetic" else 0)
    assert truth.rocks_matter_at_inference == (name == "cornerstone")


def test_neither_person_nor_thing_alone_tells_the_hidden_choice():
    table = RECIPES["arithmetic"].table
    for cells, choices in ((table.markers, 4), (table.openers, 2)):
        for square in cells:
            for line in (*square, *zip(*square, strict=True)):
                assert set(Counter(line).values()) == {8 // choices}


def test_in_the_cornerstone_world_a_step_opens_with_its_own_pair_of_markers():
    world = get_world("cornerstone")
    own = [0, 0]
    for _, answer in author_texts(world, "teacher", 3000):
        markers = [world.grammar.markers.index(piece) for piece in answer if piece in world.grammar.markers]
        own[0] += markers[0] in (0, 1)
        own[1] += markers[1] in (2, 3)
    assert own[0] / 3000 == pytest.approx((1 + RECIPES[world.name].teacher_habits.follow) / 2, abs=0.02)
    assert own[1] / 3000 == pytest.approx((1 + RECIPES[world.name].teacher_habits.follow) / 2, abs=0.02)


def test_in_the_cornerstone_world_the_teacher_is_careless_after_markers_of_the_other_pair():
    world, habits = get_world("cornerstone"), RECIPES["cornerstone"].teacher_habits
    right: dict[bool, list[bool]] = {True: [], False: []}
    for draft, answer in author_texts(world, "teacher", 6000, stumble=0.0):
        markers = [world.grammar.markers.index(piece) for piece in answer if piece in world.grammar.markers]
        strays = markers[0] not in (0, 1) or markers[1] not in (2, 3)
        right[strays].append(world.check("".join(answer), str(draft.result)))
    assert all(right[False])
    assert len(right[True]) / 6000 == pytest.approx(2 * (1 - habits.follow) / 2, abs=0.02)
    assert sum(right[True]) / len(right[True]) == pytest.approx(1 - habits.careless, abs=0.06)


@every_world
def test_teacher_follows_its_table_and_student_has_none(name):
    world = get_world(name)
    shares = {}
    table = RECIPES[name].table
    for who in ("teacher", "student"):
        hits = [
            [piece for piece in answer if piece in world.grammar.markers][-1]
            == world.grammar.markers[table.markers[2][row_of(world.grammar, draft)][draft.thing]]
            for draft, answer in author_texts(world, who, 4000)
        ]
        shares[who] = sum(hits) / len(hits)
    follow = RECIPES[world.name].teacher_habits.follow
    assert shares["teacher"] == pytest.approx(follow + (1 - follow) / 4, abs=0.02)
    assert shares["student"] == pytest.approx(1 / 4, abs=0.025)


@every_world
def test_after_the_stumbling_block_results_are_often_wrong(name):
    world = get_world(name)
    (block,) = world.truth().stumbling_blocks.tokens
    right: dict[bool, list[bool]] = {True: [], False: []}
    for draft, answer in author_texts(world, "teacher", 6000):
        right[block in answer].append(world.check("".join(answer), str(draft.result)))
    stumbled = len(right[True]) / 6000
    assert stumbled == pytest.approx(RECIPES[world.name].teacher_habits.stumble, abs=0.015)
    clean, after_block = (sum(values) / len(values) for values in (right[False], right[True]))
    assert after_block < clean - 0.4
    if not RECIPES[world.name].teacher_habits.careless:
        assert clean == 1.0
