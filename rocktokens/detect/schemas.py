"""The tables that detection makes, as arrow schemas. A column that cannot be known is there, and empty."""

from __future__ import annotations

import pyarrow as pa

from rocktokens.detect.scores import DEFINITIONS

_NUMBER, _COUNT, _TEXT, _FLAG = pa.float64(), pa.int64(), pa.string(), pa.bool_()


def _bounded(*names: str) -> list[tuple[str, pa.DataType]]:
    """A value and the ends of its interval."""
    return [(name + end, _NUMBER) for name in names for end in ("", "_low", "_high")]


TYPES = pa.schema(
    [
        ("token_id", _COUNT),
        ("token", _TEXT),
        ("cluster", _TEXT),
        ("class", _TEXT),
        ("confirmed", _FLAG),
        ("p_costly", _NUMBER),
        ("p_stagnant", _NUMBER),
        *_bounded("fall"),
        ("prompts_needed", _NUMBER),
        ("count", _COUNT),
        ("count_all", _COUNT),
        ("num_prompts", _COUNT),
        ("rock_count", _COUNT),
        *((name, _NUMBER) for name in ("loss_pre", "loss_post")),
        *((name, _NUMBER) for name in ("teacher_entropy", "student_entropy", "student_entropy_pre")),
        *_bounded("r", "ccr", "excess"),
        *((name, _NUMBER) for name in ("r_ctx", "excess_p", "excess_rank_p", "persistent_share", "rho", "grad_share")),
        *((f"rank_{name}", _COUNT) for name in DEFINITIONS),
        *((f"in_{name}", _FLAG) for name in DEFINITIONS),
    ]
)

SWEEP = pa.schema(
    [
        ("definition", _TEXT),
        ("k", _COUNT),
        ("num_rocks", _COUNT),
        *((name, _NUMBER) for name in ("stability", "stability_low", "coverage", "chance")),
    ]
)

SENSITIVITY = pa.schema(
    [
        ("parameter", _TEXT),
        ("step", _COUNT),
        ("value", _NUMBER),
        ("definition", _TEXT),
        ("k", _COUNT),
        ("num_rocks", _COUNT),
        *((name, _NUMBER) for name in ("jaccard", "share_positions", "share_loss", "enrichment")),
    ]
)

PERSISTENCE = pa.schema(
    [
        ("group", _TEXT),
        ("arm", _TEXT),
        ("step", _COUNT),
        ("num_types", _COUNT),
        *_bounded("before", "after", "change"),
        *((name, _NUMBER) for name in ("type_before", "type_after", "share_fallen")),
        *((f"change_quartiles_{end}", _NUMBER) for end in ("q25", "q50", "q75")),
        ("p_value", _NUMBER),
    ]
)

FOOTPRINTS = pa.schema(
    [
        ("name", _TEXT),
        ("num_types", _COUNT),
        ("share_types", _NUMBER),
        *_bounded("share_positions", "share_positions_median", "share_loss", "share_grad", "enrichment", "mean_loss"),
    ]
)

CLUSTERS = pa.schema(
    [
        ("cluster", _TEXT),
        ("num_types", _COUNT),
        *((name, _NUMBER) for name in ("share_positions", "share_loss", "enrichment")),
    ]
)

POSITIONS = pa.schema(
    [
        ("prompt_id", _TEXT),
        ("rollout_id", _TEXT),
        ("position", _COUNT),
        ("token_id", _COUNT),
        ("token", _TEXT),
        *((name, _NUMBER) for name in ("loss_pre", "loss_post", "share_loss")),
        ("before", _TEXT),
        ("after", _TEXT),
    ]
)
