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
    scored = {
        part.uuid
        for lease in snapshot.leases
        if lease.need.kind is LeaseKind.INFER and lease.need.tenant == need.tenant and lease.holder != holder
        for part in lease.parts
    }
    free = [
        one.device.uuid
        for one in not_reserved(snapshot, need)
        if one.matches(need) and one.fits(need) and one.device.uuid not in scored
    ]
    found = _NUMBER.search(holder)
    return sorted(free)[(int(found[1]) - 1 if found else 0) % len(free)] if free else ""
