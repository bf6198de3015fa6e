"""What more of everything does: ingest workers, templates, workloads; what gets slow first.

Each part stands alone: `--only workers|templates|workloads` (as often as wanted). Drain shards and stored
lines have benchmarks of their own."""

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from bench._load import known, stack, train
from bench._running import scratch
from bench._stacks import command, settled, watched
from bench._varied import real_files, write_cycles
from pipeline.drain.templates import DEPTH, Template, Templates
from pipeline.producer import Producer
from pipeline.records.delivery import Full
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of

PARTS: Final = ("workers", "templates", "workloads")
WORKERS: Final = (1, 2, 4)
WORKER_LINES: Final = 400_000
TEMPLATES: Final = (10, 100, 1_000, 10_000, 100_000)
ASKED: Final = 2_000
MOST_S: Final = 5.0
WORKLOADS: Final = (1, 10, 100, 1_000)
BATCHES: Final = 1_000
BATCH_LINES: Final = 100


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--only", action="append", choices=PARTS, help="this part alone (default: all)")


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "workers": _workers,
        "templates": _templates,
        "workloads": _workloads,
    }
    return {name: parts[name](data) for name in args.only or PARTS}


# ---- ingest workers ------------------------------------------------------------------------------


def _workers(data: Path) -> dict[str, Any]:
    """Lines a second of the whole way, by number of ingest processes."""
    found: dict[str, Any] = {"cores": os.cpu_count()}
    with scratch() as folder:
        sources = real_files(data, folder)
        (folder / "varied").mkdir()
        made = write_cycles(sources, folder / "varied", WORKER_LINES)
        for count in WORKERS:
            here = folder / f"stack-{count}"
            here.mkdir()
            with stack(here, LOGWEIR_INGEST_PROCESSES=str(count)) as settings:
                command(here, "send", *map(str, sources.values()), "--wait")
                command(here, "train")
                settled(settings)
                began = time.monotonic()
                with watched(settings) as seen:
                    command(here, "send", *map(str, made), "--wait", seen=seen)
                    seconds = time.monotonic() - began
            found[str(count)] = {
                "lines_per_s": round(WORKER_LINES / seconds),
                "rss_mib": round(seen.rss),
                "cpu_us_per_line": round(sum(seen.cpu_s.values()) / WORKER_LINES * 1e6, 1),
            }
    return found


# ---- templates -----------------------------------------------------------------------------------


def _templates(data: Path) -> dict[str, Any]:  # noqa: ARG001 - every part is called alike
    """What a template tree of so many templates takes: memory, a new line, a line that is known, reading it
    back."""
    return {str(count): _tree_of(count) for count in TEMPLATES}


def _tree_of(count: int) -> dict[str, float]:
    settings, rng = Settings(), random.Random(count)
    stored = [
        Template(template_id=number, text=text, severe=False, workload="growth")
        for number, text in enumerate(_patterns(rng, count), start=1)
    ]
    process = psutil.Process()
    before = process.memory_info().rss
    tree = _empty(settings, count)
    began = time.process_time()
    tree.restore(stored)
    restored = time.process_time() - began
    grown = process.memory_info().rss - before
    known_us = _per_line(lambda line: tree.match(line, severe=False), [t.text for t in stored[:ASKED]])
    new_us = _per_line(lambda line: tree.learn(line, severe=False, workload="growth"), _patterns(rng, ASKED))
    return {
        "restore_s": round(restored, 2),
        "mib": round(grown / 2**20, 1),
        "us_a_search": known_us,
        "us_a_new_line": new_us,
    }


def _per_line(work: Callable[[str], object], lines: list[str]) -> float:
    """Microseconds of processor time a line, of as many as some seconds are enough for."""
    began, done = time.process_time(), 0
    for line in lines:
        work(line)
        done += 1
        if time.process_time() - began > MOST_S:
            break
    return round((time.process_time() - began) / done * 1e6, 1)


def _empty(settings: Settings, count: int) -> Templates:
    return Templates(similarity=settings.drain.similarity, depth=DEPTH, per_workload=count + ASKED)


def _patterns(rng: random.Random, count: int) -> list[str]:
    """Masked lines of which no two are alike enough to be one template."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=7)) for _ in range(5_000)]
    return [" ".join([*rng.choices(words, k=6), "took", "<NUM>", "ms"]) for _ in range(count)]


# ---- workloads -----------------------------------------------------------------------------------


def _workloads(data: Path) -> dict[str, Any]:  # noqa: ARG001
    """The same batches, spread over so many workloads: lines a second, Redis, folders."""
    found: dict[str, Any] = {}
    for count in WORKLOADS:
        with scratch() as folder, stack(folder) as settings:
            train(folder)
            settled(settings)
            client = connect(settings)
            before: Any = client.info("memory")
            began = time.monotonic()
            with watched(settings) as seen:
                _send(settings, count)
                settled(settings)
                seconds = time.monotonic() - began
            time.sleep(2 * settings.internal.watch_s)
            after: Any = client.info("memory")
            found[str(count)] = {
                "lines_per_s": round(BATCHES * BATCH_LINES / seconds),
                "batches_per_s": round(BATCHES / seconds),
                "cpu_ms_per_batch": round(sum(seen.cpu_s.values()) / BATCHES * 1e3, 1),
                "redis_kib_per_workload": round(
                    (after["used_memory"] - before["used_memory"]) / 1024 / count, 1
                ),
                "files": len(parquet_of(settings).parts()),
            }
    return found


def _send(settings: Settings, workloads: int) -> None:
    producer = Producer.connect(settings)
    for number in range(BATCHES):
        lines = known(BATCH_LINES, seed=number)
        name = f"team-{number % workloads:04}/app"
        while isinstance(answer := producer.send(lines, workload=name, batch_id=f"growth-{number}"), Full):
            time.sleep(answer.retry_after_s)
