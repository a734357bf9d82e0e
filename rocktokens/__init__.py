"""rocktokens: which tokens on-policy distillation never fixes, what they cost, whether they matter.

The public names below load on first use, so that `import rocktokens` and the command line stay quick.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "Divergence": "rocktokens.core.divergence",
    "fused_divergence": "rocktokens.core.divergence",
    "TokenMonitor": "rocktokens.core.monitor",
    "RockDistillationTrainer": "rocktokens.lm.training.trainer",
    "Selector": "rocktokens.core.selection.selectors",
    "SelectorBatch": "rocktokens.core.selection.selectors",
    "make_selector": "rocktokens.core.selection.selectors",
    "detect_rocks": "rocktokens.core.detection.detect",
    "knockout_census": "rocktokens.lm.causal.knockout",
    "graft": "rocktokens.lm.causal.graft",
    "Run": "rocktokens.runs.store",
    "open_run": "rocktokens.runs.store",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rocktokens' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
