"""The wheel holds everything the program needs, and works outside of the checkout."""

from __future__ import annotations

import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from wheels import PIP, build, run

CARRIED = (
    *("rocktokens/py.typed", "rocktokens/report/report.html", "rocktokens/report/report.css"),
    *("rocktokens/report/charts.js", "rocktokens/report/viewer.js"),
    *("rocktokens/interop/ms_swift.py.in", "rocktokens/interop/slime.py.in"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel, and a fresh environment with it; its dependencies are those of this environment."""
    home = tmp_path_factory.mktemp("wheel")
    wheel = build(home)
    venv.create(home / "env", with_pip=False)
    python = home / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=home).strip())
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return wheel, home / "env" / "bin"


@pytest.mark.slow
def test_the_wheel_carries_models_pages_and_types(installed):
    names = set(zipfile.ZipFile(installed[0]).namelist())
    assert not [name for name in CARRIED if name not in names]
    for world in ("arithmetic", "market", "cornerstone"):
        for who in ("student", "teacher"):
            assert any(n.endswith("model.safetensors") and world in n and who in n for n in names), (world, who)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


@pytest.mark.slow
def test_the_installed_program_runs_outside_of_the_checkout(installed, tmp_path):
    import rocktokens

    bin_ = installed[1]
    where = run(bin_ / "python", "-c", "import rocktokens; print(rocktokens.__file__)", cwd=tmp_path)
    assert str(bin_.parent) in where
    assert rocktokens.__version__ in run(bin_ / "rocktokens", "--version", cwd=tmp_path)
    assert "no fault" in run(bin_ / "rocktokens", "check", cwd=tmp_path)
    flags = ["--rollouts.num-rollouts", "1", "--prompts.limit", "8", "--rollouts.max-new-tokens", "40"]
    run(bin_ / "rocktokens", "sample", "run", *flags, cwd=tmp_path)
    run(bin_ / "rocktokens", "score", "run", cwd=tmp_path)
    run(bin_ / "rocktokens", "detect", "run", "--resamples", "100", cwd=tmp_path)
    run(bin_ / "rocktokens", "report", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000
