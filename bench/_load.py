"""A running stack under load, for benchmarks that measure what happens beside the work."""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pipeline.ledger.ledger import Ledger
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted
from pipeline.redis.attach import attached
from pipeline.redis.connection import connect
from pipeline.settings import Settings

IN_FLIGHT: Final = 12  # batches: enough that no stage runs dry
BATCH_LINES: Final = 40
ENVIRONMENT: Final = {
    "LOGWEIR_FLOWER": "no",
    "LOGWEIR_METRICS": "no",
    "LOGWEIR_INTAKE": "",
    "LOGWEIR_API": "",
    "LOGWEIR_INGEST_PROCESSES": "2",
}


@dataclass(slots=True)
class Fed:
    """What the feeding thread sent: lines by batch id."""

    batches: dict[str, int] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)


@contextmanager
def stack(folder: Path, **extra: str) -> Iterator[Settings]:
    """A ready `logweir up`; its settings as a client needs them. `extra`: more of its environment."""
    env = environment(folder) | extra
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        up = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "up", "--json"],
            env=env,
            stdout=out,
            stderr=err,
            cwd=folder,
        )
    try:
        deadline = time.monotonic() + 90
        while not (folder / "out").read_text().strip():
            if up.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"logweir up is not ready: {(folder / 'err').read_text()[-1000:]}")
            time.sleep(0.1)
        yield attached(Settings(data_dir=folder / "data"))
    finally:
        up.terminate()
        up.wait(60)


def environment(folder: Path) -> dict[str, str]:
    """Nothing of a developer's own settings."""
    kept = {k: v for k, v in os.environ.items() if k != "REDIS_URL" and not k.startswith("LOGWEIR_")}
    return {**kept, **ENVIRONMENT, "LOGWEIR_DATA_DIR": str(folder / "data")}


def train(folder: Path, **extra: str) -> None:
    log = folder / "base.log"
    log.write_text("".join(line + "\n" for line in known(1_000, seed=0)), encoding="utf-8")
    env = environment(folder) | extra
    for verb in (["send", str(log), "--workload", "base", "--wait"], ["train"]):
        subprocess.run(
            [sys.executable, "-m", "pipeline.cli", *verb],
            env=env,
            check=True,
            capture_output=True,
            timeout=120,
        )


def known(n: int, *, seed: int) -> list[str]:
    """Lines of a healthy service; masked, they are 40 distinct ones."""
    rng = random.Random(seed)
    words = ("cart", "search", "login", "stock", "price", "mail", "image", "audit")
    verbs = ("served", "cached", "stored", "checked", "queued")
    return [
        f"2026-11-20T10:00:00Z INFO app: {rng.choice(words)} {rng.choice(verbs)} request "
        f"{rng.randrange(10**6)} "
        f"for 10.0.{rng.randrange(250)}.7 in {rng.randrange(900)} ms"
        for _ in range(n)
    ]


def new_lines(n: int, number: int) -> list[str]:
    """Lines whose masked form nobody has seen: no number tells them apart, words do."""
    rng = random.Random(number)
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["".join(rng.choices(letters, k=9)) for _ in range(n)]
    return [f"2026-11-20T11:00:00Z INFO app: module {name} says {name[::-1]}" for name in names]


def feed(settings: Settings, fed: Fed, batch_lines: int = BATCH_LINES) -> None:
    """Send until told to stop; half of the lines of every batch were never seen before."""
    producer, ledger = Producer.connect(settings), Ledger(connect(settings), settings)
    number = 0
    while not fed.stop.is_set():
        if ledger.backlog.counts().get("batches", 0) >= IN_FLIGHT:
            fed.stop.wait(0.01)
            continue
        number += 1
        lines = [*known(batch_lines // 2, seed=number), *new_lines(batch_lines // 2, number)]
        batch_id = f"bench-{number}"
        if isinstance(producer.send(lines, workload=f"load{number % 3}", batch_id=batch_id), Accepted):
            fed.batches[batch_id] = len(lines)
