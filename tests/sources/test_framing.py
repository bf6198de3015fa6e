"""Joining physical lines to records: nothing lost, whatever the feeds."""

import random
from itertools import pairwise

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.records.schema import RAW_SCHEMA
from pipeline.sources.framing import MAX_LOOKED_AT, SAMPLE_LINES, Framer

LOG4J = "2026-11-20 10:00:{:02d},123 INFO [main] shop.Cart: item {} added"
JAVA_TRACE = [
    "2026-11-20 10:00:00,123 ERROR [main] shop.Cart: payment failed",
    "shop.pay.PaymentException: card refused",
    "\tat shop.pay.Gateway.charge(Gateway.java:41)",
    "Caused by: java.net.SocketTimeoutException: Read timed out",
    "\t... 12 more",
]
PYTHON_TRACE = [
    "2026-11-20 10:00:00,123 - shop - ERROR - order failed",
    "Traceback (most recent call last):",
    '  File "shop.py", line 3, in pay',
    "    charge(card)",
    "shop.Refused: no such card",
]
GO_TRACE = [
    "2026/11/20 10:00:00 http: panic serving 10.0.0.9:4711: nil map",
    "goroutine 19 [running]:",
    "net/http.(*conn).serve.func1(0xc000010000)",
    "\t/usr/local/go/src/net/http/server.go:1801 +0x147",
    "main.main()",
    "created by net/http.(*Server).Serve",
]


def frame_all(lines: list[str], **options: object) -> pl.DataFrame:
    framer = Framer(**options)  # type: ignore[arg-type]
    return pl.concat([framer.feed(lines), framer.flush()])


def rebuilt(records: pl.DataFrame) -> str:
    text = ""
    for number, (raw, lines) in enumerate(records.select("raw", "lines").iter_rows()):
        text += raw if lines == 0 or number == 0 else "\n" + raw
    return text


@pytest.mark.parametrize("trace", [JAVA_TRACE, PYTHON_TRACE, GO_TRACE], ids=["java", "python", "go"])
@pytest.mark.parametrize("before", [0, 500])
def test_a_stack_trace_is_one_record_with_its_head_line(trace: list[str], before: int) -> None:
    head = [LOG4J.format(i % 60, i) for i in range(before)]
    after = trace[0].replace("10:00:00", "10:00:09")
    records = frame_all([*head, *trace, after])
    assert records["raw"].to_list()[before:] == ["\n".join(trace), after]
    assert records["lines"].to_list()[before:] == [len(trace), 1]
    assert records["line"].to_list()[before:] == [before + 1, before + 1 + len(trace)]
    assert dict(records.schema) == RAW_SCHEMA


def test_lines_of_an_unknown_format_stay_apart_but_indented_ones_join() -> None:
    lines = ["hello world", "how are you", "   fine", "", "thanks", "Caused by: nothing", "} bye", "}"]
    records = frame_all(lines)
    assert records["raw"].to_list() == [
        "hello world",
        "how are you\n   fine\n",
        "thanks\nCaused by: nothing",
        "} bye\n}",
    ]
    assert records["line"].to_list() == [1, 2, 5, 7]


def test_a_headless_line_joins_where_nearly_every_line_has_a_header() -> None:
    headed = [LOG4J.format(i % 60, i) for i in range(40)]
    assert frame_all([*headed, "no header here"]).height == 40


def test_headless_lines_of_another_writer_stay_apart() -> None:
    """They come at any time, so the headers do not tell whether one follows."""
    chance = random.Random(7)
    for share in (0.3, 0.5, 0.7):
        lines = [
            LOG4J.format(i % 60, i) if chance.random() < share else f"order {i} shown" for i in range(300)
        ]
        assert frame_all(lines).height == len(lines)


def test_the_last_line_of_a_traceback_joins_although_it_looks_like_text() -> None:
    for start in ("payment failed", "ERROR", "an exception"):
        records = frame_all([start, *PYTHON_TRACE[1:], "done"], formats=())
        assert records["raw"].to_list() == ["\n".join([start, *PYTHON_TRACE[1:]]), "done"]


