"""Runs the command as a user does: a subprocess, a real Redis, real workers; and leaves no process behind."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import polars as pl
import psutil
import pytest
import redis

from pipeline import cli
from pipeline.commands.common import print_json
from pipeline.redis.attach import attached
from pipeline.service.status import read_status
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink

# Every process started here, and whatever it starts, carries this name in its environment.
MARK = "E2E_MARK"
# Short times for what heals by expiry, so that tests wait seconds; training is as short as it may be useful.
QUICK = {
    "LOGWEIR_INTERNAL_CLAIM_TTL_MS": "3000",
    "LOGWEIR_INTERNAL_LEASE_TTL_MS": "4000",
    "LOGWEIR_INTERNAL_OVERDUE_MS": "1000",
    "LOGWEIR_INTERNAL_SWEEP_S": "0.5",
    "LOGWEIR_INTERNAL_WATCH_S": "0.5",
    "LOGWEIR_SESSION_TIMEOUT_S": "3",
    "LOGWEIR_INTERNAL_RETRAIN_BACKOFF_S": "0.5",
    "LOGWEIR_FLOWER": "no",  # test_flower.py starts it
    "LOGWEIR_METRICS": "no",  # test_metrics.py starts it
    "LOGWEIR_INTAKE": "",  # test_intake.py starts it
    "LOGWEIR_API": "",  # tests/workers/api has one of its own
    "LOGWEIR_INGEST_PROCESSES": "1",  # workers/test_more_ingest.py lets it grow
    "LOGWEIR_READER_PROCESSES": "0",  # test_workers.py and test_backfill.py start some
    "OMP_NUM_THREADS": "2",
    "POLARS_MAX_THREADS": "2",
}


def environment(mark: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tests' own environment: nothing of a developer's settings, everything of QUICK."""
    clean = {k: v for k, v in os.environ.items() if k != "REDIS_URL" and not k.startswith("LOGWEIR_")}
    return {**clean, **QUICK, "COLUMNS": "120", MARK: mark, **(extra or {})}


