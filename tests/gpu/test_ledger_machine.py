"""The pool's ledger against a plain model of it: whatever is done, twice, or not at all, nothing is given
away twice.

A crash is a step that is not taken: any rule may follow any other, so whoever should have renewed, begun,
released or swept next may never do it. Duplicates are rules that may strike twice, with the leases of the
past among them."""

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from polling import wait_until

from pipeline.errors import LeaseRefused
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.values import (
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
from pipeline.settings import Settings

NODES = {"a": ("G0", "G1"), "b": ("G2",)}
HOME = {gpu: node for node, gpus in NODES.items() for gpu in gpus}
MIB = 10
TTL_MS, NODE_TTL_MS = 600_000, 300_000
names = st.sampled_from(["p", "q", "r", "s", "t"])
gpus = st.sampled_from(sorted(HOME))
pids = st.sets(st.integers(1, 4), max_size=2)
small = st.builds(Need, memory_mib=st.integers(1, 6), compute_percent=st.sampled_from([0, 20, 50]))
wide = st.builds(
    Need, memory_mib=st.integers(1, MIB + 1), compute_percent=st.just(30), devices=st.integers(1, 2)
)
alone = st.builds(Need, mode=st.just(LeaseMode.EXCLUSIVE), memory_mib=st.just(MIB), devices=st.integers(1, 2))
usual = st.just(Need(memory_mib=MIB, compute_percent=50))  # often the same: a lease is handed on
needs = st.one_of(small, usual, usual, wide, alone)


@dataclass(slots=True)
class Held:
    """What the model knows of a lease that lives."""

    lease: PoolLease
    active: bool = False
    pids: set[int] = field(default_factory=set)
    past: bool = False  # its deadline has passed
    overdue: bool = False  # the time to yield has passed


@dataclass(slots=True)
class Gone:
    """A part that an ended lease left."""

    lease_id: str
    part: LeasePart
    exclusive: bool
    pids: set[int]


class PoolMachine(RuleBasedStateMachine):
    """Rules are the moves of holders, planners, agents, operators and time."""

    server: ClassVar[str]

    @initialize()
    def start(self) -> None:
        self.client = redis.Redis.from_url(self.server)
        own = Settings(key_prefix=f"m{uuid.uuid4().hex[:12]}", gpu_node_ttl_ms=NODE_TTL_MS)
        self.ledger = PoolLedger(self.client, own)
        self.ledger.clear_quarantine()
        self.held: dict[str, Held] = {}
        self.left: list[Gone] = []
        self.waits: dict[str, PoolRequest] = {}
        self.past: list[PoolLease] = []  # what ended, and can still be tried with
        self.token = 0
        self.heard = self.client.pubsub()
        self.heard.psubscribe(self.ledger.keys("*"))  # everybody listens
        self.why: dict[str, str] = {}
        self.silent: dict[str, bool] = {}
        self.epoch = 0
        for node in NODES:
            self.report(node, "", {})

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.heard.close()
            keys = list(self.client.scan_iter(match=self.ledger.keys("*")))
            if keys:
                self.client.delete(*keys)
            self.client.close()

    # The model's own arithmetic

    def on(self, gpu: str) -> Iterator[tuple[LeasePart, bool]]:
        for held in self.held.values():
            for part in held.lease.parts:
                if part.uuid == gpu:
                    yield part, held.lease.need.mode is LeaseMode.EXCLUSIVE
        for gone in self.left:
            if gone.part.uuid == gpu:
                yield gone.part, gone.exclusive

    def fits(self, plan: PoolPlan) -> bool:
        sums = {gpu: list(self.on(gpu)) for gpu in HOME}
        for grant in plan.grants:
            request = self.waits[grant.request_id]
            need, alone = request.need, request.need.mode is LeaseMode.EXCLUSIVE
            if len(grant.parts) != need.devices or len({part.uuid for part in grant.parts}) != need.devices:
                return False
            for part in grant.parts:
                there = sums[part.uuid]
                if self.why[part.uuid] or self.silent[HOME[part.uuid]] or (alone and there):
                    return False
                there.append((part, alone))
                if any(exclusive for _, exclusive in there) and len(there) > 1:
                    return False
                if (
                    sum(p.memory_mib for p, _ in there) > MIB
                    or sum(p.compute_percent for p, _ in there) > 100
                ):
                    return False
        return True

    def end(self, name: str, *, clean: bool = False) -> None:
        held = self.held.pop(name)
        self.past.append(held.lease)
        if held.active and not clean:
            alone = held.lease.need.mode is LeaseMode.EXCLUSIVE
            self.left += [Gone(name, part, alone, held.pids) for part in held.lease.parts]

    def moment(self) -> None:
        """Another millisecond of Redis."""
        then = self.now()
        assert wait_until(lambda: self.now() != then, timeout_s=5, poll_s=0.0003)

    def now(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    # Holders

    @rule(name=names, need=needs, holder=st.sampled_from(["h", "h", "h", "stranger"]))
    def wait(self, name: str, need: Need, holder: str) -> None:
        request = PoolRequest(request_id=name, holder=holder, need=need, ttl_ms=TTL_MS)
        known = self.held[name].lease if name in self.held else self.waits.get(name)
        if known is not None and known.holder != holder:
            with pytest.raises(LeaseRefused):
                self.ledger.wait(request, TTL_MS)
            return
        got = self.ledger.wait(request, TTL_MS)
        held = self.held.get(name)
        if held is not None and not held.past:
            assert got is not None
            assert got.parts == held.lease.parts
            return
        assert got is None
        if held is not None:
            self.end(name)
        self.waits[name] = request

    @precondition(lambda self: self.waits or self.held)
    @rule(name=names, stranger=st.booleans())
    def abandon(self, name: str, stranger: bool) -> None:
        known = self.held[name].lease if name in self.held else self.waits.get(name)
        self.ledger.abandon(name, "nobody" if stranger or known is None else known.holder)
        if stranger or known is None:
            return
        self.waits.pop(name, None)
        if name in self.held and not self.held[name].active:
            self.end(name, clean=True)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=pids)
    def activate(self, data: st.DataObject, more: set[int]) -> None:
        held = self.held[self.one(data)]
        assert self.ledger.activate(held.lease, pids=sorted(more), host="a") is not held.past
        if not held.past:
            held.active, held.pids = True, held.pids | more

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        held = self.held[self.one(data)]
        assert self.ledger.renew(held.lease).lost == ("expired" if held.past else "")

    @precondition(lambda self: self.held)
    @rule(data=st.data(), clean=st.booleans())
    def release(self, data: st.DataObject, clean: bool) -> None:
        self.give_back(self.one(data), clean=clean)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=names, clean=st.sampled_from([True, True, True, False]), late=st.booleans())
    def hand_on(self, data: st.DataObject, name: str, clean: bool, late: bool) -> None:
        """One waits for what another has, and stands in the line when it is given back."""
        ends = self.one(data)
        if name in self.held or name in self.waits:
            return
        self.wait(name, self.held[ends].lease.need, "h")
        plan = PoolPlan(reservation=Reservation(request_id=name, uuids=("G0",)), line=(name,))
        assert self.ledger.commit(self.ledger.snapshot().epoch, plan).why == ""
        if late:
            self.abandon(name, stranger=False)
        self.give_back(ends, clean=clean)

    def give_back(self, name: str, *, clean: bool) -> None:
        ended = self.held[name].lease
        released, waits = self.ledger.give_back(ended, clean=clean)
        assert released
        self.end(name, clean=clean)
        new = [lease for lease in self.ledger.snapshot().leases if lease.lease_id not in self.held]
        assert waits == (0 if new else len(self.waits))
        if not new:
            return
        # It was handed on: to one who waited for the same, on the same parts.
        (lease,) = new
        request = self.waits.pop(lease.lease_id)
        assert clean
        assert (lease.holder, lease.need, ended.need) == (request.holder, request.need, request.need)
        assert [replace(part, token=0) for part in lease.parts] == [
            replace(part, token=0) for part in ended.parts
        ]
        assert {part.token for part in lease.parts} == {lease.token}
        assert lease.token > self.token
        self.token = lease.token
        self.held[lease.lease_id] = Held(lease)

    @precondition(lambda self: self.past)
    @rule(data=st.data(), clean=st.booleans())
    def the_past_comes_again(self, data: st.DataObject, clean: bool) -> None:
        # Rather one whose name is held anew.
        again = [old for old in self.past if old.lease_id in self.held] or self.past
        old = data.draw(st.sampled_from(again))
        assert self.ledger.renew(old).lost
        assert not self.ledger.activate(old, pids=[1], host="a")
        assert not self.ledger.release(old, clean=clean)
        assert self.ledger.release_by_id(old.lease_id, old.token) is False

    def one(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.held)))

    # Planners

    @rule(data=st.data(), name=names, need=needs, begin=st.booleans(), running=pids)
    def get(self, data: st.DataObject, name: str, need: Need, begin: bool, running: set[int]) -> None:
        """Wait, have it granted, and begin, in one go."""
        if name in self.held or name in self.waits:
            return
        self.wait(name, need, "h")
        self.grant(data, [name])
        if begin and name in self.held:
            assert self.ledger.activate(self.held[name].lease, pids=sorted(running), host="a")
            self.held[name].active, self.held[name].pids = True, running

    @precondition(lambda self: self.waits)
    @rule(data=st.data(), late=st.sampled_from([False, False, False, True]), reserve=st.booleans())
    def commit(self, data: st.DataObject, late: bool, reserve: bool) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.waits)), max_size=2))
        self.grant(data, sorted(chosen), late=late, reserve=reserve)

    def grant(
        self, data: st.DataObject, chosen: list[str], *, late: bool = False, reserve: bool = False
    ) -> None:
        grants = []
        for name in chosen:
            need = self.waits[name].need
            size = (need.memory_mib, need.compute_percent) if need.mode is LeaseMode.SHARED else (MIB, 100)
            where = data.draw(st.lists(gpus, min_size=need.devices, max_size=need.devices))
            parts = tuple(LeasePart(uuid=gpu, memory_mib=size[0], compute_percent=size[1]) for gpu in where)
            grants.append(Grant(request_id=name, parts=parts, share=0.3, prepaid=2.5))
        place = next(iter(sorted(set(self.waits) - set(chosen))), None) if reserve else None
        plan = PoolPlan(
            grants=tuple(grants),
            reservation=Reservation(request_id=place, uuids=("G0",)) if place is not None else None,
            line=tuple(sorted(set(self.waits) - set(chosen))) if reserve else (),
        )
        epoch = self.ledger.snapshot().epoch
        done = self.ledger.commit(epoch - 1 if late else epoch, plan)
        if late or not self.fits(plan):
            assert done.why == ("stale" if late else "unfit")
            assert done.leases == ()
            return
        assert done.why == ""
        for grant, lease in zip(grants, done.leases, strict=True):
            request = self.waits.pop(grant.request_id)
            assert (lease.lease_id, lease.holder, lease.need) == (
                grant.request_id,
                request.holder,
                request.need,
            )
            assert {part.token for part in lease.parts} == {lease.token}
            assert lease.token > self.token, "tokens only grow"
            self.token = lease.token
            self.held[lease.lease_id] = Held(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), overdue=st.booleans())
    def ask_to_yield(self, data: st.DataObject, overdue: bool) -> None:
        name = self.one(data)
        by = self.now() + (-1 if overdue else TTL_MS)
        plan = PoolPlan(yields=(Yield(lease_id=name, by_ms=by, why="x"),))
        assert self.ledger.commit(self.ledger.snapshot().epoch, plan).why == ""
        self.held[name].overdue |= overdue

    # Time and operators

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_a_lease_run_out(self, data: st.DataObject) -> None:
        name = self.one(data)
        self.client.zadd(self.ledger.keys.gpu("deadlines"), {name: self.now() - 1})
        self.held[name].past = True

    @precondition(
        lambda self: any(x.past or x.overdue for x in self.held.values()) or any(self.silent.values())
    )
    @rule()
    def sweep(self) -> None:
        swept = self.ledger.sweep()
        expired = {name for name, held in self.held.items() if held.past}
        revoked = {name for name, held in self.held.items() if held.overdue} - expired
        assert (set(swept.expired), set(swept.revoked)) == (expired, revoked)
        fenced = {
            name
            for name, held in self.held.items()
            if any(self.silent[HOME[part.uuid]] for part in held.lease.parts)
        }
        assert set(swept.fenced) == fenced - expired - revoked
        for name in expired | revoked | fenced:
            self.end(name)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        name = self.one(data)
        assert self.ledger.revoke(name, "x")
        assert not self.ledger.revoke("nobody", "x")
        self.end(name)

    @precondition(lambda self: self.left)
    @rule(gpu=gpus)
    def clear(self, gpu: str) -> None:
        assert self.ledger.clear(gpu) == sum(gone.part.uuid == gpu for gone in self.left)
        self.left = [gone for gone in self.left if gone.part.uuid != gpu]

    # Agents

    @precondition(lambda self: self.held)
    @rule(node=st.sampled_from(sorted(NODES)))
    def fall_silent(self, node: str) -> None:
        """For longer than a node may, and its leases after it."""
        self.client.zadd(self.ledger.keys.gpu("beats"), {node: self.now() - NODE_TTL_MS - TTL_MS - 1000})
        self.silent[node] = True

    @precondition(lambda self: self.held or self.left or any(self.silent.values()))
    @rule(
        node=st.sampled_from(sorted(NODES)),
        why=st.sampled_from(["", "", "", "too hot"]),
        seen=st.dictionaries(gpus, st.one_of(st.none(), pids)),
    )
    def report(self, node: str, why: str, seen: dict[str, set[int] | None]) -> None:
        """Two beats, so that the second one tells of the time after everything before."""
        devices = []
        for gpu in NODES[node]:
            running = seen.get(gpu, set())
            processes = None if running is None else tuple(Process(pid=pid) for pid in sorted(running))
            devices.append(
                Device(
                    uuid=gpu,
                    node=node,
                    index=0,
                    name="G",
                    total_mib=MIB,
                    schedulable_mib=MIB,
                    why=why,
                    processes=processes,
                )
            )
        for _ in range(2):
            self.moment()
            assert self.ledger.report(Report(node=node, agent=node, clock_ms=0, devices=tuple(devices))) == ""
        self.silent[node] = False
        self.why.update(dict.fromkeys(NODES[node], why))
        self.left = [gone for gone in self.left if HOME[gone.part.uuid] != node or self.stays(gone, seen)]

    def stays(self, gone: Gone, seen: dict[str, set[int] | None]) -> bool:
        running = seen.get(gone.part.uuid, set())
        if running is None:
            return True
        if gone.pids:
            return bool(gone.pids & running)
        explained = {
            pid
            for held in self.held.values()
            if any(part.uuid == gone.part.uuid for part in held.lease.parts)
            for pid in held.pids
        }
        return bool(running - explained)

    # What must always hold

    @invariant()
    def nothing_is_given_away_twice(self) -> None:
        for gpu in HOME:
            there = list(self.on(gpu))
            assert sum(part.memory_mib for part, _ in there) <= MIB
            assert sum(part.compute_percent for part, _ in there) <= 100
            assert len(there) <= 1 or not any(exclusive for _, exclusive in there)

    @invariant()
    def the_ledger_agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        seen = self.ledger.snapshot()
        assert {lease.lease_id: (lease.parts, lease.state, set(lease.pids)) for lease in seen.leases} == {
            name: (held.lease.parts, LeaseState.ACTIVE if held.active else LeaseState.GRANTED, held.pids)
            for name, held in self.held.items()
        }
        assert Counter(
            (x.lease_id, x.uuid, x.memory_mib, x.exclusive, frozenset(x.pids)) for x in seen.orphans
        ) == Counter(
            (x.lease_id, x.part.uuid, x.part.memory_mib, x.exclusive, frozenset(x.pids)) for x in self.left
        )
        assert {x.request_id: (x.holder, x.need) for x in seen.waiting} == {
            name: (x.holder, x.need) for name, x in self.waits.items()
        }
        assert {device.uuid: not device.usable for device in seen.devices} == {
            gpu: bool(self.why[gpu]) or self.silent[node] for gpu, node in HOME.items()
        }
        assert seen.epoch >= self.epoch
        self.epoch = seen.epoch
        assert all(usage.value >= 0 for usage in seen.usage.values())

    @invariant()
    def the_sums_and_the_indexes_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        key = self.ledger.keys.gpu
        sums: Counter[str] = Counter()
        for gpu in HOME:
            for part, exclusive in self.on(gpu):
                sums[f"{gpu}:mem"] += part.memory_mib
                sums[f"{gpu}:cpu"] += part.compute_percent
                sums[f"{gpu}:{'exclusive' if exclusive else 'shared'}"] += 1
            sums[f"{gpu}:left"] += sum(gone.part.uuid == gpu for gone in self.left)
        taken = {name.decode(): int(value) for name, value in self.client.hgetall(key("taken")).items()}
        assert taken == {name: value for name, value in sums.items() if value}
        assert {x.decode() for x in self.client.zrange(key("deadlines"), 0, -1)} == set(self.held)
        assert {x.decode() for x in self.client.zrange(key("yields"), 0, -1)} <= set(self.held)
        assert {x.decode() for x in self.client.zrange(key("waiting_until"), 0, -1)} >= set(self.waits)


@pytest.mark.long
def test_the_pool_agrees_with_its_model_whatever_happens(redis_url: str) -> None:
    PoolMachine.server = redis_url
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            # Shrinking takes minutes on a real server; forty steps can be read as they are.
            phases=[Phase.generate],
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
