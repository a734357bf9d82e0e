"""From a pair and the servers a configuration names to what stages work with: engines, and a teacher's states.

Where no server is named, the models are loaded in this process. A model that is served is not loaded, but for a moment
to compare it with what is served (probe.py) where it is small enough. Workers of a command pass `check=False`: the
driver has asked the servers before it started them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rocktokens.errors import ConfigError
from rocktokens.models.pair import Pair, PairFacts, RemoteTeacher, context_of, load_pair, pair_facts, read_head
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Engine
from rocktokens.sample.rollouts import check_lengths, make_sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.pool import Refused, ServerPool
from rocktokens.servers.probe import Probed, probe, probe_ids, served_logprobs, states_logprobs
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.states import HOW_TO_SERVE, ServedStates
from rocktokens.servers.vllm import VllmEngine

log = logging.getLogger(__name__)


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
    """The engine that samples from the pair's student, or teacher: on servers where they are named.

    Args:
        pair: the models; the student is the checkpoint that is meant.
        servers: where they are served.
        rollouts: how is sampled.
        of_teacher: whether the teacher samples.
        check: whether servers are asked what they serve.
    """
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
    served = _probe_generating(pool, facts, name, pair).served if check else None
    log.info("%s is sampled on %s", name, ", ".join(pool.urls))
    return Sampling(_engine(pool, facts, context_of(name, pair), rollouts), facts, served or ", ".join(pool.urls))


def _probe_generating(
    pool: ServerPool, facts: Pair | PairFacts, name: str, pair: PairConfig, like: Probed | None = None
) -> Probed:
    ids = probe_ids(facts.tokenizer, facts.vocabulary, pool)
    return probe(pool, lambda one: served_logprobs(one, ids), ids, name, pair, like)


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
    """The student in this process, and the teacher too or, where it is served, its states.

    Args:
        pair: the models.
        servers: where the teacher is served; its student's URLs are not looked at.
        trains: whether the student's weights will be trained.
        check: whether servers are asked what they serve.
    """
    if servers.student:
        log.info("the student's servers are not asked here: its states are computed in this process")
    if not servers.teacher:
        return load_pair(pair, trains=trains)
    models = load_pair(pair, with_teacher=False, trains=trains)
    states, found = open_states(pair, servers, models, check=check)
    urls = [url for url in servers.teacher if url not in states.asked_for]
    if urls and check:
        with ServerPool(urls, servers) as pool:
            _probe_generating(pool, models, pair.teacher, pair, like=found)

    def engine(rollouts: RolloutConfig) -> Engine:
        return _engine(ServerPool(urls, servers), models, context_of(pair.teacher, pair), rollouts)

    return replace(models, remote=RemoteTeacher(states, engine if urls else None))


def open_states(
    pair: PairConfig, servers: ServersConfig, facts: Pair | PairFacts, *, check: bool = True
) -> tuple[ServedStates, Probed | None]:
    """The served teacher's states; refused where none of its servers gives them, or another model is served."""
    refusals = {url: why_no_states(url, servers) for url in servers.teacher}
    urls = [url for url, said in refusals.items() if said is None]
    if not urls:
        said = "; ".join(f"{url} says: {words}" for url, words in refusals.items())
        raise ConfigError(
            f"none of {', '.join(servers.teacher)} gives hidden states, which scoring and training need ({said}). "
            f"{HOW_TO_SERVE}"
        )
    pool, head = ServerPool(urls, servers), read_head(pair.teacher, pair)
    context, found = context_of(pair.teacher, pair), None
    if check:
        ids = probe_ids(facts.tokenizer, facts.vocabulary, pool)
        found = probe(pool, lambda one: states_logprobs(ServedStates(one, head), ids), ids, pair.teacher, pair)
    source = ServedStates(pool, head, model_context=context, wire=servers.wire)
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
    """What a server says when it is asked for a token's state; None where it gives it."""
    with ServerPool([url], servers) as pool:
        try:
            pool.ask("/pooling", {"input": [3], "task": "token_embed", "encoding_format": "float"})
        except Refused as refusal:
            if refusal.status in (401, 403):
                raise
            return refusal.said or str(refusal.status)
    return None
