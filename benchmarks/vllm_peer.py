"""A peer for benchmarks/sampling.py: vLLM in an environment of its own, told what to sample by lines on stdin.

Reads a JSON line {"model", "prompts", "tokens", "seed"}, answers {"ready": true}, then for each line "run" samples and
answers {"seconds", "tokens"}. It imports nothing of ours, for its environment has nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints goes to stderr
    task = json.loads(sys.stdin.readline())

    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):
        os.environ.setdefault(name, value)

    from vllm import LLM, SamplingParams

    longest = max(map(len, task["prompts"])) + task["tokens"]
    engine = LLM(
        model=task["model"],
        dtype="bfloat16",
        max_num_seqs=len(task["prompts"]),
        max_model_len=longest + 8,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,  # of main memory, on a CPU
        max_num_batched_tokens=16384,  # a seeded prefill must not be cut into chunks on the CPU build
        enforce_eager=True,  # compiling takes minutes to start on two cores
        seed=0,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
    print(json.dumps({"ready": True}), file=answers)
    for number, line in enumerate(sys.stdin):
        if line.strip() != "run":
            break
        options = SamplingParams(temperature=1.0, max_tokens=task["tokens"], ignore_eos=True, seed=number)
        start = time.perf_counter()
        found = engine.generate(prompts, options, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(one.outputs[0].token_ids) for one in found)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
