"""Three Redis servers and three sentinels of a test's own, as docs/operations.md describes them."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis
from polling import wait_until

from pipeline.producer import Producer
from pipeline.workers.stack.private_redis import find_server

MASTER = "main"
# Sentinels call a server down after so long; operators are told 2 to 5 s.
DOWN_AFTER_MS = 1_000


class Server:
    """A server or sentinel on a port of its own; it can be killed, frozen and started again."""

    def __init__(self, folder: Path, lines: list[str], *arguments: str, password: str = "") -> None:
        folder.mkdir(parents=True)
        self.port = _free_port()
        self.conf = folder / "server.conf"
        own = [f"port {self.port}", "bind 127.0.0.1", f"dir {folder}", f"logfile {folder}/log"]
        self.conf.write_text("\n".join([*own, *lines, ""]))
        self.arguments = arguments
        self.client = redis.Redis(port=self.port, password=password or None, socket_timeout=2)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([str(find_server()), str(self.conf), *self.arguments])
        assert wait_until(self._answers, timeout_s=20), self.conf.with_name("log").read_text()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(10)

    def end(self) -> None:
        self.client.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            return bool(self.client.ping())
        return False


def close(producer: Producer) -> None:
    """Its connections, which a test over TCP must not leave to the garbage collector."""
    producer.ledger.client.close()
    if producer.submit.app is not None:
        producer.submit.app.pool.force_close_all()
        producer.submit.app.close()


class Group:
    """The servers, the sentinels, and the REDIS_URL of both."""

    def __init__(self, servers: list[Server], sentinels: list[Server], login: str, query: str) -> None:
        self.servers, self.sentinels = servers, sentinels
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        self.url = f"sentinel://{login}{places}/0?master={MASTER}{query}"

    def master(self) -> Server:
        """The one that the sentinels name."""
        state = self.sentinels[0].client.sentinel_master(MASTER)
        return next(server for server in self.servers if server.port == state["port"])

    def replicas(self) -> list[Server]:
        """All but the master."""
        master = self.master()
        return [server for server in self.servers if server is not master]

    def ready(self) -> bool:
        """The replicas follow, and each sentinel knows the two others and both replicas."""
        online = [slave for slave in _replicas_of(self.master()) if slave["state"] == "online"]
        states = [sentinel.client.sentinel_master(MASTER) for sentinel in self.sentinels]
        return len(online) == len(self.servers) - 1 and all(
            state["num-other-sentinels"] == 2 and state["num-slaves"] == 2 for state in states
        )


@contextmanager
def sentinel_group(folder: Path, *, password: str = "", sentinel_password: str = "") -> Iterator[Group]:
    """A group that is ready; its processes end with the context."""
    with ExitStack() as stack:

        def started(server: Server) -> Server:
            stack.callback(server.end)
            server.start()
            return server

        lines = ['save ""', "appendonly yes", "appendfsync everysec", "repl-diskless-sync-delay 0"]
        lines += ["min-replicas-to-write 1", "min-replicas-max-lag 2", "maxmemory-policy noeviction"]
        if password:
            lines += [f"requirepass {password}", f"masterauth {password}"]
        first = started(Server(folder / "redis0", lines, password=password))
        lines.append(f"replicaof 127.0.0.1 {first.port}")
        servers = [
            first,
            *(started(Server(folder / f"redis{n}", lines, password=password)) for n in (1, 2)),
        ]
        watch = [f"sentinel monitor {MASTER} 127.0.0.1 {first.port} 2"]
        watch += [f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}"]
        watch += [f"sentinel failover-timeout {MASTER} 6000"]
        if password:
            watch.append(f"sentinel auth-pass {MASTER} {password}")
        if sentinel_password:
            watch.append(f"requirepass {sentinel_password}")
        sentinels = [
            started(Server(folder / f"sentinel{n}", watch, "--sentinel", password=sentinel_password))
            for n in range(3)
        ]
        group = Group(
            servers,
            sentinels,
            f":{password}@" if password else "",
            f"&sentinel_password={sentinel_password}" if sentinel_password else "",
        )
        assert wait_until(group.ready, timeout_s=30)
        yield group


def _replicas_of(server: Server) -> list[dict[str, str]]:
    facts = server.client.info("replication")
    return [value for name, value in facts.items() if name.startswith("slave") and isinstance(value, dict)]


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])
