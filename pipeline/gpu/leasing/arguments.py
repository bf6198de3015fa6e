"""The arguments of gpu/*.lua by name. Tokens are those of a lease's parts: `UUID=TOKEN UUID=TOKEN`."""

import msgspec


class WaitArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A need waits (wait.lua)."""

    request_id: str
    holder: str
    request: str  # JSON without its times
    remember_ms: int
    half_life_s: float


class AbandonArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Takes a need back (abandon.lua)."""

    request_id: str
    holder: str
    half_life_s: float


class CommitPlanArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a plan happen (commit.lua)."""

    epoch: int  # that the plan was made at
    plan: str  # JSON
    reservation: str  # JSON, "" for none
    lease_ttl_ms: int  # a quarantine, and the time to begin in, last so long
    node_ttl_ms: int
    half_life_s: float


class ActivateArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The holder begins (activate.lua)."""

    lease_id: str
    holder: str
    tokens: str
    host: str
    pids: list[int]


class RenewPoolLeaseArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps a lease (renew.lua)."""

    lease_id: str
    holder: str
    tokens: str


class ReleasePoolLeaseArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Gives a lease back (release.lua)."""

    lease_id: str
    holder: str  # "": whoever knows the first token, which `tokens` is then
    tokens: str
    clean: bool  # the holder is off the devices
    half_life_s: float
    lease_ttl_ms: int  # the time to begin in, where the lease is handed on


class RevokePoolLeaseArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Takes a lease away (revoke.lua)."""

    lease_id: str
    why: str
    half_life_s: float


class SweepArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Ends what has run out (sweep.lua)."""

    node_ttl_ms: int
    lease_ttl_ms: int  # of a plain lease
    half_life_s: float


class ReportArgs(msgspec.Struct, frozen=True, kw_only=True):
    """An agent says what its node has (report.lua)."""

    node: str
    agent: str
    driver: str
    clock_ms: int  # the agent's
    node_ttl_ms: int
    cpu_milli: int  # of the machine; 0: unknown
    memory_mib: int
    devices: list[str]  # JSON


class LeaveArgs(msgspec.Struct, frozen=True, kw_only=True):
    """An agent ends (leave.lua)."""

    node: str
    agent: str
    node_ttl_ms: int
