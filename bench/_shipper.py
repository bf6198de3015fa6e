"""A client of the intake in a process of its own: sends prepared requests over connections that stay open.

    python -m bench._shipper HOST PORT FILE CONNECTIONS

`FILE` holds a list of requests in MessagePack. The process says "ready" on standard output, begins with the
first line on standard input, and ends with its figures as JSON. A request that was refused for a while is
sent again, as shippers do."""

import http.client
import json
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import msgspec

AGAIN_S = 0.2
TIMEOUT_S = 60.0


class Request(msgspec.Struct, frozen=True, array_like=True):
    """As a client sends it. `due`: when, in seconds since 1970; 0 for as soon as possible."""

    path: str
    headers: dict[str, str]
    body: bytes
    lines: int
    due: float = 0.0


class Shipper:
    """The connections of a process take the next request in turn."""

    def __init__(self, host: str, port: int, requests: list[Request]) -> None:
        self.host, self.port = host, port
        self.waiting = deque(requests)
        self.statuses: Counter[int] = Counter()
        self.waits: list[float] = []  # seconds from a request to its answer
        self.late = 0.0  # seconds behind the plan, at most
        self.fault = ""

    def connection(self) -> None:
        """Until no request waits, or one is refused for good."""
        client = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            while self.waiting and not self.fault:
                try:
                    request = self.waiting.popleft()
                except IndexError:  # another thread took the last one
                    break
                self._send(client, request)
        except (OSError, http.client.HTTPException) as exc:
            self.fault = repr(exc)
        finally:
            client.close()

    def _send(self, client: http.client.HTTPConnection, request: Request) -> None:
        if request.due:
            time.sleep(max(0.0, request.due - time.time()))
            self.late = max(self.late, time.time() - request.due)
        while not self.fault:
            began = time.perf_counter()
            client.request("POST", request.path, request.body, request.headers)
            answer = client.getresponse()
            text = answer.read()
            self.statuses[answer.status] += 1
            if answer.status < 300:
                self.waits.append(time.perf_counter() - began)
                return
            if answer.status not in (429, 503):
                self.fault = f"{answer.status} {text[:300]!r}"
                return
            time.sleep(AGAIN_S)


def main(host: str, port: str, path: str, connections: str) -> int:
    requests = msgspec.msgpack.decode(Path(path).read_bytes(), type=list[Request])
    shipper = Shipper(host, int(port), requests)
    threads = [threading.Thread(target=shipper.connection) for _ in range(int(connections))]
    print("ready", flush=True)
    sys.stdin.readline()
    spent = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waits = sorted(shipper.waits)
    print(
        json.dumps(
            {
                "requests": len(waits),
                "refused": sum(n for status, n in shipper.statuses.items() if status >= 300),
                "cpu_s": time.process_time() - spent,
                "answer_p50_s": waits[len(waits) // 2] if waits else 0.0,
                "answer_p99_s": waits[int(len(waits) * 0.99)] if waits else 0.0,
                "late_s": shipper.late,
                "fault": shipper.fault,
            }
        )
    )
    return 1 if shipper.fault else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
