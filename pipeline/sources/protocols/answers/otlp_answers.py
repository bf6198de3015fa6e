"""The bodies that answer an OTLP request, in the encoding of the request."""

from google.rpc.status_pb2 import Status

from pipeline.sources.protocols.json_text import json_of

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


def otlp_success(content_type: str) -> bytes:
    """The body of a success, in the encoding `content_type`: every record is taken."""
    return b"{}" if content_type == JSON else b""


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
