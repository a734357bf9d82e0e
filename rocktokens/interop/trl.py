"""TRL: `log_completions=True` writes completions/completions_NNNNN.parquet (step, prompt, completion: text alone).

Token ids, log-probabilities and the exact divergence come from the telemetry that `RockDistillationTrainer(run=…)`
writes beside it: telemetry/step=N/part-*.parquet, whose rollout N/i is row i of the completions of step N. Without
telemetry nothing can be computed: the sampled ids cannot be had back from text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.errors import DataError
from rocktokens.interop.formats import files_below
from rocktokens.interop.samples import Dump, Sample, checked
from rocktokens.values import Row

COMPLETIONS, TELEMETRY = {"step", "prompt", "completion"}, {"rollout_id", "position", "token_id"}
MEASURES = {
    "kl_T": "kl",
    "log_ratio_T": "log_ratio",
    "student_logprob_T": "student_logprob",
    "teacher_logprob_T": "teacher_logprob",
    "student_entropy_T": "student_entropy",
    "teacher_entropy_T": "teacher_entropy",
    "grad_norm_T": "grad_norm",
}


def read(files: list[Path]) -> Dump:
    """Telemetry as samples, with the text of TRL's completions where both are there."""
    texts: dict[int, list[tuple[str, str]]] = {}
    parts: list[tuple[int, Path, pa.Table]] = []
    for path in files_below(files, "completions_*.parquet", "part-*.parquet"):
        table = _table(path)
        names = set(table.column_names)
        if names >= COMPLETIONS:
            for row in table.select(sorted(COMPLETIONS)).to_pylist():
                texts.setdefault(row["step"], []).append((row["prompt"], row["completion"]))
        elif names >= TELEMETRY:
            parts.append((_step(path), path, table))
        else:
            raise DataError(f"{path} is neither TRL's completions nor our telemetry; it has {', '.join(sorted(names))}")
    if not parts:
        raise DataError(
            f"{files[0]} holds TRL's completions, which are text alone. Give the telemetry parts of the run too "
            "(RUN/telemetry): RockDistillationTrainer writes them when it has run=."
        )
    samples = [sample for step, path, table in parts for sample in _samples(step, path, table, texts)]
    notes = [] if texts else ["no completions_*.parquet was given: rollouts are shown as their tokens, without prompts"]
    return Dump(tuple(sorted(samples, key=lambda sample: sample.step)), tuple(notes))


def _table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _step(path: Path) -> int:
    name = path.parent.name.removeprefix("step=")
    return int(name) if name.isdigit() else 0


def _samples(step: int, path: Path, table: pa.Table, texts: dict[int, list[tuple[str, str]]]) -> list[Sample]:
    table = table.sort_by([("rollout_id", "ascending"), ("position", "ascending")])
    rollouts = np.asarray(table["rollout_id"].to_pylist())
    firsts = np.flatnonzero(np.r_[True, rollouts[1:] != rollouts[:-1]])
    found = []
    for start, stop in zip(firsts, [*firsts[1:], len(rollouts)]):
        part = table.slice(int(start), int(stop - start))
        name = str(rollouts[start])
        row = name.rpartition("/")[2]
        own = texts.get(step, [])
        text = own[int(row)][1] if row.isdigit() and int(row) < len(own) else None
        columns: Row = {key: part[column].to_numpy() for key, column in MEASURES.items() if column in part.column_names}
        prompt = part["prompt_id"][0].as_py() if "prompt_id" in part.column_names else ""
        found.append(
            checked(
                Sample(
                    step=step,
                    rollout_id=name,
                    token_ids=tuple(int(id_) for id_ in part["token_id"].to_pylist()),
                    prompt_id=prompt,
                    text=text,
                    source=f"{path}, rollout {name}",
                    **columns,
                )
            )
        )
    return found
