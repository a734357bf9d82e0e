"""Load a student, a teacher and their tokenizer, and refuse pairs whose tokens do not mean the same.

Weights come from safetensors or GGUF; pickles and code that ships with a model are refused unless asked for. A family's
last step from hidden state to logits (bias, scale, soft cap) is read from its configuration and then compared with the
model's own logits, so that a family this module does not know is noticed here and not in the results.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from rocktokens.divergence.fused import Head
from rocktokens.errors import ConfigError, printable
from rocktokens.models.devices import choose_device, choose_threads, warn_of_slow_products
from rocktokens.models.settings import PairConfig

if TYPE_CHECKING:
    from rocktokens.models.states import StateSource

log = logging.getLogger(__name__)

# Our logits may differ from the model's own by this much of their spread; an unknown family differs by far more.
HEAD_TOLERANCE = 2e-2
# A damaged number beyond these would be worked at for hours, or take all of the memory.
MOST = {"num_hidden_layers": 10_000, "hidden_size": 10**6, "vocab_size": 10**8, "max_position_embeddings": 10**10}
HUB_SECONDS = 5.0
GGUF_APPENDED = "<|endoftext|>"


@dataclass(frozen=True)
class Pair:
    """Two models over one tokenizer."""

    student: PreTrainedModel
    teacher: PreTrainedModel | None
    """None where it is not needed here, or served elsewhere."""
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    """Token types both heads have; rows beyond it are padding."""
    eos_ids: tuple[int, ...]
    pad_id: int
    remote: RemoteTeacher | None = None
    """A teacher that is served, in place of `teacher`."""

    def teacher_source(self) -> PreTrainedModel | StateSource:
        """The teacher, or where its states come from."""
        source = self.teacher if self.remote is None else self.teacher or self.remote.states
        if source is not None:
            return source
        raise ConfigError("the teacher is neither loaded here nor served with states; see --servers.teacher")


@dataclass(frozen=True)
class RemoteTeacher:
    """A teacher behind servers: its states, and an engine that samples from it; either may be missing."""

    states: StateSource | None = None
    engine: Callable[[Any], Any] | None = None
    """From rollout settings to an engine that samples."""


@dataclass(frozen=True)
class PairFacts:
    """What is known of a pair without any weights."""

    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    eos_ids: tuple[int, ...]
    pad_id: int
    context: int | None
    """The student's."""


def pair_facts(config: PairConfig) -> PairFacts:
    """Check that two models fit, by their tokenizers and configurations alone."""
    tokenizer, num_types = check_tokenizers(config)
    student, teacher = (model_config(name, config).get_text_config() for name in (config.student, config.teacher))
    vocabulary = min(int(student.vocab_size), int(teacher.vocab_size))
    if num_types > vocabulary:
        raise ConfigError(
            f"the tokenizer has ids up to {num_types - 1}, but the smaller output head has {vocabulary} rows; "
            "one of the models does not belong to this tokenizer"
        )
    eos_ids = tuple(sorted(stop_ids(config.student, config) | ({tokenizer.eos_token_id} - {None})))
    if not eos_ids:
        raise ConfigError("neither the student's generation config nor its tokenizer names an end token; set eos_token")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    return PairFacts(tokenizer, vocabulary, eos_ids, int(pad_id), context_of(config.student, config))


def context_of(name: str, config: PairConfig) -> int | None:
    """Tokens that a model takes, from its configuration."""
    return getattr(model_config(name, config).get_text_config(), "max_position_embeddings", None)


def load_pair(config: PairConfig, *, with_teacher: bool = True, trains: bool = False) -> Pair:
    """Load both models and check that they fit.

    Without `with_teacher` only the teacher's tokenizer and configuration are read. A student that `trains` is float32
    whatever `dtype` says.
    """
    facts = pair_facts(config)
    # Small updates vanish in 16 bits: at a rate of 2e-6 only 1 % of bfloat16 weights move.
    loaded = {"student": load_model(config.student, replace(config, dtype="float32") if trains else config)}
    if with_teacher:
        loaded["teacher"] = load_model(config.teacher, config)
    for name, model in loaded.items():
        check_head(name, model, facts.vocabulary)
    choose_threads(config.threads, *loaded.values())
    warn_of_slow_products(*loaded.values())
    models = loaded["student"], loaded.get("teacher")
    return Pair(*models, facts.tokenizer, facts.vocabulary, facts.eos_ids, facts.pad_id)


