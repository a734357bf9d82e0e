"""Where a model's last hidden states come from: a model in this process, or one that is served elsewhere.

Scoring and training need, for every token of a rollout, the state that predicts it, and the output head that turns
states into logits. The served source is in servers/states.py; this interface knows no transport.

Shapes: B sequences, T positions, N response positions of all sequences, H width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rocktokens.divergence.fused import Head
from rocktokens.models.pair import head_of, hidden_states

# A beginning that several texts share is computed once. Below these numbers of tokens the extra pass does not pay.
LEAST_LENGTH, LEAST_TOKENS = 8, 256


@dataclass(frozen=True)
class Sequences:
    """Prompts with their rollouts as token ids, and where each rollout begins."""

    ids: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    """Length of each prompt: the index of the first token that is predicted."""
    names: tuple[str, ...] = ()
    """Names of the rollouts, for messages."""

    def name(self, index: int) -> str:
        """How messages call one of them."""
        return self.names[index] if self.names else f"number {index + 1} of {len(self.ids)}"

    def places(self) -> tuple[Tensor, Tensor]:
        """Row and column of the state that predicts each response token: one column before the token's own."""
        counts = [len(ids) - start for ids, start in zip(self.ids, self.starts)]
        row_N = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        column_N = torch.cat([torch.arange(start - 1, len(ids) - 1) for ids, start in zip(self.ids, self.starts)])
        return row_N, column_N


class StateSource(Protocol):
    """Hidden states after the final norm, and the head that they belong to."""

    ahead: bool
    """Whether the next states may be asked for while these are worked on: they come from another machine."""

    @property
    def head(self) -> Head:
        """The output head."""
        ...

    @property
    def context(self) -> int | None:
        """Tokens that a sequence may have; None where no limit is known."""
        ...

    def response_states(self, sequences: Sequences) -> Tensor:
        """The state that predicts each response token, (N, H), sequence after sequence."""
        ...


class LocalStates:
    """States of a model in this process, padded on the right, where causal attention never looks."""

    ahead = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.head = model, head_of(model)
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def response_states(self, sequences: Sequences) -> Tensor:
        """One forward pass over all sequences together, and one over what all of them begin with."""
        device: torch.device = self.model.get_input_embeddings().weight.device  # type: ignore[assignment, union-attr]
        ids = [torch.tensor(own) for own in sequences.ids]
        input_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        common = worth_sharing(sequences.ids, most=min(sequences.starts) - 1)
        trunk = DynamicCache(config=self.model.config) if common else None
        if trunk is not None and trunk.layers and all(type(layer) is DynamicLayer for layer in trunk.layers):
            hidden_states(self.model, input_BT[:1, :common], past=trunk)
            trunk.batch_repeat_interleave(len(sequences.ids))
            state_BTH = hidden_states(self.model, input_BT[:, common:], past=trunk)
        else:  # nothing to share, or a model that does not keep keys and values by position
            common, state_BTH = 0, hidden_states(self.model, input_BT)
        row_N, column_N = sequences.places()
        return state_BTH[row_N.to(state_BTH.device), column_N.to(state_BTH.device) - common]


class RememberedStates:
    """States of texts that are asked for repeatedly: many students are scored on the same rollouts.

    Kept as long as they fit into `most_bytes`; the rest is computed again.
    """

    def __init__(self, source: StateSource, *, most_bytes: int = 512 * 2**20) -> None:
        self.source, self.room = source, most_bytes
        self.ahead, self.head, self.context = source.ahead, source.head, source.context
        self._known: dict[Sequences, Tensor] = {}

    def response_states(self, sequences: Sequences) -> Tensor:
        """The source's states, asked for once."""
        known = self._known.get(sequences)
        if known is None:
            known = self.source.response_states(sequences)
            if known.nbytes <= self.room:
                self.room -= known.nbytes
                self._known[sequences] = known
        return known


def worth_sharing(texts: Sequence[Sequence[int]], most: int | None = None) -> int:
    """Tokens at the beginning of all texts that are better computed once, at most `most`; 0 where it does not pay."""
    if len(texts) < 2:
        return 0
    first, last = min(map(tuple, texts)), max(map(tuple, texts))  # whatever the first and last in order share, all do
    common = next((place for place, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    longest = max(map(len, texts))
    common = min(common, longest - 1, longest if most is None else most)
    return common if common >= LEAST_LENGTH and common * (len(texts) - 1) >= LEAST_TOKENS else 0


def source_of(teacher: PreTrainedModel | StateSource) -> StateSource:
    """Wrap a local model as a `StateSource`."""
    return LocalStates(teacher) if isinstance(teacher, PreTrainedModel) else teacher
