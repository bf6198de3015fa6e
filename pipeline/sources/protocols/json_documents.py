"""Lines that are JSON documents each, as records: `_bulk` and NDJSON.

The raw text is the document as it was sent, and stage ingest parses it. A line that is no JSON object is a
record all the same. Only what the receiver needs is read here: time, workload, stream.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pipeline.records.pushed import PushedRecords, column_of
from pipeline.sources.protocols import client_times, workloads
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.document_fields import (
    DocumentFields,
    Kubernetes,
    LogObject,
)
from pipeline.sources.protocols.json_text import FAULTS, read_or_none
from pipeline.sources.protocols.line_streams import streams_of
from pipeline.sources.protocols.origins import by_documents

_FIELDS: Final = msgspec.json.Decoder(DocumentFields)
_NO_FIELDS: Final = DocumentFields()
_NO_POD: Final = Kubernetes()


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
    texts = [document.log if isinstance(document.log, str) else document.text for document in documents]
    streams = streams_of(texts, lambda: map(_stream, documents, names))
    apart: Sequence[bytes] = ()
    if hints.one_by_one and client_times.are_microseconds(map(client_times.fraction_of, moments)):
        apart = [
            f"{name}\0{line}".encode("utf-8", "replace") for name, line in zip(names, lines, strict=True)
        ]
    return Decoded(
        records=PushedRecords(
            [None] * len(lines),
            timestamps=column_of(times),
            raws=list(lines),
            workloads=names,
            places=None if places is None else list(places),
            streams=streams,
            lines_inside=None if streams is None else texts,
        ),
        distinct=distinct,
        apart=apart,
    )


def _stream(document: DocumentFields, name: str) -> tuple[Any, ...]:
    pod, log = document.kubernetes, document.log
    inside = pod if isinstance(pod, Kubernetes) else _NO_POD
    return (
        name,
        document.stream,
        document.file,
        document.host,
        document.container_id,
        inside.pod_name,
        inside.container_name,
        inside.pod,
        inside.container,
        log.file if isinstance(log, LogObject) else None,
    )
