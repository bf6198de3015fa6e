"""The server of each listener, by its scheme."""

import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.errors import BadInput
from pipeline.service.access.keys import SenderKey
from pipeline.settings.listeners import Listener
from pipeline.workers.bounds.connection_budget import ConnectionBudget
from pipeline.workers.http_server import HttpServer
from pipeline.workers.intake.access import check_access
from pipeline.workers.intake.app import intake_app
from pipeline.workers.intake.connections import StreamServer
from pipeline.workers.intake.exchange import Service
from pipeline.workers.intake.forward_server import ForwardServer
from pipeline.workers.intake.otlp_grpc.grpc_front import FILES
from pipeline.workers.intake.otlp_grpc.grpc_server import MOST_CONNECTIONS, Authorize, GrpcServer
from pipeline.workers.intake.relp_server import RelpServer
from pipeline.workers.intake.small_requests import SmallRequests
from pipeline.workers.intake.syslog_server import SyslogDatagrams, SyslogServer
from pipeline.workers.sockets import TlsFiles


class IntakeServer(Protocol):
    """A server, as the process of the intake begins and ends it."""

    @property
    def start(self) -> Callable[[], Coroutine[Any, Any, None]]: ...

    @property
    def stop(self) -> Callable[[], Coroutine[Any, Any, None]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Startable:
    """A server and the arguments of its start."""

    start: Callable[[], Coroutine[Any, Any, None]]
    stop: Callable[[], Coroutine[Any, Any, None]]


def server_of(
    listener: Listener, service: Service, *, opened: socket.socket | None, share: bool = False
) -> IntakeServer:
    """`opened`: of `sockets.listener_socket`. Raises BadInput for a file that cannot be read."""
    tls = None
    if listener.cert is not None and listener.key is not None:
        tls = TlsFiles(cert=listener.cert, key=listener.key, client_ca=listener.ca)
    if opened is None:
        apart = min(MOST_CONNECTIONS, service.budget.limit // (4 * FILES))
        service.budget.set_apart(FILES * apart)
        grpc = GrpcServer(
            service.door,
            _authorize(listener, service),
            service.rules,
            room=service.room,
            budget=ConnectionBudget(service.room, most=apart),
        )
        return _Startable(
            start=lambda: grpc.start(listener.host, listener.port, tls=tls, share=share), stop=grpc.stop
        )
    if listener.scheme.startswith("http"):
        app = intake_app(service, listener)
        return HttpServer(
            app, listener, opened, short_way=SmallRequests(service, app.posts), budget=service.budget
        )
    if listener.scheme == "syslog+udp":
        datagrams = SyslogDatagrams(service.door, rules=service.rules)
        return _Startable(start=lambda: datagrams.start(opened), stop=datagrams.stop)
    streams = _stream_server(listener, service)
    return _Startable(start=lambda: streams.start(opened, tls=tls), stop=streams.stop)


def _stream_server(listener: Listener, service: Service) -> StreamServer:
    if listener.scheme.startswith("syslog"):
        return SyslogServer(service.door, rules=service.rules, budget=service.budget)
    if listener.scheme.startswith("relp"):
        return RelpServer(service.door, rules=service.rules, budget=service.budget)
    return ForwardServer(
        service.door, rules=service.rules, shared_key=_secret(listener), budget=service.budget
    )


def _secret(listener: Listener) -> str:
    if listener.secret is None:
        return ""
    try:
        secret = listener.secret.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise BadInput(f"the secret of {listener} is not readable ({exc})") from exc
    if not secret:
        raise BadInput(f"the secret of {listener} is empty; write the shared key into {listener.secret}")
    return secret


def _authorize(listener: Listener, service: Service) -> Authorize:
    async def authorize(headers: Mapping[str, str]) -> SenderKey | None:
        ring = await service.ring()
        return check_access(headers, ring, host=listener.host, loopback=listener.loopback)

    return authorize
