"""Ten million stored records to a training sample: records/s and peak memory, for repetitive and for ever-new
lines.

Each measurement is a process of its own, so that its peak is not that of the one before. `pages` feeds the
sampler what another program's documents look like: 5,000 at a time, without pattern and template."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.query import Query
from pipeline.records.schema import LEARN_SCHEMA, RESULT_SCHEMA
from pipeline.settings import Settings
from pipeline.training.sampling import MAX_PATTERNS, Sampler, read_parquet

RECORDS = 10_000_000
FILE_RECORDS = 5_000  # batch_records as it was when the figures of docs/benchmarks.md were made
START = datetime(2026, 11, 1, tzinfo=UTC)
LETTERS = np.frombuffer(b"ghijklmnopqrstuvwxyz", dtype=np.uint8)  # no word looks like a hexadecimal number
SHAPES = 2_000  # of the repetitive log; the n-th is n times rarer than the first


def words(rng: np.random.Generator, count: int, length: int) -> pl.Series:
    """Random words, one a row."""
    drawn = rng.choice(LETTERS, size=(count, length)).tobytes().decode()
    return pl.Series([drawn[i : i + length] for i in range(0, len(drawn), length)])


def messages(kind: str, rng: np.random.Generator, count: int, shapes: pl.Series) -> pl.DataFrame:
    """`message` and the `pattern_id` it was stored with."""
    number = pl.Series(rng.integers(0, 1 << 30, count)).cast(pl.String)
    if kind == "distinct":
        text = "request of " + words(rng, count, 12) + " for " + words(rng, count, 8) + " took " + number
        return pl.DataFrame({"message": text, "pattern_id": rng.integers(1, 1 << 62, count, dtype=np.uint64)})
    shares = 1 / np.arange(1, SHAPES + 1)
    shape = rng.choice(SHAPES, size=count, p=shares / shares.sum())
    text = (
        "connection " + number + " of " + shapes.gather(shape) + " closed after " + number.reverse() + " ms"
    )
    return pl.DataFrame({"message": text, "pattern_id": shape.astype(np.uint64) + np.uint64(1)})


def batches(kind: str, records: int) -> Iterator[pl.DataFrame]:
    """RESULT_SCHEMA frames as the store worker writes them."""
    rng = np.random.default_rng(0)
    shapes = words(rng, SHAPES, 10)
    for at in range(0, records, FILE_RECORDS):
        count = min(FILE_RECORDS, records - at)
        yield (
            messages(kind, rng, count, shapes)
            .with_columns(
                pl.col("message").alias("raw"),
                pl.Series("level", rng.choice(["info", "info", "info", "error"], count)),
                pl.lit(f"shop/api-{at // FILE_RECORDS % 20}").alias("workload"),
                pl.datetime_range(
                    START + timedelta(milliseconds=at),
                    START + timedelta(milliseconds=at + count - 1),
                    "1ms",
                    eager=True,
                ).alias("timestamp"),
                pl.lit(7, dtype=pl.Int64).alias("template_id"),
                pl.lit(1, dtype=pl.UInt32).alias("lines"),
                pl.lit(0.1).alias("score"),
                pl.lit(value=False).alias("anomalous"),
            )
            .with_columns(
                pl.lit(None, dtype=dtype).alias(name)
                for name, dtype in RESULT_SCHEMA.items()
                if name in ("record_id", "source", "line", "reasons", "model_version", "host", "process", "service")
            )
            .select(list(RESULT_SCHEMA))
        )  # fmt: skip


def store(kind: str, records: int, root: Path) -> None:
    for number, frame in enumerate(batches(kind, records)):
        folder = root / "date=2026-11-01" / f"workload=shop%2Fapi-{number % 20}"
        folder.mkdir(parents=True, exist_ok=True)
        frame.write_parquet(folder / f"{number:08}.parquet", compression="zstd", compression_level=3)


def peak_mib() -> float:
    """Largest resident set of this process; getrusage would count its parent's too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def once(kind: str, root: Path) -> dict[str, Any]:
    """In a process of its own."""
    settings = Settings()
    sampler = Sampler(MaskSet.load(), limit=MAX_PATTERNS, seed=settings.train.seed)
    spent = 0.0
    if kind == "pages":
        pages = [
            page.with_columns(pl.lit(None, pl.UInt64).alias("pattern_id"), pl.lit(None, pl.Int64).alias("template_id"))
            for page in (frame.select(list(LEARN_SCHEMA)) for frame in batches("repetitive", 500_000))
        ]  # fmt: skip
        began = time.perf_counter()
        for page in pages:
            sampler.add(page)
        spent = time.perf_counter() - began
    else:
        query = Query(exclude_words=("nothing of this kind",), exclude_anomalous=True)
        began = time.perf_counter()
        for page in read_parquet(root, query):
            sampler.add(page)
        spent = time.perf_counter() - began
    began = time.perf_counter()
    got = sampler.sample()
    last = time.perf_counter() - began
    return {
        "documents": got.lines,
        "records_per_s": round(got.lines / (spent + last)),
        "peak_rss_mib": round(peak_mib()),
        "distinct": got.distinct,
        "exact": got.exact,
        "kept": got.frame.height,
        "left_out": got.left_out,
        "sample_s": round(last, 2),
    }


def measure(_data: Path, *, records: int = RECORDS) -> dict[str, Any]:
    """The records are made here, not read, under the directory for temporary files."""
    found: dict[str, Any] = {}
    for kind in ("repetitive", "distinct", "pages"):
        root = Path(tempfile.mkdtemp(prefix="logweir-bench-"))
        try:
            if kind != "pages":
                store(kind, records, root)
            done = subprocess.run(
                [sys.executable, "-m", "bench.sampling", kind, str(root)],
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            shutil.rmtree(root)
        found[kind] = json.loads(done.stdout)
    return {"threads": pl.thread_pool_size(), **found["repetitive"], "datasets": found}


if __name__ == "__main__":
    print(json.dumps(once(sys.argv[1], Path(sys.argv[2]))))
