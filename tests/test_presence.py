"""Which workers live and why work waits, on a real Redis."""

import json
from typing import Any

import pytest
import redis

from pipeline.errors import RedisUnavailable
from pipeline.keyspace import TROUBLE_TTL_S, WORKER_TTL_S
from pipeline.presence import Presence, Trouble
from pipeline.settings import Settings


@pytest.fixture
def presence(client: "redis.Redis", settings: Settings) -> Presence:
    return Presence(client, settings)


def beat(presence: Presence, name: str, **changes: Any) -> None:
    given: dict[str, Any] = {
        "role": "cpu",
        "pid": 7,
        "queues": ["ingest", "infer.cpu"],
    }
    presence.beat(name=name, **{**given, **changes})


def age(presence: Presence, name: str, seconds: float, **more: object) -> None:
    """The worker's last heartbeat was so long ago."""
    data = json.loads(presence.client.hget(presence.keys.workers, name) or b"{}")
    data["beat_ms"] -= int(seconds * 1000)
    presence.client.hset(presence.keys.workers, name, json.dumps({**data, **more}))


def test_a_worker_that_beats_is_live_with_what_it_said(presence: Presence) -> None:
    beat(presence, "b", role="gpu", queues=("infer.gpu",), pid=9)
    beat(presence, "a")
    beat(presence, "a", pid=8)
    first, second = presence.live()
    assert (first.name, first.role, first.pid, first.queues) == ("a", "cpu", 8, ("ingest", "infer.cpu"))
    assert (second.name, second.role, second.queues) == ("b", "gpu", ("infer.gpu",))


def test_a_silent_worker_is_not_live_and_later_forgotten(presence: Presence) -> None:
    beat(presence, "a")
    beat(presence, "b")
    age(presence, "a", WORKER_TTL_S)
    assert [w.name for w in presence.live()] == ["b"]
    presence.drop_silent()
    assert presence.client.hexists(presence.keys.workers, "a")
    age(presence, "a", WORKER_TTL_S * 10)
    presence.drop_silent()
    assert not presence.client.hexists(presence.keys.workers, "a")
    assert presence.client.hexists(presence.keys.workers, "b")


def test_a_worker_that_leaves_is_gone_at_once(presence: Presence) -> None:
    beat(presence, "a")
    presence.leave("a")
    presence.leave("nobody")
    assert presence.live() == []


def test_a_worker_of_a_newer_build_may_say_more(presence: Presence) -> None:
    beat(presence, "a")
    age(presence, "a", 0, temperature=40)
    assert [w.name for w in presence.live()] == ["a"]


def test_the_newest_complaint_is_shown_for_a_while(presence: Presence) -> None:
    assert presence.trouble() is None
    presence.complain("store", "disk full")
    presence.complain("drain", "x" * 5000)
    assert presence.trouble() == Trouble(stage="drain", reason="x" * 500)
    assert 0 < int(presence.client.ttl(presence.keys.trouble)) <= TROUBLE_TTL_S


def test_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    away = Presence(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    for ask in (
        away.live,
        away.drop_silent,
        away.trouble,
        lambda: away.complain("a", "b"),
        lambda: away.leave("a"),
        lambda: beat(away, "a"),
    ):
        with pytest.raises(RedisUnavailable, match="does not answer"):
            ask()
