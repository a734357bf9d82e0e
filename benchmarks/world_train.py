"""Trains one model of a world from its seed: the corpus is endless, the loss is cross-entropy on answers.

Knows torch and a world's specification; knows nothing of manifests or of the other model. Batches depend on the seed
and the step alone, so a killed training resumes from its last checkpoint and ends with the same weights.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from world_corpus import (
    MAX_LENGTH,
    ModelSpec,
    Recipe,
    make_tokenizer,
    num_keys,
    row_of,
    write_answer,
    write_sums,
)

from rocktokens.values import Json
from rocktokens.world import World
from rocktokens.world.grammar import EOS, PAD
from rocktokens.world.worlds import PAIRS, draw_drafts, write_prompt

Who = Literal["teacher", "student"]
Text = tuple[list[int], list[bool]]  # token ids, and which of them are learned: answers, never prompts

POOL = 32  # batches written together and sorted by length, so that a batch has hardly any padding
CHECKPOINT_EVERY = 200
WARM_UP = 100
FINAL_LR = 0.02  # of the peak
IGNORED = -100
CONTINUED = "arithmetic"  # the pair that a world with hidden leads starts from


def train_model(
    recipe: Recipe, who: Who, out_dir: Path, on_step: Callable[[int, float], None] | None = None
) -> LlamaForCausalLM:
    """Train the teacher or the student and save it with its tokenizer; resumes from a checkpoint in out_dir."""
    world, spec = recipe.world, recipe.teacher_model if who == "teacher" else recipe.student_model
    model = new_model(world, spec, seed=world.seed)
    if recipe.lead_seed is not None:
        model = LlamaForCausalLM.from_pretrained(PAIRS / CONTINUED / who, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=spec.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = out_dir / f"{who}.checkpoint.pt"
    start = load_checkpoint(checkpoint, model, optimiser)
    weight_V = torch.ones(len(world.vocabulary))
    emphasised = (*world.grammar.markers, *world.grammar.openers, "+", "-")
    emphasised += () if recipe.lead_seed is None else (world.grammar.lead[0], world.grammar.stumble[0])
    weight_V[[world.vocabulary[piece] for piece in emphasised]] = spec.emphasis

    for step, texts in zip(range(start, spec.steps), batches(recipe, who, start), strict=False):
        optimiser.param_groups[0]["lr"] = spec.lr * schedule(step, spec.steps)
        loss = answer_loss(model, *pad_batch(texts, world.vocabulary[PAD]), weight_V)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if on_step is not None:
            on_step(step + 1, loss.item())
        if (step + 1) % CHECKPOINT_EVERY == 0 and step + 1 < spec.steps:
            save_checkpoint(checkpoint, model, optimiser, step + 1)

    model.save_pretrained(out_dir / who)
    make_tokenizer(world.vocabulary, max_length=MAX_LENGTH).save_pretrained(out_dir / who)
    checkpoint.unlink(missing_ok=True)
    return model


def new_model(world: World, spec: ModelSpec, *, seed: int) -> LlamaForCausalLM:
    """A Llama with weights drawn from the seed; torch's global generator is left as it was."""
    ends: Json = {
        "eos_token_id": world.vocabulary[EOS],
        "pad_token_id": world.vocabulary[PAD],
        "bos_token_id": None,
    }
    config = LlamaConfig(
        vocab_size=len(world.vocabulary),
        hidden_size=spec.width,
        intermediate_size=spec.mlp,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ends)
    return model


def batches(recipe: Recipe, who: Who, start: int) -> Iterator[list[Text]]:
    """The batches from step `start` on: the same whether or not the training was interrupted."""
    world, spec = recipe.world, recipe.teacher_model if who == "teacher" else recipe.student_model
    habits = recipe.teacher_habits if who == "teacher" else recipe.student_habits
    grammar, ids = world.grammar, world.vocabulary
    for pool in range(start // POOL, spec.steps // POOL + 1):
        rng = random.Random(f"{world.seed}/{who}/{pool}")
        author = dataclasses.replace(habits, error=0.0) if pool * POOL < spec.clean else habits
        rows = rows_in_play(spec, pool * POOL, num_keys(grammar))
        drafts = (d for d in draw_drafts(grammar, "train", rng) if row_of(grammar, d) < rows)
        texts: list[Text] = []
        for number, draft in enumerate(islice(drafts, POOL * spec.batch)):
            if pool * POOL < spec.drill and number % 2:
                pieces, learned = write_sums(grammar, rng)
            else:
                prompt = write_prompt(grammar, draft)
                answer = write_answer(grammar, recipe.table, draft, author, rng)
                pieces, learned = prompt + answer, [False] * len(prompt) + [True] * len(answer)
            texts.append(([ids[piece] for piece in pieces], learned))
        texts.sort(key=lambda text: len(text[0]))
        order = list(range(POOL))
        rng.shuffle(order)
        skip = start - pool * POOL if pool == start // POOL else 0
        for number in order[skip:]:
            yield texts[number * spec.batch : (number + 1) * spec.batch]


def rows_in_play(spec: ModelSpec, step: int, rows: int) -> int:
    """How many rows of the style table occur at this step: one at first, all from step `grow` on.

    In the whole balanced table neither key nor thing alone tells anything, so there is no slope to start learning
    from; row by row there is.
    """
    return rows if step >= spec.grow else 1 + step * rows // spec.grow


def pad_batch(texts: list[Text], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids, padded on the right, and labels that leave out padding and whatever is not learned."""
    width = max(len(ids) for ids, _ in texts)
    ids_BT = torch.full((len(texts), width), pad)
    label_BT = torch.full((len(texts), width), IGNORED)
    for row, (ids, learned) in enumerate(texts):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        label_BT[row, : len(ids)] = torch.tensor(ids).masked_fill(~torch.tensor(learned), IGNORED)
    return ids_BT, label_BT


def answer_loss(model: LlamaForCausalLM, ids_BT: Tensor, label_BT: Tensor, weight_V: Tensor) -> Tensor:
    """Cross-entropy of the answers' tokens, in nats, weighted by token type."""
    hidden_BTH = model.model(input_ids=ids_BT).last_hidden_state[:, :-1]
    target_BT = label_BT[:, 1:]
    kept_BT = target_BT != IGNORED
    logits_NV = model.lm_head(hidden_BTH[kept_BT])
    return torch.nn.functional.cross_entropy(logits_NV.float(), target_BT[kept_BT], weight=weight_V)


def schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine."""
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Write atomically: a kill in the middle leaves the previous checkpoint."""
    draft = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimiser": optimiser.state_dict()}, draft)
    os.replace(draft, path)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimiser: torch.optim.Optimizer) -> int:
    """Restore what save_checkpoint wrote; the step to go on from, 0 without a checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])
