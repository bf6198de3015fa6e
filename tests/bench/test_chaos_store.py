"""The faults of the store in a chaos run: a proxy that answers instead of the server, and a folder that is
not mounted."""

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench._chaos.http_proxy import FULL, HttpProxy
from bench._chaos.stores import OnDisk

BODY = b"x" * 300_000


class Objects(BaseHTTPRequestHandler):
    """A server of objects in memory that keeps its connections."""

    protocol_version = "HTTP/1.1"
    held: dict[str, bytes]

    def do_PUT(self) -> None:
        self.held[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._say(b"")

    def do_GET(self) -> None:
        self._say(self.held.get(self.path, b""))

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def objects() -> Iterator[tuple[HttpProxy, dict[str, bytes]]]:
    """The proxy, and what the server behind it holds."""
    held: dict[str, bytes] = {}
    handler = type("Held", (Objects,), {"held": held})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with HttpProxy(server.server_address[1]) as proxy:
            yield proxy, held
        server.shutdown()


class Client:
    """Keeps one connection, and opens another when it was closed."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self.connection.request(method, path, body)
        answer = self.connection.getresponse()
        return answer.status, answer.read()


def test_requests_and_answers_pass_unchanged_on_one_connection(
    objects: tuple[HttpProxy, dict[str, bytes]],
) -> None:
    proxy, held = objects
    client = Client(proxy.port)
    for path in ("/a", "/b"):
        assert client.ask("PUT", path, BODY) == (200, b"")
        assert client.ask("GET", path) == (200, BODY)
    assert held == {"/a": BODY, "/b": BODY}
    client.connection.close()


def test_while_it_answers_with_an_error_no_request_reaches_the_server(
    objects: tuple[HttpProxy, dict[str, bytes]],
) -> None:
    proxy, held = objects
    client = Client(proxy.port)
    assert client.ask("PUT", "/a", b"one")[0] == 200
    proxy.answer(503)
    assert client.ask("PUT", "/a", BODY)[0] == 503
    assert client.ask("GET", "/a")[0] == 503
    proxy.answer(0)
    assert client.ask("GET", "/a") == (200, b"one")
    assert held == {"/a": b"one"}
    client.connection.close()


def test_a_full_store_gives_objects_and_takes_none(objects: tuple[HttpProxy, dict[str, bytes]]) -> None:
    proxy, held = objects
    client = Client(proxy.port)
    assert client.ask("PUT", "/a", b"one")[0] == 200
    proxy.answer(FULL)
    assert client.ask("PUT", "/b", BODY)[0] == 507
    assert client.ask("GET", "/a") == (200, b"one")
    assert held == {"/a": b"one"}
    client.connection.close()


def test_a_folder_that_is_away_is_empty_and_takes_nothing_until_it_is_back(tmp_path: Path) -> None:
    store = OnDisk(tmp_path, shared=True, mib=2, processes=list)
    store.start()
    try:
        (store.path / "object").write_bytes(b"one")
        if not store.leave():
            pytest.skip("this user may not mount")
        assert list(store.path.iterdir()) == [] and not store.intact()
        with pytest.raises(OSError, match="Read-only"):
            (store.path / "other").write_bytes(b"two")
        store.back()
        assert (store.path / "object").read_bytes() == b"one" and store.intact()
    finally:
        store.close()
