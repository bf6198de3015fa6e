"""Opni's protobuf messages `Payload` and `PayloadList`, and a payload as a JSON document.

The numbers and types of the fields are those of rancher/opni, log_anomaly_payload.proto. A document has the
names of the fields, without those that are empty. Unknown fields are dropped, as Opni's services do.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from pipeline.errors import BadInput

TEXTS: Final = {
    "_id": 1,
    "cluster_id": 2,
    "log": 3,
    "masked_log": 4,
    "anomaly_level": 5,
    "log_type": 6,
    "template_matched": 7,
    "inference_model": 9,
    "pod_name": 11,
    "namespace_name": 12,
    "deployment": 13,
    "service": 14,
}
TEMPLATE_ID: Final = "template_cluster_id"
CONFIDENCE: Final = "opnilog_confidence"
# The member by which stage ingest knows a line in a wrapper.
WRAPPED: Final = '{"stream":"stdout",'
_ENCODER: Final = msgspec.json.Encoder()
NORMAL, ANOMALY = "Normal", "Anomaly"


class Payload(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A payload as the raw text of a record holds it."""

    id: str = msgspec.field(name="_id", default="")
    cluster_id: str = ""
    log: str = ""
    masked_log: str = ""
    anomaly_level: str = ""
    log_type: str = ""
    template_matched: str = ""
    template_cluster_id: int = 0
    inference_model: str = ""
    opnilog_confidence: float = 0.0
    pod_name: str = ""
    namespace_name: str = ""
    deployment: str = ""
    service: str = ""

    @property
    def place(self) -> tuple[str, ...]:
        """Cluster, namespace and deployment, without those that are empty."""
        return tuple(part for part in (self.cluster_id, self.namespace_name, self.deployment) if part)


def _messages() -> tuple[Any, Any]:
    """The classes of both messages. Not made by protoc, so that no made file has to be kept."""
    file = descriptor_pb2.FileDescriptorProto(
        name="logweir/log_anomaly_payload.proto", package="logweir.log_anomaly_payload", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto
    payload = file.message_type.add(name="Payload")
    kinds = {name: (number, field.TYPE_STRING) for name, number in TEXTS.items()}
    kinds |= {TEMPLATE_ID: (8, field.TYPE_INT64), CONFIDENCE: (10, field.TYPE_FLOAT)}
    for name, (number, kind) in kinds.items():
        payload.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    several = file.message_type.add(name="PayloadList")
    several.field.add(
        name="items",
        number=1,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_REPEATED,
        type_name=".logweir.log_anomaly_payload.Payload",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("Payload", "PayloadList")
    found = [pool.FindMessageTypeByName(f"logweir.log_anomaly_payload.{name}") for name in names]
    return message_factory.GetMessageClass(found[0]), message_factory.GetMessageClass(found[1])


_PAYLOAD, _LIST = _messages()
_WIRE_OF: Final = {"id": "_id"}
_FIELDS: Final = tuple((name, _WIRE_OF.get(name, name)) for name in Payload.__struct_fields__)


def read_payload(data: bytes) -> Payload:
    """Raises BadInput."""
    try:
        return _document(_PAYLOAD.FromString(data))
    except DecodeError as exc:
        raise BadInput(f"the message is no protobuf Payload ({exc})") from exc


def read_payloads(data: bytes) -> list[Payload]:
    """The items of a PayloadList. Raises BadInput."""
    try:
        return [_document(item) for item in _LIST.FromString(data).items]
    except DecodeError as exc:
        raise BadInput(f"the message is no protobuf PayloadList ({exc})") from exc


def _document(payload: Any) -> Payload:
    # Most fields are empty, and asking for those that are set costs less than asking for all.
    return Payload(**{_NAME_OF[field.name]: value for field, value in payload.ListFields()})


_NAME_OF: Final = {wire: name for name, wire in _FIELDS}


def wrapped_json(payload: Payload) -> str:
    """The raw text of a record: the payload in the form in which collectors wrap a line."""
    return WRAPPED + _ENCODER.encode(payload).decode()[1:]


def payload_bytes(document: Payload) -> bytes:
    """A `Payload` on the wire."""
    return bytes(_message(document).SerializeToString())


def payload_lists(documents: Iterable[Payload], most_bytes: int) -> list[tuple[list[Payload], bytes]]:
    """The documents as `PayloadList`s of at most so many bytes each; one item alone may be larger."""
    found: list[tuple[list[Payload], bytes]] = []
    some: list[Payload] = []
    parts: list[bytes] = []
    size = 0
    for document in documents:
        item = payload_bytes(document)
        framed = b"\x0a" + _varint(len(item)) + item  # field 1, length-delimited
        if some and size + len(framed) > most_bytes:
            found.append((some, b"".join(parts)))
            some, parts, size = [], [], 0
        some.append(document)
        parts.append(framed)
        size += len(framed)
    if some:
        found.append((some, b"".join(parts)))
    return found


def _message(document: Payload) -> Any:
    values: Mapping[str, Any] = {wire: value for name, wire in _FIELDS if (value := getattr(document, name))}
    return _PAYLOAD(**values)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
