"""Lines by POST: NDJSON, an array, plain text."""

import json

import pytest

from bench._fuzz_requests import JSON_HINTS, checked
from pipeline.sources.protocols.contract import Hints, Undecodable
from pipeline.sources.protocols.lines import decode_array, decode_posted
from pipeline.sources.pushed import framed

DOCUMENTS = [{"time": "2026-11-25T12:00:00.5Z", "msg": "a", "service": "cart"}, {"msg": "b"}]
NDJSON = "\n".join(json.dumps(document) for document in DOCUMENTS)


def texts(body: str, content_type: str = "application/json") -> list[str]:
    return checked(decode_posted(body.encode(), Hints(content_type=content_type))).records.texts


@pytest.mark.parametrize("content_type", ["application/json", "application/x-ndjson", "application/jsonlines; charset=utf-8"])  # fmt: skip
def test_a_document_a_line_is_a_record_as_it_was_sent(content_type: str) -> None:
    assert texts(NDJSON + "\r\n\n", content_type) == NDJSON.split("\n")


def test_an_array_of_objects_gives_the_same_records() -> None:
    body = json.dumps(DOCUMENTS, indent=1).replace("\n ", "")
    records = checked(decode_posted(f" {body}".encode(), JSON_HINTS)).records
    assert [json.loads(text) for text in records.texts] == DOCUMENTS
    assert records.workloads == ["cart", "unknown"]
    assert records.timestamps == [1795608000_500_000, None]


def test_one_document_over_many_lines_is_one_record() -> None:
    body = json.dumps(DOCUMENTS[0], indent=2)
    assert texts(body) == [body]
    assert len(texts(body + "\n}")) > 1


def test_a_line_that_is_no_document_is_a_record_all_the_same() -> None:
    assert texts('{"a":1}\nhello\n[1]\n{"a":') == ['{"a":1}', "hello", "[1]", '{"a":']


def test_plain_lines_are_records_with_stack_traces_joined() -> None:
    body = "ERROR boom\n\tat a.b(C.java:1)\n\nINFO up\n"
    decoded = decode_posted(body.encode(), Hints(content_type="text/plain"))
    assert framed(decoded.records)[0]["raw"].to_list() == ["ERROR boom\n\tat a.b(C.java:1)", "INFO up"]
    assert texts("[1] is no JSON\n", "") == ["[1] is no JSON"]


def test_documents_are_read_as_such_whatever_curl_calls_them() -> None:
    decoded = decode_posted(NDJSON.encode(), Hints(content_type="application/x-www-form-urlencoded"))
    assert decoded.records.workloads == ["cart", "unknown"]


def test_a_request_of_plain_lines_is_never_distinct_and_has_the_workload_of_its_key() -> None:
    decoded = decode_posted(b"2026-11-25T12:00:00.5Z a", Hints(workload="shop"))
    assert decoded.records.workloads == ["shop"]
    assert not decoded.distinct
    assert decode_posted(b"a", Hints(query={"service": "cron"})).records.workloads == ["cron"]


def test_a_byte_order_mark_belongs_to_no_line() -> None:
    assert texts('\ufeff{"a":1}') == ['{"a":1}']


@pytest.mark.parametrize("body", [b"[1]", b'["a"]', b"[{}", b"[{},[]]", b"[" * 100_000, b"[NaN]", b"{}"])
def test_an_array_of_anything_else_is_undecodable(body: bytes) -> None:
    with pytest.raises(Undecodable, match="the JSON array"):
        decode_array(body, Hints())


def test_a_request_is_bounded_in_records_and_in_objects() -> None:
    for body in (b"a\n" * 100_001, b"[" + b"{}," * 100_000 + b"{}]", b"[" + b"{}," * 2_000_000 + b"{}]"):
        with pytest.raises(Undecodable, match="more than"):
            decode_posted(body, JSON_HINTS)
