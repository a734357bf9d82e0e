"""House rules that a machine can check: imports point down, no cycles, the budget of lines, a light start."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rocktokens"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Rooms from the bottom up: a module may import what stands before its own room in this list, or in it.
ORDER = [
    "errors",
    "values",
    "settings",
    "progress",
    "stats",
    "show",
    "tables",
    "run",
    "stage",
    "jobs",
    "world",
    "divergence",
    "models",
    "prompts",
    "sample",
    "servers",
    "score",
    "geometry",
    "detect",
    "causal",
    "bypass",
    "select",
    "train",
    "compare",
    "report",
    "interop",
    "check",
    "study",
    "cli",
]


def name_of(path: Path) -> str:
    """Dotted name below the package: divergence.fused, cli, world."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Our own modules that a module imports anywhere in it, inside functions too, but for the type checker's sake."""
    tree = ast.parse(path.read_text())
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    names = {name_of(module) for module in MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in (name.removeprefix("rocktokens.") for name in found if name.startswith("rocktokens.")):
            yield name if name in names else name.rpartition(".")[0]


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle in order; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        found = next((cycle for other in sorted(graph[module]) if (cycle := visit(other, [*path, module]))), [])
        done.add(module)
        return found

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])


def test_no_module_imports_itself_by_way_of_others():
    names = {name_of(path): path for path in MODULES if name_of(path)}
    graph = {name: {other for other in imports_of(path) if other in names} - {name} for name, path in names.items()}
    assert not cycle_in(graph)
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})


@pytest.mark.parametrize("module", ["rocktokens", "rocktokens.errors", "rocktokens.world"])
def test_light_modules_load_no_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
