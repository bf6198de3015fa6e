"""Syslog by its real clients: `logger` and rsyslog."""

import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from intake_servers import TIMEOUT_S, MemoryDoor, listening, serving
from polling import wait_until
from tls_redis import Certificates

from pipeline.records.delivery import NO_IDENTITY
from pipeline.workers.bounds import connection_budget
from pipeline.workers.intake import connections, gathering, syslog_server
from pipeline.workers.intake.syslog_server import SyslogDatagrams, SyslogServer
from pipeline.workers.sockets import TlsFiles, open_datagrams


@pytest.fixture
def door() -> MemoryDoor:
    return MemoryDoor()


@pytest.fixture
def server(door: MemoryDoor) -> Iterator[SyslogServer]:
    server = SyslogServer(door, key="edge")
    with serving(server, server.start(listening())):
        yield server


def logger(port: int, *args: str) -> None:
    command = shutil.which("logger")
    if command is None:
        pytest.skip("needs logger, of bsdutils")
    subprocess.run(
        [command, "--server", "127.0.0.1", "--port", str(port), "--tag", "shop", *args],
        check=True,
        timeout=20,
    )


@pytest.mark.parametrize("framing", [("--octet-count",), ()])
@pytest.mark.parametrize("layout", ["--rfc5424", "--rfc3164"])
def test_logger_sends_over_tcp(
    door: MemoryDoor, server: SyslogServer, framing: tuple[str, ...], layout: str
) -> None:
    logger(server.address[1], "--tcp", layout, *framing, "--", "payment failed")
    (raw,) = door.waits_for(1)
    assert raw.startswith("<13>") and raw.endswith("payment failed")
    assert door.workloads == [f"{socket.gethostname()}/shop"]
    _, identity, sender = door.requests[0]
    assert (identity, sender.protocol, sender.key, sender.peer) == (
        NO_IDENTITY,
        "syslog",
        "edge",
        "127.0.0.1",
    )


def test_logger_sends_over_udp(door: MemoryDoor) -> None:
    server = SyslogDatagrams(door)
    with serving(server, server.start(open_datagrams("127.0.0.1", 0))):
        logger(server.address[1], "--udp", "--rfc3164", "--", "payment failed")
        (raw,) = door.waits_for(1)
    assert raw.endswith("shop: payment failed")


def test_senders_are_told_apart_in_a_batch(door: MemoryDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "WAIT_S", 60.0)
    server = SyslogDatagrams(door)
    with serving(server, server.start(open_datagrams("0.0.0.0", 0))) as run:
        for n in range(3):
            with socket.socket(type=socket.SOCK_DGRAM) as client:
                client.bind((f"127.0.0.{n % 2 + 1}", 0))
                client.sendto(b"<13>%d" % n, ("127.0.0.1", server.address[1]))
        assert wait_until(lambda: len(server._gathering._waiting) == 3, timeout_s=TIMEOUT_S, poll_s=0.01)
        run(server.stop())
    assert {sender.peer: decoded.records.texts for decoded, _, sender in door.requests} == {
        "127.0.0.1": ["<13>0", "<13>2"],
        "127.0.0.2": ["<13>1"],
    }


