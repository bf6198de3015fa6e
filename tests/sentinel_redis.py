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
from tls_redis import Certificates, tls_lines, tls_server

from bench._sentinels import FAILOVER_TIMEOUT_MS, MASTER, sentinel_lines, server_lines, written
from pipeline.producer import Producer
from pipeline.workers.stack.private_redis import find_server

# Sentinels call a server down after so long; operators are told 2 to 5 s.
DOWN_AFTER_MS = 1_000
# When sentinels have another master at the latest: an election without a winner is held again after twice the
# `failover-timeout`, and a busy machine may need three.
TAKES_OVER_S = DOWN_AFTER_MS / 1_000 + 3 * 2 * FAILOVER_TIMEOUT_MS / 1_000


class Server:
    """A server or sentinel on a port of its own; it can be killed, frozen and started again."""

    def __init__(
        self,
        folder: Path,
        lines: list[str],
        *arguments: str,
        password: str = "",
        tls: Certificates | None = None,
    ) -> None:
        self.port = _free_port()
        self.binary = find_server() if tls is None else tls_server(folder.parent)
        self.conf = written(folder, self.port, [*lines, *([] if tls is None else tls_lines(self.port, tls))])
        self.arguments = arguments
        options = {} if tls is None else {"ssl": True, **tls.shown()}
        self.client = redis.Redis(
            host="127.0.0.1", port=self.port, password=password or None, socket_timeout=2, **options
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([str(self.binary), str(self.conf), *self.arguments])
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

    def __init__(
        self, servers: list[Server], sentinels: list[Server], login: str, query: str, *, tls: bool = False
    ) -> None:
        self.servers, self.sentinels = servers, sentinels
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        self.url = f"sentinel{'s' if tls else ''}://{login}{places}/0?master={MASTER}{query}"

    def master(self) -> Server:
        """The one that the sentinels name."""
        state = self.sentinels[0].client.sentinel_master(MASTER)
        return next(server for server in self.servers if server.port == state["port"])

    def replicas(self) -> list[Server]:
        """All but the master."""
        master = self.master()
        return [server for server in self.servers if server is not master]

    def took_over(self, before: Server) -> bool:
        """Whether all sentinels name one master that is not `before`, none of them still leads a fail-over,
        and that master takes a write which a replica acknowledges: from then on nothing refuses a push."""
        states = [sentinel.client.sentinel_master(MASTER) for sentinel in self.sentinels]
        ports = {state["port"] for state in states}
        if (
            len(ports) > 1
            or before.port in ports
            or any("failover" in str(state["flags"]) for state in states)
        ):
            return False
        with contextlib.suppress(redis.RedisError):
            client = self.master().client
            client.set("took-over", 1)
            return int(client.wait(1, 200)) >= 1
        return False

    def ready(self) -> bool:
        """The replicas follow, and each sentinel knows the two others and both replicas."""
        online = [slave for slave in _replicas_of(self.master()) if slave["state"] == "online"]
        states = [sentinel.client.sentinel_master(MASTER) for sentinel in self.sentinels]
        return len(online) == len(self.servers) - 1 and all(
            state["num-other-sentinels"] == 2 and state["num-slaves"] == 2 for state in states
        )


@contextmanager
def sentinel_group(
    folder: Path, *, password: str = "", sentinel_password: str = "", tls: Certificates | None = None
) -> Iterator[Group]:
    """A group that is ready; its processes end with the context. `tls`: nobody of it speaks without."""
    with ExitStack() as stack:

        def started(name: str, lines: list[str], *arguments: str, login: str = "") -> Server:
            server = Server(folder / name, lines, *arguments, password=login, tls=tls)
            stack.callback(server.end)
            server.start()
            return server

        first = started("redis0", server_lines(password=password), login=password)
        lines = server_lines(password=password, master_port=first.port)
        servers = [first, *(started(f"redis{n}", lines, login=password) for n in (1, 2))]
        watch = sentinel_lines(
            first.port, down_after_ms=DOWN_AFTER_MS, password=password, own_password=sentinel_password
        )
        sentinels = [started(f"sentinel{n}", watch, "--sentinel", login=sentinel_password) for n in range(3)]
        for sentinel in sentinels:  # a fail-over ends with what servers say when they are asked, every 10 s
            sentinel.client.execute_command("SENTINEL", "DEBUG", "INFO-PERIOD", "1000")
        query = f"&sentinel_password={sentinel_password}" if sentinel_password else ""
        query += "" if tls is None else f"&ssl_ca_certs={tls.ca}"
        login = f":{password}@" if password else ""
        group = Group(servers, sentinels, login, query, tls=tls is not None)
        assert wait_until(group.ready, timeout_s=30)
        yield group


def _replicas_of(server: Server) -> list[dict[str, str]]:
    facts = server.client.info("replication")
    return [value for name, value in facts.items() if name.startswith("slave") and isinstance(value, dict)]


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])
