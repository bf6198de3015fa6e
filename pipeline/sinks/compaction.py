"""Compaction: many small parts become few large ones, beside the commits and in bounded memory.

    level 0, a commit --merge--> level 1, in the order of commits --seal--> level 2, sorted, of one day

A line is rewritten at most twice. Batches that may still change are never sealed: those that wait for a
model, those that the ledger has not finished, and those that Redis has forgotten. A part is replaced only if
nothing in it has changed meanwhile. Replaced files are removed after `GRACE_S`, so that a reader with an
older manifest still finds them; so are files of writers that were killed before their swap.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
import polars as pl

from pipeline.errors import StoreUnavailable
from pipeline.logs import logger
from pipeline.sinks.manifest import (
    LOOSE,
    MERGED,
    PREFIX,
    SEALED,
    Day,
    Index,
    IndexEntry,
    Part,
    ResultManifest,
    packed,
    spans,
)
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.rollups import put_rollup

# Parts of level 0 that begin a merge: a query reads a hundred small files about as fast as one large one.
MERGE_PARTS: Final = 64
MERGE_AGE_S: Final = 2.0  # Younger commits may be in the hands of their writers.
# What is read at once: about 1 GiB of memory for lines of usual length.
MAX_ROWS: Final = 1_000_000
MAX_BYTES: Final = 64 << 20  # Compressed.
SEAL_AGE_S: Final = 600.0  # Past the time in which Redis may forget a batch (sinks/forgotten.py).
SEAL_AFTER_S: Final = 3_600.0  # An older part is sealed however few rows there are.
# Parts of level 1 that cannot be sealed are merged among themselves when there are so many.
WAITING_PARTS: Final = 32
VOID_AFTER_S: Final = 60.0
GRACE_S: Final = 1_800.0
ORPHAN_S: Final = 7_200.0
NOTES: Final = f"{PREFIX}gone/"


class Fate(StrEnum):
    """What may still become of a stored batch."""

    FINAL = "final"  # Nothing.
    WAITS = "waits"  # It is committed, and scored again once there is a model.
    OPEN = "open"  # Its commit is not done, or it may be stored again under other ids.
    VOID = "void"  # It was given up; its rows are left of a worker that died.


Fates = Callable[[Sequence[str]], Sequence[Fate]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long results are kept. None: for ever, without a bound."""

    keep_s: float | None = None
    max_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class Round:
    """What one round did."""

    merged: int = 0  # parts that became others
    rows: int = 0  # rows written
    removed: int = 0  # files
    expired: int = 0  # parts past their retention


