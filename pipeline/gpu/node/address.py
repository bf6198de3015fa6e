"""The address of this machine that other machines of the pool reach, and a free port on it.

All of them reach one Redis, so the address is the one that a packet to Redis would leave from. A Redis of
this machine does not tell it; then it is that of the default route. Nothing is sent.
"""

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.settings.values import SentinelAddress, is_sentinel

LOOPBACK: Final = "127.0.0.1"
ELSEWHERE: Final = "198.51.100.1"  # of RFC 5737: an address that no machine has
PORT: Final = 9  # any


def redis_host(url: str) -> str:
    """The host of a Redis, or of its first sentinel; "" for a socket file."""
    if is_sentinel(url):
        return SentinelAddress.parse(url).sentinels[0][0]
    parts = urlsplit(url)
    return "" if parts.scheme == "unix" else parts.hostname or ""


def own_address(host: str) -> str:
    """`host`: of the Redis, "" for one of this machine."""
    for target in (host, ELSEWHERE):
        found = _route_to(target) if target else ""
        if found and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found
    return LOOPBACK


def interface_of(address: str) -> str:
    """The name of the network interface with this address, "" where none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return ""


def free_port(address: str) -> int:
    """A port that no process listens on now. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind((address, 0))
        return int(listening.getsockname()[1])


def _route_to(host: str) -> str:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.connect(target)
            return str(asking.getsockname()[0])
    except OSError:  # no such name, or no route
        return ""
