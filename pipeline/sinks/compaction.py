"""Compaction: many small parts become few large ones, beside the commits and in bounded memory.

    level 0, a commit --merge--> level 1, in the order of commits --seal--> level 2, sorted, of one day

A line is rewritten at most twice. Batches that may still change are never sealed: those that wait for a
model, those that the ledger has not finished, and those that Redis has forgotten. A part is replaced only if
nothing in it has changed meanwhile. Replaced files are removed later (retention.py).
"""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
import polars as pl

from pipeline.logs import logger
from pipeline.sinks.manifest import (
    LOOSE,
    MERGED,
    PREFIX,
    SEALED,
    Index,
    IndexEntry,
    Part,
    ResultManifest,
    packed,
    spans,
)
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.retention import (
    FOLDERS,
    Retention,
    Round,
    expire,
    kept_keys,
    note_replaced,
    remove_orphans,
    remove_replaced,
)
from pipeline.sinks.rollups import put_tables

# Parts of level 0 that begin a merge: a query reads a hundred small files about as fast as one large one.
MERGE_PARTS: Final = 64
MERGE_AGE_S: Final = 2.0  # Younger commits may be in the hands of their writers.
# The rows that one merge reads: about 230 MiB of memory for lines of usual length.
MAX_ROWS: Final = 300_000
FEW_ROWS: Final = 50_000  # where other work needs the memory: 140 MiB
MAX_BYTES: Final = 20 << 20  # Compressed.
SEAL_AGE_S: Final = 600.0  # Past the time in which Redis may forget a batch (sinks/forgotten.py).
SEAL_AFTER_S: Final = 3_600.0  # An older part is sealed however few rows there are.
# Parts of level 1 that cannot be sealed are merged among themselves when there are so many.
WAITING_PARTS: Final = 32
VOID_AFTER_S: Final = 60.0
ORDER: Final = ("workload", "template_id", "timestamp")  # of the rows of a sealed part


class Fate(StrEnum):
    """What may still become of a stored batch."""

    FINAL = "final"  # Nothing.
    WAITS = "waits"  # It is committed, and scored again once there is a model.
    OPEN = "open"  # Its commit is not done, or it may be stored again under other ids.
    VOID = "void"  # It was given up; its rows are left of a worker that died.


Fates = Callable[[Sequence[str]], Sequence[Fate]]


class Compactor:
    """Compaction of one store of results. One process at a time works well; several lose swaps, not rows."""

    def __init__(
        self,
        sink: ParquetSink,
        fates: Fates,
        retention: Retention | None = None,
        *,
        seals: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`seals`: False leaves parts unsorted and merges FEW_ROWS at a time, to spare memory."""
        self.sink = sink
        self._seals_parts = seals
        self._max_rows = MAX_ROWS if seals else FEW_ROWS
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
        if self._seals_parts and self._due("seal", 30.0):
            for group, seal in self._seals(self.sink.manifest()):
                (self._seal if seal else self.merge)(group, tally)
        if self._due("expire", 60.0):
            expire(self.sink, self._retention, self._now(), tally)
            remove_replaced(self.sink, self._now(), tally)
        if self._due("orphans", 900.0):
            remove_orphans(self.sink, self._now(), tally)
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
        groups = [group for group in _grouped(ready, self._max_rows) if len(group) > 1]
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
        note = note_replaced(self.sink, self._now(), _keys(group))
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
        note = note_replaced(self.sink, self._now(), [*_keys(group), *([before.name] if before else [])])
        frame = _ordered(pl.concat([self.sink.files.read(part) for part in group]))
        new = self.sink.files.put(
            frame, day=group[0].day, level=SEALED, written_ms=max(part.written_ms for part in group)
        )
        new = msgspec.structs.replace(new, tables=put_tables(self.sink, frame, new.day))
        if self.sink.replace_parts(group, [new], seal=True, note=note):
            tally.merged += len(group)
            tally.rows += frame.height


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
    for folder in (*FOLDERS, "gone", "usage"):  # the records of GPU use are no results
        for one in list(sink.objects.found(f"{PREFIX}{folder}/")):
            if one.key not in needed:
                sink.objects.delete(one.key)


def _ordered(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows sorted by ORDER; equal ones stay in their order. Takes the columns out of `rows`.

    NumPy sorts the keys as numbers in a tenth of the time of `sort`: rows come nearly in order."""
    names = rows["workload"].unique().sort()
    places = pl.Series(range(names.len()), dtype=pl.Int64)
    minimum = pl.lit(-(2**63), dtype=pl.Int64)  # nulls come first
    keys = rows.select(
        pl.col("workload").replace_strict(names, places, return_dtype=pl.Int64),
        pl.col("template_id").fill_null(minimum),
        pl.col("timestamp").to_physical().fill_null(minimum),
    )
    order = pl.Series(np.lexsort([keys[name].to_numpy() for name in reversed(ORDER)]))
    # Rows of one chunk are gathered in a tenth of the time that rows of a hundred take. Column by column,
    # because a whole frame would be there three times.
    return pl.DataFrame([rows.drop_in_place(name).rechunk().gather(order) for name in rows.columns])


def _grouped(parts: Iterable[Part], max_rows: int = MAX_ROWS, *, live_only: bool = True) -> list[list[Part]]:
    """Parts of one day together, at most `max_rows` unless one part has more, in the order of their commits.

    `live_only`: False keeps parts without rows in a group of their own day as well."""
    groups: list[list[Part]] = []
    rows = size = 0
    for part in sorted(parts, key=lambda one: (one.day, one.written_ms, one.name)):
        if live_only and not part.live:
            continue
        fits = groups and groups[-1][0].day == part.day
        if not fits or rows + part.live > max_rows or size + part.bytes > MAX_BYTES:
            groups.append([])
            rows = size = 0
        groups[-1].append(part)
        rows, size = rows + part.live, size + part.bytes
    return groups


def _live_entries(part: Part, batches: Sequence[IndexEntry]) -> list[IndexEntry]:
    """The batches of a part with the rows that are left of them."""
    found = []
    for entry, span in zip(batches, spans((b.batch_id, b.rows) for b in batches).values(), strict=True):
        remaining = part.live_in(span)
        if remaining:
            found.append(IndexEntry(entry.batch_id, remaining, entry.written_ms))
    return found


def _keys(group: Iterable[Part]) -> list[str]:
    return [key for part in group for key in part.objects]
