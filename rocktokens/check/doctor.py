"""The stage `doctor`: the known ways in which on-policy distillation goes wrong unnoticed, each as a check.

A check has a number, a sentence and a remedy. Nothing is written; a fault makes the command end with status 1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rocktokens.check.doctor_findings import Finding, unknown, wrong
from rocktokens.check.doctor_pair import Side, load_side, pair_findings, round_trip
from rocktokens.check.doctor_probe import Probe, probe_findings
from rocktokens.check.doctor_prompts import prompt_findings
from rocktokens.check.doctor_run import run_findings
from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, open_run
from rocktokens.sample.settings import RolloutConfig

__all__ = ["Finding", "Probe", "doctor"]


def doctor(
    path: Path | None, pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig, probe: Probe
) -> list[Finding]:
    """Look for known faults.

    Args:
        path: a run, ours or imported; None: a pair and prompts alone.
        pair: the models; where a run names its own and none are given here, the run's.
        prompts: the prompts, likewise.
        rollouts: how rollouts are sampled.
        probe: what to try with the models.

    Returns:
        One finding per check. Runs without a pair (imported ones) are checked by their tables alone.
    """
    from rocktokens.stage import resolve
    from rocktokens.tokens import run_tokenizer

    found: list[Finding] = []
    if path is not None:
        run = open_run(path)
        found += run_findings(run, run_tokenizer(run))
        if not (pair.student and pair.teacher) and not _names_pair(run):
            return [*found, unknown("pair", "The run names no pair, so models and prompts were not checked.")]
    pair, prompts = resolve(path or Path(), pair, prompts)
    if not pair.student or not pair.teacher:
        raise ConfigError("give both --pair.student and --pair.teacher, or a run that names them")
    student, teacher = load_side(pair.student, pair), load_side(pair.teacher, pair)
    found += pair_findings(student, teacher, rollouts)
    try:
        found += _with_prompts(student, prompts)
        found += probe_findings(pair, prompts, rollouts, probe)
    except RockTokensError as error:
        found.append(wrong("prompts", "", str(error), "Mend the prompts or the pair, then ask again."))
    return found


def _names_pair(run: Run) -> bool:
    pair = run.manifest["config"].get("pair") or {}
    return bool(pair.get("student") and pair.get("teacher"))


def _with_prompts(student: Side, prompts: PromptsConfig) -> list[Finding]:
    from rocktokens.prompts.tasks import load_prompts

    found = prompt_findings(prompts, student.tokenizer)
    if any(finding.status == "wrong" and finding.check == "readable answers" for finding in found):
        return found
    some = load_prompts(replace(prompts, limit=50), student.tokenizer)
    texts = [f"{prompt.text} {prompt.answer or ''}".rstrip() for prompt in some]
    return [*found, replace(round_trip(student, texts), check="round trip of prompts")]
