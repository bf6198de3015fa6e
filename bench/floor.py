"""The worst case: every line is new after masking, for minutes, through the whole pipeline: how fast, how
even, how much memory.

Such lines are answered by no cache: each is masked without any shortcut, scored by the network, learnt or,
past its workload's limit of templates, counted as unclassified. Drain3 gets lines of the same kind, on one
thread, with the same masks; it has no limit, so its tree grows with every line. What masking alone takes of
such lines, and of lines of 64 KiB, stands beside it."""

import argparse
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import IO, Any, Final

import polars as pl

from bench._drain3 import miner
from bench._load import environment, stack, train
from bench._running import memory, scratch
from bench._stacks import roots_of
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.ledger.ledger import Ledger
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of

MINUTES: Final = 10.0
WARM_UP_S: Final = 30.0  # the model is read, the first batches arrive
LOOK_S: Final = 5.0
PENDING_MIB: Final = "8"  # some batches: what waits in the end has to be worked off
WORKLOAD: Final = "flood"
PEER_LINES: Final = 20_000
WRITTEN: Final = 500  # lines at once
PARTS: Final = 10  # of the measured time, for the figures of its course
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"how long (default {MINUTES:g})")


def failed(values: dict[str, Any]) -> bool:
    return bool(values["lost"] or values["doubled"])


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:  # noqa: ARG001 - every benchmark is called alike
    with scratch() as folder, stack(folder, LOGWEIR_MAX_PENDING_MIB=PENDING_MIB) as settings:
        train(folder)
        course = _flood(folder, settings, args.minutes * 60)
        stored = _stored(settings)
    steady = course.rates(PARTS)
    first, last = mean(steady[: PARTS // 3]), mean(steady[-(PARTS // 3) :])
    return {
        "minutes": args.minutes,
        "lines": course.fed,
        "lines_per_s": round(median(steady)),
        "course_lines_per_s": [round(rate) for rate in steady],
        "last_third_to_first": round(last / first, 2),
        "rss_mib": [round(course.at(part)) for part in (0.0, 0.25, 0.5, 0.75, 1.0)],
        "redis_mib": [round(course.redis_at(part)) for part in (0.0, 0.25, 0.5, 0.75, 1.0)],
        "lost": course.fed - stored[0],
        "doubled": stored[1],
        "drain3": _peer(),
        "masking_us_per_line": _masking(),
    }


@dataclass(slots=True)
class _Course:
    """What was seen every few seconds: seconds, lines stored, memory of all processes and of Redis' data in
    MiB."""

    seen: list[tuple[float, int, float, float]] = field(default_factory=list)
    fed: int = 0

    def rates(self, parts: int) -> list[float]:
        """Lines a second in equal parts of the time."""
        began, ended = self.seen[0][0], self.seen[-1][0]
        marks = [self._near(began + (ended - began) * i / parts) for i in range(parts + 1)]
        return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks)]

    def at(self, part: float) -> float:
        return self._at(part)[2]

    def redis_at(self, part: float) -> float:
        return self._at(part)[3]

    def _at(self, part: float) -> tuple[float, int, float, float]:
        began, ended = self.seen[0][0], self.seen[-1][0]
        return self._near(began + (ended - began) * part)

    def _near(self, at: float) -> tuple[float, int, float, float]:
        return min(self.seen, key=lambda seen: abs(seen[0] - at))


def _flood(folder: Path, settings: Settings, seconds: float) -> _Course:
    """Lines without end into `logweir send -`, which waits while the pipeline is full."""
    client = connect(settings)
    ledger, tree = Ledger(client, settings), roots_of(settings)["supervisor"]
    sender = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "send", "-", "--workload", WORKLOAD, "--wait"],
        env=environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )
    stop, course = threading.Event(), _Course()
    assert sender.stdin is not None
    feeder = threading.Thread(target=_feed, args=(sender.stdin, stop, course), daemon=True)
    feeder.start()
    time.sleep(WARM_UP_S)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rss, _ = memory(tree)
        info: Any = client.info("memory")
        done = ledger.backlog.totals().get(WORKLOAD, {}).get("stored", 0)
        course.seen.append((time.monotonic(), done, rss, info["used_memory"] / 2**20))
        time.sleep(LOOK_S)
    stop.set()
    feeder.join()
    if code := sender.wait(600):
        raise RuntimeError(f"logweir send ended with {code}")
    return course


def _feed(pipe: IO[bytes], stop: threading.Event, course: _Course) -> None:
    source = lines(seed=1)
    with pipe:
        while not stop.is_set():
            pipe.write("".join(next(source) for _ in range(WRITTEN)).encode())
            course.fed += WRITTEN


def lines(seed: int) -> Iterator[str]:
    """Lines of ten words nobody has seen: no mask makes two of them one."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(_LETTERS, k=rng.randrange(3, 10))) for _ in range(4_000)]
    while True:
        new = "".join(rng.choices(_LETTERS, k=9))
        yield f"2026-11-20T12:00:00Z INFO app: {new} {' '.join(rng.choices(words, k=8))} {new[::-1]}\n"


def _stored(settings: Settings) -> tuple[int, int]:
    """(lines, record ids too many)."""
    mine = parquet_of(settings).scan().filter(pl.col("workload") == WORKLOAD)
    found = mine.select(pl.col("lines").sum(), (pl.len() - pl.col("record_id").n_unique()).alias("twice"))
    count, twice = found.collect(engine="streaming").row(0)
    return int(count), int(twice)


def _peer() -> dict[str, int]:
    """Drain3 on lines of the same kind: at the beginning, and after it has seen many."""
    theirs, source = miner(MaskSet.load(), Settings()), lines(seed=2)
    rates = []
    for _ in range(4):
        part = [next(source)[len("2026-11-20T12:00:00Z INFO app: ") : -1] for _ in range(PEER_LINES // 4)]
        began = time.perf_counter()
        for line in part:
            theirs.add_log_message(line)
        rates.append(len(part) / (time.perf_counter() - began))
    return {
        "lines": PEER_LINES,
        "first_lines_per_s": round(rates[0]),
        "last_lines_per_s": round(rates[-1]),
        "templates": len(theirs.drain.clusters),
    }


def _masking() -> dict[str, float]:
    """Processor time a line of masking alone, nothing remembered."""
    source, rng = lines(seed=3), random.Random(4)
    printable = [chr(c) for c in range(32, 127)]
    kinds = {
        "new_words": [next(source)[31:-1] for _ in range(5_000)],
        "random_printable_120": ["".join(rng.choices(printable, k=120)) for _ in range(5_000)],
        "64_kib": ["".join(rng.choices(printable, k=65_536)) for _ in range(50)],
    }
    found = {}
    for name, texts in kinds.items():
        masks, column = MaskSet.load(), pl.Series(texts)
        masks.mask(column.head(10))  # expressions are compiled
        began = time.process_time()
        masks.mask(column)
        found[name] = round((time.process_time() - began) / len(texts) * 1e6, 1)
    return found
