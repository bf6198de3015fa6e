"""The connections of a process to Redis."""

import pytest
import redis

from pipeline.errors import RedisUnavailable
from pipeline.redis.connection import answering, connect
from pipeline.settings import Settings


def test_when_one_connection_loses_its_answers_no_other_one_is_waited_for(settings: Settings) -> None:
    with connect(settings, timeout_s=0.3) as client, connect(settings) as other:
        idle = []
        for pool in (client.connection_pool, other.connection_pool):
            taken = [pool.get_connection() for _ in range(2)]
            for connection in taken:
                connection.connect()
                pool.release(connection)
            idle += taken
        assert all(connection.is_connected for connection in idle)
        with pytest.raises(redis.TimeoutError):
            client.blpop([f"{settings.redis.key_prefix}:nothing"], timeout=5)
        assert not any(connection.is_connected for connection in idle)
        assert client.ping() and other.ping()


def test_a_command_that_is_refused_breaks_no_connection(settings: Settings) -> None:
    with connect(settings) as client:
        client.ping()
        (idle,) = client.connection_pool._available_connections
        with pytest.raises(redis.ResponseError):
            client.execute_command("NO-SUCH-COMMAND")
        assert idle.is_connected


@pytest.mark.parametrize(
    ("words", "heals"),
    [
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", True),
        ("max number of clients reached", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
    ],
)
def test_an_answer_that_is_not_about_our_command_heals(words: str, heals: bool) -> None:
    with pytest.raises(RedisUnavailable if heals else redis.ResponseError), answering():
        raise redis.ResponseError(words)
