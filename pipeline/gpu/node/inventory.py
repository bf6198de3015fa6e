"""Turns readings of the driver into devices of the pool.

The devices are whole GPUs, or the slices of a split one. A fault of a GPU is a fault of each of its slices.
"""

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.gpu.node.readings import Reading
from pipeline.gpu.values import Device, MpsUse

NO_SLICES = "MIG is on and it has no slice; create one with `nvidia-smi mig -cgi`, or switch MIG off"


def this_node() -> str:
    """The name of this machine in the pool."""
    return socket.gethostname()


def usable_cores() -> int:
    """Cores that this process may use; 0 where the system does not tell."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 0


def machine_size() -> tuple[int, int]:
    """Thousandths of cores that this process may use, and MiB of memory of the machine."""
    return 1000 * usable_cores(), psutil.virtual_memory().total // 2**20


def schedulable_mib(total_mib: int, reserved_mib: int, headroom_mib: int) -> int:
    """The memory for leases: total less the driver's reserve less the headroom, never below 0.

    The CUDA context of a process (300 MiB and more) is part of its lease, since the number of processes is
    unknown.
    """
    return max(total_mib - reserved_mib - headroom_mib, 0)


def devices(
    readings: Iterable[Reading],
    *,
    node: str,
    headroom_mib: int,
    why: Mapping[str, str],
    mps: Mapping[str, MpsUse] | None = None,
) -> tuple[Device, ...]:
    """The leasable devices of these readings.

    `why`: uuid -> the fault of an unhealthy GPU. `mps`: uuid -> its MPS daemon.
    """
    found = tuple(readings)
    parents = {one.parent for one in found if one.parent}
    return tuple(
        replace(
            _device(one, node=node, headroom_mib=headroom_mib, why=_why(one, why)),
            mps=(mps or {}).get(one.uuid),
        )
        for one in found
        if one.uuid not in parents
    )


def _why(one: Reading, why: Mapping[str, str]) -> str:
    if reason := why.get(one.uuid) or why.get(one.parent):
        return reason
    return NO_SLICES if one.split else ""


def _device(one: Reading, *, node: str, headroom_mib: int, why: str) -> Device:
    return Device(
        uuid=one.uuid,
        node=node,
        index=one.index,
        name=one.name,
        total_mib=one.total_mib,
        schedulable_mib=schedulable_mib(one.total_mib, one.reserved_mib, headroom_mib),
        reserved_mib=one.reserved_mib,
        used_mib=one.used_mib,
        parent=one.parent,
        why=why,
        processes=one.processes,
        utilisation_percent=one.utilisation_percent,
        temperature_c=one.temperature_c,
    )
