"""The configuration: one frozen dataclass per stage. Flags, help and YAML keys are generated from these fields.

A recipe is a function that returns a configuration. This room knows no model, file format or default path beyond
what a user may set; it is imported on the `--help` path and therefore imports nothing heavy.
"""

from __future__ import annotations

from rocktokens.config.causal import BaselineConfig, GraftConfig, KnockoutConfig, SetKind
from rocktokens.config.common import require
from rocktokens.config.comparison import CompareConfig, Regime
from rocktokens.config.detection import Definition, DetectConfig, GeometryConfig, Signal
from rocktokens.config.models import Device, Dtype, PairConfig, PromptsConfig, RolloutConfig, ScoreConfig
from rocktokens.config.training import SELECTOR_OPTIONS, DistillConfig, OffPolicyConfig, SelectorConfig

__all__ = [
    "SELECTOR_OPTIONS",
    "BaselineConfig",
    "CompareConfig",
    "Definition",
    "DetectConfig",
    "Device",
    "DistillConfig",
    "Dtype",
    "GeometryConfig",
    "GraftConfig",
    "KnockoutConfig",
    "OffPolicyConfig",
    "PairConfig",
    "PromptsConfig",
    "Regime",
    "RolloutConfig",
    "ScoreConfig",
    "SelectorConfig",
    "SetKind",
    "Signal",
    "require",
]
