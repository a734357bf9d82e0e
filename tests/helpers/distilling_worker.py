"""Trains the tiny pair on as many processes as torchrun's environment names, or on one; leaves what it found in a
directory. Also a script:

torchrun --nproc-per-node 2 tests/helpers/distilling_worker.py plain|greedy|fsdp2 DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import distilling
import torch

from rocktokens import make_selector

torch.set_num_threads(1)

ROLLOUTS = 16
ROCKS = (5, 6, 7, 8, 9)


def main(kind: str, directory: Path) -> None:
    """Two optimiser steps of 16 rollouts over all processes."""
    from accelerate import PartialState

    from rocktokens.run import Run, open_run

    processes = PartialState(cpu=True).num_processes
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 2, "use_cpu": True}
    if kind in ("greedy", "fsdp2"):
        settings["top_k"] = 1  # the most probable token: the same rollouts whoever generates them
    args = distilling.arguments(
        directory / "resume",
        per_device_train_batch_size=ROLLOUTS // processes // 2,
        gradient_accumulation_steps=2,
        **settings,
    )
    if kind == "fsdp2":
        shard_on_the_cpu()
    if PartialState().is_main_process:
        Run.create(directory / "run")
    PartialState().wait_for_everyone()
    run = open_run(directory / "run")
    trainer = distilling.trained(
        directory,
        args=args,
        run=run,
        selector=make_selector("random" if kind == "plain" else "freeze", rocks=ROCKS),
        shadows=[make_selector("entropy"), make_selector("adaptive")],
        telemetry_every=2,
        keep_at=(0, 2),
        generation="ours" if kind == "plain" else "trl",
        rollouts_per_prompt=4,
    )
    monitor = trainer.monitor.gathered()
    if trainer.accelerator.is_main_process:
        found = {"sums": monitor.state_dict()["sums"], "rows": trainer.record.rows}
        torch.save(found, directory / "found.pt")
        facts = {"processes": trainer.accelerator.num_processes, "wrapped": type(trainer.model_wrapped).__name__}
        (directory / "facts.json").write_text(json.dumps(facts))
    PartialState().wait_for_everyone()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # Shards hold groups that outlive the call above, and torch now and then aborts when the interpreter ends with
        # a group's threads still running. All that is tested lies on the disk: leave without that ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def shard_on_the_cpu() -> None:
    """Accelerate offers FSDP on accelerators only, though torch's FSDP2 runs on a CPU: set the state it would set."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    state = Accelerator(cpu=True).state
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState().distributed_type = DistributedType.FSDP


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
