"""Which task the recipe `qwen` is to use: accuracy of student and teacher on several reasoning-gym tasks at T = 1.

Wanted: the teacher at least 15 points above the student, rollouts mostly within the length limit, and natural working
text in them. Each model is loaded once and samples one rollout for every prompt of every task.

python benchmarks/qwen_task.py --student Qwen/Qwen2.5-Coder-0.5B-Instruct --teacher Qwen/Qwen2.5-Coder-1.5B-Instruct
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from common import save

from rocktokens.models.pair import Pair, choose_threads, end_tokens, load_model, load_tokenizer
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.checkers import make_checker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import Prompt, load_prompts
from rocktokens.sample.rollouts import make_sampler, requests_for
from rocktokens.sample.settings import RolloutConfig
from rocktokens.stats import wilson_interval

TASKS: dict[str, tuple[str, ...]] = {
    "simple_equations": ("max_terms=2", "max_value=20"),
    "simple_equations/harder": ("max_terms=3", "max_value=50"),
    "simple_equations/easier": ("max_terms=2", "max_value=10"),
    "leg_counting": ("min_animals=2", "max_animals=3", "max_instances=9"),
    "gsm_symbolic": (),
    "lcm": ("max_value=30",),
    "chain_sum": ("min_terms=3", "max_terms=4", "min_digits=2", "max_digits=3"),
    "chain_sum/easier": ("min_terms=3", "max_terms=3", "min_digits=2", "max_digits=2"),
    "chain_sum/two": ("min_terms=2", "max_terms=2", "min_digits=2", "max_digits=2"),
    "chain_sum/three": ("min_terms=3", "max_terms=3", "min_digits=1", "max_digits=2"),
    "leg_counting/shorter": ("min_animals=2", "max_animals=2", "max_instances=9"),
    "basic_arithmetic": ("min_terms=3", "max_terms=3", "max_digits=2"),
    "fraction_simplification": ("max_value=60", "max_factor=12"),
    "products": ("min_digits=2", "max_digits=2"),
    "simple_geometry": ("max_sides=4",),
    "gcd": ("max_value=60",),
    "count_primes": ("max_n=60",),
    "letter_counting": ("max_words=6", "min_words=3"),
    "number_filtering": ("max_numbers=5",),
    "chain_sum/four": ("min_terms=4", "max_terms=4", "min_digits=1", "max_digits=2"),
}
LONG_SHARE = 0.9  # the length that this share of the rollouts stays below


@dataclass(frozen=True)
class Task:
    """A candidate, its prompts and its checker."""

    name: str
    settings: PromptsConfig
    prompts: list[Prompt]


def tasks(names: list[str], num_prompts: int, tokenizer: Any, system: str | None) -> list[Task]:
    """The candidates with prompts of the part that is set aside for causal tests: no training sees them."""
    found = []
    for name in names:
        source = f"reasoning-gym:{name.partition('/')[0]}"
        settings = PromptsConfig(source=source, options=TASKS[name], chat=True, system=system, limit=num_prompts)
        prompts = load_prompts(settings, tokenizer, part="causal")
        found.append(Task(name, settings, [replace(p, prompt_id=f"{name}/{p.prompt_id}") for p in prompts]))
    return found


def measure(model: str, role: str, candidates: list[Task], settings: PairConfig, tokens: int) -> list[dict[str, Any]]:
    """One row per task for one model."""
    tokenizer, loaded = load_tokenizer(model, settings), load_model(model, settings)
    choose_threads(settings.threads, loaded)
    ends = end_tokens(loaded, tokenizer)
    pair = Pair(loaded, None, tokenizer, len(tokenizer), ends, ends[0])
    sampling = RolloutConfig(num_rollouts=1, max_new_tokens=tokens, batch_size=64)
    engine = make_sampler(pair, sampling)
    every = [prompt for task in candidates for prompt in task.prompts]
    begun = time.perf_counter()
    rollouts = dict(zip((p.prompt_id for p in every), engine.generate(requests_for(every, sampling))))
    seconds = time.perf_counter() - begun
    written = sum(len(rollout.token_ids) for rollout in rollouts.values())
    print(f"{role}: {written} tokens in {seconds:.0f} s, {written / seconds:.0f} a second")
    rows = []
    for task in candidates:
        own = [rollouts[prompt.prompt_id] for prompt in task.prompts]
        texts = [str(tokenizer.decode(list(one.token_ids), skip_special_tokens=True)) for one in own]
        check = make_checker(task.settings)
        assert check is not None
        right = [check(text, prompt.answer or "") for text, prompt in zip(texts, task.prompts)]
        lengths = np.array([len(one.token_ids) for one in own])
        share = wilson_interval(sum(right), len(right))
        rows.append(
            {
                "task": task.name,
                "options": list(task.settings.options),
                "model": role,
                "prompts": len(right),
                "right": sum(right),
                "accuracy": [round(value, 4) for value in share[:3]],
                "prompt_tokens": float(np.mean([len(prompt.prompt_ids) for prompt in task.prompts])),
                "tokens": float(lengths.mean()),
                "tokens_90": float(np.quantile(lengths, LONG_SHARE)),
                "truncated": float(np.mean([one.truncated for one in own])),
                "example": {"prompt": task.prompts[0].text, "text": texts[0], "answer": str(task.prompts[0].answer)},
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table, task by task."""
    print(f"{'task':26}{'model':9}{'right':>9}{'tokens':>8}{'90 %':>6}{'cut':>6}{'prompt':>8}")
    for row in sorted(rows, key=lambda row: (row["task"], row["model"])):
        print(
            f"{row['task']:26}{row['model']:9}{100 * row['accuracy'][0]:8.1f}%{row['tokens']:8.0f}"
            f"{row['tokens_90']:6.0f}{100 * row['truncated']:5.0f}%{row['prompt_tokens']:8.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=160, help="length limit of a rollout")
    parser.add_argument("--models", nargs="+", choices=["student", "teacher"], default=["student", "teacher"])
    parser.add_argument("--system", help="system message before every prompt; unset: the chat template's own")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--results", default="qwen_task", help="name of the JSON file in docs/results")
    parser.add_argument("--examples", action="store_true", help="print one rollout of each task and model")
    options = parser.parse_args()
    settings = PairConfig(student=options.student, teacher=options.teacher, dtype="bfloat16")
    candidates = tasks(options.only, options.prompts, load_tokenizer(options.student, settings), options.system)
    rows = []
    for role in options.models:
        rows += measure(getattr(options, role), role, candidates, settings, options.tokens)
        show(rows)
    if options.examples:
        for row in rows:
            print(f"\n--- {row['task']}, {row['model']}, answer {row['example']['answer']}\n{row['example']['prompt']}")
            print(row["example"]["text"])
    save(options.results, {"length_limit": options.tokens, "system": options.system, "rows": rows})


if __name__ == "__main__":
    main()
