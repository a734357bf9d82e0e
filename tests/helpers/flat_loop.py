"""The functions of `examples/minimal_loop.py`, which is a script and no module of the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_minimal_loop() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "minimal_loop.py"
    spec = importlib.util.spec_from_file_location("minimal_loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
