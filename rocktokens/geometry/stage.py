"""The stage `geometry`: which way the token types' gradients point. Reads what `score` gathered; loads no model."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.files import reading
from rocktokens.geometry.settings import GeometryConfig
from rocktokens.geometry.terminal import show
from rocktokens.lock import working_on
from rocktokens.run import Run, open_run
from rocktokens.stage import Stage, inputs_of

log = logging.getLogger(__name__)


def geometry(path: Path, config: GeometryConfig, *, again: bool = False) -> Run:
    """Which way the token types' gradients point and how much they pull, from what scoring gathered."""
    with working_on(path):
        run = open_run(path)
        inputs = inputs_of(run, files=("gradients.safetensors", "updates.parquet"), stages=("detect",))
        stage = Stage(run, "geometry", {"geometry": config}, inputs)
        if stage.due(again):
            _geometry(stage, config)
        return run


def _geometry(stage: Stage, config: GeometryConfig) -> None:
    from rocktokens.geometry.gradients import GradientGeometry, compare_groups

    run, path = stage.run, stage.run.path
    with reading(path / "run.json", f"run `rocktokens detect {path} --again`"):
        groups = {name: np.array(ids, dtype=np.int64) for name, ids in run.facts("detect")["groups"].items()}
        rocks = groups["rocks"]
    gathered = run.path / "gradients.safetensors"
    if not gathered.exists():
        raise ConfigError(f"{path} holds no gradients; score it again: `rocktokens score {path} --again`")
    with reading(gathered, f"score it again: `rocktokens score {path} --again`"):
        result = GradientGeometry.restore(run.read_tensors("gradients"), config).result()
    comparisons = compare_groups(result, groups)
    rock_N = np.isin(result.token_id_T, rocks)
    stage.publish(
        {"geometry": result.table(groups)},
        {
            "sketched": result.sketched,
            "pooled_types": result.num_pooled_types,
            "rock_grad_share": float(result.grad_share_T[rock_N].sum()),
            "rock_position_share": float(result.position_share_T[rock_N].sum()),
            "comparisons": [row._asdict() for row in comparisons],
            **_optimiser(run, rocks),
        },
    )
    show(comparisons, run.facts("geometry"))


def _optimiser(run: Run, rocks: np.ndarray) -> dict[str, object]:
    """Does Adam shrink the rocks' step: their share of the output head's gradient, and of its update."""
    if not run.has("updates"):
        return {}
    table = run.read("updates")
    with reading(run.path / "updates.parquet", f"run `rocktokens distill {run.path} --again`, or remove it"):
        rock_T = np.isin(table["token_id"].to_numpy(), rocks)
        found = {
            "grad_share": float(table["grad_share"].to_numpy()[rock_T].sum()),
            "update_share": float(table["update_share"].to_numpy()[rock_T].sum()),
            "tied": bool(table["tied"].to_numpy(zero_copy_only=False).any()),
        }
    return {"optimiser": found}
