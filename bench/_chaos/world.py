"""The world of a chaos run: a Redis of its own behind a proxy, the stack as a service manager runs it, a
small disk.

    with World(folder, history, minutes=3) as world:   # the stack is ready here
        world.redis.kill(); world.workers(); world.disk.fill()

Whatever ends is started again, as systemd would. Messages of a worker that is stopped for longer than
VISIBILITY_S are given to another one, so that both have them when it goes on. Everything ends with the block;
and with this process, whatever way that ends, because nothing here outlives its parent. Only Linux has what
that takes."""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil  # type: ignore[import-untyped] # it publishes no types
import redis

from bench._chaos.disk import Disk
from bench._chaos.history import History
from bench._chaos.poison.sitecustomize import VISIBILITY
from bench._chaos.proxy import Proxy
from pipeline.redis.attach import state_file
from pipeline.settings import Settings
from pipeline.workers.stack.private_redis import find_server

PR_SET_CHILD_SUBREAPER: Final = 36
RESTART_S: Final = 0.5  # RestartSec= of our service manager
READY_S: Final = 180.0  # machines that run tests are busy
POLL_S: Final = 0.1
REAP_S: Final = 1.0  # it reads all of /proc
STOP_S: Final = 40.0
REDIS_MIB: Final = 256
VISIBILITY_S: Final = 10.0  # shorter than a worker is stopped for; the product's own is an hour, on purpose
POISON: Final = Path(__file__).with_name("poison")
ROOT: Final = Path(__file__).resolve().parents[2]


def settings_of(folder: Path, port: int) -> Settings:
    """The product's own time-outs; small limits where a run must be able to reach them."""
    return Settings(
        data_dir=folder / "data",
        results_dir=folder / "results",
        redis_url=f"redis://127.0.0.1:{port}/0",
        key_prefix="chaos",
        ingest_processes=2,
        infer_processes=2,
        drain_processes=2,
        store_processes=2,
        max_pending_batches=100,
        step_s=10.0,
        train_seconds=3.0,
        retrain_lines=20_000,
        retrain_backoff_s=5.0,
        flower=False,
        metrics=False,
        gpu_agent=False,
    )


