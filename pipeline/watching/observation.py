"""Observations: the watcher's view of a stored batch, a few kilobytes of Arrow beside megabytes of lines.

An observation counts templates per minute, lists the events of sessions, and the anomalous templates. It
comes from rows that the step computes anyway. The script that makes the batch `done` also stores the
observation (redis/lua/ledger/commit.lua), so the watcher sees every stored batch once. The limit of its list
may drop an observation, never a line.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Claim
from pipeline.records.levels import ERROR_LEVELS, LEVELS
from pipeline.records.schema import is_timed, pack_frame, unpack_frame
from pipeline.records.verdict import UNCLASSIFIED, Reason
from pipeline.records.wire import Codec

# More events than the largest batch in use has records come from a mistaken session key.
MAX_EVENTS: Final = 20_000
MAX_ANOMALIES: Final = 200  # templates of one batch; more are an unknown format, and one incident
TEXT_CHARS: Final = 300
_FRAME_BYTES: Final = 64 << 20

RATES_SCHEMA: Final[dict[str, Any]] = {
    "minute": pl.Int64,  # of event time, since the epoch
    "template_id": pl.Int64,
    "n": pl.UInt32,
}
EVENTS_SCHEMA: Final[dict[str, Any]] = {
    "session": pl.String,
    "at": pl.Int64,  # event time, milliseconds since the epoch
    "line": pl.UInt64,
    "template_id": pl.Int64,
}
ANOMALIES_SCHEMA: Final[dict[str, Any]] = {
    "template_id": pl.Int64,
    "n": pl.UInt32,
    "first": pl.Int64,  # event time, milliseconds since the epoch
    "last": pl.Int64,
    "score": pl.Float64,
    "level": pl.String,  # the most severe
    # 3: error-like by level or reason, 2: warning or marked, 1: neither (findings.finding_severity).
    "severity": pl.Int64,
    "text": pl.String,  # of its first record
    "source": pl.String,  # where that record stands
    "line": pl.UInt64,
    "new": pl.Boolean,  # no training has seen the template
    "timed": pl.Boolean,  # false: no record has a time, and `first` and `last` are those of arrival
}


_SCHEMAS: Final = {"rates": RATES_SCHEMA, "events": EVENTS_SCHEMA, "anomalies": ANOMALIES_SCHEMA}


class Lane(StrEnum):
    """Batches of one lane are stored about in the order of their acceptance; those of several are not."""

    FRESH = "fresh"
    BACKFILL = "backfill"
    RESCORED = "rescored"  # stored before there was a model, judged now


class _ObservationWire(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Wire form of an Observation; frames are Arrow, empty ones b""."""

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
    rates: pl.DataFrame
    events: pl.DataFrame
    anomalies: pl.DataFrame

    def pack(self) -> bytes:
        fields = {name: getattr(self, name) for name in _ObservationWire.__struct_fields__}
        for name in _SCHEMAS:
            fields[name] = pack_frame(fields[name]) if fields[name].height else b""
        return _OBSERVATIONS.pack(_ObservationWire(**fields))

    @classmethod
    def unpack(cls, blob: bytes) -> "Observation":
        """Raises BadPayload, also for a newer version."""
        fields = msgspec.structs.asdict(_OBSERVATIONS.unpack(blob))
        frames = {name: _unpack_frame(fields[name], schema) for name, schema in _SCHEMAS.items()}
        return cls(**(fields | frames))


def _unpack_frame(blob: bytes, schema: dict[str, Any]) -> pl.DataFrame:
    if not blob:
        return pl.DataFrame(schema=schema)
    frame = unpack_frame(blob, max_bytes=_FRAME_BYTES)
    if dict(frame.schema) != schema:
        raise BadPayload(f"a frame of an observation has the columns {dict(frame.schema)}")
    return frame


def observe(claim: Claim, rows: pl.DataFrame, sessions: pl.Series | None) -> Observation | None:
    """The observation of a batch that is about to be committed; None if it would be empty.

    `rows`: RESULT_SCHEMA; `sessions`: the session key of each row, null for none. Lines are counted when they
    are first stored. Sessions consist of judged lines: lines from before the first model are observed once,
    with their verdicts, when they are scored.
    """
    version = "" if rows["score"].null_count() else str(rows["model_version"][0])
    packed = rows["source"].n_unique() > 1
    counted = rows.filter(pl.col("lines") > 0) if rows["lines"].min() == 0 else rows
    rates = pl.DataFrame(schema=RATES_SCHEMA) if claim.rescore else _rates(counted)
    events, anomalies = pl.DataFrame(schema=EVENTS_SCHEMA), pl.DataFrame(schema=ANOMALIES_SCHEMA)
    if version and claim.meta.purpose is Purpose.SCORE:
        anomalies = _anomalies(counted)
        if sessions is not None and sessions.null_count() < rows.height:
            events = _events(rows, sessions)
    if rates.is_empty() and events.is_empty() and anomalies.is_empty():
        return None
    newest = counted["timestamp"].filter(counted["timed"].fill_null(value=True)).max()
    lane = Lane.BACKFILL if claim.backfill else Lane.FRESH
    return Observation(
        batch_id=claim.batch_id,
        workload=claim.workload,
        lane=Lane.RESCORED if claim.rescore else lane,
        purpose=claim.meta.purpose,
        version=version,
        source="" if packed else claim.meta.source,
        accepted_ms=claim.accepted_ms,
        newest_ms=int(newest.timestamp() * 1000) if isinstance(newest, datetime) else 0,
        rates=rates,
        events=events,
        anomalies=anomalies,
    )


