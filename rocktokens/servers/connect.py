"""From a pair and the servers a configuration names to what stages work with: engines, and a teacher's states.

Where no server is named, the models are loaded in this process. A model that is served is not loaded, but for a moment
to recognise it (identity.py) where it is small enough.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rocktokens.errors import ConfigError, DataError
from rocktokens.models.output_head import read_head
from rocktokens.models.pair import (
    Pair,
    PairFacts,
    RemoteTeacher,
    context_of,
    load_pair,
    pair_facts,
)
from rocktokens.models.settings import PairConfig
from rocktokens.models.states import Sequences
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Engine
from rocktokens.sample.rollouts import check_lengths, make_sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.calls import Refused
from rocktokens.servers.identity import (
    Fingerprint,
    Rival,
    is_text,
    loads,
    probe_ids,
    refuse_chance,
    served_logprobs,
    states_logprobs,
    verify,
)
from rocktokens.servers.pool import ServerPool
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.states import HOW_TO_SERVE, ServedStates
from rocktokens.servers.vllm import VllmEngine

log = logging.getLogger(__name__)

SHORTEST_PROBE = 4  # tokens of context without which a probe says nothing


@dataclass(frozen=True)
class Sampling:
    """An engine for one model, and what is known of its pair."""

    engine: Engine
    facts: Pair | PairFacts
    served: Fingerprint | None = None
    """What the servers serve; None: the model is in this process."""
    urls: tuple[str, ...] = ()

    def require_room(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Refuse prompts that the model has no room for, and servers that do not take the longest with its rollout."""
        if not isinstance(self.engine, VllmEngine):
            return check_lengths(prompts, self.engine.context)
        check_lengths(prompts, self.engine.model_context)
        self.engine.require(max((len(prompt.prompt_ids) for prompt in prompts), default=0) + max_new_tokens)


def open_sampling(
    pair: PairConfig,
    servers: ServersConfig,
    rollouts: RolloutConfig,
    *,
    of_teacher: bool = False,
    before: Fingerprint | None = None,
    rivals: Sequence[Rival] = (),
) -> Sampling:
    """The engine that samples from the pair's student, or teacher: on servers where they are named.

    Args:
        pair: The models; the student is the checkpoint that is meant.
        servers: Where they are served.
        rollouts: How is sampled.
        of_teacher: Whether the teacher samples.
        before: What was served when the stage's finished parts were made; another model is refused.
        rivals: Other models of the run, one of which the servers may serve by mistake.
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
    facts = pair_facts(pair)
    name = pair.teacher if of_teacher else pair.student
    pool = ServerPool(urls, servers)
    ids = _probe(facts, pool)
    served = verify(pool, lambda one: served_logprobs(one, ids), ids, name, pair, servers, before, rivals=rivals)
    log.info("%s is sampled on %s", name, ", ".join(pool.urls))
    return Sampling(_engine(pool, facts, context_of(name, pair), rollouts), facts, served, tuple(pool.urls))


def _probe(facts: Pair | PairFacts, pool: ServerPool) -> tuple[int, ...]:
    """A probe that the servers take, a token behind it included."""
    ids = probe_ids(facts.tokenizer, facts.vocabulary)
    if pool.context is None:
        return ids
    if pool.context < SHORTEST_PROBE:
        raise ConfigError(
            f"{pool.narrowest()} takes {pool.context} tokens, too few to recognise its model by; start it with a "
            "larger --max-model-len"
        )
    return ids[: pool.context - 1]


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


def open_pair(
    pair: PairConfig,
    servers: ServersConfig,
    *,
    trains: bool = False,
    before: Fingerprint | None = None,
    first: Sequences | None = None,
) -> tuple[Pair, Fingerprint | None]:
    """The student in this process, and the teacher beside it or, where it is served, its states.

    Args:
        pair: The models.
        servers: Where the teacher is served; its student's URLs are not looked at.
        trains: Whether the student's weights will be trained.
        before: What was served when the stage's finished parts were made; another teacher is refused.
        first: A rollout whose states will be asked for, where one is known: errors name it instead of the probe.

    Returns:
        The pair, and what the teacher's servers serve; None where it is in this process.
    """
    if servers.student:
        log.info("the student's servers are not asked here: its states are computed in this process")
    if not servers.teacher:
        return load_pair(pair, trains=trains), None
    models = load_pair(pair, with_teacher=False, trains=trains)
    urls = generating(servers)
    states, served = open_states(pair, servers, models, before, first)
    if urls:
        served = replace(served, writing=_writing(pair, servers, models, urls, served, before))

    def engine(rollouts: RolloutConfig) -> Engine:
        return _engine(ServerPool(urls, servers), models, context_of(pair.teacher, pair), rollouts)

    return replace(models, remote=RemoteTeacher(states, engine if urls else None)), served


def _writing(
    pair: PairConfig,
    servers: ServersConfig,
    facts: Pair,
    urls: list[str],
    states: Fingerprint,
    before: Fingerprint | None,
) -> Fingerprint:
    """What the teacher's servers that generate serve: the model whose states others give, or it is refused."""
    with ServerPool(urls, servers) as pool:
        ids = _probe(facts, pool)
        known = None if before is None else before.writing
        once = replace(servers, verify=False)  # the states were compared with the model, and these are with the states
        return verify(pool, lambda one: served_logprobs(one, ids), ids, pair.teacher, pair, once, known, states)


