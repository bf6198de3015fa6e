"""The shared verdict cache on a real Redis: keyed by version, bounded, and never in the way."""

import pytest
import redis

from pipeline.drain import verdicts
from pipeline.drain.verdicts import LOCAL_VERSIONS, Verdicts
from pipeline.errors import RedisUnavailable
from pipeline.records.verdict import Verdict
from pipeline.settings import Settings


def verdict(template_id: int, score: float | None = 0.25) -> Verdict:
    return Verdict(
        template_id=template_id,
        score=score,
        anomalous=None if score is None else score >= 0.5,
        reasons=("rare:1/100", "unlikely-tokens:a b"),
    )


@pytest.fixture
def cache(client: "redis.Redis", settings: Settings) -> Verdicts:
    return Verdicts(client, settings)


def fresh(cache: Verdicts) -> Verdicts:
    """Another process: the same Redis, nothing near."""
    return Verdicts(cache.client, Settings(key_prefix=cache.keys.prefix))


def size(cache: Verdicts, version: str = "m1") -> int:
    return sum(int(cache.client.hlen(cache.keys.verdicts(version, half))) for half in ("young", "old"))


def test_what_one_process_learns_another_one_finds_unchanged(cache: Verdicts) -> None:
    known = {1: verdict(7), 2**64 - 1: verdict(8, None), 3: verdict(9, 1.0)}
    assert cache.learn("m1", known)
    assert fresh(cache).lookup("m1", [*known, 4]) == known
    assert fresh(cache).lookup("m1", []) == {}


def test_an_answer_of_one_version_is_never_given_for_another(cache: Verdicts) -> None:
    cache.lookup("m1", [])
    cache.learn("m1", {1: verdict(7)})
    assert cache.lookup("m1", [1]) == {1: verdict(7)}
    assert cache.lookup("m2", [1]) == {}
    cache.learn("m1", {2: verdict(8)})  # an old batch ends while the new version is near
    assert cache.lookup("m2", [2]) == {}
    cache.learn("m2", {1: verdict(9)})
    assert cache.lookup("m2", [1]) == {1: verdict(9)}
    assert cache.lookup("m1", [1]) == {1: verdict(7)}


def test_the_near_cache_answers_without_redis_for_versions_that_serve_side_by_side(cache: Verdicts) -> None:
    names = [f"m{n}" for n in range(LOCAL_VERSIONS)]
    for n, name in enumerate(names):
        cache.learn(name, {1: verdict(n)})
        cache.lookup(name, [1])
        for half in ("young", "old"):
            cache.client.delete(cache.keys.verdicts(name, half))
    for n, name in enumerate(names):
        assert cache.lookup(name, [1]) == {1: verdict(n)}
    assert len(cache._local) == LOCAL_VERSIONS


def test_the_version_that_was_asked_least_recently_is_forgotten_near_first(cache: Verdicts) -> None:
    names = [f"m{n}" for n in range(LOCAL_VERSIONS)]
    for name in names:
        cache.learn(name, {1: verdict(7)})
        cache.lookup(name, [1])
        cache.client.delete(cache.keys.verdicts(name, "young"))
    cache.lookup(names[0], [1])
    cache.lookup("one more", [])
    assert cache.lookup(names[0], [1]) == {1: verdict(7)}
    assert cache.lookup(names[1], [1]) == {}, "it was not near any more, and Redis does not know it"
    assert len(cache._local) == LOCAL_VERSIONS


def test_the_near_cache_of_one_version_is_bounded(cache: Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "LOCAL_VERDICTS", 10)
    cache.lookup("m1", [])
    cache.learn("m1", {k: verdict(k) for k in range(25)})
    assert list(cache._local["m1"]) == list(range(15, 25))


def test_the_cache_never_holds_more_than_its_limit(cache: Verdicts) -> None:
    cache.limit = 100
    for start in range(0, 1000, 70):
        cache.learn("m1", {k: verdict(k) for k in range(start, start + 70)})
        assert size(cache) <= 100
    assert len(fresh(cache).lookup("m1", range(1000))) >= 50


