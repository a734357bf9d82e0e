"""What every test relies on: a CPU, one torch thread, no network, seeded generators."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before any library reads them. Spawned processes inherit them too.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="disabled",
    OMP_NUM_THREADS="1",
)

import numpy as np
import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from story import Story

torch.set_num_threads(1)  # tiny matrices stall when threads outnumber the free cores

# The same examples on every machine: a red suite means a change, not a draw.
settings.register_profile("house", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("house")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine or this command cannot run, each with the condition that brings it back."""
    without_cuda = pytest.mark.skip(reason="no CUDA device; runs on a machine with one")
    unasked_slow = pytest.mark.skip(reason="takes minutes; runs with -m slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(without_cuda)
        if item.get_closest_marker("campaign") and "campaign" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="an attack campaign; runs with make campaign"))
        if "slow" in item.keywords and "slow" not in config.option.markexpr:
            item.add_marker(unasked_slow)


@pytest.fixture(autouse=True)
def _handlers_end_with_their_test() -> Iterator[None]:
    """A command logs to the standard error of its moment; that stream is closed when its test ends."""
    yield
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)


@pytest.fixture
def rng() -> np.random.Generator:
    """A numpy generator, the same in every test."""
    return np.random.default_rng(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A torch generator, the same in every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def unused_port() -> int:
    """A TCP port on this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """One finished study of the built-in world, made once for all processes of the session. Read only: copy it."""
    from made_once import made_once
    from story import Story, study

    from rocktokens import open_run

    def make(folder: Path) -> list[object]:
        done = study(folder / "study")
        return [done.said, done.seconds]

    folder, (said, seconds) = made_once(tmp_path_factory, "story", make)
    return Story(open_run(folder / "study"), said, seconds)
