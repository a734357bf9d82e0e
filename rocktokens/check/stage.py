"""`rocktokens check`: the known ways in which on-policy distillation goes wrong unnoticed, each as a finding.

A pair, its prompts, servers, and a run, ours or imported. Nothing is written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rocktokens.check.findings import Finding, judge, unknown
from rocktokens.check.run import CUT, run_findings
from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.stats import wilson_interval
from rocktokens.train.record import lost_updates
from rocktokens.train.settings import DistillConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rocktokens.prompts.checkers import Checker
    from rocktokens.prompts.tasks import Prompt

LOST = 0.5  # share of updates lost in the weights' format that is too much
WEIGHTS = 200_000  # weights that are looked at


def check(
    path: Path | None = None,
    pair: PairConfig | None = None,
    prompts: PromptsConfig | None = None,
    rollouts: RolloutConfig | None = None,
    servers: ServersConfig | None = None,
    *,
    probe: int = 32,
    learning_rate: float = DistillConfig.learning_rate,
) -> list[Finding]:
    """Look for known faults, one finding per check.

    Args:
        path: A run, ours or imported; None: a pair and prompts alone.
        pair: The models; where a run names its own and none are given here, the run's.
        prompts: The prompts, likewise.
        rollouts: How rollouts are sampled.
        servers: Servers to be probed.
        probe: Prompts that both models answer in this process; 0: load no weights.
        learning_rate: The learning rate that is compared with the resolution of the weights.
    """
    from rocktokens.models.tokens import run_tokenizer
    from rocktokens.stage import resolve

    pair, prompts = pair or PairConfig(), prompts or PromptsConfig()
    rollouts, servers = rollouts or RolloutConfig(), servers or ServersConfig()
    found: list[Finding] = []
    if path is not None:
        run = open_run(path)
        found += run_findings(run, run_tokenizer(run))
        named = run.manifest["config"].get("pair") or {}
        if not (pair.student and pair.teacher) and not (named.get("student") and named.get("teacher")):
            return [*found, unknown("pair", "The run names no pair, so models and prompts were not checked.")]
    pair, prompts = resolve(path or Path(), pair, prompts)
    if not pair.student or not pair.teacher:
        raise ConfigError("give both --pair.student and --pair.teacher, or a run that names them")
    from rocktokens.check.needs import memory_and_time
    from rocktokens.check.pair import load_side, pair_findings
    from rocktokens.check.prompts import prompt_findings

    student = load_side(pair.student, pair)
    found += pair_findings(student, load_side(pair.teacher, pair), rollouts)
    found.append(memory_and_time(pair, rollouts))
    found += server_findings(pair, rollouts, servers)
    try:
        found += prompt_findings(prompts, student.tokenizer)
        if not any(finding.status == "wrong" and finding.check == "readable answers" for finding in found):
            found += probe_findings(pair, prompts, rollouts, probe, learning_rate)
    except RockTokensError as error:
        found.append(Finding("prompts", "wrong", "", str(error), "Mend the prompts or the pair, then ask again."))
    return found


def server_findings(pair: PairConfig, rollouts: RolloutConfig, servers: ServersConfig) -> list[Finding]:
    """Is every server that is named there, and does it serve the model that is meant?"""
    from rocktokens.models.pair import context_of, pair_facts
    from rocktokens.servers.connect import open_sampling, open_states, why_no_states
    from rocktokens.servers.pool import ServerPool

    found = []
    for role, url in [("student", url) for url in servers.student] + [("teacher", url) for url in servers.teacher]:
        one = replace(servers, student=(url,), teacher=(url,))
        try:
            with ServerPool([url], servers) as pool:
                pool.models()  # raises where nobody answers
                context = pool.context
            own = context_of(pair.teacher if role == "teacher" else pair.student, pair)
            needed = min(rollouts.max_new_tokens + 1, own or rollouts.max_new_tokens + 1)
            if context is not None and context < needed:
                raise ConfigError(
                    f"{url} takes {context} tokens, and a prompt with its rollout needs more than {needed - 1}; start "
                    "it with a larger --max-model-len, or lower --rollouts.max-new-tokens"
                )
            # Opening it compares the log-probabilities of what it serves with those of the model that is meant.
            gives = "rollouts"
            if role == "student" or why_no_states(url, servers):
                open_sampling(pair, one, rollouts, of_teacher=role == "teacher")
            else:
                gives, _ = "hidden states", open_states(pair, one, pair_facts(pair))
            limit = "context not said" if context is None else f"context {context:,}"
            found.append(Finding("server", "fine", limit, f"{url} serves the {role} and gives its {gives}."))
        except RockTokensError as error:
            found.append(Finding("server", "wrong", "", str(error), f"Mend what {url} serves, then ask again."))
    return found


# ---------------------------------------------------------------- with the models


def probe_findings(
    pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig, probe: int, rate: float
) -> list[Finding]:
    """Every check that samples or loads weights; each says so where the probe is switched off."""
    if not probe:
        names = ("teacher ahead", "length limit", "learning rate")
        return [unknown(name, "Models were not loaded (--probe 0).") for name in names]
    from rocktokens.models.pair import load_pair
    from rocktokens.prompts.checkers import make_checker
    from rocktokens.prompts.tasks import load_prompts
    from rocktokens.sample.rollouts import make_sampler, requests_for

    models = load_pair(pair)
    asked = load_prompts(replace(prompts, limit=probe), models.tokenizer, part="detection")
    settings = replace(rollouts, num_rollouts=1)
    ids = {
        who: [
            tuple(answer.token_ids)
            for answer in make_sampler(models, settings, of_teacher=who == "teacher").generate(
                requests_for(asked, settings)
            )
        ]
        for who in ("student", "teacher")
    }
    cut = [not own or own[-1] not in models.eos_ids for own in ids["teacher"]]
    return [
        teacher_ahead(asked, ids, models.tokenizer, make_checker(prompts)),
        length_limit(cut, rollouts.max_new_tokens),
        resolution(models.student, rate),
    ]


def teacher_ahead(
    prompts: list[Prompt],
    ids: dict[str, list[tuple[int, ...]]],
    tokenizer: PreTrainedTokenizerBase,
    check: Checker | None,
) -> Finding:
    """Is the teacher more often right than the student?"""
    from rocktokens.stats import accuracy_estimate, right_shares

    name = "teacher ahead"
    known = [at for at, prompt in enumerate(prompts) if prompt.answer is not None]
    if check is None or not known:
        return unknown(name, "The prompts have no answers to check, so accuracy cannot be measured.")
    right, shown = {}, []
    for who in ("student", "teacher"):
        texts = tokenizer.batch_decode([list(ids[who][at]) for at in known], skip_special_tokens=True)
        right[who] = right_shares(texts, [prompts[at].answer or "" for at in known], check)
        found = accuracy_estimate(right[who], rng=np.random.default_rng(0))
        shown.append(f"{who} {found.value:.0%} [{found.low:.0%}, {found.high:.0%}]")
    gain = right["teacher"] - right["student"]
    error = 1.96 * gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.inf
    if gain.mean() - error <= 0 <= gain.mean() + error:
        sentence = f"On {len(known)} prompts the teacher is not proven to be better than the student."
        return Finding(name, "note", ", ".join(shown), sentence, "Probe with more prompts (--probe 200).")
    return judge(
        name,
        gain.mean() < 0,
        ", ".join(shown),
        "The teacher is better than the student.",
        "The teacher is worse than the student on these prompts.",
        "Choose another teacher, or check its chat template: distillation moves the student towards it.",
    )


def length_limit(cut: list[bool], limit: int) -> Finding:
    """Is the length limit long enough for the teacher?"""
    share = wilson_interval(sum(cut), len(cut))
    return judge(
        "length limit",
        share.low > CUT / 2 and share.value > CUT,
        f"{share.value:.0%} of {len(cut)} cut at {limit} tokens",
        "The teacher finishes within the length limit.",
        "The teacher itself does not finish within the length limit.",
        "Raise --rollouts.max-new-tokens (and --distill.max-new-tokens), or ask for shorter rollouts.",
    )


def resolution(student: PreTrainedModel, rate: float) -> Finding:
    """Is an update of the learning rate's size larger than the resolution of the weights?"""
    weights = [parameter.detach().flatten() for parameter in student.parameters() if parameter.dim() > 1]
    dtype = str(weights[0].dtype).removeprefix("torch.")
    step = max(1, sum(len(own) for own in weights) // WEIGHTS)
    lost = lost_updates(np.concatenate([own[::step].float().cpu().numpy() for own in weights]), rate, dtype)
    return judge(
        "learning rate",
        lost > LOST,
        f"{lost:.0%} of updates of {rate:g} lost in {dtype}",
        "Updates are larger than the resolution of the weights.",
        "Most weights do not change when a step of this size is added to them in their own format.",
        "Keep float32 weights (--pair.dtype float32, with bf16 for products), or raise the learning rate.",
    )
