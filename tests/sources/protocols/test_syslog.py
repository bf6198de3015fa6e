"""Framing and header of syslog messages."""

import itertools
from collections.abc import Sequence

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records.batch import utc_now
from pipeline.sources.formats import parse
from pipeline.sources.protocols.streams.syslog import MOST_BYTES, SyslogFraming, syslog_records
from pipeline.sources.pushed import framed

NEW = "<165>1 2026-11-20T10:00:00.003Z web-1 checkout 8710 ID47 - payment failed"
OLD = "<34>Nov 20 10:00:00 web-1 sshd[812]: Accepted publickey for root"


def cut(parts: Sequence[bytes]) -> tuple[list[bytes], int]:
    """The messages of a stream that arrives in these parts, and how many were shortened."""
    framing = SyslogFraming()
    messages = [message for part in parts for message in framing.feed(part)]
    return messages + framing.close(), framing.shortened


def parts_of(stream: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


TEXTS = st.binary(max_size=40) | st.sampled_from([b"12 <a", b"7 ", b"999999 <34>x", b"x" * (MOST_BYTES + 9)])


@given(
    stream=st.lists(TEXTS | st.sampled_from([b"\n", b"\0", b"\r\n", b"5 <1>ab"])).map(b"".join),
    places=st.lists(st.integers(0, 200_000), max_size=8),
)
def test_the_messages_of_a_stream_do_not_depend_on_where_it_is_cut(stream: bytes, places: list[int]) -> None:
    assert cut(parts_of(stream, places)) == cut([stream])


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=60), st.booleans())))
def test_framings_may_alternate_within_a_connection(sent: list[tuple[bytes, bool]]) -> None:
    stream, expected = b"", []
    for text, counted in sent:
        message = b"<13>" + (text if counted else text.translate(None, b"\n\0"))
        stream += b"%d %s" % (len(message), message) if counted else message + b"\n"
        expected.append(message.rstrip(b"\r\n\0"))
    assert cut([stream])[0] == expected


@pytest.mark.parametrize(
    ("stream", "messages"),
    [
        (b"9 <13>a\nb\0c\n9 <13>next.", [b"<13>a\nb\0c", b"<13>next."]),
        (b"2026 was a year\n404 errors\n", [b"2026 was a year", b"404 errors"]),
        (b"<13>one\0<13>two\r\n\n<13>no end", [b"<13>one", b"<13>two", b"<13>no end"]),
        (b"12 <13>cut", [b"<13>cut"]),
        (b"12", [b"12"]),
    ],
)
def test_the_first_byte_of_a_message_tells_its_framing(stream: bytes, messages: list[bytes]) -> None:
    assert cut([stream])[0] == messages


@pytest.mark.parametrize("sep", [b"\n", b""])
def test_an_overlong_message_loses_its_end_and_the_next_one_is_whole(sep: bytes) -> None:
    long = b"<13>" + b"x" * 100_000
    stream = long + b"\n<13>next\n" if sep else b"%d %s8 <13>next" % (len(long), long)
    assert cut([stream]) == ([long[:MOST_BYTES], b"<13>next"], 1)
    at_the_limit = long[:MOST_BYTES]
    assert cut([at_the_limit + b"\n"]) == ([at_the_limit], 0)


def test_a_framer_holds_no_more_than_a_message() -> None:
    framing = SyslogFraming()
    for _ in range(100):
        framing.feed(b"x" * 10_000)
        assert len(framing._buffer) <= MOST_BYTES
    assert framing.partial


@pytest.mark.parametrize(
    ("message", "workload"),
    [
        (NEW, "web-1/checkout"),
        (OLD, "web-1/sshd"),
        ("Nov 20 10:00:00 web-1 sshd: no priority", "web-1/sshd"),
        ("<13>Nov  2 2026 10:00:00 fw-1 : %ASA-6-302013: Built inbound", "fw-1/%ASA-6-302013"),
        ("<30>2026-11-20T10:00:00.123456+01:00 db-1 /usr/sbin/cron[1]: (root) CMD", "db-1/cron"),
        ("<30>2026-11-20T10:00:00+01:00 mx postfix/smtpd[1]: connect", "mx/postfix/smtpd"),
        ("<13>Nov 20 10:00:00 web-1 some words without a tag", "web-1"),
        ("<165>1 2026-11-20T10:00:00Z - - - - - nobody", "192.0.2.7"),
        ("<165>1 - web-1 - - - - timeless", "web-1"),
        ("<189>84: *Nov 20 10:00:00.123: %SYS-5-CONFIG_I: Configured", "192.0.2.7"),
        ("no header at all", "192.0.2.7"),
        ("<165>1 - h\x07st shop - - - x", "h_st/shop"),
        ("<165>1 - - /bin/ - - - x", "192.0.2.7"),
    ],
)
def test_a_workload_is_host_and_application_or_the_address(message: str, workload: str) -> None:
    assert syslog_records([(message.encode(), "192.0.2.7")]).records.workloads == [workload]


def test_stage_ingest_reads_the_header_of_a_message() -> None:
    decoded = syslog_records([(NEW.encode(), "192.0.2.7"), (OLD.encode(), ""), (b"bare \xff", "192.0.2.7")])
    rows, formats = framed(decoded.records)
    rows = parse(rows, formats, arrived=utc_now())
    assert rows.select("host", "service", "level", "message").rows() == [
        ("web-1", "checkout", "notice", "payment failed"),
        ("web-1", "sshd", "critical", "Accepted publickey for root"),
        ("192.0.2.7", None, None, "bare \ufffd"),
    ]
    assert rows["raw"].to_list() == [NEW, OLD, "bare \ufffd"]
    assert rows["timestamp"].dt.truncate("1s").head(2).n_unique() == 1
    assert rows["raw"].dtype == pl.String


def test_only_microseconds_or_several_moments_tell_requests_apart() -> None:
    assert not syslog_records([(NEW.encode(), "")]).distinct
    assert syslog_records([(NEW.replace(".003", ".003001").encode(), "")]).distinct
    assert not syslog_records([(NEW.encode(), ""), (OLD.encode(), "")]).distinct
    whole = NEW.replace(".003", ".000").encode()
    assert syslog_records([(NEW.encode(), ""), (whole, "")]).distinct
    assert not syslog_records([(whole, ""), (whole, "")]).distinct
