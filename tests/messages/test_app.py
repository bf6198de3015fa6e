"""The broker is the same Redis database as the ledger, whatever form the URL has."""

import pytest
import redis
from kombu import Connection

from pipeline.messages.app import broker_url


@pytest.mark.parametrize(
    ("url", "broker"),
    [
        ("redis://h:6380/3", "redis://h:6380/3"),
        ("redis://h?db=3", "redis://h/3?db=3"),
        ("unix:///run/r.sock", "redis+socket:///run/r.sock?virtual_host=0"),
        ("unix:///run/r.sock?db=3", "redis+socket:///run/r.sock?virtual_host=3"),
        ("unix://u:p%40w@/run/a%3Fb.sock?db=1", "redis+socket://u:p%40w@/run/a%3Fb.sock?virtual_host=1"),
    ],
)
def test_kombu_is_told_what_redis_py_understands(url: str, broker: str) -> None:
    assert broker_url(url) == broker


@pytest.mark.parametrize("database", [0, 3])
def test_a_message_lies_in_the_database_of_the_url(redis_url: str, database: int) -> None:
    url = redis_url.replace("db=0", f"db={database}")
    client = redis.Redis.from_url(url)
    queue = f"test-app-{database}"
    with Connection(broker_url(url)) as connection:
        connection.SimpleQueue(queue).put("x")
    try:
        assert client.llen(queue) == 1
    finally:
        client.delete(queue, f"_kombu.binding.{queue}")
        client.close()
