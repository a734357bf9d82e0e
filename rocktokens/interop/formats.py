"""Dumps of other trainers as samples, one per rollout: a reader for each format, and a table of each trainer's names.

slime     `--dump-details DIR`: train_data/N.pt, a dictionary with `samples`, each over prompt and rollout (`tokens`,
          `response_lengths`) with columns over the rollout. August 2026.
prime-rl  `trainer.enable_token_export`: token_exports/step_N, a file per process, one object per sequence, all columns
          aligned with `token_ids` of prompt and rollout. It leaves out the teacher's `ref_logprobs`. August 2026.
trl       `log_completions=True`: completions_N.parquet (text alone), with the telemetry that our trainer writes:
          telemetry/step=N/part-*.parquet, whose rollout N/i is row i of the completions of step N.
verl      the parts that verl_plugin.py records. Or `trainer.rollout_data_dir`: N.jsonl, where every list of
          `reward_extra_infos_dict` with one entry per sample is a column. Or the batch saved as plain tensors (.pt):
          `prompts` (B, P) padded on the left, `responses` (B, R) on the right, `attention_mask` (B, P + R), columns
          (B, R), and `teacher_logprobs` (B, P + R, 1), where entry s is of token s + 1. verl 0.9.1.
jsonl     one rollout per line; only `token_ids` is required.

Nothing of a trainer is imported, and nothing in a file is executed. What is not in a dump stays empty; text is never
tokenised again, because the sampled ids cannot be recovered from it. Shapes: T tokens of one rollout.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rocktokens.errors import ConfigError, DataError
from rocktokens.run import reading
from rocktokens.stats import Floats
from rocktokens.tables import METRICS
from rocktokens.values import Row

Names = Mapping[str, str | tuple[str, ...]]
"""Field of `Sample` → the trainer's name for it, or several names of which the first that is there counts."""


