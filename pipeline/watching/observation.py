"""Observations: the watcher's view of a stored batch, a few kilobytes of Arrow beside megabytes of lines.

An observation counts templates per minute, lists the events of sessions, and the anomalous templates. It
comes from rows that the step computes anyway. The script that makes the batch `done` also stores the
observation (redis/lua/ledger/commit.lua), so the watcher sees every stored batch once. The limit of its list
may drop an observation, never a line.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.batch import Purpose
from pipeline.records.columns import gathered
from pipeline.records.delivery import Claim
from pipeline.records.schema import is_timed
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.records.wire import Codec
from pipeline.watching.anomalies import ANOMALIES, ANOMALY_COLUMNS, anomaly_tables
from pipeline.watching.table import FEW_ROWS, ObservedTable, Schema
from pipeline.watching.values.sampling import SLOT_S, VALUES, ValueSample, value_texts

# More than the largest batch in use has with four keys a record come from a mistaken session key.
MAX_EVENTS: Final = 40_000

RATES: Final = Schema(
    {
        "minute": pl.Int64,  # of event time, since the epoch
        "template_id": pl.Int64,
        "n": pl.UInt32,
    }
)
EVENTS: Final = Schema(
    {
        "session": pl.String,  # a key as `find_keys` writes it; a record has an event of each of its keys
        "at": pl.Int64,  # event time, milliseconds since the epoch
        "line": pl.UInt64,
        "template_id": pl.Int64,
    }
)


_EVENT_COLUMNS: Final = ("timestamp", "timed", "line", "lines", "template_id")
_NO_EVENTS: Final = EVENTS.empty()
_NO_ANOMALIES: Final = ANOMALIES.empty()
_NO_VALUES: Final = VALUES.empty()
_SCHEMAS: Final = {"rates": RATES, "events": EVENTS, "anomalies": ANOMALIES, "values": VALUES}


class Lane(StrEnum):
    """Batches of one lane are stored about in the order of their acceptance; those of several are not."""

    FRESH = "fresh"
    BACKFILL = "backfill"
    RESCORED = "rescored"  # stored before there was a model, judged now


class _ObservationWire(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Wire form of an Observation; tables as they pack themselves."""

    batch_id: str
    workload: str
    lane: Lane
    purpose: Purpose
    version: str
    source: str
    accepted_ms: int
    newest_ms: int
    rates: bytes
    events: bytes
    anomalies: bytes
    values: bytes = b""


