"""Pushed records whose raw text is more than their message, or is all that is known of them."""

from datetime import UTC, datetime

import polars as pl
import pytest

from pipeline import detect
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Meta
from pipeline.records.pushed import PushedRecords
from pipeline.sources import formats, pushed
from pipeline.sources.pushed import KnownFormats, framed, framed_by_workload, framed_records

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


def test_the_formats_of_a_workload_are_looked_for_again_when_a_record_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, looks = KnownFormats(), []
    monkeypatch.setattr(pushed, "detect", lambda lines: (looks.append(lines), formats.detect(lines))[1])
    iso = PushedRecords([None], raws=["2026-11-25 10:00:00 INFO started"])
    other = PushedRecords([None], raws=['{"log":"a","stream":"stdout","time":"2026-11-25T10:00:00.5Z"}'])
    found = [framed_records(records, "w", known)[1] for records in (iso, iso, other, other)]
    assert found[0] == found[1] != found[2]
    assert len(looks) == 3, "a line in Docker's wrapper always takes a look"


def test_the_records_of_several_workloads_have_the_formats_that_each_would_have_alone() -> None:
    inside = {
        "iso": "2026-11-25 10:00:00 INFO started",
        "hdfs": "081109 203615 148 INFO dfs.DataNode$PacketResponder: closing",
        "plain": "nothing known",
        "docker": "2026-11-25 10:00:00 INFO started",
        "json": "",
    }
    around = {
        name: f'{{"stream":"stdout","log":"{line}","kubernetes":{{"pod_name":"p"}}}}'
        for name, line in inside.items()
    }
    around["docker"] = '{"log":"a","stream":"stdout","time":"2026-11-25T10:00:00.5Z"}'
    around["json"] = '{"level":"info","msg":"a"}'
    changed = around | {"hdfs": around["docker"], "plain": inside["iso"], "json": around["iso"]}
    together, alone = KnownFormats(), KnownFormats()
    for texts in (around, around, changed, around):
        names = [name for name in texts for _ in range(3)]
        several = PushedRecords([None] * len(names), raws=[texts[name] for name in names], workloads=names)
        framed = framed_by_workload([several], together)
        for workload, rows, found in zip(framed.workloads, framed.records, framed.formats, strict=True):
            one = PushedRecords([None] * 3, raws=[texts[workload]] * 3)
            assert found == framed_records(one, workload, alone)[1], workload
            assert rows["raw"].to_list() == [texts[workload]] * 3


def test_no_formats_are_looked_for_in_records_that_have_their_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [framed(PushedRecords([f"user {n} came"], raws=['{"user":1}']))[0] for n in range(3)]
    masks = MaskSet.load()
    alone = [detect.prepare(rows, META, masks) for rows in batches]
    monkeypatch.setattr(formats, "detect", lambda lines: pytest.fail(f"looked at {lines}"))
    together = detect.prepare_all(batches, [META] * len(batches), masks)
    for one, other in zip(alone, together, strict=True):
        assert one.equals(other.select(one.columns))
