"""The GPU pool in Redis: leases, waiting needs, reports of nodes. One script per step, all on Redis time.

A lease is a holder, a deadline and a fencing token per device. A holder that lost it can neither renew, begin
nor release. A lease that ended without its holder's word leaves orphaned allocations, which count until the
node no longer sees their processes. The policy makes plans (policy/policy.py); a commit takes a plan whole,
if it still fits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import msgspec
import redis

from pipeline.errors import BadInput, LeaseRefused, RedisUnavailable
from pipeline.gpu.leasing import arguments, wire
from pipeline.gpu.values import (
    Committed,
    Device,
    Node,
    Orphan,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Renewed,
    Report,
    Reservation,
    Snapshot,
    Swept,
    Usage,
)
from pipeline.logs import logger
from pipeline.redis.arguments import named_arguments
from pipeline.redis.connection import answering, master_moves
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

SILENT: Final = "its node is silent"
# In the order of redis/lua/gpu/_gpu.lua; NAMES_PER_REQUEST begin the names of channels and keys of a request.
NAMES: Final = (
    "nodes", "beats", "devices", "leases", "deadlines", "yields", "taken", "left", "waiting", "waiting_until",
    "sums", "reservation", "freed", "records", "demand", "demand_window", "line",
    "spent",
)  # fmt: skip
NAMES_PER_REQUEST: Final = ("told", "ended")
# Hashes that grow with the pool, in the order of gpu/snapshot.lua; at most INLINE entries go through Lua.
LARGE: Final = ("nodes", "devices", "leases", "waiting", "left")
INLINE: Final = 500
USE: Final = b"use:"  # begins the fields of gpu:sums with the use of tenants


class PoolLedger:
    """Every fact of the pool. One per process; threads may share it."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self._large = False  # the last reading had more than INLINE entries
        self._names = [
            *(self.keys.gpu(name) for name in NAMES),
            self.keys.epoch,  # shared with redis/leases.py: one restart of Redis, one quarantine
            *(self.keys.gpu(name) for name in NAMES_PER_REQUEST),
            self.keys.events,
        ]

    def _run(self, name: str, args: msgspec.Struct) -> Any:
        return self.scripts.run(*self._call(name, args))

    def _call(self, name: str, args: msgspec.Struct) -> tuple[str, list[str], list[Any]]:
        named = msgspec.structs.asdict(args).items()
        texts = {field: _as_text(value) for field, value in named if isinstance(value, str)}
        return f"gpu/{name}", self._names, [named_arguments(msgspec.structs.replace(args, **texts))]

    def snapshot(self) -> Snapshot:
        """The whole pool at one moment, without tenants. Raises RedisUnavailable, BadPayload."""
        now, quarantine, beats, deadlines, flat, reservation, demand, overdue, large = self._read()
        nodes, devices, leases, waiting, orphans = large
        now = int(now)
        roster = self._nodes(nodes, _scores(beats), now)
        silent = {node.name for node in roster if node.silent}
        requests = _waiting(waiting, {name.decode("utf-8", "replace") for name in overdue})
        sums = dict(zip(flat[::2], flat[1::2], strict=True))
        place = wire.read_json(Reservation, reservation) if reservation else None
        if place is not None and all(request.request_id != place.request_id for request in requests):
            place = None
        ends = _scores(deadlines)
        return Snapshot(
            epoch=int(sums.get(b"epoch", 0)),
            now_ms=now,
            quarantine_ms=int(quarantine),
            nodes=tuple(roster),
            devices=tuple(_devices(devices, silent)),
            leases=tuple(_lease(text, ends) for text in leases),
            waiting=tuple(requests),
            orphans=tuple(wire.read_json(Orphan, text) for text in orphans),
            usage=_usage(sums),
            reservation=place,
            half_life_s=self.settings.gpu.half_life_s,
            demand=wire.read_demand(demand),
        )

    def _read(self) -> list[Any]:
        """The answer of gpu/snapshot.lua; a large pool is read beside it, in one transaction."""
        args = [self.settings.internal.lease_ttl_ms, INLINE]
        answer: list[Any] = [[]] if self._large else list(self.scripts.run("gpu/snapshot", self._names, args))
        if not answer[-1]:
            names = [self.keys.gpu(name) for name in LARGE]
            call = ("gpu/snapshot", self._names, [args[0], -1])
            (answer, *large) = self.scripts.run_all(
                [call], *(("HVALS", name) for name in names), at_once=True
            )
            answer = [*answer[:-1], large]
            self._large = sum(map(len, large)) > INLINE  # the next reading goes this way at once
        return answer

    def _nodes(self, texts: Sequence[bytes], beats: dict[str, int], now: int) -> list[Node]:
        ttl = self.settings.internal.gpu_node_ttl_ms
        nodes = []
        for text in texts:
            node = wire.read_json(Node, text)
            beat = beats.get(node.name, 0)
            nodes.append(replace(node, beat_ms=beat, silent=beat + ttl < now))
        return sorted(nodes, key=lambda node: node.name)

    def commit(self, epoch: int, plan: PoolPlan) -> Committed:
        """Compare-and-set: commit a plan made from the snapshot of this `epoch`, all of it or nothing.

        An empty plan with the same reservation changes nothing, and makes no other plan stale.
        """
        return self._committed(self.scripts.run(*self._commit(epoch, plan)))

    def _commit(self, epoch: int, plan: PoolPlan) -> tuple[str, list[str], list[Any]]:
        settings = self.settings
        place = wire.encode(plan.reservation) if plan.reservation is not None else ""
        return self._call(
            "commit",
            arguments.CommitPlanArgs(
                epoch=epoch,
                plan=wire.encode(plan, without=("reservation",)),
                reservation=place,
                lease_ttl_ms=settings.internal.lease_ttl_ms,
                node_ttl_ms=settings.internal.gpu_node_ttl_ms,
                half_life_s=settings.gpu.half_life_s,
            ),
        )

    @staticmethod
    def _committed(answer: list[Any]) -> Committed:
        why = answer[0].decode()
        if why == "":
            pairs = zip(answer[1::2], answer[2::2], strict=True)
            return Committed(why="", leases=tuple(_lease(text, int(end)) for text, end in pairs))
        if why == "unfit":
            logger().info("gpu.plan_unfit", why=answer[1].decode("utf-8", "replace"))
        return Committed(why=why, wait_ms=int(answer[1]) if why == "quarantine" else 0)

    def wait(self, request: PoolRequest, ttl_ms: int) -> PoolLease | None:
        """Wait, or go on waiting: the need is forgotten when its holder does not ask again within `ttl_ms`.

        Returns and renews the lease that this request has already, as after a restart of its holder. That
        lease is as it was granted, whatever `request` needs now. A wait whose need changed begins anew.
        Raises LeaseRefused when the id belongs to another holder, BadInput for a name that cannot be printed.
        """
        return self._waited(request, self.scripts.run(*self._wait(request, ttl_ms)))

    def wait_and_commit(
        self, request: PoolRequest, ttl_ms: int, epoch: int, plan: PoolPlan
    ) -> tuple[PoolLease | None, Committed]:
        """`wait` and then `commit` in one round trip. Raises as `wait` does."""
        waited, committed = self.scripts.run_all([self._wait(request, ttl_ms), self._commit(epoch, plan)])
        return self._waited(request, waited), self._committed(committed)

    def _wait(self, request: PoolRequest, ttl_ms: int) -> tuple[str, list[str], list[Any]]:
        _check(request)
        return self._call(
            "wait",
            arguments.WaitArgs(
                request_id=request.request_id,
                holder=request.holder,
                request=wire.encode(request, without=("since_ms",)),
                remember_ms=ttl_ms,
                half_life_s=self.settings.gpu.half_life_s,
            ),
        )

    @staticmethod
    def _waited(request: PoolRequest, answer: list[Any]) -> PoolLease | None:
        word = answer[0].decode()
        if word == "other":
            raise LeaseRefused(
                f"the request {request.request_id} belongs to {answer[1].decode('utf-8', 'replace')}; "
                "ask under another id"
            )
        return _lease(answer[1], int(answer[2])) if word == "granted" else None

    def remember(self, request_id: str, ttl_ms: int) -> bool:
        """Go on waiting, for less work of Redis than `wait`. False: the request does not wait any more."""
        return bool(self.scripts.run("gpu/remember", self._names, [_as_text(request_id), ttl_ms]))

    def listen(self, request_id: str) -> "News":
        """News of a request, from the first question for them on."""
        return News(self.client, self.keys.gpu("told", request_id))

    def abandon(self, request_id: str, holder: str) -> None:
        """Withdraw the wait, or the lease that was granted meanwhile, unless it has begun."""
        half_life_s = self.settings.gpu.half_life_s
        args = arguments.AbandonArgs(request_id=request_id, holder=holder, half_life_s=half_life_s)
        self._run("abandon", args)

    def activate(self, lease: PoolLease, *, pids: Sequence[int], host: str) -> bool:
        """Begin, before any process touches a device; again for more processes. False: the lease is lost."""
        args = arguments.ActivateArgs(
            lease_id=lease.lease_id, holder=lease.holder, tokens=_tokens(lease), host=host, pids=list(pids)
        )
        return bool(self._run("activate", args))

    def renew(self, lease: PoolLease) -> Renewed:
        """Keep the lease for its whole TTL from now on. A lost lease stays lost."""
        args = arguments.RenewPoolLeaseArgs(
            lease_id=lease.lease_id, holder=lease.holder, tokens=_tokens(lease)
        )
        answer = self._run("renew", args)
        lost = answer[0].decode("utf-8", "replace")
        if lost:
            return Renewed(lost=lost)
        return Renewed(
            deadline_ms=int(answer[1]),
            yield_by_ms=int(answer[2]) if answer[2] else None,
            yield_why=answer[3].decode("utf-8", "replace"),
        )

    def release(self, lease: PoolLease, *, clean: bool = True) -> bool:
        """Give the lease back; False when it was no longer ours.

        `clean`: no process of ours is on the devices. Otherwise its parts become orphans.
        """
        return self.give_back(lease, clean=clean)[0]

    def give_back(self, lease: PoolLease, *, clean: bool = True) -> tuple[bool, int]:
        """`release`, and the number of needs that wait for a plan; 0 where the next one has the lease now."""
        return self._release(lease.lease_id, lease.holder, _tokens(lease), clean=clean)

    def release_by_id(self, lease_id: str, token: int) -> bool:
        """For programs that know only the id and first token of their lease; they are off the devices."""
        return self._release(lease_id, "", str(token), clean=True)[0]

    def _release(self, lease_id: str, holder: str, tokens: str, *, clean: bool) -> tuple[bool, int]:
        args = arguments.ReleasePoolLeaseArgs(
            lease_id=lease_id,
            holder=holder,
            tokens=tokens,
            clean=clean,
            half_life_s=self.settings.gpu.half_life_s,
            lease_ttl_ms=self.settings.internal.lease_ttl_ms,
        )
        released, waits = self._run("release", args)
        return bool(released), int(waits)

    def revoke(self, lease_id: str, why: str) -> bool:
        """Take a lease away from its holder; False when no lease has that id."""
        half_life_s = self.settings.gpu.half_life_s
        args = arguments.RevokePoolLeaseArgs(lease_id=lease_id, why=why, half_life_s=half_life_s)
        return bool(self._run("revoke", args))

    def clear(self, uuid: str) -> int:
        """The operator's word that no orphaned process is on the device; the number of parts that freed."""
        return int(self.scripts.run("gpu/clear", self._names, [_as_text(uuid)]))

    def sweep(self) -> Swept:
        """End overdue leases and those on silent nodes; forget abandoned needs."""
        settings = self.settings
        args = arguments.SweepArgs(
            node_ttl_ms=settings.internal.gpu_node_ttl_ms,
            lease_ttl_ms=settings.internal.lease_ttl_ms,
            half_life_s=settings.gpu.half_life_s,
        )
        answer = self._run("sweep", args)
        expired, revoked, fenced, freed, forgotten = (
            tuple(name.decode("utf-8", "replace") for name in part) for part in answer
        )
        return Swept(expired=expired, revoked=revoked, fenced=fenced, freed=freed, forgotten=forgotten)

    def report(self, report: Report) -> str:
        """Replace the state of a node; "" or the reason why this agent must not report it.

        The second report after the end of a lease frees an orphan: the first may have been gathered before.
        """
        args = arguments.ReportArgs(
            node=report.node,
            agent=report.agent,
            driver=report.driver,
            clock_ms=report.clock_ms,
            node_ttl_ms=self.settings.internal.gpu_node_ttl_ms,
            cpu_milli=report.cpu_milli,
            memory_mib=report.memory_mib,
            devices=[wire.encode(replace(device, node=report.node)) for device in report.devices],
        )
        answer = self._run("report", args)
        words = [part.decode("utf-8", "replace") for part in answer]
        if words[0] == "agent":
            return (
                f"node {report.node} is watched by agent {words[1]} already; "
                "end one of the two, or give this machine another hostname"
            )
        if words[0] == "device":
            return (
                f"{words[1]} is reported by node {words[2]} already; "
                "let only one agent per machine see its GPUs, or give both the same hostname"
            )
        return ""

    def leave(self, node: str, agent: str) -> None:
        """The agent ends: its node is silent at once."""
        node_ttl_ms = self.settings.internal.gpu_node_ttl_ms
        self._run("leave", arguments.LeaveArgs(node=node, agent=agent, node_ttl_ms=node_ttl_ms))

    def clear_quarantine(self) -> None:
        """Forget leases, waits and orphans, and end the quarantine; any agent may report a node.

        Only for the process that started this Redis privately and has seen every earlier worker end.
        """
        self.scripts.run("gpu/clear_quarantine", self._names, [])


