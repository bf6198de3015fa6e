"""What a worker process holds: one of each part, built on first use in the process that uses it.

A prefork parent must not open connections or start threads that its children inherit, so nothing is built
before the first task runs.
"""

import functools
import os
import socket
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import polars as pl
import redis
from celery import Celery

from pipeline.controller.tick import Controller
from pipeline.controller.trainings import Trainings
from pipeline.controller.watchlist import Watchlist, model_of
from pipeline.drain.learner import Learner
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadBundle, ModelUnavailable, RedisUnavailable, Rejected
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import PoolLease, scoring_need
from pipeline.ledger.ledger import Ledger
from pipeline.logs import logger
from pipeline.marks.store import Marks
from pipeline.messages.submit import Submit
from pipeline.models import bundle
from pipeline.models.bundle import load_known
from pipeline.models.registry import Registry
from pipeline.models.serving import Serving
from pipeline.models.single_flight import SingleFlight
from pipeline.models.verdict import Knowledge
from pipeline.observe import counters as metrics
from pipeline.observe.presence import Presence
from pipeline.records.batch import Purpose
from pipeline.redis.connection import connect
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import Leases
from pipeline.settings import Settings
from pipeline.sinks.choose import root_of, sinks_for
from pipeline.sinks.forgotten import Forgotten
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.sink import Sink
from pipeline.tasks.share import GpuShare
from pipeline.watching.callbacks import Callbacks
from pipeline.watching.sessions import keys as session_keys
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.model import load as load_session_models
from pipeline.watching.state import WatcherState
from pipeline.watching.watcher import Watcher

if TYPE_CHECKING:
    from pipeline.models.line import LineModel


T = TypeVar("T")
# Model versions in memory, some MiB each: the shared one, its predecessor, and own models of a few workloads.
LOADED_MODELS: Final = 8


def read_session_models(path: Path) -> dict[str | None, SessionModel]:
    """The session models of a bundle by workload, and under None the one for all other workloads; none if unreadable."""
    try:
        manifest = bundle.load_manifest(path)
        blob = bundle.optional(path, bundle.SEQUENCES)
        known: dict[str | None, SessionModel] = {}
        for workload, model in ({} if blob is None else load_session_models(blob)).items():
            known[workload] = model
        # A baseline often has another name than what is judged by it: `logweir run new.log --baseline old.log`. Where a
        # model has learnt from several workloads, the sessions of one say nothing of those of another.
        if len(known) == 1 and len(manifest.workloads) <= 1:
            known[None] = next(iter(known.values()))
        return known
    except BadBundle as exc:
        logger(version=path.name).error("watch.damaged", what="sequences", why=str(exc))
        return {}


