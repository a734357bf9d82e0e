"""A training forward: hidden states of a micro-batch's completions, and the precision they are computed in.

Rollouts of one prompt begin alike: keys and values of the prompt are computed for one of them and shared, gradients
included, and of the prompt only the last hidden state is needed, for it predicts the first token. Columns that are
padding in every row are cut off before the model sees them; on a CPU, where padding costs as much as text, rows of
alike length go through the model together.

TRL computes its loss inside `_forward_redirection`, which replaces the model's `forward`; accelerate's autocast lives
in that replaced `forward`. So with `bf16=True` stock TRL samples in bfloat16 and computes the loss in the weights'
precision. Our trainer enters accelerate's autocast itself unless `autocast=False` asks for stock's behaviour.

Shapes: B rollouts, U distinct prompts, P prompt columns, C completion columns, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rocktokens.divergence.fused import Head
from rocktokens.values import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

# On a CPU, rows of a micro-batch go through the model in groups: one is closed before its padding exceeds this share,
# once it has enough tokens for another pass through the model to pay.
MAX_PADDING = 0.25
LEAST_TOKENS = 64


class Texts(NamedTuple):
    """Left-padded prompts, right-padded completions, and their masks."""

    prompt_BP: Tensor
    prompt_mask_BP: Tensor
    completion_BC: Tensor
    completion_mask_BC: Tensor

    def joined(self) -> tuple[Tensor, Tensor]:
        """Prompt and completion of every row as one text, and its mask."""
        return (
            torch.cat([self.prompt_BP, self.completion_BC], dim=1),
            torch.cat([self.prompt_mask_BP, self.completion_mask_BC], dim=1),
        )

    def trimmed(self) -> Texts:
        """Without the columns that are padding in every row; a column of each stays."""
        begun = int(self.prompt_mask_BP.any(0).long().argmax()) if self.prompt_mask_BP.any() else 0
        used = self.completion_mask_BC.any(0).nonzero()
        end = int(used[-1]) + 1 if len(used) else 1
        prompts = (self.prompt_BP[:, begun:], self.prompt_mask_BP[:, begun:])
        return Texts(*prompts, self.completion_BC[:, :end], self.completion_mask_BC[:, :end])


def completion_states(model: PreTrainedModel, inputs: Batch, read: Callable[..., Tensor], *, share: bool) -> Tensor:
    """Hidden states that predict each completion token, (B, C, H); zeros where every row is padding.

    Args:
        model: the causal model, or a PEFT wrapper of one.
        inputs: one of TRL's batches.
        read: the states by one forward over everything: from texts, their mask, and the number of completion columns.
        share: cut off columns of padding, and compute equal prompts once where the model allows it.
    """
    texts = Texts(*(inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")))
    width = texts.completion_BC.shape[1]
    if not share:
        return read(*texts.joined(), width)
    texts = texts.trimmed()
    states_BCH = _shared(base_of(model), texts)
    if states_BCH is None:
        states_BCH = read(*texts.joined(), texts.completion_BC.shape[1])
    return nn.functional.pad(states_BCH, (0, 0, 0, width - states_BCH.shape[1]))


def can_share(model: PreTrainedModel) -> bool:
    """Whether a prompt's keys and values may serve several rollouts: kept by position, nothing drawn at random."""
    if model.training:
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
        drops = drops or float(getattr(model.config, "attention_dropout", None) or 0) > 0
        if drops or getattr(model, "is_gradient_checkpointing", False):
            return False
    layers = DynamicCache(config=model.config).layers  # a sliding window or a recurrent state forgets the prompt
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def _shared(model: PreTrainedModel, texts: Texts) -> Tensor | None:
    """States with every distinct prompt computed once; None where one forward over everything is as good."""
    num_prompt = texts.prompt_BP.shape[1]
    together_BP2 = torch.cat([texts.prompt_BP, texts.prompt_mask_BP], dim=1)
    distinct_UP2, row_B = torch.unique(together_BP2, dim=0, return_inverse=True)
    groups = _alike(texts.completion_mask_BC)
    if (len(distinct_UP2) == len(row_B) and len(groups) == 1) or not can_share(model):
        return None
    trunk = DynamicCache(config=model.config)  # every distinct prompt, once
    last_U1H = model.base_model(
        input_ids=distinct_UP2[:, :num_prompt],
        attention_mask=distinct_UP2[:, num_prompt:],
        past_key_values=trunk,
        use_cache=True,
    ).last_hidden_state[:, -1:]
    first_B1H = last_U1H[row_B]
    width = texts.completion_BC.shape[1] - 1
    if width == 0:
        return first_B1H
    states = []
    for group_G in groups:  # states at the completion tokens but each row's last, which predicts nothing
        mask_GC = texts.completion_mask_BC[group_G]
        inputs = max(int(mask_GC.any(0).nonzero().max()), 1) if mask_GC.any() else 1
        branch = DynamicCache(config=model.config)  # the prompt's keys and values for each of its rollouts
        for number, layer in enumerate(trunk.layers):
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None
            assert layer.values is not None
            branch.update(layer.keys[row_B[group_G]], layer.values[row_B[group_G]], number)
        part_GCH = model.base_model(
            input_ids=texts.completion_BC[group_G, :inputs],
            attention_mask=torch.cat([texts.prompt_mask_BP[group_G], mask_GC[:, :inputs]], dim=1),
            past_key_values=branch,
            use_cache=True,
        ).last_hidden_state
        states.append(nn.functional.pad(part_GCH, (0, 0, 0, width - part_GCH.shape[1])))
    return torch.cat([first_B1H, torch.cat(states)[torch.cat(groups).argsort()]], dim=1)


