"""Who generates the student's rollouts, and in which order prompts come: TRL's way, or ours row by row from seeds.

With `generation="ours"` every rollout has a stream of its own, derived from (seed, step, row over all ranks): the same
rollout comes out whatever the number of ranks, and after a resume. This module knows prompts as token ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from trl.trainer.utils import RepeatSampler

from rocktokens.errors import ConfigError, DataError
from rocktokens.sample.requests import Request
from rocktokens.sample.sampler import Sampler
from rocktokens.seeds import derive_seed
from rocktokens.train.step_inputs import base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import DistillationTrainer as _Base

    from rocktokens.sample.accuracy import Evaluator
else:
    _Base = object

Generation = Literal["trl", "ours"]


class GenerationMixin(_Base):
    """Rollouts for the trainer."""

    args: Any
    max_completion_length: int | None
    generation: Generation
    rollouts_per_prompt: int
    vocabulary: int
    evaluator: Evaluator | None

    def check_evaluation(self) -> None:
        """Evaluation samples with our sampler, which cannot keep the ranks of a sharded model in step."""
        if self.evaluator is not None and self._is_sharded():
            raise ConfigError("evaluation while training needs the whole student on every rank; leave it out")

    def _is_sharded(self) -> bool:
        return self.is_fsdp_enabled or (self.is_deepspeed_enabled and self.args.deepspeed_plugin.zero_stage == 3)

    def _check_own_generation(self) -> None:
        if self.max_completion_length is None:
            raise ConfigError("generation='ours' needs a limit for its rollouts; set max_completion_length")
        not_ours = {
            "vLLM": self.use_vllm,
            "tools": bool(self.tools),
            "images": self._is_vlm,
            "min_p": self.min_p is not None,
            "repetition_penalty": self.repetition_penalty != 1.0,
            "generation_kwargs": bool(self.args.generation_kwargs),
            "a sharded model (ranks must stay in step)": self._is_sharded(),
        }
        for name, used in not_ours.items():
            if used:
                raise ConfigError(f"our sampler does not do {name}; use generation='trl'")

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's order of prompts, several rollouts per prompt, and the same order after a resume in a later epoch."""
        stock: Any = super()._get_train_sampler(dataset)
        return _ResumableSampler(
            data_source=stock.data_source,
            mini_repeat_count=self.rollouts_per_prompt,
            batch_size=stock.batch_size // self.rollouts_per_prompt,
            repeat_count=stock.repeat_count,
            shuffle=stock.shuffle,
            seed=self.args.seed,
            steps_done=lambda: self.state.global_step,
        )

    def _tokenize_prompts(self, prompts: list) -> object:
        """Prompts that come as token ids stay as they are: text is never tokenised twice."""
        if isinstance(prompts[0], list) and prompts[0] and isinstance(prompts[0][0], int):
            return prompts, None, {}
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: Any, has_tool_images: bool = False
    ) -> list[list[int]]:
        if self.generation == "trl":
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, has_tool_images)
        assert self.max_completion_length is not None
        first = self.accelerator.process_index * len(prompt_ids)
        seeds = [
            derive_seed(self.args.seed, "rollout", self.state.global_step + 1, first + row)
            for row in range(len(prompt_ids))
        ]
        return self.sample(prompt_ids, seeds, self.max_completion_length)

    def sample(self, prompt_ids: Sequence[Sequence[int]], seeds: Sequence[int], limit: int) -> list[list[int]]:
        """Responses of the student as it is now, each from its own seed."""
        student = base_of(self.accelerator.unwrap_model(self.model))
        sampler = Sampler(
            student,
            eos_ids=self.eos_token_ids,
            pad_id=self._tokenizer.pad_token_id,
            vocabulary=self.vocabulary,
            temperature=self.temperature,
            top_k=self.top_k or None,
            top_p=None if self.top_p == 1.0 else self.top_p,
            batch_size=max(len(prompt_ids), 1),
        )
        requests = [Request(tuple(ids), limit, seed) for ids, seed in zip(prompt_ids, seeds)]
        # Around all tokens, so that mixed precision casts the weights once and not once a token. The loss takes its
        # logits in the weights' precision; so must the sampler, or rollouts come from another policy.
        with self.accelerator.autocast(), _head_in_full(student):
            found = sampler.generate(requests)
        if any(answer.invalid for answer in found):
            raise DataError(
                f"the student's logits are not numbers after step {self.state.global_step}: training has diverged. "
                "Lower the learning rate and start again from a kept checkpoint."
            )
        return [list(answer.token_ids) for answer in found]


@contextmanager
def _head_in_full(model: PreTrainedModel) -> Iterator[None]:
    """The output head computes in its weights' precision, whatever autocast does elsewhere."""
    layer = model.get_output_embeddings()
    forward, own = layer.forward, layer.__dict__.get("forward")

    def in_full(hidden_BTH: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden_BTH.device.type, enabled=False):
            found: torch.Tensor = forward(hidden_BTH.to(layer.weight.dtype))
            return found

    layer.forward = in_full
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


class _ResumableSampler(RepeatSampler):
    """TRL's sampler draws each epoch's order from where the last one left its generator, which a resumed process never
    saw. Here the epoch follows from the steps done, and its order from the seed."""

    def __init__(self, *, steps_done: Callable[[], int], **settings: Any) -> None:
        super().__init__(**settings)
        self._steps_done = steps_done

    def __iter__(self) -> Any:
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(self._steps_done() // max(self.num_samples // self.batch_size, 1)):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()
