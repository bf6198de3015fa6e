"""The private Redis of a stack: how its start is waited for."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from pipeline.settings import Settings
from pipeline.workers.stack import private_redis as redis_server
from pipeline.workers.stack.private_redis import PrivateRedis


@pytest.mark.long
def test_a_server_that_still_reads_what_it_had_on_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="logweir-slow-") as folder:
        server = PrivateRedis(Settings(data_dir=Path(folder)))
        process = server.start()
        with redis.Redis.from_url(server.url) as client:
            pipe = client.pipeline(transaction=False)
            for n in range(3_000):
                pipe.set(f"k{n}", n)
            pipe.execute()
        process.kill()
        process.wait(10)
        plain = redis_server.redis_conf
        # A millisecond for each key that is read: three seconds.
        monkeypatch.setattr(
            redis_server, "redis_conf", lambda *given: plain(*given) + "key-load-delay 1000\n"
        )
        monkeypatch.setattr(redis_server, "START_S", 1.0)
        process = server.start()
        try:
            with redis.Redis.from_url(server.url) as client:
                assert client.dbsize() == 3_000
        finally:
            process.kill()
            process.wait(10)
