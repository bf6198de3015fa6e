"""Logweir's own models on leased devices: scoring and training ask the placement that users' models ask.

So a device has one copy of a model version, in one process. Its memory counts beside that of served models.
A scoring process reports every other second what it has, or why it has nothing.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

import redis

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.placement import Placement
from pipeline.gpu.placing import Model
from pipeline.gpu.served import ServedModels, ServeNode, ServeRoom
from pipeline.gpu.values import TENANT, PoolLease
from pipeline.redis.connection import now_ms
from pipeline.settings import Settings
from pipeline.upkeep import FaultSeries, start_thread

# Names of users' models have no space, so nobody else's is one of these.
SCORING: Final = "scoring "  # The version follows.
TRAINING: Final = "training "  # The request follows.
EVERYWHERE: Final = 1_000_000  # Copies in the pool: as many as there are devices.
WORK_MIB: Final = 64  # of a copy beside its weights, as for a served model
TOUCH_S: Final = 1.0  # between two marks that a copy is in use
SUPERSEDED_S: Final = 60.0  # a version that no batch asked for so long leaves when another one comes
WHY_S: Final = 5.0  # a refusal is repeated with each batch: without one the pool's present reason is better
REPORT_S: Final = 2.0  # below the silence after which a process counts as gone (homes.py)

T = TypeVar("T")


def scoring_model(version: str, weights_mib: int) -> Model:
    """A version as the placement counts it: its weights twice, and room for its work."""
    return Model(
        name=f"{SCORING}{version}",
        tenant=TENANT,
        memory_mib=2 * weights_mib + WORK_MIB,
        replicas=EVERYWHERE,
    )


class OwnCopies(Generic[T]):
    """The versions that one scoring process has on its leased device. For one thread at a time."""

    def __init__(
        self, client: "redis.Redis", settings: Settings, *, lease: PoolLease, copy: Callable[[str], T]
    ) -> None:
        """`copy` puts a version on the device; it may raise."""
        self.placement = Placement(client, settings, self, lease=lease)
        self._copy = copy
        self._copies: dict[str, T] = {}  # by the model's name
        self._touched: dict[str, float] = {}

    def get(self, model: Model) -> T:
        """The copy of a model, put on the device if need be.

        Raises LeaseRefused where the placement refuses, BadInput for a model larger than the lease,
        RedisUnavailable, DeviceFailed, and the errors of `copy`.
        """
        there = self.placement.here(model.key)
        if there is None:
            if why := self.placement.refusal(model):
                raise LeaseRefused(why)
            self.placement.ensure(model, timeout_s=0)
            there = self.placement.here(model.key)
            if there is None:
                raise LeaseRefused(f"another process was first with {model.name}")
            self._touched[model.name] = time.monotonic()
            self.placement.unload_idle(SUPERSEDED_S)
        elif time.monotonic() - self._touched[model.name] > TOUCH_S:
            self._touched[model.name] = time.monotonic()
            with suppress(RedisUnavailable):  # the lease tells when that lasts too long
                self.placement.touch(there)
        return self._copies[model.name]

    def load(self, model: Model, uuid: str) -> None:  # noqa: ARG002 - a process has one device
        """As the protocol Loader says."""
        self._copies[model.name] = self._copy(model.name.removeprefix(SCORING))

    def unload(self, model: Model, uuid: str) -> None:  # noqa: ARG002
        """As the protocol Loader says."""
        self._copies.pop(model.name, None)

    def clear(self) -> None:
        """Drop all copies, for the end of the lease: their entries end with it."""
        self._copies.clear()


class _Whole:
    """A loader for a program that loads by itself."""

    def load(self, model: Model, uuid: str) -> None: ...

    def unload(self, model: Model, uuid: str) -> None: ...


def count_training(client: "redis.Redis", settings: Settings, lease: PoolLease, request_id: str) -> None:
    """Count all memory of a lease as that of a training, until the lease ends.

    Raises LeaseRefused where the placement counts another model there, RedisUnavailable.
    """
    placement = Placement(client, settings, _Whole(), lease=lease)
    for uuid, room_mib in placement.rooms.items():
        model = Model(name=f"{TRAINING}{request_id}", tenant=TENANT, memory_mib=room_mib, replicas=EVERYWHERE)
        if not placement.place(model, uuid):
            raise LeaseRefused(f"{uuid} has no room for {model.name} beside the models that are there")


class ScoringReports:
    """Tells the pool about one scoring process, from a thread of its own, so that no batch waits for it."""

    def __init__(self, client: "redis.Redis", settings: Settings, name: str) -> None:
        """`name`: the holder of its leases."""
        self.client, self.name, self.node = client, name, this_node()
        self.served = ServedModels(client, settings)
        self.context_mib = settings.internal.gpu_context_mib
        self.lease: PoolLease | None = None
        self._why, self._until_s = "", 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Report from now on. A second call does nothing."""
        if self._thread is None:
            self._thread = start_thread("gpu-scoring-report", self._run)

    def close(self) -> None:
        """Report no more, and be forgotten."""
        self._stop.set()
        with suppress(RedisUnavailable, redis.RedisError):
            self.served.leave(self.name)

    def refused(self, why: str, for_s: float = WHY_S) -> None:
        """Why the process has no device, and for how long that is the reason."""
        self.lease, self._why, self._until_s = None, why, time.monotonic() + for_s

    @property
    def why(self) -> str:
        """Why the process has no device; "" where only the pool knows."""
        return self._why if self.lease is None and time.monotonic() < self._until_s else ""

    def report(self) -> None:
        """One report. Raises RedisUnavailable."""
        lease = self.lease
        parts = () if lease is None else lease.parts
        self.served.report(
            ServeNode(
                name=self.name,
                node=self.node,
                url="",
                lease_id="" if lease is None else lease.lease_id,
                rooms=tuple(
                    ServeRoom(uuid=part.uuid, memory_mib=part.memory_mib - self.context_mib) for part in parts
                ),
                why=self.why,
                beat_ms=now_ms(self.client),
                scores=True,
            )
        )

    def _run(self) -> None:
        faults = FaultSeries("gpu.scoring_not_reported", RedisUnavailable, redis.RedisError)
        while True:
            with faults.outlived():
                self.report()
            if self._stop.wait(REPORT_S):
                return
