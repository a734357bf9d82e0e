"""Loading a pair: what fits is accepted, what does not is refused with the first difference and the remedy."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from gguf_files import QWEN2_WORDS, qwen2, write_gguf
from tiny import ALL_FAMILIES, VOCABULARY, WORDS, generated, save_model, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rocktokens.divergence.fused import fused_divergence
from rocktokens.errors import ConfigError
from rocktokens.models import devices
from rocktokens.models.devices import choose_device, choose_threads
from rocktokens.models.pair import (
    GGUF_APPENDED,
    _token_types,
    check_head,
    check_tokenizers,
    head_of,
    hidden_states,
    load_model,
    load_pair,
    load_tokenizer,
    pair_facts,
)
from rocktokens.models.settings import PairConfig
from rocktokens.sample.requests import Request
from rocktokens.sample.sampler import Sampler


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A student and a wider teacher with one tokenizer, on disk; the teacher's head has rows of padding."""
    root = tmp_path_factory.mktemp("pair")
    return save_model(root / "student", tiny_model()), save_model(root / "teacher", wide_teacher())


def wide_teacher():
    return tiny_model(seed=1, width=48, vocabulary=VOCABULARY + 16)


def copy_of(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved[1], tmp_path / "copy"))


# --- what fits ---


def test_a_pair_that_fits(saved):
    pair, turned = (load_pair(PairConfig(student=a, teacher=b)) for a, b in (saved, saved[::-1]))
    assert (pair.vocabulary, pair.eos_ids, pair.pad_id) == (VOCABULARY, (1,), 2)
    assert turned.vocabulary == VOCABULARY
    assert not pair.student.training
    assert pair.student.dtype == torch.float32
    text = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(pair.student(text).logits, tiny_model()(text).logits)
    assert load_model(saved[0], PairConfig(dtype="bfloat16")).dtype == torch.bfloat16


def test_end_tokens_come_from_the_generation_config_too_and_pad_falls_back_to_one(saved, tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id, tokenizer.pad_token = [5, 9], None
    path = save_model(tmp_path / "s", model, tokenizer)
    pair = load_pair(PairConfig(student=path, teacher=path))
    assert (pair.eos_ids, pair.pad_id) == ((1, 5, 9), 1)


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id of .* is 'x'|damaged"),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id|configuration"),
        ("config.json", {"num_hidden_layers": 10_000_000}, "num_hidden_layers = 10000000|configuration"),
        ("config.json", {"vocab_size": 10**12}, "vocab_size"),
        ("config.json", {"hidden_size": -1}, "hidden_size|cannot load"),
    ],
)
def test_absurd_numbers_of_a_configuration_are_refused_at_once(saved, tmp_path, file, change, says):
    path = copy_of(saved, tmp_path)
    (path / "generation_config.json").unlink(missing_ok=True)
    content = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps({**content, **change}))
    start = time.monotonic()
    with pytest.raises(ConfigError, match=says):
        load_pair(PairConfig(student=str(path), teacher=saved[1]))
    assert time.monotonic() - start < 15


