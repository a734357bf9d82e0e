"""verl's plug-in: two distillation losses with token weights, and a record of what every token cost.

`import verl` loads this module by the entry point `verl.plugins`; it registers `rocktokens_k1` (verl's sampled reverse
KL) and `rocktokens_forward_kl_topk` (verl's own, over the teacher's top tokens). Both call verl's function and then
multiply by weights. Nothing in verl is patched. The environment of the workers says what to do:

ROCKTOKENS_BYPASS           file of `rocktokens export RUN --format verl`, or a bypass.json; unset: all weights are 1
ROCKTOKENS_TELEMETRY        directory for Parquet parts that `rocktokens import verl` reads; unset: nothing is recorded
ROCKTOKENS_TELEMETRY_EVERY  record every N-th call of the loss in each process; 10

verl only logs at debug level that a plug-in failed. So importing this module needs nothing but verl, and whatever is
wrong with the settings is an error of the first loss. Shapes: B rollouts of a micro-batch, R response positions,
K top tokens of the teacher.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from rocktokens.errors import ConfigError, DataError

log = logging.getLogger(__name__)

BYPASS, TELEMETRY, EVERY = "ROCKTOKENS_BYPASS", "ROCKTOKENS_TELEMETRY", "ROCKTOKENS_TELEMETRY_EVERY"
WEIGHTS = "rocktokens token weights"
"""`format` of the exported file."""

_process = uuid.uuid4().hex[:8]  # a training that is resumed counts its calls anew; its parts get other names
_calls = 0
_lists: dict[tuple[str, int], dict[int, float]] = {}


def k1(config: Any, distillation_config: Any, model_output: Any, data: Any) -> tuple[Any, dict[str, Any]]:
    """log p_student - log p_teacher at the sampled token, times the token's weight: (B, R), and metrics."""
    from verl.trainer.distillation.losses import compute_distillation_loss_reverse_kl_estimator

    # verl's estimator takes the name of the loss for the name of the formula, and ours is not one. Without policy
    # gradient, the gradient of k1 does not depend on the teacher, and verl refuses that name; its "k1+" has the same
    # values and the gradient of the reverse KL.
    own, loss = copy.copy(distillation_config), copy.copy(distillation_config.distillation_loss)
    vars(loss)["loss_mode"] = "k1" if loss.use_policy_gradient else "k1+"
    vars(own)["distillation_loss"] = loss
    losses_BR, metrics = compute_distillation_loss_reverse_kl_estimator(config, own, model_output, data)
    return _weighted(losses_BR, metrics, config, model_output, data, "rocktokens_k1")


def forward_kl_topk(config: Any, distillation_config: Any, model_output: Any, data: Any) -> tuple[Any, dict[str, Any]]:
    """verl's forward KL over the teacher's top tokens, times the weight of the sampled token: (B, R), and metrics."""
    from verl.trainer.distillation.losses import compute_forward_kl_topk

    losses_BR, metrics = compute_forward_kl_topk(config, distillation_config, model_output, data)
    return _weighted(losses_BR, metrics, config, model_output, data, "rocktokens_forward_kl_topk")


def _weighted(losses_BR: Any, metrics: Any, config: Any, model_output: Any, data: Any, name: str) -> Any:
    """Multiply by the weights, count what is skipped, and record the losses as they were before."""
    import torch
    from verl.utils.metric import AggregationType, Metric

    global _calls
    responses_BR, mask_BR = (_padded(data[name], losses_BR.shape) for name in ("responses", "response_mask"))
    mask_BR = mask_BR > 0
    weights, weight_BR = token_weights(config), torch.ones_like(losses_BR)
    for value in set(weights.values()):
        ids = torch.tensor([token_id for token_id, own in weights.items() if own == value], device=losses_BR.device)
        weight_BR[torch.isin(responses_BR.to(losses_BR.device), ids)] = value
    skipped_BR = mask_BR & (weight_BR == 0)
    metrics["rocktokens/skipped_tokens"] = Metric(AggregationType.SUM, skipped_BR.sum())
    metrics["rocktokens/skipped_loss"] = Metric(AggregationType.SUM, losses_BR.detach()[skipped_BR].sum())
    folder, every = os.environ.get(TELEMETRY), os.environ.get(EVERY, "10")
    if not every.isdigit() or not int(every):
        raise ConfigError(f"{EVERY} is a number of calls, at least 1; got {every!r}")
    if folder and _calls % int(every) == 0:
        try:
            _record(Path(folder) / f"call={_calls:07d}", losses_BR.detach(), mask_BR, model_output, data, name)
        except OSError as error:  # a full disk costs the record, not the training
            log.warning("rocktokens: %s holds no record of call %d: %s", folder, _calls, error)
    _calls += 1
    # Zeros are filled in, because infinity times zero is no zero.
    return losses_BR.masked_fill(weight_BR == 0, 0.0) * weight_BR, metrics


