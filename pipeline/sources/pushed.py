"""Pushed lines and records to the columns of RAW_SCHEMA, framed as in a file."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import polars as pl
from cachetools import LRUCache
from msgspec.structs import replace

from pipeline.records.columns import Parts, any_of_each, gathered, nulls_of, numbers_of
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords, joined_records
from pipeline.records.schema import RAW_SCHEMA, UTC_US, nulls, with_missing_columns
from pipeline.sources.formats import detect
from pipeline.sources.framing import (
    DOCUMENTS,
    Framer,
    are_read_as_documents,
    are_records,
    are_records_each,
)
from pipeline.sources.joining.streams import joined_streams

# How long, and for how many batches, the formats that one batch told are those of its workload. Twice as long
# whenever another batch tells the same ones: a look takes some milliseconds, and workloads are many.
TRUSTED_S: Final = 60.0
TRUSTED_BATCHES: Final = 256
MOST_TRUST: Final = 8  # times as long
_WORKLOADS: Final = 4_096
_DETECTED_IN: Final = 200  # records that tell the formats of those without a message


@dataclass(slots=True)
class _Entry:
    formats: tuple[str, ...]
    until: float
    batches: int  # that may still have them
    trust: int = 1


class KnownFormats:
    """The formats of pushed lines by workload, told by a batch for a while. One thread uses it."""

    def __init__(self) -> None:
        self._entries: LRUCache[str, _Entry] = LRUCache(_WORKLOADS)

    def of(self, workload: str) -> tuple[str, ...] | None:
        """None where the next batch is to tell them."""
        entry: _Entry | None = self._entries.get(workload)
        if entry is None or not entry.batches or time.monotonic() > entry.until:
            return None
        entry.batches -= 1
        return entry.formats

    def tell(self, workload: str, formats: tuple[str, ...]) -> None:
        """A batch of this workload was looked at."""
        before: _Entry | None = self._entries.get(workload)
        trust = min(2 * before.trust, MOST_TRUST) if before and before.formats == formats else 1
        until = time.monotonic() + trust * TRUSTED_S
        self._entries[workload] = _Entry(formats, until, trust * TRUSTED_BATCHES, trust)


def framed(
    records: pl.DataFrame | Pushed, formats: tuple[str, ...] = (), *, earlier: tuple[str, ...] | None = None
) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """The records of a batch and the formats of their headers; `formats` belong to a batch framed before.

    `earlier`: the formats that an earlier stage found in pushed lines."""
    if isinstance(records, PushedLines):
        framer = Framer(formats=earlier)
        frame = pl.concat([framer.feed(records.text.split("\n")), framer.flush()])
        return frame, framer.formats
    if isinstance(records, PushedRecords):
        rows = _columns(records)
        formats = _formats_in(rows) if earlier is None else earlier
        return joined_streams(Parts(rows, [rows.height]), records, [formats]).whole, formats
    return records, formats


@dataclass(frozen=True, slots=True)
class FramedWorkloads:
    """The records of each workload of some batches, and the formats of their headers.

    The workloads of a batch follow each other; `batches` are the numbers of theirs."""

    batches: Sequence[int]
    workloads: Sequence[str]
    records: Parts[pl.DataFrame]
    formats: Sequence[tuple[str, ...]]


def framed_by_workload(
    several: Sequence[PushedRecords], trusted: KnownFormats, names: Sequence[str | None] = ()
) -> FramedWorkloads:
    """The records of batches, framed together. `names`: the workload of each, None where its records name
    theirs; none of them where all do."""
    batches: list[int] = []
    workloads: list[str] = []
    heights: list[int] = []
    ordered = []
    for number, (records, name) in enumerate(zip(several, names or [None] * len(several), strict=True)):
        if name is not None:
            batches.append(number)
            workloads.append(name)
            heights.append(records.height)
            ordered.append(_placed(records))
            continue
        places = records.rows_by_workload()
        batches += [number] * len(places)
        workloads += places
        heights += map(len, places.values())
        ordered.append(records.take(list(chain.from_iterable(places.values()))))
    whole = joined_records(ordered)
    parts = Parts(_columns(whole), heights)
    formats = _formats_of(workloads, parts, trusted)
    return FramedWorkloads(batches, workloads, joined_streams(parts, whole, formats), formats)


def _placed(records: PushedRecords) -> PushedRecords:
    """The records of one workload, with the place of each in their batch."""
    places = records.places or list(range(1, records.height + 1))
    return replace(records, workloads=None, places=places)


def _formats_of(
    workloads: Sequence[str], parts: Parts[pl.DataFrame], trusted: KnownFormats
) -> list[tuple[str, ...]]:
    """The formats of each part: those that its workload is known to have, where it plainly has them.

    A part whose formats were looked for passes them on. Later parts of its workload are compared again, one
    by one."""
    texts = Parts(gathered(parts, ["raw", "message"]), parts.heights)
    expected = [trusted.of(workload) for workload in workloads]
    found: list[tuple[str, ...]] = []
    looked_for: set[str] = set()
    fit = _fitting(texts, expected)
    for place, (workload, formats, fits) in enumerate(zip(workloads, expected, fit, strict=True)):
        known = formats
        if workload in looked_for:
            known = trusted.of(workload)
            fits = _fitting(texts.chosen([place]), [known])[0]  # noqa: PLW2901
        if known is None or not fits:
            known = _formats_in(texts[place])
            trusted.tell(workload, known)
            looked_for.add(workload)
        found.append(known)
    return found


def _formats_in(rows: pl.DataFrame) -> tuple[str, ...]:
    """The formats of the records that only have a raw text."""
    unparsed = rows.filter(pl.col("message").is_null())["raw"]
    return detect(unparsed.head(_DETECTED_IN).to_list()) if unparsed.len() else ()


def _fitting(texts: Parts[pl.DataFrame], expected: Sequence[tuple[str, ...] | None]) -> list[bool]:
    """Whether each unparsed record of a part is plainly one of the part's expected formats. `texts`: columns
    `raw` and `message`."""
    has_formats = [formats is not None for formats in expected]
    if not any(has_formats) or not texts.whole["message"].null_count():
        return has_formats
    # The objects of a collector are alike, whatever lines they hold.
    likely = [DOCUMENTS if formats and are_read_as_documents(formats) else formats for formats in expected]
    misfits = _misfits(texts, likely)
    to_compare = [
        number
        for number, (first, formats) in enumerate(zip(likely, expected, strict=True))
        if misfits[number] and first != formats
    ]
    if to_compare:
        others = _misfits(texts.chosen(to_compare), [expected[number] for number in to_compare])
        for number, misfit in zip(to_compare, others, strict=True):
            misfits[number] = misfit
    return [has and not misfit for has, misfit in zip(has_formats, misfits, strict=True)]


def _misfits(texts: Parts[pl.DataFrame], formats: Sequence[tuple[str, ...] | None]) -> list[bool]:
    """Whether some unparsed record of each part is not plainly of the part's formats; true without any."""
    places = {
        names: place
        for place, names in enumerate(dict.fromkeys(names for names in formats if names is not None))
    }
    of_parts = np.array([-1 if names is None else places[names] for names in formats], dtype=np.intp)
    fitting = are_records_each(texts.whole["raw"], list(places), of_parts[numbers_of(texts.heights)])
    return any_of_each(nulls_of(texts.whole["message"]) & ~fitting, texts.heights)


