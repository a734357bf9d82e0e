"""What a run of a given size takes on a given machine: device-hours, memory and disk of every stage.

Scoring and training are bound by arithmetic: floating-point operations over the machine's peak and the share of it that
is reached. Sampling is bound by memory: a decoding step reads the active weights once for all rollouts in flight and
each one's cache, so its time is bytes over bandwidth, or operations over arithmetic where that is more. Estimates of
what a run must take at least; a mixture of experts counts its active parameters for arithmetic, all of them for memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rocktokens.check.plan_settings import BudgetConfig
from rocktokens.models.pair import model_config
from rocktokens.models.requirements import ModelSize, model_size, multiply_rate
from rocktokens.models.settings import PairConfig
from rocktokens.sample.settings import RolloutConfig

HOUR = 3600.0
# Bytes on disk of one scored occurrence, zstd-compressed Parquet (measured on the real pair), and of a sampled token.
OCCURRENCE_BYTES, ROLLOUT_TOKEN_BYTES = 25, 4
BYTES = 2  # bfloat16 weights, states and caches
DECODE_EFFICIENCY = 0.5  # share of the bandwidth that decoding reaches
MOST_IN_FLIGHT = 256
RESUMED_LENGTH = 0.5  # a resumed rollout goes on for half of its length, on average


@dataclass(frozen=True)
class MachineSpec:
    """One device: peak of 16-bit products, bandwidth and size of its memory."""

    flops: float
    bandwidth: float
    memory: float


# As the makers' data sheets have them; without sparsity.
MACHINES = {
    "h100": MachineSpec(990e12, 3.35e12, 80e9),
    "h200": MachineSpec(989e12, 4.8e12, 141e9),
    "b200": MachineSpec(2250e12, 8.0e12, 192e9),
    "mi300x": MachineSpec(1307e12, 5.3e12, 192e9),
    "a100": MachineSpec(312e12, 2.0e12, 80e9),
    "l40s": MachineSpec(362e12, 0.864e12, 48e9),
    "rtx4090": MachineSpec(165e12, 1.01e12, 24e9),
}


@dataclass(frozen=True)
class StageBudget:
    """One stage's needs."""

    stage: str
    device_hours: float
    memory: float
    """Bytes on the devices that do it, together, at least."""
    disk: float
    """Bytes that it leaves in the run."""
    note: str


def budget_of(pair: PairConfig, rollouts: RolloutConfig, asked: BudgetConfig) -> list[StageBudget]:
    """The needs of sampling, scoring, distilling and the census."""
    student, teacher = model_size(pair.student, pair), model_size(pair.teacher, pair)
    active_student, active_teacher = _active(pair.student, pair, student), _active(pair.teacher, pair, teacher)
    machine = machine_of(asked)
    mean = float(min(asked.mean_tokens or rollouts.max_new_tokens, rollouts.max_new_tokens))
    tokens = asked.prompts * rollouts.num_rollouts * mean
    rate = machine.flops * asked.utilisation
    score_flops = 2.0 * tokens * (active_teacher + asked.checkpoints * active_student)
    step_tokens = asked.steps * asked.step_rollouts * mean
    train_flops = 2.0 * step_tokens * (active_teacher + 3 * active_student)
    resumed = asked.causal_prompts * asked.causal_rollouts * asked.candidates * asked.resumed_share
    census_tokens = asked.causal_prompts * asked.causal_rollouts * mean + resumed * mean * RESUMED_LENGTH
    per_token = decode_seconds(student, active_student, machine, mean)
    cache = in_flight(student, machine, mean)[1] * BYTES * student.cache_per_token * mean
    student_bytes, teacher_bytes = BYTES * student.parameters, BYTES * teacher.parameters
    return [
        StageBudget(
            "sample", tokens * per_token / HOUR, student_bytes + cache, tokens * ROLLOUT_TOKEN_BYTES,
            f"{tokens / 1e6:.0f} M tokens",
        ),
        StageBudget(
            "score", score_flops / rate / HOUR, teacher_bytes + student_bytes,
            tokens * asked.checkpoints * OCCURRENCE_BYTES, f"{asked.checkpoints} checkpoints beside one teacher pass",
        ),
        StageBudget(
            "distill", train_flops / rate / HOUR + step_tokens * per_token / HOUR,
            teacher_bytes + 16 * student.parameters + cache, 8 * 4.0 * student.parameters,
            "float32 weights, gradient and Adam; the teacher may be served elsewhere",
        ),
        StageBudget(
            "census", census_tokens * per_token / HOUR, student_bytes + cache, census_tokens * 0.5,
            f"{resumed / 1e3:.0f} k resumed rollouts of {asked.candidates} candidates, before looks stop early",
        ),
    ]  # fmt: skip


def in_flight(model: ModelSize, machine: MachineSpec, mean: float) -> tuple[int, float]:
    """Devices that hold the model and at least some rollouts, and rollouts whose whole caches fit beside it."""
    room = 0.9 * machine.memory - BYTES * model.parameters
    devices = 1
    while room <= 0:  # a model that needs several devices
        devices += 1
        room = devices * 0.9 * machine.memory - BYTES * model.parameters
    return devices, max(1.0, min(MOST_IN_FLIGHT, room // (BYTES * model.cache_per_token * max(mean, 2))))


def decode_seconds(model: ModelSize, active: float, machine: MachineSpec, mean: float) -> float:
    """Seconds of one device for one sampled token, with as many rollouts in flight as its memory holds."""
    devices, flight = in_flight(model, machine, mean)
    cache = BYTES * model.cache_per_token * max(mean / 2, 1)  # half grown on average
    # With many rollouts in flight every expert is read.
    read = (BYTES * model.parameters + flight * cache) / (machine.bandwidth * DECODE_EFFICIENCY * devices)
    computed = flight * 2 * active / (machine.flops * DECODE_EFFICIENCY * devices)
    return devices * max(read, computed) / flight


def machine_of(asked: BudgetConfig) -> MachineSpec:
    """The machine that is named, with the figures that are given in place of its own."""
    given = {"flops": (asked.tflops, 1e12), "bandwidth": (asked.bandwidth, 1e12), "memory": (asked.memory, 1e9)}
    figures = {name: figure * unit for name, (figure, unit) in given.items() if figure is not None}
    if len(figures) == len(given):
        return MachineSpec(**figures)
    return replace(MACHINES[asked.machine] if asked.machine != "cpu" else _this_machine(), **figures)


def _this_machine() -> MachineSpec:
    import psutil

    return MachineSpec(multiply_rate(), 20e9, float(psutil.virtual_memory().total))


def _active(name: str, pair: PairConfig, size: ModelSize) -> float:
    """Parameters that one token meets: of a mixture, its chosen experts only."""
    text = model_config(name, pair).get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not experts:
        return float(size.parameters)
    inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    in_experts = 3.0 * text.num_hidden_layers * experts * text.hidden_size * inner
    return size.parameters - in_experts * (1 - text.num_experts_per_tok / experts)
