"""Hidden states of a micro-batch's completions with little padding, and each prompt computed once.

The rollouts of one prompt begin alike: keys and values of the prompt are computed for one of them and shared,
gradients included, and of the prompt only the last hidden state is needed, for it predicts the first token. Columns
that are padding in every row of the micro-batch are cut off before the model sees them; on a CPU, where padding costs
as much as text, rows of alike length go through the model together. This module knows no loss and no trainer.

Shapes: B rollouts, U distinct prompts, P prompt columns, C completion columns, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rocktokens.train.step_inputs import base_of
from rocktokens.values import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# On a CPU, rows of a micro-batch go through the model in groups: one is closed before its padding exceeds this share,
# if it has so many tokens that another pass through the model pays.
MAX_PADDING = 0.25
LEAST_TOKENS = 64


class Texts(NamedTuple):
    """Left-padded prompts, right-padded completions, and their masks."""

    prompt_BP: Tensor
    prompt_mask_BP: Tensor
    completion_BC: Tensor
    completion_mask_BC: Tensor

    @classmethod
    def of(cls, inputs: Batch) -> Texts:
        """The texts of one of TRL's batches."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return cls(*(inputs[name] for name in names))

    def joined(self) -> tuple[Tensor, Tensor]:
        """Prompt and completion of every row as one text, and its mask."""
        return (
            torch.cat([self.prompt_BP, self.completion_BC], dim=1),
            torch.cat([self.prompt_mask_BP, self.completion_mask_BC], dim=1),
        )

    def trimmed(self) -> Texts:
        """Without the columns that are padding in every row; a column of each stays."""
        begun = self.prompt_mask_BP.any(0).long().argmax() if self.prompt_mask_BP.any() else 0
        used = self.completion_mask_BC.any(0).nonzero()
        end = int(used[-1]) + 1 if len(used) else 1
        return Texts(
            self.prompt_BP[:, int(begun) :],
            self.prompt_mask_BP[:, int(begun) :],
            self.completion_BC[:, :end],
            self.completion_mask_BC[:, :end],
        )


def completion_states(model: PreTrainedModel, inputs: Batch, read: Callable[..., Tensor], *, share: bool) -> Tensor:
    """Hidden states that predict each completion token, (B, C, H); zeros where every row is padding.

    Args:
        model: the causal model, or a PEFT wrapper of one.
        inputs: one of TRL's batches.
        read: the states by one forward over everything: from texts, their mask, and the number of completion columns.
        share: cut off columns of padding, and compute equal prompts once where the model allows it.
    """
    texts = Texts.of(inputs)
    width = texts.completion_BC.shape[1]
    if not share:
        return read(*texts.joined(), width)
    texts = texts.trimmed()
    states_BCH = _shared(model, texts)
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
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def _shared(model: PreTrainedModel, texts: Texts) -> Tensor | None:
    num_prompt = texts.prompt_BP.shape[1]
    together_BP2 = torch.cat([texts.prompt_BP, texts.prompt_mask_BP], dim=1)
    distinct_UP2, row_B = torch.unique(together_BP2, dim=0, return_inverse=True)
    groups = _alike(texts.completion_mask_BC)
    if len(distinct_UP2) == len(row_B) and len(groups) == 1:
        return None
    model = base_of(model)
    if not can_share(model):
        return None
    trunk = DynamicCache(config=model.config)
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
    states = [_branch(model, trunk, row_B, texts, group_G) for group_G in groups]
    rest_BCH = torch.cat([nn.functional.pad(part, (0, 0, 0, width - part.shape[1])) for part in states])
    return torch.cat([first_B1H, rest_BCH[torch.cat(groups).argsort()]], dim=1)


def _branch(model: PreTrainedModel, trunk: DynamicCache, row_B: Tensor, texts: Texts, group_G: Tensor) -> Tensor:
    """States at the completion tokens of some rows but each one's last, which predicts nothing."""
    mask_GC = texts.completion_mask_BC[group_G]
    inputs = max(int(mask_GC.any(0).nonzero().max()), 1) if mask_GC.any() else 1
    branch = DynamicCache(config=model.config)
    for number, layer in enumerate(trunk.layers):
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        branch.update(layer.keys[row_B[group_G]], layer.values[row_B[group_G]], number)
    return model.base_model(
        input_ids=texts.completion_BC[group_G, :inputs],
        attention_mask=torch.cat([texts.prompt_mask_BP[group_G], mask_GC[:, :inputs]], dim=1),
        past_key_values=branch,
        use_cache=True,
    ).last_hidden_state


def _alike(mask_BC: Tensor) -> list[Tensor]:
    """Rows in groups of alike length, shortest first, so that little of a group is padding; one group off the CPU."""
    everything_B = torch.arange(len(mask_BC), device=mask_BC.device)
    if mask_BC.device.type != "cpu":
        return [everything_B]
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
