"""Samples the sessions of stored records for training, in one pass and in bounded memory.

    pages of records --session keys (keys.py)--> events, past the limit those of sessions drawn by a hash
    --> sorted, cut into segments at gaps, unfit sessions left out
    --> SessionModel (model.py) per workload and kind of key, and one of traces over all workloads (joint.py)

A kind of key becomes sessions where enough of its keys have two events or more, and where no earlier kind
cuts the same records alike (kinds.py).

A session is in the sample whole or not at all. The same pages in the same order give the same sample. As in
the watcher, a session has a gap after `timeout_s` without an event, and goes on with later events within
KEEP_S.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import polars as pl

from pipeline.records.schema import is_timed
from pipeline.units import plural, seconds
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.sessions.follow_ups import MAX_PARTS, Part, learn_follow_ups
from pipeline.watching.sessions.joint import joint_event
from pipeline.watching.sessions.keys import (
    JOINED,
    JOINT,
    KINDS,
    SEPARATOR,
    KeyPattern,
    find_keys,
    model_name,
)
from pipeline.watching.sessions.kinds import KindOverlap
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.parent_spans import ParentSpans
from pipeline.watching.sessions.trace_shape import MOST_TRACES, trace_shape

MAX_SAMPLED: Final = 3_000_000  # events: some 90 MB
_DAY_MS: Final = 86_400_000
KEEP_S: Final = 86_400.0  # after a longer gap a key names another session
MIN_SESSIONS: Final = 50  # of two events or more, for a session model
# Session timeouts that a training spans at least: in a shorter one most sessions have no begin, or no end.
LEAST_TIMEOUTS: Final = 3
# Of traces, that go through several workloads, for a model of traces as wholes.
MIN_SHARED: Final = 0.1
_MAX_WORKLOADS: Final = 10_000
# Sessions that may go on after the last record are left out, unless they are more than this share of all.
_MAX_OPEN_SHARE: Final = 0.1
_EVENTS: Final[dict[str, Any]] = {
    "workload": pl.UInt32,
    "kind": pl.UInt8,  # place in KINDS
    "key": pl.UInt64,  # hash of the session key, and of the workload for a kind that is not joined
    "at_ms": pl.Int64,
    "template_id": pl.Int64,
    "bad": pl.Boolean,
    "timed": pl.Boolean,  # false: `at_ms` is that of arrival
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSessions:
    """The sessions of one model, each as its segments in order of time, and the numbers left out."""

    segments: list[tuple[tuple[int, ...], ...]]
    parts: list[Part]  # at most MAX_PARTS of the segments, with the times of their events
    bad: int  # sessions with an anomalous line
    unfinished: int  # segments
    span_ms: int | None  # from the first event to the last; None where no event has a time of its own

    @property
    def longer(self) -> int:
        """Sessions of two events or more."""
        return sum(sum(map(len, segments)) > 1 for segments in self.segments)

    @property
    def repeats(self) -> bool:
        """Whether keys name sessions: half of them have two events or more."""
        return 0 < len(self.segments) <= 2 * self.longer


class SessionSampler:
    """Takes in pages of records. Not thread-safe.

    Of results, which no user called normal, sessions with an anomalous line are left out. So are a few that
    are unlike the common ones: lines from before the first model were never judged.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        patterns: Sequence[KeyPattern] = (),
        limit: int = MAX_SAMPLED,
    ) -> None:
        self._timeout_ms = round(timeout_s * 1000)
        self._keep_ms = max(self._timeout_ms, round(KEEP_S * 1000))
        self._patterns = patterns
        self._limit = limit
        self._names: dict[str, int] = {}
        self._doubtful: set[int] = set()  # workloads with results
        self._pages: list[pl.DataFrame] = []
        self._events = 0
        self._records = 0  # with a key
        self._overlap = KindOverlap()
        self._parents = ParentSpans()
        self._halvings = 0  # one of 2**halvings keys is drawn
        self.unjudged: list[str] = []  # after `learn`: what is not judged, and why

    def add(self, page: pl.DataFrame, *, baseline: bool = False) -> None:
        """Take in a page (LEARN_SCHEMA), in the order of its store; `baseline`: its records are of one."""
        keyed = (
            page.with_columns(find_keys(page, self._patterns))
            .filter(pl.col("timestamp").is_not_null())
            .with_row_index("record", offset=self._records)
            .explode("sessions")
            .drop_nulls("sessions")
        )
        if keyed.is_empty():
            return
        self._records += page.height
        workload = pl.col("workload").fill_null("")
        for name in keyed["workload"].fill_null("").unique(maintain_order=True):
            if len(self._names) < _MAX_WORKLOADS:
                self._names.setdefault(name, len(self._names))
            if not baseline and name in self._names:
                self._doubtful.add(self._names[name])
        bad = pl.col("anomalous").fill_null(value=False)
        parts = pl.col("sessions").str.split_exact(SEPARATOR, 1).struct
        joined = parts.field("field_0").is_in(list(JOINED))
        events = keyed.select(
            "record",
            workload.replace_strict(self._names, default=None, return_dtype=pl.UInt32),
            parts.field("field_0")
            .replace_strict({kind: at for at, kind in enumerate(KINDS)}, return_dtype=pl.UInt8)
            .alias("kind"),
            pl.struct(pl.when(joined).then(pl.lit("")).otherwise(workload).alias("w"), "sessions")
            .hash(0)
            .alias("key"),
            pl.col("timestamp").dt.epoch("ms").alias("at_ms"),
            pl.col("template_id").fill_null(0),
            pl.lit(value=False).alias("bad") if baseline else bad.alias("bad"),
            is_timed(),
        ).filter(pl.col("workload").is_not_null())
        self._overlap.add(events.select("record", "workload", "kind", "key"))
        self._parents.add(keyed, events.filter(pl.col("kind").is_in(list(map(KINDS.index, JOINED)))))
        self._pages.append(self._draw(events))
        self._events += self._pages[-1].height
        while self._events > self._limit:
            self._halvings += 1
            self._pages = [self._draw(page) for page in self._pages]
            self._events = sum(page.height for page in self._pages)

    def sessions(self) -> dict[str, SampledSessions]:
        """The sessions of each workload and kind of key, by the name of their model."""
        if not self._events:
            return {}
        names = list(self._names)
        return {
            model_name(names[workload], KINDS[kind]): sampled
            for (workload, kind), sampled in self._parted(pl.concat(self._pages)).items()
        }

    def _parted(self, events: pl.DataFrame) -> dict[tuple[int, int], SampledSessions]:
        """The sessions by the numbers of workload and kind."""
        last = int(events["at_ms"].to_numpy().max())
        cut = self._cut(events)
        return {
            (part["workload"][0], part["kind"][0]): self._finished(part, last)
            for part in cut.partition_by("workload", "kind")
        }

    def _cut(self, events: pl.DataFrame) -> pl.DataFrame:
        """A row for each segment."""
        of = ("workload", "kind", "key")
        events = events.sort(*of, "at_ms", maintain_order=True)
        gap = pl.col("at_ms").diff()
        other = pl.any_horizontal(pl.col(name) != pl.col(name).shift(1) for name in of)
        new_session = (other | (gap > self._keep_ms)).fill_null(value=True)
        new_segment = (other | (gap > self._timeout_ms)).fill_null(value=True)
        return (
            events.with_columns(
                new_session.cum_sum().alias("session"), new_segment.cum_sum().alias("segment")
            )
            .group_by("segment", maintain_order=True)
            .agg(
                pl.col("session", "workload", "kind").first(),
                pl.col("template_id", "at_ms"),
                pl.col("bad").any(),
                pl.col("timed").all(),
                pl.col("at_ms").last().alias("end_ms"),
            )
        )

    def learn(self) -> dict[str, SessionModel]:
        """The session models by their names, of each workload and kind with enough sessions, half of them of
        two events or more."""
        models: dict[str, SessionModel] = {}
        if not self._events:
            return models
        names, events, repeated = list(self._names), pl.concat(self._pages), self._overlap.repeated()
        learnt: dict[int, set[int]] = {}
        for (workload, kind), sampled in sorted(self._parted(events).items()):
            earlier = learnt.setdefault(workload, set())
            if sampled.repeats and earlier.isdisjoint(repeated.get((workload, kind), ())):
                trusted = workload not in self._doubtful
                whose = f"sessions of {names[workload]} by {KINDS[kind]}"
                model = self._fit(whose, sampled, trusted=trusted)
                if model is not None:
                    models[model_name(names[workload], KINDS[kind])] = model
                    earlier.add(kind)
        for kind in map(KINDS.index, sorted(JOINED)):
            traces = events.filter(pl.col("kind") == kind)
            workloads = traces.group_by("key").agg(pl.col("workload").n_unique())["workload"]
            if (workloads > 1).sum() >= max(1, MIN_SHARED * workloads.len()):
                joint = self._joint(traces)
                if joint is not None:
                    models[model_name(JOINT, KINDS[kind])] = joint
        return models

    def _fit(self, whose: str, sampled: SampledSessions, *, trusted: bool) -> SessionModel | None:
        """None where too little was learnt from. What is not judged is noted."""
        least_ms = LEAST_TIMEOUTS * self._timeout_ms
        if sampled.longer < MIN_SESSIONS:
            learnt = plural(sampled.longer, "session")
            self.unjudged.append(f"{whose} are not judged: {learnt} of two lines or more, not {MIN_SESSIONS}")
            return None
        if sampled.span_ms is not None and sampled.span_ms < least_ms:
            took = f"{seconds(sampled.span_ms / 1000)}, not {seconds(least_ms / 1000)}"
            self.unjudged.append(f"{whose} are not judged: they were learnt from {took}")
            return None
        model = SessionModel.fit_segments(sampled.segments, trusted=trusted)
        if not model.decides:
            learnt = f"{plural(model.sessions, 'learnt session')} are too few or too different"
            self.unjudged.append(f"{whose} are judged by their order alone: {learnt} for a limit")
        judged = sum(map(len, sampled.segments)) << self._halvings
        # Without times nothing says how long it took, and a day is taken for it.
        per_day = judged * _DAY_MS / max(_DAY_MS if sampled.span_ms is None else sampled.span_ms, 1)
        return replace(model, follow_ups=learn_follow_ups(sampled.parts), per_day=per_day)

    def _joint(self, traces: pl.DataFrame) -> SessionModel | None:
        """The model of whole traces; None where there are too few."""
        names = list(self._names)
        pairs = traces.select("workload", "template_id").unique()
        events = {
            (workload, template): joint_event(names[workload], template)
            for workload, template in pairs.iter_rows()
        }
        numbers = pairs.with_columns(
            pl.Series("event", [events[pair] for pair in pairs.iter_rows()], dtype=pl.Int64)
        )
        whole = traces.join(numbers, on=["workload", "template_id"], maintain_order="left").with_columns(
            pl.col("event").alias("template_id"), pl.lit(0, dtype=pl.UInt32).alias("workload")
        )
        whole = whole.sort("template_id")  # events of one moment, as in OpenSession.whole
        ((_, sampled),) = self._parted(whole).items()
        trusted = self._doubtful.isdisjoint(traces["workload"].unique())
        model = self._fit("traces as wholes", sampled, trusted=trusted) if sampled.repeats else None
        if model is None:
            return None
        known = set(model.vocabulary.events.tolist())
        places = {event: (names[w], template) for (w, template), event in events.items() if event in known}
        return replace(model, places=places, shape=self._shape(traces))

    def _shape(self, traces: pl.DataFrame) -> TraceShape:
        traces = traces.filter(~pl.col("bad").any().over("key"))
        drawn = traces["key"].unique(maintain_order=True).head(MOST_TRACES)
        names = pl.col("workload").replace_strict(dict(enumerate(self._names)), return_dtype=pl.String)
        return trace_shape(
            traces.filter(pl.col("key").is_in(drawn.to_list())).select(
                pl.col("key").alias("trace"), names.alias("workload"), "at_ms"
            ),
            self._parents.calls(list(self._names)),
        )

    def _draw(self, events: pl.DataFrame) -> pl.DataFrame:
        # The lowest bits draw equal keys alike, in whichever page they are.
        mask = 2**self._halvings - 1
        drawn = events.filter(pl.col("key") & mask == 0) if self._halvings else events
        return drawn.select([pl.col(name).cast(dtype) for name, dtype in _EVENTS.items()])

    def _finished(self, cut: pl.DataFrame, last_ms: int) -> SampledSessions:
        bad = pl.col("bad").any().over("session")
        is_open = pl.col("end_ms") > last_ms - self._timeout_ms
        every = cut.with_columns(bad.alias("bad"), is_open.alias("open"))
        if float(every["open"].cast(pl.Float64).mean()) > _MAX_OPEN_SHARE:  # type: ignore[arg-type]
            every = every.with_columns(pl.lit(value=False).alias("open"))
        fit = every.filter(~pl.col("bad") & ~pl.col("open"))
        segments = fit.group_by("session", maintain_order=True).agg("template_id")["template_id"].to_list()
        timed = fit.filter("timed")
        drawn = timed.gather_every(-(-timed.height // MAX_PARTS) or 1).select("template_id", "at_ms")
        times = cut.filter("timed").select(
            begin=pl.col("at_ms").list.first().min(), end=pl.col("end_ms").max()
        )
        begin, end = times.row(0)
        return SampledSessions(
            segments=[tuple(map(tuple, session)) for session in segments],
            parts=[(tuple(events), tuple(at_ms)) for events, at_ms in drawn.iter_rows()],
            bad=every.filter("bad")["session"].n_unique(),
            unfinished=every.filter(pl.col("open") & ~pl.col("bad")).height,
            span_ms=None if begin is None else end - begin,
        )
