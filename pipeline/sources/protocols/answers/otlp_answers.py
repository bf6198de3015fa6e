"""The bodies that answer an OTLP request, in the encoding of the request."""

from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsPartialSuccess,
    ExportLogsServiceResponse,
)

from pipeline.sources.protocols.json_text import json_of

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


def otlp_response(*, rejected: int = 0, why: str = "") -> ExportLogsServiceResponse:
    """The message of a success. `partial_success` is unset unless records were rejected."""
    if not rejected:
        return ExportLogsServiceResponse()
    partial = ExportLogsPartialSuccess(rejected_log_records=rejected, error_message=why)
    return ExportLogsServiceResponse(partial_success=partial)


def otlp_success(content_type: str, *, rejected: int = 0, why: str = "") -> bytes:
    """The body of a success, in the encoding `content_type`."""
    if content_type != JSON:
        body: bytes = otlp_response(rejected=rejected, why=why).SerializeToString()
        return body
    partial = {"rejectedLogRecords": str(rejected), "errorMessage": why}
    return json_of({"partialSuccess": partial} if rejected else {}).encode()


def otlp_refusal(content_type: str, *, code: int, message: str) -> bytes:
    """The body of every other answer: google.rpc.Status, whose code is one of gRPC."""
    if content_type == JSON:
        return json_of({"code": code, "message": message}).encode()
    body: bytes = Status(code=code, message=message).SerializeToString()
    return body


def otlp_encoding(content_type: str) -> str:
    """PROTOBUF or JSON by the content type of the request, "" for any other."""
    bare = content_type.partition(";")[0].strip()
    return bare if bare in (PROTOBUF, JSON) else PROTOBUF if bare == "application/protobuf" else ""
