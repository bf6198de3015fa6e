"""The pool's ledger on a real Redis: capacity, tokens, what a lost lease can still do (nothing), nodes that
fall silent."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from polling import wait_until

import pipeline.redis.keys
from pipeline.errors import BadInput, LeaseRefused, RedisUnavailable
from pipeline.gpu.leasing import pool_ledger
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.values import (
    Committed,
    Device,
    Grant,
    LeaseMode,
    LeasePart,
    LeaseState,
    Need,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Process,
    Report,
    Reservation,
    Yield,
)
from pipeline.redis.leases import Leases
from pipeline.settings import Settings
from pipeline.workers.stack.private_redis import PrivateRedis

GPU, OTHER = "GPU-0", "GPU-1"
HOUR = 3_600_000


def device(uuid: str = GPU, *, mib: int = 1000, pids: Sequence[int] | None = (), **more: Any) -> Device:
    processes = None if pids is None else tuple(Process(pid=pid) for pid in pids)
    base = Device(
        uuid=uuid, node="", index=0, name="GPU", total_mib=mib, schedulable_mib=mib, processes=processes
    )
    return replace(base, **more)


def report(
    ledger: PoolLedger, *devices: Device, node: str = "a", agent: str = "agent", clock_ms: int = 0
) -> str:
    return ledger.report(Report(node=node, agent=agent, clock_ms=clock_ms, devices=devices))


def later_report(ledger: PoolLedger, *devices: Device, **more: Any) -> None:
    """What an agent says of the time after now: its next but one beat."""
    wait_a_moment(ledger)
    assert report(ledger, *devices, **more) == ""
    wait_a_moment(ledger)
    assert report(ledger, *devices, **more) == ""


def wait_a_moment(ledger: PoolLedger) -> None:
    """Until Redis tells another millisecond."""
    then = now_ms(ledger)
    assert wait_until(lambda: now_ms(ledger) > then, timeout_s=5, poll_s=0.0005)


def now_ms(ledger: PoolLedger) -> int:
    seconds, micros = ledger.client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def shared(memory: int = 100, compute: int = 10, **more: Any) -> Need:
    return Need(memory_mib=memory, compute_percent=compute, **more)


def exclusive(**more: Any) -> Need:
    return Need(mode=LeaseMode.EXCLUSIVE, **more)


def ask(ledger: PoolLedger, name: str, need: Need, holder: str = "", ttl_ms: int = 15_000) -> PoolRequest:
    request = PoolRequest(request_id=name, holder=holder or f"holder of {name}", need=need, ttl_ms=ttl_ms)
    assert ledger.wait(request, 60_000) is None
    return request


def grant(
    request: PoolRequest, *uuids: str, share: float = 0.1, prepaid: float = 1.0, mib: int = 1000
) -> Grant:
    need = request.need
    whole = need.mode is LeaseMode.EXCLUSIVE
    memory, compute = (mib, 100) if whole else (need.memory_mib, need.compute_percent)
    parts = tuple(LeasePart(uuid=uuid, memory_mib=memory, compute_percent=compute) for uuid in uuids)
    return Grant(request_id=request.request_id, parts=parts, share=share, prepaid=prepaid)


def commit(ledger: PoolLedger, *grants: Grant, **more: Any) -> Committed:
    return ledger.commit(ledger.snapshot().epoch, PoolPlan(grants=grants, **more))


def get(
    ledger: PoolLedger, name: str, need: Need, *uuids: str, pids: Sequence[int] = (), **more: Any
) -> PoolLease:
    """A lease; active when there are pids."""
    done = commit(ledger, grant(ask(ledger, name, need, **more), *(uuids or (GPU,))))
    assert done.why == ""
    if pids:
        assert ledger.activate(done.leases[0], pids=pids, host="a")
    return done.leases[0]


def let_pass(ledger: PoolLedger, lease_id: str) -> None:
    """As if its deadline had been a moment ago."""
    ledger.client.zadd(ledger.keys.gpu("deadlines"), {lease_id: now_ms(ledger) - 1})


def silence(ledger: PoolLedger, node: str, ms: int) -> None:
    """As if nobody had heard of the node for so long."""
    ledger.client.zadd(ledger.keys.gpu("beats"), {node: now_ms(ledger) - ms})


def taken(ledger: PoolLedger) -> dict[str, int]:
    flat = ledger.client.hgetall(ledger.keys.gpu("taken"))
    return {name.decode(): int(value) for name, value in flat.items()}


@pytest.fixture
def ledger(client: "redis.Redis", settings: Settings) -> PoolLedger:
    ledger = PoolLedger(client, settings.replace(gpu_node_ttl_ms=60_000))
    ledger.clear_quarantine()
    assert report(ledger, device(GPU), device(OTHER, index=1)) == ""
    return ledger


# Capacity (invariants 1 and 2)


def test_an_exact_fit_is_granted_and_one_mib_more_is_not(ledger: PoolLedger) -> None:
    get(ledger, "a", shared(600, 60))
    over = ask(ledger, "over", shared(401, 10))
    assert commit(ledger, grant(over, GPU)).why == "unfit"
    get(ledger, "b", shared(400, 40))
    assert taken(ledger) == {"GPU-0:mem": 1000, "GPU-0:cpu": 100, "GPU-0:shared": 2}


def test_compute_is_bounded_as_memory_is(ledger: PoolLedger) -> None:
    get(ledger, "a", shared(1, 60))
    assert commit(ledger, grant(ask(ledger, "b", shared(1, 41)), GPU)).why == "unfit"


def test_an_exclusive_part_stands_alone(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared(1, 0))
    train = ask(ledger, "train", exclusive())
    assert commit(ledger, grant(train, GPU)).why == "unfit"
    assert ledger.release(lease)
    assert commit(ledger, grant(train, GPU)).why == ""
    for need in (shared(0, 0), exclusive()):
        assert commit(ledger, grant(ask(ledger, f"{need.mode}", need), GPU)).why == "unfit"


def test_a_device_that_shrank_under_its_leases_has_no_room_not_endless_room(ledger: PoolLedger) -> None:
    get(ledger, "a", shared(900, 10))
    assert report(ledger, device(GPU, mib=500), device(OTHER)) == ""
    assert commit(ledger, grant(ask(ledger, "b", shared(1, 1)), GPU)).why == "unfit"


@pytest.mark.parametrize("size", [-1, -1000])
def test_a_negative_size_makes_no_room(ledger: PoolLedger, size: int) -> None:
    assert commit(ledger, grant(ask(ledger, "a", shared(size, 1)), GPU)).why == "unfit"
    assert commit(ledger, grant(ask(ledger, "b", shared(1, size)), GPU)).why == "unfit"
    assert taken(ledger) == {}


@pytest.mark.parametrize("need", [shared(600, 10), shared(10, 60), exclusive()])
def test_grants_of_one_plan_are_counted_together(ledger: PoolLedger, need: Need) -> None:
    requests = [ask(ledger, str(i), need) for i in range(2)]
    assert commit(ledger, *(grant(request, GPU) for request in requests)).why == "unfit"
    assert taken(ledger) == {}
    assert len(ledger.snapshot().waiting) == 2


def test_a_gang_gets_all_of_its_devices_or_none(ledger: PoolLedger) -> None:
    gang = ask(ledger, "gang", exclusive(devices=2))
    get(ledger, "a", shared(), OTHER)
    for uuids in ((GPU, OTHER), (GPU,), (GPU, GPU), (GPU, "GPU-9")):
        assert commit(ledger, grant(gang, *uuids)).why == "unfit"
        assert ledger.snapshot().leases[0].lease_id == "a"
    assert taken(ledger) == {"GPU-1:mem": 100, "GPU-1:cpu": 10, "GPU-1:shared": 1}


def test_what_does_not_fit_takes_the_rest_of_its_plan_with_it(ledger: PoolLedger) -> None:
    held = get(ledger, "held", shared(), OTHER)
    good, bad = ask(ledger, "good", shared()), ask(ledger, "bad", shared(5000))
    before = ledger.snapshot()
    plan = PoolPlan(
        grants=(grant(good, GPU), grant(bad, GPU)),
        yields=(Yield(lease_id=held.lease_id, by_ms=before.now_ms + 9, why="x"),),
        reservation=Reservation(request_id="bad", uuids=(GPU,)),
    )
    assert ledger.commit(before.epoch, plan).why == "unfit"
    after = ledger.snapshot()
    assert replace(after, now_ms=before.now_ms) == before


def test_a_grant_must_give_what_its_need_asks_where_it_asks(ledger: PoolLedger) -> None:
    less = replace(ask(ledger, "less", shared(500)), need=shared(499))
    assert commit(ledger, grant(less, GPU)).why == "unfit"
    assert commit(ledger, grant(ask(ledger, "d", shared(device=OTHER)), GPU)).why == "unfit"
    assert commit(ledger, grant(ask(ledger, "n", shared(node="b")), GPU)).why == "unfit"
    assert commit(ledger, grant(ask(ledger, "big", exclusive(memory_mib=1001)), GPU)).why == "unfit"


def test_many_planners_at_once_never_pass_the_capacity(ledger: PoolLedger, settings: Settings) -> None:
    def plan_for(name: str) -> None:
        client = redis.Redis.from_url(settings.redis.url or "")
        own = PoolLedger(client, ledger.settings)
        request = ask(own, name, shared(300, 10))
        for _ in range(20):
            if commit(own, grant(request, GPU)).why in ("", "unfit"):
                break
        client.close()

    threads = [threading.Thread(target=plan_for, args=(f"r{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    leases = ledger.snapshot().leases
    assert sum(lease.parts[0].memory_mib for lease in leases) == taken(ledger)["GPU-0:mem"] <= 1000
    tokens = [lease.token for lease in leases]
    assert len(set(tokens)) == len(tokens)


# Plans


def test_a_plan_made_before_a_change_is_stale(ledger: PoolLedger) -> None:
    request = ask(ledger, "a", shared())
    epoch = ledger.snapshot().epoch
    ask(ledger, "b", shared())
    assert ledger.commit(epoch, PoolPlan(grants=(grant(request, GPU),))).why == "stale"
    assert ledger.snapshot().leases == ()


def test_an_empty_plan_makes_no_other_plan_stale(ledger: PoolLedger) -> None:
    ask(ledger, "a", exclusive())
    place = Reservation(request_id="a", uuids=(GPU,), start_ms=5, made_ms=1)
    assert commit(ledger, reservation=place).why == ""
    epoch = ledger.snapshot().epoch
    assert ledger.commit(epoch, PoolPlan(reservation=place)).why == ""
    assert ledger.commit(epoch, PoolPlan(reservation=replace(place, start_ms=9))).why == ""
    assert ledger.snapshot().reservation == replace(place, start_ms=9)
    assert ledger.snapshot().epoch == epoch
    assert ledger.commit(epoch, PoolPlan(reservation=replace(place, uuids=(OTHER,)))).why == ""
    assert ledger.snapshot().epoch > epoch
    assert commit(ledger).why == ""
    assert ledger.snapshot().reservation is None


def test_renewals_refreshed_waits_and_unchanged_reports_make_no_plan_stale(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared(), pids=[7])
    request = ask(ledger, "b", shared())
    epoch = ledger.snapshot().epoch
    assert ledger.renew(lease).lost == ""
    assert ledger.activate(lease, pids=[8], host="a")
    assert ledger.wait(request, 60_000) is None
    assert report(ledger, device(GPU, used_mib=77, pids=[7]), device(OTHER, index=1)) == ""
    assert ledger.snapshot().epoch == epoch


def test_every_change_that_planning_depends_on_makes_plans_stale(ledger: PoolLedger) -> None:
    seen = [ledger.snapshot().epoch]

    def moved() -> bool:
        seen.append(ledger.snapshot().epoch)
        return seen[-1] > seen[-2]

    lease = get(ledger, "a", shared())
    assert moved(), "granted"
    ask(ledger, "b", shared())
    assert moved(), "waits"
    ledger.abandon("b", "holder of b")
    assert moved(), "waits no more"
    commit(ledger, yields=(Yield(lease_id="a", by_ms=now_ms(ledger) + HOUR, why=""),))
    assert moved(), "asked to yield"
    ledger.release(lease)
    assert moved(), "released"
    report(ledger, device(GPU, why="too hot"), device(OTHER, index=1))
    assert moved(), "unusable"
    report(ledger, device(OTHER, index=1))
    assert moved(), "gone"
    report(ledger, device(OTHER, index=1, mib=999))
    assert moved(), "smaller"
    silence(ledger, "a", 61_000)
    report(ledger, device(OTHER, index=1, mib=999))
    assert moved(), "back"


def test_a_yield_is_never_put_off(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared())
    now = now_ms(ledger)
    for by, expected in ((now + 9000, now + 9000), (now + 99_000, now + 9000), (now + 5000, now + 5000)):
        assert commit(ledger, yields=(Yield(lease_id="a", by_ms=by, why=f"by {by}"),)).why == ""
        renewed = ledger.renew(lease)
        assert (renewed.yield_by_ms, renewed.yield_why) == (expected, f"by {expected}")
    epoch = ledger.snapshot().epoch
    assert ledger.commit(epoch, PoolPlan(yields=(Yield(lease_id="a", by_ms=now + 5000, why=""),))).why == ""
    assert ledger.snapshot().epoch == epoch, "nothing new was asked"


def test_who_did_not_yield_in_time_is_revoked(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared(), pids=[7])
    commit(ledger, yields=(Yield(lease_id="a", by_ms=now_ms(ledger) - 1, why="train begins"),))
    assert ledger.sweep().revoked == ("a",)
    assert ledger.renew(lease).lost == "revoked: it did not yield in time (train begins)"
    (left,) = ledger.snapshot().orphans
    assert (left.lease_id, left.uuid, left.pids, left.exclusive) == ("a", GPU, (7,), False)


def test_a_reservation_ends_with_its_request(ledger: PoolLedger) -> None:
    request = ask(ledger, "a", exclusive())
    place = Reservation(request_id="a", uuids=(GPU,))
    commit(ledger, reservation=place)
    ledger.abandon("a", request.holder)
    assert ledger.snapshot().reservation is None
    assert ledger.client.get(ledger.keys.gpu("reservation")) is None
    assert commit(ledger, reservation=place).why == "", "nobody waits for it any more"
    assert ledger.snapshot().reservation is None


def test_a_large_pool_is_read_as_a_small_one(ledger: PoolLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    get(ledger, "a", shared(), pids=[1])
    ask(ledger, "b", exclusive())
    small = ledger.snapshot()
    monkeypatch.setattr(pool_ledger, "INLINE", 0)
    assert replace(ledger.snapshot(), now_ms=small.now_ms) == small


# Waiting


def test_waiting_needs_are_shown_oldest_first_and_keep_their_place(ledger: PoolLedger) -> None:
    first = ask(ledger, "z", shared())
    wait_a_moment(ledger)
    ask(ledger, "a", shared())
    before = ledger.snapshot().waiting
    assert [request.request_id for request in before] == ["z", "a"]
    assert ledger.wait(first, 90_000) is None
    after = ledger.snapshot().waiting
    assert after[0].since_ms == before[0].since_ms
    until = ledger.client.zscore(ledger.keys.gpu("waiting_until"), "z")
    assert ledger.wait(first, 180_000) is None
    assert ledger.client.zscore(ledger.keys.gpu("waiting_until"), "z") > until + 80_000
    assert after[0].need == first.need


def test_who_asks_for_something_else_waits_anew(ledger: PoolLedger) -> None:
    ask(ledger, "a", shared(10))
    wait_a_moment(ledger)
    ask(ledger, "b", shared(10))
    wait_a_moment(ledger)
    ask(ledger, "a", shared(900))
    assert [request.request_id for request in ledger.snapshot().waiting] == ["b", "a"]


def test_a_need_nobody_asks_for_any_more_is_forgotten_with_its_reservation(ledger: PoolLedger) -> None:
    request = ask(ledger, "a", exclusive())
    commit(ledger, reservation=Reservation(request_id="a", uuids=(GPU,)))
    ledger.wait(request, -1)
    seen = ledger.snapshot()
    assert (seen.waiting, seen.reservation) == ((), None), "nothing could be granted to it"
    assert ledger.commit(seen.epoch, PoolPlan(grants=(grant(request, GPU),))).why == "unfit"
    news = ledger.listen("a")
    assert news.next(5) == (True, None), "who begins to listen asks once more"
    assert ledger.sweep().forgotten == ("a",)
    assert not ledger.remember("a", 9_000)
    assert news.next(5) == (True, None)
    news.close()
    assert not ledger.client.exists(ledger.keys.gpu("waiting"), ledger.keys.gpu("reservation"))


def test_asking_again_gives_the_same_lease_and_renews_it(ledger: PoolLedger) -> None:
    """Invariant 5: a holder that restarted under its name takes up its own."""
    lease = get(ledger, "a", shared(), pids=[7])
    ledger.client.zadd(ledger.keys.gpu("deadlines"), {"a": now_ms(ledger) + 500})
    request = PoolRequest(request_id="a", holder=lease.holder, need=lease.need, ttl_ms=15_000)
    for _ in range(2):
        again = ledger.wait(request, 60_000)
        assert again is not None
        assert again.parts == lease.parts
        assert again.deadline_ms > now_ms(ledger) + 10_000
    assert len(ledger.snapshot().leases) == 1
    assert ledger.renew(again).lost == ""
    assert ledger.release(again)


@pytest.mark.parametrize("granted", [False, True])
def test_a_request_of_another_holder_is_refused(ledger: PoolLedger, granted: bool) -> None:
    request = ask(ledger, "a", shared(), holder="one")
    if granted:
        assert commit(ledger, grant(request, GPU)).why == ""
    with pytest.raises(LeaseRefused, match="the request a belongs to one; ask under another id"):
        ledger.wait(replace(request, holder="two"), 60_000)
    ledger.abandon("a", "two")
    seen = ledger.snapshot()
    assert len(seen.leases) + len(seen.waiting) == 1


def test_asking_again_after_the_lease_ran_out_waits_and_leaves_what_was_held(ledger: PoolLedger) -> None:
    first = lease = get(ledger, "a", shared(), pids=[7])
    for n in (1, 2):
        let_pass(ledger, "a")
        ask(ledger, "a", shared())
        assert len(ledger.snapshot().orphans) == n
        lease = get(ledger, "a", shared(), pids=[7])
    assert lease.token == first.token + 2
    assert taken(ledger)["GPU-0:mem"] == 300
    assert ledger.clear(GPU) == 2
    assert taken(ledger) == {"GPU-0:mem": 100, "GPU-0:cpu": 10, "GPU-0:shared": 1}


def test_a_wait_that_is_taken_back_also_gives_back_what_was_granted_meanwhile(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared())
    ledger.abandon("a", lease.holder)
    assert ledger.snapshot().leases == ()
    assert taken(ledger) == {}
    begun = get(ledger, "b", shared(), pids=[7])
    ledger.abandon("b", begun.holder)
    assert ledger.renew(begun).lost == ""


def test_whoever_waits_is_woken_by_the_grant(ledger: PoolLedger) -> None:
    request = ask(ledger, "a", shared())
    news = ledger.listen("a")
    news.next(5)
    assert news.next(0.05) == (False, None)
    woken: list[tuple[bool, PoolLease | None]] = []
    thread = threading.Thread(target=lambda: woken.append(news.next(20)))
    thread.start()
    commit(ledger, grant(request, GPU))
    thread.join(20)
    assert woken == [(True, ledger.snapshot().leases[0])]
    news.close()


@pytest.mark.parametrize(("name", "holder"), [("", "h"), ("a", ""), ("a\nb", "h"), ("a", "\udc80")])
def test_a_name_that_is_none_is_refused(ledger: PoolLedger, name: str, holder: str) -> None:
    with pytest.raises(BadInput, match="does not name a"):
        ledger.wait(PoolRequest(request_id=name, holder=holder, need=shared(), ttl_ms=1000), 1000)


# Tokens and the life of a lease (invariant 3)


def test_tokens_only_grow_and_no_two_leases_have_the_same(ledger: PoolLedger) -> None:
    """Not even on two devices: a lease's name and token must not fit its successor elsewhere."""
    tokens = []
    for uuids in ((GPU, OTHER), (GPU,), (OTHER,), (GPU, OTHER)):
        lease = get(ledger, "a", exclusive(devices=len(uuids)), *uuids)
        assert len({part.token for part in lease.parts}) == 1
        tokens.append(lease.token)
        ledger.release(lease)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("how", ["token", "second token", "holder", "id"])
