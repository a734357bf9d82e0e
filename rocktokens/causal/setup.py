"""What `knockout` and `graft` share: models, prompts and sampler, the token types they name, and parts on disk."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocktokens.causal.settings import BaselineConfig
from rocktokens.errors import ConfigError, DataError
from rocktokens.progress import progress
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.stage import Parts, Stage, inputs_of, pair_of, prompts_of, student_source
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rocktokens.models.pair import Pair, PairFacts
    from rocktokens.prompts.checkers import Checker
    from rocktokens.prompts.tasks import Prompt
    from rocktokens.sample.requests import Engine
    from rocktokens.servers.connect import Sampling

__all__ = ["CausalSetup", "Parts", "bar", "causal_stage"]

log = logging.getLogger(__name__)

COLUMNS = ("subset", "prompt_field", "messages_field", "answer_field")  # of files and datasets


def causal_stage(run: Run, name: str, settings: dict[str, object], baseline: BaselineConfig) -> Stage:
    """The stage with all that a causal test reads: models, prompts, and the detection with its tables."""
    pair, prompts = pair_of(run), prompts_of(run)
    if baseline.checkpoint == "teacher":
        raise ConfigError("knock-outs and grafts are of the student; checkpoint must be last, student or a step")
    models = {"student": student_source(run, pair, baseline.checkpoint), "teacher": pair.teacher}
    prompts = dataclasses.replace(prompts, source=baseline.source or prompts.source)
    files = ("types.parquet", "rollouts.parquet")
    inputs = inputs_of(run, files=files, stages=("detect",), models=models, prompts=prompts)
    return Stage(run, name, settings, inputs, guards=("settings",))


def bar(description: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A progress bar that counts rollouts."""
    return progress(description, total, "rollouts")


@dataclass(frozen=True)
class CausalSetup:
    """Models, prompts, sampler and checker, shared by both stages."""

    pair: Pair | PairFacts
    prompts: PromptsConfig
    baseline: BaselineConfig
    rollouts: RolloutConfig
    problems: list[Prompt]
    checker: Checker | None
    engine: Engine
    sampling: Sampling

    @classmethod
    def of(
        cls,
        run: Run,
        baseline: BaselineConfig,
        servers: ServersConfig | None = None,
        *,
        with_teacher: bool = False,
    ) -> CausalSetup:
        """Everything but what is banned or grafted; the student is sampled on servers where they are named.

        Args:
            run: the run.
            baseline: how is sampled, and on which prompts.
            servers: where the student is served; unset: in this process.
            with_teacher: whether both models are loaded in this process.
        """
        from rocktokens.causal.baseline import answerable
        from rocktokens.models.pair import load_pair
        from rocktokens.prompts.checkers import make_checker
        from rocktokens.sample.rollouts import make_sampler
        from rocktokens.servers.connect import Sampling, open_sampling

        known = run.manifest["config"]
        pair_config, prompts = pair_of(run), _asked_prompts(prompts_of(run), baseline)
        checker = make_checker(_checked_as(prompts_of(run), prompts))
        answerable([], checker) if checker is None else None
        source = student_source(run, pair_config, baseline.checkpoint)
        meant = dataclasses.replace(pair_config, student=source)
        limit = baseline.max_new_tokens or known.get("rollouts", known.get("distill", {})).get("max_new_tokens")
        limit = limit or RolloutConfig.max_new_tokens
        baseline = dataclasses.replace(baseline, max_new_tokens=limit)
        rollouts = RolloutConfig(
            max_new_tokens=limit,
            temperature=baseline.temperature,
            greedy=baseline.greedy,
            top_k=baseline.top_k,
            top_p=baseline.top_p,
            batch_size=baseline.batch_size,
        )
        if with_teacher:
            pair = load_pair(meant)
            sampling = Sampling(make_sampler(pair, rollouts), pair)
        else:
            sampling = open_sampling(meant, servers or ServersConfig(), rollouts)
        problems = _problems(run, prompts, baseline, sampling.facts.tokenizer)
        sampling.require_room(problems, limit)
        return cls(sampling.facts, prompts, baseline, rollouts, problems, checker, sampling.engine, sampling)

    def decode(self, token_ids: list[int]) -> str:
        """A response as the checker reads it."""
        return str(self.pair.tokenizer.decode(token_ids, skip_special_tokens=True))


def _asked_prompts(own: PromptsConfig, baseline: BaselineConfig) -> PromptsConfig:
    """Where the problems of a causal test come from: the run's own prompts, or what the user names instead."""
    from rocktokens.prompts.tasks import is_endless
    from rocktokens.world import world_names

    source = baseline.source or own.source
    built_in = is_endless(source)
    if built_in and baseline.split not in (None, "causal"):
        raise ConfigError(f"causal tests on {source} take its prompts for causal tests; leave --baseline.split out")
    if source != own.source and {source, own.source} <= set(world_names()):
        raise ConfigError(f"this run is of {own.source}; its student does not speak the language of {source}")
    theirs: Json = {}  # settings of the run's own source that another does not have
    if source != own.source:
        theirs = {"split": PromptsConfig.split, "options": ()}
        theirs |= {name: getattr(PromptsConfig, name) for name in COLUMNS} if built_in else {}
    asked = dataclasses.replace(own, source=source, limit=baseline.problems if built_in else None, **theirs)
    return dataclasses.replace(asked, split=baseline.split or asked.split)


def _checked_as(own: PromptsConfig, asked: PromptsConfig) -> PromptsConfig:
    """The prompts whose checker reads the responses; a world's student answers in its language, on any file."""
    from rocktokens.prompts.gym import is_gym_source
    from rocktokens.world import world_names

    return own if own.source in world_names() and not is_gym_source(asked.source) else asked


def _problems(
    run: Run, asked: PromptsConfig, baseline: BaselineConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Prompts that neither training nor detection saw, unless the user says otherwise."""
    from rocktokens.prompts.tasks import is_endless, load_prompts

    source, built_in = asked.source, is_endless(asked.source)
    own = baseline.source is None and baseline.split is None
    if own and not built_in and baseline.reuse_prompts:
        return load_prompts(asked, tokenizer)
    found = load_prompts(asked, tokenizer, part="causal" if own or built_in else None)
    used = set(run.read("rollouts", ["prompt_id"])["prompt_id"].to_pylist()) if run.has("rollouts") and own else set()
    fresh = [prompt for prompt in found if prompt.prompt_id not in used]
    if len(fresh) < 2:
        raise DataError(
            f"detection used all but {len(fresh)} of the prompts of {source} that are set aside for causal tests; name "
            "other prompts with --baseline.source FILE, or pass --baseline.reuse-prompts"
        )
    if len(fresh) < baseline.problems:
        log.info(
            "%d prompts are there for the causal tests, fewer than the %d asked for", len(fresh), baseline.problems
        )
    return fresh


def candidate_types(types: Sequence[Row], declared: Sequence[int], top: int) -> list[int]:
    """The top token types by burden, and every declared rock: what is tested does not depend on what was declared."""
    by_burden = sorted(types, key=lambda row: (-(row.get("r") or 0.0), row["token_id"]))
    chosen = [int(row["token_id"]) for row in by_burden[:top]]
    return chosen + [token for token in dict.fromkeys(declared) if token not in set(chosen)]