class Compactor:
    """Compaction of one store of results. One process at a time works well; several lose swaps, not rows."""

    def __init__(
        self,
        sink: ParquetSink,
        fates: Fates,
        retention: Retention | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.sink = sink
        self._fates = fates
        self._retention = retention or Retention()
        self._now = now
        self._next: dict[str, float] = {}

    def round(self) -> Round:
        """Merges, seals, expires and removes what is due.

        Raises SinkUnavailable, StoreUnavailable, BadPayload."""
        tally = Round()
        for group in self._merges(self.sink.manifest()):
            self.merge(group, tally)
        if self._due("seal", 30.0):
            for group, seal in self._seals(self.sink.manifest()):
                (self._seal if seal else self.merge)(group, tally)
        if self._due("expire", 60.0):
            self._expire(self.sink.manifest(), tally)
            self._remove_gone(tally)
        if self._due("orphans", 900.0):
            self._remove_orphans(tally)
        return tally

    def _due(self, name: str, every_s: float) -> bool:
        """True once in so many seconds: these looks ask the ledger about many batches, or list the store."""
        if self._now() < self._next.get(name, 0.0):
            return False
        self._next[name] = self._now() + every_s
        return True

    # What is due

    def _merges(self, now: ResultManifest) -> list[list[Part]]:
        """Groups of parts of level 0, of one day each; all of their batches are committed."""
        loose = [part for part in now.parts if part.level == LOOSE]
        dead = [part for part in now.parts if not part.live]
        if len(loose) < MERGE_PARTS and not dead:
            return []
        ready = [
            part for part in loose if self._age_s(part) > MERGE_AGE_S and not self._open(part)
        ] if len(loose) >= MERGE_PARTS else []  # fmt: skip
        groups = [group for group in _grouped(ready) if len(group) > 1]
        grouped = {part.name for group in groups for part in group}
        void_parts = [part for part in dead if part.name not in grouped]
        return [*groups, void_parts] if void_parts else groups

    def _seals(self, now: ResultManifest) -> list[tuple[list[Part], bool]]:
        """Groups of parts of one day each, and whether they can be sealed or only be merged."""
        by_day: dict[str, list[Part]] = {}
        for part in now.parts:
            if self._age_s(part) > SEAL_AGE_S and part.live:
                by_day.setdefault(part.day, []).append(part)
        found: list[tuple[list[Part], bool]] = []
        for parts in by_day.values():
            rows = sum(part.live for part in parts)
            many = rows >= MAX_ROWS or len(parts) >= MERGE_PARTS
            due = many or any(self._age_s(part) > SEAL_AFTER_S for part in parts)
            if not due:
                continue
            fates = {part.name: set(self._fates_of(part)) for part in parts}
            final = [part for part in parts if fates[part.name] <= {Fate.FINAL}]
            found += [(group, True) for group in _grouped(final)]
            waiting = [part for part in parts if fates[part.name] - {Fate.FINAL} == {Fate.WAITS}]
            if len(waiting) >= WAITING_PARTS:
                found += [(group, False) for group in _grouped(waiting) if len(group) > 1]
        return found

    def _age_s(self, part: Part) -> float:
        return self._now() - part.written_ms / 1000

    def _open(self, part: Part) -> bool:
        fates = self._fates_of(part)
        if Fate.VOID in fates and self._age_s(part) > VOID_AFTER_S:
            self._drop_void(part, fates)
        return not set(fates) <= {Fate.FINAL, Fate.WAITS}

    def _fates_of(self, part: Part) -> Sequence[Fate]:
        return self._fates([one.batch_id for one in self.sink.batches(part)])

    def _drop_void(self, part: Part, fates: Sequence[Fate]) -> None:
        """Takes out the rows of batches that were given up; their writer died before it did so itself."""
        where = spans((one.batch_id, one.rows) for one in self.sink.batches(part))
        void = [span for span, fate in zip(where.values(), fates, strict=True) if fate is Fate.VOID]
        if self.sink.replace_parts([part], [part.dropping(void)]):
            logger().warning("results.void_batches", part=part.name, batches=len(void))

    # Rewriting

    def merge(self, group: list[Part], tally: Round) -> None:
        """Parts of one day as one part of level 1 that still knows its batches; parts without rows vanish."""
        note = self._note_gone(group)
        live = [part for part in group if part.live]
        if not live:
            tally.merged += len(group) if self.sink.replace_parts(group, [], note=note) else 0
            return
        entries = [entry for part in live for entry in _live_entries(part, self.sink.batches(part))]
        frame = pl.concat([self.sink.files.read(part) for part in live])
        new = self.sink.files.put(
            frame, day=live[0].day, level=MERGED, written_ms=max(part.written_ms for part in live)
        )
        name = f"{PREFIX}index/{uuid.uuid4().hex}.json"
        self.sink.objects.put(name, packed(Index(batches=tuple(entries))))
        if self.sink.replace_parts(group, [msgspec.structs.replace(new, index=name)], note=note):
            tally.merged += len(group)
            tally.rows += frame.height

    def _seal(self, group: list[Part], tally: Round) -> None:
        """Parts of one day as one sorted part that is final."""
        before = self.sink.manifest().days.get(group[0].day)
        note = self._note_gone(group, *([before.name] if before else []))
        frame = pl.concat([self.sink.files.read(part) for part in group]).sort(
            "workload", "template_id", "timestamp", maintain_order=True
        )
        new = self.sink.files.put(
            frame, day=group[0].day, level=SEALED, written_ms=max(part.written_ms for part in group)
        )
        new = msgspec.structs.replace(new, rates=put_rollup(self.sink, frame, new.day))
        if self.sink.replace_parts(group, [new], seal=True, note=note):
            tally.merged += len(group)
            tally.rows += frame.height

    def _note_gone(self, group: Iterable[Part], *more: str) -> str:
        """The object that names files which are about to be replaced."""
        name = f"{NOTES}{int(self._now() * 1000)}-{uuid.uuid4().hex}"
        files = [*more, *(key for part in group for key in part.objects)]
        self.sink.objects.put(name, "\n".join(files).encode())
        return name

    # Removing

    def _expire(self, now: ResultManifest, tally: Round) -> None:
        """Drops days of sealed parts past the retention, and the oldest ones where there are too many bytes.

        An import of old records stays as long as records of today: the later of both times counts."""
        days = dict(now.days)
        out: dict[str, Day] = {}
        if self._retention.keep_s is not None:
            before = self._now() - self._retention.keep_s
            out = {key: day for key, day in days.items() if _newest_s(day) < before}
        if self._retention.max_bytes is not None:
            size = sum(day.bytes for key, day in days.items() if key not in out)
            size += sum(part.bytes for part in now.parts)
            for key, day in sorted(days.items(), key=lambda item: (_newest_s(item[1]), item[0])):
                if size <= self._retention.max_bytes:
                    break
                if key not in out:
                    out[key] = day
                    size -= day.bytes
        if not out:
            return
        files = [part for day in out.values() for part in self.sink.sealed(day.name)]
        self._note_gone(files, *(day.name for day in out.values()))

        def edit(latest: ResultManifest) -> ResultManifest | None:
            days = {key: day for key, day in latest.days.items() if out.get(key) != day}
            return latest.edited(days=days) if len(days) < len(latest.days) else None

        self.sink.change(edit)
        tally.expired += len(files)
        logger().info("results.expired", days=sorted(out), parts=len(files))

    def _remove_gone(self, tally: Round) -> None:
        """Removes replaced files whose readers are done."""
        due = [one for one in self.sink.objects.found(NOTES) if self._now() - _noted_s(one.key) > GRACE_S]
        if not due:
            return
        needed = kept_keys(self.sink)
        for one in due:
            for key in (self.sink.objects.get(one.key) or b"").decode().split("\n"):
                if key and key not in needed:
                    self.sink.objects.delete(key)
                    tally.removed += 1
            self.sink.objects.delete(one.key)

    def _remove_orphans(self, tally: Round) -> None:
        """Removes files that no manifest names and that are too old to belong to a swap under way."""
        old = self._now() - ORPHAN_S
        found = [
            one.key
            for folder in ("lines", "rates_1h", "index", "days")
            for one in self.sink.objects.found(f"{PREFIX}{folder}/")
            if one.changed < old
        ]
        if found:
            noted = {
                key
                for one in self.sink.objects.found(NOTES)
                for key in (self.sink.objects.get(one.key) or b"").decode().split("\n")
            }
            needed = kept_keys(self.sink)
            for key in found:
                if key not in needed and key not in noted:
                    self.sink.objects.delete(key)
                    tally.removed += 1
        self.sink.objects.sweep(PREFIX)


def kept_keys(sink: ParquetSink) -> set[str]:
    """The keys that the manifest needs, as it is now. Raises StoreUnavailable, BadPayload."""
    now = sink.manifest()
    sealed = [part for day in now.days.values() for part in sink.sealed(day.name)]
    return {
        *(key for part in now.parts for key in part.objects),
        *(day.name for day in now.days.values()),
        *(key for part in sealed for key in part.objects),
    }


def rewrite_dropped(sink: ParquetSink) -> None:
    """Rewrites the parts of which some rows are no results any more, so that whole files are.

    Raises SinkUnavailable, StoreUnavailable."""
    compactor = Compactor(sink, lambda ids: [Fate.OPEN] * len(ids))
    for group in _grouped([part for part in sink.manifest().parts if part.dropped], live_only=False):
        compactor.merge(group, Round())


def vacuum(sink: ParquetSink) -> None:
    """Removes every file and row that is no result, at once. Only where nobody else reads or writes.

    Raises SinkUnavailable, StoreUnavailable."""
    rewrite_dropped(sink)
    needed = kept_keys(sink)
    for folder in ("lines", "rates_1h", "index", "days", "gone"):
        for one in list(sink.objects.found(f"{PREFIX}{folder}/")):
            if one.key not in needed:
                sink.objects.delete(one.key)


def _grouped(parts: Iterable[Part], *, live_only: bool = True) -> list[list[Part]]:
    """Parts of one day together, as many as may be read at once, in the order of their commits.

    `live_only`: False keeps parts without rows in a group of their own day as well."""
    groups: list[list[Part]] = []
    rows = size = 0
    for part in sorted(parts, key=lambda one: (one.day, one.written_ms, one.name)):
        if live_only and not part.live:
            continue
        fits = groups and groups[-1][0].day == part.day
        if not fits or rows + part.live > MAX_ROWS or size + part.bytes > MAX_BYTES:
            groups.append([])
            rows = size = 0
        groups[-1].append(part)
        rows, size = rows + part.live, size + part.bytes
    return groups


def _live_entries(part: Part, batches: Sequence[IndexEntry]) -> list[IndexEntry]:
    """The batches of a part with the rows that are left of them."""
    found = []
    for entry, (start, stop) in zip(
        batches, spans((b.batch_id, b.rows) for b in batches).values(), strict=True
    ):
        remaining = stop - start - sum(max(0, min(stop, b) - max(start, a)) for a, b in part.dropped)
        if remaining:
            found.append(IndexEntry(entry.batch_id, remaining, entry.written_ms))
    return found


def _newest_s(day: Day) -> float:
    return max(day.last_us / 1_000_000, day.written_ms / 1000)


def _noted_s(key: str) -> float:
    try:
        return int(key.removeprefix(NOTES).partition("-")[0]) / 1000
    except ValueError:
        raise StoreUnavailable(f"{key} is no note of replaced files; remove it") from None
