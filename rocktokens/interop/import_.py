"""The stage `import`: another trainer's dump becomes a run, with detection and a report.

Imported runs have rollouts and occurrences but no pair: nothing can be sampled, scored or compared in them. The
tokenizer is copied into the run, so that its tokens have names wherever the run goes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import DataError, RunError
from rocktokens.interop.formats import read_dump
from rocktokens.interop.samples import Dump
from rocktokens.interop.tables import engine_table, occurrences_table, rollouts_table, steps_table
from rocktokens.models.settings import PairConfig
from rocktokens.run import MANIFEST, Run, open_run
from rocktokens.values import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Rollouts whose ids are compared with the text that the dump has for them, and the share that may differ.
SPELLED, MISSPELLED = 50, 0.5


def import_dump(name: str, files: Sequence[Path], tokenizer: str, out: Path, *, detect: bool = True) -> Run:
    """Read a dump and write it as a run.

    Args:
        name: the format (rocktokens.interop.formats.FORMATS).
        files: files or directories.
        tokenizer: directory or hub name of the tokenizer that the trainer used.
        out: directory of the new run.
        detect: whether to detect costly token types and write the report, where the dump has teacher values.

    Returns:
        The run; its stage `import` records what can be computed from the dump and what cannot.
    """
    from rocktokens.models.pair import load_tokenizer

    if (out / MANIFEST).exists() and "import" not in open_run(out).manifest["config"]:
        raise RunError(f"{out} is a run of its own, which an import would overwrite. Choose another directory.")
    dump = read_dump(name, files)
    spelling = load_tokenizer(tokenizer, PairConfig())
    _refuse_other_tokenizer(dump, spelling, tokenizer)
    texts = [
        sample.text or str(spelling.decode(list(sample.token_ids), skip_special_tokens=True)) for sample in dump.samples
    ]
    section = {"format": name, "files": [str(path) for path in files], "tokenizer": tokenizer}
    run = Run.create(out, {"import": section})
    spelling.save_pretrained(run.path / "tokenizer")
    _write(run, dump, texts, spelling)
    facts = facts_of(dump)
    run.finish("import", facts)
    for note in facts["notes"]:
        log.warning("%s", note)
    if detect and dump.has_teacher:
        _detect_and_report(run, dump)
    return open_run(out)


def _write(run: Run, dump: Dump, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    step = dump.samples[-1].step
    run.write("rollouts", rollouts_table(dump, texts))
    run.write("imported", steps_table(dump))
    engine = engine_table(dump)
    if engine is not None:
        run.write("engine", engine)
    if dump.has_teacher:
        run.clear_occurrences(step)
        with run.part_writer(step) as writer:
            writer.write(occurrences_table(dump, {tokenizer.eos_token_id} - {None}))


def _detect_and_report(run: Run, dump: Dump) -> None:
    from rocktokens.detect.stage import detect
    from rocktokens.report.stage import report

    detect(run.path, replace(DetectConfig(), signal="kl" if dump.has_kl else "log_ratio"))
    report(run.path)


def facts_of(dump: Dump) -> Json:
    """Sizes, what is in the dump, and sentences on what its estimates rest on."""
    notes = list(dump.notes)
    if not dump.has_teacher:
        can = ["rollouts with their lengths and repetitions"]
        can += ["the engine's log-probabilities against the trainer's"] if engine_table(dump) is not None else []
        notes.append(
            f"the dump has no teacher log-probabilities for every rollout, so no token's cost is known and nothing can "
            f"be detected. What can be had: {' and '.join(can)} (`rocktokens check RUN`)."
        )
    elif not dump.has_kl:
        notes.append(
            "every cost is log p_student - log p_teacher of the one token that was sampled: over the student's own "
            "rollouts its mean is the reverse KL without bias, but at a single token it is noisy and may be negative. "
            "Token types need many occurrences, and single positions cannot be ranked by it."
        )
    return {
        "rollouts": len(dump.samples),
        "tokens": sum(len(sample.token_ids) for sample in dump.samples),
        "steps": [dump.samples[0].step, dump.samples[-1].step],
        "teacher": dump.has_teacher,
        "exact_kl": dump.has_kl,
        "estimator": "full distributions" if dump.has_kl else "sampled tokens" if dump.has_teacher else None,
        "notes": notes,
    }


def _refuse_other_tokenizer(dump: Dump, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse ids that the tokenizer does not have, or that do not spell the text which the dump has for them."""
    if len(dump.tokenizers) > 1:
        raise DataError(
            f"the files were made with several tokenizers ({', '.join(sorted(dump.tokenizers))}); their ids do not "
            "mean the same. Import them into runs of their own."
        )
    known = max(tokenizer.get_vocab().values())
    for sample in dump.samples:
        largest = max(max(sample.token_ids), *sample.prompt_ids, 0)
        if largest > known:
            raise DataError(
                f"{sample.source}: token id {largest} is not one of tokenizer {name}, whose largest is {known}. Name "
                "the tokenizer of the model that was trained."
            )
    spelled = [sample for sample in dump.samples if sample.text][:SPELLED]
    wrong = [sample for sample in spelled if not _spells(tokenizer, sample.token_ids, str(sample.text))]
    if spelled and len(wrong) > MISSPELLED * len(spelled):
        found = str(tokenizer.decode(list(wrong[0].token_ids), skip_special_tokens=True))
        raise DataError(
            f"{len(wrong)} of {len(spelled)} rollouts do not spell their own text under tokenizer {name}: "
            f"{wrong[0].source} reads {found[:60]!r}, the dump says {str(wrong[0].text)[:60]!r}. Name the tokenizer of "
            "the model that was trained; files of different tokenizers need runs of their own."
        )


def _spells(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> bool:
    def letters(given: str) -> str:
        return "".join(given.split())

    spelled = (str(tokenizer.decode(list(ids), skip_special_tokens=skip)) for skip in (True, False))
    return any(letters(own) == letters(text) for own in spelled)
