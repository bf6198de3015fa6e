"""Results of the build before lack the p-value; they stay readable beside those of this one."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.records.query import Query
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.report import findings, summary
from pipeline.sinks import results
from pipeline.sinks.parquet import ParquetSink
from pipeline.training.sampling import read_parquet

AT = datetime(2026, 11, 20, 12, tzinfo=UTC)
OLDER = {name: kind for name, kind in RESULT_SCHEMA.items() if name not in results.LATER}


def rows(key: str, **columns: Any) -> pl.DataFrame:
    row = dict.fromkeys(RESULT_SCHEMA) | {
        "record_id": key, "source": "app.log", "line": 1, "lines": 1, "timestamp": AT, "workload": "shop",
        "message": f"message {key}", "raw": f"message {key}", "pattern_id": 7, "template_id": 1, "score": 0.9,
        "anomalous": True, "reasons": ["new-template"], "model_version": "m1", **columns,
    }  # fmt: skip
    return pl.DataFrame([row], schema=RESULT_SCHEMA)


@pytest.fixture(params=["b-first", "b-second"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> ParquetSink:
    """Two batches, one of which, the first or the second, the build before has written."""
    made = ParquetSink(tmp_path)
    for batch, p_value in (("b-first", 0.004), ("b-second", 0.002)):
        made.write(batch, rows(batch, p_value=p_value))
    older = made.path(request.param, rows(request.param))
    pl.read_parquet(older, hive_partitioning=False).select(list(OLDER)).write_parquet(older)
    return made


def test_all_rows_are_scanned_with_all_columns(sink: ParquetSink) -> None:
    frame = results.scan(sink.root).collect()
    assert dict(frame.schema) == RESULT_SCHEMA and frame.height == 2
    assert frame["p_value"].null_count() == 1
    assert summary.summary(sink.root)["anomalous"] == 2


def test_findings_have_the_p_values_there_are(sink: ParquetSink) -> None:
    templates = pl.DataFrame(schema={"template_id": pl.Int64, "template": pl.String})
    (found,) = findings.collect(sink.root, templates)
    assert found.count == 2 and found.p_value in (0.004, 0.002)


def test_a_training_reads_both(sink: ParquetSink) -> None:
    read = pl.concat(read_parquet(sink.root, Query()))
    assert sorted(read["message"]) == ["message b-first", "message b-second"]


def test_a_batch_is_read_back_whole_and_its_records_can_be_taken_out(sink: ParquetSink) -> None:
    for batch in ("b-first", "b-second"):
        got = sink.read(batch, "shop")
        assert got is not None and dict(got.schema) == RESULT_SCHEMA
        name = sink.name(batch, got)
        assert sink.record_ids(name) == [batch]
        assert sink.take_out(name, [batch])
    assert results.scan(sink.root).collect().is_empty()


def test_columns_of_a_newer_build_are_passed_over(sink: ParquetSink) -> None:
    newer = sink.path("b-second", rows("b-second"))
    frame = rows("b-second").with_columns(pl.lit(1).alias("of tomorrow"))
    frame.write_parquet(newer)
    assert dict(results.scan(sink.root).collect().schema) == RESULT_SCHEMA
