"""What a stored batch says to whoever watches: how often which template came, what happened in which session, and which
templates were anomalous. A few kilobytes of Arrow beside the batch's megabyte of lines.

It is made from rows that are computed anyway and handed over in the same step that makes the batch `done`
(redis/lua/ledger/commit.lua), so what is watched is what is stored, once. It may be lost at the limit of its list; a line never is.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgpack
import numpy as np
import polars as pl

from pipeline.errors import BadPayload
from pipeline.ledger.batches import Claim
from pipeline.records.batch import Purpose
from pipeline.records.levels import ERROR_LEVELS, LEVELS
from pipeline.records.schema import pack_frame, unpack_frame
from pipeline.records.verdict import UNCLASSIFIED, Reason

OBSERVATION_VERSION: Final = 1
# More events than records of the largest batch in use are no session log but a mistaken key.
MAX_EVENTS: Final = 20_000
MAX_ANOMALIES: Final = 200  # templates of one batch; more than that is a format nobody knew, and one incident
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
    "severity": pl.Int64,  # 3: error-like by level or reason, 2: warning or marked, 1: neither (findings.severity)
    "text": pl.String,  # of its first record
}


class Lane(StrEnum):
    """Batches of one lane are stored about in the order they were accepted in; those of two are not."""

    FRESH = "fresh"
    BACKFILL = "backfill"
    RESCORED = "rescored"  # stored before there was a model, judged now


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One stored batch. Frames that have nothing to say are empty."""

    batch_id: str
    workload: str
    lane: Lane
    purpose: Purpose
    version: str  # model version it was answered under, "" for none
    source: str
    accepted_ms: int  # Redis time
    newest_ms: int  # newest event time, 0 for none
    rates: pl.DataFrame
    events: pl.DataFrame
    anomalies: pl.DataFrame

    def pack(self) -> bytes:
        """msgpack of version and fields; frames as Arrow, empty ones as nothing."""
        frames = (self.rates, self.events, self.anomalies)
        return bytes(
            msgpack.packb(
                [
                    OBSERVATION_VERSION, self.batch_id, self.workload, self.lane.value, self.purpose.value,
                    self.version, self.source, self.accepted_ms, self.newest_ms,
                    *(pack_frame(frame) if frame.height else b"" for frame in frames),
                ]
            )
        )  # fmt: skip

    @classmethod
    def unpack(cls, blob: bytes) -> "Observation":
        """Raises BadPayload, also for one of a newer build: what it says cannot wait for it."""
        try:
            version, *rest = msgpack.unpackb(blob)
            if version > OBSERVATION_VERSION:
                raise BadPayload(f"an observation has wire version {version}; this build reads up to 1")
            batch_id, workload, lane, purpose, model, source, accepted_ms, newest_ms, *frames = rest
            texts, numbers = (batch_id, workload, model, source), (accepted_ms, newest_ms)
            if not (all(isinstance(x, str) for x in texts) and all(isinstance(x, int) for x in numbers)):
                raise TypeError("its fields have other types")
            rates, events, anomalies = (
                _read(part, schema)
                for part, schema in zip(frames, (RATES_SCHEMA, EVENTS_SCHEMA, ANOMALIES_SCHEMA), strict=True)
            )
            return cls(
                batch_id=batch_id,
                workload=workload,
                lane=Lane(lane),
                purpose=Purpose(purpose),
                version=model,
                source=source,
                accepted_ms=accepted_ms,
                newest_ms=newest_ms,
                rates=rates,
                events=events,
                anomalies=anomalies,
            )
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise BadPayload(f"an observation of {len(blob)} bytes is not readable: {exc}") from exc


def _read(part: bytes, schema: dict[str, Any]) -> pl.DataFrame:
    if not part:
        return pl.DataFrame(schema=schema)
    frame = unpack_frame(part, max_bytes=_FRAME_BYTES)
    if dict(frame.schema) != schema:
        raise TypeError(f"a frame has the columns {dict(frame.schema)}")
    return frame


def observe(claim: Claim, rows: pl.DataFrame, sessions: pl.Series | None) -> Observation | None:
    """The observation of a batch that is about to be committed; None when nobody learns anything from it.

    `rows`: RESULT_SCHEMA; `sessions`: the session key of each row, null for none.
    Lines are counted when they are stored first. A session is of judged lines: those stored before there was a model
    come with their verdicts, once, when they are scored.
    """
    version = "" if rows["score"].null_count() else str(rows["model_version"][0])
    seen = rows.filter(pl.col("lines") > 0) if rows["lines"].min() == 0 else rows
    rates = pl.DataFrame(schema=RATES_SCHEMA) if claim.rescore else _rates(seen)
    events, anomalies = pl.DataFrame(schema=EVENTS_SCHEMA), pl.DataFrame(schema=ANOMALIES_SCHEMA)
    if version and claim.meta.purpose is Purpose.SCORE:
        anomalies = _anomalies(seen)
        if sessions is not None and sessions.null_count() < rows.height:
            events = _events(rows, sessions)
    if rates.is_empty() and events.is_empty() and anomalies.is_empty():
        return None
    newest = seen["timestamp"].max()
    late = Lane.BACKFILL if claim.backfill else Lane.FRESH
    return Observation(
        batch_id=claim.batch_id,
        workload=claim.workload,
        lane=Lane.RESCORED if claim.rescore else late,
        purpose=claim.meta.purpose,
        version=version,
        source=claim.meta.source,
        accepted_ms=claim.accepted_ms,
        newest_ms=int(newest.timestamp() * 1000) if isinstance(newest, datetime) else 0,
        rates=rates,
        events=events,
        anomalies=anomalies,
    )


def _rates(rows: pl.DataFrame) -> pl.DataFrame:
    """RATES_SCHEMA by minute and template."""
    counted = rows["timestamp"].is_not_null() & (rows["template_id"] != UNCLASSIFIED)
    # A query over a batch of few lines costs four times this.
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
    at = pl.col("timestamp").dt.epoch("ms").alias("at")
    return (
        rows.select("timestamp", "line", "lines", "template_id")
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
    return (
        found.lazy()
        .with_columns(
            rank.alias("rank"),
            pl.when(severe).then(3).when(warned).then(2).otherwise(1).cast(pl.Int64).alias("severity"),
            text.alias("text"),
            pl.col("timestamp").dt.epoch("ms").alias("at"),
        )
        .group_by("template_id", maintain_order=True)
        .agg(
            pl.len().cast(pl.UInt32).alias("n"),
            pl.col("at").min().alias("first"),
            pl.col("at").max().alias("last"),
            pl.col("score").max(),
            pl.col("rank").max(),
            pl.col("severity").max(),
            pl.col("text").first(),
        )
        .sort("score", "n", descending=True)
        .head(MAX_ANOMALIES)
        .with_columns(names.alias("level"))
        .select(list(ANOMALIES_SCHEMA))
        .collect()
    )


def _says(name: Reason) -> pl.Expr:
    """Whether one of a row's reasons is this one."""
    return pl.col("reasons").list.eval(pl.element().str.starts_with(name.value)).list.any()
