"""Every table of a run: what one row is, and of every column its type and one sentence.

To add a column, add its line to TEXT: `Run.write` puts it in its place and gives it its type, and
`python -m rocktokens.tables docs/reference/schema.md` documents it. A test says when that page is stale, another when a
stage writes a column that is not described here.

    # name | command | what a row is | place        place: STEP and EVALUATION name a file per checkpoint or evaluation
    column  type  meaning                           type interval: a value and the ends of its interval, three columns
    *table                                          all columns of another table; *table COPIED: those in COPIED
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

SCHEMA_VERSION = 2  # 1: version 0.2 and before

# Definition of a rock → the column of `types` that orders by it.
ORDERED_BY = {"certified": "r", "burden": "r", "context": "r_ctx"}
# Stages of a training step, in the order of the step; those in FLOP_STAGES have their operations counted.
STEP_STAGES = ("rollout", "select", "teacher", "student", "head", "optimiser", "telemetry", "evaluate", "checkpoint")
TRAINING_STAGES = STEP_STAGES[:6]
FLOP_STAGES = STEP_STAGES[:5]
# Columns of `training` that `compare` repeats.
COPIED = (
    *("loss", "loss_rocks", "loss_rest", "kept_share", "weight_share", "tokens", "rollouts", "learning_rate"),
    *("scored", "changed_share", "changed_loss_share", "end_dropped_share", "mean_length", "truncated_share"),
)

TYPES = {
    "text": pa.string(),
    "int": pa.int64(),
    "int32": pa.int32(),
    "float": pa.float64(),
    "float32": pa.float32(),
    "bool": pa.bool_(),
    "ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
}
GROUPS = {  # column_{GROUP} in TEXT: one column for each
    "STEP": STEP_STAGES,
    "TRAIN": (*TRAINING_STAGES, "other"),
    "FLOPS": FLOP_STAGES,
    "DEFINITION": tuple(ORDERED_BY),
}
PLACES = {
    "": "{}.parquet",
    "STEP": "{}/step=N/part-*.parquet",
    "EVALUATION": "compare/REGIME/seed=N/{}/step=N.parquet",
}

TEXT = """
# rollouts | sample | one row per sampled rollout
prompt_id  text     Identifier of the prompt.
group_id   text     Prompts of one group are not independent of each other; empty: the prompt stands for itself.
rollout_id text     Identifier of the rollout: prompt_id#number.
prompt_ids ids      Token ids of the prompt, as the model saw them.
token_ids  ids      Sampled token ids, the end token included.
text       text     The rollout decoded without special tokens; only `correct` is computed from it.
answer     text     Reference answer; empty where the prompt has none.
correct    bool     Whether the rollout's answer is right; empty where nothing could be checked.
truncated  bool     Whether the rollout was cut at the length limit.
seed       int      Seed of the rollout's random numbers.

# occurrences | score | one row per response position, scored under checkpoint N | STEP
prompt_id       text     Identifier of the prompt.
rollout_id      text     Identifier of the rollout: prompt_id#number.
position        int32    Position within the rollout, from 0.
token_id        int32    Token predicted at this position.
kl              float32  KL(student || teacher) over the full shared vocabulary, nats, >= 0.
log_ratio       float32  Log p_student - log p_teacher at the sampled token, nats; unbiased for kl, may be negative.
student_logprob float32  Student's log-probability of the token predicted at this position, nats.
teacher_logprob float32  Teacher's log-probability of the same token on the same prefix, nats.
student_entropy float32  Entropy of the student's distribution, nats.
teacher_entropy float32  Entropy of the teacher's distribution, nats.
grad_norm       float32  Euclidean norm of the gradient of kl in the student's logits.
is_eos          bool     Whether the token ends the sequence.

# top_tokens | score | one row per position of a rollout that the report shows, under checkpoint N | STEP
prompt_id            text     Identifier of the prompt.
rollout_id           text     Identifier of the rollout: prompt_id#number.
position             int32    Position within the rollout, from 0.
student_top_ids      ids      The student's most probable tokens, most probable first.
student_top_logprobs logprobs Their log-probabilities, nats.
teacher_top_ids      ids      The teacher's most probable tokens, most probable first.
teacher_top_logprobs logprobs Their log-probabilities, nats.

