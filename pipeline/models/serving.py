"""The version of each model that this process serves.

A process serves the live version once it has read its files, which it fetches from the store where its
machine lacks them. Until then, or while these files cannot be read, it serves the version before. So a
damaged or missing bundle never stops scoring: the fault is reported (status shows it per machine), and
reading is tried again. The fault of one machine bars the version on no other. A live version that an older
build made, without an earlier one that can be read, is no model: lines are stored and wait for a training.
Batches and the reloader compare the pointer; a broadcast only wakes the reloader early.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from pipeline.errors import BadBundle, ModelUnavailable
from pipeline.logs import logger
from pipeline.models.registry import Registry
from pipeline.records.versions import Live
from pipeline.redis.keys import SHARED

RETRY_S: Final = 5.0  # until an unreadable version is tried again


class Serving:
    """One per process; threads share it. `prepare(version)` reads the parts needed here; raises BadBundle."""

    def __init__(self, registry: Registry, prepare: Callable[[str], object]) -> None:
        self.registry = registry
        self.prepare = prepare
        self._good: dict[str, str] = {}
        self._failed: dict[str, float] = {}
        self._lock = threading.Lock()

    def version(self, model: str = SHARED) -> str | None:
        """The version to serve; None before the first one, and where an older build made the live one.

        Raises ModelUnavailable when neither the live version nor an earlier one can be read for another
        reason.
        """
        live, faults = self.registry.snapshot(model)
        return None if live is None else self.follow(live, faults)

    def follow(self, live: Live, faults: dict[str, str]) -> str | None:
        """The version to serve for this live version; the one before, while another thread reads its files.
        None where an older build made the live one.

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
        """The served versions by model."""
        return dict(self._good)

    def _choose(self, live: Live, faults: dict[str, str]) -> str | None:
        before = [v for v in reversed(live.history) if v != live.version]
        good = self._good.get(live.model)
        for version in dict.fromkeys((live.version, *([good] if good else []), *before)):
            if self._readable(version, faults):
                if good != version:
                    logger(model=live.model, version=version).info("model.serving", before=good or "-")
                self._good[live.model] = version
                return version
        if self.registry.is_older(live.version):
            self._good.pop(live.model, None)
            return None
        raise ModelUnavailable(
            f"no version of the {live.model} model can be read ({faults.get(live.version, live.version)}); "
            "restore its files or train again with `logweir train`"
        )

    def _readable(self, version: str, faults: dict[str, str]) -> bool:
        failed = version in self._failed
        if failed and time.monotonic() < self._failed[version]:
            return False
        if version in faults and not failed:
            return False  # another process of this machine cannot read it
        if version in self._good.values() and not failed:
            return True
        try:
            self.prepare(version)
        except BadBundle as exc:
            self._failed[version] = time.monotonic() + RETRY_S
            logger(version=version).error("model.unreadable", why=str(exc))
            self.registry.report_fault(version, str(exc))
            return False
        if failed:
            del self._failed[version]
            self.registry.clear_fault(version)
        return True