def marked(mark: str) -> list[psutil.Process]:
    """The processes that carry this mark, or work below the directory of this name; zombies are dead.

    Redis writes its title over its environment, so it is known by its directory.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            ours = process.environ().get(MARK) == mark or process.cwd().startswith(mark + os.sep)
            if ours:
                found.append(process)
    return found


def is_redis(process: psutil.Process) -> bool:
    """The private server, whichever was found."""
    return any(name in " ".join(process.cmdline()) for name in ("redis-server", "valkey-server"))


T = TypeVar("T")


def until(ask: Callable[[], T], *, within_s: float = 120.0, what: str) -> T:
    """Poll until the answer is true; it fails the test with `what` and the last answer. A question that takes
    long is asked less often, so that it takes a tenth of a processor from those that it waits for."""
    deadline = time.monotonic() + within_s
    while True:
        began = time.monotonic()
        if answer := ask():
            return answer
        ended = time.monotonic()
        if ended > deadline:
            pytest.fail(f"not within {within_s:.0f} s: {what}; the last answer was {answer!r}")
        time.sleep(min(max(0.05, 9 * (ended - began)), 0.5))


def nothing_left(mark: str, *, within_s: float = 20.0) -> None:
    """Fails when a process of this mark outlives the time."""
    deadline = time.monotonic() + within_s
    while left := marked(mark):
        if time.monotonic() > deadline:
            names = [" ".join(p.cmdline()) for p in left]
            end(mark)
            pytest.fail(f"orphans after {within_s:.0f} s: {names}")
        time.sleep(0.1)


# Commands that run beside a test.
_started: Final = weakref.WeakSet[subprocess.Popen[bytes]]()


def end(mark: str) -> None:
    """Kill what is left of a test that failed."""
    left = marked(mark)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    # One that nobody waited for is a warning, which would fail the test that runs when it is collected.
    for command in _started:
        if command.pid in {process.pid for process in left}:
            command.wait(10)


# For `logweir run`: worker processes, however small the input.
FLEET: Final = {"LOGWEIR_INTERNAL_ONE_PROCESS_KIB": "0"}


# Verbs that start processes or end this one, or whose own process is what is looked at.
APART: Final = frozenset({"run", "up", "doctor", "gpu"})
PROGRAM: Final = (sys.executable, "-m", "pipeline.cli")


@dataclass(slots=True)
class Command:
    """Runs `logweir ...` and waits for its end."""

    mark: str
    cwd: Path
    extra: dict[str, str] = field(default_factory=dict)
    program: list[str] = field(default_factory=lambda: [*PROGRAM])

    def __call__(
        self, *args: object, text: bytes | None = None, timeout: float = 200, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """In this process where it shows the same: the imports of a verb take a process up to 0.9 s of a
        processor."""
        if text is None and args[0] not in APART and self.program == [*PROGRAM]:
            return self.inside(*args, **env)
        return self.apart(*args, text=text, timeout=timeout, **env)

    def apart(
        self, *args: object, text: bytes | None = None, timeout: float = 200, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """In a process of its own."""
        done = subprocess.run(
            [*self.program, *map(str, args)],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            env=environment(self.mark, {**self.extra, **env}),
            cwd=self.cwd,
            timeout=timeout,
            check=False,
        )
        return subprocess.CompletedProcess(done.args, done.returncode, _text(done.stdout), _text(done.stderr))

    def inside(self, *args: object, **env: str) -> "subprocess.CompletedProcess[str]":
        """In this process: `cli.main` with the environment, the directory and the streams of the other
        one."""
        variables = environment(self.mark, {**self.extra, **env})
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2))
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name in os.environ.keys() - variables.keys():
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.chdir(self.cwd)
            try:
                code: Any = cli.main([*map(str, args)])
            except SystemExit as refused:  # by argparse
                code = refused.code
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        for stream in (out, err):
            stream.flush()
        said = [_text(stream.buffer.getvalue()) for stream in (out, err)]  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(args, code, *said)

    def start(self, *args: object, **env: str) -> "subprocess.Popen[bytes]":
        """The same in the background; output goes to files `out` and `err` in the directory of the
        command."""
        with (self.cwd / "out").open("wb") as out, (self.cwd / "err").open("wb") as err:
            process = subprocess.Popen(
                [*self.program, *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(self.mark, {**self.extra, **env}),
                cwd=self.cwd,
            )
        _started.add(process)
        return process


def _text(written: bytes) -> str:
    return written.decode("utf-8", "replace")


def sentence(done: "subprocess.CompletedProcess[str]", code: int = 2) -> str:
    """The one sentence on standard error of a command that ended with this code; no traceback."""
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.endswith("...")]
    # A run prints its first screen before it meets what only starting shows.
    lines = [line for line in lines if not line.startswith("  ") and " at first sight" not in line]
    assert done.returncode == code, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    assert "Traceback" not in done.stderr, done.stderr
    assert len(lines) == 1 and lines[0].startswith("logweir: "), done.stderr
    return lines[0]


class Up:
    """A running `logweir up`."""

    def __init__(
        self, folder: Path, env: Mapping[str, str] | None = None, *, program: Sequence[str] = PROGRAM
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.mark = str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.logweir = Command(self.mark, folder, {"LOGWEIR_DATA_DIR": str(self.data), **(env or {})})
        starting = replace(self.logweir, program=[*program])
        self.process = starting.start("up", "--json")
        self.facts: dict[str, Any] = {}
        self._numbers = 0

    def wait_ready(self) -> "Up":
        """Until it has said that it is ready."""

        def said() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"logweir up ended with {self.process.returncode}: {self.err()}")
            with contextlib.suppress(ValueError):
                self.facts = json.loads((self.folder / "out").read_text())
            return bool(self.facts)

        until(said, within_s=90, what="logweir up is ready")
        return self

    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def client(self) -> "redis.Redis":
        """A plain client on the stack's Redis."""
        state = json.loads((self.data / "stack.json").read_text())
        return redis.Redis.from_url(state["redis_url"])

    def pid(self, name: str) -> int:
        """The process of a worker now, which changes when it is restarted. Waits until it is there: never
        0."""

        def found() -> int:
            named = (int(w["pid"]) for w in self.status()["workers"] if w["name"] == name)
            return next(filter(psutil.pid_exists, named), 0)  # one that was killed is listed for a while

        return until(found, within_s=40, what=f"the worker {name} is there")

    @contextlib.contextmanager
    def frozen(self, *names: str) -> Iterator[None]:
        """These workers and what they started stand still meanwhile. The same processes go on afterwards: a
        worker that stood still for long is in no list any more, so it cannot be asked for then."""
        processes = [psutil.Process(self.pid(name)) for name in names]
        processes += [child for worker in processes for child in worker.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):  # it was killed for its silence
                    process.resume()

    def listeners(self) -> set[int]:
        """TCP ports that processes of this stack listen on."""
        found = set()
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                connections = process.net_connections("inet")
                found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        return found

    def status(self) -> dict[str, Any]:
        """The facts of `logweir status --json`, without its process: a poll of one took 0.7 s of processor
        time."""
        settings = Settings.load(environ=environment(self.mark, self.logweir.extra))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_json(asdict(read_status(attached(settings))))
        facts = dict(json.loads(printed.getvalue()))
        assert facts["workers"], "the verb ends with 1 then"
        return facts

    def totals(self, workload: str) -> dict[str, int]:
        """Line counters of a workload, straight from the ledger: quicker than a command per poll."""
        with self.client() as client:
            raw = client.hgetall(f"{{logweir}}:totals:{workload}")
        return {k.decode(): int(v) for k, v in raw.items()}  # type: ignore[union-attr]

    def write(self, lines: Sequence[str], name: str | None = None) -> Path:
        """A log file in the folder of this stack."""
        self._numbers += 1
        path = self.folder / (name or f"in{self._numbers}.log")
        path.write_text("".join(line + "\n" for line in lines))
        return path

    def send(self, lines: Sequence[str], workload: str) -> dict[str, int]:
        """Send lines as a file and wait until they are stored or dead."""
        done = self.logweir("send", self.write(lines), "--workload", workload, "--json")
        assert done.returncode == 0, done.stderr
        self.settled(workload)
        return dict(json.loads(done.stdout))

    def settled(self, workload: str, within_s: float = 120) -> dict[str, int]:
        """Counters once everything accepted of a workload is stored, dead, discarded or skipped."""

        def answer() -> dict[str, int]:
            with contextlib.suppress(redis.RedisError):
                t = self.totals(workload)
                if t.get("accepted") == sum(t.get(n, 0) for n in ("stored", "dead", "discarded", "skipped")):
                    return t
            return {}

        return until(answer, within_s=within_s, what=f"all lines of {workload} are stored")

    def rows(self, workload: str, *, of_lines: bool = True) -> pl.DataFrame:
        """What is stored of a workload: its lines, or what was found in its sessions and rates."""
        stored = ParquetSink(self.data / "results").scan(workloads=[workload])
        wanted = pl.col("source").str.starts_with("logweir:") != of_lines
        return stored.filter(pl.col("workload") == workload, wanted).sort("line").collect()

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Log events of a worker."""
        found = []
        for line in (self.data / "logs" / f"{name}.log").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                item = json.loads(line)
                if item.get("event") == event:
                    found.append(item)
        return found

    def stop(self, number: signal.Signals = signal.SIGINT, within_s: float = 60) -> int:
        """Ask it to end; its exit code. Fails when a process is left."""
        self.process.send_signal(number)
        code = self.process.wait(within_s)
        nothing_left(self.mark)
        return code


@contextlib.contextmanager
def running(env: Mapping[str, str] | None = None, *, program: Sequence[str] = PROGRAM) -> Iterator[Up]:
    """A `logweir up` that is ready, in a directory with a short name. `program`: it and what starts it."""
    folder = Path(tempfile.mkdtemp(prefix="logweir-e2e-"))
    up = Up(folder, env, program=program)
    try:
        yield up.wait_ready()
    finally:
        print(up.err()[-3000:])  # shown when a test fails
        end(up.mark)
        up.process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def ordinary(n: int, *, start: int = 0) -> list[str]:
    """Lines of a healthy service: few shapes, many values."""
    return [
        f"2026-11-20T10:{i // 60 % 60:02d}:{i % 60:02d}Z INFO app: user {i} logged in from 10.0.{i % 250}.7 "
        f"in {i % 97} ms"
        if i % 3
        else f"2026-11-20T10:{i // 60 % 60:02d}:{i % 60:02d}Z INFO app: cache refreshed with {i} entries"
        for i in range(start, start + n)
    ]


ORDER = (
    "basket turned into an order",
    "payment taken from card",
    "parcel left the warehouse",
    "invoice mailed",
)


def orders(n: int, *, start: int = 0, steps: Sequence[str] = ORDER) -> list[str]:
    """Lines of a shop whose orders all go the same way, a few of them at a time."""
    return [
        f"2026-11-20T10:{second // 60 % 60:02d}:{second % 60:02d}Z INFO shop: {step} "
        f"request_id=order-{start + i:04d}"
        for second, i, step in sorted(
            (start + i + k, i, step) for i in range(n) for k, step in enumerate(steps)
        )
    ]


def varied(n: int) -> list[str]:
    """Lines of a healthy service with 48 shapes: enough that two models of them are about equally good."""
    things = ("cart", "search", "login", "stock", "price", "mail", "image", "audit")
    verbs = ("served", "cached", "stored", "checked", "queued", "closed")
    return [
        f"2026-11-20T10:{i // 60 % 60:02d}:{i % 60:02d}Z INFO app: "
        f"{things[i % 8]} {verbs[i % 7 % 6]} request {i} for 10.0.{i % 250}.7 in {i % 97} ms"
        for i in range(n)
    ]


def novel(n: int, word: str) -> list[str]:
    """Lines of which every one is new: no cache knows them."""
    letters = "abcdefghijklmnopqrstuvwxyz"

    def name(i: int) -> str:
        return word + "".join(letters[i // 26**k % 26] for k in range(4))

    return [
        f"2026-11-20T11:{i // 60 % 60:02d}:{i % 60:02d}Z INFO app: module {name(i)} says {name(i + 7)}"
        for i in range(n)
    ]
