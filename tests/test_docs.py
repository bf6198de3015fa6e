"""The documents agree with the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_layers import FLOORS

from pipeline.cli import parser
from pipeline.settings import PREFIX, PUBLIC, page

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = (ROOT / "samples").rglob("README.md")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *SAMPLES])
# These tell what was: names stay in them that the code has no more.
HISTORY = {"CHANGELOG.md", "LOG.md"}
PRESENT = [path for path in DOCUMENTS if path.name not in HISTORY]
# A path in a document begins at the root, in the package, at the Lua scripts, or beside the document.
ROOTS = (ROOT, ROOT / "pipeline", ROOT / "pipeline" / "redis" / "lua", ROOT / "docs")
PATH = re.compile(r"(?:[\w.-]+/)*[\w.-]+(?:/|\.(?:py|lua|toml|yml|md|svg|ndjson|sh))")
CODE = re.compile(r"`([^`\n]+)`")


def spans(path: Path) -> set[str]:
    """Code spans of a document, those in fenced blocks left out."""
    return set(CODE.findall(re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)))


def test_the_settings_page_lists_the_settings_as_they_are() -> None:
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == page(), (
        "run: python -c 'from pipeline.settings import page; print(page(), end=\"\")' > docs/settings.md"
    )


@pytest.mark.long
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    """As scripts/docs does it: Sphinx resolves each link and anchor between pages, and imports what the API
    page names."""
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees", "docs", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-4000:]
    for name in ("index", "reference/commands", "reference/metrics", "api"):
        assert (tmp_path / f"{name}.html").exists()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        made_by_the_build = target.startswith("reference/")  # the build resolves these
        if "://" not in target and not made_by_the_build:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", PRESENT, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_path_that_a_document_names_exists(path: Path) -> None:
    named = {span for span in spans(path) if PATH.fullmatch(span)}
    lost = {name for name in named if not any((root / name).exists() for root in (*ROOTS, path.parent))}
    made_by_a_run = {"report.html", "docs/reference/", "docs/_build/html/"}
    assert lost <= made_by_a_run


@pytest.mark.parametrize("path", PRESENT, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_setting_that_a_document_names_exists(path: Path) -> None:
    names = set(PUBLIC)
    variables = set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", path.read_text(encoding="utf-8")))
    assert {name.removeprefix(PREFIX).lower() for name in variables} <= names | {"config"}
    # Endings that only settings have: a name with one of them is a setting, or the document is wrong.
    unit = re.compile(r"[a-z]+(_[a-z]+)*_(s|ms|mib|kib|processes|shards|threads)")
    others = {
        "ttl_ms",
        "retry_after_s",
        "yield_by_ms",
        "timeout_s",
        "max_duration_s",
        "memory_mib",
        "arrival_s",
        "duration_s",
        "lines_per_s",
    }
    assert {span for span in spans(path) if unit.fullmatch(span)} <= names | others


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Every word of the code, its tests, scripts and configuration."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours = re.compile(
        r"(pipeline|bench|tests|config|deploy|scripts|examples)/|samples/labels\.json|[^/]+\.(toml|yml)"
    )
    files = [ROOT / name for name in listed.splitlines() if ours.match(name)]
    found = {path.stem for path in files}
    for path in files:
        if path.is_file():
            found |= set(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace")))
    return found | set(PUBLIC)


@pytest.mark.parametrize("path", PRESENT, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_identifier_that_a_document_names_occurs_in_the_code(path: Path, words: set[str]) -> None:
    named = {word for span in spans(path) for word in re.findall(r"\w*[A-Za-z]_\w+", span)}
    named -= {"android_level", "bgl_level", "hadoop_level", "zookeeper_level"}  # put together by the bench
    named -= {"tensorflow_model_server", "model_base_path"}  # of TensorFlow Serving, in an example
    assert {word for word in named if not word.startswith(PREFIX)} <= words


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_name_only_verbs_that_exist(path: Path) -> None:
    verbs = set(parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type]
    used = set(re.findall(r"`logweir ([a-z]+)\b", path.read_text(encoding="utf-8")))
    used |= set(re.findall(r"^logweir ([a-z]+)\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert used <= verbs


def test_the_architecture_draws_every_floor_and_lists_every_room() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawing = re.findall(r"```\n(.*?)```", text, flags=re.DOTALL)[0]
    floors = re.split(r"\n +\d+ {2,}", drawing)[1:]  # the first part is the heading
    assert len(floors) == len(FLOORS)
    for drawn, rooms in zip(floors, FLOORS, strict=True):
        columns = " ".join(re.split(r" {3,}", line.strip())[0] for line in drawn.splitlines())
        assert set(columns.split()) == set(rooms)
    layout = text.partition("## 5. Layout")[2].partition("## 6.")[0]
    listed = {span.rstrip("/") for span in CODE.findall(layout)}
    assert {room for floor in FLOORS for room in floor} <= listed
