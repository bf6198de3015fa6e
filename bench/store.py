"""The store of results over seven days: commits, compaction, size and questions, beside a file a batch.

Lines are those of the data sets with other parameters in each cycle, parsed as the pipeline parses them,
spread over seven days and 50 workloads, as 20 batches of 500 a commit. The clock is made up, so that a week
of compaction runs in minutes. The peer writes each batch as a file of its own, synced, as the first edition
did."""

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import polars as pl

from bench._running import scratch
from bench._varied import real_files
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.pattern_query import PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks import parquet
from pipeline.sinks.answers.files import FileAnswers
from pipeline.sinks.compaction import Compactor, Fate
from pipeline.sinks.parquet import ParquetSink
from pipeline.sources import files, formats

BATCH: Final = 500
GROUP: Final = 20
DAYS: Final = 7
WORKLOADS: Final = 50
TEMPLATES: Final = 5_000
ROUND_S: Final = 300.0  # of the made-up clock, between two rounds of compaction
PEER_GROUPS: Final = 20
REPEATS: Final = 5
START: Final = datetime(2026, 11, 1, tzinfo=UTC)
END: Final = START + timedelta(days=DAYS)
_PARSED: Final = ("level", "message", "host", "process", "service")
_DIGITS: Final = "123456789"  # zeros stay, so that no number begins with one


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
            found = _filled(ParquetSink(results), _groups(data, folder, args.lines), args.lines)
            found["peer"] = _peer(_groups(data, folder, PEER_GROUPS * GROUP * BATCH), folder / "peer")
        # A process of its own answers, so that its memory is not that of the writer.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as answerer:
            return found | answerer.submit(_asked, results, folder).result()


def _groups(data: Path, folder: Path, lines: int) -> Iterator[list[tuple[str, pl.DataFrame]]]:
    """The batches of each commit, in the order of their time."""
    real = _real(data, folder)
    step_us = DAYS * 86_400_000_000 // lines
    for first in range(0, lines, GROUP * BATCH):
        cycle, at = divmod(first, real.height)
        rows = _varied(real.slice(at, GROUP * BATCH), cycle)
        yield [
            (f"batch-{first + start}", _frame(rows.slice(start, BATCH), first + start, step_us))
            for start in range(0, GROUP * BATCH, BATCH)
        ]


def _real(data: Path, folder: Path) -> pl.DataFrame:
    """The lines of the data sets, parsed and masked as a batch is; as many as fill whole commits."""
    masks, found = MaskSet.load(), []
    for path in real_files(data, folder).values():
        for chunk in files.read_file(path):
            parsed = formats.parse(chunk.records, chunk.formats, arrived=START, zone="UTC")
            pattern = masks.mask(parsed["message"])["pattern_id"]
            found.append(parsed.select("raw", *_PARSED).with_columns(pattern))
    rows = pl.concat(found)
    rows = rows.head(rows.height // (GROUP * BATCH) * GROUP * BATCH)
    return rows.with_columns(pl.col("raw").str.strip_suffix(pl.col("message")).alias("head"))


def _varied(rows: pl.DataFrame, cycle: int) -> pl.DataFrame:
    """The rows with the digits of their messages written as others, each cycle in another way."""
    if not cycle:
        return rows
    others = random.Random(cycle).sample(_DIGITS, len(_DIGITS))
    message = pl.col("message").str.replace_many(list(_DIGITS), others)
    return rows.with_columns(message).with_columns(pl.concat_str("head", "message").alias("raw"))


def _frame(rows: pl.DataFrame, at: int, step_us: int) -> pl.DataFrame:
    workload = f"team-{at // BATCH % WORKLOADS:02}/app"
    known = {
        "record_id": [f"{at:x}-{n}" for n in range(BATCH)],
        "source": pl.repeat(f"/var/log/{workload}.log", BATCH, eager=True),
        "line": pl.int_range(at + 1, at + BATCH + 1, eager=True),
        "lines": pl.repeat(1, BATCH, eager=True),
        "timestamp": (START.timestamp() * 1e6 + pl.int_range(at, at + BATCH, eager=True) * step_us).cast(
            pl.Int64
        ),
        "timed": pl.repeat(value=True, n=BATCH, eager=True),
        "workload": pl.repeat(workload, BATCH, eager=True),
        **{name: rows[name] for name in ("raw", "pattern_id", *_PARSED)},
        "reasons": pl.Series([[]] * BATCH, dtype=pl.List(pl.String)),
        "model_version": pl.repeat("20261101T000000-bench", BATCH, eager=True),
    }
    frame = pl.DataFrame(known).with_columns(
        template_id=(pl.col("pattern_id") % TEMPLATES + 1).cast(pl.Int64),
        anomalous=(pl.col("pattern_id") % 53).cast(pl.Int64) == pl.col("line").cast(pl.Int64) % 53,
        score=(pl.col("pattern_id") % 1000).cast(pl.Float64) / 1000,
    )
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in RESULT_SCHEMA.items()
    )


def _filled(
    sink: ParquetSink, groups: Iterator[list[tuple[str, pl.DataFrame]]], lines: int
) -> dict[str, Any]:
    """Commits and compaction of a week."""
    clock = START.timestamp()
    compactor = Compactor(sink, lambda ids: [Fate.FINAL] * len(ids), now=lambda: clock)
    committing = compacting = 0.0
    batches = rewritten = most = 0
    rounded = clock
    with patch.object(parquet, "_now_ms", lambda: int(clock * 1000)):
        for group in groups:
            began = time.process_time()
            sink.write_all(group)
            committing += time.process_time() - began
            batches += len(group)
            clock = START.timestamp() + DAYS * 86_400 * batches * BATCH / lines
            if clock - rounded > ROUND_S:
                rounded, began = clock, time.process_time()
                rewritten += compactor.round().rows
                compacting += time.process_time() - began
            most = max(most, len(sink.manifest().parts))
        clock += 4_000
        began = time.process_time()
        rewritten += compactor.round().rows
        compacting += time.process_time() - began
    parts = sink.parts()
    return {
        "lines": lines,
        "commit_cpu_ms_per_batch": round(committing / batches * 1000, 2),
        "compaction_cpu_s_per_million": round(compacting / max(1, rewritten) * 1e6, 2),
        "rewrites_per_line": round(rewritten / lines, 2),
        "bytes_per_line": round(sum(part.bytes for part in parts) / lines, 1),
        "files": len(parts),
        "files_per_day": round(len(parts) / DAYS, 1),
        "unsealed_at_most": most,
    }


def _peer(groups: Iterator[list[tuple[str, pl.DataFrame]]], folder: Path) -> dict[str, Any]:
    """A file a batch."""
    folder.mkdir()
    spent, size, batches = 0.0, 0, 0
    for group in groups:
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

        hit = lines(limit=1, anomalous=True)
        return {
            "page_24h_ms": _ms(page(1)),
            "page_7d_ms": _ms(page(7)),
            "page_30d_ms": _ms(page(30)),
            "findings_24h_ms": _ms(lambda: lines(limit=200, anomalous=True)),
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