@dataclass(frozen=True)
class Sample:
    """One rollout of a dump."""

    step: int
    rollout_id: str
    token_ids: tuple[int, ...]
    """Sampled ids, as the engine returned them."""
    prompt_ids: tuple[int, ...] = ()
    prompt_id: str = ""
    """Which prompt it answers; empty: rollouts with the same prompt ids share a prompt."""
    counts_T: NDArray[np.bool_] | None = None
    """Which tokens the trainer's loss counts; None: all."""
    student_logprob_T: Floats | None = None
    """Log-probabilities of the sampled tokens by the trainer's forward pass."""
    engine_logprob_T: Floats | None = None
    """The same by the engine that sampled them."""
    teacher_logprob_T: Floats | None = None
    log_ratio_T: Floats | None = None
    """Student's minus teacher's log-probability, where only the difference was recorded."""
    kl_T: Floats | None = None
    """Reverse KL over the whole vocabulary; no trainer but ours records it."""
    student_entropy_T: Floats | None = None
    teacher_entropy_T: Floats | None = None
    grad_norm_T: Floats | None = None
    text: str | None = None
    answer: str | None = None
    correct: bool | None = None
    truncated: bool | None = None
    source: str = ""
    """File and place in it, for messages."""

    @property
    def ratio_T(self) -> Floats | None:
        """log p_student - log p_teacher of every sampled token; None where the dump has no teacher values."""
        if self.log_ratio_T is not None:
            return self.log_ratio_T
        student_T = self.student_logprob_T if self.student_logprob_T is not None else self.engine_logprob_T
        if student_T is None or self.teacher_logprob_T is None:
            return None
        return student_T - self.teacher_logprob_T

    @property
    def prompt_name(self) -> str:
        """A name that rollouts of one prompt share: its own, or a digest of the prompt's ids."""
        if self.prompt_id or not self.prompt_ids:
            return self.prompt_id
        return hashlib.blake2b(np.asarray(self.prompt_ids, np.int64).tobytes(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Dump:
    """Everything that was read, in the order of its steps, and what the reader has to say about it."""

    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()
    tokenizers: frozenset[str] = frozenset()
    """Tokenizers that the files name, where they do."""

    @property
    def has_teacher(self) -> bool:
        """Whether every sample has the teacher's log-probabilities, or the difference to them."""
        return all(sample.ratio_T is not None for sample in self.samples)

    @property
    def has_kl(self) -> bool:
        """Whether every sample has the exact divergence."""
        return all(sample.kl_T is not None for sample in self.samples)


NO_TEACHER = (
    "prime-rl's export has no teacher log-probabilities (ref_logprobs); add them to _export_columns in "
    "prime_rl/trainer/rl/token_export.py, one line: see docs/other-trainers.md"
)
ENGINE_ONLY = "the files hold no log-probabilities of the trainer (log_probs); the engine's stand for the student's"
# Field of a sample → the trainer's name for it.
JSONL: Names = {
    **{name: name for name in ("token_ids", "prompt_ids", "prompt_id", "text", "answer", "correct", "truncated")},
    **{f"{name}_T": name for name in ("kl", "student_entropy", "teacher_entropy")},
    **{f"{who}_logprob_T": f"{who}_logprobs" for who in ("student", "engine", "teacher")},
    "counts_T": "mask",
}
PRIME_RL: Names = {
    "counts_T": "loss_mask",
    "student_logprob_T": "trainer_logprobs",
    "engine_logprob_T": "inference_logprobs",
    "teacher_logprob_T": ("ref_logprobs", "teacher_logprobs"),
    "student_entropy_T": "entropy",
}
SLIME: Names = {
    "counts_T": "loss_masks",
    "student_logprob_T": "log_probs",
    "engine_logprob_T": "rollout_log_probs",
    "teacher_logprob_T": "teacher_log_probs",
    "log_ratio_T": "opd_reverse_kl",
    "student_entropy_T": "entropy",
}
VERL: Names = {
    "token_ids": ("responses", "response_ids"),
    "prompt_ids": ("prompts", "prompt_ids"),
    "counts_T": "response_mask",
    "student_logprob_T": ("log_probs", "old_log_probs"),
    "engine_logprob_T": "rollout_log_probs",
    "teacher_logprob_T": "teacher_logprobs",
    "student_entropy_T": "entropys",
    "text": "output",
}
TRL: Names = {"token_ids": "token_id"} | {f"{name}_T": name for name in METRICS}


def read_dump(name: str, files: Sequence[Path]) -> Dump:
    """Read a dump of one of FORMATS; directories are searched for the format's files."""
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FORMATS)}"
        raise ConfigError(f"no format is called {name!r}; {hint}")
    form, found, missing = FORMATS[name], list[Path](), [path for path in files if not path.exists()]
    for path in files:
        found += sorted({file for own in form.patterns for file in path.rglob(own)}) if path.is_dir() else [path]
    notes, tokenizers = dict[str, None](), set[str]()
    samples = list(form.read(found, notes, tokenizers)) if found and not missing else []
    if not samples:
        said = f"{', '.join(map(str, files))} holds no rollouts of {form.what}"
        said = said if found else f"{files[0]} holds no file {' or '.join(form.patterns)}"
        raise DataError(f"there is no file {missing[0]}" if missing else said)
    return Dump(tuple(sorted(samples, key=lambda sample: sample.step)), tuple(notes), frozenset(tokenizers))


def _jsonl(files: list[Path], notes: dict[str, None], tokenizers: set[str]) -> Iterator[Sample]:
    known = {*JSONL.values(), "step", "rollout_id", "tokenizer"}
    for where, name, row in _json_lines(files):
        if row.keys() - known:
            notes[f"columns that are not read: {', '.join(sorted(row.keys() - known))}"] = None
        tokenizers |= {str(row["tokenizer"])} if row.get("tokenizer") else set()
        yield sample_of(row, JSONL, where, step=int(row.get("step") or 0), rollout_id=str(row.get("rollout_id", name)))


