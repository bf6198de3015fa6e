"""The sink is down for minutes while producers push on: what waits, memory, refusals, draining; fresh lines
beside backfill.

A real `logweir up` with a small limit on what may wait, so that it is reached soon. First fresh batches
alone, then the same beside a backfill that keeps the pipeline full: their latency, from accepted to stored on
Redis' clock. Then a file takes the place of the results directory, which stops root too, and producers push
on; then it goes and everything drains. Every line carries a mark of its own, so that the results can be
counted line by line. No model is trained: lines are stored warming, new ones through all queues but infer's.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import polars as pl
import psutil
import redis

from bench._load import new_lines, stack
from bench._running import scratch
from pipeline.errors import RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.messages.routing import QUEUE_INGEST
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted, Stage
from pipeline.redis.attach import running
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.tasks import periodic
from pipeline.tasks.context import Context

PENDING_MIB: Final = 4
PENDING_BATCHES: Final = 100
REDIS_MIB: Final = 96
# A worker with torch loaded and a batch of megabytes in hand; measured at 420.
RSS_MOST_MIB: Final = 800
BATCH_LINES: Final = 500
NEW_LINES: Final = 20  # of a batch, so that it goes through every queue
FRESH_EVERY_S: Final = 0.5
PUSHERS: Final = 3
ALONE_S: Final = 15.0
BESIDE_S: Final = 25.0
FILL_MOST_S: Final = 180.0
DRAIN_MOST_S: Final = 600.0
SWEPT: Final = 10_000


@dataclass(slots=True)
class Pushed:
    """What was accepted, by batch id, and what was refused, by reason."""

    batches: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class Peak:
    """The most that was seen."""

    bytes: int = 0
    batches: int = 0
    redis: int = 0
    rss: dict[str, int] = field(default_factory=dict)


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--minutes", type=float, default=2.0, help="how long the sink is down (2)")


def failed(values: dict[str, Any]) -> bool:
    within = (
        values["rss_max_mib"] <= values["rss_limit_mib"]
        and values["redis_max_mib"] <= values["redis_limit_mib"]
    )
    return bool(values["lost"] or values["doubled"] or not values["drained"] or not within)


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    limits = {
        "LOGWEIR_MAX_PENDING_MIB": str(PENDING_MIB),
        "LOGWEIR_INTERNAL_MAX_PENDING_BATCHES": str(PENDING_BATCHES),
        "LOGWEIR_REDIS_MAX_MIB": str(REDIS_MIB),
    }
    with scratch() as folder, stack(folder, **limits) as found:
        settings = found.replace(max_pending_mib=PENDING_MIB, max_pending_batches=PENDING_BATCHES)
        pushed, ledger = Pushed(), Ledger(connect(settings), settings)
        with _watched(settings) as peak:
            with _pushing(settings, pushed, "alone", every_s=FRESH_EVERY_S):
                time.sleep(ALONE_S)
            _drained(ledger)
            with _pushing(settings, pushed, "old", backfill=True, threads=PUSHERS):
                _until(lambda: bool(pushed.refused), "the backfill never filled the pipeline")
                with _pushing(settings, pushed, "beside", every_s=FRESH_EVERY_S):
                    time.sleep(BESIDE_S)
            before = dict(pushed.refused)
            down = _down(settings, pushed, ledger, 60 * args.minutes)
            began, waiting = time.monotonic(), ledger.backlog.counts().get("batches", 0)
            drained = _drained(ledger)
            drain_s = time.monotonic() - began
        lines = _lines(settings.data.results)
        accepted = sum(pushed.batches.values())
        alone, beside = (_latency(ledger, pushed, kind) for kind in ("alone", "beside"))
        drain_rate = waiting * BATCH_LINES / max(0.001, drain_s)
        return {
            "sink_down_s": round(60 * args.minutes),
            "accepted_lines": accepted,
            "lost": accepted - lines.n_unique(),
            "doubled": lines.len() - lines.n_unique(),
            "dead": sum(t.get("dead", 0) for t in ledger.backlog.totals().values()),
            "drained": drained,
            "offered_lines_s": round(down["offered_s"]),
            "drain_lines_s": round(drain_rate),
            "offered_times_drained": round(down["offered_s"] / max(1.0, drain_rate), 1),
            "drain_s": round(drain_s, 1),
            "waiting_batches": waiting,
            "refused_while_down": {k: n - before.get(k, 0) for k, n in pushed.refused.items()},
            "pending_max_mib": round(peak.bytes / 2**20, 2),
            "pending_limit_mib": PENDING_MIB,
            "pending_max_batches": peak.batches,
            "pending_limit_batches": PENDING_BATCHES,
            "redis_max_mib": round(peak.redis / 2**20, 1),
            "redis_limit_mib": REDIS_MIB,
            "rss_max_mib": max(peak.rss.values()) // 2**20,
            "rss_limit_mib": RSS_MOST_MIB,
            "rss_mib": {name: size // 2**20 for name, size in sorted(peak.rss.items())},
            "fresh_alone_median_s": round(statistics.median(alone), 3),
            "fresh_beside_backfill_median_s": round(statistics.median(beside), 3),
            "fresh_ratio": round(statistics.median(beside) / statistics.median(alone), 1),
            "backfill_median_s": round(statistics.median(_latency(ledger, pushed, "old")), 1),
            "sweep_of_10000_waiting_s": round(_sweep(settings), 2),
        }


# ---- pushing ---------------------------------------------------------------------------------------


@contextmanager
def _pushing(
    settings: Settings,
    pushed: Pushed,
    kind: str,
    *,
    backfill: bool = False,
    every_s: float = 0.0,
    threads: int = 1,
) -> Iterator[None]:
    """Push batches while the body runs: as fast as they are taken, or one every so often."""
    stop = threading.Event()
    pushers = [
        threading.Thread(
            target=_push,
            args=(settings, pushed, f"{kind}-{n}"),
            kwargs={"stop": stop, "backfill": backfill, "every_s": every_s},
            daemon=True,
        )
        for n in range(threads)
    ]
    for pusher in pushers:
        pusher.start()
    try:
        yield
    finally:
        stop.set()
        for pusher in pushers:
            pusher.join(60)


def _push(
    settings: Settings, pushed: Pushed, who: str, *, stop: threading.Event, backfill: bool, every_s: float
) -> None:
    producer, number = Producer.connect(settings), 0
    rng = random.Random(who)
    while not stop.is_set():
        number += 1
        batch_id = f"{who}-{number}"
        fresh = new_lines(NEW_LINES, rng.randrange(2**60))
        known = [f"2026-11-20T10:00:00Z INFO app: served request {rng.randrange(10**6)}"] * (
            BATCH_LINES - NEW_LINES
        )
        lines = [f"{line} mark={batch_id}#{n}" for n, line in enumerate([*known, *fresh])]
        while not stop.is_set():
            with suppress(RedisUnavailable):
                answer = producer.send(lines, workload="load", batch_id=batch_id, backfill=backfill)
                with pushed.lock:
                    if isinstance(answer, Accepted):
                        pushed.batches[batch_id] = len(lines)
                        break
                    pushed.refused[answer.reason] = pushed.refused.get(answer.reason, 0) + 1
                stop.wait(answer.retry_after_s)
        stop.wait(every_s)


def _down(settings: Settings, pushed: Pushed, ledger: Ledger, seconds: float) -> dict[str, float]:
    """A file stands where the results directory was, while producers of both classes push on."""
    _drained(ledger)
    results, away = settings.data.results, settings.data.results.with_name("results.away")
    results.rename(away)
    results.write_text("not a directory\n", encoding="utf-8")
    before, refused, began = len(pushed.batches), sum(pushed.refused.values()), time.monotonic()
    filled_s = 0.0
    try:
        with (
            _pushing(settings, pushed, "down-old", backfill=True, threads=PUSHERS),
            _pushing(settings, pushed, "down-new", threads=1),
        ):
            while time.monotonic() - began < seconds:
                if not filled_s and sum(pushed.refused.values()) > refused:
                    filled_s, filled = time.monotonic() - began, len(pushed.batches) - before
                time.sleep(0.1)
    finally:
        results.unlink()
        away.rename(results)
    if not filled_s:
        raise RuntimeError("nothing was refused while the sink was down; give it longer")
    return {"offered_s": filled * BATCH_LINES / filled_s}


def _drained(ledger: Ledger) -> bool:
    deadline = time.monotonic() + DRAIN_MOST_S
    while ledger.backlog.counts().get("batches", 0):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _until(done: Any, otherwise: str) -> None:
    deadline = time.monotonic() + FILL_MOST_S
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.1)


# ---- looking ---------------------------------------------------------------------------------------


@contextmanager
def _watched(settings: Settings) -> Iterator[Peak]:
    """The most of everything that is bounded, twice a second."""
    peak, stop = Peak(), threading.Event()
    client = connect(settings)
    ledger, presence = Ledger(client, settings), Presence(client, settings)

    def look() -> None:
        names: dict[int, str] = {}
        while not stop.wait(0.5):
            with suppress(RedisUnavailable, redis.RedisError):
                counts = ledger.backlog.counts()
                peak.bytes = max(peak.bytes, counts.get("bytes", 0))
                peak.batches = max(peak.batches, counts.get("batches", 0))
                peak.redis = max(peak.redis, int(client.info("memory")["used_memory"]))
                names = {worker.pid: worker.role for worker in presence.live()}
            for process in _processes(settings):
                with suppress(psutil.Error):
                    name = names.get(process.pid) or names.get(process.ppid(), "") or process.name()
                    peak.rss[name] = max(peak.rss.get(name, 0), process.memory_info().rss)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join(10)


def _processes(settings: Settings) -> list[psutil.Process]:
    state = running(settings.data.dir)
    if state is None:
        return []
    with suppress(psutil.Error):
        up = psutil.Process(int(str(state["pid"])))
        return [up, *up.children(recursive=True)]
    return []


def _latency(ledger: Ledger, pushed: Pushed, kind: str) -> list[float]:
    """Seconds from accepted to stored of every batch of a kind."""
    found = []
    for batch_id in pushed.batches:
        if batch_id.startswith(f"{kind}-"):
            entry: Any = ledger.client.hmget(ledger.keys.batch(batch_id), ["accepted_ms", "done_ms"])
            if all(entry):
                accepted, done = map(int, entry)
                found.append((done - accepted) / 1000)
    return found


def _lines(results: Path) -> pl.Series:
    """The mark of every stored line."""
    stored = ParquetSink(results).scan().select(pl.col("message").str.extract(r"mark=(\S+)$"))
    return stored.collect()["message"]


def _sweep(settings: Settings) -> float:
    """Seconds of one sweep over SWEPT overdue batches whose messages all wait where they should; on a prefix
    of its own."""
    own = settings.replace(
        max_pending_batches=2 * SWEPT, key_prefix=f"{settings.redis.key_prefix}-sweep", overdue_ms=600_000
    )
    app = make_app(own)
    context = Context(app, own)
    producer = Producer(context.ledger, context.submit, own)
    producer.send(["x"], workload="w", batch_id="first", backfill=False)
    keys, client = context.ledger.keys, context.client
    entry: Any = client.hgetall(keys.batch("first"))
    queue = keys.kombu(QUEUE_INGEST)
    message: Any = client.lindex(queue, 0)
    pipe = client.pipeline(transaction=False)
    for name in (f"n{n:05}" for n in range(SWEPT)):
        pipe.hset(keys.batch(name), mapping=entry)
        pipe.zadd(keys.due, {name: 1})
        pipe.lpush(queue, message.replace(b'"batch": "first"', f'"batch": "{name}"'.encode()))
    pipe.execute()
    began = time.monotonic()
    sent = periodic.sweep(context)
    seconds = time.monotonic() - began
    waiting = context.submit.waiting_ids(Stage.INGEST) or ()
    app.close()
    if sent or len(waiting) != SWEPT + 1:
        raise RuntimeError(f"the sweep sent {sent} batches that all waited")
    return seconds
