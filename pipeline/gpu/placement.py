"""Loads models on leased devices, as many copies in the pool as wanted: best fit, idle ones go first.

gpu/placing.py decides. A lease gives a process memory on devices, and a Placement fills it. One entry per
model and device in Redis makes loading single-flight; the script that claims it counts the copies. While all
copies are ready in other processes, `ensure` answers a device of theirs, and `request` names its holder.
Nothing here forwards a request. An entry ends with its lease, so a killed process leaves none behind.
"""

import json
import threading
import time
import uuid as uuids
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final, Protocol

import msgspec
import redis

from pipeline.errors import BadInput, DeviceFailed, LeaseRefused, ModelUnavailable, RedisUnavailable
from pipeline.gpu.placing import (
    Backoff,
    Loaded,
    LoadState,
    Model,
    PlacementChoice,
    choose_device,
    copies,
)
from pipeline.gpu.values import PoolLease
from pipeline.logs import logger
from pipeline.redis.arguments import named_arguments
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings
from pipeline.upkeep import start_thread

LOAD_S: Final = 300.0  # tens of GiB from a slow disk
LEAVE_S: Final = 0.05  # between two looks whether the last request of a model has ended


class PlaceArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of gpu/place.lua by name."""

    verb: str  # list, claim, touch, ready, unloading, drop
    field: str = ""  # of the entry; for all but `list`
    claim: str = ""  # id of the claim; for touch, ready, unloading, drop
    entry: str = ""  # JSON; for claim, with the five below
    memory_mib: int = 0
    room_mib: int = 0
    context_mib: int = 0  # of CUDA, once for each lease on a device
    replicas: int = 1
    load_ms: int = 0


class Loader(Protocol):
    """Moves weights; called from any thread."""

    def load(self, model: Model, uuid: str) -> None:
        """May raise; then nothing of the model is on the device."""

    def unload(self, model: Model, uuid: str) -> None: ...


class PlacedModels:
    """What is on devices, of all processes. For readers, and for those that load."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        keys = Keys(settings.redis.key_prefix)
        self.keys = [keys.gpu("models"), keys.gpu("deadlines"), keys.gpu("devices")]
        self.scripts = Scripts(client)

    def look(self) -> tuple[int, list[Loaded]]:
        """The time of Redis in milliseconds, and the models then, in one order. Raises RedisUnavailable."""
        now, *texts = self.step(PlaceArgs(verb="list"))
        return int(now), sorted((_entry(text) for text in texts), key=lambda entry: entry.key)

    def step(self, args: PlaceArgs) -> Any:
        """One run of gpu/place.lua. Raises RedisUnavailable."""
        return self.scripts.run("gpu/place", self.keys, [named_arguments(args)])


