"""Each module imports only from modules above it in the order of docs/ARCHITECTURE.md §5."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Top to bottom. A package stands for all its modules; modules of one entry may import each other.
ORDER = [
    "errors", "words", "arrow", "columns", "records", "onsets", "incident_values", "incidents", "query", "values", "shards", "settings", "observe", "keyspace", "metrics", "batches", "holding", "ledger", "marks", "mark_store", "models", "drain", "gpu", "presence",
    "registry", "routing", "opensearch", "sources", "results", "sinks", "findings", "report", "controller", "detect",
    "session_keys", "sampling", "session_sampling", "judging", "training", "watching", "app", "tasks", "producer", "workers", "journey", "run", "commands", "cli",
]  # fmt: skip
# Heavy packages and the only places that may import them at module level or inside functions.
HOMES = {
    "torch": {"models"},
    "transformers": {"models"},
    "drain3": {"drain"},
    "pynvml": {"gpu"},
    "opensearchpy": {"opensearch"},
    "celery": {"app", "tasks", "workers"},
    "kombu": {"app", "tasks", "workers"},
}
FILES = sorted((ROOT / "pipeline").rglob("*.py"))


def layer(path: Path) -> str:
    parts = path.relative_to(ROOT / "pipeline").with_suffix("").parts
    return parts[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "pipeline" else {module}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    own = layer(path)
    if own == "__init__":
        return
    assert own in ORDER, f"{own} has no place in the order; add it here and in docs/ARCHITECTURE.md §5"
    for name in imports(path):
        if not name.startswith("pipeline."):
            continue
        other = name.split(".")[1]
        if other not in (own, "__version__"):
            assert ORDER.index(other) < ORDER.index(own), f"{path} imports {name}, which stands below it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_packages_stay_in_their_homes(path: Path) -> None:
    for name in imports(path):
        homes = HOMES.get(name.split(".")[0])
        assert homes is None or layer(path) in homes, f"{path} imports {name}"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("pipeline.producer", ("torch", "transformers", "drain3", "pipeline.workers", "pipeline.detect")),
        ("pipeline.cli", ("torch", "celery", "polars", "redis", "rich")),
        ("pipeline.workers.bootstrap", ("torch", "transformers")),
    ],
)
def test_importing_stays_light(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {forbidden!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_settings_reads_the_environment() -> None:
    readers = [
        str(p.relative_to(ROOT))
        for p in FILES
        if any(word in p.read_text(encoding="utf-8") for word in ("os.environ", "getenv"))
    ]
    # local.py hands the environment on to the processes it starts.
    assert readers == ["pipeline/settings.py", "pipeline/workers/stack/stack.py"]
