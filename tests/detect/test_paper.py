"""The paper's definitions against slow oracles: burden, context consistency at every size, thresholds, edges."""

import numpy as np
import oracles_detect as oracle
import pytest

from rocktokens.detect import paper
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.paper import Contexts, score, type_vectors, unit
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import DataError


def corpus(rng, rows=400, types=6, length=20):
    return {
        "rollout_id": np.repeat(np.arange(rows // length), length),
        "position": np.tile(np.arange(length), rows // length),
        "token_id": rng.integers(0, types, rows),
        "loss": rng.exponential(size=rows),
    }


def consistency(contexts, gamma, max_others=10_000, seed=1):
    """ρ of every occurrence; 0 for what does not persist."""
    rho_N = np.zeros(len(contexts.occurrences), np.float32)
    rho_N[contexts.index_Q] = contexts.consistency(gamma, max_others, np.random.default_rng(seed))
    return rho_N


def contexts_of(columns, rng, persistent_N=None, window=4, vector_VH=None):
    occurrences = Occurrences.from_table(columns)
    vector_VH = type_vectors(occurrences.token_ids_V, rng=rng) if vector_VH is None else vector_VH
    persistent_N = np.ones(len(occurrences), bool) if persistent_N is None else persistent_N
    return Contexts(occurrences, persistent_N, vector_VH, window)


def test_scores_equal_the_oracle(rng):
    columns = {name: column[:3000] for name, column in oracle.simulate(np.random.default_rng(0))[0].items()}
    occurrences = Occurrences.from_table(columns)
    vector_VH = rng.standard_normal((len(occurrences.token_ids_V), 16)).astype(np.float32)
    scores = score(occurrences, occurrences.pairs(), DetectConfig(), vector_VH)
    tokens, post, at = columns["token_id"], columns["loss_post"], scores.thresholds
    assert at.tau_post == pytest.approx(max(np.quantile(post, 0.8), post.mean()))
    persistent = (post >= np.float32(at.tau_post)) & (columns["loss_pre"] >= np.float32(at.tau_pre))
    vectors = dict(zip(occurrences.token_ids_V.tolist(), vector_VH))
    rho = oracle.consistency(columns["rollout_id"], columns["position"], tokens, persistent, vectors, 4, at.gamma)
    ccr, burden = oracle.ccr(tokens, persistent & (rho >= 0.1)), oracle.burden(tokens, post)
    for v, token in enumerate(occurrences.token_ids_V.tolist()):
        assert scores.r_V[v] == pytest.approx(burden[token])
        assert scores.ccr_V[v] == pytest.approx(ccr[token])
        assert scores.r_ctx_V[v] == pytest.approx(burden[token] * ccr[token])


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("gamma", [0.1, 0.4])
def test_consistency_equals_the_oracle(rng, window, gamma):
    keep = rng.random(400) < 0.9  # positions are missing: distances must be those of positions
    columns = {name: column[keep] for name, column in corpus(rng).items()}
    persistent_N = columns["loss"] > 0.7
    contexts = contexts_of(columns, rng, persistent_N, window)
    vectors = dict(zip(contexts.occurrences.token_ids_V.tolist(), contexts.vector_VH))
    places = (columns["rollout_id"], columns["position"], columns["token_id"])
    expected = oracle.consistency(*places, persistent_N, vectors, window, gamma)
    np.testing.assert_allclose(consistency(contexts, gamma), expected, atol=1e-6)


@pytest.mark.parametrize(("share", "slack"), [(0.05, 0.004), (0.2, 0.01)])
def test_the_threshold_is_exceeded_by_its_share_of_pairs_of_different_types(rng, share, slack):
    contexts = contexts_of(corpus(rng, rows=4000, types=40), rng)
    encoded, kinds = contexts.encode(slice(None)), contexts.type_Q
    differ = kinds[:, None] != kinds[None, :]
    gamma = contexts.similarity_threshold(share, rng)
    assert ((encoded @ encoded.T)[differ] >= gamma).mean() == pytest.approx(share, abs=slack)


def test_a_sample_of_others_is_close_to_all_and_never_counts_itself(rng):
    contexts = contexts_of(corpus(rng, rows=3000, types=1), rng, vector_VH=np.ones((1, 4), np.float32))
    assert consistency(contexts, 0.99, 100).min() == 1.0
    contexts = contexts_of(corpus(rng, rows=6000, types=5), rng)
    every, sampled = consistency(contexts, 0.3), consistency(contexts, 0.3, 400)
    assert np.abs(every - sampled).max() < 0.12
    assert np.abs(every - sampled).mean() < 0.03


def test_large_types_are_encoded_in_parts_with_the_same_result(rng, monkeypatch):
    contexts = contexts_of(corpus(rng, rows=2000, types=4), rng, rng.random(2000) < 0.8)
    whole = consistency(contexts, 0.3, 200)
    monkeypatch.setattr(paper, "ENCODE_ROWS", 37)
    np.testing.assert_allclose(consistency(contexts, 0.3, 200), whole, atol=0.01)


def test_more_similar_ones_than_a_byte_can_count(rng):
    own = np.tile(unit(rng.standard_normal((1, 4), dtype=np.float32)), (2500, 1))
    assert (paper.similar_shares(own[:40], own, np.ones(40, bool), np.float32(0.5)) == 1).all()


def test_vectors_depend_on_the_id_alone(rng):
    few = type_vectors(np.array([3, 9]), rng=np.random.default_rng(1))
    many = type_vectors(np.array([1, 3, 5, 9, 400]), rng=np.random.default_rng(1))
    np.testing.assert_array_equal(few, many[[1, 3]])
    np.testing.assert_allclose(np.linalg.norm(few, axis=1), 1, rtol=1e-6)
    with pytest.raises(DataError, match="tokenizer"):
        type_vectors(np.array([3, 9]), rng=rng, embedding_VH=np.ones((9, 4)))


def test_prompts_beyond_the_limit_are_merged_into_units_of_equal_number():
    assert np.bincount(paper.units_of(60, 200, 0)).tolist() == [1] * 60
    assert np.bincount(paper.units_of(3 * 1024, 200, 0)).tolist() == [3] * 1024
    assert paper.units_of(1000, 10**6, 0).max() == 99
