"""`_bulk`, as its clients write it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from elasticsearch.serializer import NdjsonSerializer
from opensearchpy.helpers.actions import _chunk_actions, expand_action
from opensearchpy.serializer import JSONSerializer

from bench._fuzz_requests import checked
from pipeline.sources.protocols.bulk import bulk_error, bulk_full, bulk_operations, bulk_success, decode_bulk
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.pushed import framed

NOON = "2026-11-25T12:00:00.250Z"


def decoded(
    *pairs: tuple[dict[str, Any], dict[str, Any]], path: str = "/_bulk", workload: str = ""
) -> Decoded:
    lines = [json.dumps(value) for pair in pairs for value in pair]
    return checked(decode_bulk(("\n".join(lines) + "\n").encode(), Hints(path=path, workload=workload)))


def create(document: dict[str, Any], index: str | None = "logs") -> tuple[dict[str, Any], dict[str, Any]]:
    return {"create": {} if index is None else {"_index": index}}, document


def test_what_the_client_of_elasticsearch_writes_is_stored_as_it_was_sent() -> None:
    document = {"@timestamp": NOON, "message": "café", "level": "error"}
    body = NdjsonSerializer().dumps([{"create": {"_index": "logs-2026.11.25"}}, document])
    records = checked(decode_bulk(body, Hints(path="/_bulk"))).records
    assert records.messages == [None]
    assert records.texts == [body.decode().splitlines()[1]]
    assert (records.timestamps, records.workloads) == ([1795608000_250_000], ["logs"])


def test_what_the_helper_of_opensearch_writes_is_stored_and_answered_in_its_order() -> None:
    actions = [expand_action({"_index": "logs", "message": "a"}),
               expand_action({"_op_type": "create", "_index": "logs", "message": "b"})]  # fmt: skip
    ((_, lines),) = _chunk_actions(actions, 500, 1 << 20, JSONSerializer())
    body = ("\n".join(lines) + "\n").encode()
    assert checked(decode_bulk(body, Hints())).records.height == 2
    assert bulk_operations(body) == ["index", "create"]


def test_a_document_of_fluent_bit_names_its_workload_and_its_time() -> None:
    kubernetes = {
        "namespace_name": "shop",
        "pod_name": "cart-5f-x",
        "container_name": "c",
        "labels": {"app": "cart"},
    }
    request = decoded(create({"@timestamp": NOON, "log": "up", "stream": "stdout", "kubernetes": kubernetes}))
    assert request.records.workloads == ["shop/cart"]


@pytest.mark.parametrize(
    ("action", "document", "workload"),
    [
        # Fluent Bit with Logstash_Format, Vector's Kubernetes source, Filebeat with its processors, Logstash.
        (
            '{"create":{"_index":"logstash-2026.11.25"}}',
            '{"@timestamp":"2026-11-25T12:00:00.250Z","stream":"stderr","_p":"F","log":"disk full"}',
            "logstash",
        ),
        (
            '{"create":{"_index":"vector-2026.11.25","_id":"7"}}',
            '{"file":"/var/log/pods/x/0.log","kubernetes":{"container_name":"cart","pod_labels":{"app":"cart"},'
            '"pod_name":"cart-5f-x","pod_namespace":"shop"},"message":"disk full","source_type":"kubernetes_logs",'
            '"stream":"stderr","timestamp":"2026-11-25T12:00:00.250Z"}',
            "shop/cart",
        ),
        (
            '{"create":{"_index":"filebeat-9.2.0","pipeline":"x","require_alias":false}}',
            '{"@timestamp":"2026-11-25T12:00:00.250Z","@metadata":{"beat":"filebeat"},"message":"disk full",'
            '"log":{"offset":7,"file":{"path":"/var/log/x.log"}},"input":{"type":"filestream"},"ecs":{"version":"8.0.0"},'
            '"host":{"name":"web-1"},"kubernetes":{"namespace":"shop","deployment":{"name":"cart"},"pod":{"name":"cart-5f-x"},'
            '"labels":{"app_kubernetes_io/name":"other"}},"orchestrator":{"cluster":{"name":"eu"}}}',
            "eu/shop/cart",
        ),
        (
            '{"index":{"_id":null,"_index":"logstash-2026.11.25","routing":null}}',
            '{"@timestamp":"2026-11-25T12:00:00.250Z","@version":"1","host":{"name":"web-1"},"message":"disk full",'
            '"event":{"original":"disk full"},"service":{"name":"cart"}}',
            "cart",
        ),
    ],
    ids=["fluent-bit", "vector", "filebeat", "logstash"],
)
def test_what_a_shipper_writes_is_stored_under_its_workload(
    action: str, document: str, workload: str
) -> None:
    request = checked(decode_bulk(f"{action}\n{document}\n".encode(), Hints(path="/_bulk")))
    assert (request.records.texts, request.records.workloads) == ([document], [workload])
    assert request.records.timestamps == [1795608000_250_000]


def test_several_moments_or_microseconds_make_a_request_distinct() -> None:
    later = NOON.replace(".250", ".251")
    assert not decoded(create({"@timestamp": NOON})).distinct
    assert not decoded(create({"@timestamp": NOON}), create({"@timestamp": NOON})).distinct
    assert decoded(create({"@timestamp": NOON}), create({"@timestamp": later})).distinct
    assert decoded(create({"@timestamp": NOON.replace(".250", ".250001")})).distinct


def test_times_without_a_fraction_do_not_make_a_request_distinct() -> None:
    assert not decoded(create({"@timestamp": "2026-11-25T12:00:00Z"})).distinct
    assert not decoded(create({"@timestamp": NOON}), create({"message": "a"})).distinct
    assert not decoded(create({"@timestamp": "2026-11-25T12:00:00.000Z"})).distinct
    assert not decoded(create({"@timestamp": NOON}), create({"@timestamp": "2026-11-25T12:00:00Z"})).distinct


def test_an_index_in_the_path_is_that_of_actions_without_one() -> None:
    pairs = (create({"a": 1}, index=None), create({"a": 1}, index="own"))
    assert decoded(*pairs, path="/logs-app/_bulk").records.workloads == ["logs-app", "own"]
    assert decoded(*pairs, path="/es/_bulk").records.workloads == ["unknown", "own"]
    assert decoded(*pairs, workload="shop").records.workloads == ["shop", "shop"]


@pytest.mark.parametrize("document", [b"not JSON", b'{"a":NaN}', b"[1]", b'"text"', b'{"a":"\\ud800"}', b'{"a":"\xff"}', b"[" * 100_000])  # fmt: skip
def test_a_document_that_is_no_object_is_stored_as_text(document: bytes) -> None:
    body = (
        b'{"index":{"_index":"logs"}}\n' + document + b'\n{"index":{"_index":"logs"}}\n{"service":"cart"}\n'
    )
    records = checked(decode_bulk(body, Hints())).records
    assert records.texts == [document.decode("utf-8", "replace"), '{"service":"cart"}']
    assert records.workloads == ["logs", "cart"]


def test_lines_of_a_stack_trace_become_one_document_per_container() -> None:
    def line(log: str, container: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return create(
            {"log": log, "kubernetes": {"namespace_name": "s", "container_name": container, "pod_name": "p"}}
        )

    records = decoded(
        line("ERROR boom\n", "a"), line("INFO up\n", "b"), line("\tat a.b(C.java:1)\n", "a"), line("Caused by: x\n", "a")
    ).records  # fmt: skip
    texts = framed(records)[0]["raw"].to_list()
    assert [json.loads(raw)["log"] for raw in texts] == [
        "ERROR boom\n\tat a.b(C.java:1)\nCaused by: x",
        "INFO up\n",
    ]
    assert json.loads(texts[0])["kubernetes"]["container_name"] == "a"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"update":{"_id":"1"}}\n{"doc":{}}\n', "line 1 of the request updates or deletes"),
        (b'{"index":{}}\n{"a":1}\n{"delete":{"_id":"1"}}\n', "line 3 of the request updates or deletes"),
        (b'{"index":{}}\n', "line 2 of the request is empty"),
        (b'{"index":{}}', "the last action of the request has no document"),
        (b'{"index":{}}\n\n{"index":{}}\n', "line 2 of the request is empty"),
        (b'{"message":"a"}\n', "line 1 of the request is no action"),
        (b"hello\n", "line 1 of the request, an action, is not readable"),
        (b'{"index":{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"index":{}}\n{}\n' * 100_001, "more than 100,000 records"),
        (b"\n" * 1_000_000, "more than 100,000 records"),
    ],
)
def test_a_request_that_is_no_pairs_of_create_or_index_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(Undecodable, match=reason):
        decode_bulk(body, Hints())


def of_bulk(read: Callable[[], Decoded]) -> object:
    """The records of a request, or the sentence that refuses it."""
    try:
        return read()
    except Undecodable as exc:
        return str(exc)


def test_many_different_actions_are_read_in_one_pass() -> None:
    body = b"".join(b'{"create":{"_index":"i%d"}}\n{"log":"up"}\n' % n for n in range(20_000))
    assert len(set(decode_bulk(body, Hints()).records.workloads or ())) == 20_000


def test_an_empty_request_has_no_records() -> None:
    assert checked(decode_bulk(b"\r\n\n", Hints())).records.height == 0


def test_a_success_is_compact_and_has_its_keys_in_the_order_that_fluent_bit_searches() -> None:
    assert bulk_success(["create", "index"], took_ms=3) == (
        b'{"took":3,"errors":false,"items":[{"create":{"status":201}},{"index":{"status":201}}]}'
    )


def test_refusals_have_the_shape_of_elasticsearch() -> None:
    full = json.loads(bulk_full("the pipeline is full"))
    assert full["status"] == 429
    assert full["error"]["type"] == "es_rejected_execution_exception"
    error = json.loads(bulk_error("parse_exception", "no", status=400))
    assert (error["status"], error["error"]["reason"]) == (400, "no")
