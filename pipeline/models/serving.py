"""Which version of each model this process answers under.

The live one, as soon as its files were read here; until then, and while they cannot be read, the one before. So a
damaged or missing bundle never stops the scoring: the fault is reported (status shows it) and tried again. The pointer
is compared between batches and by the reloader; a broadcast only makes the reloader look at once.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from pipeline.errors import BadBundle, ModelUnavailable
from pipeline.logs import logger
from pipeline.models.registry import Live, Registry
from pipeline.redis.keys import SHARED

RETRY_S: Final = 5.0  # a version that could not be read is looked at again after so long


class Serving:
    """One per process; threads share it. `prepare(version)` reads what this process needs; it raises BadBundle."""

    def __init__(self, registry: Registry, prepare: Callable[[str], object]) -> None:
        self.registry = registry
        self.prepare = prepare
        self._good: dict[str, str] = {}
        self._failed: dict[str, float] = {}
        self._lock = threading.Lock()

    def version(self, model: str = SHARED) -> str | None:
        """The version to answer under now, None before the first one.

        Raises ModelUnavailable when neither the live version nor one before it can be read.
        """
        live, faults = self.registry.snapshot(model)
        return None if live is None else self.follow(live, faults)

    def follow(self, live: Live, faults: dict[str, str]) -> str:
        """The version to answer under now that this one is live. While another thread reads it, the one before serves.

        Raises ModelUnavailable.
        """
        good = self._good.get(live.model)
        if good == live.version and live.version not in faults:
            return live.version
        if not self._lock.acquire(blocking=good is None or good in faults):
            return str(good)
        try:
            return self._choose(live, faults)
        finally:
            self._lock.release()

    def versions(self) -> dict[str, str]:
        """What this process answers under, by model."""
        return dict(self._good)

    def _choose(self, live: Live, faults: dict[str, str]) -> str:
        before = [v for v in reversed(live.history) if v != live.version]
        good = self._good.get(live.model)
        for version in dict.fromkeys((live.version, *([good] if good else []), *before)):
            if self._readable(version, faults):
                if good != version:
                    logger(model=live.model, version=version).info("model.serving", before=good or "-")
                self._good[live.model] = version
                return version
        raise ModelUnavailable(
            f"no version of the {live.model} model can be read ({faults.get(live.version, live.version)}); "
            "restore its files or train again with `logweir train`"
        )

    def _readable(self, version: str, faults: dict[str, str]) -> bool:
        mine = version in self._failed
        if mine and time.monotonic() < self._failed[version]:
            return False
        if version in faults and not mine:
            return False  # another process cannot read it: it could not finish what we begin under it
        if version in self._good.values() and not mine:
            return True
        try:
            self.prepare(version)
        except BadBundle as exc:
            self._failed[version] = time.monotonic() + RETRY_S
            logger(version=version).error("model.unreadable", why=str(exc))
            self.registry.report_fault(version, str(exc))
            return False
        if mine:
            del self._failed[version]
            self.registry.clear_fault(version)
        return True
