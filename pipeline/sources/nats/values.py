"""Messages of Opni's services as records of logs.

The raw text of a record is its payload as a JSON document, in the form in which collectors wrap a line:
stage ingest parses the line inside, and an answer to Opni finds the other fields there. Stage ingest joins
the lines of a pod; the answer to a joined record is one to each of its payloads. The place of a record is the
sequence of its message, or the sequence times MANY and the number of its item.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pipeline.errors import BadInput
from pipeline.nats.payloads import Payload, read_payload, read_payloads, wrapped_json
from pipeline.nats.subjects import FLOWS
from pipeline.records.pushed import LATEST, PushedRecords, column_of
from pipeline.sources.protocols import workloads
from pipeline.sources.protocols.json_text import shown_bytes
from pipeline.sources.protocols.line_streams import streams_of

MANY: Final = 100_000  # items of a message
NOWHERE: Final = "opni"  # the workload of a payload that names none


class NatsMessage(NamedTuple):
    """A message of a log subject. `micros`: when the server took it, since 1970."""

    number: int
    data: bytes
    micros: int


@dataclass(slots=True, kw_only=True)
class ReadMessages:
    """The contents of messages. `unreadable` go to the dead letters; `why` is of the first one."""

    records: PushedRecords | None
    unreadable: PushedRecords | None = None
    why: str = ""
    empty: int = 0  # payloads without a text


@dataclass(slots=True)
class _Columns:
    raws: list[str | None] = field(default_factory=list)
    hosts: list[str | None] = field(default_factory=list)
    workloads: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    times: list[int | None] = field(default_factory=list)
    names: dict[tuple[str, ...], str] = field(default_factory=dict)
    lines: list[str | None] = field(default_factory=list)
    streams: list[tuple[str, ...]] = field(default_factory=list)


def read_messages(subject: str, messages: Sequence[NatsMessage]) -> ReadMessages:
    """The records of messages of one log subject, in their order. No message stops the others."""
    is_list = FLOWS[subject].is_list
    columns, unreadable, why, empty = _Columns(), [], "", 0
    for message in messages:
        try:
            documents = _documents(message, is_list=is_list)
        except BadInput as exc:
            unreadable.append(message)
            why = why or str(exc)
            continue
        for number, document in enumerate(documents):
            if not document.log or document.log.isspace():
                empty += 1
                continue
            place = message.number * MANY + number if is_list else message.number
            _add(columns, document, place, message.micros)
    streams = streams_of(columns.lines, lambda: columns.streams)
    records = PushedRecords(
        [None] * len(columns.raws),
        hosts=column_of(columns.hosts),
        raws=columns.raws,
        workloads=columns.workloads,
        places=columns.places,
        untimed=column_of(columns.times),
        streams=streams,
        lines_inside=None if streams is None else columns.lines,
    )
    return ReadMessages(
        records=records if columns.raws else None,
        unreadable=_as_text(unreadable) if unreadable else None,
        why=why,
        empty=empty,
    )


def _documents(message: NatsMessage, *, is_list: bool) -> list[Payload]:
    if not is_list:
        return [read_payload(message.data)]
    documents = read_payloads(message.data)
    if len(documents) > MANY:
        raise BadInput(f"the message holds {len(documents):,} payloads; send at most {MANY:,} in one")
    return documents


def _add(columns: _Columns, document: Payload, place: int, micros: int) -> None:
    where = document.place
    name = columns.names.get(where)
    if name is None:
        name = columns.names[where] = workloads.joined_name(*where) if where else NOWHERE
    columns.raws.append(wrapped_json(document))
    columns.hosts.append(document.pod_name or None)
    columns.workloads.append(name)
    columns.places.append(place)
    columns.times.append(micros if 0 < micros <= LATEST else None)
    columns.lines.append(document.log)
    columns.streams.append((*where, document.service, document.pod_name))


def _as_text(messages: Sequence[NatsMessage]) -> PushedRecords:
    """Messages that cannot be read, as base64 where they are no text."""
    return PushedRecords(
        [shown_bytes(message.data) for message in messages],
        untimed=column_of([message.micros if 0 < message.micros <= LATEST else None for message in messages]),
        workloads=[NOWHERE] * len(messages),
        places=[message.number for message in messages],
    )
