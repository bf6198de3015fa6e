"""Frames of RELP."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sources.protocols.contract import Undecodable
from pipeline.sources.protocols.streams.relp import Frame, RelpFraming, open_response, response
from pipeline.sources.protocols.streams.syslog import MOST_BYTES


def frame(number: int, command: bytes, data: bytes = b"") -> bytes:
    return b"%d %s %d" % (number, command, len(data)) + (b" " + data if data else b"") + b"\n"


SENT = st.lists(
    st.tuples(
        st.integers(0, 999_999_999), st.sampled_from([b"syslog", b"open", b"close"]), st.binary(max_size=30)
    )
)


@given(sent=SENT, places=st.lists(st.integers(0, 400), max_size=8))
def test_the_frames_of_a_stream_do_not_depend_on_where_it_is_cut(
    sent: list[tuple[int, bytes, bytes]], places: list[int]
) -> None:
    stream = b"".join(frame(*one) for one in sent)
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    framing = RelpFraming()
    frames = [one for a, b in itertools.pairwise(edges) for one in framing.feed(stream[a:b])]
    assert frames == [Frame(number=n, command=command, data=data) for n, command, data in sent]
    assert not framing.partial


def test_an_overlong_message_loses_its_end_and_the_next_one_is_whole() -> None:
    framing = RelpFraming()
    stream = frame(1, b"syslog", b"x" * 100_000) + frame(2, b"syslog", b"next")
    frames = framing.feed(stream[:90_000]) + framing.feed(stream[90_000:])
    assert [(f.number, len(f.data)) for f in frames] == [(1, MOST_BYTES), (2, 4)]
    assert framing.shortened == 1


@pytest.mark.parametrize(
    "stream",
    [
        b"<13>no relp\n",
        b"1 syslog\n",
        b"1 syslog 4\n",
        b"1 syslog 3 four\n",
        b"1 syslog 9999999999 x\n",
        b"x" * 100,
    ],
)
def test_a_stream_that_is_no_relp_is_refused(stream: bytes) -> None:
    with pytest.raises(Undecodable):
        RelpFraming().feed(stream)


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_are_refused(stream: bytes) -> None:
    framing = RelpFraming()
    try:
        framing.feed(stream)
    except Undecodable:
        return
    assert len(framing._buffer) <= len(stream)


def test_answers_have_the_length_of_their_text() -> None:
    assert response(7) == b"7 rsp 6 200 OK\n"
    assert response(7, b"") == b"7 rsp 0\n"
    offers = b"relp_version=0\nrelp_software=librelp,1.11.0\ncommands=syslog"
    assert open_response(offers).split(b"\n") == [
        b"200 OK",
        b"relp_version=0",
        b"relp_software=logweir",
        b"commands=syslog",
    ]
    for refused in (offers.replace(b"=0", b"=9"), offers.replace(b"=syslog", b"=other"), b""):
        with pytest.raises(Undecodable):
            open_response(refused)
