"""The tables of a run: names, columns, types, and what every column means. Artefacts carry this version."""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1

METRICS = {
    "kl": "KL(student || teacher) over the full shared vocabulary, nats, >= 0",
    "log_ratio": "log p_student - log p_teacher at the sampled token, nats; unbiased for kl, may be negative",
    "student_logprob": "student's log-probability of the token predicted at this position, nats",
    "teacher_logprob": "teacher's log-probability of the same token on the same prefix, nats",
    "student_entropy": "entropy of the student's distribution, nats",
    "teacher_entropy": "entropy of the teacher's distribution, nats",
    "grad_norm": "Euclidean norm of the gradient of kl in the student's logits",
}

# Definition of a rock → the column of `types` that ranks by it.
RANKED_BY = {"burden": "r", "context": "r_ctx", "excess": "excess_low"}

ROLLOUTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("rollout_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("answer", pa.string()),
        ("correct", pa.bool_()),
        ("truncated", pa.bool_()),
        ("seed", pa.int64()),
    ]
)

OCCURRENCES = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("rollout_id", pa.string()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        *((name, pa.float32()) for name in METRICS),
        ("is_eos", pa.bool_()),
    ]
)

TOP_TOKENS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("rollout_id", pa.string()),
        ("position", pa.int32()),
        ("student_top_ids", pa.list_(pa.int32())),
        ("student_top_logprobs", pa.list_(pa.float32())),
        ("teacher_top_ids", pa.list_(pa.int32())),
        ("teacher_top_logprobs", pa.list_(pa.float32())),
    ]
)
