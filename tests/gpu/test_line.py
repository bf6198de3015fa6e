"""The line: who is served next, and how a lease goes from hand to hand without a new plan."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from gpu_worlds import NOW_MS, device, exclusive, lease, request, shared, snapshot

from pipeline.gpu.leasing.ended import EndedLeases
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.policy import line
from pipeline.gpu.policy.policy import make_plan
from pipeline.gpu.values import (
    Device,
    Grant,
    LeasePart,
    Need,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Report,
    Reservation,
    Tenant,
)
from pipeline.settings import Settings

ONE = device()
SAME = Need(memory_mib=600, compute_percent=60)


# ---- the order (pure) ------------------------------------------------------------------------------


def planned(*needs: Need, tenants: dict[str, Tenant] | None = None) -> tuple[str, ...]:
    """The line of a pool whose one device somebody has whole."""
    waits = [request(f"r{n}", need, since_ms=n) for n, need in enumerate(needs)]
    world = snapshot([ONE], leases=[lease("held", exclusive(), [ONE])], waiting=waits)
    return make_plan(replace(world, tenants=tenants or {}, now_ms=NOW_MS)).line


def test_the_needs_of_one_tenant_stand_in_line_by_age() -> None:
    assert planned(*[exclusive()] * 4) == ("r0", "r1", "r2", "r3")


def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "LONGEST", 3)
    assert planned(*[exclusive()] * 5) == ("r0", "r1", "r2")
    assert len(planned(*[exclusive(tenant=f"t{n % 2}") for n in range(6)])) == 3


def test_tenants_take_turns_in_the_line() -> None:
    names = planned(*[exclusive(tenant=tenant) for tenant in ("a", "a", "a", "b", "b")])
    assert [name for name in names if name in {"r3", "r4"}] == ["r3", "r4"]
    assert names.index("r3") < names.index("r2")


def test_the_line_has_one_need_where_a_quota_may_open_another_and_none_without_a_reservation() -> None:
    quota = {"b": Tenant(name="b", quota_mib=1)}
    assert planned(exclusive(tenant="a"), exclusive(tenant="a"), exclusive(tenant="b"), tenants=quota) == (
        "r0",
    )
    free = snapshot([ONE], leases=[], waiting=[request("r", shared(1))])
    assert make_plan(free).line == ()


def test_a_lower_priority_than_the_highest_has_no_line() -> None:
    """The higher one is over its quota, and the end of any lease may change that."""
    quota = {"b": Tenant(name="b", quota_mib=0)}
    assert planned(exclusive(tenant="a"), exclusive(tenant="b", priority=5), tenants=quota) == ()


# ---- from hand to hand -----------------------------------------------------------------------------


@pytest.fixture
def ledger(client: "redis.Redis", settings: Settings) -> Iterator[PoolLedger]:
    """One device; `a` has 60 % of it, `b` and then `c` wait for the same, and both listen."""
    ledger = PoolLedger(client, settings.replace(gpu_node_ttl_ms=60_000))
    ledger.clear_quarantine()
    assert beat(ledger) == ""
    heard = [ledger.listen(name) for name in ("b", "c")]
    for news in heard:
        news.next(5)
    first = wait(ledger, "a")
    part = LeasePart(uuid="GPU-0", memory_mib=600, compute_percent=60)
    grants = (Grant(request_id=first.request_id, parts=(part,), share=0.6, prepaid=36.0),)
    assert ledger.commit(ledger.snapshot().epoch, PoolPlan(grants=grants)).why == ""
    yield ledger
    for news in heard:
        news.close()


def beat(ledger: PoolLedger, why: str = "") -> str:
    gpu = Device(uuid="GPU-0", node="a", index=0, name="A100", total_mib=1000, schedulable_mib=1000, why=why)
    return ledger.report(Report(node="a", agent="agent", clock_ms=0, devices=(gpu,)))


def wait(ledger: PoolLedger, name: str, need: Need = SAME) -> PoolRequest:
    asked = PoolRequest(request_id=name, holder=f"holder of {name}", need=need, ttl_ms=15_000)
    assert ledger.wait(asked, 60_000) is None
    return asked


def stand(ledger: PoolLedger, *names: str, need: Need = SAME) -> PoolLease:
    """These wait, in a line; returns the lease that ends next."""
    for name in names:
        wait(ledger, name, need)
    place = Reservation(request_id=names[0], uuids=("GPU-0",))
    plan = PoolPlan(reservation=place, line=names)
    assert ledger.commit(ledger.snapshot().epoch, plan).why == ""
    return ledger.snapshot().leases[0]


def sums(ledger: PoolLedger) -> dict[bytes, bytes]:
    return dict(ledger.client.hgetall(ledger.keys.gpu("sums")))


def test_a_lease_goes_from_hand_to_hand_with_its_record_and_its_charge(
    ledger: PoolLedger, client: "redis.Redis", settings: Settings
) -> None:
    held = stand(ledger, "b", "c")
    news = ledger.listen("b")
    news.next(5)
    on_it = dict(client.hgetall(ledger.keys.gpu("taken")))
    assert ledger.give_back(held) == (True, 0)
    (now,) = ledger.snapshot().leases
    assert (now.lease_id, now.holder, now.need, now.ttl_ms) == ("b", "holder of b", SAME, 15_000)
    assert now.token == held.token + 1
    assert [replace(part, token=held.token) for part in now.parts] == list(held.parts)
    assert (now.share, now.prepaid) == (held.share, held.prepaid)
    assert news.next(5) == (True, now), "the grant says the lease"
    news.close()
    assert client.hgetall(ledger.keys.gpu("taken")) == on_it
    assert [request.request_id for request in ledger.snapshot().waiting] == ["c"]
    assert not ledger.release(held), "it is another's now"
    # And once more, in the same line.
    assert ledger.give_back(now) == (True, 0)
    (last,) = ledger.snapshot().leases
    assert (last.lease_id, last.token) == ("c", now.token + 1)
    assert ledger.give_back(last) == (True, 0)
    assert client.hgetall(ledger.keys.gpu("taken")) == {}
    records = [record for _, record in EndedLeases(client, settings).oldest(9)]
    assert [(one.lease_id, one.token, one.node, one.device_name, one.share) for one in records] == [
        (one.lease_id, one.token, "a", "A100", 0.6) for one in (held, now, last)
    ]
    assert int(sums(ledger)[b"ms:user:logweir"]) == sum(
        round((one.ended_ms - one.granted_ms) * 0.6) for one in records
    )
    assert 0 <= ledger.snapshot().usage["logweir"].value < 3, "what was prepaid is settled"
    kinds = [fields[b"type"] for _, fields in client.xrange(ledger.keys.events)]
    assert kinds == [b"lease.granted", *[b"lease.ended", b"lease.granted"] * 2, b"lease.ended"]


def test_another_tenant_in_the_line_is_charged_for_itself(ledger: PoolLedger) -> None:
    held = stand(ledger, "b", need=replace(SAME, tenant="b"))
    assert ledger.give_back(held) == (True, 0)
    use = {name: usage.value for name, usage in ledger.snapshot().usage.items()}
    assert use["b"] == pytest.approx(36.0, rel=0.01)
    assert use["logweir"] < 3


def listens_no_more(ledger: PoolLedger, held: PoolLease) -> PoolLease:
    stand(ledger, "deaf", "b")
    return held


def expires(ledger: PoolLedger, held: PoolLease) -> PoolLease:
    ledger.client.delete(ledger.keys.gpu("line"))
    return held


def restarts(ledger: PoolLedger, held: PoolLease) -> PoolLease:
    key = ledger.keys.gpu("line")
    (text,) = ledger.client.lrange(key, 0, 0)
    epoch, _, rest = text.split(b" ", 2)
    ledger.client.lset(key, 0, b"%s %s %s" % (epoch, b"0" * 40, rest))
    return held


def changes(call: Callable[[PoolLedger], Any]) -> Callable[[PoolLedger, PoolLease], PoolLease]:
    def change(ledger: PoolLedger, held: PoolLease) -> PoolLease:
        call(ledger)
        return held

    return change


def asked_to_yield(ledger: PoolLedger, held: PoolLease) -> PoolLease:
    key = ledger.keys.gpu("leases")
    text = ledger.client.hget(key, "a") or b""
    ledger.client.hset(key, "a", text[:-1] + b',"yield_by_ms":1}')
    return held


OTHERWISE: dict[str, Callable[[PoolLedger, PoolLease], PoolLease]] = {
    "nobody listens": listens_no_more,
    "the line is too old": expires,
    "Redis was restarted": restarts,
    "another need waits": changes(lambda ledger: wait(ledger, "new", replace(SAME, priority=1))),
    "the device broke": changes(lambda ledger: beat(ledger, "too hot")),
    "the next one left": changes(lambda ledger: ledger.abandon("b", "holder of b")),
    "it was asked to yield": asked_to_yield,
}


@pytest.mark.parametrize("why", sorted(OTHERWISE))
def test_a_lease_is_not_handed_on_when(ledger: PoolLedger, why: str) -> None:
    held = stand(ledger, "b", "c")
    held = OTHERWISE[why](ledger, held)
    waits = len(ledger.snapshot().waiting)
    assert ledger.give_back(held) == (True, waits)
    assert ledger.snapshot().leases == ()
    assert not ledger.client.hgetall(ledger.keys.gpu("taken"))


def test_another_need_and_an_unclean_end_and_a_stranger_hand_nothing_on(ledger: PoolLedger) -> None:
    held = stand(ledger, "b", need=replace(SAME, memory_mib=599))
    assert ledger.give_back(replace(held, holder="nobody")) == (False, 1)
    assert ledger.give_back(held, clean=False) == (True, 1)
    assert ledger.snapshot().leases == ()
