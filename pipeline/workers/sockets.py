"""Listening sockets of the sidecars, Flower and the metrics.

The supervisor opens them and hands them over: stacks that start at once get different ports, and a port
outlives a restart of its process."""

import errno
import ipaddress
import socket
from typing import Final

from pipeline.errors import BadInput

# Ports tried from the wanted one on.
TRIES: Final = 100


def listen(name: str, address: str, first: int) -> socket.socket:
    """A listening socket on the wanted port, or on the next free one. `name` is that of the settings,
    `flower`.

    Raises BadInput.
    """
    why = ""
    for port in range(first, min(first + TRIES, 2**16)):
        try:
            family, *_, where = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.create_server(where, family=family, backlog=128)
        except OSError as exc:
            why = exc.strerror or str(exc)
            if exc.errno != errno.EADDRINUSE:
                break
        else:
            return listener
    raise BadInput(
        f"{name.capitalize()} cannot listen on {address} from port {first} on ({why}); set {name}_address or "
        f"{name}_port, or {name} = false"
    )


def url(listener: socket.socket) -> str:
    """Where a browser on this machine finds what listens there."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
