"""Forward, the protocol of Fluentd and Fluent Bit: values of msgpack in a stream, and answers to them.

A record becomes a JSON document with the time of its event beside its fields, in the form in which Fluent Bit
writes both. The protocol:
https://github.com/fluent/fluentd/wiki/Forward-Protocol-Specification-v1
"""

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.inflating import inflated
from pipeline.sources.protocols.json_documents import posted_documents
from pipeline.sources.protocols.json_text import MAX_RECORDS, check_count, json_of

# Fluentd's chunk in memory has 8 MiB, and tag and options stand around it.
MOST_BYTES: Final = 8 * 1024 * 1024 + 64 * 1024
MOST_INFLATED: Final = 20 * 1024 * 1024
_DEEPEST: Final = 32  # levels of a record
# One byte of msgpack can be a list, which takes 64 in memory.
_MOST_CONTAINERS: Final = 500_000  # of a message, without the events that are packed
_MOST_EVENT_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 4_096  # with which a buffer of msgpack begins
_LOGS: Final = 0  # Fluent Bit marks metrics and traces with other signals
# What msgpack raises for bytes that are not msgpack, or beyond its limits.
_FAULTS: Final = (msgpack.UnpackException, ValueError, TypeError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMessage:
    """Events of a tag, in `packed` one after another in msgpack, perhaps compressed, else in `events`.

    A client that names its `chunk` waits for an answer."""

    tag: str
    packed: bytes
    events: Sequence[Any]
    compressed: str
    chunk: bytes

    @property
    def size(self) -> int:
        """Bytes that are packed."""
        return len(self.packed)


class ForwardFraming:
    """Cuts the bytes of a connection into values. An idle connection has no buffer."""

    def __init__(self) -> None:
        self._unpacker: Any = None  # 40 KiB, so only while a value has begun
        self._containers = 0
        self._received = 0
        self._ended = 0  # how much of `_received` is values that have ended

    @property
    def size(self) -> int:
        """Bytes of the value that has begun."""
        return self._received - self._ended

    @property
    def partial(self) -> bool:
        """The beginning of a value has arrived, and its end has not."""
        return self.size > 0

    def feed(self, data: bytes) -> list[Any]:
        """The values that end within `data`. Raises Undecodable."""
        if self._unpacker is None:
            self._unpacker = _unpacker(2 * MOST_BYTES, self._count)
            self._received = self._ended = 0
        self._received += len(data)
        values: list[Any] = []
        try:
            self._unpacker.feed(data)
            while self._ended < self._received:
                values.append(self._unpacker.unpack())
                self._ended = self._unpacker.tell()
                self._containers = 0
            self._unpacker = None
        except msgpack.OutOfData:
            if self.size > MOST_BYTES:
                raise Undecodable(
                    f"a message has more than {MOST_BYTES // 2**20} MiB; set chunk_limit_size 8m"
                ) from None
        except _FAULTS as exc:
            raise Undecodable(
                f"the stream is not msgpack within its limits ({exc}); send forward here"
            ) from exc
        return values

    def close(self) -> None:
        """The connection has ended. A value that has begun would stay until Python looks for cycles."""
        self._unpacker = None

    def _count(self, container: Any) -> Any:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise ValueError(f"a message has more than {_MOST_CONTAINERS:,} lists and maps")
        return container


def forward_message(value: Any) -> ForwardMessage | None:
    """A value of a connection as a message; None for a heartbeat. Raises Undecodable."""
    match value:
        case None:
            return None
        case [bytes(tag), list(events) | bytes(events), *options] if len(options) <= 1:
            pass
        case [bytes(tag), moment, record, *options] if len(options) <= 1:
            events = [[moment, record]]
        case _:
            raise Undecodable("a message is not [tag, events] or [tag, time, record]; send forward here")
    option = options[0] if options and isinstance(options[0], dict) else {}
    if option.get(b"fluent_signal", _LOGS) != _LOGS:
        raise Undecodable("a message holds metrics or traces; send logs alone here")
    chunk = option.get(b"chunk")
    return ForwardMessage(
        tag=_text(tag),
        packed=events if isinstance(events, bytes) else b"",
        events=events if isinstance(events, list) else (),
        compressed=_text(option.get(b"compressed") or b"text"),
        chunk=chunk if isinstance(chunk, bytes) else b"",
    )


def forward_lines(message: ForwardMessage) -> list[str]:
    """The events of a message as JSON documents. Raises Undecodable."""
    check_count(len(message.events))
    lines = [_document(event) for event in message.events]
    if message.packed:
        for event in _events(_unpacked(message)):
            lines.append(_document(event))
            check_count(len(lines))
    return lines


def forward_records(messages: Sequence[tuple[str, Sequence[str]]], hints: Hints) -> Decoded:
    """Documents by their tags as the records of one request."""
    lines = [line for _, documents in messages for line in documents]
    tags = [tag for tag, documents in messages for _ in documents]
    return posted_documents(lines, tags, hints)


def acknowledgement(chunk: bytes) -> bytes:
    """The answer to a message that is stored."""
    return _packed({"ack": chunk})


def _events(packed: bytes) -> Iterator[Any]:
    """The length of an event is looked at before it is built."""
    scanner, unpacker = _unpacker(MOST_INFLATED), _unpacker(MOST_INFLATED)
    start = 0
    try:
        scanner.feed(packed)
        unpacker.feed(packed)
        while start < len(packed):
            scanner.skip()
            if scanner.tell() - start > _MOST_EVENT_BYTES:
                raise Undecodable(
                    f"an event has more than {_MOST_EVENT_BYTES // 2**20} MiB; send it in parts"
                )
            start = scanner.tell()
            yield unpacker.unpack()
    except msgpack.OutOfData as exc:
        raise Undecodable("the last event of a message has no end") from exc
    except _FAULTS as exc:
        raise Undecodable(f"the events of a message are not msgpack within its limits ({exc})") from exc


def _unpacker(limit: int, hook: Callable[[Any], Any] | None = None) -> Any:
    # Bytes and texts are not told apart: Ruby packs a text of unknown encoding as bytes.
    return msgpack.Unpacker(
        raw=True,
        strict_map_key=False,
        read_size=_READ_BYTES,
        max_buffer_size=limit,
        max_array_len=MAX_RECORDS,
        max_map_len=10_000,
        max_ext_len=64,
        list_hook=hook,
        object_hook=hook,
    )


def _packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, use_bin_type=False)
    return data


