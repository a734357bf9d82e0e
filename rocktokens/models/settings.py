"""Settings of the pair: which two models, and how they are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rocktokens.settings import Settings, immaterial, permission

Device = Literal["auto", "cpu", "cuda", "mps"]


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class PairConfig(Settings, section="pair"):
    """Which two models, and how they are loaded."""

    student: str = ""
    """Student: a Hugging Face directory or hub name, or a .gguf file."""
    teacher: str = ""
    """Teacher: likewise; it must share the student's tokenizer."""
    dtype: Dtype = "auto"
    """Weights' dtype; auto is float32 on a CPU and the checkpoint's own elsewhere."""
    device: Device = "auto"
    """Where the models live; auto takes CUDA or MPS where there is one."""
    device_map: str | None = None
    """Passed to transformers for models larger than one device, e.g. auto."""
    trust_remote_code: bool = permission()
    """Run Python code that comes with the model. Off: such models are refused."""
    allow_pickle: bool = permission()
    """Load pickled weights (.bin, .pt). Off: only safetensors and GGUF."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = immaterial(None)
    """CPU threads for torch; unset: one for tiny models, otherwise the free cores."""
