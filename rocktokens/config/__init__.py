"""The configuration: one frozen dataclass per stage. Flags, help and YAML keys are generated from these fields.

It is imported on the `--help` path and therefore imports nothing heavy.
"""

from __future__ import annotations

from rocktokens.config.alarms import AlarmConfig
from rocktokens.config.base import require
from rocktokens.config.bypass import BypassConfig
from rocktokens.config.compare import CompareConfig, Regime
from rocktokens.config.detect import Definition, DetectConfig, Signal
from rocktokens.config.distill import DistillConfig, OffPolicyConfig, VllmConfig
from rocktokens.config.geometry import GeometryConfig
from rocktokens.config.graft import GraftConfig
from rocktokens.config.knockout import BaselineConfig, KnockoutConfig, SetKind
from rocktokens.config.pair import Device, Dtype, PairConfig
from rocktokens.config.prompts import PromptsConfig
from rocktokens.config.sample import RolloutConfig
from rocktokens.config.score import ScoreConfig
from rocktokens.config.selector import SELECTOR_OPTIONS, SelectorConfig
from rocktokens.config.servers import ServersConfig, Wire

__all__ = [
    "SELECTOR_OPTIONS",
    "AlarmConfig",
    "BaselineConfig",
    "BypassConfig",
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
    "ServersConfig",
    "SetKind",
    "Signal",
    "VllmConfig",
    "Wire",
    "require",
]
