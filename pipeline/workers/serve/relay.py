"""Requests to a copy on another node: sent on as they are, with the key of their sender."""

import http.client
import queue
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

RELAYED: Final = "X-Logweir-Relayed"  # a request that came from another node goes to no third one
MOVED: Final = "X-Logweir-Moved"  # the copy is not there any more
IDLE: Final = 8  # connections to one node that wait for the next request
MOST_ANSWER: Final = 256 << 20
# Of a request and of its answer; all others belong to one connection.
_SENT: Final = ("authorization", "content-type", "inference-header-content-length")
_RETURNED: Final = ("content-type", "inference-header-content-length", "retry-after", MOVED.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedAnswer:
    """The answer of another node."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Relay:
    """Keeps connections to other nodes. Threads share it."""

    def __init__(self) -> None:
        self._idle: dict[str, queue.LifoQueue[http.client.HTTPConnection]] = {}

    def send(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        by: str,
        timeout_s: float,
    ) -> RelayedAnswer:
        """`headers`: with names in lower case; `by`: this node. Raises OSError, HTTPException."""
        own = {name: headers[name] for name in _SENT if name in headers} | {RELAYED: by}
        waiting = self._idle.setdefault(url, queue.LifoQueue(IDLE))
        while True:
            try:
                connection, used = waiting.get_nowait(), True
            except queue.Empty:
                connection, used = _connect(url, timeout_s), False
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                connection.request(method, path, body or None, own)
                answer = connection.getresponse()
                content = answer.read(MOST_ANSWER + 1)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                connection.close()
                if used:  # it was closed while it waited; a model may answer a request twice
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            break
        if answer.will_close or len(content) > MOST_ANSWER:
            connection.close()
        else:
            try:
                waiting.put_nowait(connection)
            except queue.Full:
                connection.close()
        if len(content) > MOST_ANSWER:
            raise OSError(f"its answer has more than {MOST_ANSWER >> 20} MiB")
        returned = {name: value for name, value in answer.getheaders() if name.lower() in _RETURNED}
        return RelayedAnswer(status=answer.status, headers=returned, body=content)

    def close(self) -> None:
        """Closes connections that wait."""
        for waiting in self._idle.values():
            while not waiting.empty():
                waiting.get_nowait().close()


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    if parts.scheme == "https":
        return http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=ssl.create_default_context()
        )
    return http.client.HTTPConnection(host, port, timeout=timeout_s)
