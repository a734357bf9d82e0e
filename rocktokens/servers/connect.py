"""From a pair and the servers a configuration names to what stages work with: engines, and a teacher's states.

Where no server is named, the models are loaded in this process. Every server is probed first: its log-probabilities of
one text must be the model's own, which is loaded for a moment if it is small enough, or else those of the other
servers. Workers of a command pass `check=False`: the driver has probed the servers before it started them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from rocktokens.divergence.heads import logits_
from rocktokens.errors import ConfigError
from rocktokens.models import pair as models_
from rocktokens.models.pair import Pair, PairFacts, RemoteTeacher, context_of, load_pair, pair_facts
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Engine
from rocktokens.sample.rollouts import check_lengths, make_sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.pool import Refused, ServerPool, wait_for
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.states import HOW_TO_SERVE, ServedStates
from rocktokens.servers.vllm import VllmEngine

log = logging.getLogger(__name__)

TEXT = "Let x = 3 + 4. Then x is 7, and so 2 * x = 14. The answer is 14."
TOKENS, SHORTEST = 16, 4  # of the probe
SAME_MODEL = 0.15  # nats of mean difference that rounding explains: bfloat16 servers stay below a tenth
MEMORY_SHARE = 0.25  # of the free memory that a model may take to be loaded for the comparison


@dataclass(frozen=True)
class Sampling:
    """An engine for one model, and what is known of its pair."""

    engine: Engine
    facts: Pair | PairFacts
    served: str | None = None
    """Where the servers read the model from, as they name it; None: the model is in this process."""

    def require_room(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Refuse prompts that the model has no room for, and servers that do not take the longest with its rollout."""
        if not isinstance(self.engine, VllmEngine):
            return check_lengths(prompts, self.engine.context)
        check_lengths(prompts, self.engine.model_context)
        self.engine.require(max((len(prompt.prompt_ids) for prompt in prompts), default=0) + max_new_tokens)


def open_sampling(
    pair: PairConfig, servers: ServersConfig, rollouts: RolloutConfig, *, of_teacher: bool = False, check: bool = True
) -> Sampling:
    """The engine that samples from the pair's student, or teacher: on its servers, or in this process."""
    urls = generating(servers) if of_teacher else list(servers.student)
    if of_teacher and servers.teacher and not urls:
        raise ConfigError(
            f"{', '.join(servers.teacher)} gives the teacher's states and does not generate; add a server that "
            "generates with the teacher to --servers.teacher, or leave --servers.teacher out to load it here"
        )
    if not urls:
        models = load_pair(pair, with_teacher=of_teacher)
        return Sampling(make_sampler(models, rollouts, of_teacher=of_teacher), models)
    facts, name = pair_facts(pair), pair.teacher if of_teacher else pair.student
    pool = ServerPool(urls, servers)
    served = probe(pool, facts, name, pair, served_logprobs).served if check else None
    log.info("%s is sampled on %s", name, ", ".join(pool.urls))
    return Sampling(_engine(pool, facts, context_of(name, pair), rollouts), facts, served or ", ".join(pool.urls))


def _engine(pool: ServerPool, facts: PairFacts | Pair, context: int | None, rollouts: RolloutConfig) -> VllmEngine:
    return VllmEngine(
        pool,
        eos_ids=facts.eos_ids,
        vocabulary=facts.vocabulary,
        model_context=context,
        temperature=rollouts.temperature,
        greedy=rollouts.greedy,
        top_k=rollouts.top_k,
        top_p=rollouts.top_p,
    )


def open_pair(pair: PairConfig, servers: ServersConfig, *, trains: bool = False, check: bool = True) -> Pair:
    """The student in this process, and the teacher too or, if it is served, its states."""
    if servers.student:
        log.info("the student's servers are not asked here: its states are computed in this process")
    if not servers.teacher:
        return load_pair(pair, trains=trains)
    models = load_pair(pair, with_teacher=False, trains=trains)
    states, found = open_states(pair, servers, models, check=check)
    urls = [url for url in servers.teacher if url not in states.asked_for]
    if urls and check:
        with ServerPool(urls, servers) as pool:
            probe(pool, models, pair.teacher, pair, served_logprobs, like=found)

    def engine(rollouts: RolloutConfig) -> Engine:
        return _engine(ServerPool(urls, servers), models, context_of(pair.teacher, pair), rollouts)

    return replace(models, remote=RemoteTeacher(states, engine if urls else None))


def open_states(
    pair: PairConfig, servers: ServersConfig, facts: Pair | PairFacts, *, check: bool = True
) -> tuple[ServedStates, Probed | None]:
    """The served teacher's states; refused if none of its servers gives them, or another model is served."""
    refusals = {url: why_no_states(url, servers) for url in servers.teacher}
    urls = [url for url, said in refusals.items() if said is None]
    if not urls:
        said = "; ".join(f"{url} says: {words}" for url, words in refusals.items())
        raise ConfigError(f"no server gives hidden states, which scoring and training need ({said}). {HOW_TO_SERVE}")
    pool, head, found = ServerPool(urls, servers), models_.read_head(pair.teacher, pair), None
    if check:
        found = probe(pool, facts, pair.teacher, pair, lambda one, ids: states_logprobs(ServedStates(one, head), ids))
    source = ServedStates(pool, head, model_context=context_of(pair.teacher, pair), wire=servers.wire)
    source.asked_for, source.served = tuple(urls), found.served if found else ", ".join(pool.urls)
    log.info("the teacher's states come from %s", ", ".join(pool.urls))
    return source, found