def _rates(rows: pl.DataFrame) -> pl.DataFrame:
    """RATES_SCHEMA by minute and template. A rate of arrival times is that of the reader."""
    counted = rows["timestamp"].is_not_null() & (rows["template_id"] != UNCLASSIFIED)
    counted &= rows["timed"].fill_null(value=True)
    # A Polars query over a batch of few lines costs four times as much.
    minutes = rows["timestamp"].filter(counted).to_physical().to_numpy() // 60_000_000
    ids = rows["template_id"].filter(counted).to_numpy()
    order = np.lexsort((ids, minutes))
    minutes, ids = minutes[order], ids[order]
    starts = np.flatnonzero(np.diff(minutes, prepend=-1).astype(bool) | np.diff(ids, prepend=-1).astype(bool))
    counts = np.diff(starts, append=minutes.size)
    found = {"minute": minutes[starts], "template_id": ids[starts], "n": counts}
    return pl.DataFrame(found, schema=RATES_SCHEMA)


def _events(rows: pl.DataFrame, sessions: pl.Series) -> pl.DataFrame:
    wanted = pl.col("session").is_not_null() & (pl.col("lines") > 0) & pl.col("timestamp").is_not_null()
    wanted &= is_timed()  # a session's begin, end and gaps are times of its records
    at = pl.col("timestamp").dt.epoch("ms").alias("at")
    return (
        rows.select("timestamp", "timed", "line", "lines", "template_id")
        .with_columns(sessions.alias("session"))
        .lazy()
        .filter(wanted)
        .head(MAX_EVENTS)
        .select("session", at, "line", "template_id")
        .collect()
    )


def _anomalies(rows: pl.DataFrame) -> pl.DataFrame:
    anomalous = pl.col("anomalous").fill_null(value=False) & pl.col("timestamp").is_not_null()
    found = rows.filter(anomalous) if rows["anomalous"].any() else rows.clear()
    if found.is_empty():
        return pl.DataFrame(schema=ANOMALIES_SCHEMA)
    places = {name: at for at, name in enumerate(LEVELS)}
    rank = pl.col("level").replace_strict(places, default=-1, return_dtype=pl.Int64)
    severe = pl.col("level").is_in(list(ERROR_LEVELS)).fill_null(value=False) | _says(Reason.ERROR_SEVERITY)
    warned = (pl.col("level") == "warning").fill_null(value=False) | _says(Reason.MARKED)
    text = pl.coalesce("message", "raw", pl.lit("")).str.head(TEXT_CHARS)
    names = pl.col("rank").replace_strict(dict(enumerate(LEVELS)), default=None, return_dtype=pl.String)
    stamped = pl.col("at").filter(pl.col("timed"))  # an arrival says nothing of when a timed fault began
    return (
        found.lazy()
        .with_columns(
            rank.alias("rank"),
            pl.when(severe).then(3).when(warned).then(2).otherwise(1).cast(pl.Int64).alias("severity"),
            text.alias("text"),
            pl.col("timestamp").dt.epoch("ms").alias("at"),
            is_timed().alias("timed"),
        )
        .group_by("template_id", maintain_order=True)
        .agg(
            pl.len().cast(pl.UInt32).alias("n"),
            pl.coalesce(stamped.min(), pl.col("at").min()).alias("first"),
            pl.coalesce(stamped.max(), pl.col("at").max()).alias("last"),
            pl.col("score").max(),
            pl.col("rank").max(),
            pl.col("severity").max(),
            pl.col("text", "source", "line").sort_by("at", "line").first(),
            _says(Reason.NEW_TEMPLATE).any().alias("new"),
            pl.col("timed").any(),
        )
        .sort("score", "n", descending=True)
        .head(MAX_ANOMALIES)
        .with_columns(names.alias("level"))
        .select(list(ANOMALIES_SCHEMA))
        .collect()
    )


def _says(name: Reason) -> pl.Expr:
    """Whether a row has this reason."""
    return pl.col("reasons").list.eval(pl.element().str.starts_with(name.value)).list.any()
