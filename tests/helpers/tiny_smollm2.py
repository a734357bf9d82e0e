"""A tiny random Llama with a small byte-level tokenizer and a chat template: SmolLM2's classes, made in a second."""

from __future__ import annotations

from pathlib import Path

from smollm2_pair import MakeConfig
from smollm2_problems import word_problems
from smollm2_teach import TeachConfig
from tiny import save_model, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rocktokens.train.settings import OffPolicyConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUICK = MakeConfig(
    problems=120,
    readings=8,
    final_readings=8,
    teach=TeachConfig(lessons=32, steps=6, batch=4, learning_rate=1e-2, warmup=1, look_every=2, target=1.0),
    layers_left_out=1,
    heal=OffPolicyConfig(answers=16, batch=8, learning_rate=1e-3),
    max_new_tokens=12,
)


def chat_tokenizer(vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """Trained on our own problems, with SmolLM2's special tokens and template."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    fast.decoder = decoders.ByteLevel()
    texts = [f"{problem.prompt}\n{problem.solution}" for problem in word_problems(200, seed=5)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(texts, trainer)
    start, end = SPECIAL[1:]
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token=start, eos_token=end, pad_token=end, chat_template=TEMPLATE
    )


def save_base(path: Path) -> Path:
    """What stands for the package's weights: SmolLM2's kind of shape (tied head, fewer key heads) in miniature."""
    tokenizer = chat_tokenizer()
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    shape = {"width": 48, "num_hidden_layers": 4, "tie_word_embeddings": True, "max_position_embeddings": 512}
    save_model(path, tiny_model(vocabulary=len(tokenizer), **shape, **ends), tokenizer)
    return path