class Context:
    """The parts of one process, each built once. `device` is where models run.

    `pooled`: only under a lease of the GPU pool. Then `device` is a kind ("cuda"), the lease names which one, and what is
    read ahead stays in ordinary memory until there is a lease.

    `loads` says what this process needs of a model version before it answers under it: "network", "knowledge" or
    only the "manifest", whose hashes are checked.

    `shard`: the shard of stage drain that this process is a writer of, where it is one.
    """

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        *,
        device: str = "cpu",
        loads: str = "manifest",
        pooled: bool = False,
        shard: int = 0,
    ) -> None:
        self.app = app
        self.settings = settings
        self.device = device
        self.loads = loads
        self.pooled = pooled
        self.shard = shard
        self._models: OrderedDict[str, LineModel] = OrderedDict()
        self._placed: OrderedDict[str, LineModel] = OrderedDict()  # copies on the leased device
        self._place = "cpu"
        self._known: OrderedDict[str, Knowledge] = OrderedDict()
        self._session_models: OrderedDict[str, dict[str | None, SessionModel]] = OrderedDict()
        self._lock = threading.RLock()  # the reloader loads what the worker asks for next
        self._in_sink = False
        self.apart: OrderedDict[str, None] = OrderedDict()  # batches that one pass with others failed for

    @functools.cached_property
    def owner(self) -> str:
        """Who we are in claims and leases. Host and pid are for readers: containers share both, so chance tells apart."""
        return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

    @functools.cached_property
    def client(self) -> "redis.Redis":
        return connect(self.settings)

    @functools.cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.client, self.settings)

    @functools.cached_property
    def submit(self) -> Submit:
        need = scoring_need(self.settings)
        gpu_open = functools.partial(self.pool.open_to_shared, need)
        return Submit(self.app, self.client, self.settings, gpu_open=gpu_open)

    @functools.cached_property
    def presence(self) -> Presence:
        return Presence(self.client, self.settings)

    @functools.cached_property
    def registry(self) -> Registry:
        return Registry(self.client, self.settings)

    @functools.cached_property
    def leases(self) -> Leases:
        return Leases(self.client, self.settings)

    @functools.cached_property
    def pool(self) -> Pool:
        return Pool(self.client, self.settings)

    @functools.cached_property
    def share(self) -> GpuShare | None:
        """Our part of a GPU; None for a process that needs no leave to score."""
        return GpuShare(self.pool, self.settings, holder=self.owner, place=self) if self.pooled else None

    @functools.cached_property
    def masks(self) -> MaskSet:
        return MaskSet.load(extra=self.settings.intake.masks)

    @functools.cached_property
    def session_patterns(self) -> tuple[session_keys.KeyPattern, ...]:
        """What names sessions here, besides what is recognised anyway."""
        return session_keys.user_patterns(self.settings.watch.session_keys)

    @functools.cached_property
    def verdicts(self) -> Verdicts:
        return Verdicts(self.client, self.settings)

    @functools.cached_property
    def single_flight(self) -> SingleFlight:
        return SingleFlight(self.client, self.settings, self.owner)

    @functools.cached_property
    def marks(self) -> Marks:
        return Marks(self.client, self.settings)

    @functools.cached_property
    def learner(self) -> Learner:
        return Learner(self.client, self.settings, self.verdicts, shard=self.shard)

    @functools.cached_property
    def serving(self) -> Serving:
        prepare = {"network": self.model, "knowledge": self.knowledge, "manifest": self.registry.manifest}
        return Serving(self.registry, prepare[self.loads])

    @functools.cached_property
    def trainings(self) -> Trainings:
        return Trainings(self.client, self.settings)

    @functools.cached_property
    def controller(self) -> Controller:
        return Controller(self.client, self.settings)

    @functools.cached_property
    def watchlist(self) -> Watchlist:
        return Watchlist(self.client, self.settings)

    @functools.cached_property
    def _sinks(self) -> dict[Purpose, Sink]:
        return sinks_for(self.settings)

    def sink(self, purpose: Purpose) -> Sink:
        """Where results of this purpose are stored."""
        return self._sinks[purpose]

    @contextmanager
    def at_sink(self, purpose: Purpose) -> Iterator[Sink]:
        """`sink`, for a step that reads or changes what is stored: `in_sink` says meanwhile that it does."""
        self._in_sink = True
        try:
            yield self.sink(purpose)
        finally:
            self._in_sink = False

    @property
    def in_sink(self) -> bool:
        """Whether the step waits for the sink: what takes long now is no fault of its batch."""
        return self._in_sink

    @functools.cached_property
    def _forgotten(self) -> dict[Purpose, Forgotten]:
        if "parquet" not in self.settings.data.sinks:
            return {}
        return {
            p: Forgotten(self.client, self.ledger.keys, ParquetSink(root_of(self.settings, p)), p)
            for p in Purpose
        }

    def forgotten(self, purpose: Purpose) -> Forgotten | None:
        """Result files of batches that the ledger has forgotten; None where results are no files."""
        return self._forgotten.get(purpose)

    def version(self, workload: str) -> str | None:
        """The version that a workload's lines are answered under now, None before the first model.

        Raises ModelUnavailable.
        """
        model = model_of(workload, self.settings.train.own_models)
        if model != SHARED:
            with suppress(ModelUnavailable):  # status shows the fault; the shared one answers meanwhile
                own = self.serving.version(model)
                if own is not None:
                    return own
        return self.serving.version()

    @functools.cached_property
    def watcher(self) -> Watcher:
        callbacks = Callbacks(
            session_model=self.session_model, store=self._store_found, normal=self.marks.normal
        )
        return Watcher(WatcherState(self.client, self.settings), self.settings, callbacks)

    def session_model(self, workload: str) -> "tuple[str, SessionModel] | None":
        """(version, session model) of the live version; None without one."""
        try:
            version = self.version(workload)
        except ModelUnavailable:  # status shows the fault; its lines wait, its sessions are not judged
            return None
        if version is None:
            return None
        known = self._kept(
            self._session_models, version, lambda: read_session_models(self.registry.path(version))
        )
        model = known.get(workload, known.get(None))
        return None if model is None else (version, model)

    def _store_found(self, batch_id: str, workload: str, rows: pl.DataFrame) -> None:
        """Into every sink. The rows have this id for good, so writing them again changes nothing."""
        forgotten = self.forgotten(Purpose.SCORE)
        try:
            with self.at_sink(Purpose.SCORE) as sink:
                if forgotten is not None:  # a Redis that lost its last moments lets us find things again
                    forgotten.look()
                sink.write(batch_id, rows)
                if forgotten is not None:
                    forgotten.taken_over(batch_id, rows)
        except Rejected as exc:
            logger(workload=workload).error("watch.rejected", why=str(exc))

    def model(self, version: str) -> "LineModel":
        """The network of a version; the least recently used one goes when there are too many. Raises BadBundle."""
        from pipeline.models.line import LineModel

        def load() -> "LineModel":
            where = "cpu" if self.pooled else self.device
            return LineModel.load(self.registry.path(version), where)

        return self._kept(self._models, version, load)

    def scorer(self, version: str) -> "LineModel":
        """The network of a version where this process may score now. Raises BadBundle."""
        model = self.model(version)
        if self._place == "cpu":
            return model
        return self._kept(self._placed, version, lambda: model.on(self._place))

    @property
    def place(self) -> str:
        """Where models run now, as torch names it."""
        return self._place

    @property
    def begun(self) -> str | None:
        """The device that this process has started CUDA on, which ends only with it."""
        if self.device == "cpu" or not self.pooled:
            return None
        from pipeline.gpu.node import cuda as device

        return device.started_on()

    @property
    def began(self) -> bool:
        """True when this process keeps something on a device until it ends."""
        return self.begun is not None

    def prepare(self) -> None:
        """Import torch and read the live model, which takes seconds, before there is a claim or a lease."""
        with suppress(ModelUnavailable, RedisUnavailable):  # whoever needs the model says so
            self.serving.version()

    def begin(self, lease: PoolLease) -> None:
        """Start to use the leased device, within its memory. Raises LogweirError."""
        if self.device == "cpu":
            return
        from pipeline.gpu.node import cuda as device

        part = lease.parts[0]
        self._place = device.begin(
            part.uuid, memory_mib=part.memory_mib, context_mib=self.settings.internal.gpu_context_mib
        )

    def unload(self) -> None:
        """Take our models off the device."""
        with self._lock:
            self._placed.clear()
        self._place = "cpu"
        if self.device != "cpu":
            from pipeline.gpu.node import cuda as device

            device.unload()

    def end(self) -> None:
        """End this process between two batches: Celery starts another one, without what CUDA keeps."""
        metrics.flush()
        os._exit(0)

    def knowledge(self, version: str) -> Knowledge:
        """What concluding needs from a version. Raises BadBundle."""

        def load() -> Knowledge:
            calibration = self.registry.manifest(version).calibration
            return Knowledge(calibration=calibration, known=load_known(self.registry.path(version)))

        return self._kept(self._known, version, load)

    def _kept(self, kept: "OrderedDict[str, T]", version: str, load: Callable[[], T]) -> T:
        # Batches in flight end under the version they began with, and workloads may have models of their own.
        with self._lock:
            found = kept.get(version)
            if found is not None:
                kept.move_to_end(version)
                return found
        loaded = load()  # outside the lock: the worker goes on under the version before meanwhile
        with self._lock:
            kept[version] = loaded
            while len(kept) > LOADED_MODELS:
                kept.popitem(last=False)
        return loaded
