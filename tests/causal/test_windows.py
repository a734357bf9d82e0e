"""Window sets by SQL over a run's occurrences, against one type at a time by the selector's own window."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from rocktokens.causal.bans import WINDOW_SHARE, window_sets
from rocktokens.run import Run
from rocktokens.select.interface import high_divergence_window
from rocktokens.tables import OCCURRENCES


def run_of(path, rollout_N, token_N, loss_N, rng=None):
    """A run with these occurrences; given a generator, rollouts are torn apart over several files."""
    number = len(token_N)
    known = {
        "rollout_id": [f"p{rollout:03d}#0" for rollout in rollout_N],
        "prompt_id": [f"p{rollout:03d}" for rollout in rollout_N],
        "position": np.arange(number) - np.searchsorted(rollout_N, rollout_N),
        "token_id": token_N,
        "kl": loss_N,
    }
    empty = {name: np.zeros(number) for name in OCCURRENCES.names if name not in known}
    table = pa.table({**known, **empty}).select(OCCURRENCES.names).cast(OCCURRENCES)
    run = Run.create(path, {})
    for part, rows in enumerate(np.array_split(np.arange(number) if rng is None else rng.permutation(number), 4)):
        run.write_part(3, table.take(rows), part=str(part))
    return run


def window_members(token_id, candidates, rollout_N, token_N, loss_N, *, tau, width):
    """The definition, one type at a time, by code that the training selectors use."""
    hit_N = torch.from_numpy(token_N == token_id)
    loss_N = torch.from_numpy(loss_N.astype(np.float32).astype(float))
    inside_N = high_divergence_window(hit_N, loss_N, torch.from_numpy(rollout_N), width=width, tau=tau)
    ids, counts = np.unique(token_N[(inside_N & ~hit_N).numpy()], return_counts=True)
    often = set(ids[counts >= WINDOW_SHARE * int(hit_N.sum())].tolist())
    return tuple(sorted({token_id, *(often & set(candidates))}))


@pytest.mark.parametrize("seed", range(4))
def test_sets_are_those_of_the_definition(seed, tmp_path):
    """Losses that come in runs, some of them missing."""
    rng = np.random.default_rng(seed)
    rollout_N = np.repeat(np.arange(40), rng.integers(1, 30, 40))
    level_N = np.repeat(rng.exponential(size=len(rollout_N) // 3 + 1), 3)[: len(rollout_N)]
    loss_N = np.where(rng.random(len(rollout_N)) < 0.02, np.nan, level_N * rng.random(len(rollout_N)))
    occurrences = rollout_N, rng.integers(0, 30, len(rollout_N)), loss_N
    run = run_of(tmp_path / "run", *occurrences, rng)
    candidates = rng.permutation(34)[:25].tolist()  # some are not candidates, some never occur
    tokens = candidates[: int(rng.integers(1, 25))]
    for tau, width in ((0.1, 1), (0.3, 4), (0.6, 5)):
        found = window_sets(run, tokens, candidates, tau=tau, width=width)
        assert found == {t: window_members(t, candidates, *occurrences, tau=tau, width=width) for t in tokens}
        assert any(len(own) > 1 for own in found.values())
