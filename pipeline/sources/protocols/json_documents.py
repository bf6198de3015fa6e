"""Lines that are JSON documents each, as records: `_bulk` and NDJSON.

The raw text is the document as it was sent, and stage ingest parses it. A line that is no JSON object is a
record all the same. Only what the receiver needs is read here: time, workload, stream.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Final

import msgspec

from pipeline.records.pushed import PushedRecords, column_of
from pipeline.sources.protocols import client_times, workloads
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.document_fields import (
    DocumentFields,
    Kubernetes,
    LogObject,
    NamedObject,
    name_of,
)
from pipeline.sources.protocols.joining import continuations, heads, joined_text
from pipeline.sources.protocols.json_text import FAULTS, json_of, read_body, read_or_none
from pipeline.sources.protocols.origins import by_documents

_FIELDS: Final = msgspec.json.Decoder(DocumentFields)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_NO_FIELDS: Final = DocumentFields()


def posted_documents(
    lines: Sequence[str], indices: Sequence[str], hints: Hints, *, places: Sequence[int] | None = None
) -> Decoded:
    """The records of these lines. `indices`: where the sender wants each, "" for nowhere. `places`: of each
    in its source."""
    try:
        documents = [_FIELDS.decode(line) for line in lines]
    except FAULTS:
        documents = [read_or_none(_FIELDS, line) or _NO_FIELDS for line in lines]
    # The commonest fields first, without a call.
    moments = [document.at_timestamp or document.moment for document in documents]
    times = [client_times.of_value(moment) for moment in moments]
    distinct = client_times.are_fine(times) and all(map(client_times.has_fraction, moments))
    if hints.workload:
        names = [workloads.joined_name(hints.workload)] * len(lines)
    else:
        names = by_documents(hints, documents, lines, indices, workloads.of_documents(documents, indices))
    texts = [
        (document.log if isinstance(document.log, str) else document.text) or None for document in documents
    ]
    found = continuations(texts, lambda i: (names[i], *_stream(documents[i])))
    raws: list[str | None] = list(lines)
    for head, others in found.items():
        raws[head] = _with_text(lines[head], documents[head].text_key, joined_text(texts, head, others))
    rows = heads(len(lines), found)
    apart: Sequence[bytes] = ()
    if hints.one_by_one and client_times.are_microseconds(map(client_times.fraction_of, moments)):
        apart = [f"{names[i]}\0{raws[i]}".encode("utf-8", "replace") for i in rows]
    return Decoded(
        records=PushedRecords(
            [None] * len(rows),
            timestamps=column_of([times[i] for i in rows]),
            raws=[raws[i] for i in rows],
            workloads=[names[i] for i in rows],
            places=None if places is None else [places[i] for i in rows],
        ),
        distinct=distinct,
        apart=apart,
    )


def _stream(document: DocumentFields) -> tuple[Hashable, ...]:
    pod, log = document.kubernetes, document.log
    places = [document.host, document.container_id, document.file, document.stream]
    if isinstance(pod, Kubernetes):
        places += [pod.pod_name, pod.pod, pod.container_name, pod.container]
    if isinstance(log, LogObject) and isinstance(log.file, NamedObject):
        places.append(log.file.path)
    return tuple(map(name_of, places))


def _with_text(line: str, key: str, text: str) -> str:
    """The document with another text of the program."""
    document: dict[str, Any] = read_body(_OBJECT, line, "a document")
    return json_of(document | {key: text})
