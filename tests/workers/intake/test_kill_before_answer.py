"""A server is killed between accept and answer. Its client sends again to the next one, which knows it."""

import contextlib
import signal
import socket
from collections.abc import Iterator

import msgpack
import pytest
from intake_servers import TIMEOUT_S, LoopThread, listening
from killed_intake import SERVERS, fatal_server, producer_of

from pipeline.ledger.ledger import Ledger
from pipeline.settings import Settings
from pipeline.workers.intake.door import Door

CHUNK = msgpack.packb(["shop", [[1_795_168_800, {"log": "order 1 failed"}]], {"chunk": "abc"}])
MESSAGE = b"<13>1 2026-11-20T10:00:00.003001Z web-1 shop - - - order 1 failed"
OPEN = b"relp_version=0\ncommands=syslog"
OPENING = b"1 open %d %s\n" % (len(OPEN), OPEN)
CASES = {
    "forward": (b"", CHUNK, msgpack.packb({"ack": "abc"}), "shop"),
    "relp": (OPENING, b"2 syslog %d %s\n" % (len(MESSAGE), MESSAGE), b"2 rsp 6 200 OK\n", "web-1/shop"),
}


@contextlib.contextmanager
def next_server(protocol: str, port: int, settings: Settings) -> Iterator[None]:
    run = LoopThread()

    async def start() -> tuple[Door, object]:
        door = Door(producer_of(settings))
        server = SERVERS[protocol](door)
        await server.start(listening(port))
        return door, server

    try:
        door, server = run(start())
        yield
        run(server.stop())
        run(door.close())
    finally:
        run.close()


def exchange(port: int, greeting: bytes, request: bytes) -> bytes:
    """The bytes of the server until it ends the connection or has answered the request."""
    answers = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
        client.sendall(greeting + request)
        with contextlib.suppress(ConnectionError):
            while not answers.endswith((b"2 rsp 6 200 OK\n", b"abc")) and (data := client.recv(4_096)):
                answers += data
    return answers


@pytest.mark.long
@pytest.mark.parametrize("protocol", sorted(CASES))
def test_a_request_that_was_accepted_and_not_answered_is_stored_once(
    protocol: str, settings: Settings, ledger: Ledger
) -> None:
    greeting, request, answer, workload = CASES[protocol]

    def accepted() -> int:
        return ledger.backlog.totals().get(workload, {}).get("accepted", 0)

    opened = listening()
    port = opened.getsockname()[1]
    with fatal_server(protocol, opened, settings) as killed:
        assert not exchange(port, greeting, request).endswith(answer)
        assert killed.wait(TIMEOUT_S) == -signal.SIGKILL
    assert accepted() == 1
    with next_server(protocol, port, settings):
        assert exchange(port, greeting, request).endswith(answer)
    assert accepted() == 1
