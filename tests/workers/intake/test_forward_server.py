"""The forward protocol with fluent-logger, and with a client that waits for acknowledgements."""

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import structlog
from fluent.sender import FluentSender
from intake_servers import TIMEOUT_S, MemoryDoor, listening, serving
from polling import wait_until

from pipeline.records.delivery import NO_IDENTITY
from pipeline.workers.intake.forward_server import ForwardServer

AT = 1_795_168_800


class Forwarder:
    """As Fluentd sends: it names a chunk, and sends the chunk again where no answer came."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=TIMEOUT_S)

    def send(self, *values: Any) -> None:
        self.socket.sendall(b"".join(map(msgpack.packb, values)))

    def receive(self) -> Any:
        """The next value of the server; None at the end of the connection."""
        unpacker = msgpack.Unpacker()
        while data := self.socket.recv(4_096):
            unpacker.feed(data)
            for value in unpacker:
                return value
        return None

    def __enter__(self) -> "Forwarder":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()


@pytest.fixture
def door() -> MemoryDoor:
    return MemoryDoor()


@pytest.fixture
def server(door: MemoryDoor) -> Iterator[ForwardServer]:
    server = ForwardServer(door, key="edge")
    with serving(server, server.start(listening())):
        yield server


def test_fluent_logger_sends_events(door: MemoryDoor, server: ForwardServer) -> None:
    host, port = server.address
    with FluentSender("shop", host=host, port=port, nanosecond_precision=True) as sender:
        for n in range(3):
            assert sender.emit("till", {"message": f"order {n} failed", "level": "ERROR"})
        raws = door.waits_for(3)
    assert [json.loads(raw)["message"] for raw in raws] == [f"order {n} failed" for n in range(3)]
    assert set(door.workloads) == {"shop.till"}
    _, identity, sender_of = door.requests[0]
    assert (identity, sender_of.protocol, sender_of.key) == (NO_IDENTITY, "forward", "edge")


def test_events_without_a_chunk_are_taken_after_their_sender_has_gone(
    door: MemoryDoor, server: ForwardServer
) -> None:
    door.full = 5
    host, port = server.address
    with FluentSender("shop", host=host, port=port) as sender:
        assert sender.emit("till", {"message": "the last words"})
    assert len(door.waits_for(1)) == 1


def test_a_chunk_is_acknowledged_once_it_is_accepted(door: MemoryDoor, server: ForwardServer) -> None:
    door.full = 3
    packed = msgpack.packb([AT, {"log": "x"}])
    with Forwarder(server.address) as client:
        client.send(["shop", packed, {"chunk": "abc"}], ["shop", AT, {"log": "y"}])
        assert client.receive() == {"ack": "abc"}
        assert door.tries >= 3
    assert len(door.waits_for(2)) == 2


def test_a_chunk_that_is_sent_again_is_a_duplicate(door: MemoryDoor, server: ForwardServer) -> None:
    for _ in range(2):
        with Forwarder(server.address) as client:
            client.send(["shop", [[AT, {"log": "x"}]], {"chunk": "abc"}])
            assert client.receive() == {"ack": "abc"}
    assert len(door.raws) == 1
    with Forwarder(server.address) as client:
        client.send(["shop", [[AT, {"log": "other"}]], {"chunk": "abc"}])
        assert client.receive() == {"ack": "abc"}
    assert len(door.raws) == 2


def test_a_client_that_gave_up_waiting_is_not_stored_behind_its_back(
    door: MemoryDoor, server: ForwardServer
) -> None:
    door.full = 1_000_000
    with Forwarder(server.address) as client:
        client.send(["shop", [[AT, {"log": "x"}]], {"chunk": "abc"}])
        assert wait_until(lambda: door.tries > 1, timeout_s=TIMEOUT_S, poll_s=0.01)
    assert wait_until(lambda: not server._connections, timeout_s=TIMEOUT_S, poll_s=0.01)
    assert door.raws == []


def test_a_malformed_message_closes_its_connection_and_no_other(
    door: MemoryDoor, server: ForwardServer
) -> None:
    with (
        structlog.testing.capture_logs() as logs,
        Forwarder(server.address) as good,
        Forwarder(server.address) as bad,
    ):
        good.send(["shop", AT, {"log": "x"}])
        bad.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert bad.receive() is None
        good.send(["shop", [[AT, {"log": "y"}]], {"chunk": "abc"}])
        assert good.receive() == {"ack": "abc"}
    assert len(door.waits_for(2)) == 2
    assert [line["event"] for line in logs] == ["intake_connection_closed"]


def test_large_messages_of_many_connections_are_bounded_together(
    door: MemoryDoor, server: ForwardServer
) -> None:
    """The one that began first gives way, and a message that ends is taken."""
    held = server.budget.held
    held.limit = 150_000
    large = msgpack.packb(["shop", bytes(200_000)])
    with Forwarder(server.address) as first, Forwarder(server.address) as second:
        first.socket.sendall(large[:100_000])
        assert wait_until(lambda: held.held == 100_000, timeout_s=TIMEOUT_S, poll_s=0.01)
        second.socket.sendall(large[:100_000])
        with contextlib.suppress(ConnectionError):
            assert first.receive() is None
        assert wait_until(lambda: held.held == 100_000, timeout_s=TIMEOUT_S, poll_s=0.01)
        with Forwarder(server.address) as third:
            third.send(["shop", [[AT, {"log": "x"}]], {"chunk": "abc"}])
            assert third.receive() == {"ack": "abc"}
    assert wait_until(lambda: held.held == 0, timeout_s=TIMEOUT_S, poll_s=0.01)


def test_a_client_must_show_the_shared_key(door: MemoryDoor) -> None:
    server = ForwardServer(door, shared_key="secret")

    def greet(client: Forwarder, key: bytes) -> Any:
        helo, options = client.receive()
        nonce = options["nonce"]
        assert helo == "HELO"
        shown = hashlib.sha512(b"salt" + b"web-1" + nonce.encode() + key).hexdigest()
        client.send(["PING", "web-1", "salt", shown, "", ""])
        return client.receive()

    with serving(server, server.start(listening())):
        with Forwarder(server.address) as client:
            assert greet(client, b"secret")[:2] == ["PONG", True]
            client.send(["shop", [[AT, {"log": "x"}]], {"chunk": "abc"}])
            assert client.receive() == {"ack": "abc"}
        with structlog.testing.capture_logs() as logs:
            with Forwarder(server.address) as client:
                assert greet(client, b"guess")[:2] == ["PONG", False]
                assert client.receive() is None
            with Forwarder(server.address) as client:
                client.receive()
                client.send(["shop", AT, {"log": "unasked"}])
                assert client.receive() is None
    assert len(door.raws) == 1
    assert len(logs) == 2
