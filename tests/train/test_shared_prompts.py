"""Prompts computed once and padding cut off: the same hidden states and gradients as one forward over everything."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, tiny_model

from rocktokens.train.forward import Texts, can_share, completion_states

PAD = 2


def texts(prompts: list[int], lengths: list[int], columns: tuple[int, int] = (9, 8)) -> Texts:
    """Rows of the numbered prompts (number n has 3 + n tokens), with completions of these lengths."""
    g = torch.Generator().manual_seed(0)
    written = {n: torch.randint(3, 60, (3 + n,), generator=g) for n in sorted(set(prompts))}
    prompt, completion = (torch.full((len(prompts), width), PAD) for width in columns)
    prompt_mask, completion_mask = torch.zeros_like(prompt), torch.zeros_like(completion)
    for row, (number, length) in enumerate(zip(prompts, lengths)):
        prompt[row, columns[0] - 3 - number :] = written[number]
        prompt_mask[row, columns[0] - 3 - number :] = 1
        completion[row, :length] = torch.randint(3, 60, (length,), generator=g)
        completion_mask[row, :length] = 1
    return Texts(prompt, prompt_mask, completion, completion_mask)


def inputs(given: Texts) -> dict[str, torch.Tensor]:
    """As TRL names them."""
    return dict(zip(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), given))


def reader(model):
    """One forward over everything, positions as transformers counts them."""

    def read(input_BT, mask_BT, width):
        states = model.base_model(input_ids=input_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
        return states[:, -width - 1 : -1]

    return read


def one_forward(model, given: Texts) -> torch.Tensor:
    """The definition: every row whole."""
    input_BT = torch.cat([given.prompt_BP, given.completion_BC], dim=1)
    mask_BT = torch.cat([given.prompt_mask_BP, given.completion_mask_BC], dim=1)
    return reader(model)(input_BT, mask_BT, given.completion_BC.shape[1])


def gradients(model, states, mask) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (states * mask[..., None]).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def forwards_of_equal_states(model, given: Texts) -> list[tuple[int, int]]:
    """Shapes of the forwards that sharing takes, once its states and gradients are those of one forward."""
    mask = given.completion_mask_BC
    want = one_forward(model, given)
    want_grads = gradients(model, want, mask)
    forwards = []
    handle = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    got = completion_states(model, inputs(given), reader(model), share=True)
    handle.remove()
    assert got.shape == want.shape
    torch.testing.assert_close(got[mask > 0], want[mask > 0], rtol=1e-4, atol=1e-5)
    got_grads = gradients(model, got, mask)
    assert got_grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-3, atol=1e-4, msg=name)
    return forwards


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", [[0, 0, 0, 0], [1, 1, 4, 4, 1]])
def test_states_and_gradients_are_those_of_one_forward(family, prompts):
    model, rows, longest = tiny_model(family).train(), len(prompts), 3 + max(prompts)
    forwards = forwards_of_equal_states(model, texts(prompts, [5, 3, 1, 6, 2][:rows]))
    shared = [(len(set(prompts)), longest), (rows, 5)]  # the longest completion has 6 tokens
    assert forwards == (shared if can_share(model) else [(rows, longest + 6)])


@pytest.mark.parametrize("prompts", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5]])
def test_on_a_cpu_rows_of_alike_length_go_together(prompts):
    """Six completions of very different length: the same states and gradients, with less padding."""
    given = texts(prompts, [40, 3, 41, 5, 38, 39], columns=(9, 50))
    longest, distinct = 3 + max(prompts), len(set(prompts))
    # 3, 5 and 38 are fewer than 64 tokens without the third
    assert forwards_of_equal_states(tiny_model().train(), given) == [(distinct, longest), (3, 37), (3, 40)]


def test_which_models_share():
    assert can_share(tiny_model("llama"))
    assert not can_share(tiny_model("mistral"))  # a sliding window forgets the prompt
    assert not can_share(tiny_model("llama", attention_dropout=0.1).train())
    assert can_share(tiny_model("llama", attention_dropout=0.1))
    checkpointed = tiny_model("llama").train()
    checkpointed.gradient_checkpointing_enable()
    assert not can_share(checkpointed)


def test_without_sharing_every_row_is_read_whole():
    model, given = tiny_model(), texts([0, 1, 2], [2, 4, 3])
    whole = completion_states(model, inputs(given), reader(model), share=False)
    torch.testing.assert_close(whole, one_forward(model, given))


def test_a_batch_without_any_completion_keeps_a_column():
    given = texts([0, 0], [0, 0])
    assert given.trimmed().completion_BC.shape == (2, 1)
    states = completion_states(tiny_model(), inputs(given), reader(tiny_model()), share=True)
    assert states.shape[:2] == (2, 8)
