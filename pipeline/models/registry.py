"""Model versions: immutable bundles in the store, one pointer per model in Redis.

    train --> store --judge--> publish: The pointer moves, fenced by the lease.        (published)
                          '--> Stays beside the live one, with the reason.             (candidate)
    promote VERSION, roll back: An operator moves the pointer at any time.             (promoted, rolled-back)

A version is in the store before a pointer names it, so every machine can fetch it. Earlier versions stay
until retention removes the oldest. Every process compares `current()` between batches. Nothing needs
invalidation, because every cache is keyed by version. A note beside the manifest of a version tells its fate,
so that the fate survives Redis.
"""

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import redis

from pipeline.errors import BadBundle, BadInput, LiveChanged, RedisUnavailable, StaleToken, StoreUnavailable
from pipeline.models.bundle import Manifest, load_manifest
from pipeline.models.versions import Versions, token_of
from pipeline.records.batch import digest
from pipeline.records.versions import Fault, Live, Note
from pipeline.redis.arguments import named_arguments
from pipeline.redis.connection import answering, byte_set, text_map
from pipeline.redis.keys import SHARED, Keys
from pipeline.redis.leases import Lease
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings
from pipeline.store.choose import open_store

T = TypeVar("T")
# Versions of a model that retention spares, so that one can roll back.
HISTORY_KEPT: Final = 3
# Versions in the store besides those in use: a week of daily trainings; keep_models_mib bounds large ones.
KEEP: Final = 10
# Serving reports a fault every few seconds while it lasts; after this silence it counts as mended.
FAULT_TTL_S: Final = 20
# Replicas have to acknowledge a new live version within this time: a fail-over takes 3 to 6 s.
ACKNOWLEDGED_S: Final = 10.0


class PublishArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of models/publish.lua by name."""

    version: str
    holder: str
    token: str
    at: str  # ISO
    model: str
    expected: int | None  # generation it was judged against; None: any


class PromoteArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of models/promote.lua by name."""

    version: str
    generation: int  # it was decided on
    at: str  # ISO
    model: str
    how: str  # "promoted" | "rolled-back"