def model_config(name: str, config: PairConfig) -> Any:
    """A model's configuration, without its weights."""
    source, options = _source(name, config)
    with _named_errors(name, "configuration"):
        found = AutoConfig.from_pretrained(source, **options)
        for field, most in MOST.items():
            size = getattr(found.get_text_config(), field, None)
            if size is not None and (type(size) is not int or not 0 < size <= most):
                raise ConfigError(f"config.json of {name} says {field} = {printable(size, 40)}; restore it")
        return found


def load_model(name: str, config: PairConfig) -> PreTrainedModel:
    """One causal language model, in evaluation mode, on the device asked for."""
    device, dtype = choose_device(config.device), _dtype(config)
    source, options = _source(name, config)
    if config.device_map is not None:
        options["device_map"] = config.device_map
    if "gguf_file" in options:
        if hasattr(transformers, "GgufConfig"):  # versions without it always unpack
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = None if config.allow_pickle else True
    with _named_errors(name), no_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:  # transformers has filled them with random numbers
        raise ConfigError(
            f"the weights of {name} lack {missing[0]}, one of {len(missing)}; the model is half-written or has another "
            "model's config.json. Copy or download it again."
        )
    if "gguf_file" in options:  # its weights are plain by now, but transformers would still refuse to train or save it
        model.hf_quantizer = None  # type: ignore[assignment]
        for described in (model.config, model.config.get_text_config()):
            if hasattr(described, "quantization_config"):
                del described.quantization_config
    if config.device_map is None:
        model.to(device)  # type: ignore[arg-type]
    return model.eval()


def _dtype(config: PairConfig) -> Any:
    if config.dtype == "auto":
        return torch.float32 if choose_device(config.device) == "cpu" else "auto"
    return getattr(torch, config.dtype)


def load_tokenizer(name: str, config: PairConfig) -> PreTrainedTokenizerBase:
    """A model's tokenizer."""
    source, options = _source(name, config, ("tokenizer.json", "tokenizer_config.json", "config.json"))
    with _named_errors(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(source, **options)


def check_tokenizers(
    config: PairConfig, loaded: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None
) -> tuple[PreTrainedTokenizerBase, int]:
    """Refuse tokenizers that differ in content; returns the student's, and the number of token types both know."""
    student, teacher = loaded or (load_tokenizer(config.student, config), load_tokenizer(config.teacher, config))
    ours, theirs = _token_types(student, config.student), _token_types(teacher, config.teacher)
    different = sorted(id_ for id_ in ours.keys() | theirs.keys() if ours.get(id_) != theirs.get(id_))
    specials = {
        name: (getattr(student, name), getattr(teacher, name)) for name in ("bos_token", "eos_token", "unk_token")
    }
    unequal = next((name for name, (own, their) in specials.items() if own != their), None)
    probe = "Rock tokens: 3 + 4 = 7, so\n\\(x\\) is 7."
    said = None
    if different:
        one, two = (repr(own[different[0]]) if different[0] in own else "no token" for own in (ours, theirs))
        said = f"id {different[0]} is {one} for the student, {two} for the teacher, one of {len(different)}"
    elif unequal is not None:
        said = "{}: {!r} for the student, {!r} for the teacher".format(unequal, *specials[unequal])
    elif student(probe)["input_ids"] != teacher(probe)["input_ids"]:
        said = "they have one vocabulary but split text differently (merges or normalisation)"
    if said is not None:
        raise ConfigError(
            f"the tokenizers differ: {said}; per-token divergence needs one vocabulary. "
            "Choose a teacher of the same tokenizer family."
        )
    return student, max(ours) + 1


def _token_types(tokenizer: PreTrainedTokenizerBase, name: str) -> dict[int, str]:
    """Every id and its token; without the one that transformers appends to GGUF vocabularies that lack it."""
    types = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    last = max(types)
    if name.endswith(".gguf") and types[last] == GGUF_APPENDED and last != tokenizer.eos_token_id:
        del types[last]
    return types


def stop_ids(name: str, config: PairConfig) -> set[int]:
    """Ids that end a response by a model's generation config, else by its configuration."""
    try:
        named = GenerationConfig.from_pretrained(_source(name, config)[0]).eos_token_id
    except OSError:  # there is none: what the model's configuration says is what transformers would take
        named = getattr(model_config(name, config).get_text_config(), "eos_token_id", None)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"generation_config.json of {name} is damaged ({error}); restore or remove it") from error
    ids = list(named) if isinstance(named, list | tuple) else [] if named is None else [named]
    if any(type(id_) is not int or id_ < 0 for id_ in ids):
        raise ConfigError(f"eos_token_id of {name} is {named!r}, and token ids are whole numbers; restore its files")
    return set(ids)