class News:
    """What happens to one waiting request: a subscription, which takes a connection of the client's pool.

    Hints only: they get lost with a connection. Redis counts the subscription as the sign that the holder
    lives, so a process that was killed gets no lease handed on.
    """

    def __init__(self, client: "redis.Redis", channel: str) -> None:
        self.client = client
        self.channel = channel
        self._heard: Any = None
        self._moves = 0  # of the master, when it subscribed

    def next(self, timeout_s: float) -> tuple[bool, PoolLease | None]:
        """Whether to ask the ledger again: the request was granted or forgotten, or nobody listened before.

        With the lease as it was granted, where the grant says it. Raises RedisUnavailable.
        """
        if self._moves != master_moves():
            self.drop()  # a master that froze says nothing, and breaks no connection
        try:
            with answering():
                if self._heard is None:
                    self._moves = master_moves()
                    self._heard = self.client.pubsub()  # type: ignore[no-untyped-call]
                    self._heard.subscribe(self.channel)
                found = self._heard.get_message(timeout=max(0.001, timeout_s))
        except RedisUnavailable:
            self.drop()
            raise
        if found is None or found["type"] == "pong":
            return False, None
        if found["type"] != "message":  # subscribed, or once more after the connection was lost
            return True, None
        ends_at, _, text = cast("bytes", found["data"]).partition(b" ")
        return True, _lease(text, int(ends_at)) if text else None

    def drop(self) -> None:
        """End the subscription at once, with its connection; `next` begins another one."""
        heard, self._heard = self._heard, None
        if heard is not None:
            heard.close()

    def close(self) -> None:
        """Stop listening. The connection goes back to the client's pool as it is, where Redis answers."""
        if self._heard is None:
            return
        heard, self._heard = self._heard, None
        try:
            heard.unsubscribe()
            while (found := heard.get_message(timeout=1.0)) is not None:
                if found["type"] == "unsubscribe":
                    # PubSub.close() ends the connection, and then every idle one of this process.
                    connection, heard.connection = heard.connection, None
                    connection.deregister_connect_callback(heard.on_connect)
                    self.client.connection_pool.release(connection)
                    return
        except redis.RedisError:
            pass  # it is closed below
        heard.close()


