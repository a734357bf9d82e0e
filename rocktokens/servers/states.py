"""A served teacher: its last hidden states from vLLM servers, and its output head from its own weights.

Servers started with `--runner pooling` return the states after the final norm, L x H numbers per sequence. With the
head, read here from the teacher's safetensors, full-vocabulary divergences are exact up to the precision on the wire.
States are never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocktokens.divergence.fused import Head
from rocktokens.errors import ConfigError, DataError
from rocktokens.models.states import Sequences
from rocktokens.servers.pool import Reply, ServerPool
from rocktokens.servers.settings import Wire

HOW_TO_SERVE = (
    'Start it with: --runner pooling --convert embed --pooler-config \'{"task":"token_embed","use_activation":false}\''
)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# A normalised state has length 1 up to the wire's precision; states after a final norm have about the width's root.
UNIT_TOLERANCE = 1e-2


class ServedStates:
    """A source of states behind a pool of servers. `head` belongs to the served model."""

    ahead = True
    asked_for: tuple[str, ...] = ()
    """The URLs as the configuration names them."""
    served: str = ""
    """Where the servers read the model from, as they name it."""

    def __init__(
        self, pool: ServerPool, head: Head, *, model_context: int | None = None, wire: Wire = "float32"
    ) -> None:
        self.pool, self.head, self.model_context, self.wire = pool, head, model_context, wire

    @property
    def context(self) -> int | None:
        """Tokens that a sequence may have: the model's own limit; `check` names a server that takes fewer."""
        return self.model_context if self.model_context is not None else self.pool.context

    def response_states(self, sequences: Sequences) -> Tensor:
        """One request per sequence; float32 on the CPU, sequence after sequence."""
        self.check(sequences)

        async def ask(index: int) -> Tensor:
            # The last token's own state predicts nothing that was sampled.
            ids, start = sequences.ids[index][:-1], sequences.starts[index]
            return (await self.states(ids, f"rollout {sequences.name(index)}"))[start - 1 :]

        return torch.cat(self.pool.map(ask, range(len(sequences.ids))))

    async def states(self, ids: tuple[int, ...], what: str) -> Tensor:
        """All states of one sequence, (L, H). `what`: how errors name it."""
        body = {
            "input": list(ids),
            "task": "token_embed",
            "encoding_format": "bytes_only",
            "embed_dtype": self.wire,
            "endianness": "little",
            "use_activation": False,
            "add_special_tokens": False,
        }
        # An answer that is too long is named by its length, unless it is far too long.
        most = 2 * len(ids) * self.head.weight_VH.shape[1] * DTYPES[self.wire].itemsize + 2**20
        return self._read(await self.pool.post("/pooling", body, prefix=ids, most=most), ids, what)

    def check(self, sequences: Sequences) -> None:
        """Refuse sequences that the model takes and a server does not, before anything is asked for."""
        for index, ids in enumerate(sequences.ids):
            if self.model_context is None or len(ids) - 1 <= self.model_context:
                self.pool.require(len(ids) - 1, f"rollout {sequences.name(index)} with its prompt")

    def require(self, tokens: int) -> None:
        """Refuse servers that do not take sequences of `tokens` tokens; the last token's state is not asked for."""
        self.pool.require((tokens if self.model_context is None else min(tokens, self.model_context)) - 1)

    def _read(self, reply: Reply, ids: tuple[int, ...], what: str) -> Tensor:
        length, width, size = len(ids), self.head.weight_VH.shape[1], len(reply.body)
        wanted = length * width * DTYPES[self.wire].itemsize
        if size != wanted:
            raise DataError(
                f"{reply.url} returned {size:,} bytes of states for {what}, and {length} tokens of width {width} in "
                f"{self.wire} are {wanted:,}: another model is served, or one that ignores embed_dtype (pass "
                f"--servers.wire float32). {HOW_TO_SERVE}"
            )
        # A bytearray, because torch warns of memory that it cannot write to.
        state_LH = torch.frombuffer(bytearray(reply.body), dtype=DTYPES[self.wire]).float().reshape(length, width)
        if not bool(torch.isfinite(state_LH).all()):
            raise DataError(
                f"{reply.url} returned states that are not numbers for {what}; the served model's precision "
                "overflows (serve it in bfloat16 or float32), or its weights are damaged"
            )
        flat = width > 1 and bool((state_LH == state_LH[:, :1]).all(dim=1).any())
        if flat or (len(set(ids)) > 1 and bool((state_LH == state_LH[0]).all())):
            raise DataError(
                f"{reply.url} returned states that are all equal for {what}: no model computes such; see its log"
            )
        if width > 1 and bool(((state_LH.norm(dim=1) - 1).abs() < UNIT_TOLERANCE).all()):
            raise ConfigError(
                f"{reply.url} returns states of unit norm: it normalises them, and the model's logits cannot be had "
                f"from them. {HOW_TO_SERVE}"
            )
        return state_LH
