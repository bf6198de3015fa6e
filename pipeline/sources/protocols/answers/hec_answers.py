"""The answers of Splunk's HTTP Event Collector, each with its code."""

from typing import Any, Final

import msgspec

from pipeline.sources.protocols.json_text import json_of, read_body
from pipeline.sources.protocols.tables import tables

SUCCESS, BUSY, HEALTHY = 0, 9, 17


class _Acks(msgspec.Struct):
    acks: list[int]


_ACKS: Final = msgspec.json.Decoder(_Acks)


def hec_answer(code: int, *, ack_id: int | None = None, event: int | None = None) -> tuple[int, bytes]:
    """Status and body. `ack_id`: of a request with a channel; `event`: the number of the event at fault."""
    status, text = tables().splunk[str(code)]
    body: dict[str, Any] = {"text": text, "code": code}
    if event is not None:
        body["invalid-event-number"] = event
    if ack_id is not None:
        body["ackId"] = ack_id
    return status, json_of(body).encode()


def hec_acks(body: bytes) -> bytes:
    """The answer to `/services/collector/ack`: a request that was accepted is stored, so every id is true.

    Raises Undecodable."""
    request = read_body(_ACKS, body, "the request for acknowledgements").acks
    return json_of({"acks": {str(ack_id): True for ack_id in request}}).encode()
