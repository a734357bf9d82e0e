"""`rocktokens check`: does this pair fit, how large is it, what will a run need. Loads tokenizers, no weights."""

from __future__ import annotations

import psutil
from rich.console import Console
from rich.table import Table

from rocktokens.config import PairConfig, PromptsConfig, RolloutConfig
from rocktokens.errors import ConfigError


def check(pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig) -> None:
    """Print the verdict, sizes, and what memory and time a run needs; raise ConfigError where the pair does not fit."""
    from pathlib import Path

    from rocktokens.lm.requirements import needs_of
    from rocktokens.stages.stage import resolve

    pair, prompts = resolve(Path(), pair, prompts)
    if not pair.student or not pair.teacher:
        raise ConfigError("give both --pair.student and --pair.teacher: a model directory, a hub name or a .gguf file")
    needs = needs_of(pair, rollouts)
    console = Console()
    table = Table("", "student", "teacher", box=None)
    for label, name in (
        ("family", "model_type"),
        ("parameters", "parameters"),
        ("layers", "layers"),
        ("width", "width"),
        ("output head rows", "vocabulary"),
        ("context", "context"),
    ):
        values = [getattr(size, name) for size in (needs.student, needs.teacher)]
        table.add_row(label, *(f"{value:,}" if isinstance(value, int) else str(value) for value in values))
    console.print(table)
    shared = min(needs.student.vocabulary, needs.teacher.vocabulary)
    console.print(
        f"The pair fits: {needs.num_types:,} token types, one tokenizer; {shared:,} rows of both heads are used."
    )
    available = psutil.virtual_memory().available
    console.print(
        f"Memory: about {needs.score_bytes / 1e9:.2f} GB to sample and score, {needs.distill_bytes / 1e9:.2f} GB to "
        f"distil; {available / 1e9:.1f} GB are free on this machine."
    )
    console.print(
        f"Time for 1,000 response tokens, at least: sampling {needs.sample_seconds:.2g} s, scoring "
        f"{needs.score_seconds:.2g} s, a distillation step's forward and backward {needs.distill_seconds:.2g} s."
    )
    if needs.distill_bytes > available:
        console.print("[bold]This machine has too little free memory to distil this pair.[/bold]")