class Placement:
    """The models of one process under one lease. Safe to use from several threads."""

    def __init__(
        self,
        client: "redis.Redis",
        settings: Settings,
        loader: Loader,
        *,
        lease: PoolLease,
        load_timeout_s: float = LOAD_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.placed = PlacedModels(client, settings)
        self.loader = loader
        self.lease = lease
        self.load_timeout_s = load_timeout_s
        self.pause = pause
        self.context_mib = settings.internal.gpu_context_mib
        self.rooms = {part.uuid: part.memory_mib - self.context_mib for part in lease.parts}
        self._lock = threading.Lock()
        self._here: dict[tuple[str, str], Loaded] = {}  # by tenant and name: ready in this process
        self._busy: Counter[tuple[str, str]] = Counter()  # requests in work
        self._dropping: list[Loaded] = []  # unloaded while Redis was away; their entries are dropped later
        self._stuck: Counter[str] = Counter()  # MiB that abandoned loads may still take

    def loaded(self) -> list[Loaded]:
        """All models on devices, of all processes, in a fixed order. Raises RedisUnavailable."""
        return self._entries()[1]

    def ensure(self, model: Model, *, timeout_s: float | None = None) -> str:
        """The device on which a model is ready, loaded there if need be. Backs off, up to `timeout_s`.

        The copy may belong to another process: `loaded()` names the holder. Raises BadInput for a model that
        is larger than the memory of any leased device, LeaseRefused when it is not ready in time or the lease
        has ended. Raises DeviceFailed when a load does not end, and the errors of the loader.
        """
        backoff, end = Backoff(), None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            choice, rooms = self._choose(model)
            if choice.ready:
                return choice.uuid
            why = choice.why
            if choice.uuid and all(self.unload(entry) for entry in choice.unload):
                claimed = self._claim(model, choice.uuid, rooms[choice.uuid])
                if claimed is not None:
                    return self._load(claimed)
            elif choice.uuid:
                why = f"the models on {choice.uuid} are in use"
            wait_s = backoff.next()
            if end is not None and (remaining_s := end - time.monotonic()) <= wait_s:
                if remaining_s <= 0:
                    raise LeaseRefused(
                        f"{model.name} could not be loaded "
                        f"({why or 'another process was first or took the room'}); try again later"
                    )
                wait_s = remaining_s
            self.pause(wait_s)

    def refusal(self, model: Model) -> str:
        """Why a model cannot be put on a device of this lease now; "" when it can, or is there.

        A copy in another process does not help. Raises RedisUnavailable.
        """
        largest = max([0, *self.rooms.values()])
        if model.memory_mib > largest:
            return f"{model.name} needs {model.memory_mib} MiB and the lease has {largest} MiB for it"
        choice, rooms = self._choose(model)
        if choice.ready and self.here(model.key) is None:
            there = next((entry for entry in copies(model, self.loaded()) if entry.uuid in rooms), None)
            if there is not None:
                return f"{there.holder} has {model.name} on {there.uuid} already"
            return f"the other models of this lease leave {model.name} no room"
        return choice.why

    def touch(self, entry: Loaded) -> bool:
        """A model of ours is used now. False when its entry has gone. Raises RedisUnavailable."""
        return self._step("touch", entry)

    def view(self) -> tuple[int, list[Loaded]]:
        """The time of Redis in milliseconds, and `loaded()` at that time. Raises RedisUnavailable."""
        return self._entries()

    def here(self, key: tuple[str, str]) -> Loaded | None:
        """The copy of a model (`Model.key`) that is ready in this process."""
        with self._lock:
            return self._here.get(key)

    def place(self, model: Model, uuid: str, *, unload: Sequence[Loaded] = ()) -> bool:
        """Load a model on this device of the lease, after `unload`. False when one of those is in use, or
        when another process was first or took the room. Raises as `ensure` does.
        """
        if not all(self.unload(entry) for entry in unload):
            return False
        with self._lock:
            room_mib = self.rooms[uuid] - self._stuck[uuid]
        claimed = self._claim(model, uuid, room_mib)
        if claimed is None:
            return False
        self._load(claimed)
        return True

    def leave(self, within_s: float) -> bool:
        """Unload all models of this process, each once its requests have ended; False when some are left.

        For the end of a lease. Without Redis their entries end with the lease.
        """
        end = time.monotonic() + within_s
        while True:
            with self._lock:
                left = list(self._here.values())
            for entry in left:
                with suppress(RedisUnavailable):
                    self.unload(entry)
            with self._lock:
                if not self._here:
                    return True
            if time.monotonic() >= end:
                return False
            self.pause(LEAVE_S)

    @contextmanager
    def request(self, tenant: str, model: Model) -> Iterator[Loaded]:
        """Around one request of a tenant to a model that is ready in this process and stays loaded meanwhile.

        Raises BadInput for another tenant's model, ModelUnavailable when it is not ready here; a copy that is
        ready in another process is named.
        """
        if tenant != model.tenant:
            raise BadInput(f"{tenant} has no model {model.name}; ask for one of its own")
        with self._lock:
            entry = self._here.get(model.key)
            if entry is not None:
                self._busy[model.key] += 1
        if entry is None:
            raise ModelUnavailable(self._whereabouts(model))
        try:
            if not self.touch(entry):
                raise ModelUnavailable(f"{model.name} has gone with its lease; load it under another one")
            yield entry
        finally:
            with self._lock:
                self._busy[model.key] -= 1
            with suppress(RedisUnavailable):
                self.touch(entry)

    def unload_idle(self, idle_s: float) -> list[Loaded]:
        """Unload our models that were not used for so long; returns them."""
        now_ms, entries = self._entries()
        return [e for e in entries if e.used_ms <= now_ms - idle_s * 1000 and self.unload(e)]

    def unload(self, entry: Loaded) -> bool:
        """False when the model is not ours, answers a request, or is not ready."""
        key = entry.model.key
        with self._lock:
            copy = self._here.get(key)
            if copy is None or copy.claim != entry.claim or self._busy[key]:
                return False
            del self._here[key]  # no request from here on
        try:
            self._step("unloading", entry)  # refused after the end of our lease: it is unloaded all the same
        except RedisUnavailable:
            with self._lock:
                self._here[key] = copy
            raise
        if not self._unload_quietly(entry):
            return False  # its memory stays counted until the lease ends
        self._drop(entry)
        return True

    def _choose(self, model: Model) -> tuple[PlacementChoice, dict[str, int]]:
        """The place for a model, and the room of each device of the lease. Raises as `ensure` does."""
        largest = max([0, *self.rooms.values()])
        entries = self.loaded()
        with self._lock:
            idle = {entry.claim for key, entry in self._here.items() if not self._busy[key]}
            rooms = {uuid: room - self._stuck[uuid] for uuid, room in self.rooms.items()}
        busy = {entry.key for entry in entries if entry.claim not in idle}
        choice = choose_device(model, entries, rooms, lease_id=self.lease.lease_id, busy=busy)
        if not choice.ready and not 0 < model.memory_mib <= largest and not copies(model, entries):
            raise BadInput(
                f"{model.name} needs {model.memory_mib} MiB and the lease has room for 1 to {largest} MiB"
                " on a device; lease more memory, or use a smaller model"
            )
        return choice, rooms

    def _entries(self) -> tuple[int, list[Loaded]]:
        with self._lock:
            late, self._dropping = self._dropping, []
        for entry in late:
            self._drop(entry)
        return self.placed.look()

    def _whereabouts(self, model: Model) -> str:
        """The reason why a model is not ready in this process. Raises RedisUnavailable."""
        ready = [entry for entry in copies(model, self.loaded()) if entry.state is LoadState.READY]
        if not ready:
            return f"{model.name} is not loaded here; load it first"
        return f"{model.name} is loaded by {ready[0].holder} on {ready[0].uuid}; send the request there"

    def _claim(self, model: Model, uuid: str, room_mib: int) -> Loaded | None:
        """None when another process was faster. Raises LeaseRefused when our lease has ended."""
        entry = Loaded(
            model=model,
            uuid=uuid,
            holder=self.lease.holder,
            lease_id=self.lease.lease_id,
            claim=uuids.uuid4().hex,
        )
        # We give up before the claim expires; its end is for a process that was killed.
        load_ms = int(self.load_timeout_s * 1000) + 5_000
        args = PlaceArgs(
            verb="claim",
            field=_field(entry),
            entry=_text(entry),
            memory_mib=model.memory_mib,
            room_mib=room_mib,
            context_mib=self.context_mib,
            replicas=model.replicas,
            load_ms=load_ms,
        )
        word, *_ = self.placed.step(args)
        if word == b"lost":
            raise LeaseRefused(f"lease {self.lease.lease_id} is gone; ask for another one")
        return entry if word == b"claimed" else None

    def _load(self, entry: Loaded) -> str:
        """Load a claimed model; returns the uuid.

        In a thread, so that a hung load does not hang the caller.
        """
        model, uuid, failed = entry.model, entry.uuid, list[BaseException]()
        ended, given_up = threading.Event(), threading.Event()

        def work() -> None:
            try:
                self.loader.load(model, uuid)
            except BaseException as exc:  # noqa: BLE001 - the waiting thread raises it
                failed.append(exc)
            with self._lock:
                ended.set()
                late = given_up.is_set()
            if late:
                if not failed:
                    self._unload_quietly(entry)
                with self._lock:
                    self._stuck[uuid] -= model.memory_mib

        start_thread(f"load-{model.name}", work)
        try:
            ended.wait(self.load_timeout_s)
        finally:
            with self._lock:
                if not ended.is_set():
                    given_up.set()
                    self._stuck[uuid] += model.memory_mib
        if given_up.is_set():
            self._drop(entry)
            raise DeviceFailed(
                f"{model.name} was not loaded on {uuid} within {self.load_timeout_s:g} s and is given up;"
                " see what its loader waits for"
            )
        if failed:
            self._drop(entry)
            raise failed[0]
        self._ready(entry)
        return uuid

    def _ready(self, entry: Loaded) -> None:
        """Announce the model. Raises LeaseRefused, RedisUnavailable; it is unloaded then."""
        key, announced = entry.model.key, False
        with self._lock:
            self._here[key] = entry  # first: a request may come as soon as Redis knows
        try:
            announced = self._step("ready", entry)
        finally:
            if not announced:
                with self._lock:
                    del self._here[key]
                self._unload_quietly(entry)
                self._drop(entry)
        if not announced:
            raise LeaseRefused(
                f"{entry.model.name} was loaded on {entry.uuid} after its lease had gone; ask for another one"
            )

    def _unload_quietly(self, entry: Loaded) -> bool:
        try:
            self.loader.unload(entry.model, entry.uuid)
        except Exception:  # noqa: BLE001 - a loader's error; the lease still covers the model's memory
            logger(device=entry.uuid, model=entry.model.name).exception("gpu.model_not_unloaded")
            return False
        return True

    def _drop(self, entry: Loaded) -> None:
        """Delete the entry; with Redis away later, or at the end of the lease."""
        try:
            self._step("drop", entry)
        except RedisUnavailable:
            with self._lock:
                self._dropping.append(entry)

    def _step(self, verb: str, entry: Loaded) -> bool:
        return bool(self.placed.step(PlaceArgs(verb=verb, field=_field(entry), claim=entry.claim)))


def _field(entry: Loaded) -> str:
    return json.dumps(entry.key)


def _text(entry: Loaded) -> str:
    """The wire form: flat, with a version."""
    flat: dict[str, Any] = {**asdict(entry), "v": 1, "until_ms": 0}
    return json.dumps(flat | flat.pop("model"))


def _entry(text: bytes) -> Loaded:
    flat = json.loads(text)
    model = Model(
        name=flat["name"],
        tenant=flat["tenant"],
        memory_mib=int(flat["memory_mib"]),
        replicas=int(flat.get("replicas", 1)),  # an older build wrote none
    )
    return Loaded(
        model=model,
        uuid=flat["uuid"],
        holder=flat["holder"],
        lease_id=flat["lease_id"],
        claim=flat["claim"],
        state=LoadState(flat["state"]),
        used_ms=int(flat["used_ms"]),
    )