def test_a_sender_is_held_back_while_the_door_is_full_and_loses_nothing(
    door: MemoryDoor, server: SyslogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(gathering, "AT_ONCE_BYTES", 100_000)
    door.full = 1_000_000
    sent = [f"<13>{n} {'x' * 2_000}" for n in range(10_000)]
    with socket.create_connection(server.address) as client:
        client.setblocking(False)
        stream = "\n".join([*sent, ""]).encode()
        done = 0

        def stuck() -> bool:
            nonlocal done
            before = done
            with contextlib.suppress(BlockingIOError):
                done += client.send(stream[done : done + 1_000_000])
            return done == before and door.tries > 100

        assert wait_until(stuck, timeout_s=TIMEOUT_S, poll_s=0.05)
        assert done < len(stream)
        door.full = 0
        client.settimeout(TIMEOUT_S)
        client.sendall(stream[done:])
    assert sorted(door.waits_for(len(sent))) == sorted(sent)


def test_datagrams_without_room_are_dropped_and_counted(
    door: MemoryDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MOST_MESSAGES", 10)
    monkeypatch.setattr(gathering, "AT_ONCE", 1)
    door.full = 1_000_000
    server = SyslogDatagrams(door)
    with (
        structlog.testing.capture_logs() as logs,
        serving(server, server.start(open_datagrams("127.0.0.1", 0))),
        socket.socket(type=socket.SOCK_DGRAM) as client,
    ):
        for n in range(50):
            client.sendto(b"<13>%d" % n, server.address)
        # Eight batches of one message are underway, and ten messages wait.
        assert wait_until(lambda: server.dropped == 50 - 18, timeout_s=TIMEOUT_S, poll_s=0.01)
        door.full = 0
        assert len(door.waits_for(18)) == 18
    assert [line["event"] for line in logs if line["event"] != "intake_small_buffer"] == ["intake_dropped"]


def test_datagrams_that_the_kernel_drops_are_counted(
    door: MemoryDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syslog_server, "LOOK_S", 0.01)
    opened = open_datagrams("127.0.0.1", 0)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    with socket.socket(type=socket.SOCK_DGRAM) as client, structlog.testing.capture_logs():
        for n in range(100):  # before anybody reads
            client.sendto(b"<13>%d" % n, opened.getsockname())
        server = SyslogDatagrams(door)
        with serving(server, server.start(opened)):
            assert wait_until(
                lambda: server.dropped > 0 and server.dropped + len(door.raws) == 100,
                timeout_s=TIMEOUT_S,
                poll_s=0.01,
            )


def test_a_slow_client_is_cut_off_within_a_message_and_an_idle_one_is_not(
    door: MemoryDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SLOW_S", 0.2)
    server = SyslogServer(door)
    with (
        serving(server, server.start(listening())),
        structlog.testing.capture_logs() as logs,
        socket.create_connection(server.address) as idle,
        socket.create_connection(server.address, timeout=TIMEOUT_S) as slow,
    ):
        slow.sendall(b"<13>half a mess")
        assert slow.recv(1) == b""
        idle.sendall(b"<13>still here\n")
        assert door.waits_for(1) == ["<13>still here"]
    assert [(line["event"], line["why"]) for line in logs] == [
        ("intake_connection_closed", "a message did not end within 0 s")
    ]


def test_a_stop_hands_over_what_has_arrived(door: MemoryDoor) -> None:
    server = SyslogServer(door)
    door.full, door.away = 3, 1
    with serving(server, server.start(listening())) as run:
        with socket.create_connection(server.address) as client:
            client.sendall(b"<13>one\n<13>no end")
            assert wait_until(lambda: door.tries > 0, timeout_s=TIMEOUT_S, poll_s=0.01)
            run(server.stop())
        assert door.raws == ["<13>one", "<13>no end"]


def test_tls_asks_for_a_certificate_where_a_client_ca_is_named(door: MemoryDoor, tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    files = TlsFiles(
        cert=certificates.server, key=certificates.folder / "server.key", client_ca=certificates.ca
    )
    client = ssl.create_default_context(cafile=str(certificates.ca))
    server = SyslogServer(door)
    with serving(server, server.start(listening(), tls=files)):
        with (
            contextlib.suppress(ssl.SSLError, ConnectionError),
            socket.create_connection(server.address, timeout=TIMEOUT_S) as plain,
            client.wrap_socket(plain, server_hostname="localhost") as stranger,
        ):
            stranger.sendall(b"<13>from a stranger\n")
            assert stranger.recv(1) == b""
        client.load_cert_chain(certificates.client, certificates.folder / "client.key")
        with (
            socket.create_connection(server.address) as plain,
            client.wrap_socket(plain, server_hostname="localhost") as known,
        ):
            known.sendall(b"<13>" + b"x" * 60_000 + b"\n<13>secret\n")
            assert door.waits_for(2)[1] == "<13>secret"
        assert len(door.raws) == 2


def test_one_connection_too_many_closes_the_one_that_is_silent_for_longest(
    door: MemoryDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SyslogServer(door)
    with serving(server, server.start(listening())), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(server.address)) for _ in range(20)]
        assert wait_until(lambda: len(server._connections) == 20, timeout_s=TIMEOUT_S, poll_s=0.01)
        monkeypatch.setattr(connection_budget, "MOST_CONNECTIONS", 20)
        stack.enter_context(socket.create_connection(server.address, timeout=TIMEOUT_S))
        clients[0].settimeout(TIMEOUT_S)
        with contextlib.suppress(ConnectionError):
            assert clients[0].recv(1) == b""
        clients[-1].sendall(b"<13>heard\n")
        assert door.waits_for(1) == ["<13>heard"]
