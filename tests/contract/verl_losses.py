"""Run by verl's interpreter: verl's own distillation losses next to those of our plug-in; prints findings as JSON.

python verl_losses.py FOLDER; FOLDER/list.json was exported for FOLDER/tokenizer. Only verl is imported: the plug-in has
to have registered itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.trainer.distillation import losses
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig
from verl.workers.utils.padding import left_right_2_no_padding

FOLDER, EOS, TOP, COSTLY = Path(sys.argv[1]), 1, 8, 7
RESPONSE = ("responses", "response_mask", "old_log_probs", "advantages")
LISTED = torch.tensor(json.loads((FOLDER / "list.json").read_text())["ids"])


def batch(name: str, count: int, nested: bool, seed: int = 3) -> tuple[TensorDict, dict[str, torch.Tensor]]:
    """Rollouts as verl's trainers hand them to a loss, and what the student's forward pass gave."""
    top = TOP if "topk" in name else 1
    rng = torch.Generator().manual_seed(seed)
    prompt_lens, lens = (torch.randint(low, high, (count,), generator=rng) for low, high in ((2, 6), (6, 14)))
    P, R = int(prompt_lens.max()), int(lens.max())
    seen = torch.cat([torch.arange(P) >= P - prompt_lens[:, None], torch.arange(R) < lens[:, None]], 1)
    ids = torch.randint(3, 20, (count, P + R), generator=rng) * seen
    ids[torch.arange(count), P + lens - 1] = EOS
    mask = seen[:, P:].long()
    mask[0, 1] = 0  # a tool's output
    after = ids.roll(-1, 1)  # what verl predicts at a position is the next token
    student = -torch.rand((count, P + R), generator=rng) * 3 - 0.2
    teacher = student - 1.5 * (after == COSTLY) + 0.3 * torch.randn((count, P + R), generator=rng)
    tops = torch.stack([(after + k) % 64 for k in range(top)], -1).int()
    tops[::3, ::4] += 1  # the sampled token is not among the teacher's top tokens
    data = {"input_ids": ids, "prompts": ids[:, :P], "responses": ids[:, P:], "attention_mask": seen.long()}
    data |= {"response_mask": mask, "position_ids": (seen.cumsum(1) - 1).clamp(min=0), "teacher_ids": tops}
    data |= {"teacher_logprobs": teacher[..., None] - 0.1 * torch.arange(top), "old_log_probs": student[:, P - 1 : -1]}
    data["advantages"] = torch.zeros_like(data["old_log_probs"])
    if nested:  # as the newer trainer keeps it throughout
        for name, kept in [("prompts", seen[:, :P])] + [(n, seen[:, P:]) for n in RESPONSE]:
            data[name] = [row[own] for row, own in zip(data[name], kept)]
        for name in ("input_ids", "teacher_logprobs", "teacher_ids"):
            data[name] = [row[own] for row, own in zip(data[name], seen)]
        jagged = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in data.items() if type(v) is list}
        made = TensorDict(jagged, [count])
    else:
        made = left_right_2_no_padding(TensorDict(data, [count]))
    tu.assign_non_tensor(made, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=count)
    leaf = student[seen].clone().requires_grad_()
    return made, {
        "log_probs": leaf,
        "distillation_losses": leaf.exp() * 2,
        "student_mass": leaf.detach().exp(),
        "teacher_mass": leaf.detach().exp(),
    }


def per_token(name: str, made: Any, gradient: bool, config: ActorConfig) -> tuple[torch.Tensor, dict[str, Any], Any]:
    """Losses of one entry of verl's registry, its metrics, and the settings."""
    how = {"loss_mode": name, "topk": TOP, "use_policy_gradient": gradient, "use_task_rewards": False}
    settings = DistillationConfig(distillation_loss=DistillationLossConfig(**how))
    values, metrics = losses.get_distillation_loss_fn(name)(config, settings, made[1], made[0])
    return values, metrics, settings


def whole(name: str, nested: bool, gradient: bool, config: ActorConfig) -> dict[str, torch.Tensor]:
    """The same, and verl's aggregated loss with its gradient in the student's log-probabilities."""
    made = batch(name, 9, nested)
    values, metrics, settings = per_token(name, made, gradient, config)
    loss, _ = losses.distillation_ppo_loss(config, settings, made[1], made[0])
    (slope,) = torch.autograd.grad(loss, made[1]["log_probs"])
    ids, mask = (made[0][own] for own in ("responses", "response_mask"))
    ids, mask = (own.to_padded_tensor(0) if own.is_nested else own for own in (ids, mask))
    listed = torch.isin(ids, LISTED) & mask.bool()
    return {"values": values.detach(), "loss": loss.detach(), "slope": slope, "listed": listed, "metrics": metrics}


