"""One bound of connections for all listeners of a process, and who gives way at it."""

import contextlib
import socket
import time
from dataclasses import dataclass

import msgpack
import pytest
from intake_servers import MemoryDoor, listening, serving
from polling import wait_until

from pipeline.workers.bounds import connection_budget
from pipeline.workers.bounds.connection_budget import STALLED_S, ConnectionBudget, Doing
from pipeline.workers.intake.connections import StreamServer
from pipeline.workers.intake.forward_server import ForwardServer
from pipeline.workers.intake.relp_server import RelpServer
from pipeline.workers.intake.syslog_server import SyslogServer

MESSAGES: dict[type[StreamServer], bytes] = {
    SyslogServer: b"<13>Nov 28 12:00:00 h app: hello\n",
    RelpServer: b"1 open 30 relp_version=0\ncommands=syslog\n2 syslog 33 <13>Nov 28 12:00:00 h app: hello!\n",
    ForwardServer: msgpack.packb(["app", [[1_795_000_000, {"message": "hello"}]]]),
}
MOST = 8


@dataclass(eq=False, kw_only=True)
class Client:
    """A connection in memory, quiet for so long."""

    what: Doing
    quiet_s: float
    gone: bool = False

    def __post_init__(self) -> None:
        self.heard = time.monotonic() - self.quiet_s

    def doing(self) -> Doing:
        return self.what

    def give_way(self) -> None:
        self.gone = True


def test_silent_ones_give_way_before_stalled_and_idle_ones_and_busy_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = ConnectionBudget()
    monkeypatch.setattr(ConnectionBudget, "limit", 6)
    order = [
        Client(what=Doing.NEVER_SENT, quiet_s=1.0),
        Client(what=Doing.WITHIN_A_MESSAGE, quiet_s=STALLED_S + 1),
        Client(what=Doing.IDLE, quiet_s=90.0),
        Client(what=Doing.IDLE, quiet_s=9.0),
        Client(what=Doing.WITHIN_A_MESSAGE, quiet_s=0.0),
        Client(what=Doing.BUSY, quiet_s=99.0),
    ]
    for one in reversed(order):
        assert budget.enter(one)
    went: list[Client] = []
    newcomers = [Client(what=Doing.BUSY, quiet_s=0.0) for _ in range(4)]
    for newcomer in newcomers:
        assert budget.enter(newcomer)
        went += [one for one in order if one.gone and one not in went]
    assert went == order[:4]
    assert not budget.enter(Client(what=Doing.NEVER_SENT, quiet_s=0.0))
    assert not any(one.gone for one in order[4:])


@pytest.mark.parametrize("made", MESSAGES)
def test_silent_connections_keep_no_sender_out_of_a_stream(
    made: type[StreamServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_budget, "MOST_CONNECTIONS", MOST)
    door = MemoryDoor()
    budget = ConnectionBudget()
    server, other = made(door, budget=budget), SyslogServer(door, budget=budget)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(serving(server, server.start(listening())))
        run(other.start(listening()))
        stack.callback(lambda: run(other.stop()))
        for n in range(2 * MOST):
            stack.enter_context(socket.create_connection((other if n % 2 else server).address, 5))

        def settled() -> bool:
            return len(server._connections) + len(other._connections) == MOST

        assert wait_until(settled, timeout_s=10)
        with socket.create_connection(server.address, 5) as sender:
            sender.sendall(MESSAGES[made])
            door.waits_for(1)
            assert wait_until(settled, timeout_s=10)
