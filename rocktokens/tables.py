"""Every table of a run: what one row is, and of every column its type and one sentence. Artefacts carry this version.

To add a column, add its line here: `Run.write` puts it into its place and gives it its type, and
`python -m rocktokens.tables > docs/reference/schema.md` documents it. A test says when that page is stale, another
when a stage writes a column that is not described here.
"""

from __future__ import annotations

from rocktokens.table_columns import (
    BOOL,
    ENRICHMENT,
    FLOAT,
    FLOAT32,
    IDS,
    INT,
    INT32,
    LOGPROBS,
    PROMPT,
    ROLLOUT,
    ROLLOUT_COLUMNS,
    SHARE_LOSS,
    SHARE_POSITIONS,
    STR,
    TOKEN_ID,
    Column,
    Table,
    as_markdown,
    columns,
    interval,
)
from rocktokens.training_tables import COPIED, FLOP_STAGES, STEP_STAGES, TRAINING_STAGES, TRAINING_TABLES

__all__ = ["COPIED", "FLOP_STAGES", "METRICS", "OCCURRENCES", "RANKED_BY", "ROLLOUTS", "SCHEMA_VERSION", "STEP_STAGES"]
__all__ += ["TABLES", "TOP_TOKENS", "TRAINING_STAGES", "Column", "Table", "table_of"]

SCHEMA_VERSION = 1

# Definition of a rock → the column of `types` that ranks by it.
RANKED_BY = {"certified": "r", "burden": "r", "context": "r_ctx", "excess": "excess_low"}

METRICS = {
    "kl": "KL(student || teacher) over the full shared vocabulary, nats, >= 0",
    "log_ratio": "log p_student - log p_teacher at the sampled token, nats; unbiased for kl, may be negative",
    "student_logprob": "student's log-probability of the token predicted at this position, nats",
    "teacher_logprob": "teacher's log-probability of the same token on the same prefix, nats",
    "student_entropy": "entropy of the student's distribution, nats",
    "teacher_entropy": "entropy of the teacher's distribution, nats",
    "grad_norm": "Euclidean norm of the gradient of kl in the student's logits",
}