def test_a_stranger_and_a_stale_token_can_neither_renew_nor_begin_nor_release(
    ledger: PoolLedger, how: str
) -> None:
    lease = get(ledger, "a", exclusive(devices=2), GPU, OTHER)
    first, second = lease.parts
    wrong = {
        "token": replace(lease, parts=(replace(first, token=first.token - 1), second)),
        "second token": replace(lease, parts=(first, replace(second, token=second.token + 1))),
        "holder": replace(lease, holder="somebody else"),
        "id": replace(lease, lease_id="b"),
    }[how]
    assert ledger.renew(wrong).lost == (
        "Redis does not know it any more" if how == "id" else "its name belongs to another lease now"
    )
    assert not ledger.activate(wrong, pids=[1], host="a")
    assert not ledger.release(wrong)
    assert not ledger.release(wrong, clean=False)
    assert not ledger.release_by_id("a", first.token + 1)
    (seen,) = ledger.snapshot().leases
    assert (seen.state, seen.parts) == (LeaseState.GRANTED, lease.parts)


def test_a_lease_that_ran_out_cannot_be_renewed_before_or_after_the_sweep(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared())
    let_pass(ledger, "a")
    assert ledger.renew(lease).lost == "expired"
    assert not ledger.activate(lease, pids=[1], host="a")
    assert commit(ledger, grant(ask(ledger, "b", exclusive()), GPU)).why == "unfit", (
        "it counts until it is swept"
    )
    assert ledger.sweep().expired == ("a",)
    assert ledger.renew(lease).lost == "expired: it was not renewed"
    assert not ledger.release(lease)
    assert commit(ledger, grant(ask(ledger, "b", exclusive()), GPU)).why == ""


