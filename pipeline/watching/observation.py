"""Observations: the watcher's view of a stored batch, a few kilobytes of Arrow beside megabytes of lines.

An observation counts templates per minute, lists the events of sessions, and the anomalous templates. It
comes from rows that the step computes anyway. The script that makes the batch `done` also stores the
observation (redis/lua/ledger/commit.lua), so the watcher sees every stored batch once. The limit of its list
may drop an observation, never a line.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.batch import Purpose
from pipeline.records.columns import Parts, gathered, heights_of, numbers_of
from pipeline.records.delivery import Claim
from pipeline.records.news import is_news
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
        "at": pl.Int64,  # event time, or that of arrival without one: milliseconds since the epoch
        "line": pl.UInt64,
        "template_id": pl.Int64,
    }
)


_EVENT_COLUMNS: Final = ("timestamp", "line", "template_id")
_COLUMNS: Final = (*ANOMALY_COLUMNS, "model_version")  # of rows that observations tell of
_NO_EVENTS: Final = EVENTS.empty()
_NO_ANOMALIES: Final = ANOMALIES.empty()
_NO_VALUES: Final = VALUES.empty()
_SCHEMAS: Final = {"rates": RATES, "events": EVENTS, "anomalies": ANOMALIES, "values": VALUES}


Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


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
    beyond: int = 0


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
    beyond: int = 0  # events past MAX_EVENTS, which it leaves out

    @property
    def rows(self) -> int:
        """Of all its tables."""
        return self.rates.height + self.events.height + self.anomalies.height + self.values.height

    def pack(self) -> bytes:
        return _OBSERVATIONS.pack(
            _ObservationWire(
                batch_id=self.batch_id,
                workload=self.workload,
                lane=self.lane,
                purpose=self.purpose,
                version=self.version,
                source=self.source,
                accepted_ms=self.accepted_ms,
                newest_ms=self.newest_ms,
                rates=self.rates.pack(),
                events=self.events.pack(),
                anomalies=self.anomalies.pack(),
                values=self.values.pack(),
                beyond=self.beyond,
            )
        )

    @classmethod
    def unpack(cls, blob: bytes) -> "Observation":
        """Raises BadPayload, also for a newer version."""
        fields = msgspec.structs.asdict(_OBSERVATIONS.unpack(blob))
        tables = {name: ObservedTable.unpack(schema, fields[name]) for name, schema in _SCHEMAS.items()}
        return cls(**(fields | tables))


def observe(claim: Claim, rows: pl.DataFrame, sessions: pl.Series | None) -> Observation | None:
    """`observe_all` for one workload."""
    return observe_all([claim], [rows], [sessions])[0]


def observe_all(
    claims: Sequence[Claim], rows: Sequence[pl.DataFrame], sessions: Sequence[pl.Series | None]
) -> list[Observation | None]:
    """The observations of workloads that are about to be committed; None for one that would be empty.

    `rows`: RESULT_SCHEMA, those of each claim; `sessions`: the session keys of each row
    (sessions/keys.py:find_keys), None where they are unknown.

    Lines are counted when they are first stored. Sessions consist of judged lines: lines from before the
    first model are observed once, with their verdicts, when they are scored. A query of Polars costs as much
    for ten rows as for a thousand, so that all share each pass over the columns."""
    heights = heights_of(rows)
    columns = gathered(rows, _COLUMNS)
    counted = _Counted.of_rows(columns, heights)
    first_time = np.array([not claim.rescore for claim in claims])[counted.of]
    to_score = np.array([claim.meta.purpose is Purpose.SCORE for claim in claims])
    judged = (counted.scored & to_score)[counted.of]
    rates = _rates(counted, first_time, len(claims))
    anomalies = _anomalies(columns, counted, judged)
    events = _events(columns, counted, judged, sessions, heights)
    values = _values(columns, counted, first_time)
    versions = columns["model_version"][counted.starts].to_list()
    each = zip(claims, versions, counted.scored.tolist(), counted.packed.tolist(), strict=True)
    newest = (counted.newest_us // 1000).tolist()
    return [
        _observation(
            claim,
            version=str(version) if scored else "",
            source="" if packed else claim.meta.source,
            newest_ms=newest[number],
            rates=rates[number],
            events=events.get(number, _NO_EVENTS),
            anomalies=anomalies.get(number, _NO_ANOMALIES),
            values=values.get(number, _NO_VALUES),
        )
        for number, (claim, version, scored, packed) in enumerate(each)
    ]


def _observation(
    claim: Claim,
    *,
    version: str,
    source: str,
    newest_ms: int,
    rates: ObservedTable,
    events: ObservedTable,
    anomalies: ObservedTable,
    values: ObservedTable,
) -> Observation | None:
    if not (rates or events or anomalies):
        return None
    beyond = max(0, events.height - MAX_EVENTS)
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
        events=events.slice(0, MAX_EVENTS) if beyond else events,
        anomalies=anomalies,
        values=values,
        beyond=beyond,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """Columns of the rows of all workloads, and what they say of each workload."""

    of: Ints  # the workload's number for each row
    starts: Ints  # the first row of each workload
    minute: Ints
    slot: Ints
    template: Ints
    rated: Flags  # rows that count in rates
    placed: Flags  # rows with a time, be it that of arrival
    anomalous: Flags  # rows with a time that are
    # Of each workload:
    scored: Flags  # each row has a score
    packed: Flags  # the rows come from several sources
    newest_us: Ints  # of timed rows, 0 for none

    @classmethod
    def of_rows(cls, rows: pl.DataFrame, heights: Sequence[int]) -> "_Counted":
        of = numbers_of(heights)
        starts = np.cumsum(heights, dtype=np.int64) - np.array(heights, dtype=np.int64)
        at, source = pl.col("timestamp").to_physical(), pl.col("source")
        whole = at.is_not_null() & (pl.col("lines") > 0)
        columns = rows.select(
            at.fill_null(0).alias("at"),
            whole.alias("placed"),
            (pl.col("timed").fill_null(value=True) & whole).alias("timed"),
            pl.col("template_id").fill_null(UNCLASSIFIED).alias("template"),
            pl.col("score").is_not_null().alias("scored"),
            (pl.col("anomalous").fill_null(value=False) & whole).alias("anomalous"),
            (source != pl.lit(rows["source"][starts][of])).fill_null(value=False).alias("packed"),
        )
        at_us, placed, timed, template, scored, anomalous, packed = (
            one.to_numpy() for one in columns.get_columns()
        )
        return cls(
            of=of,
            starts=starts,
            minute=at_us // 60_000_000,
            slot=at_us // (SLOT_S * 1_000_000),
            template=template,
            # A rate of arrival times is that of the reader.
            rated=timed & (template != UNCLASSIFIED),
            placed=placed,
            anomalous=anomalous,
            scored=np.logical_and.reduceat(scored, starts),
            packed=np.logical_or.reduceat(packed, starts),
            newest_us=np.maximum.reduceat(np.where(timed, at_us, 0), starts),
        )


def _rates(counted: _Counted, first_time: Flags, workloads: int) -> list[ObservedTable]:
    """RATES by minute and template of each workload; none of rows that were stored before."""
    wanted = counted.rated & first_time
    of, minutes, ids = counted.of[wanted], counted.minute[wanted], counted.template[wanted]
    order = np.lexsort((ids, minutes, of))
    of, minutes, ids = of[order], minutes[order], ids[order]
    changes = (np.diff(column, prepend=column[:1] - 1) != 0 for column in (of, minutes, ids))
    starts = np.flatnonzero(np.logical_or.reduce(list(changes)))
    counts = np.diff(starts, append=of.size)
    bounds = np.searchsorted(of[starts], np.arange(workloads + 1))
    columns = {"minute": minutes[starts], "template_id": ids[starts], "n": counts}
    rates = ObservedTable(RATES, {name: values.tolist() for name, values in columns.items()})
    return [rates.slice(begin, end) for begin, end in itertools.pairwise(bounds.tolist())]


def _anomalies(rows: pl.DataFrame, counted: _Counted, judged: Flags) -> dict[int, ObservedTable]:
    """ANOMALIES of each workload. News opens no incident."""
    found = np.flatnonzero(counted.anomalous & judged)
    found = found[~pl.DataFrame([rows["reasons"][found]]).select(is_news()).to_series().to_numpy()]
    if not found.size:
        return {}
    anomalous = pl.DataFrame([rows[name][found] for name in ANOMALY_COLUMNS])
    return anomaly_tables(anomalous, counted.of[found])


def _values(rows: pl.DataFrame, counted: _Counted, first_time: Flags) -> dict[int, ObservedTable]:
    """VALUES of each workload; none of rows that were stored before."""
    sample = ValueSample(counted.of, counted.slot, counted.template, counted.rated & first_time)
    raw, message = rows["raw"], rows["message"]
    return sample.tables(lambda chosen: value_texts(pl.DataFrame([raw[chosen], message[chosen]])))


def _events(
    rows: pl.DataFrame,
    counted: _Counted,
    judged: Flags,
    sessions: Sequence[pl.Series | None],
    heights: Sequence[int],
) -> dict[int, ObservedTable]:
    """EVENTS of each workload."""
    # Lines without a time have that of their arrival: their sessions are followed in the order of lines.
    wanted = np.flatnonzero(counted.placed & judged)
    keys = _keys(sessions, heights)
    if not wanted.size or keys.null_count() == keys.len():
        return {}
    at = pl.col("timestamp").dt.epoch("ms").alias("at")
    found = (
        pl.DataFrame(
            [
                *(rows[name][wanted] for name in _EVENT_COLUMNS),
                keys[wanted].alias("session"),
                pl.Series("of", counted.of[wanted]),
            ]
        )
        .lazy()
        .select("of", "session", at, "line", "template_id")
        .explode("session")
        .drop_nulls("session")
        .collect()
    )
    return _by_number(EVENTS, found)


def _keys(sessions: Sequence[pl.Series | None], heights: Sequence[int]) -> pl.Series:
    """The session keys of all rows; null where they are unknown."""
    if isinstance(sessions, Parts):
        whole: pl.Series = sessions.whole
        return whole
    unknown = pl.Series([None], dtype=pl.List(pl.String))
    each = zip(sessions, heights, strict=True)
    return pl.concat([unknown.new_from_index(0, height) if keys is None else keys for keys, height in each])


def _by_number(schema: Schema, found: pl.DataFrame) -> dict[int, ObservedTable]:
    """The rows of each workload, whose rows are neighbours."""
    numbers, starts = np.unique(found["of"].to_numpy(), return_index=True)
    bounds = itertools.pairwise([*starts.tolist(), found.height])
    table = ObservedTable.of(schema, found)
    if found.height <= FEW_ROWS * numbers.size:
        table = ObservedTable(
            schema, table.columns
        )  # a slice of a frame is a query, and its lists are asked for
    return {
        number: table.slice(begin, end) for number, (begin, end) in zip(numbers.tolist(), bounds, strict=True)
    }