OCCURRENCE_COLUMNS = columns(
    PROMPT,
    ROLLOUT,
    ("position", INT32, "Position within the rollout, from 0."),
    ("token_id", INT32, "Token predicted at this position."),
    (Column(name, FLOAT32, f"{meaning[0].upper()}{meaning[1:]}.") for name, meaning in METRICS.items()),
    ("is_eos", BOOL, "Whether the token ends the sequence."),
)
RESUMED_COLUMNS = columns(
    ("resumed_at", INT32, "Position from which the rollout was generated anew; empty for the baseline."),
    ("correct", BOOL, "Whether the resumed rollout's answer is right."),
    ("num_tokens", INT32, "Tokens generated."),
    ("token_ids", IDS, "The whole rollout, copied part included; empty unless the run keeps them."),
)
TABLES: dict[str, Table] = {
    "rollouts": Table("sample", "one row per sampled rollout", ROLLOUT_COLUMNS),
    "occurrences": Table(
        "score",
        "one row per response position, scored under checkpoint N",
        OCCURRENCE_COLUMNS,
        path="occurrences/step=N/part-*.parquet",
    ),
    "top_tokens": Table(
        "score",
        "one row per position of a rollout that the report shows, under checkpoint N",
        columns(
            PROMPT,
            ROLLOUT,
            ("position", INT32, "Position within the rollout, from 0."),
            ("student_top_ids", IDS, "The student's most probable tokens, most probable first."),
            ("student_top_logprobs", LOGPROBS, "Their log-probabilities, nats."),
            ("teacher_top_ids", IDS, "The teacher's most probable tokens, most probable first."),
            ("teacher_top_logprobs", LOGPROBS, "Their log-probabilities, nats."),
        ),
        path="top_tokens/step=N/part-*.parquet",
    ),
    "imported": Table(
        "import",
        "one row per rollout of another trainer's dump",
        columns(
            PROMPT,
            ROLLOUT,
            ("step", INT, "The trainer's step that the rollout was sampled for."),
            ("source", STR, "File and place in it."),
        ),
    ),
    "engine": Table(
        "import",
        "one row per token of a dump that has log-probabilities of the engine and of the trainer",
        columns(
            PROMPT,
            ROLLOUT,
            ("position", INT32, "Position within the rollout, from 0."),
            ("engine_logprob", FLOAT32, "Log-probability of the token by the engine that sampled it, nats."),
            ("student_logprob", FLOAT32, "The same by the trainer's forward pass, nats."),
        ),
    ),
    "telemetry": Table(
        "distill",
        "one row per response position of training step N's own rollouts",
        OCCURRENCE_COLUMNS,
        path="telemetry/step=N/part-*.parquet",
    ),
    "types": Table(
        "detect",
        "one row per token type observed, rocks of the chosen definition first, then by burden",
        columns(
            TOKEN_ID,
            ("token", STR, "Text of the token."),
            ("cluster", STR, "Kind of token: digits, punctuation, content words and so on."),
            (
                "class",
                STR,
                "rock, learning, learning, levelled off, or unclear; costly where the loss before OPD is not known; "
                "empty for a type that is not costly beyond doubt.",
            ),
            ("confirmed", BOOL, "Whether the other half of the prompts says the same of it; empty without a class."),
            (
                "p_costly",
                FLOAT,
                "p of not costly: the larger of two tests on the half that chooses; empty below 5 prompts.",
            ),
            ("p_stagnant", FLOAT, "p of a fall by 1 − κ or more, on the half that chooses; empty where not tested."),
            interval("fall", "Share of its loss that the type lost between the first and the last checkpoint."),
            ("prompts_needed", FLOAT, "For an unclear type: prompts in all that would settle it, about."),
            ("count", INT, "Occurrences in the half of the prompts that measures."),
            ("count_all", INT, "Occurrences in all prompts."),
            ("num_prompts", INT, "Prompts in which the type occurs, of all."),
            ("rock_count", INT, "Persistent occurrences in recurring contexts."),
            ("loss_pre", FLOAT, "Mean loss at the first checkpoint, nats; empty where only one was scored."),
            ("loss_post", FLOAT, "Mean loss at the last checkpoint, nats; empty where the half has no occurrence."),
            ("teacher_entropy", FLOAT, "Mean entropy of the teacher, nats; empty where not recorded."),
            ("student_entropy", FLOAT, "Mean entropy of the student at the last checkpoint; empty where not recorded."),
            ("student_entropy_pre", FLOAT, "The same at the first checkpoint; empty where not recorded."),
            interval("r", "Burden, the Rock Score: total loss of the type, nats."),
            interval("ccr", "Share of the type's occurrences that are rock occurrences."),
            interval("excess", "Total loss above what as many average occurrences would cost, nats."),
            ("r_ctx", FLOAT, "Burden times ccr."),
            ("excess_p", FLOAT, "Adjusted p of an excess above 0, on the half that chooses."),
            ("excess_rank_p", FLOAT, "The same for ranks within prompts; shown beside it, never decisive."),
            ("persistent_share", FLOAT, "Share of occurrences with a high loss before and after; empty if none."),
            ("rho", FLOAT, "Mean share of similar contexts among the persistent occurrences; empty if none."),
            ("grad_share", FLOAT, "Share of the total gradient norm; empty where norms were not recorded."),
            *(
                column
                for name in RANKED_BY
                for column in (
                    Column(f"rank_{name}", INT, f"Rank by the definition {name}; empty where not eligible."),
                    Column(f"in_{name}", BOOL, f"Whether the type is a rock by the definition {name}."),
                )
            ),
        ),
    ),
    "footprints": Table(
        "detect",
        "one row per definition of a rock, and per control of the chosen one",
        columns(
            ("name", STR, "Definition, or control and what it is matched on."),
            ("num_types", INT, "Token types in the set."),
            ("share_types", FLOAT, "Share of all token types observed."),
            interval("share_positions", SHARE_POSITIONS),
            interval("share_positions_median", "Median over rollouts of the share of positions."),
            interval("share_loss", SHARE_LOSS),
            interval("share_grad", "Share of the total gradient norm; empty where norms were not recorded."),
            interval("enrichment", ENRICHMENT),
            interval("mean_loss", "Mean loss of an occurrence, nats."),
        ),
    ),
    "clusters": Table(
        "detect",
        "one row per kind of token among the rocks",
        columns(
            ("cluster", STR, "Kind of token."),
            ("num_types", INT, "Rocks of this kind."),
            ("share_positions", FLOAT, SHARE_POSITIONS),
            ("share_loss", FLOAT, SHARE_LOSS),
            ("enrichment", FLOAT, ENRICHMENT),
        ),
    ),
    "sweep": Table(
        "detect",
        "one row per definition and K",
        columns(
            ("definition", STR, "Definition of a rock."),
            ("k", INT, "Size of the set asked for."),
            ("num_rocks", INT, "Size of the set; less than K where fewer types are eligible."),
            ("stability", FLOAT, "Mean Jaccard index of the top K of 10 to 80 % of the prompts with that of all."),
            ("stability_low", FLOAT, "The same at 10 % of the prompts alone."),
            ("coverage", FLOAT, SHARE_LOSS),
            ("chance", FLOAT, "Jaccard index of two random sets of this size, to compare stability with."),
        ),
    ),
    "sensitivity": Table(
        "detect",
        "one row per threshold, step and definition",
        columns(
            ("parameter", STR, "The threshold that was moved; base for none."),
            ("step", INT, "One step down (−1), up (1), or none (0)."),
            ("value", FLOAT, "Value of the threshold."),
            ("definition", STR, "Definition of a rock."),
            ("k", INT, "Size of the set asked for."),
            ("num_rocks", INT, "Size of the set."),
            ("jaccard", FLOAT, "Jaccard index with the set at the base thresholds."),
            ("share_positions", FLOAT, SHARE_POSITIONS),
            ("share_loss", FLOAT, SHARE_LOSS),
            ("enrichment", FLOAT, ENRICHMENT + " Empty for an empty set."),
        ),
    ),
    "persistence": Table(
        "detect",
        "one row per group of token types and arm; no rows where only one checkpoint was scored",
        columns(
            ("group", STR, "rocks, rare high-loss, or random others."),
            (
                "arm",
                STR,
                "checkpoint: same texts, later checkpoint; aa_selected, aa_fresh: same checkpoint, other texts.",
            ),
            ("step", INT, "The later checkpoint; empty in A/A arms."),
            ("num_types", INT, "Token types in the group."),
            interval("before", "Mean loss over occurrences before, nats."),
            interval("after", "Mean loss over occurrences after, nats."),
            interval("change", "After minus before, nats."),
            ("type_before", FLOAT, "Mean over types of their mean loss before, nats."),
            ("type_after", FLOAT, "Mean over types of their mean loss after, nats."),
            ("share_fallen", FLOAT, "Share of types whose mean loss fell."),
            ("change_quartiles_q25", FLOAT, "First quartile of the types' change, nats."),
            ("change_quartiles_q50", FLOAT, "Median of the types' change, nats."),
            ("change_quartiles_q75", FLOAT, "Third quartile of the types' change, nats."),
            ("p_value", FLOAT, "Wilcoxon signed-rank test over types."),
        ),
    ),
    "positions": Table(
        "detect",
        "one row per position, the costliest first",
        columns(
            PROMPT,
            ROLLOUT,
            ("position", INT, "Position within the rollout, from 0."),
            TOKEN_ID,
            ("token", STR, "Text of the token."),
            ("loss_pre", FLOAT, "Loss at the first checkpoint, nats; empty where only one was scored."),
            ("loss_post", FLOAT, "Loss at the last checkpoint, nats."),
            ("share_loss", FLOAT, "Share of the total loss."),
            ("before", STR, "Text of the tokens before it."),
            ("after", STR, "Text of the tokens after it."),
            ("student_top_ids", IDS, "The student's most probable tokens, most probable first; empty if not kept."),
            ("student_top_logprobs", LOGPROBS, "Their log-probabilities, nats."),
            ("teacher_top_ids", IDS, "The teacher's most probable tokens: what it wanted instead; empty if not kept."),
            ("teacher_top_logprobs", LOGPROBS, "Their log-probabilities, nats."),
        ),
    ),
    "geometry": Table(
        "geometry",
        "one row per token type with a gradient of its own",
        columns(
            TOKEN_ID,
            ("group", STR, "rocks, rare high-loss, random others, or other."),
            ("count", INT, "Occurrences."),
            ("mean_grad_norm", FLOAT, "Norm of the mean gradient in logit space."),
            ("cos_balanced", FLOAT, "Cosine with the sum of the types' mean gradients."),
            ("cos_global", FLOAT, "Cosine with the sum of the gradients of all occurrences."),
            ("cos_others", FLOAT, "Cosine with the sum of the other types' mean gradients; empty where that is 0."),
            ("contrib", FLOAT, "count x mean_grad_norm x cos_balanced."),
            ("grad_share", FLOAT, "Share of the total gradient norm."),
            ("position_share", FLOAT, SHARE_POSITIONS),
        ),
    ),
    "knockouts": Table(
        "knockout",
        "one row per resumed rollout; a rollout without a row for a set was copied whole",
        columns(
            PROMPT,
            ROLLOUT,
            ("arm", STR, "baseline, knockout (the set banned) or placebo (nothing banned)."),
            ("set_id", STR, "The banned set; the empty string for the baseline."),
            ("repeat", INT32, "Number of the repeated continuation, from 0."),
            RESUMED_COLUMNS,
        ),
    ),
    "baseline": Table("knockout", "one row per rollout that knock-outs are resumed from", ROLLOUT_COLUMNS),
    "census": Table(
        "knockout",
        "one row per banned set",
        columns(
            ("set_id", STR, "Identifier of the set."),
            ("role", STR, "candidate or control."),
            ("kind", STR, "token, window or family."),
            ("token_id", INT32, "The token type that the set belongs to."),
            ("token", STR, "Its text."),
            ("members", IDS, "Token ids banned together."),
            ("control_of", STR, "The set that a control is as frequent as; empty for candidates."),
            ("verdict", STR, "Strong Pillar, Strong Stumbling Block, Proven Neutral, Undecided or Never Used."),
            ("num_used", INT, "Baseline rollouts that use the set."),
            ("used_share", FLOAT, "Share of the baseline rollouts looked at that use it."),
            ("num_problems", INT, "Prompts that the set was tested on."),
            ("num_changed", INT, "Prompts whose outcome the ban changed."),
            interval("delta", "Change of accuracy under the ban; the interval is the one that the verdict inverts."),
            ("outer_low", FLOAT, "Lower end of the 1 − α interval of the test of no effect."),
            ("outer_high", FLOAT, "Upper end of the 1 − α interval of the test of no effect."),
            ("inner_low", FLOAT, "Lower end of the 1 − 2α interval of the equivalence test."),
            ("inner_high", FLOAT, "Upper end of the 1 − 2α interval of the equivalence test."),
            ("p", FLOAT, "p value of no effect, divided by the share of α of its look."),
            ("p_bonferroni", FLOAT, "p after Bonferroni over candidates; empty for controls and unused sets."),
            ("p_bh", FLOAT, "p after Benjamini–Hochberg over candidates; empty likewise."),
            ("p_neutral", FLOAT, "p of the equivalence test."),
            ("sd", FLOAT, "Standard deviation of the change per prompt."),
            ("detectable", FLOAT, "Smallest effect that these prompts show at the power asked for."),
            ("placebo_delta", FLOAT, "Mean change when nothing is banned; empty without placebos."),
            (
                "placebo_floor",
                FLOAT,
                "Noise floor: what two identical arms differ by on as many prompts; empty likewise.",
            ),
            ("round", INT, "The look at which the verdict was reached."),
            ("alpha_share", FLOAT, "Share of α that this look could spend."),
            ("more_problems", INT, "Further prompts that would decide an undecided set; else 0."),
            ("num_resumed", INT, "Rollouts resumed."),
            ("num_tokens", INT, "Tokens generated."),
            ("accuracy_with", FLOAT, "Accuracy without a ban, on the prompts that the set was tested on."),
            ("accuracy_without", FLOAT, "Accuracy with the set banned, on the same prompts."),
            *((f"bh_{level}", BOOL, f"Whether p_bh is at most 0.{level}.") for level in ("05", "10", "20")),
        ),
    ),
    "grafts": Table(
        "graft",
        "one row per set of tokens that the teacher draws in the student's place",
        columns(
            (
                "arm",
                STR,
                "rocks, or candidates without any rock; placebo, control, rest, all, skippable, or cluster NAME.",
            ),
            ("num_types", INT, "Token types in the set."),
            ("members", IDS, "Token ids of rocks, candidates and skippable; empty for the other arms."),
            ("share_positions", FLOAT, "Share of the baseline's positions that are drawn again."),
            ("loss_share", FLOAT, "Share of the total loss; empty for placebo and control."),
            ("grad_share", FLOAT, "Share of the total gradient norm; empty for placebo and control."),
            interval("accuracy", "Accuracy under the graft; of `all`, the teacher's own."),
            interval("gain", "Accuracy under the graft minus without, paired by prompt."),
            ("num_problems", INT, "Prompts."),
            ("num_resumed", INT, "Rollouts resumed."),
            ("num_rollouts", INT, "Rollouts in all."),
            ("num_tokens", INT, "Tokens generated."),
        ),
    ),
    "graft_rollouts": Table(
        "graft",
        "one row per resumed rollout; a rollout without a row for an arm was copied whole",
        columns(PROMPT, ROLLOUT, ("arm", STR, "As in grafts."), RESUMED_COLUMNS),
    ),
    **TRAINING_TABLES,
}

ROLLOUTS, OCCURRENCES, TOP_TOKENS = (TABLES[name].schema for name in ("rollouts", "occurrences", "top_tokens"))


def table_of(name: str) -> Table | None:
    """The table that a file below a run belongs to; None for parts and for tables of other people.

    Args:
        name: Path below the run directory without `.parquet`, such as `types` or `problems/step=10`.
    """
    if name == "compare/contexts":
        return TABLES["rollouts"]
    return TABLES.get(name.split("/")[0])


if __name__ == "__main__":
    print(as_markdown(TABLES), end="")
