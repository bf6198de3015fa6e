"""Session keys are found by looking at a record alone."""

import json
from unittest import mock

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import BadSetting
from pipeline.sources.protocols.contract import Hints
from pipeline.sources.protocols.otlp_json import decode_json
from pipeline.watching.sessions import keys, shapes_of_ids
from pipeline.watching.sessions.keys import (
    MAX_BLOCKS,
    MAX_KEY,
    extract,
    find_keys,
    kind_and_key,
    user_patterns,
)
from pipeline.watching.sessions.shapes_of_ids import SHAPES, IdShapes
from pipeline.watching.sessions.shapes_of_ids import UUID as UUID_PATTERN
from pipeline.watching.sessions.shipped_ids import TRACE, ShippedIds

UUID = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
OTHER = "1033c28e-4f89-41d3-9a0c-0305e82c3301"
HEX32 = "121f3fe08fca4050ada25791f255b1cc"


def key(raw: str, *patterns: str) -> str | None:
    found: str | None = extract(pl.DataFrame({"raw": [raw]}), user_patterns(patterns))[0]
    return found


def every(raw: str) -> list[str]:
    return [key for key in find_keys(pl.DataFrame({"raw": [raw]}))[0].to_list() if key is not None]


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ("Receiving block blk_-1608999687919862906 src: /10.250.19.102:54106", "blk_-1608999687919862906"),
        (f"[SW_CTX:[ts-order,a@10.0.0.1,{HEX32}.46.16283306033640027,b.37.1,0]] INFO x", f"{HEX32}.46.16283306033640027"),
        (f"GET / traceparent=00-{HEX32}-00f067aa0ba902b7-01", HEX32),
        (f'{{"level":"info","trace_id":"{HEX32}","msg":"done"}}', HEX32),
        ("level=info traceID=5f2b4a1c9d8e7f60 msg=done", "5f2b4a1c9d8e7f60"),
        ("INFO [shop,5f2b4a1c9d8e7f60,a1b2c3d4e5f60718,true] 1 --- started", "5f2b4a1c9d8e7f60"),
        (f"nova.api [req-{UUID} admin] GET /servers", f"req-{UUID}"),
        ("handled request_id=ab12-cd34 in 3 ms", "ab12-cd34"),
        ('{"requestId": "ab12cd34"}', "ab12cd34"),
        ("X-Correlation-ID: 7788-99", "7788-99"),
        (f"order {UUID} paid", UUID),
    ],
)  # fmt: skip
def test_the_usual_keys_are_recognised(raw: str, wanted: str) -> None:
    assert key(raw) == wanted


@pytest.mark.parametrize(
    "raw",
    [
        "", "started in 3 ms", "user=alice pod=shop-7f9c5d-x2x8k", "request failed: id unknown", "session closed for user root",
        f"trace_id={'0' * 32}", "[SW_CTX:[ts-order,a@10.0.0.1,N/A,N/A,-1]] INFO x", "deadbeef 00-1234", "2026-01-02 03:04:05",
    ],
)  # fmt: skip
def test_records_without_a_key_have_none(raw: str) -> None:
    assert key(raw) is None


def test_what_ranks_higher_wins_wherever_it_stands() -> None:
    assert key(f"uuid {UUID} request_id=abcd trace_id={HEX32}") == HEX32
    assert key(f"uuid {UUID} request_id=abcd") == "abcd"
    assert key("blk_2 and blk_1") == "blk_2"


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (f"[req-{UUID} admin] [instance: {OTHER}] up",
         {"trace": f"req-{UUID}", "instance": OTHER}),
        (f'{{"trace_id":"{HEX32}","span_id":"00f067aa0ba902b7","parent_span_id":"ffffffffffffffff"}}',
         {"trace": HEX32, "span": "00f067aa0ba902b7"}),
        (f'{{"parent_span_id":"ffffffffffffffff","trace_id":"{HEX32}"}}', {"trace": HEX32}),
        (f"request_id=ab12 sessionId=cart-7 order {UUID}", {"request": "ab12", "session": "cart-7", "uuid": UUID}),
        (f"trace_id={UUID} again {UUID}", {"trace": UUID}),
    ],
)  # fmt: skip
def test_a_record_has_the_first_key_of_each_kind(raw: str, wanted: dict[str, str]) -> None:
    assert dict(map(kind_and_key, every(raw))) == wanted


def test_a_record_has_all_of_its_blocks_and_each_once() -> None:
    assert every("ask a to delete blk_1 blk_-2 blk_1 blk_3") == [
        "block\0blk_1",
        "block\0blk_-2",
        "block\0blk_3",
    ]
    many = " ".join(f"blk_{n}" for n in range(1, 1_000))
    assert len(every(many)) == MAX_BLOCKS


def test_patterns_of_the_user_come_before_all() -> None:
    assert key("order=77 blk_12", r"order=(\d+)") == "77"
    assert key("blk_12", r"order=(\d+)") == "blk_12"


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("a(b", "not a Rust"), ("ab", "0 groups"), ("(a)(b)", "2 groups"), ("", "empty"), (r"(?=a)(b)", "not a Rust")],
)  # fmt: skip
def test_a_bad_pattern_is_refused_with_what_is_wrong(pattern: str, says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        user_patterns([pattern])


def test_a_header_is_searched_and_a_record_without_raw_text_by_its_message() -> None:
    frame = pl.DataFrame({"raw": ["[blk_1] hello", None], "message": ["hello", "hello blk_2"]})
    assert extract(frame).to_list() == ["blk_1", "blk_2"]
    assert extract(frame.select("message")).to_list() == [None, "blk_2"]


def test_no_records_have_no_keys() -> None:
    empty = extract(pl.DataFrame({"raw": []}, schema={"raw": pl.String}))
    assert empty.dtype == pl.String
    assert empty.name == "session"
    assert empty.is_empty()


def test_a_key_is_no_longer_than_a_key_may_be() -> None:
    assert len(key("order=" + "x" * 500, "order=(x+)") or "") == MAX_KEY


LINES = st.sampled_from(
    ["blk_7 a", f"trace_id={HEX32}", f"req-{UUID}", "nothing", f"{UUID}", "request_id=q1w2", ""]
)


@settings(max_examples=30, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=30))
def test_a_records_key_does_not_depend_on_the_batch_around_it(lines: list[str]) -> None:
    assert extract(pl.DataFrame({"raw": lines})).to_list() == [key(line) for line in lines]


