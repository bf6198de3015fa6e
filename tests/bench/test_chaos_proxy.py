"""The proxy of a chaos run, between a real client and a real server."""

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from polling import wait_until

from bench._chaos.proxy import Proxy


class Echo(threading.Thread):
    """A server that sends back what it gets, and counts what it got."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        self.got = b""

    def run(self) -> None:
        while True:
            try:
                peer, _ = self.door.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                while piece := peer.recv(65_536):
                    self.got += piece
                    peer.sendall(piece)
            except OSError:
                return


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    server.start()
    yield server
    server.door.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port) as running:
        yield running


def connected(proxy: Proxy) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
    assert said(sock, b"hello") == b"hello"
    return sock


def said(sock: socket.socket, text: bytes) -> bytes:
    sock.sendall(text)
    answer = b""
    while len(answer) < len(text):
        piece = sock.recv(65_536)
        if not piece:
            break
        answer += piece
    return answer


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_what_is_sent_arrives_whole_and_in_order(proxy: Proxy) -> None:
    text = random.Random(1).randbytes(2_000_000)
    with connected(proxy) as sock:
        sender = threading.Thread(target=sock.sendall, args=(text,))
        sender.start()
        got = b""
        while len(got) < len(text):
            got += sock.recv(65_536)
        sender.join()
    assert got == text


def test_a_cut_ends_all_connections_and_new_ones_work(proxy: Proxy) -> None:
    with connected(proxy) as one, connected(proxy) as two:
        assert proxy.cut() == 2
        assert ended(one) and ended(two)
    connected(proxy).close()


def test_while_it_refuses_nobody_gets_through(proxy: Proxy) -> None:
    with connected(proxy) as before:
        proxy.refuse(True)
        assert ended(before)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as during:
        assert ended(during)
    proxy.refuse(False)
    connected(proxy).close()


def test_a_delay_holds_every_piece_back_until_it_is_lifted(proxy: Proxy) -> None:
    with connected(proxy) as sock:
        proxy.delay(0.2)
        began = time.monotonic()
        assert said(sock, b"slow") == b"slow"
        assert time.monotonic() - began >= 0.4, "there and back"
        proxy.delay(0.0)
        assert said(sock, b"again") == b"again"


def test_of_a_half_open_connection_requests_arrive_and_answers_do_not(proxy: Proxy, echo: Echo) -> None:
    with connected(proxy) as sock:
        assert proxy.half_open(1.0, random.Random(1)) == 1
        sock.sendall(b"lost")
        assert wait_until(lambda: echo.got.endswith(b"lost"), timeout_s=10)
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert proxy.half_open(1.0, random.Random(1)) == 0, "it is that already"
    connected(proxy).close()


def test_a_server_that_is_away_looks_like_a_connection_that_is_reset(proxy: Proxy, echo: Echo) -> None:
    echo.door.close()  # what waits in accept() takes one more
    assert wait_until(lambda: _refused(proxy), timeout_s=10)


def _refused(proxy: Proxy) -> bool:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as sock:
        sock.settimeout(1)
        try:
            sock.sendall(b"x")
            return ended(sock)
        except ConnectionError:
            return True
        except TimeoutError:
            return False
