"""The messages of Loki's push in protobuf (logproto.PushRequest), without generated code.

Texts are declared as bytes, which have the same form on the wire: Loki's clients send lines of files, and
protobuf refuses a whole request for one text that is not UTF-8.
"""

from collections.abc import Iterable
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE: Final = "logweir.loki"
_FIELD: Final = descriptor_pb2.FieldDescriptorProto
# Of each message: name, number and kind of its fields; a kind that is no number is a repeated message, or one
# message where it begins with "one ".
_MESSAGES: Final = {
    "Timestamp": (("seconds", 1, _FIELD.TYPE_INT64), ("nanos", 2, _FIELD.TYPE_INT32)),
    "LabelPair": (("name", 1, _FIELD.TYPE_BYTES), ("value", 2, _FIELD.TYPE_BYTES)),
    "Entry": (
        ("timestamp", 1, "one Timestamp"),
        ("line", 2, _FIELD.TYPE_BYTES),
        ("metadata", 3, "LabelPair"),
    ),
    "Stream": (("labels", 1, _FIELD.TYPE_BYTES), ("entries", 2, "Entry")),
    "PushRequest": (("streams", 1, "Stream"),),
}


def _class_of(messages: Iterable[str], name: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="logweir/loki.proto", package=_PACKAGE, syntax="proto3")
    for message in messages:
        declared = file.message_type.add(name=message)
        for field, number, kind in _MESSAGES[message]:
            one = isinstance(kind, int) or kind.startswith("one ")
            label = _FIELD.LABEL_OPTIONAL if one else _FIELD.LABEL_REPEATED
            added = declared.field.add(name=field, number=number, label=label)
            if isinstance(kind, int):
                added.type = kind
            else:
                added.type, added.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind.removeprefix('one ')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


PushRequest: Final = _class_of(_MESSAGES, "PushRequest")
