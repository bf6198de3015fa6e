"""A Redis that is away."""

import asyncio
from pathlib import Path

import own_redis
import pytest
from google.rpc.status_pb2 import Status
from intake_process import running_intake

from pipeline.errors import RedisUnavailable
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted
from pipeline.records.pushed import PushedRecords
from pipeline.service.senders import SentBy
from pipeline.settings import Settings
from pipeline.sources.protocols.contract import Decoded
from pipeline.workers.intake.door import Door

pytestmark = pytest.mark.long  # starts processes

SENDER = SentBy(protocol="lines", key="", peer="")
BOTH = Decoded(records=PushedRecords(["a", "b", "c"], workloads=["shop/a", "till", "shop/a"]), distinct=True)


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
