"""Messages that are accepted together, and the batches made of them.

A window holds the messages that the server took in the same quarter of a second, up to a bound. Once a later
message has ended it, it depends on the stream only: read again, the same messages give the same batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final

from pipeline.nats.streams import StreamMessage
from pipeline.nats.subjects import family
from pipeline.records.batch import Batch, Purpose, digest
from pipeline.records.payload import content_of
from pipeline.records.pushed import PushedRecords
from pipeline.settings import Settings
from pipeline.sources.nats.values import NatsMessage, read_messages
from pipeline.workers.intake.batches import parted_records

SLOT_NANOS: Final = 250_000_000
# A window that nothing follows ends so long after its first message came. Its slot has passed then.
OPEN_S: Final = SLOT_NANOS / 1e9 + 0.05
MESSAGE_BYTES: Final = 300  # of an object for a message, beside its data
SOURCE: Final = "nats"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWindow:
    """The input of one accept. `lines` are those of the batches."""

    batches: Sequence[Batch]
    dead: dict[str, str]  # why batches cannot be read, by id
    backfill: bool
    empty: int
    unreadable: int
    lines: int


def message_bytes(message: StreamMessage) -> int:
    return len(message.data) + MESSAGE_BYTES


def window_length(messages: Sequence[StreamMessage], settings: Settings) -> int:
    """The number of messages of the first window: those of the slot of the first message, up to the bound."""
    s, size = settings.internal, 0
    slot = messages[0].nanos // SLOT_NANOS
    for count, message in enumerate(messages):
        is_above = count >= s.batch_records or size + len(message.data) > s.batch_kib * 1024
        if count and (is_above or message.nanos // SLOT_NANOS != slot):
            return count
        size += message_bytes(message)
    return len(messages)


def prepare_window(
    messages: Sequence[StreamMessage],
    place: str,
    settings: Settings,
    *,
    arrived: datetime,
    alone: Callable[[str], bool],
    is_past: Callable[[object], bool],
) -> PreparedWindow:
    """The batches of all messages. Their ids derive from their contents. `place` names the stream in ids."""
    batches: list[Batch] = []
    dead: dict[str, str] = {}
    empty = unreadable = 0
    latest: list[object] = []
    s = settings.internal
    by_subject = sorted(messages, key=lambda message: family(message.subject))
    for subject, some in groupby(by_subject, key=lambda message: family(message.subject)):
        source_key = digest(SOURCE, place, subject)
        # An own stream may hold other subjects too; their messages are no logs.
        if not subject:
            continue
        found = [NatsMessage(one.sequence, one.data, one.nanos // 1000) for one in some]
        read = read_messages(subject, found)
        make = partial(_batch, subject, source_key, arrived=arrived, zone=settings.intake.time_zone)
        empty += read.empty
        if read.records is not None:
            latest.append(read.records.latest)
            parts = parted_records(read.records, s.batch_records, s.batch_kib * 4096, alone)
            batches += [make(*part) for part in parts]
        if read.unreadable is not None:
            unreadable += read.unreadable.height
            (workload,) = set(read.unreadable.workloads or ())
            one = make(workload, read.unreadable)
            numbers = read.unreadable.places or []
            more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            dead[one.batch_id] = f"{subject} message {numbers[0]}{more}: {read.why}"
            batches.append(one)
    return PreparedWindow(
        batches=batches,
        dead=dead,
        backfill=bool(latest) and all(map(is_past, latest)),
        empty=empty,
        unreadable=unreadable,
        lines=sum(map(attrgetter("physical_lines"), batches)),
    )


def _batch(
    subject: str, source_key: str, workload: str, records: PushedRecords, *, arrived: datetime, zone: str
) -> Batch:
    content = content_of(workload, records)
    return Batch(
        batch_id=f"{source_key}-{content}",
        workload=workload,
        source=f"{SOURCE}:{subject}",
        source_key=source_key,
        purpose=Purpose.SCORE,
        arrived=arrived,
        formats=(),
        zone=zone,
        records=records,
        content=content,
    )