def test_a_lease_lives_through_its_states_and_says_how_it_ended(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared())
    assert ledger.snapshot().leases[0].state is LeaseState.GRANTED
    assert ledger.activate(lease, pids=[7, 8], host="a")
    assert ledger.activate(lease, pids=[8, 9], host="a")
    (seen,) = ledger.snapshot().leases
    assert (seen.state, seen.pids, seen.host) == (LeaseState.ACTIVE, (7, 8, 9), "a")
    assert seen.need == lease.need
    assert ledger.release(lease)
    assert not ledger.release(lease)
    assert ledger.renew(lease).lost == "released"
    assert taken(ledger) == {}


def test_a_stale_holder_cannot_touch_the_lease_of_its_successor(ledger: PoolLedger) -> None:
    old = get(ledger, "a", shared())
    let_pass(ledger, "a")
    ledger.sweep()
    new = get(ledger, "a", shared())
    assert new.token > old.token
    assert ledger.renew(old).lost == "its name belongs to another lease now"
    assert not ledger.release(old)
    assert ledger.renew(new).lost == ""


def test_a_lease_is_released_by_its_name_and_token(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared(), pids=[7])
    assert ledger.release_by_id("a", lease.token)
    assert not ledger.release_by_id("a", lease.token)
    assert taken(ledger) == {}


