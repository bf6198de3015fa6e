"""The manifest of stored results: which files hold them, changed as a whole by compare-and-set.

A *part* is an immutable Parquet file. Level 0 is what one commit wrote, level 1 merges parts of level 0,
level 2 is sorted and sealed. Parts of levels 0 and 1 know the rows of each batch, so that a batch can be
read, replaced and removed by its id. A change of stored rows drops row ranges in the manifest and adds a
part. Readers leave dropped rows out; compaction writes them away later.

The manifest lists the parts of levels 0 and 1. Sealed parts stand in an immutable object per day, which the
manifest names, so that its size does not grow with the months.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from pipeline.errors import BadPayload, StoreUnavailable, TooNew
from pipeline.store.objects import Objects

T = TypeVar("T")
VERSION: Final = 3
PREFIX: Final = "v2/"
KEY: Final = f"{PREFIX}manifest.json"
MAX_NAMES: Final = 32  # workloads that a part names; one with more may hold any
LOOSE, MERGED, SEALED = 0, 1, 2  # levels


class ResultTable(StrEnum):
    """A table of stored results. Each has a retention of its own; the value names its folder in the store."""

    LINES = "lines"
    FINDINGS = "findings"  # anomalous rows of sealed lines; all columns
    RATES_5M = "rates_5m"  # counts of sealed lines by five minutes, workload and template
    RATES_1H = "rates_1h"  # the same by the hour, with first and last record


class TableFile(msgspec.Struct, frozen=True, array_like=True):
    """The object with the rows that a table has of one sealed part."""

    key: str
    bytes: int


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file. Times are of its records, in microseconds since 1970; `written_ms` is that of its newest
    commit."""

    name: str  # the key of its object
    day: str  # UTC day of its first record
    rows: int
    bytes: int
    first_us: int
    last_us: int
    written_ms: int
    level: int = LOOSE
    workloads: tuple[str, ...] = ()  # sorted; none: it may hold any
    batches: tuple[tuple[str, int], ...] = ()  # level 0: ids and their rows, in the order of the file
    index: str = ""  # level 1: the object that holds its batches
    tables: dict[ResultTable, TableFile] = {}  # level 2: its findings, where there are some, and its rates
    expired: bool = False  # level 2: its lines are past their retention, and their file is removed
    elided: bool = False  # level 2: messages that end their `raw` are left out (part_files.MESSAGE_AT)
    dropped: tuple[tuple[int, int], ...] = ()  # sorted row ranges [start, stop) that are no results any more

    @property
    def objects(self) -> tuple[str, ...]:
        """The keys of all its objects."""
        lines = "" if self.expired else self.name
        return tuple(key for key in (lines, self.index, *(one.key for one in self.tables.values())) if key)

    @property
    def live(self) -> int:
        """Lines that are results."""
        return 0 if self.expired else self.live_in((0, self.rows))

    def live_in(self, span: tuple[int, int]) -> int:
        """Rows of a range that are not dropped."""
        start, stop = span
        return stop - start - sum(max(0, min(stop, b) - max(start, a)) for a, b in self.dropped)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its lines and tables."""
        return (0 if self.expired else self.bytes) + sum(one.bytes for one in self.tables.values())

    def without(self, tables: Collection[ResultTable]) -> "Part | None":
        """The sealed part less these tables; None where nothing would be left."""
        rest = {name: one for name, one in self.tables.items() if name not in tables}
        expired = self.expired or ResultTable.LINES in tables
        return msgspec.structs.replace(self, tables=rest, expired=expired) if rest or not expired else None

    def dropping(self, ranges: Iterable[tuple[int, int]]) -> "Part":
        """The part without these rows as well."""
        return msgspec.structs.replace(self, dropped=merged((*self.dropped, *ranges)))

    def may_hold(self, since_us: int | None, until_us: int | None, workloads: Iterable[str] | None) -> bool:
        """False if no record of this span [since, until) and these workloads is in it."""
        if (since_us is not None and self.last_us < since_us) or (
            until_us is not None and self.first_us >= until_us
        ):
            return False
        return workloads is None or not self.workloads or not set(self.workloads).isdisjoint(workloads)


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """The sealed parts of a day: the object that lists them, and their sums."""

    name: str
    parts: int
    rows: int  # lines
    bytes: int  # of lines
    table_bytes: int = 0  # of the other tables
    tables: tuple[ResultTable, ...] = (ResultTable.LINES,)  # that are there
    first_us: int
    last_us: int
    written_ms: int


class ResultManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored. `edits` counts the swaps, so that no two manifests of a store are alike."""

    v: int = VERSION
    edits: int = 0
    parts: tuple[Part, ...] = ()  # levels 0 and 1
    days: dict[str, Day] = {}  # by UTC day

    def totals(self) -> dict[str, int]:
        """Lines (`rows`), files with lines, and bytes of all tables."""
        days = self.days.values()
        return {
            "rows": sum(part.live for part in self.parts) + sum(day.rows for day in days),
            "files": len(self.parts) + sum(day.parts for day in days if day.rows),
            "bytes": sum(part.bytes for part in self.parts) + sum(d.bytes + d.table_bytes for d in days),
        }

    def edited(
        self, *, parts: Iterable[Part] | None = None, days: Mapping[str, Day] | None = None
    ) -> "ResultManifest":
        """The next manifest."""
        return ResultManifest(
            edits=self.edits + 1,
            parts=self.parts if parts is None else tuple(parts),
            days=self.days if days is None else dict(sorted(days.items())),
        )


