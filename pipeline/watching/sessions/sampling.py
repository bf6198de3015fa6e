"""Samples the sessions of stored records for training, in one pass and in bounded memory.

    pages of records --session key (keys.py)--> events, past the limit those of sessions drawn by a hash
    --> sorted, cut into segments at gaps, unfit sessions left out --> SessionModel (model.py) per workload

A session is in the sample whole or not at all. The same pages in the same order give the same sample. As in
the watcher, a session has a gap after `timeout_s` without an event, and goes on with later events within
KEEP_S.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from pipeline.watching.sessions.keys import KeyPattern, extract
from pipeline.watching.sessions.model import SessionModel

MAX_SAMPLED: Final = 3_000_000  # events: some 90 MB
KEEP_S: Final = 86_400.0  # after a longer gap a key names another session
MIN_SESSIONS: Final = 50  # of two events or more, for a workload's session model
_MAX_WORKLOADS: Final = 10_000
# Sessions that may go on after the last record are left out, unless they are more than this share of all.
_MAX_OPEN_SHARE: Final = 0.1
_EVENTS: Final[dict[str, Any]] = {
    "workload": pl.UInt32,
    "key": pl.UInt64,  # hash of workload and session key
    "at_ms": pl.Int64,
    "template_id": pl.Int64,
    "bad": pl.Boolean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSessions:
    """The sessions of one workload, each as its segments in order of time, and the numbers left out."""

    segments: list[tuple[tuple[int, ...], ...]]
    bad: int  # sessions with an anomalous line
    unfinished: int  # segments


class SessionSampler:
    """Takes in pages of records. Not thread-safe.

    `spotless`: the records are results, which no user called normal. Sessions with an anomalous line are left
    out. So are a few that are unlike the common ones: lines from before the first model were never judged.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        spotless: bool,
        patterns: Sequence[KeyPattern] = (),
        limit: int = MAX_SAMPLED,
    ) -> None:
        self._timeout_ms = round(timeout_s * 1000)
        self._keep_ms = max(self._timeout_ms, round(KEEP_S * 1000))
        self._spotless = spotless
        self._patterns = patterns
        self._limit = limit
        self._names: dict[str, int] = {}
        self._pages: list[pl.DataFrame] = []
        self._events = 0
        self._halvings = 0  # one of 2**halvings keys is drawn

    def add(self, page: pl.DataFrame) -> None:
        """Take in a page (LEARN_SCHEMA), in the order of its store."""
        keyed = page.with_columns(extract(page, self._patterns)).filter(
            pl.col("session").is_not_null() & pl.col("timestamp").is_not_null()
        )
        if keyed.is_empty():
            return
        workload = pl.col("workload").fill_null("")
        for name in keyed["workload"].fill_null("").unique(maintain_order=True):
            if len(self._names) < _MAX_WORKLOADS:
                self._names.setdefault(name, len(self._names))
        events = keyed.select(
            workload.replace_strict(self._names, default=None, return_dtype=pl.UInt32),
            pl.struct(workload.alias("w"), "session").hash(0).alias("key"),
            pl.col("timestamp").dt.epoch("ms").alias("at_ms"),
            pl.col("template_id").fill_null(0),
            pl.col("anomalous").fill_null(value=False).alias("bad"),
        ).filter(pl.col("workload").is_not_null())
        self._pages.append(self._draw(events))
        self._events += self._pages[-1].height
        while self._events > self._limit:
            self._halvings += 1
            self._pages = [self._draw(page) for page in self._pages]
            self._events = sum(page.height for page in self._pages)

    def sessions(self) -> dict[str, SampledSessions]:
        """The sessions of each workload that has any."""
        if not self._events:
            return {}
        events = pl.concat(self._pages).sort("workload", "key", "at_ms", maintain_order=True)
        gap = pl.col("at_ms").diff()
        other = (pl.col("key") != pl.col("key").shift(1)) | (
            pl.col("workload") != pl.col("workload").shift(1)
        )
        new_session = (other | (gap > self._keep_ms)).fill_null(value=True)
        new_segment = (other | (gap > self._timeout_ms)).fill_null(value=True)
        cut = (
            events.with_columns(
                new_session.cum_sum().alias("session"), new_segment.cum_sum().alias("segment")
            )
            .group_by("segment", maintain_order=True)
            .agg(
                pl.col("session", "workload").first(),
                pl.col("template_id"),
                pl.col("bad").any(),
                pl.col("at_ms").last().alias("end_ms"),
            )
        )
        last = int(events["at_ms"].to_numpy().max())
        names = list(self._names)
        parts = cut.partition_by("workload")
        return {names[part["workload"][0]]: self._finished(part, last) for part in parts}

    def learn(self) -> dict[str, SessionModel]:
        """The session model of each workload with enough sessions, most of them of more than one event."""
        models = {}
        for name, sampled in self.sessions().items():
            longer = sum(sum(map(len, segments)) > 1 for segments in sampled.segments)
            if longer >= MIN_SESSIONS and 2 * longer >= len(sampled.segments):
                models[name] = SessionModel.fit_segments(sampled.segments, trusted=not self._spotless)
        return models

    def _draw(self, events: pl.DataFrame) -> pl.DataFrame:
        # The lowest bits draw equal keys alike, in whichever page they are.
        mask = 2**self._halvings - 1
        drawn = events.filter(pl.col("key") & mask == 0) if self._halvings else events
        return drawn.select([pl.col(name).cast(dtype) for name, dtype in _EVENTS.items()])

    def _finished(self, cut: pl.DataFrame, last_ms: int) -> SampledSessions:
        bad = pl.col("bad").any().over("session") if self._spotless else pl.lit(value=False)
        is_open = pl.col("end_ms") > last_ms - self._timeout_ms
        every = cut.with_columns(bad.alias("bad"), is_open.alias("open"))
        if float(every["open"].cast(pl.Float64).mean()) > _MAX_OPEN_SHARE:  # type: ignore[arg-type]
            every = every.with_columns(pl.lit(value=False).alias("open"))
        fit = every.filter(~pl.col("bad") & ~pl.col("open"))
        segments = fit.group_by("session", maintain_order=True).agg("template_id")["template_id"].to_list()
        return SampledSessions(
            segments=[tuple(map(tuple, session)) for session in segments],
            bad=every.filter("bad")["session"].n_unique(),
            unfinished=every.filter(pl.col("open") & ~pl.col("bad")).height,
        )
