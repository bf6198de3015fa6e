"""Lines by POST without a protocol around them: NDJSON, an array of JSON objects, or plain text."""

from typing import Final

import msgspec

from pipeline.records.pushed import PushedRecords
from pipeline.sources.protocols import workloads
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.document_fields import DocumentFields
from pipeline.sources.protocols.json_documents import posted_documents
from pipeline.sources.protocols.json_text import check_count, read_body
from pipeline.sources.protocols.origins import PLAIN, by_rules

_NOUN: Final = "the JSON array of the request"
_OBJECTS: Final = msgspec.json.Decoder(list[DocumentFields])
_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_OBJECT: Final = msgspec.json.Decoder(DocumentFields)


def decode_posted(body: bytes, hints: Hints) -> Decoded:
    """By the content type and the first character: curl calls everything a form."""
    start = body[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if start == b"[" and "json" in hints.content_type:
        return decode_array(body, hints)
    if start == b"{" or "json" in hints.content_type:
        return decode_ndjson(body, hints)
    return decode_text(body, hints)


def decode_ndjson(body: bytes, hints: Hints) -> Decoded:
    """A JSON document a line, or one document over many lines. Other lines are records all the same."""
    lines = posted_lines(body)
    if len(lines) > 1 and lines[0].strip() == "{" and _is_one_object(body):
        lines = [body.decode("utf-8", "replace").strip()]
    return posted_documents(lines, [""] * len(lines), hints)


def decode_array(body: bytes, hints: Hints) -> Decoded:
    """An array of objects, each a record as it was sent."""
    check_count(len(read_body(_OBJECTS, body, _NOUN)))  # in front of the texts: refuses what is no object
    texts = [bytes(raw).decode("utf-8", "replace") for raw in read_body(_RAWS, body, _NOUN)]
    return posted_documents(texts, [""] * len(texts), hints)


def decode_text(body: bytes, hints: Hints) -> Decoded:
    """Plain lines, which stage ingest parses. All lines of a request are one stream."""
    service = hints.query.get("service", "")
    name = by_rules(hints, PLAIN, hints.query, workloads.joined_name(hints.workload or service))
    return line_records(posted_lines(body), name)


def line_records(lines: list[str], workload: str, *, host: str = "") -> Decoded:
    """Lines of one stream and one workload."""
    count = len(lines)
    records = PushedRecords(
        [None] * count,
        hosts=[host] * count if host else None,
        raws=list(lines),
        workloads=[workloads.joined_name(workload)] * count,
        streams=[0] * count,
    )
    return Decoded(records=records, distinct=False)


def posted_lines(body: bytes) -> list[str]:
    """The lines that are not blank."""
    check_count(body.count(b"\n") // 4)  # most lines may be blank, but not all of 20 MiB
    lines = body.decode("utf-8", "replace").removeprefix("\ufeff").split("\n")
    found = [line.rstrip("\r") for line in lines if line and not line.isspace()]
    check_count(len(found))
    return found


def _is_one_object(body: bytes) -> bool:
    try:
        read_body(_OBJECT, body, "the request")
    except Undecodable:
        return False
    return True
