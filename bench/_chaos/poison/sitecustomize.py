"""Put on the PYTHONPATH of the workers of a chaos run: what the product itself has no setting for.

A line with the word of chaos is poison for whoever prepares it. And messages are given to another worker
after CHAOS_VISIBILITY_S instead of an hour, so that one that was stopped for longer goes on beside whoever
has its message.

Python imports a module of this name by itself when it starts. It waits until the modules that it changes are
imported; nothing of the product knows about it."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Not to be found in any line that somebody else wrote.
KILL = "zyxkillzyx"
HANG = "zyxhangzyx"


VISIBILITY = "CHAOS_VISIBILITY_S"


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self.changes = changes

    def find_spec(  # the signature is Python's
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, module_name = name.partition(".")
        change = self.changes.pop(module_name, None) if package == "pipeline" else None
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _poison(module: ModuleType) -> None:
    prepare = module.prepare

    def poisoned(records: Any, *args: Any, **kwargs: Any) -> Any:
        text = "\n".join(records["raw"].to_list())
        if KILL in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in text:
            threading.Event().wait()
        return prepare(records, *args, **kwargs)

    module.prepare = poisoned  # type: ignore[attr-defined]


def _restore_soon(module: ModuleType) -> None:
    configuration = module.configuration

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = configuration(*args, **kwargs)
        found["broker_transport_options"] |= {
            "visibility_timeout": float(os.environ[VISIBILITY]),
            # How often a worker looks, in s: kombu's own choice is every 100.
            "unacked_restore_interval": 2,
            "unacked_restore_throttle": 1,
        }
        return found

    module.configuration = changed  # type: ignore[attr-defined]


sys.meta_path.insert(
    0,
    _Finder({"detect": _poison, **({"messages.app": _restore_soon} if VISIBILITY in os.environ else {})}),
)
