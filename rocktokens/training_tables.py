"""The tables that training and the comparison of regimes write. Use them by way of `runs/schema.py`, which has all."""

from __future__ import annotations

from rocktokens.table_columns import (
    BOOL,
    FLOAT,
    INT,
    INT32,
    PROMPT,
    ROLLOUT_COLUMNS,
    SHARE_LOSS,
    STR,
    TOKEN_ID,
    Column,
    Table,
    by_stage,
    columns,
    interval,
)

# Stages of a training step, in the order of the step; those in FLOP_STAGES have their operations counted.
STEP_STAGES = ("rollout", "select", "teacher", "student", "head", "optimiser", "telemetry", "evaluate", "checkpoint")
TRAINING_STAGES = STEP_STAGES[:6]
FLOP_STAGES = STEP_STAGES[:5]

# Columns of `training` that `compare` repeats.
COPIED: tuple[str, ...] = (
    "loss",
    "loss_rocks",
    "loss_rest",
    "kept_share",
    "weight_share",
    "tokens",
    "rollouts",
    "learning_rate",
)
COPIED += ("scored", "changed_share", "changed_loss_share", "end_dropped_share", "mean_length", "truncated_share")

# Alarms of the trainer → what they are for.
ALARMS = {
    "length": "exploding lengths",
    "entropy": "a collapsed entropy",
    "floor": "a loss below rounding",
    "invalid": "divergences that are not numbers",
}

REGIME = Column("regime", STR, "Name of the training regime.")
SEED = Column("seed", INT, "Number of the training seed.")
OUTCOME_COLUMNS = columns(
    PROMPT,
    ("correct", FLOAT, "Share of right rollouts."),
    ("rollouts", INT32, "Rollouts sampled."),
    ("length", FLOAT, "Mean length of the rollouts, tokens; empty where it was not recorded."),
    ("truncated", FLOAT, "Share of the rollouts that were cut at the length limit; empty likewise."),
)
TRAINING_COLUMNS = columns(
    ("step", INT, "Optimiser step, from 1; 0 is the evaluation before the first."),
    ("loss", FLOAT, "What was minimised: sum of weight x divergence over the denominator, nats; empty at step 0."),
    ("loss_rocks", FLOAT, "Mean divergence at rocks, nats; empty where not every position was measured."),
    ("loss_rest", FLOAT, "Mean divergence at all other positions, nats; empty likewise."),
    ("kept_share", FLOAT, "Share of response tokens with a weight above 0."),
    ("weight_share", FLOAT, "Mean weight of a response token."),
    ("ceiling", FLOAT, "Largest speed-up that dropping tokens could give: 1 / kept_share."),
    ("tokens", INT, "Response tokens of the step, all ranks."),
    ("prompt_tokens", INT, "Prompt tokens of the step."),
    ("scored", INT, "Response tokens that the teacher scored for the step's loss; empty in version 0.1."),
    ("changed_share", FLOAT, "Share of response tokens whose weight is not 1; empty in version 0.1."),
    ("changed_loss_share", FLOAT, "Share of the loss at those tokens; empty where not every position was measured."),
    ("end_dropped_share", FLOAT, "Share of end tokens with weight 0; empty where the step has none."),
    ("rollouts", INT, "Rollouts of the step."),
    ("invalid", INT, "Tokens whose divergence was not a number."),
    ("mean_length", FLOAT, "Mean length of the step's rollouts, in tokens that carry loss; empty in version 0.1."),
    ("truncated_share", FLOAT, "Share of the step's rollouts that do not end with an end token; empty in version 0.1."),
    ("entropy", FLOAT, "Mean entropy of the student at the tokens that were trained on, nats; empty in version 0.1."),
    ("rocks_online", INT, "Rocks that the monitor declares so far; empty between two log lines."),
    (
        Column(f"alarm_{name}", INT, f"1 where the alarm for {meaning} held after the step; else empty.")
        for name, meaning in ALARMS.items()
    ),
    ("learning_rate", FLOAT, "Learning rate of the step."),
    interval("accuracy", "Accuracy on held-out prompts after the step; empty where it was not evaluated."),
    ("seconds", FLOAT, "Wall-clock seconds of the step on the first rank, evaluation and checkpoint included."),
    ("seconds_processor", FLOAT, "Processor seconds of the first rank's process for training alone."),
    by_stage("seconds", STEP_STAGES, "Seconds of the step spent in the stage {}."),
    by_stage("flops", FLOP_STAGES, "Floating-point operations of the stage {}, from the models' shapes."),
)

