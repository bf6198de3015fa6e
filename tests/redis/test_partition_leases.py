"""Readers divide the partitions of a source: each has one reader, each reader its part."""

import uuid

import pytest
import redis
from polling import wait_until

from pipeline.redis.partition_leases import PartitionLeases
from pipeline.settings import Settings

NAMES = [f"app/{n}" for n in range(5)]


@pytest.fixture
def own(settings: Settings) -> Settings:
    return settings.replace(lease_ttl_ms=2_000)


def shares(client: "redis.Redis", settings: Settings, holder: str, source: str = "s") -> PartitionLeases:
    return PartitionLeases(client, settings, source=source, holder=holder)


def test_one_reader_has_all_and_gives_half_to_the_next(client: "redis.Redis", own: Settings) -> None:
    one, two = shares(client, own, "one"), shares(client, own, "two")
    assert set(one.renew(NAMES)) == set(NAMES)
    assert two.renew(NAMES) == {}
    kept = one.renew(NAMES)
    assert len(kept) == 3
    taken = two.renew(NAMES)
    assert set(taken) == set(NAMES) - set(kept)
    assert min(taken.values()) > max(kept.values())  # a later token


def test_tokens_stay_while_a_lease_is_renewed(client: "redis.Redis", own: Settings) -> None:
    one = shares(client, own, "one")
    assert one.renew(NAMES) == one.renew(NAMES)


def test_a_reader_that_leaves_frees_all_at_once(client: "redis.Redis", own: Settings) -> None:
    one, two = shares(client, own, "one"), shares(client, own, "two")
    one.renew(NAMES)
    two.renew(NAMES)
    one.leave()
    assert set(two.renew(NAMES)) == set(NAMES)


def test_a_killed_reader_is_missed_after_a_ttl(client: "redis.Redis", own: Settings) -> None:
    shares(client, own, "killed").renew(NAMES)
    two = shares(client, own, "two")
    assert two.renew(NAMES) == {}
    assert wait_until(lambda: set(two.renew(NAMES)) == set(NAMES), timeout_s=10)


def test_partitions_that_came_or_went_are_given_and_taken(client: "redis.Redis", own: Settings) -> None:
    one = shares(client, own, "one")
    one.renew(NAMES[:2])
    assert set(one.renew(NAMES[1:])) == set(NAMES[1:])
    assert one.renew([]) == {}


def test_sources_do_not_mix(client: "redis.Redis", own: Settings) -> None:
    name = uuid.uuid4().hex
    assert set(shares(client, own, "one").renew(NAMES)) == set(NAMES)
    assert set(shares(client, own, "two", name).renew(NAMES)) == set(NAMES)