# imported | import | one row per rollout of another trainer's dump
prompt_id  text     Identifier of the prompt.
rollout_id text     Identifier of the rollout: prompt_id#number.
step       int      The trainer's step that the rollout was sampled for.
source     text     File and place in it.

# engine | import | one row per token of a dump that has log-probabilities of the engine and of the trainer
prompt_id       text     Identifier of the prompt.
rollout_id      text     Identifier of the rollout: prompt_id#number.
position        int32    Position within the rollout, from 0.
engine_logprob  float32  Log-probability of the token by the engine that sampled it, nats.
student_logprob float32  The same by the trainer's forward pass, nats.

# telemetry | distill | one row per response position of training step N's own rollouts | STEP
*occurrences

# types | detect | one row per token type observed, rocks of the chosen definition first, then by burden
token_id         int      Vocabulary id of the token type.
token            text     Text of the token.
cluster          text     Kind of token: digits, punctuation, content words and so on.
class            text     rock; rock so far; not yet; learning; learning, levelled off; unclear; costly; else empty.
confirmed        bool     Whether the other half of the prompts says the same of it; empty without a class.
p_costly         float    p of not costly: the larger of two tests on the half that chooses; empty below 5 prompts.
p_stagnant       float    p of a fall by 1 − κ or more, on the half that chooses; empty where not tested.
p_settled        float    p of 1 − κ lost in three more runs at the pace of the last third; empty where not tested.
quarter_steps    float    Steps until 1 − κ of the present loss is gone at that pace; empty where it does not fall.
quarter_steps_low float   Lower end of its interval (95 %); empty where the data do not bound it.
fall             interval Share of its loss that the type lost between the first and the last checkpoint.
prompts_needed   float    For an unclear type: prompts in all that would settle it, about.
count            int      Occurrences in the half of the prompts that measures.
count_all        int      Occurrences in all prompts.
num_prompts      int      Prompts in which the type occurs, of all.
loss_pre         float    Mean loss at the first checkpoint, nats; empty where only one was scored.
loss_post        float    Mean loss at the last checkpoint, nats; empty where the half has no occurrence.
r                interval Burden, the Rock Score: total loss of the type, nats.
ccr              float    Share of the type's occurrences that are rock occurrences.
r_ctx            float    Burden times ccr.
rho              float    Mean share of similar contexts among the persistent occurrences; empty if none.
grad_share       float    Share of the total gradient norm; empty where norms were not recorded.
place_{DEFINITION} int    Place by the definition {}; empty where not eligible.
in_{DEFINITION}  bool     Whether the type is a rock by the definition {}.

# footprints | detect | one row per definition of a rock, and per control of the chosen one
name                   text     Definition, or control and what it is matched on.
num_types              int      Token types in the set.
share_types            float    Share of all token types observed.
share_positions        interval Share of all response positions.
share_positions_median interval Median over rollouts of the share of positions.
share_loss             interval Share of the total loss.
share_grad             interval Share of the total gradient norm; empty where norms were not recorded.
enrichment             interval Share of the loss divided by share of the positions; 1 means merely frequent.

# clusters | detect | one row per kind of token among the rocks
cluster         text     Kind of token.
num_types       int      Rocks of this kind.
share_positions float    Share of all response positions.
share_loss      float    Share of the total loss.
enrichment      float    Share of the loss divided by share of the positions; 1 means merely frequent.

# sensitivity | detect | the declared set, and one row per step of κ and of q
parameter       text     The threshold that was moved; base for none.
step            int      One step down (−1), up (1), or none (0).
value           float    Value of the threshold.
num_rocks       int      Size of the set.
jaccard         float    Jaccard index with the set at the base thresholds.
share_positions float    Share of all response positions.
share_loss      float    Share of the total loss.
enrichment      float    Share of the loss over share of the positions; 1: merely frequent. Empty for no set.

