"""What must not matter to detection: row order, parts, names of rollouts and prompts, numbers of token ids."""

import numpy as np
import oracles_detect as oracle
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rocktokens.detect.measures import matched_control, run_starts_lengths
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.rocks import detect_rocks
from rocktokens.detect.settings import DetectConfig

CONFIG = DetectConfig(k=5, resamples=100)
seeds = st.integers(0, 2**32 - 1)


def corpus(seed):
    rng = np.random.default_rng(seed)
    columns, _, _ = oracle.simulate(
        rng, num_prompts=12, num_rollouts=2, length=30, num_types=25, vocab=60, num_rocks=3, rock_share=0.2
    )
    return columns, rng


def same(first, second, relabel=None):
    relabel = relabel or {}
    for name in first.sets:
        assert [relabel.get(t, t) for t in first.sets[name].tolist()] == second.sets[name].tolist()
    one, two = first.tables["types"].to_pylist(), second.tables["types"].to_pylist()
    ours = {relabel.get(row["token_id"], row["token_id"]): row for row in one}
    assert sorted(ours) == sorted(row["token_id"] for row in two)
    for row in two:
        for column in ("count", "r", "ccr", "r_ctx", "loss_pre", "loss_post", "r_low", "r_high"):
            assert_close(ours[row["token_id"]][column], row[column])
    for a, b in zip(*(report.tables["sensitivity"].to_pylist() for report in (first, second))):
        assert [a[name] for name in ("parameter", "step", "num_rocks")] == [
            b[n] for n in ("parameter", "step", "num_rocks")
        ]
        assert_close(a["enrichment"], b["enrichment"])
    for a, b in zip(*(report.tables["footprints"].to_pylist() for report in (first, second))):
        assert a["name"] == b["name"]
        for end in ("", "_low", "_high"):
            assert_close(a[f"enrichment{end}"], b[f"enrichment{end}"])


def assert_close(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@settings(max_examples=5)
@given(seeds)
def test_row_order_parts_and_names_of_prompts_and_rollouts_are_irrelevant(seed):
    columns, rng = corpus(seed)
    plain = detect_rocks(columns, config=CONFIG)
    names = {name: [f"{name} {code:06d}" for code in columns[name]] for name in ("prompt_id", "rollout_id")}
    table = pa.table({**columns, **names}).take(rng.permutation(len(columns["loss_post"])))
    cut = int(rng.integers(1, table.num_rows - 1))
    parts = pa.concat_tables([table.slice(cut), table.slice(0, cut)])
    same(plain, detect_rocks(parts, config=CONFIG))


@settings(max_examples=5)
@given(seeds)
def test_token_ids_are_only_names(seed):
    columns, rng = corpus(seed)
    names = rng.permutation(60)
    embedding = rng.standard_normal((60, 12)).astype(np.float32)
    moved = np.empty_like(embedding)
    moved[names] = embedding
    plain = detect_rocks(columns, config=CONFIG, embedding_VH=embedding)
    relabelled = detect_rocks({**columns, "token_id": names[columns["token_id"]]}, config=CONFIG, embedding_VH=moved)
    # The group of random others is drawn by id, so persistence is not compared; everything else is.
    same(plain, relabelled, dict(enumerate(names.tolist())))


@settings(max_examples=5)
@given(seeds, st.floats(0.05, 20))
def test_the_unit_of_the_loss_is_irrelevant(seed, scale):
    columns, _ = corpus(seed)
    scaled = {**columns, **{name: scale * columns[name].astype(float) for name in ("loss_pre", "loss_post")}}
    first, second = (detect_rocks(c, config=CONFIG) for c in (columns, scaled))
    assert [set(s.tolist()) for s in first.sets.values()] == [set(s.tolist()) for s in second.sets.values()]
    shares = [report.tables["footprints"]["share_loss"].to_numpy() for report in (first, second)]
    np.testing.assert_allclose(*shares, rtol=2e-3)


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(1, 20), seeds)
def test_controls_never_touch_rocks_or_grow_together(mask, length, seed):
    rock_N = np.array([*mask, True])
    rollout_N = np.arange(len(rock_N)) // length
    rng = np.random.default_rng(seed)
    chosen_N = matched_control(rock_N, rollout_N, rng.random(len(rock_N)), rng=rng, match_loss=bool(seed % 2))
    assert not (chosen_N & rock_N).any()
    assert chosen_N.sum() <= rock_N.sum()
    wanted, placed = (run_starts_lengths(m, rollout_N)[1] for m in (rock_N, chosen_N))
    assert placed.max(initial=0) <= wanted.max()
    if len(placed) == len(wanted) and chosen_N.sum() == rock_N.sum():
        assert sorted(wanted.tolist()) == sorted(placed.tolist())


@settings(max_examples=10)
@given(seeds)
def test_prompts_may_be_given_as_rollout_names(seed):
    """Where a rollout's number recurs under another prompt, the pair is what names it."""
    columns, _ = corpus(seed)
    recurring = {**columns, "rollout_id": columns["rollout_id"] % 2}
    one, two = Occurrences.from_table(columns), Occurrences.from_table(recurring)
    np.testing.assert_array_equal(one.rollout_N, two.rollout_N)
    np.testing.assert_array_equal(one.loss_post_N, two.loss_post_N)
