"""Context consistency against a slow oracle, and what it must do at the edges."""

import numpy as np
import oracles_detect as oracle
import pytest

from rocktokens.detect.context import Contexts, encode_windows, type_vectors
from rocktokens.detect.occurrences import Occurrences
from rocktokens.errors import DataError


def corpus(rng, rows=400, types=6, length=20):
    return {
        "rollout_id": np.repeat(np.arange(rows // length), length),
        "position": np.tile(np.arange(length), rows // length),
        "token_id": rng.integers(0, types, rows),
        "loss": rng.exponential(size=rows),
    }


def vectors_of(occurrences, rng, dims=8):
    return type_vectors(occurrences.token_ids_V, dims=dims, rng=rng)


@pytest.mark.parametrize("window", [1, 4])
def test_equals_the_oracle(rng, window):
    columns = corpus(rng)
    keep = rng.random(400) < 0.9  # positions are missing: distances must be those of positions
    columns = {name: column[keep] for name, column in columns.items()}
    occurrences = Occurrences.from_table(columns)
    vector_VH = vectors_of(occurrences, rng)
    persistent_N = columns["loss"] > 0.7
    found = Contexts(occurrences, persistent_N, vector_VH, window).consistency([0.2, 0.6], 10_000, rng)
    vectors = dict(zip(occurrences.token_ids_V.tolist(), vector_VH))
    for g, gamma in enumerate([0.2, 0.6]):
        expected = oracle.consistency(
            columns["rollout_id"], columns["position"], columns["token_id"], persistent_N, vectors, window, gamma
        )
        np.testing.assert_allclose(found[g], expected, atol=1e-6)


def test_windows_end_with_the_rollout_and_leave_the_centre_out():
    columns = {
        "rollout_id": [0, 0, 0, 1, 1],
        "position": [0, 1, 2, 0, 1],
        "token_id": [0, 1, 2, 3, 4],
        "loss": [1.0] * 5,
    }
    occurrences = Occurrences.from_table(columns)
    found = encode_windows(occurrences, np.arange(5), np.eye(5, dtype=np.float32), 4)
    np.testing.assert_allclose(found[0] / found[0].max(), [0, 1, 0.5, 0, 0])
    np.testing.assert_allclose(found[1], np.array([1, 0, 1, 0, 0]) / np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(found[3], [0, 0, 0, 0, 1])


def test_same_surroundings_are_consistent_and_other_ones_are_not(rng):
    rollouts, length = 40, 9
    token = rng.integers(10, 500, (rollouts, length))
    token[:20, :] = np.arange(100, 109)
    token[:, 4] = 1
    columns = {
        "rollout_id": np.repeat(np.arange(rollouts), length),
        "position": np.tile(np.arange(length), rollouts),
        "token_id": token.ravel(),
        "loss": np.ones(rollouts * length),
    }
    occurrences = Occurrences.from_table(columns)
    vector_VH = type_vectors(occurrences.token_ids_V, dims=64, rng=rng)
    contexts = Contexts(occurrences, token.ravel() == 1, vector_VH, 4)
    rho = contexts.consistency([0.9], 2048, rng)[0].reshape(rollouts, length)
    np.testing.assert_allclose(rho[:20, 4], 19 / 39, rtol=1e-6)
    assert (rho[20:, 4] == 0).all()
    assert (np.delete(rho, 4, axis=1) == 0).all()


def test_one_alone_has_none(rng):
    columns = corpus(rng)
    occurrences = Occurrences.from_table(columns)
    only = np.zeros(400, bool)
    only[7] = True
    contexts = Contexts(occurrences, only, vectors_of(occurrences, rng), 4)
    assert contexts.consistency([-1.0], 2048, rng).max() == 0
    assert contexts.similarity_thresholds([0.05], rng) == [1.0]


def test_a_rollout_of_one_token_has_no_context(rng):
    columns = {
        "rollout_id": np.arange(30),
        "position": np.zeros(30, int),
        "token_id": np.zeros(30, int),
        "loss": np.ones(30),
    }
    occurrences = Occurrences.from_table(columns)
    contexts = Contexts(occurrences, np.ones(30, bool), vectors_of(occurrences, rng), 4)
    assert contexts.consistency([0.1], 2048, rng).max() == 0


def test_threshold_is_exceeded_by_its_share_of_pairs_of_different_types(rng):
    occurrences = Occurrences.from_table(corpus(rng, rows=4000, types=40))
    contexts = Contexts(occurrences, np.ones(4000, bool), vectors_of(occurrences, rng, 32), 4)
    few, some = contexts.similarity_thresholds([0.05, 0.2], rng)
    assert few > some
    encoded, kinds = contexts.encode(slice(None)), contexts.type_Q
    cosine = encoded @ encoded.T
    differ = kinds[:, None] != kinds[None, :]
    assert (cosine[differ] >= few).mean() == pytest.approx(0.05, abs=0.004)
    assert (cosine[differ] >= some).mean() == pytest.approx(0.2, abs=0.01)


def test_a_sample_of_others_is_close_to_all_and_never_counts_itself(rng):
    occurrences = Occurrences.from_table(corpus(rng, rows=3000, types=1))
    contexts = Contexts(occurrences, np.ones(3000, bool), np.ones((1, 4), np.float32), 4)
    assert contexts.consistency([0.99], 100, rng).min() == 1.0
    occurrences = Occurrences.from_table(corpus(rng, rows=6000, types=5))
    contexts = Contexts(occurrences, np.ones(6000, bool), vectors_of(occurrences, rng), 4)
    every = contexts.consistency([0.5], 10_000, rng)[0]
    sampled = contexts.consistency([0.5], 400, rng)[0]
    assert np.abs(every - sampled).max() < 0.12
    assert np.abs(every - sampled).mean() < 0.03


def test_large_types_are_encoded_in_parts_with_the_same_result(rng, monkeypatch):
    occurrences = Occurrences.from_table(corpus(rng, rows=2000, types=4))
    contexts = Contexts(occurrences, rng.random(2000) < 0.8, vectors_of(occurrences, rng), 4)
    whole = contexts.consistency([0.3, 0.6], 200, np.random.default_rng(1))
    monkeypatch.setattr("rocktokens.detect.context.ENCODE_ROWS", 37)
    np.testing.assert_allclose(contexts.consistency([0.3, 0.6], 200, np.random.default_rng(1)), whole, atol=0.01)


def test_vectors_depend_on_the_id_alone(rng):
    few = type_vectors(np.array([3, 9]), dims=8, rng=np.random.default_rng(1))
    many = type_vectors(np.array([1, 3, 5, 9, 400]), dims=8, rng=np.random.default_rng(1))
    np.testing.assert_array_equal(few, many[[1, 3]])
    np.testing.assert_allclose(np.linalg.norm(few, axis=1), 1, rtol=1e-6)


def test_an_embedding_of_another_tokenizer_is_refused(rng):
    with pytest.raises(DataError, match="another tokenizer"):
        type_vectors(np.array([3, 9]), dims=8, rng=rng, embedding_VH=np.ones((9, 4)))
