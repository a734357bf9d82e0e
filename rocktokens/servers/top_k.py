"""A teacher on servers that give no hidden states: its most probable tokens from stock `prompt_logprobs`.

A fall-back, asked for with `servers.top_k`, for servers that cannot be started with `--runner pooling`. What it gives
is an approximation (lm/top_k.py), and every stage that uses it says so.
"""

from __future__ import annotations

import torch

from rocktokens.errors import ConfigError, DataError
from rocktokens.models.states import Sequences
from rocktokens.score.top_k import TopK, TopKSource
from rocktokens.servers.calls import Reply
from rocktokens.servers.pool import ServerPool
from rocktokens.values import Json


class ServedTopK(TopKSource):
    """The k most probable tokens of each position, and the sampled one, from servers that generate."""

    def __init__(self, pool: ServerPool, k: int, *, model_context: int | None = None) -> None:
        self.pool, self.k, self.model_context = pool, k, model_context

    @property
    def context(self) -> int | None:
        """Tokens that a sequence may have; a server draws one token behind it, so that it needs room for one more."""
        return self.model_context if self.model_context is not None else self.pool.context

    def response_top(self, sequences: Sequences) -> TopK:
        """One request a sequence."""
        self.check(sequences)
        found = self.pool.map(lambda index: self._ask(sequences, index), range(len(sequences.ids)))
        rows = [row for own in found for row in own]
        width = max(map(len, rows))
        token_NK = torch.full((len(rows), width), -1, dtype=torch.long)
        logprob_NK = torch.full((len(rows), width), -torch.inf)
        for number, row in enumerate(rows):
            token_NK[number, : len(row)] = torch.tensor(list(row))
            logprob_NK[number, : len(row)] = torch.tensor(list(row.values()))
        return TopK(token_NK, logprob_NK)

    def check(self, sequences: Sequences) -> None:
        """Refuse sequences that a server has no room for, before anything is asked for."""
        served = self.pool.context
        for index, ids in enumerate(sequences.ids):
            if served is not None and len(ids) >= served:
                raise ConfigError(
                    f"{self.pool.narrowest()} takes {served} tokens, and rollout {sequences.name(index)} needs "
                    f"{len(ids) + 1} with its prompt and one token behind it; start the server with --max-model-len "
                    f"{len(ids) + 1} or more"
                )

    def _ask(self, sequences: Sequences, index: int) -> list[dict[int, float]]:
        ids, start = sequences.ids[index], sequences.starts[index]
        body: Json = {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "add_special_tokens": False}
        reply = self.pool.post("/v1/completions", {**body, "prompt_logprobs": self.k}, prefix=ids)
        return self._read(reply, ids, start, sequences.name(index))

    def _read(self, reply: Reply, ids: tuple[int, ...], start: int, name: str) -> list[dict[int, float]]:
        try:
            listed = reply.json()["choices"][0]["prompt_logprobs"][start:]
            rows = [{int(token): float(own["logprob"]) for token, own in entry.items()} for entry in listed]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{reply.url} returned no log-probabilities of the prompt for rollout {name}; is it a vLLM server that "
                f"was started with --max-logprobs {self.k} or more?"
            ) from error
        if len(rows) != len(ids) - start:
            raise DataError(
                f"{reply.url} returned log-probabilities of {len(rows)} tokens for rollout {name}, which has "
                f"{len(ids) - start}: the answer is cut off"
            )
        for row, token in zip(rows, ids[start:]):
            if token not in row or len(row) < self.k:
                raise DataError(f"{reply.url} told {len(row)} of {self.k} tokens at a position of rollout {name}")
            if any(value != value or value > 1e-3 for value in row.values()):
                raise DataError(f"{reply.url} returned log-probabilities that are not numbers for rollout {name}")
        return rows