def head_of(model: PreTrainedModel) -> Head:
    """The output head and what the family does to the logits after it."""
    layer: Any = model.get_output_embeddings()
    return head_from(model.config, layer.weight, getattr(layer, "bias", None))


def head_from(config: Any, weight_VH: Tensor, bias_V: Tensor | None) -> Head:
    """An output head with what a model's configuration says of scaling and capping its logits."""
    config = config.get_text_config()
    factors = [getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    scale = float(next((factor for factor in factors if factor is not None), 1.0))
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None and not any(factor is not None for factor in factors):
        scale = float(divisor) if config.model_type == "hyperclovax" else 1 / float(divisor)
    return Head(weight_VH, bias_V, getattr(config, "final_logit_softcapping", None), scale)


def read_head(name: str, config: PairConfig) -> Head:
    """The output head alone, from safetensors: a served teacher's states are multiplied with it here."""
    described, (source, options) = model_config(name, config), _source(name, config)
    if "gguf_file" in options:  # the whole model is read and released
        head = head_of(load_model(name, config))
        return Head(head.weight_VH.detach().clone(), head.bias_V, head.softcap, head.scale)
    with _named_errors(name), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    layer: Any = model.get_output_embeddings()
    named = list(model.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor | None] = {"bias": None}
    for part, parameter in (("weight", layer.weight), ("bias", getattr(layer, "bias", None))):
        if parameter is not None:
            keys = [key for key, value in named if value is parameter]
            if getattr(described.get_text_config(), "tie_word_embeddings", False) and part == "weight":
                keys += [key for key, value in named if value is model.get_input_embeddings().weight]  # type: ignore[union-attr]
            with _named_errors(name):
                found[part] = _read_tensor(source, keys, tuple(parameter.shape))
    dtype, weight = _dtype(config), found["weight"]
    assert weight is not None
    return head_from(described, weight if dtype == "auto" else weight.to(dtype), found["bias"])


def _read_tensor(source: str, keys: list[str], shape: tuple[int, ...]) -> Tensor:
    """One tensor of a checkpoint, by any of its names; of several files only the one that holds it is opened."""
    index = cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        files = json.loads(Path(index).read_text())["weight_map"]
    else:
        with safe_open(str(cached_file(source, "model.safetensors")), "pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    endings = {".".join(key.split(".")[-2:]) for key in keys}
    for key in [*keys, *(key for key in files if ".".join(key.split(".")[-2:]) in endings)]:
        if key in files:
            with safe_open(str(cached_file(source, files[key])), "pt") as file:
                if tuple(file.get_slice(key).get_shape()) == shape:
                    return file.get_tensor(key)
    raise ConfigError(f"the weights of {source} hold no {keys[0]} of shape {shape}; the output head cannot be read")


def hidden_states(
    model: PreTrainedModel, input_BT: Tensor, mask_BT: Tensor | None = None, *, past: Cache | None = None
) -> Tensor:
    """Last hidden state at every position: what the output head is applied to. `past`: what was read before, if any."""
    body: Any = model.base_model if model.base_model is not model else model.model  # Llama 4 misnames its base
    held = {"use_cache": False} if past is None else {"use_cache": True, "past_key_values": past}
    return body(input_ids=input_BT, attention_mask=mask_BT, **held).last_hidden_state


@torch.inference_mode()
def check_head(name: str, model: PreTrainedModel, vocabulary: int) -> None:
    """Compare our last step from hidden state to logits with the model's own."""
    device: Any = model.get_input_embeddings().weight.device  # type: ignore[union-attr]
    input_BT = torch.arange(min(8, vocabulary), device=device)[None]
    own = model(input_ids=input_BT, use_cache=False).logits[0].float()
    head = head_of(model)
    state = hidden_states(model, input_BT)[0].to(head.weight_VH.device)
    ours = (state @ head.weight_VH.t()).float()
    if head.bias_V is not None:
        ours = ours + head.bias_V.float()
    ours = ours * head.scale
    if head.softcap is not None:
        ours = head.softcap * torch.tanh(ours / head.softcap)
    ours = ours.to(own.device)[:, : own.shape[1]]
    spread = own[:, : ours.shape[1]].std().clamp_min(1e-6)
    if not torch.isfinite(own).all():
        log.warning("the %s's logits on a probe are not finite; its weights may be damaged", name)
    elif float((ours - own).abs().max() / spread) > HEAD_TOLERANCE:
        raise ConfigError(
            f"the {name} ({model.config.model_type}) computes its logits in a way this version does not know; "
            "its divergences would be wrong. Please report the model type."
        )


def _source(name: str, config: PairConfig, holds: tuple[str, ...] = ("config.json",)) -> tuple[str, dict[str, Any]]:
    """Where transformers is to look, and with which options; a directory must hold one of the files named."""
    if not name:
        raise ConfigError("give both --pair.student and --pair.teacher: a model directory, a hub name or a .gguf file")
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no file {name}")
        return str(path.parent), {**options, "gguf_file": path.name}
    if path.is_dir():
        if not any((path / file).exists() for file in holds):
            missing = "config.json" if not (path / "config.json").exists() else holds[0]
            raise ConfigError(f"{name} holds no {missing}; a model directory is what save_pretrained wrote")
        return str(path), options
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1
    why = "" if is_path else hub_lacks(name)
    if is_path or why:
        near = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*/")], n=1, cutoff=0.75)
        hint = (
            f"did you mean {path.parent / near[0]}?" if near else "give a model directory, a hub name or a .gguf file"
        )
        raise ConfigError(f"there is no directory {name}{why}; {hint}")
    return name, options


@functools.cache
def hub_lacks(name: str) -> str:
    """Why a name cannot be had from the hub or its cache, in words; empty where it can. Answers within seconds."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return ""
    except HFValidationError:
        return ", and it is no hub name"
    if constants.HF_HUB_OFFLINE:
        return ", and it is not in the hub's cache, which is all that HF_HUB_OFFLINE allows"
    found: list[int] = []

    def ask() -> None:
        with suppress(httpx.HTTPError):
            found.append(httpx.head(f"{constants.ENDPOINT}/api/models/{name}", timeout=HUB_SECONDS).status_code)

    asking = threading.Thread(target=ask, daemon=True)  # looking up the address may take longer than any time-out
    asking.start()
    asking.join(HUB_SECONDS)
    if not found:
        return f", and the hub ({constants.ENDPOINT}) cannot be reached"
    return ", and the hub has no such model" if found[0] == 404 else ""


@contextmanager
def no_bars() -> Iterator[None]:
    """Without transformers' bar for every model it reads or writes: ours says what is going on."""
    shown, gguf_bar = transformers_logging.is_progress_bar_enabled(), getattr(modeling_gguf_pytorch_utils, "tqdm", None)
    transformers_logging.disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors  # this one asks nobody whether bars are shown
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _named_errors(name: str, what: str = "model") -> Iterator[None]:
    """Turn whatever a loader raises into one sentence that names the model and the remedy."""
    if name.endswith(".gguf") and not importlib.util.find_spec("gguf"):
        raise ConfigError(f"cannot load the {what} of {name}: install the package gguf, `pip install rocktokens[gguf]`")
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            remedy = "it needs Python code of its own; pass --pair.trust-remote-code if you trust its author"
        elif "safetensors" in text and ("use_safetensors" in text or "no file named" in text.lower()):
            remedy = "it has no safetensors weights; convert it, or pass --pair.allow-pickle if you trust its author"
        elif type(error).__name__ == "SafetensorError" or "incomplete" in text.lower():
            remedy = f"its weights are damaged or half-written ({text[:120]}); copy or download it again"
        elif name.endswith(".gguf") and what == "tokenizer" and isinstance(error, KeyError):
            remedy = (
                f"the file lacks a part of it ({text}; a byte-pair tokenizer needs its merges); convert the model "
                "again with llama.cpp's convert_hf_to_gguf.py, or give its directory instead"
            )
        else:
            remedy = f"{type(error).__name__}: {text[:200]}"
        raise ConfigError(f"cannot load the {what} of {name}: {remedy}") from error