# persistence | detect | one row per group of token types and arm; no rows where only one checkpoint was scored
group     text     rocks, rare high-loss, or random others.
arm       text     checkpoint: same texts, later weights; aa_selected, aa_fresh: same weights, other texts.
step      int      The later checkpoint; empty in A/A arms.
num_types int      Token types in the group.
before    interval Mean loss over occurrences before, nats.
after     interval Mean loss over occurrences after, nats.
change    interval After minus before, nats.

# curves | detect | one row per declared (or not yet settled) token type and checkpoint, on the half that measures
token_id int      Vocabulary id of the token type.
token    text     Text of the token.
class    text     rock, rock so far, or not yet.
step     int      Checkpoint; 0 and 1 for loss_pre and loss of a table.
loss     interval Mean loss over its occurrences, nats, with an interval over groups of prompts.

# positions | detect | one row per position, the costliest first
prompt_id            text     Identifier of the prompt.
rollout_id           text     Identifier of the rollout: prompt_id#number.
position             int      Position within the rollout, from 0.
token_id             int      Vocabulary id of the token type.
token                text     Text of the token.
loss_pre             float    Loss at the first checkpoint, nats; empty where only one was scored.
loss_post            float    Loss at the last checkpoint, nats.
share_loss           float    Share of the total loss.
before               text     Text of the tokens before it.
after                text     Text of the tokens after it.
student_top_ids      ids      The student's most probable tokens, most probable first; empty if not kept.
student_top_logprobs logprobs Their log-probabilities, nats.
teacher_top_ids      ids      The teacher's most probable tokens: what it wanted instead; empty if not kept.
teacher_top_logprobs logprobs Their log-probabilities, nats.

# geometry | geometry | one row per token type with a gradient of its own
token_id       int      Vocabulary id of the token type.
group          text     rocks, rare high-loss, random others, or other.
count          int      Occurrences.
mean_grad_norm float    Norm of the mean gradient in logit space.
cos_balanced   float    Cosine with the sum of the types' mean gradients.
cos_global     float    Cosine with the sum of the gradients of all occurrences.
cos_others     float    Cosine with the sum of the other types' mean gradients; empty where that is 0.
contrib        float    count x mean_grad_norm x cos_balanced.
grad_share     float    Share of the total gradient norm.
position_share float    Share of all response positions.

# knockouts | knockout | one row per resumed rollout; a rollout without a row for a set was copied whole
prompt_id  text     Identifier of the prompt.
rollout_id text     Identifier of the rollout: prompt_id#number.
arm        text     knockout or control (the set banned), or placebo (nothing banned).
set_id     text     The set.
resumed_at int32    Position from which the rollout was generated anew.
correct    bool     Whether the resumed rollout's answer is right.
num_tokens int32    Tokens generated.
token_ids  ids      The whole rollout, copied part included; empty unless the run keeps them.

# baseline | knockout | one row per rollout that knock-outs are resumed from
*rollouts

# census | knockout | one row per banned set
set_id           text     Identifier of the set.
role             text     candidate or control.
kind             text     token, window or family.
token_id         int32    The token type that the set belongs to.
token            text     Its text.
members          ids      Token ids banned together.
control_of       text     The set that a control is as frequent as; empty for candidates.
verdict          text     Strong Pillar, Strong Stumbling Block, Proven Neutral, Undecided or Never Used.
num_used         int      Baseline rollouts that use the set.
used_share       float    Share of the baseline rollouts looked at that use it.
num_problems     int      Prompts that the set was tested on.
num_changed      int      Prompts whose outcome the ban changed.
delta            interval Change of accuracy under the ban; the interval is the one that the verdict inverts.
outer_low        float    Lower end of the 1 − α interval of the test of no effect.
outer_high       float    Upper end of the 1 − α interval of the test of no effect.
inner_low        float    Lower end of the 1 − 2α interval of the equivalence test.
inner_high       float    Upper end of the 1 − 2α interval of the equivalence test.
p                float    p value of no effect, divided by the share of α of its look.
p_bh             float    p after Benjamini–Hochberg over candidates; empty for controls and unused sets.
p_neutral        float    p of the equivalence test.
sd               float    Standard deviation of the change per prompt.
detectable       float    Smallest effect that these prompts show at the power asked for.
placebo_floor    float    Noise floor: difference between two identical arms on as many prompts; empty without placebos.
round            int      The look at which the verdict was reached.
more_problems    int      Further prompts that would decide an undecided set; else 0.
accuracy_with    float    Accuracy without a ban, on the prompts that the set was tested on.
accuracy_without float    Accuracy with the set banned, on the same prompts.

