"""Our wheel, built from what is committed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*words: str | Path, cwd: Path) -> str:
    """The output of a command that must succeed; it sees what is installed, and not the checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=cwd, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


def build(home: Path) -> Path:
    """The wheel, in `home`."""
    run("git", "clone", "--quiet", ROOT, home / "source", cwd=home)
    run(*PIP, "wheel", "--no-deps", "--wheel-dir", home / "dist", home / "source", cwd=home)
    (wheel,) = (home / "dist").glob("rocktokens-*.whl")
    return wheel