def _alike(mask_BC: Tensor) -> list[Tensor]:
    """Rows in groups of alike length, shortest first, so that little of a group is padding; one group off the CPU."""
    if mask_BC.device.type != "cpu":
        return [torch.arange(len(mask_BC), device=mask_BC.device)]
    length_B = (mask_BC * torch.arange(1, mask_BC.shape[1] + 1)).amax(1)
    groups: list[list[int]] = [[]]
    real = held = 0  # tokens of the last group, without and with its padding
    for row in length_B.argsort(stable=True).tolist():
        length = max(int(length_B[row]), 1)
        padded = length * (len(groups[-1]) + 1)
        if held >= LEAST_TOKENS and padded - real - length > MAX_PADDING * padded:
            groups.append([])
            real, padded = 0, length
        groups[-1].append(row)
        real, held = real + length, padded
    return [torch.tensor(group) for group in groups]


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model under PEFT's adapters, or the model itself where there are none."""
    wrapped: object = model
    return wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else model


class Precision:
    """Number formats of a trainer's forward passes; `autocast=False` leaves training forwards as TRL has them."""

    def __init__(self, accelerator: Accelerator, weight: Tensor, *, autocast: bool) -> None:
        asked = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        self._accelerator, self.autocast = accelerator, autocast
        self._mixed = asked if autocast else None
        names = [str(own).removeprefix("torch.") for own in (weight.dtype, self._mixed or weight.dtype)]
        names.append(str(self.product(weight.device) or weight.dtype).removeprefix("torch."))
        self.forward = names[1]
        """The format in which hidden states are computed: what the loss's numerical floor follows from."""
        own = f" (autocast=False, as in TRL itself; rollouts in {asked})" if asked and not autocast else ""
        self.description = (
            "precision: weights {}, training forwards {}, output heads {}, sums float32".format(*names) + own
        )

    def mixed(self) -> AbstractContextManager[object]:
        """Accelerate's autocast, where the user asked for mixed precision and for its use in training forwards."""
        return self._accelerator.autocast() if self.autocast else nullcontext()

    def product(self, device: torch.device) -> torch.dtype | None:
        """The dtype in which the output heads' factors are multiplied; None: the dtype they have.

        CUDA multiplies bfloat16 into float32 sums at full speed, where a float32 product would be slow. On a CPU the
        factors would have to be widened again first, so float32 weights stay float32 there. float16 is left alone: its
        gradients would underflow.
        """
        return self._mixed if self._mixed is torch.bfloat16 and device.type == "cuda" else None

    def factors(self, head: Head, states: Tensor, device: torch.device) -> tuple[Head, Tensor]:
        """A head and its hidden states, whole and in the dtype of their product, differentiably; sums stay float32."""
        if isinstance(head.weight_VH, DTensor):  # sharded by FSDP2: gathered once
            bias_V = head.bias_V.full_tensor() if isinstance(head.bias_V, DTensor) else head.bias_V
            head = replace(head, weight_VH=head.weight_VH.full_tensor().to(states.dtype), bias_V=bias_V)
        dtype = self.product(device)
        if dtype is not None:
            head, states = replace(head, weight_VH=head.weight_VH.to(dtype)), states.to(dtype)
        return head, states.to(head.weight_VH.device)
