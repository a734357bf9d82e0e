"""Is what is served what the run means? A probe's log-probabilities against the model's own, and against last time's.

Two checkpoints of one training may agree on a probe to within a server's rounding, so where the server names a
directory of this machine, that has to be the model's, too; and a server that is clearly nearer to another checkpoint of
the run (a rival) than to the one that is meant serves that one. What a server was found to be is its fingerprint; a
stage that goes on keeps it and refuses to mix rollouts or scores of two models.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from rocktokens.divergence.heads import logits_
from rocktokens.errors import ConfigError, RunError
from rocktokens.models.pair import load_model, model_config
from rocktokens.models.settings import PairConfig
from rocktokens.servers.calls import Refused
from rocktokens.servers.pool import ServedModel, ServerPool
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.states import ServedStates
from rocktokens.values import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PROBE_TEXT = "Let x = 3 + 4. Then x is 7, and so 2 * x = 14. The answer is 14."
PROBE_TOKENS = 16
# Mean difference of a probe's log-probabilities, in nats, that rounding explains: bfloat16 servers stay below a tenth.
SAME_MODEL = 0.15
# The same on resumption: server and precision are those of before, and a checkpoint further on may be this near.
RESUMED = 0.02
# A server is a rival's if its distance to the rival is below this share of its distance to the model that is meant, and
# the latter is more than the noise of float32. Where a server rounds to bfloat16, both distances are that rounding.
NEARER, NOISE = 0.25, 1e-5
# A tokenizer of so many types was made for text, and a model with it finds text more probable than chance does.
TEXT_TYPES = 1000
MEMORY_SHARE = 0.25


@dataclass(frozen=True)
class Fingerprint:
    """What a pool was found to serve."""

    root: str | None
    """Where the servers say that they read it from; several places are separated by commas."""
    logprobs: tuple[float, ...]
    """Of the probe's tokens, from its second on, by the first server."""
    others: tuple[tuple[float, ...], ...] = ()
    """By further servers, where they differ: in precision, say."""
    writing: Fingerprint | None = None
    """Of the servers that generate with the model, where this one is of those that give its states."""

    def distance(self, other: Fingerprint) -> float:
        """Mean difference of the first servers' log-probabilities, in nats."""
        return _mean_difference(self.logprobs, other.logprobs)

    def moved(self, before: Fingerprint) -> float:
        """How far the server that has moved most is from the nearest one of before, in nats."""
        known = (before.logprobs, *before.others)
        return max(min(_mean_difference(own, old) for old in known) for own in (self.logprobs, *self.others))

    def text(self) -> str:
        """As JSON, for a file."""
        return json.dumps(asdict(self))

    def roots(self) -> set[str]:
        """The places apart."""
        return set(self.root.split(", ")) if self.root else set()

    @classmethod
    def of_text(cls, text: str) -> Fingerprint:
        """Back from JSON."""
        try:
            return cls._of(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                "what the servers served is recorded in a damaged part; pass --again to start over"
            ) from error

    @classmethod
    def _of(cls, found: Json) -> Fingerprint:
        others = tuple(tuple(map(float, own)) for own in found.get("others", ()))
        writing = found.get("writing")
        own = tuple(map(float, found["logprobs"]))
        return cls(found["root"], own, others, None if writing is None else cls._of(writing))


class Rival(NamedTuple):
    """A model that may be served by mistake."""

    name: str
    """Where it is loaded from to compare."""
    also: str | None = None
    """Another name of the same model, as a server may say it."""


def rivals_of(student: str, kept: Sequence[str], meant: str) -> tuple[Rival, ...]:
    """Models of one run that its servers may serve in place of the one that is meant: at most four are compared.

    Args:
        student: The model that the training began with.
        kept: The run's checkpoints in order; one of step 0 is the student.
        meant: The student or one of the checkpoints.
    """
    has_first = bool(kept) and Path(kept[0]).name == "step=0"
    models = [Rival(kept[0], student) if has_first else Rival(student)]
    models += [Rival(name) for name in (kept[1:] if has_first else kept)]
    own = next((at for at, model in enumerate(models) if meant in model), None)
    if own is None:
        return ()
    # What a server is left with: the original, a neighbour, or the end of the training.
    chosen = {0, own - 1, own + 1, len(models) - 1} - {own}
    return tuple(models[at] for at in sorted(chosen) if 0 <= at < len(models))


