"""The doctor's checks that need the models: a few rollouts of both, and one forward pass over them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rocktokens.accuracy import accuracy_estimate, right_shares
from rocktokens.check.doctor_findings import Finding, fine, note, unknown, wrong
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.stats import wilson_interval
from rocktokens.train.health import clamped_share, lost_updates

# Share of rollouts cut at the limit, of updates lost, of top-k losses clamped, that is too much.

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rocktokens.models.pair import Pair
    from rocktokens.prompts.checkers import Checker
    from rocktokens.prompts.tasks import Prompt
CUT, LOST, CLAMPED = 0.2, 0.5, 0.05
# Mean difference of log-probabilities, nats, that a server's own precision explains.
SERVED = 0.15
WEIGHTS = 200_000


@dataclass(frozen=True)
class Probe:
    """What the doctor is to try with the models."""

    prompts: int
    learning_rate: float
    top_k: int | None = None
    servers: ServersConfig = field(default_factory=ServersConfig)


def probe_findings(pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig, probe: Probe) -> list[Finding]:
    """Every check that samples or loads weights; each says so where the probe is switched off."""
    if not probe.prompts:
        why = "Models were not loaded (--probe 0)."
        names = ("teacher ahead", "length limit", "learning rate", "top-k loss", "server")
        return [unknown(name, why) for name in names]
    from rocktokens.models.pair import load_pair
    from rocktokens.prompts.checkers import make_checker
    from rocktokens.prompts.tasks import load_prompts

    models = load_pair(pair)
    asked = load_prompts(replace(prompts, limit=probe.prompts), models.tokenizer, part="detection")
    settings = replace(rollouts, num_rollouts=1)
    answers = {who: _sampled(models, asked, settings, who == "teacher") for who in ("student", "teacher")}
    check = make_checker(prompts)
    return [
        teacher_ahead(asked, answers, models.tokenizer, check),
        length_limit([not answer.ended for answer in answers["teacher"]], rollouts.max_new_tokens),
        learning_rate(models.student, probe.learning_rate),
        top_k_loss(models, asked, answers["student"], probe.top_k),
        server(pair, models.tokenizer, models.vocabulary, probe.servers),
    ]


@dataclass(frozen=True)
class _Answer:
    ids: tuple[int, ...]
    ended: bool


def _sampled(models: Pair, prompts: list[Prompt], settings: RolloutConfig, of_teacher: bool) -> list[_Answer]:
    from rocktokens.sample.rollouts import make_sampler, requests_for

    found = make_sampler(models, settings, of_teacher=of_teacher).generate(requests_for(prompts, settings))
    return [_Answer(tuple(own.token_ids), bool(own.token_ids) and own.token_ids[-1] in models.eos_ids) for own in found]


def teacher_ahead(
    prompts: list[Prompt], answers: dict[str, list[_Answer]], tokenizer: PreTrainedTokenizerBase, check: Checker | None
) -> Finding:
    """Is the teacher more often right than the student?"""
    name = "teacher ahead"
    known = [at for at, prompt in enumerate(prompts) if prompt.answer is not None]
    if check is None or not known:
        return unknown(name, "The prompts have no answers to check, so accuracy cannot be measured.")
    right = {}
    for who, own in answers.items():
        texts = tokenizer.batch_decode([list(own[at].ids) for at in known], skip_special_tokens=True)
        right[who] = right_shares(texts, [prompts[at].answer or "" for at in known], check)
    shown = []
    for who in ("student", "teacher"):
        found = accuracy_estimate(right[who], rng=np.random.default_rng(0))
        shown.append(f"{who} {found.value:.0%} [{found.low:.0%}, {found.high:.0%}]")
    gain = right["teacher"] - right["student"]
    error = 1.96 * gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.inf
    number = ", ".join(shown)
    if gain.mean() + error < 0:
        return wrong(
            name,
            number,
            "The teacher is worse than the student on these prompts.",
            "Choose another teacher, or check its chat template: distillation moves the student towards it.",
        )
    if gain.mean() - error <= 0:
        return note(
            name,
            number,
            f"On {len(known)} prompts the teacher is not proven to be better than the student.",
            "Probe with more prompts (--probe 200).",
        )
    return fine(name, number, "The teacher is better than the student.")


def length_limit(cut: list[bool], limit: int) -> Finding:
    """Is the length limit long enough for the teacher?"""
    share = float(np.mean(cut)) if cut else 0.0
    number = f"{share:.0%} of {len(cut)} cut at {limit} tokens"
    low = wilson_interval(int(np.sum(cut)), len(cut)).low if cut else 0.0
    if low > CUT / 2 and share > CUT:
        return wrong(
            "length limit",
            number,
            "The teacher itself does not finish within the length limit.",
            "Raise --rollouts.max-new-tokens (and --distill.max-new-tokens), or ask for shorter rollouts.",
        )
    return fine("length limit", number, "The teacher finishes within the length limit.")


def learning_rate(student: PreTrainedModel, rate: float) -> Finding:
    """Is an update of the learning rate's size larger than the resolution of the weights?"""
    weights = [parameter.detach().flatten() for parameter in student.parameters() if parameter.dim() > 1]
    dtype = str(weights[0].dtype).removeprefix("torch.")
    step = max(1, sum(len(own) for own in weights) // WEIGHTS)
    sample = np.concatenate([own[::step].float().cpu().numpy() for own in weights])
    lost = lost_updates(sample, rate, dtype)
    number = f"{lost:.0%} of updates of {rate:g} lost in {dtype}"
    if lost > LOST:
        return wrong(
            "learning rate",
            number,
            "Most weights do not change when a step of this size is added to them in their own format.",
            "Keep float32 weights (--pair.dtype float32, with bf16 for products), or raise the learning rate.",
        )
    return fine("learning rate", number, "Updates are larger than the resolution of the weights.")


def top_k_loss(models: Pair, prompts: list[Prompt], answers: list[_Answer], k: int | None) -> Finding:
    """How many tokens would a clamped top-k forward KL leave without gradient?"""
    if k is None:
        return unknown("top-k loss", "No top-k loss was asked about (--top-k 64).")
    import torch

    shares = []
    for prompt, answer in list(zip(prompts, answers))[:16]:
        if not answer.ids:
            continue
        ids = torch.tensor([[*prompt.prompt_ids, *answer.ids]])
        rows = slice(len(prompt.prompt_ids) - 1, -1)
        with torch.inference_mode():
            student, teacher = (
                model(input_ids=ids.to(model.device)).logits[0, rows, : models.vocabulary].float().log_softmax(-1).cpu()
                for model in (models.student, models.teacher or models.student)
            )
        shares.append((clamped_share(student.numpy(), teacher.numpy(), k), len(answer.ids)))
    share = float(np.average([own for own, _ in shares], weights=[size for _, size in shares])) if shares else 0.0
    number = f"{share:.1%} of tokens at k = {k}"
    if share > CLAMPED:
        return wrong(
            "top-k loss",
            number,
            "A forward KL over the teacher's top k tokens is negative there; clamped at 0 it gives no gradient.",
            "Use the full vocabulary (rocktokens does), add a tail bucket, or raise k.",
        )
    return fine("top-k loss", number, "A clamped top-k loss would lose hardly any tokens.")


def server(pair: PairConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int, servers: ServersConfig) -> Finding:
    """Does the teacher's server give the local teacher's log-probabilities on a probe?"""
    if not servers.teacher:
        return unknown("server", "No teacher server was named (--servers.teacher URL).")
    from rocktokens.servers.pool import ServerPool
    from rocktokens.servers.probe import own_logprobs, probe_ids, served_logprobs

    ids = probe_ids(tokenizer, vocabulary)
    with ServerPool(servers.teacher, servers) as pool:
        served = np.array(served_logprobs(pool, ids))
    local = np.array(own_logprobs(pair.teacher, pair, ids))
    mean, largest = float(np.abs(served - local).mean()), int(np.abs(served - local).argmax())
    number = f"mean {mean:.3g} nats, largest {abs(served - local)[largest]:.3g} at token {largest + 1}"
    if mean > SERVED:
        return wrong(
            "server",
            number,
            "The server's log-probabilities are not those of the teacher loaded here.",
            "Serve the same weights in the same precision, without quantisation, and with the same tokenizer.",
        )
    return fine("server", number, "The server gives the teacher's log-probabilities.")
