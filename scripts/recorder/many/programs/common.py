"""What the Python services of the set share: logs in three styles, a trace id per request, HTTP both ways.

Each service is a program of its own, written like an ordinary one. `Hooks` is the door for faults: the
recorder writes a small file, and the service's code then takes a wrong turn. It prints nothing itself.
"""

import http.client
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

PORTS = {
    "gateway": 28080, "web": 28001, "catalog": 28002, "search": 28003, "orders": 28004, "payments": 28005,
    "notify": 28006, "postgres": 25432, "cache": 26379, "queue": 26380,
}  # fmt: skip
STATS_S = 5.0
RETRIES_S = (0.3, 0.7)
_here = threading.local()


class UpstreamError(Exception):
    """Another service answered 5xx, or not at all."""


class Refused(Exception):
    """The request is at fault; `status` is the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def current_trace() -> str | None:
    return getattr(_here, "trace", None)


@contextmanager
def traced(trace: str) -> Iterator[None]:
    """Everything that this thread logs and sends inside belongs to `trace`."""
    _here.trace = trace
    try:
        yield
    finally:
        _here.trace = None


class Hooks:
    """The fault that the recorder asks for now: {"kind", "variant", "share"} in $FAULT_FILE, or none."""

    def __init__(self) -> None:
        self._path = Path(os.environ.get("FAULT_FILE", "/nonexistent"))
        self._stamp = 0
        self._now: dict[str, Any] = {}
        self._turn = 0
        self._kept: list[bytearray] = []

    def _current(self) -> dict[str, Any]:
        try:
            stamp = self._path.stat().st_mtime_ns
        except OSError:
            self._now, self._stamp = {}, 0
            return {}
        if stamp != self._stamp:
            self._stamp, self._now = stamp, json.loads(self._path.read_text())
        return self._now

    def variant(self, kind: str) -> int | None:
        """Which wrong turn of `kind` this request takes; None: none. Notes the trace that took it."""
        now = self._current()
        if now.get("kind") != kind:
            return None
        self._turn += 1
        if self._turn % 10 >= now.get("share", 1.0) * 10:
            return None
        if trace := current_trace():
            with self._path.with_suffix(".traces").open("a") as notes:
                notes.write(trace + "\n")
        return int(now.get("variant", 0))

    def before(self) -> None:
        """Latency, CPU and memory: what goes wrong before any code of the request runs."""
        kind = self._current().get("kind")
        if kind == "latency" and self.variant("latency") is not None:
            time.sleep(float(self._now.get("seconds", 1.2)))
        elif kind == "cpu" and self.variant("cpu") is not None:
            until = time.thread_time() + float(self._now.get("seconds", 0.35))
            while time.thread_time() < until:
                re.match(r"(a+)+$", "a" * 17 + "b")  # backtracks; it keeps the interpreter's lock
        elif kind == "memory" and self.variant("memory") is not None:
            self._kept.append(bytearray(b"\1") * (int(self._now.get("mib", 12)) << 20))


hooks = Hooks()


class Log:
    """One line per event on stdout. `style`: text, json, logfmt."""

    def __init__(self, service: str, style: str) -> None:
        self.service, self.style = service, style
        self._lock = threading.Lock()
        if style == "text":
            handler = logging.StreamHandler(sys.stdout)
            form = "%(asctime)s %(levelname)s [%(threadName)s] %(name)s: %(message)s"
            handler.setFormatter(logging.Formatter(form))
            self._logger = logging.getLogger(service)
            self._logger.addHandler(handler)
            self._logger.setLevel(logging.INFO)

    def __call__(self, level: str, message: str, *, failed: bool = False, **facts: Any) -> None:
        """`failed`: inside an except block; its traceback is part of the event."""
        trace = current_trace()
        if self.style == "text":
            pairs = "".join(f" {key}={value}" for key, value in facts.items())
            text = f"{message}{pairs}" + (f" [trace_id={trace}]" if trace else "")
            self._logger.log(getattr(logging, level.upper()), text, exc_info=failed)
            return
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        record: dict[str, Any] = {"trace_id": trace} if trace else {}
        record |= facts
        if self.style == "json":
            if failed:
                record["exception"] = traceback.format_exc().strip()
            head = {"timestamp": stamp, "level": level, "service": self.service, "event": message}
            line = json.dumps(head | record, default=str)
        else:
            if failed:
                record["error"] = repr(sys.exc_info()[1])
            pairs = " ".join(f"{key}={_quoted(value)}" for key, value in record.items())
            line = f'ts={stamp} level={level} service={self.service} msg="{message}" {pairs}'.rstrip()
            if failed:
                line += "\n" + traceback.format_exc().rstrip()
        with self._lock:
            print(line, flush=True)


def _quoted(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if re.search(r'[\s"=]', text) or not text else text


def _connect(connection: http.client.HTTPConnection) -> None:
    """A service that is just starting refuses: again, a little later."""
    for wait_s in RETRIES_S:
        try:
            connection.connect()
        except ConnectionRefusedError:
            time.sleep(wait_s)
        else:
            return
    connection.connect()


def call(service: str, method: str, path: str, body: Any = None, *, timeout_s: float = 2.0) -> Any:
    """The JSON answer of another service. Raises UpstreamError, and Refused for its 4xx."""
    port = int(os.environ.get(f"{service.upper()}_PORT", PORTS[service]))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    headers = {"X-Trace-Id": current_trace() or "", "Content-Type": "application/json"}
    try:
        _connect(connection)
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read()
    except (OSError, http.client.HTTPException) as exc:
        raise UpstreamError(
            f"{service} {method} {path.partition('?')[0]}: {exc or type(exc).__name__}"
        ) from exc
    finally:
        connection.close()
    if answer.status >= 500:
        raise UpstreamError(f"{service} {method} {path.partition('?')[0]} answered {answer.status}")
    if answer.status >= 400:
        raise Refused(answer.status, json.loads(data or b"{}").get("error", "refused"))
    return json.loads(data)


Route = tuple[str, re.Pattern[str], Callable[..., Any]]


class Handler(BaseHTTPRequestHandler):
    """Routes one request; a handler returns a body, or (status, body)."""

    log: Log
    routes: list[Route]
    quiet: frozenset[str] = frozenset({"/healthz"})

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        url = urlsplit(self.path)
        with traced(self.headers.get("X-Trace-Id") or uuid.uuid4().hex):
            begun = time.perf_counter()
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            if url.path in self.quiet:
                status, answer = 200, {"status": "ok"}
            else:
                status, answer = self._answer(url.path, dict(parse_qsl(url.query)), body)
            data = json.dumps(answer, default=str).encode()
            spent_ms = (time.perf_counter() - begun) * 1000
            if url.path not in self.quiet:
                self.report(url.path, status, len(data), spent_ms)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def _answer(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        try:
            for method, pattern, handle in self.routes:
                match = pattern.fullmatch(path)
                if match and method == self.command:
                    hooks.before()
                    answer = handle(*match.groups(), query=query, body=body)
                    return answer if isinstance(answer, tuple) else (200, answer)
        except Refused as exc:
            self.log("warning", "request refused", path=path, status=exc.status, reason=exc)
            return exc.status, {"error": str(exc)}
        except UpstreamError as exc:
            self.log("error", "upstream failed", path=path, error=exc)
            return 502, {"error": "upstream failed"}
        except Exception:  # noqa: BLE001 -- the edge of a request: logged, answered with 500
            self.log("error", "unhandled error", path=path, failed=True)
            return 500, {"error": "internal error"}
        return 404, {"error": "no such route"}

    def report(self, path: str, status: int, size: int, spent_ms: float) -> None:
        self.log(
            "info", "request", method=self.command, path=path, status=status, bytes=size,
            duration_ms=f"{spent_ms:.1f}",
        )  # fmt: skip

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged by `report`."""


