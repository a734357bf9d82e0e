"""Is what is served what the run means? One text's log-probabilities by each server against the model's own.

Where the model is too large to load here, the servers are compared with each other. Two checkpoints of one training may
agree within the tolerance, so a directory that a server names and this machine has must be the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import torch

from rocktokens.divergence.heads import logits_
from rocktokens.errors import ConfigError
from rocktokens.models.pair import load_model, model_config
from rocktokens.models.settings import PairConfig
from rocktokens.servers.pool import ServerPool
from rocktokens.servers.states import ServedStates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = "Let x = 3 + 4. Then x is 7, and so 2 * x = 14. The answer is 14."
TOKENS, SHORTEST = 16, 4
# Mean difference of a probe's log-probabilities, in nats, that rounding explains: bfloat16 servers stay below a tenth.
SAME_MODEL = 0.15
MEMORY_SHARE = 0.25


class Probed(NamedTuple):
    """What a pool was found to serve."""

    served: str
    """Where the servers read the model from, as they name it; else their URLs."""
    logprobs: tuple[float, ...]
    """Of the probe's tokens, from its second on: the model's own, else the first server's."""


def probe_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: int, pool: ServerPool | None = None) -> tuple[int, ...]:
    """A short text as ids that the servers take; where the tokenizer makes too little of it, ids spread out."""
    ids = [token for token in tokenizer(TEXT)["input_ids"] if token < vocabulary][:TOKENS]
    if len(set(ids)) < 8:
        ids = [(7 * number + 3) % vocabulary for number in range(TOKENS)]
    if pool is not None:
        pool.require(SHORTEST, "a probe")
    room = None if pool is None else pool.context
    return tuple(ids if room is None else ids[: room - 1])


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
    state_LH, head = source.states(ids, "a probe of the model")[:-1], source.head
    logits_LV = torch.empty(len(state_LH), len(head.weight_VH))
    logits_(logits_LV, state_LH.to(head.weight_VH.device), head)
    if head.softcap is not None:
        logits_LV = head.softcap * torch.tanh(logits_LV / head.softcap)
    return _at_next(logits_LV, ids)


@torch.inference_mode()
def own_logprobs(name: str, config: PairConfig, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of a probe by the model itself, loaded here and let go."""
    model = load_model(name, config)
    device: Any = model.get_input_embeddings().weight.device  # type: ignore[union-attr]
    return _at_next(model(input_ids=torch.tensor([ids], device=device)).logits[0, :-1].float().cpu(), ids)


def _at_next(logits_LV: torch.Tensor, ids: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(logits_LV.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())


def probe(
    pool: ServerPool,
    ask: Callable[[ServerPool], tuple[float, ...]],
    ids: tuple[int, ...],
    name: str,
    config: PairConfig,
    like: Probed | None = None,
) -> Probed:
    """Ask every server of a pool by itself; refuse one that serves another model than `name`.

    Args:
        pool: the servers.
        ask: gives the probe's log-probabilities by the one server of the pool that it is given.
        ids: the probe.
        name: the model that is meant.
        config: how it would be loaded here.
        like: what was found of the model elsewhere, where it need not be loaded again.
    """
    own = None if like is None else like.logprobs
    if own is None and loads(name, config, pool.config.verify):
        own = own_logprobs(name, config, ids)
    reference, source = own, name
    for url, model in zip(pool.urls, pool.models()):
        meant, named = Path(name).expanduser(), Path(model.root or "")
        if model.root and meant.is_dir() and named.is_dir() and meant.resolve() != named.resolve():
            raise ConfigError(f"{url} serves {model.root}, and this stage needs {meant}; start it with --model {meant}")
        with ServerPool([url], pool.config, pause=pool.pause) as one:
            found = ask(one)
        if reference is None:
            reference, source = found, url
        # Over what both have: a server with a short context was asked for the beginning of the probe alone.
        apart = float(np.mean([abs(a - b) for a, b in zip(found, reference)]))
        if not apart < SAME_MODEL:  # log-probabilities that are no numbers are another model's, too
            raise ConfigError(
                f"{url} serves another model than {source}: a probe's log-probabilities differ by {apart:.2g} nats on "
                f"average. Serve {name}, or correct the URL."
            )
    assert reference is not None
    roots = sorted({model.root for model in pool.models() if model.root})
    return Probed(", ".join(roots) or ", ".join(pool.urls), reference)


def loads(name: str, config: PairConfig, verify: bool | None) -> bool:
    """Whether the model is loaded here to compare: as told, else where it takes little of the free memory."""
    if verify is not None:
        return verify
    text = model_config(name, config).get_text_config()
    # Weights of a dense decoder, roughly; enough to tell what fits by far from what does not.
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    layer = 4 * text.hidden_size**2 + 3 * experts * text.hidden_size * (inner or 4 * text.hidden_size)
    weights = 4 * (text.num_hidden_layers * layer + 2 * text.vocab_size * text.hidden_size)
    return weights < MEMORY_SHARE * psutil.virtual_memory().available
