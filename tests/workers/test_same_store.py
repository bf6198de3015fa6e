"""Processes with different stores do not work on one Redis."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from s3_server import S3Server

from pipeline.errors import BadInput, SinkUnavailable
from pipeline.models.registry import machine_of
from pipeline.observe.presence import Presence
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.store.choose import open_store
from pipeline.store.identity import identity
from pipeline.workers.same_store import adopt, entered, join


def elsewhere(settings: Settings, **more: object) -> Settings:
    """Another machine on the same Redis."""
    return settings.replace(data_dir=settings.data.dir.parent / "elsewhere", **more)


def test_the_second_machine_may_join_with_the_same_store_only(
    client: "redis.Redis", settings: Settings
) -> None:
    join(client, settings)
    join(client, settings)
    other = elsewhere(settings)
    for first in (True, False):
        with pytest.raises(BadInput) as refused:
            join(client, other, first=first)
        said = str(refused.value)
        assert settings.data.store in said and other.data.store in said
        assert machine_of(settings) in said and machine_of(other) in said
        assert "store_url" in said and "logweir store adopt" in said
    join(client, elsewhere(settings, store_url=settings.data.store))
    assert entered(client, settings)["machine"] == machine_of(settings), "the first one stays named"


def test_a_store_that_was_moved_with_its_objects_is_the_same(
    client: "redis.Redis", settings: Settings
) -> None:
    join(client, settings)
    settings.data.dir.rename(settings.data.dir.parent / "moved")
    join(client, settings.replace(data_dir=settings.data.dir.parent / "moved"))


def test_adopting_gives_lost_results_a_new_beginning_and_leaves_others_alone(
    client: "redis.Redis", settings: Settings
) -> None:
    join(client, settings)
    sink = parquet_of(settings)
    with pytest.raises(SinkUnavailable, match="`logweir store adopt` goes on without them"):
        sink.expect()
    adopt(client, settings)
    sink.expect()
    assert sink.parts() == []
    sink.change(lambda now: now.edited())
    adopt(client, settings)
    assert sink.manifest().edits == 1


def test_after_a_loss_an_operator_takes_another_store(client: "redis.Redis", settings: Settings) -> None:
    join(client, settings)
    other = elsewhere(settings)
    own = adopt(client, other)
    join(client, other)
    assert entered(client, settings)["id"] == own
    with pytest.raises(BadInput, match=re.escape(other.data.store)):
        join(client, settings)


def test_a_process_that_only_compares_writes_nothing(client: "redis.Redis", settings: Settings) -> None:
    join(client, settings, first=False)
    assert not settings.data.dir.exists()
    assert entered(client, settings) == {}
    identity(open_store(settings.data.store))
    join(client, settings, first=False)
    assert entered(client, settings) == {}


@pytest.mark.parametrize("damage", [b"{", b"[]", b"\xff"])
def test_a_damaged_entry_names_no_store(client: "redis.Redis", settings: Settings, damage: bytes) -> None:
    client.set(Keys(settings.redis.key_prefix).store, damage)
    assert entered(client, settings) == {}


def test_what_redis_keeps_of_a_store_is_small_and_readable(client: "redis.Redis", settings: Settings) -> None:
    join(client, settings)
    raw = client.get(Keys(settings.redis.key_prefix).store)
    assert set(json.loads(raw or b"")) == {"id", "machine", "url"}


def worker(settings: Settings, **more: str) -> "subprocess.Popen[str]":
    """A worker process that no embedded stack has started. Its pool forks."""
    program = [sys.executable, "-m", "pipeline.workers.cpu", "infer-cpu", "infer-cpu"]
    environ = {**settings.to_environ(), **more, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen(program, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_worker_with_another_store_ends_with_the_sentence(
    client: "redis.Redis", settings: Settings
) -> None:
    join(client, settings)
    refused = worker(elsewhere(settings))
    _, said = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "Traceback" not in said and settings.data.store in said and "store_url" in said
    assert "logweir: this pipeline works with the store" in said


def test_a_worker_that_will_fork_loads_no_client_of_a_bucket(
    client: "redis.Redis", settings: Settings, s3_server: S3Server, tmp_path: Path
) -> None:
    """Threads of the client do not survive the fork; a child that waits for them waits for ever."""
    with s3_server.credentials():
        there = settings.replace(store_url=s3_server.new_place(), results_dir=tmp_path)
    with worker(there, **s3_server.environment()) as process:
        try:
            until = time.monotonic() + 60
            while not Presence(client, there).heard():
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            assert "obstore" not in Path(f"/proc/{process.pid}/maps").read_text()
            assert entered(client, there)["url"] == there.data.store, "a process of its own has entered it"
        finally:
            process.kill()
