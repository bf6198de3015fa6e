"""The process that serves models on a lease of this machine's GPUs: its listener, its heartbeat, its end.

    python -m pipeline.workers.serve [NAME] [--fd=N]

It listens at `gpu_serve`. Other nodes send requests there too, so on several machines that names an address
which they reach; of 0.0.0.0 they are told this machine's name. `--fd`: a socket that the supervisor opened.
"""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from pipeline.errors import BadSetting
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.policy.fairness import parse_tenants
from pipeline.gpu.pool import Pool
from pipeline.logs import logger, set_up
from pipeline.observe import counters as metrics
from pipeline.observe.embedded import called
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.service.access.keys import SenderKeys
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.upkeep import UpkeepThread
from pipeline.workers.heartbeat import Heartbeat
from pipeline.workers.http_server import HttpServer
from pipeline.workers.liveness import Progress
from pipeline.workers.same_store import join_beside
from pipeline.workers.serve.app import ServeApp
from pipeline.workers.serve.desk import ModelDesk
from pipeline.workers.serve.host import ModelHost
from pipeline.workers.sockets import listener_socket

ROLE: Final = "serve"
REDIS_S: Final = 5.0
PULSE_S: Final = 1.0
GRACE_S: Final = 20.0


def main(argv: Sequence[str]) -> int:
    settings = Settings.load()
    set_up(settings.stack.log_level)
    if not settings.gpu.serve:
        raise BadSetting("models are served nowhere; set gpu_serve, such as http://127.0.0.1:4390")
    parse_tenants(settings.gpu.tenants)
    names = [a for a in argv if not a.startswith("--")]
    fds = [int(a.removeprefix("--fd=")) for a in argv if a.startswith("--fd=")]
    supervised = settings.internal.supervisor_pid
    if not supervised:
        join_beside()
    listener = Listener.parse(settings.gpu.serve, setting="gpu_serve")
    opened = socket.socket(fileno=fds[0]) if fds else listener_socket(listener, name="gpu_serve")
    assert opened is not None  # noqa: S101 - only gRPC opens its own
    client = connect(settings, timeout_s=REDIS_S)
    metrics.push(client, Keys(settings.redis.key_prefix), ROLE)
    metrics.started(ROLE)
    name = names[0] if names else ROLE
    folder = settings.data.dir.absolute() / "serve"
    host = ModelHost(
        Pool(client, settings),
        settings,
        name=called(settings, name, embedded=bool(supervised)),
        url=node_url(listener, opened.getsockname()[1]),
    )
    try:
        asyncio.run(serve_models(settings, host, listener, opened, name=name))
    finally:
        shutil.rmtree(folder / str(os.getpid()), ignore_errors=True)
        metrics.flush()
    return 0


async def serve_models(
    settings: Settings, host: ModelHost, listener: Listener, opened: socket.socket, *, name: str
) -> None:
    """Until a signal, or until the host ends by itself; then the lease is given back."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    desk = ModelDesk(host)
    app = ServeApp(desk, SenderKeys(connect(settings, timeout_s=REDIS_S), settings))
    server = HttpServer(app.routes(), listener, opened, forwarded=False)
    progress = Progress()
    heart = Heartbeat(settings, role_name=ROLE, queues=(), name=name, progress=progress, ends=False)
    thread = UpkeepThread("serve-host", host.run)
    await server.start()
    logger(at=str(listener), pid=os.getpid()).info("serve.starts")
    heart.start()
    thread.start()
    try:
        while not stop.is_set() and thread.is_alive():
            progress.pulse()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PULSE_S)
    finally:
        host.stop()
        await server.stop()
        await asyncio.to_thread(thread.join, GRACE_S)
        desk.close()
        await asyncio.to_thread(heart.leave)


def node_url(listener: Listener, port: int) -> str:
    """Where other nodes reach this one."""
    host = this_node() if listener.host in ("0.0.0.0", "::") else listener.host
    return f"{listener.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
