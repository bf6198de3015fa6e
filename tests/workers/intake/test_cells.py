"""Requests whose workloads lie in two Redis, and a Redis that is away."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import own_redis
import pytest
from google.rpc.status_pb2 import Status
from intake_process import running_intake

from pipeline.errors import RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted, Full
from pipeline.records.pushed import PushedRecords
from pipeline.redis.connection import connect
from pipeline.service.senders import SentBy
from pipeline.settings import Settings
from pipeline.sources.protocols.contract import Decoded
from pipeline.workers.intake import identity
from pipeline.workers.intake.door import Door

pytestmark = pytest.mark.long  # starts processes

SENDER = SentBy(protocol="lines", key="", peer="")
BOTH = Decoded(records=PushedRecords(["a", "b", "c"], workloads=["shop/a", "till", "shop/a"]), distinct=True)


@pytest.fixture
def two_cells(settings: Settings, tmp_path: Path) -> Iterator[tuple[Settings, Settings]]:
    """The settings of the cells "" and "shop/"; REDIS_URL of the first names both."""
    with own_redis.server(tmp_path):
        shop = settings.replace(redis_url=f"unix://{tmp_path}/r.sock")
        (tmp_path / "cells.toml").write_text(
            f'[cells]\n"" = "{settings.redis.url}"\n"shop/" = "{shop.redis.url}"\n'
        )
        yield settings, shop


def accepted(settings: Settings) -> dict[str, int]:
    totals = Ledger(connect(settings), settings).backlog.totals()
    return {name: numbers["accepted"] for name, numbers in totals.items()}


def test_a_request_of_two_cells_is_in_once_in_each(
    two_cells: tuple[Settings, Settings], tmp_path: Path
) -> None:
    plain, shop = two_cells
    told = identity.of_body(b"both", distinct=True)

    async def run() -> list[Accepted | Full]:
        door = Door(Producer.connect(plain.replace(redis_url=f"cells://{tmp_path}/cells.toml")))
        answers = [await door.take(BOTH, identity=told, sender=SENDER)]
        Ledger(connect(shop), shop).intake.pause("maintenance")
        answers.append(await door.take(BOTH, identity=told, sender=SENDER))
        other = identity.of_body(b"other", distinct=True)
        answers.append(await door.take(BOTH, identity=other, sender=SENDER))
        Ledger(connect(shop), shop).intake.resume()
        answers.append(await door.take(BOTH, identity=other, sender=SENDER))
        await door.close()
        return answers

    first, known, full, completed = asyncio.run(run())
    assert isinstance(first, Accepted) and not first.duplicate
    assert isinstance(known, Accepted) and known.duplicate
    assert isinstance(full, Full) and isinstance(completed, Accepted)
    assert (accepted(plain), accepted(shop)) == ({"till": 2}, {"shop/a": 4})


def test_records_with_an_identity_each_are_in_once_in_their_cells(
    two_cells: tuple[Settings, Settings], tmp_path: Path
) -> None:
    plain, shop = two_cells

    async def run() -> list[bool]:
        door = Door(Producer.connect(plain.replace(redis_url=f"cells://{tmp_path}/cells.toml")))
        duplicates = []
        for texts in ((b"a", b"b", b"c"), (b"new", b"b", b"c"), (b"a", b"b", b"c")):
            answer = await door.take(BOTH, identity=identity.of_records(texts), sender=SENDER)
            assert isinstance(answer, Accepted)
            duplicates.append(answer.duplicate)
        await door.close()
        return duplicates

    assert asyncio.run(run()) == [False, False, True]
    assert (accepted(plain), accepted(shop)) == ({"till": 1}, {"shop/a": 3})


def test_a_redis_that_is_away_is_said_to_the_sender_who_sends_again(
    settings: Settings, tmp_path: Path
) -> None:
    own = settings.replace(redis_url=f"unix://{tmp_path}/r.sock")
    with own_redis.server(tmp_path) as client, running_intake(own) as intake:
        assert intake.ask("/lines?workload=a", b"x").status == 200
        client.shutdown(nosave=True)
        answer = intake.ask("/v1/logs", b"", Content_Type="application/x-protobuf")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "Redis does not answer" in Status.FromString(answer.body).message
        assert intake.ask("/readyz").status == 503 and intake.ask("/healthz").status == 200


def test_a_redis_that_stays_away_fails_every_request_of_the_window(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.workers.intake.door.PATIENCE_S", 0.1)

    def away(*_: object, **__: object) -> Accepted:
        raise RedisUnavailable("it is away")

    async def run() -> list[object]:
        producer = Producer.connect(settings)
        monkeypatch.setattr(producer, "accept_all", away)
        door = Door(producer)
        takes = (door.take(BOTH, sender=SENDER) for _ in range(3))
        answers = await asyncio.gather(*takes, return_exceptions=True)
        await door.close()
        assert door.held == 0
        return list(answers)

    assert [type(answer) for answer in asyncio.run(run())] == [RedisUnavailable] * 3
