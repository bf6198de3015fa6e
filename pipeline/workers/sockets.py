"""Listening sockets of the intake and of the sidecars, Flower and the metrics.

The supervisor opens them and hands them over: stacks that start at once get different ports, and a port
outlives a restart of its process."""

import contextlib
import errno
import functools
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import BadInput
from pipeline.logs import logger
from pipeline.records.remembered import remembered
from pipeline.settings.listeners import Listener

# Ports tried from the wanted one on.
TRIES: Final = 100
# Of datagrams: a burst of a second may fill it while the process of the intake does other work.
RECEIVE_BYTES: Final = 8 * 1024 * 1024
# Linux's SO_RCVBUFFORCE, which goes beyond net.core.rmem_max with the right CAP_NET_ADMIN.
_FORCE: Final = 33
# Reserved or never delegated: no page on the internet has an origin there.
LOCAL_DOMAINS: Final = frozenset(("localhost", "local", "internal", "svc"))
MOST_HOST: Final = 300  # characters of a Host header: a name has at most 253
WRONG_HOST: Final = "421 Misdirected Request"
ACCEPTED_AT_ONCE: Final = 8  # by asyncio in one go, before any of them is counted
KERNEL_BACKLOG: Final = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. `client_ca`: only clients with a certificate of this CA may connect."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """As servers of asyncio take it. Raises BadInput."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as exc:
            names = ", ".join(str(path) for path in (self.cert, self.key, self.client_ca) if path)
            raise BadInput(
                f"a listener cannot speak TLS with {names} ({exc}); name readable PEM files"
            ) from exc
        return context


def listen(name: str, address: str, first: int) -> socket.socket:
    """A listening socket on the wanted port, or on the next free one. `name` is that of the settings,
    `flower`.

    Raises BadInput.
    """
    try:
        return socket_at(address, first, tries=TRIES, backlog=128)
    except OSError as exc:
        raise BadInput(
            f"{name.capitalize()} cannot listen on {address} from port {first} on ({exc.strerror or exc}); "
            f"set {name}_address or {name}_port, or {name} = false"
        ) from exc


def listener_socket(
    listener: Listener, *, share: bool = False, tries: int = 1, name: str = "intake"
) -> socket.socket | None:
    """The socket of a listener; None for gRPC, which opens its own. `share`: with other processes of this
    pipeline that say so too. `tries`: how many ports from the wanted one on. `name`: of its setting.

    Raises BadInput."""
    if listener.scheme.startswith("grpc"):
        return None
    try:
        if listener.scheme == "syslog+udp":
            return open_datagrams(listener.host, listener.port, share=share)
        return socket_at(listener.host, listener.port, tries=tries, backlog=1_024, share=share)
    except OSError as exc:
        raise BadInput(
            f"the {'API' if name == 'api' else name} cannot listen at {listener} ({exc.strerror or exc}); free "
            f"that port, or set {name} to another address"
        ) from exc


def socket_at(host: str, port: int, *, tries: int, backlog: int, share: bool = False) -> socket.socket:
    """A listening socket on the first free one of so many ports. Raises OSError."""
    last = min(port + tries, 2**16) - 1
    while True:
        try:
            family, *_, where = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            opened = socket.create_server(where, family=family, backlog=backlog, reuse_port=share)
            # Connections take this over. asyncio sets it only where the protocol of a socket is known, and
            # the body of an answer would wait 40 ms for the acknowledgement of its head.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return opened
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or port >= last:
                raise
        port += 1


def open_datagrams(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A bound socket with a large buffer. `share`: as in `listener_socket`. Raises OSError."""
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)[0]
    opened = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if share:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind(where)
    except OSError:
        opened.close()
        raise
    with contextlib.suppress(OSError):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        opened.setsockopt(socket.SOL_SOCKET, _FORCE, RECEIVE_BYTES)
    # Linux reports twice what was asked for.
    if (size := opened.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2) < RECEIVE_BYTES:
        logger().warning(
            "intake_small_buffer", bytes=size, remedy=f"sysctl net.core.rmem_max={RECEIVE_BYTES}"
        )
    return opened


def url(listener: socket.socket) -> str:
    """Where a browser on this machine finds what listens there."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_own_host(header: str | None, address: str) -> bool:
    """Whether a Host header names this server, and not a public domain that was made to lead here.

    DNS rebinding: a page on a public domain whose DNS answers with our address could otherwise read us in
    the browser of somebody on this machine. Taken are the configured address, IP addresses, the names of
    this machine, and names that no public DNS has: without a dot, or below LOCAL_DOMAINS. A client that sends
    no Host is no browser."""
    if not header:
        return header is None
    return _is_own(header, address)  # senders repeat theirs in each request


@remembered(256, 2 * MOST_HOST)
def _is_own(header: str, address: str) -> bool:
    name = _host(header)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        local = "." not in name or name.rpartition(".")[2] in LOCAL_DOMAINS
        return bool(name) and (local or name == address.lower() or name in _names())
    return True


@functools.cache
def _names() -> frozenset[str]:
    """The names of this machine; asking may take seconds, so it is done once."""
    return frozenset((socket.gethostname().lower(), socket.getfqdn().lower()))


def _host(header: str) -> str:
    """The host of `host`, `host:port` and `[address]:port`, in lower case and without a closing dot."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].strip().lower().removesuffix(".")