def _check(request: PoolRequest) -> None:
    for name, value in (("request", request.request_id), ("holder", request.holder)):
        if not value or not value.isprintable():
            raise BadInput(f"{value!r} does not name a {name}; use printable characters")


def _as_text(word: str) -> str:
    """Names can come from a command line whose bytes are no text."""
    return word.encode("utf-8", "replace").decode()


def _tokens(lease: PoolLease) -> str:
    return " ".join(f"{part.uuid}={part.token}" for part in lease.parts)


def _scores(flat: Sequence[bytes]) -> dict[str, int]:
    return {
        name.decode("utf-8", "replace"): int(float(score))
        for name, score in zip(flat[::2], flat[1::2], strict=True)
    }


def _devices(texts: Sequence[bytes], silent: set[str]) -> list[Device]:
    devices = [wire.read_json(Device, text) for text in texts]
    return sorted(
        (
            replace(device, why=SILENT) if device.node in silent and device.usable else device
            for device in devices
        ),
        key=lambda device: (device.node, device.index, device.uuid),
    )


def _lease(text: bytes, deadline_ms: int | Mapping[str, int]) -> PoolLease:
    lease = wire.read_json(PoolLease, text)
    if not isinstance(deadline_ms, int):
        deadline_ms = deadline_ms.get(lease.lease_id, 0)
    return replace(lease, deadline_ms=deadline_ms)


def _waiting(texts: Sequence[bytes], overdue: set[str]) -> list[PoolRequest]:
    """Oldest first, without requests that ran out, swept or not: they could not be granted."""
    requests = (wire.read_json(PoolRequest, text) for text in texts)
    return sorted(
        (request for request in requests if request.request_id not in overdue),
        key=lambda request: (request.since_ms, request.request_id),
    )


def _usage(sums: Mapping[bytes, bytes]) -> dict[str, Usage]:
    usage = {}
    for name, text in sums.items():
        if name.startswith(USE):
            value, _, at = text.decode().rpartition(":")
            usage[name.removeprefix(USE).decode("utf-8", "replace")] = Usage(
                value=float(value), at_ms=int(at)
            )
    return usage
