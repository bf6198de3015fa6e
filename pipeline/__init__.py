"""Logweir: finds the lines that matter in a river of logs.

    from pipeline import Client, Need, Pool, Producer, Settings, score_frame

These names are imported when they are first used, so that a service pays only for the part that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pipeline.gpu.pool import Pool
    from pipeline.gpu.values import Need
    from pipeline.producer import Producer
    from pipeline.service.client import Client
    from pipeline.settings import Settings
    from pipeline.tasks.frames import score_frame as score_frame

__version__ = "0.1.0"
__all__ = [
    "Client",
    "Need",
    "Pool",
    "Producer",
    "Settings",
    "__version__",
]  # all that a base install can import

_HOMES: Final = {
    "Client": "pipeline.service.client",
    "Need": "pipeline.gpu.values",
    "Pool": "pipeline.gpu.pool",
    "Producer": "pipeline.producer",
    "Settings": "pipeline.settings",
    "score_frame": "pipeline.tasks.frames",
}

if not TYPE_CHECKING:  # a type checker would take every name of the package for Any

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
