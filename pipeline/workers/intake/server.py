"""The process of the intake: its listeners, its heartbeat, its end.

    python -m pipeline.workers.intake [NAME] [--share] [--fd=N ...]

`--share`: several processes of one pipeline listen on one port, and the kernel spreads connections. `--fd`:
a socket that the supervisor has opened, one for each listener in the order of the setting `intake`; -1 for
gRPC, which opens its own.
"""

import asyncio
import atexit
import os
import resource
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import redis

from pipeline.errors import BadInput, BadSetting, RedisUnavailable
from pipeline.logs import logger, set_up
from pipeline.observe import counters as metrics
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.service.access.keys import SEND, SenderKeys
from pipeline.service.senders import PUSH_S
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.upkeep import FaultSeries
from pipeline.workers.heartbeat import Heartbeat
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.exchange import Service
from pipeline.workers.intake.listening import IntakeServer, server_of
from pipeline.workers.intake.rule_book import RuleBook
from pipeline.workers.liveness import Progress
from pipeline.workers.loops import collect_seldom
from pipeline.workers.sockets import listener_socket
from pipeline.workers.tethered import tether

ROLE: Final = "intake"
REDIS_S: Final = 5.0  # senders give up after ten
PULSE_S: Final = 1.0
GRACE_S: Final = 10.0


def main(argv: Sequence[str]) -> int:
    settings = Settings.load()
    set_up(settings.stack.log_level)
    names = [a for a in argv if not a.startswith("--")]
    fds = [int(a.removeprefix("--fd=")) for a in argv if a.startswith("--fd=")]
    listeners = [Listener.parse(text) for text in settings.intake.listeners]
    check_listeners(listeners)
    supervised = settings.internal.supervisor_pid
    if supervised:
        tether(supervised, grace_s=GRACE_S)
    producer = Producer.connect(settings)
    settings = producer.settings  # of the stack
    rules = repaired_rules(settings) if supervised else RuleBook(settings.intake.rules)
    keys = SenderKeys(connect(settings, timeout_s=REDIS_S), settings)
    # A supervisor's own Redis has no key before it runs. Until there is one, access.py refuses all others.
    if not supervised:
        check_keys(listeners, keys)
    _raise_file_limit()
    share = "--share" in argv
    opened: list[socket.socket | None]
    opened = (
        [None if fd < 0 else socket.socket(fileno=fd) for fd in fds]
        if fds
        else [listener_socket(listener, share=share) for listener in listeners]
    )
    metrics.push(connect(settings, timeout_s=REDIS_S), Keys(settings.redis.key_prefix), ROLE)
    metrics.started(ROLE)
    atexit.register(metrics.flush)
    service = Service(door=Door(producer), keys=keys, rules=rules)
    servers = {
        str(listener): server_of(listener, service, opened=one, share=share)
        for listener, one in zip(listeners, opened, strict=True)
    }
    name = names[0] if names else ROLE
    collect_seldom()
    asyncio.run(serve_intake(service, servers, settings, name=name))
    return 0


async def serve_intake(
    service: Service, servers: Mapping[str, IntakeServer], settings: Settings, *, name: str
) -> None:
    """Until a signal; then no new request, an answer to each that is there, and the end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    progress = Progress()
    heart = Heartbeat(settings, role_name=ROLE, queues=(), name=name, progress=progress, ends=False)
    for address, server in servers.items():
        await server.start()
        logger(at=address, pid=os.getpid()).info("intake.starts")
    heart.start()
    senders, due = service.door.senders, loop.time() + PUSH_S
    try:
        while not stop.is_set():
            progress.pulse()
            service.rules.refresh()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PULSE_S)
            if loop.time() >= due:
                due = loop.time() + PUSH_S
                await asyncio.to_thread(senders.push, service.keys.client, settings)
    finally:
        service.door.hurry()
        await asyncio.gather(*(server.stop() for server in servers.values()))
        await service.door.close()
        await asyncio.to_thread(senders.push, service.keys.client, settings)
        await asyncio.to_thread(heart.leave)


def repaired_rules(settings: Settings) -> RuleBook:
    """The rules, as soon as their file is right. The stack had read it when it started, and a process that
    cannot be started again would end all others."""
    presence, faults = Presence(connect(settings), settings), FaultSeries("intake.rules_refused", BadSetting)
    while True:
        try:
            return RuleBook(settings.intake.rules)
        except BadSetting as exc:
            faults.add(exc)
            with suppress(RedisUnavailable, redis.RedisError):
                presence.complain(ROLE, str(exc))
        time.sleep(PULSE_S)


def check_listeners(listeners: Sequence[Listener]) -> None:
    """Raises BadSetting where nothing is to be served."""
    if not listeners:
        raise BadSetting("the intake has no listener; set intake, such as http://127.0.0.1:4318")


def check_keys(listeners: Sequence[Listener], keys: SenderKeys) -> None:
    """Raises BadInput where other machines would reach the intake without a key."""
    exposed = [listener for listener in listeners if listener.needs_key]
    if exposed and not any(key.may(SEND) for key in keys.look()):
        raise BadInput(
            f"the intake at {exposed[0]} would take lines from everybody; make a key with "
            "`logweir keys add NAME`, or listen on 127.0.0.1"
        )


def _raise_file_limit() -> None:
    """Each connection is a file, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
