"""A payment service over TLS; logs to stdout as logfmt. SIGHUP loads the certificate again.

It is one of the programs whose logs `scripts/record_samples` records.
"""

import argparse
import json
import random
import signal
import ssl
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_lock = threading.Lock()


def log(level: str, message: str, **facts: Any) -> None:
    """One logfmt line."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    pairs = [
        f"{key}={json.dumps(str(value)) if ' ' in str(value) else value}" for key, value in facts.items()
    ]
    with _lock:
        print(" ".join([f"ts={stamp}", f"level={level}", f'msg="{message}"', *pairs]), flush=True)


class Handler(BaseHTTPRequestHandler):
    """POST /payments/<order> with {"amount": euros}: 200, or 402 above the card's limit."""

    def do_POST(self) -> None:
        begun = time.perf_counter()
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        order = self.path.rpartition("/")[2]
        amount = float(body.get("amount", 0))
        time.sleep(random.uniform(0.002, 0.02))  # what the card network takes
        accepted = amount <= 400
        self.send_response(200 if accepted else 402)
        self.send_header("Content-Length", "0")
        self.end_headers()
        facts = {"order": order, "amount": f"{amount:.2f}", "currency": "EUR"}
        spent_ms = f"{(time.perf_counter() - begun) * 1000:.1f}"
        if accepted:
            log("info", "payment authorised", **facts, ms=spent_ms)
        else:
            log("warn", "payment declined", **facts, reason="over limit", ms=spent_ms)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged by `do_POST`."""


class Server(ThreadingHTTPServer):
    """Shakes hands in the request's own thread, so that one bad client does not hold up the rest."""

    daemon_threads = True
    context: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(5)
        try:
            secured = self.context.wrap_socket(request, server_side=True)
        except (ssl.SSLError, OSError) as exc:
            log("error", "TLS handshake failed", client=client_address[0], error=exc)
            return
        try:
            self.RequestHandlerClass(secured, client_address, self)
        except (ssl.SSLError, OSError) as exc:
            log("error", "connection lost", client=client_address[0], error=exc)
        finally:
            secured.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--certificate", required=True)
    parser.add_argument("--key", required=True)
    options = parser.parse_args()
    server = Server(("127.0.0.1", options.port), Handler)

    def load(*_: Any) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.certificate, options.key)
        server.context = context
        log("info", "certificate loaded", path=options.certificate)

    def stop(*_: Any) -> None:
        log("info", "stopping")
        sys.exit(0)

    load()
    signal.signal(signal.SIGHUP, load)
    signal.signal(signal.SIGTERM, stop)
    log("info", "listening", address=f"127.0.0.1:{options.port}")
    server.serve_forever()


if __name__ == "__main__":
    main()