def require_room(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Refuse a served teacher that does not take the longest prompt with its rollout."""
    source = None if pair.remote is None else pair.remote.states
    if isinstance(source, ServedStates) and prompts:
        longest = max(len(prompt.prompt_ids) for prompt in prompts) + max_new_tokens
        own = getattr(pair.student.config.get_text_config(), "max_position_embeddings", None)
        source.require(longest if own is None else min(longest, own))


def generating(servers: ServersConfig) -> list[str]:
    """The teacher's servers that generate."""
    return [url for url in servers.teacher if why_no_states(url, servers) is not None]


def why_no_states(url: str, servers: ServersConfig) -> str | None:
    """What a server says when it is asked for a token's state; None if it gives it."""
    with ServerPool([url], servers) as pool:
        try:
            pool.ask("/pooling", {"input": [3], "task": "token_embed", "encoding_format": "float"})
        except Refused as refusal:
            if refusal.status in (401, 403):  # a wrong key says nothing about states
                raise
            return refusal.said or str(refusal.status)
    return None


# ---------------------------------------------------------------- the probe


class Probed(NamedTuple):
    """What a pool was found to serve."""

    served: str
    """Where the servers read the model from, as they name it; else their URLs."""
    logprobs: tuple[float, ...]
    """Of the probe's tokens, from its second on: the model's own, else the first server's."""


def probe(
    pool: ServerPool,
    facts: Pair | PairFacts,
    name: str,
    config: PairConfig,
    ask: Callable[[ServerPool, tuple[int, ...]], tuple[float, ...]],
    like: Probed | None = None,
) -> Probed:
    """Ask every server of a pool by itself; refuse one that serves another model than `name`.

    Args:
        pool: The servers.
        facts: The model's tokenizer and vocabulary.
        name: The model that is meant.
        config: How it would be loaded here.
        ask: The log-probabilities of a text's ids, from the second on, by the only server of the pool it is given.
        like: What was found of the same model before, so that it need not be loaded again.
    """
    pool.require(SHORTEST, "a probe")
    ids = tuple(token for token in facts.tokenizer(TEXT)["input_ids"] if token < facts.vocabulary)[:TOKENS]
    if len(set(ids)) < 8:  # the tokenizer makes too little of the text
        ids = tuple((7 * number + 3) % facts.vocabulary for number in range(TOKENS))
    ids = ids[: (pool.context or TOKENS + 1) - 1]
    reference, source = None if like is None else like.logprobs, name
    if reference is None and _loads(name, config, pool.config.verify):
        reference = own_logprobs(name, config, ids)
    for url, model in zip(pool.urls, pool.models()):
        # Checkpoints of one training may agree within the tolerance: a directory that both sides know must match.
        meant, named = Path(name).expanduser(), Path(model.root or "")
        if model.root and meant.is_dir() and named.is_dir() and meant.resolve() != named.resolve():
            raise ConfigError(f"{url} serves {model.root}, and this stage needs {meant}; start it with --model {meant}")
        with ServerPool([url], pool.config, pause=pool.pause) as one:
            found = ask(one, ids)
        if reference is None:
            reference, source = found, url
        # Over what both have: a server with a short context was asked for the beginning of the probe alone.
        apart = float(np.mean([abs(a - b) for a, b in zip(found, reference)]))
        if not apart < SAME_MODEL:  # also if it is NaN
            raise ConfigError(
                f"{url} serves another model than {source}: a probe's log-probabilities differ by {apart:.2g} nats on "
                f"average. Serve {name}, or correct the URL."
            )
    assert reference is not None
    roots = sorted({model.root for model in pool.models() if model.root})
    return Probed(", ".join(roots) or ", ".join(pool.urls), reference)


def served_logprobs(pool: ServerPool, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of a probe by a server that generates."""
    body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "add_special_tokens": False}
    reply = pool.ask("/v1/completions", body, prefix=ids)
    try:
        listed = reply.json()["choices"][0]["prompt_logprobs"]
        return tuple(float(entry[str(token)]["logprob"]) for entry, token in zip(listed[1:], ids[1:], strict=True))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{reply.url} gives no log-probabilities of a prompt, by which models are recognised; is it vLLM?"
        ) from error


@torch.inference_mode()
def states_logprobs(source: ServedStates, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of a probe from served states and the head that was read here."""
    state_LH, head = wait_for(source.states(ids, "a probe of the model"))[:-1], source.head
    logits_LV = torch.empty(len(state_LH), len(head.weight_VH))
    logits_(logits_LV, state_LH.to(head.weight_VH.device), head)
    if head.softcap is not None:
        logits_LV = head.softcap * torch.tanh(logits_LV / head.softcap)
    return _at_next(logits_LV, ids)


@torch.inference_mode()
def own_logprobs(name: str, config: PairConfig, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of a probe by the model itself, loaded here for the moment."""
    model = models_.load_model(name, config)
    device: Any = model.get_input_embeddings().weight.device  # type: ignore[union-attr]
    return _at_next(model(input_ids=torch.tensor([ids], device=device)).logits[0, :-1].float().cpu(), ids)


def _at_next(logits_LV: torch.Tensor, ids: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(logits_LV.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())


def _loads(name: str, config: PairConfig, verify: bool | None) -> bool:
    """Whether the model is loaded here to compare: as told, else if it takes little of the free memory."""
    if verify is not None:
        return verify
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            models_.model_config(name, config), trust_remote_code=config.trust_remote_code
        )
    return 4 * sum(p.numel() for p in model.parameters()) < MEMORY_SHARE * psutil.virtual_memory().available
