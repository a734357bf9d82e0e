"""Seeds of one comparison that were trained apart: put together only where nothing but the seed differs."""

import json
import math

import pytest
from pair_seeds import combine, page, read


def written(path, seed, accuracy, **compare):
    own = {"seeds": 1, "first_seed": seed, "steps": 6, **compare}
    settings = {"compare": own, "prompts": {}, "distill": {"seed": 0, "keep": seed}}
    regimes = [{"regime": "uniform", "accuracy": 0.5}, {"regime": "small", "accuracy": accuracy}]
    path.write_text(json.dumps({"settings": settings, "results": {"regimes": regimes}}))
    return path


def test_the_interval_is_students_over_seeds(tmp_path):
    files = [written(tmp_path / f"{seed}.json", seed, 0.5 + change) for seed, change in enumerate((-0.02, 0.0, 0.05))]
    (row,) = combine(read(files))
    assert (row["regime"], row["measure"], row["mean"]) == ("small", "accuracy", pytest.approx(0.01))
    spread = math.sqrt(((-0.03) ** 2 + (-0.01) ** 2 + 0.04**2) / 2 / 3)
    assert row["interval"] == pytest.approx([0.01 - 4.302653 * spread, 0.01 + 4.302653 * spread])
    (few,) = combine(read(files[:2]))
    assert "interval" not in few
    assert "too few for an interval" in page([few])


def test_another_comparison_is_refused(tmp_path):
    first = written(tmp_path / "a.json", 0, 0.5, learning_rate=1e-6)
    with pytest.raises(SystemExit, match="differs in learning_rate"):
        read([first, written(tmp_path / "b.json", 1, 0.5, learning_rate=3e-6)])
    with pytest.raises(SystemExit, match="one seed per file"):
        read([first, written(tmp_path / "c.json", 0, 0.5, learning_rate=1e-6)])
    read([first, written(tmp_path / "d.json", 1, 0.5, learning_rate=1e-6, regimes=["uniform"])])
