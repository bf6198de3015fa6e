"""Leases on a real Redis: who may hold what, when a lease is lost, and what a stale token can still do
(nothing)."""

import uuid
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from polling import wait_until

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.redis.leases import Lease, Leases, Refused, granted
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

ONE = "training"


@pytest.fixture
def leases(client: "redis.Redis", settings: Settings) -> Leases:
    return Leases(client, settings)


def get(leases: Leases, holder: str, **more: Any) -> Lease:
    return granted(leases.request(ONE, holder, **more), ONE)


def refused(leases: Leases, holder: str, **more: Any) -> Refused:
    answer = leases.request(ONE, holder, **more)
    assert isinstance(answer, Refused), answer
    return answer


def now_ms(client: "redis.Redis") -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def let_pass(leases: Leases) -> None:
    """As if every deadline on the resource had been a moment ago."""
    past = now_ms(leases.client) - 1
    if leases.client.hexists(leases.keys.lease(ONE), "deadline"):
        leases.client.hset(leases.keys.lease(ONE), "deadline", past)


# Exclusion


def test_a_lease_stands_alone(leases: Leases) -> None:
    lease = get(leases, "trainer")
    assert leases.holder_of(ONE) == "trainer"
    answer = refused(leases, "other")
    assert answer.why == "held"
    assert 0 < answer.wait_ms <= lease.ttl_ms
    assert leases.release(lease)
    get(leases, "other")


def test_different_resources_do_not_touch_each_other(leases: Leases) -> None:
    get(leases, "trainer")
    assert isinstance(leases.request("gpu1", "other"), Lease)


def test_asking_again_for_ones_own_exclusive_lease_renews_it(leases: Leases) -> None:
    first = get(leases, "trainer")
    leases.client.hset(leases.keys.lease(ONE), "deadline", now_ms(leases.client) + 500)
    assert get(leases, "trainer") == first
    deadline = int(leases.client.hget(leases.keys.lease(ONE), "deadline") or 0)
    assert deadline > now_ms(leases.client) + 1000


def test_a_refusal_becomes_an_error_that_names_the_time(leases: Leases) -> None:
    get(leases, "trainer")
    with pytest.raises(LeaseRefused, match=r"training is held; it may be free in \d+\.\d s"):
        granted(leases.request(ONE, "other"), ONE)


# Tokens


def test_tokens_only_grow_also_over_expiry_and_release(leases: Leases) -> None:
    tokens = []
    for n in range(6):
        lease = get(leases, f"h{n}")
        tokens.append(lease.token)
        if n % 3:
            leases.release(lease)
        else:
            let_pass(leases)
    assert tokens == sorted(set(tokens))


def test_a_token_is_above_the_newest_one_that_storage_knows(leases: Leases) -> None:
    lease = get(leases, "trainer", floor=41)
    assert lease.token > 41
    leases.release(lease)
    assert get(leases, "trainer", floor=3).token > lease.token


def test_an_expired_lease_cannot_be_renewed_and_is_free_for_others(leases: Leases) -> None:
    lease = get(leases, "a")
    assert leases.renew(lease)
    let_pass(leases)
    assert leases.holder_of(ONE) is None
    assert not leases.renew(lease)
    get(leases, "b")
    assert not leases.renew(lease)
    leases.release(lease)
    assert leases.holder_of(ONE) == "b"


@pytest.mark.long
def test_a_lease_expires_by_itself(client: "redis.Redis", settings: Settings) -> None:
    leases = Leases(client, settings.replace(lease_ttl_ms=2000))
    get(leases, "a")
    assert wait_until(lambda: isinstance(leases.request(ONE, "b"), Lease), timeout_s=20)


def test_a_stranger_and_an_old_token_can_neither_renew_nor_release(leases: Leases) -> None:
    old = get(leases, "a")
    let_pass(leases)
    new = get(leases, "a")
    assert new.token > old.token
    stranger = replace(new, holder="b")
    for wrong in (old, stranger, replace(new, token=new.token + 1)):
        assert not leases.renew(wrong)
        assert not leases.release(wrong)
    assert leases.renew(new)
    assert leases.release(new)
    assert not leases.release(new)


# After Redis changed


def test_an_unknown_redis_grants_nothing_for_one_ttl_where_that_is_asked_for(
    leases: Leases,
) -> None:
    answer = refused(leases, "trainer", quarantine=True)
    assert answer.why == "quarantine"
    assert 0 < answer.wait_ms <= leases.ttl_ms
    leases.client.hset(leases.keys.epoch, "until_ms", now_ms(leases.client) - 1)
    get(leases, "trainer", quarantine=True)


