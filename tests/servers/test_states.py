"""A served teacher's states with its own head give the local teacher's divergences, and bad answers are named."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import tiny
import torch
from standin_server import StandIn

from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.models.pair import head_of, read_head
from rocktokens.models.settings import PairConfig
from rocktokens.models.states import Sequences
from rocktokens.score.scoring import Rollout, score
from rocktokens.servers.connect import probe, states_logprobs
from rocktokens.servers.pool import ServerPool
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.states import ServedStates

TEACHER = tiny.tiny_model("qwen3", seed=1, width=48)
STUDENTS = {0: tiny.tiny_model(seed=2), 7: tiny.tiny_model(seed=3)}
ROLLOUTS = [
    Rollout(f"p{number}", f"p{number}#0", prompt, response)
    for number, (prompt, response) in enumerate(zip(tiny.prompts(20, seed=1), tiny.prompts(20, seed=2, longest=30)))
]


def served(server: StandIn, **settings) -> ServedStates:
    return ServedStates(
        ServerPool([server.url], ServersConfig(concurrency=4), pause=0.01), head_of(TEACHER), **settings
    )


def scored(teacher, **settings) -> dict[int, pa.Table]:
    tables: dict[int, list[pa.Table]] = {step: [] for step in STUDENTS}
    score(
        ROLLOUTS,
        STUDENTS,
        teacher,
        eos_ids=(1,),
        vocabulary=tiny.VOCABULARY,
        write=lambda step, table: tables[step].append(table),
        token_budget=128,
        **settings,
    )
    return {step: pa.concat_tables(own).sort_by([("rollout_id", "ascending"), ("position", "ascending")])
            for step, own in tables.items()}  # fmt: skip


@pytest.mark.parametrize(("wire", "tolerance"), [("float32", 5e-5), ("float16", 5e-3), ("bfloat16", 5e-2)])
def test_scores_with_a_served_teacher_are_the_local_ones(wire, tolerance):
    local = scored(TEACHER)
    with StandIn(TEACHER, pooling=True) as server:
        remote = scored(served(server, wire=wire))
        # One request a rollout, however many checkpoints are scored beside it.
        assert len(server.requests) == len(ROLLOUTS)
    for step in STUDENTS:
        for column in ("kl", "log_ratio", "teacher_logprob", "teacher_entropy"):
            np.testing.assert_allclose(remote[step][column], local[step][column], atol=tolerance, rtol=0)
        assert remote[step]["token_id"].equals(local[step]["token_id"])
    if wire != "float32":  # the wire's precision is what separates them, so the tolerance is no accident
        assert max(abs(np.subtract(remote[0]["kl"], local[0]["kl"]))) > 1e-6


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}], ids=["own head", "tied head"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_head_is_read_from_the_weights_alone(tmp_path, family, options):
    model = tiny.tiny_model(family, seed=4, **options)
    path = tiny.save_model(tmp_path / "m", model)
    found, wanted = read_head(path, PairConfig()), head_of(model)
    assert torch.equal(found.weight_VH, wanted.weight_VH)
    assert (found.bias_V, found.softcap, found.scale) == (None, wanted.softcap, wanted.scale)


def test_the_head_is_found_among_several_files(tmp_path):
    model = tiny.tiny_model(seed=4)
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert torch.equal(read_head(str(tmp_path / "m"), PairConfig()).weight_VH, head_of(model).weight_VH)


def test_the_probe_of_a_served_teacher(tmp_path):
    """Another model, a directory that is another checkpoint, and answers that are no numbers are refused by URL."""
    right = tiny.save_model(tmp_path / "step=1", TEACHER)
    other = tiny.save_model(tmp_path / "step=2", tiny.tiny_model("qwen3", seed=9, width=48))
    facts = SimpleNamespace(tokenizer=tiny.tiny_tokenizer(), vocabulary=tiny.VOCABULARY)

    def probed(name, root="model", verify=None, **trouble):
        with StandIn(TEACHER, pooling=True, root=root, **trouble) as server:
            pool = ServerPool([server.url], ServersConfig(verify=verify), pause=0.01)
            ask = lambda one, ids: states_logprobs(ServedStates(one, head_of(TEACHER)), ids)  # noqa: E731
            return probe(pool, facts, name, PairConfig(), ask)

    assert probed(right).served == "model"
    assert probed(other, verify=False).logprobs == pytest.approx(probed(right).logprobs, abs=1e-4)  # told not to look
    (tmp_path / "link").symlink_to(right)
    probed(right, root=str(tmp_path / "link"))
    for name, settings, says in (
        (other, {}, "serves another model"),
        (right, {"root": other}, "--model"),
        (right, {"nan_states": True}, "not numbers"),
    ):
        with pytest.raises((ConfigError, DataError), match=rf"http://.*{says}"):
            probed(name, **settings)


@pytest.mark.parametrize(
    ("states_of", "says"),
    [
        (lambda states: states * 0, "all equal"),
        (lambda states: states * 0 + 3, "all equal"),
        (lambda states: states[:1].expand_as(states), "all equal"),
        (lambda states: states[:-1], "bytes of states"),
        (lambda states: states.repeat(10, 1), "bytes of states|more than"),
    ],
)
def test_states_that_no_model_computes_are_refused_by_url_and_rollout(states_of, says):
    with StandIn(TEACHER, pooling=True, states_of=states_of) as server:
        with pytest.raises((DataError, RunError), match=says) as error:
            served(server).response_states(Sequences(((3, 4, 5, 6),), (1,), ("p3#1",)))
        assert server.url in str(error.value)
        assert "p3#1" in str(error.value) or "more than" in str(error.value)
