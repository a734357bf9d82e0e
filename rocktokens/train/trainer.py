"""TRL's DistillationTrainer with a weight for every token and a record of every token.

What is overridden, and nothing else: who generates completions and in which order prompts come, the loss of a
micro-batch (a fused divergence over the weighted rows only), what is saved with a checkpoint, and hooks around a step.
Rollouts, accelerate, FSDP, DeepSpeed, LoRA, trackers and the optimiser stay TRL's.

Shapes: B rollouts of a (micro-)batch, C columns of the completion grid, N occurrences of the step, K rows with a
weight, H and G widths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import PartialState
from datasets import IterableDataset
from torch import Tensor, nn
from trl import DistillationConfig, DistillationTrainer
from trl.trainer.utils import RepeatSampler, get_config_model_id

from rocktokens.divergence.fused import CHUNK_ELEMENTS, Divergence, Head, Kind, fused_divergence
from rocktokens.divergence.measures import KINDS, TopChoices
from rocktokens.divergence.monitor import TokenMonitor
from rocktokens.errors import DataError
from rocktokens.models.pair import head_of
from rocktokens.models.states import StateSource
from rocktokens.run import Run
from rocktokens.sample.requests import Request
from rocktokens.sample.sampler import Sampler
from rocktokens.seeds import derive_seed
from rocktokens.select.interface import Selector, SelectorBatch, Uniform, make_selector, selector_of
from rocktokens.select.settings import SELECTOR_OPTIONS, SelectorConfig
from rocktokens.settings import require
from rocktokens.train.checkpoints import CheckpointMixin
from rocktokens.train.describe import describe_run, is_own, token_ids_of
from rocktokens.train.forward import Precision, base_of, can_share, completion_states
from rocktokens.train.record import TrainingRecord
from rocktokens.train.step import Meter, ModelShape, StepHooks
from rocktokens.train.teacher import (
    LocalTeacher,
    ServedTeacher,
    StateMemory,
    differ_in_size,
    prepared_teacher,
    refuse_other_tokenizer,
    share_vocabulary,
)
from rocktokens.train.weights import (
    Grid,
    Rows,
    decide_weights,
    everywhere,
    gather_grid,
    loss_mask,
    repeated_prompts,
    with_losses,
)
from rocktokens.values import Batch, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rocktokens.sample.rollouts import Evaluator

log = logging.getLogger(__name__)

# What a multimodal model is given in addition to token ids.
IMAGE_KEYS = ["pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes"]
IMAGE_KEYS += ["token_type_ids", "mm_token_type_ids", "image_position_ids"]
EVERY_STEP_UNTIL = 100  # with telemetry_every="auto"
PASSED_ON = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "row")


@dataclass(frozen=True, kw_only=True)
class RockOptions:
    """What RockDistillationTrainer takes in addition to TRL's arguments, `selector`, `run` and `rocks`."""

    shadows: Mapping[str, Selector] | Sequence[Selector] = ()
    """Selectors that are recorded but not in force: a list, or a mapping from names of your own."""
    monitor: TokenMonitor | None = None
    """A monitor of your own, e.g. with another half-life; None: one for the pair's vocabulary."""
    normalise: Literal["kept", "all"] = "kept"
    """Divide the loss by the weight of the kept tokens, or by the number of all tokens."""
    kind: Kind | None = None
    """Another divergence than TRL's `beta` names: todi, srkl, …"""
    telemetry_every: int | Literal["auto"] | None = "auto"
    """Steps between two recordings of every token's occurrence in the run; None: never. auto: every step up to 100,
    every second up to 200, every fourth up to 400, and so on."""
    audit_every: int | None = None
    """Steps between two audits, in which every position is measured to record what the selector changed and what
    shadows would keep; None: only what is measured anyway."""
    keep_at: Collection[int] | None = None
    """Steps whose student is kept in the run as checkpoints/step=N; None: the first and the last."""
    generation: Literal["trl", "ours"] = "trl"
    """trl: HF generate or vLLM, as TRL does; ours: our sampler, with a seed for every rollout."""
    rollouts_per_prompt: int = 1
    """Responses to each prompt of a step."""
    evaluator: Evaluator | None = None
    """Measures accuracy on held-out prompts, the same prompts and seeds every time."""
    evaluate_every: int | None = None
    """Steps between two evaluations."""
    autocast: bool = True
    """Use the mixed precision that bf16 or fp16 asks for in training forwards; False: as TRL does."""
    on_step: Callable[[Row], None] | None = None
    """Called with the record's row of every step."""
    teacher_states: StateSource | None = None
    """A served teacher in place of `teacher_model`."""

    def __post_init__(self) -> None:
        choices = {"normalise": ("kept", "all"), "generation": ("trl", "ours"), "kind": (None, *KINDS)}
        for name, allowed in choices.items():
            given = getattr(self, name)
            require(given in allowed, f"{name} must be one of {', '.join(map(str, allowed))}, got {given!r}")


