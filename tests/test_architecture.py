"""House rules that a machine can check: who may import whom, how long things get, what loads before --help."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rocktokens"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Layer → what it may import of ours. DESIGN.md: core ← lm ← stages ← commands ← cli; runs ← stages.
LIGHT = ("config", "errors", "progress")
BELOW_STAGES = (*LIGHT, "core", "lm", "engines", "interop", "runs", "world", "report", "smollm2", "recipes")
MAY_IMPORT = {
    "errors": (),
    "values": (),
    "progress": ("errors",),
    "config": ("config", "errors", "world"),
    "core": ("core", "config", "errors"),
    "runs": ("runs", "config", "errors"),
    "world": ("world", "core", *LIGHT),
    "lm": ("lm", "core", "world", "runs.schema", "runs.ranks", *LIGHT),
    "engines": ("engines", "lm", "core", "runs.ranks", *LIGHT),
    "interop": ("interop", "runs", "core", *LIGHT),
    "report": ("report", "runs", "core", "config", "errors", "progress"),
    "smollm2": ("smollm2", "lm", "core", "runs", "world", *LIGHT),
    "everyday": (),
    "recipes": ("smollm2", "world", "config", "errors"),
    "stages": ("stages", *BELOW_STAGES),
    "commands_interop": ("stages", *BELOW_STAGES),
    "commands": ("commands_interop", "stages", *BELOW_STAGES),
    "cli": ("commands", "everyday", "stages", *BELOW_STAGES),
}


def name_of(path: Path) -> str:
    """Dotted name below the package: core.divergence, cli, world."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, for_types: bool = True) -> Iterator[str]:
    """Our own modules that a module imports anywhere in it, inside functions too, as dotted names below the package.

    `for_types`: also what is imported for the type checker alone.
    """
    package = ["rocktokens", *path.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(path.read_text())
    if not for_types:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("rocktokens.") for name in names if name.startswith("rocktokens."))


def allowed(importer: str, imported: str) -> bool:
    room = importer.split(".")[0]
    if imported.split(".")[0] == "cli":
        return room == "__main__"
    if imported.startswith(("__version__", "values.")):
        return True
    return any(imported == name or imported.startswith(f"{name}.") for name in MAY_IMPORT[room])


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path):
    wrong = [name for name in imports_of(path) if name_of(path) != "" and not allowed(name_of(path), name)]
    assert not wrong, f"{name_of(path)} may import {MAY_IMPORT[name_of(path).split('.')[0]]}, but imports {wrong}"


def test_the_import_rule_sees_what_it_forbids(tmp_path):
    assert not allowed("core.divergence", "lm.pair.Pair")
    assert not allowed("report.build", "lm.pair.load_pair")
    assert allowed("report.build", "core.stats.Estimate")
    assert not allowed("stages.sample", "cli.main")
    assert allowed("stages.sample", "runs.store.Run")


def test_every_module_is_in_the_table():
    rooms = {name_of(path).split(".")[0] for path in MODULES} - {""}
    assert rooms <= set(MAY_IMPORT), "tests/test_architecture.py must say what every module may import"


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
    """Imports inside functions count; the public names of the package load on use, and import no name here."""
    names = {name_of(path): path for path in MODULES if name_of(path)}
    graph = {
        name: {
            module
            for found in imports_of(path, for_types=False)
            if (module := module_of(found, names)) and module != name
        }
        for name, path in names.items()
    }
    assert not cycle_in(graph)


def module_of(imported: str, names: dict[str, Path]) -> str | None:
    """The module that an imported name lies in: `core.stats` for `core.stats.Estimate`."""
    return next((name for name in (imported, imported.rpartition(".")[0]) if name in names), None)


