"""`detect --counts`: token types from anybody's counts and mean losses; no model, no rollouts, no prompts.

Only the ranking by burden can be had from a table of counts. Nothing is declared, contexts and persistence are unknown,
and no number has an interval: the run says so, and its report shows what is left.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa

from rocktokens.detect.clusters import clusters_of, token_texts
from rocktokens.detect.counted import CorpusTotals, CountedReport, detect_counted
from rocktokens.detect.counts_terminal import render
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import ConfigError, RunError
from rocktokens.files import digest
from rocktokens.interop.measured import read_counts
from rocktokens.lock import working_on
from rocktokens.models.settings import PairConfig
from rocktokens.progress import console
from rocktokens.run import MANIFEST, Run, open_run
from rocktokens.show import significant
from rocktokens.stage import Stage

log = logging.getLogger(__name__)

# Sections of runs that consist of tables which a user brought.
BROUGHT = ("counts", "outcomes")
CANNOT = (
    "Only counts and mean losses are known: types are ranked by burden and none is declared a rock; contexts, "
    "persistence (whether a type learns) and intervals cannot be had from them."
)


def detect_counts(
    counts: Path,
    out: Path,
    config: DetectConfig,
    *,
    totals: CorpusTotals | None = None,
    tokenizer: str | None = None,
    again: bool = False,
) -> Run:
    """Rank token types by burden and say what the first K cover.

    Args:
        counts: CSV or Parquet with token_id, count and mean_loss.
        out: directory of the new run.
        config: k (auto: the paper's 100) and signal are used.
        totals: positions and loss of the whole corpus, for shares and enrichment.
        tokenizer: names the tokens where the file does not.
        again: whether to write anew although the stage is complete.
    """
    if config.definition not in ("certified", "burden"):
        raise ConfigError(f"counts say nothing about {config.definition}; only burden can be had from them")
    read = read_counts(counts, signed=config.signal == "log_ratio")
    named = None
    if tokenizer is not None:
        from rocktokens.models.pair import load_tokenizer

        named = load_tokenizer(tokenizer, PairConfig())
    totals = totals or CorpusTotals()
    report = detect_counted(read, totals, None if config.k == "auto" else config.k)
    tables = {"types": _types(report, named), "footprints": _footprint(report), "sweep": _sweep(report)}
    with working_on(out):
        refuse_other_runs(out)
        section = {"tokenizer": tokenizer, "corpus_positions": totals.positions, "corpus_loss": totals.loss}
        run = Run.create(out, {})
        stage = Stage(
            run, "detect", {"detect": config, "counts": {"source": str(counts), **section}}, {"counts": digest(counts)}
        )
        if stage.due(again):
            stage.publish(tables, _facts(report, config))
            console().print(render(report, tables["types"], _notes(report)))
        return run


def refuse_other_runs(out: Path) -> None:
    """Tables that a user brought never go into a run that something else made."""
    if not (out / MANIFEST).exists():
        return
    run = open_run(out)
    made = {stage.split("/")[0] for stage in run.manifest["stages"]} - {"detect", "knockout", "bypass", "report"}
    known = set(run.manifest["config"])
    ours = known & set(BROUGHT)
    if made or (known and not ours) or (run.manifest["stages"] and not ours):
        raise RunError(
            f"{out} is a run of its own ({', '.join(sorted(made)) or 'made by something else'}); its results would be "
            "overwritten. Choose another directory with --out."
        )


def _types(report: CountedReport, tokenizer: object | None) -> pa.Table:
    """types.parquet, largest burden first; the columns that counts do not give are empty."""
    counts, order = report.counts, report.order_V
    ids = counts.token_id_V[order]
    if counts.tokens is not None and tokenizer is None:
        texts = [counts.tokens[place] or f"#{counts.token_id_V[place]}" for place in order]
    else:
        texts = token_texts(ids, tokenizer)
    knows_texts = tokenizer is not None or counts.tokens is not None
    return pa.table(
        {
            "token_id": ids,
            "token": texts,
            "cluster": clusters_of(texts, True if knows_texts else None),
            "count": counts.count_V[order],
            "count_all": counts.count_V[order],
            "loss_post": counts.mean_loss_V[order],
            "r": counts.burden_V[order],
            "rank_burden": list(range(1, len(ids) + 1)),
            "in_burden": [place < report.k for place in range(len(ids))],
        }
    )


def _footprint(report: CountedReport) -> pa.Table:
    held = report.chosen
    return pa.Table.from_pylist(
        [
            {
                "name": "burden",
                "num_types": held.k,
                "share_types": held.k / len(report.order_V),
                "share_positions": held.share_positions,
                "share_loss": held.share_loss,
                "enrichment": held.enrichment,
                "mean_loss": held.mean_loss,
            }
        ]
    )


def _sweep(report: CountedReport) -> pa.Table:
    """Coverage against K: of the corpus where its loss is given, else of the types that are listed."""
    return pa.Table.from_pylist(
        [
            {
                "definition": "burden",
                "k": held.k,
                "num_rocks": held.k,
                "coverage": held.share_of_listed if held.share_loss is None else held.share_loss,
            }
            for held in report.sweep
        ]
    )


def _facts(report: CountedReport, config: DetectConfig) -> dict[str, object]:
    held, totals = report.chosen, report.totals
    return {
        "definition": "burden",
        "signal": config.signal,
        "k": report.k,
        "ks": {"burden": report.k},
        "rocks": [int(token) for token in report.rocks],
        "can_declare": False,
        "source": "counts",
        "num_types": len(report.order_V),
        "num_occurrences": int(report.counts.count_V.sum()),
        "corpus_positions": totals.positions,
        "corpus_loss": totals.loss,
        "coverage": held.share_loss,
        "coverage_of_listed": held.share_of_listed,
        "share_positions": held.share_positions,
        "enrichment": held.enrichment,
        "mean_loss": held.mean_loss,
        "notes": _notes(report),
    }


def _notes(report: CountedReport) -> list[str]:
    notes = [CANNOT]
    if report.chosen.enrichment is None:
        notes.append(
            "Enrichment is not known: it needs the corpus' totals (--corpus-positions and --corpus-loss); coverage is "
            "a share of the listed types' loss unless --corpus-loss is given."
        )
    if report.chosen.share_of_listed is None:
        notes.append(
            f"The listed types' losses add up to {significant(report.listed_loss)} nats, which is not above 0: there "
            "is no share of it to give."
        )
    return notes
