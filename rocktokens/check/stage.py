"""`rocktokens check`: does this pair fit, do servers serve it, how large is it, what will a run need.

Loads tokenizers, and no weights unless servers are named whose model is recognised by loading it for a moment.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import psutil

from rocktokens.check.plan_settings import BudgetConfig
from rocktokens.check.terminal import BudgetRow, budget_table, sizes_table
from rocktokens.errors import ConfigError
from rocktokens.models.settings import PairConfig
from rocktokens.progress import console
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig

# A probe of a server's speed: short enough to be quick, long enough to mean something.
PROBE_ROLLOUTS, PROBE_TOKENS = 16, 32


def check(
    pair: PairConfig,
    prompts: PromptsConfig,
    rollouts: RolloutConfig,
    servers: ServersConfig | None = None,
    *,
    budget: BudgetConfig | None = None,
) -> None:
    """Print the verdict, sizes, and what memory and time a run needs; raise ConfigError where the pair does not fit."""
    if budget is not None:
        return plan(pair, prompts, rollouts, budget)
    from pathlib import Path

    from rocktokens.models.requirements import needs_of
    from rocktokens.stage import resolve

    pair, prompts = resolve(Path(), pair, prompts)
    if not pair.student or not pair.teacher:
        raise ConfigError("give both --pair.student and --pair.teacher: a model directory, a hub name or a .gguf file")
    needs = needs_of(pair, rollouts)
    out = console()
    out.print(sizes_table(dataclasses.asdict(needs.student), dataclasses.asdict(needs.teacher)))
    shared = min(needs.student.vocabulary, needs.teacher.vocabulary)
    out.print(f"The pair fits: {needs.num_types:,} token types, one tokenizer; {shared:,} rows of both heads are used.")
    out.print(needs.templates, highlight=False, markup=False)
    available = psutil.virtual_memory().available
    out.print(
        f"Memory: about {needs.score_bytes / 1e9:.2f} GB to sample and score, {needs.distill_bytes / 1e9:.2f} GB to "
        f"distil; {available / 1e9:.1f} GB are free on this machine."
    )
    out.print(
        f"Time for 1,000 response tokens, at least: sampling {needs.sample_seconds:.2g} s, scoring "
        f"{needs.score_seconds:.2g} s, a distillation step's forward and backward {needs.distill_seconds:.2g} s."
    )
    if needs.distill_bytes > available:
        out.print("[bold]This machine has too little free memory to distil this pair.[/bold]")
    for line in _probe(pair, rollouts, servers or ServersConfig()):
        out.print(line, highlight=False)


def _probe(pair: PairConfig, rollouts: RolloutConfig, servers: ServersConfig) -> Iterator[str]:
    """Ask every server that is named: is it there, is it the model that is meant, how long a text, how quick."""
    from rocktokens.servers.connect import why_no_states
    from rocktokens.servers.pool import ServerPool

    for role, urls in (("student", servers.student), ("teacher", servers.teacher)):
        for url in urls:
            one = dataclasses.replace(servers, student=(url,), teacher=(url,))
            with ServerPool([url], servers) as pool:
                pool.models()  # nobody answers: said by URL
                trouble = pool.healthy(pool.urls[0])
                if trouble is not None:
                    raise ConfigError(trouble)
                context = pool.context
            _require_context(url, context, pair, rollouts, role)
            kind = "generates" if role == "student" or why_no_states(url, servers) else "states"
            speed = _generation_speed if kind == "generates" else _states_speed
            yield (
                f"{url} serves the {role} and {'generates' if kind == 'generates' else 'gives its hidden states'}; "
                f"context {context or 'not said'}, {speed(pair, one, rollouts, role)}."
            )


def _require_context(url: str, context: int | None, pair: PairConfig, rollouts: RolloutConfig, role: str) -> None:
    """Refuse a server that would not even take a prompt of one token with the longest rollout."""
    from rocktokens.models.pair import context_of

    own = context_of(pair.teacher if role == "teacher" else pair.student, pair)
    needed = min(rollouts.max_new_tokens + 1, own or rollouts.max_new_tokens + 1)
    if context is not None and context < needed:
        raise ConfigError(
            f"{url} takes {context} tokens, and a prompt with its rollout needs more than {needed - 1}; start it with "
            f"a larger --max-model-len, or lower --rollouts.max-new-tokens"
        )


def _generation_speed(pair: PairConfig, servers: ServersConfig, rollouts: RolloutConfig, role: str) -> str:
    from rocktokens.sample.requests import Request
    from rocktokens.servers.connect import open_sampling
    from rocktokens.servers.probe import probe_ids

    found = open_sampling(pair, servers, rollouts, of_teacher=role == "teacher")
    ids = probe_ids(found.facts.tokenizer, found.facts.vocabulary)
    length = min(PROBE_TOKENS, (found.engine.context or PROBE_TOKENS + len(ids)) - len(ids))
    asked = [Request(ids, length, seed) for seed in range(PROBE_ROLLOUTS)]
    start = time.perf_counter()
    tokens = sum(len(answer.token_ids) for answer in found.engine.generate(asked))
    seconds = time.perf_counter() - start
    return f"{tokens / seconds:,.0f} tokens a second with {PROBE_ROLLOUTS} rollouts in flight"


def _states_speed(pair: PairConfig, servers: ServersConfig, rollouts: RolloutConfig, role: str) -> str:
    from rocktokens.models.pair import pair_facts
    from rocktokens.models.states import Sequences
    from rocktokens.servers.connect import open_states
    from rocktokens.servers.probe import probe_ids

    facts = pair_facts(pair)
    source, _ = open_states(pair, servers, facts)
    ids = probe_ids(facts.tokenizer, facts.vocabulary)
    sequences = Sequences((ids,) * PROBE_ROLLOUTS, (1,) * PROBE_ROLLOUTS)
    start = time.perf_counter()
    source.response_states(sequences)
    seconds = time.perf_counter() - start
    return f"states of {PROBE_ROLLOUTS * len(ids) / seconds:,.0f} tokens a second in {servers.wire}"


def plan(pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig, asked: BudgetConfig) -> None:
    """Print a budget: device-hours, memory and disk of every stage."""
    from pathlib import Path

    from rocktokens.check.budget import budget_of
    from rocktokens.stage import resolve

    pair, _ = resolve(Path(), pair, prompts)
    if not pair.student or not pair.teacher:
        raise ConfigError("give both --pair.student and --pair.teacher: a model directory, a hub name or a .gguf file")
    found = budget_of(pair, rollouts, asked)
    out = console()
    devices = 1 if asked.machine == "cpu" else asked.devices
    rows = [
        BudgetRow(own.stage, own.device_hours, own.device_hours / devices, own.memory, own.disk, own.note)
        for own in found
    ]
    out.print(budget_table(rows, asked.where))
    total = sum(stage.device_hours for stage in found)
    out.print(
        f"Together {total:,.1f} device-hours and {sum(stage.disk for stage in found) / 1e9:,.0f} GB of disk, at least. "
        "Estimates from the models' shapes and the machine's data sheet; docs/scale.md says how."
    )
