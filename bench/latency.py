"""How long a line takes from being written until it is stored: trickles, and floods beside a fixed large
batch.

A real `logweir up` with a trained model; the lines are known to it but for one in 200, so that scoring and
Drain3 are passed too. Every line carries a serial number and the moment it was written. It is stored when the
Parquet file with it has its final name (the time of its inode, which the rename sets) and its batch is
committed (Redis' clock): the later of the two counts. Ways: a file under `logweir send --follow`, a pipe into
`logweir send -`, and `Producer.send` with what came in a tenth of a second. A flood is written as fast as it
is taken, once followed, once through a pipe, and once with `logweir send FILE`, which knows only full
batches."""

import argparse
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import psutil

from bench._load import environment, stack, train
from bench._running import cpu_seconds, scratch
from bench._stored import stored_batches
from pipeline.ledger.ledger import Ledger
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted
from pipeline.redis.attach import running
from pipeline.redis.connection import connect
from pipeline.settings import Settings

P99_MOST_MS: Final = 1_000.0
PROMISED_RATE: Final = 1_000
RATES: Final = (10, 100, 1_000, 5_000)
NEW_IN: Final = 200  # one line in so many was never seen before
WARM_LINES: Final = 400  # what tells a source's format, and what starts the clients
STORED_S: Final = 120.0
API_S: Final = 0.1
API_LINES: Final = 100
FLOOD_BLOCK: Final = 64 * 1024  # what a program writes at once
SERIAL: Final = r"request (\d+) "
WRITTEN: Final = r" in (\d+) ms$"


@dataclass(slots=True)
class Lines:
    """Makes lines; `made` of them so far, each with its number and the moment it was made, in ms since
    `began`."""

    began: float
    made: int = 0
    rng: random.Random = field(default_factory=random.Random)

    def next(self) -> str:
        self.made += 1
        now = time.time()
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        tail = f"request {self.made} for 10.0.{self.made % 250}.7 in {round((now - self.began) * 1000)} ms"
        if self.made % NEW_IN:
            return f"{stamp} INFO app: {WORDS[self.made % 8]} {VERBS[self.made % 5]} {tail}\n"
        name = "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz", k=9))
        return f"{stamp} INFO app: module {name} says {name[::-1]} {tail}\n"


# As bench/_load.py's known lines, so that the model has learnt them.
WORDS: Final = ("cart", "search", "login", "stock", "price", "mail", "image", "audit")
VERBS: Final = ("served", "cached", "stored", "checked", "queued")


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each trickle lasts (20)")
    parser.add_argument("--flood", type=int, default=300_000, help="lines of a flood, 0 for none (300000)")
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="lines/s of followed files")


def failed(values: dict[str, Any]) -> bool:
    runs = [run for run in values.values() if isinstance(run, dict) and "lost" in run]
    promised = [r for r in runs if r.get("offered_lines_s") == PROMISED_RATE]
    return any(r["lost"] or r["doubled"] for r in runs) or any(r["p99_ms"] >= P99_MOST_MS for r in promised)


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder, stack(folder) as settings:
        train(folder)
        bench = Bench(folder, settings)
        bench.trickle("warm-up", bench.followed, 1_000, 3.0)
        found: dict[str, Any] = {}
        for rate in args.rates:
            found[f"follow_{rate}"] = bench.trickle(f"follow-{rate}", bench.followed, rate, args.seconds)
        for name, way in (("stdin", bench.piped), ("api", bench.api)):
            found[f"{name}_{PROMISED_RATE}"] = bench.trickle(name, way, PROMISED_RATE, args.seconds)
        if args.flood:
            found |= bench.floods(args.flood)
    return found


