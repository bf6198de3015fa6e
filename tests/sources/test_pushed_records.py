"""Pushed records whose raw text is more than their message, or is all that is known of them."""

from datetime import UTC, datetime

import numpy as np
import polars as pl
import pytest

from pipeline import detect
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Meta
from pipeline.records.pushed import PushedRecords
from pipeline.sources import formats, pushed
from pipeline.sources.framing import are_records, are_records_each
from pipeline.sources.pushed import KnownFormats, framed, framed_by_workload

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
    found = [framed_by_workload([records], known, ["w"]).formats[0] for records in (iso, iso, other, other)]
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
            assert found == framed_by_workload([one], alone, [workload]).formats[0], workload
            assert rows["raw"].to_list() == [texts[workload]] * 3
        if texts is around:
            assert dict(zip(framed.workloads, framed.formats, strict=True)) == {
                "iso": ("envelope", "iso"), "hdfs": ("envelope", "hdfs"), "plain": ("envelope",),
                "docker": ("docker",), "json": ("json",),
            }  # fmt: skip


def test_batches_framed_together_have_the_rows_that_each_would_have_alone() -> None:
    noon = int(datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp() * 1e6)
    iso = "2026-11-25 10:00:00 INFO started"
    batches = [
        (PushedRecords(["plain", "two\nlines"]), "a"),
        (PushedRecords([None, "b"], raws=[iso, None], timestamps=[noon, None], levels=["error", None]), "a"),
        (PushedRecords([None, None], raws=[iso, "x\ny\n"], untimed=[noon, None], places=[7, 9]), "b"),
        (PushedRecords([None] * 3, raws=[iso] * 3, workloads=["b", "c", "b"], hosts=["h", None, "i"]), None),
        (PushedRecords([None], raws=['{"level":"info","msg":"a"}'], services=["s"], workloads=["b"]), "a"),
    ]
    together, alone = KnownFormats(), KnownFormats()
    names = [name for _, name in batches]
    for _ in range(2):
        framed_all = framed_by_workload([records for records, _ in batches], together, names)
        found = list(
            zip(framed_all.batches, framed_all.workloads, framed_all.records, framed_all.formats, strict=True)
        )
        assert [(number, workload) for number, workload, _, _ in found] == [
            (0, "a"), (1, "a"), (2, "b"), (3, "b"), (3, "c"), (4, "a"),
        ]  # fmt: skip
        for number, (records, name) in enumerate(batches):
            expected = framed_by_workload([records], alone, [name])
            some = [(workload, formats) for place, workload, _, formats in found if place == number]
            assert some == list(zip(expected.workloads, expected.formats, strict=True))
            rows = pl.concat([rows for place, _, rows, _ in found if place == number])
            assert rows.equals(expected.records.whole), number
    assert framed_by_workload([batches[2][0]], alone, ["b"]).records.whole["line"].to_list() == [7, 9]


@pytest.mark.parametrize("pattern", ["ij", "iij", "iiiijjjj", "i", "id"])
def test_parts_of_one_workload_are_compared_a_few_times_whatever_their_formats(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "i": "2026-11-25 10:00:00 INFO started",
        "j": '{"level":"info","msg":"a"}',
        "d": '{"log":"a","stream":"stdout","time":"2026-11-25T10:00:00.5Z"}',
    }
    batches = [PushedRecords([None], raws=[texts[kind]]) for kind in (pattern * 40)[:40]]
    alone = KnownFormats()
    expected = [framed_by_workload([records], alone, ["w"]).formats[0] for records in batches]
    compared: list[int] = []
    fitting = pushed._fitting
    monkeypatch.setattr(
        pushed, "_fitting", lambda texts, *of: (compared.append(len(texts)), fitting(texts, *of))[1]
    )
    known = KnownFormats()
    for _ in range(2):
        assert list(framed_by_workload(batches, known, ["w"] * 40).formats) == expected
    assert sum(compared) <= 2 * 4 * 40


def test_lines_of_several_sources_are_records_as_those_of_each_alone() -> None:
    lines = [
        "2026-11-25 10:00:00 INFO started",
        "\x1b[31mERROR\x1b[0m no paper",
        "ERROR at 10:00 no paper",
        "nothing known",
        "Caused by: x",
        '{"log":"a","stream":"stdout"}',
        '{"level":"info","msg":"a"}',
        "till-1  | 2026-11-25 10:00:00 INFO started",
        "x" * 70_000,
        "",
    ]
    several = [
        ("iso",),
        ("level",),
        (),
        ("json",),
        ("envelope",),
        ("compose", "iso"),
        ("docker",),
        ("iso", "json"),
    ]
    which = np.arange(len(lines) * len(several)) % len(several)
    every = pl.Series("raw", [line for line in lines for _ in several])
    found = are_records_each(every, several, which)
    for number, formats_of_source in enumerate(several):
        alone = [are_records(pl.Series("raw", [line]), formats_of_source).item() for line in lines]
        assert found[which == number].tolist() == alone, formats_of_source
    fitting = {formats: np.flatnonzero(found[which == n]).tolist() for n, formats in enumerate(several)}
    assert 3 in fitting.pop(())
    assert fitting == {
        ("iso",): [0],
        ("level",): [1],
        ("json",): [6],
        ("envelope",): [6],
        ("compose", "iso"): [0, 7],
        ("docker",): [],
        ("iso", "json"): [0, 6],
    }


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
