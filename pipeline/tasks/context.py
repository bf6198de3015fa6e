"""The parts of a worker process, each built on its first use in that process.

A prefork parent must not open connections or start threads that its children inherit, so the first task
builds them."""

import functools
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import polars as pl
import redis
from cachetools import LRUCache

from pipeline.controller.tick import Controller
from pipeline.controller.trainings import Trainings
from pipeline.controller.watchlist import Watchlist, model_of
from pipeline.drain.learner import Learner
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadBundle, ModelUnavailable
from pipeline.gpu.job_keeper import JobKeeper
from pipeline.gpu.jobs import PoolJobs
from pipeline.gpu.leasing.ended import EndedLeases
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import scoring_need
from pipeline.ledger.ledger import Ledger
from pipeline.marks.store import Marks
from pipeline.messages.pace import PassPace
from pipeline.messages.submit import Submit
from pipeline.models.evidence import Evidence
from pipeline.models.registry import Registry
from pipeline.observe.presence import Presence
from pipeline.records.batch import Purpose
from pipeline.redis.connection import connect
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import Leases
from pipeline.redis.scripts import script_files
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of, sinks_for, usage_of
from pipeline.sinks.compaction import Compactor
from pipeline.sinks.fates import compactor_of
from pipeline.sinks.forgotten import Forgotten
from pipeline.sinks.sink import Sink
from pipeline.sinks.usage import UsageTable
from pipeline.sources.backfill.plans import Plans
from pipeline.sources.pushed import KnownFormats
from pipeline.tasks.loaded import CPU_PROFILE, LoadedModels, WorkerProfile
from pipeline.tasks.share import GpuShare
from pipeline.watching.callbacks import Callbacks, Expected
from pipeline.watching.sessions import keys as session_keys
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.state import WatcherState
from pipeline.watching.watcher import Watcher

if TYPE_CHECKING:
    from celery import Celery

_EVIDENCE_MOST: Final = 20_000  # lines: 20 MiB


