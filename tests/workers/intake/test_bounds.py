"""Bounds of a request: time, size, memory, connections."""

import asyncio
import gzip
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tls_redis import Certificates

from pipeline.errors import BadInput
from pipeline.ledger.ledger import Ledger
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.redis.connection import connect
from pipeline.service.access.keys import SenderKeys
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.workers import http_server, sockets
from pipeline.workers.intake import bodies
from pipeline.workers.intake.bodies import Room, receive_body
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.exchange import Service
from pipeline.workers.intake.listening import server_of
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.sockets import listener_socket


async def pieces(*chunks: bytes, then: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if then is not None:
        await then.wait()


def refused(chunks: Any, *, room: Room | None = None, slow_s: float = 30.0) -> Refusal:
    room = room or Room()

    async def run() -> None:
        with room.shared() as share:
            await receive_body(chunks(), encoding="identity", share=share, slow_s=slow_s)

    with pytest.raises(RequestRefused) as caught:
        asyncio.run(run())
    assert room.held == 0
    return caught.value.kind


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    assert refused(lambda: pieces(b"half", then=asyncio.Event()), slow_s=0.01) is Refusal.SLOW


def test_a_body_that_is_too_large_is_read_on_so_that_its_sender_sees_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY", 10)
    seen = []

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for n in range(count):
            seen.append(n)
            yield b"12345678"

    assert refused(lambda: chunks(4)) is Refusal.TOO_LARGE
    assert len(seen) == 4
    monkeypatch.setattr(bodies, "DRAINED", 20)
    assert refused(lambda: chunks(100)) is Refusal.TOO_LARGE
    assert len(seen) < 4 + 10


def test_bodies_of_all_requests_share_one_room() -> None:
    assert refused(lambda: pieces(b"12345678"), room=Room(limit=7)) is Refusal.FULL


@pytest.mark.parametrize("cut", [0, 1])
def test_every_member_of_a_gzip_body_is_read_and_a_cut_one_is_refused(cut: int) -> None:
    body = gzip.compress(b"one ") + gzip.compress(b"") * 2_000 + gzip.compress(b"two")
    if not cut:
        assert bodies.decompressed(body, "gzip") == b"one two"
        return
    with pytest.raises(RequestRefused) as caught:
        bodies.decompressed(body[:-cut], "gzip")
    assert caught.value.kind is Refusal.UNDECODABLE


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def on_a_server(settings: Settings, use: Any, *, at: str = "http://127.0.0.1:0") -> Any:
    ledger = Ledger(connect(settings), settings)
    listener = Listener.parse(at)
    with listener_socket(listener) as opened:

        async def run() -> Any:
            door = Door(Producer(ledger, Submit(None, ledger.client, settings), settings))
            service = Service(door=door, keys=SenderKeys(ledger.client, settings))
            server = server_of(listener, service, opened=opened)
            await server.start()
            try:
                return await use(opened.getsockname()[:2])
            finally:
                await server.stop()

        return asyncio.run(run())


def test_a_connection_that_says_nothing_is_cut(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.05)

    async def use(address: tuple[str, int]) -> None:
        for said in (b"", b"POST /lines HTTP/1.1\r\nHost: localho"):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(said)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                assert await reader.readexactly(1) == b""
            writer.close()

    on_a_server(settings, use)


def test_one_connection_too_many_is_turned_away_and_the_others_go_on(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "most_connections", lambda: 1)

    async def use(address: tuple[str, int]) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEALTH[:20])
        await asyncio.sleep(0.1)  # the request has begun
        other, closing = await asyncio.open_connection(*address)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await other.readexactly(1)
        closing.close()
        writer.write(HEALTH[20:])
        answer = await reader.read()
        writer.close()
        return answer

    assert on_a_server(settings, use).startswith(b"HTTP/1.1 200")


def test_who_only_connects_takes_no_place_from_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that has asked before keeps its connection, while some without a request are closed."""
    monkeypatch.setattr(http_server, "most_connections", lambda: 20)
    monkeypatch.setattr(http_server, "_CLOSED_AT_ONCE", 2)

    async def use(address: tuple[str, int]) -> list[bytes]:
        reader, writer = await asyncio.open_connection(*address)
        answers = []
        idle = []
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answers.append((await reader.read(4096)).split(b"\r\n")[0])
            idle += [await asyncio.open_connection(*address) for _ in range(30)]
        late, writing = await asyncio.open_connection(*address)
        writing.write(HEALTH)
        answers.append((await late.read()).split(b"\r\n")[0])
        for _, one in [*idle, (late, writing), (reader, writer)]:
            one.close()
        return answers

    assert on_a_server(settings, use) == [b"HTTP/1.1 200 OK"] * 4


def test_a_listener_speaks_tls_with_its_files_and_refuses_others_in_a_sentence(
    settings: Settings, tmp_path: Path
) -> None:
    made = Certificates.make(tmp_path)
    trusted = ssl.create_default_context(cafile=str(made.ca))

    async def use(address: tuple[str, int]) -> bytes:
        reader, writer = await asyncio.open_connection(*address, ssl=trusted, server_hostname="localhost")
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    url = f"https://127.0.0.1:0?cert={made.server}&key={made.folder}/server.key"
    assert on_a_server(settings, use, at=url).startswith(b"HTTP/1.1 200")
    with pytest.raises(BadInput, match="cannot speak TLS with"):
        on_a_server(settings, use, at=f"https://127.0.0.1:0?cert={made.server}&key={tmp_path}/none")


def test_the_bound_of_connections_leaves_files_for_other_things() -> None:
    assert 16 <= http_server.most_connections() <= sockets.MOST_CONNECTIONS
    with socket.create_server(("127.0.0.1", 0)):
        assert http_server.most_connections() > 0
