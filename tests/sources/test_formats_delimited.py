"""Tables as logs: the layout is found in a sample and travels as text; every row keeps its values."""

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._log_files import read_file
from pipeline.errors import BadInput
from pipeline.records.schema import raw_frame
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
    ("windows event viewer", ["Level,Date and Time,Source,Event ID,Task Category", 'Error,11/19/2026 8:09:10 AM,Disk,7,None,"bad block, on disk 0"', "Warning,11/19/2026 1:09:11 PM,Disk,8,None,slow"], 1, [
        ("2026-11-19T08:09:10", "error", "Disk", None, "bad block, on disk 0 Event_ID=7 Task_Category=None"),
        ("2026-11-19T13:09:11", "warning", "Disk", None, "slow Event_ID=8 Task_Category=None"),
    ]),
    ("palo alto", ["1,2026/11/19 08:09:10,001801000012,SYSTEM,general,2026/11/19 08:09:10,critical,disk fails", "1,2026/11/19 08:09:11,001801000012,SYSTEM,general,2026/11/19 08:09:11,informational,a commit is done"], 0, [
        ("2026-11-19T08:09:10", "critical", None, None, "disk fails c1=1 c3=001801000012 c4=SYSTEM c5=general c6=2026/11/19 08:09:10"),
        ("2026-11-19T08:09:11", "info", None, None, "a commit is done c1=1 c3=001801000012 c4=SYSTEM c5=general c6=2026/11/19 08:09:11"),
    ]),
    ("dotted dates", ["Time;Level;Text", "19.11.2026 08:09:10;ERROR;a", "1.11.2026 08:09:11,5;INFO;b"], 1, [
        ("2026-11-19T08:09:10", "error", None, None, "a"),
        ("2026-11-01T08:09:11.5", "info", None, None, "b"),
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
    assert out["raw"].to_list() == ["\n".join(lines[: ahead + 1]), *lines[ahead + 1 :]]
    assert out["line"].to_list() == list(range(ahead + 1, len(lines) + 1))
    assert out["lines"].to_list() == [ahead + 1] + [1] * (len(lines) - ahead - 1)
    got = out.select("timestamp", "level", "service", "host", "message").rows()
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
    assert records["raw"].to_list() == ["\n".join(lines[:4]), lines[4]]
    out = parse(records, framer.formats, arrived=ARRIVED)
    assert out["message"].to_list() == ["first\nsecond, with comma", "ok"]
    stray = [lines[0], '2026-11-19T08:09:10Z,ERROR,5" disk', *[lines[4]] * 3]
    framer = Framer()
    records = pl.concat([framer.feed(stray), framer.flush()])
    assert records["raw"].to_list() == ["\n".join(stray[:2]), *stray[2:]]


IIS = [
    "#Software: Microsoft Internet Information Services 10.0",
    "#Version: 1.0",
    "#Date: 2026-11-19 08:00:00",
]
SWAPPED = "#Fields: date time cs-method cs-uri-stem sc-bytes sc-status"
MORE = "#Fields: date time s-ip cs-method cs-uri-stem sc-status sc-bytes cs(User-Agent)"


def table(tmp_path: Path, lines: list[str], max_records: int = 10_000) -> list[tuple[str | None, str]]:
    path = tmp_path / "table"
    path.write_text("\n".join(lines) + "\n")
    found = []
    for chunk in read_file(path, max_records=max_records):
        out = parse(chunk.records, chunk.formats, arrived=ARRIVED)
        found += out.select("level", "message").rows()
        last = chunk.latest(arrived=ARRIVED, zone="UTC")
        assert last == out["timestamp"][-1]
        (rest, *_) = [*read_file(path, start=chunk.cursor, max_records=max_records), None]
        if rest is not None:  # a reader that starts here knows the layout of this place
            again = parse(rest.records, rest.formats, arrived=ARRIVED)
            assert again["level"].null_count() == 0
    return found


@pytest.mark.parametrize("max_records", [1, 2, 3, 10_000])
def test_a_second_header_holds_for_the_rows_below_it(tmp_path: Path, max_records: int) -> None:
    lines = [
        *IIS,
        "#Fields: date time cs-method cs-uri-stem sc-status sc-bytes",
        "2026-11-19 08:09:10 GET /a 200 500",
        "2026-11-19 08:09:11 GET /b 503 200",
        *IIS,
        SWAPPED,
        "2026-11-19 08:09:12 GET /c 500 200",
        "2026-11-19 08:09:13 GET /d 200 503",
        *IIS[:1],
        MORE,
        "2026-11-19 08:09:14 10.0.0.1 GET /e 404 7 curl",
        "2026-11-19 08:09:15 10.0.0.1 GET /f 200 7 curl",
        "2026-11-19 08:09:16 10.0.0.1 GET /g 200 7 curl",
    ]
    assert table(tmp_path, lines, max_records) == [
        ("info", "GET /a 200 sc-bytes=500"),
        ("error", "GET /b 503 sc-bytes=200"),
        ("info", "GET /c 200 sc-bytes=500"),
        ("error", "GET /d 503 sc-bytes=200"),
        ("warning", "GET /e 404 sc-bytes=7 cs(User-Agent)=curl"),
        ("info", "GET /f 200 sc-bytes=7 cs(User-Agent)=curl"),
        ("info", "GET /g 200 sc-bytes=7 cs(User-Agent)=curl"),
    ]


@pytest.mark.parametrize("max_records", [1, 10_000])
def test_files_of_comma_separated_values_one_behind_another_keep_their_own_columns(
    tmp_path: Path, max_records: int
) -> None:
    lines = [
        "time,level,message,user",
        "2026-11-19T08:09:10Z,error,no stock,ann",
        "time,level,message,user",
        "2026-11-19T08:09:11Z,info,in stock,bob",
        "user,level,time,service,message",
        "cat,warning,2026-11-19T08:09:12Z,cart,low",
        "dan,info,2026-11-19T08:09:13Z,cart,fine",
    ]
    assert table(tmp_path, lines, max_records) == [
        ("error", "no stock user=ann"),
        ("info", "in stock user=bob"),
        ("warning", "low user=cat"),
        ("info", "fine user=dan"),
    ]


def test_rows_of_w3c_may_have_a_clock_time_alone_blanks_between_values_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "w3c.log"
    path.write_text(
        "#Version: 1.0\n#Date: 2026-11-19 00:00:00\n#Fields: time c-ip cs-method cs-uri-stem sc-status cs(User-Agent)\n"
        '08:09:10   10.0.0.7  GET  /a  200  "curl 8"\n08:09:11 10.0.0.7 GET /b 500 "two words, and more" \n'
        '08:09:12 10.0.0.7 GET /c"d 404 x\n'
        "#Date: 2026-11-20 00:00:00\n00:00:01 10.0.0.7 GET /e 200 -\n"
    )
    (chunk,) = read_file(path)
    out = parse(chunk.records, chunk.formats, arrived=ARRIVED)
    assert out.select("timestamp", "level", "message").rows() == [
        (datetime(2026, 11, 19, 8, 9, 10, tzinfo=UTC), "info", "GET /a 200 c-ip=10.0.0.7 cs(User-Agent)=curl 8"),
        (datetime(2026, 11, 19, 8, 9, 11, tzinfo=UTC), "error", "GET /b 500 c-ip=10.0.0.7 cs(User-Agent)=two words, and more"),
        (datetime(2026, 11, 19, 8, 9, 12, tzinfo=UTC), "warning", 'GET /c"d 404 c-ip=10.0.0.7 cs(User-Agent)=x'),
        (datetime(2026, 11, 20, 0, 0, 1, tzinfo=UTC), "info", "GET /e 200 c-ip=10.0.0.7"),
    ]  # fmt: skip


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
        [
            f'[2026-11-24 09:00:0{n},281][pool-0][svc][save][INFO ] => saved {{"order":{n},"amount":0,"state":1}}'
            for n in range(9)
        ],
        [f"2026-11-24T09:00:0{n}Z, the user has logged in, from his home, at night" for n in range(9)],
        [f"2026-11-24T09:00:0{n}Z,order({n}, 7, open),done" for n in range(9)],
        ["Date, time and place", *[f"On day {n}, at noon, here" for n in range(9)]],
        ["time,user,action", *[f"yesterday,ann,saved {n}" for n in range(9)]],
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