def test_a_failover_starts_a_new_quarantine(leases: Leases) -> None:
    leases.clear_quarantine()
    leases.release(get(leases, "trainer", quarantine=True))
    leases.client.hset(leases.keys.epoch, "id", "0" * 40)  # as if this were another server than before
    assert refused(leases, "trainer", quarantine=True).why == "quarantine"
    left_behind = get(leases, "a")
    leases.clear_quarantine()  # nobody of before is alive: no quarantine, and nothing is held
    assert get(leases, "trainer", quarantine=True).token > left_behind.token
    assert not leases.renew(left_behind)


def test_what_compares_tokens_itself_needs_no_quarantine(leases: Leases) -> None:
    get(leases, "learner")


# Holding


def test_holding_renews_and_gives_back(client: "redis.Redis", settings: Settings) -> None:
    leases = Leases(client, settings.replace(lease_ttl_ms=2000))
    lease = get(leases, "a")
    first = client.hget(leases.keys.lease(ONE), "deadline")
    with leases.holding(lease) as held:
        assert wait_until(lambda: client.hget(leases.keys.lease(ONE), "deadline") != first, timeout_s=10)
        assert not held.lost.is_set()
    assert leases.holder_of(ONE) is None


def test_holding_says_that_the_lease_is_lost(client: "redis.Redis", settings: Settings) -> None:
    leases = Leases(client, settings.replace(lease_ttl_ms=2000))
    with leases.holding(get(leases, "a")) as held:
        let_pass(leases)
        other = get(leases, "b")
        assert held.lost.wait(10)
    assert leases.holder_of(ONE) == other.holder, "the loser gives back nothing"


@pytest.mark.long
def test_holding_is_lost_before_others_start_when_redis_is_silent(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(client, settings.replace(lease_ttl_ms=2000))
    lease = get(leases, "a")

    def silent(*_: object) -> Any:
        raise RedisUnavailable("silent")

    with monkeypatch.context() as patch:
        patch.setattr(Scripts, "run", silent)
        with leases.holding(lease) as held:
            assert held.lost.wait(10)
            deadline = int(client.hget(leases.keys.lease(ONE), "deadline") or 0)
            assert now_ms(client) < deadline, "we stop while nobody else could have started"


def test_looking_at_leases_of_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    away = Leases(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    for ask in (lambda: away.holder_of(ONE), lambda: away.request(ONE, "a"), away.clear_quarantine):
        with pytest.raises(RedisUnavailable, match="does not answer"):
            ask()


# Whatever happens


@dataclass(slots=True)
class Handle:
    """A lease as somebody believes to hold it."""

    lease: Lease
    alive: bool = True


class LeaseMachine(RuleBasedStateMachine):
    """Three processes and time."""

    server: ClassVar[str]

    @initialize()
    def start(self) -> None:
        self.client = redis.Redis.from_url(self.server)
        self.leases = Leases(
            self.client, Settings(key_prefix=f"m{uuid.uuid4().hex[:12]}", lease_ttl_ms=600_000)
        )
        self.handles: list[Handle] = []
        self.newest = 0

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.close()

    def live(self) -> list[Handle]:
        return [h for h in self.handles if h.alive]

    @rule(holder=st.sampled_from("abc"), floor=st.sampled_from([0, 0, 0, 50]))
    def request(self, holder: str, floor: int) -> None:
        answer = self.leases.request(ONE, holder, floor=floor)
        live = self.live()
        if isinstance(answer, Refused):
            assert live
            return
        if live:
            assert answer == live[0].lease, "only its holder gets it again, with the same token"
            return
        assert answer.token > self.newest
        assert answer.token > floor
        self.newest = answer.token
        self.handles.append(Handle(answer))

    @rule(data=st.data(), release=st.booleans())
    def renew_or_release(self, data: Any, release: bool) -> None:
        if not self.handles:
            return
        handle = data.draw(st.sampled_from(self.handles))
        if release:
            # Giving back what has expired is harmless; the invariant says that it takes nothing from others.
            assert self.leases.release(handle.lease) or not handle.alive
            handle.alive = False
        else:
            assert self.leases.renew(handle.lease) == handle.alive

    @rule()
    def time_passes(self) -> None:
        let_pass(self.leases)
        for handle in self.handles:
            handle.alive = False

    @invariant()
    def the_view_agrees(self) -> None:
        if not hasattr(self, "leases"):
            return
        live = self.live()
        assert len(live) <= 1
        assert self.leases.holder_of(ONE) == (live[0].lease.holder if live else None)


@pytest.mark.long
def test_no_order_of_events_gives_a_resource_away_twice(redis_url: str) -> None:
    LeaseMachine.server = redis_url
    run_state_machine_as_test(
        LeaseMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            phases=[Phase.generate],  # shrinking takes minutes on a real server
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
