"""The GPU pool as values: what there is, who holds it, who waits. Nothing here touches a device or Redis.

Memory is counted in integer MiB and compute in integer percent of a device, so sums are exact. Times are milliseconds
of the Redis clock (`..._ms`): no machine's own clock counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pipeline.settings import Settings

TENANT: Final = "logweir"  # who our own workers are charged to
WHOLE: Final = 100  # percent
# Of a GPU, never leased: drivers and contexts differ by some ten MiB from what a lease was computed for.
HEADROOM_MIB: Final = 256
INFER_PERCENT: Final = 10  # of a GPU for a scoring process, which computes in short bursts


class LeaseMode(StrEnum):
    """How devices are used."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


class LeaseState(StrEnum):
    """The life of a lease; it only moves to the right. A need that waits is a PoolRequest and has no state."""

    GRANTED = "granted"  # the holder may begin
    ACTIVE = "active"  # the holder has begun and told its processes
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class Backfill(StrEnum):
    """What may overtake a need that waits for room."""

    EASY = "easy"  # whoever does not move its start
    STRICT = "strict"  # nobody
    FREE = "free"  # everybody: big needs may starve; for comparison and for pools without gangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A compute process that the driver sees on a device; `used_mib` is None where it does not say."""

    pid: int
    used_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A whole GPU or one MIG slice, as its node's agent saw it last.

    `why` is empty when leases may be granted, else the reason in words for an operator. `processes` is None when the
    driver does not list them.
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

    @property
    def usable(self) -> bool:
        return not self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine with an agent. `beat_ms` is when Redis heard of it last; `clock_ahead_ms` is how wrong its clock is."""

    name: str
    agent: str  # which agent process speaks for it; a second one is refused while the first one lives
    beat_ms: int = 0  # kept beside the node in Redis
    driver: str = ""
    clock_ahead_ms: int = 0
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What somebody wants of the pool.

    Shared: `memory_mib` and `compute_percent` on each of `devices` devices; memory is all that the process takes there,
    its CUDA context included. Exclusive: `devices` whole devices of at least `memory_mib` schedulable each.
    `max_duration_s` is what backfill counts with; None: unknown. `preemptible`: may be asked to yield for another need.
    `node`, `device`: only there ("" anywhere).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePart:
    """What a lease has on one device. An exclusive part has all of it. `token` is the device's fencing token."""

    uuid: str
    memory_mib: int
    compute_percent: int
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLease:
    """The right to use parts of devices until it is not renewed for `ttl_ms`. Its id is the id of its request."""

    lease_id: str
    holder: str
    need: Need
    parts: tuple[LeasePart, ...]
    state: LeaseState
    granted_ms: int
    deadline_ms: int = 0  # kept beside the lease in Redis
    ttl_ms: int
    share: float = 0.0  # dominant share of the pool when granted: what its tenant is charged per second
    prepaid: float = 0.0  # share-seconds charged at the grant, settled when it ends
    yield_by_ms: int | None = None  # asked to give back until then; revoked after it
    yield_why: str = ""
    host: str = ""  # node of its processes
    pids: tuple[int, ...] = ()

    @property
    def token(self) -> int:
        """The token of the first part, for logs."""
        return self.parts[0].token


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """A need that waits. It is forgotten when nobody has asked for it until `until_ms`."""

    request_id: str
    holder: str
    need: Need
    ttl_ms: int  # of the lease, once granted
    since_ms: int = 0  # set by the pool
    until_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A part of a lease that ended without its holder saying that it is off the device.

    It counts as taken until the node's agent, in a report newer than `since_ms`, no longer sees its processes.
    """

    lease_id: str
    uuid: str
    memory_mib: int
    compute_percent: int
    exclusive: bool
    pids: tuple[int, ...]
    since_ms: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is charged. `quota_mib` bounds what it may hold at a time, over all devices."""

    name: str
    weight: float = 1.0
    quota_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Dominant-share-seconds that a tenant was charged, decayed to `at_ms`."""

    value: float = 0.0
    at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The one need that devices are kept free for. Nothing new starts there that would delay it."""

    request_id: str
    uuids: tuple[str, ...]
    start_ms: int | None = None  # when the leases there end by what they said; None: unknown
    made_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything at one moment. A plan made from it is committed only if `epoch` is still the same."""

    epoch: int
    now_ms: int
    quarantine_ms: int = (
        0  # nothing is granted for so long: Redis was restarted, and may have forgotten a lease
    )
    nodes: tuple[Node, ...] = ()
    devices: tuple[Device, ...] = ()
    leases: tuple[PoolLease, ...] = ()
    waiting: tuple[PoolRequest, ...] = ()  # oldest first
    orphans: tuple[Orphan, ...] = ()
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    reservation: Reservation | None = None
    half_life_s: float = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A request gets these parts (their tokens are given at the commit)."""

    request_id: str
    parts: tuple[LeasePart, ...]
    share: float
    prepaid: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """A lease is asked to give back; it is revoked when it has not until `by_ms`."""

    lease_id: str
    by_ms: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What should happen now. `reservation` replaces the one before it."""

    grants: tuple[Grant, ...] = ()
    yields: tuple[Yield, ...] = ()
    reservation: Reservation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one agent says in one beat."""

    node: str
    agent: str
    clock_ms: int  # its own clock, to tell how wrong it is; nothing is compared with it
    devices: tuple[Device, ...]
    driver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What became of a plan: `why` is "" (done), "stale" (the pool changed), "quarantine" or "unfit" (a part of it does
    not fit any more); then nothing of it happened."""

    why: str
    leases: tuple[PoolLease, ...] = ()
    wait_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Answer to a renewal. `lost` is "" or why the lease is gone (released, expired, revoked, unknown, stale token)."""

    lost: str = ""
    deadline_ms: int = 0
    yield_by_ms: int | None = None
    yield_why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one sweep ended or opened, as ids."""

    expired: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()  # did not yield in time
    fenced: tuple[str, ...] = ()  # on a node that fell silent
    freed: tuple[str, ...] = ()  # devices whose left processes have gone
    forgotten: tuple[str, ...] = ()  # requests nobody asks for any more


def scoring_need(settings: Settings, *, node: str = "") -> Need:
    """What one scoring process asks of the pool; it asks on its own machine."""
    return Need(
        memory_mib=settings.gpu.infer_mib,
        compute_percent=INFER_PERCENT,
        preemptible=True,
        node=node,
    )