def _prime_rl(files: list[Path], notes: dict[str, None], tokenizers: set[str]) -> Iterator[Sample]:
    for path in files:
        if path.parent.name.startswith("step_") and not (path.parent / "STABLE").exists():
            raise DataError(f"{path.parent} has no file STABLE: prime-rl is still writing it, or was stopped. Wait.")
    for where, name, row in _json_lines(files):
        counted = np.flatnonzero(row.get("loss_mask", ()))
        if not len(counted) or not {"token_ids", "trainer_logprobs"} <= row.keys() or row.get("schema_version", 1) != 1:
            raise DataError(f"{where}: this is no token export of prime-rl in schema version 1, or no token has loss")
        first = int(counted[0])  # the rollout begins where the first token counts
        cut = {key: value[first:] for key, value in row.items() if isinstance(value, list)}
        sample = sample_of(
            cut,
            PRIME_RL,
            where,
            step=int(row.get("step") or 0),
            rollout_id=f"{row.get('step', 0)}/{name}",
            token_ids=cut["token_ids"],
            prompt_ids=row["token_ids"][:first],
        )
        if sample.teacher_logprob_T is None:
            notes[NO_TEACHER] = None
        yield sample


def _slime(files: list[Path], notes: dict[str, None], tokenizers: set[str]) -> Iterator[Sample]:
    for path in files:
        if path.name.startswith("eval_") or path.parent.name == "rollout_data":
            continue  # evaluations, and the same steps before the trainer has seen them
        content = _load_tensors(path)
        if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
            raise DataError(f"{path} is no dump of slime's --dump-details: it has no list `samples`")
        step = _digits(path.stem if content.get("rollout_id") is None else str(content["rollout_id"]))
        for number, row in enumerate(content["samples"]):
            with reading(path, "it is no dump of slime's --dump-details"):
                tokens = _listed(row["tokens"])
                first = len(tokens) - int(row["response_lengths"])
            name = f"{step}/{row.get('sample_index', number)}"
            known = {"step": step, "rollout_id": name, "token_ids": tokens[first:], "prompt_ids": tokens[:first]}
            sample = sample_of(row, SLIME, f"{path}, sample {number}", **known)
            if sample.student_logprob_T is None:
                notes[ENGINE_ONLY] = None
            yield sample


def _verl(files: list[Path], notes: dict[str, None], tokenizers: set[str]) -> Iterator[Sample]:
    yield from _verl_parts([path for path in files if path.suffix == ".parquet"], notes)
    for path in (path for path in files if path.suffix != ".parquet"):
        if path.suffix == ".pt":
            yield from _verl_batch(_load_tensors(path), path)
            continue
        for where, name, row in _json_lines([path]):
            if not isinstance(first_of(row, VERL["token_ids"]), list):
                raise DataError(
                    f"{path} holds text only, as verl's rollout_data_dir writes it, and the sampled token ids cannot "
                    "be had back from text. Train with ROCKTOKENS_TELEMETRY=DIRECTORY, or put the lists into "
                    "reward_extra_infos_dict: see docs/other-trainers.md"
                )
            score, answer = first_of(row, ("acc", "score")), row.get("gts")
            yield sample_of(
                row,
                VERL,
                where,
                step=int(row.get("step") or 0),
                rollout_id=str(row.get("request_id") or name),
                answer=None if answer is None else str(answer),
                correct=None if score is None else float(score) > 0,
            )


def _verl_parts(files: list[Path], notes: dict[str, None]) -> Iterator[Sample]:
    """What our plug-in recorded. Processes that share a sequence (sequence or tensor parallel) record the same."""
    outside, tokens, read = 0, 0, dict[Path, list[pa.Table]]()
    for path in files:
        with reading(path, "copy it again"):
            table = pq.read_table(path).replace_schema_metadata(None)
        others = read.setdefault(path.parent, [])
        if any(table.equals(other) for other in others):
            continue
        others.append(table)
        for number, row in enumerate(table.to_pylist()):
            beyond = [own for own, counts in zip(row.get("outside_top") or (), row["response_mask"]) if counts]
            outside, tokens = outside + sum(beyond), tokens + len(beyond)
            name = f"{path.parent.name}/{path.stem}/{number}"
            yield sample_of(row, VERL, f"{path}, rollout {number}", step=row["step"], rollout_id=name)
    if outside:
        notes[
            f"{outside:,} of {tokens:,} tokens lie outside of the teacher's top tokens; what they cost is a lower bound"
        ] = None