class Bench:
    """The runs on one stack; each under a workload of its own."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.ledger = Ledger(connect(settings), settings)
        state = running(settings.data.dir)
        assert state is not None
        self.top = psutil.Process(int(str(state["pid"])))

    # ---- ways in ---------------------------------------------------------------------------------

    @contextmanager
    def followed(self, workload: str) -> Iterator[Callable[[str], object]]:
        path = self.folder / f"{workload}.log"
        with (
            path.open("w", encoding="utf-8", buffering=1) as log,
            self._send("--follow", str(path), "--workload", workload) as sender,
        ):
            yield log.write
            self._until_read(workload)
            sender.send_signal(signal.SIGINT)

    @contextmanager
    def piped(self, workload: str) -> Iterator[Callable[[str], object]]:
        with self._send("-", "--workload", workload, stdin=subprocess.PIPE) as sender:
            assert sender.stdin is not None

            def write(text: str) -> None:
                sender.stdin.write(text.encode())  # type: ignore[union-attr]
                sender.stdin.flush()  # type: ignore[union-attr]

            yield write
            sender.stdin.close()

    @contextmanager
    def api(self, workload: str) -> Iterator[Callable[[str], object]]:
        producer = Producer.connect(self.settings)
        held: list[str] = []
        sent_at = time.monotonic()

        def send() -> None:
            nonlocal sent_at
            while held and not isinstance(producer.send(held, workload=workload), Accepted):
                time.sleep(0.05)
            held.clear()
            sent_at = time.monotonic()

        def write(text: str) -> None:
            held.append(text.rstrip("\n"))
            if len(held) >= API_LINES or time.monotonic() - sent_at >= API_S:
                send()

        yield write
        send()

    @contextmanager
    def _send(self, *args: str, stdin: int = subprocess.DEVNULL) -> "Iterator[subprocess.Popen[bytes]]":
        command = [sys.executable, "-m", "pipeline.cli", "send", *args]
        with (self.folder / "send.err").open("ab") as said:
            sender = subprocess.Popen(
                command, env=environment(self.folder), stdin=stdin, stdout=subprocess.DEVNULL, stderr=said
            )
        self.sender = psutil.Process(sender.pid)
        try:
            yield sender
            sender.wait(60)
        finally:
            sender.kill()
            sender.wait()
            self.sender = None

    sender: psutil.Process | None = None

    # ---- runs ------------------------------------------------------------------------------------

    def trickle(self, workload: str, way: Callable[[str], Any], rate: int, seconds: float) -> dict[str, Any]:
        """So many lines a second, evenly, after some that are not counted in."""
        lines = Lines(time.time())
        with way(workload) as write:
            for _ in range(WARM_LINES):
                write(lines.next())
            self._until(workload, WARM_LINES - 1)  # the last one may wait for what follows
            time.sleep(1.5)
            spent, own, began = cpu_seconds(self.top), self._own(), time.monotonic()
            while (gone := time.monotonic() - began) < seconds:
                for _ in range(int(gone * rate) - (lines.made - WARM_LINES)):
                    write(lines.next())
                time.sleep(0.001 if rate >= 1_000 else 0.005)
            wall = time.monotonic() - began
            cpu = _grown(spent, cpu_seconds(self.top))
            sender_cpu = self._own() - own
        self._until(workload, lines.made)
        stored = self._stored(workload, lines.began)
        timed = stored.filter(pl.col("serial") > WARM_LINES)
        waits = timed["wait_ms"].to_numpy()
        p50, p90, p99 = (round(float(x)) for x in np.percentile(waits, [50, 90, 99]))
        new = timed.filter(pl.col("serial") % NEW_IN == 0)["wait_ms"]
        return {
            "offered_lines_s": rate,
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "max_ms": round(float(waits.max())),
            "new_lines_p99_ms": round(float(np.percentile(new.to_numpy(), 99))) if new.len() else None,
            "lines": lines.made - WARM_LINES,
            **_counted(stored, lines.made),
            "files": timed["file"].n_unique(),
            "files_s": round(timed["file"].n_unique() / wall, 1),
            "stack_cpu_percent_of_a_core": round(100 * cpu / wall, 1),
            "sender_cpu_percent_of_a_core": round(100 * sender_cpu / wall, 1),
        }

    def floods(self, count: int) -> dict[str, Any]:
        """As fast as it is taken; twice each, in turn, so that what else the machine does falls on all of
        them."""
        rates: dict[str, list[float]] = {}
        found: dict[str, Any] = {}
        for turn in (1, 2):
            for name, way in (("fixed", None), ("follow", self.followed), ("stdin", self.piped)):
                workload = f"flood-{name}-{turn}"
                lines = Lines(time.time())
                text = "".join(lines.next() for _ in range(count))
                if way is None:
                    path = self.folder / f"{workload}.log"
                    path.write_text(text, encoding="utf-8")
                    with self._send(str(path), "--workload", workload):
                        pass
                else:
                    with way(workload) as write:
                        for at in range(0, len(text), FLOOD_BLOCK):
                            write(text[at : at + FLOOD_BLOCK])
                self._until(workload, count)
                stored = self._stored(workload, lines.began)
                before = found.get(f"flood_{name}", {"lost": 0, "doubled": 0})
                counted = {key: before[key] + value for key, value in _counted(stored, count).items()}
                rates.setdefault(name, []).append(count / stored["spent_s"][0])
                found[f"flood_{name}"] = {"lines": count, **counted} | {"files": stored["file"].n_unique()}
        for name, each in rates.items():
            found[f"flood_{name}"] |= {
                "lines_s": round(max(each)),
                "of_fixed": round(max(each) / max(rates["fixed"]), 2),
            }
        return found

    # ---- looking ---------------------------------------------------------------------------------

    def _own(self) -> float:
        """CPU seconds of the sending process, where there is one."""
        if self.sender is None:
            return 0.0
        times = self.sender.cpu_times()
        return float(times.user + times.system)

    def _until(self, workload: str, count: int) -> None:
        deadline = time.monotonic() + STORED_S
        while self.ledger.backlog.totals().get(workload, {}).get("stored", 0) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{workload}: {self.ledger.backlog.totals().get(workload)} of {count} after {STORED_S} s"
                )
            time.sleep(0.05)
        while any(self.ledger.backlog.pending()):  # what is stored twice is stored a second time later
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{workload}: batches wait that nobody works on: {self.ledger.backlog.counts()}"
                )
            time.sleep(0.05)

    def _until_read(self, workload: str) -> None:
        """Until the follower has sent all that is in the file."""
        lines = (self.folder / f"{workload}.log").read_bytes().count(b"\n")
        deadline = time.monotonic() + STORED_S
        while self.ledger.backlog.totals().get(workload, {}).get("accepted", 0) < lines:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{workload} was not read to its end: {self.ledger.backlog.totals().get(workload)}"
                )
            time.sleep(0.05)

    def _stored(self, workload: str, began: float) -> pl.DataFrame:
        """serial, file, wait_ms of every stored line; spent_s, from the first batch accepted to the last one
        stored."""
        frames, first, last = [], float("inf"), 0.0
        for one in stored_batches(self.settings):
            if one.rows["workload"][0] != workload:
                continue
            entry: Any = self.ledger.client.hmget(
                self.ledger.keys.batch(one.batch_id), ["accepted_ms", "done_ms"]
            )
            accepted, done = (int(value) / 1000 for value in entry)
            at = max(one.written_s, done)
            first, last = min(first, accepted), max(last, at)
            found = one.rows.select(
                pl.col("message").str.extract(SERIAL).cast(pl.Int64).alias("serial"),
                ((at - began) * 1000 - pl.col("message").str.extract(WRITTEN).cast(pl.Int64)).alias(
                    "wait_ms"
                ),
                pl.lit(one.batch_id).alias("file"),
            )
            frames.append(found)
        return pl.concat(frames).with_columns(pl.lit(last - first).alias("spent_s"))


def _counted(stored: pl.DataFrame, made: int) -> dict[str, int]:
    distinct = stored["serial"].n_unique()
    return {"lost": made - distinct, "doubled": stored.height - distinct}


def _grown(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(spent - before.get(pid, 0.0) for pid, spent in after.items())
