"""Model versions: complete bundles in the store, one fenced pointer in Redis."""

from dataclasses import replace

import pytest
import redis
from small_bundles import AT, ONE, THREE, TWO, put, written

from pipeline.errors import BadBundle, RedisUnavailable, StaleToken
from pipeline.models import bundle
from pipeline.models.registry import Registry
from pipeline.redis.leases import Lease, Leases, granted
from pipeline.settings import Settings


@pytest.fixture
def registry(client: "redis.Redis", settings: Settings) -> Registry:
    return Registry(client, settings)


@pytest.fixture
def leases(client: "redis.Redis", settings: Settings) -> Leases:
    return Leases(client, settings)


def lease(leases: Leases, holder: str = "trainer", floor: int = 0) -> Lease:
    return granted(leases.request("gpu0", holder, floor=floor), "gpu0")


def test_publishing_moves_the_pointer_and_keeps_the_version_before(
    registry: Registry, leases: Leases
) -> None:
    assert registry.current() is None
    held = lease(leases)
    for generation, version in enumerate((ONE, TWO), start=1):
        path = written(registry, version)
        assert registry.publish(version, held, at=AT) == generation
        live = registry.current()
        assert live is not None
        assert (live.version, live.generation, live.token) == (version, generation, held.token)
        assert live.published == AT.isoformat()
        assert path.is_dir()
    assert registry.versions() == [ONE, TWO]
    assert live.previous == ONE


def test_all_models_are_looked_at_in_one_round_trip(
    registry: Registry, leases: Leases, client: "redis.Redis", settings: Settings
) -> None:
    watching = Registry(client, settings)
    assert watching.snapshot_all() == ([], {})
    held = lease(leases)
    for version, model in ((ONE, "prod/own/x"), (TWO, "shared")):
        written(registry, version, model=model)
        registry.publish(version, held, at=AT)
        lives, faults = watching.snapshot_all()
        assert (lives, faults) == (registry.live(), {})
    assert [live.model for live in lives] == ["shared", "prod/own/x"]
    registry.report_fault(TWO, "damaged")
    assert watching.snapshot_all() == (registry.live(), {TWO: "damaged"})


def test_publishing_the_same_version_twice_changes_nothing_more(registry: Registry, leases: Leases) -> None:
    held = lease(leases)
    for version in (ONE, TWO):
        written(registry, version)
        registry.publish(version, held, at=AT)
    before = registry.client.hgetall(registry.keys.model())
    assert registry.publish(TWO, held, at=AT) == 2, "an answer that was lost on the way is given again"
    assert registry.client.hgetall(registry.keys.model()) == before


def test_a_new_live_version_waits_for_the_replicas_that_it_was_promised(
    client: "redis.Redis", settings: Settings, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.models.registry.ACKNOWLEDGED_S", 0.3)
    alone = Registry(client, settings.replace(redis_replicas_ack=1))  # this server has no replica
    held = lease(leases)
    for version in (ONE, TWO):
        written(alone, version)
        alone.put(version)
    for move in (lambda: alone.publish(ONE, held, at=AT), lambda: alone.promote(TWO, at=AT)):
        with pytest.raises(RedisUnavailable, match="only 0 of 1 replicas have acknowledged"):
            move()
    # Each move stands and was made once, however often its script ran.
    live = Registry(client, settings).current()
    assert live is not None and (live.version, live.generation, live.previous) == (TWO, 2, ONE)


def expire(leases: Leases) -> None:
    leases.client.hset(leases.keys.lease("gpu0"), "deadline", 1)


@pytest.mark.parametrize("lost", ["expired", "taken over", "given back", "stranger", "never held"])
def test_whoever_lost_the_lease_publishes_nothing(registry: Registry, leases: Leases, lost: str) -> None:
    held = lease(leases)
    written(registry, ONE)
    registry.publish(ONE, held, at=AT)
    written(registry, TWO)
    if lost == "stranger":
        held = replace(held, holder="somebody")
    elif lost == "given back":
        leases.release(held)
    elif lost == "never held":
        held = replace(held, resource="gpu7")
    else:
        expire(leases)
    if lost == "taken over":
        lease(leases, "other")
    with pytest.raises(StaleToken, match=f"{TWO} is not published"):
        registry.publish(TWO, held, at=AT)
    live = registry.current()
    assert live is not None
    assert (live.version, live.generation) == (ONE, 1)


def test_a_token_older_than_the_live_models_publishes_nothing(registry: Registry, leases: Leases) -> None:
    written(registry, ONE)
    held = lease(leases)
    registry.client.hset(
        registry.keys.model(),
        mapping={"version": TWO, "token": held.token + 1, "generation": 4, "published": ""},
    )
    with pytest.raises(StaleToken):
        registry.publish(ONE, held, at=AT)
    live = registry.current()
    assert live is not None
    assert live.version == TWO


def test_a_bundle_that_is_not_whole_is_not_published(registry: Registry, leases: Leases) -> None:
    held = lease(leases)
    with pytest.raises(BadBundle):
        registry.publish(ONE, held, at=AT)
    (written(registry, ONE) / bundle.WEIGHTS).write_bytes(b"altered")
    with pytest.raises(BadBundle, match="SHA-256"):
        registry.publish(ONE, held, at=AT)
    assert registry.current() is None


def test_new_tokens_start_above_those_of_the_store_even_on_an_empty_redis(
    registry: Registry, leases: Leases
) -> None:
    assert registry.newest_token() == 0
    put(registry, ONE, "m000041-ffffffff", THREE)
    written(registry, "m000050-0a1b2c3d")  # a training that did not get as far as the store
    for name in ("notes", "m000077-short"):
        registry.stored.objects.put(f"versions/{name}/manifest.json", b"{}")
    assert registry.newest_token() == 41
    held = lease(leases, floor=registry.newest_token())
    assert held.token == 42
    assert registry.name(held.token, "0123456789abcdef") == "m000042-01234567"


def test_versions_stay_in_order_when_tokens_pass_a_million(registry: Registry) -> None:
    big = registry.name(1_000_000, "0123456789abcdef")
    assert registry.path(big).name == big
    put(registry, big, "m999999-0a1b2c3d", ONE)
    assert registry.versions() == [ONE, "m999999-0a1b2c3d", big]
    assert registry.newest_token() == 1_000_000


@pytest.mark.parametrize(
    "name", ["", "..", "../m000001-0a1b2c3d", "m000001-0a1b2c3d/..", "m1-0a1b2c3d", "m000001-0A1B2C3D\n"]
)
def test_a_name_that_is_no_version_has_no_path(registry: Registry, name: str) -> None:
    with pytest.raises(BadBundle, match="not a model version"):
        registry.path(name)


def test_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    away = Registry(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    with pytest.raises(RedisUnavailable, match="does not answer"):
        away.current()
