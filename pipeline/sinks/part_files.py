"""The files of parts: written once, read lazily, and fetched to this machine where the store is a bucket.

A sealed part leaves out messages that end their `raw`, as most do. Their `message` is null, and `message_at`
says at which character of `raw` they begin.
"""

import io
import itertools
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import polars as pl

from pipeline.errors import StoreUnavailable
from pipeline.logs import logger
from pipeline.records.batch import digest
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.manifest import LOOSE, MAX_NAMES, MERGED, PREFIX, SEALED, Part
from pipeline.store.folder import Folder
from pipeline.store.objects import Objects

LINES: Final = f"{PREFIX}lines/"
ROW_GROUP: Final = 65_536
# A column of a row group is one page: zstd finds what repeats in a page alone (docs/LOG.md).
PAGE_BYTES: Final = 16 << 20
# Of each level of parts. Files of a commit are merged within minutes, and are no larger with level 1.
# Level 6 would spare an eighth of the bytes for a second more per million lines (docs/LOG.md).
ZSTD_LEVELS: Final = {LOOSE: 1, MERGED: 2, SEALED: 3}
MESSAGE_AT: Final = "message_at"
_ELIDED_SCHEMA: Final = {**RESULT_SCHEMA, MESSAGE_AT: pl.UInt32}
_NOWHERE: Final = pl.lit(None, dtype=pl.UInt32).alias(MESSAGE_AT)
# Fetched copies of a bucket's parts on one machine. A reader may still use a copy for as long as KEPT_S.
CACHE_BYTES: Final = 4 << 30
KEPT_S: Final = 600.0
_ROW: Final = "logweir:row"
# Ranges are read as slices, which skip row groups; of more, each would decode its row group again.
FEW_RANGES: Final = 4


class PartFiles:
    """The files of one store of results. `cache`: where copies of a bucket's files lie."""

    def __init__(self, objects: Objects, cache: Path | None = None) -> None:
        self.objects = objects
        self._root = objects.root if isinstance(objects, Folder) else None
        self._cache = None if cache is None else cache / digest(objects.url)
        self.not_found: dict[str, int] = {}  # parts that `located` has left out, and their lines

    @property
    def folder(self) -> Path:
        """Where the files lie on this machine."""
        if self._root is not None:
            return self._root
        if self._cache is None:
            raise StoreUnavailable(f"parts of {self.objects.url} need a folder for their copies")
        return self._cache

    def put(self, frame: pl.DataFrame, *, day: str, level: int, written_ms: int) -> Part:
        """Writes a new part; a sealed one without the messages that end their `raw`.

        Raises StoreUnavailable."""
        rows = frame.select(list(RESULT_SCHEMA))
        sealed = level == SEALED
        out = io.BytesIO()
        # All files have the same columns, so that other programs read them together.
        (_elided(rows) if sealed else rows.with_columns(_NOWHERE)).write_parquet(
            out,
            compression="zstd",
            compression_level=ZSTD_LEVELS[level],
            statistics=level != LOOSE,  # the manifest tells readers what a small part holds
            row_group_size=ROW_GROUP,
            data_page_size=PAGE_BYTES,
        )
        name = f"{LINES}date={day}/{level}-{uuid.uuid4().hex}.parquet"
        self.objects.put(name, out.getvalue())
        at_us = rows["timestamp"].to_physical()
        first, last = cast("int | None", at_us.min()), cast("int | None", at_us.max())
        return Part(
            name=name,
            day=day,
            rows=rows.height,
            bytes=out.tell(),
            first_us=first or 0,
            last_us=last or 0,
            written_ms=written_ms,
            level=level,
            workloads=_names(rows),
            elided=sealed,
        )

    def local(self, name: str, size: int) -> Path:
        """A file of at most `size` bytes on this machine; that of a bucket is fetched.

        Raises StoreUnavailable."""
        if self._root is not None:
            return self._root / name
        place = self.folder / name.rpartition("/")[2]
        try:
            if place.exists():
                os.utime(place)
                return place
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex[:12]}.part")
            try:
                if self.objects.fetch(name, temporary, max_bytes=size):
                    temporary.replace(place)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as exc:
            raise StoreUnavailable(
                f"copies of {self.objects.url} cannot be written to {self._cache} ({exc.strerror or exc}); "
                "free space or fix the rights there"
            ) from exc
        return place

    def file(self, part: Part) -> Path:
        """The file of a part on this machine. Raises StoreUnavailable."""
        return self.local(part.name, part.bytes)

    def has(self, part: Part) -> bool:
        """Whether the store has the file of a part. Raises StoreUnavailable."""
        return self.objects.look(part.name) is not None

    def located(self, parts: Iterable[Part]) -> list[tuple[Part, Path]]:
        """The parts that have results, with their files on this machine. Raises StoreUnavailable.

        A file that is not there is left out and noted in `not_found`: a person has removed a damaged one, as
        its error says."""
        found = []
        for part in parts:
            if not part.live:
                continue
            path = self.file(part)
            if path.exists():
                found.append((part, path))
            else:
                self.not_found[part.name] = part.live
                logger().warning("results.part_missing", part=part.name, rows=part.live)
        return found

    def _make_room(self, wanted: int) -> None:
        """Removes the copies that were not used for longest."""
        assert self._cache is not None  # noqa: S101 - a bucket has one
        found = []
        for entry in os.scandir(self._cache):
            with suppress(FileNotFoundError):
                info = entry.stat()
                found.append((info.st_mtime, info.st_size, entry.path))
        size = sum(each for _, each, _ in found) + wanted
        for used, each, path in sorted(found):
            if size <= CACHE_BYTES or used > time.time() - KEPT_S:
                return
            Path(path).unlink(missing_ok=True)
            size -= each

    def lazy(self, parts: Iterable[Part]) -> pl.LazyFrame:
        """The results in these parts, RESULT_SCHEMA, in their order. Raises StoreUnavailable."""
        paths_of: dict[bool, list[Path]] = {False: [], True: []}  # by whether messages are left out
        frames: list[pl.LazyFrame] = []
        for part, path in self.located(parts):
            if part.dropped:
                frames.append(_without(path, part))
            else:
                paths_of[part.elided].append(path)
        frames += [lazily_lines(paths, elided=elided) for elided, paths in paths_of.items() if paths]
        return pl.concat(frames) if frames else pl.LazyFrame(schema=RESULT_SCHEMA)

    def read(self, part: Part, span: tuple[int, int] | None = None) -> pl.DataFrame:
        """The rows of a part, or of one range in it, without dropped ones. Raises StoreUnavailable."""
        path = self.file(part)
        start, stop = span or (0, part.rows)
        rows = lazily_lines([path], elided=part.elided).slice(start, stop - start).collect()
        if rows.is_empty() or not part.dropped:
            return rows
        return rows.filter(~_inside(pl.int_range(pl.len()) + start, part.dropped))