def test_a_partial_container_line_joins_the_next_one() -> None:
    cri = [
        "2026-11-20T10:00:00.1Z stdout P first half,",
        "2026-11-20T10:00:00.2Z stdout F second half",
        "2026-11-20T10:00:00.3Z stdout F alone",
        "2026-11-20T10:00:00.4Z stdout F   indented, so a continuation",
        "2026-11-20T10:00:00.4Z stderr F   of the other stream",
    ]
    assert frame_all(cri)["lines"].to_list() == [2, 2, 1]
    docker = [
        '{"log":"first half,","stream":"stdout","time":"2026-11-20T10:00:00.1Z"}',
        '{"log":"second half\\n","stream":"stdout","time":"2026-11-20T10:00:00.2Z"}',
        '{"log":"alone\\n","stream":"stdout","time":"2026-11-20T10:00:00.3Z"}',
        '{"log":"\\tat shop.Cart.add(Cart.java:7)\\n","stream":"stdout","time":"2026-11-20T10:00:00.3Z"}',
    ]
    assert frame_all(docker)["lines"].to_list() == [2, 2]


def test_a_record_that_would_pass_the_cap_is_closed_and_the_next_line_begins_another() -> None:
    lines = ["2026-11-20 10:00:00 head", *["\tat " + "x" * 20] * 10]
    records = frame_all(lines, max_record_bytes=100)
    assert max(records["raw"].str.len_bytes()) <= 100
    assert records["lines"].to_list() == [4, 4, 3]
    assert records["line"].to_list() == [1, 5, 9]
    assert rebuilt(records) == "\n".join(lines)


def test_a_line_longer_than_the_cap_becomes_pieces_that_count_once() -> None:
    lines = ["before", "é" * 100, "after", "\tindented"]
    records = frame_all(lines, max_record_bytes=65)
    assert records["lines"].to_list() == [1, 1, 0, 0, 0, 2]
    assert records["line"].to_list() == [1, 2, 2, 2, 2, 3]
    assert max(records["raw"].str.len_bytes()) <= 65
    assert rebuilt(records) == "\n".join(lines)


def test_nothing_comes_out_before_the_formats_are_known_and_everything_after() -> None:
    framer = Framer()
    lines = [LOG4J.format(i % 60, i) for i in range(SAMPLE_LINES)]
    assert framer.feed(lines[:-1]).is_empty()
    assert framer.formats == ()
    assert framer.feed(lines[-1:]).height == SAMPLE_LINES - 1
    assert framer.formats == ("log4j",)
    assert framer.flush().height == 1
    assert framer.flush().is_empty()


def test_endless_blank_lines_are_not_held_back() -> None:
    framer = Framer()
    framer.feed([""] * (MAX_LOOKED_AT + 1))
    assert framer.settled


def test_formats_are_looked_for_again_while_little_was_seen() -> None:
    framer = Framer()
    framer.feed(["starting up"])
    assert framer.flush()["raw"].to_list() == ["starting up"]
    assert framer.formats == ()
    framer.feed([LOG4J.format(i % 60, i) for i in range(SAMPLE_LINES)])
    assert framer.formats == ("log4j",)


WEB, API = "web-1  | ", "\x1b[36mapi-1  |\x1b[0m "
POD, TWIN = "[pod/shop-7d4-x2k/web] ", "[pod/shop-7d4-9qz/web] "


@pytest.mark.parametrize(("one", "other"), [(WEB, API), (POD, TWIN)], ids=["compose", "kubectl"])
@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_no_line_joins_a_record_of_another_service(one: str, other: str, step: int) -> None:
    calm = [f"{who}{LOG4J.format(i % 60, i)}" for i in range(SAMPLE_LINES) for who in (one, other)]
    java = [one + line for line in JAVA_TRACE]
    python = [other + line for line in PYTHON_TRACE]
    woven = [*java[:2], *python[:3], *java[2:], *python[3:]]
    lines = [*calm, *woven, one + LOG4J.format(9, 9)]
    framer = Framer()
    fed = [framer.feed(lines[at : at + step]) for at in range(0, len(lines), step)]
    records = pl.concat([*fed, framer.flush()])
    assert framer.formats == ("compose" if one is WEB else "kubectl", "log4j")
    assert rebuilt(records) == "\n".join(lines)
    parts = (java[:2], python[:3], java[2:], python[3:])
    assert records["raw"].to_list()[len(calm) : -1] == ["\n".join(part) for part in parts]


