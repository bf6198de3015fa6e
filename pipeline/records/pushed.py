"""Lines or records as a sender hands them over: checked, and packed without Polars or NumPy.

A producer lives inside other people's services, so it only checks and packs. Stage ingest joins stack traces,
finds the formats and builds the columns of RAW_SCHEMA (sources/pushed.py).
"""

import itertools
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, TypeVar

import msgspec

from pipeline.errors import BadInput
from pipeline.records.levels import LEVELS

T = TypeVar("T")
FIELDS: Final = ("message", "timestamp", "level", "host", "process", "service")
TEXTS: Final = ("host", "process", "service")
_FIELD_SET: Final = frozenset(FIELDS)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# The times that a `datetime` in UTC can be, in microseconds since 1970.
EARLIEST: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
LATEST: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
MOST_STREAMS: Final = 2**32
# The member of a joined record's raw text with the id and the line of each other document in it.
JOINED: Final = "joined_documents"
# A line that begins with a blank continues the record before it, as in a stack trace.
_FLUSH_LEFT: Final = re.compile(r"^\S", re.MULTILINE)


class PushedLines(msgspec.Struct, frozen=True, array_like=True, tag="lines"):
    """Raw lines. Their records are not known yet: a stack trace becomes one record in stage ingest."""

    text: str  # physical lines, joined by "\n"

    @property
    def lines(self) -> int:
        """Physical lines."""
        return self.text.count("\n") + 1

    @property
    def height(self) -> int:
        """The most records that there may be before framing; overlong lines are cut later."""
        return self.lines

    @property
    def size(self) -> int:
        """Bytes of text. Raises UnicodeEncodeError for lone surrogates."""
        return len(self.text.encode()) - self.text.count("\n")

    @property
    def latest(self) -> datetime | None:
        """None: the times of raw lines are parsed in stage ingest."""
        return None

    def heads(self) -> int:
        """Lines that may begin a record."""
        return max(1, len(_FLUSH_LEFT.findall(self.text)))


class PushedRecords(msgspec.Struct, frozen=True, array_like=True, tag="records"):
    """Records by column. A column that no record has is None, not a list.

    A message of None is parsed from the raw text in stage ingest, as a line of a file is."""

    messages: list[str | None]
    # Microseconds since 1970, UTC.
    timestamps: list[Annotated[int, msgspec.Meta(ge=EARLIEST, le=LATEST)] | None] | None = None
    levels: list[str | None] | None = None
    hosts: list[str | None] | None = None
    processes: list[str | None] | None = None
    services: list[str | None] | None = None
    raws: list[str | None] | None = None  # None: the raw text is the message
    workloads: list[str] | None = None  # None: that of the batch
    places: list[int] | None = None  # of each in the batch that it came with; None: from 1 on
    # As `timestamps`, for records in whose text stage ingest finds no time. A record has one of the two.
    untimed: list[Annotated[int, msgspec.Meta(ge=EARLIEST, le=LATEST)] | None] | None = None
    # The number of the stream that a record is the next line of, None for a record by itself. Stage ingest
    # joins the lines of a stream as those of a file. None: no record is a line of a stream.
    streams: list[Annotated[int, msgspec.Meta(ge=0, le=MOST_STREAMS)] | None] | None = None
    lines_inside: list[str | None] | None = None  # the line of a record whose raw text holds more than it

    @property
    def texts(self) -> list[str]:
        """The raw text of each record."""
        texts = self.messages if self.raws is None else self.raws
        if None not in texts:
            return texts  # type: ignore[return-value] # nobody changes it
        if self.raws is None:
            return [message or "" for message in self.messages]
        pairs = zip(self.raws, self.messages, strict=True)
        return [(message or "") if raw is None else raw for raw, message in pairs]

    @property
    def columns(self) -> tuple[Sequence[object] | None, ...]:
        """Every column beside the messages."""
        return (
            self.timestamps,
            self.levels,
            self.hosts,
            self.processes,
            self.services,
            self.raws,
            self.workloads,
            self.places,
            self.untimed,
            self.streams,
            self.lines_inside,
        )

    def take(self, rows: Sequence[int], *, named: bool = False) -> "PushedRecords":
        """These records, in their places. `named`: with the workload of each."""

        def some(column: list[Any] | None) -> list[Any] | None:
            return None if column is None else [column[row] for row in rows]

        return PushedRecords(
            [self.messages[row] for row in rows],
            timestamps=some(self.timestamps),
            levels=some(self.levels),
            hosts=some(self.hosts),
            processes=some(self.processes),
            services=some(self.services),
            raws=some(self.raws),
            workloads=some(self.workloads) if named else None,
            places=[row + 1 for row in rows] if self.places is None else some(self.places),
            untimed=some(self.untimed),
            streams=some(self.streams),
            lines_inside=some(self.lines_inside),
        )

    def rows_by_workload(self) -> dict[str, list[int]]:
        """The rows of each workload, in their order; that of "" is the batch's."""
        found: dict[str, list[int]] = {}
        for row, workload in enumerate(self.workloads or [""] * self.height):
            found.setdefault(workload, []).append(row)
        return found

    @property
    def lines(self) -> int:
        """Physical lines."""
        return "\n".join(self.texts).count("\n") + 1

    @property
    def height(self) -> int:
        """Records."""
        return len(self.messages)

    @property
    def size(self) -> int:
        """Bytes of text. Raises UnicodeEncodeError for lone surrogates."""
        messages = self.messages if self.raws is not None else ()
        return len("".join([*self.texts, *(message or "" for message in messages)]).encode())

    @property
    def characters(self) -> int:
        """Characters of text."""
        columns = [self.messages] if self.raws is None else [self.messages, self.raws]
        return sum(sum(map(len, filter(None, column))) for column in columns)

    @property
    def latest(self) -> datetime | None:
        """The newest timestamp; None where a record has none."""
        times = [
            time for column in (self.timestamps, self.untimed) for time in column or () if time is not None
        ]
        complete = len(times) == len(self.messages)
        return _EPOCH + max(times) * _MICROSECOND if complete else None

    def heads(self) -> int:
        return self.height


