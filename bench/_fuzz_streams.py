"""Connections of syslog, RELP and forward for the fuzzer: bytes in two reads, as the servers take them in."""

import gzip
import struct
from typing import Final

import msgpack

from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.streams.forward import (
    ForwardFraming,
    forward_lines,
    forward_message,
    forward_records,
)
from pipeline.sources.protocols.streams.relp import RelpFraming
from pipeline.sources.protocols.streams.syslog import SyslogFraming, syslog_records

PEER: Final = "192.0.2.7"
_NEW: Final = b'<165>1 2026-11-20T10:00:00.003Z h1 cart 7 ID47 [a@1 b="c"] disk full'
_OLD: Final = b"<34>Nov 20 10:00:00 h1 su[7]: 'su root' failed"
SYSLOG_SEEDS: Final = (
    b"%d %s%d %s" % (len(_NEW), _NEW, len(_OLD), _OLD),
    _OLD + b"\n" + _NEW + b"\n<13>no header\0\r\n",
)
_OFFERS: Final = b"relp_version=0\nrelp_software=librelp,1.10.0\ncommands=syslog"
RELP_SEEDS: Final = (
    b"1 open %d %s\n2 syslog %d %s\n3 syslog %d %s\n4 close 0\n"
    % (len(_OFFERS), _OFFERS, len(_NEW), _NEW, len(_OLD), _OLD),
)
_TIME: Final = msgpack.ExtType(0, struct.pack(">II", 1_763_539_200, 123_456_789))
_RECORD: Final = {
    "log": "disk full",
    "stream": "stderr",
    "kubernetes": {"pod_name": "cart-1", "n": [1, None, 2.5]},
}
_PACKED: Final = msgpack.packb([_TIME, _RECORD]) + msgpack.packb([[_TIME, {"m": 1}], {"message": "up"}])
FORWARD_SEEDS: Final = (
    msgpack.packb(["app.log", 1_763_539_200, _RECORD, {"chunk": "YWJj"}]),
    msgpack.packb(["app.log", [[_TIME, _RECORD], [1_763_539_201, {"log": "\tat a.b(C.java:1)"}]]]),
    msgpack.packb(["app.log", _PACKED, {"chunk": "YWJj", "size": 2}]) + msgpack.packb(None),
    msgpack.packb(["app.log", gzip.compress(_PACKED, mtime=0), {"compressed": "gzip"}]),
)


def _reads(body: bytes) -> tuple[bytes, bytes]:
    """The border depends on the bytes alone, so that an input has one result."""
    border = sum(body[:64]) % (len(body) + 1)
    return body[:border], body[border:]


def decode_syslog(body: bytes, hints: Hints) -> Decoded:
    """A connection that ends after these bytes."""
    framing = SyslogFraming()
    messages = [message for data in _reads(body) for message in framing.feed(data)] + framing.close()
    return syslog_records([(message, PEER) for message in messages], hints)


def decode_datagram(body: bytes, hints: Hints) -> Decoded:
    """One message."""
    return syslog_records([(body, PEER)], hints)


def decode_relp(body: bytes, hints: Hints) -> Decoded:
    """The messages of a session; other commands are the server's own matter. Raises Undecodable."""
    framing = RelpFraming()
    frames = [frame for data in _reads(body) for frame in framing.feed(data)]
    return syslog_records([(frame.data, PEER) for frame in frames if frame.command == b"syslog"], hints)


def decode_forward(body: bytes, hints: Hints) -> Decoded:
    """The messages of a connection. Raises Undecodable."""
    framing = ForwardFraming()
    values = [value for data in _reads(body) for value in framing.feed(data)]
    messages = [message for value in values if (message := forward_message(value)) is not None]
    return forward_records([(message.tag, forward_lines(message)) for message in messages], hints)