def token_weights(config: Any) -> dict[int, float]:
    """Weight by token id of the list that ROCKTOKENS_BYPASS names; tokens that are not in it weigh 1.

    `config`: verl's ActorConfig, whose tokenizer must be the list's where there is one.
    """
    path, tokenizer = os.environ.get(BYPASS), getattr(getattr(config, "model_config", None), "tokenizer", None)
    if not path:
        return {}
    key = path, id(tokenizer)
    if key not in _lists:
        from rocktokens.bypass import FORMAT, fingerprint, read_bypass

        mark = None if tokenizer is None else fingerprint(tokenizer.get_vocab())
        found = read_bypass(path, fingerprint=mark, formats=(FORMAT, WEIGHTS))
        if mark is None or found.fingerprint is None:
            log.warning("rocktokens: %s cannot be compared with verl's tokenizer; its ids are taken as they are", path)
        try:
            weights = found.content.get("token_weights", dict.fromkeys(found.ids, 0.0))
            _lists[key] = {int(token_id): float(weight) for token_id, weight in weights.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{path}: token_weights must be an object of ids and numbers ({error})") from None
    return _lists[key]


def _record(folder: Path, losses_BR: Any, mask_BR: Any, model_output: Any, data: Any, name: str) -> None:
    """Write one row per rollout of a micro-batch, in verl's words; atomically, because a training may be killed."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from verl.workers.utils.padding import no_padding_2_padding

    shape = losses_BR.shape
    responses_BR = _padded(data["responses"], shape)
    columns = {"loss": losses_BR, "response_mask": mask_BR, "responses": responses_BR}
    if model_output.get("log_probs") is not None:
        columns["log_probs"] = no_padding_2_padding(model_output["log_probs"].detach(), data)
    elif "old_log_probs" in data.keys():  # noqa: SIM118 (a TensorDict is no mapping)
        columns["log_probs"] = _padded(data["old_log_probs"], shape)
    teacher_BRK = no_padding_2_padding(data["teacher_logprobs"], data)
    if name == "rocktokens_k1":
        columns["teacher_logprobs"] = teacher_BRK.squeeze(-1)
    else:
        # A sampled token outside of the teacher's top K is at most as probable as the last of them.
        hit_BRK = no_padding_2_padding(data["teacher_ids"], data) == responses_BR[..., None]
        known_BR = teacher_BRK.masked_fill(~hit_BRK, -torch.inf).amax(-1)
        columns["teacher_logprobs"] = torch.where(hit_BRK.any(-1), known_BR, teacher_BRK.amin(-1))
        columns["outside_top"] = ~hit_BRK.any(-1)
    prompts, responses = data["prompts"], data["responses"]
    if prompts.is_nested:
        prompt_ids, lengths = [own.tolist() for own in prompts.unbind()], responses.offsets().diff().tolist()
    else:
        seen = data["attention_mask"].bool()
        prompt_ids = [own[kept].tolist() for own, kept in zip(prompts, seen[:, : prompts.shape[1]])]
        lengths = seen[:, prompts.shape[1] :].sum(1).tolist()
    rows = [row for row in range(shape[0]) if mask_BR[row].any()]  # the others only fill the batch up
    table: dict[str, Any] = {
        own: [values_BR[row, : lengths[row]].tolist() for row in rows] for own, values_BR in columns.items()
    }
    table |= {"step": [int(folder.name[5:])] * len(rows), "prompts": [prompt_ids[row] for row in rows]}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".rank{rank}-{_process}"
    pq.write_table(pa.table(table).replace_schema_metadata({"loss": name}), draft)
    draft.replace(folder / f"part-rank{rank}-{_process}.parquet")


def _padded(values: Any, shape: Any) -> Any:
    """Response values as (B, R); -1, which is no token's id and counts as no mask, behind each rollout."""
    return values.to_padded_tensor(-1, output_size=tuple(shape)) if values.is_nested else values


def register() -> None:
    """Put both losses into verl's registry."""
    from verl.trainer.distillation.losses import DistillationLossSettings, register_distillation_loss

    register_distillation_loss(DistillationLossSettings(names=["rocktokens_k1"], use_estimator=True))(k1)
    named = DistillationLossSettings(names=["rocktokens_forward_kl_topk"], use_topk=True)
    register_distillation_loss(named)(forward_kl_topk)


if "verl" in sys.modules:  # verl imports its plug-ins and calls nothing of them
    register()
