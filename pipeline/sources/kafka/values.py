"""Values of Kafka's records as records of logs.

A value is one record: a JSON document as Filebeat, Vector or Fluent Bit write it, or text. Other formats
hold several (`format` of the source). Documents tell their workload by the rules of `_bulk`. Headers tell it
by the same rules for all others, and the topic where no header does. The texts of one key are the lines of
one stream, in which stage ingest joins stack traces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec

from pipeline.logs import logger
from pipeline.records.pushed import LATEST, PushedRecords, column_of, joined_records, stream_numbers
from pipeline.settings.kafka import KafkaSource
from pipeline.sources.protocols import otlp_json, workloads
from pipeline.sources.protocols.contract import Decoder, Hints, Undecodable
from pipeline.sources.protocols.document_fields import DocumentFields
from pipeline.sources.protocols.json_documents import posted_documents
from pipeline.sources.protocols.json_text import shown_bytes
from pipeline.sources.protocols.lines import decode_posted

# The place of a record in its partition is the offset where a value is one record. Where it holds several, it
# is the offset times MANY, and the number of the record in the value.
MANY: Final = 100_000
_JSON: Final = Hints(content_type="application/json")


class KafkaRecord(NamedTuple):
    """A record of a partition. `millis`: its time in ms since 1970, 0 for none."""

    offset: int
    value: bytes | None
    key: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    millis: int


@dataclass(slots=True, kw_only=True)
class Read:
    """The contents of records. `unreadable` goes to the dead letters; `why` is of its first record."""

    records: PushedRecords | None
    unreadable: PushedRecords | None = None
    why: str = ""
    tombstones: int = 0  # records without a value, or with blanks alone


@dataclass(slots=True)
class _Columns:
    parts: list[PushedRecords] = field(default_factory=list)
    unreadable: list[KafkaRecord] = field(default_factory=list)
    why: str = ""


def read_values(source: KafkaSource, topic: str, records: Sequence[KafkaRecord]) -> Read:
    """The records of one partition, in their order. No value stops the others: one that a decoder fails on is
    unreadable, as one that it refuses."""
    decode = None if source.format == "record" else _decoder(source.format)
    return _read(source, topic, records, decode)


def _read(source: KafkaSource, topic: str, records: Sequence[KafkaRecord], decode: Decoder | None) -> Read:
    try:
        return _decoded(source, topic, records, decode)
    except MemoryError:
        raise
    except Exception as exc:  # noqa: BLE001 - logged below, with the one value that it is about
        if len(records) == 1:
            logger(topic=topic, offset=records[0].offset).exception("kafka.decoder_failed")
            return Read(
                records=None,
                unreadable=_as_text(topic, records),
                why=f"a decoder failed ({type(exc).__name__}: {exc})",
            )
    half = len(records) // 2
    first, second = (_read(source, topic, some, decode) for some in (records[:half], records[half:]))
    unreadable = [part.unreadable for part in (first, second) if part.unreadable is not None]
    return Read(
        records=_in_order([part.records for part in (first, second) if part.records is not None]),
        unreadable=joined_records(unreadable) if unreadable else None,
        why=first.why or second.why,
        tombstones=first.tombstones + second.tombstones,
    )


def _decoded(source: KafkaSource, topic: str, records: Sequence[KafkaRecord], decode: Decoder | None) -> Read:
    filled = [record for record in records if record.value and not record.value.isspace()]
    found = _Columns()
    if decode is None:
        _whole_values(source, topic, filled, found)
    else:
        for record in filled:
            _several(source, topic, record, decode, found)
    joined = _in_order(found.parts)
    if joined is not None:
        for column in (joined.texts, joined.hosts, joined.processes, joined.services, joined.workloads):
            "".join(text or "" for text in column or ()).encode()  # a lone surrogate is no text
    return Read(
        records=joined,
        unreadable=_as_text(topic, found.unreadable) if found.unreadable else None,
        why=found.why,
        tombstones=len(records) - len(filled),
    )


def _decoder(name: str) -> Decoder:
    if name == "lines":
        return decode_posted
    if name == "otlp-json":
        return otlp_json.decode_json
    from pipeline.sources.protocols import otlp  # protobuf is of the extra, and only this format needs it

    return otlp.decode_protobuf


# ---- one record a value --------------------------------------------------------------------------


def _whole_values(source: KafkaSource, topic: str, records: Sequence[KafkaRecord], found: _Columns) -> None:
    documents: list[tuple[KafkaRecord, str]] = []
    texts: list[tuple[KafkaRecord, str]] = []
    for record in records:
        value = record.value or b""
        if b"\0" in value:
            found.unreadable.append(record)
            found.why = found.why or "the value is binary and no text; name its format in kafka_source"
            continue
        text = value.decode("utf-8", "replace").removeprefix("\ufeff").rstrip("\r\n")
        if text.lstrip()[:1] == "{" and text.rstrip()[-1:] == "}":
            documents.append((record, _one_line(text)))
        else:
            texts.append((record, text))
    if documents:
        found.parts.append(_documents(source, topic, documents))
    if texts:
        found.parts.append(_texts(source, topic, texts))


def _one_line(document: str) -> str:
    if "\n" not in document:
        return document
    try:
        return msgspec.json.format(document, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return document


def _documents(source: KafkaSource, topic: str, pairs: Sequence[tuple[KafkaRecord, str]]) -> PushedRecords:
    records = [record for record, _ in pairs]
    names = _names(source, topic, records)
    decoded = posted_documents(
        [text for _, text in pairs],
        ["" if source.workload else name for name in names],
        _JSON,
        places=[record.offset for record in records],
    )
    return _completed(source, decoded.records, records, names)


def _texts(source: KafkaSource, topic: str, pairs: Sequence[tuple[KafkaRecord, str]]) -> PushedRecords:
    records, texts = [record for record, _ in pairs], [text for _, text in pairs]
    names = _names(source, topic, records)
    columns = PushedRecords(
        [None] * len(texts),
        raws=list(texts),
        workloads=names,
        places=[record.offset for record in records],
        streams=stream_numbers((name, record.key) for name, record in zip(names, records, strict=True)),
    )
    return _completed(source, columns, records, names)


def _completed(
    source: KafkaSource, columns: PushedRecords, records: Sequence[KafkaRecord], names: Sequence[str]
) -> PushedRecords:
    """With the time of Kafka's record where the text may have none, and with the workload of the setting."""
    places = columns.places or []
    times = {record.offset: _micros(record) for record in records}
    stamps = columns.timestamps or [None] * columns.height
    untimed = [times[place] if stamp is None else None for place, stamp in zip(places, stamps, strict=True)]
    chosen = columns.workloads
    if source.workload:
        by_offset = {record.offset: name for record, name in zip(records, names, strict=True)}
        chosen = [by_offset[place] for place in places]
    return msgspec.structs.replace(columns, untimed=column_of(untimed), workloads=chosen)