class Registry:
    """Reads and moves the pointers."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.directory = settings.data.models
        self.machine = machine_of(settings)
        self.keep = KEEP
        self.keep_bytes = settings.train.keep_models_mib * 2**20
        self._names: tuple[str, ...] = ()  # of the models, as of the last look
        self._older: set[str] = set()  # versions that an older build made

    @functools.cached_property
    def stored(self) -> Versions:
        """The versions in the store, and this machine's copies."""
        return Versions(open_store(self.settings.data.store), self.directory)

    def path(self, version: str) -> Path:
        """Where this machine's copy lies. Raises BadBundle for a name that is not a version."""
        return self.stored.place(version)

    def read(self, version: str, load: Callable[[Path], T]) -> T:
        """Loads this machine's copy by `load`; fetches the copy if there is none. Raises BadBundle."""
        return self.stored.read(version, load)

    def current(self, model: str = SHARED) -> Live | None:
        """The live version of a model, None before the first one."""
        with answering():
            return _live(model, text_map(self.client.hgetall(self.keys.model(model))))

    def snapshot(self, model: str = SHARED) -> "tuple[Live | None, dict[str, str]]":
        """`current()`, and the faults of this machine by version. Workers ask between batches."""
        lives, faults = self.snapshot_all()
        return next((live for live in lives if live.model == model), None), faults

    def snapshot_all(self) -> "tuple[list[Live], dict[str, str]]":
        """`live()`, and why this machine cannot read some versions. Faults of other machines do not count."""
        lives, faults = self._read()
        return lives, {fault.version: fault.reason for fault in faults if fault.machine == self.machine}

    def live(self) -> list[Live]:
        """The live versions of all models, the shared one first."""
        return self._read()[0]

    def faults(self) -> list[Fault]:
        """Versions that some machine cannot read, and why."""
        return sorted(self._read()[1], key=lambda fault: (fault.version, fault.machine))

    def _read(self) -> "tuple[list[Live], list[Fault]]":
        """In one round trip, or in two when a new model appeared."""
        while True:
            listed = self._names
            pipe = self.client.pipeline(transaction=False)
            pipe.smembers(self.keys.model_names)
            pipe.hgetall(self.keys.model_faults)
            pipe.time()
            for name in listed:
                pipe.hgetall(self.keys.model(name))
            with answering():
                names, faults, (seconds, _), *entries = pipe.execute()
            self._names = _ordered(names)
            if self._names == listed:
                break
        found = (_live(name, text_map(entry)) for name, entry in zip(listed, entries, strict=True))
        fresh = _fresh(text_map(faults), int(seconds)) if faults else []
        return [live for live in found if live is not None], fresh

    def is_older(self, version: str) -> bool:
        """Whether an older build made this version, so that only a training helps."""
        if version not in self._older and self.stored.is_older(version):
            self._older.add(version)
        return version in self._older

    def outdated(self) -> list[Live]:
        """The live versions that an older build made. Raises RedisUnavailable."""
        return [live for live in self.live() if self.is_older(live.version)]

    def was_live(self, version: str) -> bool:
        """Whether this version is or was the live one of its model."""
        return any(version in live.history for live in self.live())

    def versions(self) -> list[str]:
        """All versions in the store, oldest first. Raises StoreUnavailable."""
        return self.stored.names()

    def newest_token(self) -> int:
        """The highest fencing token of any version: leases start above it, even on an empty Redis.

        Raises StoreUnavailable."""
        return max((token_of(v) for v in self.versions()), default=0)

    def name(self, token: int, content: str) -> str:
        """The version of a training under this token: the token orders, the content makes it unique."""
        return f"m{token:06d}-{content[:8]}"

    def manifest(self, version: str) -> Manifest:
        """The verified manifest of this machine's copy, which is fetched if it lacks. Raises BadBundle."""
        return self.read(version, load_manifest)

    def put(self, version: str) -> Manifest:
        """Brings a bundle that was made here into the store. Raises BadBundle, StoreUnavailable."""
        return self.stored.put(version)

    def publish(
        self,
        version: str,
        lease: Lease,
        *,
        at: datetime,
        judgement: Mapping[str, Any] | None = None,
        expected: int | None = None,
    ) -> int:
        """Makes a complete bundle the live one of its model; returns the new generation.

        The bundle is brought into the store first. `expected`: the generation it was judged against, 0 for
        none. Raises BadBundle for damaged files, StoreUnavailable, StaleToken when the training lease was
        lost, LiveChanged when the pointer moved since (compare-and-set).
        """
        model = self.put(version).model
        args = PublishArgs(
            version=version,
            holder=lease.holder,
            token=str(lease.token),
            at=at.isoformat(),
            model=model,
            expected=expected,
        )
        answer = self._acknowledged(
            "models/publish",
            [
                self.keys.model(model),
                self.keys.lease(lease.resource),
                self.keys.model_names,
                self.keys.events,
            ],
            [named_arguments(args)],
        )
        if answer[0] == b"changed":
            raise LiveChanged(f"another version was made live while {version} was judged; it is judged again")
        if answer[0] != b"published":
            raise StaleToken(
                f"the lease on {lease.resource} (token {lease.token}) was lost; {version} is not published"
            )
        self.write_note(version, Note(state="published", at=at.isoformat(), judgement=judgement or {}))
        return int(answer[1])

    def promote(self, version: str, *, at: datetime, reason: str = "") -> Live:
        """Makes any version of the store live, also one that the judge refused; returns the live version.

        Raises BadInput for an unknown or live version and for a lost race, BadBundle for damaged files,
        StoreUnavailable.
        """
        if version not in self.versions():
            raise BadInput(f"there is no model {version!r}; `logweir models list` shows what there is")
        model = self.stored.verified(version).model
        live = self.current(model)
        if live is not None and live.version == version:
            raise BadInput(f"{version} is live already; `logweir models list` shows the others")
        self._move(
            version, live, model=model, at=at, how="promoted", reason=reason or "an operator promoted it"
        )
        return self._now(model)

    def roll_back(self, *, model: str = SHARED, at: datetime, reason: str = "") -> tuple[str, Live]:
        """Makes the version before the live one live again; returns (version before, live version now).

        Raises BadInput when there is none and for a lost race, BadBundle for damaged files,
        StoreUnavailable.
        """
        live = self.current(model)
        if live is None or not live.previous:
            raise BadInput(
                f"there is no version before the live one of the {model} model; `logweir models list` "
                "shows all, and `logweir models promote VERSION` takes any of them"
            )
        self.stored.verified(live.previous)
        self._move(live.previous, live, model=model, at=at, how="rolled-back", reason="")
        why = reason or f"an operator went back to {live.previous}"
        self.write_note(
            live.version,
            Note(state="rolled-back", reason=why, at=at.isoformat(), judgement=self._judged(live.version)),
        )
        return live.version, self._now(model)

    def _move(
        self, version: str, live: Live | None, *, model: str, at: datetime, how: str, reason: str
    ) -> None:
        generation = live.generation if live else 0
        args = PromoteArgs(version=version, generation=generation, at=at.isoformat(), model=model, how=how)
        keys = [self.keys.model(model), self.keys.model_names, self.keys.events]
        answer = self._acknowledged("models/promote", keys, [named_arguments(args)])
        if answer[0] != b"published":
            raise BadInput(
                "another version was made live meanwhile; look with `logweir models list` and decide again"
            )
        note = Note(
            state="promoted" if how == "promoted" else "published",
            reason=reason,
            at=at.isoformat(),
            judgement=self._judged(version),
        )
        self.write_note(version, note)

    def _acknowledged(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """The answer of a script that moves a pointer, once `redis_replicas_ack` replicas have it.

        The script runs again meanwhile: a new master may lack the move. Raises RedisUnavailable."""
        replicas, deadline = self.settings.redis.replicas_ack, time.monotonic() + ACKNOWLEDGED_S
        while True:
            try:
                return self.scripts.run_acknowledged(
                    name, keys, args, replicas=replicas, mark=self.keys.acknowledged
                )
            except RedisUnavailable:
                if not replicas or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _now(self, model: str) -> Live:
        live = self.current(model)
        if live is None:
            raise BadInput(f"the {model} model has no live version any more; look with `logweir models list`")
        return live

    def note(self, version: str) -> Note | None:
        """The note of a version, None without a readable one."""
        try:
            return msgspec.json.decode(self.stored.note(version) or b"", type=Note)
        except (StoreUnavailable, ValueError, RecursionError):
            return None

    def write_note(self, version: str, note: Note) -> None:
        """Writes the note; a full store costs the note, not the model."""
        with contextlib.suppress(StoreUnavailable):
            self.stored.write_note(version, msgspec.json.format(msgspec.json.encode(note), indent=1))

    def _judged(self, version: str) -> Mapping[str, Any]:
        note = self.note(version)
        return note.judgement if note else {}

    def report_fault(self, version: str, reason: str) -> None:
        """Reports that this machine cannot read a version. Repeated while it lasts: it counts FAULT_TTL_S."""
        with answering():
            seconds, _ = self.client.time()
            entry = json.dumps({"reason": reason[:500], "at_s": int(seconds)})
            pipe = self.client.pipeline(transaction=True)
            pipe.hset(self.keys.model_faults, f"{version} {self.machine}", entry)
            pipe.expire(self.keys.model_faults, FAULT_TTL_S)  # the newest entry counts no longer
            pipe.execute()

    def clear_fault(self, version: str) -> None:
        """Reports that this machine can read the version again."""
        with answering():
            self.client.hdel(self.keys.model_faults, f"{version} {self.machine}")

    def retire(self) -> list[str]:
        """Removes the oldest versions of each model past its number, and of all models past the size.

        Returns their names. Live versions and the last few of each history always stay. Artifacts that no
        version names go after a grace time. Only the holder of the training lease calls this. A batch in
        flight under a removed version begins again under the live one. Raises StoreUnavailable.
        """
        artifacts = self.stored.artifacts.sizes()
        spared = {v for live in self.live() for v in (live.version, *live.history[-HISTORY_KEPT:])}
        versions = [v for v in self.versions() if v not in spared]
        by_model: dict[str, list[str]] = {}
        sizes: dict[str, int] = {}
        for version in versions:
            model, sizes[version] = self._model_and_size(version, artifacts)
            by_model.setdefault(model, []).append(version)
        surplus = {v for each in by_model.values() for v in each[: max(0, len(each) - self.keep)]}
        sizes = {v: size for v, size in sizes.items() if v not in surplus}
        for version in list(sizes):
            if sum(sizes.values()) <= self.keep_bytes:
                break
            surplus.add(version)
            del sizes[version]
        removed = [v for v in versions if v in surplus]
        for version in removed:
            self.stored.remove(version)
            self.clear_fault(version)
        self.stored.sweep()
        return removed

    def _model_and_size(self, version: str, artifacts: Mapping[str, int]) -> tuple[str, int]:
        """The model of a version, and the bytes of its artifacts."""
        try:
            manifest = self.stored.manifest(version)
        except BadBundle:
            return SHARED, 0
        return manifest.model, sum(artifacts.get(file.sha256, 0) for file in manifest.files.values())


def machine_of(settings: Settings) -> str:
    """The name of this machine's stack in reports: host and data directory."""
    return f"{socket.gethostname()}-{digest(str(settings.data.dir.absolute()))[:4]}"


def _ordered(names: Any) -> tuple[str, ...]:
    """Names of models as Redis answers them, the shared one first."""
    return tuple(sorted((str(name, "utf-8") for name in byte_set(names)), key=lambda n: (n != SHARED, n)))


def _live(model: str, entry: Mapping[str, str]) -> Live | None:
    if not entry.get("version"):
        return None
    history = tuple(json.loads(entry.get("history") or "[]"))
    return Live(
        version=entry["version"],
        generation=int(entry["generation"]),
        token=int(entry["token"]),
        published=entry["published"],
        model=model,
        previous=history[-2] if len(history) > 1 else "",
        how=entry.get("how", "published"),
        published_ms=int(entry.get("published_ms") or 0),
        history=history,
    )


def _fresh(faults: Mapping[str, str], now_s: int) -> list[Fault]:
    found = []
    for name, text in faults.items():
        version, _, machine = name.partition(" ")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            data = json.loads(text)
            if now_s - int(data["at_s"]) < FAULT_TTL_S:
                found.append(Fault(version=version, machine=machine, reason=str(data["reason"])))
    return found
