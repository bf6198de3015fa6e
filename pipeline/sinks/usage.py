"""The table `usage` of the store: immutable records of GPU use, below `results/v2/usage/`.

It has a manifest of its own, so that commits of lines and records of use never wait for each other. `add`
swaps in a part with the records that the table lacks, by compare-and-set. It looks their identities up in the
parts that the manifest names. A record that comes twice is therefore stored once. It comes twice after a
kill, from two writers at once, and where Redis has forgotten the end of a lease, which then ends again.

A part lies in the day on which its leases ended. `maintain` merges the parts of a day, drops old ones, and
removes files that no manifest names. A replaced file stays for `GRACE_S`, for readers of the older manifest.
"""

import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from pipeline.errors import BadPayload
from pipeline.gpu.leasing.ended import UsageRecord
from pipeline.logs import logger
from pipeline.records.schema import UTC_US
from pipeline.sinks.parquet import DAMAGED, SWAP_S, too_many_writers
from pipeline.sinks.part_files import PartFiles, lazily, put_table
from pipeline.sinks.retention import GRACE_S, ORPHAN_S
from pipeline.sinks.usage_manifest import FOLDER, KEY, ReplacedFile, UsageManifest, UsagePart, usage_manifest
from pipeline.store.objects import Objects
from pipeline.units import epoch_us

MERGE_PARTS: Final = 32  # of a day; those of an earlier day are merged whenever there are two
USAGE_SCHEMA: Final[dict[str, Any]] = {
    "lease_id": pl.String,
    "token": pl.Int64,
    "holder": pl.String,
    "tenant": pl.String,
    "kind": pl.String,
    "mode": pl.String,
    "node": pl.String,
    "device": pl.String,
    "device_name": pl.String,
    "memory_mib": pl.Int64,
    "compute_percent": pl.Int64,
    "share": pl.Float64,
    "granted_at": UTC_US,
    "ended_at": UTC_US,
    "seconds": pl.Float64,
    "ended": pl.String,
}
IDENTITY: Final = ("lease_id", "token", "device")
_ORDER: Final = ("tenant", "device", "granted_at", "lease_id")


