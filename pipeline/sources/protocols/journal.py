"""The export format of the systemd journal, in which `systemd-journal-upload` sends.

A blank line separates two entries. A field is a line `NAME=text`, or a line `NAME`, the length of its data in
8 bytes (little endian), the data, and a newline. The raw text of a record is its message, or JSON of the
message and of the fields that the program set itself. The fields that the journal adds stay out.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from pipeline.records.levels import SYSLOG_LEVELS
from pipeline.records.pushed import PushedRecords, column_of
from pipeline.sources.protocols import client_times, workloads
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.json_text import check_count, json_of
from pipeline.sources.protocols.line_streams import streams_of
from pipeline.sources.protocols.origins import JOURNAL, by_rules

_LENGTH: Final = 8
_LONGEST_FIELD: Final = 65_536  # bytes of a field in the raw text; a core dump is one field
# Priorities of syslog, 0 to 7.
_DIGITS: Final = frozenset(str(number).encode() for number in range(len(SYSLOG_LEVELS)))
_TIMES: Final = (b"_SOURCE_REALTIME_TIMESTAMP", b"__REALTIME_TIMESTAMP")
# Docker names a container in a field of its own; its SYSLOG_IDENTIFIER is new with every container.
_PROGRAMS: Final = (b"CONTAINER_NAME", b"SYSLOG_IDENTIFIER", b"_COMM", b"_SYSTEMD_UNIT")
_STREAM: Final = (b"_HOSTNAME", b"_PID", b"CONTAINER_ID", b"SYSLOG_IDENTIFIER")
# The journal's own fields, and fields that other columns hold or that name a place in a program.
_LEFT_OUT: Final = (b"_", b"MESSAGE", b"PRIORITY", b"SYSLOG_", b"CODE_", b"CONTAINER_", b"TID")
_MOST_FIELDS: Final = 10_000  # of an entry
_BLANK: Final = re.compile(rb"\n+")

Fields = Mapping[bytes, bytes]


def decode_journal(body: bytes, hints: Hints) -> Decoded:
    """The entries of a body of `application/vnd.fdo.journal`."""
    entries = _entries(body)
    times = [_time(entry) for entry in entries]
    distinct = client_times.are_fine(times)
    texts = [_text(entry.get(b"MESSAGE")) for entry in entries]
    raws = list(map(_raw, entries, texts))
    programs = [_first(entry, _PROGRAMS) for entry in entries]
    hosts = [_text(entry.get(b"_HOSTNAME")) for entry in entries]
    if hints.workload:
        names = [workloads.joined_name(hints.workload)] * len(entries)
    else:
        names = [workloads.of_program(host, program) for host, program in zip(hosts, programs, strict=True)]
    if hints.rules:
        facts = ({_text(name): value for name, value in entry.items()} for entry in entries)
        names = [by_rules(hints, JOURNAL, one, name) for one, name in zip(facts, names, strict=True)]
    records = PushedRecords(
        [text or raw or "" for text, raw in zip(texts, raws, strict=True)],
        timestamps=column_of(times),
        levels=column_of(list(map(_level, entries))),
        hosts=column_of([host or None for host in hosts]),
        processes=column_of([_text(entry.get(b"_PID")) or None for entry in entries]),
        services=column_of([program or None for program in programs]),
        raws=column_of(raws),
        workloads=names,
        streams=streams_of(
            [text or None for text in texts],
            lambda: (tuple(entry.get(name) for name in _STREAM) for entry in entries),
        ),
    )
    # After a failure the next upload begins at the same entry, and has those that came meanwhile.
    cursors = [entry.get(b"__CURSOR", b"") for entry in entries]
    apart = [b"%b\0%b" % (cursor, text.encode()) for cursor, text in zip(cursors, texts, strict=True)]
    return Decoded(records=records, distinct=distinct, apart=apart if all(cursors) else ())


def whole_entries(body: bytes, most: int) -> int:
    """The length of the entries at the beginning of an unfinished body that are there as a whole, of at most
    so many. Raises Undecodable for data that cannot become an entry."""
    at = whole = found = 0
    while at < len(body) and found < most:
        if (blank := _BLANK.match(body, at)) is not None:
            at = blank.end()
            continue
        end = body.find(b"\n\n", at)
        text = body[at : len(body) if end < 0 else end]
        if all(b"=" in line for line in text.split(b"\n")):
            if end < 0:
                break
            at = end + 1
        else:
            try:
                _, at = _entry_with_data(body, at, found + 1)
            except _Unfinished:
                break
            if body[at - 1 : at + 1] != b"\n\n":
                break
        found += 1
        at = whole = at + 1
    return whole


class _Unfinished(Undecodable):
    """A field that is longer than the body."""


def _entries(body: bytes) -> list[Fields]:
    entries: list[Fields] = []
    at = 0
    while at < len(body):
        if (blank := _BLANK.match(body, at)) is not None:
            at = blank.end()
            continue
        check_count(len(entries) + 1)
        end = body.find(b"\n\n", at)
        end = len(body) if end < 0 else end
        if body.count(b"\n", at, end) > _MOST_FIELDS:
            raise Undecodable(
                f"entry {len(entries) + 1} of the journal has more than {_MOST_FIELDS:,} lines; send it apart"
            )
        try:
            # Text cannot have a newline. Data can, and its first line is a name without "=".
            entries.append(dict([line.split(b"=", 1) for line in body[at:end].rstrip(b"\n").split(b"\n")]))
            at = end
        except ValueError:
            entry, at = _entry_with_data(body, at, len(entries) + 1)
            entries.append(entry)
    return entries


def _entry_with_data(body: bytes, at: int, number: int) -> tuple[Fields, int]:
    """The entry that begins at an offset, and where it ends."""
    entry: dict[bytes, bytes] = {}
    while at < len(body):
        end = body.find(b"\n", at)
        end = len(body) if end < 0 else end
        name, is_text, text = body[at:end].partition(b"=")
        if not name and not is_text:
            break
        if is_text:
            entry[name], at = text, end + 1
            continue
        start = end + 1 + _LENGTH
        stop = start + int.from_bytes(body[end + 1 : start], "little")
        short = start > len(body) or stop > len(body)
        if short or body[stop : stop + 1] not in (b"\n", b""):
            shown = name[:40].decode("utf-8", "replace")
            raise (_Unfinished if short else Undecodable)(
                f"entry {number} of the journal has a field {shown!r} whose length does not fit; "
                "send the export format of journalctl"
            )
        entry[name], at = body[start:stop], stop + 1
    return entry, at


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _first(entry: Fields, names: Iterable[bytes]) -> str:
    return _text(next((entry[name] for name in names if entry.get(name)), None))


def _time(entry: Fields) -> int | None:
    for name in _TIMES:
        if (time := client_times.of_microseconds(entry.get(name, b""))) is not None:
            return time
    return None


def _level(entry: Fields) -> str | None:
    priority = entry.get(b"PRIORITY", b"")
    return SYSLOG_LEVELS[int(priority)] if priority in _DIGITS else None


def _raw(entry: Fields, message: str) -> str | None:
    fields = {
        _text(name): _text(value[:_LONGEST_FIELD])
        for name, value in entry.items()
        if not name.startswith(_LEFT_OUT)
    }
    return json_of({"MESSAGE": message, **fields}) if fields else None
