"""Where served models are loaded, as pure decisions. Every node decides alike from what all of them report.

A model without enough copies goes to the node with the tightest room that fits. Where nothing fits, idle
models make room for one that somebody asks for, and for no other. So models that nobody asks for never
displace each other in turn.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from pipeline.gpu.placing import Loaded, LoadState, best_place
from pipeline.gpu.served import ServedModel, ServeNode
from pipeline.units import size

SILENT_MS: Final = 5_000  # five reports of a node
IN_USE_MS: Final = 10_000  # a model that answered within this time makes no room: else two would swap in turn
SUPERSEDED_MS: Final = 60_000  # an older version without a request for so long is unloaded
NO_SERVER: Final = (
    "no process of the role serve runs; set gpu_serve on a machine with a GPU, as for `logweir up`"
)


Place = tuple[str, str]  # a lease and a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Load on `uuid` of this lease after `unload`; or wait for `why`; or nothing is to be done."""

    lease_id: str = ""
    uuid: str = ""
    unload: tuple[Loaded, ...] = ()
    why: str = ""


class ServeState(StrEnum):
    """The state of a model in the pool."""

    READY = "ready"  # at least one copy answers
    LOADING = "loading"
    PENDING = "pending"


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Everything that decisions about homes are made from, at one moment of the Redis clock.

    A node decides about up to a thousand models once a second, so what several of them need is kept.
    """

    now_ms: int
    models: Sequence[ServedModel]
    loaded: Sequence[Loaded]
    nodes: Sequence[ServeNode]
    wanted: Collection[str] = ()  # ServedModel.field of those that were asked for lately
    scoring: Sequence[ServeNode] = ()  # processes that score: no home of a served model

    def silent(self, node: ServeNode) -> bool:
        return self.now_ms - node.beat_ms > SILENT_MS

    def versions(self, tenant: str, name: str) -> list[ServedModel]:
        """Of one model, the newest first."""
        return self._by_name.get((tenant, name), [])

    def newest(self, model: ServedModel) -> bool:
        return self.versions(model.tenant, model.name)[:1] == [model]

    def copies_of(self, model: ServedModel) -> list[Loaded]:
        return self._by_key.get(model.model.key, [])

    def on(self, place: Place) -> list[Loaded]:
        """The models of a lease on a device."""
        return self._by_place.get(place, [])

    def ready(self, model: ServedModel) -> list[Loaded]:
        return [one for one in self.copies_of(model) if one.state is LoadState.READY]

    def answering(self, model: ServedModel) -> list[Loaded]:
        """Copies whose node reports: requests go there."""
        found = ((entry, self.holder(entry)) for entry in self.ready(model))
        return [entry for entry, node in found if node is not None and not self.silent(node)]

    def holder(self, entry: Loaded) -> ServeNode | None:
        """The process of a copy, None where it has never reported."""
        return self._by_lease.get(entry.lease_id)

    @cached_property
    def free(self) -> dict[str, dict[Place, int]]:
        """MiB by place, for each node."""
        return {
            node.name: {
                (node.lease_id, room.uuid): room.memory_mib
                - sum(entry.model.memory_mib for entry in self.on((node.lease_id, room.uuid)))
                for room in node.rooms
            }
            for node in self.nodes
        }

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], list[ServedModel]]:
        found: dict[tuple[str, str], list[ServedModel]] = defaultdict(list)
        for model in sorted(self.models, key=lambda one: -one.version):
            found[model.tenant, model.name].append(model)
        return found

    @cached_property
    def _by_key(self) -> dict[tuple[str, str], list[Loaded]]:
        found: dict[tuple[str, str], list[Loaded]] = defaultdict(list)
        for entry in self.loaded:
            found[entry.model.key].append(entry)
        return found

    @cached_property
    def _by_place(self) -> dict[Place, list[Loaded]]:
        found: dict[Place, list[Loaded]] = defaultdict(list)
        for entry in self.loaded:
            found[entry.lease_id, entry.uuid].append(entry)
        return found

    @cached_property
    def _by_lease(self) -> dict[str, ServeNode]:
        return {node.lease_id: node for node in (*self.nodes, *self.scoring) if node.lease_id}


def choose_home(view: Pending, model: ServedModel) -> Home:
    """Where the next copy of a model goes. Pure."""
    same = view.copies_of(model)
    if sum(entry.state is not LoadState.UNLOADING for entry in same) >= model.replicas:
        return Home()
    wanted = model.field in view.wanted
    if not wanted and not view.newest(model):
        return Home(why="a newer version has taken its place; it is loaded when it is asked for")
    able = [node for node in view.nodes if not _obstacle(view, node, model)]
    taken = {entry.uuid for entry in same}  # never two copies on a device
    free = {
        place: mib for node in able for place, mib in view.free[node.name].items() if place[1] not in taken
    }
    idle = {}
    if wanted:
        idle = {place: [entry for entry in view.on(place) if _idle(view, entry)] for place in free}
    found = best_place(model.model, free, idle)
    if found is None:
        return Home(why=_why(view, model, able, free))
    (lease_id, uuid), unload = found
    return Home(lease_id=lease_id, uuid=uuid, unload=unload)


def next_load(view: Pending, lease_id: str) -> tuple[ServedModel, Home] | None:
    """The next load of a lease: models that were asked for come first, then the newest. Pure."""
    order = sorted(view.models, key=lambda one: (one.field not in view.wanted, -one.put_ms, one.field))
    found = ((model, choose_home(view, model)) for model in order)
    return next(((model, home) for model, home in found if home.uuid and home.lease_id == lease_id), None)


def surplus(view: Pending, lease_id: str) -> list[Loaded]:
    """Copies of a lease that are not to be served any more. Pure."""
    by_key = {one.model.key: one for one in view.models}
    found = []
    for entry in view.loaded:
        if entry.lease_id != lease_id or entry.state is not LoadState.READY:
            continue
        model = by_key.get(entry.model.key)
        if model is None:
            found.append(entry)  # removed
        elif not view.newest(model) and model.field not in view.wanted:
            first = view.versions(model.tenant, model.name)[0]
            if view.ready(first) and entry.used_ms < view.now_ms - SUPERSEDED_MS:
                found.append(entry)
    return found


def serve_state(view: Pending, model: ServedModel) -> tuple[ServeState, str]:
    """The state of a model and the reason why it has fewer copies than wanted, "" where it has all. Pure."""
    ready = view.answering(model)
    reasons = []
    for entry in view.ready(model):
        if entry not in ready:
            node = view.holder(entry)
            silent = f"{entry.holder} is gone" if node is None else _silence(view, node)
            reasons.append(f"{silent}; its copy counts until its lease ends")
    if len(ready) >= model.replicas:
        return ServeState.READY, ""
    loading = [e for e in view.copies_of(model) if e.state is LoadState.LOADING]
    reasons += [f"{e.holder} is loading it" for e in loading]
    home = choose_home(view, model)
    if home.uuid:
        reasons.append("it is loaded next")
    elif home.why:
        reasons.append(home.why)
    why = "; ".join(reasons)
    if ready:
        return ServeState.READY, why
    return (ServeState.LOADING if loading else ServeState.PENDING), why


def _idle(view: Pending, entry: Loaded) -> bool:
    return entry.state is LoadState.READY and entry.used_ms < view.now_ms - IN_USE_MS


def _silence(view: Pending, node: ServeNode) -> str:
    return f"{node.name} has been silent for {(view.now_ms - node.beat_ms) // 1000} s"


def _obstacle(view: Pending, node: ServeNode, model: ServedModel) -> str:
    """Why a node does not load a model now, "" when it may."""
    if view.silent(node):
        return _silence(view, node)
    if node.why or not node.lease_id:
        return f"{node.name} {node.why or 'has no lease'}"
    if model.format not in node.formats:
        return f"{node.name} cannot load the format {model.format}; install the extra serve there"
    fault = next((fault for fault in node.faults if fault.model == model.field), None)
    if fault is not None and fault.until_ms > view.now_ms:
        wait_s = -((view.now_ms - fault.until_ms) // 1000)
        return f"{node.name} could not load it ({fault.why}) and tries again in {wait_s} s"
    return ""


def _why(
    view: Pending, model: ServedModel, able: Sequence[ServeNode], free: "dict[tuple[str, str], int]"
) -> str:
    obstacles = [why for node in view.nodes if (why := _obstacle(view, node, model))]
    if not able:
        return "; ".join(obstacles) or NO_SERVER
    largest = max((room.memory_mib for node in able for room in node.rooms), default=0)
    if not free:
        why = (
            f"each of {sum(len(node.rooms) for node in able)} devices has a copy; a further one needs another"
        )
    elif model.memory_mib > largest:
        why = f"it needs {size(model.memory_mib)}, and the largest lease has {size(largest)} (gpu_serve_mib)"
    else:
        most = max([0, *free.values()])
        why = f"it needs {size(model.memory_mib)}, and {size(most)} are free; "
        why += (
            "all others are in use"
            if model.field in view.wanted
            else "idle ones make room when it is asked for"
        )
    return "; ".join((why, *obstacles))
