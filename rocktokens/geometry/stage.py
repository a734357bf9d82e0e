"""The stage `geometry`: which way the token types' gradients point. Reads what `score` gathered; loads no model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.progress import console
from rocktokens.run import Run, open_run, reading, working_on
from rocktokens.show import Column, Table, p_value, percent, significant
from rocktokens.stage import Stage, inputs_of
from rocktokens.values import Json


def geometry(path: Path, *, again: bool = False) -> Run:
    """Which way the token types' gradients point and how much they pull, from what scoring gathered."""
    from rocktokens.geometry.gradients import GradientGeometry, compare_groups

    with working_on(path):
        run = open_run(path)
        inputs = inputs_of(run, files=("gradients.safetensors",), stages=("detect",))
        stage = Stage(run, "geometry", {}, inputs)
        if not stage.due(again):
            return run
        with reading(path / "run.json", f"run `rocktokens detect {path} --again`"):
            groups = {name: np.array(ids, dtype=np.int64) for name, ids in run.facts("detect")["groups"].items()}
            rocks = groups["rocks"]
        gathered = run.path / "gradients.safetensors"
        if not gathered.exists():
            raise ConfigError(f"{path} holds no gradients; score it again: `rocktokens score {path} --again`")
        with reading(gathered, f"score it again: `rocktokens score {path} --again`"):
            result = GradientGeometry.restore(run.read_tensors("gradients")).result()
        comparisons = [row._asdict() for row in compare_groups(result, groups)]
        rock_T = np.isin(result.token_id_T, rocks)
        facts: Json = {
            "sketched": result.sketched,
            "pooled_types": result.num_pooled_types,
            "rock_grad_share": float(result.grad_share_T[rock_T].sum()),
            "rock_position_share": float(result.position_share_T[rock_T].sum()),
            "comparisons": comparisons,
        }
        stage.publish({"geometry": result.table(groups)}, facts)
        columns = (
            Column("measure", "metric"),
            Column("groups", "groups"),
            Column("median", "median_first", significant),
            Column("median", "median_second", significant),
            Column("larger", "share_larger", percent, {"digits": 0}),
            Column("", "p_value", p_value),
        )
        rows = [{**row, "groups": f"{row['first']} / {row['second']}"} for row in comparisons]
        held = (
            f"Rocks hold {percent(facts['rock_grad_share'])} of the gradient norm on "
            f"{percent(facts['rock_position_share'])} of the positions."
        )
        title = "Gradients of the groups of token types (Mann–Whitney)"
        console().print(Table(columns, rows, title=title, caption=[held]))
        return run
