"""Clients of the intake, as shippers are: the same request again until it is answered as taken in.

Each tells a repetition by another identity that the intake knows (docs/intake.md): times of records in an
equal body, each record, a declared key."""

import http.client
import time
from collections.abc import Sequence
from typing import Final

from bench._requests import PROTOCOLS, Part, Record
from bench._shipper import Request
from pipeline.errors import LogweirError
from pipeline.records.delivery import Accepted

# By the name of the application that sends so.
SHIPPERS: Final = {"otlp": "otlp", "rsyslog": "bulk_rsyslog", "lines": "text"}
ANSWER_S: Final = 10.0  # an answer may be lost on the way


class Unsaid(LogweirError):
    """The request may be in or not."""


class Shipper:
    """For one thread. Goes on at the next of the ports after each connection that breaks."""

    def __init__(self, app: str, ports: Sequence[int]) -> None:
        self.workload = Part(app, (), 0).workload
        self._app, self._ports = app, ports
        self._broken = 0
        self._client: http.client.HTTPConnection | None = None
        self._request: tuple[str, Request] | None = None  # of a batch, until the next one

    def send(self, lines: Sequence[str], *, workload: str, batch_id: str) -> Accepted:
        """One try. Raises Unsaid once it may be tried again, RuntimeError for an answer to which a shipper
        gives a request up."""
        assert workload == self.workload
        if self._request is None or self._request[0] != batch_id:
            self._request = batch_id, self._made(lines, batch_id)
        request = self._request[1]
        if self._client is None:
            port = self._ports[self._broken % len(self._ports)]
            self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        try:
            self._client.request("POST", request.path, request.body, request.headers)
            answer = self._client.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            self.close()
            self._broken += 1
            raise Unsaid(repr(exc)) from exc
        if answer.status < 300:
            return Accepted(batch_id=batch_id)
        if answer.status not in (429, 503):
            raise RuntimeError(f"the intake answered {answer.status}: {text[:500]!r}")
        time.sleep(float(answer.headers["Retry-After"]))
        raise Unsaid(f"{answer.status}: {text[:500]!r}")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _made(self, lines: Sequence[str], batch_id: str) -> Request:
        records = [Record(line, line, "info") for line in lines]
        request = PROTOCOLS[SHIPPERS[self._app]].request([Part(self._app, records, time.time_ns() // 1000)])
        if self._app == "lines":  # they have no times
            request.headers["Idempotency-Key"] = batch_id
        return request