# grafts | graft | one row per set of tokens that the teacher draws in the student's place
arm             text     rocks (or candidates), placebo, control, rest, all, cluster NAME, skippable, skippable N.
num_types       int      Token types in the set.
members         ids      Token ids of rocks, candidates and skippable; empty for the other arms.
alternatives    ids      Of skippable: members that stand where a candidate could, and are none; else empty.
share_positions float    Share of the baseline's positions that are drawn again.
loss_share      float    Share of the total loss; empty for placebo and control.
grad_share      float    Share of the total gradient norm; empty for placebo and control.
accuracy        interval Accuracy under the graft; of `all`, the teacher's own.
gain            interval Accuracy under the graft minus without, paired by prompt.
num_problems    int      Prompts.

# graft_rollouts | graft | one row per resumed rollout; a rollout without a row for an arm was copied whole
prompt_id  text     Identifier of the prompt.
rollout_id text     Identifier of the rollout: prompt_id#number.
arm        text     As in grafts.
resumed_at int32    Position from which the rollout was generated anew.
correct    bool     Whether the resumed rollout's answer is right.
num_tokens int32    Tokens generated.
token_ids  ids      The whole rollout, copied part included; empty unless the run keeps them.

# training | distill | one row per optimiser step; shadow selectors add shadow_kept_NAME and overlap_A_B
step               int      Optimiser step, from 1; 0 is the evaluation before the first.
loss               float    What was minimised: weighted mean divergence, nats; empty at step 0.
loss_rocks         float    Mean divergence at rocks, nats; empty where not every position was measured.
loss_rest          float    Mean divergence at all other positions, nats; empty likewise.
kept_share         float    Share of response tokens with a weight above 0.
weight_share       float    Mean weight of a response token.
ceiling            float    Largest speed-up that dropping tokens could give: 1 / kept_share.
tokens             int      Response tokens of the step, over all processes.
prompt_tokens      int      Prompt tokens of the step.
scored             int      Response tokens that the teacher scored for the step's loss; empty in version 0.1.
changed_share      float    Share of response tokens whose weight is not 1; empty in version 0.1.
changed_loss_share float    Share of the loss at those tokens; empty where not every position was measured.
end_dropped_share  float    Share of end tokens with weight 0; empty where the step has none.
rollouts           int      Rollouts of the step.
invalid            int      Tokens whose divergence was not a number.
mean_length        float    Mean length of the step's rollouts, in tokens that carry loss; empty in version 0.1.
truncated_share    float    Share of the step's rollouts that do not end with an end token; empty in version 0.1.
entropy            float    Mean entropy of the student at the tokens trained on, nats; empty in version 0.1.
rocks_online       int      Rocks that the monitor declares so far; empty between two log lines.
alarm_length       int      1 where the alarm for exploding lengths held after the step; else empty.
alarm_entropy      int      1 where the alarm for a collapsed entropy held after the step; else empty.
alarm_floor        int      1 where the alarm for a loss below rounding held after the step; else empty.
alarm_invalid      int      1 where the alarm for invalid divergences held after the step; else empty.
learning_rate      float    Learning rate of the step.
accuracy           interval Accuracy on held-out prompts after the step; empty where it was not evaluated.
seconds            float    Wall-clock seconds of the step in the first process, evaluation and checkpoint included.
seconds_processor  float    Processor seconds of the first process for training alone.
seconds_{STEP}     float    Seconds of the step spent in the stage {}.
flops_{FLOPS}      float    Floating-point operations of the stage {}, from the models' shapes.

# off_policy | distill | one row per optimiser step of the off-policy stage
*training

