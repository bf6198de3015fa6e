"""The answers of each protocol, in the words of its clients.

A shipper decides by the answer whether to repeat, to drop or to stop, and no two do so alike. The table in
docs/intake.md lists the answers; the requests themselves are read by sources/protocols/.
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.sources.protocols import bulk, hec, journal, lines, loki, otlp, otlp_json
from pipeline.sources.protocols.answers import hec_answers, otlp_answers, preamble
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.workers.intake.refusals import AGAIN, RETRY_AFTER_S, STATUS, Refusal, RequestRefused

JSON: Final = "application/json"
PLAIN: Final = "text/plain; charset=utf-8"
LOGIN: Final = {"WWW-Authenticate": 'Basic realm="logweir"'}
RETRY: Final = {"Retry-After": str(RETRY_AFTER_S)}
# OTLP names a refusal by a code of gRPC.
_GRPC: Final = {
    Refusal.FULL: 14, Refusal.AWAY: 14, Refusal.FAILED: 14, Refusal.UNDECODABLE: 3, Refusal.TOO_LARGE: 8,
    Refusal.ENCODING: 3, Refusal.SLOW: 4, Refusal.KEY_MISSING: 16, Refusal.KEY_WRONG: 16,
    Refusal.FORBIDDEN: 7, Refusal.CONFLICT: 6,
}  # fmt: skip
_ELASTIC: Final = {
    Refusal.TOO_LARGE: "content_too_long_exception",
    Refusal.KEY_MISSING: "security_exception",
    Refusal.KEY_WRONG: "security_exception",
    Refusal.FORBIDDEN: "security_exception",
    Refusal.CONFLICT: "version_conflict_engine_exception",
}
_HEC: Final = {
    Refusal.FULL: 9, Refusal.AWAY: 9, Refusal.FAILED: 9, Refusal.KEY_MISSING: 2, Refusal.KEY_WRONG: 4,
    Refusal.FORBIDDEN: 4, Refusal.UNDECODABLE: 6,
}  # fmt: skip


# Refusals that an operator ends.
_MENDED: Final = (Refusal.KEY_MISSING, Refusal.KEY_WRONG, Refusal.FORBIDDEN)


class PreparedResponse(Response):
    """An answer that many requests get."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wire = wire_form(self)