def _verl_batch(batch: Any, path: Path) -> Iterator[Sample]:
    with reading(path, "save verl's prompts, responses and attention_mask as plain tensors"):
        own = {name: np.asarray(values) for name, values in batch.items() if values is not None}
        seen_BS = own["attention_mask"].astype(bool)
    prompt_BP, response_BR = own["prompts"], own["responses"]
    width = prompt_BP.shape[1]
    columns_BR = {name: own[name] for name in ("old_log_probs", "rollout_log_probs", "entropys") if name in own}
    columns_BR["response_mask"] = own.get("response_mask", seen_BS[:, width:])
    teacher = own.get("teacher_logprobs")
    if teacher is not None and teacher.shape[2:] not in ((), (1,)):
        raise DataError(
            f"{path}: teacher_logprobs hold the teacher's top {teacher.shape[2]} tokens; the cost of a sampled token "
            "outside of them is unknown, and means without it are wrong. Record the sampled token's log-probability."
        )
    if teacher is not None:
        teacher = teacher.reshape(teacher.shape[:2])
        shifted = slice(width - 1, width - 1 + response_BR.shape[1])  # entry s is of token s + 1
        columns_BR["teacher_logprobs"] = teacher if teacher.shape == response_BR.shape else teacher[:, shifted]
    for number in range(len(response_BR)):
        length = int(seen_BS[number, width:].sum())
        row: Row = {name: values_BR[number, :length] for name, values_BR in columns_BR.items()}
        row |= {"responses": response_BR[number, :length], "prompts": prompt_BP[number, seen_BS[number, :width]]}
        where = f"{path}, sample {number}"
        yield sample_of(row, VERL, where, step=_digits(path.stem), rollout_id=f"{path.stem}/{number}")


def _trl(files: list[Path], notes: dict[str, None], tokenizers: set[str]) -> Iterator[Sample]:
    texts, parts = dict[int, list[str]](), list[tuple[int, Path, pa.Table]]()
    for path in files:
        with reading(path, "copy it again"):
            table = pq.read_table(path)
        if {"step", "completion"} <= set(table.column_names):
            for step, text in zip(table["step"].to_pylist(), table["completion"].to_pylist()):
                texts.setdefault(step, []).append(text)
        elif {"rollout_id", "position", "token_id"} <= set(table.column_names):
            table = table.sort_by([("rollout_id", "ascending"), ("position", "ascending")])
            parts.append((_digits(path.parent.name), path, table))
        else:
            notes[f"{path} is neither TRL's completions nor our telemetry, and is not read"] = None
    if not parts:
        raise DataError(
            f"{files[0]} holds no telemetry, and TRL's completions are text alone. Give the telemetry parts of the run "
            "too (RUN/telemetry): RockDistillationTrainer writes them when it has run=."
        )
    if not texts:
        notes["no completions_*.parquet was given: rollouts are shown as their tokens, without prompts"] = None
    for step, path, table in parts:
        rollouts = np.asarray(table["rollout_id"].to_pylist())
        firsts = np.flatnonzero(np.r_[True, rollouts[1:] != rollouts[:-1]])
        for start, stop in zip(firsts, [*firsts[1:], len(rollouts)]):
            part, name, own = table.slice(int(start), int(stop - start)), str(rollouts[start]), texts.get(step, [])
            place = name.rpartition("/")[2]
            yield sample_of(
                {column: part[column].to_numpy() for column in part.column_names},
                TRL,
                f"{path}, rollout {name}",
                step=step,
                rollout_id=name,
                prompt_id=part["prompt_id"][0].as_py() if "prompt_id" in part.column_names else "",
                text=own[int(place)] if place.isdigit() and int(place) < len(own) else None,
            )


