"""The clients of Elasticsearch and OpenSearch against the fixed answers and the answers to `_bulk`."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import elasticsearch
import elasticsearch.helpers
import opensearchpy
import opensearchpy.helpers
import pytest

from bench._fuzz_requests import checked
from pipeline.sources.protocols.answers.preamble import ELASTIC_HEADERS, preamble
from pipeline.sources.protocols.bulk import bulk_full, bulk_operations, bulk_success, decode_bulk
from pipeline.sources.protocols.contract import Hints
from pipeline.sources.protocols.tables import tables

DOCUMENTS = [
    {"_op_type": kind, "_index": "logs-2026.11.25", "@timestamp": f"2026-11-25T12:00:00.{n}Z", "message": f"café {n}"}
    for n, kind in enumerate(("create", "index", "create"))
]  # fmt: skip


class Receiver(ThreadingHTTPServer):
    """Stores what is sent, after `refusals` answers that it is full."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.texts: list[str] = []
        self.workloads: list[str] = []
        self.refusals = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        fixed = preamble(self.command, self.path)
        if fixed is not None:
            self.reply(fixed.status, fixed.body, dict(fixed.headers))
        elif self.server.refusals:
            self.server.refusals -= 1
            self.reply(429, bulk_full("full"), {**ELASTIC_HEADERS, "Content-Type": "application/json"})
        else:
            records = checked(decode_bulk(body, Hints(path=self.path))).records
            self.server.texts += records.texts
            self.server.workloads += records.workloads or []
            success = bulk_success(bulk_operations(body), took_ms=1)
            self.reply(200, success, {**ELASTIC_HEADERS, "Content-Type": "application/json"})

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815 - the names of http.server

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_client_of_elasticsearch_takes_the_receiver_for_one_and_sends_again_when_it_is_full(
    receiver: Receiver,
) -> None:
    receiver.refusals = 1
    with elasticsearch.Elasticsearch(
        receiver.url, http_compress=True, retry_on_status=[429], max_retries=3
    ) as client:
        assert client.info()["version"]["number"] == tables().elasticsearch.answers[""]["version"]["number"]
        assert client.cluster.health()["status"] == "green"
        assert elasticsearch.helpers.bulk(client, DOCUMENTS) == (3, [])
    assert len(receiver.texts) == 3
    assert "café 2" in receiver.texts[2]
    assert receiver.workloads == ["logs"] * 3


def test_the_client_of_opensearch_counts_every_document_as_stored(receiver: Receiver) -> None:
    client = opensearchpy.OpenSearch(receiver.url)
    try:
        assert client.info()["tagline"] == "You Know, for Search"
        assert opensearchpy.helpers.bulk(client, DOCUMENTS) == (3, [])
    finally:
        client.close()
    assert len(receiver.texts) == 3
