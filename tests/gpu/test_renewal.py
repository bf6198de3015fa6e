"""A lease in use: renewed, asked for, lost, given back; with the real ledger, and with one that answers as
told."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from polling import wait_until
from pool_devices import put_devices

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.gpu.leasing import renewal as module
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode, LeasePart, LeaseState, Need, PoolLease, PoolPlan, Renewed, Yield
from pipeline.redis import keeper as keeper_module
from pipeline.settings import Settings

WHOLE = Need(mode=LeaseMode.EXCLUSIVE)


@pytest.fixture
def pool(client: "redis.Redis", settings: Settings) -> Pool:
    pool = Pool(client, settings.replace(lease_ttl_ms=2_000, gpu_node_ttl_ms=600_000))
    put_devices(pool, 1)
    return pool


class Told:
    """Answers renewals one after the other, the last one for ever; remembers what was given back."""

    def __init__(self, *answers: Callable[[], Renewed]) -> None:
        self.answers = list(answers)
        self.renewals = 0
        self.given_back: list[bool] = []

    def renew(self, _lease: PoolLease) -> Renewed:
        answer = self.answers[min(self.renewals, len(self.answers) - 1)]
        self.renewals += 1
        return answer()

    def release(self, _lease: PoolLease, *, clean: bool = True) -> bool:
        self.given_back.append(clean)
        return True


def fine() -> Renewed:
    return Renewed(deadline_ms=1)


def away() -> Renewed:
    raise RedisUnavailable("Redis does not answer; it is tried again")


def odd() -> Renewed:
    raise ValueError("an answer that nobody expects")


def a_lease(ttl_ms: int = 600) -> PoolLease:
    return PoolLease(
        lease_id="l1",
        holder="a",
        need=WHOLE,
        parts=(LeasePart(uuid="GPU-1", memory_mib=16_000, compute_percent=100, token=7),),
        state=LeaseState.ACTIVE,
        granted_ms=0,
        deadline_ms=ttl_ms,
        ttl_ms=ttl_ms,
    )


# ---- with the real ledger --------------------------------------------------------------------------


def test_a_lease_is_begun_by_this_process_and_given_back_at_the_end(pool: Pool) -> None:
    with pool.lease(WHOLE, holder="a") as held:
        (shown,) = pool.snapshot().leases
        assert (shown.state, shown.pids, shown.host) == (LeaseState.ACTIVE, (os.getpid(),), this_node())
        assert (held.lease.lease_id, held.why()) == (shown.lease_id, "")
    after = pool.snapshot()
    assert (after.leases, after.orphans) == ((), ())


def test_a_lease_outlives_its_ttl_while_it_is_held(pool: Pool) -> None:
    lease = pool.request(WHOLE, holder="a", ttl_ms=400)
    with pool.holding(lease) as held:
        assert wait_until(lambda: pool.snapshot().now_ms > lease.deadline_ms + 400, timeout_s=10)
        assert pool.sweep().expired == ()
        assert not held.lost.is_set()


def test_a_body_that_fails_gives_back_all_the_same(pool: Pool) -> None:
    with pytest.raises(ZeroDivisionError), pool.lease(WHOLE):
        raise ZeroDivisionError
    assert pool.snapshot().leases == ()


def test_a_holder_that_cannot_get_off_the_device_leaves_its_part_taken(pool: Pool) -> None:
    with pool.lease(WHOLE) as held:
        held.dirty()
    snapshot = pool.snapshot()
    assert snapshot.leases == ()
    assert [left.pids for left in snapshot.orphans] == [(os.getpid(),)]
    with pytest.raises(LeaseRefused, match="needs 1 whole device"):
        pool.request(WHOLE, holder="b")
    assert pool.clear(snapshot.orphans[0].uuid) == 1
    assert pool.request(WHOLE, holder="b")


def test_a_holder_is_told_that_somebody_asks_for_its_device(pool: Pool) -> None:
    with pool.lease(WHOLE) as held:
        snapshot = pool.snapshot()
        by_ms = snapshot.now_ms + 60_000
        ask = Yield(lease_id=held.lease.lease_id, by_ms=by_ms, why="training waits")
        assert pool.ledger.commit(snapshot.epoch, PoolPlan(yields=(ask,))).why == ""
        assert held.asked.wait(5)
        assert (held.why(), held.yield_by_ms, held.lost.is_set()) == ("training waits", by_ms, False)


def test_a_revoked_lease_is_lost_and_stays_with_who_has_the_device_now(pool: Pool) -> None:
    with pool.lease(WHOLE) as held:
        assert pool.revoke(held.lease.lease_id, "maintenance")
        assert held.lost.wait(5)
        assert held.why()
        pool.clear(held.lease.parts[0].uuid)
        other = pool.request(WHOLE, holder="b")
    assert [lease.lease_id for lease in pool.snapshot().leases] == [other.lease_id]


def test_a_lease_that_ended_before_it_is_used_is_noticed_before_the_body(pool: Pool) -> None:
    lease = pool.request(WHOLE, holder="a", ttl_ms=50)
    assert wait_until(lambda: bool(pool.sweep().expired), timeout_s=10)
    with pytest.raises(LeaseRefused, match="ask for another"), pool.holding(lease):
        pytest.fail("the body ran without a lease")


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RedisUnavailable("away")])
def test_a_lease_that_could_not_be_begun_is_given_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    def interrupted(*_: Any, **__: Any) -> bool:
        raise end

    monkeypatch.setattr(pool.ledger, "activate", interrupted)
    with pytest.raises(type(end)), pool.lease(WHOLE):
        pytest.fail("the body ran without a lease")
    assert pool.snapshot().leases == ()


# ---- with answers as told --------------------------------------------------------------------------


@pytest.mark.long
def test_a_holder_stops_before_its_lease_can_have_expired() -> None:
    told = Told(fine, away)
    began = time.monotonic()
    with module.holding(told, a_lease(ttl_ms=5_000)) as held:
        assert not held.lost.is_set()
        assert held.lost.wait(10)
        lost_s = time.monotonic() - began
        assert "may have expired" in held.why()
    assert 4.0 <= lost_s < 5.0
    assert told.given_back == [], "what is lost is somebody else's"


class Passing:
    """A clock and an event on it: whoever waits is told at once that the time has passed."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize("ttl_s", [0.05, 1.0, 15.0, 3600.0])
