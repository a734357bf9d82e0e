"""Sampling on a pool of stock vLLM servers: bans, resumption and length limits with the exact law of our own sampler.

Seeds. vLLM restarts a request's random stream at its beginning, so a rollout that is resumed with its own seed would
meet again the very numbers that wrote its prefix: the wrong law. A resumed request therefore draws with a fresh seed,
derived from its seed, from how far it was and from the seed of its first number.

Bans. `logit_bias` is clamped to -100 and not to minus infinity, and padding rows of the output head can be drawn. A
banned or padding id that appears all the same is thrown away, and the place is drawn again with a fresh seed. The draw
that is kept has the law of a draw given that it is allowed, whatever the bias was; the bias only makes it rare. An id
that had to be thrown away is biased in the rollout's further requests, too: a greedy draw would only repeat it.

Lengths. A server shortens a request that does not fit its context and says nothing; the room is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocktokens.errors import DataError, RunError, printable
from rocktokens.sample.requests import Continuation, Request
from rocktokens.seeds import derive_seed
from rocktokens.servers.pool import ServerPool

BAN_BIAS = -100.0
MOST_BIASES = 1000  # what vLLM's GPU sampler has room for; further bans rest on redrawing alone, which is exact
MOST_STOPS = 100  # banned ids that end a request: no more than a server looks at quickly
MOST_REDRAWS = 2000  # of one place in a row, after which something other than chance is at work


class VllmEngine:
    """Continues prefixes on vLLM servers. `vocabulary` is the number of token types that may be drawn."""

    def __init__(
        self,
        pool: ServerPool,
        *,
        eos_ids: Sequence[int],
        vocabulary: int,
        model_context: int | None = None,
        temperature: float = 1.0,
        greedy: bool = False,
        top_k: int | None = None,
        top_p: float | None = None,
        ban_bias: float = BAN_BIAS,
    ) -> None:
        self.pool, self.eos_ids, self.vocabulary = pool, tuple(sorted(set(eos_ids))), vocabulary
        self.model_context, self.greedy, self.ban_bias = model_context, greedy, ban_bias
        self.rows = vocabulary + vocabulary // 8 + 1024  # more than any output head has, with its padding
        self.exact_resume = greedy or (top_k is None and top_p is None)
        self.redraws = 0
        """Places drawn again so far because a banned or padding id had come."""
        # Every setting is sent: a server fills what is missing from the model's generation config.
        self.settings: dict[str, object] = {
            "temperature": 0.0 if greedy else temperature,
            "top_p": 1.0 if top_p is None or greedy else top_p,
            "top_k": 0 if top_k is None or greedy else top_k,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "n": 1,
            "ignore_eos": True,  # end tokens are among the stop ids, so that they stay in the answer
            "return_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "stream": False,
        }

    @property
    def context(self) -> int | None:
        """Tokens that a prompt and its rollout may have together."""
        limits = [limit for limit in (self.model_context, self.pool.context) if limit is not None]
        return min(limits) if limits else None

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[Continuation]:
        """One continuation per request, in order."""
        for request in requests:
            self.check(request)
        return self.pool.map(self.complete, requests, progress=progress)

    def check(self, request: Request) -> None:
        """Refuse a request that the model or a server cannot take."""
        ids = (*request.prefix, *request.banned)
        if not request.prefix or not 0 <= min(ids) <= max(ids) < self.vocabulary:  # either ends a vLLM engine
            raise DataError(
                f"a request holds token ids {min(ids, default=None)} to {max(ids, default=None)}, the model knows "
                f"{self.vocabulary}: a prompt is empty, or was made with another tokenizer"
            )
        self.require(len(request.prefix) + request.max_new_tokens)

    def require(self, tokens: int) -> None:
        """Refuse servers that do not take this many tokens, as far as the model itself does."""
        self.pool.require(tokens if self.model_context is None else min(tokens, self.model_context))

    async def complete(self, request: Request) -> Continuation:
        """One continuation: the server's draw, and again from where it drew an id that is not allowed."""
        room = request.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - len(request.prefix))
        banned = frozenset(request.banned)
        # Banned ids end a request too: what would follow one is thrown away anyhow, of these and of further ones.
        stops = [*self.eos_ids, *sorted(banned - set(self.eos_ids))[:MOST_STOPS]]
        done: list[int] = []
        met: list[int] = []  # ids that were thrown away, the last one first
        again = 0  # redraws of this place in a row
        while True:
            seed, prefix = stream_seed(request), (*request.prefix, *done)
            if done or again:
                seed = derive_seed(seed, "redraw", len(done), again)
            biased = list(dict.fromkeys([*met, *sorted(banned)]))[:MOST_BIASES]
            body = {"prompt": list(prefix), "max_tokens": room - len(done), "seed": seed, "stop_token_ids": stops}
            if biased:
                body["logit_bias"] = {str(token): self.ban_bias for token in biased}
            reply = await self.pool.post("/v1/completions", {**self.settings, **body}, prefix=prefix)
            try:
                choice = reply.json()["choices"][0]
                drawn, reason = list(choice["token_ids"]), printable(choice.get("finish_reason"), 40)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise RunError(
                    f"{reply.url}/v1/completions answered without token ids ({reply.text()[:200]}); vLLM 0.10.2 and "
                    "later return them, and text is never re-tokenised here"
                ) from error
            unknown = [token for token in drawn if type(token) is not int or not 0 <= token < self.rows]
            wrong, drawn = "", [] if unknown else drawn
            allowed = next((i for i, t in enumerate(drawn) if t in banned or not 0 <= t < self.vocabulary), len(drawn))
            if unknown:
                wrong = f"token {printable(unknown[0], 40)}, where the model has {self.vocabulary}"
            elif len(drawn) > room - len(done):
                wrong = f"{len(drawn):,} tokens where {room - len(done)} were asked for"
            elif not set(self.eos_ids).isdisjoint(drawn[: min(allowed, len(drawn) - 1)]):
                wrong = "tokens after an end token"
            if wrong:
                raise RunError(f"{reply.url} returned {wrong}, for {request.name}; is it a vLLM server of this model?")
            done += drawn[:allowed]
            if allowed == len(drawn):
                ended = bool(drawn) and drawn[-1] in self.eos_ids
                if not ended and len(done) < room:
                    raise RunError(
                        f"{reply.url} ended {request.name} after {len(done)} of {room} tokens without an end token "
                        f"(finish_reason {reason}); see the server's log"
                    )
                return Continuation(tuple(done), truncated=not ended)
            thrown, again = drawn[allowed], 1 if allowed else again + 1
            self.redraws += 1
            # A place that is drawn again and again, or a greedy draw that a bias does not change: not chance.
            if again > MOST_REDRAWS or (self.greedy and thrown in biased):
                kind = "banned" if thrown < self.vocabulary else "padding"
                why = f" although its logit is lowered by {-self.ban_bias:g}" if thrown in biased else ""
                raise RunError(
                    f"{reply.url} draws {kind} token {thrown}{why}, after {again} draws of one place; its distribution "
                    "there is degenerate"
                )
            met.insert(0, thrown)


def stream_seed(request: Request) -> int:
    """The seed to send: a stream that is resumed in the middle, or begins with another's number, is a fresh one."""
    if request.skip == 0 and request.first_seed is None:
        return request.seed
    first = "none" if request.first_seed is None else request.first_seed
    return derive_seed(request.seed, "resume", request.skip, first)
