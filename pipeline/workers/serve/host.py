"""The models of one node: its lease, and the rounds in which it loads and unloads.

A round reads what all nodes report, decides by gpu/homes.py, and acts on this node's part alone. Loads run in
a thread of their own, one at a time, so that the node goes on reporting. When the lease is asked for or lost,
requests that run end, the models go, and the node asks for another lease.
"""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final

import redis

from pipeline.errors import BadInput, LeaseRefused, LogweirError, RedisUnavailable, StoreUnavailable
from pipeline.gpu.homes import Home, Pending, next_load, surplus
from pipeline.gpu.leasing.renewal import LeaseInUse
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.placement import Placement
from pipeline.gpu.placing import Backoff
from pipeline.gpu.policy.explain import device_views, why_it_waits
from pipeline.gpu.pool import Pool
from pipeline.gpu.served import LoadFault, ServedModel, ServedModels, ServeNode, ServeRoom
from pipeline.gpu.served_files import sweep_model_files
from pipeline.gpu.serving import read_pending
from pipeline.gpu.values import INFER_PERCENT, LeaseKind, Need
from pipeline.logs import logger
from pipeline.redis.connection import now_ms
from pipeline.settings import Settings
from pipeline.store.choose import open_store
from pipeline.tasks.share import host_locks
from pipeline.units import size
from pipeline.upkeep import submit
from pipeline.workers.serve.runners import RunnerLoader, formats_here

ROUND_S: Final = 1.0
LOOK_S: Final = 0.1  # minimum age of a view before a request reads a newer one
REFUSED_S: Final = 5.0  # before a need is asked for again that could not be met at all
LEAVE_S: Final = 10.0  # for requests that run when the lease has to be given back
SWEEP_S: Final = 3_600.0  # between two looks for files that no record names


