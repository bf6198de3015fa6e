"""Files and tables that `logweir export` writes, in bounded memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import polars as pl

from pipeline.records.result_query import ResultQuery
from pipeline.service.lines import covered_names
from pipeline.service.questions import LinesAsked
from pipeline.service.stored.tables import flat_rows
from pipeline.sinks.parquet import ParquetSink

CHUNK: Final = 250_000  # lines in memory at once

Writer = Callable[[pl.LazyFrame, Path], int]


def matching_rows(sink: ParquetSink, asked: LinesAsked) -> pl.LazyFrame:
    """All stored lines that match, lazily. Findings stay longer than lines. Raises SinkUnavailable."""
    query = ResultQuery(
        limit=0,
        since=asked.since,
        until=asked.until,
        workloads=covered_names(asked.workload, sink.workloads() if asked.workload else ()),
        level=asked.level,
        text=asked.text,
        template_id=asked.template_id,
        anomalous=asked.anomalous,
    )
    scan = sink.findings if query.anomalous else sink.scan
    wanted: list[pl.Expr] = []
    if query.since is not None:
        wanted.append(pl.col("timestamp") >= query.since)
    if query.until is not None:
        wanted.append(pl.col("timestamp") < query.until)
    if query.workloads is not None:
        wanted.append(pl.col("workload").is_in(query.workloads))
    if query.level is not None:
        wanted.append(pl.col("level").is_in(query.levels))
    if query.template_id is not None:
        wanted.append(pl.col("template_id").fill_null(0) == query.template_id)
    if query.anomalous:
        wanted.append(pl.col("anomalous"))
    if query.text is not None:
        text = pl.col("message").str.to_lowercase()
        wanted.append(text.str.contains(query.text.lower(), literal=True))
    return scan(since=query.since, until=query.until, workloads=query.workloads).filter(*wanted)


def rows_of_files(folder: Path) -> pl.LazyFrame:
    """The rows of the Parquet files in a folder, of which there is at least one."""
    return pl.scan_parquet(sorted(folder.glob("*.parquet")), glob=False)  # whatever its path contains


def writer_of(kind: str) -> Writer:
    """The writer of a format. Raises BadInput where its package is missing."""
    if kind == "delta":
        import deltalake  # noqa: F401 - a missing extra is said before anything is read
    return WRITERS[kind]


def _parquet(rows: pl.LazyFrame, path: Path) -> int:
    rows.sink_parquet(path, compression="zstd", compression_level=3)
    return int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())


def _csv(rows: pl.LazyFrame, path: Path) -> int:
    flat = flat_rows(rows)
    lines = 0
    with path.open("wb") as file:
        file.write((",".join(rows.collect_schema().names()) + "\n").encode())
        for some in flat.collect_batches(chunk_size=CHUNK, maintain_order=True):
            some.write_csv(file, include_header=False)
            lines += some.height
    return lines


def _delta(rows: pl.LazyFrame, path: Path) -> int:
    """Delta has no unsigned numbers: pattern ids keep their bits."""
    signed = rows.with_columns(
        pl.col("pattern_id").reinterpret(signed=True),
        pl.col("line").reinterpret(signed=True),
        pl.col("lines").cast(pl.Int32),
    )
    lines = 0
    for some in signed.collect_batches(chunk_size=CHUNK, maintain_order=True):
        if some.height:
            some.write_delta(str(path), mode="append")
            lines += some.height
    if not lines:
        signed.head(0).collect().write_delta(str(path))
    return lines


WRITERS: Final[dict[str, Writer]] = {"csv": _csv, "parquet": _parquet, "delta": _delta}
