"""Which workers live and why work waits, on a real Redis."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import redis

from pipeline.errors import BadInput, RedisUnavailable
from pipeline.logs import set_up
from pipeline.observe.presence import Presence, Trouble
from pipeline.redis.attach import attached, running, state_file
from pipeline.redis.keys import TROUBLE_TTL_S, WORKER_TTL_S
from pipeline.settings import Settings
from pipeline.workers.stack.stack import Stack


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


def a_stack(settings: Settings, **changes: Any) -> None:
    """One runs on the data directory, as far as others can see. None: it does not say so."""
    settings.data.dir.mkdir(parents=True)
    stack = Stack(settings)
    stack._write_state()
    path = state_file(settings.data.dir)
    state = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({k: v for k, v in state.items() if v is not None}), encoding="utf-8")


def test_who_joins_a_stack_keeps_to_its_gpu_policy(settings: Settings) -> None:
    theirs = settings.replace(
        gpu_tenants=("logweir", "research=1:4GiB"), gpu_backfill="strict", gpu_half_life_s=60.0
    )
    a_stack(theirs)
    assert (running(settings.data.dir) or {})["pid"] == os.getpid()
    got = attached(Settings(data_dir=settings.data.dir, seed=3))
    assert got.policy() == theirs.policy()
    assert (got.redis.url, got.redis.key_prefix, got.train.seed) == (
        settings.redis.url,
        settings.redis.key_prefix,
        3,
    )


def test_a_policy_of_ones_own_does_not_count_beside_a_stack_and_that_is_said(
    settings: Settings, capsys: "pytest.CaptureFixture[str]"
) -> None:
    set_up("warning")
    a_stack(settings)
    own = Settings(data_dir=settings.data.dir, gpu_tenants=("logweir", "research=9"), lease_ttl_ms=2_000)
    assert attached(own).policy() == Settings().policy()
    said = capsys.readouterr().err
    assert "gpu_tenants of the running stack counts" in said
    assert "lease_ttl_ms of the running stack counts" in said
    assert len(said.splitlines()) == 2


def test_an_older_stack_that_wrote_no_policy_can_still_be_joined(settings: Settings) -> None:
    a_stack(settings, policy=None)
    own = Settings(data_dir=settings.data.dir, gpu_tenants=("logweir", "research"))
    assert attached(own).gpu.tenants == ("logweir", "research")
    assert attached(own).redis.key_prefix == settings.redis.key_prefix


def test_with_a_redis_of_its_own_nobody_else_is_asked(settings: Settings, tmp_path: Path) -> None:
    assert attached(settings) is settings
    with pytest.raises(BadInput, match="no logweir stack runs on"):
        attached(Settings(data_dir=tmp_path / "nothing"))


def test_who_sends_to_a_stack_keeps_to_its_limits(settings: Settings) -> None:
    a_stack(settings.replace(max_dead_mib=3, max_pending_mib=5, max_pending_batches=7))
    got = attached(Settings(data_dir=settings.data.dir))
    limits = (got.intake.max_dead_mib, got.intake.max_pending_mib, got.internal.max_pending_batches)
    assert limits == (3, 5, 7)


def test_a_stack_of_another_user_is_said_to_be_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_stack(settings)
    read = Path.read_bytes

    def refused(path: Path, *_: object, **__: object) -> bytes:
        if path.name == "stack.json":
            raise PermissionError
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)  # the tests may run as root, who may read everything
    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(BadInput, match=r"stack.json cannot be read: the stack there is another user's"):
        attached(Settings(data_dir=settings.data.dir))
