"""The teacher as the trainer sees it: its states for a batch, and its head. In this process, or served elsewhere.

A local teacher is TRL's: prepared by accelerate, run through its own wrapper. A served one takes no memory here but its
output head's; its states are asked for rollout by rollout and put on the batch's grid.

TRL wants equal `vocab_size` in both configurations, but many families pad their output heads to a multiple that depends
on the model's size, so that one tokenizer has heads of different height. Such a teacher is loaded as TRL loads it and
handed to the trainer afterwards; rows beyond the shared part are cut in the loss and banned in sampling.

Shapes: B rollouts of a micro-batch, C columns of the completion grid, G the teacher's width.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from trl import DistillationConfig
from trl.models import prepare_deepspeed
from trl.trainer.utils import create_model_from_path, get_config_model_id

from rocktokens.errors import ConfigError
from rocktokens.models.pair import head_of
from rocktokens.models.states import Sequences, StateSource
from rocktokens.train.step import ModelShape
from rocktokens.values import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rocktokens.train.trainer import RockDistillationTrainer

log = logging.getLogger(__name__)


class LocalTeacher:
    """The trainer's `teacher_model`."""

    def __init__(self, trainer: RockDistillationTrainer) -> None:
        self.trainer = trainer
        self._model: Any = trainer.accelerator.unwrap_model(trainer.teacher_model)
        if trainer.is_deepspeed_enabled and trainer.args.deepspeed_plugin.zero_stage == 3:
            raise ConfigError(
                "DeepSpeed's ZeRO-3 cuts the teacher's output head into pieces; serve it: start vLLM with --runner "
                "pooling and name its URL with --servers.teacher (docs/scale.md)"
            )
        self.rows = len(self._model.get_output_embeddings().weight)
        self.shape, self.head = ModelShape.of(self._model), head_of(self._model)

    def states(self, inputs: Batch) -> Tensor:
        """The states that predict each completion token, (B, C, G); through its own wrapper, without gradient."""
        trainer, model = self.trainer, self._model
        model.eval()  # dropout would make the target random
        with torch.no_grad(), trainer.precision.mixed():
            found: Tensor = trainer._forward_redirection(trainer.teacher_model, model, trainer._states, model, inputs)
            return found


class ServedTeacher:
    """A teacher behind a source of states."""

    def __init__(self, trainer: RockDistillationTrainer, source: StateSource) -> None:
        self.trainer, self.source = trainer, source
        device, head = trainer.accelerator.device, source.head
        bias = None if head.bias_V is None else head.bias_V.to(device)
        self.head = replace(head, weight_VH=head.weight_VH.to(device), bias_V=bias)
        self.rows = len(head.weight_VH)
        self.shape = ModelShape(0, 0, head.weight_VH.numel())  # its backbone costs this machine nothing

    @torch.no_grad()
    def states(self, inputs: Batch) -> Tensor:
        """One sequence a rollout, without padding; its states at their places on the grid, 0 elsewhere."""
        if "pixel_values" in inputs:
            raise ConfigError("a served teacher sees token ids only; images need the teacher in this process")
        mask_BC = inputs["completion_mask"].bool().cpu()
        prompts = _unmasked(inputs["prompt_ids"], inputs["prompt_mask"])
        responses = _unmasked(inputs["completion_ids"], mask_BC)
        filled = [index for index, response in enumerate(responses) if response]  # nothing is asked about an empty one
        sequences = Sequences(
            tuple((*prompts[index], *responses[index]) for index in filled),
            tuple(len(prompts[index]) for index in filled),
            tuple(f"{index + 1} of step {self.trainer.state.global_step + 1}" for index in filled),
        )
        device, width = self.head.weight_VH.device, self.head.weight_VH.shape[1]
        state_BCG = torch.zeros((*mask_BC.shape, width), device=device)
        if filled:
            state_BCG[mask_BC.to(device)] = self.source.response_states(sequences).to(device)
        return state_BCG


def _unmasked(ids_BC: Tensor, mask_BC: Tensor) -> list[tuple[int, ...]]:
    """The unmasked ids of every row."""
    return [tuple(ids[mask].tolist()) for ids, mask in zip(ids_BC.cpu(), mask_BC.bool().cpu())]