TRAINING_TABLES: dict[str, Table] = {
    "training": Table(
        "distill",
        "one row per optimiser step",
        TRAINING_COLUMNS,
        more="Shadow selectors add `shadow_kept_NAME`, the share of tokens kept, and `overlap_A_B`, their overlap.",
    ),
    "off_policy": Table("distill", "one row per optimiser step of the off-policy stage", TRAINING_COLUMNS),
    "teacher_answers": Table("distill", "one row per rollout of the teacher for the off-policy stage", ROLLOUT_COLUMNS),
    "monitor": Table(
        "distill",
        "one row per token type seen while training, largest total loss first",
        columns(
            TOKEN_ID,
            ("count", INT, "Occurrences seen."),
            ("mean", FLOAT, "Mean loss, nats."),
            ("variance", FLOAT, "Variance of the loss."),
            ("early_mean", FLOAT, "Mean loss over the first steps, nats; NaN where the type was not seen then."),
            ("recent_mean", FLOAT, "Mean loss over the recent steps, nats; NaN where the type was not seen then."),
            ("recent_rows", FLOAT, "Effective number of recent occurrences."),
            ("loss_share", FLOAT, SHARE_LOSS),
            ("grad_norm", FLOAT, "Sum of gradient norms."),
        ),
    ),
    "updates": Table(
        "distill",
        "one row per token type of the output head, at the last kept step",
        columns(
            TOKEN_ID,
            ("grad_share", FLOAT, "Share of the squared gradient of the output head."),
            ("update_share", FLOAT, "Share of the squared update by Adam."),
            ("tied", BOOL, "Whether the head shares its weights with the input embeddings."),
        ),
    ),
    "compare": Table(
        "compare",
        "one row per optimiser step of a regime and seed; step 0 is the common start",
        columns(
            REGIME,
            SEED,
            ("step", INT, "Optimiser step; 0 is the common start."),
            interval("accuracy", "Accuracy on held-out prompts; empty where it was not evaluated."),
            ("heldout_loss_rocks", FLOAT, "Mean loss at rocks on rollouts common to all regimes; empty likewise."),
            ("heldout_loss_rest", FLOAT, "The same at all other positions; empty likewise."),
            ("heldout_length", FLOAT, "Mean length of the held-out rollouts; empty likewise."),
            ("heldout_truncated", FLOAT, "Share of them that were cut at the length limit; empty likewise."),
            ("tokens_total", INT, "Tokens sampled, and scored by the teacher, up to this step."),
            ("seconds", FLOAT, "Wall-clock seconds of training in this step, without evaluation and recording."),
            ("seconds_total", FLOAT, "The same, summed up to this step."),
            ("seconds_processor", FLOAT, "Processor seconds of training in this step."),
            ("seconds_processor_total", FLOAT, "The same, summed up to this step."),
            ("flops_total", FLOAT, "Floating-point operations up to this step."),
            *(column for column in TRAINING_COLUMNS if column.name in COPIED),
            by_stage("seconds", (*TRAINING_STAGES, "other"), "Seconds of the step spent in the stage {}."),
            by_stage("flops", FLOP_STAGES, "Floating-point operations of the stage {}."),
        ),
    ),
    "compare_problems": Table(
        "compare",
        "one row per held-out prompt at an evaluation of a regime and seed",
        columns(REGIME, SEED, ("step", INT, "Step of the evaluation."), OUTCOME_COLUMNS),
    ),
    "problems": Table(
        "compare",
        "one row per held-out prompt at one evaluation of one training",
        OUTCOME_COLUMNS,
        path="compare/REGIME/seed=N/problems/step=N.parquet",
    ),
    "losses": Table(
        "compare",
        "one row per prompt of the held-out rollouts that are common to all regimes, at one evaluation of one training",
        columns(
            PROMPT,
            ("rock_positions", INT, "Positions of its rollouts whose token is a rock."),
            ("rock_loss", FLOAT, "Summed loss there, nats."),
            ("rest_positions", INT, "All other positions of its rollouts."),
            ("rest_loss", FLOAT, "Summed loss there, nats."),
        ),
        path="compare/REGIME/seed=N/losses/step=N.parquet",
    ),
    "compare_summary": Table(
        "compare",
        "one row per regime; every value over seeds and prompts, changes and ratios against uniform",
        columns(
            REGIME,
            ("verdict", STR, "costs, gains, unchanged or undecided."),
            ("num_seeds", INT, "Trainings."),
            ("over_seeds", BOOL, "Whether intervals speak of seeds, too (three at least); else of prompts only."),
            ("num_problems", INT, "Held-out prompts."),
            interval("delta", "Change of the final accuracy."),
            interval("accuracy", "Final accuracy."),
            interval("change_same_seconds", "Change of accuracy at equal training seconds."),
            interval("accuracy_same_tokens", "Accuracy at equal tokens (sampled, and scored by the teacher)."),
            interval("change_same_tokens", "Its change."),
            interval("area_steps", "Mean accuracy over the steps."),
            interval("area_steps_change", "Its change."),
            interval("area_seconds", "Mean accuracy over the seconds."),
            interval("area_seconds_change", "Its change."),
            interval("seconds", "Training seconds."),
            interval("seconds_ratio", "Ratio of training seconds."),
            interval("step_ratio", "Ratio of seconds per step."),
            interval("loss_rocks", "Loss at rocks on common held-out rollouts, nats; empty where there are no rocks."),
            interval("loss_rest", "The same at all other positions, nats; empty likewise."),
            interval("loss_rocks_change", "Its change at rocks, paired by seed and prompt; empty for uniform."),
            interval("loss_rest_change", "Its change at all other positions; empty likewise."),
            interval("steps_to", "Steps until uniform's final accuracy less the margin; empty where not reached."),
            interval("seconds_to", "Training seconds until then; empty where not reached."),
            interval("flops_to", "Floating-point operations until then; empty where not reached."),
            interval("tokens_to", "Tokens sampled and scored until then; empty where not reached."),
            interval("length_ratio", "Ratio of the mean length of held-out rollouts at the end; empty before 0.2."),
            interval(
                "truncated_change", "Change of the share of them that were cut at the length limit; empty likewise."
            ),
            ("grew", BOOL, "Whether either grew beyond chance; empty where that is not known."),
            ("spent_ratio", FLOAT, "Ratio of tokens sampled and scored, after the same number of steps."),
            ("bite_tokens", FLOAT, "Share of the tokens with another weight, or not sampled at all; empty before 0.2."),
            (
                "bite_loss",
                FLOAT,
                "Share of the loss at sampled tokens with another weight; empty where it was not audited.",
            ),
            ("end_dropped", FLOAT, "Share of end tokens that carried no loss; empty where there was none."),
            ("share_reached", FLOAT, "Share of bootstrap resamples in which it was reached."),
            ("flops_ratio", FLOAT, "Ratio of floating-point operations."),
            ("kept_share", FLOAT, "Share of response tokens with a weight above 0."),
            ("tokens_ratio", FLOAT, "Ratio of sampled response tokens."),
            ("ceiling", FLOAT, "Largest speed-up that the dropped tokens could give."),
            by_stage("seconds", (*TRAINING_STAGES, "other"), "Seconds of the stage {}, mean over seeds."),
        ),
    ),
    "compare_savings": Table(
        "compare",
        "one row per regime that samples less, against the best control that simply samples less, too",
        columns(
            REGIME,
            ("control", STR, "The control of the highest accuracy at equal tokens."),
            ("answer", STR, "yes where the interval of the difference lies above 0, else no."),
            interval("over_control", "Accuracy minus the control's at equal tokens."),
        ),
    ),
    "compare_overlap": Table(
        "compare",
        "one row per pair of selectors: what they would keep of uniform's rollouts, mean over audits and seeds",
        columns(
            ("first", STR, "A selector."),
            ("second", STR, "Another one."),
            ("overlap", FLOAT, "Overlap of what they keep: sum of the smaller over sum of the larger weights."),
            ("kept_first", FLOAT, "Share of tokens that the first keeps."),
            ("kept_second", FLOAT, "Share of tokens that the second keeps."),
        ),
    ),
}
