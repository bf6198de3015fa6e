"""Model versions: immutable directories on disk, one pointer per model in Redis.

    train --> directory --judge--> publish: the pointer moves, fenced by the training lease   (published)
                              '--> stays beside the live one, with the reason                 (candidate)
    promote VERSION, roll back: an operator moves the pointer, at any time                    (promoted, rolled-back)

The versions before stay where they are until retention removes the oldest. Every process compares `current()` between
batches; there is nothing to invalidate, because every cache is keyed by version. What became of a version stands in
a small file beside its directory, so it survives Redis.
"""

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import redis

from pipeline.errors import BadBundle, BadInput, LiveChanged, StaleToken
from pipeline.models.bundle import MANIFEST, Manifest, load_manifest
from pipeline.redis.connection import answering, byte_set, text_map
from pipeline.redis.keys import SHARED, Keys
from pipeline.redis.leases import Lease
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

VERSION: Final = re.compile(r"m(\d{6,})-[0-9a-f]{8}")
# Removed last: the live version and those one may want to go back to.
HISTORY_KEPT: Final = 3
# Versions on disk besides those in use: a week of daily trainings and some; keep_models_mib bounds large ones.
KEEP: Final = 10
# A fault is said again every few seconds while it lasts (models/serving.py); longer silence means that nobody has it.
FAULT_TTL_S: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The live version of a model. `previous`: what going back would take, "" when there is none."""

    version: str
    generation: int
    token: int
    published: str
    model: str = SHARED
    previous: str = ""
    how: str = "published"
    published_ms: int = 0
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What became of a version: "candidate", "published", "promoted" or "rolled-back", since when and why."""

    state: str
    reason: str = ""
    at: str = ""
    judgement: Mapping[str, Any] = field(default_factory=dict)


