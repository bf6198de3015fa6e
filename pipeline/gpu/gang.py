"""The ranks of a gang: one process for each device of a lease, numbered as torchrun numbers its own.

Ranks lie together by node. The whole GPUs of a gang on one node are visible to each of its ranks there, so
that a library can copy between them directly. LOCAL_RANK chooses among them. A MIG slice is alone, because
CUDA shows a process only its first slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.gpu.values import Device, DeviceKind, PoolLease

MOST_RANKS: Final = 256
# Of a rank's environment, beside those of its lease. The names and meanings are torchrun's.
RANK_VARIABLES: Final[Mapping[str, str]] = {
    "MASTER_ADDR": "address of the node of rank 0",
    "MASTER_PORT": "a port that was free there; rank 0 listens on it",
    "RANK": "number of the process, from 0",
    "WORLD_SIZE": "number of processes",
    "LOCAL_RANK": "number of the process on its node: the index of its device",
    "LOCAL_WORLD_SIZE": "number of processes on its node",
    "GROUP_RANK": "number of its node",
    "TORCHELASTIC_RUN_ID": "id of the lease; another one in each try",
    "TORCHELASTIC_RESTART_COUNT": "tries before this one",
    "TORCHELASTIC_MAX_RESTARTS": "as --retries",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The place of one process of a gang."""

    node: str
    uuid: str  # its device
    local: int  # LOCAL_RANK
    beside: int  # LOCAL_WORLD_SIZE
    group: int  # GROUP_RANK


def ranks_of(lease: PoolLease, devices: Sequence[Device]) -> tuple[Rank, ...]:
    """The ranks of a lease in their order; () where the pool does not know one of its devices any more."""
    by_uuid = {device.uuid: device for device in devices}
    devices = [by_uuid[part.uuid] for part in lease.parts if part.uuid in by_uuid]
    if len(devices) < len(lease.parts):
        return ()
    groups: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda device: (device.node, device.index, device.uuid)):
        alone = device.kind is DeviceKind.SLICE
        groups.setdefault(device.uuid if alone else device.node, []).append(device)
    return tuple(
        Rank(node=device.node, uuid=device.uuid, local=local, beside=len(group), group=number)
        for number, group in enumerate(groups.values())
        for local, device in enumerate(group)
    )


def devices_of_rank(ranks: Sequence[Rank], number: int) -> frozenset[str]:
    """The devices that a rank sees."""
    return frozenset(rank.uuid for rank in ranks if rank.group == ranks[number].group)


def rank_variables(
    ranks: Sequence[Rank], number: int, *, master: str, run: str, attempt: int, retries: int
) -> dict[str, str]:
    """The RANK_VARIABLES of one rank. `master`: address and port of rank 0."""
    place = ranks[number]
    address, _, port = master.rpartition(":")
    values: tuple[str | int, ...] = (
        address, port, number, len(ranks), place.local, place.beside, place.group, run, attempt - 1, retries
    )  # fmt: skip
    return {name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=True)}