# The watcher cannot wait for a newer build to read an observation, so a newer version counts as damage.
_OBSERVATIONS: Final = Codec(_ObservationWire, version=1, what="an observation", newer=BadPayload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One stored batch."""

    batch_id: str
    workload: str
    lane: Lane
    purpose: Purpose
    version: str  # model version of its verdicts, "" for none
    source: str
    accepted_ms: int  # Redis time
    newest_ms: int  # newest event time of a timed record, 0 for none
    rates: ObservedTable
    events: ObservedTable
    anomalies: ObservedTable
    values: ObservedTable = _NO_VALUES

    @property
    def rows(self) -> int:
        """Of all its tables."""
        return self.rates.height + self.events.height + self.anomalies.height + self.values.height

    def pack(self) -> bytes:
        fields = {name: getattr(self, name) for name in _ObservationWire.__struct_fields__}
        for name in _SCHEMAS:
            fields[name] = fields[name].pack()
        return _OBSERVATIONS.pack(_ObservationWire(**fields))

    @classmethod
    def unpack(cls, blob: bytes) -> "Observation":
        """Raises BadPayload, also for a newer version."""
        fields = msgspec.structs.asdict(_OBSERVATIONS.unpack(blob))
        tables = {name: ObservedTable.unpack(schema, fields[name]) for name, schema in _SCHEMAS.items()}
        return cls(**(fields | tables))


@dataclass(frozen=True, slots=True)
class Observed:
    """The rows of one workload of a batch that is about to be committed.

    `rows`: RESULT_SCHEMA; `sessions`: the session keys of each row (sessions/keys.py:find_keys)."""

    claim: Claim
    rows: pl.DataFrame
    sessions: pl.Series | None


def observe(claim: Claim, rows: pl.DataFrame, sessions: pl.Series | None) -> Observation | None:
    """`observe_all` for one workload."""
    return observe_all([Observed(claim, rows, sessions)])[0]


def observe_all(several: Sequence[Observed]) -> list[Observation | None]:
    """The observations of workloads that are committed; None for one that would be empty.

    Lines are counted when they are first stored. Sessions consist of judged lines: lines from before the
    first model are observed once, with their verdicts, when they are scored. A query of Polars costs as much
    for ten rows as for a thousand, so that all share each pass over the columns."""
    counted = _Counted.of_rows([one.rows for one in several])
    first_time = [not one.claim.rescore for one in several]
    rates = _rates(counted, first_time)
    judged = [
        number
        for number, one in enumerate(several)
        if counted.scored[number] and one.claim.meta.purpose is Purpose.SCORE
    ]
    with_anomalies = {n: several[n].rows for n in judged if counted.anomalous[n]}
    anomalies = anomaly_tables(_numbered(with_anomalies, ANOMALY_COLUMNS)) if with_anomalies else {}
    keyed = _with_keys([several[number].sessions for number in judged])
    events = _events({n: several[n] for n, has_some in zip(judged, keyed, strict=True) if has_some})
    values = _values(counted, [one.rows for one in several], first_time)
    return [
        _observation(
            one,
            version=str(one.rows["model_version"][0]) if counted.scored[number] else "",
            source="" if counted.packed[number] else one.claim.meta.source,
            newest_ms=int(counted.newest_us[number]) // 1000,
            rates=rates[number],
            events=events.get(number, _NO_EVENTS),
            anomalies=anomalies.get(number, _NO_ANOMALIES),
            values=values.get(number, _NO_VALUES),
        )
        for number, one in enumerate(several)
    ]


def _observation(
    one: Observed,
    *,
    version: str,
    source: str,
    newest_ms: int,
    rates: ObservedTable,
    events: ObservedTable,
    anomalies: ObservedTable,
    values: ObservedTable,
) -> Observation | None:
    claim = one.claim
    if not (rates or events or anomalies):
        return None
    lane = Lane.BACKFILL if claim.backfill else Lane.FRESH
    return Observation(
        batch_id=claim.batch_id,
        workload=claim.workload,
        lane=Lane.RESCORED if claim.rescore else lane,
        purpose=claim.meta.purpose,
        version=version,
        source=source,
        accepted_ms=claim.accepted_ms,
        newest_ms=newest_ms,
        rates=rates,
        events=events,
        anomalies=anomalies,
        values=values,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """Columns of the rows of all workloads, and what they say of each workload."""

    of: "np.ndarray[tuple[int], np.dtype[np.int64]]"  # the workload's number for each row
    minute: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    slot: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    template: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    rated: "np.ndarray[tuple[int], np.dtype[np.bool]]"  # rows that count in rates
    # Of each workload:
    scored: "np.ndarray[tuple[int], np.dtype[np.bool]]"  # each row has a score
    anomalous: "np.ndarray[tuple[int], np.dtype[np.bool]]"  # some row is
    packed: "np.ndarray[tuple[int], np.dtype[np.bool]]"  # the rows come from several sources
    newest_us: "np.ndarray[tuple[int], np.dtype[np.int64]]"  # of timed rows, 0 for none

    @classmethod
    def of_rows(cls, several: Sequence[pl.DataFrame]) -> "_Counted":
        names = ["timestamp", "timed", "template_id", "lines", "anomalous", "score", "source"]
        rows = gathered(several, names)
        heights = np.array([one.height for one in several])
        starts = np.cumsum(heights) - heights
        of = np.repeat(np.arange(heights.size), heights)
        at, source = pl.col("timestamp").to_physical(), pl.col("source")
        columns = rows.with_columns(rows["source"][starts][of].alias("first")).select(
            at.fill_null(0).alias("at"),
            (pl.col("timed").fill_null(value=True) & at.is_not_null() & (pl.col("lines") > 0)).alias("timed"),
            pl.col("template_id").fill_null(UNCLASSIFIED).alias("template"),
            pl.col("score").is_not_null().alias("scored"),
            pl.col("anomalous").fill_null(value=False),
            (source != pl.col("first")).fill_null(value=False).alias("packed"),
        )
        at_us, timed, template, scored, anomalous, packed = (one.to_numpy() for one in columns.get_columns())
        return cls(
            of=of,
            minute=at_us // 60_000_000,
            slot=at_us // (SLOT_S * 1_000_000),
            template=template,
            # A rate of arrival times is that of the reader.
            rated=timed & (template != UNCLASSIFIED),
            scored=np.logical_and.reduceat(scored, starts),
            anomalous=np.logical_or.reduceat(anomalous, starts),
            packed=np.logical_or.reduceat(packed, starts),
            newest_us=np.maximum.reduceat(np.where(timed, at_us, 0), starts),
        )


def _rates(counted: _Counted, first_time: Sequence[bool]) -> list[ObservedTable]:
    """RATES by minute and template of each workload; none of rows that were stored before."""
    wanted = counted.rated & np.array(first_time)[counted.of]
    of, minutes, ids = counted.of[wanted], counted.minute[wanted], counted.template[wanted]
    order = np.lexsort((ids, minutes, of))
    of, minutes, ids = of[order], minutes[order], ids[order]
    changes = (np.diff(column, prepend=column[:1] - 1) != 0 for column in (of, minutes, ids))
    starts = np.flatnonzero(np.logical_or.reduce(list(changes)))
    counts = np.diff(starts, append=of.size)
    bounds = np.searchsorted(of[starts], np.arange(len(first_time) + 1))
    columns = {"minute": minutes[starts], "template_id": ids[starts], "n": counts}
    rates = ObservedTable(RATES, {name: values.tolist() for name, values in columns.items()})
    return [rates.slice(begin, end) for begin, end in itertools.pairwise(bounds.tolist())]


def _values(
    counted: _Counted, several: Sequence[pl.DataFrame], first_time: Sequence[bool]
) -> dict[int, ObservedTable]:
    """VALUES of each workload; none of rows that were stored before."""
    texts = gathered(several, ["raw", "message"])
    sample = ValueSample(
        counted.of, counted.slot, counted.template, counted.rated & np.array(first_time)[counted.of]
    )
    return sample.tables(lambda rows: value_texts(texts[rows]))


def _with_keys(several: Sequence[pl.Series | None]) -> list[bool]:
    """Whether some record of each has a session key."""
    known = [keys for keys in several if keys is not None]
    heights = np.array([0 if keys is None else keys.len() for keys in several], dtype=np.int64)
    if not heights.sum():
        return [False] * len(several)
    counts = pl.concat(known).list.len().fill_null(0).to_numpy()
    of = np.repeat(np.arange(heights.size), heights)
    return [bool(count) for count in np.bincount(of, weights=counts, minlength=heights.size)]


def _events(several: Mapping[int, Observed]) -> dict[int, ObservedTable]:
    """EVENTS of each workload."""
    if not several:
        return {}
    wanted = (pl.col("lines") > 0) & pl.col("timestamp").is_not_null()
    wanted &= is_timed()  # a session's begin, end and gaps are times of its records
    at = pl.col("timestamp").dt.epoch("ms").alias("at")
    rows = _numbered({n: one.rows for n, one in several.items()}, _EVENT_COLUMNS)
    sessions = pl.concat([one.sessions for one in several.values() if one.sessions is not None])
    found = (
        rows.with_columns(sessions.alias("session"))
        .lazy()
        .filter(wanted)
        .select("of", "session", at, "line", "template_id")
        .explode("session")
        .drop_nulls("session")
        .collect()
    )
    return _by_number(EVENTS, found, MAX_EVENTS)


def _numbered(several: Mapping[int, pl.DataFrame], names: Sequence[str]) -> pl.DataFrame:
    """These columns of all workloads, and `of`, the number of the workload."""
    of = np.repeat(list(several), [rows.height for rows in several.values()])
    rows = gathered(list(several.values()), names)
    return rows.with_columns(pl.Series("of", of, dtype=pl.Int64))


def _by_number(schema: Schema, found: pl.DataFrame, most: int) -> dict[int, ObservedTable]:
    """The rows of each workload, whose rows are neighbours, and at most so many."""
    numbers, starts = np.unique(found["of"].to_numpy(), return_index=True)
    bounds = itertools.pairwise([*starts.tolist(), found.height])
    table = ObservedTable.of(schema, found)
    if found.height <= FEW_ROWS * numbers.size:
        table = ObservedTable(
            schema, table.columns
        )  # a slice of a frame is a query, and its lists are asked for
    return {
        number: table.slice(begin, min(end, begin + most))
        for number, (begin, end) in zip(numbers.tolist(), bounds, strict=True)
    }