class ModelHost:
    """One per process. `run` is a thread; requests read `view` and `placement`."""

    def __init__(self, pool: Pool, settings: Settings, *, name: str, url: str) -> None:
        """`name`: of the process, unique in the pool; `url`: where other nodes reach it."""
        self.pool, self.settings = pool, settings
        self.name, self.url = name, url
        self.need = Need(
            memory_mib=settings.gpu.serve_mib,
            compute_percent=INFER_PERCENT,
            preemptible=True,
            node=this_node(),
            kind=LeaseKind.SERVE,
        )
        self.served = ServedModels(pool.client, settings)
        self.objects = open_store(settings.data.store)
        self.loader = RunnerLoader(self.objects, settings.data.dir.absolute() / "serve" / str(os.getpid()))
        self.formats = formats_here()
        self.placement: Placement | None = None
        self.view = Pending(now_ms=0, models=(), loaded=(), nodes=())
        self.why = "has not asked for a lease yet"
        self._seen = float("-inf")
        self._looking = threading.Lock()
        self._faults: dict[str, tuple[Backoff, LoadFault]] = {}
        self._loads = ThreadPoolExecutor(1, "serve-load")
        self._loading: Future[None] | None = None
        self._wake, self._stop = threading.Event(), threading.Event()
        self._swept = time.monotonic()

    def run(self) -> None:
        """Serve under one lease after another, until `stop`."""
        while not self._stop.is_set():
            try:
                self._under_a_lease()
            except (RedisUnavailable, redis.RedisError) as exc:
                self._pause("waits for Redis", exc)
            except (BadInput, LeaseRefused) as exc:
                if not self._stop.is_set():
                    self._pause(f"has no lease: {exc}", exc)
            except Exception as exc:  # the edge of a loop that must not end  # noqa: BLE001
                logger().exception("serve.failed")
                self._pause(f"failed: {exc}", exc)
            if self.loader.began:
                break  # CUDA's context, and the lock that covers it, end only with this process
        with suppress(RedisUnavailable, redis.RedisError):
            self.served.leave(self.name)
        self._loads.shutdown(wait=False)

    def _under_a_lease(self) -> None:
        """Wait for a lease, and serve under it. Raises as `Pool.lease` does."""
        with self.pool.lease(self.need, holder=self.name, timeout_s=None, go_on=self._wait_on) as using:
            locks = host_locks(using.lease, wait_s=0)
            try:
                self._serve(using)
            finally:
                if not self.loader.began:
                    locks.close()

    def stop(self) -> None:
        """Gives the lease back and ends `run`."""
        self._stop.set()
        self._wake.set()

    def wake(self) -> None:
        """The next round begins at once."""
        self._wake.set()

    def look(self) -> Pending:
        """The newest view, read again when it is older than LOOK_S. Raises RedisUnavailable."""
        with self._looking:
            if time.monotonic() - self._seen > LOOK_S:
                self.view = read_pending(self.pool.client, self.settings)
                self._seen = time.monotonic()
            return self.view

    def _wait_on(self) -> None:
        """While the lease is waited for: say why. Raises LeaseRefused at the end of the process."""
        if self._stop.is_set():
            raise LeaseRefused("this process ends")
        snapshot = self.pool.snapshot()
        request = next((one for one in snapshot.waiting if one.holder == self.name), None)
        why = "" if request is None else why_it_waits(snapshot, request, device_views(snapshot))
        self.why = f"waits for a lease of {size(self.need.memory_mib)}" + (f": {why}" if why else "")
        self._report(None)
        self.look()

    def _pause(self, why: str, exc: Exception) -> None:
        """Nothing can be loaded for a while."""
        if why != self.why:
            logger().warning("serve.waits", why=str(exc))
        self.why = why
        end = time.monotonic() + REFUSED_S
        while not self._stop.is_set() and time.monotonic() < end:
            with suppress(RedisUnavailable, redis.RedisError):
                self._report(None)
                self.look()
            self._stop.wait(ROUND_S)

    def _serve(self, using: LeaseInUse) -> None:
        """Load and unload until the lease ends or has to be given back."""
        placement = Placement(self.pool.client, self.settings, self.loader, lease=using.lease)
        self.loader.device_mib = using.lease.parts[0].memory_mib
        self.loader.context_mib = self.settings.internal.gpu_context_mib
        self.why = ""
        self.placement = placement
        logger(lease=using.lease.lease_id, device=using.lease.parts[0].uuid).info("serve.leased")
        try:
            while not (self._stop.is_set() or using.lost.is_set() or using.asked.is_set()):
                with suppress(RedisUnavailable, redis.RedisError):  # the lease tells when that is too long
                    self._round(placement)
                self._wake.wait(ROUND_S)
                self._wake.clear()
        finally:
            self._give_back(placement, using)

    def _give_back(self, placement: Placement, using: LeaseInUse) -> None:
        self.placement = None  # no new request from here on
        self.why = f"gives its lease back: {using.why()}" if using.why() else "ends"
        with suppress(RedisUnavailable, redis.RedisError):
            self._report(None)
        within_s = 0.0 if using.lost.is_set() else LEAVE_S
        loading = [] if self._loading is None else [self._loading]
        left = not placement.leave(within_s)
        self.loader.runners.clear()  # a request that goes on has its own
        if left or wait(loading, within_s).not_done:
            using.dirty()  # its part stays taken until this process ends
            logger().warning(
                "serve.requests_left", why=f"they went on for {within_s:g} s after the lease's end"
            )
        logger(lease=using.lease.lease_id).info("serve.gave_back", why=self.why)

    def _round(self, placement: Placement) -> None:
        self._report(placement)
        self._seen = float("-inf")
        view = self.look()
        lease_id = placement.lease.lease_id
        for entry in surplus(view, lease_id):
            placement.unload(entry)
        for field in self._faults.keys() - {model.field for model in view.models}:
            del self._faults[field]
        if self._loading is None or self._loading.done():
            load = next_load(view, lease_id)
            if load is not None:
                self._loading = submit(self._loads, "serve-load", self._load, placement, *load)
        if time.monotonic() - self._swept > SWEEP_S:
            self._swept = time.monotonic()
            # With a record that cannot be read, nobody knows which files are named.
            if len(view.models) == self.served.count():
                with suppress(StoreUnavailable):
                    sweep_model_files(self.objects, {model.sha256 for model in view.models})

    def _load(self, placement: Placement, model: ServedModel, home: Home) -> None:
        """One load, in the thread for loads."""
        self.loader.records[model.model.key] = model
        try:
            if placement.place(model.model, home.uuid, unload=home.unload):
                self.served.fulfil(model)
            self._faults.pop(model.field, None)
        except (RedisUnavailable, LeaseRefused):
            pass  # no fault of the model
        except Exception as exc:  # any package of a format raises its own  # noqa: BLE001
            known = isinstance(exc, LogweirError)
            why = str(exc) if known else f"{type(exc).__name__}: {exc}"
            logger(model=model.field).warning("serve.not_loaded", why=why, exc_info=not known)
            self._fail(model, why)
        finally:
            self._wake.set()

    def _fail(self, model: ServedModel, why: str) -> None:
        backoff = self._faults[model.field][0] if model.field in self._faults else Backoff()
        until_ms = self.view.now_ms + int(1000 * backoff.next())
        with suppress(RedisUnavailable, redis.RedisError):
            until_ms += now_ms(self.pool.client) - self.view.now_ms
        self._faults[model.field] = backoff, LoadFault(model=model.field, why=why[:300], until_ms=until_ms)

    def _report(self, placement: Placement | None) -> None:
        """Raises RedisUnavailable."""
        rooms = {} if placement is None else placement.rooms
        node = ServeNode(
            name=self.name,
            node=this_node(),
            url=self.url,
            lease_id="" if placement is None else placement.lease.lease_id,
            rooms=tuple(ServeRoom(uuid=uuid, memory_mib=room) for uuid, room in rooms.items()),
            formats=self.formats,
            faults=tuple(fault for _, fault in list(self._faults.values())),
            why="" if placement is not None else self.why,
            beat_ms=now_ms(self.pool.client),
        )
        self.served.report(node)
