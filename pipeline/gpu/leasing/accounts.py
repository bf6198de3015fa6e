"""Accounts of tenants in Redis: budgets that commands set, and the device time of this period.

The script that ends a lease adds its time to the days in which it was held (`gpu:spent`). A budget is
compared with the days of its period, so every machine of the pool counts the same, and a restart forgets
nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import redis

from pipeline.gpu.leasing import wire
from pipeline.gpu.policy.budgets import days_of, with_use
from pipeline.gpu.values import Snapshot, Tenant, TenantBudget
from pipeline.redis.connection import answering, byte_map
from pipeline.redis.keys import Keys

FRESH_S: Final = 1.0  # maximum age of what a plan knows of budgets; use grows by hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a command has set for one tenant."""

    name: str
    budget: TenantBudget | None = None
    member: bool = False  # may use the pool, whether or not the setting gpu_tenants names it
    weight: float = 1.0  # of a member that the setting does not name


class Accounts:
    """The accounts of one pool. One per process; threads may share it."""

    def __init__(self, client: "redis.Redis", prefix: str) -> None:
        self.client = client
        self._key = Keys(prefix).gpu("accounts")
        self._spent = Keys(prefix).gpu("spent")
        self._latest: tuple[float, Mapping[str, Account], Mapping[str, int]] | None = None

    def all(self) -> dict[str, Account]:
        """By name. Raises RedisUnavailable, BadPayload."""
        with answering():
            texts = byte_map(self.client.hgetall(self._key))
        found = (wire.read_json(Account, text) for text in texts.values())
        return {account.name: account for account in found}

    def change(self, name: str, edit: Callable[[Account], Account]) -> None:
        """Compare-and-set; of a tenant without an account a new one. Raises RedisUnavailable, BadPayload."""

        def swap(pipe: Any) -> None:
            text = pipe.hget(self._key, name)
            account = edit(wire.read_json(Account, text) if text else Account(name=name))
            pipe.multi()
            pipe.hset(self._key, name, wire.encode(account))

        with answering():
            self.client.transaction(swap, self._key)
        self._latest = None

    def remove(self, name: str) -> None:
        """Raises RedisUnavailable."""
        with answering():
            self.client.hdel(self._key, name)
        self._latest = None

    def spent_ms(self, accounts: Mapping[str, Account], now_ms: int) -> dict[str, int]:
        """Device time of ended leases by tenant, in the period of its budget. Raises RedisUnavailable."""
        places = [
            (account.name, f"{day} {account.name}")
            for account in accounts.values()
            if account.budget is not None
            for day in days_of(account.budget.per, now_ms)
        ]
        if not places:
            return {}
        with answering():
            counts = self.client.hmget(self._spent, [field for _, field in places])
        sums: dict[str, int] = {}
        for (name, _), count in zip(places, counts, strict=True):
            sums[name] = sums.get(name, 0) + int(count or 0)
        return sums

    def of(self, tenants: Mapping[str, Tenant], snapshot: Snapshot) -> Mapping[str, Tenant]:
        """The tenants with their budgets and the use of this period. Raises RedisUnavailable, BadPayload."""
        latest = self._latest
        if latest is None or time.monotonic() - latest[0] > FRESH_S:
            accounts = self.all()
            latest = time.monotonic(), accounts, self.spent_ms(accounts, snapshot.now_ms)
            self._latest = latest
        _, known, spent = latest
        if not known:
            return tenants
        named = dict(tenants)
        for name, account in known.items():
            if name in named or account.member:
                tenant = named.get(name) or Tenant(name=name, weight=account.weight)
                named[name] = replace(tenant, budget=account.budget)
        return with_use(named, spent, snapshot)
