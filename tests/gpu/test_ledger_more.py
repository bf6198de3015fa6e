"""The pool's ledger where machines leave, leases are asked for anew, Redis forgets or its clock is set
back."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis
from polling import wait_until

from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.values import (
    Device,
    Grant,
    LeasePart,
    Need,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Process,
    Report,
)
from pipeline.settings import Settings

GPU, OTHER = "GPU-0", "GPU-1"
HOUR = 3_600_000
NEED = Need(memory_mib=100, compute_percent=10)
TTL, NODE_TTL = 15_000, 60_000


@pytest.fixture
def ledger(client: "redis.Redis", settings: Settings) -> Iterator[PoolLedger]:
    made = PoolLedger(client, settings.replace(gpu_node_ttl_ms=NODE_TTL))
    made.clear_quarantine()
    assert report(made, GPU, OTHER) == ""
    yield made


def report(ledger: PoolLedger, *uuids: str, pids: Sequence[int] = (), node: str = "a") -> str:
    processes = tuple(Process(pid=pid) for pid in pids)
    devices = tuple(
        Device(
            uuid=uuid, node="", index=n, name="GPU", total_mib=1000, schedulable_mib=1000, processes=processes
        )
        for n, uuid in enumerate(uuids)
    )
    return ledger.report(Report(node=node, agent="agent", clock_ms=0, devices=devices))


def now_ms(ledger: PoolLedger) -> int:
    seconds, micros = ledger.client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def wait_a_moment(ledger: PoolLedger) -> None:
    """Until Redis tells another millisecond."""
    then = now_ms(ledger)
    assert wait_until(lambda: now_ms(ledger) > then, timeout_s=5, poll_s=0.0005)


def a_request(name: str, ttl_ms: int = TTL) -> PoolRequest:
    return PoolRequest(request_id=name, holder=f"holder of {name}", need=NEED, ttl_ms=ttl_ms)


def get(
    ledger: PoolLedger, name: str, *, uuid: str = GPU, pids: Sequence[int] = (), ttl_ms: int = TTL
) -> PoolLease:
    """A lease; active when there are pids."""
    assert ledger.wait(a_request(name, ttl_ms), HOUR) is None
    grant = Grant(
        request_id=name,
        parts=(LeasePart(uuid=uuid, memory_mib=100, compute_percent=10),),
        share=0.1,
        prepaid=1.0,
    )
    done = ledger.commit(ledger.snapshot().epoch, PoolPlan(grants=(grant,)))
    assert done.why == ""
    if pids:
        assert ledger.activate(done.leases[0], pids=pids, host="a")
    return done.leases[0]


def score(ledger: PoolLedger, key: str, member: str) -> int:
    found = ledger.client.zscore(ledger.keys.gpu(key), member)
    assert found is not None
    return int(found)


# Machines that leave


def test_a_node_whose_agent_ends_leaves_nothing_behind_when_nothing_is_on_it(ledger: PoolLedger) -> None:
    assert report(ledger, "GPU-b", node="b") == ""
    epoch = ledger.snapshot().epoch
    ledger.leave("a", "agent")
    seen = ledger.snapshot()
    assert [node.name for node in seen.nodes] == ["b"]
    assert [device.uuid for device in seen.devices] == ["GPU-b"]
    assert seen.epoch > epoch, "plans that count on it are stale"
    assert ledger.client.zscore(ledger.keys.gpu("beats"), "a") is None
    assert report(ledger, GPU, OTHER) == ""
    assert len(ledger.snapshot().devices) == 3


@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_device_that_is_in_use_goes_after_its_node_when_nothing_is_on_it_any_more(
    ledger: PoolLedger, how: str
) -> None:
    lease = get(ledger, "a", pids=[7])
    ledger.leave("a", "agent")
    (device,) = ledger.snapshot().devices
    assert (device.uuid, device.usable, device.why) == (GPU, False, "its agent has ended")
    ledger.sweep()
    assert ledger.renew(lease).lost == ""
    if how == "released":
        assert ledger.release(lease)
    else:
        assert ledger.revoke("a", "")
        ledger.sweep()
        assert len(ledger.snapshot().devices) == 1, "its part is left"
        assert ledger.clear(GPU) == 1
    ledger.sweep()
    seen = ledger.snapshot()
    assert (seen.nodes, seen.devices) == ((), ())


def test_a_node_that_left_and_came_back_is_whole_again(ledger: PoolLedger) -> None:
    lease = get(ledger, "a", pids=[7])
    ledger.leave("a", "agent")
    assert report(ledger, GPU, OTHER, pids=[7]) == ""
    assert ledger.release(lease)
    ledger.client.zadd(ledger.keys.gpu("beats"), {"a": now_ms(ledger) - NODE_TTL - 1})
    ledger.sweep()
    assert [device.uuid for device in ledger.snapshot().devices] == [GPU, OTHER], "silent for less than a day"


# Asking again


@pytest.mark.parametrize("ttl_ms", [HOUR, 5_000])
def test_a_lease_that_is_asked_for_again_lives_as_long_as_asked_for_now(
    ledger: PoolLedger, ttl_ms: int
) -> None:
    first = get(ledger, "a", pids=[7])
    before = now_ms(ledger)
    again = ledger.wait(a_request("a", ttl_ms), HOUR)
    assert again is not None
    assert (again.ttl_ms, again.parts, again.pids) == (ttl_ms, first.parts, (7,))
    assert before + ttl_ms <= again.deadline_ms <= now_ms(ledger) + ttl_ms
    (seen,) = ledger.snapshot().leases
    assert (seen.ttl_ms, seen.deadline_ms) == (ttl_ms, again.deadline_ms)
    before = now_ms(ledger)
    assert before + ttl_ms <= ledger.renew(first).deadline_ms <= now_ms(ledger) + ttl_ms


def test_a_lease_that_is_asked_for_again_with_another_need_stays_what_was_granted(ledger: PoolLedger) -> None:
    first = get(ledger, "a")
    more = replace(a_request("a", HOUR), need=replace(NEED, memory_mib=500))
    again = ledger.wait(more, HOUR)
    assert again is not None and (again.need, again.parts) == (NEED, first.parts)


# A Redis that forgot


def test_tokens_go_on_growing_after_redis_lost_its_data(ledger: PoolLedger) -> None:
    first = get(ledger, "a")
    tokens = [first.token, get(ledger, "b").token]
    assert tokens[1] == tokens[0] + 1
    assert now_ms(ledger) - 60_000 < tokens[0] <= now_ms(ledger) + 1
    for name in ("tokens", "leases", "deadlines", "taken"):
        ledger.client.delete(ledger.keys.gpu(name))
    wait_a_moment(ledger)
    later = get(ledger, "a")
    assert later.token > first.token
    assert ledger.renew(first).lost == "its name belongs to another lease now"
    assert not ledger.release(first)


def test_a_lease_that_nobody_remembers_is_said_so_in_words(ledger: PoolLedger) -> None:
    lease = get(ledger, "a")
    ledger.clear_quarantine()
    assert ledger.renew(lease).lost == "Redis does not know it any more"


# A clock that was set back


@pytest.mark.parametrize("ttl_ms", [TTL, 2 * HOUR])
def test_a_dead_holder_does_not_live_longer_for_a_clock_that_was_set_back(
    ledger: PoolLedger, ttl_ms: int
) -> None:
    get(ledger, "a", pids=[7], ttl_ms=ttl_ms)
    ledger.client.zadd(ledger.keys.gpu("deadlines"), {"a": now_ms(ledger) + ttl_ms + HOUR})
    before = now_ms(ledger)
    assert ledger.sweep().expired == ()
    assert before + ttl_ms <= score(ledger, "deadlines", "a") <= now_ms(ledger) + ttl_ms


def test_deadlines_that_can_be_meant_stay_as_they_are(ledger: PoolLedger) -> None:
    get(ledger, "long", pids=[7], ttl_ms=2 * HOUR)
    get(ledger, "short", pids=[8])
    before = {name: score(ledger, "deadlines", name) for name in ("long", "short")}
    wait_a_moment(ledger)
    ledger.sweep()
    assert {name: score(ledger, "deadlines", name) for name in before} == before


def test_a_dead_node_falls_silent_though_the_clock_was_set_back(ledger: PoolLedger) -> None:
    ledger.client.zadd(ledger.keys.gpu("beats"), {"a": now_ms(ledger) + HOUR})
    ledger.sweep()
    assert score(ledger, "beats", "a") <= now_ms(ledger)


def node_says(ledger: PoolLedger, **changes: Any) -> None:
    key = ledger.keys.gpu("nodes")
    node = json.loads(ledger.client.hget(key, "a") or b"{}")
    ledger.client.hset(key, "a", json.dumps({**node, **changes}))


def test_what_a_lease_left_is_freed_though_the_clock_was_set_back(ledger: PoolLedger) -> None:
    """By the third report: the first one starts its time anew, the second may have been gathered before."""
    get(ledger, "a", pids=[7])
    ledger.revoke("a", "")
    key = ledger.keys.gpu("left")
    ((name, text),) = ledger.client.hgetall(key).items()
    ledger.client.hset(key, name, json.dumps({**json.loads(text), "since_ms": now_ms(ledger) + HOUR}))
    node_says(ledger, reported_ms=now_ms(ledger) + HOUR)
    for expected in (1, 1, 0):
        wait_a_moment(ledger)
        assert report(ledger, GPU, OTHER) == ""
        assert len(ledger.snapshot().orphans) == expected


def test_a_report_from_before_the_clock_was_set_back_frees_nothing(ledger: PoolLedger) -> None:
    get(ledger, "a", pids=[7])
    ledger.revoke("a", "")
    node_says(ledger, reported_ms=now_ms(ledger) + HOUR)
    wait_a_moment(ledger)
    assert report(ledger, GPU, OTHER) == ""
    assert len(ledger.snapshot().orphans) == 1
    wait_a_moment(ledger)
    assert report(ledger, GPU, OTHER) == ""
    assert ledger.snapshot().orphans == ()


def test_an_agent_is_told_what_it_can_change_when_it_must_not_speak_for_a_node(ledger: PoolLedger) -> None:
    other = Report(node="a", agent="other", clock_ms=0, devices=())
    assert ledger.report(other).endswith("end one of the two, or give this machine another hostname")
    assert report(ledger, GPU, node="b").endswith("or give both the same hostname")
