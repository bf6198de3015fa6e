"""100 times: from "training wants the GPU" to "training holds it", under full inference load; lines lost or
doubled.

A real `logweir up` with one more worker that serves the GPU queue under its share of a pool, on a device that
is made up: everything is as on a GPU but the arithmetic, which the CPU does. Lines flow all the time, half of
them never seen before. The wait may be the longest batch of that worker, read from its log, plus one second.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from bench._load import Fed, environment, feed, stack, train
from bench._running import scratch
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Device, LeaseMode, Need, Report
from pipeline.ledger.ledger import Ledger
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of

TIMES: Final = 100
HELD_S: Final = 0.2  # a training that takes no time: batches go to the CPU queue meanwhile
BATCH_LINES: Final = 150  # about half a second of scoring
WARM: Final = 5  # batches before the first measurement
BACK_S: Final = 30.0  # for inference to be on the GPU again
DRAINED_S: Final = 120.0


def measure(_data: Path) -> dict[str, Any]:
    with scratch() as folder, stack(folder) as settings:
        train(folder)
        pool = Pool(connect(settings), settings)
        with _device(settings), _worker(folder, settings):
            fed = Fed()
            feeder = threading.Thread(target=feed, args=(settings, fed, BATCH_LINES), daemon=True)
            feeder.start()
            _warm(folder / "infer-gpu.log")
            try:
                waits = [_once(pool, number) for number in range(TIMES)]
            finally:
                fed.stop.set()
                feeder.join(DRAINED_S)
            return _judged(settings, fed, waits, folder / "infer-gpu.log")


@contextmanager
def _device(settings: Settings) -> Iterator[None]:
    """An agent that sees one idle device."""
    pool = Pool(connect(settings), settings)
    pool.ledger.clear_quarantine()
    seen = Device(
        uuid="GPU-00000000-0000-0000-0000-000000000001",
        node=this_node(),
        index=0,
        name="made up",
        total_mib=16_384,
        schedulable_mib=16_000,
    )
    stop = threading.Event()

    def beat() -> None:
        while True:
            pool.report(
                Report(node=this_node(), agent="bench", clock_ms=round(time.time() * 1000), devices=(seen,))
            )
            if stop.wait(1.0):
                return

    agent = threading.Thread(target=beat, daemon=True)
    agent.start()
    yield
    stop.set()
    agent.join()


@contextmanager
def _worker(folder: Path, settings: Settings) -> Iterator[None]:
    env = {**environment(folder), **settings.to_environ()}
    with (folder / "infer-gpu.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.gpu", "infer-gpu", "cpu"],
            env=env,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        worker.terminate()
        worker.wait(60)


def _warm(log: Path) -> None:
    """Until the worker has scored some batches: its first ones wait for torch, and are no batch's length."""
    deadline = time.monotonic() + 120
    while len(_steps_ms(log)) < WARM:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the GPU worker has not scored {WARM} batches within 120 s; see its log {log}"
            )
        time.sleep(0.2)


def _once(pool: Pool, number: int) -> float:
    """Seconds from wanting to having."""
    deadline = time.monotonic() + BACK_S
    while not any(lease.need.mode is LeaseMode.SHARED for lease in pool.snapshot().leases):
        if time.monotonic() > deadline:
            raise RuntimeError(f"inference was not back on the GPU {BACK_S:.0f} s after training {number}")
        time.sleep(0.02)
    time.sleep(0.05 * (number % 10))  # anywhere in a batch
    began = time.monotonic()
    lease = pool.request(Need(mode=LeaseMode.EXCLUSIVE), holder="bench-training", timeout_s=60)
    waited = time.monotonic() - began
    time.sleep(HELD_S)
    pool.release(lease)
    return waited


def _judged(settings: Settings, fed: Fed, waits: list[float], log: Path) -> dict[str, Any]:
    ledger = Ledger(connect(settings), settings)
    deadline = time.monotonic() + DRAINED_S
    while ledger.backlog.counts().get("batches", 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    stored = parquet_of(settings).scan().filter(pl.col("workload").str.starts_with("load"))
    rows = stored.select("record_id", "lines").collect()
    longest_s = max(_steps_ms(log)[WARM:]) / 1000
    taken = np.array(waits)
    return {
        "times": len(waits),
        "within_bound": int((taken <= longest_s + 1).sum()),
        "longest_batch_ms": round(longest_s * 1000),
        "p50_ms": round(float(np.percentile(taken, 50)) * 1000),
        "p99_ms": round(float(np.percentile(taken, 99)) * 1000),
        "max_ms": round(float(taken.max()) * 1000),
        "batches": len(fed.batches),
        "batches_on_the_gpu": len(_steps_ms(log)),
        "unfinished": ledger.backlog.counts().get("batches", 0),
        "lost": sum(fed.batches.values()) - int(rows.unique("record_id")["lines"].sum()),
        "doubled": rows.height - rows["record_id"].n_unique(),
    }


def _steps_ms(log: Path) -> list[int]:
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if '"batch.step"' in line:
            found.append(int(json.loads(line)["ms"]))
    return found
