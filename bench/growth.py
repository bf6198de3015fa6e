"""What more of everything does: ingest workers, templates, workloads, stored lines; what gets slow first.

Each part stands alone: `--only workers|templates|workloads|stored` (as often as wanted). Drain shards have a
benchmark of their own."""

import argparse
import os
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import polars as pl
import psutil

from bench._load import known, stack, train
from bench._running import scratch
from bench._stacks import command, settled, watched
from bench._varied import real_files, write_cycles
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import DEPTH, Template, Templates
from pipeline.ledger.batches import Full
from pipeline.producer import Producer
from pipeline.records.query import Query
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.redis.connection import connect
from pipeline.report import findings, summary
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.training.sampling import MAX_PATTERNS, Sampler, read_parquet

PARTS: Final = ("workers", "templates", "workloads", "stored")
WORKERS: Final = (1, 2, 4)
WORKER_LINES: Final = 400_000
TEMPLATES: Final = (10, 100, 1_000, 10_000, 100_000)
ASKED: Final = 2_000
MOST_S: Final = 5.0
WORKLOADS: Final = (1, 10, 100, 1_000)
BATCHES: Final = 1_000
BATCH_LINES: Final = 100
STORED: Final = (1_000_000, 10_000_000, 100_000_000)
FILE_LINES: Final = 5_000
DISTINCT_FILES: Final = 20


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--only", action="append", choices=PARTS, help="this part alone (default: all)")


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "workers": _workers,
        "templates": _templates,
        "workloads": _workloads,
        "stored": _stored,
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
                "folders": sum(1 for _ in settings.data.results.glob("date=*/workload=*")),
            }
    return found


def _send(settings: Settings, workloads: int) -> None:
    producer = Producer.connect(settings)
    for number in range(BATCHES):
        lines = known(BATCH_LINES, seed=number)
        name = f"team-{number % workloads:04}/app"
        while isinstance(answer := producer.send(lines, workload=name, batch_id=f"growth-{number}"), Full):
            time.sleep(answer.retry_after_s)


# ---- stored lines --------------------------------------------------------------------------------


def _stored(data: Path) -> dict[str, Any]:  # noqa: ARG001
    """Reading so many stored lines: the numbers of a report, its findings, training data, the newest
    files."""
    found: dict[str, Any] = {}
    with scratch() as folder:
        files = _files(folder / "own")
        root, there = folder / "results", 0
        for lines in STORED:
            for number in range(there, lines // FILE_LINES):
                _link(files[number % len(files)], root, number)
            there = lines // FILE_LINES
            found[f"{lines:,}"] = {
                "files": there,
                "newest_files_s": _timed(lambda: ParquetSink(root).latest(5.0, 100)),
                "report_numbers_s": _timed(lambda: summary.run_summary(root)),
                "report_findings_s": _timed(lambda: findings.collect(root, _NO_TEXTS, limit=100)),
                "training_sample_s": _timed(lambda: _sample(root)),
            }
    return found


_NO_TEXTS: Final = pl.DataFrame(schema={"template_id": pl.Int64, "template": pl.String})


def _files(folder: Path) -> list[Path]:
    """A few files of results; all others are links to them, as disks here have no room for 100 million
    lines."""
    folder.mkdir()
    made = []
    rng = random.Random(7)
    start = datetime(2026, 11, 1, tzinfo=UTC)
    for number in range(DISTINCT_FILES):
        lines = known(FILE_LINES, seed=number)
        ids = [rng.randrange(1, 200) for _ in lines]
        frame = pl.DataFrame(
            {
                "record_id": [f"{number:x}-{i}" for i in range(FILE_LINES)],
                "source": ["growth.log"] * FILE_LINES,
                "line": list(range(1, FILE_LINES + 1)),
                "lines": [1] * FILE_LINES,
                "timestamp": [start + timedelta(seconds=number * FILE_LINES + i) for i in range(FILE_LINES)],
                "workload": ["growth"] * FILE_LINES,
                "level": ["info"] * FILE_LINES,
                "message": [line[33:] for line in lines],
                "pattern_id": [template_id * 7919 for template_id in ids],
                "template_id": ids,
                "score": [0.9 if template_id == 1 else 0.1 for template_id in ids],
                "anomalous": [template_id == 1 for template_id in ids],
                "reasons": [["rare:1/9"] if template_id == 1 else [] for template_id in ids],
                "model_version": ["20261101T000000-growth"] * FILE_LINES,
                "raw": lines,
            }
        )
        made.append(folder / f"{number}.parquet")
        columns = [
            (pl.col(name) if name in frame.columns else pl.lit(None)).cast(kind).alias(name)
            for name, kind in RESULT_SCHEMA.items()
        ]
        frame.select(columns).write_parquet(made[-1])
    return made


def _link(file: Path, root: Path, number: int) -> None:
    place = root / f"date=2026-11-{number % 28 + 1:02}" / "workload=growth"
    place.mkdir(parents=True, exist_ok=True)
    os.link(file, place / f"batch-{number}.parquet")


def _sample(root: Path) -> None:
    sampler = Sampler(MaskSet.load(), limit=MAX_PATTERNS)
    for page in read_parquet(root, Query()):
        sampler.add(page)


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return round(time.monotonic() - began, 2)
