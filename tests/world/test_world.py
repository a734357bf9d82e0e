"""The built-in worlds as text: splits, tokenizer, checker, planted truth, and how often authors do what they do."""

import random
from itertools import islice

import numpy as np
import pytest
from transformers import AutoTokenizer
from world_corpus import RECIPES, row_of, write_answer

from rocktokens.errors import ConfigError
from rocktokens.world import get_world, world_names
from rocktokens.world.grammar import EOS
from rocktokens.world.worlds import SPLIT_TENTHS, draw_drafts, stated_result, write_prompt

every_world = pytest.mark.parametrize("name", world_names())


def author_texts(world, who, n):
    """Drafts with the answers that the teacher's or the student's author writes to them."""
    recipe, rng = RECIPES[world.name], random.Random(0)
    habits = getattr(recipe, f"{who}_habits")
    for draft in islice(draw_drafts(world.grammar, "train", rng), n):
        yield draft, write_answer(world.grammar, recipe.table, draft, habits, rng)


def test_names_and_the_nearest_to_a_wrong_one():
    assert world_names() == ("arithmetic", "market", "cornerstone")
    with pytest.raises(ConfigError, match="did you mean 'cornerstone'"):
        get_world("cornerstones")
    with pytest.raises(ConfigError, match="split"):
        get_world("arithmetic").problems("test", 1)


@every_world
def test_problems_are_distinct_repeatable_and_splits_are_disjoint_whatever_the_seed(name):
    world = get_world(name)
    problems = world.problems("causal", 500, seed=0)
    assert problems[:300] == world.problems("causal", 300, seed=0)
    assert len({p.prompt for p in problems}) == len({p.id for p in problems}) == 500
    seen = {split: {p.prompt for seed in (0, 1) for p in world.problems(split, 500, seed)} for split in SPLIT_TENTHS}
    assert all(len(prompts) > 500 for prompts in seen.values())  # another seed, other problems
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


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


@every_world
def test_authors_do_what_their_habits_say(name):
    """The teacher follows its table and the student has none; results are wrong after the stumbling block, and after
    markers that stray from their pair where the teacher is careless."""
    world, recipe = get_world(name), RECIPES[name]
    habits, markers = recipe.teacher_habits, world.grammar.markers
    (block,) = world.truth().stumbling_blocks.tokens
    follows = {"teacher": [], "student": []}
    right: dict[tuple[bool, bool], list[bool]] = {}
    for who, hits in follows.items():
        for draft, answer in author_texts(world, who, 6000):
            used = [markers.index(piece) for piece in answer if piece in markers]
            hits.append(used[-1] == recipe.table.markers[2][row_of(world.grammar, draft)][draft.thing])
            strays = bool(habits.careless) and (used[0] not in (0, 1) or used[1] not in (2, 3))
            if who == "teacher":
                kind = block in answer, strays
                right.setdefault(kind, []).append(world.check("".join(answer), str(draft.result)))
    assert np.mean(follows["teacher"]) == pytest.approx(habits.follow + (1 - habits.follow) / 4, abs=0.02)
    assert np.mean(follows["student"]) == pytest.approx(1 / 4, abs=0.025)
    stumbled = [own for (blocked, _), kind in right.items() for own in kind if blocked]
    assert len(stumbled) / 6000 == pytest.approx(habits.stumble, abs=0.015)
    assert np.mean(stumbled) < 0.6
    assert all(right[False, False])
    if habits.careless:
        assert np.mean(right[False, True]) == pytest.approx(1 - habits.careless, abs=0.06)
