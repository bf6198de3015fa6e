"""Leases on a real Redis: who may hold what, when a lease is lost, and what a stale token can still do (nothing)."""

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
from pipeline.redis.leases import Lease, Leases, Mode, Refused, granted
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

ONE = "training"
SHARED, EXCLUSIVE = Mode.SHARED, Mode.EXCLUSIVE


@pytest.fixture
def leases(client: "redis.Redis", settings: Settings) -> Leases:
    return Leases(client, settings)


def get(leases: Leases, mode: Mode, holder: str, **more: Any) -> Lease:
    return granted(leases.request(ONE, mode, holder, **more), ONE)


def refused(leases: Leases, mode: Mode, holder: str, **more: Any) -> Refused:
    answer = leases.request(ONE, mode, holder, **more)
    assert isinstance(answer, Refused), answer
    return answer


def now_ms(client: "redis.Redis") -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def let_pass(leases: Leases) -> None:
    """As if every deadline on the resource had been a moment ago."""
    past = now_ms(leases.client) - 1
    key, shared = leases.keys.lease(ONE), leases.keys.shared(ONE)
    for name in ("deadline", "waiting_until"):
        if leases.client.hexists(key, name):
            leases.client.hset(key, name, past)
    for member in leases.client.zrange(shared, 0, -1):
        leases.client.zadd(shared, {member: past})


# Exclusion


def test_shared_leases_stand_beside_each_other(leases: Leases) -> None:
    get(leases, SHARED, "a")
    get(leases, SHARED, "b")
    view = leases.look(ONE)
    assert (view.shared, view.exclusive, view.open_to_shared) == (2, None, True)


def test_an_exclusive_lease_stands_alone(leases: Leases) -> None:
    lease = get(leases, EXCLUSIVE, "trainer")
    assert leases.look(ONE).exclusive == "trainer"
    assert not leases.look(ONE).open_to_shared
    for mode in Mode:
        answer = refused(leases, mode, "other")
        assert answer.why == "held"
        assert 0 < answer.wait_ms <= lease.ttl_ms
    assert leases.release(lease)
    get(leases, SHARED, "other")


def test_different_resources_do_not_touch_each_other(leases: Leases) -> None:
    get(leases, EXCLUSIVE, "trainer")
    assert isinstance(leases.request("gpu1", EXCLUSIVE, "other"), Lease)


def test_asking_again_for_ones_own_exclusive_lease_renews_it(leases: Leases) -> None:
    first = get(leases, EXCLUSIVE, "trainer")
    leases.client.hset(leases.keys.lease(ONE), "deadline", now_ms(leases.client) + 500)
    assert get(leases, EXCLUSIVE, "trainer") == first
    deadline = int(leases.client.hget(leases.keys.lease(ONE), "deadline") or 0)
    assert deadline > now_ms(leases.client) + 1000


def test_a_refusal_becomes_an_error_that_names_the_time(leases: Leases) -> None:
    get(leases, EXCLUSIVE, "trainer")
    with pytest.raises(LeaseRefused, match=r"training is held; it may be free in \d+\.\d s"):
        granted(leases.request(ONE, SHARED, "other"), ONE)


# The door


def test_a_waiting_exclusive_need_closes_the_door_and_gets_in_when_the_others_left(leases: Leases) -> None:
    shared = get(leases, SHARED, "a")
    assert refused(leases, EXCLUSIVE, "trainer").why == "held"
    assert leases.look(ONE).waiting
    assert refused(leases, SHARED, "b").why == "held"
    assert leases.renew(shared), "who is inside may finish"
    assert leases.release(shared)
    get(leases, EXCLUSIVE, "trainer")
    assert not leases.look(ONE).waiting


def test_the_door_opens_again_when_the_one_who_waited_does_not_come_back(leases: Leases) -> None:
    get(leases, SHARED, "a")
    refused(leases, EXCLUSIVE, "trainer")
    refused(leases, SHARED, "b")
    let_pass(leases)
    assert leases.look(ONE).open_to_shared
    get(leases, SHARED, "b")


# Tokens


def test_tokens_only_grow_also_over_expiry_and_release(leases: Leases) -> None:
    tokens = []
    for n in range(6):
        lease = get(leases, EXCLUSIVE if n % 2 else SHARED, f"h{n}")
        tokens.append(lease.token)
        if n % 3:
            leases.release(lease)
        else:
            let_pass(leases)
    assert tokens == sorted(set(tokens))


def test_a_token_is_above_the_newest_one_that_storage_knows(leases: Leases) -> None:
    lease = get(leases, EXCLUSIVE, "trainer", floor=41)
    assert lease.token > 41
    leases.release(lease)
    assert get(leases, EXCLUSIVE, "trainer", floor=3).token > lease.token


def test_an_expired_lease_cannot_be_renewed_and_is_free_for_others(leases: Leases) -> None:
    for mode in Mode:
        lease = get(leases, mode, "a")
        assert leases.renew(lease)
        let_pass(leases)
        assert leases.look(ONE).exclusive is None
        assert leases.look(ONE).shared == 0
        assert not leases.renew(lease)
        other = get(leases, EXCLUSIVE, "b")
        assert not leases.renew(lease)
        leases.release(lease)
        assert leases.look(ONE).exclusive == "b"
        leases.release(other)


