"""Shippers that cannot be installed here: their requests, written by hand in the shapes that their sources
and documentation give, in the order in which they come.

Each conversation is held twice with a running intake. The second one repeats the first, as after a lost
answer, and stores nothing more.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import cramjam
import pytest
from intake_process import Answer, Intake

from pipeline.sources.protocols.loki_messages import PushRequest

pytestmark = pytest.mark.long  # starts processes

NAME = "{name}"  # stands for the workload of the test
Check = Callable[[Answer], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`right`: what the shipper looks at in the answer."""

    method: str
    path: str
    right: Check
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


def status(*wanted: int) -> Check:
    return lambda answer: answer.status in wanted


def elastic(answer: Answer) -> bool:
    """The checks of Elastic's clients before the first document."""
    return answer.headers["x-elastic-product"] == "Elasticsearch" and bool(answer.json["version"]["number"])


def packed(text: str) -> bytes:
    return gzip.compress(text.encode())


def documents(action: str, *found: Mapping[str, object]) -> str:
    return "".join(f"{action}\n{json.dumps(one)}\n" for one in found)


def flat_success(answer: Answer) -> bool:
    """Fluent Bit searches a long answer for this text."""
    return answer.status == 200 and b'"errors":false,"items":[' in answer.body


POD = {
    "namespace_name": "shop",
    "pod_name": "cart-7f9c5d8b6-x2x8k",
    "container_name": "c",
    "labels": {"app": NAME},
}

FLUENT_BIT_ES = [
    Request(
        method="POST",
        path="/_bulk",
        headers={"User-Agent": "Fluent-Bit", "Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"},
        body=packed(
            documents(
                '{"create":{"_index":"fluent-bit"}}',
                *(
                    {"@timestamp": f"2026-11-25T12:00:00.{n}23Z", "stream": "stderr", "logtag": "F",
                     "log": f"order {n}\n", "kubernetes": POD}
                    for n in range(3)
                ),
            )
        ),
        right=flat_success,
    )
]  # fmt: skip
FLUENT_BIT_LOKI = [
    Request(
        method="POST",
        path="/loki/api/v1/push",
        headers={"User-Agent": "Fluent-Bit", "Content-Type": "application/json"},
        body=json.dumps(
            {"streams": [{"stream": {"job": NAME},
                          "values": [[f"179516880012345678{n}", f"order {n}"] for n in range(3)]}]}
        ).encode(),
        right=status(200, 204),
    )
]  # fmt: skip
FLUENT_BIT_SPLUNK = [
    Request(
        method="POST",
        path="/services/collector/event",
        headers={
            "User-Agent": "Fluent-Bit",
            "Content-Type": "application/json",
            "Authorization": "Splunk any",
        },
        body="".join(
            json.dumps({"time": 1_795_168_800.123 + n, "event": {"log": f"order {n}"}, "sourcetype": NAME})
            for n in range(3)
        ).encode(),
        right=lambda answer: answer.status == 200 and answer.json["code"] == 0,
    )
]
VECTOR_ES = [
    Request(method="GET", path="/es/", right=elastic),
    Request(method="GET", path="/es/_cluster/health", right=status(200)),
    Request(
        method="POST",
        path="/es/_bulk?timeout=60s",
        headers={"User-Agent": "Vector/0.50.0", "Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"},
        body=packed(
            documents(
                '{"create":{"_index":"vector"}}',
                *(
                    {"@timestamp": f"2026-11-25T12:00:00.{n}23456789Z", "message": f"order {n}", "source_type": "file",
                     "file": "/var/log/app.log", "host": "web-1", "service": NAME}
                    for n in range(3)
                ),
            )
        ),
        right=lambda answer: answer.status == 200 and b'"errors":true' not in answer.body,
    ),
]  # fmt: skip


def vector_push() -> bytes:
    request = PushRequest()
    stream = request.streams.add(labels=f'{{service_name="{NAME}"}}'.encode())
    for n in range(3):
        entry = stream.entries.add(line=f"order {n}".encode())
        entry.timestamp.seconds, entry.timestamp.nanos = 1_795_168_800, 123_456_789 + n
    return bytes(request.SerializeToString())


