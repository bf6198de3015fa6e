"""Usage records of ended leases. The script that ends a lease writes one for each of its devices, in the
same step.

A record is final: who had what, where, from when to when, and how it ended. The records wait in a stream of
Redis until the table `usage` of the store has them (sinks/usage.py); then this module removes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import redis

from pipeline.gpu.leasing import wire
from pipeline.gpu.values import LeaseKind, LeaseMode
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.settings import Settings


class LeaseEnd(StrEnum):
    """How a lease ended."""

    RELEASED = "released"  # its holder gave it back
    EXPIRED = "expired"  # its holder did not renew it
    REVOKED = "revoked"  # by an operator, or because it did not yield in time
    NODE_LOST = "node_lost"  # its node was silent
    RESTART = "restart"  # the stack began anew, after all its processes had ended


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """One device of one ended lease. `token` tells two leases of one id apart.

    `share`: of the device, from 0 to 1, the larger of memory and compute; 1 where it was exclusive. A lease
    ends at its deadline at the latest, however late the pool noticed.
    """

    lease_id: str
    token: int
    holder: str
    tenant: str
    kind: LeaseKind
    mode: LeaseMode
    node: str
    device: str
    device_name: str
    memory_mib: int
    compute_percent: int  # 0: none was reserved
    share: float
    granted_ms: int
    ended_ms: int
    ended: LeaseEnd


class EndedLeases:
    """The usage records that wait in Redis. Several processes may read and remove at once."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self._stream = Keys(settings.redis.key_prefix).gpu("records")

    def count(self) -> int:
        """How many wait. Raises RedisUnavailable."""
        with answering():
            return int(self.client.xlen(self._stream))

    def oldest(self, limit: int) -> list[tuple[bytes, UsageRecord]]:
        """The first records with their names in the stream. Raises RedisUnavailable, BadPayload."""
        with answering():
            answer = self.client.xrange(self._stream, count=limit)
        found = cast("list[tuple[bytes, dict[bytes, bytes]]]", answer)
        return [(name, wire.read_json(UsageRecord, fields[b"record"])) for name, fields in found]

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes records that are stored. Raises RedisUnavailable."""
        with answering():
            self.client.xdel(self._stream, *names)
