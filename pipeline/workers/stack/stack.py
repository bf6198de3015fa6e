"""The embedded stack on one machine: a private Redis, Celery workers as processes, beat; supervised until it
ends.

    with Stack(settings) as stack:     # ready here
        while work: stack.check()      # restarts dead children; StackFailed when one cannot start

One stack per data directory (flock). Children run in sessions of their own, so Ctrl-C reaches only the
supervisor, which ends them in order: workers finish their step, then Redis. No child outlives the supervisor.
"""

import contextlib
import importlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import redis

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import RedisUnavailable, StackFailed
from pipeline.gpu.node.probe import shown_devices
from pipeline.gpu.policy.fairness import parse_tenants
from pipeline.logs import logger
from pipeline.observe.embedded import called
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.redis.attach import state_file
from pipeline.redis.check import check_redis
from pipeline.redis.connection import connect
from pipeline.redis.leases import Leases
from pipeline.service.access.own_key import make_own_key
from pipeline.settings import Settings, without_settings
from pipeline.settings import nats as nats_settings
from pipeline.settings.kafka import kafka_packages, with_absolute_files
from pipeline.settings.listeners import API_DEFAULT, Listener
from pipeline.sources.protocols.rules import read_rules
from pipeline.watching.sessions import keys as session_keys
from pipeline.workers import flower as flower_process
from pipeline.workers import sockets
from pipeline.workers.same_store import join
from pipeline.workers.stack.child import STOP_S, Child, Rule, end, last_line, restart_dead
from pipeline.workers.stack.data_dir import lock, outlive, write_state
from pipeline.workers.stack.intake_sockets import IntakeSockets
from pipeline.workers.stack.limits import check_files
from pipeline.workers.stack.more_ingest import MOST, MoreIngest, OldestBatch
from pipeline.workers.stack.private_redis import PrivateRedis
from pipeline.workers.stack.restarts import Crashes, Restarts
from pipeline.workers.stack.sidecars import Sidecars

READY_S: Final = 60.0
ASK_S: Final = 1.0  # a Redis that hangs must not hang the supervisor
# Roles with a module of their own, and what it is called with, its name first; the others share one.
MODULES: Final = {
    "train": ("train", ["train", "cpu"]),
    "train-gpu": ("train", ["train", "cuda"]),
    "infer-gpu": ("gpu", ["infer-gpu"]),
    "agent": ("agent", ["agent"]),
    "gpu-jobs": ("jobs", ["gpu-jobs"]),
    "serve": ("serve", ["serve"]),
    "source": ("source", ["source"]),
    "kafka": ("kafka", ["kafka"]),
    "nats": ("nats", ["nats"]),
    "intake": ("intake", ["intake"]),
}