# ---- several records a value ---------------------------------------------------------------------


def _several(
    source: KafkaSource,
    topic: str,
    record: KafkaRecord,
    decode: Decoder,
    found: _Columns,
) -> None:
    (name,) = _names(source, topic, [record])
    plain = source.format == "lines"
    try:
        records = decode(record.value or b"", Hints(workload=name if source.workload else "")).records
    except Undecodable as exc:
        found.unreadable.append(record)
        found.why = found.why or str(exc)
        return
    if not records.height:
        return
    time = _micros(record)
    stamps = records.timestamps or [None] * records.height
    late = [time if stamp is None else None for stamp in stamps]
    # OTLP has a field for the time. Text may have a time in itself.
    if plain:
        records = msgspec.structs.replace(records, untimed=column_of(late))
    else:
        times = [stamp or other for stamp, other in zip(stamps, late, strict=True)]
        records = msgspec.structs.replace(records, timestamps=column_of(times))
    names = records.workloads or [name] * records.height
    nameless = (workloads.UNKNOWN, workloads.UNKNOWN_SERVICE)
    found.parts.append(
        msgspec.structs.replace(
            records,
            workloads=[name if one in nameless else one for one in names],
            places=[record.offset * MANY + number for number in range(records.height)],
        )
    )


# ---- workloads, order, dead letters --------------------------------------------------------------


def _names(source: KafkaSource, topic: str, records: Sequence[KafkaRecord]) -> list[str]:
    """The workload of each record: that of the setting, of its headers, of the topic."""
    if source.workload and not source.fields:
        return [workloads.joined_name(source.workload)] * len(records)
    fallback = partial(_chosen, source, topic) if source.workload else partial(_of_headers, topic)
    return [fallback(record) for record in records]


def _chosen(source: KafkaSource, topic: str, record: KafkaRecord) -> str:
    values = {"topic": topic, "key": _text(record.key)}
    values |= {f"header.{name}": _text(value) for name, value in record.headers or ()}
    parts = (part for part in source.workload_of(values).split("/") if part)
    return workloads.joined_name(*parts)


def _of_headers(topic: str, record: KafkaRecord) -> str:
    if not record.headers:
        return workloads.of_index(topic)
    values = {name: _text(value) for name, value in record.headers}
    resource = workloads.of_resource(values)
    if resource != workloads.UNKNOWN_SERVICE:
        return resource
    return workloads.of_document(_fields(values), topic)


def _fields(values: Mapping[str, str]) -> DocumentFields:
    """Headers as the fields of a document; without those that say more than where a line is from."""
    beside: dict[str, Any] = {name: value for name, value in values.items() if name not in ("message", "log")}
    return msgspec.convert(beside, DocumentFields)


def _micros(record: KafkaRecord) -> int | None:
    micros = record.millis * 1000
    return micros if 0 < micros <= LATEST else None


def _text(value: bytes | str | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def _in_order(parts: Sequence[PushedRecords]) -> PushedRecords | None:
    """The records of all parts by their places."""
    filled = [part for part in parts if part.height]
    if len(filled) < 2:
        return filled[0] if filled else None
    joined = joined_records(filled)
    places = joined.places or []
    if all(first < second for first, second in pairwise(places)):
        return joined
    return joined.take(sorted(range(joined.height), key=places.__getitem__), named=True)


def _as_text(topic: str, records: Sequence[KafkaRecord]) -> PushedRecords:
    """Values that cannot be read, as base64 where they are no text."""
    return PushedRecords(
        [shown_bytes(record.value or b"") for record in records],
        untimed=column_of([_micros(record) for record in records]),
        workloads=[workloads.of_index(topic)] * len(records),
        places=[record.offset for record in records],
    )
