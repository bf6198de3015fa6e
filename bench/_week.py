"""A week of stored lines: those of the data sets with other parameters in each cycle, parsed as the pipeline
parses them, over 50 workloads, as 20 batches of 500 a commit. The clock is made up, so that a week of
compaction runs in minutes."""

import random
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import polars as pl

from bench._log_files import read_file
from bench._varied import real_files
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks import parquet
from pipeline.sinks.compaction import Compactor, Fate
from pipeline.sinks.parquet import ParquetSink
from pipeline.sources import formats

BATCH: Final = 500
GROUP: Final = 20
DAYS: Final = 7
WORKLOADS: Final = 50
TEMPLATES: Final = 5_000
ROUND_S: Final = 300.0  # of the made-up clock, between two rounds of compaction
_PARSED: Final = ("level", "message", "host", "process", "service")
_DIGITS: Final = "123456789"  # zeros stay, so that no number begins with one


def groups(data: Path, folder: Path, lines: int, start: datetime) -> Iterator[list[tuple[str, pl.DataFrame]]]:
    """The batches of each commit, in the order of their time, over DAYS from `start`."""
    real = _real(data, folder, start)
    first_us = round(start.timestamp() * 1e6)
    step_us = DAYS * 86_400_000_000 // lines
    for first in range(0, lines, GROUP * BATCH):
        cycle, at = divmod(first, real.height)
        rows = _varied(real.slice(at, GROUP * BATCH), cycle)
        yield [
            (f"batch-{first + place}", _frame(rows.slice(place, BATCH), first + place, first_us, step_us))
            for place in range(0, GROUP * BATCH, BATCH)
        ]


def _real(data: Path, folder: Path, start: datetime) -> pl.DataFrame:
    """The lines of the data sets, parsed and masked as a batch is; as many as fill whole commits."""
    masks, found = MaskSet.load(), []
    for path in real_files(data, folder).values():
        for chunk in read_file(path):
            parsed = formats.parse(chunk.records, chunk.formats, arrived=start, zone="UTC")
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


def _frame(rows: pl.DataFrame, at: int, first_us: int, step_us: int) -> pl.DataFrame:
    workload = f"team-{at // BATCH % WORKLOADS:02}/app"
    known = {
        "record_id": [f"{at:x}-{n}" for n in range(BATCH)],
        "source": pl.repeat(f"/var/log/{workload}.log", BATCH, eager=True),
        "line": pl.int_range(at + 1, at + BATCH + 1, eager=True),
        "lines": pl.repeat(1, BATCH, eager=True),
        "timestamp": (first_us + pl.int_range(at, at + BATCH, eager=True) * step_us).cast(pl.Int64),
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


def filled(
    sink: ParquetSink, commits: Iterator[list[tuple[str, pl.DataFrame]]], lines: int, start: datetime
) -> dict[str, Any]:
    """Commits and compaction of a week."""
    clock = start.timestamp()
    compactor = Compactor(sink, lambda ids: [Fate.FINAL] * len(ids), now=lambda: clock)
    committing = compacting = 0.0
    batches = rewritten = most = 0
    rounded = clock
    with patch.object(parquet, "_now_ms", lambda: int(clock * 1000)):
        for group in commits:
            began = time.process_time()
            sink.write_all(group)
            committing += time.process_time() - began
            batches += len(group)
            clock = start.timestamp() + DAYS * 86_400 * batches * BATCH / lines
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
