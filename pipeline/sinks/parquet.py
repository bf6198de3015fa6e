"""Results as Parquet files in the store, listed by one manifest (sinks/manifest.py).

A write puts its file and then swaps the manifest by compare-and-set, so readers see all of it or nothing. The
swap also takes out earlier rows of the same batches, so writes are idempotent and delivery is exactly once in
effect. Before each try of a swap the writer checks that it still owns the batches. Every change of another
writer changes the manifest, so a writer that was stalled after its check loses the swap and checks again.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from pipeline.errors import SinkUnavailable, StoreUnavailable
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.manifest import (
    KEY,
    LOOSE,
    PREFIX,
    Day,
    IndexEntry,
    Part,
    ResultManifest,
    ResultTable,
    SealedParts,
    TableFile,
    day_of,
    gone,
    index,
    manifest,
    packed,
    sealed,
    spans,
)
from pipeline.sinks.part_files import PartFiles, lazily
from pipeline.sinks.sink import Last, at_once
from pipeline.store.folder import Folder
from pipeline.store.objects import Objects
from pipeline.units import epoch_us

# A swap takes milliseconds in a folder and tens of them in a bucket. Many writers at once lose some turns.
SWAP_S: Final = 20.0
# Polars raises several unrelated classes on damaged files, and its panics are no Exceptions.
DAMAGED: Final = (pl.exceptions.PolarsError, pl.exceptions.PanicException, FileNotFoundError)

# The next manifest; None where the change is in it already.
Edit = Callable[[ResultManifest], ResultManifest | None]


class ParquetSink:
    """Writes to and reads back from one store of results. Not thread-safe.

    `place`: a folder, or the objects of a store. `cache`: where copies lie of files in a bucket."""

    def __init__(self, place: Path | Objects, cache: Path | None = None) -> None:
        self.objects: Objects = Folder(place) if isinstance(place, Path) else place
        self.files = PartFiles(self.objects, cache)
        self._held: tuple[ResultManifest, str | None] | None = None  # as last read or written here
        self._was_there = False  # a manifest
        self._indexes: dict[str, tuple[IndexEntry, ...]] = {}
        self._days: dict[str, tuple[Part, ...]] = {}
        self._named: tuple[frozenset[str], frozenset[str]] = frozenset(), frozenset()

    # The sink

    def write(self, batch_id: str, frame: pl.DataFrame, *, last: Last = at_once) -> None:
        """Stores a batch's results (RESULT_SCHEMA); replaces earlier ones of this id.

        `last` is called before each try of the swap. Raises SinkUnavailable for a full disk, a store that is
        away or a missing right, and the errors of `last`."""
        self.write_all([(batch_id, frame)], last=last)

    def write_all(self, batches: Sequence[tuple[str, pl.DataFrame]], *, last: Last = at_once) -> None:
        """Stores the results of several batches in one commit; `write` says the rest."""
        ids = [batch_id for batch_id, _ in batches]
        with self._explained():
            new = self._put(batches)

            def edit(now: ResultManifest) -> ResultManifest | None:
                if any(part.name == new[0].name for part in now.parts):
                    return None  # the answer to our own swap was lost
                stamp = _now_ms()
                stamped = [msgspec.structs.replace(part, written_ms=stamp) for part in new]
                return now.edited(parts=[*self._less(now, self._places(now, ids)), *stamped])

            try:
                self._change(edit, last)
            except StoreUnavailable:  # the swap may have happened; else compaction removes the files
                raise
            except Exception:
                for part in new:
                    with suppress(StoreUnavailable):
                        self.objects.delete(part.name)
                raise

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results in the order they were written, None when there are none.

        Raises SinkUnavailable."""
        with self._explained(reading=True):
            for part, span in self._places(self.manifest(), [batch_id]):
                rows = self.files.read(part, span)
                if not rows.is_empty():
                    return rows if rows["workload"][0] == workload else None
        return None

    def by_part(self, batch_ids: Collection[str]) -> Iterator[list[tuple[str, pl.DataFrame]]]:
        """The stored results of these batches, with those of one part at once: cheaper than one by one.

        Raises SinkUnavailable."""
        wanted = set(batch_ids)
        with self._explained(reading=True):
            for part in self.manifest().parts:
                where = spans((one.batch_id, one.rows) for one in self.batches(part))
                if wanted.isdisjoint(where):
                    continue
                rows, at, found = self.files.read(part), 0, []
                for batch_id, span in where.items():
                    height = part.live_in(span)
                    if height and batch_id in wanted:
                        found.append((batch_id, rows.slice(at, height)))
                    at += height
                if found:
                    yield found

    def remove(self, batch_id: str, workload: str, *, last: Last = at_once) -> None:  # noqa: ARG002
        """Removes the results of a batch. Raises SinkUnavailable and the errors of `last`."""
        with self._explained():
            # Also where nothing is to be removed: a stalled writer of this batch must lose its swap.
            self._change(lambda now: now.edited(parts=self._less(now, self._places(now, [batch_id]))), last)

    # Batches that Redis has forgotten (sinks/forgotten.py)

    def latest(self, within_s: float, limit: int) -> list[str]:
        """The newest `limit` batches, oldest first, not older than `within_s` before the newest.

        Raises SinkUnavailable."""
        with self._explained(reading=True):
            found = sorted((at, batch_id) for batch_id, at in self.written(self.manifest()).items())
        after = found[-1][0] - within_s * 1000 if found else 0.0
        return [batch_id for at, batch_id in found[-limit:] if at >= after]

    def by_age(self, batch_ids: Sequence[str]) -> list[str]:
        """These batches, newest first, less those that are gone. Raises SinkUnavailable."""
        with self._explained(reading=True):
            written = self.written(self.manifest())
        there = [batch_id for batch_id in batch_ids if batch_id in written]
        return sorted(there, key=lambda batch_id: -written[batch_id])

    def record_ids(self, batch_id: str) -> list[str]:
        """The records of a batch, none when it is gone or its file is damaged. Raises SinkUnavailable."""
        with self._explained(reading=True):
            for part, span in self._places(self.manifest(), [batch_id]):
                with suppress(*DAMAGED):  # readers of results report the damage
                    return list(self.files.read(part, span)["record_id"])
        return []

    def take_out(self, batch_id: str, record_ids: Collection[str] | None, *, last: Last = at_once) -> bool:
        """Removes these records (None: all) of a batch; True if none of it is left.

        Of a damaged file a batch only goes as a whole. Raises SinkUnavailable and the errors of `last`."""
        remaining = 0

        def edit(now: ResultManifest) -> ResultManifest | None:
            nonlocal remaining
            remaining, out = 0, []
            for part, span in self._places(now, [batch_id]):
                ranges = self._rows_of(part, span, record_ids)
                remaining += part.dropping(ranges).live_in(span)
                out += [(part, one) for one in ranges]
            return now.edited(parts=self._less(now, out)) if out else None

        with self._explained():
            self._change(edit, last)
        return remaining == 0

    # Reading

    def scan(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        workloads: Collection[str] | None = None,
    ) -> pl.LazyFrame:
        """The results, lazily (RESULT_SCHEMA), less parts that hold nothing of this span and these workloads.

        Raises SinkUnavailable."""
        return self.lazy(self.parts(since=since, until=until, workloads=workloads))

    def lazy(self, parts: Iterable[Part]) -> pl.LazyFrame:
        """The results in these parts, lazily, in their order. Raises SinkUnavailable."""
        with self._explained(reading=True):
            return self.files.lazy(parts)

    def located(self, parts: Iterable[Part]) -> list[tuple[Part, Path]]:
        """The parts that have results, with their files on this machine. Raises SinkUnavailable."""
        with self._explained(reading=True):
            return self.files.located(parts)

    def missing_rows(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        workloads: Collection[str] | None = None,
    ) -> int:
        """How many stored rows were in files that are missing, of parts that may hold results of this span
        and these workloads. Raises SinkUnavailable."""
        with self._explained(reading=True):
            parts = self.parts(since=since, until=until, workloads=workloads)
            return sum(part.live for part in parts if part.live and not self.files.has(part))

    def table_file(self, one: TableFile) -> Path:
        """The object of a table on this machine. Raises SinkUnavailable."""
        with self._explained(reading=True):
            return self.files.local(one.key, one.bytes)

    def findings(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        workloads: Collection[str] | None = None,
    ) -> pl.LazyFrame:
        """The anomalous results, lazily (RESULT_SCHEMA), less parts that hold nothing of this span and these
        workloads. Also those whose lines have expired.

        Raises SinkUnavailable."""
        table = ResultTable.FINDINGS
        files, others = [], []
        for part in self.parts(since=since, until=until, workloads=workloads, table=table):
            if table in part.tables:
                files.append(part.tables[table])
            elif not part.tables:  # with other tables it has no findings
                others.append(part)
        found = self.lazy(others)
        if files:
            found = pl.concat([self.lazy_table(files, RESULT_SCHEMA), found])
        return found.filter(pl.col("anomalous"))

    def lazy_table(self, files: Sequence[TableFile], schema: Mapping[str, Any]) -> pl.LazyFrame:
        """The rows of a table's objects, lazily. Raises SinkUnavailable."""
        with self._explained(reading=True):
            return lazily([self.files.local(one.key, one.bytes) for one in files], schema)

    def parts(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        workloads: Collection[str] | None = None,
        table: ResultTable | None = ResultTable.LINES,
    ) -> list[Part]:
        """The parts that may hold results of the span [since, until) and these workloads, the oldest first.

        For another table than lines (None: any): also those whose lines have expired. Raises
        SinkUnavailable."""
        first, stop = (None if at is None else epoch_us(at) for at in (since, until))
        with self._explained(reading=True):
            now = self.manifest()
            found = list(now.parts)
            for day in now.days.values():
                if not (
                    (first is not None and day.last_us < first) or (stop is not None and day.first_us >= stop)
                ):
                    found += self.sealed(day.name)
        there = [part for part in found if part.live or table in part.tables or (not table and part.tables)]
        chosen = [part for part in there if part.may_hold(first, stop, workloads)]
        return sorted(chosen, key=lambda part: (part.written_ms, part.name))

    def workloads(self) -> list[str]:
        """The names of all workloads that have results. Raises SinkUnavailable."""
        parts = self.parts(table=None)
        found = {name for part in parts for name in part.workloads}
        unnamed = [part for part in parts if not part.workloads]
        found |= _names_in(self.lazy(part for part in unnamed if not part.tables))
        return sorted(found | self._names_of(part for part in unnamed if part.tables))

    def _names_of(self, parts: Iterable[Part]) -> frozenset[str]:
        """The workloads of sealed parts. Their files never change, so only new ones are read.

        The hours of a part name its workloads in the fewest rows; the findings do when those have expired."""
        files = [part.tables.get(ResultTable.RATES_1H) or next(iter(part.tables.values())) for part in parts]
        keys = frozenset(file.key for file in files)
        known, names = self._named
        if not known <= keys:  # names may have gone with files
            known, names = frozenset(), frozenset()
        new = [file for file in files if file.key not in known]
        if new:
            names |= _names_in(self.lazy_table(new, {"workload": pl.String}))
        self._named = keys, names
        return names

    def manifest(self) -> ResultManifest:
        """The manifest as it is now. Raises StoreUnavailable, BadPayload, TooNew.

        One that was read before is absent only where its disk is not mounted, or somebody deleted it."""
        return self._read()[0]

    def expect(self) -> None:
        """Results were stored here, so an absent manifest is a fault from now on. Raises SinkUnavailable."""
        self._was_there = True
        with self._explained():
            self._read()

    def sealed(self, name: str) -> tuple[Part, ...]:
        """The sealed parts that a day's object lists. Raises StoreUnavailable, BadPayload."""
        if name not in self._days:
            blob = self.objects.get(name)
            self._days[name] = sealed(blob, f"{name} of {self.objects.url}")
        return self._days[name]

    def batches(self, part: Part) -> tuple[IndexEntry, ...]:
        """The batches of a part of level 0 or 1, in the order of its rows.

        Raises StoreUnavailable, BadPayload."""
        if part.level == LOOSE:
            return tuple(IndexEntry(one, rows, part.written_ms) for one, rows in part.batches)
        if part.index not in self._indexes:
            blob = self.objects.get(part.index)
            self._indexes[part.index] = index(blob, f"{part.index} of {self.objects.url}")
        return self._indexes[part.index]

    # Changes of the manifest

    def replace_parts(
        self, old: Sequence[Part], new: Sequence[Part], *, seal: bool = False, note: str = ""
    ) -> bool:
        """Swaps parts of the manifest for others; False if one of the old ones has changed meanwhile.

        `seal`: the new ones are sealed. `gone`: an object that names the old files, for the sweep. Raises
        SinkUnavailable."""
        unchanged = False

        def edit(now: ResultManifest) -> ResultManifest | None:
            nonlocal unchanged
            there = {part.name: part for part in now.parts}
            unchanged = all(there.get(part.name) == part for part in old)
            if not unchanged:
                return None
            out = {part.name for part in old}
            others = [part for part in now.parts if part.name not in out]
            if not seal:
                return now.edited(parts=[*others, *new])
            days = dict(now.days)
            for day in {part.day for part in new}:
                before = self.sealed(days[day].name) if day in days else ()
                listed = (*before, *(part for part in new if part.day == day))
                days[day] = self.put_day(day, listed)
            return now.edited(parts=others, days=days)

        with self._explained():
            self._change(edit, at_once)
        if not unchanged and note:
            with suppress(StoreUnavailable):
                self.objects.delete(note)
        return unchanged

    def put_day(self, day: str, parts: Sequence[Part]) -> Day:
        """Writes a new object that lists the sealed parts of a day; a manifest has to name it yet.

        Raises StoreUnavailable."""
        name = f"{PREFIX}days/{day}-{random.getrandbits(64):016x}.json"
        self.objects.put(name, packed(SealedParts(parts=tuple(parts))))
        return day_of(name, parts)

    def change(self, edit: Edit) -> None:
        """Swaps the manifest for an edited one. Raises SinkUnavailable."""
        with self._explained():
            self._change(edit, at_once)

    def _change(self, edit: Edit, last: Last) -> None:
        until = time.monotonic() + SWAP_S
        fresh = False
        while True:
            if self._held is None:
                self._held, fresh = self._read(), True
            now, tag = self._held
            changed = edit(now)
            if changed is None:
                if fresh:
                    return
                self._held = None  # it may be old
                continue
            last()
            try:
                new_tag = self.objects.swap(KEY, packed(changed), tag)
            except BaseException:
                self._held = None
                raise
            if new_tag is not None:
                self._held, self._was_there = (changed, new_tag), True
                return
            self._held, fresh = None, False
            if time.monotonic() > until:
                raise too_many_writers(f"the store {self.objects.url}")
            if not isinstance(self.objects, Folder):
                time.sleep(random.uniform(0.0, 0.05))  # noqa: S311 - no secret

    def _read(self) -> tuple[ResultManifest, str | None]:
        found = self.objects.tagged(KEY)
        if found is None and self._was_there:
            raise gone(self.objects.url)
        blob, tag = (None, None) if found is None else found
        self._was_there = tag is not None
        if self._held is not None and self._held[1] == tag:
            return self._held
        self._held = (manifest(blob, self.objects.url), tag)
        indexes = {part.index for part in self._held[0].parts}
        self._indexes = {name: one for name, one in self._indexes.items() if name in indexes}
        days = {day.name for day in self._held[0].days.values()}
        self._days = {name: one for name, one in self._days.items() if name in days}
        return self._held

    def _put(self, batches: Sequence[tuple[str, pl.DataFrame]]) -> list[Part]:
        """One new part for each day that batches begin on."""
        by_day: dict[str, list[tuple[str, pl.DataFrame]]] = {}
        for batch_id, frame in batches:
            by_day.setdefault(frame["timestamp"][0].isoformat()[:10], []).append((batch_id, frame))
        found = []
        for day, some in by_day.items():
            frames = [frame for _, frame in some]
            rows = frames[0] if len(frames) == 1 else pl.concat(frames)
            part = self.files.put(rows, day=day, level=LOOSE, written_ms=0)
            ids = tuple((batch_id, frame.height) for batch_id, frame in some)
            found.append(msgspec.structs.replace(part, batches=ids))
        return found

    def _places(self, now: ResultManifest, batch_ids: Collection[str]) -> list[tuple[Part, tuple[int, int]]]:
        """Where live rows of these batches are."""
        wanted, found = set(batch_ids), []
        for part in now.parts:
            if part.level == LOOSE and wanted.isdisjoint(one for one, _ in part.batches):
                continue
            where = spans((one.batch_id, one.rows) for one in self.batches(part))
            for batch_id in wanted & where.keys():
                if part.live_in(where[batch_id]):
                    found.append((part, where[batch_id]))
        return found

    def written(self, now: ResultManifest) -> dict[str, int]:
        """When each batch was written that the parts of levels 0 and 1 hold, in milliseconds since 1970.

        Raises StoreUnavailable, BadPayload."""
        found: dict[str, int] = {}
        for part in now.parts:
            where = spans((one.batch_id, one.rows) for one in self.batches(part))
            found |= {
                one.batch_id: one.written_ms
                for one in self.batches(part)
                if part.live_in(where[one.batch_id])
            }
        return found

    def _rows_of(
        self, part: Part, span: tuple[int, int], record_ids: Collection[str] | None
    ) -> list[tuple[int, int]]:
        """The ranges of these records (None: all) in a range of a part; none when its file is damaged."""
        if record_ids is None:
            return [span]
        try:
            # With dropped rows, so that rows keep their numbers.
            rows = self.files.read(msgspec.structs.replace(part, dropped=()), span)["record_id"]
        except DAMAGED:
            return []
        return [(span[0] + at, span[0] + at + 1) for at in rows.is_in(list(record_ids)).arg_true()]

    @staticmethod
    def _less(now: ResultManifest, out: Sequence[tuple[Part, tuple[int, int]]]) -> list[Part]:
        """The parts without these rows."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for part, span in out:
            ranges.setdefault(part.name, []).append(span)
        return [part.dropping(ranges[part.name]) if part.name in ranges else part for part in now.parts]

    @contextmanager
    def _explained(self, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except (StoreUnavailable, OSError) as exc:
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            url = self.objects.url
            raise SinkUnavailable(
                f"results cannot be read from {url} ({why}); give the right to read them, or bring the store "
                "back"
                if reading
                else f"results cannot be written to {url} ({why}); nothing is lost and writing goes on by "
                "itself"
            ) from exc


def too_many_writers(place: str) -> StoreUnavailable:
    """Of a manifest that other writers have swapped for SWAP_S."""
    return StoreUnavailable(
        f"{place} has so many writers that none of {SWAP_S:g} s came through; use fewer store processes"
    )


def _names_in(rows: pl.LazyFrame) -> set[str]:
    return set(rows.select(pl.col("workload").drop_nulls().unique()).collect()["workload"])


def _now_ms() -> int:
    return int(time.time() * 1000)