def _unpacked(message: ForwardMessage) -> bytes:
    if message.compressed == "text":
        return message.packed
    try:  # Fluentd appends a member for each write to its chunk
        return inflated(message.packed, message.compressed, most=MOST_INFLATED)
    except Undecodable as exc:
        raise Undecodable(f"a message cannot be decompressed: {exc}") from exc


def _document(event: Any) -> str:
    """An event of any shape: one that is no pair of time and record is a text."""
    moment, record = event if isinstance(event, list) and len(event) == 2 else (None, event)
    if isinstance(moment, list) and moment:
        moment = moment[0]  # Fluent Bit's events with metadata
    fields = _plain(record, 0)
    if not isinstance(fields, dict):
        fields = {"message": fields if isinstance(fields, str) else json_of(fields)}
    time = _time(moment)
    return json_of(fields if time is None or "date" in fields else {"date": time, **fields})


def _time(moment: Any) -> float | None:
    """Seconds since 1970."""
    match moment:
        case bool():
            return None
        case int() | float():
            return moment
        case msgpack.ExtType(code=0, data=data) if len(data) == 8:
            seconds, nanos = struct.unpack(">II", data)
        case msgpack.Timestamp(seconds=seconds, nanoseconds=nanos):
            pass
        case _:
            return None
    time: float = seconds + nanos // 1000 / 1e6
    return time


def _plain(value: Any, depth: int) -> Any:
    """A value of msgpack as JSON can hold it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict | list) and depth >= _DEEPEST:
        raise Undecodable(f"a record is nested deeper than {_DEEPEST} levels; send fewer")
    if isinstance(value, dict):
        return {_text(key): _plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, depth + 1) for inner in value]
    if isinstance(value, msgpack.ExtType | msgpack.Timestamp):
        return _time(value)
    return value


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# ---- the shared key ------------------------------------------------------------------------------


def greeting(nonce: bytes) -> bytes:
    """HELO, by which a server asks for the shared key."""
    return _packed(["HELO", {"nonce": nonce, "auth": "", "keepalive": True}])


def is_trusted(ping: Any, *, nonce: bytes, shared_key: str) -> bool:
    """Whether the client that answered HELO has the shared key. Raises Undecodable for another message."""
    match ping:
        case [b"PING", bytes(name), bytes(salt), bytes(shown), _, _]:
            return hmac.compare_digest(shown, _digest(salt, name, nonce, shared_key))
    raise Undecodable("the client does not answer HELO; set the shared key of this listener there")


def welcome(ping: Any, *, name: str, nonce: bytes, shared_key: str, trusted: bool) -> bytes:
    """PONG, the answer to PING. A client that is trusted learns that this server has the key too."""
    if not trusted:
        return _packed(["PONG", False, "shared_key mismatch", "", ""])
    return _packed(["PONG", True, "", name, _digest(ping[2], name.encode(), nonce, shared_key)])


def _digest(salt: bytes, name: bytes, nonce: bytes, shared_key: str) -> bytes:
    """Of the specification: SHA-512 in hex."""
    return hashlib.sha512(salt + name + nonce + shared_key.encode()).hexdigest().encode()
