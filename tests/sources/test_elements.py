"""Documents of many records: each element is a record, every line counts once, no text is lost."""

import io
import json
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._log_files import read_file
from pipeline.sources.chunks import Assembly, Chunk, Cursor
from pipeline.sources.elements import MAX_ELEMENT_BYTES, Elements, element_kind
from pipeline.sources.formats import parse
from pipeline.sources.protocols.contract import Hints
from pipeline.sources.protocols.otlp_json import decode_json
from pipeline.sources.stdin import read_stream

ARRIVED = datetime(2026, 11, 20, 15, 0, tzinfo=UTC)
START = Cursor(path="x", identity="x")


def read(data: bytes, cuts: list[int] | None = None, **limits: int) -> list[Chunk]:
    assembly = Assembly(START, documents=True, **limits)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts or ()), len(data)]
    chunks: list[Chunk] = []
    for a, b in pairwise(edges):
        if a < b:
            chunks += assembly.push(data[a:b], b)
    return [*chunks, *assembly.finish(len(data))]


def records(chunks: list[Chunk]) -> pl.DataFrame:
    return pl.concat([chunk.records for chunk in chunks])


def physical_lines(data: bytes) -> int:
    return data.count(b"\n") + (bool(data) and not data.endswith(b"\n"))


def parsed(path: Path) -> pl.DataFrame:
    chunks = list(read_file(path))
    out = pl.concat([parse(chunk.records, chunk.formats, arrived=ARRIVED) for chunk in chunks])
    assert int(out["lines"].sum()) == physical_lines(path.read_bytes())
    return out


def events(n: int) -> list[dict[str, Any]]:
    return [
        {"time": f"2026-11-20T10:00:{i % 60:02d}Z", "level": "error" if i == 9 else "info", "msg": f"t {i}"}
        for i in range(n)
    ]


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("around", [None, "Records", "events"])
def test_an_array_of_2000_elements_is_2000_records(
    tmp_path: Path, indent: int | None, around: str | None
) -> None:
    path = tmp_path / "a.json"
    value: Any = events(2000)
    path.write_text(json.dumps({around: value} if around else value, indent=indent))
    out = parsed(path)
    assert out["message"].to_list() == [f"t {i}" for i in range(2000)]
    assert out.filter(pl.col("level") == "error").height == 1
    assert out["timed"].all()
    if indent is None:
        assert out["line"].unique().to_list() == [1]
        assert out["lines"].to_list() == [1, *[0] * 1999]
    else:
        first = 2 + (around is not None)
        assert out["line"].to_list() == [first + 5 * i for i in range(2000)]


def test_pretty_objects_one_behind_the_other_are_records(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(event, indent=2) for event in events(3)) + "\n")
    out = parsed(path)
    assert out["message"].to_list() == ["t 0", "t 1", "t 2"]
    assert out["line"].to_list() == [1, 6, 11]
    assert out["lines"].to_list() == [5, 5, 5]


@pytest.mark.parametrize("joint", ["", "\n", "\n\n"])
def test_events_as_xml_are_records_on_one_line_and_on_many(tmp_path: Path, joint: str) -> None:
    one = "<Event xmlns='a'><System><Provider Name='Disk'/>{0}<Level>2</Level>{0}</System>{0}</Event>"
    path = tmp_path / "a.xml"
    body = joint.join(one.format(joint) for _ in range(5))
    path.write_text(f'<?xml version="1.0"?>{joint}<Events>{joint}{body}{joint}</Events>\n')
    out = parsed(path)
    assert out["service"].to_list() == ["Disk"] * 5
    assert out["level"].to_list() == ["error"] * 5


def test_an_array_comes_through_a_pipe_too() -> None:
    data = json.dumps(events(300)).encode()
    out = records(list(read_stream(io.BytesIO(data))))
    assert out.height == 300


