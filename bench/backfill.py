"""An archive by `logweir backfill` with four readers, two of them killed, beside `logweir send` of its files.

Both store the same real lines with varied parameters, each round under a workload of its own, on one stack
with a trained model. A sending before and one after the backfill are the peer, because other work on the
machine comes and goes; `--sends 1` leaves the second one out. A time ends when every line is stored. Readers
die when a quarter and half of the lines are accepted; the stack starts them again. `--store s3` reads from
SeaweedFS, whose binary WEED names."""

import argparse
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, Final

import polars as pl

from bench._load import stack
from bench._running import scratch
from bench._stacks import command, roots_of, settled
from bench._varied import real_files, write_cycles
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.sources.backfill.plans import Plans

LINES: Final = 1_000_000
READERS: Final = 4
OBJECT_BYTES: Final = 128 << 20  # of a file in the bucket
KILLED: Final = (("reader", 0.25), ("reader-2", 0.5))  # when so much of the lines is accepted
TESTS: Final = Path(__file__).resolve().parent.parent / "tests"


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--lines", type=int, default=LINES, help=f"lines of the archive (default {LINES:,})")
    parser.add_argument("--store", choices=("folder", "s3"), default="folder", help="where the archive lies")
    parser.add_argument(
        "--sends", type=int, choices=(1, 2), default=2, help="sendings beside it: before, and after (2)"
    )
    parser.add_argument(
        "--kill", action=argparse.BooleanOptionalAction, default=True, help="kill two readers"
    )


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder, _place(args.store) as (place, upload):
        sources = real_files(data, folder)
        archive = folder / "archive"
        archive.mkdir()
        made = write_cycles(sources, archive, args.lines, first=100)
        lines = sum(path.read_bytes().count(b"\n") for path in made)
        size = sum(path.stat().st_size for path in made)
        upload(made)
        extra = {"LOGWEIR_READER_PROCESSES": str(READERS)}
        with stack(folder, **extra) as settings:
            command(folder, "send", *map(str, sources.values()), "--wait", extra=extra)
            command(folder, "train", extra=extra)
            settled(settings)
            sent = [_timed(folder, settings, ["send", *map(str, made), "--wait"], "before", extra)]
            watcher = _Watcher(settings, lines if args.kill else 0)
            verb = ["backfill", place or str(archive), "--parallel", str(READERS)]
            with watcher:
                read = _timed(folder, settings, verb, "backfill", extra)
            if args.sends > 1:
                sent.append(_timed(folder, settings, ["send", *map(str, made), "--wait"], "after", extra))
            stored = [_stored(settings, name) for name in ("before", "backfill", "after")[: args.sends + 1]]
    return {
        "lines": lines,
        "bytes": size,
        "store": args.store,
        "readers": READERS,
        "killed": watcher.killed,
        "redis_us_per_line": round(watcher.cpu_s / lines * 1e6, 2),
        "redis_bytes_per_line": round(watcher.received / lines, 1),
        "redis_peak_mib": watcher.peak >> 20,
        "backfill_lines_per_s": round(lines / read),
        "send_lines_per_s": round(mean(lines / seconds for seconds in sent)),
        "send_s": [round(seconds, 1) for seconds in sent],
        "backfill_s": round(read, 1),
        "ratio": round(mean(sent) / read, 2),
        "lost": sum(abs(lines - found) for found, _ in stored),
        "doubled": sum(doubled for _, doubled in stored),
    }


def failed(values: dict[str, Any]) -> bool:
    return bool(values["lost"] or values["doubled"])


def _timed(folder: Path, settings: Settings, verb: list[str], workload: str, extra: dict[str, str]) -> float:
    """Seconds until a command's lines are stored."""
    began = time.monotonic()
    command(folder, *verb, "--workload", workload, extra=extra)
    settled(settings)
    return time.monotonic() - began


def _stored(settings: Settings, workload: str) -> tuple[int, int]:
    """Physical lines, and records that are there twice."""
    rows = parquet_of(settings).scan(workloads=[workload])
    rows = rows.filter(pl.col("workload") == workload, ~pl.col("source").str.starts_with("logweir:"))
    found = rows.select(pl.col("lines").sum(), pl.len() - pl.col("record_id").n_unique().alias("twice"))
    lines, twice = found.collect(engine="streaming").row(0)
    return int(lines), int(twice)


class _Watcher(threading.Thread):
    """Kills readers while they read, and looks at the cost in Redis."""

    def __init__(self, settings: Settings, lines: int) -> None:
        super().__init__(daemon=True)
        self.settings, self.lines = settings, lines
        self.client = connect(settings)
        self.killed: list[str] = []
        self.peak = 0  # bytes of memory
        self.received = 0  # bytes
        self.cpu_s = 0.0
        self._done = threading.Event()

    def __enter__(self) -> "_Watcher":
        self.received, self.cpu_s = self._spent()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()
        received, cpu_s = self._spent()
        self.received, self.cpu_s = received - self.received, cpu_s - self.cpu_s

    def _spent(self) -> tuple[int, float]:
        info = self.client.info()
        return info["total_net_input_bytes"], info["used_cpu_user"] + info["used_cpu_sys"]

    def run(self) -> None:
        plans, left = Plans(self.client, self.settings), list(KILLED) if self.lines else []
        while not self._done.wait(0.2):
            self.peak = max(self.peak, self.client.info("memory")["used_memory"])
            if not left:
                continue
            names = plans.names()
            view = plans.view(names[0]) if names else None
            if view is None or view.over or view.lines < left[0][1] * self.lines:
                continue
            name, share = left.pop(0)
            os.kill(roots_of(self.settings)[name].pid, signal.SIGKILL)
            self.killed.append(f"{name} at {view.lines / self.lines:.0%} (wanted {share:.0%})")


def _objects(path: Path) -> Iterator[bytes]:
    """The file in objects of whole lines."""
    with path.open("rb") as file:
        while content := file.read(OBJECT_BYTES):
            yield content + file.readline()


@contextmanager
def _place(store: str) -> Iterator[tuple[str, Any]]:
    """The address of an archive elsewhere, "" for the folder itself, and how files come there."""
    if store == "folder":
        yield "", lambda _files: None
        return
    sys.path.append(str(TESTS))
    server: Any = importlib.import_module("s3_server").S3Server(os.environ["WEED"])
    try:
        os.environ.update(server.environment())
        place = server.new_place()
        from pipeline.store.bucket import Bucket

        bucket = Bucket(server.bucket, place.rpartition("/")[2])

        def upload(files: list[Path]) -> None:
            for path in files:
                for number, content in enumerate(_objects(path)):
                    bucket.put(f"{path.stem}-{number:03}{path.suffix}", content)

        yield place, upload
    finally:
        server.close()