class Format(NamedTuple):
    """One kind of dump."""

    what: str
    patterns: tuple[str, ...]
    """Names of its files, for a directory that is searched."""
    read: Callable[[list[Path], dict[str, None], set[str]], Iterator[Sample]]
    """Files → samples; notes for the user and the names of tokenizers are added to the other two arguments."""


FORMATS = {
    "slime": Format("slime's --dump-details", ("*.pt",), _slime),
    "prime-rl": Format("prime-rl's enable_token_export", ("*_[0-9]*.jsonl",), _prime_rl),
    "trl": Format("TRL's log_completions with our telemetry", ("completions_*.parquet", "part-*.parquet"), _trl),
    "verl": Format("verl, by our plug-in, rollout_data_dir or tensors", ("part-*.parquet", "*.jsonl", "*.pt"), _verl),
    "jsonl": Format("JSONL of token_ids, student_logprobs and teacher_logprobs", ("*.jsonl",), _jsonl),
}


def sample_of(row: Row, names: Names, where: str, **known: Any) -> Sample:
    """A trainer's row as a sample; `known`: fields that are not in the row under one of the trainer's names."""
    values, said = {name: first_of(row, theirs) for name, theirs in names.items()} | known, ""
    for name in ("token_ids", "prompt_ids"):
        listed = _listed(values.get(name) if values.get(name) is not None else ())
        if any(isinstance(value, bool) or int(value) != value for value in listed):
            said = f"{names.get(name, name)} must hold whole numbers"
        values[name] = tuple(int(value) for value in listed)
    ids = values["token_ids"]
    if not ids or min(ids) < 0:
        said = f"the rollout has {'a negative token id' if ids else 'no tokens'} in token_ids"
    for name in [name for name in values if name.endswith("_T")]:
        column = floats(values[name])
        if column is not None and len(column) != len(ids):
            length = f"{len(column)} entries for {len(ids)} tokens"
            said = said or f"{names.get(name, name)} has {length}; were prompt and rollout cut at different places?"
        values[name] = column > 0 if name == "counts_T" and column is not None else column
    if said:
        raise DataError(f"{where}: {said}")
    return Sample(**{name: value for name, value in values.items() if value is not None}, source=where)


def first_of(row: Row, names: str | tuple[str, ...]) -> Any:
    """The first value that is there under one of these names, or None."""
    return next(
        (row[name] for name in ((names,) if isinstance(names, str) else names) if row.get(name) is not None), None
    )


def floats(values: Any) -> Floats | None:
    """A column as numbers; empty entries become NaN, a column that is empty throughout becomes None."""
    if values is None:
        return None
    column = np.array([np.nan if value is None else value for value in _listed(values)], np.float64)
    return None if np.isnan(column).all() and len(column) else column


def _listed(values: Any) -> list[Any]:
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def _digits(text: str) -> int:
    return int("".join(letter for letter in text if letter.isdigit()) or 0)


def _json_lines(files: Sequence[Path]) -> Iterator[tuple[str, str, Row]]:
    """(place, name, object) of every line of JSONL files; blank lines are passed over."""
    for path in files:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                where = f"{path}, line {number + 1}"
                if line.strip():
                    try:
                        row = json.loads(line)
                    except ValueError:
                        row = None
                    if not isinstance(row, dict):
                        raise DataError(f"{where}: not a JSON object")
                    yield where, f"{path.stem}/{number}", row


def _load_tensors(path: Path) -> object:
    """A torch file, read without executing anything in it; DataError where that is not possible."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises its own, pickle's and zip's errors here
        remedy = (
            "it holds Python objects, whose loading can execute code; nothing was executed. Save plain dictionaries, "
            "lists and tensors instead"
            if zipfile.is_zipfile(path)
            else "it is damaged or no torch file; nothing was executed"
        )
        reason = " ".join(str(error).split())[:160]
        raise DataError(f"{path} cannot be read with weights_only: {remedy} ({reason})") from None
