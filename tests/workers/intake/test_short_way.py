"""The short way of small requests: the answers of the usual way, and the same bounds."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from polling import wait_until

from pipeline.errors import RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.redis.connection import connect
from pipeline.service.access.keys import SenderKeys
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.workers import http_server
from pipeline.workers.intake.dialects import LinesDialect
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.exchange import INLINE_BYTES, Service
from pipeline.workers.intake.listening import server_of
from pipeline.workers.intake.rule_book import RuleBook
from pipeline.workers.intake.small_requests import SmallRequests
from pipeline.workers.short_way.known_heads import KnownHead, parted_head
from pipeline.workers.sockets import listener_socket

JSON = "application/json"


@dataclass
class Server:
    """A listener in this process, and how many of its requests began the short way."""

    settings: Settings
    service: Service
    address: tuple[str, int]
    stop: Callable[[], Awaitable[None]]
    begun: list[int]
    clients: "list[Client]" = field(default_factory=list)

    async def client(self) -> "Client":
        self.clients.append(Client(*await asyncio.open_connection(*self.address)))
        return self.clients[-1]

    def accepted(self, workload: str) -> int:
        ledger = Ledger(connect(self.settings), self.settings)
        return ledger.backlog.totals().get(workload, {}).get("accepted", 0)


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def ask(self, path: str, body: bytes, *, pieces: int = 1, **headers: str) -> bytes:
        data = request(path, body, **headers)
        size = -(-len(data) // pieces)
        for begin in range(0, len(data), size):
            self.writer.write(data[begin : begin + size])
            await self.writer.drain()
            await asyncio.sleep(0)
        return await self.answer()

    async def answer(self) -> bytes:
        """Without its date."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.startswith(b"date: ")]
        length = next((int(line[16:]) for line in lines if line.startswith(b"content-length: ")), 0)
        return b"\r\n".join(lines) + await self.reader.readexactly(length)


def request(path: str, body: bytes, **headers: str) -> bytes:
    named = {"Host": "localhost", "Content-Length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items()]
    return f"POST {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + body


def on_server(
    settings: Settings, use: Callable[[Server], Awaitable[Any]], *, rules: Path | None = None
) -> Any:
    ledger = Ledger(connect(settings), settings)
    listener = Listener.parse("http://127.0.0.1:0")
    begun: list[int] = []
    begin = SmallRequests.begin

    def counted(self: SmallRequests, one: Any) -> bool:
        taken = begin(self, one)
        begun.append(taken)
        return taken

    async def run() -> Any:
        door = Door(Producer(ledger, Submit(None, ledger.client, settings), settings))
        service = Service(door=door, keys=SenderKeys(ledger.client, settings), rules=RuleBook(rules))
        server = server_of(listener, service, opened=opened)
        await server.start()
        made = Server(settings, service, opened.getsockname()[:2], server.stop, begun)
        try:
            return await use(made)
        finally:
            for client in made.clients:
                await client.close()
            door.hurry()
            await server.stop()
            await door.close()

    with listener_socket(listener) as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SmallRequests, "begin", counted)
        return asyncio.run(run())


def bulk(*messages: str, index: str = "shop") -> bytes:
    pairs = ((json.dumps({"create": {"_index": index}}), json.dumps({"message": m})) for m in messages)
    return "".join(f"{action}\n{document}\n" for action, document in pairs).encode()


def loki(*lines: str) -> bytes:
    values = [[str(1_700_000_000_000_000_000 + n), line] for n, line in enumerate(lines)]
    return json.dumps({"streams": [{"stream": {"app": "shop"}, "values": values}]}).encode()


def otlp(*lines: str) -> bytes:
    records = [{"timeUnixNano": "1700000000123456000", "body": {"stringValue": line}} for line in lines]
    service = {"key": "service.name", "value": {"stringValue": "shop"}}
    scopes = [{"logRecords": records}]
    return json.dumps(
        {"resourceLogs": [{"resource": {"attributes": [service]}, "scopeLogs": scopes}]}
    ).encode()