class RockDistillationTrainer(CheckpointMixin, DistillationTrainer):
    """TRL's trainer plus `selector`, `run`, `rocks` and `options`; with none of them it trains what TRL trains.

    Args:
        model: the student, as TRL takes it.
        teacher_model: the teacher, as TRL takes it; None for a served one (`options.teacher_states`).
        args: TRL's configuration.
        selector: weighs the tokens (default: uniform); or its name, with `rocks` for those that need some.
        run: a run or its directory: receives one row of training.parquet a step, occurrences every `telemetry_every`
            steps and a checkpoint at every step of `keep_at`. `rocktokens study RUN` continues from there.
        rocks: token types whose loss is reported apart (default: those the selector names): ids, texts, or a run in
            which `detect` declared some.
        options: everything else.
    """

    samples = True
    """Whether completions are sampled in each step (and their FLOPs counted)."""
    cross_entropy = 0.0
    """Share of the loss that is cross-entropy with the completion's own tokens."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        teacher_model: str | PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        *trl_arguments: Any,
        selector: Selector | str | None = None,
        run: Run | str | Path | None = None,
        rocks: Run | str | Path | Iterable[int | str] | None = None,
        options: RockOptions | None = None,
        **trl_settings: Any,
    ) -> None:
        for name in (field.name for field in fields(RockOptions)):  # keywords of the trainer in version 0.2
            require(name not in trl_settings, f"{name} is a field of RockOptions: pass options=RockOptions({name}=…)")
        self.options = options = options or RockOptions()
        is_one = (teacher_model is None) != (options.teacher_states is None)
        require(is_one, "one teacher is needed: teacher_model, or options.teacher_states if it is served")
        if args is None:  # in the output directory that TRL chooses
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = device_arguments(f"{name.split('/')[-1]}-Distillation")
        # A selector that needs rocks waits for the tokenizer; one that shortens rollouts, for nothing.
        needs_rocks = isinstance(selector, str) and "rocks" in SELECTOR_OPTIONS.get(selector, ())
        named = make_selector(selector) if isinstance(selector, str) and not needs_rocks else selector
        self.selector = named if isinstance(named, Selector) else Uniform()
        given: Any = options.shadows
        self.shadows = dict(given) if isinstance(given, Mapping) else {shadow.name: shadow for shadow in given}
        is_named = len(self.shadows) == len(options.shadows)
        require(is_named, "several shadow selectors share a name; pass a mapping from names of your own")
        self.length_limit = args.max_completion_length
        shortens = type(self.selector).length is not Selector.length  # later positions are not even sampled
        limited = self.length_limit is not None or not shortens
        require(limited, f"selector {self.selector.name} takes a share of the length; set max_completion_length")
        apart = differ_in_size(model, teacher_model, args)  # TRL would refuse them; our loss cuts to the shared rows
        if shortens and self.length_limit is not None:  # while TRL reads it; afterwards it is the user's again
            args.max_completion_length = self.selector.length(self.length_limit)
        try:
            super().__init__(model, None if apart else teacher_model, args, *trl_arguments, **trl_settings)
        finally:
            args.max_completion_length = self.length_limit
        if teacher_model is not None:
            refuse_other_tokenizer(self._tokenizer, teacher_model, args)
            if apart:
                self.teacher_model = prepared_teacher(teacher_model, args, self)

        student = self.accelerator.unwrap_model(self.model)
        head_weight = student.get_output_embeddings().weight
        self.precision = Precision(self.accelerator, head_weight, autocast=options.autocast)
        log.info("%s", self.precision.description)
        self.memory = StateMemory()
        source = options.teacher_states
        self.teacher = LocalTeacher(self) if source is None else ServedTeacher(self, source)
        self.vocabulary = min(len(head_weight), self.teacher.rows)
        if apart or len(head_weight) != self.teacher.rows:
            share_vocabulary(self, self.vocabulary, len(head_weight))
        with self.accelerator.main_process_first():  # the others open what the first has made
            self.run = run if isinstance(run, Run) or run is None else Run.create(run)
        known = () if rocks is None else token_ids_of(rocks, self._tokenizer)
        if isinstance(selector, str) and needs_rocks:
            listed = rocks if rocks is None else token_ids_of(rocks, self._tokenizer, skips=True)
            self.selector = selector_of(SelectorConfig(name=selector), known, listed)
        self.rocks = frozenset(self.selector.token_ids if rocks is None else known)
        self.monitor = options.monitor or TokenMonitor(self.vocabulary)
        self.meter = Meter(self.accelerator.device)
        self.shapes = ModelShape.of(student), self.teacher.shape
        self.record = TrainingRecord()
        # What one optimiser step gathers, for the hooks after it.
        self.grid: Grid | None = None
        self.audited: SelectorBatch | None = None
        self.weight_N, self.denominator = torch.zeros(0), 0.0
        self.trained: list[Rows] = []
        """Rows whose loss was trained on in this step, on this rank."""
        self.others: list[Rows] = []
        """Rows of weight 0 that were measured all the same."""
        self.prompt_names: list[str] = []
        self.prompt_lengths = torch.zeros(0, dtype=torch.long)
        self.shared_prompts: list[Tensor] = []
        """Lengths of prompts that another rollout of the same micro-batch had computed, by micro-batch."""
        self.left = 0.0
        self._check_settings()
        self.owns_run = self.samples and self.run is not None and is_own(self.run)
        if self.run is not None and self.owns_run:
            describe_run(self, self.run, {"student": model, "teacher": teacher_model})
        self.add_callback(StepHooks(self))

    def _check_settings(self) -> None:
        options, each = self.options, self.options.rollouts_per_prompt
        beyond = sorted(v for v in {*self.rocks, *self.selector.token_ids} if not 0 <= v < self.vocabulary)
        require(
            not beyond,
            f"rock id {beyond[:1]} is not in the vocabulary of {self.vocabulary} token types ({len(beyond)} such); "
            "were the rocks found with another tokenizer?",
        )
        is_reverse = self.beta == 1.0 if options.kind is None else options.kind == "reverse_kl"
        other = (
            f"occurrences record the reverse KL; beta = {self.beta}, kind = {options.kind} trains another divergence"
        )
        if self.run is not None and options.telemetry_every == "auto" and not is_reverse:
            log.warning("%s: none are recorded", other)
            self.options = options = replace(options, telemetry_every=None)
        fits = self.run is None or options.telemetry_every is None or is_reverse
        require(fits, f"{other}: set beta=1.0 or telemetry_every=None")
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        divides = rows * self.accelerator.num_processes % each == 0
        require(divides, f"{rows} rollouts per step cannot be divided into {each} per prompt")
        streams = isinstance(self.train_dataset, IterableDataset)  # its rows would come once, whatever was asked for
        require(each == 1 or not streams, f"rollouts_per_prompt = {each} needs a dataset with a length, not a stream")
        # Our sampler cannot keep the ranks of a sharded model in step.
        sharded = self.is_fsdp_enabled or (self.is_deepspeed_enabled and self.args.deepspeed_plugin.zero_stage == 3)
        whole = options.evaluator is None or not sharded
        require(whole, "evaluation while training needs the whole student on every rank; leave it out")
        not_ours = {
            "vLLM": self.use_vllm,
            "tools": self.tools,
            "images": self._is_vlm,
            "min_p": self.min_p is not None,
            "repetition_penalty": self.repetition_penalty != 1.0,
            "generation_kwargs": self.args.generation_kwargs,
            "a sharded model": sharded,
            "rollouts without a limit; set max_completion_length, or": self.max_completion_length is None,
        }
        for name, used in not_ours.items():
            allowed = options.generation == "trl" or not used
            require(allowed, f"generation='ours': our sampler does not do {name}; use generation='trl'")

    # Rollouts

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's order of prompts, several rollouts per prompt, and the same order after a resume in a later epoch."""
        stock: Any = super()._get_train_sampler(dataset)
        sampler = _ResumableSampler(
            data_source=stock.data_source,
            mini_repeat_count=self.options.rollouts_per_prompt,
            batch_size=stock.batch_size // self.options.rollouts_per_prompt,
            repeat_count=stock.repeat_count,
            shuffle=stock.shuffle,
            seed=self.args.seed,
        )
        sampler.steps_done = lambda: self.state.global_step
        return sampler

    def _tokenize_prompts(self, prompts: list) -> object:
        """Prompts that come as token ids stay as they are: text is never tokenised twice."""
        if isinstance(prompts[0], list) and prompts[0] and isinstance(prompts[0][0], int):
            return prompts, None, {}
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: Any, has_tool_images: bool = False
    ) -> list[list[int]]:
        """TRL's generation, or ours: each rollout has a seed of its own, from (seed, step, row over all ranks)."""
        if self.options.generation == "trl":
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, has_tool_images)
        assert self.max_completion_length is not None
        first, step = self.accelerator.process_index * len(prompt_ids), self.state.global_step + 1
        seeds = [derive_seed(self.args.seed, "rollout", step, first + row) for row in range(len(prompt_ids))]
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

    # Weights

    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        with self.meter.stage("rollout"):
            output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            # A prompt is known by its own id, or by one that follows from its text.
            names = (row.get("prompt_id", f"{derive_seed(str(row['prompt'])):x}") for row in inputs)
            self.prompt_names = [str(name) for name in names]
            self._weigh(output)
        return output

    def _weigh(self, output: Batch) -> None:
        """Decide the weight of every token of the optimiser step, and add this rank's grid of them to the batch.

        The selector sees the whole step, over all ranks. What it needs to know of the losses is measured once, without
        gradient, and the teacher's states of that pass are kept for the loss. On audit steps everything is measured,
        so that the record can say how much the selector changed and what others would have kept.
        """
        token_BC, selector, accelerator = output["completion_ids"], self.selector, self.accelerator
        if token_BC.numel() and int(token_BC.max()) >= self.vocabulary:  # an engine elsewhere may know only the student
            raise DataError(
                f"token {int(token_BC.max())} was sampled, but the teacher has {self.vocabulary} rows; the engine that "
                "samples must not draw the student's padding rows"
            )
        grid = gather_grid(accelerator, output, step=self.state.global_step + 1, length_limit=self.length_limit)
        self.prompt_lengths = everywhere(accelerator, output["prompt_mask"].sum(1, keepdim=True)).squeeze(1)
        self.shared_prompts = []
        output["row"] = torch.arange(len(token_BC), device=token_BC.device) + grid.first_row
        self.memory = StateMemory()
        rows = None
        with self.meter.whole("select"):  # the pass that some selectors need is theirs, teacher and head included
            if selector.needs_losses:
                rows, top = self._measure(output, selector.needs_top, keep=True)
                batch = with_losses(accelerator, grid, rows, top)
                assert batch is not None
                grid = replace(grid, batch=batch)
            kept_before = any(row.get("kept_share") for row in self.record.rows)
            self.weight_N = decide_weights(accelerator, selector, grid.batch, kept_before=kept_before)
        self.grid = grid
        total = float(self.weight_N.double().sum()) if self.options.normalise == "kept" else float(len(grid.batch))
        self.denominator = total or 1.0  # a step without loss tokens has loss 0
        weight_BC = grid.own(self.weight_N)
        output["loss_weight"] = weight_BC.to(token_BC.device)
        self.audited, every = None, self.options.audit_every
        if every is not None and self.state.global_step % every == 0:
            with self.meter.whole("telemetry"):
                top_k = max(given.needs_top for given in (selector, *self.shadows.values()))
                is_known = rows is not None and top_k <= selector.needs_top
                self.audited = grid.batch if is_known else with_losses(accelerator, grid, *self._measure(output, top_k))
        if rows is not None:
            self.others.append(rows.at(weight_BC[rows.rollout_K - grid.first_row, rows.position_K] == 0))

    @torch.no_grad()
    def _measure(self, output: Mapping[str, Any], top: int, *, keep: bool = False) -> tuple[Rows, TopChoices | None]:
        """Losses of every occurrence of this rank before the step, and both models' `top` most probable tokens.

        With `keep` the loss uses the teacher's states of this pass again.
        """
        images = "pixel_values" in output
        require(not images, f"selector {self.selector.name} needs losses, which is not supported with images")
        size, parts, choices = self.args.per_device_train_batch_size, list[Rows](), list[TopChoices]()
        student = self.accelerator.unwrap_model(self.model_wrapped)
        for start in range(0, len(output["row"]), size):
            part = {key: output[key][start : start + size] for key in PASSED_ON if key in output}
            given = (student, part, loss_mask(part).float(), 1.0, top, keep)
            _, rows, found = self._forward_redirection(self.model_wrapped, student, self._divergence, *given)
            parts.append(rows)
            choices += [found] if found is not None else []
        joined = TopChoices(*(torch.cat(column).cpu() for column in zip(*choices))) if choices else None
        return Rows.joined(parts), joined

    # Loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with self.meter.stage("student"):  # less what rollouts, weights, teacher and head claim inside
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.left = self.meter.now()
        return loss

    def row_loss(self, rows: Rows) -> Tensor:
        """What each trained row adds to the loss, before its weight."""
        if not self.cross_entropy:  # 0 x infinity would be NaN
            return rows.value_K
        return (1 - self.cross_entropy) * rows.value_K - self.cross_entropy * rows.student_logprob_K

    def records_at(self, step: int) -> bool:
        """Whether a step's occurrences go to the run; then every position is measured, whatever its weight."""
        every = self.options.telemetry_every
        if every == "auto":  # half as often whenever the steps have doubled; a clock would make runs differ
            every = 2 ** ((step - 1) // EVERY_STEP_UNTIL).bit_length()
        return self.run is not None and every is not None and step % every == 0

    def keeps(self, step: int) -> bool:
        """Whether the student at a step is kept in the run."""
        kept = self.options.keep_at
        return self.run is not None and step in ((0, self.state.max_steps) if kept is None else kept)

    def _compute_loss(
        self, unwrapped_student: PreTrainedModel, inputs: Batch, num_items_in_batch: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted divergence of one micro-batch; runs inside the student wrapper's forward, as TRL's does."""
        weight_BC = inputs.get("loss_weight")
        if weight_BC is None:  # evaluation: every token counts, averaged as TRL averages
            weight_BC = loss_mask(inputs).float()
            denominator = num_items_in_batch if num_items_in_batch is not None else weight_BC.sum().clamp(min=1)
        else:
            # DDP and FSDP average gradients over ranks; dividing here makes that average a sum.
            denominator = self.denominator / self.accelerator.num_processes
        found, rows, _ = self._divergence(unwrapped_student, inputs, weight_BC, denominator)
        if self.model.training:
            self.trained.append(rows)
            if self.accelerator.num_processes == 1 and can_share(unwrapped_student):
                self.shared_prompts.append(repeated_prompts(inputs))
        entropy = torch.nansum(found.student_entropy_N)
        return found.loss, entropy, torch.tensor(len(rows.token_K), device=found.loss.device)

    def _divergence(
        self,
        unwrapped_student: PreTrainedModel,
        inputs: Batch,
        weight_BC: Tensor,
        denominator: Tensor | float,
        top: int = 0,
        keep: bool = False,
    ) -> tuple[Divergence, Rows, TopChoices | None]:
        """Fused divergence of the rows with a weight; on telemetry steps the other rows are measured too."""
        with self.meter.stage("teacher"):  # first, while no activations of the student exist
            teacher_BCG = self.memory.states(self.teacher, inputs, keep=keep)
        with self.precision.mixed():  # a block of its own: autocast remembers casts made without grad
            student_BCH = self._states(unwrapped_student, inputs)
        with self.meter.stage("head"):
            heads = head_of(unwrapped_student), self.teacher.head
            device = heads[0].weight_VH.device
            is_one = device == heads[1].weight_VH.device
            require(is_one, "both output heads must be on one device; set their device_map so")
            student, teacher = map(self.precision.factors, heads, (student_BCH, teacher_BCG), (device, device))
            at = weight_BC.to(device)
            measured = self._rows(student, teacher, inputs, at, at > 0, denominator, top)
        records = "loss_weight" in inputs and self.records_at(self.state.global_step + 1)
        if self.model.training and records and not self.selector.needs_losses:
            with self.meter.stage("telemetry"), torch.no_grad():
                dropped_BC = (loss_mask(inputs).to(device) > 0) & (at == 0)
                _, others, _ = self._rows(student, teacher, inputs, torch.ones_like(at), dropped_BC, 1.0)
                self.others.append(others._replace(weight_K=torch.zeros(len(others.token_K))))
        return measured

    def _states(self, model: PreTrainedModel, inputs: Batch) -> Tensor:
        """Hidden states that predict each completion token."""
        images = {key: inputs[key] for key in IMAGE_KEYS if key in inputs}
        read = partial(self._get_last_hidden_state, model, **images)
        return completion_states(model, inputs, read, share=not images and self.accelerator.num_processes == 1)

    def _rows(
        self,
        student: tuple[Head, Tensor],
        teacher: tuple[Head, Tensor],
        inputs: Batch,
        weight_BC: Tensor,
        keep_BC: Tensor,
        denominator: Tensor | float,
        top: int = 0,
    ) -> tuple[Divergence, Rows, TopChoices | None]:
        """Rows outside `keep_BC` leave here, before either vocabulary projection."""
        (own, student_BCH), (other, teacher_BCG) = student, teacher
        row_K, column_K = keep_BC.nonzero(as_tuple=True)
        token_K = inputs["completion_ids"].to(keep_BC.device)[row_K, column_K]
        weight_K = weight_BC[row_K, column_K]
        choices = TopChoices.empty(len(token_K), top, keep_BC.device) if top else None
        # Half of the rows that scoring takes at once, because in training all activations exist at the same time.
        usual = CHUNK_ELEMENTS // self.vocabulary
        found = fused_divergence(
            student_BCH[row_K, column_K],
            own.weight_VH,
            teacher_BCG[row_K, column_K],
            other.weight_VH,
            token_N=token_K,
            weight_N=weight_K,
            kind=self.options.kind or ("reverse_kl" if self.beta == 1 else "forward_kl" if self.beta == 0 else "jsd"),
            beta=self.beta,
            temperature=self.temperature,
            student_bias=own.bias_V,
            teacher_bias=other.bias_V,
            student_softcap=own.softcap,
            teacher_softcap=other.softcap,
            student_scale=own.scale,
            teacher_scale=other.scale,
            chunk=max(96, usual // 2 // 16 * 16) if usual >= 96 else None,
            denominator=denominator,
            cross_entropy=self.cross_entropy,
            top=choices,
        )
        rollout_K = inputs["row"].to(keep_BC.device)[row_K] if "row" in inputs else row_K
        columns = (rollout_K, column_K, token_K, weight_K, *found[1:])
        return found, Rows(*(column.detach().cpu() for column in columns if column is not None)), choices


class OffPolicyTrainer(RockDistillationTrainer):
    """The stage before OPD: trains on answers given in the column `completion` (token ids) instead of sampling them.

    Loss: half forward KL, half cross-entropy with the answer's tokens, both from the same hidden states. Weights,
    meter, checkpoints and resume are those of OPD.
    """

    samples = False
    cross_entropy = 0.5

    def __init__(self, *trl_arguments: Any, options: RockOptions | None = None, **settings: Any) -> None:
        options = replace(options or RockOptions(), telemetry_every=None, keep_at=())
        super().__init__(*trl_arguments, options=options, **settings)
        self.beta = 0.0  # forward KL
        self.record.name = "off_policy"
        self._answers: list[list[int]] = []

    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        self._answers = [list(row["completion"]) for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, *_: object, **__: object) -> list[list[int]]:
        return self._answers


class _ResumableSampler(RepeatSampler):
    """TRL's sampler draws each epoch's order from where the last one left its generator, which a resumed process never
    saw. Here the epoch follows from the steps done, and its order from the seed."""

    steps_done: Callable[[], int]

    def __iter__(self) -> Any:
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(self.steps_done() // max(self.num_samples // self.batch_size, 1)):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


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


def processes() -> PartialState:
    """The processes that train together, before a trainer exists; without a GPU accelerate must be told so."""
    return PartialState(cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available())


def device_arguments(output_dir: str, **settings: Any) -> DistillationConfig:
    """TRL's configuration with defaults for this machine: bfloat16 and gradient checkpointing only where CUDA is."""
    on_cuda = torch.cuda.is_available() and not settings.get("use_cpu", False)
    defaults = {
        "bf16": on_cuda and torch.cuda.is_bf16_supported(),
        "gradient_checkpointing": on_cuda,
        "use_cpu": not on_cuda and not torch.backends.mps.is_available(),
        "report_to": "none",
    }
    return DistillationConfig(output_dir, **{**defaults, **settings})
