"""Which device a scoring process asks for, where several of them share a machine. Pure."""

import re
from typing import Final

from pipeline.gpu.policy.policy import not_reserved
from pipeline.gpu.values import LeaseKind, Need, Snapshot

_NUMBER: Final = re.compile(r"-(\d+)(?=\.|@|:|$)")


def scoring_device(snapshot: Snapshot, need: Need, holder: str) -> str:
    """The UUID of a device with room that no scoring process of ours has yet; "" when there is none.

    Packing would put two processes on one device while another is idle. Processes that ask at once take
    different devices by the number in their name, as in `infer-gpu-2`.
    """
    scored = scored_devices(snapshot, need, holder)
    free = [uuid for uuid in _fitting(snapshot, need) if uuid not in scored]
    found = _NUMBER.search(holder)
    return sorted(free)[(int(found[1]) - 1 if found else 0) % len(free)] if free else ""


def scored_already(snapshot: Snapshot, need: Need, holder: str) -> str:
    """The reason why no device is left, where only devices of other scoring processes have room; else ""."""
    scored = scored_devices(snapshot, need, holder)
    fitting = _fitting(snapshot, need)
    if not fitting or not scored.keys() >= set(fitting):
        return ""
    return f"{scored[fitting[0]]} scores on {fitting[0]} already, and no other device has room"


def scored_devices(snapshot: Snapshot, need: Need, holder: str) -> dict[str, str]:
    """The devices that other scoring processes of ours have, and their holders."""
    return {
        part.uuid: lease.holder
        for lease in snapshot.leases
        if lease.need.kind is LeaseKind.INFER and lease.need.tenant == need.tenant and lease.holder != holder
        for part in lease.parts
    }


def _fitting(snapshot: Snapshot, need: Need) -> list[str]:
    """The devices that would take the need now."""
    free = not_reserved(snapshot, need)
    return sorted(one.device.uuid for one in free if one.matches(need) and one.fits(need))