class Registry:
    """Reads and moves the pointers."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.directory = settings.data.models
        self.keep = KEEP
        self.keep_bytes = settings.train.keep_models_mib * 2**20
        self._names: tuple[str, ...] = ()  # models as of the last `snapshot_all`

    def path(self, version: str) -> Path:
        """Where a version's bundle lies. Raises BadBundle for a name that is not a version."""
        if not VERSION.fullmatch(version):
            raise BadBundle(f"{version!r} is not a model version; versions look like m000001-0a1b2c3d")
        return self.directory / version

    def current(self, model: str = SHARED) -> Live | None:
        """The live version of a model, None before the first one."""
        with answering():
            return _live(model, text_map(self.client.hgetall(self.keys.model(model))))

    def snapshot(self, model: str = SHARED) -> "tuple[Live | None, dict[str, str]]":
        """`current()` and `faults()` in one round trip: what a worker asks between batches."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hgetall(self.keys.model(model))
        pipe.hgetall(self.keys.model_faults)
        pipe.time()
        with answering():
            entry, faults, (seconds, _) = pipe.execute()
        return _live(model, text_map(entry)), _fresh(text_map(faults), int(seconds))

    def snapshot_all(self) -> "tuple[list[Live], dict[str, str]]":
        """`live()` and `faults()` in one round trip, or in two when there is a model that was not there before: what a
        worker asks several times a second."""
        while True:
            asked = self._names
            pipe = self.client.pipeline(transaction=False)
            pipe.smembers(self.keys.model_names)
            pipe.hgetall(self.keys.model_faults)
            pipe.time()
            for name in asked:
                pipe.hgetall(self.keys.model(name))
            with answering():
                names, faults, (seconds, _), *entries = pipe.execute()
            self._names = _ordered(names)
            if self._names == asked:
                break
        found = (_live(name, text_map(entry)) for name, entry in zip(asked, entries, strict=True))
        lives = [live for live in found if live is not None]
        return lives, _fresh(text_map(faults), int(seconds)) if faults else {}

    def live(self) -> list[Live]:
        """The live versions of all models, the shared one first."""
        with answering():
            ordered = _ordered(self.client.smembers(self.keys.model_names))
        pipe = self.client.pipeline(transaction=False)
        for name in ordered:
            pipe.hgetall(self.keys.model(name))
        with answering():
            entries = pipe.execute()
        found = (_live(name, text_map(entry)) for name, entry in zip(ordered, entries, strict=True))
        return [live for live in found if live is not None]

    def was_live(self, version: str) -> bool:
        """Whether this version is or was the live one of its model."""
        return any(version in live.history for live in self.live())

    def versions(self) -> list[str]:
        """All versions on disk, oldest first."""
        if not self.directory.is_dir():
            return []
        names = (p.name for p in self.directory.iterdir() if VERSION.fullmatch(p.name))
        return sorted(names, key=lambda name: (_token(name), name))

    def newest_token(self) -> int:
        """The highest fencing token that ever published to disk: new leases start above it, even on an empty Redis."""
        return max((_token(v) for v in self.versions()), default=0)

    def name(self, token: int, content: str) -> str:
        """The version that a training under this token makes: the token orders, the content tells apart."""
        return f"m{token:06d}-{content[:8]}"

    def manifest(self, version: str) -> Manifest:
        """What the version is; its files are checked against their hashes. Raises BadBundle."""
        return load_manifest(self.path(version))

    # ---- moving the pointer ----------------------------------------------------------------------

    def publish(
        self,
        version: str,
        lease: Lease,
        *,
        at: datetime,
        judgement: Mapping[str, Any] | None = None,
        expected: int | None = None,
    ) -> int:
        """Make a complete bundle the live one of its model; returns the new generation.

        `expected`: the generation it was judged against, 0 for none. Raises BadBundle when the files are not whole,
        StaleToken when the training lease was lost, LiveChanged when the pointer is not where it was expected.
        """
        model = self.manifest(version).model
        answer = self.scripts.run(
            "models/publish",
            [self.keys.model(model), self.keys.lease(lease.resource), self.keys.model_names],
            [
                version, lease.holder, lease.token, at.isoformat(), model, "" if expected is None else expected,
            ],
        )  # fmt: skip
        if answer[0] == b"changed":
            raise LiveChanged(f"another version was made live while {version} was judged; it is judged again")
        if answer[0] != b"published":
            raise StaleToken(
                f"the lease on {lease.resource} (token {lease.token}) was lost; {version} is not published"
            )
        self.write_note(version, Note(state="published", at=at.isoformat(), judgement=judgement or {}))
        return int(answer[1])

    def promote(self, version: str, *, at: datetime, reason: str = "") -> Live:
        """Make any version on disk live, whatever its judge said; returns what is live now.

        Raises BadInput when there is nothing to do or somebody was quicker, BadBundle when its files are not whole.
        """
        if version not in self.versions():
            raise BadInput(f"there is no model {version!r}; `logweir models list` shows what there is")
        model = self.manifest(version).model
        live = self.current(model)
        if live is not None and live.version == version:
            raise BadInput(f"{version} is live already; `logweir models list` shows the others")
        self._move(
            version, live, model=model, at=at, how="promoted", reason=reason or "an operator promoted it"
        )
        return self._now(model)

    def roll_back(self, *, model: str = SHARED, at: datetime, reason: str = "") -> tuple[str, Live]:
        """Make the version before the live one live again; returns (what was live, what is live now).

        Raises BadInput when there is none or somebody was quicker, BadBundle when its files are not whole.
        """
        live = self.current(model)
        if live is None or not live.previous:
            raise BadInput(
                f"there is no version before the live one of the {model} model; `logweir models list` shows all, "
                "and `logweir models promote VERSION` takes any of them"
            )
        self.manifest(live.previous)
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
        answer = self.scripts.run(
            "models/promote",
            [self.keys.model(model), self.keys.model_names],
            [version, live.generation if live else 0, at.isoformat(), model, how],
        )
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

    def _now(self, model: str) -> Live:
        live = self.current(model)
        if live is None:
            raise BadInput(f"the {model} model has no live version any more; look with `logweir models list`")
        return live

    # ---- what became of a version ----------------------------------------------------------------

    def note(self, version: str) -> Note | None:
        """What became of a version, None when nothing readable was written about it."""
        try:
            data = json.loads(self._note_file(version).read_text(encoding="utf-8"))
            return Note(
                state=str(data["state"]),
                reason=str(data["reason"]),
                at=str(data["at"]),
                judgement=dict(data["judgement"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_note(self, version: str, note: Note) -> None:
        """Remember it; a disk that takes no more costs the remark, not the model."""
        file = self._note_file(version)
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.part")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(asdict(note), indent=1), encoding="utf-8")
            temporary.replace(file)

    def _judged(self, version: str) -> Mapping[str, Any]:
        note = self.note(version)
        return note.judgement if note else {}

    def _note_file(self, version: str) -> Path:
        path = self.path(version)
        return path.with_name(f"{path.name}.json")

    # ---- versions that cannot be read ------------------------------------------------------------

    def report_fault(self, version: str, reason: str) -> None:
        """Say that a version's files cannot be read here. It counts for FAULT_TTL_S: say it again while it is so."""
        with answering():
            seconds, _ = self.client.time()
            entry = json.dumps({"reason": reason[:500], "at_s": int(seconds)})
            pipe = self.client.pipeline(transaction=True)
            pipe.hset(self.keys.model_faults, version, entry)
            pipe.expire(self.keys.model_faults, FAULT_TTL_S)  # the newest entry counts no longer
            pipe.execute()

    def clear_fault(self, version: str) -> None:
        """Say that whoever reported it can read them again."""
        with answering():
            self.client.hdel(self.keys.model_faults, version)

    def faults(self) -> dict[str, str]:
        """Versions that some process cannot read now, and why."""
        return self.snapshot()[1]

    # ---- retention -------------------------------------------------------------------------------

    def retire(self) -> list[str]:
        """Remove the oldest versions of each model past its number, and the oldest of all past the size; returns their
        names. What killed writers left behind goes too.

        Live versions and the last few of each history stay, whatever the limits say. Only the holder of the training
        lease calls this. A batch in flight under a removed version begins again under the live one.
        """
        self._sweep()
        kept = {v for live in self.live() for v in (live.version, *live.history[-HISTORY_KEPT:])}
        versions = [v for v in self.versions() if v not in kept]
        of_model: dict[str, list[str]] = {}
        for version in versions:
            of_model.setdefault(self._model_of(version), []).append(version)
        surplus = {v for own in of_model.values() for v in own[: max(0, len(own) - self.keep)]}
        left = [v for v in versions if v not in surplus]
        sizes = {v: _size(self.path(v)) for v in left}
        while left and sum(sizes[v] for v in left) > self.keep_bytes:
            surplus.add(left.pop(0))
        gone = [v for v in versions if v in surplus]
        for version in gone:
            self._remove(version)
        return gone

    def _model_of(self, version: str) -> str:
        """Whose version it is, by its manifest alone: no reason to read all its files."""
        try:
            data = json.loads((self.path(version) / MANIFEST).read_text(encoding="utf-8"))
            return str(data.get("model", SHARED))
        except (OSError, ValueError, AttributeError):
            return SHARED

    def _sweep(self) -> None:
        """Half-written and half-removed versions: nobody else writes here while the training lease is held."""
        for path in self.directory.glob(".m*"):
            if path.suffix in (".tmp", ".gone", ".part"):
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _remove(self, version: str) -> None:
        path = self.path(version)
        hidden = path.with_name(f".{path.name}.{os.getpid()}.gone")
        with contextlib.suppress(OSError):
            path.rename(hidden)  # at once, so that nobody reads half a bundle
        shutil.rmtree(hidden, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._note_file(version).unlink()
        self.clear_fault(version)


def _size(bundle: Path) -> int:
    try:
        return sum(f.stat().st_size for f in bundle.iterdir() if f.is_file())
    except OSError:
        return 0


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


def _fresh(faults: Mapping[str, str], now_s: int) -> dict[str, str]:
    found = {}
    for version, text in faults.items():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            data = json.loads(text)
            if now_s - int(data["at_s"]) < FAULT_TTL_S:
                found[version] = str(data["reason"])
    return found


def _token(version: str) -> int:
    match = VERSION.fullmatch(version)
    return int(match.group(1)) if match else 0
