"""The bench of the intake sends every line once, as the decoders of the intake read it."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench._decoding import DIALECTS, decode_us_per_line, hints_of
from bench._requests import PROTOCOLS, Part, Record, lines_in
from bench._shipper import Request, Shipper
from bench._traffic import LARGEST, Timetable, heap

TRACE = "failed to read\njava.io.IOException: broken pipe\n\tat org.apache.Foo.bar(Foo.java:4711)"
RECORDS = [
    *(Record(f"10:00:0{n} INFO served request {n}", f"served request {n}", "info") for n in range(9)),
    Record(f"10:00:09 ERROR {TRACE}", TRACE, "error"),
]
AT_US = 1_790_000_000_000_000


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_intake_reads_every_line_of_a_request_under_its_workload(name: str) -> None:
    protocol = PROTOCOLS[name]
    request = protocol.plain.request([Part("cart", RECORDS, AT_US)])
    decoded = DIALECTS[protocol.dialect].decode(request.body, hints_of(protocol, request))
    assert set(decoded.records.workloads or ()) == {"bench/cart"}
    assert request.lines == (len(RECORDS) if "otlp" in name else lines_in(RECORDS))
    assert "served request 8" in decoded.records.texts[8]
    if name != "text":
        assert decoded.distinct, "the body tells a request from the next one"
        assert (decoded.records.timestamps or [])[:2] == [AT_US, AT_US + 1]
    assert decode_us_per_line(protocol, [request]) > 0


def test_only_clients_without_a_name_may_send_a_record_again_with_others() -> None:
    apart = {}
    for name, protocol in PROTOCOLS.items():
        request = protocol.plain.request([Part("cart", RECORDS, AT_US)])
        decoded = DIALECTS[protocol.dialect].decode(request.body, hints_of(protocol, request))
        apart[name] = bool(decoded.apart)
    assert {name for name, found in apart.items() if found} == {"bulk_rsyslog", "loki_winston"}


def test_requests_of_a_heap_hold_all_records_in_as_many_workloads() -> None:
    sources = {LARGEST: RECORDS * 40, "small": RECORDS * 3}
    requests = heap(PROTOCOLS["text"], sources, lines=6, workloads=5, now=AT_US / 1e6)
    assert sum(request.lines for request in requests) == lines_in(RECORDS) * 43
    assert len({request.path for request in requests}) == 5


def test_a_timetable_spreads_the_requests_of_each_workload() -> None:
    table = Timetable(workloads=4, lines=2, every_s=1.0, together=2)
    made = table.requests(PROTOCOLS["loki"], {"a": RECORDS}, begins=100.0, seconds=2.0)
    assert [request.due for request in made] == [100.0, 100.5, 101.0, 101.5]
    assert [request.lines for request in made] == [4] * 4
    decoded = DIALECTS["loki"].decode(made[1].body, hints_of(PROTOCOLS["loki"], made[1]))
    assert set(decoded.records.workloads or ()) == {"bench/app-2", "bench/app-3"}


def test_a_client_sends_a_refused_request_again_and_ends_at_a_fault() -> None:
    with answering([503, 200, 400]) as (port, bodies):
        shipper = Shipper("127.0.0.1", port, [Request("/", {}, b"a", 1), Request("/", {}, b"b", 1)])
        shipper.connection()
    assert bodies == [b"a", b"a", b"b"]
    assert shipper.statuses == {503: 1, 200: 1, 400: 1}
    assert shipper.fault.startswith("400")


@contextmanager
def answering(statuses: list[int]) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives these answers, and what it was sent."""
    bodies: list[bytes] = []
    left = iter(statuses)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(next(left))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port, bodies
        finally:
            server.shutdown()
