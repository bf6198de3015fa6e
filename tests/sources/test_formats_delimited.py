"""Tables as logs: the layout is found in a sample and travels as text; every row keeps its values."""

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import BadInput
from pipeline.records.schema import raw_frame
from pipeline.sources.files import read_file
from pipeline.sources.formats import detect, parse
from pipeline.sources.formats_delimited import is_layout, read_layout
from pipeline.sources.framing import Framer

ARRIVED = datetime(2026, 11, 20, 15, 0, tzinfo=UTC)
PG = '2026-11-19 09:09:10.%03d CET,"app","shop",77,"10.0.0.9:5511",65.4d,3,"SELECT",2026-11-19 09:00:00 CET,3/9,0,%s,%s,"%s",,,,,,"select ""a"" from b",,,"psql","client backend",,0'

# name, lines, rows that follow the lines without values: (time, level, service, host, message)
Row = tuple[str, str | None, str | None, str | None, str]
TABLES: list[tuple[str, list[str], int, list[Row]]] = [
    ("csv", ["Timestamp,Level,Service,Message,User", "2026-11-19T08:09:10.5Z,ERROR,cart,no stock,ann", '2026-11-19T09:09:11+01:00,info,pay,"paid 3, and ""more""",bob', "2026-11-19T08:09:12Z,Warn,cart,low,"], 1, [
        ("2026-11-19T08:09:10.5", "error", "cart", None, "no stock User=ann"),
        ("2026-11-19T08:09:11", "info", "pay", None, 'paid 3, and "more" User=bob'),
        ("2026-11-19T08:09:12", "warning", "cart", None, "low"),
    ]),
    ("tsv", ["date\ttime\thost\tseverity\tmsg", "2026-11-19\t08:09:10\th1\tINFO\tup", "2026-11-19\t08:09:11\th2\tFATAL\tdead, really", "2026-11-19\t08:09:12\th1\tDEBUG\tx"], 1, [
        ("2026-11-19T08:09:10", "info", None, "h1", "up"),
        ("2026-11-19T08:09:11", "fatal", None, "h2", "dead, really"),
        ("2026-11-19T08:09:12", "debug", None, "h1", "x"),
    ]),
    ("semicolon", ["time;level;text", "1795075750;error;a, b", "1795075751.5;info;c", '1795075752;warning;"d;e"'], 1, [
        ("2026-11-19T08:09:10", "error", None, None, "a, b"),
        ("2026-11-19T08:09:11.5", "info", None, None, "c"),
        ("2026-11-19T08:09:12", "warning", None, None, "d;e"),
    ]),
    ("csv without header", ["2026-11-19T08:09:10Z,INFO,cart,added three items", "2026-11-19T08:09:11Z,ERROR,cart,payment was refused", "2026-11-19T08:09:12Z,INFO,pay,added one item"], 0, [
        ("2026-11-19T08:09:10", "info", None, None, "added three items c3=cart"),
        ("2026-11-19T08:09:11", "error", None, None, "payment was refused c3=cart"),
        ("2026-11-19T08:09:12", "info", None, None, "added one item c3=pay"),
    ]),
    ("semicolons without header", ["2026-11-19 08:09:10;WARN;slow, very slow", "2026-11-19 08:09:11;INFO;fine", "2026-11-19 08:09:12;INFO;fine again"], 0, [
        ("2026-11-19T08:09:10", "warning", None, None, "slow, very slow"),
        ("2026-11-19T08:09:11", "info", None, None, "fine"),
        ("2026-11-19T08:09:12", "info", None, None, "fine again"),
    ]),
    ("postgresql csvlog", [PG % (1, "ERROR", "42703", 'column ""a"" is unknown'), PG % (2, "LOG", "00000", "checkpoint, done"), PG % (3, "PANIC", "XX000", "could not write")], 0, [
        ("2026-11-19T08:09:10.001", "error", "client backend", None, 'column "a" is unknown user=app database=shop client=10.0.0.9:5511 command=SELECT state=42703 query=select "a" from b application=psql'),
        ("2026-11-19T08:09:10.002", "info", "client backend", None, 'checkpoint, done user=app database=shop client=10.0.0.9:5511 command=SELECT state=00000 query=select "a" from b application=psql'),
        ("2026-11-19T08:09:10.003", "fatal", "client backend", None, 'could not write user=app database=shop client=10.0.0.9:5511 command=SELECT state=XX000 query=select "a" from b application=psql'),
    ]),
    ("iis", ["#Software: Microsoft Internet Information Services 10.0", "#Version: 1.0", "#Date: 2026-11-19 08:09:10", "#Fields: date time s-ip cs-method cs-uri-stem cs-uri-query s-port c-ip sc-status time-taken", "2026-11-19 08:09:10 10.0.0.1 GET /a - 443 10.0.0.7 200 15", "2026-11-19 08:09:11 10.0.0.1 POST /b q=1 443 10.0.0.8 503 2000", "2026-11-19 08:09:12 10.0.0.1 GET /c - 443 10.0.0.7 404 3"], 4, [
        ("2026-11-19T08:09:10", "info", None, "10.0.0.1", "GET /a 200 s-port=443 c-ip=10.0.0.7 time-taken=15"),
        ("2026-11-19T08:09:11", "error", None, "10.0.0.1", "POST /b q=1 503 s-port=443 c-ip=10.0.0.8 time-taken=2000"),
        ("2026-11-19T08:09:12", "warning", None, "10.0.0.1", "GET /c 404 s-port=443 c-ip=10.0.0.7 time-taken=3"),
    ]),
    ("cloudfront", ["#Version: 1.0", "#Fields: date time x-edge-location sc-bytes c-ip cs-method cs(Host) cs-uri-stem sc-status cs(User-Agent)", "2026-11-19\t08:09:10\tFRA2\t391\t10.0.0.7\tGET\td1.net\t/a.png\t200\tcurl%20x", "2026-11-19\t08:09:11\tFRA2\t0\t10.0.0.7\tGET\td1.net\t/b\t502\t-", "2026-11-19\t08:09:12\tFRA2\t1\t10.0.0.9\tHEAD\td1.net\t/c\t403\tx"], 2, [
        ("2026-11-19T08:09:10", "info", None, None, "GET /a.png 200 x-edge-location=FRA2 sc-bytes=391 c-ip=10.0.0.7 cs(Host)=d1.net cs(User-Agent)=curl%20x"),
        ("2026-11-19T08:09:11", "error", None, None, "GET /b 502 x-edge-location=FRA2 sc-bytes=0 c-ip=10.0.0.7 cs(Host)=d1.net"),
        ("2026-11-19T08:09:12", "warning", None, None, "HEAD /c 403 x-edge-location=FRA2 sc-bytes=1 c-ip=10.0.0.9 cs(Host)=d1.net cs(User-Agent)=x"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=[table[0] for table in TABLES])
def test_a_table_is_read_by_its_columns(table: tuple[str, list[str], int, list[Row]], tmp_path: Path) -> None:
    _, lines, ahead, rows = table
    path = tmp_path / "table"
    path.write_text("\n".join(lines) + "\n")
    (chunk,) = read_file(path)
    out = parse(chunk.records, chunk.formats, arrived=ARRIVED)
    assert out["raw"].to_list() == lines
    assert out["message"].to_list()[:ahead] == lines[:ahead]
    assert out["level"].to_list()[:ahead] == [None] * ahead
    got = out[ahead:].select("timestamp", "level", "service", "host", "message").rows()
    assert got == [(datetime.fromisoformat(row[0]).replace(tzinfo=UTC), *row[1:]) for row in rows]
    # a later batch has no header, and its layout came with it
    (name,) = chunk.formats
    assert is_layout(name)
    assert read_layout(name).name == name
    alone = parse(raw_frame(lines[ahead:]), (name,), arrived=ARRIVED)
    assert alone["message"].to_list() == [row[4] for row in rows]


def test_a_quoted_line_end_stays_in_its_row_and_a_stray_quote_costs_one_row() -> None:
    lines = [
        "time,level,message",
        '2026-11-19T08:09:10Z,ERROR,"first',
        "second, with comma",
        '"',
        "2026-11-19T08:09:11Z,INFO,ok",
    ]
    framer = Framer()
    parts = [framer.feed([line]) for line in lines]
    records = pl.concat([*parts, framer.flush()])
    assert records["raw"].to_list() == [lines[0], "\n".join(lines[1:4]), lines[4]]
    out = parse(records, framer.formats, arrived=ARRIVED)
    assert out["message"].to_list()[1] == "first\nsecond, with comma"
    stray = [lines[0], '2026-11-19T08:09:10Z,ERROR,5" disk', *[lines[4]] * 3]
    framer = Framer()
    records = pl.concat([framer.feed(stray), framer.flush()])
    assert records["raw"].to_list() == stray


@pytest.mark.parametrize(
    "lines",
    [
        ["2026-11-19 08:09:10,978 INFO [main] a.B: x, y", "2026-11-19 08:09:11,978 INFO [main] a.B: z"],
        ["a,b,c", "d,e,f"],
        ["Dear Sir, the time, date and level", "of the message, are unknown, to me"],
        ["time,level,message"],
        ["one | two | three", "four | five | six"],
        ['{"time":1,"level":"x"}', '{"time":2,"level":"y"}'],
        ["#Fields:", "x y z"],
    ],
)
def test_lines_with_separators_are_no_table(lines: list[str]) -> None:
    assert not any(is_layout(name) for name in detect(lines))


@pytest.mark.parametrize(
    "name",
    ["csv:", "csv:comma:", "csv:comma:time", "csv:dash:time,level", "csv:comma:time,evil\x1b[2J", "csv:comma:time,time",
     "w3c:space:" + ",".join(["-"] * 101), "csv:comma:=" + "x" * 2000 + ",time"],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"the table layout .* is unknown"):
        parse(raw_frame(["x"]), (name,), arrived=ARRIVED)


CELL = st.text(st.sampled_from('ab ,;"\n\t|-#1'), max_size=8)


@settings(max_examples=80, deadline=None)
@given(st.lists(CELL, min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_no_text_makes_a_table_lose_a_row_or_depend_on_the_feeds(cells: list[str], cuts: list[int]) -> None:
    lines = ["time,level,message,user"]
    for number, cell in enumerate(cells):
        lines += f"2026-11-19T08:09:{number:02d}Z,INFO,{cell},u".split("\n")
    whole = Framer(formats=("csv:comma:time,level,message,=user",))
    expected = pl.concat([whole.feed(lines), whole.flush()])
    framer = Framer(formats=("csv:comma:time,level,message,=user",))
    edges = [0, *sorted(min(cut, len(lines)) for cut in cuts), len(lines)]
    got = pl.concat([*(framer.feed(lines[a:b]) for a, b in pairwise(edges)), framer.flush()])
    assert got.equals(expected)
    assert "\n".join(got["raw"]) == "\n".join(lines)
    out = parse(got, framer.formats, arrived=ARRIVED)
    assert out.height == got.height
    assert out["message"].null_count() == 0
