"""The store of results over seven days: commits, compaction, size and questions, beside a file a batch.

Lines are those of bench/_week.py, of seven days and 50 workloads. The peer writes each batch as a file of its
own, synced, as the first edition did."""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Final

import polars as pl

from bench._running import scratch
from bench._week import BATCH, DAYS, GROUP, filled, groups
from pipeline.records.news import NewsQuery
from pipeline.records.pattern_query import PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.sinks.answers.files import FileAnswers
from pipeline.sinks.parquet import ParquetSink

PEER_GROUPS: Final = 20
REPEATS: Final = 5
START: Final = datetime(2026, 11, 1, tzinfo=UTC)
END: Final = START + timedelta(days=DAYS)


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--lines", type=int, default=5_000_000, help="stored lines (5,000,000)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the store in DIR; one that lies there is only asked"
    )


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder:
        results = (args.keep or folder) / "results"
        found: dict[str, Any] = {}
        if not results.exists():
            found = filled(ParquetSink(results), groups(data, folder, args.lines, START), args.lines, START)
            found["peer"] = _peer(groups(data, folder, PEER_GROUPS * GROUP * BATCH, START), folder / "peer")
        # A process of its own answers, so that its memory is not that of the writer.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as answerer:
            return found | answerer.submit(_asked, results, folder).result()


def _peer(commits: Iterator[list[tuple[str, pl.DataFrame]]], folder: Path) -> dict[str, Any]:
    """A file a batch."""
    folder.mkdir()
    spent, size, batches = 0.0, 0, 0
    for group in commits:
        began = time.process_time()
        for name, frame in group:
            with (folder / f"{name}.parquet").open("wb") as out:
                frame.write_parquet(out, compression="zstd", compression_level=3)
                out.flush()
                os.fsync(out.fileno())
        spent += time.process_time() - began
        batches += len(group)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "commit_cpu_ms_per_batch": round(spent / batches * 1000, 2),
        "bytes_per_line": round(size / (batches * BATCH), 1),
    }


def _asked(results: Path, cache: Path) -> dict[str, Any]:
    """Milliseconds of the questions of an operator, each the median after one warm-up; MiB of the process."""
    day = timedelta(days=1)
    with closing(FileAnswers(ParquetSink(results), cache=cache)) as answers:

        def page(days: int) -> Callable[[], object]:
            since = END - days * day
            other = (since - days * day, since)
            query = PatternQuery(since=since, until=END, against=other, limit=50)
            return lambda: answers.patterns(query)

        def lines(**wanted: Any) -> pl.DataFrame:
            return answers.lines(ResultQuery(since=END - day, until=END, **wanted))

        news = NewsQuery(past=END - 4 * day, since=END - day, until=END, limit=210)
        hit = lines(limit=1, anomalous=True)
        return {
            "page_24h_ms": _ms(page(1)),
            "page_7d_ms": _ms(page(7)),
            "page_30d_ms": _ms(page(30)),
            "findings_24h_ms": _ms(lambda: lines(limit=200, anomalous=True)),
            "news_24h_ms": _ms(lambda: answers.news(news)),
            "context_ms": _ms(lambda: answers.context(hit, 5)),
            "search_first_s": round(_ms(lambda: lines(limit=50, text="exception")) / 1000, 2),
            "search_none_s": round(_ms(lambda: lines(limit=50, text="nothing like it")) / 1000, 2),
            "rss_mib": _peak_mib(),
        }


def _peak_mib() -> int:
    """The largest resident set of this program; `ru_maxrss` would be that of whoever began it, too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def _ms(work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        found.append((time.perf_counter() - began) * 1000)
    return round(median(found), 1)
