"""The GPU pool as values: devices, leases, waiting needs. Nothing here touches a device or Redis.

Memory is integer MiB and compute is integer percent of a device, so sums are exact. Times are milliseconds of
the Redis clock (`..._ms`); no machine's own clock counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pipeline.settings import Settings

TENANT: Final = "logweir"  # our own workers
FULL_PERCENT: Final = 100  # percent
# Of a GPU, never leased: drivers and contexts differ by some ten MiB from what a lease was computed for.
HEADROOM_MIB: Final = 256
INFER_PERCENT: Final = 10  # of a GPU for a scoring process, which computes in short bursts


class LeaseMode(StrEnum):
    """How devices are used."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


class DeviceKind(StrEnum):
    """The devices that a need accepts."""

    ANY = "any"
    GPU = "gpu"  # whole GPUs
    SLICE = "slice"  # MIG slices


class LeaseKind(StrEnum):
    """The purpose of a lease, for its usage record."""

    TRAIN = "train"
    INFER = "infer"
    SERVE = "serve"  # models of users, in our process
    USER = "user"  # any program beside our own workers


class LeaseState(StrEnum):
    """The life of a lease; it only moves to the right. A waiting need is a PoolRequest and has no state."""

    GRANTED = "granted"  # the holder may begin
    ACTIVE = "active"  # the holder has begun and named its processes
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class Backfill(StrEnum):
    """Which needs may overtake the reserved one."""

    EASY = "easy"  # needs that do not delay its start
    STRICT = "strict"  # none
    FREE = "free"  # all: big needs may starve; for comparison and for pools without gangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A compute process that the driver sees on a device; `used_mib` is None where the driver does not
    say."""

    pid: int
    used_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsUse:
    """The MPS daemon that serves a device. `own`: it serves no other one. `clients`: None if unknown."""

    own: bool
    clients: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A whole GPU or one MIG slice, as its node's agent saw it last.

    `why` is empty when leases may be granted, else the reason for an operator. `processes` is None when the
    driver does not list them. `mps` is None where no daemon serves it, or nobody has looked yet.
    """

    uuid: str
    node: str
    index: int
    name: str
    total_mib: int
    schedulable_mib: int  # total - reserved by the driver - headroom
    reserved_mib: int = 0
    used_mib: int = 0
    parent: str = ""  # uuid of the whole GPU, for a MIG slice
    why: str = ""
    processes: tuple[Process, ...] | None = ()
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    mps: MpsUse | None = None

    @property
    def usable(self) -> bool:
        return not self.why

    @property
    def kind(self) -> DeviceKind:
        return DeviceKind.SLICE if self.parent else DeviceKind.GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine with an agent. `beat_ms`: its last report; `clock_ahead_ms`: the error of its clock.

    CPU and memory are 0 where the agent does not report them: needs are not bounded by them then.
    """

    name: str
    agent: str  # the agent process that reports it; a second one is refused while the first one lives
    beat_ms: int = 0  # kept beside the node in Redis
    driver: str = ""
    clock_ahead_ms: int = 0
    cpu_milli: int = 0  # thousandths of a core
    memory_mib: int = 0
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A request for devices, without its holder.

    Shared: `memory_mib` and `compute_percent` on each of `devices` devices; the memory includes the CUDA
    context. Exclusive: `devices` whole devices of at least `memory_mib` schedulable each. Backfill counts
    with `max_duration_s` (None: unknown). `preemptible`: may be asked to yield for another need. `node`,
    `device`: only there ("" anywhere); of nodes also several (`a|b`). `model`: only devices whose name has
    this word, or one of several (`A100|H100`). `device_kind` ANY: an exclusive need takes whole GPUs where
    the pool has enough of them, slices elsewhere; devices of one need are of one kind. `cpu_milli`,
    `node_memory_mib`: of the node, for each device. `same_node`: all devices on one node. `kind` decides
    nothing; usage records name it.
    """

    tenant: str = TENANT
    mode: LeaseMode = LeaseMode.SHARED
    memory_mib: int = 0
    compute_percent: int = 0
    devices: int = 1
    priority: int = 0
    max_duration_s: float | None = None
    preemptible: bool = False
    node: str = ""
    device: str = ""
    kind: LeaseKind = LeaseKind.USER
    device_kind: DeviceKind = DeviceKind.ANY
    model: str = ""
    cpu_milli: int = 0
    node_memory_mib: int = 0
    same_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePart:
    """The part of a lease on one device; an exclusive part has all of it.

    `token` is the device's fencing token.
    """

    uuid: str
    memory_mib: int
    compute_percent: int
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLease:
    """The right to use parts of devices until it is not renewed for `ttl_ms`.

    Its id is the id of its request.
    """

    lease_id: str
    holder: str
    need: Need
    parts: tuple[LeasePart, ...]
    state: LeaseState
    granted_ms: int
    deadline_ms: int = 0  # kept beside the lease in Redis
    ttl_ms: int
    share: float = 0.0  # Dominant share of the pool when granted: what its tenant is charged per second.
    prepaid: float = 0.0  # Share-seconds charged at the grant, settled at the end.
    yield_by_ms: int | None = None  # Asked to yield by then; revoked after it.
    yield_why: str = ""
    host: str = ""  # node of its processes
    pids: tuple[int, ...] = ()

    @property
    def token(self) -> int:
        """The token of the first part, for logs."""
        return self.parts[0].token


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """A need that waits. It is forgotten when its holder has not asked again for a while."""

    request_id: str
    holder: str
    need: Need
    ttl_ms: int  # of the lease, once granted
    since_ms: int = 0  # set by the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """An orphaned allocation: part of a lease that ended while its processes may still use the device.

    It counts as taken until the node's agent no longer sees its processes, in a report newer than `since_ms`.
    """

    lease_id: str
    uuid: str
    memory_mib: int
    compute_percent: int
    exclusive: bool
    pids: tuple[int, ...]
    since_ms: int
    why: str


class BudgetPeriod(StrEnum):
    """After this time a budget begins anew."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBudget:
    """GPU-hours that a tenant may use in a period. `refuses`: a need beyond it does not wait."""

    gpu_hours: float
    per: BudgetPeriod
    refuses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The account that leases are charged to. `quota_mib` bounds its leases at a time, over all devices."""

    name: str
    weight: float = 1.0
    quota_mib: int | None = None
    budget: TenantBudget | None = None
    used_gpu_hours: float = 0.0  # of the budget, in its present period, with leases that live


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Dominant-share-seconds charged to a tenant, decayed to `at_ms`."""

    value: float = 0.0
    at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The one need that devices are kept free for. No need starts there that would delay it."""

    request_id: str
    uuids: tuple[str, ...]
    start_ms: int | None = None  # announced end of the leases there; None: unknown
    made_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole pool at one moment. A plan made from it is committed only if `epoch` is still the same."""

    epoch: int
    now_ms: int
    quarantine_ms: int = 0  # no grants for so long: a restarted Redis may have forgotten a lease
    nodes: tuple[Node, ...] = ()
    devices: tuple[Device, ...] = ()
    leases: tuple[PoolLease, ...] = ()
    waiting: tuple[PoolRequest, ...] = ()  # oldest first
    orphans: tuple[Orphan, ...] = ()
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    reservation: Reservation | None = None
    half_life_s: float = 86_400.0
    demand: Mapping[Need, int] = field(default_factory=dict)  # recent needs by their form (demand.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A request gets these parts; the commit sets their tokens."""

    request_id: str
    parts: tuple[LeasePart, ...]
    share: float
    prepaid: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """A lease is asked to yield; it is revoked if it has not by `by_ms`."""

    lease_id: str
    by_ms: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The next changes of the pool. `reservation` replaces the one before it.

    `line`: the requests that are served next, in their order, whenever a lease like theirs ends.
    """

    grants: tuple[Grant, ...] = ()
    yields: tuple[Yield, ...] = ()
    reservation: Reservation | None = None
    line: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One beat of an agent."""

    node: str
    agent: str
    clock_ms: int  # the agent's own clock, only to show its error
    devices: tuple[Device, ...]
    driver: str = ""
    cpu_milli: int = 0  # of the machine; 0: unknown
    memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The result of a commit: `why` is "" (committed), "stale" (the pool changed), "quarantine" or "unfit".

    Unfit: a part of the plan no longer fits. Only a committed plan has changed the pool.
    """

    why: str
    leases: tuple[PoolLease, ...] = ()
    wait_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Answer to a renewal.

    `lost`: "" or why the lease has ended (released, expired, revoked, unknown, old token).
    """

    lost: str = ""
    deadline_ms: int = 0
    yield_by_ms: int | None = None
    yield_why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Ids of all that one sweep ended or opened."""

    expired: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()  # did not yield in time
    fenced: tuple[str, ...] = ()  # on a node that fell silent
    freed: tuple[str, ...] = ()  # devices without orphaned processes
    forgotten: tuple[str, ...] = ()  # requests whose holder no longer asks


def scoring_need(settings: Settings, *, node: str = "") -> Need:
    """The need of one scoring process, on its own machine."""
    return Need(
        memory_mib=settings.gpu.infer_mib,
        compute_percent=INFER_PERCENT,
        preemptible=True,
        node=node,
        kind=LeaseKind.INFER,
    )
