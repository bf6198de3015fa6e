"""Placement of models as values and one pure decision. Nothing here touches a device or Redis."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 120.0


class LoadState(StrEnum):
    """The life of a model on a device."""

    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to load. Two tenants may use one name for two models."""

    name: str
    tenant: str
    memory_mib: int

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model on a device. The process `holder` answers requests for it."""

    model: Model
    uuid: str
    holder: str
    lease_id: str
    claim: str  # a random id; each step of the holder repeats it
    state: LoadState = LoadState.LOADING
    used_ms: int = 0  # Redis clock

    @property
    def key(self) -> tuple[str, str, str]:
        return self.uuid, *self.model.key


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """Use the model on `uuid` (`ready`), or load it there after `unload`, or wait for `why` (`uuid`
    empty)."""

    uuid: str = ""
    ready: bool = False
    unload: tuple[Loaded, ...] = ()
    why: str = ""


class Backoff:
    """Back-off of a model that fits nowhere: 0.5 s, doubling, 120 s at most."""

    def __init__(self) -> None:
        self.wait_s = FIRST_WAIT_S

    def next(self) -> float:
        now, self.wait_s = self.wait_s, min(self.wait_s * 2, LONGEST_WAIT_S)
        return now


def copies(model: Model, loaded: Sequence[Loaded]) -> list[Loaded]:
    """The entries of one model, on any device."""
    return [entry for entry in loaded if entry.model.key == model.key]


def choose_device(
    model: Model,
    loaded: Sequence[Loaded],
    rooms: Mapping[str, int],
    *,
    lease_id: str,
    busy: Collection[tuple[str, str, str]] = (),
) -> PlacementChoice:
    """The device for a model. Pure.

    In order: a ready copy, first one of this lease; waiting for a copy that loads; best fit, exact fits
    accepted. Last comes the device whose least recently used idle models make room, oldest first. `rooms`:
    MiB by device that the models of `lease_id` may take together. `loaded`: all entries, of other leases too.
    `busy`: keys that answer a request now.
    """
    same = copies(model, loaded)
    ready = [entry for entry in same if entry.state is LoadState.READY]
    if ready:
        ready_first = sorted(ready, key=lambda entry: (entry.lease_id != lease_id, entry.uuid))
        return PlacementChoice(uuid=ready_first[0].uuid, ready=True)
    loading = [entry for entry in same if entry.state is LoadState.LOADING]
    if loading:
        return PlacementChoice(why=f"{loading[0].holder} is loading {model.name} on {loading[0].uuid}")
    of_lease = [entry for entry in loaded if entry.lease_id == lease_id]
    unloading = {entry.uuid for entry in same}  # never two copies on a device, not even for a moment
    free = {
        uuid: room - sum(entry.model.memory_mib for entry in of_lease if entry.uuid == uuid)
        for uuid, room in rooms.items()
        if uuid not in unloading
    }
    fits = [
        (free_mib - model.memory_mib, uuid) for uuid, free_mib in free.items() if free_mib >= model.memory_mib
    ]
    if fits:
        return PlacementChoice(uuid=min(fits)[1])
    plans = []
    for uuid, free_mib in free.items():
        room = free_mib
        idle = [e for e in of_lease if e.uuid == uuid and e.state is LoadState.READY and e.key not in busy]
        first: list[Loaded] = []
        for entry in sorted(idle, key=lambda e: (e.used_ms, e.key)):
            if room >= model.memory_mib:
                break
            first.append(entry)
            room += entry.model.memory_mib
        if room >= model.memory_mib:
            plans.append((max(entry.used_ms for entry in first), len(first), uuid, tuple(first)))
    if plans:
        _, _, uuid, unload = min(plans, key=lambda plan: plan[:3])
        return PlacementChoice(uuid=uuid, unload=unload)
    if not free:
        return PlacementChoice(why=f"{model.name} is being unloaded")
    largest = max([0, *free.values()])
    return PlacementChoice(
        why=f"{model.name} needs {model.memory_mib} MiB, {largest} MiB are free and no idle models make room"
    )