def test_the_cycle_finder_finds_one():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def packages_of(path: Path) -> set[str]:
    """Top-level packages that a module imports anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in names}


def test_terminal_figures_and_flags_have_their_places():
    """rich draws in report/terminal and progress.py, plotly in report, tyro reads flags in cli.py; core knows none."""
    places = {"rich": ("report.terminal", "progress"), "plotly": ("report",), "tyro": ("cli", "commands", "config")}
    wrong = [
        f"{name_of(path)} imports {package}"
        for path in MODULES
        for package in packages_of(path) & places.keys()
        if not name_of(path).startswith(places[package])
    ]
    assert not wrong


# Words that are data: the discourse markers of a cluster; and halves of messages that are raised by a shared function.
NO_PROSE_BUT = {"core.detection.clusters", "core.selection.basic", "core.selection.selectors"}


def prose_of(path: Path, *, words: int = 5) -> list[str]:
    """Strings of a module that read as sentences, apart from docstrings and from what is raised."""
    tree = ast.parse(path.read_text())
    aside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            aside |= {id(inner) for inner in ast.walk(node)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            aside.add(id(node.value))
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in aside
    ]
    return [text for text in texts if len(re.findall(r"[a-z]+[ ,.:;]", text)) >= words]


@pytest.mark.parametrize("path", [path for path in MODULES if name_of(path).startswith("core")], ids=name_of)
def test_core_writes_no_prose(path):
    assert name_of(path) in NO_PROSE_BUT or not prose_of(path), "the words belong into report/conclusions"


def test_the_prose_finder_finds_prose(tmp_path):
    (tmp_path / "one.py").write_text("""
'''A docstring may say whatever it wants to say about this module.'''
note = f"only {3} prompts were measured and the intervals are therefore too short"
raise ValueError("this is a message of an error that somebody reads")
""")
    assert len(prose_of(tmp_path / "one.py")) == 1


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= limit(node), f"{node.name} has {length} lines"


def limit(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """60 lines of code; the signature and the docstring do not count."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return 60 + (first.end_lineno if is_docstring else first.lineno - 1) - function.lineno + 1


# `Any` stands where objects come from other people's code: TRL, transformers, pyarrow, argparse. It may only fall.
MOST_ANY = 250
MOST_ARGUMENTS = 12
# Public functions whose keyword arguments other people's code names: they stay as they are.
MORE_ARGUMENTS = {
    "lm.training.trainer.__init__": 27,
    "core.divergence.fused_divergence": 19,
    "lm.causal.graft.graft": 13,
}


def test_any_is_for_other_peoples_objects():
    names = [node for path in MODULES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)]
    assert sum(node.id == "Any" for node in names) <= MOST_ANY


def test_what_travels_together_is_one_argument():
    wrong = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                most = MORE_ARGUMENTS.get(f"{name_of(path)}.{node.name}", MOST_ARGUMENTS)
                wrong += [f"{name_of(path)}.{node.name} takes {count} arguments"] if count > most else []
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_references_to_the_method_point_to_sections_that_exist():
    """`docs/method.md §3` is a numbered heading of that page; the page itself is the only name for the method."""
    root = PACKAGE.parent
    sections = set(re.findall(r"^## (\d+)\.", (root / "docs" / "method.md").read_text(), re.M))
    texts = {path: path.read_text() for path in (*MODULES, *root.glob("tests/**/*.py"), *root.glob("docs/*.md"))}
    named = {number for text in texts.values() for number in re.findall(r"docs/method\.md §(\d+)", text)}
    assert named
    assert named <= sections
    other = re.compile(r"METHOD(?:\.md)? ?§|METHOD's")
    assert not [str(path) for path, text in texts.items() if path != Path(__file__) and other.search(text)]


def loaded_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after this code."""
    code = f"import sys\n{code}\nprint('loaded:' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("loaded:")[2].split())


HEAVY = {"torch", "transformers", "trl", "scipy", "pyarrow", "duckdb", "plotly", "pandas"}


@pytest.mark.parametrize("module", ["rocktokens", "rocktokens.config", "rocktokens.errors", "rocktokens.world"])
def test_light_modules_load_nothing_heavy(module):
    assert not HEAVY & loaded_after(f"import {module}")


@pytest.mark.parametrize("room", ["core.detection.detect", "core.stats", "runs.store", "report"])
def test_detection_store_and_report_load_no_model_library(room):
    assert not {"transformers", "trl"} & loaded_after(f"import rocktokens.{room}")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["stdy"]], ids=str)
def test_help_version_and_mistakes_load_nothing_heavy(arguments):
    code = f"from rocktokens.cli import main\ntry: main({arguments})\nexcept SystemExit: pass"
    assert not HEAVY & loaded_after(code)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_answer_at_once(flag):
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "rocktokens.cli", flag], capture_output=True, check=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.5  # processor time, the quickest of five: what the program costs, not what else runs here
