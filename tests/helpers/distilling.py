"""A tiny random pair, its prompts and a trainer on it, for the tests of distillation; also run by torchrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rocktokens.models.pair import Pair
from rocktokens.prompts.tasks import Prompt

VOCABULARY = 64
EOS, PAD = 1, 0


@cache
def tokenizer(ids: Sequence[int] = range(3, VOCABULARY)) -> PreTrainedTokenizerFast:
    """Words w3 … w63, each one token; `ids` in another order make another tokenizer."""
    words = {f"w{word}": id_ for word, id_ in zip(range(3, VOCABULARY), ids)}
    ordered = ["<pad>", "<eos>", "<unk>", *sorted(words, key=words.get)]
    return tiny_tokenizer(ordered, bos_token=None, unk_token="<unk>", padding_side="left")


def model(seed: int, width: int = 32, layers: int = 2, vocabulary: int = VOCABULARY, **settings: Any) -> Any:
    """A Llama with random weights large enough for its choices to matter."""
    shape = {"num_hidden_layers": layers, "max_position_embeddings": 64, "tie_word_embeddings": True}
    ends = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None}
    shape |= {"initializer_range": 0.3, **ends, **settings}
    return tiny_model(seed=seed, width=width, vocabulary=vocabulary, **shape)


def student(**settings: Any) -> Any:
    """The student, always the same."""
    return model(0, **settings)


def teacher(**settings: Any) -> Any:
    """A teacher of another width and depth."""
    return model(1, 48, 3, **settings)


def prompts(count: int = 64) -> list[Prompt]:
    """Prompts of 2 to 6 tokens, with an answer that is one of the words."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    found = []
    for number in range(count):
        ids = tuple(draw(3, VOCABULARY, draw(2, 7, 1)[0]))
        text = " ".join(f"w{i}" for i in ids)
        found.append(Prompt(f"p{number}", ids, text, f"w{draw(3, VOCABULARY, 1)[0]}"))
    return found


def dataset(count: int = 64) -> Dataset:
    """The same prompts as a stock TRL script would hold them: text."""
    return Dataset.from_list([{"prompt": prompt.text} for prompt in prompts(count)])


def pair(the_student: Any = None, the_teacher: Any = None) -> Pair:
    """Both models and their tokenizer."""
    the_student, the_teacher = the_student or student(), the_teacher or teacher()
    return Pair(the_student, the_teacher, tokenizer(), VOCABULARY, (EOS,), PAD)


def arguments(path: Path | str, **settings: Any) -> Any:
    """TRL's configuration for a few quick steps."""
    from rocktokens.train.trainer import device_arguments

    defaults = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "max_completion_length": 12,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
    }
    return device_arguments(str(path), **{**defaults, **settings})


def with_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Keywords of our trainer, with those that are fields of RockOptions gathered in `options`."""
    from rocktokens.train.trainer import RockOptions

    names = {field.name for field in fields(RockOptions)} & settings.keys()
    own = RockOptions(**{name: settings[name] for name in names})
    return {name: value for name, value in settings.items() if name not in names} | ({"options": own} if names else {})


def made(path: Path | str, trainer: Any = None, *, data: Any = None, models: Any = None, args: Any = None, **settings):
    """A trainer that has not trained yet, ours unless another class is given."""
    from rocktokens import RockDistillationTrainer

    models, data = models or (student(), teacher()), data if data is not None else dataset()
    settings = with_options({"processing_class": tokenizer(), **settings})
    return (trainer or RockDistillationTrainer)(*models, args or arguments(path), data, **settings)


def trained(path: Path | str, **settings: Any):
    """A trainer after its steps."""
    trainer = made(path, **settings)
    trainer.train()
    return trainer


def one_step(path: Path | str, given: Mapping[str, Any] | None = None, /, **settings: Any):
    """One step of plain SGD with rate 1, with these arguments of TRL: the trainer, and the gradient by parameter."""
    sgd = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}
    before = parameters(student())
    trainer = trained(path, args=arguments(path, **{**sgd, **(given or {})}), **settings)
    after = parameters(trainer)
    return trainer, {name: before[name] - after[name] for name in before}


def parameters(trainer_or_model: Any) -> dict[str, torch.Tensor]:
    """Parameters by name, as they are."""
    found = getattr(trainer_or_model, "model", trainer_or_model)
    found = trainer_or_model if isinstance(trainer_or_model, LlamaForCausalLM) else found
    return {name: parameter.detach().clone() for name, parameter in found.named_parameters()}


def furthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Largest difference of two sets of parameters."""
    return max(float((first[name] - second[name]).abs().max()) for name in first)