def test_reading_goes_on_from_every_cursor_in_the_middle(tmp_path: Path) -> None:
    for indent in (None, 2):
        path = tmp_path / f"{indent}.json"
        path.write_text(json.dumps({"Records": events(50)}, indent=indent))
        chunks = list(read_file(path, max_records=7))
        assert [chunk.records.height for chunk in chunks] == [7] * 7 + [1]
        whole = records(chunks)
        for number, chunk in enumerate(chunks[:-1]):
            assert chunk.cursor.offset < chunks[number + 1].cursor.offset
            after = records(list(read_file(path, start=chunk.cursor, max_records=7)))
            assert after.equals(whole[7 * (number + 1) :])


def test_an_element_above_the_cap_becomes_pieces_and_its_neighbours_stay_records() -> None:
    data = json.dumps([{"m": "a"}, {"m": "é" * 80_000}, {"m": "b"}], ensure_ascii=False).encode()
    out = records(read(data))
    assert out["lines"].to_list() == [1, 0, 0, 0, 0]
    assert out["raw"][0] == '{"m": "a"}'
    assert out["raw"][-1] == '{"m": "b"}'
    assert "".join(out["raw"][1:4]) == '{"m": "' + "é" * 80_000 + '"}'


DAMAGED = [
    '[{"a": 1}, {"b": "no end}, {"c": 3}]\n',
    '[\n  {\n    "a": 1\n  },\n  {\n    "b": "open\n  },\n  {\n    "c": 3\n  }\n]\n',
    '[{"a": 1}, {"b": {"x": 2}, {"c": 3}]',
    '[{"a": 1},\ntext between\n{"c": 3}]',
    '{"Records": [{"a": 1}, {"c": 3}], "nextToken": "b/7"}\n',
    '[{"a": 1}\nplain\nlines\n',
    '[{"a": 1}, 7, "word", null]',
    "[{}",
    "{\n}",
    '{\n"',
    '[{"a": "' + "x" * (2 * MAX_ELEMENT_BYTES),
    "<Event><System></System>\n<Event a='b'></Event>\nplain\n",
    "<Events>\n<Event a='b'>",
    "<Event ",
]


def content(text: str) -> str:
    """Text without what separates elements."""
    return "".join(c for c in text if c not in " \t\r\n,[]{}")


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_damage_loses_no_text_and_no_line(text: str) -> None:
    data = text.encode()
    whole = records(read(data))
    assert content("".join(whole["raw"])) == content(text).replace("<Events>", "").replace('"Records":', "")
    assert int(whole["lines"].sum()) == physical_lines(data)
    assert records(read(data, list(range(0, min(len(data), 300), 3)))).equals(whole)


def test_a_document_that_is_damaged_for_long_goes_on_as_lines() -> None:
    lines = [f"2026-11-20 10:00:{i % 60:02d} INFO line {i}" for i in range(500)]
    data = ("[" + json.dumps(events(3))[1:-1] + ",\n" + "\n".join(lines) + "\n").encode()
    chunks = read(data)
    out = records(chunks)
    assert out["raw"].to_list()[3:] == lines
    assert out["line"].to_list()[3:] == list(range(2, 502))
    assert "iso" in chunks[-1].formats


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "[", "[]", "[main] started", "[{main}] started\n", "{", "{}\n", '{"a":1}\n{"a":2}\n',
        '{"events": 7}\n', "[ 1, 2 ]", "{\nfunction\n}\n", "<html>\n", "\ufeff", "\ufeffplain\n", "<34>x\n",
    ],
)  # fmt: skip
def test_lines_stay_lines(text: str) -> None:
    data = text.encode()
    assert element_kind(data) is None
    expected = [chunk.records for chunk in _lines(data)]
    got = [chunk.records for chunk in read(data, list(range(len(data))))]
    assert [frame.to_dicts() for frame in got] == [frame.to_dicts() for frame in expected]


