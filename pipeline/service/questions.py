"""Questions about what is stored, as a person asks them: patterns of workloads, spans of time, filters.

The command line and the API build the same values, and check them the same way.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, Self, get_args

from pipeline.controller.watchlist import check_pattern
from pipeline.errors import BadInput
from pipeline.observe.events import id_before, is_event_id
from pipeline.records.left_out import AHEAD
from pipeline.records.levels import LEVELS
from pipeline.units import LOG_YEARS, span, time_of

MAX_TEXT: Final = 2_000  # characters of a text that is looked for
TABLE_PAGE: Final = 10_000  # lines of a page of a table; DuckDB finds as many by their keys first
MAX_SPAN: Final = timedelta(days=3_660)
BUCKETS: Final = 24  # of a trend
MOST_AMONG: Final = 5_000  # templates that a question names
ROUNDED: Final = timedelta(hours=3)
_BUCKET: Final = timedelta(minutes=5)  # of the finest counts
_MIDNIGHT: Final = datetime(2020, 1, 1, tzinfo=UTC)

PatternOrder = Literal["count", "change", "new", "less"]
UsageColumn = Literal["tenant", "kind", "device", "node", "user", "model", "day"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesAsked:
    """The newest lines that match all of it. `workload`: a pattern as in `logweir watch`. `context`: also so
    many records before and after each. `cursor`: of the page before."""

    limit: int = 50
    since: datetime | None = None
    until: datetime | None = None
    workload: str | None = None
    level: str | None = None
    text: str | None = None
    template_id: int | None = None
    anomalous: bool = False
    context: int = 0
    cursor: str | None = None
    only: tuple[str, ...] = ()  # patterns of the workloads that the asker sees; empty: all

    def __post_init__(self) -> None:
        _check_filters(self.workload, self.since, self.until)
        if self.level is not None and self.level not in LEVELS:
            raise BadInput(f"level {self.level[:40]!r} is none; use one of {', '.join(LEVELS)}")
        if self.text is not None and len(self.text) > MAX_TEXT:
            raise BadInput(f"the text has {len(self.text):,} characters; ask for at most {MAX_TEXT:,}")
        if self.since is not None and self.until is not None and self.until < self.since:
            until, since = (at.isoformat(timespec="seconds") for at in (self.until, self.since))
            raise BadInput(f"until {until} is before since {since}; give a later time")

    def at_clock(self, now: datetime) -> "tuple[LinesAsked, LinesAsked | None]":
        """Without an end: the same question up to the clock, and one for the newest line that is ahead of it.

        A line of a broken clock would be the newest one for years. A question with an end stays as it is."""
        end = now + AHEAD
        if self.until is not None or self.cursor is not None or (self.since is not None and self.since > end):
            return self, None
        return replace(self, until=end), replace(self, since=end, limit=1, context=0)

    @property
    def filters(self) -> tuple[object, ...]:
        """All but the page and the span: a cursor belongs to them, and brings its own span."""
        return (self.workload, self.level, self.text, self.template_id, self.anomalous, self.only)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternsAsked:
    """The patterns of [since, until), beside the span of the same length that begins at `against`. `among`:
    no other templates than these."""

    since: datetime
    until: datetime
    against: datetime | None = None  # None: the span before
    workload: str | None = None
    template_id: int | None = None
    among: tuple[int, ...] | None = None
    anomalous: bool = False
    order: PatternOrder = "count"
    limit: int = 30
    buckets: int = BUCKETS
    cursor: str | None = None
    only: tuple[str, ...] = ()  # as in LinesAsked

    def __post_init__(self) -> None:
        _check_filters(self.workload, self.since, self.until)
        if self.until <= self.since:
            raise BadInput(
                f"until {self.until.isoformat()} is not after since {self.since.isoformat()}; give a later time"
            )
        if self.until - self.since > MAX_SPAN:
            raise BadInput(f"the span is longer than {MAX_SPAN.days:,} days; ask for a shorter one")
        if self.among is not None and len(self.among) > MOST_AMONG:
            raise BadInput(
                f"{len(self.among):,} patterns are of this kind; that is too many to filter, leave the filter out"
            )
        if self.order not in get_args(PatternOrder):
            raise BadInput(f"order {self.order!r} is none; use {', '.join(get_args(PatternOrder))}")
        try:
            _ = self.other
        except OverflowError as exc:
            raise BadInput(
                "the span to compare with reaches back before the year 1; ask for a later one"
            ) from exc

    @property
    def other(self) -> tuple[datetime, datetime]:
        """The span to compare with."""
        length = self.until - self.since
        begin = self.since - length if self.against is None else self.against
        return begin, begin + length

    @property
    def filters(self) -> tuple[object, ...]:
        """All but the page and the span: a cursor brings its own."""
        return self.workload, self.template_id, self.among, self.anomalous, self.order, self.only

    def with_span(self, since: datetime, until: datetime, against: datetime) -> Self:
        """The same question about another span."""
        return replace(self, since=since, until=until, against=against)


def pattern_span(
    since: str, until: str | None, now: datetime, *, flags: tuple[str, str] = ("since", "until")
) -> tuple[datetime, datetime]:
    """The span of patterns. One of ROUNDED or more that goes up to now is widened to whole five minutes, for
    which counts are kept. Raises BadInput, also for an end that is not after the beginning."""
    begin = time_of(since, now, flag=flags[0])
    end = asked_moment(until, now, flag=flags[1])
    if begin >= (end or now):
        raise BadInput(f"{flags[1]} {until or 'now'} is not after {flags[0]} {since}; give a longer span")
    if end is not None:
        return begin, end
    if span(since) is None or now - begin < ROUNDED:
        return begin, now
    return begin - (begin - _MIDNIGHT) % _BUCKET, now + (_MIDNIGHT - now) % _BUCKET


def template_number(text: str, *, flag: str = "--template") -> int:
    """The template that `T17` or `17` names. Raises BadInput."""
    number = text.removeprefix("T").removeprefix("t")
    digits = number.removeprefix("-")
    # Findings in sessions and rates have templates of 62 bits, below zero.
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 19 or int(digits) >= 1 << 63:
        raise BadInput(f"{flag} {text[:40]!r} is no template; give its number, such as T17")
    return int(number)


def asked_moment(text: str | None, now: datetime, *, flag: str) -> datetime | None:
    """The moment of a text such as `1h` or 2026-11-20T10:00, None without one. Raises BadInput."""
    return time_of(text, now, flag=flag) if text else None


def asked_event(text: str | None, now: datetime, *, flag: str) -> str | None:
    """The id of an event behind which a page begins: an id, or that before a moment. Raises BadInput."""
    if not text or is_event_id(text):
        return text or None
    try:
        return id_before(time_of(text, now, flag=flag))
    except BadInput as exc:
        raise BadInput(f"{exc}, or the id of an event such as 1795168801123-0") from exc


def _check_filters(workload: str | None, since: datetime | None, until: datetime | None) -> None:
    if workload is not None:
        check_pattern(workload)
    for name, at in (("since", since), ("until", until)):
        if at is not None and at.year not in LOG_YEARS:
            raise BadInput(f"{name} {at.isoformat()} is no time of a log; give one of this age")
