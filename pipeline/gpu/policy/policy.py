"""What the pool does next, as a pure function of a snapshot: grants, the one reservation, and who is asked to yield.

Order: priority, then the tenant that used least (fairness.py), then age. All or none of a gang. The first need that does not fit is
reserved on concrete devices (reserving.py); behind it only that starts which does not delay it. For the reserved need, and only for
it, others may be asked to yield (preempting.py). The same snapshot gives the same plan, in whatever order its parts are listed.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pipeline.gpu.policy.admission import refusal
from pipeline.gpu.policy.fairness import ENTRY_S, Shares, size, standings, tenants
from pipeline.gpu.policy.packing import Room, Rooms
from pipeline.gpu.policy.preemption import Asking
from pipeline.gpu.policy.reservation import Choice, Kept, MayAsk, choose, kept, nobody
from pipeline.gpu.values import (
    Backfill,
    Grant,
    LeaseMode,
    LeasePart,
    LeaseState,
    Need,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Reservation,
    Snapshot,
    Yield,
)

__all__ = ["ENTRY_S", "YIELD_MS", "open_to_shared", "plan", "refusal", "standings", "tenants"]

YIELD_MS: Final = 150_000  # the default of the setting gpu_yield_s


def plan(snapshot: Snapshot, *, backfill: Backfill = Backfill.EASY, yield_ms: int = YIELD_MS) -> PoolPlan:
    """What to do now. Whoever is asked to yield has `yield_ms` for it."""
    if snapshot.quarantine_ms > 0:
        return PoolPlan(reservation=snapshot.reservation)
    return _Round(snapshot, backfill, yield_ms).run()


def open_to_shared(snapshot: Snapshot, need: Need) -> bool:
    """Whether some device outside the reservation would take this shared need now."""
    if snapshot.quarantine_ms > 0 or need.mode is LeaseMode.EXCLUSIVE or need.devices < 1:
        return False
    rooms = Rooms(snapshot)
    if snapshot.reservation is not None:
        named = (rooms.by_uuid.get(uuid) for uuid in dict.fromkeys(snapshot.reservation.uuids))
        rooms.keep([room for room in named if room is not None])
    return rooms.find(need) is not None


def served(snapshot: Snapshot, need: Need) -> bool:
    """Whether a lease like this need is held and stays: a device that our own workers fill is open to their batches."""
    closed = set() if snapshot.reservation is None else set(snapshot.reservation.uuids)
    usable = {device.uuid for device in snapshot.devices if device.usable} - closed
    return any(
        lease.yield_by_ms is None
        and lease.deadline_ms > snapshot.now_ms
        and replace(lease.need, node="", device="") == replace(need, node="", device="")
        and all(part.uuid in usable for part in lease.parts)
        for lease in snapshot.leases
    )


class _Round:
    """One planning. Room only shrinks while it lasts, so a shape that did not fit once is not tried again."""

    def __init__(self, snapshot: Snapshot, backfill: Backfill, yield_ms: int) -> None:
        self.snapshot = snapshot
        self.backfill = backfill
        self.yield_by_ms = snapshot.now_ms + yield_ms
        self.shares = Shares(snapshot)
        self.rooms = Rooms(snapshot)
        self.grants: list[Grant] = []
        self.yields: list[Yield] = []
        self.reservation: Reservation | None = None
        self.kept: Kept | None = None
        self.unfit: set[tuple[object, ...]] = set()
        self.granted: set[str] = set()
        self.fresh: list[
            tuple[PoolRequest, list[Room], tuple[LeasePart, ...]]
        ] = []  # grants that no room lists yet
        self.alike: dict[tuple[str, float | None], PoolLease] = {}

    def run(self) -> PoolPlan:
        before = self.snapshot.reservation
        levels: dict[int, dict[str, list[PoolRequest]]] = defaultdict(lambda: defaultdict(list))
        head: PoolRequest | None = None
        for request in self.snapshot.waiting:
            if before is not None and request.request_id == before.request_id:
                head = request
            levels[request.need.priority][request.need.tenant].append(request)
        for priority in sorted(levels, reverse=True):
            for queue in levels[priority].values():
                queue.sort(key=lambda r: (r.since_ms, r.request_id))
            settled = ""
            if head is not None and head.need.priority == priority and self.kept is None:
                queue = levels[priority][head.need.tenant]
                settled = head.request_id if self._honour(head, queue) else ""
            if not self._level(levels[priority], settled):
                break
        return PoolPlan(grants=tuple(self.grants), yields=tuple(self.yields), reservation=self.reservation)

    def _honour(self, head: PoolRequest, queue: Sequence[PoolRequest]) -> bool:
        """The need that has the reservation comes first among its priority, as long as its start is in sight.

        False when it has to stand in line again.
        """
        if not self._within_quota(head.need):
            return False
        if self._grant(head):
            return True
        if not self._may_reserve(head, queue):
            return False
        asking = Asking(head.need, self.shares, self.snapshot.now_ms)
        choice = self._choice(head, asking)
        if choice is None or choice.unknown:
            return False
        self._reserve(head, choice, asking)
        return True

    def _level(self, queues: Mapping[str, list[PoolRequest]], settled: str) -> bool:
        """All needs of one priority. False when nothing after them may start."""
        waiting = {tenant: iter(requests) for tenant, requests in queues.items()}
        heap = [self.shares.order(tenant) for tenant in waiting]
        heapq.heapify(heap)
        while heap:
            tenant = heap[0][2]
            for request in waiting[tenant]:
                if self.kept is not None and self.backfill is Backfill.STRICT:
                    return False
                if request.request_id != settled and self._next(request, queues):
                    heapq.heapreplace(heap, self.shares.order(tenant))
                    break
            else:
                heapq.heappop(heap)
        return self.kept is None or self.backfill is not Backfill.STRICT

    def _next(self, request: PoolRequest, queues: Mapping[str, list[PoolRequest]]) -> bool:
        """Grant it if it fits; reserve for it if it is the first that does not."""
        need = request.need
        short = self.kept is not None and self.kept.ends_before(need)
        # Room within a quota is another one for every tenant: what an exclusive need takes depends on its devices.
        whose = need.tenant if need.mode is LeaseMode.EXCLUSIVE else ""
        shape = (need.memory_mib, need.compute_percent, need.devices, need.node, need.device, short, whose)
        if shape in self.unfit or not self._within_quota(need):
            return False
        if self._grant(request):
            return True
        self.unfit.add(shape)
        if self.kept is None and self._may_reserve(request, queues[need.tenant]):
            asking = Asking(need, self.shares, self.snapshot.now_ms)
            choice = self._choice(request, asking)
            if choice is not None and not self._hand_over(request, choice, queues):
                self._reserve(request, choice, asking)
        return False

    def _hand_over(
        self, request: PoolRequest, choice: Choice, queues: Mapping[str, list[PoolRequest]]
    ) -> bool:
        """Reserve for a tenant that has these devices now, if it stood before this one without what it gives back there.

        Who holds a device has more than who waits for it, whatever their weights and their past: without this, two tenants with
        whole needs on one device would take turns.
        """
        need = request.need
        if choice.by_yields:
            return False
        most = (
            size(need)
            if need.mode is LeaseMode.SHARED
            else (self.shares.memory_mib, self.shares.compute_percent)
        )
        given: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for room in choice.rooms:
            for lease, memory, compute in room.held:
                sums = given[lease.need.tenant]
                sums[0], sums[1] = min(most[0], sums[0] + memory), min(most[1], sums[1] + compute)

        def standing(tenant: str) -> tuple[float, float]:
            memory, compute = given.get(tenant, (0, 0))
            return self.shares.order(tenant, (memory, compute))[:2]

        before = [t for t in given if t in queues and standing(t) < standing(need.tenant)]
        for tenant in sorted(before, key=lambda t: (standing(t), t)):
            other = next((r for r in queues[tenant] if r.request_id not in self.granted), None)
            if other is None or not self._within_quota(other.need):
                continue
            if len(self.rooms.some(other.need)) == other.need.devices:
                continue  # it starts when it is its turn
            if not self._may_reserve(other, queues[tenant]):
                continue
            asking = Asking(other.need, self.shares, self.snapshot.now_ms)
            theirs = self._choice(other, asking)
            if theirs is not None:
                self._reserve(other, theirs, asking)
                return True
        return False

    def _may_reserve(self, request: PoolRequest, queue: Sequence[PoolRequest]) -> bool:
        """A shared need leaves the reservation to an exclusive one of its tenant that others make room for: the door."""
        if request.need.mode is LeaseMode.EXCLUSIVE:
            return True
        if self.backfill is Backfill.FREE:
            return False
        door = next(
            (r for r in queue if r.need.mode is LeaseMode.EXCLUSIVE and r.request_id not in self.granted),
            None,
        )
        if door is None or not self._within_quota(door.need):
            return True
        choice = self._choice(door, Asking(door.need, self.shares, self.snapshot.now_ms))
        return choice is None or not choice.by_yields

    def _choice(self, request: PoolRequest, asking: Asking) -> Choice | None:
        """Where to reserve. An earlier choice stands unless another is plainly better; so it never goes to and fro."""
        self._list_fresh()
        new = self._at_best(asking, lambda may_ask: self._anew(request.need, may_ask))
        before = self.snapshot.reservation
        if before is None or before.request_id != request.request_id:
            return new
        now_ms = self.snapshot.now_ms
        old = self._at_best(
            asking, lambda may_ask: kept(before, self.rooms, request.need, may_ask, now_ms=now_ms)
        )
        return new if old is None or (new is not None and new.quality < old.quality) else old

    def _list_fresh(self) -> None:
        """Enter the grants of this plan where reserving looks for holders: they have ends, but nobody asks them to yield yet.

        One lease stands for all that are alike in what is looked at there: whose it is and when it ends.
        """
        for request, rooms, parts in self.fresh:
            need = request.need
            alike = (need.tenant, need.max_duration_s)
            if alike not in self.alike:
                self.alike[alike] = PoolLease(
                    lease_id="",
                    holder="",
                    need=replace(need, preemptible=False),
                    parts=(),
                    state=LeaseState.GRANTED,
                    granted_ms=self.snapshot.now_ms,
                    deadline_ms=self.snapshot.now_ms,
                    ttl_ms=0,
                )
            for room, part in zip(rooms, parts, strict=True):
                room.held.append((self.alike[alike], part.memory_mib, part.compute_percent))
        self.fresh.clear()

    def _anew(self, need: Need, may_ask: MayAsk) -> Choice | None:
        left = self.shares.quota_left_mib(need.tenant)
        return choose(self.rooms, need, may_ask, now_ms=self.snapshot.now_ms, most_mib=left)

    @staticmethod
    def _at_best(asking: Asking, look: Callable[[MayAsk], Choice | None]) -> Choice | None:
        """Count on yields only where they may be asked for all together."""
        choice = look(asking.may_ask)
        hollow = choice is not None and choice.by_yields and not asking.victims(choice.rooms)
        return look(nobody) if hollow else choice

    def _within_quota(self, need: Need) -> bool:
        left = self.shares.quota_left_mib(need.tenant)
        return left is None or size(need)[0] <= left

    def _grant(self, request: PoolRequest) -> bool:
        need = request.need
        if need.devices < 1 or need.memory_mib < 0 or need.compute_percent < 0:
            return False  # refusing.py says so to whoever asks; a plan does not trust what it reads
        rooms = self.rooms.some(need)
        if self.kept is not None and len(rooms) < need.devices:
            rooms = (rooms + self.kept.admitted(need))[: need.devices]
        if len(rooms) < need.devices:
            return False
        if need.mode is LeaseMode.EXCLUSIVE:
            left = self.shares.quota_left_mib(need.tenant)
            if left is not None and sum(room.device.schedulable_mib for room in rooms) > left:
                return False
        parts = tuple(self._part(room, need) for room in rooms)
        memory, compute = sum(p.memory_mib for p in parts), sum(p.compute_percent for p in parts)
        share = self.shares.dominant(memory, compute)
        self.shares.add(need.tenant, memory, compute)
        self.fresh.append((request, rooms, parts))
        self.granted.add(request.request_id)
        self.grants.append(
            Grant(request_id=request.request_id, parts=parts, share=share, prepaid=share * ENTRY_S)
        )
        return True

    def _part(self, room: Room, need: Need) -> LeasePart:
        if self.kept is not None and room.kept:
            self.kept.took(room, need)
        memory, compute = self.rooms.take(room, need)
        return LeasePart(uuid=room.device.uuid, memory_mib=memory, compute_percent=compute)

    def _reserve(self, request: PoolRequest, choice: Choice, asking: Asking) -> None:
        """Close the door of these devices and ask whoever stands in the way, if that is all that is missing."""
        victims = asking.victims(choice.rooms)
        uuids = tuple(room.device.uuid for room in choice.rooms)
        for lease in victims:
            why = _why(request.need, [part.uuid for part in lease.parts if part.uuid in uuids])
            self.yields.append(Yield(lease_id=lease.lease_id, by_ms=self.yield_by_ms, why=why))
        before, now_ms = self.snapshot.reservation, self.snapshot.now_ms
        same = before is not None and (before.request_id, before.uuids) == (request.request_id, uuids)
        self.kept = Kept(request, choice, {lease.lease_id for lease in victims}, now_ms=now_ms)
        self.reservation = Reservation(
            request_id=request.request_id,
            uuids=uuids,
            start_ms=choice.start_ms,
            made_ms=before.made_ms if same and before is not None else now_ms,
        )
        self.rooms.keep(list(choice.rooms))


def _why(need: Need, uuids: Sequence[str]) -> str:
    what = "the whole of" if need.mode is LeaseMode.EXCLUSIVE else f"{need.memory_mib:,} MiB of"
    return f"{need.tenant} waits for {what} {', '.join(uuids)}"