def _lines(data: bytes) -> list[Chunk]:
    assembly = Assembly(START)
    return [*assembly.push(data, len(data)), *assembly.finish(len(data))]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=12)
    | st.sampled_from(['"', "\\", "}{", "[]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(max_size=8), JSON, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(OBJECT, min_size=1, max_size=8),
    st.sampled_from([None, 0, 1, 3]),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
def test_any_list_of_objects_is_its_elements_however_it_is_written_and_cut(
    objects: list[dict[str, Any]], indent: int | None, ascii_only: bool, cuts: list[int], crlf: bool
) -> None:
    text = json.dumps(objects, indent=indent, ensure_ascii=ascii_only)
    data = text.replace("\n", "\r\n" if crlf else "\n").encode("utf-8", "surrogatepass")
    out = records(read(data, cuts))
    assert [json.loads(raw) for raw in out["raw"]] == objects
    assert int(out["lines"].sum()) == physical_lines(data)
    assert out.equals(records(read(data)))
    starts = [json.dumps(o, indent=indent, ensure_ascii=ascii_only).count("\n") + 1 for o in objects]
    line = 1 + (indent is not None)
    for row, size in zip(out["line"].to_list(), starts, strict=True):
        assert row == line
        line += size if indent is not None else 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(OBJECT, min_size=1, max_size=6),
    st.sampled_from([None, 2]),
    st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(['"', "{", "}", "\n", "x", ",", "\\"])), max_size=5
    ),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_damage_at_any_place_loses_nothing(
    objects: list[dict[str, Any]],
    indent: int | None,
    damage: list[tuple[int, str]],
    cuts: list[int],
) -> None:
    text = json.dumps(objects, indent=indent)
    for place, added in damage:
        at = min(place, len(text))
        text = text[:at] + added + text[at:]
    data = text.encode()
    out = records(read(data, cuts))
    assert content("".join(out["raw"])) == content(text)
    assert int(out["lines"].sum()) == physical_lines(data)
    assert out.equals(records(read(data)))


def test_the_splitter_holds_no_more_than_an_element_and_a_block() -> None:
    elements = Elements()
    element = json.dumps({"m": "x" * 100}).encode()
    elements.push(b"[" + element)
    for _ in range(200):
        elements.push((b",\n" + element) * 50)
        assert len(elements._data) < 60 * len(element)


def otlp_line(number: int, count: int) -> str:
    records = [
        {
            "timeUnixNano": str(1_795_510_800_000_000_000 + number * 1_000_000_000 + n),
            "severityNumber": 17 if n % 2 else 9,
            "body": {"stringValue": f"charge {number}.{n}"},
            "attributes": [{"key": "till", "value": {"intValue": str(n)}}],
        }
        for n in range(count)
    ]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "pay"}}]}
    return json.dumps({"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": records}]}]})


@pytest.mark.parametrize("max_records", [1, 3, 10_000])
def test_a_line_of_the_collectors_file_exporter_is_the_records_that_the_intake_makes_of_it(
    tmp_path: Path, max_records: int
) -> None:
    path = tmp_path / "otlp.jsonl"
    lines = [otlp_line(0, 2), otlp_line(1, 5), '{"resourceLogs":[]}', otlp_line(2, 1)]
    path.write_text("\n".join(lines) + "\n")
    chunks = list(read_file(path, max_records=max_records))
    out = pl.concat([parse(chunk.records, chunk.formats, arrived=ARRIVED) for chunk in chunks])
    expected = decode_json("".join(lines[:1]).encode(), Hints()).records
    assert out["raw"].to_list()[:2] == expected.texts
    assert out["message"].to_list() == [
        "charge 0.0", "charge 0.1", *(f"charge 1.{n}" for n in range(5)), "resourceLogs=[]", "charge 2.0"
    ]  # fmt: skip
    assert out["level"].to_list()[:4] == ["info", "error", "info", "error"]
    assert out["service"].to_list()[:7] == ["pay"] * 7
    assert out["timestamp"][0] == datetime(2026, 11, 24, 9, tzinfo=UTC)
    assert out["line"].to_list() == [1, 1, 2, 2, 2, 2, 2, 3, 4]
    assert out["lines"].to_list() == [1, 0, 1, 0, 0, 0, 0, 1, 1]
    for n, chunk in enumerate(
        chunks[:-1], start=1
    ):  # a reader that starts at any cursor has each of the other records once
        rest = [record for later in read_file(path, start=chunk.cursor) for record in later.records["raw"]]
        done = [record for one in chunks[:n] for record in one.records["raw"]]
        assert done + rest == out["raw"].to_list()