def test_revoking_tells_the_holder_why(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared())
    assert ledger.revoke("a", "the machine goes down")
    assert ledger.renew(lease).lost == "revoked: the machine goes down"
    assert not ledger.revoke("a", "again")


# What ended leases leave (invariant 4)


def test_after_a_kill_the_device_is_free_only_when_its_process_has_gone(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", exclusive(), pids=[7, 8])
    let_pass(ledger, "a")
    assert ledger.sweep().expired == ("a",)
    train = ask(ledger, "train", exclusive())
    assert commit(ledger, grant(train, GPU)).why == "unfit"
    later_report(ledger, device(GPU, pids=[8, 99]), device(OTHER))
    assert commit(ledger, grant(train, GPU)).why == "unfit"
    assert not ledger.release(lease), "a dead lease's holder has no say"
    later_report(ledger, device(GPU, pids=[99]), device(OTHER))
    assert ledger.sweep().freed == (GPU,)
    assert commit(ledger, grant(train, GPU)).why == ""
    assert ledger.sweep().freed == ()


def test_what_was_seen_before_a_lease_ended_frees_nothing(ledger: PoolLedger) -> None:
    """The report may have been gathered before the process began to use the device."""
    get(ledger, "a", shared(), pids=[7])
    ledger.revoke("a", "")
    wait_a_moment(ledger)
    report(ledger, device(GPU), device(OTHER))
    assert len(ledger.snapshot().orphans) == 1
    wait_a_moment(ledger)
    report(ledger, device(GPU), device(OTHER))
    assert ledger.snapshot().orphans == ()


def test_without_known_processes_any_that_no_lease_explains_keeps_the_part(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared())
    assert ledger.activate(lease, pids=[], host="a")
    get(ledger, "b", shared(), pids=[5])
    ledger.revoke("a", "")
    later_report(ledger, device(GPU, pids=[5, 6]), device(OTHER))
    assert len(ledger.snapshot().orphans) == 1
    later_report(ledger, device(GPU, pids=[5]), device(OTHER))
    assert ledger.snapshot().orphans == ()


def test_where_the_driver_lists_no_processes_an_operator_has_to_clear(ledger: PoolLedger) -> None:
    get(ledger, "a", shared(), pids=[7])
    ledger.revoke("a", "")
    later_report(ledger, device(GPU, pids=None), device(OTHER))
    assert len(ledger.snapshot().orphans) == 1
    assert ledger.clear(OTHER) == 0
    assert ledger.clear(GPU) == 1
    assert ledger.snapshot().orphans == ()
    assert taken(ledger) == {}


def test_a_lease_that_never_began_leaves_nothing(ledger: PoolLedger) -> None:
    get(ledger, "a", exclusive())
    let_pass(ledger, "a")
    ledger.sweep()
    assert ledger.snapshot().orphans == ()
    assert taken(ledger) == {}
    lease = get(ledger, "b", exclusive())
    assert ledger.release(lease, clean=False)
    assert taken(ledger) == {}


def test_a_holder_that_cannot_vouch_for_its_processes_leaves_its_parts(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", exclusive(devices=2), GPU, OTHER, pids=[7])
    assert ledger.release(lease, clean=False)
    assert {(left.uuid, left.pids, left.exclusive) for left in ledger.snapshot().orphans} == {
        (GPU, (7,), True),
        (OTHER, (7,), True),
    }
    assert commit(ledger, grant(ask(ledger, "b", shared(1, 0)), GPU)).why == "unfit"
    later_report(ledger, device(GPU), device(OTHER, pids=[7]))
    assert [left.uuid for left in ledger.snapshot().orphans] == [OTHER]


# Nodes (invariant 7)


def test_a_silent_node_gets_nothing_new_and_its_leases_are_fenced_after_their_time(
    ledger: PoolLedger,
) -> None:
    lease = get(ledger, "a", shared(), pids=[7])
    waiting = ask(ledger, "b", shared())
    silence(ledger, "a", 60_500)
    seen = ledger.snapshot()
    assert seen.nodes[0].silent
    assert [device.why for device in seen.devices] == ["its node is silent"] * 2
    assert commit(ledger, grant(waiting, GPU)).why == "unfit"
    assert ledger.renew(lease).lost == "", "its holder may live; only the agent is known to be silent"
    assert ledger.sweep().fenced == ()
    silence(ledger, "a", 60_000 + lease.ttl_ms + 100)
    assert ledger.sweep().fenced == ("a",)
    assert ledger.renew(lease).lost == "revoked: node a has been silent for 75 s"
    assert len(ledger.snapshot().orphans) == 1
    later_report(ledger, device(GPU, pids=[]), device(OTHER))
    assert ledger.snapshot().orphans == ()
    assert commit(ledger, grant(waiting, GPU)).why == ""


def test_only_leases_on_the_silent_node_are_fenced(ledger: PoolLedger) -> None:
    report(ledger, device("GPU-b"), node="b", agent="agent b")
    get(ledger, "here", shared())
    get(ledger, "there", shared(), "GPU-b")
    gang = get(ledger, "gang", shared(devices=2), OTHER, "GPU-b", pids=[7])
    silence(ledger, "b", HOUR)
    assert sorted(ledger.sweep().fenced) == ["gang", "there"]
    assert [lease.lease_id for lease in ledger.snapshot().leases] == ["here"]
    assert ledger.renew(gang).lost.startswith("revoked: node b has been silent")
    assert sorted(left.uuid for left in ledger.snapshot().orphans) == [OTHER, "GPU-b"]


def test_a_second_agent_of_a_node_is_refused_while_the_first_one_lives(ledger: PoolLedger) -> None:
    refused = report(ledger, device(GPU), agent="second")
    assert refused.startswith("node a is watched by agent agent already;")
    assert len(ledger.snapshot().devices) == 2
    silence(ledger, "a", 61_000)
    assert report(ledger, device(GPU), agent="second") == ""
    assert "watched by agent second" in report(ledger, device(GPU))


def test_an_agent_that_leaves_makes_room_for_the_next_and_its_node_silent(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared())
    ledger.leave("a", "somebody else")
    assert not ledger.snapshot().nodes[0].silent
    ledger.leave("a", "agent")
    assert ledger.snapshot().nodes[0].silent
    assert ledger.sweep().fenced == ()
    assert ledger.renew(lease).lost == ""
    assert report(ledger, device(GPU), device(OTHER), agent="next") == ""
    assert not ledger.snapshot().nodes[0].silent


def test_two_nodes_do_not_both_have_one_device(ledger: PoolLedger) -> None:
    refused = report(ledger, device(GPU), node="container", agent="other agent")
    assert refused.startswith("GPU-0 is reported by node a already;")
    assert [node.name for node in ledger.snapshot().nodes] == ["a"]
    get(ledger, "lease", shared())
    silence(ledger, "a", 61_000)
    assert report(ledger, device(GPU), node="container", agent="other agent") == "", "the machine was renamed"
    assert {d.uuid: d.node for d in ledger.snapshot().devices}[GPU] == "container"
    silence(ledger, "a", 2 * HOUR)
    assert ledger.sweep().fenced == ()


def test_a_node_whose_clock_is_an_hour_off_is_shown_so_and_works(ledger: PoolLedger) -> None:
    for ahead in (HOUR, -HOUR):
        report(ledger, device(GPU), device(OTHER), clock_ms=now_ms(ledger) + ahead)
        (node,) = ledger.snapshot().nodes
        assert abs(node.clock_ahead_ms - ahead) < 10_000
        assert not node.silent
        lease = get(ledger, f"r{ahead}", shared())
        assert ledger.renew(lease).lost == ""


def test_a_redis_clock_that_went_back_ends_nothing_and_decays_nothing(ledger: PoolLedger) -> None:
    ahead = now_ms(ledger) + HOUR
    silence(ledger, "a", -HOUR)
    ledger.client.hset(ledger.keys.gpu("sums"), "use:logweir", f"5:{ahead}")
    lease = get(ledger, "a", shared(), pids=[7])
    assert ledger.sweep().fenced == ()
    assert not ledger.snapshot().nodes[0].silent
    assert ledger.renew(lease).lost == ""
    usage = ledger.snapshot().usage["logweir"]
    assert (usage.value, usage.at_ms) == (6.0, ahead)


def test_a_device_that_vanishes_is_kept_while_something_is_on_it(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared(), OTHER)
    assert report(ledger, device(GPU)) == ""
    (_, other) = sorted(ledger.snapshot().devices, key=lambda d: d.uuid)
    assert other.why == "its driver does not show it any more"
    epoch = ledger.snapshot().epoch
    assert report(ledger, device(GPU)) == ""
    assert ledger.snapshot().epoch == epoch
    assert commit(ledger, grant(ask(ledger, "b", shared()), OTHER)).why == "unfit"
    ledger.release(lease)
    assert report(ledger, device(GPU)) == ""
    assert [d.uuid for d in ledger.snapshot().devices] == [GPU]


def test_a_node_silent_for_a_day_is_forgotten_unless_something_is_on_it(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared(), pids=[7])
    silence(ledger, "a", 25 * HOUR)
    ledger.sweep()
    assert [d.uuid for d in ledger.snapshot().devices] == [GPU], "its part is left"
    ledger.clear(GPU)
    ledger.sweep()
    seen = ledger.snapshot()
    assert (seen.devices, seen.nodes) == ((), ())
    assert int(ledger.client.hget(ledger.keys.gpu("sums"), "token") or 0) == lease.token, (
        "tokens never start again"
    )


# Use


def test_a_grant_is_charged_at_once_and_settled_at_the_end(client: "redis.Redis", settings: Settings) -> None:
    ledger = PoolLedger(client, settings.replace(gpu_half_life_s=100.0))
    ledger.clear_quarantine()
    report(ledger, device(GPU))
    request = ask(ledger, "a", shared(tenant="t"))
    commit(ledger, grant(request, GPU, share=0.5, prepaid=30.0))
    assert ledger.snapshot().usage["t"].value == pytest.approx(30.0, rel=0.01)
    # As if it had been held for one half-life, charged all the while.
    key, past = ledger.keys.gpu("leases"), now_ms(ledger) - 100_000
    (lease,) = ledger.snapshot().leases
    text = (client.hget(key, "a") or b"").decode().replace(str(lease.granted_ms), str(past))
    client.hset(key, "a", text)
    client.hset(ledger.keys.gpu("sums"), "use:t", f"30:{past}")
    assert ledger.release(lease)
    accrued = 0.5 * (100 / 0.693147) * 0.5
    assert ledger.snapshot().usage["t"].value == pytest.approx(accrued, rel=0.01)


def test_use_is_never_below_nothing(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared(tenant="t"))
    ledger.client.hset(ledger.keys.gpu("sums"), "use:t", f"0.1:{now_ms(ledger)}")
    ledger.release(lease)
    assert ledger.snapshot().usage["t"].value == 0.0


# Redis itself (invariant 6)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[PrivateRedis]:
    yield PrivateRedis(Settings(data_dir=tmp_path))


def test_a_restarted_redis_keeps_leases_and_tokens_and_grants_nothing_for_a_while(
    own_redis: PrivateRedis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = own_redis.start()
    client = redis.Redis.from_url(own_redis.url)
    try:
        ledger = PoolLedger(client, settings.replace(gpu_node_ttl_ms=60_000))
        ledger.clear_quarantine()
        report(ledger, device(GPU), device(OTHER))
        lease = get(ledger, "a", shared(), pids=[7])
        waiting = ask(ledger, "b", shared())
        before = ledger.snapshot()
        process.kill()
        process.wait(20)
        with pytest.raises(RedisUnavailable):
            ledger.renew(lease)
        process = own_redis.start()
        # The server forgot the scripts: what is read beside one brings it along.
        ledger.scripts.run_all([("gpu/snapshot", ledger._names, [settings.internal.lease_ttl_ms, -1])])
        assert ledger.snapshot().epoch == before.epoch
        with monkeypatch.context() as patch:
            patch.setattr(pool_ledger, "INLINE", 0)
            after = ledger.snapshot()
        assert after.leases == before.leases
        assert 0 < after.quarantine_ms <= settings.internal.lease_ttl_ms
        done = ledger.commit(after.epoch, PoolPlan(grants=(grant(waiting, GPU),)))
        assert done.why == "quarantine"
        assert 0 < done.wait_ms <= settings.internal.lease_ttl_ms
        assert commit(ledger).why == "", "what grants nothing may go on"
        assert ledger.renew(lease).lost == ""
        client.hset(ledger.keys.epoch, "until_ms", 0)
        again = commit(ledger, grant(waiting, GPU)).leases[0]
        assert again.token == lease.token + 1
    finally:
        client.close()
        process.kill()
        process.wait(20)


def test_a_new_redis_is_in_quarantine_and_one_blessing_serves_all_leases(
    client: "redis.Redis", settings: Settings
) -> None:
    ledger = PoolLedger(client, settings)
    assert ledger.snapshot().quarantine_ms == settings.internal.lease_ttl_ms
    Leases(client, settings).clear_quarantine()
    assert ledger.snapshot().quarantine_ms == 0


def test_a_blessing_forgets_who_held_and_lets_a_new_agent_in(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", shared(), pids=[7])
    ask(ledger, "b", shared())
    get(ledger, "c", exclusive(), OTHER, pids=[8])
    ledger.revoke("c", "")
    ledger.clear_quarantine()
    seen = ledger.snapshot()
    assert (seen.leases, seen.waiting, seen.orphans) == ((), (), ())
    assert taken(ledger) == {}
    assert ledger.renew(lease).lost == "Redis does not know it any more"
    assert report(ledger, device(GPU), agent="new") == ""
    assert get(ledger, "d", shared()).token > lease.token + 1


def test_every_key_is_in_the_table_and_under_one_hash_tag(ledger: PoolLedger, settings: Settings) -> None:
    get(ledger, "a", shared(), pids=[7])
    commit(ledger, yields=(Yield(lease_id="a", by_ms=now_ms(ledger) - 1, why=""),))
    ledger.sweep()
    ask(ledger, "b", exclusive())
    commit(ledger, reservation=Reservation(request_id="b", uuids=(GPU,)))
    table = {name for name, *_ in pipeline.redis.keys.table()}
    prefix = "{" + settings.redis.key_prefix + "}:"
    names = [key.decode() for key in ledger.client.scan_iter(match=f"{prefix}*")]
    assert len(names) > 8
    for name in names:
        short = name.removeprefix(prefix)
        shown = ":".join(short.split(":")[:2]) + (":<id>" if short.count(":") > 1 else "")
        assert shown in table, name