def ids(trace: str = HEX32, span: str = "00f067aa0ba902b7") -> str:
    """The end of a raw text as the intake writes it for OTLP."""
    return f'"trace_id":"{trace}","span_id":"{span}"}}'


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.none()
        | st.lists(
            LINES
            | st.sampled_from(
                [
                    *(
                        ids(),
                        ids("0" * 32),
                        ids(span="0" * 16),
                        ids("A" * 32),
                        ids("7" * 31),
                        ids() + " ",
                        "{,",
                    ),
                    *(
                        "traceId=1234567890abcdef",
                        'TRACE_ID="00000000000000000000000000000000"',
                        "tRaCe",
                        "race",
                    ),
                    *('"span_id":"1234567890abcdef"', "span=", "trace", "request", "[a,", '"body":"é",'),
                    *(
                        f"[a,{HEX32},00f067aa0ba902b7",
                        f"SW_CTX:[a,b,{HEX32}",
                        f"00-{HEX32}-00f067aa0ba902b7-01",
                    ),
                ]
            )
        ).flatmap(lambda pieces: st.sampled_from([",".join(pieces), "".join(pieces)]))
        | st.lists(
            LINES
            | st.sampled_from(
                [
                    *("request_id=0000", "job-7", "é", "blk_8 blk_9", "span_id=00f067aa0ba902b7", "SW_CTX:"),
                    f"SW_CTX:[a,b@c,{HEX32}.1,d,0] SW_CTX:[a,b,{OTHER},d,0]",
                    *(
                        f"SW_CTX:{head},{HEX32}{end}"
                        for head in ("[a,b", "[a b,c", " [,@")
                        for end in (".7", "g")
                    ),
                    f"SW_CTX:[a,b, {HEX32}.1,d,0]",
                    "SW_CTX:[N/A,N/A,N/A,N/A,-1]",
                    f"00-{HEX32}-00f067aa0ba902b7-01",
                    f"[a,{HEX32},00f067aa0ba902b7] ,00f067aa0ba902b7,",
                ]
            )
        ).map(" ".join)
    ),
    st.sampled_from([(), ("(job-[0-9])",)]),
)
def test_few_records_have_the_keys_that_queries_find(
    lines: list[str | None], patterns: tuple[str, ...]
) -> None:
    frame = pl.DataFrame({"raw": lines}, schema={"raw": pl.String})
    with mock.patch.object(keys, "FEW_ROWS", 0):
        by_queries = find_keys(frame, user_patterns(patterns)).to_list()
    found = find_keys(frame, user_patterns(patterns)).to_list()
    assert [[key for key in keys or () if key is not None] for keys in found] == [
        [key for key in keys or () if key is not None] for keys in by_queries
    ]


def test_the_end_of_a_record_that_the_intake_writes_has_the_ids_of_its_shipper() -> None:
    record = {
        "severityText": "INFO",
        "body": {"stringValue": "a body"},
        "traceId": HEX32,
        "spanId": "00f067aa0ba902b7",
    }
    body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]})
    (raw,) = decode_json(body.encode(), Hints()).records.texts
    shipped = ShippedIds.of(pl.Series([raw, "another text", None]))
    assert shipped is not None
    assert shipped.heads.to_list() == ['{"body":"a body","severity":"INFO",', "another text", None]
    assert (trace := shipped.ids(TRACE)) is not None
    assert trace.to_list() == [HEX32, None, None]


def test_ids_behind_another_key_are_found_alike_in_a_small_and_in_a_large_batch() -> None:
    lines = [f"login session_id={ids()}", f'{{"body":"a",{ids()}', f"{{{ids()}"]
    trace, span = f"trace\0{HEX32}", "span\x0000f067aa0ba902b7"
    expected = [[trace, "session\0trace_id", span], [trace, span], [trace, span]]
    assert list(map(every, lines)) == expected
    large = find_keys(pl.DataFrame({"raw": lines * 200})).to_list()
    assert [[key for key in found if key is not None] for found in large[:3]] == expected


HEX_PIECES = st.sampled_from(
    ["0", "3f", "4f8", "89d1", "a000", "0305e82c3301", "-", ",", "]", "00-", "-4F89-", "é", "\n", UUID]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | st.lists(HEX_PIECES, max_size=12).map("".join), max_size=6))
def test_shapes_of_ids_stand_where_their_expressions_find_them(lines: list[str | None]) -> None:
    text = pl.Series("text", lines, dtype=pl.String)
    with mock.patch.object(shapes_of_ids, "_BLOCK", 24):
        shapes = IdShapes(text)
    for shape in SHAPES:
        assert shapes.rows(shape).tolist() == text.str.contains(shape).arg_true().to_list()
    rows, uuids = shapes.uuids()
    expected = text.str.extract(f"({UUID_PATTERN})", 1)
    assert rows.tolist() == expected.is_not_null().arg_true().to_list()
    assert uuids.to_list() == expected.drop_nulls().to_list()