def open_states(
    pair: PairConfig,
    servers: ServersConfig,
    facts: Pair | PairFacts,
    before: Fingerprint | None = None,
    first: Sequences | None = None,
) -> tuple[ServedStates, Fingerprint]:
    """The served teacher's states; refused where none of its servers gives them, or another model is served."""
    refusals = {url: why_no_states(url, servers) for url in servers.teacher}
    urls = [url for url, said in refusals.items() if said is None]
    if not urls:
        said = "; ".join(f"{url} says: {words}" for url, words in refusals.items())
        raise ConfigError(
            f"none of {', '.join(servers.teacher)} gives hidden states, which scoring and training need ({said}). "
            f"{HOW_TO_SERVE}"
        )
    pool = ServerPool(urls, servers)
    head = read_head(pair.teacher, pair)
    context = context_of(pair.teacher, pair)
    source = ServedStates(pool, head, model_context=context, wire=servers.wire)
    ids = _probe(facts, pool)

    def ask(one: ServerPool) -> tuple[float, ...]:
        # In float32 whatever the wire: what is recorded does not depend on a setting that may change on the way.
        exact = ServedStates(one, head, model_context=context)
        try:
            return states_logprobs(exact, ids)
        except DataError:
            if first is not None:
                exact.response_states(first)  # fails alike, and names the rollout
            raise

    served = verify(pool, ask, ids, pair.teacher, pair, servers, before)
    if not loads(pair.teacher, pair, servers) and is_text(ids, facts.tokenizer, facts.vocabulary):
        refuse_chance(pool.urls, served, pair.teacher, facts.vocabulary)
    log.info("the teacher's states come from %s", ", ".join(pool.urls))
    return source, served


def require_room(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Refuse a served teacher that does not take the longest prompt with its rollout."""
    source = None if pair.remote is None else pair.remote.states
    if isinstance(source, ServedStates) and prompts:
        longest = max(len(prompt.prompt_ids) for prompt in prompts) + max_new_tokens
        own = getattr(pair.student.config.get_text_config(), "max_position_embeddings", None)
        source.require(longest if own is None else min(longest, own))


def generating(servers: ServersConfig) -> list[str]:
    """The teacher's servers that generate."""
    return [url for url in servers.teacher if kind_of(url, servers) == "generates"]


def kind_of(url: str, servers: ServersConfig) -> str:
    """Whether a server gives states or generates, by asking it for a token's state."""
    return "states" if why_no_states(url, servers) is None else "generates"


def why_no_states(url: str, servers: ServersConfig) -> str | None:
    """What a server says when it is asked for a token's state; None where it gives it."""
    with ServerPool([url], servers) as pool:
        try:
            pool.post("/pooling", {"input": [3], "task": "token_embed", "encoding_format": "float"})
        except Refused as refusal:
            if refusal.status in (401, 403):
                raise
            return refusal.said or str(refusal.status)
    return None
