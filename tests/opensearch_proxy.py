"""A proxy in front of a real OpenSearch that can refuse documents, or lose an answer, as a busy one does."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import urllib3

# Given (number of this bulk from 0, document id): None lets the document pass, otherwise its fate.
Refuse = Callable[[int, str], "tuple[int, str, str] | None"]  # status, type, reason


def none_refused(_bulk: int, _id: str) -> None:
    """Every document passes."""


@dataclass(slots=True, kw_only=True)
class Proxy:
    """What the proxy does and what it saw."""

    url: str = ""
    refuse: Refuse = none_refused
    lose_answers: int = 0  # so many bulks are carried out, but their answer never arrives
    busy: list[int] = field(
        default_factory=list
    )  # statuses of the next whole bulks, which are not carried out
    bulks: list[list[str]] = field(default_factory=list)  # ids in every bulk that arrived


@contextmanager
def proxy_to(target: str, *, address: str = "127.0.0.1") -> Iterator[Proxy]:
    """Runs until the block ends."""
    proxy = Proxy()
    pool = urllib3.PoolManager()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.path.startswith("/_bulk"):
                self._bulk(body)
            else:
                self._answer(*self._forward(body))

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _handle  # noqa: N815 # names given by http.server

        def _forward(self, body: bytes) -> tuple[int, bytes]:
            answer = pool.request(
                self.command, target + self.path, body=body, headers={"content-type": "application/json"}
            )
            return answer.status, answer.data

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _bulk(self, body: bytes) -> None:
            lines = body.splitlines()
            pairs = [
                (json.loads(a)["index"]["_id"], a, d) for a, d in zip(lines[::2], lines[1::2], strict=True)
            ]
            number = len(proxy.bulks)
            proxy.bulks.append([name for name, _, _ in pairs])
            if proxy.busy:
                status = proxy.busy.pop(0)
                error = {"type": "rejected_execution_exception", "reason": "queue is full"}
                self._answer(status, json.dumps({"error": error, "status": status}).encode())
                return
            fates = {name: proxy.refuse(number, name) for name, _, _ in pairs}
            passed = b"".join(a + b"\n" + d + b"\n" for name, a, d in pairs if fates[name] is None)
            items = iter(json.loads(self._forward(passed)[1])["items"] if passed else [])
            if proxy.lose_answers:
                proxy.lose_answers -= 1
                self.close_connection = True
                return
            merged = []
            for name, _, _ in pairs:
                fate = fates[name]
                if fate is None:
                    merged.append(next(items))
                else:
                    status, kind, reason = fate
                    error = {"type": kind, "reason": reason}
                    merged.append({"index": {"_id": name, "status": status, "error": error}})
            errors = any("error" in item["index"] for item in merged)
            self._answer(200, json.dumps({"errors": errors, "items": merged}).encode())

    server = ThreadingHTTPServer((address, 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        pool.clear()
