"""`python -m pipeline.workers.metrics [NAME]`: serves the metrics of a whole deployment to Prometheus; one is
enough.

    /metrics   what there is to measure (scrape.py)
    /healthz   200 while this process lives
    /readyz    200 while Redis answers, else 503 with the reason

It answers every reader, and only with numbers: off loopback keep it inside your network. A Host header that
is a public domain is refused. It answers without Redis too."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from socketserver import BaseServer
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler

import redis
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from pipeline.errors import BadInput, RedisUnavailable
from pipeline.logs import logger, set_up
from pipeline.redis.connection import answering, connect
from pipeline.settings import Settings
from pipeline.upkeep import start_thread
from pipeline.workers import sockets
from pipeline.workers.exits import exit_code
from pipeline.workers.loops import tend
from pipeline.workers.scrape import Scrape

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

ROLE: Final = "metrics"
REDIS_S: Final = 5.0  # Prometheus gives a scrape ten seconds
READER_S: Final = 10.0  # a reader that is silent for so long is let go
READERS: Final = 32  # at a time; more are turned away


class Handler(WSGIRequestHandler):
    """Logs no request; drops a silent reader."""

    timeout = READER_S

    def log_message(self, *_: Any) -> None:
        """Every scrape would be a line."""


class Server(ThreadingWSGIServer):
    """Serves on an open socket; bounds the readers at a time."""

    def __init__(self, opened: socket.socket, app: "WSGIApplication") -> None:
        super().__init__(opened.getsockname()[:2], Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = opened
        self.server_name, self.server_port = ROLE, opened.getsockname()[1]
        self.setup_environ()
        self.set_app(app)
        self._room = threading.BoundedSemaphore(READERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, *_: Any) -> None:
        """A reader that went away is no fault."""
        if not isinstance(sys.exc_info()[1], OSError):
            logger().exception("metrics.failed")


def application(client: "redis.Redis", settings: Settings) -> "WSGIApplication":
    """The three pages."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(client, settings))
    metrics: WSGIApplication = make_wsgi_app(registry)

    def healthz() -> tuple[str, str]:
        return "200 OK", "it lives"

    def readyz() -> tuple[str, str]:
        try:
            with answering():
                client.ping()
        except (RedisUnavailable, redis.RedisError) as exc:
            logger().info("redis.away", why=str(exc))  # the reason may name hosts and users
            return (
                "503 Service Unavailable",
                "Redis does not answer; look at it, or set REDIS_URL to the right one",
            )
        return "200 OK", "Redis answers"

    pages: dict[str, Callable[[], tuple[str, str]]] = {"/healthz": healthz, "/readyz": readyz}

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO", "/"), environ["REQUEST_METHOD"]
        if not sockets.is_own_host(environ.get("HTTP_HOST"), settings.stack.metrics_address):
            status, text = sockets.WRONG_HOST, "ask for it by its address or by a name of this machine"
        elif method not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", "this is for reading: GET"
        elif path == "/metrics":
            return metrics(environ, start_response)
        elif path in pages:
            status, text = pages[path]()
        else:
            status, text = "404 Not Found", "there are /metrics, /healthz and /readyz"
        body = f"{text}\n".encode()
        start_response(
            status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        )
        return [] if method == "HEAD" else [body]

    return app


def main(argv: list[str]) -> int:
    settings = Settings.load()
    set_up(settings.stack.log_level)
    fds = [int(a.removeprefix("--fd=")) for a in argv if a.startswith("--fd=")]
    names = [a for a in argv if not a.startswith("--")]
    try:
        opened = (
            socket.socket(fileno=fds[0])
            if fds
            else sockets.listen(ROLE, settings.stack.metrics_address, settings.stack.metrics_port)
        )
        server: BaseServer = Server(opened, application(connect(settings, timeout_s=REDIS_S), settings))
    except BadInput as exc:
        sys.stderr.write(f"logweir: {exc}\n")
        return 2
    logger(url=sockets.url(opened), pid=os.getpid()).info("metrics.starts")
    stop = threading.Event()

    def run() -> None:
        start_thread("metrics-http", server.serve_forever)
        stop.wait()
        server.shutdown()
        with contextlib.suppress(OSError):
            server.server_close()

    tend(settings, run, stop, role_name=ROLE, name=names[0] if names else ROLE)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
