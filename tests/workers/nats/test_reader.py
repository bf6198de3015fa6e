"""A stream of a real nats-server into a real ledger: every message once, whatever is killed or removed."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis
from killed_intake import producer_of
from killed_nats import run_until_killed
from nats_server import NatsServer, listed, payload, single
from polling import wait_until
from power_cut import power

from pipeline.ledger.ledger import Ledger
from pipeline.observe.presence import Presence
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.settings.nats import NatsSource
from pipeline.sources.pushed import framed
from pipeline.workers.nats import reader as reader_module
from pipeline.workers.nats.process import Gateway
from pipeline.workers.nats.progress import stored_streams
from pipeline.workers.nats.reader import NatsReader

LIMIT_S = 30


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer.running() as one:
        yield one


@pytest.fixture
def stream(request: pytest.FixtureRequest, server: NatsServer) -> Iterator[str]:
    """A name of this test alone; the subjects are free again behind it."""
    name = request.node.name[:50].replace("[", "-").replace("]", "")
    yield name

    async def delete() -> None:
        client = await server.client()
        for one in await client.jetstream().streams_info():
            await client.jetstream().delete_stream(one.config.name or "")
        await client.close()

    server.run(delete())


class Gateways:
    """Gateways as threads."""

    def __init__(self, settings: Settings, server: NatsServer) -> None:
        self.settings = settings
        self.server = server
        self._running: list[tuple[Gateway, threading.Event, threading.Thread]] = []

    def start(self, path: str = "raw_logs", holder: str = "one", **query: str | int) -> Gateway:
        stop = threading.Event()
        source = NatsSource.parse(self.server.url(path, **query))
        gateway = Gateway(source, producer_of(self.settings), holder=holder, stop=stop)
        thread = threading.Thread(target=gateway.run, daemon=True)
        thread.start()
        self._running.append((gateway, stop, thread))
        return gateway

    def stop(self) -> None:
        for _, stop, _ in self._running:
            stop.set()
        for _, _, thread in self._running:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        self._running.clear()


@pytest.fixture
def own(settings: Settings) -> Settings:
    """Small batches, so that a stream makes many, and short leases."""
    return settings.replace(batch_records=100, lease_ttl_ms=2_000)


@pytest.fixture
def gateways(own: Settings, server: NatsServer) -> Iterator[Gateways]:
    some = Gateways(own, server)
    yield some
    some.stop()


@pytest.fixture
def ledger(own: Settings, client: "redis.Redis") -> Ledger:
    return Ledger(client, own)


def rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Every record that was accepted, with its batch."""
    found = []
    for key in ledger.client.scan_iter(ledger.keys.batch("*")):
        batch_id = key.decode().rpartition(":")[2]
        for row in framed(ledger.payload(batch_id))[0].to_dicts():
            found.append(row | {"id": (batch_id.partition("-")[0], row["line"])})
    return found


def ids(ledger: Ledger) -> list[str]:
    return sorted(msgspec.json.decode(row["raw"])["_id"] for row in rows(ledger))


def accepted(ledger: Ledger) -> int:
    return sum(int(totals["accepted"]) for totals in ledger.backlog.totals().values())


def all_in(ledger: Ledger, count: int) -> None:
    """Payloads 0 to `count`, each once, under a place of its own."""
    assert wait_until(lambda: accepted(ledger) >= count, timeout_s=LIMIT_S), accepted(ledger)
    assert ids(ledger) == sorted(f"id{n}" for n in range(count))
    assert len({row["id"] for row in rows(ledger)}) == count


def lost(ledger: Ledger) -> int:
    return int(ledger.client.hget(ledger.keys.counts, "source_lost") or 0)  # type: ignore[arg-type]


def trouble(own: Settings, ledger: Ledger) -> str:
    found = Presence(ledger.client, own).trouble()
    return found.reason if found else ""


def is_reading(ledger: Ledger, own: Settings) -> bool:
    return bool(stored_streams(ledger.client, own))


# ---- what is read --------------------------------------------------------------------------------


