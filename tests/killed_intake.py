"""A server of the intake in a process that is killed between accept and answer.

python tests/killed_intake.py forward|relp FD, with settings in the environment
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.ledger.ledger import Ledger
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.records.delivery import NO_IDENTITY, Accepted, Full, RequestIdentity
from pipeline.redis.connection import connect
from pipeline.service.senders import SentBy
from pipeline.settings import Settings
from pipeline.sources.protocols.contract import Decoded
from pipeline.workers.intake.connections import StreamServer
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.forward_server import ForwardServer
from pipeline.workers.intake.relp_server import RelpServer

SERVERS: dict[str, type[StreamServer]] = {"forward": ForwardServer, "relp": RelpServer}
ROOT = Path(__file__).resolve().parent.parent


def producer_of(settings: Settings) -> Producer:
    """A producer that wakes no worker."""
    ledger = Ledger(connect(settings), settings)
    return Producer(ledger, Submit(None, ledger.client, settings), settings)


class FatalDoor(Door):
    """Its process is killed as soon as a request is in."""

    async def take(
        self, decoded: Decoded, *, identity: RequestIdentity = NO_IDENTITY, sender: SentBy
    ) -> Accepted | Full:
        await super().take(decoded, identity=identity, sender=sender)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@contextlib.contextmanager
def fatal_server(
    protocol: str, opened: socket.socket, settings: Settings
) -> Iterator["subprocess.Popen[bytes]"]:
    """It serves the socket, which this process closes, until it takes a request."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")}
    with opened:
        process = subprocess.Popen(
            [sys.executable, __file__, protocol, str(opened.fileno())],
            env={**clean, **settings.to_environ(), "PYTHONPATH": str(ROOT)},
            pass_fds=[opened.fileno()],
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def main(protocol: str, fd: int) -> None:
    opened = socket.socket(fileno=fd)
    await SERVERS[protocol](FatalDoor(producer_of(Settings.load()))).start(opened)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
