"""Syslog: a TCP stream cut into messages, and messages as records.

The raw text of a record is its message as it was sent, with its priority; stage ingest parses it as a line of
a file. The framings of RFC 6587 may alternate within a connection, because relays mix them. A message that
begins with a count, a space and `<` is octet-counted, and any other ends at LF or NUL. Without the `<` of a
priority, a number may be the beginning of a line, such as a year.
"""

import re
from collections.abc import Iterable
from typing import Final

from pipeline.records.pushed import PushedRecords
from pipeline.sources.protocols import client_times
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.line_streams import streams_of
from pipeline.sources.protocols.origins import PLAIN, by_rules
from pipeline.sources.protocols.workloads import of_program

# RFC 5424 asks for 2 KiB; a record of a file holds as much.
MOST_BYTES: Final = 64 * 1024
_COUNT: Final = re.compile(rb"([1-9][0-9]{0,6}) <")
_COUNT_SO_FAR: Final = re.compile(rb"[1-9][0-9]{0,6} ?")
_LONGEST_COUNT: Final = 9  # characters of _COUNT
_ENDS: Final = b"\r\n\0"

_FRACTION: Final = r"(?:[.,](?P<fraction>[0-9]+))?"
_ISO: Final = rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}T[0-9:]{{8}}{_FRACTION}(?:Z|[+-][0-9]{{2}}:?[0-9]{{2}})"
_TAG: Final = r"(?:(?P<app>[^ :\[]{1,128})(?:\[(?P<process>[^\] ]{0,32})\]:?|:)(?: |$))?"
_DATA: Final = r"(?:-|(?:\[(?:[^\]\\]|\\.)*+\])++)"  # structured data
_NEW: Final = re.compile(
    rf"<[0-9]{{1,3}}>[0-9]{{1,2}} (?:-|{_ISO}) (?P<host>[^ ]+) (?P<app>[^ ]+) "
    rf"(?:(?P<process>[^ ]+) [^ ]+ {_DATA}(?: \ufeff?|$))?"
)
_OLD: Final = re.compile(
    r"(?:<[0-9]{1,3}>)?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}[0-9]{1,2} (?:[0-9]{4} )?"
    rf"[0-9:]{{7,8}}{_FRACTION}(?: [0-9]{{4}})? (?P<host>[^ :]+) (?:: )?{_TAG}"
)
# Without a priority, the word behind the time is as a rule a level.
_OLD_ISO: Final = re.compile(rf"<[0-9]{{1,3}}>{_ISO} (?P<host>[^ :]+) {_TAG}")


class SyslogFraming:
    """Cuts the bytes of a connection into messages. However they arrive, the messages are the same.

    A message beyond MOST_BYTES loses its end; `shortened` counts these until it is reset."""

    def __init__(self) -> None:
        self.shortened = 0
        self._buffer = bytearray()
        self._octets_to_skip = 0
        self._skips_line = False

    @property
    def size(self) -> int:
        """Bytes of the message that has begun."""
        return len(self._buffer)

    @property
    def partial(self) -> bool:
        """The beginning of a message has arrived, and its end has not."""
        return bool(self._buffer or self._octets_to_skip or self._skips_line)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that end within `data`."""
        self._buffer += data
        messages: list[bytes] = []
        start = 0
        while (end := self._take(start, messages)) > start:
            start = end
        del self._buffer[:start]
        return [message for message in messages if message]

    def close(self) -> list[bytes]:
        """The connection has ended: the last message may have no end, and is worth its beginning."""
        remainder = bytes(self._buffer)
        self._buffer.clear()
        if self._skips_line or self._octets_to_skip:
            return []
        if counted := _COUNT.match(remainder):
            self.shortened += 1
            remainder = remainder[counted.end() - 1 :]
        message = remainder[:MOST_BYTES].rstrip(_ENDS)
        return [message] if message else []

    def _take(self, start: int, messages: list[bytes]) -> int:
        """Where the message at `start` ends in the buffer; `start` itself while that is open."""
        buffer = self._buffer
        if self._octets_to_skip:
            skipped = min(self._octets_to_skip, len(buffer) - start)
            self._octets_to_skip -= skipped
            return start + skipped
        if self._skips_line:
            if (end := _line_end(buffer, start)) < 0:
                return len(buffer)
            self._skips_line = False
            return end + 1
        if counted := _COUNT.match(buffer, start):
            return self._take_counted(counted.end() - 1, int(counted[1]), start, messages)
        if len(buffer) - start < _LONGEST_COUNT and _COUNT_SO_FAR.fullmatch(buffer, start):
            return start
        end = _line_end(buffer, start)
        if end < 0 and len(buffer) - start <= MOST_BYTES:
            return start
        if end < 0 or end - start > MOST_BYTES:
            self.shortened += 1
            self._skips_line = end < 0
            messages.append(bytes(buffer[start : start + MOST_BYTES]))
            return len(buffer) if end < 0 else end + 1
        messages.append(bytes(buffer[start:end]).rstrip(_ENDS))
        return end + 1

    def _take_counted(self, begin: int, octets: int, start: int, messages: list[bytes]) -> int:
        end = begin + min(octets, MOST_BYTES)
        if len(self._buffer) < end:
            return start
        if octets > MOST_BYTES:
            self.shortened += 1
            self._octets_to_skip = octets - MOST_BYTES
        messages.append(bytes(self._buffer[begin:end]).rstrip(_ENDS))
        return end


def _line_end(buffer: bytearray, start: int) -> int:
    newline = buffer.find(b"\n", start)
    nul = buffer.find(b"\0", start, newline if newline >= 0 else len(buffer))
    return nul if nul >= 0 else newline


def syslog_records(messages: Iterable[tuple[bytes, str]], hints: Hints | None = None) -> Decoded:
    """Messages, each with the address of its sender, as records.

    The workload is host and application of the header, else the address. `hints`: of the listener, because
    messages of many connections come together."""
    rules = None if hints is None or not hints.rules else hints
    raws: list[str | None] = []
    names: list[str] = []
    hosts: list[str | None] = []
    fractions: list[str | None] = []
    lines: list[str | None] = []
    origins: list[tuple[str | None, ...]] = []
    for message, peer in messages:
        raw = message.decode("utf-8", "replace")
        found = _NEW.match(raw) or _OLD_ISO.match(raw) or _OLD.match(raw)
        host, app = (found["host"], found["app"] or "-") if found else ("-", "-")
        raws.append(raw)
        program = app.rpartition("/")[2] if app.startswith("/") else app
        program = program if program != "-" else ""
        name = of_program(host if host != "-" else peer, program)
        if rules is not None:
            facts = {"host": host if host != "-" else "", "program": program}
            name = by_rules(rules, PLAIN, facts, name, peer=peer)
        names.append(name)
        hosts.append(peer if host == "-" and peer else None)  # else the header says it
        fractions.append(found["fraction"] if found else None)
        lines.append(raw[found.end() :] if found and program else None)
        origins.append((peer, host, app, found["process"] if found else None))
    streams = streams_of(lines, lambda: origins)
    return Decoded(
        records=PushedRecords(
            [None] * len(raws),
            hosts=hosts if any(hosts) else None,
            raws=raws,
            workloads=names,
            streams=streams,
            lines_inside=None if streams is None else lines,
        ),
        apart=[(raw or "").encode() for raw in raws]
        if client_times.are_microseconds(fraction or "" for fraction in fractions)
        else (),
        distinct=client_times.are_fine(list(map(client_times.of_fraction, fractions))),
    )