# teacher_answers | distill | one row per rollout of the teacher for the off-policy stage
*rollouts

# monitor | distill | one row per token type seen while training, largest total loss first
token_id    int      Vocabulary id of the token type.
count       int      Occurrences seen.
mean        float    Mean loss, nats.
variance    float    Variance of the loss.
early_mean  float    Mean loss over the first steps, nats; NaN where the type was not seen then.
recent_mean float    Mean loss over the recent steps, nats; NaN where the type was not seen then.
recent_rows float    Effective number of recent occurrences.
loss_share  float    Share of the total loss.
grad_norm   float    Sum of gradient norms.

# compare | compare | one row per optimiser step of a regime and seed; step 0 is the common start
regime                  text     Name of the training regime.
seed                    int      Number of the training seed.
step                    int      Optimiser step; 0 is the common start.
accuracy                float    Accuracy on held-out prompts; empty where it was not evaluated.
heldout_loss_rocks      float    Mean loss at rocks on rollouts common to all regimes; empty likewise.
heldout_loss_rest       float    The same at all other positions; empty likewise.
heldout_length          float    Mean length of the held-out rollouts; empty likewise.
heldout_truncated       float    Share of them that were cut at the length limit; empty likewise.
tokens_total            int      Tokens sampled, and scored by the teacher, up to this step.
seconds                 float    Wall-clock seconds of training in this step, without evaluation and recording.
seconds_total           float    The same, summed up to this step.
flops_total             float    Floating-point operations up to this step.
*training COPIED
seconds_{TRAIN}         float    Seconds of the step spent in the stage {}.
flops_{FLOPS}           float    Floating-point operations of the stage {}.

# problems | compare | one row per held-out prompt at one evaluation of one training | EVALUATION
prompt_id text     Identifier of the prompt.
correct   float    Share of right rollouts.
rollouts  int32    Rollouts sampled.
length    float    Mean length of the rollouts, tokens; empty where it was not recorded.
truncated float    Share of the rollouts that were cut at the length limit; empty likewise.

# compare_problems | compare | one row per held-out prompt at an evaluation of a regime and seed
regime text     Name of the training regime.
seed   int      Number of the training seed.
step   int      Step of the evaluation.
*problems

# losses | compare | one row per prompt of the common held-out rollouts, at one evaluation of one training | EVALUATION
prompt_id      text     Identifier of the prompt.
rock_positions int      Positions of its rollouts whose token is a rock.
rock_loss      float    Summed loss there, nats.
rest_positions int      All other positions of its rollouts.
rest_loss      float    Summed loss there, nats.

# compare_summary | compare | one row per regime; every value over seeds and prompts, changes and ratios against uniform
regime               text     Name of the training regime.
verdict              text     costs, gains, unchanged or undecided.
num_seeds            int      Trainings.
over_seeds           bool     Whether intervals speak of seeds, too (three at least); else of prompts only.
num_problems         int      Held-out prompts.
delta                interval Change of the final accuracy.
accuracy             interval Final accuracy.
change_same_seconds  interval Change of accuracy at equal training seconds.
accuracy_same_tokens interval Accuracy at equal tokens (sampled, and scored by the teacher).
change_same_tokens   interval Its change.
seconds              interval Training seconds.
seconds_ratio        interval Ratio of training seconds.
loss_rocks           interval Loss at rocks on common held-out rollouts, nats; empty without rocks.
loss_rest            interval The same at all other positions, nats; empty likewise.
loss_rocks_change    interval Its change at rocks, paired by seed and prompt; empty for uniform.
loss_rest_change     interval Its change at all other positions; empty likewise.
steps_to             interval Steps until uniform's final accuracy less the margin; empty where not reached.
seconds_to           interval Training seconds until then; empty where not reached.
flops_to             interval Floating-point operations until then; empty where not reached.
tokens_to            interval Tokens sampled and scored until then; empty where not reached.
length_ratio         interval Ratio of the mean length of held-out rollouts at the end; empty before 0.2.
truncated_change     interval Change of the share of them that were cut at the length limit; empty likewise.
grew                 bool     Whether either grew beyond chance; empty where that is not known.
spent_ratio          float    Ratio of tokens sampled and scored, after the same number of steps.
bite_tokens          float    Share of the tokens with another weight, or not sampled at all; empty before 0.2.
bite_loss            float    Share of the loss at sampled tokens with another weight; empty if not audited.
end_dropped          float    Share of end tokens that carried no loss; empty where there was none.
flops_ratio          float    Ratio of floating-point operations.
kept_share           float    Share of response tokens with a weight above 0.
tokens_ratio         float    Ratio of sampled response tokens.
ceiling              float    Largest speed-up that the dropped tokens could give.

