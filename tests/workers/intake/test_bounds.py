"""Bounds of a request: time, size, memory, connections."""

import asyncio
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
from pipeline.workers import http_server
from pipeline.workers.bounds import connection_budget
from pipeline.workers.bounds.byte_budget import ByteBudget
from pipeline.workers.bounds.connection_budget import ConnectionBudget
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


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def on_a_server(
    settings: Settings, use: Any, *, at: str = "http://127.0.0.1:0", room: ByteBudget | None = None
) -> Any:
    ledger = Ledger(connect(settings), settings)
    listener = Listener.parse(at)
    with listener_socket(listener) as opened:

        async def run() -> Any:
            door = Door(Producer(ledger, Submit(None, ledger.client, settings), settings))
            service = Service(door=door, keys=SenderKeys(ledger.client, settings))
            if room is not None:
                service.budget = ConnectionBudget(room)
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
    monkeypatch.setattr(ConnectionBudget, "limit", 1)

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
    monkeypatch.setattr(ConnectionBudget, "limit", 20)

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
    assert 8 <= ConnectionBudget().limit <= connection_budget.MOST_CONNECTIONS


def test_a_head_without_an_end_is_refused(settings: Settings) -> None:
    async def use(address: tuple[str, int]) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        async with asyncio.timeout(20):
            for _ in range(5):
                writer.write(b"X-Long: " + b"x" * 20_000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)
            answer = await reader.read()
        writer.close()
        return answer

    assert on_a_server(settings, use).startswith(b"HTTP/1.1 431 ")


def test_a_head_that_comes_in_pieces_is_answered_whatever_came_before_it(settings: Settings) -> None:
    """A long body and the beginning of the next head may come at once."""
    body = b"one line\n" * 30_000
    post = b"POST /api/v1/lines?workload=w HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )

    async def use(address: tuple[str, int]) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post + body + HEALTH[:20])
        await asyncio.sleep(0.2)
        writer.write(HEALTH[20:])
        answers = await reader.read()
        writer.close()
        return answers

    answers = on_a_server(settings, use)
    assert answers.count(b"HTTP/1.1 200") == 2, answers


def test_heads_that_do_not_end_share_the_memory_of_all_listeners(settings: Settings) -> None:
    """The one that began first gives way, and a sender is answered."""
    budget = ByteBudget(limit=100_000)
    said = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: "

    async def use(address: tuple[str, int]) -> tuple[bytes, bytes]:
        held = []
        for _ in range(4):
            held.append(await asyncio.open_connection(*address))
            held[-1][1].write(said)
            await asyncio.sleep(0.05)
            held[-1][1].write(b"x" * 40_000)
            await asyncio.sleep(0.05)
        assert budget.held <= budget.limit
        gone = await held[0][0].read()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEALTH)
        answer = await reader.read()
        for _, one in [*held, (reader, writer)]:
            one.close()
        return gone, answer

    gone, answer = on_a_server(settings, use, room=budget)
    assert gone == b"" and answer.startswith(b"HTTP/1.1 200")
    assert budget.held == 0
