"""`logweir export`: stored lines as one file or table for other programs, in bounded memory."""

import argparse
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import polars as pl

from pipeline.commands.common import display, of_pipeline, out, print_json, settings_of
from pipeline.commands.results import lines_asked
from pipeline.errors import BadInput, SinkUnavailable
from pipeline.records.result_query import ResultQuery
from pipeline.report.export import FORMULA_MARKS
from pipeline.service.lines import covered_names
from pipeline.sinks.choose import parquet_of
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.results import readable
from pipeline.units import plural

CHUNK: Final = 250_000  # lines in memory at once

_DISK_FAULTS: Final = tuple(
    os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)
)

Writer = Callable[[pl.LazyFrame, Path], int]


def main(args: argparse.Namespace) -> int:
    settings = of_pipeline(settings_of(args))
    if "parquet" not in settings.data.sinks:
        raise BadInput("export reads Parquet results, and these are in OpenSearch (sinks)")
    kind, target = next((kind, path) for kind in WRITERS if (path := getattr(args, kind)) is not None)
    write = _writer(kind)
    sink, asked = parquet_of(settings), lines_asked(args)
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
    with readable(sink), _in_place(kind, target) as temporary:
        lines = write(_matching(sink, query), temporary)
    if args.json:
        print_json({"format": kind, "path": str(target), "lines": lines})
    else:
        out().print(f"{plural(lines, 'line')} in {display(target)}", markup=False, soft_wrap=True)
    return 0


def _matching(sink: ParquetSink, query: ResultQuery) -> pl.LazyFrame:
    """All stored lines that match, lazily. Findings stay longer than lines. Raises SinkUnavailable."""
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


@contextmanager
def _in_place(kind: str, target: Path) -> Iterator[Path]:
    """A place beside the target, which gets its name once all is written. Raises BadInput,
    SinkUnavailable."""
    if target.exists() or target.is_symlink():
        raise BadInput(f"--{kind} {target} exists; remove it, or choose another name")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield temporary
        temporary.rename(target)
    except Exception as exc:
        # Polars and deltalake wrap faults of the disk in errors of their own.
        why = next((text for text in _DISK_FAULTS if text in str(exc)), None)
        if why is None and not isinstance(exc, OSError):
            raise
        why = why or getattr(exc, "strerror", None) or str(exc)
        raise SinkUnavailable(
            f"--{kind} {target} cannot be written ({why}); free space, fix the rights, or name another place"
        ) from exc
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _writer(kind: str) -> Writer:
    """The writer of a format. Raises BadInput where its package is missing."""
    if kind == "delta":
        import deltalake  # noqa: F401 - a missing extra is said before anything is read
    return WRITERS[kind]


def _parquet(rows: pl.LazyFrame, path: Path) -> int:
    rows.sink_parquet(path, compression="zstd", compression_level=3)
    return int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())


def _csv(rows: pl.LazyFrame, path: Path) -> int:
    """Lists are joined by spaces; text that a spreadsheet takes for a formula gets an apostrophe."""
    text = pl.col(pl.String)
    flat = rows.with_columns(
        pl.col("reasons").list.join(" "), pl.col("timestamp").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ")
    ).with_columns(
        pl.when(text.str.head(1).is_in(FORMULA_MARKS)).then("'" + text).otherwise(text).name.keep()
    )
    lines = 0
    with path.open("wb") as file:
        file.write((",".join(rows.collect_schema().names()) + "\n").encode())
        for some in flat.collect_batches(chunk_size=CHUNK, maintain_order=False):
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
    for some in signed.collect_batches(chunk_size=CHUNK, maintain_order=False):
        if some.height:
            some.write_delta(str(path), mode="append")
            lines += some.height
    if not lines:
        signed.head(0).collect().write_delta(str(path))
    return lines


WRITERS: Final[dict[str, Writer]] = {"csv": _csv, "parquet": _parquet, "delta": _delta}