def actor(tokenizer: object) -> ActorConfig:
    """verl's actor settings; a worker puts the model's settings, with the tokenizer, into them."""
    made = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode="token-mean")
    vars(made)["model_config"] = SimpleNamespace(tokenizer=tokenizer)
    return made


def compared(name: str, theirs: str, nested: bool, gradient: bool, config: ActorConfig) -> dict[str, Any]:
    """Our loss without and with a list, against verl's own."""
    os.environ.pop("ROCKTOKENS_BYPASS", None)
    plain, own = whole(theirs, nested, gradient, config), whole(name, nested, gradient, config)
    (FOLDER / "empty.json").write_text(json.dumps(json.loads((FOLDER / "list.json").read_text()) | EMPTY))
    os.environ["ROCKTOKENS_BYPASS"] = str(FOLDER / "empty.json")
    empty = whole(name, nested, gradient, config)
    os.environ["ROCKTOKENS_BYPASS"] = str(FOLDER / "list.json")
    with_list = whole(name, nested, gradient, config)
    at, metrics = own["listed"], {k: v.aggregate() for k, v in with_list["metrics"].items() if "rocktokens" in k}
    same = ["slope"] if theirs == "k2" else ["values", "loss", "slope"]
    return {
        "case": f"{name}, {'nested' if nested else 'padded'}, {'policy gradient' if gradient else 'supervised'}",
        "equals verl's": all(torch.equal(run[key], plain[key]) for key in same for run in (own, empty)),
        "0 at the ids": bool(at.any()) and not with_list["values"][at].any(),
        "unchanged elsewhere": torch.equal(with_list["values"][~at], own["values"][~at]),
        "slope 0 at the ids alone": int((with_list["slope"] == 0).sum() - (own["slope"] == 0).sum()) == int(at.sum()),
        "tokens counted": metrics["rocktokens/skipped_tokens"] == int(at.sum()),
        "loss summed": abs(metrics["rocktokens/skipped_loss"] - float(own["values"][at].sum())) < 1e-4,
    }


EMPTY = {"ids": [], "tokens": [], "token_weights": {}}


def error_of(tokenizer: object, **settings: str) -> str:
    """What a loss call says under these settings."""
    os.environ.update(settings)
    try:
        per_token("rocktokens_k1", batch("rocktokens_k1", 4, False), True, actor(tokenizer))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for name in settings:
            del os.environ[name]
    return "no error"


def main() -> None:
    """Print what was found."""
    found: dict[str, Any] = {"verl": verl.__version__, "torch": torch.__version__}
    found["registered"] = sorted(name for name in losses.DISTILLATION_LOSS_REGISTRY if name.startswith("rocktokens"))
    own, other = (AutoTokenizer.from_pretrained(FOLDER / name) for name in ("tokenizer", "other"))
    pairs = [("rocktokens_k1", "k1"), ("rocktokens_forward_kl_topk", "forward_kl_topk")]
    found["cases"] = [
        # verl refuses k1 without policy gradient; k2 has the gradient of the reverse KL, which is what is compared.
        compared(name, "k2" if theirs == "k1" and not gradient else theirs, nested, gradient, actor(own))
        for name, theirs in pairs
        for nested in (False, True)
        for gradient in (True, False)
    ]
    del os.environ["ROCKTOKENS_BYPASS"]
    (FOLDER / "broken.json").write_text("{")
    found["refused"] = {
        "another tokenizer": error_of(other, ROCKTOKENS_BYPASS=str(FOLDER / "list.json")),
        "broken": error_of(own, ROCKTOKENS_BYPASS=str(FOLDER / "broken.json")),
        "missing": error_of(own, ROCKTOKENS_BYPASS=str(FOLDER / "missing.json")),
        "every": error_of(own, ROCKTOKENS_TELEMETRY_EVERY="often"),
    }
    os.environ["ROCKTOKENS_TELEMETRY_EVERY"] = "2"
    for name, _ in pairs:
        os.environ["ROCKTOKENS_TELEMETRY"] = str(FOLDER / name)
        for call in range(4):  # two of them are recorded
            per_token(name, batch(name, 40, call % 4 > 1, seed=call), True, actor(own))
    print(json.dumps(found, default=bool))  # numpy has bools of its own


main()
