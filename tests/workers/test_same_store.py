"""Processes with different stores do not work on one Redis."""

import json
import re

import pytest
import redis

from pipeline.errors import BadInput
from pipeline.models.registry import machine_of
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
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