def test_a_write_larger_than_the_whole_cache_keeps_to_the_limit(cache: Verdicts) -> None:
    cache.limit = 100
    cache.learn("m1", {k: verdict(k) for k in range(1000)})
    assert size(cache) <= 100
    assert set(fresh(cache).lookup("m1", range(1000))) >= set(range(950, 1000))


@pytest.mark.long
def test_what_is_asked_for_survives_and_what_is_not_leaves(cache: Verdicts) -> None:
    cache.limit = 100
    cache.learn("m1", {1: verdict(1), 2: verdict(2)})
    for start in range(100, 600, 10):
        assert fresh(cache).lookup("m1", [1]) == {1: verdict(1)}, (
            "an old answer that is used becomes young again"
        )
        cache.learn("m1", {k: verdict(k) for k in range(start, start + 10)})
    assert fresh(cache).lookup("m1", [2]) == {}


def test_every_half_expires(cache: Verdicts) -> None:
    cache.limit = 10
    for k in range(12):
        cache.learn("m1", {k: verdict(k)})
    for half in ("young", "old"):
        assert int(cache.client.ttl(cache.keys.verdicts("m1", half))) > 0


def test_an_unreadable_answer_is_unknown_and_can_be_learnt_again(cache: Verdicts) -> None:
    cache.learn("m1", {1: verdict(7), 2: verdict(8), 3: verdict(9)})
    young = cache.keys.verdicts("m1", "young")
    cache.client.hset(young, (1).to_bytes(8, "little"), b"\xc1 damaged")
    newer = b"\x95\x63" + verdict(8).pack()[2:]  # wire version 99, as written by a later build
    cache.client.hset(young, (2).to_bytes(8, "little"), newer)
    assert fresh(cache).lookup("m1", [1, 2, 3]) == {3: verdict(9)}
    cache.learn("m1", {1: verdict(7)})
    assert fresh(cache).lookup("m1", [1]) == {1: verdict(7)}


def test_a_write_with_a_token_that_is_not_the_holders_changes_nothing(cache: Verdicts) -> None:
    lease = cache.keys.lease("drain")
    cache.client.hset(lease, mapping={"holder": "a", "token": 5, "deadline": 2**45})
    assert not cache.learn("m1", {1: verdict(7)}, templates=[(1, b"t", "shop")], token="4")
    assert size(cache) == 0
    assert not cache.client.exists(cache.keys.templates, cache.keys.template_counts)
    assert cache.learn("m1", {1: verdict(7)}, templates=[(1, b"t", "shop")], token="5")
    cache.client.hset(lease, "deadline", 1)
    assert not cache.learn("m1", {2: verdict(7)}, token="5"), "an expired lease writes nothing either"
    assert fresh(cache).lookup("m1", [1, 2]) == {1: verdict(7)}


def test_a_refused_write_is_not_remembered_near(cache: Verdicts) -> None:
    cache.lookup("m1", [])
    assert not cache.learn("m1", {1: verdict(7)}, token="4")
    assert cache.lookup("m1", [1]) == {}


def test_a_template_written_twice_is_counted_once(cache: Verdicts) -> None:
    for _ in range(2):  # the answer was lost, so Redis was asked again
        assert cache.learn("m1", {}, templates=[(1, b"t", "shop")])
    assert cache.learn("m1", {}, templates=[(1, b"t <*>", "")])
    assert cache.client.hget(cache.keys.template_counts, "shop") == b"1"
    assert cache.client.hget(cache.keys.templates, 1) == b"t <*>"


def test_an_id_is_not_given_to_a_second_template(cache: Verdicts) -> None:
    assert cache.learn("m1", {}, templates=[(1, b"t", "shop")])
    assert not cache.learn("m1", {1: verdict(1)}, templates=[(1, b"other", "shop")])
    assert cache.client.hget(cache.keys.templates, 1) == b"t"
    assert cache.lookup("m1", [1]) == {}


def test_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    away = Verdicts(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    with pytest.raises(RedisUnavailable, match="does not answer"):
        away.lookup("m1", [1])
    with pytest.raises(RedisUnavailable, match="does not answer"):
        away.learn("m1", {1: verdict(1)})
