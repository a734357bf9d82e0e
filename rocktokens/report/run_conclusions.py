"""The answer in five sentences, from the numbers: what, how much, do they learn, do they matter, and without them.

A question that the run did not ask is answered by saying so, with the command that asks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rocktokens.causal.figures import census_rows, counted, epsilon, graft_rows, noise_floor, verdicts_by_token
from rocktokens.compare.figures import finals
from rocktokens.detect.figures import footprint_row
from rocktokens.facts import Facts
from rocktokens.show import estimate, interval, listed, number, percent, plural, points, visible
from rocktokens.stats import MIN_SEEDS, Estimate
from rocktokens.train.figures import persistence_rows
from rocktokens.values import Row


def answer(facts: Facts) -> list[str]:
    """Five sentences, plain text."""
    return [_what(facts), _how_much(facts), _learn(facts), _matter(facts), _without(facts)]


def _ask(facts: Facts, stage: str, question: str) -> str:
    command = facts.command(stage)
    if command is None:
        return f"{question} is not known: this run names no models, so `{stage}` cannot run on it."
    return f"{question} is not known yet: run `{command}`."


def _what(facts: Facts) -> str:
    if not facts.types:
        return _ask(facts, "detect", "Which tokens are rocks")
    names = [f"“{visible(row['token'])}”" for row in facts.rocks]
    if not names:
        proven = "no type is proven to cost more than the tokens around it and to have stopped learning"
        why = proven if facts.definition == "certified" else "no type stays expensive in recurring contexts"
        among = plural(len(facts.types), "token type")
        return f"No rock was found among {among} by the `{facts.definition}` definition: {why}."
    stay, recur = ("stays", "recurs") if len(names) == 1 else ("stay", "recur")
    when = f"{stay} expensive before and after distillation"
    if not any(row.get("loss_pre") is not None for row in facts.types):
        when = f"{'is' if len(names) == 1 else 'are'} expensive at the one checkpoint that was scored"
    # `certified` tests cost and learning; contexts are shown beside it.
    where = "" if facts.definition == "certified" else f" and {recur} in similar contexts"
    return (
        f"{len(names)} of {plural(len(facts.types), 'token type')} {when}{where} "
        f"(`{facts.definition}` definition): {listed(names)}."
    )


def _how_much(facts: Facts) -> str:
    row = footprint_row(facts)
    enrichment = estimate(row, "enrichment")
    if not facts.rocks or enrichment is None:
        return (
            "What they cost cannot be said without a rock set." if facts.types else _ask(facts, "detect", "Their cost")
        )
    grad = estimate(row, "share_grad")
    gradient = f" and {interval(grad, percent)} of the gradient norm" if grad else ""
    return (
        f"They fill {interval(estimate(row, 'share_positions'), percent)} of the positions and carry "
        f"{interval(estimate(row, 'share_loss'), percent)} of the loss{gradient}: {_frequent(enrichment)}."
    )


def _frequent(enrichment: Estimate) -> str:
    said = f"enrichment {interval(enrichment)}"
    low = enrichment.low if math.isfinite(enrichment.low) else enrichment.value
    high = enrichment.high if math.isfinite(enrichment.high) else enrichment.value
    if low > 1:
        return f"{number(enrichment.value, 1)} times what their frequency explains ({said})"
    if high < 1:
        return f"less than their frequency explains ({said}), so they are merely frequent"
    return f"no more than their frequency explains ({said})"


def _learn(facts: Facts) -> str:
    rows = [row for row in persistence_rows(facts) if row["arm"] == "checkpoint"]
    if not rows and len(facts.steps) == 1:
        unknown = "Whether they learn is not known: only one checkpoint was scored"
        command = facts.command("distill")
        return f"{unknown}; distil with `{command}` and score every checkpoint." if command else f"{unknown}."
    if not rows:
        return _ask(facts, "score", "Whether they learn")
    last = max(row["step"] for row in rows)
    by_group = {row["group"]: row for row in rows if row["step"] == last}
    row = by_group.get("rocks")
    if row is None:
        return "Whether they learn cannot be said: no rock was measured at two checkpoints."
    change = estimate(row, "change")
    share = f" ({percent(row['after'] / row['before'] - 1, 0)})" if row.get("before") else ""
    said = (
        f"On the same texts their mean loss went from {number(row['before'], 3)} to {number(row['after'], 3)} nats"
        f"{share}, a change of {interval(change, digits=3)}"
    )
    rare = by_group.get("rare high-loss")
    if rare is not None and rare.get("before"):
        said += f", while rare high-loss types changed by {percent(rare['after'] / rare['before'] - 1, 0)}"
    return said + _against_noise(facts, change) + "."


def _against_noise(facts: Facts, change: Estimate | None) -> str:
    """Whether the change is more than other texts alone would bring."""
    arms = [row for row in persistence_rows(facts) if row["group"] == "rocks" and row["arm"].startswith("aa_")]
    if change is None or not arms:
        return ""
    noise = max(abs(row["change"]) for row in arms if row["change"] is not None)
    clear = math.isfinite(change.high) and (change.high < 0 or change.low > 0)
    if not clear:
        return ": they did not learn, as far as this run can see"
    if abs(change.value) <= noise:
        return f"; one checkpoint against itself on other texts changes as much ({number(noise, 3)})"
    word = "fell" if change.value < 0 else "rose"
    return f"; it {word} by more than the {number(noise, 3)} that other texts alone bring"


def _verdict_counts(rows: Sequence[Row]) -> str:
    """How many have each verdict, the most frequent first."""
    count = {name: sum(row["verdict"] == name for row in rows) for name in {row["verdict"] for row in rows}}
    ordered = sorted(count, key=lambda name: (-count[name], name))
    return listed([counted(name, count[name]) for name in ordered], limit=6)


def _matter(facts: Facts) -> str:
    rows = verdicts_by_token(facts)
    if not census_rows(facts):
        return _ask(facts, "knockout", "Whether the student needs them")
    own = [rows[token_id] for token_id in facts.rock_ids if token_id in rows]
    if not facts.rock_ids:
        return f"No rock could be tested; of the costliest candidates, {_verdict_counts(list(rows.values()))}."
    if not own:
        return "None of the rocks was among the candidates of the census."
    said = _verdict_counts(own)
    floor = noise_floor(facts)
    noise = f", noise floor up to {number(100 * floor, 1)}" if floor is not None else ""
    stage = facts.stage("knockout")
    accuracy = estimate(stage, "accuracy")
    base = f", baseline accuracy {interval(accuracy, percent)}" if accuracy else ""
    if accuracy is not None and accuracy.value in (0.0, 1.0):
        base += ", which leaves no room for an effect"
    gain = next((item for row in graft_rows(facts) if row["arm"] == "rocks" and (item := estimate(row, "gain"))), None)
    graft = f"; drawn by the teacher instead, they gain {interval(gain, points)} points" if gain else ""
    return (
        f"Banned at inference, {plural(len(own), 'rock')} tested gave {said} "
        f"(ε = {number(100 * epsilon(facts), 1)} points{noise}{base}){graft}."
    )


def _too_few(seeds: int) -> str:
    return "" if seeds >= MIN_SEEDS else f" where a decision takes {MIN_SEEDS}: the interval is over prompts only"


def _without(facts: Facts) -> str:
    found = finals(facts)
    base, freeze = found.get("uniform"), found.get("freeze")
    if not found:
        return _ask(facts, "compare", "What training without them costs or saves")
    if base is None or freeze is None:
        return f"What freezing costs is not known: the comparison holds {listed(list(found))}, not uniform and freeze."
    change = estimate(freeze, "delta")
    ratio, flops = estimate(freeze, "seconds_ratio"), freeze.get("flops_ratio")
    spent = f" with {percent(flops)} of its FLOPs" if flops is not None else ""
    if ratio is not None and math.isfinite(ratio.low):
        spent += f"{' and' if spent else ' in'} {interval(ratio, percent, digits=0)} of its seconds"
    return (
        f"Trained without them, the student ended {interval(change, points)} points from uniform training "
        f"({percent(freeze['accuracy'])} against {percent(base['accuracy'])}, {plural(freeze['num_seeds'], 'seed')}"
        f"{_too_few(freeze['num_seeds'])}){spent}."
    )
