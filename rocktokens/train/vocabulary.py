"""Teachers whose vocabulary differs from the student's by padding rows fit; teachers of another tokenizer are refused.

TRL wants equal `vocab_size` in both configurations. Many families pad their output heads to a multiple that depends on
the model's size, so that the same tokenizer has heads of different height. Such a teacher is loaded as TRL loads it,
but handed to the trainer afterwards; rows beyond the shared part are cut in the loss and banned in sampling.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from trl import DistillationConfig
from trl.models import prepare_deepspeed
from trl.trainer.utils import create_model_from_path, get_config_model_id

from rocktokens.errors import ConfigError, DataError
from rocktokens.values import Json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rocktokens.train.trainer import RockDistillationTrainer

log = logging.getLogger(__name__)


def differ_in_size(
    student: str | PreTrainedModel, teacher: str | PreTrainedModel | None, args: DistillationConfig
) -> bool:
    """Whether TRL would refuse the pair because the vocabulary sizes in the configurations differ."""
    if teacher is None:
        return False
    student_options, teacher_options = _options(args.model_init_kwargs), _options(args.teacher_model_init_kwargs)
    if args.teacher_model_revision is not None:
        teacher_options.setdefault("revision", args.teacher_model_revision)
    sizes = [
        _config(model, options, args).get_text_config().vocab_size
        for model, options in ((student, student_options), (teacher, teacher_options))
    ]
    return bool(sizes[0] != sizes[1])


def _options(given: Any) -> Json:
    """Settings for a model's loader; TRL has parsed those that came as text."""
    return dict(given or {})


def _config(model: str | PreTrainedModel, options: Json, args: DistillationConfig) -> Any:
    if not isinstance(model, str):
        return model.config
    trust = options.get("trust_remote_code", args.trust_remote_code)
    return AutoConfig.from_pretrained(model, revision=options.get("revision"), trust_remote_code=trust)


def prepared_teacher(
    teacher: str | PreTrainedModel, args: DistillationConfig, trainer: RockDistillationTrainer
) -> PreTrainedModel:
    """The teacher, loaded and prepared in the way TRL does it for teachers of the student's vocabulary size."""
    if isinstance(teacher, str):
        options = _options(args.teacher_model_init_kwargs)
        dtype = options.get("dtype")
        options["dtype"] = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        if args.teacher_model_revision is not None:
            options.setdefault("revision", args.teacher_model_revision)
        if args.distributed_state.distributed_type in ["MULTI_GPU", "DEEPSPEED"]:
            options["device_map"] = None
        options.setdefault("trust_remote_code", args.trust_remote_code)
        teacher = create_model_from_path(teacher, **options)
    elif args.teacher_model_init_kwargs is not None:
        raise ConfigError("teacher_model_init_kwargs is for a teacher given by name; this one is already loaded")
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
    theirs = _tokenizer_of(teacher, args)
    if theirs is None:
        return
    ours = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    others = {id_: token for token, id_ in theirs.get_vocab().items()}
    for id_ in sorted(ours.keys() & others.keys()):
        if ours[id_] != others[id_]:
            raise ConfigError(
                f"the tokenizers differ: id {id_} is {ours[id_]!r} for the student and {others[id_]!r} for the "
                "teacher; per-token divergence needs one vocabulary. Choose a teacher of the same tokenizer family."
            )


def _tokenizer_of(teacher: str | PreTrainedModel, args: DistillationConfig) -> PreTrainedTokenizerBase | None:
    if isinstance(teacher, str):
        name, options = teacher, {"revision": args.teacher_model_revision, "trust_remote_code": args.trust_remote_code}
    else:  # what was loaded from the hub is in the cache: the network is not asked again
        name, options = get_config_model_id(teacher.config), {"local_files_only": True}
    if not name or (Path(name).is_dir() and not any(Path(name).glob("*token*"))):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        log.info("the teacher's tokenizer cannot be read, so it was not compared with the student's: %s", error)
        return None


def refuse_small_head(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """Refuse heads of different height where the smaller one does not even hold the tokenizer's ids."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer has ids up to {largest}, but the smaller output head has {vocabulary} rows; one of the "
            "models does not belong to this tokenizer. Choose a teacher of the same tokenizer family."
        )


def ban_in_sampling(trainer: RockDistillationTrainer, first: int, rows: int) -> None:
    """Let TRL's generation never draw an id from `first` to `rows` - 1: the teacher has no such row."""
    if first >= rows:
        return
    banned = list(range(first, rows))
    kept = trainer.generation_config.suppress_tokens or []
    trainer.generation_config.suppress_tokens = sorted({*kept, *banned})
    trainer.generation_kwargs["suppress_tokens"] = trainer.generation_config.suppress_tokens
    if trainer.use_vllm:
        bias = {**trainer.vllm_generation.generation_kwargs.get("logit_bias", {}), **dict.fromkeys(banned, -100.0)}
        trainer.vllm_generation.generation_kwargs = {
            **trainer.vllm_generation.generation_kwargs,
            "logit_bias": bias,
        }


def refuse_unknown_ids(token_BC: Tensor, vocabulary: int) -> None:
    """Sampled tokens must have a row in both heads; an engine of another process may know the student's alone."""
    if token_BC.numel() and int(token_BC.max()) >= vocabulary:
        raise DataError(
            f"token {int(token_BC.max())} was sampled, but the teacher has {vocabulary} rows; the engine that "
            "samples must not draw the student's padding rows"
        )