@pytest.mark.parametrize(
    ("path", "bodies", "headers"),
    [
        ("/v1/logs", [otlp("a"), otlp("b", "c"), b"[]", otlp("d"), b"{}"], {"Content_Type": JSON}),
        ("/v1/logs", [b"", b"\xff\xff", b"\xff\xff"], {"Content_Type": "application/x-protobuf"}),
        ("/v1/logs", [b"x", b"y"], {"Content_Type": "text/html"}),
        ("/_bulk", [bulk("a"), bulk("b", "c"), b'{"delete":{}}\n', bulk("\ud800")], {"User_Agent": "x/1"}),
        ("/loki/api/v1/push", [loki("a"), loki("b"), b"[", loki("c")], {"Content_Type": JSON}),
        ("/services/collector", [b'{"event":"a"}', b'{"event":"b"}', b'{"e":1}', b'{"event":"c"}'], {}),
        ("/lines?workload=shop", [b"a", b"b\nc", b"d"], {}),
        ("/lines?workload=shop", [b"a", b"a", b"b"], {"Idempotency_Key": "k"}),
        ("/lines", [b"a", b"b"], {"Origin": "http://page.example"}),
        ("/lines", [b"a", b"b"], {"Host": "page.example"}),
        ("/lines", [gzip.compress(b"a"), gzip.compress(b"b"), b"none"], {"Content_Encoding": "gzip"}),
        ("/lines", [b"a", b"b"], {"Content_Encoding": "br"}),
        ("/none", [b"a", b"b"], {}),
    ],
)
def test_an_answer_is_that_of_the_usual_way(
    settings: Settings, path: str, bodies: list[bytes], headers: dict[str, str]
) -> None:
    async def answers(server: Server, *, repeating: bool) -> list[bytes]:
        client = await server.client()
        found = []
        for body in bodies:
            found.append(await client.ask(path, body, **headers))
            if not repeating:
                client = await server.client()
        return found

    async def use(server: Server, *, repeating: bool) -> tuple[list[bytes], int, dict[str, int]]:
        found = await answers(server, repeating=repeating)
        lines = Ledger(connect(server.settings), server.settings).backlog.totals()
        return found, len(server.begun), {name: of["accepted"] for name, of in lines.items()}

    def on_way(*, repeating: bool) -> Any:
        prefix = f"{settings.redis.key_prefix}{int(repeating)}"
        own = settings.replace(key_prefix=prefix)
        return on_server(own, lambda server: use(server, repeating=repeating))

    usual, none, lines = on_way(repeating=False)
    short, begun, same = on_way(repeating=True)
    assert usual == short and lines == same
    assert none == 0
    known = path != "/none" and headers.get("Content_Encoding") != "br"
    assert begun == (len(bodies) - 1 if known else begun)


def test_a_body_in_pieces_is_whole_and_one_that_is_late_goes_the_usual_way(settings: Settings) -> None:
    async def use(server: Server) -> None:
        client = await server.client()
        path = "/lines?workload=shop"
        for pieces in (1, 2, 5, 40):
            assert (await client.ask(path, b"one\ntwo", pieces=pieces)).startswith(b"HTTP/1.1 200")
        before = len(server.begun)
        data = request(path, b"late")
        client.writer.write(data[:-3])
        await asyncio.sleep(0.6)  # longer than any window
        client.writer.write(data[-3:])
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        assert len(server.begun) == before + 1
        assert (await client.ask(path, b"again")).startswith(b"HTTP/1.1 200")
        assert server.accepted("shop") == 10

    on_server(settings, use)


def test_requests_behind_one_that_waits_are_answered_in_their_order(settings: Settings) -> None:
    async def use(server: Server) -> None:
        client = await server.client()
        assert b'"records":1' in await client.ask("/lines?workload=shop", b"a")
        client.writer.write(request("/lines?workload=shop", b"b\nc"))
        await client.writer.drain()
        assert await asyncio.to_thread(wait_until, lambda: bool(server.begun), timeout_s=5)
        behind = (b"d\ne\nf", b"g\nh\ni\nj")
        client.writer.write(b"".join(request("/lines?workload=shop", body) for body in behind))
        for records in (2, 3, 4):
            assert b'"records":%d' % records in await client.answer()
        assert server.accepted("shop") == 10

    on_server(settings, use)