def framed_alike(batches: Sequence[PushedLines], formats: tuple[str, ...]) -> list[pl.DataFrame | None]:
    """The records of each batch whose every line is plainly a record of these formats; None for the others.

    To find formats in a few lines takes longer than all other work on them (docs/LOG.md)."""
    lines = pl.Series("raw", "\n".join(batch.text for batch in batches).split("\n"), dtype=pl.String)
    counts = np.array([batch.text.count("\n") + 1 for batch in batches])
    starts = np.cumsum(counts) - counts
    fits_all = np.logical_and.reduceat(are_records(lines, formats), starts)
    number = np.arange(lines.len()) - np.repeat(starts, counts) + 1
    rows = pl.DataFrame(
        {
            "raw": lines,
            "line": pl.Series(number, dtype=pl.UInt64),
            "lines": pl.Series(np.ones(lines.len(), dtype=np.uint32)),
        }
    )
    rows = with_missing_columns(rows)
    parts = Parts(rows, counts.tolist())
    return [part if fits else None for part, fits in zip(parts, fits_all, strict=True)]


def _columns(records: PushedRecords) -> pl.DataFrame:
    message = pl.Series("message", records.messages, dtype=pl.String)
    raw = message.alias("raw")
    if records.raws is not None or message.null_count():
        raw = pl.Series("raw", records.texts, dtype=pl.String)
    n = records.height
    timestamp, timed = _times(records)
    filled = {
        "raw": raw,
        "line": pl.Series("line", records.places or range(1, n + 1), dtype=pl.UInt64),
        "lines": _lines_of(raw),
        "timestamp": timestamp,
        "timed": timed,
        "message": message,
    }
    others = (records.levels, records.hosts, records.processes, records.services)
    for name, values in zip(("level", "host", "process", "service"), others, strict=True):
        if values:
            filled[name] = pl.Series(name, values, dtype=pl.String)
    return pl.DataFrame([filled[name] if name in filled else nulls(name, n) for name in RAW_SCHEMA])


def _lines_of(raw: pl.Series) -> pl.Series:
    """The physical lines of each text."""
    if raw.str.contains("\n", literal=True).any():
        return (raw.str.count_matches("\n", literal=True) + 1).alias("lines")
    return pl.Series("lines", [1], dtype=pl.UInt32).new_from_index(0, raw.len())


def _times(records: PushedRecords) -> tuple[pl.Series, pl.Series]:
    """`timestamp` and `timed`, which is false where the time holds only if the text has none."""
    n = records.height
    unknown = nulls("timed", n)
    if not records.timestamps and records.untimed is None:
        return nulls("timestamp", n), unknown
    given = pl.Series("timestamp", records.timestamps or [None] * n, dtype=pl.Int64)
    if records.untimed is None:
        return given.cast(UTC_US), unknown
    others = pl.Series("timestamp", records.untimed, dtype=pl.Int64)
    timed = unknown.zip_with(others.is_null(), pl.Series("timed", [False]).new_from_index(0, n))
    return given.zip_with(given.is_not_null(), others).cast(UTC_US), timed
