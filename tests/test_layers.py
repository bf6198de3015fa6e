"""Each room imports only from rooms on floors below its own, and no two sub-rooms of a room import each other
in a circle."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.commands.extras import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
# Floors from the top down, as docs/ARCHITECTURE.md draws them. Rooms on one floor do not know each other.
FLOORS = [
    ["cli"],
    ["commands"],
    ["workers"],
    ["tasks", "service"],
    ["training", "detect", "report", "producer"],
    ["sinks", "watching", "sources", "messages", "controller"],
    ["opensearch", "nats", "drain", "models", "ledger", "marks", "observe", "gpu"],
    ["records", "redis", "store"],
    ["settings", "units", "upkeep"],
    ["errors", "imports", "logs"],
]
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
# Loose modules at the top of pipeline/: each is a face that users import, or what every room stands on.
LOOSE = {"cli", "detect", "errors", "imports", "logs", "producer", "units", "upkeep"}
MOST_FILES = 22  # in one folder; more of them want a second room
MOST_LINES, MOST_PARAMETERS = 80, 10  # of a function
# Names that many modules give to the same thing: entry points, flags of a verb, tasks and their stages.
SAME_EVERYWHERE = {"main", "flags", "run", "step"}
# Heavy packages and the only places that may import them at module level or inside functions.
HOMES = {
    "torch": {"models", "gpu/node/cuda"},
    "transformers": {"models"},
    "drain3": {"drain"},
    "pynvml": {"gpu/node/nvml"},
    "opensearchpy": {"opensearch", "sinks/template_index"},
    "confluent_kafka": {"sources/kafka/client"},
    "nats": {"nats", "workers/nats"},
    "obstore": {"store/bucket"},
    "duckdb": {"sinks/answers/engine"},
    "fastapi": {"workers/api"},
    "onnxruntime": {"workers/serve/onnx_runner"},
    "pydantic": {"workers/api"},
    "celery": {"messages", "tasks", "workers"},
    "kombu": {"messages", "tasks", "workers"},
    "opentelemetry": {"sources/protocols", "workers/intake"},
    "google": {"sources/protocols", "workers/intake", "nats/payloads"},
    "cramjam": {"sources/protocols", "workers/intake"},
}
# Packages of the extras: neither a producer nor `--help` needs one.
HEAVY = tuple(name for packages in EXTRAS.values() for name in packages if name != "opentelemetry")
HEAVY += ("opentelemetry.proto",)  # redis-py imports other parts of that namespace where they are installed
FILES = sorted((ROOT / "pipeline").rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT / "pipeline").with_suffix("").parts


@functools.cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_a_room_imports_only_from_floors_below() -> None:
    wrong = []
    for path in FILES:
        own = parts_of(path)[0]
        if own == "__init__":
            continue
        assert own in FLOOR_OF, f"{own} has no floor; give it one here and in docs/ARCHITECTURE.md"
        for name in imports(path):
            other = name.split(".")[1] if name.startswith("pipeline.") else own
            if other not in (own, "__version__") and FLOOR_OF[own] >= FLOOR_OF[other]:
                wrong.append(f"{path} imports {name}, which does not stand below it")
    assert wrong == []


def test_sub_rooms_have_an_order() -> None:
    """Within a room, the folders and the files beside them import each other in one direction only."""
    arrows: dict[str, set[str]] = {}
    for path in FILES:
        own = parts_of(path)
        if len(own) < 2:
            continue
        for name in imports(path):
            other = tuple(name.split(".")[1:])
            if other[:1] == own[:1] and other[1:2] != own[1:2] and len(other) > 1:
                arrows.setdefault("/".join(own[:2]), set()).add("/".join(other[:2]))

    def circle(start: str, at: str, seen: tuple[str, ...]) -> tuple[str, ...] | None:
        for target in sorted(arrows.get(at, ())):
            if target == start:
                return (*seen, at, target)
            if target not in seen and (found := circle(start, target, (*seen, at))):
                return found
        return None

    circles = [found for start in sorted(arrows) if (found := circle(start, start, ()))]
    assert circles == []


def test_loose_modules_are_faces() -> None:
    assert {path.stem for path in (ROOT / "pipeline").glob("*.py")} == LOOSE | {"__init__"}


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in FILES}), ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_folder_is_small_enough_to_know(folder: Path) -> None:
    files = [p for p in folder.iterdir() if p.is_file() and p.name not in ("__init__.py", "py.typed")]
    assert len(files) <= MOST_FILES


def test_heavy_packages_stay_in_their_homes() -> None:
    wrong = []
    for path in FILES:
        for name in imports(path):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None and not any("/".join(parts_of(path)).startswith(home) for home in homes):
                wrong.append(f"{path} imports {name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        # 0.01, 0.2 and 0.05 s of CPU time; what would make it more is not imported.
        ("pipeline", ("pipeline.producer", "pipeline.settings", "pipeline.gpu", "redis", "msgspec")),
        ("pipeline.producer", (*HEAVY, "rich", "structlog", "celery.app", "pipeline.gpu", "pipeline.detect")),
        ("pipeline.gpu.pool", (*HEAVY, "rich", "structlog", "celery")),
        ("pipeline.cli", (*HEAVY, "celery", "redis", "rich", "structlog", "msgspec")),
        ("pipeline.workers.bootstrap", ("torch", "transformers")),
        # Beat, the agent and the exporter.
        (
            "pipeline.workers.loops, pipeline.workers.agent, pipeline.workers.metrics",
            ("polars", "numpy", "drain3", "duckdb", "torch"),
        ),
        ("pipeline.workers.api.server", ("torch", "transformers", "pipeline.tasks", "pipeline.training")),
        ("pipeline.service.client", (*HEAVY, "celery", "structlog", "rich")),
        # What a plain installation asks of a pipeline on this machine.
        (
            "pipeline.service.local, pipeline.service.status, pipeline.service.running.health, "
            "pipeline.service.access.key_changes, pipeline.service.senders, pipeline.service.watchlist, "
            "pipeline.commands.store, pipeline.commands.console, pipeline.commands.doctor",
            HEAVY,
        ),
        # The process that receives imports all decoders, and nothing that a worker needs.
        (
            ", ".join(
                f"pipeline.sources.protocols.{name}" for name in ("bulk", "hec", "journal", "loki", "otlp")
            ),
            ("polars", "numpy", "torch", "redis", "celery", "structlog"),
        ),
        ("pipeline.producer", ("pipeline.sources.protocols", "google.protobuf", "cramjam")),
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
    assert readers == ["pipeline/settings/__init__.py", "pipeline/settings/allocators.py"]


def test_a_public_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                places.setdefault(node.name, []).append("/".join(parts_of(path)))
    several = {
        name: where
        for name, where in places.items()
        if len(where) > 1 and not name.startswith("_") and name not in SAME_EVERYWHERE
    }
    assert several == {}, "a reader of one of them finds the other; give each a name of its own"


def test_a_function_is_short_and_takes_few_parameters() -> None:
    over = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                parameters = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
                if lines > MOST_LINES or parameters > MOST_PARAMETERS:
                    over.append(("/".join(parts_of(path)), node.name, lines, parameters))
    assert over == [], "a long function has a second idea; parameters that travel together are one value"