async def begin_short(server: "Server", client: "Client") -> None:
    """Until a second request of the client waits for its turn on the short way."""
    client.writer.write(request("/lines?workload=shop", b"b"))
    await client.writer.drain()
    while not server.begun:
        await asyncio.sleep(0)


def test_the_request_of_a_client_that_has_gone_is_not_taken_in(settings: Settings) -> None:
    async def use(server: Server) -> None:
        client = await server.client()
        await client.ask("/lines?workload=shop", b"a")
        await begin_short(server, client)
        client.writer.transport.abort()
        other = await server.client()
        await other.ask("/lines?workload=till", b"c")
        assert (server.accepted("shop"), server.accepted("till")) == (1, 1)
        assert server.service.room.held == server.service.door.held == 0

    on_server(settings, use)


def test_a_key_counts_on_the_short_way_from_the_next_look_on(settings: Settings) -> None:
    keys = SenderKeys(connect(settings), settings)
    bearer = {"Authorization": f"Bearer {keys.add('a', workload='own', lasts=timedelta(seconds=30))}"}

    async def use(server: Server) -> None:
        client = await server.client()
        for _ in range(3):
            assert (await client.ask("/lines?workload=shop", b"a", **bearer)).startswith(b"HTTP/1.1 200")
        assert len(server.begun) == 2
        keys.revoke("a")
        keys.add("b")
        server.service.keys._seen = None
        assert (await client.ask("/lines?workload=shop", b"a", **bearer)).startswith(b"HTTP/1.1 401")
        assert len(server.begun) == 3
        assert (server.accepted("own"), server.accepted("shop")) == (3, 0)

    on_server(settings, use)


def test_rules_that_change_name_the_workload_of_the_next_request(settings: Settings, tmp_path: Path) -> None:
    rules = tmp_path / "workloads.toml"
    rules.write_text('[[rule]]\nwhen = { key = "nobody" }\nworkload = "none"\n')

    async def use(server: Server) -> None:
        client = await server.client()
        for _ in range(2):
            await client.ask("/v1/logs", otlp("a"), Content_Type=JSON)
        rules.write_text('[[rule]]\nworkload = "renamed"\n')
        server.service.rules.refresh()
        await client.ask("/v1/logs", otlp("b"), Content_Type=JSON)
        assert (server.accepted("shop"), server.accepted("renamed")) == (1, 1)

    on_server(settings, use, rules=rules)


def test_a_server_that_stops_answers_what_waits_and_ends_the_connection(settings: Settings) -> None:
    async def use(server: Server) -> None:
        client = await server.client()
        await client.ask("/lines?workload=shop", b"a")
        await begin_short(server, client)
        stopping = asyncio.ensure_future(server.stop())
        answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        assert await client.reader.read() == b""
        await stopping
        assert server.accepted("shop") == 2

    on_server(settings, use)


def test_a_connection_is_kept_for_its_time_behind_an_answer(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(server: Server) -> None:
        client = await server.client()
        await client.ask("/lines?workload=shop", b"a")
        monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.05)
        assert (await client.ask("/lines?workload=shop", b"b")).startswith(b"HTTP/1.1 200")
        assert len(server.begun) == 1
        assert await asyncio.wait_for(client.reader.read(), 5) == b""

    on_server(settings, use)


def test_large_bodies_and_redis_being_away_are_as_on_the_usual_way(settings: Settings) -> None:
    async def use(server: Server) -> None:
        client = await server.client()
        await client.ask("/lines?workload=shop", b"a")
        large = await client.ask("/lines?workload=shop", b"b\n" * INLINE_BYTES)
        assert b'"records":32768' in large and server.begun == [False]
        server.service.keys._seen = None

        def refuse() -> Any:
            raise RedisUnavailable("away")

        server.service.keys.look = refuse  # type: ignore[method-assign]
        assert (await client.ask("/lines?workload=shop", b"c")).startswith(b"HTTP/1.1 503")
        assert server.begun == [False, True]

    on_server(settings, use)