class StateMemory:
    """The teacher's states of one optimiser step by rollout, so that what a selector had measured is not run twice."""

    def __init__(self) -> None:
        self._state_by_row: dict[int, Tensor] = {}

    def states(self, teacher: LocalTeacher | ServedTeacher, inputs: Batch, *, keep: bool) -> Tensor:
        """The teacher's states of a micro-batch; from memory, once, where all of its rollouts are there."""
        rows = inputs["row"].tolist() if "row" in inputs else []
        if rows and not keep and all(row in self._state_by_row for row in rows):
            width = inputs["completion_ids"].shape[1]
            kept = [self._state_by_row.pop(row)[:width] for row in rows]
            return torch.stack([nn.functional.pad(state_CG, (0, 0, 0, width - len(state_CG))) for state_CG in kept])
        found_BCG = teacher.states(inputs)
        if keep:
            self._state_by_row |= dict(zip(rows, found_BCG))
        return found_BCG


def differ_in_size(
    student: str | PreTrainedModel, teacher: str | PreTrainedModel | None, args: DistillationConfig
) -> bool:
    """Whether TRL would refuse the pair because the vocabulary sizes in the configurations differ."""
    if teacher is None:
        return False
    sizes = []
    for model, given in ((student, args.model_init_kwargs), (teacher, args.teacher_model_init_kwargs)):
        options: Any = given or {}
        revision = options.get("revision", args.teacher_model_revision if model is teacher else None)
        trust = options.get("trust_remote_code", args.trust_remote_code)
        config: Any = getattr(model, "config", None)
        if isinstance(model, str):
            config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust)
        sizes.append(config.get_text_config().vocab_size)
    return bool(sizes[0] != sizes[1])


def prepared_teacher(
    teacher: str | PreTrainedModel, args: DistillationConfig, trainer: RockDistillationTrainer
) -> PreTrainedModel:
    """The teacher, loaded and prepared in the way TRL does it for teachers of the student's vocabulary size."""
    if isinstance(teacher, str):
        given: Any = args.teacher_model_init_kwargs
        options = dict(given or {})
        dtype = options.get("dtype")
        options["dtype"] = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        if args.teacher_model_revision is not None:
            options.setdefault("revision", args.teacher_model_revision)
        if args.distributed_state.distributed_type in ["MULTI_GPU", "DEEPSPEED"]:
            options["device_map"] = None
        options.setdefault("trust_remote_code", args.trust_remote_code)
        teacher = create_model_from_path(teacher, **options)
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(teacher, trainer.accelerator)
    return trainer.accelerator.prepare_model(teacher, evaluation_mode=True)


def refuse_other_tokenizer(
    tokenizer: PreTrainedTokenizerBase, teacher: str | PreTrainedModel, args: DistillationConfig
) -> None:
    """Refuse a teacher whose tokenizer gives an id of the student's another meaning.

    The teacher's tokenizer is looked for where the teacher came from. A teacher without one (a random model, a
    directory of weights alone) cannot be checked, and is believed.
    """
    if isinstance(teacher, str):
        name, options = teacher, {"revision": args.teacher_model_revision, "trust_remote_code": args.trust_remote_code}
    else:  # what was loaded from the hub is in the cache: the network is not asked again
        name, options = get_config_model_id(teacher.config), {"local_files_only": True}
    if not name or (Path(name).is_dir() and not any(Path(name).glob("*token*"))):
        return
    try:
        theirs = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        log.info("the teacher's tokenizer cannot be read, so it was not compared with the student's: %s", error)
        return
    ours = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    others = {id_: token for token, id_ in theirs.get_vocab().items()}
    for id_ in sorted(ours.keys() & others.keys()):
        if ours[id_] != others[id_]:
            raise ConfigError(
                f"the tokenizers differ: id {id_} is {ours[id_]!r} for the student and {others[id_]!r} for the "
                "teacher; per-token divergence needs one vocabulary. Choose a teacher of the same tokenizer family."
            )


def share_vocabulary(trainer: RockDistillationTrainer, vocabulary: int, rows: int) -> None:
    """Let TRL's generation never draw an id from `vocabulary` to `rows` - 1: the teacher has no such row.

    Refused where the smaller head does not even hold the tokenizer's ids.
    """
    largest = max(trainer._tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer has ids up to {largest}, but the smaller output head has {vocabulary} rows; one of the "
            "models does not belong to this tokenizer. Choose a teacher of the same tokenizer family."
        )
    if vocabulary >= rows:
        return
    banned = list(range(vocabulary, rows))
    suppressed = sorted({*(trainer.generation_config.suppress_tokens or []), *banned})
    trainer.generation_config.suppress_tokens = trainer.generation_kwargs["suppress_tokens"] = suppressed
    if trainer.use_vllm:
        given = trainer.vllm_generation.generation_kwargs
        bias = {**given.get("logit_bias", {}), **dict.fromkeys(banned, -100.0)}
        trainer.vllm_generation.generation_kwargs = {**given, "logit_bias": bias}