class CutResponse(Response):
    """A head that announces a body, and the end of the connection before it."""

    def __init__(self, status_code: int) -> None:
        super().__init__(status_code=status_code)
        self.raw_headers = [(b"content-length", b"1"), (b"connection", b"close")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


def wire_form(response: Response) -> bytes:
    """The headers, the empty line and the body, as HTTP/1.1 has them."""
    lines = [b"%b: %b\r\n" % header for header in response.raw_headers]
    return b"".join((*lines, b"\r\n", response.body))


class Dialect(ABC):
    """One protocol over HTTP."""

    protocol: ClassVar[str]

    @abstractmethod
    def decode(self, body: bytes, hints: Hints) -> Decoded:
        """Raises Undecodable."""

    @abstractmethod
    def stored(self, body: bytes, hints: Hints, decoded: Decoded, /) -> Response:
        """The answer to a request that is in, now or before."""

    @abstractmethod
    def refused(self, hints: Hints, refused: RequestRefused, /) -> Response:
        """The answer to any other."""


_OTLP_STORED: Final = {
    encoding: PreparedResponse(otlp_answers.otlp_success(encoding), media_type=encoding)
    for encoding in (otlp_answers.PROTOBUF, JSON)
}


class OtlpDialect(Dialect):
    """OTLP over HTTP, in protobuf or JSON; the answer has the encoding of the request."""

    protocol = "otlp"

    def decode(self, body: bytes, hints: Hints) -> Decoded:
        encoding = otlp_answers.otlp_encoding(hints.content_type)
        if not encoding:
            raise RequestRefused(
                Refusal.ENCODING,
                f"Content-Type {hints.content_type[:60]!r} is not OTLP's; "
                f"use {otlp_answers.PROTOBUF} or {JSON}",
            )
        return (otlp_json.decode_json if encoding == JSON else otlp.decode_protobuf)(body, hints)

    def stored(self, _body: bytes, hints: Hints, _decoded: Decoded, /) -> Response:
        return _OTLP_STORED[_otlp_encoding(hints)]

    def refused(self, hints: Hints, refused: RequestRefused, /) -> Response:
        encoding = _otlp_encoding(hints)
        text = otlp_answers.otlp_refusal(encoding, code=_GRPC[refused.kind], message=str(refused))
        return Response(text, STATUS[refused.kind], _headers(refused), media_type=encoding)


class BulkDialect(Dialect):
    """`_bulk` of Elasticsearch and OpenSearch: one answer for the whole request."""

    protocol = "bulk"

    def decode(self, body: bytes, hints: Hints) -> Decoded:
        return bulk.decode_bulk(body, replace(hints, one_by_one=_is_nameless(hints)))

    def stored(self, body: bytes, _hints: Hints, _decoded: Decoded, /) -> Response:
        answer = bulk.bulk_success(bulk.bulk_operations(body), took_ms=1)
        return Response(answer, headers=dict(preamble.ELASTIC_HEADERS), media_type=JSON)

    def refused(self, hints: Hints, refused: RequestRefused, /) -> Response:
        headers = {**_headers(refused), **preamble.ELASTIC_HEADERS}
        if _is_nameless(hints) and refused.kind in (*AGAIN, *_MENDED):
            # rsyslog before April 2026 takes every answer for the end of its batch, and only repeats it
            # after a broken connection.
            return CutResponse(status_code=429 if refused.kind in AGAIN else STATUS[refused.kind])
        if refused.kind in AGAIN and refused.body and _is_javascript(hints):
            text = bulk.bulk_items_full(bulk.bulk_operations(refused.body), str(refused))
            return Response(text, headers=dict(preamble.ELASTIC_HEADERS), media_type=JSON)
        if refused.kind in AGAIN:
            return Response(bulk.bulk_full(str(refused)), 429, headers, media_type=JSON)
        kind, status = _ELASTIC.get(refused.kind, "illegal_argument_exception"), STATUS[refused.kind]
        return Response(bulk.bulk_error(kind, str(refused), status=status), status, headers, media_type=JSON)


_LOKI_STORED: Final = PreparedResponse(status_code=204)


class LokiDialect(Dialect):
    """Loki's push: 204 and nothing else is a success to some of its clients."""

    protocol = "loki"

    def decode(self, body: bytes, hints: Hints) -> Decoded:
        # winston-loki sends what failed together with newer entries.
        return loki.decode_push(body, replace(hints, one_by_one=_is_nameless(hints)))

    def stored(self, _body: bytes, _hints: Hints, _decoded: Decoded, /) -> Response:
        return _LOKI_STORED

    def refused(self, _hints: Hints, refused: RequestRefused, /) -> Response:
        status = 429 if refused.kind in AGAIN else STATUS[refused.kind]
        return Response(f"{refused}\n", status, _headers(refused), media_type=PLAIN)


class HecDialect(Dialect):
    """Splunk's HTTP Event Collector. With a channel, the answer has an id that is true at once."""

    protocol = "hec"

    def __init__(self) -> None:
        self._acks = itertools.count()

    def decode(self, body: bytes, hints: Hints) -> Decoded:
        raw = "/raw" in hints.path
        return (hec.decode_raw if raw else hec.decode_events)(body, hints)

    def stored(self, _body: bytes, hints: Hints, _decoded: Decoded, /) -> Response:
        channel = hints.headers.get("x-splunk-request-channel") or hints.query.get("channel")
        _, text = hec_answers.hec_answer(hec_answers.SUCCESS, ack_id=next(self._acks) if channel else None)
        return Response(text, media_type=JSON)

    def refused(self, _hints: Hints, refused: RequestRefused, /) -> Response:
        cause = refused.__cause__
        if isinstance(cause, hec.HecRefused):
            status, text = hec_answers.hec_answer(cause.code, event=cause.event)
            return Response(text, status, media_type=JSON)
        if (code := _HEC.get(refused.kind)) is None:
            return json_answer({"text": str(refused), "code": 6}, STATUS[refused.kind], _headers(refused))
        status, text = hec_answers.hec_answer(code)
        return Response(text, status, _headers(refused), media_type=JSON)


class LinesDialect(Dialect):
    """Lines without a protocol around them: plain text or JSON."""

    protocol = "lines"

    def decode(self, body: bytes, hints: Hints) -> Decoded:
        return lines.decode_posted(body, hints)

    def stored(self, _body: bytes, _hints: Hints, decoded: Decoded, /) -> Response:
        return json_answer({"records": decoded.records.height, "rejected": 0})  # every record is taken

    def refused(self, _hints: Hints, refused: RequestRefused, /) -> Response:
        return json_answer({"error": str(refused)}, STATUS[refused.kind], _headers(refused))


class JournalDialect(Dialect):
    """`systemd-journal-upload`, answered as `systemd-journal-remote` does."""

    protocol = "journal"

    def decode(self, body: bytes, hints: Hints) -> Decoded:
        return journal.decode_journal(body, hints)

    def stored(self, _body: bytes, _hints: Hints, _decoded: Decoded, /) -> Response:
        return Response("OK.\n", 202, media_type=PLAIN)

    def refused(self, _hints: Hints, refused: RequestRefused, /) -> Response:
        return Response(f"{refused}\n", STATUS[refused.kind], _headers(refused), media_type=PLAIN)


def _is_nameless(hints: Hints) -> bool:
    """Without a User-Agent. Of all senders of `_bulk` that is rsyslog alone, which sends each document apart
    after a failure; of those of Loki's push it is winston-loki."""
    return "user-agent" not in hints.headers


def _is_javascript(hints: Hints) -> bool:
    """A client of Elastic or OpenSearch for Node. Its `bulk` helper gives a request up that is answered with
    429, and sends documents again that are refused with 429 each."""
    return hints.headers.get("user-agent", "").startswith(("elasticsearch-js/", "opensearch-js/"))


def json_answer(
    facts: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Compact JSON with a line end, for people with curl."""
    text = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
    return Response(f"{text}\n", status, headers, media_type=JSON)


def _otlp_encoding(hints: Hints) -> str:
    return otlp_answers.otlp_encoding(hints.content_type) or otlp_answers.PROTOBUF


def _headers(refused: RequestRefused) -> dict[str, str]:
    match refused.kind:
        case kind if kind in AGAIN:
            return dict(RETRY)
        case Refusal.KEY_MISSING | Refusal.KEY_WRONG:
            return dict(LOGIN)
        case Refusal.SLOW:
            return {"Connection": "close"}
        case _:
            return {}
