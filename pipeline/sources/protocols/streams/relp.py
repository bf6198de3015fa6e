"""RELP: frames of rsyslog's reliable transport, and the answers to them.

A frame is `TXNR COMMAND LENGTH DATA` and LF. The specification is that of librelp
(https://www.rsyslog.com/doc/relp.html).
"""

import re
from dataclasses import dataclass
from typing import Final

from pipeline.sources.protocols.contract import Undecodable
from pipeline.sources.protocols.streams.syslog import MOST_BYTES

_HEADER: Final = re.compile(rb"([0-9]{1,9}) ([a-z]{1,32}) ([0-9]{1,9})([ \n])")
_LONGEST_HEADER: Final = 54
_VERSIONS: Final = (b"0", b"1")
OK: Final = b"200 OK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One transaction of a client. `data` ends at MOST_BYTES."""

    number: int
    command: bytes
    data: bytes


class RelpFraming:
    """Cuts the bytes of a connection into frames. `shortened` counts those that lost their end."""

    def __init__(self) -> None:
        self.shortened = 0
        self._buffer = bytearray()
        self._octets_to_skip = 0

    @property
    def size(self) -> int:
        """Bytes of the frame that has begun."""
        return len(self._buffer)

    @property
    def partial(self) -> bool:
        """The beginning of a frame has arrived, and its end has not."""
        return bool(self._buffer or self._octets_to_skip)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that end within `data`. Raises Undecodable."""
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        while (end := self._take(start, frames)) > start:
            start = end
        del self._buffer[:start]
        return frames

    def _take(self, start: int, frames: list[Frame]) -> int:
        """Where the frame at `start` ends in the buffer; `start` itself while that is open."""
        buffer = self._buffer
        if self._octets_to_skip:
            skipped = min(self._octets_to_skip, len(buffer) - start)
            self._octets_to_skip -= skipped
            return start + skipped
        header = _HEADER.match(buffer, start)
        if header is None:
            if len(buffer) - start >= _LONGEST_HEADER or b"\n" in buffer[start:]:
                raise Undecodable("a frame does not begin with `TXNR COMMAND LENGTH`; send RELP here")
            return start
        octets = int(header[3])
        if header[4] == b"\n":
            if octets:
                raise Undecodable(f"a frame announces {octets} bytes and has none")
            begin = end = header.end() - 1
        else:
            begin = header.end()
            end = begin + min(octets, MOST_BYTES)
        if octets > MOST_BYTES:
            # Its data and the LF behind it are not gathered.
            if len(buffer) < end:
                return start
            self.shortened += 1
            self._octets_to_skip = octets - MOST_BYTES + 1
            after = end
        elif len(buffer) <= end:
            return start
        elif buffer[end : end + 1] != b"\n":
            raise Undecodable("a frame does not end where its length says")
        else:
            after = end + 1
        frames.append(Frame(number=int(header[1]), command=header[2], data=bytes(buffer[begin:end])))
        return after


def response(number: int, text: bytes = OK) -> bytes:
    """The response to a transaction."""
    return b"%d rsp %d %s\n" % (number, len(text), text) if text else b"%d rsp 0\n" % number


def open_response(offers: bytes) -> bytes:
    """The response to the offers of `open`. Raises Undecodable for a client that offers no syslog."""
    offered = dict(line.partition(b"=")[::2] for line in offers.splitlines())
    if offered.get(b"relp_version") not in _VERSIONS:
        raise Undecodable("the client speaks another version of RELP; versions 0 and 1 are known")
    if b"syslog" not in offered.get(b"commands", b"").split(b","):
        raise Undecodable("the client does not offer the command syslog")
    return b"\n".join((OK, b"relp_version=0", b"relp_software=logweir", b"commands=syslog"))