class UsageTable:
    """Writes to and reads from the table of one store. `cache`: where copies lie of files in a bucket.

    Every method raises StoreUnavailable, BadPayload, TooNew."""

    def __init__(self, objects: Objects, cache: Path | None = None) -> None:
        self.objects = objects
        self._files = PartFiles(objects, cache)

    def add(self, records: Sequence[UsageRecord]) -> int:
        """Stores the records that the table lacks; how many those were."""
        if not records:
            return 0
        frame = _frame(records)
        added = 0

        def edit(now: UsageManifest) -> UsageManifest | None:
            nonlocal added
            new = frame.join(self._identities(now, frame), on=IDENTITY, how="anti")
            added = new.height
            days = new.with_columns(pl.col("ended_at").dt.strftime("%Y-%m-%d").alias("day"))
            parts = [
                self._put(rows, str(day)) for (day,), rows in days.partition_by("day", as_dict=True).items()
            ]
            return now.edited([*now.parts, *parts], now.replaced) if parts else None

        self._change(edit)
        return added

    def maintain(self, keep_s: float | None, now: float | None = None) -> None:
        """Merges small parts, drops those past `keep_s` (None: never), removes files without a name."""
        now = time.time() if now is None else now

        def edit(before: UsageManifest) -> UsageManifest | None:
            oldest_us = None if keep_s is None else (now - keep_s) * 1_000_000
            parts = [part for part in before.parts if oldest_us is None or part.last_us >= oldest_us]
            parts = [part for group in _by_day(parts) for part in self._merged(group, now)]
            names, at_ms = {part.name for part in parts}, int(now * 1000)
            replaced = [one for one in before.replaced if now - one.at_ms / 1000 <= GRACE_S]
            replaced += [ReplacedFile(part.name, at_ms) for part in before.parts if part.name not in names]
            if set(parts) == set(before.parts) and tuple(replaced) == before.replaced:
                return None
            return before.edited(parts, replaced)

        self._change(edit)
        named = _names(self.manifest())
        for one in list(self.objects.found(FOLDER)):
            if one.key not in named and now - one.changed > ORPHAN_S:
                self.objects.delete(one.key)

    def scan(self, since: datetime | None = None, until: datetime | None = None) -> pl.LazyFrame:
        """The records, lazily (USAGE_SCHEMA), less parts without a lease in the span [since, until)."""
        first, stop = (None if at is None else epoch_us(at) for at in (since, until))
        chosen = [
            part
            for part in self.manifest().parts
            if (first is None or part.last_us >= first) and (stop is None or part.first_us < stop)
        ]
        return self._lazy(chosen)

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Around every reading of `scan`: raises BadPayload for a damaged file."""
        try:
            yield
        except DAMAGED as exc:
            raise BadPayload(
                f"records of GPU use cannot be read from {self.objects.url}/{FOLDER} ({exc}); restore the "
                "damaged file, or remove it"
            ) from exc

    def manifest(self) -> UsageManifest:
        """The manifest as it is now."""
        return self._read()[0]

    def _read(self) -> tuple[UsageManifest, str | None]:
        found = self.objects.tagged(KEY)
        blob, tag = (None, None) if found is None else found
        return usage_manifest(blob, self.objects.url), tag

    def _lazy(self, parts: Iterable[UsagePart]) -> pl.LazyFrame:
        """A file that is not there is left out: a person has removed a damaged one."""
        files = [self._files.local(part.name, part.bytes) for part in parts]
        if absent := [file.name for file in files if not file.exists()]:
            logger().warning("usage.part_missing", files=absent)
            files = [file for file in files if file.name not in absent]
        return lazily(files, USAGE_SCHEMA) if files else pl.LazyFrame(schema=USAGE_SCHEMA)

    def _identities(self, now: UsageManifest, frame: pl.DataFrame) -> pl.DataFrame:
        """The identities of the stored records that were granted when those of `frame` were."""
        granted = pl.col("granted_at").dt.epoch("us")
        first, last = frame.select(granted.min().alias("first"), granted.max().alias("last")).row(0)
        parts = [part for part in now.parts if part.first_us <= last and part.last_us >= first]
        with self.readable():
            return self._lazy(parts).select(IDENTITY).collect()

    def _merged(self, group: Sequence[UsagePart], now: float) -> Sequence[UsagePart]:
        """The parts of a day as one, where it is worth it and no file of them is away."""
        today = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
        if len(group) < (2 if group[0].day < today else MERGE_PARTS):
            return group
        with self.readable():
            rows = self._lazy(group).collect()
        return [self._put(rows, group[0].day)] if rows.height == sum(part.rows for part in group) else group

    def _put(self, rows: pl.DataFrame, day: str) -> UsagePart:
        rows = rows.select(list(USAGE_SCHEMA)).sort(_ORDER)
        name = f"{FOLDER}date={day}/{uuid.uuid4().hex}.parquet"
        size = put_table(self.objects, name, rows)
        first, last = rows.select(
            pl.col("granted_at").dt.epoch("us").min(), pl.col("ended_at").dt.epoch("us").max()
        ).row(0)
        return UsagePart(name=name, day=day, rows=rows.height, bytes=size, first_us=first, last_us=last)

    def _change(self, edit: Callable[[UsageManifest], UsageManifest | None]) -> None:
        """Swaps the manifest for an edited one. Where another writer was first, the files of the edit go.

        A failure leaves its files to `maintain`: the answer to the swap may have been lost."""
        until = time.monotonic() + SWAP_S
        while True:
            now, tag = self._read()
            changed = edit(now)
            if changed is None or self.objects.swap(KEY, msgspec.json.encode(changed), tag) is not None:
                return
            # The swap may be ours, with an answer that was lost: then these files are the table.
            for name in _names(changed) - _names(now) - _names(self.manifest()):
                self.objects.delete(name)
            if time.monotonic() > until:
                raise too_many_writers(f"{KEY} of {self.objects.url}")
            time.sleep(random.uniform(0.0, 0.05))  # noqa: S311 - no secret


def usage_sums(
    table: UsageTable, by: str, since: datetime | None = None, until: datetime | None = None
) -> pl.DataFrame:
    """Leases and hours by a column, the largest GPU-hours first (days in order); only what lies in the span.

    A column of USAGE_SCHEMA, `user`, `model`, or `day` in UTC: a lease over midnight counts for both days.
    `lease_hours`: of every device of every lease. `gpu_hours`: the same by the share of the device.
    `gib_hours`: by the leased memory. Raises StoreUnavailable, BadPayload."""
    ordered = ("day",) if by == "day" else ("gpu_hours", by)
    sums = (
        _pieces(table, by, since, until)
        .group_by(by)
        .agg(
            pl.struct("lease_id", "token").n_unique().cast(pl.Int64).alias("leases"),
            pl.col("hours").sum().alias("lease_hours"),
            (pl.col("hours") * pl.col("share")).sum().alias("gpu_hours"),
            (pl.col("hours") * pl.col("memory_mib") / 1024).sum().alias("gib_hours"),
        )
        .sort(ordered, descending=[name == "gpu_hours" for name in ordered])
    )
    with table.readable():
        return sums.collect()


def _pieces(table: UsageTable, by: str, since: datetime | None, until: datetime | None) -> pl.LazyFrame:
    """The records with the column `by` and `hours`, cut to the span; by `day`, cut at midnight too."""
    begin = pl.col("granted_at") if since is None else pl.max_horizontal("granted_at", pl.lit(since, UTC_US))
    end = pl.col("ended_at") if until is None else pl.min_horizontal("ended_at", pl.lit(until, UTC_US))
    pieces = table.scan(since, until).with_columns(
        begin=begin, end=end, model="device_name", user=pl.col("holder").str.split(":").list.first()
    )
    pieces = pieces.filter(pl.col("end") >= pl.col("begin"))
    if by == "day":
        last = pl.max_horizontal("begin", pl.col("end").dt.offset_by("-1us")).dt.date()
        midnight = pl.col("day").cast(UTC_US)
        pieces = (
            pieces.with_columns(day=pl.date_ranges(pl.col("begin").dt.date(), last))
            .explode("day")
            .with_columns(
                begin=pl.max_horizontal("begin", midnight),
                end=pl.min_horizontal("end", midnight.dt.offset_by("1d")),
                day=pl.col("day").cast(pl.String),
            )
        )
    return pieces.with_columns(
        hours=(pl.col("end") - pl.col("begin")).dt.total_microseconds() / 3_600_000_000
    )


def _frame(records: Sequence[UsageRecord]) -> pl.DataFrame:
    """The records, USAGE_SCHEMA, each identity once: the first end is the true one."""
    rows = [asdict(record) | {"seconds": (record.ended_ms - record.granted_ms) / 1000} for record in records]
    at = {
        f"{name}_at": pl.from_epoch(f"{name}_ms", "ms").dt.cast_time_unit("us").dt.replace_time_zone("UTC")
        for name in ("granted", "ended")
    }
    times = {"granted_ms": pl.Int64, "ended_ms": pl.Int64}
    schema = {name: kind for name, kind in USAGE_SCHEMA.items() if not name.endswith("_at")} | times
    return (
        pl.DataFrame(rows, schema=schema)
        .with_columns(**at)
        .select(list(USAGE_SCHEMA))
        .unique(IDENTITY, keep="first", maintain_order=True)
    )


def _by_day(parts: Iterable[UsagePart]) -> list[list[UsagePart]]:
    found: dict[str, list[UsagePart]] = {}
    for part in parts:
        found.setdefault(part.day, []).append(part)
    return list(found.values())


def _names(manifest: UsageManifest) -> set[str]:
    """The files that must stay."""
    return {KEY, *(part.name for part in manifest.parts), *(one.name for one in manifest.replaced)}
