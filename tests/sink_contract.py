"""What every sink must do, stated once; test_sinks.py holds each kind to it."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks import compaction
from pipeline.sinks.compaction import Compactor, Fate
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.sink import Sink

# Next to midnight, with microseconds: three records lie in two daily indices.
AT = datetime(2026, 11, 20, 23, 59, 59, 999_998, tzinfo=UTC)


def rows(
    n: int = 3, *, key: str = "k", workload: str = "shop", at: datetime = AT, **columns: Any
) -> pl.DataFrame:
    """RESULT_SCHEMA rows a microsecond apart, with ids `<key>-<row>`; more columns by name."""
    blank: dict[str, Any] = dict.fromkeys(RESULT_SCHEMA)
    return pl.DataFrame(
        [
            {
                **blank,
                "record_id": f"{key}-{i}",
                "source": "/var/log/shop.log",
                "line": i + 1,
                "lines": 1,
                "timestamp": at + timedelta(microseconds=i),
                "workload": workload,
                "message": f"message {i}",
                "pattern_id": 2**64 - 1 - i,  # beyond what a double or a signed long can hold
                "reasons": [],
                **columns,
            }
            for i in range(n)
        ],
        schema=RESULT_SCHEMA,
    )


def seal(sink: ParquetSink) -> None:
    """Seals all that is stored."""
    late = compaction.SEAL_AFTER_S + 5
    Compactor(sink, lambda ids: [Fate.FINAL] * len(ids), now=lambda: time.time() + late).round()


class SinkContract:
    """Tests over a fixture named `sink`."""

    def test_what_is_written_is_read_back_unchanged_and_in_order(self, sink: Sink) -> None:
        full = rows(
            3,
            level="error",
            template_id=7,
            score=0.1 + 0.2,
            anomalous=True,
            p_value=1 / 3,
            reasons=["rare:1/9", "unlikely-tokens:größe 日本 \u2028 \x00"],
            model_version="v1",
            host="web-1",
            process="nginx[7]",
            service="nginx",
            raw='tab\t quote" back\\slash\nsecond line 🦀',
        )
        warming = rows(2, key="w", reasons=["warming"], message="")
        for frame in (full, warming, pl.concat([warming, full]).reverse()):
            sink.write("b", frame)
            got = sink.read("b", "shop")
            assert got is not None
            assert got.schema == frame.schema
            mine = got.filter(pl.col("record_id").is_in(frame["record_id"].to_list()))
            assert mine.equals(frame)
            sink.remove("b", "shop")

    def test_writing_a_batch_again_changes_nothing(self, sink: Sink) -> None:
        frame = rows(5)
        sink.write("b", frame)
        sink.write("b", frame)
        got = sink.read("b", "shop")
        assert got is not None
        assert got.equals(frame)

    def test_a_batch_written_again_with_verdicts_has_them(self, sink: Sink) -> None:
        sink.write("b", rows(4, reasons=["warming"]))
        scored = rows(4, score=0.5, anomalous=False, model_version="v2")
        sink.write("b", scored)
        got = sink.read("b", "shop")
        assert got is not None
        assert got.equals(scored)

    def test_what_was_never_written_is_none(self, sink: Sink) -> None:
        assert sink.read("b", "shop") is None
        sink.write("b", rows())
        assert sink.read("c", "shop") is None
        assert sink.read("b", "bank") is None

    def test_batches_are_read_and_removed_apart(self, sink: Sink) -> None:
        for name in ("a", "b", "b*", "-"):
            sink.write(name, rows(2, key=name))
        sink.remove("b", "shop")
        sink.remove("b", "shop")
        sink.remove("never written", "shop")
        left = {name: sink.read(name, "shop") for name in ("a", "b", "b*", "-")}
        assert left.pop("b") is None
        for name, frame in left.items():
            assert frame is not None, name
            assert frame.equals(rows(2, key=name))

    def test_a_batch_that_was_split_is_stored_once_as_its_halves(self, sink: Sink) -> None:
        whole = rows(5)
        sink.write("b", whole)
        sink.write("b.0", whole[:2])
        sink.write("b.1", whole[2:])
        sink.remove("b", "shop")
        assert sink.read("b", "shop") is None
        halves = [sink.read(name, "shop") for name in ("b.0", "b.1")]
        assert halves[0] is not None
        assert halves[0].equals(whole[:2])
        assert halves[1] is not None
        assert halves[1].equals(whole[2:])

    def test_names_are_taken_literally(self, sink: Sink) -> None:
        for name in ("*", "a/b", "shop OR 1", '"', ".x", "größe", "x" * 300):
            sink.write(f"batch {name}", rows(1, key=name, workload=name))
            got = sink.read(f"batch {name}", name)
            assert got is not None, name
            assert got["workload"].to_list() == [name]

    def test_no_value_is_too_long(self, sink: Sink) -> None:
        long = {"message": "x" * 70_000, "raw": "ü" * 70_000, "source": "日" * 20_000, "host": "🦀" * 9_000}
        frame = rows(1, reasons=["unlikely-tokens:" + "w " * 40_000], **long)
        sink.write("b", frame)
        got = sink.read("b", "shop")
        assert got is not None
        assert got.equals(frame)

    def test_strange_dates_are_stored_like_any_other(self, sink: Sink) -> None:
        for year in (1, 1900, 9999):
            frame = rows(1, key=str(year), at=datetime(year, 2, 3, 4, 5, 6, 7, tzinfo=UTC))
            sink.write(f"year-{year}", frame)
            got = sink.read(f"year-{year}", "shop")
            assert got is not None
            assert got.equals(frame)

    def test_more_records_than_one_page_or_request_holds_keep_their_order(self, sink: Sink) -> None:
        frame = rows(10_001)
        sink.write("b", frame)
        got = sink.read("b", "shop")
        assert got is not None
        assert got.equals(frame)
