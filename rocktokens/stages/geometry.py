"""The stage `geometry`: which way the token types' gradients point. Reads what `score` gathered; loads no model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.config import GeometryConfig
from rocktokens.config.base import to_mapping
from rocktokens.errors import ConfigError
from rocktokens.report.terminal.geometry import show
from rocktokens.runs.store import Run, open_run

log = logging.getLogger(__name__)


def geometry(path: Path, config: GeometryConfig, *, again: bool = False) -> Run:
    """Which way the token types' gradients point and how much they pull, from what scoring gathered."""
    from safetensors.torch import load_file

    from rocktokens.core.geometry import GradientGeometry, compare_groups

    run = open_run(path)
    same = run.manifest["config"].get("geometry") == to_mapping(config)
    if run.done("geometry") and same and run.rests_on("geometry", "detect") and not again:
        log.info("%s: geometry is there; nothing to do", path)
        return run
    groups = {name: np.array(ids, dtype=np.int64) for name, ids in run.facts("detect")["groups"].items()}
    gathered = run.path / "gradients.safetensors"
    if not gathered.exists():
        raise ConfigError(f"{path} holds no gradients; score it again: `rocktokens score {path} --again`")
    result = GradientGeometry.restore(load_file(gathered), config).result()
    comparisons = compare_groups(result, groups)
    run.write("geometry", result.table(groups))
    run.manifest["config"]["geometry"] = to_mapping(config)
    rock_N = np.isin(result.token_id_T, groups["rocks"])
    run.finish(
        "geometry",
        {
            "sketched": result.sketched,
            "pooled_types": result.num_pooled_types,
            "rock_grad_share": float(result.grad_share_T[rock_N].sum()),
            "rock_position_share": float(result.position_share_T[rock_N].sum()),
            "comparisons": [row._asdict() for row in comparisons],
            "mark_detect": run.mark("detect"),
            **_optimiser(run, groups["rocks"]),
        },
    )
    show(comparisons, run.facts("geometry"))
    return run


def _optimiser(run: Run, rocks: np.ndarray) -> dict[str, Any]:
    """Does Adam shrink the rocks' step: their share of the output head's gradient, and of its update."""
    if not run.has("updates"):
        return {}
    table = run.read("updates")
    rock_T = np.isin(table["token_id"].to_numpy(), rocks)
    return {
        "optimiser": {
            "grad_share": float(table["grad_share"].to_numpy()[rock_T].sum()),
            "update_share": float(table["update_share"].to_numpy()[rock_T].sum()),
            "tied": bool(table["tied"].to_numpy(zero_copy_only=False).any()),
        }
    }
