"""The pool from its users' side: asking, waiting, giving back; who plans; and every way out without a
lease."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import redis
from polling import wait_until
from pool_devices import put_devices

from pipeline.errors import BadInput, LeaseRefused, RedisUnavailable
from pipeline.gpu.leasing import planner
from pipeline.gpu.leasing.planner import PLAN_MEANWHILE, Planner
from pipeline.gpu.policy import policy
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Committed, LeaseMode, LeaseState, Need, PoolLease
from pipeline.settings import Settings

WHOLE = Need(mode=LeaseMode.EXCLUSIVE)
SMALL = Need(memory_mib=1_000, compute_percent=10)


@pytest.fixture
def bare(client: "redis.Redis", settings: Settings) -> Pool:
    """No device yet, and a quarantine as after a restart."""
    return Pool(client, settings.replace(lease_ttl_ms=2_000, gpu_node_ttl_ms=600_000))


@pytest.fixture
def pool(bare: Pool) -> Pool:
    put_devices(bare)
    return bare


def away(*_: Any, **__: Any) -> Any:
    raise RedisUnavailable("Redis does not answer; it is tried again")


def waiting(pool: Pool) -> int:
    return len(pool.snapshot().waiting)


class Asker:
    """Somebody who waits, in a thread."""

    def __init__(self, pool: Pool, need: Need, name: str, **more: Any) -> None:
        self.lease: PoolLease | None = None
        self.error: BaseException | None = None

        def ask() -> None:
            try:
                self.lease = pool.request(need, holder=name, **{"timeout_s": 30.0, **more})
            except BaseException as exc:  # noqa: BLE001 - handed to the test
                self.error = exc

        self.thread = threading.Thread(target=ask, daemon=True)
        self.thread.start()

    def got(self) -> PoolLease:
        self.thread.join(20)
        assert self.lease is not None, self.error
        return self.lease

    def failed(self) -> BaseException:
        self.thread.join(20)
        assert self.error is not None
        return self.error


# ---- asking ----------------------------------------------------------------------------------------


def test_asking_gives_a_part_of_a_device_and_giving_back_frees_it(pool: Pool) -> None:
    lease = pool.request(SMALL, holder="a")
    assert (lease.state, lease.holder, len(lease.parts)) == (LeaseState.GRANTED, "a", 1)
    assert (lease.parts[0].memory_mib, lease.parts[0].compute_percent) == (1_000, 10)
    assert lease.token > 0
    assert [one.lease_id for one in pool.snapshot().leases] == [lease.lease_id]
    assert pool.release(lease)
    assert pool.snapshot().leases == ()
    assert not pool.release(lease)


@pytest.mark.parametrize("timeout_s", [0.0, 10.0])
def test_a_shared_and_an_exclusive_need_never_meet_on_a_device(pool: Pool, timeout_s: float) -> None:
    put_devices(pool, 1, node="node-a")
    first = pool.request(WHOLE, holder="a", timeout_s=timeout_s)
    with pytest.raises(LeaseRefused, match="no GPU now: needs 1000 MiB and 10 %"):
        pool.request(SMALL, holder="b")
    pool.release(first)
    assert pool.request(SMALL, holder="b", timeout_s=timeout_s).token > first.token


def test_a_gang_gets_all_its_devices_or_none(pool: Pool) -> None:
    gang = Need(mode=LeaseMode.EXCLUSIVE, devices=2)
    one = pool.request(WHOLE, holder="a")
    with pytest.raises(LeaseRefused, match="2 whole devices"):
        pool.request(gang, holder="b")
    assert len(pool.snapshot().leases) == 1
    pool.release(one)
    assert len({part.uuid for part in pool.request(gang, holder="b").parts}) == 2


def test_a_need_that_can_never_be_met_is_bad_input_at_once(pool: Pool) -> None:
    with pytest.raises(BadInput):
        pool.request(Need(memory_mib=16_001, compute_percent=10), holder="a", timeout_s=None)
    with pytest.raises(BadInput):
        pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=3), holder="a", timeout_s=None)
    assert waiting(pool) == 0
    assert pool.refusal(SMALL) == ""
    assert pool.refusal(replace(SMALL, tenant="nobody"))


def test_a_device_that_has_just_come_is_seen_by_who_was_refused_before(bare: Pool) -> None:
    put_devices(bare, 1)
    assert bare.refusal(Need(mode=LeaseMode.EXCLUSIVE, devices=2))
    put_devices(bare, 2)
    assert bare.refusal(Need(mode=LeaseMode.EXCLUSIVE, devices=2)) == ""


@pytest.mark.parametrize(
    "wrong", [{"holder": ""}, {"ttl_ms": 0}, {"timeout_s": -1.0}, {"timeout_s": float("nan")}]
)
def test_a_request_without_a_holder_or_with_senseless_times_is_bad_input(
    pool: Pool, wrong: dict[str, Any]
) -> None:
    with pytest.raises(BadInput):
        pool.request(SMALL, **{"holder": "a", **wrong})


def test_asking_again_under_the_same_name_gives_the_same_lease(pool: Pool) -> None:
    first = pool.request(WHOLE, holder="a", request_id="job-1")
    again = pool.request(WHOLE, holder="a", request_id="job-1", timeout_s=5)
    assert (again.lease_id, again.parts) == (first.lease_id, first.parts)
    with pytest.raises(LeaseRefused, match="belongs to a"):
        pool.request(WHOLE, holder="b", request_id="job-1", timeout_s=5)
    assert [lease.holder for lease in pool.snapshot().leases] == ["a"], (
        "the refusal took nothing from its owner"
    )


@pytest.mark.long
def test_after_a_restart_of_redis_nothing_is_granted_for_one_ttl(bare: Pool) -> None:
    put_devices(bare, clear_quarantine=False)
    with pytest.raises(LeaseRefused, match=r"Redis was restarted, so nothing is granted for [12] s"):
        bare.request(SMALL, holder="a")
    assert bare.request(SMALL, holder="a", timeout_s=20)


def test_asking_once_in_vain_changes_nothing_for_others(pool: Pool) -> None:
    """It will not be there when its turn comes, so nobody yields and nothing is kept free for it."""
    pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=2, preemptible=True), holder="a")
    before = pool.snapshot()
    with pytest.raises(LeaseRefused):
        pool.request(replace(WHOLE, priority=9), holder="b")
    after = pool.snapshot()
    assert (after.epoch, after.reservation) == (before.epoch, None)
    assert after.leases[0].yield_by_ms is None


# ---- waiting ---------------------------------------------------------------------------------------


def test_who_waits_gets_what_is_given_back(pool: Pool) -> None:
    put_devices(pool, 1)
    first = pool.request(WHOLE, holder="a")
    second = Asker(pool, WHOLE, "b")
    assert wait_until(lambda: waiting(pool) == 1, timeout_s=10)
    pool.release(first)
    lease = second.got()
    assert lease.holder == "b"
    assert lease.token > first.token


def test_who_waits_gets_what_a_dead_holder_had(pool: Pool) -> None:
    put_devices(pool, 1)
    pool.request(WHOLE, holder="dead", ttl_ms=300)
    second = Asker(pool, WHOLE, "b")

    def swept() -> bool:
        pool.sweep()
        return second.lease is not None

    assert wait_until(swept, timeout_s=10)


def test_who_waits_is_granted_when_nobody_else_plans(pool: Pool) -> None:
    """The device was given back by somebody who died before planning."""
    put_devices(pool, 1)
    first = pool.request(WHOLE, holder="a")
    second = Asker(pool, WHOLE, "b")
    assert wait_until(lambda: waiting(pool) == 1, timeout_s=10)
    pool.ledger.release(first)
    assert second.got()


def test_a_planner_that_died_keeps_nobody_out_for_long(pool: Pool) -> None:
    first = pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=2), holder="a")
    others = [Asker(pool, WHOLE, name) for name in ("b", "c")]
    assert wait_until(lambda: waiting(pool) == 2, timeout_s=10)
    pool.client.set(pool.planner.slot, "dead", px=1_000)
    pool.release(first)
    assert all(other.got() for other in others)


def test_a_need_that_is_not_met_in_time_waits_no_more(pool: Pool) -> None:
    pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=2), holder="a")
    with pytest.raises(LeaseRefused, match=r"no GPU within 0\.2 s: needs 1 whole device; "):
        pool.request(WHOLE, holder="b", timeout_s=0.2)
    assert waiting(pool) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_who_is_interrupted_waits_no_more(pool: Pool, error: type[BaseException]) -> None:
    def go_on() -> None:
        raise error

    pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=2), holder="a")
    with pytest.raises(error):
        pool.request(WHOLE, holder="b", timeout_s=None, go_on=go_on)
    assert waiting(pool) == 0


def test_what_was_granted_to_one_who_left_is_free_again(pool: Pool) -> None:
    """The grant comes in the same moment as the interrupt: nobody knows of it but the ledger."""

    def interrupted() -> None:
        pool.release(first)
        assert waiting(pool) == 0
        assert [one.holder for one in pool.snapshot().leases] == ["b"]
        raise KeyboardInterrupt

    first = pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=2), holder="a")
    with pytest.raises(KeyboardInterrupt):
        pool.request(WHOLE, holder="b", timeout_s=None, go_on=interrupted)
    assert pool.snapshot().leases == ()


def test_a_waiting_process_that_stays_alive_is_not_forgotten(pool: Pool) -> None:
    first = pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=2), holder="a", ttl_ms=60_000)
    second = Asker(pool, WHOLE, "b", ttl_ms=400)
    assert wait_until(lambda: waiting(pool) == 1, timeout_s=10)
    registered = pool.snapshot().waiting[0]
    assert wait_until(lambda: pool.snapshot().now_ms > registered.since_ms + 800, timeout_s=10)
    pool.sweep()
    assert [one.since_ms for one in pool.snapshot().waiting] == [registered.since_ms]
    pool.release(first)
    assert second.got()


def test_who_waits_gets_over_a_redis_that_is_away_for_a_while(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    wait = pool.ledger.wait_and_commit

    def shaky(*args: Any) -> tuple[PoolLease | None, Committed]:
        tries.append(1)
        return away() if len(tries) < 3 else wait(*args)

    monkeypatch.setattr(pool.ledger, "wait_and_commit", shaky)
    assert pool.request(SMALL, holder="a", timeout_s=20)
    assert len(tries) == 3


def test_without_redis_asking_fails_and_no_shared_need_is_invited(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool.ledger, "snapshot", away)
    monkeypatch.setattr(pool.ledger, "wait", away)
    monkeypatch.setattr(pool.ledger, "abandon", away)
    assert not pool.open_to_shared(SMALL)
    with pytest.raises(RedisUnavailable):
        pool.request(SMALL, holder="a")


def test_two_needs_of_one_size_are_not_swapped(pool: Pool) -> None:
    """A grant is for the need that it was planned for, not for the oldest one of its size."""
    left, right = (device.uuid for device in put_devices(pool, 2))
    both = [pool.request(replace(WHOLE, device=uuid), holder="first") for uuid in (left, right)]
    older = Asker(pool, replace(WHOLE, device=right), "older", request_id="r-older", ttl_ms=31_000)
    assert wait_until(lambda: waiting(pool) == 1, timeout_s=10)
    newer = Asker(pool, replace(WHOLE, device=left), "newer", request_id="r-newer", ttl_ms=32_000)
    assert wait_until(lambda: waiting(pool) == 2, timeout_s=10)
    pool.release(both[0])
    second = newer.got()
    assert (second.lease_id, second.holder, second.ttl_ms) == ("r-newer", "newer", 32_000)
    assert [part.uuid for part in second.parts] == [left]
    assert [one.request_id for one in pool.snapshot().waiting] == ["r-older"]
    pool.release(both[1])
    third = older.got()
    assert (third.lease_id, third.holder, third.ttl_ms) == ("r-older", "older", 31_000)
    assert [part.uuid for part in third.parts] == [right]
    # And neither is good for what the other has.
    swapped = replace(second, parts=third.parts)
    assert pool.renew(swapped).lost
    assert not pool.activate(swapped, pids=[1])
    assert not pool.release(swapped)
    assert {one.lease_id for one in pool.snapshot().leases} == {"r-older", "r-newer"}


# ---- who plans -------------------------------------------------------------------------------------


def test_many_who_wait_for_one_device_get_it_one_after_the_other_and_plan_in_turn(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_devices(pool, 1)
    looks: list[int] = []
    now: list[str] = []
    most: list[int] = []
    look = pool.ledger.snapshot

    def counted() -> Any:
        looks.append(1)
        return look()

    def use(name: str) -> None:
        with pool.lease(WHOLE, holder=name, timeout_s=60):
            now.append(name)
            time.sleep(0.001)  # long enough for a second holder to begin
            most.append(len(now))
            now.remove(name)

    first = pool.request(WHOLE, holder="first", ttl_ms=60_000)
    users = [threading.Thread(target=use, args=(f"w{i}",), daemon=True) for i in range(40)]
    for user in users:
        user.start()
    assert wait_until(lambda: waiting(pool) == len(users), timeout_s=20)
    monkeypatch.setattr(pool.ledger, "snapshot", counted)
    pool.release(first)
    for user in users:
        user.join(60)
    assert most == [1] * len(users)
    assert len(looks) < 5 * len(users), "each grant wakes one, not all"


def test_who_plans_plans_again_for_one_who_came_meanwhile(
    pool: Pool, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    other, looks = Planner(client, pool.ledger, pool.settings), []
    look = pool.ledger.snapshot

    def interrupted() -> Any:
        looks.append(1)
        if len(looks) == 1:
            assert other.plan() == ()
            assert client.get(other.slot) == PLAN_MEANWHILE
        return look()

    monkeypatch.setattr(pool.ledger, "snapshot", interrupted)
    # On a busy machine a first round may take longer than one process plans for others.
    monkeypatch.setattr(planner, "ROUNDS_S", 60.0)
    monkeypatch.setattr(planner, "SLOT_MS", 60_000)
    pool.planner.plan()
    assert len(looks) == 2
    assert client.get(other.slot) is None


def test_nobody_plans_for_others_for_ever(
    pool: Pool, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Planner(client, pool.ledger, pool.settings)
    look = pool.ledger.snapshot

    def busy() -> Any:
        other.plan()
        return look()

    monkeypatch.setattr(pool.ledger, "snapshot", busy)
    client.set(other.recent, "x")
    pool.planner.plan()
    assert client.get(other.recent) is None, "the next who polls plans at once"


def test_a_plan_is_made_anew_when_the_pool_changed_under_it(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, changes = pool.ledger.snapshot, []

    def changing() -> Any:
        snapshot = look()
        if len(changes) < 2:
            changes.append(put_devices(pool, 2, mib=16_000 + len(changes) + 1, clear_quarantine=False))
        return snapshot

    pool.refusal(SMALL)
    monkeypatch.setattr(pool.ledger, "snapshot", changing)
    assert pool.request(SMALL, holder="a")
    assert len(changes) == 2


def test_a_fault_in_planning_does_not_stop_who_gives_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=2), holder="a")
    second = Asker(pool, WHOLE, "b", timeout_s=None)
    assert wait_until(lambda: waiting(pool) == 1, timeout_s=10)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(policy, "make_plan", broken)
    assert pool.release(first)
    assert isinstance(second.failed(), ZeroDivisionError)
    assert pool.client.get(pool.planner.slot) is None
    assert waiting(pool) == 0


# ---- the rest --------------------------------------------------------------------------------------


def test_an_answer_about_room_is_kept_for_a_moment(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert pool.open_to_shared(SMALL)
    lease = (
        pool.ledger.wait
    )  # what follows does not go through the pool's own asking, which needs a real clock
    assert lease is not None
    pool.revoke("none", "nothing")
    put_devices(pool, 2, clear_quarantine=False, why="broken")
    assert pool.open_to_shared(SMALL), "still the answer of before"
    clock[0] += 0.3
    assert not pool.open_to_shared(SMALL)


def test_an_operator_and_other_programs_can_end_a_lease(pool: Pool) -> None:
    first, second = pool.request(SMALL, holder="a"), pool.request(SMALL, holder="b")
    assert not pool.release_by_id(first.lease_id, first.token + 10)
    assert pool.release_by_id(first.lease_id, first.token)
    assert pool.revoke(second.lease_id, "maintenance")
    assert not pool.revoke(second.lease_id, "maintenance")
    assert pool.clear(second.parts[0].uuid) == 0
    assert pool.snapshot().leases == ()


def test_making_a_pool_starts_nothing(settings: Settings) -> None:
    """Workers are forked from a process that has one."""
    before = threading.active_count()
    pool = Pool(redis.Redis.from_url("redis://127.0.0.1:1/0"), settings)
    assert threading.active_count() == before
    assert not pool.open_to_shared(SMALL)
