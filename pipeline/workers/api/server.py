"""The process of the API: one listener, its heartbeat, its end.

    python -m pipeline.workers.api [NAME] [--fd=N]

`--fd`: a socket that the supervisor has opened.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from pipeline.errors import BadInput, BadSetting
from pipeline.logs import logger, set_up
from pipeline.redis.connection import connect
from pipeline.service.access.keys import READ, SenderKeys, key_digest
from pipeline.service.access.own_key import read_own_key
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.settings.proxies import parse_proxies
from pipeline.workers.api.access import Doorkeeper
from pipeline.workers.api.app import api_app
from pipeline.workers.api.asking import Api
from pipeline.workers.heartbeat import Heartbeat
from pipeline.workers.http_server import HttpServer
from pipeline.workers.liveness import Progress
from pipeline.workers.sockets import listener_socket

ROLE: Final = "api"
REDIS_S: Final = 10.0
PULSE_S: Final = 1.0


def main(argv: Sequence[str]) -> int:
    settings = Settings.load()
    set_up(settings.stack.log_level)
    names = [a for a in argv if not a.startswith("--")]
    fds = [int(a.removeprefix("--fd=")) for a in argv if a.startswith("--fd=")]
    if not settings.stack.api:
        raise BadSetting("the API has no address; set api, such as http://127.0.0.1:4380")
    listener = Listener.parse(settings.stack.api, setting="api")
    client = connect(settings, timeout_s=REDIS_S)
    keys = SenderKeys(client, settings)
    own = read_own_key(settings.data.dir) if listener.loopback else ""
    supervised = settings.internal.supervisor_pid
    proxies = parse_proxies(settings.stack.api_proxies)
    if not supervised and not proxies.networks:
        check_reachable(listener, keys, own)
    opened = socket.socket(fileno=fds[0]) if fds else listener_socket(listener, name="api")
    assert opened is not None  # noqa: S101 - only gRPC opens its own
    door = Doorkeeper(keys=keys, listener=listener, own=key_digest(own) if own else "", proxies=proxies)
    asyncio.run(serve_api(settings, door, opened, name=names[0] if names else ROLE))
    return 0


async def serve_api(settings: Settings, door: Doorkeeper, opened: socket.socket, *, name: str) -> None:
    """Until a signal; then no new request, an answer to each that is there, and the end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    api = Api(door.keys.client, settings, door, door.keys)
    server = HttpServer(api_app(api), door.listener, opened, forwarded=False)
    progress = Progress()
    heart = Heartbeat(settings, role_name=ROLE, queues=(), name=name, progress=progress, ends=False)
    await server.start()
    logger(at=str(door.listener), pid=os.getpid()).info("api.starts")
    heart.start()
    try:
        while not stop.is_set():
            progress.pulse()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PULSE_S)
    finally:
        await api.feed.close()
        await api.events.close()
        await server.stop()
        await api.close()
        await asyncio.to_thread(heart.leave)


def check_reachable(listener: Listener, keys: SenderKeys, own: str) -> None:
    """Raises BadInput where nobody could ask, or everybody would try to."""
    if not own and not any(key.may(READ) for key in keys.look()):
        raise BadInput(
            f"the API at {listener} answers nobody without a key; make one with "
            "`logweir keys add NAME --scope read`, or name a proxy in api_proxies"
        )
