"""Pushed records whose raw text is more than their message, or is all that is known of them."""

from datetime import UTC, datetime

import polars as pl

from pipeline import detect
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Meta
from pipeline.records.pushed import PushedRecords
from pipeline.sources.pushed import framed

META = Meta(source="push", source_key="0" * 16, purpose=Purpose.SCORE, arrived=datetime(2026, 11, 25, tzinfo=UTC),
            formats=(), zone="UTC")  # fmt: skip


def parsed(records: PushedRecords) -> list[dict[str, object]]:
    frame, formats = framed(records)
    names = Meta(**{name: getattr(META, name) for name in META.__dataclass_fields__} | {"formats": formats})
    return detect._parsed(frame, names).select("raw", "message", "level", "timestamp").to_dicts()


def test_a_record_without_a_message_is_parsed_from_its_raw_text_and_given_columns_win() -> None:
    noon = datetime(2026, 11, 25, 12, tzinfo=UTC)
    line = '{"@timestamp":"2026-11-25T10:00:00.5Z","level":"error","msg":"disk full"}'
    first, second, third = parsed(
        PushedRecords(
            [None, None, "known"],
            raws=[line, line, '{"body":"known"}'],
            timestamps=[None, int(noon.timestamp() * 1e6), None],
            levels=[None, "warning", None],
        )
    )
    assert (first["message"], first["level"], first["raw"]) == ("disk full", "error", line)
    assert first["timestamp"] == datetime(2026, 11, 25, 10, 0, 0, 500_000, tzinfo=UTC)
    assert (second["message"], second["level"], second["timestamp"]) == ("disk full", "warning", noon)
    assert (third["message"], third["raw"]) == ("known", '{"body":"known"}')


def test_records_stay_apart_whatever_their_text_looks_like() -> None:
    texts = ["Traceback (most recent call last):", "  File x", "\tat java.lang.Thread", "", "a\nb"]
    frame, _ = framed(PushedRecords([None] * 5, raws=list(texts)))
    assert frame["raw"].to_list() == texts
    assert frame["lines"].to_list() == [1, 1, 1, 1, 2]
    assert frame["line"].dtype == pl.UInt64
