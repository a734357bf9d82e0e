"""A batch of token sequences under way in one model: prefill, advance by a token, let rows go.

Padding is on the left and exact: masked out of attention, and position ids start at 0 on a row's first real token.
Distinct prefixes are prefilled once and shared by the rows that start from them, a beginning that all have (a system
message) once for the batch; a batch may branch from another's rows. Keys and values of attention layers live in one
preallocated slab per layer, so that a step copies nothing but its own token. How tokens are chosen is sampler.py's.

Shapes: B rows in the batch, T positions, U distinct prefixes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rocktokens.errors import ConfigError
from rocktokens.models.states import worth_sharing


class _SlabLayer(DynamicLayer):
    """Keys and values in a buffer with room for the whole rollout; what attention sees is a view of it.

    Sliding-window layers may use it too: the mask, not the cache, decides what a position sees.
    """

    key_slab: Tensor
    value_slab: Tensor

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.start = self.stop = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            for name, given in (("key_slab", key_states), ("value_slab", value_states)):
                batch, heads, length, width = given.shape
                setattr(self, name, given.new_empty((batch, heads, length + self.room, width)))
        stop = self.stop + key_states.shape[-2]
        self.key_slab[:, :, self.stop : stop] = key_states
        self.value_slab[:, :, self.stop : stop] = value_states
        self.stop = stop
        return self._view()

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys = self.key_slab[:, :, self.start : self.stop]
        self.values = self.value_slab[:, :, self.start : self.stop]
        return self.keys, self.values

    def select(self, row_B: Tensor, drop_left: int) -> None:
        """Keep these rows, and forget the first positions, which are padding in all of them."""
        self.start += drop_left
        length = self.stop - self.start
        for name in ("key_slab", "value_slab"):
            old = getattr(self, name)
            new = old.new_empty((len(row_B), old.shape[1], old.shape[2] - self.start, old.shape[3]))
            torch.index_select(old[:, :, self.start : self.stop], 0, row_B, out=new[:, :, :length])
            setattr(self, name, new)
        self.start, self.stop = 0, length
        self._view()


class Decoder:
    """Rows of one model's decoding batch; every method returns the next token's logits in float32."""

    def __init__(self, model: PreTrainedModel, *, pad_id: int) -> None:
        self.model, self.pad_id = model, pad_id
        self.device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment, union-attr]

    @torch.inference_mode()
    def prefill(self, prefixes: Sequence[Sequence[int]], *, room: int) -> Tensor:
        """Start with these prefixes, with space for `room` more tokens each."""
        distinct = {prefix: row for row, prefix in enumerate(dict.fromkeys(map(tuple, prefixes)))}
        row_B = torch.tensor([distinct[tuple(prefix)] for prefix in prefixes], device=self.device)
        length_U = torch.tensor([len(prefix) for prefix in distinct])
        longest = int(length_U.max())

        input_UT = torch.full((len(distinct), longest), self.pad_id)
        for prefix, row in distinct.items():
            input_UT[row, longest - len(prefix) :] = torch.tensor(prefix)
        pad_U1 = (longest - length_U)[:, None]
        column_T = torch.arange(longest)
        self._cache = _new_cache(self.model, room)
        known, common = 0, worth_sharing(list(distinct))
        if common:  # what all prefixes begin with is computed once
            trunk = Decoder(self.model, pad_id=self.pad_id)
            trunk.prefill([next(iter(distinct))[:common]], room=0)
            if trunk.can_branch:
                row_U = torch.zeros(len(distinct), dtype=torch.long, device=self.device)
                self._adopt(trunk, row_U, pad_U1.to(self.device), common, room + longest - common)
                # Columns to leave out. A shorter prefix lies further right: its last shared tokens are computed again.
                known = common
        self._mask_BT = torch.ones((len(distinct), longest + room), dtype=torch.long, device=self.device)
        self._mask_BT[:, :longest] = (column_T >= pad_U1).to(self.device)
        position_UT = (column_T - pad_U1).clamp_min(0).to(self.device)
        self._length = longest
        self._next_B = length_U.to(self.device)
        logits_UV = self._forward(input_UT[:, known:].to(self.device), position_UT[:, known:])
        if all(getattr(layer, "device", None) is None for layer in self._cache.layers):  # nothing was put into it
            raise ConfigError(
                f"a {self.model.config.model_type} model keeps its state in a way this sampler does not know; it would "
                "forget the text at every token. Choose a model with an attention cache."
            )
        if len(distinct) == len(prefixes):
            return logits_UV
        self.keep(row_B)
        return logits_UV[row_B]

    @property
    def can_branch(self) -> bool:
        """Whether other batches may start from this one's rows: all its layers keep keys and values by position."""
        return all(isinstance(layer, _SlabLayer) for layer in self._cache.layers)

    @torch.inference_mode()
    def branch(self, trunk: Decoder, row_B: Tensor, prefixes: Sequence[Sequence[int]], *, room: int) -> Tensor:
        """Start with prefixes of a prefilled trunk's rows: all but their last token is copied, not computed."""
        length_B = torch.tensor([len(prefix) - 1 for prefix in prefixes], device=self.device)
        longest = int(length_B.max())
        pad_B1 = (longest - length_B)[:, None]
        column_T = torch.arange(longest, device=self.device)
        self._adopt(trunk, row_B, pad_B1, longest, room + 1)
        self._mask_BT = torch.ones((len(prefixes), longest + room + 1), dtype=torch.long, device=self.device)
        self._mask_BT[:, :longest] = column_T >= pad_B1
        self._length, self._next_B = longest, length_B
        return self.advance(torch.tensor([prefix[-1] for prefix in prefixes], device=self.device))

    def _adopt(self, trunk: Decoder, row_B: Tensor, pad_B1: Tensor, columns: int, room: int) -> None:
        """Fill the first columns from a trunk's rows, each moved right by its padding, with room for more columns."""
        start_B1 = (trunk._length - trunk._next_B[row_B])[:, None]  # where the trunk's rows begin, after their padding
        from_BT = (torch.arange(columns, device=self.device) - pad_B1).clamp_min(0) + start_B1
        self._cache = _new_cache(self.model, room)
        for own, theirs in zip(self._cache.layers, trunk._cache.layers):
            assert isinstance(own, _SlabLayer)
            assert isinstance(theirs, _SlabLayer)
            slabs = (theirs.key_slab, theirs.value_slab)
            own.update(*(slab[row_B[:, None], :, from_BT].transpose(1, 2) for slab in slabs))

    @torch.inference_mode()
    def advance(self, token_B: Tensor) -> Tensor:
        """Append one token to every row."""
        self._length += 1
        position_B1 = self._next_B[:, None]
        self._next_B = self._next_B + 1
        return self._forward(token_B[:, None], position_B1)

    @torch.inference_mode()
    def keep(self, row_B: Tensor) -> None:
        """Continue with these rows only (in this order, repeats allowed)."""
        self._mask_BT, self._next_B = self._mask_BT[row_B], self._next_B[row_B]
        if not self.can_branch:
            self._cache.reorder_cache(row_B)  # type: ignore[arg-type]
            return
        drop_left = self._length - int(self._next_B.max())
        self._mask_BT = self._mask_BT[:, drop_left:]
        self._length -= drop_left
        for layer in self._cache.layers:
            assert isinstance(layer, _SlabLayer)
            layer.select(row_B, drop_left)

    def _forward(self, input_BT: Tensor, position_BT: Tensor) -> Tensor:
        mask_BT = self._mask_BT[:, : self._length]
        # Rows of equal length need no mask, and attention without one is faster.
        padded = bool(self._next_B.min() != self._next_B.max()) or not isinstance(self._cache.layers[0], _SlabLayer)
        output = self.model(
            input_ids=input_BT,
            attention_mask=mask_BT if padded else None,
            position_ids=position_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].to(self.device).float()


def _new_cache(model: PreTrainedModel, room: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    if cache.layers and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        cache.layers = [_SlabLayer(room) for _ in cache.layers]
    return cache
