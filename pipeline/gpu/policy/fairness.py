"""Dominant resource fairness: which tenant is served next, by weighted shares and decayed past use.

After Ghodsi et al. (NSDI 2011). Shares count per tenant, never per job, so splitting work into more jobs
gains nothing. Past use decays with a half-life, in closed form from one (value, time) pair. Without a history
this is plain discrete DRF.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from pipeline.errors import BadSetting
from pipeline.gpu.values import FULL_PERCENT, TENANT, LeaseMode, Need, PoolLease, Snapshot, Tenant, Usage
from pipeline.units import mib

# Seconds of its share that a lease prepays at the grant and settles at its end. A tenant that submits many
# short needs at once so pays for each before the first has run. Below one minute, starting CUDA costs as much
# as the work.
ENTRY_S: Final = 60.0
_LN2: Final = math.log(2)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_WEIGHT: Final = re.compile(r"\d{1,6}(\.\d{1,6})?")


def is_name(text: str) -> bool:
    """Whether a tenant may have this name: it stands in messages and hash fields, not in Redis keys."""
    return _NAME.fullmatch(text) is not None


def parse_tenants(texts: Sequence[str]) -> dict[str, Tenant]:
    """Tenants from `name`, `name=WEIGHT` or `name=WEIGHT:MEMORY`; always with our own. Raises BadSetting."""
    parsed: dict[str, Tenant] = {}
    for text in texts:
        name, has_weight, amounts = (part.strip() for part in text.partition("="))
        weight, has_quota, quota = (part.strip() for part in amounts.partition(":"))
        if not is_name(name):
            raise BadSetting(
                f"gpu_tenants: {name!r} is not a name of a tenant; use letters, digits, dots, dashes and"
                " underscores, at most 63"
            )
        if name in parsed:
            raise BadSetting(f"gpu_tenants names {name!r} twice; name it once")
        if has_weight and not _WEIGHT.fullmatch(weight):
            raise BadSetting(
                f"gpu_tenants: the weight of {name!r} is {weight!r}; write a number from 0 up, as in {name}=2"
            )
        parsed[name] = Tenant(
            name=name,
            weight=float(weight) if has_weight else 1.0,
            quota_mib=_quota(name, quota) if has_quota else None,
        )
    return {TENANT: Tenant(name=TENANT)} | parsed


def _quota(name: str, text: str) -> int:
    """In MiB. A number without a unit is refused: 4 MiB of a GPU is never meant."""
    try:
        if not text.isdigit():
            return mib(text)
    except BadSetting:
        pass
    raise BadSetting(
        f"gpu_tenants: the memory of {name!r} is {text!r}; write it with its unit, as in {name}=1:4GiB"
    )


def decayed(usage: Usage, now_ms: int, half_life_s: float) -> Usage:
    """The use as it counts at `now_ms`. A clock that stepped back changes nothing."""
    if now_ms <= usage.at_ms:
        return usage
    factor = 2.0 ** (-(now_ms - usage.at_ms) / 1000 / half_life_s)
    return Usage(value=usage.value * factor, at_ms=now_ms)


def accrued(share: float, seconds: float, half_life_s: float) -> float:
    """Share-seconds of holding `share` for a time, decayed to its end: r * (h / ln 2) * (1 - 2^(-d/h))."""
    return share * half_life_s / _LN2 * -math.expm1(-max(0.0, seconds) * _LN2 / half_life_s)


def lease_size(lease: PoolLease) -> tuple[int, int]:
    """(MiB, percent) of a lease over all its devices."""
    memory = compute = 0
    for part in lease.parts:
        memory += part.memory_mib
        compute += part.compute_percent
    return memory, compute


class Holdings:
    """The leases of every tenant, and what they have in all."""

    def __init__(self, leases: Iterable[PoolLease] = ()) -> None:
        self.leases: dict[str, dict[str, PoolLease]] = defaultdict(dict)
        self.sums: dict[str, tuple[int, int]] = {}  # (MiB, percent) of tenants that hold something
        for lease in leases:
            self.add(lease)

    def add(self, lease: PoolLease) -> None:
        self.leases[lease.need.tenant][lease.lease_id] = lease
        self._count(lease, 1)

    def drop(self, lease: PoolLease) -> None:
        del self.leases[lease.need.tenant][lease.lease_id]
        self._count(lease, -1)
        if not self.leases[lease.need.tenant]:
            del self.leases[lease.need.tenant], self.sums[lease.need.tenant]

    def _count(self, lease: PoolLease, sign: int) -> None:
        memory, compute = lease_size(lease)
        has = self.sums.get(lease.need.tenant, (0, 0))
        self.sums[lease.need.tenant] = has[0] + sign * memory, has[1] + sign * compute


class Shares:
    """The share of every tenant now and in the past, and the order that follows. A plan adds its grants.

    `sizes` (MiB and percent of all usable devices) and `holdings` are counted where they are not known.
    """

    def __init__(
        self, snapshot: Snapshot, sizes: tuple[int, int] | None = None, holdings: Holdings | None = None
    ) -> None:
        if sizes is None:
            usable = [device.schedulable_mib for device in snapshot.devices if device.usable]
            sizes = sum(usable), FULL_PERCENT * len(usable)
        self.memory_mib, self.compute_percent = sizes
        self.tenants = snapshot.tenants
        self._snapshot = snapshot
        self._holdings = Holdings(snapshot.leases) if holdings is None else holdings
        self._held = {tenant: list(amounts) for tenant, amounts in self._holdings.sums.items()}
        self._past: dict[str, float] = {}

    def names(self) -> set[str]:
        """Every tenant that holds, held or may hold something."""
        return {*self.tenants, *self._held, *self._snapshot.usage}

    def past(self, tenant: str) -> float:
        """The average share of a tenant over the window of the decay."""
        found = self._past.get(tenant)
        if found is None:
            s = self._snapshot
            leases = self._holdings.leases.get(tenant, {}).values()
            values = [_unpaid(lease, s.now_ms, s.half_life_s) for lease in leases]
            if tenant in s.usage:
                values.append(decayed(s.usage[tenant], s.now_ms, s.half_life_s).value)
            # fsum: independent of the order of the leases.
            found = self._past[tenant] = math.fsum(values) / (s.half_life_s / _LN2)
        return found

    def weight(self, tenant: str) -> float:
        """1 for a tenant that the settings no longer name."""
        settings = self.tenants.get(tenant)
        return 1.0 if settings is None else settings.weight

    def held_mib(self, tenant: str) -> int:
        return self._held[tenant][0] if tenant in self._held else 0

    def quota_left_mib(self, tenant: str) -> int | None:
        """Signed; None where there is no bound."""
        settings = self.tenants.get(tenant)
        return (
            None
            if settings is None or settings.quota_mib is None
            else settings.quota_mib - self.held_mib(tenant)
        )

    def bounded(self, tenant: str) -> bool:
        """Whether a quota or a budget bounds what it may have."""
        settings = self.tenants.get(tenant)
        return settings is not None and (settings.quota_mib is not None or settings.budget is not None)

    def add(self, tenant: str, memory_mib: int, compute_percent: int) -> None:
        holding = self._held.setdefault(tenant, [0, 0])
        holding[0] += memory_mib
        holding[1] += compute_percent

    def dominant(self, memory_mib: int, compute_percent: int) -> float:
        """The larger of both parts of the pool; 0 of an empty pool."""
        return max(
            memory_mib / self.memory_mib if self.memory_mib > 0 else 0.0,
            compute_percent / self.compute_percent if self.compute_percent > 0 else 0.0,
        )

    def weighted(self, tenant: str, memory_mib: int = 0, compute_percent: int = 0) -> float:
        """Dominant share with this much more (or less), over the weight; infinite at weight 0."""
        holding = self._held.get(tenant, (0, 0))
        weight = self.weight(tenant)
        share = self.dominant(holding[0] + memory_mib, holding[1] + compute_percent)
        return share / weight if weight > 0 else math.inf

    def order(self, tenant: str, less: tuple[int, int] = (0, 0)) -> tuple[float, float, str]:
        """The tenant with the smaller key is served first; tenants of weight 0 come last, by use.

        `less`: (MiB, percent) that it will have given back by then.
        """
        holding = self._held.get(tenant, (0, 0))
        used = self.dominant(holding[0] - less[0], holding[1] - less[1]) + self.past(tenant)
        weight = self.weight(tenant)
        return used / weight if weight > 0 else math.inf, used, tenant


def standings(snapshot: Snapshot) -> dict[str, float]:
    """(share now + decayed average share before) / weight of every tenant; smaller goes first."""
    shares = Shares(snapshot)
    names = shares.names() | {request.need.tenant for request in snapshot.waiting}
    return {name: shares.order(name)[0] for name in sorted(names)}


def need_size(need: Need) -> tuple[int, int]:
    """(MiB, percent) over all its devices; an exclusive need gets more where its devices are larger."""
    percent = FULL_PERCENT if need.mode is LeaseMode.EXCLUSIVE else need.compute_percent
    return need.memory_mib * need.devices, percent * need.devices


def _unpaid(lease: PoolLease, now_ms: int, half_life_s: float) -> float:
    """Use of a running lease beyond its prepayment, both decayed to now: `accrued` less `decayed`, in one."""
    if now_ms <= lease.granted_ms:
        return 0.0
    faded = -math.expm1((lease.granted_ms - now_ms) * _LN2 / 1000 / half_life_s)  # 1 - 2^(-d/h)
    return max(0.0, lease.share * half_life_s / _LN2 * faded - lease.prepaid * (1.0 - faded))
