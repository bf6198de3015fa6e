"""A folder of results as files of an engine: a store, or Parquet files that somebody took out of one."""

from pathlib import Path

from pipeline.sinks.answers.engine import Engine, RowFile
from pipeline.sinks.answers.stored import line_files
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.results import is_elided, is_store, result_files


def engine_over(results: Path) -> Engine:
    """An engine that reads this folder; close it. A report takes as long as it takes."""
    return Engine([results], limit_s=None)


def files_in(results: Path) -> list[RowFile]:
    """The files with the lines of a folder; one that is absent or empty has none. Raises SinkUnavailable."""
    if is_store(results):
        sink = ParquetSink(results)
        return line_files(sink, sink.parts())
    return [RowFile(path=path, elided=is_elided(path)) for path in result_files(results)]