def test_no_end_token_anywhere_is_refused(saved, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    monkeypatch.setattr("rocktokens.models.pair.check_tokenizers", lambda config: (tokenizer, VOCABULARY))
    monkeypatch.setattr("rocktokens.models.pair.stop_ids", lambda name, config: set())
    with pytest.raises(ConfigError, match="eos_token"):
        pair_facts(PairConfig(student=saved[0], teacher=saved[1]))


def test_a_mistyped_path_is_one_sentence_at_once(saved, tmp_path, monkeypatch):
    (tmp_path / "models" / "student").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rocktokens.models.pair.HUB_SECONDS", 0.5)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("httpx.head", lambda *_, **__: time.sleep(20))
    start = time.monotonic()
    for name, says in (
        ("models/studnt", r"no directory models/studnt.*cannot be reached.*did you mean models/student\?"),
        ("somebody/something-unheard-of", "cannot be reached"),
        ("models/studnt/", r"did you mean models/student\?"),
        ("a b", "no hub name"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_pair(PairConfig(student=saved[0], teacher=name))
    assert time.monotonic() - start < 5


# --- from hidden state to logits, as each family does it ---


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_has_its_own_log_probabilities_and_its_own_greedy_tokens(family):
    """Our last step against the model's own logits; our decoder, with prompts of three lengths, against `generate`."""
    model = tiny_model(family)
    check_head("student", model, VOCABULARY)
    head, text = head_of(model), torch.tensor([[3, 4, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        own = model(text).logits[0].log_softmax(-1)
        result = fused_divergence(
            hidden_states(model, text)[0],
            head.weight_VH,
            torch.zeros(7, 3),
            torch.zeros(VOCABULARY, 3),
            token_N=torch.arange(7) + 10,
            student_bias=head.bias_V,
            student_softcap=head.softcap,
            student_scale=head.scale,
        )
    expected = own[torch.arange(7), torch.arange(7) + 10]
    torch.testing.assert_close(result.student_logprob_N, expected, rtol=1e-4, atol=1e-4)

    prefixes = [(3,), (4, 5, 6, 7), (8, 9)]
    engine = Sampler(model, eos_ids=(1,), pad_id=2, greedy=True)
    for prefix, answer in zip(prefixes, engine.generate([Request(prefix, 12, 0) for prefix in prefixes])):
        assert answer.token_ids == generated(model, prefix, 12, (1,))


def test_a_family_whose_state_the_sampler_cannot_keep_is_refused():
    """transformers would run it without a state, and every token would be drawn from the one before it alone."""
    engine = Sampler(tiny_model("mamba"), eos_ids=(1,), pad_id=2)
    with pytest.raises(ConfigError, match="a mamba model keeps its state in a way"):
        engine.generate([Request((3, 4), 3, 0)])


class _UnknownFamily(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


def test_a_family_with_a_last_step_we_do_not_know_is_refused():
    model = _UnknownFamily(tiny_model().config)
    with pytest.raises(ConfigError, match=r"teacher \(llama\) computes its logits in a way"):
        check_head("teacher", model.eval(), VOCABULARY)


# --- tokenizers that do not fit ---


@pytest.mark.parametrize(
    ("words", "special", "says"),
    [
        ([*WORDS[:10], WORDS[11], WORDS[10], *WORDS[12:]], {}, "id 10 is 'w10' for the student, 'w11'"),
        ([*WORDS, "extra"], {}, "id 64 is no token for the student, 'extra'"),
        (WORDS[:60], {}, "id 60 is 'w60' for the student, no token for the teacher, one of 4"),
        (WORDS, {"eos_token": "w9"}, "eos_token: '<eos>' for the student, 'w9'"),
    ],
)
def test_tokenizers_that_differ_are_refused_by_the_first_difference(saved, tmp_path, words, special, says):
    path = save_model(tmp_path / "teacher", tiny_model(seed=1), tiny_tokenizer(words, **special))
    with pytest.raises(ConfigError, match=says):
        load_pair(PairConfig(student=saved[0], teacher=path))


def test_one_vocabulary_split_differently_is_refused(tmp_path):
    """The same pieces, merged in another order."""
    pieces = {piece: number for number, piece in enumerate(["<eos>", *"Rock tens:", "oc", "ck", "ock"])}
    paths = []
    for name, merges in (("s", [("o", "c")]), ("t", [("c", "k")])):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE(pieces, merges)), eos_token="<eos>", pad_token="<eos>"
        )
        paths.append(save_model(tmp_path / name, tiny_model(), tokenizer))
    with pytest.raises(ConfigError, match="split text differently"):
        check_tokenizers(PairConfig(student=paths[0], teacher=paths[1]))


def test_a_tokenizer_with_more_ids_than_the_head_has_rows_is_refused(tmp_path):
    paths = [save_model(tmp_path / name, tiny_model(vocabulary=40)) for name in ("s", "t")]
    with pytest.raises(ConfigError, match="ids up to 63, but the smaller output head has 40 rows"):
        load_pair(PairConfig(student=paths[0], teacher=paths[1]))


# --- models that cannot be loaded ---


def refused(saved, teacher, *says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pair(PairConfig(student=saved[0], teacher=str(teacher)))
    for part in says:
        assert part in str(caught.value)


def cut(name, keep):
    return lambda path: [file.write_bytes(file.read_bytes()[:keep]) for file in path.glob(name)]


def remove(*names):
    return lambda path: [file.unlink() for name in names for file in path.glob(name)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: shutil.rmtree(path), "there is no directory"),
        (remove("*"), "config.json"),
        (cut("*.safetensors", 0), "copy"),
        (cut("*.safetensors", 500), "copy"),
        (cut("*.safetensors", -100), "copy"),
        (remove("*.safetensors"), "safetensors"),
        (cut("config.json", 40), "config"),
        (remove("tokenizer*", "special_tokens_map.json"), "tokenizer"),
    ],
)
def test_a_model_that_is_missing_or_damaged_is_refused_by_its_name(saved, tmp_path, change, says):
    path = copy_of(saved, tmp_path)
    change(path)
    refused(saved, path, str(path), says)


def test_names_that_lead_nowhere(saved, tmp_path):
    refused(saved, "./nowhere", "there is no directory")
    refused(saved, tmp_path / "model.gguf", "there is no file")
    refused(saved, "nobody/nothing", "nobody/nothing")
    cut_short = Path(write_gguf(tmp_path / "m.gguf", qwen2()))
    cut_short.write_bytes(cut_short.read_bytes()[:3000])
    refused(saved, cut_short, "m.gguf")
    with pytest.raises(ConfigError, match=r"--pair\.student and --pair\.teacher"):
        load_pair(PairConfig())


def test_weights_that_miss_a_layer_are_refused(saved, tmp_path):
    """transformers would fill it with random numbers and go on."""
    path = copy_of(saved, tmp_path)
    from safetensors.torch import load_file, save_file

    weights = next(path.glob("*.safetensors"))
    state = load_file(weights)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, weights, metadata={"format": "pt"})
    refused(saved, path, "model.layers.1.mlp.up_proj.weight")


def test_pickled_weights_are_refused_unless_asked_for(saved, tmp_path):
    path = copy_of(saved, tmp_path)
    next(path.glob("*.safetensors")).unlink()
    torch.save(wide_teacher().state_dict(), path / "pytorch_model.bin")
    refused(saved, path, "safetensors", "--pair.allow-pickle")
    pair = load_pair(PairConfig(student=saved[0], teacher=str(path), allow_pickle=True))
    assert pair.teacher.config.hidden_size == 48


def test_code_that_comes_with_a_model_is_not_run_unless_asked_for(saved, tmp_path):
    path = copy_of(saved, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    config["model_type"] = "evil"
    (path / "config.json").write_text(json.dumps(config))
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refused(saved, path, "trust-remote-code")
    assert not (tmp_path / "ran").exists()


# --- GGUF ---


def test_gguf_files_are_loaded_through_transformers(tmp_path):
    paths = [write_gguf(tmp_path / f"{seed}.gguf", qwen2(seed)) for seed in (0, 1)]
    pair = load_pair(PairConfig(student=paths[0], teacher=paths[1]))
    assert (pair.vocabulary, pair.eos_ids, pair.pad_id) == (len(QWEN2_WORDS), (2,), 0)
    text = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        for model, seed in ((pair.student, 0), (pair.teacher, 1)):
            torch.testing.assert_close(model(text).logits, qwen2(seed)(text).logits, rtol=1e-4, atol=1e-4)


def test_without_the_package_gguf_one_sentence_says_what_to_install(tmp_path, monkeypatch, capfd):
    path = write_gguf(tmp_path / "0.gguf", qwen2())
    capfd.readouterr()  # what the writer says
    monkeypatch.setitem(sys.modules, "gguf", None)
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigError, match=r"0\.gguf: install the package gguf, `pip install rocktokens\[gguf\]`"):
            load(path, PairConfig())
    assert capfd.readouterr().err == ""


def test_a_gguf_file_without_merges_is_refused_with_a_remedy(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", qwen2(), merges=False)
    with pytest.raises(ConfigError, match="needs its merges\\); convert the model again"):
        load_tokenizer(path, PairConfig())


def test_what_transformers_appends_to_a_gguf_vocabulary_is_no_token_of_the_pair():
    tokenizer = tiny_tokenizer([*WORDS, GGUF_APPENDED])
    assert max(_token_types(tokenizer, "m.gguf")) + 1 == max(_token_types(tokenizer, "m")) == VOCABULARY


# --- machine ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device; runs on a machine without one")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"--pair\.device cpu"):
        choose_device("cuda")
    assert choose_device("auto") in ("cpu", "mps")
    assert choose_device("cpu") == "cpu"


# Parameters below which a model is tiny, what was told, workers, processes of torchrun, and the threads of eight cores.
THREADS = [(10**9, None, 1, 1, 1), (10**9, 2, 1, 1, 2), (0, None, 1, 1, 8), (0, None, 3, 1, 2), (0, None, 1, 4, 2)]


@pytest.mark.parametrize(("tiny", "told", "workers", "launched", "threads"), THREADS)
def test_tiny_models_get_one_thread_and_others_their_share(monkeypatch, tiny, told, workers, launched, threads):
    monkeypatch.setattr(devices, "TINY_PARAMETERS", tiny)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(devices, "num_workers", lambda: workers)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(launched))
    assert choose_threads(told, tiny_model()) == threads


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_16_bit_weights_on_a_processor_without_instructions_for_them_are_said(monkeypatch, caplog, dtype, fast):
    monkeypatch.setattr(devices, "has_bf16_products", lambda: fast)
    model = tiny_model().to(dtype)
    devices.warn_of_slow_products(model)
    assert not caplog.text  # a tiny model is fast anyway
    monkeypatch.setattr(devices, "TINY_PARAMETERS", 0)
    devices.warn_of_slow_products(model, model)
    assert caplog.text.count("pass --pair.dtype float32") == (dtype == torch.bfloat16 and not fast)