def lazily_lines(files: Sequence[Path], *, elided: bool = False) -> pl.LazyFrame:
    """The lines in these files, RESULT_SCHEMA. `elided`: messages may be left out in all of them."""
    return _with_messages(lazily(files, _ELIDED_SCHEMA)) if elided else lazily(files, RESULT_SCHEMA)


def _elided(rows: pl.DataFrame) -> pl.DataFrame:
    """_ELIDED_SCHEMA of lines."""
    raw, message = pl.col("raw"), pl.col("message")
    ends = raw.str.ends_with(message).fill_null(value=False)
    return rows.with_columns(
        pl.when(~ends).then(message).alias("message"),
        pl.when(ends).then(raw.str.len_chars() - message.str.len_chars()).cast(pl.UInt32).alias(MESSAGE_AT),
    )


def _with_messages(lines: pl.LazyFrame) -> pl.LazyFrame:
    """RESULT_SCHEMA of lines in _ELIDED_SCHEMA."""
    suffix = pl.col("raw").str.slice(pl.col(MESSAGE_AT))
    return lines.with_columns(pl.coalesce("message", suffix)).select(list(RESULT_SCHEMA))


def put_table(objects: Objects, key: str, rows: pl.DataFrame) -> int:
    """Writes rows of a table that is not the lines; the bytes of the file. Raises StoreUnavailable."""
    out = io.BytesIO()
    rows.write_parquet(out, compression="zstd", compression_level=3)
    objects.put(key, out.getvalue())
    return out.tell()


def lazily(files: Sequence[Path], schema: Mapping[str, Any]) -> pl.LazyFrame:
    """The rows of these files, in these columns."""
    # Names may hold * and =, so they are taken as they are.
    return pl.scan_parquet(
        list(files),
        schema=dict(schema),
        extra_columns="ignore",  # of a newer build
        hive_partitioning=False,
        glob=False,
    )


def _without(path: Path, part: Part) -> pl.LazyFrame:
    bounds = [0, *itertools.chain.from_iterable(part.dropped), part.rows]
    live = [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]
    if len(live) <= FEW_RANGES:
        lines = lazily_lines([path], elided=part.elided)
        return pl.concat([lines.slice(start, stop - start) for start, stop in live])
    numbered = pl.scan_parquet(
        [path],
        schema=_ELIDED_SCHEMA if part.elided else RESULT_SCHEMA,
        extra_columns="ignore",
        hive_partitioning=False,
        glob=False,
        row_index_name=_ROW,
    )
    rows = numbered.filter(~_inside(pl.col(_ROW).cast(pl.Int64), part.dropped)).drop(_ROW)
    return _with_messages(rows) if part.elided else rows


def _inside(row: pl.Expr, ranges: Sequence[tuple[int, int]]) -> pl.Expr:
    """True for rows of the sorted ranges: the last start up to the row has its stop behind the row."""
    starts = pl.lit(pl.Series([start for start, _ in ranges], dtype=pl.Int64))
    stops = pl.lit(pl.Series([-1, *(stop for _, stop in ranges)], dtype=pl.Int64))
    return row < stops.gather(starts.search_sorted(row, side="right"))


def _names(rows: pl.DataFrame) -> tuple[str, ...]:
    """The workloads, none where there are more than a part names."""
    names = rows["workload"].unique().sort().to_list()
    return () if len(names) > MAX_NAMES or None in names else tuple(names)
