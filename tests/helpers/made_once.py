"""Expensive things that several tests share: made once per session, however many of its processes ask for them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """A directory filled by `make(directory)`, and what that returned (anything JSON can hold)."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(base / f"{name}.lock"):
        folder, kept = base / name, base / f"{name}.json"
        if not kept.exists():
            folder.mkdir()
            kept.write_text(json.dumps(make(folder)))
        return folder, json.loads(kept.read_text())
