"""What a run needs: what is trained is float32, whatever dtype the pair is loaded in."""

from __future__ import annotations

import dataclasses

from tiny import save_model, tiny_model

from rocktokens.models.requirements import needs_of
from rocktokens.models.settings import PairConfig
from rocktokens.sample.settings import RolloutConfig


def test_memory_to_distil_counts_float32_weights_gradients_and_moments(tmp_path):
    student, teacher = tiny_model(), tiny_model(seed=1, width=64)
    pair = PairConfig(
        student=save_model(tmp_path / "s", student), teacher=save_model(tmp_path / "t", teacher), dtype="bfloat16"
    )
    rollouts = RolloutConfig(batch_size=1, max_new_tokens=4)
    half, full = (needs_of(dataclasses.replace(pair, dtype=dtype), rollouts) for dtype in ("bfloat16", "float32"))
    own, theirs = (sum(p.numel() for p in model.parameters()) for model in (student, teacher))
    # Only the teacher is smaller in bfloat16 while the student trains; when nothing trains, both are.
    assert full.distill_bytes - half.distill_bytes == 2 * theirs
    assert full.score_bytes - half.score_bytes >= 2 * (own + theirs)
    assert half.distill_bytes >= 16 * own + 2 * theirs
