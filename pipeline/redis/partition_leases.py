"""Leases on the parts of a source that several readers divide among themselves.

A lease has a holder, a deadline on Redis time and a fencing token, as in leases.py. One script renews and
takes all leases of a reader, so hundreds of partitions cost a round trip. A lease only spares work that
another reader would do in vain. The cursor decides between two readers: it moves by compare-and-set
(Intake.accept_all).
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import redis

from pipeline.redis.arguments import named_arguments
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings


class PartitionLeasesArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of leases/share.lua by name."""

    source: str
    holder: str
    resources: list[str]
    ttl_ms: int
    leaves: bool


class PartitionLeases:
    """The leases of one reader on the parts of one source. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings, *, source: str, holder: str) -> None:
        keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.source = source
        self.holder = holder
        self.ttl_ms = settings.internal.lease_ttl_ms
        self._keys = [keys.shares(source), keys.shares(f"{source}:readers"), keys.tokens]

    def renew(self, resources: Collection[str]) -> Mapping[str, int]:
        """The resources that this reader holds for the next `ttl_ms`, and their tokens. `resources`: all that
        there are."""
        return self._run(resources, leaves=False)

    def leave(self) -> None:
        """Gives all back."""
        self._run((), leaves=True)

    def _run(self, resources: Collection[str], *, leaves: bool) -> Mapping[str, int]:
        args = PartitionLeasesArgs(
            source=self.source,
            holder=self.holder,
            resources=sorted(resources),
            ttl_ms=self.ttl_ms,
            leaves=leaves,
        )
        flat: list[Any] = self.scripts.run("leases/share", self._keys, [named_arguments(args)])
        return {name.decode(): int(token) for name, token in zip(flat[::2], flat[1::2], strict=True)}