def test_a_fault_in_one_answer_ends_its_connection_and_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    decode = LinesDialect.decode

    def partly_broken(self: LinesDialect, body: bytes, hints: Any) -> Any:
        return broken() if body == b"x" else decode(self, body, hints)

    async def use(server: Server) -> None:
        first, second = await server.client(), await server.client()
        for client in (first, second):
            await client.ask("/lines?workload=shop", b"a")
        monkeypatch.setattr(LinesDialect, "refused", broken)
        monkeypatch.setattr(LinesDialect, "decode", partly_broken)
        first.writer.write(request("/lines?workload=shop", b"x"))
        assert (await second.ask("/lines?workload=shop", b"b")).startswith(b"HTTP/1.1 200")
        assert (await first.reader.read()).startswith(b"HTTP/1.1 500")
        server.service.keys._seen = None
        server.service.keys.look = broken  # type: ignore[method-assign]
        with pytest.raises(asyncio.IncompleteReadError):
            await second.ask("/lines?workload=shop", b"c")

    on_server(settings, use)


HEAD = b"POST /lines?a=b HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nX-A:  y\r\n\r\n"


def scope(head: bytes, version: str = "1.1") -> Mapping[str, Any]:
    line, *lines = head[:-4].split(b"\r\n")
    path, _, query = line.split(b" ")[1].partition(b"?")
    pairs = [one.split(b":", 1) for one in lines]
    headers = [(name.lower(), value.strip()) for name, value in pairs]
    return {
        "method": "POST",
        "raw_path": path,
        "query_string": query,
        "headers": headers,
        "http_version": version,
    }


def known(head: bytes) -> KnownHead:
    parts = parted_head(head, scope(head))
    assert parts is not None
    return KnownHead(*parts, None)


@given(st.integers(0, 999_999_999), st.binary(max_size=40))
def test_a_head_with_another_length_is_known(length: int, body: bytes) -> None:
    head = HEAD.replace(b"12", b"%d" % length)
    assert known(HEAD).measure(head + body) == (length, len(head))


@given(st.integers(0, len(HEAD) - 1), st.binary(max_size=3))
def test_any_other_head_is_not_known(place: int, other: bytes) -> None:
    head = HEAD[:place] + other + HEAD[place + 1 :]
    found = known(HEAD).measure(head)
    if found is not None:  # only the digits differ, or a body follows
        length, begins = found
        assert HEAD.replace(b"12", head[len(known(HEAD).before) :][: begins - len(HEAD) + 2]) == head[:begins]
        assert length == int(head[len(known(HEAD).before) :].split(b"\r\n")[0])


@pytest.mark.parametrize(
    "line",
    [
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Connection: close",
        b"Connection: keep-alive, Upgrade",
        b"Proxy-Connection: close",
        b"Content-Length: 12",
        b"X-Forwarded-For: 10.0.0.1",
        b"X-Long: " + b"x" * 5_000,
    ],
)
def test_a_head_that_says_more_than_a_length_is_not_known(line: bytes) -> None:
    head = HEAD[:-2] + line + b"\r\n\r\n"
    assert parted_head(head, scope(head)) is None
    assert parted_head(HEAD, scope(HEAD)) is not None
    assert parted_head(HEAD, scope(HEAD, "1.0")) is None


def test_a_head_is_not_known_where_a_parser_has_read_it_in_another_way() -> None:
    read = dict(scope(HEAD))
    assert parted_head(HEAD, {**read, "raw_path": b"/other"}) is None
    assert parted_head(HEAD, {**read, "headers": read["headers"][:-1]}) is None
    folded = HEAD.replace(b"X-A:  y", b"X-A:\r\n y")
    assert parted_head(folded, read) is None
    for length in (b"", b"1234567890", b"+1", b"1 "):
        other = HEAD.replace(b"12", length)
        assert parted_head(other, scope(other)) is None
        assert known(HEAD).measure(other) is None