def _mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Over what both have: a server with a short context was asked for the beginning of the probe alone."""
    common = min(len(one), len(other))
    return sum(abs(a - b) for a, b in zip(one, other)) / common if common else float("inf")


def probe_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> tuple[int, ...]:
    """A short text as ids; where the tokenizer makes too little of it, ids spread over the vocabulary."""
    ids = [token for token in tokenizer(PROBE_TEXT)["input_ids"] if token < vocabulary][:PROBE_TOKENS]
    if len(set(ids)) < 8:
        ids = [(7 * number + 3) % vocabulary for number in range(PROBE_TOKENS)]
    return tuple(ids)


def is_text(ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> bool:
    """Whether a probe is text to the model: made by a tokenizer that knows words, and nothing of it lost."""
    said = str(tokenizer.decode(list(ids), skip_special_tokens=True)).split()
    return vocabulary >= TEXT_TYPES and len(said) > 3 and PROBE_TEXT.split()[: len(said) - 1] == said[:-1]


def served_logprobs(pool: ServerPool, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of a probe by a server that generates."""
    body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "add_special_tokens": False}
    try:
        reply = pool.post("/v1/completions", body, prefix=ids)
    except Refused as refusal:
        if not _lacks_completions(refusal):
            raise
        hint = "This server does not generate; was it started with --runner pooling?"
        raise Refused(f"{refusal}. {hint}", refusal.status, refusal.said) from refusal
    try:
        listed = reply.json()["choices"][0]["prompt_logprobs"]
        return tuple(float(entry[str(token)]["logprob"]) for entry, token in zip(listed[1:], ids[1:], strict=True))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{reply.url} does not give prompt log-probabilities, by which the model is recognised; is it a vLLM "
            "server?"
        ) from error


def _lacks_completions(refusal: Refused) -> bool:
    """Whether a server refuses generation as such, by its status or in vLLM's words, and not this one request."""
    unknown = refusal.status in (404, 405, 501) and "does not exist" not in refusal.said
    return unknown or "does not support completions" in refusal.said.lower()