def test_a_lease_expires_by_itself(client: "redis.Redis", settings: Settings) -> None:
    leases = Leases(client, replace(settings, lease_ttl_ms=2000))
    get(leases, EXCLUSIVE, "a")
    assert wait_until(lambda: isinstance(leases.request(ONE, SHARED, "b"), Lease), timeout_s=20)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_stranger_and_an_old_token_can_neither_renew_nor_release(leases: Leases, mode: Mode) -> None:
    old = get(leases, mode, "a")
    let_pass(leases)
    new = get(leases, mode, "a")
    assert new.token > old.token
    stranger = replace(new, holder="b")
    for wrong in (old, stranger, replace(new, token=new.token + 1)):
        assert not leases.renew(wrong)
        assert not leases.release(wrong)
    assert leases.renew(new)
    assert leases.release(new)
    assert not leases.release(new)


# After Redis changed


def test_an_unknown_redis_grants_nothing_exclusive_for_one_ttl_where_that_is_asked_for(
    leases: Leases,
) -> None:
    answer = refused(leases, EXCLUSIVE, "trainer", quarantine=True)
    assert answer.why == "quarantine"
    assert 0 < answer.wait_ms <= leases.ttl_ms
    leases.client.hset(leases.keys.epoch, "until_ms", now_ms(leases.client) - 1)
    get(leases, EXCLUSIVE, "trainer", quarantine=True)


def test_a_failover_starts_a_new_quarantine(leases: Leases) -> None:
    leases.clear_quarantine()
    leases.release(get(leases, EXCLUSIVE, "trainer", quarantine=True))
    leases.client.hset(leases.keys.epoch, "id", "0" * 40)  # as if this were another server than before
    assert refused(leases, EXCLUSIVE, "trainer", quarantine=True).why == "quarantine"
    left_behind = get(leases, SHARED, "a")
    leases.clear_quarantine()  # nobody of before is alive: no quarantine, and nothing is held
    assert get(leases, EXCLUSIVE, "trainer", quarantine=True).token > left_behind.token
    assert not leases.renew(left_behind)


def test_what_compares_tokens_itself_needs_no_quarantine(leases: Leases) -> None:
    get(leases, EXCLUSIVE, "learner")


# Holding


def test_holding_renews_and_gives_back(client: "redis.Redis", settings: Settings) -> None:
    leases = Leases(client, replace(settings, lease_ttl_ms=2000))
    lease = get(leases, EXCLUSIVE, "a")
    first = client.hget(leases.keys.lease(ONE), "deadline")
    with leases.holding(lease) as held:
        assert wait_until(lambda: client.hget(leases.keys.lease(ONE), "deadline") != first, timeout_s=10)
        assert not held.lost.is_set()
    assert leases.look(ONE).exclusive is None


def test_holding_says_that_the_lease_is_lost(client: "redis.Redis", settings: Settings) -> None:
    leases = Leases(client, replace(settings, lease_ttl_ms=2000))
    with leases.holding(get(leases, EXCLUSIVE, "a")) as held:
        let_pass(leases)
        other = get(leases, EXCLUSIVE, "b")
        assert held.lost.wait(10)
    assert leases.look(ONE).exclusive == other.holder, "the loser gives back nothing"


def test_holding_is_lost_before_others_start_when_redis_is_silent(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(client, replace(settings, lease_ttl_ms=2000))
    lease = get(leases, EXCLUSIVE, "a")

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
    for ask in (lambda: away.look(ONE), lambda: away.request(ONE, SHARED, "a"), away.clear_quarantine):
        with pytest.raises(RedisUnavailable, match="does not answer"):
            ask()


# Whatever happens


@dataclass(slots=True)
class Handle:
    """A lease as somebody believes to hold it."""

    lease: Lease
    alive: bool = True


class LeaseMachine(RuleBasedStateMachine):
    """Three processes, two modes, time."""

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

    def live(self, mode: Mode) -> list[Handle]:
        return [h for h in self.handles if h.alive and h.lease.mode is mode]

    @rule(mode=st.sampled_from(Mode), holder=st.sampled_from("abc"), floor=st.sampled_from([0, 0, 0, 50]))
    def request(self, mode: Mode, holder: str, floor: int) -> None:
        answer = self.leases.request(ONE, mode, holder, floor=floor)
        exclusive, shared = self.live(EXCLUSIVE), self.live(SHARED)
        if isinstance(answer, Refused):
            assert exclusive or shared
            return
        if mode is EXCLUSIVE and exclusive:
            assert answer == exclusive[0].lease, "only its holder gets it again, with the same token"
            return
        assert not exclusive, "nothing is granted beside an exclusive lease"
        assert mode is SHARED or not shared
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
        view = self.leases.look(ONE)
        exclusive = self.live(EXCLUSIVE)
        assert view.exclusive == (exclusive[0].lease.holder if exclusive else None)
        assert view.shared == len(self.live(SHARED))
        assert len(exclusive) <= 1
        assert not (exclusive and self.live(SHARED))


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
