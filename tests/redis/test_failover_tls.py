"""Servers and sentinels that speak TLS alone: clients reach them, and a sentence tells each mistake."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from polling import wait_until
from sentinel_redis import TAKES_OVER_S, Group, close, sentinel_group
from tls_redis import Certificates

from pipeline.errors import BadInput, RedisUnavailable
from pipeline.messages.app import make_app
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted
from pipeline.redis import failover
from pipeline.redis.check import check_redis
from pipeline.redis.connection import connect
from pipeline.settings import Settings

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, made: Certificates) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("group")
    with sentinel_group(folder, password="pw-redis", sentinel_password="pw-sentinel", tls=made) as found:
        yield found


@pytest.fixture
def settings(group: Group, tmp_path: Path) -> Settings:
    return Settings(redis_url=group.url, redis_replicas_ack=1, data_dir=tmp_path / "data")


def with_ca(group: Group, made: Certificates, ca: str) -> Settings:
    return Settings(redis_url=group.url.replace(str(made.ca), ca))


def test_a_push_survives_the_master_and_doctor_reads_all_rows(group: Group, settings: Settings) -> None:
    check_redis(settings)
    with connect(settings) as client:
        rows = {row["what"]: row for row in failover.checks(settings, client)}
    assert not any(row["warning"] for row in rows.values()), rows
    assert rows["sentinels"]["found"].startswith("3 of 3 answer, quorum 2, master 127.0.0.1:")
    producer = Producer.connect(settings)
    assert isinstance(producer.send(["one"], workload="shop", batch_id="one"), Accepted)
    before = group.master()
    before.send(signal.SIGKILL)
    assert wait_until(lambda: group.master() is not before, timeout_s=TAKES_OVER_S)

    def sent() -> bool:
        try:
            return producer.send(["one"], workload="shop", batch_id="one") == Accepted(
                batch_id="one", duplicate=True
            )
        except RedisUnavailable:
            return False

    assert wait_until(sent, timeout_s=30)
    close(producer)
    before.start()
    assert wait_until(group.ready, timeout_s=30)


def test_celery_and_flower_reach_the_master_over_tls(group: Group, settings: Settings) -> None:
    app = make_app(settings)
    with app.connection_for_write() as connection:
        connection.SimpleQueue("logweir-tls").put("x")
        connection.default_channel.close()
    assert wait_until(lambda: group.master().client.llen("logweir:logweir-tls") == 1, timeout_s=10)
    from flower.utils.broker import Broker  # type: ignore[import-untyped] # it publishes no types

    broker = Broker(
        app.connection_for_read().as_uri(include_password=True),
        broker_options=app.conf.broker_transport_options,
        broker_use_ssl=app.conf.broker_use_ssl,
    )

    async def asked() -> Any:
        found = await broker.queues(["logweir-tls"])
        await broker.redis.aclose(close_connection_pool=True)
        for sentinel in broker.redis.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()
        return found

    assert asyncio.run(asked())[0]["messages"] == 1
    app.close()


@pytest.mark.parametrize(
    ("ca", "says"),
    [
        ("{other}", "127.0.0.1:{port} shows no certificate that can be trusted"),
        ("/nowhere/ca.crt", "a file that REDIS_URL names for TLS is not there"),
    ],
)
def test_a_wrong_ca_is_told_in_one_sentence_with_the_remedy(
    group: Group, made: Certificates, tmp_path: Path, ca: str, says: str
) -> None:
    other = Certificates.make(tmp_path)
    with pytest.raises(BadInput) as told:
        check_redis(with_ca(group, made, ca.format(other=other.ca)))
    text = str(told.value)
    assert says.format(port=group.sentinels[0].port) in text and "\n" not in text
    assert ("?ssl_ca_certs=FILE" in text) == (ca == "{other}") and "ssl_" in text
    assert "pw-redis" not in text and "pw-sentinel" not in text


def test_whoever_leaves_tls_out_is_told_to_write_sentinels(group: Group, made: Certificates) -> None:
    url = group.url.replace("sentinels://", "sentinel://").replace(f"&ssl_ca_certs={made.ca}", "")
    with pytest.raises(BadInput, match=r"hangs up.*sentinels://"):
        check_redis(Settings(redis_url=url))


def test_sentinels_with_tls_before_a_server_without_a_trusted_certificate(
    group: Group, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sentinels are trusted here, the server is not: another CA for it alone."""
    from pipeline.redis import connection

    other = Certificates.make(tmp_path)
    real = connection.tls_of
    monkeypatch.setattr(
        connection,
        "tls_of",
        lambda address: real(replace(address, tls={**address.tls, "ssl_ca_certs": str(other.ca)})),
    )
    with pytest.raises(BadInput, match="shows no certificate that can be trusted"):
        check_redis(settings)
