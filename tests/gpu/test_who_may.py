"""What an agent with a user of its own can do, and what an attacker with its password cannot."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from fake_nvml_driver import Driver, Gpu
from own_redis import server
from polling import wait_until

from pipeline.errors import BadInput, NotFound
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Need
from pipeline.redis.keys import Keys
from pipeline.service.access.agent_users import add_agent, agent_names, agent_user, remove_agent
from pipeline.settings import Settings

KEYS = Keys("logweir")


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator["redis.Redis"]:
    folder = tmp_path_factory.mktemp("acl")
    (folder / "users.acl").touch()
    with server(folder, "--aclfile", str(folder / "users.acl")) as client:
        yield client


@pytest.fixture(scope="module")
def settings(admin: "redis.Redis") -> Settings:
    return Settings(redis_url=f"unix://{admin.connection_pool.connection_kwargs['path']}")


@pytest.fixture(scope="module")
def url(admin: "redis.Redis", settings: Settings) -> str:
    found, saved = add_agent(admin, settings, "agent-b", by="test")
    assert saved
    return found


@pytest.fixture
def attacker(url: str) -> Iterator["redis.Redis"]:
    client = redis.Redis.from_url(url)
    yield client
    client.close()


def last_beat(admin: "redis.Redis") -> float:
    beats: Any = admin.zrange(KEYS.gpu("beats"), 0, 0, withscores=True)
    return float(beats[0][1])


def test_an_agent_with_its_token_joins_and_needs_no_other_right(
    admin: "redis.Redis", settings: Settings, url: str, tmp_path: Path
) -> None:
    driver = Driver(tmp_path)
    driver.devices(Gpu("GPU-join-1"))
    admin.acl_log_reset()
    quick = {"LOGWEIR_INTERNAL_GPU_BEAT_S": "0.1", "REDIS_URL": url}
    pool = Pool(admin, settings)
    with subprocess.Popen(
        [sys.executable, "-m", "pipeline.workers.agent", "agent-b"],
        env={**os.environ, **driver.environ(), **quick},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as agent:
        try:
            assert wait_until(lambda: pool.snapshot().devices, timeout_s=30)
            admin.hset(KEYS.epoch, "until_ms", 0)
            # One expires, so the agent sweeps; the next one is waited for, so it may plan.
            pool.request(Need(memory_mib=64), holder="a", ttl_ms=50)
            beats = last_beat(admin)
            assert wait_until(lambda: not pool.snapshot().leases, timeout_s=20)
            assert wait_until(lambda: last_beat(admin) > beats + 300, timeout_s=20)
        finally:
            agent.terminate()
    refused = [entry["object"] for entry in admin.acl_log()]
    assert set(refused) <= {KEYS.gpu("jobs").encode(), KEYS.gpu("jobs")}, "it leaves the jobs to others"
    user = redis.Redis.from_url(url)
    own = Pool(user, settings)
    own.ledger.sweep()
    own.planner.plan()
    user.close()


@pytest.mark.parametrize(
    "command",
    [
        ("HGETALL", KEYS.sender_keys), ("HSET", KEYS.sender_keys, "me", "{}"), ("GET", KEYS.payload("b1")),
        ("HGETALL", KEYS.batch("b1")), ("XRANGE", KEYS.audit, "-", "+"), ("XADD", KEYS.audit, "*", "by", "me"),
        ("HSET", KEYS.gpu("jobs"), "job", "{}"), ("HGETALL", KEYS.gpu("jobs_ended")), ("SET", KEYS.gpu("job_beat", "j"), "1"),
        ("LPUSH", KEYS.kombu("gpu.job.host"), "x"), ("LRANGE", KEYS.kombu("ingest"), "0", "-1"),
        ("HGETALL", KEYS.marks), ("HGETALL", KEYS.model()), ("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",),
        ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("ACL", "SETUSER", "me", "on"), ("FLUSHALL",), ("SCRIPT", "FLUSH"),
        ("SHUTDOWN",), ("REPLICAOF", "NO", "ONE"), ("MONITOR",), ("CLIENT", "LIST"),
        ("PUBLISH", "other", "x"), ("SUBSCRIBE", "__keyspace@0__:x"),
        ("EVAL", "return redis.call('HGETALL', KEYS[1])", "1", KEYS.sender_keys),
        ("EVAL", f"return redis.call('HSET', '{KEYS.gpu('jobs')}', 'job', 'x')", "1", KEYS.gpu("nodes")),
    ],
    ids=lambda words: " ".join(words[:2])[:40],
)  # fmt: skip
def test_with_the_password_of_an_agent_an_attacker_reaches_nothing_but_the_pool(
    admin: "redis.Redis", attacker: "redis.Redis", command: tuple[str, ...]
) -> None:
    admin.hset(KEYS.sender_keys, "secret", "digest")
    with pytest.raises(redis.ResponseError, match=r"(?i)noperm|permission|can't (run|access)|can't execute"):
        attacker.execute_command(*command)  # type: ignore[no-untyped-call]
    assert not admin.exists(KEYS.gpu("jobs"))
    assert admin.hgetall(KEYS.sender_keys) == {b"secret": b"digest"}


def test_a_new_token_ends_the_old_one_and_a_removed_agent_is_refused_at_once(
    admin: "redis.Redis", settings: Settings
) -> None:
    first, _ = add_agent(admin, settings, "c", by="test")
    second, _ = add_agent(admin, settings, "c", by="test")
    assert set(agent_names(admin, settings)) - {"agent-b"} == {"c"}, "agent-b is of other tests"
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(first).ping()
    open_one: Any = redis.Redis.from_url(second)
    assert open_one.ping()
    assert remove_agent(admin, settings, "c", by="test")
    with pytest.raises((redis.AuthenticationError, redis.ConnectionError)):
        open_one.ping()
    with pytest.raises(NotFound, match="no agent 'c'"):
        remove_agent(admin, settings, "c", by="test")
    assert second.split(":")[2].split("@")[0] not in str(admin.execute_command("ACL", "LIST"))  # type: ignore[no-untyped-call]


def test_what_makes_no_user_is_said(admin: "redis.Redis", settings: Settings, url: str) -> None:
    with pytest.raises(BadInput, match="no name of an agent"):
        add_agent(admin, settings, "a b", by="test")
    with pytest.raises(BadInput, match="may not change users"):
        add_agent(redis.Redis.from_url(url), settings, "x", by="test")
    failing = settings.replace(redis_url="sentinel://h:1/0?master=m")
    with pytest.raises(BadInput, match=f"ACL SETUSER {agent_user('logweir', 'x')} "):
        add_agent(admin, failing, "x", by="test")