class Server(ThreadingHTTPServer):
    """Logs a client that went away as one line."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_port = True  # a new release listens before the old one ends
    log: Log
    listener: socket.socket | None = None

    def handle_error(self, *_: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError):
            self.log("warning", "client closed the connection", error=error)
        else:
            self.log("error", "request aborted", failed=True)


def route(method: str, pattern: str, handle: Callable[..., Any]) -> Route:
    return method, re.compile(pattern), handle


def report_stats(log: Log) -> None:
    """Starts the line of runtime statistics that many services write."""

    def run() -> None:
        spent = time.process_time()
        while True:
            time.sleep(STATS_S)
            now = time.process_time()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            log(
                "info", "runtime stats", rss_mb=pages * resource.getpagesize() >> 20,
                cpu_pct=f"{(now - spent) / STATS_S * 100:.0f}", threads=threading.active_count(),
            )  # fmt: skip
            spent = now

    threading.Thread(target=run, daemon=True, name="stats").start()


def begin(log: Log) -> None:
    """The start-up line, the memory limit of the unit file, and an orderly end on SIGTERM."""
    threading.stack_size(1 << 19)
    if limit := int(os.environ.get("MEMORY_MIB", "0")):
        resource.setrlimit(resource.RLIMIT_DATA, (limit << 20, limit << 20))

    def stop(*_: Any) -> None:
        log("info", "shutting down")
        if Server.listener:
            Server.listener.close()
        time.sleep(0.4)  # requests that are under way end in their threads
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    log("info", "starting", version=os.environ.get("RELEASE", "1.0.0"), pid=os.getpid())
    report_stats(log)


def serve(service: str, log: Log, routes: list[Route], handler: type[Handler] = Handler) -> None:
    """Serves until SIGTERM."""
    begin(log)
    handler.log, handler.routes, Server.log = log, routes, log
    server = Server(("127.0.0.1", PORTS[service]), handler)
    Server.listener = server.socket
    log("info", "listening", port=PORTS[service])
    server.serve_forever()


def release_fault() -> int | None:
    """The mistake that this release was built with; None in every good one."""
    text = os.environ.get("RELEASE_FAULT", "")
    return int(text) if text else None
