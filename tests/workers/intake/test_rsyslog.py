"""rsyslog sends over TCP, TLS and RELP, and sends again what was not answered."""

import contextlib
import socket
from pathlib import Path

import pytest
from intake_servers import TIMEOUT_S, MemoryDoor, listening, serving
from polling import wait_until
from shippers import rsyslog

from pipeline.workers.intake.relp_server import RelpServer
from pipeline.workers.intake.syslog_server import SyslogServer


def forwards(action: str) -> str:
    """The configuration of rsyslog with this action."""
    return f"""
        module(load="omrelp")
        action({action} template="RSYSLOG_SyslogProtocol23Format"
          action.resumeRetryCount="-1" action.resumeInterval="1")
        """


@pytest.fixture
def door() -> MemoryDoor:
    return MemoryDoor()


def test_rsyslog_forwards_over_tcp(door: MemoryDoor, tmp_path: Path) -> None:
    server = SyslogServer(door)
    with serving(server, server.start(listening())):
        port = server.address[1]
        action = f'type="omfwd" target="127.0.0.1" port="{port}" protocol="tcp" TCP_Framing="octet-counted"'
        with rsyslog(tmp_path, forwards(action)) as program:
            for n in range(3):
                program.send(f"<14>Nov 20 10:00:00 shop[7]: order {n}".encode())
            raws = door.waits_for(3)
    assert [raw.partition(" - - ")[2].strip() for raw in raws] == [f"order {n}" for n in range(3)]
    assert set(door.workloads) == {f"{socket.gethostname()}/shop"}


def test_rsyslog_sends_over_relp_and_waits_while_the_door_is_full(door: MemoryDoor, tmp_path: Path) -> None:
    door.full = 10
    server = RelpServer(door)
    with serving(server, server.start(listening())):
        action = f'type="omrelp" target="127.0.0.1" port="{server.address[1]}"'
        with rsyslog(tmp_path, forwards(action)) as program:
            for n in range(300):
                program.send(f"<14>Nov 20 10:00:00 shop[7]: order {n}".encode())
            raws = door.waits_for(300)
    assert [int(raw.rpartition(" ")[2]) for raw in raws] == list(range(300))
    assert door.requests[0][2].protocol == "relp"


def test_rsyslog_sends_again_over_relp_what_was_not_answered(door: MemoryDoor, tmp_path: Path) -> None:
    """The server is killed while the door is full, and another one listens at its port."""
    door.full = 1_000_000
    killed = RelpServer(door)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(serving(killed, killed.start(listening())))
        port = killed.address[1]
        program = stack.enter_context(
            rsyslog(tmp_path, forwards(f'type="omrelp" target="127.0.0.1" port="{port}" timeout="2"'))
        )
        program.send(b"<14>Nov 20 10:00:00 shop[7]: order 1")
        assert wait_until(lambda: door.tries > 2, timeout_s=TIMEOUT_S, poll_s=0.01)
        run(killed.stop())
        assert door.raws == []
        door.full = 0
        successor = RelpServer(door)
        stack.enter_context(serving(successor, successor.start(listening(port))))
        program.send(
            b"<14>Nov 20 10:00:00 shop[7]: order 2"
        )  # rsyslog looks after its connection when it sends
        raws = door.waits_for(2)
    assert [raw[-7:] for raw in raws] == ["order 1", "order 2"]