# compare_savings | compare | one row per regime that samples less, against the best control that samples less
regime       text     Name of the training regime.
control      text     The control of the highest accuracy at equal tokens.
answer       text     yes where the interval of the difference lies above 0, else no.
over_control interval Accuracy minus the control's at equal tokens.
"""


class Column(NamedTuple):
    """One column: its name, its Arrow type, and what it means in one sentence."""

    name: str
    type: pa.DataType
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table of a run."""

    stage: str
    """The command that writes it."""
    row: str
    """What one row is: "one row per …"."""
    path: str
    """File pattern below the run directory."""
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns as Arrow sees them."""
        return pa.schema([(column.name, column.type) for column in self.columns])

    def conform(self, table: pa.Table) -> pa.Table:
        """The same rows with the documented columns first, in order and of their types; empty where not given."""
        given = {
            name: table[name].cast(kind) if name in table.column_names else pa.nulls(len(table), kind)
            for name, kind, _ in self.columns
        }
        return pa.table(given | {name: table[name] for name in table.column_names if name not in given})

    def misfit(self, schema: pa.Schema) -> str | None:
        """The first documented column that has values of another kind, in words; None where all fit."""
        for name, wanted, _ in self.columns:
            found = schema.field(name).type if name in schema.names else pa.null()
            kinds = _kind(found), _kind(wanted)
            if kinds[0] not in ("null", kinds[1]) and kinds != ("int", "double"):
                return f"column {name} holds {found}, not {wanted}"
        return None


def _kind(kind: pa.DataType) -> str:
    """A type without its width."""
    if pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return ("" if pa.types.is_dictionary(kind) else "list ") + _kind(kind.value_type)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "int" if pa.types.is_integer(kind) else "double"
    return str(kind).removeprefix("large_")


def _read(text: str) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for block in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        head, *lines = block.strip().splitlines()
        name, stage, row, *place = head.split(" | ")
        columns: list[Column] = []
        for line in lines:
            if line.startswith("*"):
                other, _, only = line[1:].partition(" ")
                columns += [column for column in found[other].columns if not only or column.name in COPIED]
                continue
            column, kind, meaning = line.split(maxsplit=2)
            stem, _, group = column.partition("{")
            if group:
                columns += [Column(stem + each, TYPES[kind], meaning.format(each)) for each in GROUPS[group[:-1]]]
            elif kind == "interval":
                columns.append(Column(column, TYPES["float"], meaning))
                for end, word in (("low", "Lower"), ("high", "Upper")):
                    said = f"{word} end of the interval of {column}; empty where there is none."
                    columns.append(Column(f"{column}_{end}", TYPES["float"], said))
            else:
                columns.append(Column(column, TYPES[kind], meaning))
        path = PLACES[place[0] if place else ""].format(name)
        found[name] = Table(stage, row, path, tuple(columns))
    return found


TABLES = _read(TEXT)
ROLLOUTS, OCCURRENCES, TOP_TOKENS = (TABLES[name].schema for name in ("rollouts", "occurrences", "top_tokens"))
METRICS = tuple(column.name for column in TABLES["occurrences"].columns if column.type == TYPES["float32"])


def table_of(name: str) -> Table | None:
    """The table that a file below a run belongs to; None for parts and for tables of other people.

    Args:
        name: path below the run directory without `.parquet`, such as `types` or `problems/step=10`.
    """
    return TABLES.get(name.split("/")[0])
