"""Stored lines as tables for other programs: all columns, a page at a time."""

import io

import polars as pl

from pipeline.errors import BadInput
from pipeline.records.result_query import ResultQuery
from pipeline.report.export import FORMULA_MARKS
from pipeline.service.lines import chosen_names, line_rows
from pipeline.service.questions import LinesAsked
from pipeline.service.stored.values import TablePage
from pipeline.sinks.answers.answers import Answers


def table_page(answers: Answers, asked: LinesAsked, kind: str) -> TablePage:
    """A page of lines as a file of a kind, `csv` or `parquet`. The first page of a CSV has the header, so
    that its pages in their order are one file. Raises as `stored_lines`."""
    rows, following = line_rows(answers, asked)
    file = io.BytesIO()
    match kind:
        case "csv":
            flat_rows(rows.lazy()).collect().write_csv(file, include_header=asked.cursor is None)
        case "parquet":
            rows.write_parquet(file, compression="zstd", compression_level=3)
        case _:
            raise BadInput(f"there is no table of the kind {kind[:40]!r}; take csv or parquet")
    missing = 0
    if asked.cursor is None:
        names = chosen_names(answers, asked.workload, asked.only)
        missing = answers.missing_rows(
            ResultQuery(limit=1, since=asked.since, until=asked.until, workloads=names)
        )
    return TablePage(body=file.getvalue(), lines=rows.height, next=following, missing=missing)


def flat_rows(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Rows of RESULT_SCHEMA for CSV: lists are joined by spaces, and text that a spreadsheet takes for a
    formula gets an apostrophe."""
    text = pl.col(pl.String)
    return rows.with_columns(
        pl.col("reasons").list.join(" "), pl.col("timestamp").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ")
    ).with_columns(
        pl.when(text.str.head(1).is_in(FORMULA_MARKS)).then("'" + text).otherwise(text).name.keep()
    )
