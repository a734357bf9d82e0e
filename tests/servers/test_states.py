"""A served teacher's states with its own head give the local teacher's divergences, and bad answers are named."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import tiny
import torch
from standin_server import StandIn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.models.output_head import read_head
from rocktokens.models.pair import head_of
from rocktokens.models.settings import PairConfig
from rocktokens.models.states import LocalStates, Sequences
from rocktokens.score.scoring import Rollout, score
from rocktokens.servers.connect import open_states
from rocktokens.servers.identity import (
    PROBE_TEXT,
    Fingerprint,
    Rival,
    check_same,
    is_text,
    probe_ids,
    refuse_chance,
    rivals_of,
    states_logprobs,
    verify,
)
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


def test_states_are_those_that_predict_the_response():
    sequences = Sequences(((3, 4, 5, 6, 7), (8, 9, 10)), (2, 1))
    with StandIn(TEACHER, pooling=True) as server:
        remote = served(server).response_states(sequences)
    assert remote.shape == (3 + 2, 48)
    torch.testing.assert_close(remote, LocalStates(TEACHER).response_states(sequences), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("trouble", "error", "says"),
    [
        ({"unit_norm": True}, ConfigError, "use_activation"),
        ({"nan_states": True}, DataError, r"not numbers for rollout p\d+#0"),
        ({"short_states": True}, DataError, r"bytes of states for rollout p\d+#0"),
        ({"refuse": "no pooling here"}, ConfigError, "no pooling here"),
        ({"context": 8}, ConfigError, "--max-model-len"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_answers_are_named(trouble, error, says):
    with StandIn(TEACHER, pooling=True, **trouble) as server, pytest.raises(error, match=says) as raised:
        scored(served(server, model_context=tiny.CONTEXT))
    assert server.url in str(raised.value) or "leave it out" in str(raised.value)


def test_a_server_that_ignores_the_precision_is_said_to_do_so():
    ignores = StandIn(TEACHER, pooling=True, ignores_dtype=True)
    with ignores as server, pytest.raises(DataError, match="ignores embed_dtype and sends float32") as error:
        served(server, wire="float16").states((3, 4, 5))
    assert "cut off" not in str(error.value)


def test_without_a_rollout_the_probe_is_said_to_be_none(tmp_path):
    name = tiny.save_model(tmp_path / "m", TEACHER)
    facts = SimpleNamespace(tokenizer=tiny.tiny_tokenizer(), vocabulary=tiny.VOCABULARY)
    says = pytest.raises(DataError, match=r"not numbers for the probe .*\(not a rollout\)")
    with StandIn(TEACHER, pooling=True, nan_states=True) as server, says:
        open_states(PairConfig(student=name, teacher=name), ServersConfig(teacher=(server.url,)), facts)


def test_a_server_that_generates_gives_no_states():
    with StandIn(TEACHER) as server, pytest.raises(ConfigError, match="Not Found"):
        served(server).response_states(Sequences(((3, 4),), (1,)))


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


def test_the_head_is_widened_as_the_model_would_be(tmp_path):
    path = tiny.save_model(tmp_path / "m", tiny.tiny_model(seed=4).bfloat16())
    assert read_head(path, PairConfig(device="cpu")).weight_VH.dtype == torch.float32
    assert read_head(path, PairConfig(dtype="bfloat16")).weight_VH.dtype == torch.bfloat16


def test_identity_of_a_served_teacher(tmp_path):
    right = tiny.save_model(tmp_path / "teacher", TEACHER)
    other = tiny.save_model(tmp_path / "other", tiny.tiny_model("qwen3", seed=9, width=48))
    ids = probe_ids(tiny.tiny_tokenizer(), tiny.VOCABULARY)
    with StandIn(TEACHER, pooling=True) as server:
        source = served(server)
        found = states_logprobs(source, ids)
        print_ = verify(source.pool, lambda _, found=found: found, ids, right, PairConfig(), ServersConfig())
        assert print_.logprobs == found
        with pytest.raises(ConfigError, match="serves another model") as error:
            verify(source.pool, lambda _: found, ids, other, PairConfig(), ServersConfig())
        assert server.url in str(error.value)
        verify(source.pool, lambda _: found, ids, other, PairConfig(), ServersConfig(verify=False))  # told not to look


def test_a_directory_that_the_server_names_must_be_the_models(tmp_path):
    right = tiny.save_model(tmp_path / "step=1", TEACHER)
    copy = tiny.save_model(tmp_path / "copy", TEACHER)
    nearly = tiny.tiny_model("qwen3", seed=1, width=48)
    with torch.no_grad():
        next(nearly.parameters()).mul_(1 + 1e-6)  # a checkpoint so close that no probe tells them apart
    other = tiny.save_model(tmp_path / "step=2", nearly)
    ids = probe_ids(tiny.tiny_tokenizer(), tiny.VOCABULARY)
    for root, fits in ((right, True), (copy, True), (other, False), ("elsewhere", True)):
        with StandIn(TEACHER, pooling=True, root=root) as server:
            source = served(server)
            found = states_logprobs(source, ids)
            if fits:
                verify(source.pool, lambda _, found=found: found, ids, right, PairConfig(), ServersConfig())
            else:
                with pytest.raises(ConfigError, match="start the server with --model"):
                    verify(source.pool, lambda _, found=found: found, ids, right, PairConfig(), ServersConfig())


def test_rivals_are_the_original_the_neighbours_and_the_last():
    kept = [f"run/checkpoints/step={step}" for step in (0, 1, 2, 3, 4, 5)]
    first = Rival(kept[0], "hub/student")
    assert rivals_of("hub/student", kept, kept[2]) == (first, Rival(kept[1]), Rival(kept[3]), Rival(kept[5]))
    assert rivals_of("hub/student", kept, "hub/student") == (Rival(kept[1]), Rival(kept[5]))  # step 0 is the student
    assert rivals_of("hub/student", kept[1:], kept[5]) == (Rival("hub/student"), Rival(kept[4]))
    assert rivals_of("hub/student", [], "hub/student") == ()


def test_another_model_on_resume_is_refused():
    first = Fingerprint("/m/step=1", (-1.0, -2.0, -3.0))
    check_same(Fingerprint("/m/step=1", (-1.02, -2.0, -3.02)), first, ["http://x"])
    check_same(Fingerprint("/m/step=1", (-1.02, -2.0)), first, ["http://x"])  # a shorter context, a shorter probe
    assert Fingerprint.of_text(first.text()) == first
    for now in (Fingerprint("/m/step=2", first.logprobs), Fingerprint("/m/step=1", (-1.05, -2.0, -3.05))):
        with pytest.raises(RunError, match="serves another model than when this stage began"):
            check_same(now, first, ["http://x"])


def test_a_pool_of_two_precisions_may_go_on_with_either():
    first = Fingerprint("/m", (-1.0, -2.0), ((-1.1, -2.1),), Fingerprint("/m", (-1.2, -2.2)))
    assert Fingerprint.of_text(first.text()) == first
    for logprobs in ((-1.0, -2.0), (-1.1, -2.1)):
        check_same(Fingerprint("/m", logprobs), first, ["http://x"])
    check_same(Fingerprint("/m", (-1.1, -2.1), writing=first.writing), first, ["http://x"])
    others = [Fingerprint("/m", (-1.0, -2.0), ((-1.2, -2.2),)), Fingerprint("/m", (-1.0, -2.0), writing=first)]
    for now in others:
        with pytest.raises(RunError, match="serves another model than when this stage began"):
            check_same(now, first, ["http://x"])


def test_a_probe_that_is_no_number_is_said_to_be_none(tmp_path):
    name = tiny.save_model(tmp_path / "m", TEACHER)
    not_numbers = pytest.raises(ConfigError, match=r"http://.* gives log-probabilities of a probe that are not numbers")
    with StandIn(TEACHER) as server, ServerPool([server.url]) as pool, not_numbers:
        verify(pool, lambda _: (-1.0, float("nan")), (3, 4, 5), name, PairConfig(), ServersConfig(verify=False))


def text_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Knows the probe's words, and many more."""
    words = [*dict.fromkeys(PROBE_TEXT.split()), "<unk>"]
    words += [f"w{number}" for number in range(len(words), vocabulary)]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def test_states_by_which_text_is_worse_than_chance_are_another_models(tmp_path):
    """A teacher too large to load is told by the states alone: with its head, another model's make no sense of text."""
    types = 1200
    tokenizer = text_tokenizer(types)
    ids = probe_ids(tokenizer, types)
    assert is_text(ids, tokenizer, types)
    assert not is_text(probe_ids(tiny.tiny_tokenizer(), tiny.VOCABULARY), tiny.tiny_tokenizer(), tiny.VOCABULARY)
    refuse_chance(["http://x"], Fingerprint(None, (-1.0, -7.0)), "m", types)
    model, other = (tiny.tiny_model("qwen3", seed=seed, width=48, vocabulary=types) for seed in (1, 2))
    name = tiny.save_model(tmp_path / "m", model, tokenizer)
    pair = PairConfig(student=name, teacher=name)
    facts = SimpleNamespace(tokenizer=tokenizer, vocabulary=types)
    with StandIn(other, pooling=True) as server:
        servers = ServersConfig(teacher=(server.url,), verify=False)
        with pytest.raises(ConfigError, match="less than by chance") as error:
            open_states(pair, servers, facts)
        assert server.url in str(error.value)


def test_a_context_too_short_for_any_probe_is_refused_by_url(tmp_path):
    name = tiny.save_model(tmp_path / "m", TEACHER)
    facts = SimpleNamespace(tokenizer=tiny.tiny_tokenizer(), vocabulary=tiny.VOCABULARY)
    with StandIn(TEACHER, pooling=True, context=3) as server:
        with pytest.raises(ConfigError, match="--max-model-len") as error:
            open_states(PairConfig(student=name, teacher=name), ServersConfig(teacher=(server.url,)), facts)
        assert server.url in str(error.value)