@torch.inference_mode()
def states_logprobs(source: ServedStates, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of a probe from served states and the head that was read here."""
    state_LH = source.states(ids, "the probe by which its model is recognised (not a rollout)")[:-1]
    logits_LV = torch.empty(len(state_LH), len(source.head.weight_VH))
    head = source.head
    logits_(logits_LV, state_LH.to(head.weight_VH.device), head)
    if head.softcap is not None:
        logits_LV = head.softcap * torch.tanh(logits_LV / head.softcap)
    logprob_LV = logits_LV.log_softmax(-1)
    return tuple(logprob_LV[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())


@torch.inference_mode()
def own_logprobs(name: str, config: PairConfig, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of a probe by the model itself, loaded here and let go."""
    model = load_model(name, config)
    device: Any = model.get_input_embeddings().weight.device  # type: ignore[union-attr]
    logprob_LV = model(input_ids=torch.tensor([ids], device=device)).logits[0].float().log_softmax(-1).cpu()
    return tuple(logprob_LV[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())


def verify(
    pool: ServerPool,
    ask: Callable[[ServerPool], tuple[float, ...]],
    ids: tuple[int, ...],
    name: str,
    config: PairConfig,
    asked: ServersConfig,
    before: Fingerprint | None = None,
    like: Fingerprint | None = None,
    rivals: Sequence[Rival] = (),
) -> Fingerprint:
    """Ask every server of a pool for itself; refuse one that serves another model than `name`, or than `before`.

    Args:
        pool: The servers.
        ask: Gives the probe's log-probabilities by the one server of the pool that it is given.
        ids: The probe.
        name: The model that is meant.
        config: How the model would be loaded here.
        asked: Whether it is loaded here to compare.
        before: What made the finished parts of a stage that goes on; unset: there are none.
        like: What was found of the model elsewhere, to compare with where it is not loaded here.
        rivals: Models that may be served by mistake; compared with where the model is loaded here, else by name.

    Returns:
        What they serve: every place, and the log-probabilities.
    """
    found = {url: _ask(pool, url, ask) for url in pool.urls}
    roots = sorted({one.root for one in found.values() if one.root})
    first, *rest = found.values()
    others = {own.logprobs for own in rest} - {first.logprobs}
    whole = Fingerprint(", ".join(roots) or None, first.logprobs, tuple(sorted(others)))
    if before is not None:
        for url, own in found.items():
            check_same(own, before, [url])
    loaded = loads(name, config, asked)
    own_model = Fingerprint(name, own_logprobs(name, config, ids)) if loaded else like
    loaded_rivals = _loaded(rivals, config, ids) if loaded else []
    for (url, own), model in zip(found.items(), pool.models()):
        _check_root(url, model, name)
        _refuse_rivals_name(url, model, name, rivals)
        if own_model is not None:
            _refuse_other(url, own, own_model, name)
            _refuse_rivals(url, own, own_model, loaded_rivals)
        elif not own.distance(whole) < SAME_MODEL:
            raise ConfigError(
                f"{url} serves another model than {pool.urls[0]}: a probe's log-probabilities differ by "
                f"{own.distance(whole):.2g} nats on average. Serve {name} on all of them, or leave one out."
            )
    return whole


def _ask(pool: ServerPool, url: str, ask: Callable[[ServerPool], tuple[float, ...]]) -> Fingerprint:
    with pool.alone(url) as one:
        found = Fingerprint(one.models()[0].root, ask(one))
    if not all(map(math.isfinite, found.logprobs)):
        raise ConfigError(
            f"{url} gives log-probabilities of a probe that are not numbers; the served model's precision overflows "
            "(serve it in bfloat16 or float32), or its weights are damaged"
        )
    return found


def refuse_chance(urls: list[str], found: Fingerprint, name: str, vocabulary: int) -> None:
    """Refuse states that with the model's head make text less probable than chance: they are another model's."""
    for logprobs in (found.logprobs, *found.others):
        mean = sum(logprobs) / max(len(logprobs), 1)
        if mean < -math.log(vocabulary):
            raise ConfigError(
                f"{', '.join(urls)} serves another model than {name}: with that model's head a plain sentence has "
                f"{mean:.2g} nats a token, less than by chance ({-math.log(vocabulary):.2g}). Serve that model, or "
                "correct the URL."
            )


def _refuse_other(url: str, found: Fingerprint, own: Fingerprint, name: str) -> None:
    if not found.distance(own) < SAME_MODEL:
        raise ConfigError(
            f"{url} serves another model than {name}: a probe's log-probabilities differ by "
            f"{found.distance(own):.2g} nats on average. Serve that model, or correct the URL."
        )


def _loaded(rivals: Sequence[Rival], config: PairConfig, ids: tuple[int, ...]) -> list[Fingerprint]:
    """Each rival's own log-probabilities of a probe; one that is not at hand is left out."""
    found = []
    for rival in rivals:
        try:
            found.append(Fingerprint(rival.name, own_logprobs(rival.name, config, ids)))
        except (ConfigError, OSError) as error:
            log.info("servers are not compared with %s, which cannot be loaded here: %s", rival.name, error)
    return found


def _refuse_rivals(url: str, found: Fingerprint, own: Fingerprint, rivals: Sequence[Fingerprint]) -> None:
    """Refuse what is clearly nearer to another model of the run; the message names the nearest."""
    if not rivals:
        return
    rival = min(rivals, key=found.distance)
    to_own, to_rival = found.distance(own), found.distance(rival)
    if to_own > NOISE and to_rival < NEARER * to_own:
        raise ConfigError(
            f"{url} seems to serve {rival.root}, and this stage needs {own.root}: a probe's log-probabilities differ "
            f"from the first by {to_rival:.2g} nats on average, from the second by {to_own:.2g}. Start the server with "
            f"--model {own.root}, or ask for the first by its step (--checkpoint, --baseline.checkpoint)."
        )


def _refuse_rivals_name(url: str, model: ServedModel, name: str, rivals: Sequence[Rival]) -> None:
    """Refuse a server that says itself that it serves another model of the run."""
    if model.root and model.root != name and any(model.root in rival for rival in rivals):
        raise ConfigError(
            f"{url} serves {model.root}, and this stage needs {name}; start the server with --model {name}"
        )


def _check_root(url: str, model: ServedModel, name: str) -> None:
    """A directory that the server names and this machine has must be the model's."""
    meant = Path(name).expanduser()
    named = Path(model.root) if model.root else None
    if named is None or not meant.is_dir() or not named.is_dir():
        return
    if named.resolve() != meant.resolve() and not _same_weights(named, meant):
        raise ConfigError(
            f"{url} serves {model.root}, and this stage needs {meant}; start the server with --model {meant.resolve()}"
        )


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two directories hold the same weights, byte for byte: copies and links are the same model."""
    files = [sorted(path.glob("*.safetensors")) for path in (one, other)]
    if not files[0] or [file.name for file in files[0]] != [file.name for file in files[1]]:
        return False
    return all(a.stat().st_size == b.stat().st_size and (a.samefile(b) or _bytes_alike(a, b)) for a, b in zip(*files))


def _bytes_alike(one: Path, other: Path, block: int = 1 << 22) -> bool:
    with one.open("rb") as first, other.open("rb") as second:
        while True:
            a, b = first.read(block), second.read(block)
            if a != b:
                return False
            if not a:
                return True


def loads(name: str, config: PairConfig, asked: ServersConfig) -> bool:
    """Whether the model is loaded here to compare: as told, else where it takes little of the free memory."""
    if asked.verify is not None:
        return asked.verify
    text = model_config(name, config).get_text_config()
    # Weights of a dense decoder, roughly; enough to tell what fits by far from what does not.
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 0
    inner = inner or 4 * text.hidden_size
    layer = 4 * text.hidden_size**2 + 3 * experts * text.hidden_size * inner
    weights = 4 * (text.num_hidden_layers * layer + 2 * text.vocab_size * text.hidden_size)
    return weights < MEMORY_SHARE * psutil.virtual_memory().available


def check_same(now: Fingerprint, before: Fingerprint, urls: list[str]) -> None:
    """Refuse to go on with another model than the finished parts were made with."""
    moved = bool(before.roots()) and not now.roots() <= before.roots()
    if moved or not now.moved(before) < RESUMED:
        raise RunError(
            f"{', '.join(urls)} serves another model than when this stage began, or the same in another precision "
            f"(then {before.root}, now {now.root}; a probe's log-probabilities differ by {now.moved(before):.2g} "
            "nats). Serve the first again to go on, or pass --again to start over."
        )
    if now.writing is not None and before.writing is not None:
        check_same(now.writing, before.writing, urls)


def check_sampled(now: Fingerprint, sampled: Fingerprint, urls: Sequence[str], run: Path) -> None:
    """Refuse to test a checkpoint with another model than its rollouts were sampled from; copies may lie anywhere."""
    if not now.moved(sampled) < RESUMED:
        raise RunError(
            f"{', '.join(urls)} serves another model than the one that sampled the run's rollouts, or the same in "
            f"another precision (then {sampled.root}, now {now.root}; a probe's log-probabilities differ by "
            f"{now.moved(sampled):.2g} nats). Serve the first again, or sample with this one: `rocktokens sample {run} "
            "--again`."
        )