PALETTE = st.sampled_from(
    [
        *JAVA_TRACE,
        *PYTHON_TRACE,
        *GO_TRACE,
        "",
        " ",
        "}",
        "plain text",
        *(WEB + line for line in PYTHON_TRACE),
        *(API + line for line in JAVA_TRACE),
        "2026-11-20T10:00:00.1Z stdout P half ",
        "2026-11-20T10:00:00.1Z stdout F whole",
        "2026-11-20T10:00:00.1Z stdout F Traceback (most recent call last):",
        "panic: boom",
        "Segmentation fault",
        "TypeError: no cart",
        '{"log":"half","stream":"stdout","time":"2026-11-20T10:00:00.1Z"}',
        '{"log":"whole\\n","stream":"stdout","time":"2026-11-20T10:00:00.1Z"}',
        "y" * 150,
        "€" * 40,
    ]
)
LINE = st.one_of(
    PALETTE, st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=90)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(LINE, max_size=40), st.lists(st.integers(0, 40), max_size=6), st.integers(16, 200))
def test_any_cut_into_feeds_gives_the_same_records_and_loses_nothing(
    lines: list[str], cuts: list[int], cap: int
) -> None:
    # more than a sample, so that formats settle in the middle of the feeds
    lines = lines * (SAMPLE_LINES // 20) if len(lines) > 20 else lines
    whole = frame_all(lines, max_record_bytes=cap)
    framer = Framer(max_record_bytes=cap)
    edges = [0, *sorted(min(c * 7, len(lines)) for c in cuts), len(lines)]
    parts = [framer.feed(lines[a:b]) for a, b in pairwise(edges)]
    cut = pl.concat([*parts, framer.flush()])
    assert cut.equals(whole)
    assert int(whole["lines"].sum()) == len(lines)
    assert rebuilt(whole) == "\n".join(lines)
    assert whole["raw"].str.len_bytes().max() is None or whole["raw"].str.len_bytes().max() <= cap  # type: ignore[operator]
    fresh = whole.filter(pl.col("lines") > 0)
    assert fresh["line"].to_list() == [1 + sum(fresh["lines"].to_list()[:i]) for i in range(fresh.height)]


def blocks(lines: list[str], step: int = 10_000) -> list[str]:
    """The records of these lines, fed a few at a time."""
    framer = Framer(sample=lines[:60])
    fed = [framer.feed(lines[at : at + step]) for at in range(0, len(lines), step)]
    return pl.concat([*fed, framer.flush()])["raw"].to_list()


SLOW = [
    "# Time: 2026-11-20T10:00:01.123456Z\n# User@Host: shop[shop] @ localhost []  Id: 4\n# Query_time: 4.0\n"
    "SET timestamp=1795168801;\nSELECT a\nFROM b\nWHERE c = 'ERROR: x';",
    "# User@Host: shop[shop] @ localhost []  Id: 5\n# Query_time: 4.1\nSET timestamp=1795168801;\nCOMMIT;",
]
JAVA = [
    "Nov 20, 2026 10:00:01 AM org.shop.Cart add\nINFO: one",
    "Nov 20, 2026 10:00:02 AM org.shop.Cart add\nSEVERE: no stock\njava.lang.Exception: x\n\tat a.B(C.java:1)",
]


@pytest.mark.parametrize("records", [SLOW, JAVA])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 10_000])
def test_the_lines_below_a_header_are_one_record_whatever_they_say(records: list[str], step: int) -> None:
    many = records * (30 if step > 3 else 10)  # a feed costs the same however few lines it has
    assert blocks("\n".join(many).split("\n"), step) == many
