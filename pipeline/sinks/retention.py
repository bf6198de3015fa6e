"""Removal of results: those past their retention, replaced files, and files of killed writers.

Whole days leave, table by table (`results_keep`). A replaced file is removed after `GRACE_S`, so that a
reader with an older manifest still finds it, and not while somebody reads for long (`long_reading`). A file
that no manifest names is removed after `ORPHAN_S`.
"""

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from pipeline.errors import StoreUnavailable
from pipeline.logs import logger
from pipeline.sinks.manifest import (
    PREFIX,
    Day,
    ResultManifest,
    ResultTable,
)
from pipeline.sinks.parquet import ParquetSink
from pipeline.upkeep import FaultSeries, start_thread

GRACE_S: Final = 1_800.0
ORPHAN_S: Final = 7_200.0
NOTES: Final = f"{PREFIX}gone/"
# Readers that may need longer than GRACE_S say so. One that was killed delays the removal by READER_S.
READERS: Final = f"{PREFIX}readers/"
READER_S: Final = 3_600.0
RENEWED_S: Final = 600.0
# Where the objects lie that a manifest may need.
FOLDERS: Final = (*ResultTable, "index", "days")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long results are kept, and how large they get."""

    keep_s: Mapping[ResultTable, float] = field(default_factory=dict)  # a table that is absent stays for ever
    max_bytes: int | None = None  # None: no bound


@dataclass(slots=True, kw_only=True)
class Round:
    """The tally of one round of compaction."""

    merged: int = 0  # parts that became others
    rows: int = 0  # rows written
    removed: int = 0  # files
    expired: int = 0  # parts of which tables are past their retention


def expire(sink: ParquetSink, retention: Retention, now: float, tally: Round) -> None:
    """Drops the tables of days that are past their retention. Where there are too many bytes, the lines of
    the oldest days go first, and then their other tables.

    An import of old records stays as long as records of today: the later of both times counts. Raises
    SinkUnavailable, StoreUnavailable."""
    manifest = sink.manifest()
    out = _past_age(manifest, retention, now)
    if retention.max_bytes is not None:
        _past_size(manifest, retention.max_bytes, out)
    changed: dict[str, tuple[Day, Day | None]] = {}
    objects: list[str] = []
    for key, tables in out.items():
        if not tables:
            continue
        before = manifest.days[key]
        parts = sink.sealed(before.name)
        left = [part for one in parts if (part := one.without(tables)) is not None]
        changed[key] = (before, sink.put_day(key, left) if left else None)
        kept = {name for part in left for name in part.objects}
        objects += [before.name, *(name for part in parts for name in part.objects if name not in kept)]
        tally.expired += len(parts)
    if not changed:
        return
    note_replaced(sink, now, objects)

    def edit(latest: ResultManifest) -> ResultManifest | None:
        days = dict(latest.days)
        for key, (before, after) in changed.items():
            if days.get(key) == before:
                days.pop(key)
                days |= {key: after} if after else {}
        return latest.edited(days=days) if days != latest.days else None

    sink.change(edit)
    logger().info("results.expired", days={key: sorted(map(str, out[key])) for key in sorted(changed)})


def _past_age(manifest: ResultManifest, retention: Retention, now: float) -> dict[str, set[ResultTable]]:
    """The tables of each day that are older than they are kept."""
    return {
        key: {
            table
            for table in day.tables
            if table in retention.keep_s and _newest_s(day) < now - retention.keep_s[table]
        }
        for key, day in manifest.days.items()
    }


def _past_size(manifest: ResultManifest, max_bytes: int, out: dict[str, set[ResultTable]]) -> None:
    """Adds tables of the oldest days until the others have no more than so many bytes."""
    total = sum(part.stored_bytes for part in manifest.parts)
    total += sum(day.bytes + day.table_bytes for day in manifest.days.values())
    total -= sum(day.bytes for key, day in manifest.days.items() if ResultTable.LINES in out[key])
    oldest = sorted(manifest.days.items(), key=lambda item: (_newest_s(item[1]), item[0]))
    for key, day in oldest:
        if total > max_bytes and ResultTable.LINES not in out[key]:
            out[key] |= {ResultTable.LINES} & set(day.tables)
            total -= day.bytes
    for key, day in oldest:
        if total > max_bytes:
            out[key] |= set(day.tables)
            total -= day.table_bytes


def note_replaced(sink: ParquetSink, now: float, keys: Iterable[str]) -> str:
    """Writes the object that names objects which are about to be replaced; its key. Raises
    StoreUnavailable."""
    name = f"{NOTES}{int(now * 1000)}-{uuid.uuid4().hex}"
    sink.objects.put(name, "\n".join(keys).encode())
    return name


def remove_replaced(sink: ParquetSink, now: float, tally: Round) -> None:
    """Removes replaced objects whose readers are done. Raises StoreUnavailable."""
    due = [one for one in sink.objects.found(NOTES) if now - _noted_s(one.key) > GRACE_S]
    if not due or _is_read(sink, now):
        return
    needed = kept_keys(sink)
    for one in due:
        for key in (sink.objects.get(one.key) or b"").decode().split("\n"):
            if key and key not in needed:
                sink.objects.delete(key)
                tally.removed += 1
        sink.objects.delete(one.key)


@contextmanager
def long_reading(sink: ParquetSink) -> Iterator[None]:
    """While it lasts, replaced files stay, however long the reader needs.

    A reader that may not write to the store gets GRACE_S."""
    key, over = f"{READERS}{uuid.uuid4().hex}", threading.Event()

    def renew() -> None:
        faults = FaultSeries("store.reading_not_noted", StoreUnavailable)
        while True:
            with faults.outlived():
                sink.objects.put(key, b"")
            began.set()
            if over.wait(RENEWED_S):
                break
        with suppress(StoreUnavailable):
            sink.objects.delete(key)

    began = threading.Event()
    thread = start_thread("long-reading", renew)
    began.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_read(sink: ParquetSink, now: float) -> bool:
    """Whether somebody reads for long; forgets readers that were killed."""
    live = False
    for one in list(sink.objects.found(READERS)):
        if now - one.changed < READER_S:
            live = True
        else:
            sink.objects.delete(one.key)
    return live


def remove_orphans(sink: ParquetSink, now: float, tally: Round) -> None:
    """Removes objects that no manifest names and that are too old to belong to a swap under way.

    Raises StoreUnavailable."""
    old = now - ORPHAN_S
    orphans = [
        one.key for folder in FOLDERS for one in sink.objects.found(f"{PREFIX}{folder}/") if one.changed < old
    ]
    if orphans:
        noted = {
            key
            for one in sink.objects.found(NOTES)
            for key in (sink.objects.get(one.key) or b"").decode().split("\n")
        }
        needed = kept_keys(sink)
        for key in orphans:
            if key not in needed and key not in noted:
                sink.objects.delete(key)
                tally.removed += 1
    sink.objects.sweep(PREFIX)


def kept_keys(sink: ParquetSink) -> set[str]:
    """The keys that the manifest needs, as it is now. Raises StoreUnavailable, BadPayload."""
    now = sink.manifest()
    sealed = [part for day in now.days.values() for part in sink.sealed(day.name)]
    return {
        *(key for part in now.parts for key in part.objects),
        *(day.name for day in now.days.values()),
        *(key for part in sealed for key in part.objects),
    }


def _newest_s(day: Day) -> float:
    return max(day.last_us / 1_000_000, day.written_ms / 1000)


def _noted_s(key: str) -> float:
    try:
        return int(key.removeprefix(NOTES).partition("-")[0]) / 1000
    except ValueError:
        raise StoreUnavailable(f"{key} is no note of replaced files; remove it") from None