VECTOR_LOKI = [
    Request(method="GET", path="/ready", right=status(200)),
    Request(
        method="POST",
        path="/loki/api/v1/push",
        headers={
            "User-Agent": "Vector/0.50.0",
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "snappy",
        },
        body=vector_push(),
        right=status(204),
    ),
]
LOGSTASH = [
    Request(method="HEAD", path="/", right=status(200)),
    Request(method="GET", path="/", right=elastic),
    Request(method="GET", path="/_license", right=lambda answer: answer.json["license"]["status"] == "active"),
    Request(method="HEAD", path="/_index_template/ecs-logstash", right=status(200)),
    Request(
        method="POST",
        path="/_bulk?filter_path=errors,items.*.error,items.*.status",
        headers={"User-Agent": "logstash/9.2.0 (OS=Linux) logstash-output-elasticsearch/12.0.0",
                 "Content-Type": "application/json", "Content-Encoding": "gzip"},
        body=packed(
            documents(
                '{"index":{"_id":null,"_index":"logstash","routing":null}}',
                *(
                    {"@version": "1", "@timestamp": f"2026-11-25T12:00:00.{n}23456Z", "message": f"order {n}",
                     "event": {"original": f"order {n}"}, "service": {"name": NAME}}
                    for n in range(3)
                ),
            )
        ),
        right=lambda answer: len(answer.json["items"]) == 3 and all(
            one["index"]["status"] == 201 for one in answer.json["items"]
        ),
    ),
]  # fmt: skip
FILEBEAT = [
    Request(method="GET", path="/", right=elastic),
    Request(method="GET", path="/_license?human=false", right=status(200)),
    Request(method="GET", path="/_ilm/policy/filebeat", right=status(200)),
    Request(method="GET", path="/_index_template/filebeat-9.2.0", right=status(200)),
    Request(
        method="POST",
        path="/_bulk",
        headers={"User-Agent": "Elastic-filebeat/9.2.0 (linux; amd64)", "X-Elastic-Product-Origin": "beats",
                 "Content-Type": "application/vnd.elasticsearch+json; compatible-with=8", "Content-Encoding": "gzip"},
        body=packed(
            documents(
                '{"create":{"_index":"filebeat-9.2.0"}}',
                *(
                    {"@timestamp": f"2026-11-25T12:00:00.{n}23Z", "message": f"order {n}", "ecs": {"version": "8.0.0"},
                     "log": {"offset": n, "file": {"path": "/var/log/app.log", "inode": "7"}}, "host": {"name": "web-1"},
                     "agent": {"type": "filebeat", "version": "9.2.0"}, "service": {"name": NAME}}
                    for n in range(3)
                ),
            )
        ),
        right=lambda answer: not answer.json["errors"] and len(answer.json["items"]) == 3,
    ),
]  # fmt: skip
CONVERSATIONS: Mapping[str, tuple[Sequence[Request], str]] = {
    "fluent-bit to es": (FLUENT_BIT_ES, f"shop/{NAME}"),
    "fluent-bit to loki": (FLUENT_BIT_LOKI, NAME),
    "fluent-bit to splunk": (FLUENT_BIT_SPLUNK, NAME),
    "vector to elasticsearch": (VECTOR_ES, NAME),
    "vector to loki": (VECTOR_LOKI, NAME),
    "logstash": (LOGSTASH, NAME),
    "filebeat": (FILEBEAT, NAME),
}


def named(request: Request, name: str) -> bytes | None:
    """The body for this workload, of the same length, packed as its headers say."""
    if request.body is None:
        return None
    encoding = request.headers.get("Content-Encoding")
    body = gzip.decompress(request.body) if encoding == "gzip" else request.body
    body = body.replace(NAME.encode(), name.encode())
    if encoding == "snappy":
        return bytes(cramjam.snappy.compress_raw(body))
    return gzip.compress(body) if encoding == "gzip" else body


@pytest.mark.parametrize("shipper", CONVERSATIONS)
def test_the_conversation_of_a_shipper_is_right_for_it_and_its_repetition_stores_nothing_more(
    intake: Intake, workload: str, shipper: str
) -> None:
    requests, template = CONVERSATIONS[shipper]
    name = workload[: len(NAME)]  # protobuf counts its bytes
    assert len(name) == len(NAME)
    for _ in range(2):
        for request in requests:
            answer = intake.ask(
                request.path, named(request, name), method=request.method, **dict(request.headers)
            )
            assert request.right(answer), (request.path, answer)
        assert intake.accepted(template.replace(NAME, name)) == 3
