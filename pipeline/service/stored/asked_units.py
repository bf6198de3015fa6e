"""The question which units are unusual, and its answer; a client of the API needs no columns for them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final, get_args

from pipeline.errors import BadInput
from pipeline.records.unit_query import UNIT_COLUMNS, UnitKind
from pipeline.service.questions import MAX_SPAN, LinesAsked, pattern_span
from pipeline.units import time_of
from pipeline.watching.units.values import UnitRanking

WINDOWS: Final = 6  # of the normal span, unless it is given


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsAsked:
    """The units of [since, until), beside those of [normal, since). Raises BadInput."""

    by: UnitKind
    normal: datetime
    since: datetime
    until: datetime
    workload: str | None = None
    limit: int = 20
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.by not in get_args(UnitKind):
            raise BadInput(
                f"by {str(self.by)[:40]!r} is no unit; use one of {', '.join(sorted(UNIT_COLUMNS))}"
            )
        LinesAsked(since=self.since, until=self.until, workload=self.workload)  # checks them
        for name, begin, end in (("until", self.since, self.until), ("since", self.normal, self.since)):
            if end <= begin:
                raise BadInput(
                    f"{name} {end.isoformat()} is not after {begin.isoformat()}; give a later time"
                )
        if self.until - self.normal > MAX_SPAN:
            raise BadInput(f"the span is longer than {MAX_SPAN.days:,} days; ask for a shorter one")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsFound:
    """The units in order. `unnamed`: lines that name no such unit. `open`: sessions that may go on."""

    by: UnitKind
    normal_since: datetime
    since: datetime
    until: datetime
    ranking: UnitRanking
    unnamed: int
    open: int


def units_asked(
    by: UnitKind, since: str, until: str | None, normal: str | None, now: datetime, **more: object
) -> UnitsAsked:
    """The question of these texts. Raises BadInput."""
    begin, end = pattern_span(since, until, now)
    try:
        before = time_of(normal, now, flag="normal") if normal else begin - WINDOWS * (end - begin)
    except OverflowError as exc:
        raise BadInput(f"the span is longer than {MAX_SPAN.days:,} days; ask for a shorter one") from exc
    return UnitsAsked(by=by, normal=before, since=begin, until=end, **more)  # type: ignore[arg-type]
