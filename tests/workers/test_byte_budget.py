"""One bound on the bytes of all listeners of a process, and who gives way at it."""

import contextlib
import gc
import socket
import weakref

import msgpack
import pytest
from intake_servers import MemoryDoor, listening, serving
from polling import wait_until

from pipeline.sources.protocols.streams.forward import ForwardFraming
from pipeline.workers.bounds.byte_budget import ByteBudget
from pipeline.workers.bounds.connection_budget import ConnectionBudget
from pipeline.workers.intake.bodies import Room
from pipeline.workers.intake.connections import StreamServer
from pipeline.workers.intake.forward_server import MOST_PING, ForwardServer
from pipeline.workers.intake.refusals import RequestRefused
from pipeline.workers.intake.relp_server import RelpServer
from pipeline.workers.intake.syslog_server import SyslogServer

UNFINISHED: dict[type[StreamServer], bytes] = {
    SyslogServer: b"<13>" + b"x" * 40_000,
    RelpServer: b"1 syslog 60000 " + b"x" * 40_000,
    ForwardServer: b"\xc6\x00\x01\x00\x00" + b"x" * 40_000,
}
MESSAGES: dict[type[StreamServer], bytes] = {
    SyslogServer: b"<13>Nov 28 12:00:00 h app: hello\n",
    RelpServer: b"1 open 30 relp_version=0\ncommands=syslog\n2 syslog 33 <13>Nov 28 12:00:00 h app: hello!\n",
    ForwardServer: msgpack.packb(["app", [[1_795_000_000, {"message": "hello"}]]]),
}


class Client:
    """A connection in memory."""

    def __init__(self) -> None:
        self.gone = False

    def give_way(self) -> None:
        self.gone = True


def test_who_held_much_for_long_gives_way_first() -> None:
    budget = ByteBudget(limit=100)
    small, large, late = Client(), Client(), Client()
    budget.hold(small, 2)
    budget.hold(large, 90)
    budget.hold(late, 20)
    assert (small.gone, large.gone, late.gone) == (False, True, False)
    assert budget.held == 22
    budget.hold(large, 0)  # its end is told later
    budget.hold(late, 0)
    budget.hold(small, 0)
    assert budget.held == 0


def test_messages_without_an_end_give_way_to_the_body_of_a_request() -> None:
    room = Room(limit=100)
    client = Client()
    room.hold(client, 80)
    with room.shared() as share:
        share.take(60)
        assert client.gone and room.held == 60
        with pytest.raises(RequestRefused):
            share.take(60)
    assert room.held == 0


@pytest.mark.parametrize("made", UNFINISHED)
def test_unfinished_messages_of_a_stream_are_bounded_and_a_sender_is_heard(made: type[StreamServer]) -> None:
    held = ByteBudget(limit=200_000)
    door = MemoryDoor()
    server = made(door, budget=ConnectionBudget(held))  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(server, server.start(listening())))
        for _ in range(20):
            one = stack.enter_context(socket.create_connection(server.address, 5))
            with contextlib.suppress(ConnectionError):
                one.sendall(UNFINISHED[made])
            assert held.held <= held.limit
        assert wait_until(lambda: held.held >= 100_000, timeout_s=10), "they are counted"
        with socket.create_connection(server.address, 5) as sender:
            sender.sendall(MESSAGES[made])
            door.waits_for(1)
    assert held.held == 0


def test_a_client_of_forward_without_the_shared_key_can_make_nobody_hold_much() -> None:
    server = ForwardServer(MemoryDoor(), shared_key="secret")
    with serving(server, server.start(listening())), socket.create_connection(server.address, 5) as client:
        assert client.recv(1_000)  # its greeting
        with contextlib.suppress(ConnectionError):
            client.sendall(b"\xc6\x00\x80\x00\x00" + b"x" * 20 * MOST_PING)
            while client.recv(1_000):
                pass


def test_a_message_of_forward_that_has_no_end_goes_with_its_connection() -> None:
    """Not when Python looks for cycles, which is seldom in the intake."""
    framing = ForwardFraming()
    gc.disable()
    try:
        framing.feed(UNFINISHED[ForwardServer])
        framing.close()
        gone = weakref.ref(framing)
        del framing
        assert gone() is None
    finally:
        gc.enable()
