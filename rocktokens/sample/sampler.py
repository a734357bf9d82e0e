"""Sampling from a model in this process: batched, cached, reproducible row by row.

Every row has a random stream of its own and consumes one number a token, so its tokens do not depend on which other
rows share its batch (up to floating point), nor on the batch size. Rows leave when they finish. This module does not
know prompts, answers or files.

Shapes: B rows in the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rocktokens.errors import ConfigError, DataError
from rocktokens.sample.cpu_decoding import fast_on_cpu
from rocktokens.sample.kv_decoder import Decoder
from rocktokens.sample.requests import Continuation, Request
from rocktokens.seeds import uniforms

# Rows are dropped from the batch when this share of it has finished: copying the cache for each would cost more.
LEAVE_SHARE = 0.1
# Batches that share one prefill of their longest prefixes, so that rows of alike length still meet.
BLOCK_BATCHES = 4

# Vocabularies wider than this are searched block by block: accumulating every token costs more than the model's layers.
WIDE_VOCABULARY = 8192
BLOCK_TOKENS = 512

Prefix = tuple[int, ...]
Trunk = tuple[Decoder, list[Prefix]]


class Sampler:
    """The engine for a Hugging Face model. `vocabulary` cuts off padding rows of the output head."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        vocabulary: int | None = None,
        temperature: float = 1.0,
        greedy: bool = False,
        top_k: int | None = None,
        top_p: float | None = None,
        batch_size: int = 64,
    ) -> None:
        if not eos_ids:
            raise ConfigError("sampling needs at least one end token; the model's generation config names none")
        self.model, self.pad_id, self.vocabulary = model, pad_id, vocabulary
        self.temperature, self.greedy, self.top_k, self.top_p = temperature, greedy, top_k, top_p
        self.batch_size = batch_size
        self.device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment, union-attr]
        self.eos_E = torch.tensor(sorted(set(eos_ids)), device=self.device)
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.exact_resume = greedy or (top_k is None and top_p is None)

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[Continuation]:
        """One continuation a request, in order; rows of similar length share a batch."""
        for request in requests:
            self._check(request)
        answers: list[Continuation | None] = [None] * len(requests)
        was_training = self.model.training
        self.model.eval()
        steps = max((request.max_new_tokens for request in requests), default=0)
        try:
            with fast_on_cpu(self.model, steps=steps):
                for roots, members in self._blocks(requests):
                    trunk: Trunk | None = None
                    if roots:
                        decoder = self._decoder()
                        decoder.prefill(roots, room=0)
                        trunk = (decoder, roots) if decoder.can_branch else None
                    order = sorted(members, key=lambda index: (len(requests[index].prefix), requests[index].prefix))
                    for start in range(0, len(order), self.batch_size):
                        batch = order[start : start + self.batch_size]
                        for index, answer in zip(batch, self._generate_batch([requests[i] for i in batch], trunk)):
                            answers[index] = answer
                        if progress is not None:
                            progress(len(batch))
        finally:
            self.model.train(was_training)
        return [answer for answer in answers if answer is not None]

    def _blocks(self, requests: Sequence[Request]) -> list[tuple[list[Prefix], list[int]]]:
        """Requests that share one prefill, with the longest prefixes that hold all of theirs.

        Rollouts that are resumed at many places have prefixes that begin alike: where that halves the tokens to be
        prefilled, a block's longest ones are prefilled once and every batch copies its beginnings. Otherwise there are
        no roots, and each batch prefills its own.
        """
        root_of = roots_of({request.prefix for request in requests})
        shared = sum(map(len, set(root_of.values())))
        if 2 * shared > sum(map(len, root_of)) or min(map(len, root_of), default=0) < 2:
            return [([], list(range(len(requests))))]
        by_root: dict[Prefix, list[int]] = {}
        for index, request in enumerate(requests):
            by_root.setdefault(root_of[request.prefix], []).append(index)
        blocks: list[tuple[list[Prefix], list[int]]] = []
        for root, members in sorted(by_root.items()):
            roots, rows = blocks[-1] if blocks else ([], [])
            if not blocks or len(rows) >= BLOCK_BATCHES * self.batch_size or len(roots) >= self.batch_size:
                blocks.append(([root], members))
            else:
                roots.append(root)
                rows += members
        return blocks

    def _check(self, request: Request) -> None:
        known = self.model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr, index]
        if not request.prefix or (self.context is not None and len(request.prefix) >= self.context):
            raise DataError(
                f"a prompt has {len(request.prefix)} tokens and the model's context is {self.context}; "
                "every prompt needs a token, and room for a response"
            )
        if not 0 <= min(request.prefix) <= max(request.prefix) < known:
            raise DataError(f"a prompt holds token ids beyond the {known} of this model; it was made for another")
        rows = self.vocabulary or self.model.get_output_embeddings().weight.shape[0]
        banned = set(request.banned)
        if banned and (min(banned) < 0 or max(banned) >= rows or len(banned) >= rows):
            raise ConfigError(f"banned token ids must lie in [0, {rows}) and leave some over, got {sorted(banned)}")

    def _room(self, request: Request) -> int:
        if self.context is None:
            return request.max_new_tokens
        return min(request.max_new_tokens, self.context - len(request.prefix))

    @torch.inference_mode()
    def _generate_batch(self, requests: list[Request], trunk: Trunk | None = None) -> list[Continuation]:
        room = [self._room(request) for request in requests]
        uniform_BT = torch.zeros((len(requests), max(room)), dtype=torch.float64, device=self.device)
        if not self.greedy:
            for row, request in enumerate(requests):
                numbers = uniforms(request.seed, request.skip + room[row])[request.skip :]
                if request.first_seed is not None:
                    numbers[0] = uniforms(request.first_seed, 1)[0]
                uniform_BT[row, : room[row]] = torch.from_numpy(numbers)
        token_BT = torch.full((len(requests), max(room)), self.pad_id, device=self.device)
        length_B = torch.zeros(len(requests), dtype=torch.long, device=self.device)
        ended_B = torch.zeros(len(requests), dtype=torch.bool, device=self.device)
        invalid_B = torch.zeros(len(requests), dtype=torch.bool, device=self.device)
        room_B = torch.tensor(room, device=self.device)

        decoder = self._decoder()
        prefixes = [request.prefix for request in requests]
        if trunk is None:
            logits_LV = decoder.prefill(prefixes, room=max(room))
        else:
            root_of, place = roots_of({*trunk[1], *prefixes}), {root: row for row, root in enumerate(trunk[1])}
            row_B = torch.tensor([place[root_of[prefix]] for prefix in prefixes], device=self.device)
            logits_LV = decoder.branch(trunk[0], row_B, prefixes, room=max(room))
        live_L = torch.arange(len(requests), device=self.device)  # which request each row of the decoder serves
        going_L = torch.ones(len(requests), dtype=torch.bool, device=self.device)
        banned = _banned(requests, live_L)
        for step in range(max(room)):
            logits_LV = logits_LV[:, : self.vocabulary]
            if len(banned[0]):
                logits_LV = logits_LV.clone()
                logits_LV[banned] = -torch.inf  # after any soft cap, so that no ban leaks
            chosen_L, bad_L = self._draw(decoder, logits_LV, uniform_BT[live_L, step], live_L, step)
            writes_L = going_L & ~bad_L
            at = live_L[writes_L]
            token_BT[at, step] = chosen_L[writes_L]
            length_B[at] = step + 1
            invalid_B[live_L[going_L & bad_L]] = True
            ended_L = torch.isin(chosen_L, self.eos_E)
            ended_B[live_L[writes_L & ended_L]] = True
            going_L = writes_L & ~ended_L & (room_B[live_L] > step + 1)
            num_going = int(going_L.sum())
            if num_going == 0:
                break
            if num_going <= len(going_L) * (1 - LEAVE_SHARE):
                row_L = going_L.nonzero().squeeze(1)
                decoder.keep(row_L)
                live_L, chosen_L, going_L = live_L[row_L], chosen_L[row_L], going_L[row_L]
                banned = _banned(requests, live_L)
            logits_LV = decoder.advance(chosen_L)
        return [
            Continuation(tuple(tokens[:length]), truncated=not ended, invalid=invalid)
            for tokens, length, ended, invalid in zip(
                token_BT.tolist(), length_B.tolist(), ended_B.tolist(), invalid_B.tolist()
            )
        ]

    # A subclass may decode with several models and draw otherwise: causal/graft_sampler.py.

    def _decoder(self) -> Decoder:
        return Decoder(self.model, pad_id=self.pad_id)

    def _draw(
        self, decoder: Decoder, logits_LV: Tensor, uniform_L: Tensor, live_L: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """The next token of every live row; `live_L` says which request each serves."""
        return self.choose(logits_LV, uniform_L)

    def choose(self, logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of every row, and whether its logits were unusable (NaN, +inf, or nothing left)."""
        top_B = logits_BV.amax(dim=1)
        bad_B = ~torch.isfinite(top_B)
        if self.greedy:
            return logits_BV.argmax(dim=1), bad_B
        scaled_BV = logits_BV - top_B[:, None]
        if self.temperature != 1:
            scaled_BV /= self.temperature
        if self.top_k is not None and self.top_k < scaled_BV.shape[1]:
            floor_B1 = scaled_BV.topk(self.top_k, dim=1).values[:, -1:]
            scaled_BV = scaled_BV.masked_fill(scaled_BV < floor_B1, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            # Keep the most probable tokens until together they reach top_p, the one that crosses it included.
            sorted_BV, index_BV = scaled_BV.sort(dim=1, descending=True)
            probability_BV = sorted_BV.softmax(dim=1)
            before_BV = probability_BV.cumsum(dim=1) - probability_BV
            drop_BV = torch.zeros_like(scaled_BV, dtype=torch.bool).scatter_(1, index_BV, before_BV >= self.top_p)
            scaled_BV = scaled_BV.masked_fill(drop_BV, -torch.inf)
        return inverse_transform(scaled_BV.exp_(), uniform_B), bad_B


def inverse_transform(mass_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token of each row whose cumulative mass exceeds the row's number in [0, 1) times its total mass.

    Summed in float64. A token of mass 0 adds nothing, so it can never be the first to exceed. A wide vocabulary is
    summed in blocks first, so that only the block that holds the token is accumulated token by token.
    """
    num_tokens = mass_BV.shape[1]
    if num_tokens <= WIDE_VOCABULARY:
        cumulative_BV = mass_BV.cumsum(dim=1, dtype=torch.float64)
        return _first_above(cumulative_BV, uniform_B * cumulative_BV[:, -1])
    whole = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    sum_BN = mass_BV[:, :whole].unflatten(1, (-1, BLOCK_TOKENS)).sum(dim=2, dtype=torch.float64)
    rest_B1 = mass_BV[:, whole:].sum(dim=1, keepdim=True, dtype=torch.float64)
    cumulative_BN = torch.cat([sum_BN, rest_B1], dim=1).cumsum_(dim=1)
    target_B = uniform_B * cumulative_BN[:, -1]
    block_B1 = _first_above(cumulative_BN, target_B)[:, None]
    before_B1 = cumulative_BN.gather(1, (block_B1 - 1).clamp_min(0)) * (block_B1 > 0)
    index_BW = block_B1 * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=mass_BV.device)
    mass_BW = mass_BV.gather(1, index_BW.clamp_max(num_tokens - 1)) * (index_BW < num_tokens)
    return index_BW[:, 0] + _first_above(before_B1 + mass_BW.cumsum(dim=1, dtype=torch.float64), target_B)


def _first_above(cumulative_BV: Tensor, target_B: Tensor) -> Tensor:
    """The first place of each row above its target, which rounding never lets reach the row's last sum."""
    end_B = cumulative_BV[:, -1]
    below_B = torch.minimum(target_B, torch.nextafter(end_B, torch.full_like(end_B, -torch.inf)))
    place_B = torch.searchsorted(cumulative_BV, below_B[:, None], right=True).squeeze(1)
    return place_B.clamp_max_(cumulative_BV.shape[1] - 1)  # a row of NaN has no such place


def roots_of(prefixes: set[Prefix]) -> dict[Prefix, Prefix]:
    """For every prefix one of them that it begins, and that begins no other."""
    found: dict[Prefix, Prefix] = {}
    root: Prefix | None = None
    for prefix in sorted(prefixes, reverse=True):  # whatever a prefix begins comes right before it
        if root is None or root[: len(prefix)] != prefix:
            root = prefix
        found[prefix] = root
    return found


def _banned(requests: Sequence[Request], live_L: Tensor) -> tuple[Tensor, Tensor]:
    """The banned (row, token type) pairs of the rows now in the batch."""
    pairs = [(row, token) for row, index in enumerate(live_L.tolist()) for token in requests[index].banned]
    row_P, token_P = torch.tensor(pairs, device=live_L.device).reshape(-1, 2).long().unbind(1)
    return row_P, token_P
