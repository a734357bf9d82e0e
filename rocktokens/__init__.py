"""rocktokens: which tokens on-policy distillation never fixes, what they cost, whether they matter.

The public names below load on first use, so that `import rocktokens` and the command line stay quick.
"""

from importlib import import_module
from typing import Any

__version__ = "0.3.0.dev0"

_HOMES = {
    "Divergence": "rocktokens.divergence.fused",
    "fused_divergence": "rocktokens.divergence.fused",
    "TokenMonitor": "rocktokens.divergence.monitor",
    "RockDistillationTrainer": "rocktokens.train.trainer",
    "RockOptions": "rocktokens.train.trainer",
    "freeze": "rocktokens.train.freeze",
    "Selector": "rocktokens.select.interface",
    "SelectorBatch": "rocktokens.select.interface",
    "make_selector": "rocktokens.select.interface",
    "detect_rocks": "rocktokens.detect.rocks",
    "knockout_census": "rocktokens.causal.knockout",
    "graft": "rocktokens.causal.graft",
    "Run": "rocktokens.run",
    "open_run": "rocktokens.run",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rocktokens' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
