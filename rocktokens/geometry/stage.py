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
    from rocktokens.geometry.gradients import compare_groups, gathered

    with working_on(path):
        run = open_run(path)
        inputs = inputs_of(run, files=("gradients.safetensors",), stages=("detect",))
        stage = Stage(run, "geometry", {}, inputs)
        if not stage.due(again):
            return run
        with reading(path / "run.json", f"run `rocktokens detect {path} --again`"):
            groups = {name: np.array(ids, dtype=np.int64) for name, ids in run.facts("detect")["groups"].items()}
        file = run.path / "gradients.safetensors"
        if not file.exists():
            raise ConfigError(f"{path} holds no gradients; score it again: `rocktokens score {path} --again`")
        run.verify(file)
        with reading(file, f"score it again: `rocktokens score {path} --again`"):
            gradients = gathered([file])
            table = gradients.table(groups)
        rocks = table.filter(np.array(table["group"].to_pylist()) == "rocks")
        held = {name: float(np.sum(rocks[name].to_numpy())) for name in ("grad_share", "position_share")}
        comparisons = compare_groups(table)
        facts: Json = {"sketched": gradients.sketched, "comparisons": comparisons}
        stage.publish({"geometry": table}, facts | {f"rock_{name}": share for name, share in held.items()})
        columns = (
            Column("measure", "metric"),
            Column("groups", "groups"),
            Column("median", "median_first", significant),
            Column("median", "median_second", significant),
            Column("larger", "share_larger", percent, {"digits": 0}),
            Column("", "p_value", p_value),
        )
        rows = [{**row, "groups": f"{row['first']} / {row['second']}"} for row in comparisons]
        said = (
            f"Rocks hold {percent(held['grad_share'])} of the gradient norm on {percent(held['position_share'])} of "
            "the positions."
        )
        title = "Gradients of the groups of token types (Mann–Whitney)"
        console().print(Table(columns, rows, title=title, caption=[said]))
        return run