class Context:
    """The parts of one process, each built once.

    `app` is None where nothing goes through Celery (workers/one_process.py).
    """

    def __init__(
        self,
        app: "Celery | None",
        settings: Settings,
        profile: WorkerProfile = CPU_PROFILE,
    ) -> None:
        self.app = app
        self.settings = settings
        self.profile = profile
        self.in_sink = False  # while a step waits for the sink, its slowness is no fault of the batch
        self.pace = PassPace()  # of stage ingest
        self.usage_maintained_s = float("-inf")  # monotonic: the last time (tasks/usage.py)
        self.decisions_copied_s = float("-inf")  # when what people decided was copied, monotonic
        self._session_versions: dict[str, str | None] = {}  # by model, in this round of the watcher
        self.compaction_yields = 0  # rounds that waiting batches have postponed (tasks/compact.py)

    def end_process(self, code: int) -> None:
        """End this process, because no call ends a thread that hangs."""
        os._exit(code)

    def go_on(self) -> None:
        """Raises Cancelled where this process ends and a training in it is not to be waited for."""

    def prepare(self) -> None:
        """Load the files that every batch needs, so that a fault there precedes the claim.

        A failed load is tried again by the next call. Raises BadInput (BadMask, BadSetting), OSError."""
        _ = self.masks, self.session_patterns
        script_files()

    @functools.cached_property
    def owner(self) -> str:
        """The holder in claims and leases. Containers may share host and pid: the random suffix tells them
        apart."""
        return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

    @functools.cached_property
    def client(self) -> "redis.Redis":
        return connect(self.settings)

    @functools.cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.client, self.settings)

    @functools.cached_property
    def committer(self) -> ThreadPoolExecutor:
        """The one thread that commits while the step goes on (tasks/grouping/group_commit.py)."""
        return ThreadPoolExecutor(1, "commit")

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
    def jobs(self) -> PoolJobs:
        """Programs that people submitted."""
        return PoolJobs(self.client, self.settings)

    @functools.cached_property
    def job_keeper(self) -> JobKeeper:
        return JobKeeper(self.pool, self.jobs, nodes=self.submit.job_nodes, send=self.submit.start_job)

    @functools.cached_property
    def ended_leases(self) -> EndedLeases:
        """Usage records that wait for the store."""
        return EndedLeases(self.client, self.settings)

    @functools.cached_property
    def usage_table(self) -> UsageTable:
        return usage_of(self.settings)

    @functools.cached_property
    def share(self) -> GpuShare | None:
        """The GPU share of this process; None if it scores without a lease."""
        if not self.profile.leased:
            return None
        return GpuShare(self.pool, self.settings, holder=self.owner, place=self.models)

    @functools.cached_property
    def models(self) -> LoadedModels:
        return LoadedModels(self.registry, self.settings, self.profile)

    @functools.cached_property
    def formats(self) -> KnownFormats:
        return KnownFormats()

    @functools.cached_property
    def masks(self) -> MaskSet:
        return MaskSet.load(extra=self.settings.intake.masks)

    @functools.cached_property
    def session_patterns(self) -> tuple[session_keys.KeyPattern, ...]:
        """Patterns of session keys from the settings, besides the built-in ones."""
        return session_keys.user_patterns(self.settings.watch.session_keys)

    @functools.cached_property
    def verdicts(self) -> Verdicts:
        return Verdicts(self.client, self.settings)

    @functools.cached_property
    def evidence(self) -> LRUCache[tuple[str, int], Evidence]:
        """Evidence by model version and pattern, of lines that may have no verdict yet."""
        return LRUCache(_EVIDENCE_MOST)

    @functools.cached_property
    def marks(self) -> Marks:
        return Marks(self.client, self.settings)

    @functools.cached_property
    def learner(self) -> Learner:
        return Learner(self.client, self.settings, self.verdicts, at_store=self.at_store)

    @functools.cached_property
    def trainings(self) -> Trainings:
        return Trainings(self.client, self.settings)

    @functools.cached_property
    def plans(self) -> Plans:
        """The plans of backfills."""
        return Plans(self.client, self.settings)

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
        """`sink`, with `in_sink` set, for a step that reads or changes stored results."""
        with self.at_store():
            yield self.sink(purpose)

    @contextmanager
    def at_store(self) -> Iterator[None]:
        """Sets `in_sink` while a step waits for the store."""
        self.in_sink = True
        try:
            yield
        finally:
            self.in_sink = False

    @functools.cached_property
    def _forgotten(self) -> dict[Purpose, Forgotten]:
        if "parquet" not in self.settings.data.sinks:
            return {}
        sinks = {p: parquet_of(self.settings, p) for p in Purpose}
        return {p: Forgotten(self.client, self.ledger.backlog, sink, p) for p, sink in sinks.items()}

    @functools.cached_property
    def compactors(self) -> dict[Purpose, Compactor]:
        """Compaction of the results of each purpose."""
        backlog = self.ledger.backlog
        return {p: compactor_of(self.settings, p, backlog, self.forgotten(p)) for p in Purpose}

    def forgotten(self, purpose: Purpose) -> Forgotten | None:
        """Stored batches that the ledger has forgotten; None without a sink of files."""
        return self._forgotten.get(purpose)

    def version(self, workload: str) -> str | None:
        """The version that a workload's lines are answered under now, None before the first model.

        Raises ModelUnavailable.
        """
        return self.versions([workload])[workload]

    def versions(self, workloads: Iterable[str]) -> dict[str, str | None]:
        """`version` of several workloads; each model is asked for once. Raises ModelUnavailable."""
        found: dict[str, str | None] = {}
        by_workload = {}
        for workload in workloads:
            model = model_of(workload, self.settings.train.own_models)
            if model not in found:
                found[model] = self._version_of(model)
            by_workload[workload] = found[model]
        return by_workload

    def _version_of(self, model: str) -> str | None:
        if model != SHARED:
            with suppress(ModelUnavailable):  # status shows the fault; the shared model answers
                version = self.models.serving.version(model)
                if version is not None:
                    return version
        return self.models.serving.version()

    @functools.cached_property
    def watcher(self) -> Watcher:
        callbacks = Callbacks(
            session_model=self.session_model,
            store=self._store_found,
            normal=self.marks.normal,
            expected=self.expected,
        )
        return Watcher(WatcherState(self.client, self.settings), self.settings, callbacks)

    def begin_watching(self) -> None:
        """A round of the watcher begins: each model is asked for its version once in it."""
        self._session_versions.clear()

    def session_model(self, workload: str, kind: str) -> tuple[str, SessionModel] | None:
        """(version, session model) of the live version, for one kind of key; None without one."""
        model_name = model_of(workload, self.settings.train.own_models)
        if model_name not in self._session_versions:
            try:
                version = self._version_of(model_name)
            except ModelUnavailable:  # status shows the fault; its sessions are not judged
                version = None
            self._session_versions[model_name] = version
        version = self._session_versions[model_name]
        model = None if version is None else self.models.session_model(version, workload, kind)
        return None if version is None or model is None else (version, model)

    def expected(self, workload: str) -> Expected:
        """What the training of the live version expects of a day."""
        try:
            version = self.version(workload)
            return Expected() if version is None else self.models.expected(version)
        except (ModelUnavailable, BadBundle):  # status shows the fault
            return Expected()

    def _store_found(self, batch_id: str, _: str, rows: pl.DataFrame) -> None:
        """Write findings to every sink. Idempotent: the id of the rows is final. Raises Rejected where a sink
        will never take them."""
        forgotten = self.forgotten(Purpose.SCORE)
        with self.at_sink(Purpose.SCORE) as sink:
            if forgotten is not None:  # after a crash of Redis a finding may come again
                forgotten.look()
            sink.write(batch_id, rows)
            if forgotten is not None:
                forgotten.taken_over(batch_id, rows)
