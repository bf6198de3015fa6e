"""The embedded stack on one machine: a private Redis, Celery workers as processes, beat; supervised until it ends.

    with Stack(settings) as stack:     # ready here
        while work: stack.check()      # restarts what died; raises StackFailed when something keeps dying

One stack per data directory (flock). Children run in sessions of their own, so Ctrl-C reaches only the
supervisor, which ends them in order: workers finish their step, then Redis. Whatever way the supervisor
ends, no child outlives it.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.drain.masking import MaskSet
from pipeline.errors import BadInput, StackFailed
from pipeline.gpu.fairness import tenants
from pipeline.gpu.leases import Leases
from pipeline.gpu.probe import has_devices
from pipeline.keyspace import connect
from pipeline.observe import logger
from pipeline.presence import Presence, state_file
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.workers import flower as flower_process
from pipeline.workers.redis_server import PrivateRedis, check_redis

READY_S: Final = 60.0
STOP_S: Final = 12.0
# A process that dies this often within a minute will not come back by itself.
CRASHES: Final = 5
CRASH_WINDOW_S: Final = 60.0
# Roles with a module of their own, and what it is called with; the others share one.
MODULES: Final = {
    "train": ("train", ["train", "cpu"]),
    "train-gpu": ("train", ["train", "cuda"]),
    "infer-gpu": ("gpu", ["infer-gpu"]),
    "agent": ("agent", ["agent"]),
    "source": ("source", ["source"]),
}


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    command: list[str]
    process: "subprocess.Popen[bytes]"
    log: Path
    crashes: list[float] = field(default_factory=list)


class Stack:
    """Starts on `__enter__`, ends on `__exit__`. Use from the main thread: the tether of Redis counts the thread."""

    def __init__(self, settings: Settings, *, flower: bool = False) -> None:
        # Absolute, because the workers run in the data directory.
        self.settings = replace(
            settings,
            data_dir=settings.data_dir.absolute(),
            results_dir=None if settings.results_dir is None else settings.results_dir.absolute(),
            masks=tuple(path.absolute() for path in settings.masks),
            opensearch_ca=None if settings.opensearch_ca is None else settings.opensearch_ca.absolute(),
            supervisor_pid=os.getpid(),
        )
        self.private: PrivateRedis | None = None
        self.redis_process: subprocess.Popen[bytes] | None = None
        self.children: list[Child] = []
        self.flower: Child | None = None  # not vital: it is no worker, and the stack goes on without it
        self.gpu: list[Child] = []  # not vital either: without them the CPU does it all
        self.ready_s = 0.0
        self._with_gpu = False
        self._with_flower = flower
        self._door: socket.socket | None = None
        self._lock: IO[str] | None = None
        self._redis_crashes: list[float] = []

    def __enter__(self) -> Self:
        began = time.monotonic()
        MaskSet.load(extra=self.settings.masks)  # a bad mask is said here, not by every batch
        tenants(self.settings.gpu_tenants)
        if self._with_flower:
            flower_process.check(self.settings.flower_address, self.settings.flower_auth)
        self._lock = lock(self.settings.data_dir)
        try:
            if self._with_flower:
                self._door = flower_process.listen(self.settings)
            self._outlive()
            if self.settings.redis_url is None:  # with a Redis of our own nobody else writes there either
                for place in (self.settings.results, self.settings.baseline):
                    ParquetSink(place).sweep()
            self._start_redis()
            with_gpu = self.settings.gpu_agent and has_devices()
            for role, name in self._roles(gpu=with_gpu):
                self.children.append(self._spawn(role, name))
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - began
        self._start_gpu()  # nobody waits for these
        self._start_flower()
        self._write_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _outlive(self) -> None:
        """After a supervisor that was killed: its children end by themselves, and only then ours may start."""
        try:
            state = json.loads(state_file(self.settings.data_dir).read_text(encoding="utf-8"))
            pids = (*state["workers"].values(), *state.get("redis", []), *state.get("flower_pids", []))
            old = {int(pid) for pid in pids}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        deadline = time.monotonic() + STOP_S
        while old and time.monotonic() < deadline:
            old = {pid for pid in old if _works_in(pid, self.settings.data_dir)}
            time.sleep(0.05)
        for pid in old:
            logger(pid=pid).warning("worker.killed", why="it outlived the stack it belonged to")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _roles(self, *, gpu: bool) -> list[tuple[str, str]]:
        ingest = [("ingest", f"ingest-{n}") for n in range(1, self.settings.ingest_processes + 1)]
        source = [("source", "source")] if self.settings.opensearch_source else []
        train = ("train-gpu" if gpu else "train", "train")
        others = ((role, role) for role in ("infer-cpu", "drain", "store", "beat"))
        self._with_gpu = gpu
        return [*ingest, *others, train, *source]

    def _start_redis(self) -> None:
        if self.settings.redis_url is None:
            self.private = PrivateRedis(self.settings)
            self.redis_process = self.private.start()
            self.settings = replace(self.settings, redis_url=self.private.url)
        check_redis(self.settings)
        if self.private is not None:
            # Every worker of an earlier Redis here was a child of the process whose lock we hold now.
            Leases(connect(self.settings), self.settings).bless()

    def _spawn(self, role: str, name: str) -> Child:
        module, args = MODULES.get(role, ("cpu", [role, name]))
        logs = self.settings.data_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}.log"
        command = [sys.executable, "-m", f"pipeline.workers.{module}", *args]
        return Child(name=name, command=command, process=self._popen(command, log), log=log)

    def _start_gpu(self) -> None:
        """The agent that watches the GPUs of this machine, and a process that scores on one."""
        if self._with_gpu:
            self.gpu = [self._spawn(role, role) for role in ("agent", "infer-gpu")]

    def _check_gpu(self) -> None:
        """Restart what died; what keeps dying is given up, once and for all, and the CPU does its work."""
        for child in list(self.gpu):
            if (code := child.process.poll()) is None:
                continue
            logger(worker=child.name).error("worker.died", code=code)
            try:
                self._count_crash(child.crashes, child.name, _tail(child.log))
                child.process = self._popen(child.command, child.log)
            except (StackFailed, OSError) as exc:
                logger(worker=child.name).error("worker.given_up", why=str(exc))
                self.gpu.remove(child)
            self._note_state()

    @property
    def flower_url(self) -> str | None:
        """Where Flower is looked at; None when it is off or was given up."""
        return None if self._door is None else flower_process.url(self._door)

    def _start_flower(self) -> None:
        """Start it, or start it again. Its socket stays open meanwhile, so its port stays and browsers wait."""
        if self._door is None:
            return
        log = self.settings.data_dir / "logs" / "flower.log"
        command = [sys.executable, "-m", "pipeline.workers.flower", f"--fd={self._door.fileno()}"]
        try:
            process = self._popen(command, log, fds=(self._door.fileno(),))
        except OSError as exc:
            logger().error("flower.given_up", why=str(exc))
            self._close_door()
            self.flower = None
            return
        with contextlib.suppress(psutil.Error):
            psutil.Process(process.pid).nice(10)  # looking must not slow the work
        if self.flower is None:
            self.flower = Child(name="flower", command=command, process=process, log=log)
        else:
            self.flower.process = process

    def _check_flower(self) -> None:
        """Restart it when it died; when it keeps dying, say so once and go on without it."""
        if self.flower is None or (code := self.flower.process.poll()) is None:
            return
        logger(worker="flower").error("worker.died", code=code)
        try:
            self._count_crash(self.flower.crashes, "Flower", _tail(self.flower.log))
        except StackFailed as exc:
            logger().error("flower.given_up", why=str(exc))
            self._close_door()
            self.flower = None
        self._start_flower()
        self._note_state()

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _popen(
        self, command: list[str], log: Path, *, fds: tuple[int, ...] = ()
    ) -> "subprocess.Popen[bytes]":
        keep = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")}
        # torch spins all cores while it waits unless told otherwise, at the cost of everybody else.
        env = {**keep, **self.settings.to_environ(), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as out:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=self.settings.data_dir,
                start_new_session=True, pass_fds=fds,
            )  # fmt: skip

    def _wait_ready(self) -> None:
        """Until every child said hello to Redis."""
        presence = Presence(connect(self.settings), self.settings)
        wanted = {child.name: child.process for child in self.children}
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            here = {w.name for w in presence.live() if w.name in wanted and w.pid == wanted[w.name].pid}
            if len(here) == len(wanted):
                return
            for child in self.children:
                if child.process.poll() is not None:
                    raise StackFailed(f"{child.name} ended while starting: {_tail(child.log)}")
            time.sleep(0.05)
        missing = sorted(set(wanted) - here)
        raise StackFailed(
            f"{', '.join(missing)} did not get ready within {READY_S:.0f} s; see {self.children[0].log.parent}"
        )

    def check(self) -> None:
        """Restart what died. Raises StackFailed when a process keeps dying. Call it at least every second."""
        if (
            self.private is not None
            and self.redis_process is not None
            and self.redis_process.poll() is not None
        ):
            logger().error("redis.died", code=self.redis_process.returncode, why=self.private.last_words())
            self._count_crash(self._redis_crashes, "Redis", self.private.last_words())
            self.redis_process = self.private.start()
            self._note_state()
        for child in self.children:
            code = child.process.poll()
            if code is None:
                continue
            logger(worker=child.name).error("worker.died", code=code)
            self._count_crash(child.crashes, child.name, _tail(child.log))
            child.process = self._popen(child.command, child.log)
            self._note_state()
        self._check_gpu()
        self._check_flower()

    def _count_crash(self, crashes: list[float], name: str, words: str) -> None:
        now = time.monotonic()
        crashes[:] = [t for t in crashes if now - t < CRASH_WINDOW_S] + [now]
        if len(crashes) >= CRASHES:
            raise StackFailed(f"{name} died {len(crashes)} times within {CRASH_WINDOW_S:.0f} s: {words}")

    def stop(self) -> None:
        """End every child: a warm shutdown first, then by force; Redis last, so that steps can be committed."""
        flower = [] if self.flower is None else [self.flower]
        _end([c.process for c in (*self.children, *self.gpu, *flower)], signal.SIGTERM)
        self.children = []
        self.gpu = []
        self.flower = None
        self._close_door()
        if self.redis_process is not None:
            _end([self.redis_process], signal.SIGTERM)
            self.redis_process = None
        with contextlib.suppress(OSError):
            state_file(self.settings.data_dir).unlink()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _note_state(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the stack
            self._write_state()

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "redis_url": self.settings.redis_url,
            "key_prefix": self.settings.key_prefix,
            "policy": self.settings.policy(),
            "ready_s": round(self.ready_s, 2),
            "workers": {c.name: c.process.pid for c in (*self.children, *self.gpu)},
            "redis": [] if self.redis_process is None else [self.redis_process.pid],
            "flower": self.flower_url,
            "flower_pids": [] if self.flower is None else [self.flower.process.pid],
        }
        path = state_file(self.settings.data_dir)
        temporary = path.with_suffix(".part")
        temporary.unlink(missing_ok=True)
        # The URL may hold a password: nobody else may read it, not for a moment.
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
            json.dump(state, out)
        temporary.replace(path)


def lock(data_dir: Path) -> IO[str]:
    """The right to work in a data directory, until the file is closed. Raises BadInput when another process has it."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        handle = (data_dir / "lock").open("a+", encoding="utf-8")
    except OSError as exc:
        raise BadInput(
            f"the data directory {data_dir} cannot be used ({exc.strerror}); choose another directory"
        ) from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        handle.seek(0)
        pid = handle.read().strip() or "?"
        handle.close()
        raise BadInput(
            f"a logweir (process {pid}) already works in {data_dir}; stop it or choose another directory"
        ) from exc
    handle.seek(0)
    handle.truncate()
    handle.write(str(os.getpid()))
    handle.flush()
    return handle


def _works_in(pid: int, data_dir: Path) -> bool:
    """A process of an earlier stack of this directory, and not a stranger who got its number."""
    try:
        return Path(psutil.Process(pid).cwd()).is_relative_to(data_dir)
    except (psutil.Error, OSError):
        return False


def _end(processes: "list[subprocess.Popen[bytes]]", first: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(first)
    deadline = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger(pid=process.pid).warning("worker.killed", why=f"it did not end within {STOP_S:.0f} s")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its session: pool children too
            process.wait()


def _tail(log: Path) -> str:
    try:
        lines = [x for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    except OSError:
        return "it left no log"
    return lines[-1][:500] if lines else "it left no log"
