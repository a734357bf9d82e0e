"""The documentation is true: every public name imports, every snippet runs, every link and path exists.

A fenced block is a snippet if its language is python, sh or bash. It runs as it stands, in a directory with a finished
small run at `runs/arithmetic`. HTML comments right above a block say otherwise:

    <!-- snippet: not run: REASON -->      cannot run here
    <!-- snippet: small -->                takes minutes: runs with small settings, and only with -m slow
    <!-- snippet: file NAME -->            the block is the content of a file that later snippets use
    <!-- snippet: setup                    Python that runs before, for names the text takes for granted
    CODE
    -->
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from story import SETTINGS

import rocktokens
from rocktokens import cli
from rocktokens.world import get_world

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"((?:<!-- snippet:.*?-->\n+)*)```([a-z]*)\n(.*?)```", re.DOTALL)
MARKER = re.compile(r"<!-- snippet: (\S+(?: run:)?)\s*(.*?)\s*-->", re.DOTALL)
SHELL, PYTHON = ("sh", "bash"), ("python",)
PUBLIC = (
    *("fused_divergence", "RockDistillationTrainer", "Selector", "make_selector", "TokenMonitor", "Run", "open_run"),
    *("detect_rocks", "knockout_census", "graft"),
)
QUICK = {
    "knockout": "--again --baseline.problems 20 --knockout.resamples 200 --knockout.rounds 1 --knockout.top 3",
    "graft": "--again --baseline.problems 20 --graft.problems 10 --graft.resamples 100",
    "compare": "--again --compare.seeds 1 --compare.steps 2 --compare.evaluations 1 --compare.problems 8 "
    "--compare.rollouts 1 --compare.contexts 20 --compare.resamples 100",
    "distill": "--distill.steps 2 --distill.prompts-per-step 4 --problems 4",
    "detect": "--again --detect.resamples 100",
    "sample": "--rollouts.num-rollouts 1 --prompts.limit 8",
}
SLOW = ("study", "distill", "compare")


class Snippet(NamedTuple):
    """One fenced block with what the comments above it say."""

    page: Path
    language: str
    text: str
    markers: dict[str, str]

    @property
    def name(self) -> str:
        """For a test's name: page and first line."""
        return f"{self.page.relative_to(ROOT)}: {self.text.strip().splitlines()[0][:50]}"


def snippets(page: Path) -> list[Snippet]:
    """All blocks of a page in order."""
    found = []
    for above, language, text in BLOCK.findall(page.read_text()):
        found.append(Snippet(page, language, text, dict(MARKER.findall(above))))
    return found


def commands(snippet: Snippet) -> Iterator[list[str]]:
    """The `rocktokens` commands of a shell block as words; anything else must be marked as not run."""
    for line in snippet.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" > ")[0], comments=True)
        if words:
            assert words[0].split("/")[-1] == "rocktokens", f"mark this line with <!-- snippet: not run: … -->: {line}"
            yield words[3:] if words[1] == "--workers" else words[1:]


def filled(word: str) -> str:
    """A placeholder of the text as what stands for it here."""
    world = get_world("arithmetic")
    known = {"STUDENT": str(world.student_path), "TEACHER": str(world.teacher_path), "RUN": "runs/arithmetic"}
    return known.get(word, word)


ALL = [snippet for page in PAGES for snippet in snippets(page)]
RUNS = [snippet for snippet in ALL if "not run:" not in snippet.markers]


@pytest.fixture
def here(story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a finished run, prompts of one's own, and the files that pages show."""
    shutil.copytree(story.run.path, tmp_path / "runs" / "arithmetic")
    rows = [{"prompt": p.prompt, "answer": p.answer} for p in get_world("arithmetic").problems("train", 60, seed=3)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for snippet in ALL:
        if "file" in snippet.markers:
            (tmp_path / snippet.markers["file"]).write_text(snippet.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROCKTOKENS_BROWSER", "")
    return tmp_path


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_import_from_the_package(name):
    assert getattr(rocktokens, name) is not None
    assert name in rocktokens.__all__
    assert name in dir(rocktokens)


@pytest.mark.parametrize("snippet", [s for s in RUNS if s.language in PYTHON], ids=lambda s: s.name)
def test_python_snippets_run(snippet, here):
    names: dict[str, object] = {}
    exec(compile(snippet.markers.get("setup", ""), "setup", "exec"), names)
    exec(compile(snippet.text, str(snippet.page), "exec"), names)


@pytest.mark.parametrize("snippet", [s for s in RUNS if s.language in SHELL], ids=lambda s: s.name)
def test_shell_snippets_name_commands_and_flags_that_exist(snippet):
    for words in commands(snippet):
        if words[0] == "study" and len(words) > 1 and words[1].endswith(".yaml"):
            continue  # the file is there when the snippet runs
        cli.parse([filled(word) for word in words])


def execute(snippet: Snippet) -> None:
    """Run every command of a block in this process with small settings."""
    for words in commands(snippet):
        name, rest = words[0], [filled(word) for word in words[1:]]
        extra = SETTINGS if name == "study" else shlex.split(QUICK.get(name, ""))
        with pytest.raises(SystemExit) as stop:
            cli.main([name, *rest, *extra])
        assert stop.value.code == 0, words


def trains(snippet: Snippet) -> bool:
    """Whether a block takes minutes."""
    return "small" in snippet.markers or any(words[0] in SLOW for words in commands(snippet))


@pytest.mark.parametrize("snippet", [s for s in RUNS if s.language in SHELL and not trains(s)], ids=lambda s: s.name)
def test_shell_snippets_run(snippet, here):
    execute(snippet)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [s for s in RUNS if s.language in SHELL and trains(s)], ids=lambda s: s.name)
def test_shell_snippets_that_train_run(snippet, here):
    execute(snippet)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    for own, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]*)\)", text):
        if not own.startswith("http") and (own.endswith(".md") or not own):
            other = (page.parent / own if own else page).read_text()
            heads = [re.sub(r"[^\w\- ]", "", head.lower()) for head in re.findall(r"^#+ (.*)$", other, re.M)]
            assert anchor in {head.strip().replace(" ", "-") for head in heads}, f"{page.name}: {own}#{anchor}"


def test_the_tree_names_every_room_and_the_walk_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tree, walk = page.split("## The rule of the tree")[1].split("```")[1], page.split("## A walk")[1].split("\n## ")[0]
    rooms = {folder.parent.name + "/" for folder in (ROOT / "rocktokens").glob("*/__init__.py")}
    named = set(re.findall(r"[├└]── ([\w]+(?:\.py|/))", tree))
    assert rooms <= named
    files = re.findall(r"^\d+\. `(rocktokens/[\w/]+\.py)`", walk, re.M)
    assert 8 <= len(files) == len(set(files)) <= 12
    assert all((ROOT / file).exists() for file in [*files, *(f"rocktokens/{name}" for name in named)])


def test_generated_pages_are_those_of_the_code():
    for page, text in runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["pages"]().items():
        assert page.read_text() == text, f"{page.name}: run make docs"


def test_the_site_shows_every_page():
    shown = set(re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert shown == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_versions_agree():
    patterns = {"pyproject.toml": r'^version = "(.*)"', "CITATION.cff": r"^version: (.*)", "CHANGELOG.md": r"^## (\S+)"}
    for file, pattern in patterns.items():
        assert re.search(pattern, (ROOT / file).read_text(), re.M)[1] == rocktokens.__version__, file
