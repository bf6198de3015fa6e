"""Core NATS without a stream: what comes while a gateway runs is taken in; what does not fit is counted."""

import threading
from collections.abc import Iterator

import pytest
import redis
from killed_intake import producer_of
from nats_server import NatsServer, listed, payload, single
from polling import wait_until

from pipeline.ledger.ledger import Ledger
from pipeline.observe.presence import Presence
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.settings.nats import NatsSource
from pipeline.workers.nats import at_most_once
from pipeline.workers.nats.process import Gateway

LIMIT_S = 20


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer.running(jetstream=False) as one:
        yield one


@pytest.fixture
def ledger(settings: Settings) -> Ledger:
    return Ledger(connect(settings), settings)


@pytest.fixture
def gateway(settings: Settings, server: NatsServer) -> Iterator[Gateway]:
    stop = threading.Event()
    source = NatsSource.parse(server.url("raw_logs,opnilog_workload_logs", mode="core"))
    one = Gateway(source, producer_of(settings), holder="one", stop=stop)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    assert wait_until(lambda: one.reader._subscribed is not None, timeout_s=LIMIT_S)  # type: ignore[union-attr]
    yield one
    stop.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def accepted(ledger: Ledger) -> int:
    return sum(int(totals["accepted"]) for totals in ledger.backlog.totals().values())


def trouble(settings: Settings, client: "redis.Redis") -> str:
    found = Presence(client, settings).trouble()
    return found.reason if found else ""


@pytest.mark.usefixtures("gateway")
def test_a_server_without_jetstream_is_read(server: NatsServer, ledger: Ledger) -> None:
    server.send(single(payload(n) for n in range(100)))
    server.send(listed([payload(n) for n in range(100, 300)], 50))
    server.send([("raw_logs", b"\x0a\xff")])
    assert wait_until(lambda: accepted(ledger) == 301, timeout_s=LIMIT_S), accepted(ledger)
    (letter,) = ledger.dead_letters.newest()
    assert letter.reason.startswith("raw_logs message")


@pytest.mark.usefixtures("gateway")
def test_a_server_that_comes_back_is_read_on(server: NatsServer, settings: Settings, ledger: Ledger) -> None:
    server.send(single(payload(n) for n in range(10)))
    assert wait_until(lambda: accepted(ledger) == 10, timeout_s=LIMIT_S)
    server.kill()
    assert wait_until(lambda: "does not answer" in trouble(settings, ledger.client), timeout_s=LIMIT_S)
    server.start()

    def comes() -> bool:
        server.send(single([payload(99)]))
        return accepted(ledger) > 10

    assert wait_until(comes, timeout_s=LIMIT_S)


def test_messages_without_room_are_dropped_counted_and_said(
    server: NatsServer, settings: Settings, ledger: Ledger, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_most_once, "HELD_BYTES", 20_000)
    ledger.intake.pause("a test")
    server.send(single(payload(n) for n in range(200)))
    assert wait_until(lambda: "were dropped" in trouble(settings, ledger.client), timeout_s=LIMIT_S)
    ledger.intake.resume()
    assert wait_until(lambda: 0 < accepted(ledger) < 100, timeout_s=LIMIT_S)
    assert isinstance(gateway.reader, at_most_once.AtMostOnceReader)
