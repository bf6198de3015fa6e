"""Made-up devices for tests of the pool: what an agent would report, without a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Device, Process, Report

RESERVED_MIB = 384


def made_up(n: int = 2, mib: int = 16_000, node: str = "node-a", **more: Any) -> tuple[Device, ...]:
    """Devices with `mib` schedulable each."""
    return tuple(
        Device(
            uuid=f"GPU-{node}-{index}",
            node=node,
            index=index,
            name="Made-up 16",
            total_mib=mib + RESERVED_MIB,
            reserved_mib=RESERVED_MIB,
            schedulable_mib=mib,
            **more,
        )
        for index in range(n)
    )


def put_devices(
    pool_or_ledger: Pool | PoolLedger,
    n: int = 2,
    mib: int = 16_000,
    node: str = "node-a",
    *,
    processes: Mapping[int, Sequence[int]] | None = None,
    clear_quarantine: bool = True,
    **more: Any,
) -> tuple[Device, ...]:
    """Report `n` devices of a node, so that a pool has capacity; also its next beat.

    `processes`: index of a device -> pids that the driver sees. `clear_quarantine`: without a quarantine.
    """
    ledger = pool_or_ledger.ledger if isinstance(pool_or_ledger, Pool) else pool_or_ledger
    seen = processes or {}
    devices = tuple(
        replace(device, processes=tuple(Process(pid=pid, used_mib=512) for pid in seen.get(device.index, ())))
        for device in made_up(n, mib, node, **more)
    )
    if clear_quarantine:
        ledger.clear_quarantine()
    refused = ledger.report(
        Report(node=node, agent=f"agent-of-{node}", clock_ms=0, devices=devices, driver="made up")
    )
    assert not refused, refused
    return devices
