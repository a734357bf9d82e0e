"""The command `import`: another trainer's dump becomes a run, with detection and a report.

Imported runs have rollouts and occurrences but no pair: nothing can be sampled, scored or compared in them. The
tokenizer is copied into the run, so that its tokens have names wherever the run goes.

Shapes: R rollouts, N tokens of all rollouts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import DataError, RunError
from rocktokens.interop.formats import Dump, read_dump
from rocktokens.models.tokens import FOLDER, open_tokenizer
from rocktokens.run import MANIFEST, Run, open_run
from rocktokens.tables import METRICS, ROLLOUTS
from rocktokens.values import Json

log = logging.getLogger(__name__)

# Rollouts whose ids are compared with the text that the dump has for them, and the share that may differ.
SPELLED, MISSPELLED = 50, 0.5


def import_dump(name: str, files: Sequence[Path], tokenizer: str, out: Path, *, detect: bool = True) -> Run:
    """Read a dump and write it as a run.

    Args:
        name: The format, one of `FORMATS`.
        files: Files or directories.
        tokenizer: Directory or hub name of the tokenizer that the trainer used.
        out: Directory of the new run.
        detect: Whether to detect costly token types and write the report, if the dump has teacher values.

    Returns:
        The run; its stage `import` records what can be computed from the dump and what cannot.
    """
    if (out / MANIFEST).exists() and "import" not in open_run(out).manifest["config"]:
        raise RunError(f"{out} is a run of its own, which an import would overwrite. Choose another directory.")
    dump = read_dump(name, files)
    spelling = open_tokenizer(tokenizer)
    _refuse_other_tokenizer(dump, spelling, tokenizer)
    run = Run.create(out, {"import": {"format": name, "files": [str(path) for path in files], "tokenizer": tokenizer}})
    spelling.save_pretrained(run.path / FOLDER)
    facts = _write(run, dump, spelling)
    run.finish("import", facts)
    for note in facts["notes"]:
        log.warning("%s", note)
    if detect and dump.has_teacher:
        from rocktokens.detect.stage import detect as detect_in
        from rocktokens.report.stage import report

        detect_in(run.path, replace(DetectConfig(), signal="kl" if dump.has_kl else "log_ratio"))
        report(run.path)
    return open_run(out)


def _write(run: Run, dump: Dump, tokenizer: Any) -> Json:
    """Write rollouts, occurrences and, where both are known, the engine's log-probabilities next to the trainer's.

    Returns:
        Sizes, what is in the dump, and sentences on what its estimates rest on.
    """
    samples, seen, names = dump.samples, dict[str, int](), list[str]()
    for sample in samples:  # names that several samples share get a number
        times = seen.get(sample.rollout_id, 0)
        seen[sample.rollout_id] = times + 1
        names.append(f"{sample.rollout_id}#{times}" if times else sample.rollout_id)
    prompts = [sample.prompt_name or rollout for sample, rollout in zip(samples, names)]
    rows = [
        {
            "prompt_id": prompt,
            "rollout_id": rollout,
            "prompt_ids": list(sample.prompt_ids),
            "token_ids": list(sample.token_ids),
            "text": sample.text or str(tokenizer.decode(list(sample.token_ids), skip_special_tokens=True)),
            "answer": sample.answer,
            "correct": sample.correct,
            "truncated": sample.truncated,
            "seed": None,
        }
        for sample, prompt, rollout in zip(samples, prompts, names)
    ]
    run.write("rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS))
    steps, sources = pa.array([sample.step for sample in samples], pa.int64()), [sample.source for sample in samples]
    run.write("imported", pa.table({"prompt_id": prompts, "rollout_id": names, "step": steps, "source": sources}))

    size_R = np.array([len(sample.token_ids) for sample in samples])
    rollout_N = pa.array(np.repeat(np.arange(len(size_R)), size_R))
    keys = {
        "prompt_id": pa.array(prompts).take(rollout_N),
        "rollout_id": pa.array(names).take(rollout_N),
        "position": pa.array(np.concatenate([np.arange(size) for size in size_R]), pa.int32()),
    }

    def column(*fields: str) -> pa.Array:
        """The first of these fields that a sample has; NaN at tokens that the trainer's loss left out."""
        parts = []
        for sample in samples:
            found: Any = next((own for name in fields if (own := getattr(sample, name)) is not None), None)
            found = np.full(len(sample.token_ids), np.nan) if found is None else found
            parts.append(found if sample.counts_T is None else np.where(sample.counts_T, found, np.nan))
        return pa.array(np.concatenate(parts), pa.float32())

    has_both = all(s.engine_logprob_T is not None and s.student_logprob_T is not None for s in samples)
    if has_both:
        both = {name: column(f"{name}_T") for name in ("engine_logprob", "student_logprob")}
        run.write("engine", pa.table({**keys, **both}))
    notes = list(dump.notes)
    if dump.has_teacher:
        token_N = np.concatenate([np.asarray(sample.token_ids) for sample in samples])
        # The student's is the trainer's, else the engine's: whichever the ratio was taken from.
        fields = {"student_logprob": ("student_logprob_T", "engine_logprob_T"), "log_ratio": ("ratio_T",)}
        measured = {name: column(*fields.get(name, (f"{name}_T",))) for name in METRICS}
        ends = {"token_id": token_N, "is_eos": token_N == tokenizer.eos_token_id}
        run.clear_occurrences(samples[-1].step)
        run.write_part(samples[-1].step, pa.table({**keys, **measured, **ends}))
        if not dump.has_kl:
            notes.append(
                "every cost is log p_student - log p_teacher of the one token that was sampled: over the student's own "
                "rollouts its mean is the reverse KL without bias, but at a single token it is noisy and may be "
                "negative. Token types need many occurrences, and single positions cannot be compared by it."
            )
    else:
        can = ["rollouts with their lengths and repetitions"]
        can += ["the engine's log-probabilities against the trainer's"] if has_both else []
        notes.append(
            f"the dump has no teacher log-probabilities for every rollout, so no token's cost is known and nothing can "
            f"be detected. What can be had: {' and '.join(can)} (`rocktokens check RUN`)."
        )
    return {
        "rollouts": len(samples),
        "tokens": int(size_R.sum()),
        "steps": [samples[0].step, samples[-1].step],
        "teacher": dump.has_teacher,
        "exact_kl": dump.has_kl,
        "estimator": "full distributions" if dump.has_kl else "sampled tokens" if dump.has_teacher else None,
        "notes": notes,
    }


