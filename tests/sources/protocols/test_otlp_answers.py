"""The bodies that answer an OTLP request."""

import json

import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

from pipeline.sources.protocols.answers.otlp_answers import (
    JSON,
    PROTOBUF,
    otlp_encoding,
    otlp_refusal,
    otlp_success,
)


def test_a_success_says_nothing_because_every_record_is_taken() -> None:
    assert otlp_success(PROTOBUF) == b""
    assert otlp_success(JSON) == b"{}"
    assert not ExportLogsServiceResponse.FromString(b"").HasField("partial_success")


def test_a_refusal_is_a_status_in_the_encoding_of_the_request() -> None:
    status = Status.FromString(otlp_refusal(PROTOBUF, code=3, message="no"))
    assert (status.code, status.message) == (3, "no")
    assert json.loads(otlp_refusal(JSON, code=3, message="no")) == {"code": 3, "message": "no"}


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [("application/json; charset=utf-8", JSON), ("application/x-protobuf", PROTOBUF), ("application/protobuf", PROTOBUF),
     ("text/plain", ""), ("", "")],
)  # fmt: skip
def test_the_encoding_is_that_of_the_content_type(content_type: str, encoding: str) -> None:
    assert otlp_encoding(content_type) == encoding
