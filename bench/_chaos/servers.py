"""The Redis of a chaos run: one server, or three with three sentinels; a proxy in front of each.

With sentinels the proxy is the network of its server: clients, sentinels and replicas connect through it."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench._chaos.proxy import Proxy
from bench._chaos.services import Services, free_port
from bench._sentinels import MASTER, sentinel_lines, server_lines, written
from pipeline.redis.connection import open_pool
from pipeline.workers.stack.private_redis import find_server

REDIS_MIB: Final = 256
SERVERS: Final = 3
DOWN_AFTER_MS: Final = 2_000  # as docs/operations.md recommends
CAUGHT_UP_S: Final = 2.0  # replicas say how far they are once a second
ASK_S: Final = 1.0
_KINDS: Final = ("redis", "sentinel")
# A replica whose link loses every answer connects anew after repl-timeout; the default of 60 s is longer than
# a run waits for lines to flow.
_OWN_LINES: Final = (
    f"maxmemory {REDIS_MIB}mb", "auto-aof-rewrite-min-size 16mb",
    "repl-timeout 15", "repl-ping-replica-period 3",
)  # fmt: skip


class Servers(Protocol):
    """The Redis of a run, of either kind."""

    url: str  # for the product, through the network
    direct: str  # for the bench
    replicas_ack: int

    def start(self) -> None:
        """Returns when it answers."""

    def close(self) -> None: ...

    def answers(self) -> bool: ...

    def master(self) -> str:
        """The name of the service that takes writes; "" while there is none."""

    def replicas(self) -> list[str]: ...

    def way(self) -> Proxy | None:
        """The network of the master."""

    def redundant(self) -> bool:
        """Whether one server may fail without a loss: all run, and replicas have what the master has."""


def client_of(url: str, *, timeout_s: float) -> "redis.Redis":
    """A client that repeats nothing."""
    return redis.Redis.from_pool(open_pool(url, timeout_s=timeout_s, connect_s=timeout_s))


class OneServer:
    """A single Redis with `appendfsync always`: what it answered survives, and nobody pushes it again."""

    replicas_ack = 0

    def __init__(self, folder: Path, services: Services) -> None:
        self.folder = folder
        self.services = services
        self.port = free_port()
        self.direct = f"redis://127.0.0.1:{self.port}/0"
        self.url = ""
        self.proxy = Proxy(self.port)
        self.client = client_of(self.direct, timeout_s=5)

    def start(self) -> None:
        self.proxy.__enter__()
        self.url = f"redis://127.0.0.1:{self.proxy.port}/0"
        self.services.add("redis", self._command(), {})
        self.services.start("redis")
        self.services.wait(self.answers, "Redis answers")

    def close(self) -> None:
        self.proxy.__exit__()

    def answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.client.ping())
        return False

    def master(self) -> str:
        return "redis"

    def replicas(self) -> list[str]:
        return []

    def way(self) -> Proxy:
        return self.proxy

    def redundant(self) -> bool:
        return True

    def _command(self) -> list[str]:
        directory = self.folder / "redis"
        directory.mkdir()
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": directory,
            "logfile": directory / "redis.log",
            "daemonize": "no",
            "appendonly": "yes",
            # an answer survives a crash: pushes have no source that could read again
            "appendfsync": "always",
            "save": "",
            "maxmemory": f"{REDIS_MIB}mb",
            "maxmemory-policy": "noeviction",
            "auto-aof-rewrite-min-size": "16mb",  # so that a run meets rewrites too
        }
        return [str(find_server()), *(word for k, v in options.items() for word in (f"--{k}", str(v)))]


class SentinelServers:
    """Three servers and three sentinels; a push is accepted once a replica has it."""

    replicas_ack = 1

    def __init__(self, folder: Path, services: Services) -> None:
        self.folder = folder / "redis"
        self.services = services
        self.ports = [free_port() for _ in range(SERVERS)]
        self.proxies = {f"redis-{n}": Proxy(port) for n, port in enumerate(self.ports)}
        self.sentinel_ports = [free_port() for _ in range(SERVERS)]
        places = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        self.url = self.direct = f"sentinel://{places}/0?master={MASTER}"
        self._asked = [_asking(port) for port in self.sentinel_ports]
        self._servers = {f"redis-{n}": _asking(port) for n, port in enumerate(self.ports)}
        self._open = ExitStack()

    def start(self) -> None:
        for proxy in self.proxies.values():
            self._open.enter_context(proxy)
        first = self.proxies["redis-0"].port
        for n, (name, proxy) in enumerate(self.proxies.items()):
            lines = [*server_lines(master_port=0 if n == 0 else first), *_OWN_LINES]
            lines += ["replica-announce-ip 127.0.0.1", f"replica-announce-port {proxy.port}"]
            self._begin(name, self.ports[n], lines)
        self.services.wait(lambda: all(_answers(one) for one in self._servers.values()), "Redis answers")
        for n, port in enumerate(self.sentinel_ports):
            self._begin(f"sentinel-{n}", port, sentinel_lines(first, down_after_ms=DOWN_AFTER_MS))
        self.services.wait(self.redundant, "the sentinels know the replicas")

    def _begin(self, name: str, port: int, lines: list[str]) -> None:
        conf = written(self.folder / name, port, lines)
        mode = ["--sentinel"] if name.startswith("sentinel") else []
        self.services.add(name, [str(find_server()), str(conf), *mode], {})
        self.services.start(name)

    def close(self) -> None:
        self._open.close()

    def answers(self) -> bool:
        name = self.master()
        return bool(name) and _answers(self._servers[name])

    def master(self) -> str:
        ports = {proxy.port: name for name, proxy in self.proxies.items()}
        return next((ports.get(int(view["port"]), "") for view in self._views() if not _down(view)), "")

    def replicas(self) -> list[str]:
        master = self.master()
        return [name for name in self.proxies if master and name != master]

    def way(self) -> Proxy | None:
        return self.proxies.get(self.master())

    def redundant(self) -> bool:
        if not all(self.services.running(f"{kind}-{n}") for kind in _KINDS for n in range(SERVERS)):
            return False
        views = list(self._views())
        agreed = {int(view["port"]) for view in views}
        complete = [int(view["num-other-sentinels"]) == int(view["num-slaves"]) == 2 for view in views]
        if len(views) < SERVERS or len(agreed) > 1 or not all(complete) or any(map(_down, views)):
            return False
        name = self.master()
        return bool(name) and self._caught_up(self._servers[name])

    def _caught_up(self, master: "redis.Redis") -> bool:
        """Whether both replicas have by now what the master had when it was asked."""
        end, wanted = time.monotonic() + CAUGHT_UP_S, None
        with contextlib.suppress(redis.RedisError):
            while time.monotonic() < end:
                facts: Any = master.info("replication")
                if facts["role"] != "master":
                    return False
                wanted = int(facts["master_repl_offset"]) if wanted is None else wanted
                found = [v for k, v in facts.items() if k[5:].isdigit() and isinstance(v, dict)]
                have = [int(v["offset"]) for v in found if v["state"] == "online" and int(v["lag"]) <= 1]
                if len(have) == SERVERS - 1 and min(have) >= wanted:
                    return True
                time.sleep(0.2)
        return False

    def _views(self) -> Iterator[dict[str, Any]]:
        """The master as each sentinel that answers knows it."""
        for sentinel in self._asked:
            with contextlib.suppress(redis.RedisError):
                view: Any = sentinel.sentinel_master(MASTER)
                yield view


def _down(view: dict[str, Any]) -> bool:
    return not view["is_master"] or view["is_sdown"] or view["is_odown"]


def _asking(port: int) -> "redis.Redis":
    return redis.Redis(
        port=port, socket_timeout=ASK_S, socket_connect_timeout=ASK_S, retry=Retry(NoBackoff(), 0)
    )


def _answers(client: "redis.Redis") -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False
