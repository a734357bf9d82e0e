"""One OPD optimiser step of stock TRL and of ours with full telemetry: same pair, prompts, batch and seed.

One process each, taking turns; median of 5; peak memory above what was resident before the step (weights and optimiser
state), as the system sees it and, in a second pass, of memory in use. On the world's pair and on a random pair of
SmolLM2-135M's shape. Ours samples with our sampler, as `rocktokens distill` does. A given pair takes 4 rollouts of each
of 2 prompts, at most 96 tokens long; the others take one rollout per prompt.
    python benchmarks/step.py [--pair world smollm] [--repeats 5] [--threads 2] [--no-save]
    python benchmarks/step.py --student DIR --teacher DIR      # this pair alone, on chat prompts; to step_pair.json
    python benchmarks/step.py --student DIR --teacher DIR --dtype bfloat16 --only TRL ours
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import interleaved, save

VOCABULARY, EOS, PAD = 49_152, 0, 1
SETTINGS = {
    "smollm": {"rollouts": 16, "new_tokens": 48, "learning_rate": 1e-6},
    "given": {"rollouts": 8, "per_prompt": 4, "new_tokens": 96, "learning_rate": 1e-6},
    "world": {"rollouts": 64, "new_tokens": 64, "learning_rate": 3e-4},
}


def smollm(layers: int, seed: int) -> Any:
    """SmolLM2-135M's shape with random weights (its own depth is 30)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def load_given(student: str, teacher: str, dtype: Any) -> tuple[Any, Any, Any, list[list[int]]]:
    """A pair by its directories, both models in one dtype, asked word problems through its chat template."""
    from smollm2_problems import word_problems

    from rocktokens.models.pair import load_pair
    from rocktokens.models.settings import PairConfig

    pair = load_pair(PairConfig(student=student, teacher=teacher, dtype=dtype))
    chats = [[{"role": "user", "content": problem.prompt}] for problem in word_problems(512)]
    texts = [pair.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    pair.tokenizer.padding_side = "left"
    return pair.student, pair.teacher, pair.tokenizer, pair.tokenizer(texts, add_special_tokens=False)["input_ids"]


def load(name: str) -> tuple[Any, Any, Any, list[list[int]]]:
    """Student, teacher, tokenizer and prompts."""
    if name == "world":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rocktokens.world import get_world

        world = get_world("arithmetic")
        tokenizer = AutoTokenizer.from_pretrained(world.student_path)
        models = map(AutoModelForCausalLM.from_pretrained, (world.student_path, world.teacher_path))
        prompts = [tokenizer(problem.prompt)["input_ids"] for problem in world.problems("train", 1024, seed=0)]
        return (*models, tokenizer, prompts)
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": EOS, "<pad>": PAD, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    fast = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (512, 32), generator=generator).tolist()
    return smollm(24, 0), smollm(30, 1), tokenizer, prompts


class Turnstile:
    """Lets the training loop, which runs in a thread of its own, through one optimiser step at a time."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def callback(self) -> Any:
        from transformers import TrainerCallback

        turnstile = self

        class Gate(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                turnstile.go.acquire()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                turnstile.done.release()

        return Gate()

    def step(self) -> None:
        """One step, then freed memory goes back to the system so that the next turn starts from what is in use."""
        self.go.release()
        self.done.acquire()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def prepare(
    pair: str, contestant: str, threads: int, micro_batch: int | None, given: tuple[str, ...] = ()
) -> Callable[[], None]:
    """A trainer that waits in its loop; the action takes one optimiser step."""
    import transformers
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import DistillationTrainer

    from rocktokens import RockDistillationTrainer, RockOptions
    from rocktokens.run import Run
    from rocktokens.train.trainer import device_arguments

    transformers.logging.set_verbosity_error()
    settings, scratch = SETTINGS[pair], Path(tempfile.mkdtemp())
    student, teacher, tokenizer, prompts = load_given(*given) if given else load(pair)
    torch.set_num_threads(threads)
    micro_batch = micro_batch or settings["rollouts"]
    args = device_arguments(
        str(scratch / "out"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=settings["rollouts"] // micro_batch,
        max_steps=1000,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        max_completion_length=settings["new_tokens"],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        seed=0,
        shuffle_dataset="per_prompt" not in settings,
    )
    # Stock TRL takes text only; where prompts are tokenised is no part of the comparison.
    repeated = int(settings.get("per_prompt", 1))  # every prompt comes so many times in a row, for all contestants
    rows = Dataset.from_list([{"prompt": ids} for ids in prompts for _ in range(repeated)])
    kind: Any = DistillationTrainer
    ours: dict[str, Any] = {}
    if contestant != "TRL":
        kind = RockDistillationTrainer
        generation = "trl" if contestant.endswith("TRL's generation") else "ours"
        every = 1
        ours = {"run": Run.create(scratch / "run")}
        if "30 %" in contestant:  # occurrences of dropped positions would have to be measured: not in this one
            every, ours["selector"] = None, thirty_percent()
        ours["options"] = RockOptions(telemetry_every=every, generation=generation)
    else:
        kind = type("StockTrainer", (DistillationTrainer,), {"_tokenize_prompts": lambda self, rows: (rows, None, {})})
    turnstile = Turnstile()
    trainer = kind(student, teacher, args, rows, processing_class=tokenizer, **ours)
    trainer.add_callback(turnstile.callback())  # last, so that a step ends after our own hooks
    trainer.remove_callback(PrinterCallback)
    threading.Thread(target=_train_or_die, args=(trainer,), daemon=True).start()

    def step() -> None:
        turnstile.step()
        if contestant != "TRL":
            row = trainer.record.rows[-1]
            stages = {key[8:]: round(value, 2) for key, value in row.items() if key.startswith("seconds_") and value}
            print(f"    {contestant}: {stages}", flush=True)

    return step


def _train_or_die(trainer: Any) -> None:
    """An error in the training thread ends the process instead of leaving the main thread waiting."""
    try:
        trainer.train()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def thirty_percent() -> Any:
    """A selector that drops 30 % of the positions, whatever their token: what a rock set of that share would drop."""
    from rocktokens import Selector

    class Thirty(Selector):
        name = "thirty"

        def weights(self, batch: Any) -> torch.Tensor:
            generator = torch.Generator().manual_seed(batch.step)
            return (torch.rand(len(batch), generator=generator) >= 0.3).float()

    return Thirty()


def show(measured: dict[str, dict[str, float]]) -> None:
    """Every contestant beside the first."""
    reference = next(iter(measured.values()))
    print(
        f"{'':24}{'seconds':>9}{'min-max':>16}{'CPU s':>8}{'peak MB':>9}{'in use':>8}   ratios: time, CPU, peak, in use"
    )
    for name, row in measured.items():
        spread = f"{row['seconds_min']:.2f}-{row['seconds_max']:.2f}"
        ratios = [row[key] / reference[key] for key in ("seconds", "cpu_seconds", "peak_mb", "peak_in_use_mb")]
        print(
            f"{name:24}{row['seconds']:9.2f}{spread:>16}{row['cpu_seconds']:8.2f}{row['peak_mb']:9.0f}"
            f"{row['peak_in_use_mb']:8.0f}   " + ", ".join(f"{ratio:.2f}" for ratio in ratios)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs="*", default=["world", "smollm"])
    parser.add_argument("--student", help="a student of your own, a model directory; with --teacher")
    parser.add_argument("--teacher", help="its teacher, likewise")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the pair's weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    if (options.student is None) != (options.teacher is None):
        parser.error("--student and --teacher go together")
    given = (options.student, options.teacher, options.dtype) if options.student else ()
    if given:
        options.pair = ["given"]
    names = ["TRL", "ours", "ours, 30 % dropped", "ours, TRL's generation"]
    results: dict[str, Any] = {}
    for pair in options.pair:
        threads = options.threads or (1 if pair == "world" else 2)
        contestants = {
            name: (prepare, (pair, name, threads, options.micro_batch, given))
            for name in names
            if options.only is None or name in options.only
        }
        print(f"\n{pair}: {SETTINGS[pair]}, {threads} threads")
        measured = interleaved(contestants, options.repeats)
        # Peak memory in use: freed blocks go back to the system at once, for every contestant alike.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        tight = interleaved(contestants, 1)
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        for name, row in measured.items():
            row["peak_in_use_mb"] = tight[name]["peak_mb"]
        show(measured)
        results[pair] = {"threads": threads, **measured}
    if not options.no_save:
        save("step_pair" if given else "step", results)


if __name__ == "__main__":
    main()