class Stack:
    """Starts on `__enter__`, ends on `__exit__`. Main thread only: the tether of Redis ends with its
    thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        flower: bool = False,
        metrics: bool = False,
        intake: bool = False,
        api: bool = False,
        serve: bool = False,
    ) -> None:
        # Absolute, because the workers run in the data directory, and without links, because a process is
        # recognised by the directory that it works in.
        self.settings = settings.replace(
            data_dir=settings.data.dir.resolve(),
            results_dir=None if settings.data.results_dir is None else settings.data.results_dir.absolute(),
            masks=tuple(path.absolute() for path in settings.intake.masks),
            kafka_source=settings.kafka.source and with_absolute_files(settings.kafka.source),
            nats_source=settings.nats.source and nats_settings.with_absolute_paths(settings.nats.source),
            gpu_serve=settings.gpu.serve
            and str(Listener.parse(settings.gpu.serve, setting="gpu_serve").absolute()),
            workload_rules=None if settings.intake.rules is None else settings.intake.rules.absolute(),
            opensearch_ca=None if settings.opensearch.ca is None else settings.opensearch.ca.absolute(),
            supervisor_pid=os.getpid(),
        )
        self.private: PrivateRedis | None = None
        self.redis_process: subprocess.Popen[bytes] | None = None
        self.children: list[Child[Restarts]] = []
        self.sidecars = Sidecars(self.settings.data.dir / "logs", self._popen)
        self.gpu: list[Child[Crashes]] = []  # not vital either: without them the CPU does it all
        self.more_ingest: MoreIngest | None = None  # where the number of processes is not set
        self.ready_s = 0.0
        self.stop_s = STOP_S  # how long processes may take to end, before they are killed
        self._with_gpu = False
        self._devices: int | None = None
        self._with_flower = flower
        self._with_metrics = metrics
        self._with_intake = intake and bool(settings.intake.listeners)
        self.intake = IntakeSockets()
        self._with_api = api and bool(settings.stack.api)
        self._with_serve = serve and bool(settings.gpu.serve)
        self._lock: IO[str] | None = None
        self._redis_restarts = Restarts()

    def __enter__(self) -> Self:
        began = time.monotonic()
        MaskSet.load(extra=self.settings.intake.masks)  # a bad mask is said here, not by every batch
        read_rules(self.settings.intake.rules)
        session_keys.user_patterns(self.settings.watch.session_keys)
        parse_tenants(self.settings.gpu.tenants)
        for package in (
            *kafka_packages(self.settings.kafka.source),
            *nats_settings.nats_packages(self.settings.nats.source),
        ):
            importlib.import_module(package)  # a missing extra is said here, not in a log
        if self._with_flower:
            flower_process.check_login(self.settings.stack.flower_address, self.settings.stack.flower_auth)
        elastic = not self.settings.stack.ingest_processes
        check_files(len(self._roles(gpu=False)) + (MOST - 1 if elastic else 0))
        self._lock = lock(self.settings.data.dir)
        try:
            outlive(self.settings.data.dir)  # before the ports, which an earlier stack may still hold
            if self._with_flower:
                self.sidecars.add("flower", flower_process.open_listener(self.settings))
            if self._with_metrics:
                at = (self.settings.stack.metrics_address, self.settings.stack.metrics_port)
                self.sidecars.add("metrics", sockets.listen("metrics", *at))
            if self._with_intake:
                listeners = self.intake.open(self.settings.intake.listeners)
                self.settings = self.settings.replace(intake=listeners)
            if self._with_api:
                self._open_api()
            self._start_redis()
            self._devices = shown_devices() if self.settings.gpu.agent else None
            for role, name in self._roles(gpu=self._devices is not None):
                self.children.append(self._spawn(role, name, Restarts()))
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - began
        self._start_gpu()  # the stack is ready without them
        if elastic:
            oldest = OldestBatch(connect(self.settings, timeout_s=ASK_S), self.settings)
            self.more_ingest = MoreIngest(
                oldest, lambda name: self._spawn("ingest", name, Crashes()), self._start_again
            )
        self.sidecars.show()
        self._write_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def producer(self) -> Producer:
        """Accepts batches and wakes the workers of this stack."""
        return Producer.connect(self.settings)

    def expect_training(self) -> None:
        """Told when a training will come; the trainer of a fleet waits ready."""

    def _roles(self, *, gpu: bool) -> list[tuple[str, str]]:
        wanted = self.settings
        ingest = [("ingest", f"ingest-{n}") for n in range(1, max(1, wanted.stack.ingest_processes) + 1)]
        others = [
            *_several("infer-cpu", wanted.stack.infer_processes),
            *_several("drain", wanted.drain.processes),
            *_several("store", wanted.stack.store_processes),
            *_several("reader", wanted.stack.reader_processes),
            ("beat", "beat"),
        ]
        source = [("source", "source")] if wanted.opensearch.source else []
        kafka = [("kafka", "kafka")] if wanted.kafka.source else []
        nats = [("nats", "nats")] if wanted.nats.source else []
        intake = [("intake", "intake")] if self._with_intake else []
        train = ("train-gpu" if gpu else "train", "train")
        self._with_gpu = gpu
        return [*ingest, *others, train, *source, *kafka, *nats, *intake]

    def _start_redis(self) -> None:
        if self.settings.redis.url is None:
            self.private = PrivateRedis(self.settings)
            self.redis_process = self.private.start()
            self.settings = self.settings.replace(redis_url=self.private.url)
        check_redis(self.settings)
        join(connect(self.settings), self.settings)
        if self.private is not None:
            # Every worker of an earlier Redis here was a child of the process whose lock we hold now.
            Leases(connect(self.settings), self.settings).clear_quarantine()

    def _open_api(self) -> None:
        """Its socket, with the port that was found, and the key of this machine's user."""
        wanted = Listener.parse(self.settings.stack.api, setting="api")
        tries = sockets.TRIES if self.settings.stack.api == API_DEFAULT else 1
        opened = sockets.listener_socket(wanted, tries=tries, name="api")
        assert opened is not None  # noqa: S101 - only gRPC opens its own
        found = replace(wanted, port=opened.getsockname()[1]).absolute()
        self.settings = self.settings.replace(api=str(found))
        make_own_key(self.settings.data.dir)
        self.sidecars.add("api", opened)

    def _spawn(self, role: str, name: str, deaths: Rule) -> Child[Rule]:
        module, args = MODULES.get(role, ("cpu", [role, name]))
        if role in MODULES:
            args = [name, *args[1:]]
        logs = self.settings.data.dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}.log"
        fds = self.intake.fds if role == "intake" else ()
        command = [sys.executable, "-m", f"pipeline.workers.{module}", *args, *(f"--fd={fd}" for fd in fds)]
        inherited = tuple(fd for fd in fds if fd >= 0)
        process = self._popen(command, log, inherited)
        return Child(name=name, command=command, process=process, log=log, deaths=deaths, fds=inherited)

    @property
    def _workers(self) -> list[Child[Restarts] | Child[Crashes]]:
        more = self.more_ingest.children if self.more_ingest is not None else []
        return [*self.children, *more, *self.gpu]

    def _start_gpu(self) -> None:
        """The agent of this machine's GPUs, a process that scores for each, and those that are asked for."""
        if self._with_gpu:
            scoring = min(self.settings.gpu.infer_processes, max(1, self._devices or 1))
            jobs = [("gpu-jobs", "gpu-jobs")] if self.settings.gpu.jobs else []
            serve = [("serve", "serve")] if self._with_serve else []
            roles = [("agent", "agent"), *_several("infer-gpu", scoring), *jobs, *serve]
            self.gpu = [self._spawn(role, name, Crashes()) for role, name in roles]

    def _check_gpu(self) -> None:
        """Restart what died; what keeps dying is given up, once and for all, and the CPU does its work."""
        if restart_dead(self.gpu, self._start_again):
            self._note_state()

    def _start_again(self, child: Child[Crashes]) -> "subprocess.Popen[bytes]":
        return self._popen(child.command, child.log)

    @property
    def serves(self) -> bool:
        """Whether this machine serves models of the pool."""
        return any(child.name == "serve" for child in self.gpu)

    @property
    def flower_url(self) -> str | None:
        """Where Flower is looked at; None when it is off or was given up."""
        return self.sidecars.url("flower")

    @property
    def api_url(self) -> str | None:
        """Where the pipeline is asked; None when the API is off or was given up."""
        if self.sidecars.url("api") is None:
            return None
        return Listener.parse(self.settings.stack.api, setting="api").address

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus reads the metrics; None when they are off or were given up."""
        url = self.sidecars.url("metrics")
        return None if url is None else f"{url}/metrics"

    def _popen(self, command: list[str], log: Path, fds: tuple[int, ...] = ()) -> "subprocess.Popen[bytes]":
        # torch spins all cores while it waits unless told otherwise, at the cost of everybody else.
        own = {**self.settings.to_environ(), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**without_settings(), **own},
                cwd=self.settings.data.dir,
                start_new_session=True,
                pass_fds=fds,
            )

    def _wait_ready(self) -> None:
        """Until every child said hello to Redis."""
        presence = Presence(connect(self.settings), self.settings)
        wanted = {called(self.settings, child.name, embedded=True): child.process for child in self.children}
        deadline = time.monotonic() + READY_S
        here: set[str] = set()
        while time.monotonic() < deadline:
            with contextlib.suppress(RedisUnavailable):  # the workers wait for it, too
                here = {w.name for w in presence.live() if w.name in wanted and w.pid == wanted[w.name].pid}
            if len(here) == len(wanted):
                return
            for child in self.children:
                if child.process.poll() is not None:
                    raise StackFailed(f"{child.name} ended while starting: {last_line(child.log)}")
            time.sleep(0.05)
        missing = sorted(set(wanted) - here)
        raise StackFailed(
            f"{', '.join(missing)} did not get ready within {READY_S:.0f} s; see "
            f"{self.children[0].log.parent}"
        )

    def check(self) -> None:
        """Restart dead processes; call it at least every second. Raises StackFailed if one cannot start any
        more."""
        self._check_redis()
        for child in self.children:
            self._check_child(child)
        self._check_gpu()
        changed = self.sidecars.check()
        if self.more_ingest is not None:
            changed = self.more_ingest.check() or changed
        if changed:
            self._note_state()

    def _check_child(self, child: Child[Restarts]) -> None:
        restarts = child.deaths
        if restarts.again_at is None:
            if (code := child.process.poll()) is None:
                return
            logger(worker=child.name).error("worker.died", code=code)
            self._died(restarts, child.name, last_line(child.log), ready=code == 0 or self._was_ready(child))
        if not restarts.due:
            return
        try:
            child.process = self._popen(child.command, child.log, child.fds)
        except OSError as exc:
            logger(worker=child.name).error("worker.not_started", why=str(exc))
            self._died(restarts, child.name, str(exc), ready=False)
        else:
            restarts.started()
        self._note_state()

    def _check_redis(self) -> None:
        restarts = self._redis_restarts
        if self.private is None or self.redis_process is None:
            return
        if restarts.again_at is None:
            if self.redis_process.poll() is None:
                return
            words = self.private.last_words()
            logger().error("redis.died", code=self.redis_process.returncode, why=words)
            self._died(restarts, "Redis", words, ready=True)
        if not restarts.due:
            return
        try:
            self.redis_process = self.private.start()
        except (StackFailed, OSError) as exc:
            logger().error("redis.not_started", why=str(exc))
            self._died(restarts, "Redis", self.private.last_words(), ready=False)
        else:
            restarts.started()
        self._note_state()

    def _was_ready(self, child: Child[Restarts]) -> bool | None:
        """Whether the process that has just died had said hello to Redis; None when Redis does not answer."""
        client = connect(self.settings, timeout_s=ASK_S)
        try:
            heard = Presence(client, self.settings).heard()
        except (RedisUnavailable, redis.RedisError):
            return None
        finally:
            client.close()
        name = called(self.settings, child.name, embedded=True)
        return any(w.name == name and w.pid == child.process.pid for w, _ in heard)

    def _died(self, restarts: Restarts, name: str, words: str, *, ready: bool | None) -> None:
        restarts.died(ready=ready)
        if restarts.hopeless:
            raise StackFailed(f"{name} {restarts}: {words}")

    def end_workers(self) -> None:
        """End every child but Redis, which stays supervised: a warm shutdown first, then by force.

        Nobody else changes the stored results afterwards."""
        ending = self.more_ingest.ending if self.more_ingest is not None else []
        workers = [c.process for c in self._workers]
        end([*workers, *ending, *self.sidecars.processes], within_s=self.stop_s)
        self.more_ingest = None
        self.children = []
        self.gpu = []
        self.sidecars.close()

    def stop(self) -> None:
        """End every child; Redis last, so that steps can be committed."""
        self.end_workers()
        self.intake.close()
        if self.redis_process is not None:
            end([self.redis_process], within_s=self.stop_s)
            self.redis_process = None
        with contextlib.suppress(OSError):
            state_file(self.settings.data.dir).unlink()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _note_state(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the stack
            self._write_state()

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "redis_url": self.settings.redis.url,
            "key_prefix": self.settings.redis.key_prefix,
            "policy": self.settings.policy(),
            "ready_s": round(self.ready_s, 2),
            "workers": {c.name: c.process.pid for c in self._workers},
            "redis": [] if self.redis_process is None else [self.redis_process.pid],
            "flower": self.flower_url,
            "flower_pids": self.sidecars.pids("flower"),
            "metrics": self.metrics_url,
            "metrics_pids": self.sidecars.pids("metrics"),
            "intake": self.intake.urls,
            "api": self.api_url,
            "api_pids": self.sidecars.pids("api"),
        }
        write_state(self.settings.data.dir, state)


def _several(role: str, count: int) -> list[tuple[str, str]]:
    """(role, name) of each process: the first has the name of its role, then `store-2`, `store-3`."""
    return [(role, role if n == 1 else f"{role}-{n}") for n in range(1, count + 1)]
