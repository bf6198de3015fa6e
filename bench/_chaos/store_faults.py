"""Faults of the store: it is away, slow, full, answers with errors, or its server dies or stands still."""

import random
import threading
import time
from typing import Any, Final

from bench._chaos.acts import Act, Heal, Missed, healed_by, stopped
from bench._chaos.http_proxy import FULL
from bench._chaos.schedule import Fault
from bench._chaos.services import Services
from bench._chaos.stores import SERVICE, Bucket, OnDisk, Store

POLL_S: Final = 0.25
START_MOST_S: Final = 60.0


class DiskFaults:
    """Of a folder, on one machine or shared."""

    def __init__(self, store: OnDisk) -> None:
        self.store = store
        self.acts: dict[str, Act] = {"disk_full": self._full, "store_away": self._away}

    def _full(self, *_: Any) -> tuple[Any, Heal | None]:
        self.store.disk.fill()
        return {"disk": self.store.kind}, self.store.disk.free

    def _away(self, *_: Any) -> tuple[Any, Heal | None]:
        if not self.store.intact() or not self.store.leave():
            raise Missed("it is away, or this user may not mount")
        return {}, self.store.back


class BucketFaults:
    """Of an S3 server and the network before it; `over` is set when all faults have to end."""

    def __init__(self, store: Bucket, services: Services, over: threading.Event) -> None:
        self.store = store
        self.proxy = store.proxy
        self.services = services
        self.over = over
        self.acts: dict[str, Act] = {
            "store_away": self._away,
            "store_slow": self._slow,
            "store_errors": lambda fault, _: self._answering(int(fault.target)),
            "store_full": lambda *_: self._answering(FULL),
            "store_cut": lambda *_: ({"connections": self.proxy.cut()}, None),
            "store_half_open": self._half_open,
            "stop_store": self._stop,
            "kill_store": self._kill,
        }

    def _away(self, *_: Any) -> tuple[Any, Heal | None]:
        return {"connections": self.proxy.refuse(True)}, healed_by(lambda: self.proxy.refuse(False))

    def _slow(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        self.proxy.delay(float(fault.target))
        return {}, lambda: self.proxy.delay(0.0)

    def _answering(self, status: int) -> tuple[Any, Heal | None]:
        self.proxy.answer(status)
        return {"status": status}, lambda: self.proxy.answer(0)

    def _half_open(self, fault: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
        return {"connections": self.proxy.half_open(float(fault.target), rng)}, None

    def _stop(self, *_: Any) -> tuple[Any, Heal | None]:
        process = self.services.running(SERVICE)
        if process is None:
            raise Missed("the store does not run")
        self.store.hurt(1)
        detail, go_on = stopped({SERVICE: process.pid})

        def heal() -> None:
            go_on()
            self.store.hurt(-1)

        return detail, heal

    def _kill(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        self.store.hurt(1)
        if not self.services.kill(SERVICE):
            self.store.hurt(-1)
            raise Missed("the store does not run")
        self.services.hold(SERVICE, fault.for_s)

        def back() -> None:
            end = time.monotonic() + START_MOST_S
            while time.monotonic() < end and not (
                self.services.running(SERVICE) is not None and self.store.serves()
            ):
                time.sleep(POLL_S)
            self.store.hurt(-1)

        return {}, back


def acts_of(store: Store, services: Services, over: threading.Event) -> dict[str, Act]:
    """The faults that this store has."""
    if isinstance(store, Bucket):
        return BucketFaults(store, services, over).acts
    return DiskFaults(store).acts
