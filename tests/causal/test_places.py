"""Knock-outs and grafts make the same run in every place, bit for bit, and no piece is done twice."""

from __future__ import annotations

import shutil

import pytest
from causal_runs import make_tiny_run

from rocktokens.causal import baseline as pieces
from rocktokens.causal import graft, knockout
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.errors import DataError
from rocktokens.jobs import Place, keeping_workers
from rocktokens.run import open_run
from rocktokens.settings import granting

BASE = BaselineConfig(problems=40, max_new_tokens=12, batch_size=32)
KNOCKOUT = KnockoutConfig(candidates=("+", "7"), resamples=200)
GRAFT = GraftConfig(rocks=("7", "+"), problems=40, resamples=200)
TABLES = ("baseline", "knockouts", "census", "grafts", "graft_rollouts")


def both(path, place):
    """Both stages; what they wrote."""
    knockout.knockout(path, KNOCKOUT, BASE, place=place)
    run = graft.run_graft(path, GRAFT, BASE, place=place)
    assert not list(path.glob("*.parts"))
    return {name: (run.path / f"{name}.parquet").read_bytes() for name in TABLES}


@pytest.fixture
def tiny_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "CHUNK", 32)
    with granting("code"):
        yield make_tiny_run(tmp_path)


def test_two_workers_make_the_run_that_one_process_makes(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "two")
    with keeping_workers():
        assert both(tmp_path / "two", Place(workers=2)) == both(tiny_run, Place())


@pytest.mark.parametrize("stop", [1, 5])
def test_a_stopped_stage_continues_with_the_missing_parts(tiny_run, tmp_path, monkeypatch, stop):
    shutil.copytree(tiny_run, tmp_path / "stopped")
    expected, done, own, left = both(tiny_run, Place()), [], pieces.do_piece, [stop]

    def stopping(part, **given):
        if left and len(done) == left[0]:
            left.clear()
            raise DataError("stopped")
        own(part, **given)
        done.append(part.name)

    monkeypatch.setattr(pieces, "do_piece", stopping)
    with pytest.raises(DataError, match="stopped"):
        both(tmp_path / "stopped", Place())
    assert not open_run(tmp_path / "stopped").done("knockout")
    assert both(tmp_path / "stopped", Place()) == expected
    assert len(done) == len(set(done))
