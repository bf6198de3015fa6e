"""A running stack with its intake, and what is sent to it: from files, and by clients in other processes."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np
import polars as pl

from bench._load import environment
from bench._running import cpu_seconds
from bench._shipper import Request
from bench._stacks import Seen, command, roots_of, settled, watched
from bench._stored import clear, stored_batches
from bench._varied import write_cycles
from pipeline.ledger.ledger import Ledger
from pipeline.redis.attach import running
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of

CLIENTS: Final = 2  # processes, one for each core of a small machine
READY_S: Final = 60.0
LOOK_S: Final = 0.02
STORED_S: Final = 120.0
REST_S: Final = 15.0  # at most, for the watcher to end its work on what was sent before
REST_LOOK_S: Final = 1.0
REST_CORES: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One sending until everything is stored."""

    lines: int
    seconds: float
    cpu_s: dict[str, float]  # by role
    lost: int
    doubled: int
    clients: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lines_per_s(self) -> float:
        return self.lines / self.seconds

    def us_per_line(self, *roles: str) -> float:
        """Processor time of these roles, of the whole stack for none."""
        of_stack = {name: spent for name, spent in self.cpu_s.items() if name != "send"}
        return sum(of_stack[name] for name in roles or of_stack) / self.lines * 1e6

    @property
    def client_us_per_line(self) -> float:
        """Processor time of the clients."""
        return sum(client["cpu_s"] for client in self.clients) / self.lines * 1e6

    @property
    def refused(self) -> int:
        """Requests that were refused for a while."""
        return sum(client["refused"] for client in self.clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A stream at a fixed rate."""

    p50_ms: float
    p99_ms: float
    cores: float
    by_role: dict[str, float]  # cores
    batches_per_s: float
    lost: int
    late_ms: int  # at most, of a client behind its timetable: the machine was too busy


class World:
    """All sendings of a benchmark. Results are removed after each."""

    def __init__(self, folder: Path, settings: Settings, sources: dict[str, Path]) -> None:
        self.folder, self.settings, self.sources = folder, settings, sources
        state: dict[str, Any] = running(settings.data.dir) or {}
        url = urlsplit(state["intake"][0])
        self.where = (str(url.hostname), str(url.port))
        self.ledger = Ledger(connect(settings), settings)
        self.clear()

    def written(self, lines: int, cycle: int) -> list[Path]:
        """Files with parameters of this cycle, in a folder of their own."""
        here = self.folder / f"cycle-{cycle}"
        here.mkdir()
        return write_cycles(self.sources, here, lines, first=100 * cycle)

    def send_files(self, made: Sequence[Path]) -> Run:
        """As `logweir send` reads them. The clock begins with the first batch that is in, and ends with the
        last line that is stored: the command waits for the watcher, too."""
        lines = sum(path.read_bytes().count(b"\n") for path in made)
        times: list[float] = []
        accepted, stored = self._counted("accepted"), self._counted("stored")

        def look() -> None:
            while self._counted("accepted") == accepted:
                time.sleep(LOOK_S)
            times.append(time.monotonic())
            self._until_stored(stored + lines)
            times.append(time.monotonic())

        looking = threading.Thread(target=look, daemon=True)
        with watched(self.settings) as seen:
            looking.start()
            command(self.folder, "send", *map(str, made), "--wait", seen=seen)
        looking.join()
        began, ended = times
        return self._run(lines, ended - began, seen)

    def ship(self, requests: Sequence[Request], *, connections: int) -> Run:
        """By clients that each wait for the answer before the next request."""
        wanted = sum(request.lines for request in requests)
        before = self._counted("stored")
        with self._shippers(requests, connections) as shippers, watched(self.settings) as seen:
            began = time.monotonic()
            said = _run_all(shippers)
            self._until_stored(before + wanted)
            ended = time.monotonic()
        return self._run(wanted, ended - began, seen, said)

    def stream(self, requests: Sequence[Request], *, connections: int, seconds: float) -> Steady:
        """Requests by their timetable. The times of their lines are when they were due."""
        wanted = sum(request.lines for request in requests)
        before, roots = self._counted("stored"), roots_of(self.settings)
        with self._shippers(requests, connections) as shippers:
            spent = {name: cpu_seconds(root) for name, root in roots.items()}
            said = _run_all(shippers)
            grown = {name: _grown(spent[name], cpu_seconds(root)) for name, root in roots.items()}
            self._until_stored(before + wanted)
        settled(self.settings)
        waits, batches = self._waits_ms()
        self.clear()
        p50, p99 = (round(float(value)) for value in np.percentile(waits, [50, 99]))
        everything = grown.pop("supervisor")  # with all its children
        return Steady(
            p50_ms=p50,
            p99_ms=p99,
            cores=round(everything / seconds, 3),
            by_role={name: round(cpu / seconds, 3) for name, cpu in grown.items()},
            batches_per_s=round(batches / seconds, 1),
            lost=wanted - len(waits),
            late_ms=round(max(client["late_s"] for client in said) * 1000),
        )

    def clear(self) -> None:
        """Removes the results and lets the stack come to rest, so that each sending begins alike."""
        settled(self.settings)
        clear(self.settings)
        top = roots_of(self.settings)["supervisor"]
        deadline = time.monotonic() + REST_S
        while time.monotonic() < deadline:
            spent, began = cpu_seconds(top), time.monotonic()
            time.sleep(REST_LOOK_S)
            if _grown(spent, cpu_seconds(top)) < REST_CORES * (time.monotonic() - began):
                break

    def _run(
        self, wanted: int, seconds: float, seen: Seen, clients: "list[dict[str, Any]] | None" = None
    ) -> Run:
        rows = parquet_of(self.settings).scan()
        lines, ids, records = (
            rows.select(pl.col("lines").sum(), pl.col("record_id").n_unique(), pl.len().alias("n"))
            .collect(engine="streaming")
            .row(0)
        )
        self.clear()
        return Run(
            lines=wanted,
            seconds=seconds,
            cpu_s=dict(seen.cpu_s),
            lost=wanted - int(lines),
            doubled=int(records - ids),
            clients=clients or [],
        )

    def _counted(self, what: str) -> int:
        """Lines of all workloads."""
        return sum(totals.get(what, 0) for totals in self.ledger.backlog.totals().values())

    def _until_stored(self, lines: int) -> None:
        deadline = time.monotonic() + STORED_S
        while (stored := self._counted("stored")) < lines:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{lines - stored} lines are not stored after {STORED_S:.0f} s: "
                    f"{self.ledger.backlog.counts()}"
                )
            time.sleep(LOOK_S)

    def _waits_ms(self) -> tuple["np.ndarray[Any, Any]", int]:
        """Of each stored record, from its time until its batch was committed; and the number of batches."""
        waits = []
        for one in stored_batches(self.settings):
            lines = one.rows.filter(pl.col("lines") > 0)  # the others are findings of the watcher
            if lines.is_empty():
                continue
            done: Any = self.ledger.client.hget(self.ledger.keys.batch(one.batch_id), "done_ms")
            at = max(one.written_s * 1000, int(done))
            waits.append(at - lines["timestamp"].dt.epoch("us").to_numpy() / 1000)
        return np.concatenate(waits), len(waits)

    @contextmanager
    def _shippers(
        self, requests: Sequence[Request], connections: int
    ) -> "Iterator[list[subprocess.Popen[str]]]":
        """Clients that have read their requests and wait for a word."""
        shippers = []
        with contextlib.ExitStack() as stack:
            for number in range(CLIENTS):
                path = self.folder / f"requests-{number}"
                path.write_bytes(msgspec.msgpack.encode(requests[number::CLIENTS]))
                words = ["-m", "bench._shipper", *self.where, str(path), str(connections // CLIENTS)]
                shippers.append(
                    stack.enter_context(
                        subprocess.Popen(
                            [sys.executable, *words],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            text=True,
                            env=environment(self.folder),
                        )
                    )
                )
                stack.callback(shippers[-1].kill)
            for shipper in shippers:
                assert shipper.stdout is not None
                if shipper.stdout.readline() != "ready\n":
                    raise RuntimeError("a client did not start")
            yield shippers


def _run_all(shippers: "Sequence[subprocess.Popen[str]]") -> list[dict[str, Any]]:
    """The reports of the clients when all their requests are answered."""
    for shipper in shippers:
        assert shipper.stdin is not None
        shipper.stdin.write("go\n")
        shipper.stdin.flush()
    said = [json.loads(shipper.communicate()[0]) for shipper in shippers]
    for one in said:
        if one["fault"]:
            raise RuntimeError(f"a client gave up: {one['fault']}")
    return said


def _grown(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(spent - before.get(pid, 0.0) for pid, spent in after.items())