@dataclass(slots=True)
class Service:
    """A command that is started again when it ends."""

    name: str
    command: list[str]
    log: Path
    env: Mapping[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    wanted: bool = False
    not_before: float = 0.0  # monotonic
    starts: int = 0


class World:
    """Use it from the main thread; its methods may be called from any."""

    def __init__(self, folder: Path, history: History, *, minutes: float) -> None:
        self.folder = folder
        self.history = history
        self.disk = Disk(folder / "results", mib=int(64 + 16 * minutes), processes=self._writers)
        self.redis_port = _free_port()
        self.proxy = Proxy(self.redis_port)
        self.settings = settings_of(folder, 0)
        self.direct = settings_of(folder, self.redis_port)
        self.client = redis.Redis.from_url(
            self.direct.redis.url or "", socket_timeout=5, socket_connect_timeout=5
        )
        self.services: dict[str, Service] = {}
        self._ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise RuntimeError("this kernel adopts no orphans; run it on Linux")
        try:
            self.disk.mount()
            self.proxy.__enter__()
            self.settings = settings_of(self.folder, self.proxy.port)
            self._add("redis", self._redis_command(), {})
            self._add("up", [sys.executable, "-m", "pipeline.cli", "up", "--json"], self._environment())
            self._keeper.start()
            self.start("redis")
            self._wait(self.redis_answers, "Redis answers")
            self.start("up")
            self._wait(self.ready, "the stack is ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop("follow")
        self.stop("up")
        self._ending.set()
        if self._keeper.is_alive():
            self._keeper.join(STOP_S)
        for process in psutil.Process().children(
            recursive=True
        ):  # the last ones: Redis, and what outlived its parent
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._reap()
        self.proxy.__exit__()
        self.disk.unmount()

    # ---- services --------------------------------------------------------------------------------

    def follow(self, path: Path, workload: str) -> None:
        """Somebody follows a file from now on."""
        command = [
            *(sys.executable, "-m", "pipeline.cli", "send", str(path)),
            *("--follow", "--workload", workload),
        ]
        self._add("follow", command, self._environment())
        self.start("follow")

    def start(self, name: str) -> None:
        self.services[name].wanted = True

    def stop(self, name: str) -> None:
        """As a service manager does: ask, then force."""
        service = self.services.get(name)
        if service is None:
            return
        with self._lock:
            service.wanted, process = False, service.process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def hold(self, name: str, seconds: float) -> None:
        """Do not start it again before so long has passed."""
        self.services[name].not_before = time.monotonic() + seconds

    def kill(self, name: str) -> bool:
        """SIGKILL the service itself; False when it does not run."""
        process = self.services[name].process
        if process is None or process.poll() is not None:
            return False
        process.kill()
        return True

    def _add(self, name: str, command: list[str], env: Mapping[str, str]) -> None:
        self.services[name] = Service(
            name=name, command=command, log=self.folder / f"{name}.log", env={**os.environ, **env}
        )

    def _keep(self) -> None:
        """The service manager. Its children end with this thread (PR_SET_PDEATHSIG), so it starts all of
        them."""
        reaped = 0.0
        while not self._ending.wait(POLL_S):
            if time.monotonic() - reaped > REAP_S:
                reaped = time.monotonic()
                self._reap()
            for service in list(self.services.values()):
                with self._lock:
                    self._look_after(service)

    def _look_after(self, service: Service) -> None:
        now = time.monotonic()
        if service.process is not None and (code := service.process.poll()) is not None:
            service.process = None
            service.not_before = max(service.not_before, now + RESTART_S)
            self.history.note(
                "ended", who=service.name, code=code, wanted=service.wanted, why=_tail(service.log)
            )
        if service.process is None and service.wanted and now >= service.not_before:
            service.starts += 1
            tether = [sys.executable, "-m", "pipeline.workers.tethered", str(os.getpid())]
            with service.log.open("ab") as out:
                service.process = subprocess.Popen(
                    [*tether, *service.command],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(service.env), cwd=ROOT,
                )  # fmt: skip
            self.history.note("started", who=service.name, times=service.starts)

    def _reap(self) -> None:
        """Orphans become our children; nobody else waits for them."""
        own = {s.process.pid for s in self.services.values() if s.process is not None}
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)

    def logweir(self, *args: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
        """One command of the product, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "pipeline.cli", *args],
            env={**os.environ, **self._environment()}, cwd=ROOT, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    # ---- what there is ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the stack wrote about itself; {} when it has not."""
        try:
            return dict(json.loads(state_file(self.direct.data.dir).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def ready(self) -> bool:
        """The stack that runs now has written that it is ready."""
        up = self.services["up"].process
        return up is not None and up.poll() is None and self.state().get("pid") == up.pid

    def workers(self, role: str = "") -> dict[str, int]:
        """Processes of the stack's workers by name, of one role or all; without those that have ended."""
        found = {}
        for name, pid in sorted(self.state().get("workers", {}).items()):
            if (not role or name == role or name.rstrip("0123456789").rstrip("-") == role) and _lives(pid):
                found[name] = int(pid)
        return found

    def pids(self) -> list[int]:
        """Every process of the world but Redis and those that start something."""
        server = self.services["redis"].process if "redis" in self.services else None
        skip = {server.pid} if server is not None else set()
        return [p.pid for p in psutil.Process().children(recursive=True) if p.pid not in skip]

    def _writers(self) -> list[int]:
        return [*self.workers("ingest").values(), *self.workers("store").values()]

    def redis_answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.client.ping())
        return False

    def _wait(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + READY_S
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {READY_S:.0f} s: {what}; see the logs in {self.folder}")
            time.sleep(POLL_S)

    # ---- how things are started ------------------------------------------------------------------

    def _redis_command(self) -> list[str]:
        directory = self.folder / "redis"
        directory.mkdir()
        options = {
            "port": self.redis_port,
            "bind": "127.0.0.1",
            "dir": directory,
            "logfile": directory / "redis.log",
            "daemonize": "no",
            "appendonly": "yes",
            # what was answered survives: pushes have no source that could read again
            "appendfsync": "always",
            "save": "",
            "maxmemory": f"{REDIS_MIB}mb",
            "maxmemory-policy": "noeviction",
            "auto-aof-rewrite-min-size": "16mb",  # so that a run meets rewrites too
        }
        return [str(find_server()), *(word for k, v in options.items() for word in (f"--{k}", str(v)))]

    def _environment(self) -> dict[str, str]:
        """For the product: these settings and no others, and the poison that only its workers taste."""
        return {
            **self.settings.replace(supervisor_pid=0).to_environ(),
            "PYTHONPATH": f"{POISON}{os.pathsep}{ROOT}",  # the workers run in the data directory
            VISIBILITY: str(VISIBILITY_S),
            "OMP_NUM_THREADS": "1",
        }


def clean_environment() -> None:
    """Nothing of a developer's own settings reaches the run, nor this process."""
    for name in list(os.environ):
        if name == "REDIS_URL" or name.startswith(("LOGWEIR_", "OPENSEARCH_")):
            del os.environ[name]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "pipeline.workers" in " ".join(process.cmdline())
    return False


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [x for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
        return lines[-1][:300] if lines else ""
    return ""