@pytest.mark.parametrize("answer_s", [0.0, 0.01, 0.5, 0.79])
def test_a_lease_counts_from_when_its_last_renewal_was_sent(
    monkeypatch: pytest.MonkeyPatch, ttl_s: float, answer_s: float
) -> None:
    """Redis may have counted from then on; the answer came after `answer_s` of the TTL."""
    clock = Passing()

    def slow() -> Renewed:
        clock.now += answer_s * ttl_s
        return fine()

    monkeypatch.setattr(keeper_module, "time", clock)
    using = module.LeaseInUse(a_lease(ttl_ms=int(ttl_s * 1000)))
    keeper = module.keeper_of(Told(slow), using)
    keeper._stop = clock  # type: ignore[assignment]
    sent = clock.now
    assert keeper.renew()
    assert not using.lost.is_set()
    keeper._watch()
    assert using.lost.is_set()
    assert 0.8 * ttl_s <= clock.now - sent + 1e-9 < ttl_s


def test_a_holder_that_was_stopped_learns_of_the_loss_before_a_thread_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Passing()
    monkeypatch.setattr(keeper_module, "time", clock)
    using = module.LeaseInUse(a_lease(ttl_ms=1_000))
    keeper = module.keeper_of(Told(fine), using)  # no thread is started
    assert keeper.renew()
    assert not using.lost.is_set()
    clock.now += 1.25
    assert using.lost.is_set()
    assert "may have expired" in using.why()


def test_a_lease_that_was_given_back_is_not_lost_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Passing()
    monkeypatch.setattr(keeper_module, "time", clock)
    with module.holding(told := Told(fine), a_lease(ttl_ms=1_000)) as held:
        pass
    clock.now += 1.25
    assert not held.lost.is_set()
    assert told.given_back == [True]


def test_a_renewal_that_hangs_does_not_hide_that_the_lease_is_lost() -> None:
    going = threading.Event()

    def hangs() -> Renewed:
        going.wait(20)
        return fine()

    with module.holding(Told(fine, hangs), a_lease()) as held:
        assert held.lost.wait(10)
        going.set()


@pytest.mark.long
def test_an_odd_answer_does_not_end_the_renewing() -> None:
    told = Told(fine, odd, away, odd, fine)
    with module.holding(told, a_lease(ttl_ms=20_000)) as held:
        assert wait_until(lambda: told.renewals > 6, timeout_s=20)
        assert not held.lost.is_set()
    assert told.given_back == [True]


def test_only_odd_answers_lose_the_lease_in_time() -> None:
    with module.holding(Told(fine, odd), a_lease()) as held:
        assert held.lost.wait(10)


def test_a_refused_renewal_loses_the_lease_at_once_with_its_reason() -> None:
    told = Told(fine, lambda: Renewed(lost="expired"))
    with module.holding(told, a_lease(ttl_ms=600_000)) as held:
        assert held.lost.wait(10)
        assert held.why() == "expired"
    assert told.renewals == 2, "what is lost stays lost"


def test_whether_the_first_renewal_fails_decides_whether_the_body_runs() -> None:
    told = Told(away)
    with pytest.raises(RedisUnavailable), module.holding(told, a_lease()):
        pytest.fail("the body ran on a lease of unknown age")
    assert told.given_back == [True]


def test_a_thread_that_cannot_start_gives_the_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told = Told(fine)
    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError), module.holding(told, a_lease()):
        pytest.fail("the body ran unwatched")
    assert told.given_back == [True]


def test_redis_away_at_the_end_is_no_fault_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(fine)
    monkeypatch.setattr(told, "release", lambda _lease, *, clean: away())
    with module.holding(told, a_lease(ttl_ms=60_000)):
        pass


def test_how_a_holder_leaves_is_told() -> None:
    told = Told(fine)
    with module.holding(told, a_lease(), clean=False):
        pass
    with module.holding(told, a_lease()) as held:
        held.dirty()
    assert told.given_back == [False, False]
