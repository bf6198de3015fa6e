"""Placement of models as values and one pure decision. Nothing here touches a device or Redis."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 120.0

Place = TypeVar("Place", str, tuple[str, str])


class LoadState(StrEnum):
    """The life of a model on a device."""

    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to load. Two tenants may use one name for two models. `replicas`: copies in the pool at most,
    each on a device of its own."""

    name: str
    tenant: str
    memory_mib: int
    replicas: int = 1

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

    In order: a ready copy of this lease; any ready copy, or waiting for one that loads, where the pool has
    all replicas; best fit, exact fits accepted. Then comes the device whose least recently used idle models
    make room, oldest first. Last comes a ready copy elsewhere. `rooms`: MiB by device that the models of
    `lease_id` may take together. `loaded`: all entries, of other leases too. `busy`: keys that answer a
    request now.
    """
    same = copies(model, loaded)
    ready = sorted(
        (entry for entry in same if entry.state is LoadState.READY),
        key=lambda entry: (entry.lease_id != lease_id, entry.uuid),
    )
    loading = [entry for entry in same if entry.state is LoadState.LOADING]
    whole = len(ready) + len(loading) >= model.replicas
    if ready and (whole or ready[0].lease_id == lease_id):
        return PlacementChoice(uuid=ready[0].uuid, ready=True)
    waits = f"{model.name} is being unloaded"
    if loading:
        waits = f"{loading[0].holder} is loading {model.name} on {loading[0].uuid}"
    if whole:
        return PlacementChoice(why=waits)
    of_lease = [entry for entry in loaded if entry.lease_id == lease_id]
    taken = {entry.uuid for entry in same}  # never two copies on a device, not even for a moment
    free = {
        uuid: room - sum(entry.model.memory_mib for entry in of_lease if entry.uuid == uuid)
        for uuid, room in rooms.items()
        if uuid not in taken
    }
    idle = [e for e in of_lease if e.state is LoadState.READY and e.key not in busy]
    found = best_place(model, free, {uuid: [e for e in idle if e.uuid == uuid] for uuid in free})
    if found is not None:
        return PlacementChoice(uuid=found[0], unload=found[1])
    if ready:
        return PlacementChoice(uuid=ready[0].uuid, ready=True)
    if not free:
        return PlacementChoice(why=waits)
    largest = max([0, *free.values()])
    return PlacementChoice(
        why=f"{model.name} needs {model.memory_mib} MiB, {largest} MiB are free and no idle models make room"
    )


def best_place(
    model: Model, free: Mapping[Place, int], idle: Mapping[Place, Sequence[Loaded]]
) -> tuple[Place, tuple[Loaded, ...]] | None:
    """The place for a model and what has to be unloaded there first; None where it fits nowhere. Pure.

    `free`: MiB by place. Best fit first; else the place whose least recently used `idle` models make room.
    """
    fits = [
        (free_mib - model.memory_mib, place)
        for place, free_mib in free.items()
        if free_mib >= model.memory_mib
    ]
    if fits:
        return min(fits)[1], ()
    plans = []
    for place, free_mib in free.items():
        room = free_mib
        first: list[Loaded] = []
        for entry in sorted(idle.get(place, ()), key=lambda e: (e.used_ms, e.key)):
            if room >= model.memory_mib:
                break
            first.append(entry)
            room += entry.model.memory_mib
        if room >= model.memory_mib:
            plans.append((max(entry.used_ms for entry in first), len(first), place, tuple(first)))
    if not plans:
        return None
    _, _, place, unload = min(plans, key=lambda plan: plan[:3])
    return place, unload
