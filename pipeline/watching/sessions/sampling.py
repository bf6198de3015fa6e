"""Stored records to what normal sessions look like, in one pass and in memory that does not grow with their number.

    pages of records --key (session_keys)--> events --past the limit: whole sessions drawn by a hash of their key-->
    sorted, cut into parts at silences, the unfit left out --> watching/sessions/model.py, for each workload

Always true: a session is in the sample whole or not at all; the same pages in the same order give the same sample. As
the watcher does with a stream, a session falls silent where nothing happens for longer than `timeout_s`, and goes on
with what comes within KEEP_S.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from pipeline.watching.sessions.keys import Kind, extract
from pipeline.watching.sessions.model import Sequences

MAX_HELD: Final = 3_000_000  # events: some 90 MB
KEEP_S: Final = 86_400.0  # a key that comes again after a longer silence is another session's
LEAST_SESSIONS: Final = 50  # of two events or more, for a workload's sessions to be learnt
_WORKLOADS: Final = 10_000
# Sessions that may go on after the last record was written are left out, unless that takes more than this share of all.
_OPEN_SHARE: Final = 0.1
_EVENTS: Final[dict[str, Any]] = {
    "workload": pl.UInt32,
    "key": pl.UInt64,  # hash of workload and session key
    "at_ms": pl.Int64,
    "template_id": pl.Int64,
    "bad": pl.Boolean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """The sessions of one workload, each as its parts in order of time, and how much was left out."""

    parts: list[tuple[tuple[int, ...], ...]]
    bad: int  # sessions with an anomalous line
    unfinished: int  # parts


class SessionSampler:
    """Takes in pages of records. Not thread-safe.

    `spotless`: for results, which nobody called normal. Sessions with a line that was judged anomalous are left out, and
    so are a few that are unlike the common ones: before there was a model no line was judged, so faults may be among them.
    """

    def __init__(
        self, *, timeout_s: float, spotless: bool, kinds: Sequence[Kind] = (), limit: int = MAX_HELD
    ) -> None:
        self._timeout_ms = round(timeout_s * 1000)
        self._keep_ms = max(self._timeout_ms, round(KEEP_S * 1000))
        self._spotless = spotless
        self._kinds = kinds
        self._limit = limit
        self._names: dict[str, int] = {}
        self._pages: list[pl.DataFrame] = []
        self._held = 0
        self._halved = 0  # of 2**halved keys one is taken

    def add(self, page: pl.DataFrame) -> None:
        """Take in a page (LEARN_SCHEMA), in the order of its store."""
        keyed = page.with_columns(extract(page, self._kinds)).filter(
            pl.col("session").is_not_null() & pl.col("timestamp").is_not_null()
        )
        if keyed.is_empty():
            return
        workload = pl.col("workload").fill_null("")
        for name in keyed["workload"].fill_null("").unique(maintain_order=True):
            if len(self._names) < _WORKLOADS:
                self._names.setdefault(name, len(self._names))
        events = keyed.select(
            workload.replace_strict(self._names, default=None, return_dtype=pl.UInt32),
            pl.struct(workload.alias("w"), "session").hash(0).alias("key"),
            pl.col("timestamp").dt.epoch("ms").alias("at_ms"),
            pl.col("template_id").fill_null(0),
            pl.col("anomalous").fill_null(value=False).alias("bad"),
        ).filter(pl.col("workload").is_not_null())
        self._pages.append(self._drawn(events))
        self._held += self._pages[-1].height
        while self._held > self._limit:
            self._halved += 1
            self._pages = [self._drawn(held) for held in self._pages]
            self._held = sum(held.height for held in self._pages)

    def sessions(self) -> dict[str, Sessions]:
        """By workload, of those that have any."""
        if not self._held:
            return {}
        events = pl.concat(self._pages).sort("workload", "key", "at_ms", maintain_order=True)
        silence = pl.col("at_ms").diff()
        other = (pl.col("key") != pl.col("key").shift(1)) | (
            pl.col("workload") != pl.col("workload").shift(1)
        )
        begins = (other | (silence > self._keep_ms)).fill_null(value=True)
        goes_on = (other | (silence > self._timeout_ms)).fill_null(value=True)
        cut = (
            events.with_columns(begins.cum_sum().alias("session"), goes_on.cum_sum().alias("part"))
            .group_by("part", maintain_order=True)
            .agg(
                pl.col("session", "workload").first(),
                pl.col("template_id"),
                pl.col("bad").any(),
                pl.col("at_ms").last().alias("end_ms"),
            )
        )
        last = int(events["at_ms"].to_numpy().max())
        names = list(self._names)
        return {
            names[part["workload"][0]]: self._fit_ones(part, last) for part in cut.partition_by("workload")
        }

    def learn(self) -> dict[str, Sequences]:
        """What is normal, of each workload that has sessions enough; most of them with more than one event."""
        learnt = {}
        for name, found in self.sessions().items():
            several = sum(sum(map(len, parts)) > 1 for parts in found.parts)
            if several >= LEAST_SESSIONS and 2 * several >= len(found.parts):
                learnt[name] = Sequences.of_parts(found.parts, trusted=not self._spotless)
        return learnt

    def _drawn(self, events: pl.DataFrame) -> pl.DataFrame:
        # The lowest bits: equal keys are drawn alike, whichever page they come in.
        drawn = events.filter(pl.col("key") & (2**self._halved - 1) == 0) if self._halved else events
        return drawn.select([pl.col(name).cast(dtype) for name, dtype in _EVENTS.items()])

    def _fit_ones(self, cut: pl.DataFrame, last_ms: int) -> Sessions:
        bad = pl.col("bad").any().over("session") if self._spotless else pl.lit(value=False)
        open_ = pl.col("end_ms") > last_ms - self._timeout_ms
        seen = cut.with_columns(bad.alias("bad"), open_.alias("open"))
        if float(seen["open"].cast(pl.Float64).mean()) > _OPEN_SHARE:  # type: ignore[arg-type]
            seen = seen.with_columns(pl.lit(value=False).alias("open"))
        kept = seen.filter(~pl.col("bad") & ~pl.col("open"))
        parts = kept.group_by("session", maintain_order=True).agg("template_id")["template_id"].to_list()
        return Sessions(
            parts=[tuple(map(tuple, session)) for session in parts],
            bad=seen.filter("bad")["session"].n_unique(),
            unfinished=seen.filter(pl.col("open") & ~pl.col("bad")).height,
        )