Pushed = PushedLines | PushedRecords


def joined_records(parts: Sequence[PushedRecords]) -> PushedRecords:
    """The records of all parts, in this order. Where one part has places, or names workloads, all do."""
    if len(parts) == 1:
        return parts[0]
    heights = [part.height for part in parts]
    columns: dict[str, Any] = {}
    for name in PushedRecords.__struct_fields__:
        values = [getattr(part, name) for part in parts]
        if any(value is not None for value in values):
            filled = (
                [None] * n if value is None else value for value, n in zip(values, heights, strict=True)
            )
            columns[name] = list(itertools.chain.from_iterable(filled))
    if "streams" in columns:
        columns["streams"] = _apart(columns["streams"], heights)
    return PushedRecords(**columns)


def _apart(streams: Sequence[int | None], heights: Sequence[int]) -> list[int | None]:
    """The numbers of the streams of several parts: no part goes on with a stream of another one."""
    found: list[int | None] = []
    above = at = 0
    for height in heights:
        part = streams[at : at + height]
        at += height
        most = max((number for number in part if number is not None), default=-1)
        found += part if not above else [None if number is None else number + above for number in part]
        above += most + 1
    return found


def stream_numbers(keys: Iterable[Hashable]) -> list[int | None]:
    """The number of each stream by its key, in the order of their first records."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def column_of(values: list[T | None]) -> list[T | None] | None:
    """The values as a column of PushedRecords."""
    return values if any(value is not None for value in values) else None


def pushed(items: Collection[str] | Collection[Mapping[str, Any]]) -> Pushed:
    """`items` of Producer.send, not empty. Raises BadInput with the number of the item at fault."""
    if all(isinstance(item, str) for item in items):
        return PushedLines("\n".join(str(item).rstrip("\r\n") for item in items))
    if not all(isinstance(item, Mapping) for item in items):
        raise BadInput("a batch holds either lines (str) or records (mappings), not both and nothing else")
    rows = [_row(item, n) for n, item in enumerate(items, start=1) if isinstance(item, Mapping)]
    messages, *others = map(list, zip(*rows, strict=True))
    return PushedRecords(messages, *(None if set(column) == {None} else column for column in others))


def not_text(items: Collection[Any]) -> BadInput:
    """The error about the first item with a lone surrogate, which UTF-8 cannot carry."""
    number, item = next((n, item) for n, item in enumerate(items, start=1) if not _is_text(item))
    noun = "line" if isinstance(item, str) else "record"
    return BadInput(f"{noun} {number} holds a character that is not text; decode bytes with errors='replace'")


def _is_text(item: object) -> bool:
    values = item.values() if isinstance(item, Mapping) else [item]
    try:
        "".join(value for value in values if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _row(item: Mapping[str, Any], number: int) -> Sequence[Any]:
    """One record in the order of FIELDS."""
    if not item.keys() <= _FIELD_SET:
        unknown = sorted(set(map(str, item)) - _FIELD_SET)
        raise BadInput(
            f"record {number} has the unknown field {unknown[0]!r}; the fields are: {', '.join(FIELDS)}"
        )
    message, level = item.get("message"), item.get("level")
    if not isinstance(message, str):
        raise BadInput(f"record {number} has no text in 'message'")
    if level is not None and level not in LEVELS:
        raise BadInput(f"record {number} has the level {level!r}; the levels are: {', '.join(LEVELS)}")
    row = [str(message), _microseconds(item.get("timestamp"), number), level and str(level)]
    for name in TEXTS:
        value = item.get(name)
        if value is not None and not isinstance(value, str):
            raise BadInput(f"record {number} has {name} = {value!r}; it must be text")
        row.append(value if value is None else str(value))
    return row


def _microseconds(value: object, number: int) -> int | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(moment, datetime) and moment.utcoffset() is not None:
            since = (moment - _EPOCH) // _MICROSECOND
            if EARLIEST <= since <= LATEST:
                return since
    except (ValueError, OverflowError):  # no time, or none that UTC has a year for
        pass
    raise BadInput(
        f"record {number} has timestamp {value!r}; give an aware datetime or ISO 8601 with an offset, "
        "such as 2026-11-20T10:00:00Z"
    )
