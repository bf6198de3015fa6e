"""JSON of requests, read with typed decoders and written in its compact form.

A text with half a surrogate pair or with bytes that are not UTF-8 is read with U+FFFD in their place.
Every other fault of a body is one Undecodable.
"""

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from pipeline.sources.protocols.contract import Undecodable

T = TypeVar("T")
MAX_RECORDS: Final = 100_000  # in one request
# Empty objects take three bytes of a body, and a hundred in memory. Honest requests have one in 19 bytes at
# most (an attribute of OTLP), so 20 MiB of them have fewer.
_MAX_OBJECTS: Final = 2_000_000
# msgspec raises these for text that is not JSON of its type, and for too deep nesting.
FAULTS: Final = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
_ENCODER: Final = msgspec.json.Encoder()
# An escape of half a surrogate pair, or of a whole one, behind an even number of backslashes.
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURROGATE: Final = re.compile(rf"(?<!\\)((?:\\\\)*+)(?:({_HIGH}{_LOW})|{_HIGH}|{_LOW})")


def read_body(decoder: msgspec.json.Decoder[T], body: bytes | str, noun: str) -> T:
    """The body by its decoder. Raises Undecodable, which calls the body `noun`."""
    if len(body) > _MAX_OBJECTS and isinstance(body, bytes):
        _check_objects(body, noun)
    try:
        return decoder.decode(body)
    except RecursionError as exc:
        raise Undecodable(f"{noun} is nested too deeply; send fewer levels") from exc
    except FAULTS as exc:
        mended = mend(body)
        if isinstance(exc, msgspec.ValidationError) or mended is None:
            raise Undecodable(f"{noun} is not readable: {exc}") from exc
    try:
        return decoder.decode(mended)
    except FAULTS as exc:
        raise Undecodable(f"{noun} is not readable: {exc}") from exc


def read_or_none(decoder: msgspec.json.Decoder[T], text: str) -> T | None:
    """As `read_body`; None for a text that is anything else."""
    try:
        return decoder.decode(text)
    except FAULTS:
        mended = mend(text)
    try:
        return None if mended is None else decoder.decode(mended)
    except FAULTS:
        return None


def mend(body: bytes | str) -> str | None:
    """JSON without half pairs, bad UTF-8 and byte order mark; None where there is nothing to mend."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    mended = text.removeprefix("\ufeff")
    if "\\ud" in mended or "\\uD" in mended:
        mended = _SURROGATE.sub(lambda found: found[1] + (found[2] or r"\ufffd"), mended)
    if mended != text:
        return mended
    return mended if isinstance(body, bytes) and "\ufffd" in mended else None


def json_of(value: Any) -> str:
    """A value as JSON without blanks."""
    try:
        return _ENCODER.encode(value).decode()
    except OverflowError:  # an integer of more than 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def text_form(value: object) -> str:
    """A value of JSON as text, "" for null."""
    if isinstance(value, str):
        return value
    return "" if value is None else json_of(value)


def envelope(line: str, fields: Mapping[str, Any], micros: int | None) -> str:
    """A line and the fields that stand beside it, in the form in which Fluent Bit writes both.

    Stage ingest parses the line inside, and session keys are found in the fields."""
    document: dict[str, Any] = {}
    if micros is not None:
        document["date"] = micros / 1e6
    elif fields.get("stream") not in ("stdout", "stderr"):  # either one tells stage ingest the form
        document["stream"] = "stdout"
    document["log"] = line
    if document.keys().isdisjoint(fields):
        return json_of(document | dict(fields))
    renamed = {f"metadata.{key}" if key in document else key: value for key, value in fields.items()}
    return json_of(document | renamed)


def check_count(records: int) -> None:
    """Raises Undecodable for more records than a request may have."""
    if records > MAX_RECORDS:
        raise Undecodable(f"the request has more than {MAX_RECORDS:,} records; send them in smaller requests")


def _check_objects(body: bytes, noun: str) -> None:
    if body.count(b"{") + body.count(b"[") > _MAX_OBJECTS:
        raise Undecodable(f"{noun} has more than {_MAX_OBJECTS:,} objects; send smaller requests")


def shown_bytes(value: bytes) -> str:
    """The text, or base64 where the bytes are no text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    return base64.b64encode(value).decode() if "\0" in text else text


def at_path(document: Any, path: str) -> object:
    """The value at a path of keys that are joined by dots. Keys may hold dots themselves."""
    if not isinstance(document, dict):
        return None
    if (value := document.get(path)) is not None:
        return value
    dot = path.find(".")
    while dot > 0:
        found = at_path(document.get(path[:dot]), path[dot + 1 :])
        if found is not None:
            return found
        dot = path.find(".", dot + 1)
    return None
