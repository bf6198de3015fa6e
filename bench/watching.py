"""What watching costs: the observation of a batch beside the rest of its step, and what one watcher folds in
per second.

HDFS lines with their block ids as session keys, in batches of 5,000, on a Redis of its own. The step is that
of a batch of known lines: parse, mask, look up, join; what it stores is not in it. The rules judge what they
were fitted on: it is their time that counts here."""

import csv
import gzip
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import polars as pl
import redis

from pipeline import detect
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.ledger.ledger import Ledger
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Claim, Stage
from pipeline.records.schema import raw_frame
from pipeline.records.verdict import Verdict
from pipeline.redis.connection import connect
from pipeline.redis.leases import WATCH, Leases, granted
from pipeline.settings import Settings
from pipeline.sources.pushed import framed
from pipeline.watching.callbacks import Callbacks
from pipeline.watching.observation import observe
from pipeline.watching.sessions import keys as session_keys
from pipeline.watching.sessions.history import SessionHistory
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.state import WatcherState
from pipeline.watching.watcher import Watcher
from pipeline.workers.stack.private_redis import PrivateRedis

RECORDS: Final = 5_000
NOW_MS: Final = 1_795_000_000_000  # some time in 2026


def lines(data: Path) -> list[str]:
    """The sample as the files had it."""
    path = data / "hdfs" / "HDFS_2percent_events.csv.gz"
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        return [
            f"{r['date']} {r['time']} {r['id']} {r['level']} {r['component']} {r['m_message']}"
            for r in csv.DictReader(file)
        ]


@contextmanager
def own_redis(folder: Path, **more: Any) -> Iterator[Settings]:
    """A Redis with these settings."""
    settings = Settings(data_dir=folder, **more)
    server = PrivateRedis(settings)
    process = server.start()
    try:
        yield settings.replace(redis_url=server.url, lease_ttl_ms=3_600_000)
    finally:
        process.terminate()
        process.wait(20)


class Bench:
    """Batches on their way through the step of known lines."""

    def __init__(self, settings: Settings) -> None:
        self.ledger = Ledger(connect(settings), settings)
        self.masks = MaskSet.load()
        self.templates: dict[int, int] = {}
        self.ms: dict[str, list[float]] = {}
        self.sizes: list[int] = []
        self.sessions: dict[str, list[int]] = {}

    def timed(self, name: str, began: float) -> float:
        now = time.perf_counter()
        self.ms.setdefault(name, []).append((now - began) * 1000)
        return now

    def batch(self, number: int, some: list[str], *, observed: bool) -> None:
        batch = Batch(
            batch_id=f"b{number}", workload="hdfs", source="hdfs.log", source_key="k", purpose=Purpose.SCORE,
            arrived=datetime(2026, 11, 20, tzinfo=UTC), formats=(), zone="UTC",
            records=raw_frame(some, first_line=number * RECORDS + 1),
        )  # fmt: skip
        self.ledger.intake.accept(batch)
        claim = self.ledger.claim(batch.batch_id, Stage.INGEST, "bench")
        assert isinstance(claim, Claim)
        began = time.perf_counter()
        prepared = detect.prepare(framed(self.ledger.payload(batch.batch_id))[0], claim.meta, self.masks)
        work = detect.distinct(prepared, "m1")
        work = detect.answer(work, {key: self.verdict(key) for key in work["key"].to_list()})
        rows = detect.result_rows(prepared, work, claim.meta, "hdfs")
        began = self.timed("step", began)
        blob = b""
        if observed:
            keys = session_keys.find_keys(prepared)
            began = self.timed("keys", began)
            seen = observe(claim, rows, keys)
            blob = b"" if seen is None else seen.pack()
            began = self.timed("observe", began)
            self.sizes.append(len(blob))
            assert seen is not None
            for key, _, _, template in seen.events.rows():
                self.sessions.setdefault(key, []).append(template)
        began = time.perf_counter()
        self.ledger.commit(claim, warming=False, outcomes={}, observation=blob)
        self.timed("commit_observed" if observed else "commit", began)

    def verdict(self, key: int) -> Verdict:
        template = self.templates.setdefault(key, len(self.templates) + 1)
        return Verdict(template_id=template, score=0.1, anomalous=False, reasons=())


def measure(data: Path) -> dict[str, Any]:
    everything = lines(data)
    batches = [everything[i : i + RECORDS] for i in range(0, len(everything), RECORDS)]
    folder = Path(tempfile.mkdtemp(prefix="logweir-bench-"))
    try:
        with own_redis(folder) as settings:
            bench = Bench(settings)
            for number, some in enumerate(batches):
                bench.batch(number, some, observed=True)
            for number, some in enumerate(batches):
                bench.batch(len(batches) + number, some, observed=False)
            folded = fold(bench, settings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ms = {name: round(median(values), 2) for name, values in bench.ms.items()}
    added = ms["keys"] + ms["observe"] + ms["commit_observed"] - ms["commit"]
    return {
        "threads": pl.thread_pool_size(),
        "ms_per_batch": ms,
        "added_ms": round(added, 2),
        "added_percent": round(100 * added / (ms["step"] + ms["commit"]), 1),
        "observation_kib": round(median(bench.sizes) / 1024, 1),
        **folded,
    }


def fold(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Everything that was observed, by one watcher, and the end of all sessions."""
    rules = SessionModel.fit(list(bench.sessions.values()))
    client = connect(settings)
    watcher = Watcher(
        WatcherState(client, settings),
        settings,
        Callbacks(
            session_model=lambda *_: ("m1", rules), store=lambda *_: None, normal=lambda *_: frozenset()
        ),
    )
    lease = granted(Leases(client, settings).request(WATCH, "bench"), WATCH)
    total = int(sum(len(session) for session in bench.sessions.values()))
    began = time.perf_counter()
    while watcher.round(lease.token).more:
        pass
    folded = time.perf_counter()
    held = int(client.memory_usage(watcher.state.keys.watching("sessions"), samples=0) or 0)
    is_open, judged = int(client.hlen(watcher.state.keys.watching("sessions"))), 0
    told = watcher.round(lease.token, end=True)
    judged += told.judged
    while told.more:
        told = watcher.round(lease.token, end=True)
        judged += told.judged
    ended = time.perf_counter()
    return {
        "events": total,
        "sessions": len(bench.sessions),
        "fold_lines_per_s": round(total / (folded - began)),
        "open_sessions": is_open,
        "bytes_per_open_session": round(held / max(1, is_open)),
        "bytes_per_history": history_bytes(client, bench),
        "judged": judged,
        "judged_per_s": round(judged / (ended - folded)),
    }


def history_bytes(client: "redis.Redis", bench: Bench) -> int:
    """In Redis for each session, had all of them a gap: its history, and when the history expires."""
    for key, templates in bench.sessions.items():
        history = SessionHistory(
            source="hdfs.log", line=100_000, began_ms=NOW_MS, until_ms=NOW_MS, dropped=0, templates=tuple(templates)
        )  # fmt: skip
        client.hset("pasts", f"hdfs\0{key}", history.pack())
        client.zadd("past_due", {f"hdfs\0{key}": NOW_MS})
    held = sum(int(client.memory_usage(name, samples=0) or 0) for name in ("pasts", "past_due"))
    return round(held / max(1, len(bench.sessions)))