def test_payloads_and_lists_are_read_once_and_a_later_gateway_goes_on(
    server: NatsServer, gateways: Gateways, own: Settings, ledger: Ledger, stream: str
) -> None:
    gateways.start("raw_logs,opnilog_workload_logs", stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    server.send(single(payload(n) for n in range(150)))
    server.send(listed([payload(n) for n in range(150, 450)], 40))
    all_in(ledger, 450)
    gateways.stop()
    server.send(single(payload(n) for n in range(450, 500)))
    gateways.start("raw_logs,opnilog_workload_logs", "two", stream=stream)
    all_in(ledger, 500)
    (one,) = stored_streams(ledger.client, own)
    gateways.stop()
    assert one.stream == stream
    (row,) = (row for row in rows(ledger) if '"id160"' in row["raw"])
    assert row["line"] == 151 * 100_000 + 10  # the message, and the number in it
    assert set(ledger.backlog.totals()) == {"c1/shop/web"}


def test_a_partitioned_subject_is_read_as_the_whole(
    server: NatsServer, gateways: Gateways, own: Settings, ledger: Ledger, stream: str
) -> None:
    gateways.start(stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    server.send(single((payload(n) for n in range(20)), "raw_logs.3"))
    all_in(ledger, 20)


def test_the_latest_start_reads_nothing_of_before(
    server: NatsServer, gateways: Gateways, own: Settings, ledger: Ledger, stream: str
) -> None:
    gateways.start(stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    gateways.stop()
    server.send(single(payload(n) for n in range(900, 930)))
    server.wait_stored(stream, 30)
    other = own.replace(key_prefix=f"{own.redis.key_prefix}x")
    late = Gateways(other, server)
    try:
        late.start(stream=stream, start="latest")
        there = Ledger(ledger.client, other)
        assert wait_until(lambda: is_reading(there, other), timeout_s=LIMIT_S)
        server.send(single(payload(n) for n in range(5)))
        all_in(there, 5)
    finally:
        late.stop()


def test_messages_that_cannot_be_read_are_dead_letters_with_their_subject(
    server: NatsServer, gateways: Gateways, own: Settings, ledger: Ledger, stream: str
) -> None:
    gateways.start("raw_logs,opnilog_workload_logs", stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    server.send([*single([payload(0)]), ("opnilog_workload_logs", b"\x0a\xff\xff"), *single([payload(1)])])
    server.send(single([payload(7, log=" ")]))
    assert wait_until(lambda: accepted(ledger) == 3, timeout_s=LIMIT_S)
    (letter,) = ledger.dead_letters.newest()
    assert letter.reason.startswith("opnilog_workload_logs message 2: the message is no protobuf PayloadList")
    assert (letter.source, letter.first_line) == ("nats:opnilog_workload_logs", 2)
    assert ledger.backlog.totals()["opni"]["dead"] == 1
    assert wait_until(
        lambda: stored_streams(ledger.client, own)[0].sequence == 5, timeout_s=LIMIT_S
    )  # the blank one too


# ---- kills and rollbacks -------------------------------------------------------------------------


def test_a_killed_gateway_loses_and_doubles_nothing(
    server: NatsServer, gateways: Gateways, own: Settings, ledger: Ledger, stream: str
) -> None:
    """Killed between the script that takes the batches in and its answer."""
    gateways.start(stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    gateways.stop()
    server.send(single(payload(n) for n in range(3_000)))
    server.wait_stored(stream, 1_000)
    run_until_killed(server.url(stream=stream), own, accepts=2)
    assert 0 < accepted(ledger) < 3_000
    gateways.start(stream=stream)
    all_in(ledger, 3_000)


def test_a_killed_server_is_read_on_by_sequence(own: Settings, ledger: Ledger) -> None:
    with NatsServer.running() as server:
        gateways = Gateways(own, server)
        try:
            gateways.start()
            assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
            server.send(single(payload(n) for n in range(300)))
            all_in(ledger, 300)
            server.kill()
            assert wait_until(lambda: "does not answer" in trouble(own, ledger), timeout_s=LIMIT_S)
            server.start()
            server.send(single(payload(n) for n in range(300, 600)))
            all_in(ledger, 600)
        finally:
            gateways.stop()


def test_a_redis_that_went_back_is_read_into_again(server: NatsServer, stream: str) -> None:
    with power() as current:
        own = current.settings.replace(batch_records=50, lease_ttl_ms=2_000)
        gateways, ledger = Gateways(own, server), Ledger(connect(own), own)
        try:
            gateways.start(stream=stream)
            assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
            server.send(single(payload(n) for n in range(300)))
            all_in(ledger, 300)
            moment = current.now()
            server.send(single(payload(n) for n in range(300, 600)))
            all_in(ledger, 600)
            current.cut(back_to=moment)
            assert accepted(ledger) < 600
            all_in(ledger, 600)  # though no message comes
            server.send(single(payload(n) for n in range(600, 700)))
            all_in(ledger, 700)
        finally:
            gateways.stop()
            ledger.client.close()


def test_messages_read_again_make_the_same_batches(
    server: NatsServer, gateways: Gateways, own: Settings, ledger: Ledger, stream: str
) -> None:
    """Windows are cut by the times of the server, not by when they come here."""
    gateways.start(stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    for start in range(0, 120, 20):
        server.send(single(payload(n) for n in range(start, start + 20)))
    all_in(ledger, 120)
    gateways.stop()
    first = set(ledger.client.scan_iter(ledger.keys.batch("*")))
    other = own.replace(key_prefix=f"{own.redis.key_prefix}x")
    again, there = Gateways(other, server), Ledger(ledger.client, other)
    try:
        again.start(stream=stream)
        assert wait_until(lambda: accepted(there) >= 120, timeout_s=LIMIT_S)
    finally:
        again.stop()
    second = set(ledger.client.scan_iter(there.keys.batch("*")))
    assert {key.rpartition(b":")[2] for key in first} == {key.rpartition(b":")[2] for key in second}


def test_two_readers_of_one_stream_double_nothing(
    gateways: Gateways, own: Settings, ledger: Ledger, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a Redis that forgot its leases."""
    server = gateways.server
    monkeypatch.setattr(reader_module, "NATS", "nats-one")
    gateways.start(stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    monkeypatch.setattr(reader_module, "NATS", "nats-two")
    gateways.start(holder="two", stream=stream)
    for start in range(0, 1_000, 100):
        server.send(single(payload(n) for n in range(start, start + 100)))
    all_in(ledger, 1_000)


# ---- retention, back-pressure --------------------------------------------------------------------


def test_messages_that_were_removed_unread_are_counted_and_said(
    server: NatsServer, gateways: Gateways, own: Settings, ledger: Ledger, stream: str
) -> None:
    gateways.start(stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    server.send(single(payload(n) for n in range(20)))
    all_in(ledger, 20)
    gateways.stop()
    server.send(single(payload(n) for n in range(500, 540)))

    server.wait_stored(stream, 60)

    async def purge() -> None:
        client = await server.client()
        await client.jetstream().purge_stream(stream, seq=51)
        await client.jetstream().delete_msg(stream, 55)
        await client.close()

    server.run(purge())
    gateways.start(stream=stream)
    assert wait_until(lambda: accepted(ledger) == 29, timeout_s=LIMIT_S), accepted(ledger)
    assert lost(ledger) == 31
    assert wait_until(lambda: "NATS removed" in trouble(own, ledger), timeout_s=LIMIT_S)
    assert ids(ledger) == sorted(f"id{n}" for n in (*range(20), *range(530, 534), *range(535, 540)))


def test_a_stream_made_anew_is_read_from_its_beginning(
    gateways: Gateways, own: Settings, ledger: Ledger, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = gateways.server
    monkeypatch.setattr(reader_module, "LOOK_S", 0.2)
    gateways.start(stream=stream)
    assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
    server.send(single(payload(n) for n in range(30)))
    all_in(ledger, 30)

    async def delete() -> None:
        client = await server.client()
        await client.jetstream().delete_stream(stream)
        await client.close()

    server.run(delete())

    def is_there() -> bool:
        async def look() -> bool:
            client = await server.client()
            names = [one.config.name for one in await client.jetstream().streams_info()]
            await client.close()
            return stream in names

        return bool(server.run(look()))

    assert wait_until(is_there, timeout_s=LIMIT_S)
    server.send(single(payload(n) for n in range(30, 70)))
    all_in(ledger, 70)


def test_a_full_pipeline_leaves_the_messages_in_the_stream(
    server: NatsServer, own: Settings, ledger: Ledger, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "HELD_BYTES", 50_000)
    gateways = Gateways(own.replace(max_pending_batches=3), server)
    try:
        gateway = gateways.start(stream=stream)
        assert wait_until(lambda: is_reading(ledger, own), timeout_s=LIMIT_S)
        server.send(single(payload(n) for n in range(2_500)))
        reader = gateway.reader
        assert isinstance(reader, NatsReader)
        assert wait_until(lambda: stored_streams(ledger.client, own)[0].lag > 1_500, timeout_s=LIMIT_S)
        assert 0 < accepted(ledger) <= 300
        assert len(reader._held) <= 2_000 + 200
    finally:
        gateways.stop()