def _refuse_other_tokenizer(dump: Dump, tokenizer: Any, name: str) -> None:
    """Refuse ids that the tokenizer does not have, or that do not spell the text which the dump has for them."""
    said, known = "", max(tokenizer.get_vocab().values())
    if len(dump.tokenizers) > 1:
        said = f"the files were made with several tokenizers ({', '.join(sorted(dump.tokenizers))})"
    for sample in dump.samples:
        largest = max(max(sample.token_ids), *sample.prompt_ids, 0)
        if largest > known:
            said = f"{sample.source}: token id {largest} is not one of tokenizer {name}, whose largest is {known}"
    wrong, named = list[str](), [sample for sample in dump.samples if sample.text and not said][:SPELLED]
    for sample in named:
        read = [str(tokenizer.decode(list(sample.token_ids), skip_special_tokens=skip)) for skip in (True, False)]
        if "".join(str(sample.text).split()) not in ["".join(text.split()) for text in read]:
            wrong.append(f"{sample.source} reads {read[0][:60]!r}, the dump says {str(sample.text)[:60]!r}")
    if named and len(wrong) > MISSPELLED * len(named):
        said = f"{len(wrong)} of {len(named)} rollouts do not spell their own text under tokenizer {name}: {wrong[0]}"
    if said:
        raise DataError(f"{said}. Name the tokenizer of the model that was trained; other tokenizers are other runs.")
