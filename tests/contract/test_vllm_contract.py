"""What our engine relies on, against the stand-in and, where ROCKTOKENS_VLLM_PYTHON is set, against real vLLM.

Set ROCKTOKENS_VLLM_RESULTS to a file to have what was measured written there. Servers of this file's own two models
that run already are used instead of new ones if ROCKTOKENS_VLLM_URLS names them: the student's, a comma, the teacher's.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import distilling
import markov
import numpy as np
import pytest
import tiny
import torch
import vllm_server
from datasets import Dataset
from standin_server import Direct, StandIn

from rocktokens.causal.census import BannedSet
from rocktokens.causal.knockout import knockout_census
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.models.pair import head_of
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Request
from rocktokens.sample.sampler import Sampler
from rocktokens.score.scoring import Rollout
from rocktokens.servers.connect import own_logprobs, served_logprobs
from rocktokens.servers.pool import ServerPool
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.states import ServedStates
from rocktokens.servers.vllm import VllmEngine
from rocktokens.train.trainer import RockDistillationTrainer, RockOptions

# Heads of width 32, the least that vLLM's CPU attention takes.
WIDTH, EOS = 128, 1
STUDENT, TEACHER = tiny.tiny_model(width=WIDTH, seed=5), tiny.tiny_model(width=WIDTH, seed=6)
PROMPT = (3, 4, 5)
DRAWS = 1200
MEASURED: dict[str, object] = {}

real = pytest.param(
    "vllm",
    marks=pytest.mark.skipif(
        vllm_server.PYTHON is None, reason="ROCKTOKENS_VLLM_PYTHON names no interpreter with vLLM; set it to run this"
    ),
)


@pytest.fixture(scope="module", params=["stand-in", real])
def served(request, tmp_path_factory):
    """(kind, URL of a server that generates with the student, of one with the teacher's states, paths, stand-in)."""
    folder = tmp_path_factory.mktemp("served")
    paths = [tiny.save_model(folder / name, model) for name, model in (("student", STUDENT), ("teacher", TEACHER))]
    with ExitStack() as stack:
        stand_in = None
        if request.param == "stand-in":
            stand_in = stack.enter_context(StandIn(STUDENT))
            urls = [stand_in.url, stack.enter_context(StandIn(TEACHER, pooling=True)).url]
        elif "ROCKTOKENS_VLLM_URLS" in os.environ:
            urls = os.environ["ROCKTOKENS_VLLM_URLS"].split(",")
        else:
            urls = [
                stack.enter_context(vllm_server.serve(path, folder / f"{number}.log", pooling=number == 1))
                for number, path in enumerate(paths)
            ]
        yield request.param, *urls, paths, stand_in


@pytest.fixture(scope="module")
def engine(served):
    # Laws take thousands of draws: the stand-in is asked without a network, which tests/servers/test_pool.py looks at.
    with Direct(served[4]) if served[4] else ServerPool([served[1]], ServersConfig(concurrency=32)) as pool:
        yield VllmEngine(pool, eos_ids=(EOS,), vocabulary=tiny.VOCABULARY, model_context=tiny.CONTEXT)


@pytest.fixture(scope="module")
def states(served):
    with ServerPool([served[2]], ServersConfig(concurrency=8)) as pool:
        yield ServedStates(pool, head_of(TEACHER), model_context=tiny.CONTEXT)


def note(served, name: str, value: object) -> None:
    """Keep what was measured on real vLLM; written at once, so that a stopped session loses nothing."""
    if served[0] == "vllm":
        MEASURED[name] = value
        if "ROCKTOKENS_VLLM_RESULTS" in os.environ:
            results = Path(os.environ["ROCKTOKENS_VLLM_RESULTS"])
            known = json.loads(results.read_text()) if results.exists() else {}
            results.write_text(json.dumps({**known, **MEASURED}, indent=1, sort_keys=True) + "\n")


@torch.inference_mode()
def next_law(prefix: tuple[int, ...], banned: tuple[int, ...] = ()) -> np.ndarray:
    logits = STUDENT(input_ids=torch.tensor([prefix])).logits[0, -1].double()
    logits[list(banned)] = -torch.inf
    return logits.softmax(0).numpy()


def chi2(tokens: list[int], law: np.ndarray) -> float:
    return markov.fit_p([(token,) for token in tokens], {(token,): p for token, p in enumerate(law) if p > 0})


def test_model_and_context_are_said(served):
    with ServerPool([served[1]]) as pool:
        assert pool.models()[0].name == "m"
        assert pool.context == tiny.CONTEXT


def test_greedy_rollouts_are_our_samplers(served, engine):
    ours = Sampler(STUDENT, eos_ids=(EOS,), pad_id=2, greedy=True)
    theirs = VllmEngine(engine.pool, eos_ids=(EOS,), vocabulary=tiny.VOCABULARY, greedy=True)
    asked = [Request(prompt, 20, 0, (7,)) for prompt in tiny.prompts(24, seed=3)]
    same = sum(a == b for a, b in zip(ours.generate(asked), theirs.generate(asked)))
    note(served, "greedy rollouts equal to ours, of 24", same)
    assert same >= 23  # a tie within rounding may fall either way


def test_end_tokens_end_a_rollout_and_stay_in_it(engine):
    several = VllmEngine(engine.pool, eos_ids=(EOS, 9, 11), vocabulary=tiny.VOCABULARY)
    found = several.generate([Request(PROMPT, 60, seed) for seed in range(60)])
    ends = Counter(answer.token_ids[-1] for answer in found if not answer.truncated)
    assert set(ends) <= {EOS, 9, 11}
    assert len(ends) >= 2
    assert not any({EOS, 9, 11} & set(answer.token_ids[:-1]) for answer in found)


def test_baseline_and_ban_have_the_models_law(served, engine):
    banned = tuple(int(token) for token in np.argsort(-next_law(PROMPT))[:3] if token != EOS)
    for name, ban in (("baseline", ()), ("ban", banned)):
        tokens = [a.token_ids[0] for a in engine.generate([Request(PROMPT, 1, seed, ban) for seed in range(DRAWS)])]
        p = chi2(tokens, next_law(PROMPT, ban))
        note(served, f"chi-square p, {name}", p)
        assert p > 0.001


def test_resumption_needs_a_fresh_seed(served, engine):
    """Rollouts that began alike go on: right with a fresh seed, wrong with their own, whose numbers come again."""
    draws = 8 * DRAWS if served[0] == "vllm" else 3 * DRAWS
    first = [a.token_ids[0] for a in engine.generate([Request(PROMPT, 1, seed) for seed in range(draws)])]
    begun = Counter(token for token in first if token != EOS).most_common(1)[0][0]
    users = [seed for seed, token in enumerate(first) if token == begun]
    law = next_law((*PROMPT, begun))
    found = {}
    for name, skip in (("fresh seed", 1), ("own seed", 0)):
        asked = [Request((*PROMPT, begun), 1, seed, skip=skip) for seed in users]
        found[name] = chi2([a.token_ids[0] for a in engine.generate(asked)], law)
        note(served, f"chi-square p, resumed with {name}", found[name])
    assert found["fresh seed"] > 0.001
    assert found["own seed"] < 1e-4


def test_the_same_seeds_give_the_same_rollouts(served, engine):
    asked = [Request(prompt, 16, seed) for seed, prompt in enumerate(tiny.prompts(32, seed=8))]
    same = sum(a == b for a, b in zip(engine.generate(asked), engine.generate(asked[::-1])[::-1]))
    note(served, "rollouts repeated from their seeds, of 32", same)
    assert same >= 31


def test_many_prompts_at_once_do_not_end_the_server(engine):
    asked = [Request(tuple(range(3, 60)), 4, seed) for seed in range(64)]
    assert len(engine.generate(asked)) == 64
    assert len(engine.generate(asked[:1])) == 1


def test_log_probabilities_of_a_prompt_identify_the_model(served, engine):
    ids = tuple(range(3, 19))
    theirs, ours = served_logprobs(engine.pool, ids), own_logprobs(served[3][0], PairConfig(), ids)
    distance = float(np.abs(np.subtract(theirs, ours)).max())
    note(served, "largest difference of a probe's log-probabilities, nats", distance)
    assert distance < 1e-3


@pytest.mark.parametrize(("wire", "tolerance"), [("float32", 1e-4), ("float16", 5e-3), ("bfloat16", 5e-2)])
def test_scores_with_served_states_are_the_local_ones(served, states, wire, tolerance):
    rollouts = [
        Rollout(f"p{number}", f"p{number}#0", prompt, response)
        for number, (prompt, response) in enumerate(zip(tiny.prompts(16, seed=1), tiny.prompts(16, seed=2, longest=40)))
    ]
    served_states = ServedStates(states.pool, states.head, wire=wire)
    found = [tiny.scored(rollouts, STUDENT, teacher)["kl"].to_numpy() for teacher in (TEACHER, served_states)]
    distance = float(np.abs(found[0] - found[1]).max())
    note(served, f"largest difference of a KL with {wire} on the wire, nats", distance)
    assert distance < tolerance


def test_twenty_steps_of_distillation_follow_the_local_teacher(served, states, tmp_path):
    """The same student, prompts and seeds; the teacher in this process, and its states from the server."""
    tokenizer = tiny.tiny_tokenizer()
    texts = [" ".join(f"w{token}" for token in ids) for ids in tiny.prompts(64, seed=21, shortest=2, longest=6)]
    losses = []
    for name, teacher, source in (("local", TEACHER, None), ("served", None, states)):
        trainer = RockDistillationTrainer(
            tiny.tiny_model(width=WIDTH, seed=5).train(),
            teacher,
            distilling.arguments(tmp_path / name, max_steps=20),
            Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=tokenizer,
            options=RockOptions(generation="ours", teacher_states=source),
        )
        trainer.train()
        losses.append([row["loss"] for row in trainer.record.rows])
    distance = float(np.abs(np.subtract(*losses)).max())
    note(served, "largest difference of the loss in 20 steps of distillation with a served teacher", distance)
    assert len(losses[0]) == 20
    assert losses[0][-1] < 0.9 * losses[0][0]  # it does learn
    assert distance < 1e-3


PROMPTS = 480
"""Prompts of the census on real vLLM: enough for intervals of 2 points. The stand-in is held to fewer."""

# Bans whose effects in process lie far from 0 and from ±ε, by at least twice the interval, so that another engine's
# rollouts cannot change a verdict by chance: -0.22, +0.29 and 0.01 with ε = 0.1.
WANTED, UNWANTED, RARE = 53, 47, 19
VERDICTS = {WANTED: "Strong Pillar", UNWANTED: "Strong Stumbling Block", RARE: "Proven Neutral"}


def right(text: str, _: str) -> bool:
    """What bans of two frequent tokens change in both directions."""
    said = text.split()
    return str(WANTED) in said and str(UNWANTED) not in said


def test_the_census_agrees_with_the_one_in_process(served, engine):
    """Another engine draws other rollouts of one law: the verdicts are the same, and effects lie within intervals."""
    number = PROMPTS if served[0] == "vllm" else 60  # the stand-in samples one rollout at a time
    prompts = [Prompt(f"p{at}", ids, "", "x") for at, ids in enumerate(tiny.prompts(number, seed=12))]
    sets = [BannedSet(f"t{token}", "token", token, f"w{token}", (token,)) for token in VERDICTS]
    found = []
    for own in (engine, Sampler(STUDENT, eos_ids=(EOS,), pad_id=2, batch_size=256)):
        result = knockout_census(
            own,
            prompts,
            sets,
            decode=lambda ids: " ".join(map(str, ids)),
            checker=right,
            eos_ids=(EOS,),
            vocabulary=tiny.VOCABULARY,
            config=KnockoutConfig(until="budget", rounds=1, resamples=500, epsilon=0.1),
            baseline=BaselineConfig(problems=number, rollouts=8 if served[0] == "vllm" else 4, max_new_tokens=24),
        )
        found.append(result.census)
    for theirs, ours in zip(*(census.results for census in found)):
        both = [{"delta": [row.delta, row.low, row.high], "verdict": row.verdict} for row in (theirs, ours)]
        note(served, f"census of {ours.banned.token}, {number} prompts, vLLM and in process", both)
        assert theirs.low <= ours.high
        assert ours.low <= theirs.high
    for census in found:
        assert [row.verdict for row in census.results] == list(VERDICTS.values())