class SealedParts(msgspec.Struct, frozen=True, kw_only=True):
    """The object of a day."""

    v: int = VERSION
    parts: tuple[Part, ...] = ()


class IndexEntry(msgspec.Struct, frozen=True, array_like=True):
    """A batch of a merged part."""

    batch_id: str
    rows: int
    written_ms: int


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The object of a merged part: its batches, in the order of the file."""

    v: int = VERSION
    batches: tuple[IndexEntry, ...] = ()


_manifest: Final = msgspec.json.Decoder(ResultManifest)
_sealed: Final = msgspec.json.Decoder(SealedParts)
_index: Final = msgspec.json.Decoder(Index)


class _Versioned(msgspec.Struct):
    v: int


def packed(value: ResultManifest | SealedParts | Index) -> bytes:
    """The value as JSON."""
    return msgspec.json.encode(value)


def manifest(blob: bytes | None, where: str) -> ResultManifest:
    """The inverse of `packed`; a new one for a store without. Raises BadPayload, TooNew."""
    return ResultManifest() if blob is None else versioned(_manifest, blob, f"the manifest of {where}")


def gone(where: str) -> StoreUnavailable:
    """Of results that were there before: an empty answer would look like a pipeline without lines."""
    return StoreUnavailable(
        f"the results in {where} were there before, and are gone; mount their folder, or restore them; after their "
        "loss `logweir store adopt` goes on without them"
    )


def begin_manifest(objects: Objects) -> None:
    """Gives results that were lost a new beginning. Raises StoreUnavailable."""
    objects.create(KEY, packed(ResultManifest()))


def sealed(blob: bytes | None, where: str) -> tuple[Part, ...]:
    """The parts of a day's object; None: the store lacks it. Raises BadPayload, TooNew."""
    return versioned(_sealed, _there(blob, where), where).parts


def index(blob: bytes | None, where: str) -> tuple[IndexEntry, ...]:
    """The batches of a merged part; None: the store lacks its index. Raises BadPayload, TooNew."""
    return versioned(_index, _there(blob, where), where).batches


def _there(blob: bytes | None, where: str) -> bytes:
    if blob is None:
        raise BadPayload(f"{where} is missing; restore it from a backup of the store")
    return blob


def versioned(decoder: "msgspec.json.Decoder[T]", blob: bytes, where: str) -> T:
    """The value of an object with a version. Raises BadPayload, TooNew."""
    try:
        if (version := msgspec.json.decode(blob, type=_Versioned).v) > VERSION:
            raise TooNew(f"{where} has version {version}, and this build reads up to {VERSION}: update it")
        return decoder.decode(blob)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise BadPayload(f"{where} is damaged ({exc}); restore it from a backup of the store") from exc


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted ranges without overlaps; neighbours become one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def spans(batches: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """The row range of each batch."""
    found, at = {}, 0
    for batch_id, rows in batches:
        found[batch_id] = (at, at + rows)
        at += rows
    return found


def day_of(name: str, parts: Iterable[Part]) -> Day:
    """The sums of a day's sealed parts."""
    parts = tuple(parts)
    lines = {ResultTable.LINES} if any(not part.expired for part in parts) else set()
    return Day(
        name=name,
        parts=len(parts),
        rows=sum(part.live for part in parts),
        bytes=sum(part.bytes for part in parts if not part.expired),
        table_bytes=sum(one.bytes for part in parts for one in part.tables.values()),
        tables=tuple(sorted({name for part in parts for name in part.tables} | lines)),
        first_us=min(part.first_us for part in parts),
        last_us=max(part.last_us for part in parts),
        written_ms=max(part.written_ms for part in parts),
    )
