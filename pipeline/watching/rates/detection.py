"""A detection, the back-off of alerts by cause, and the context of a judged minute."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import Baseline
from pipeline.watching.rates.columns import TOTAL
from pipeline.watching.rates.season import KINDS, Season
from pipeline.watching.rates.tail_bounds import Floats

LAST_MINUTE: Final = 253_402_300_799 // 60  # of the year 9999
TOGETHER: Final = 3  # detections of one kind in one minute; more become one of the workload
_CAUSES: Final = 512
_PAUSE: Final = 30.0  # minutes of the first pause; each repeat doubles it, up to a day

EpochMinute = Annotated[int, Meta(ge=0, le=LAST_MINUTE)]
TemplateId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Finite = Annotated[float, Meta(gt=-1e300, lt=1e300)]
Positive = Annotated[float, Meta(ge=0.0, lt=1e18)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DailyRun:
    """The run of a daily job that did not come."""

    first: EpochMinute  # between these it was expected
    last: EpochMinute
    days: Annotated[int, Meta(ge=0, le=366)]  # with a run before


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One minute out of the ordinary. `template_id` None: of the workload as a whole."""

    kind: Reason
    template_id: TemplateId | None
    began: EpochMinute
    minute: EpochMinute
    expected: Finite  # lines since it began
    seen: Finite
    nats: Finite  # minus the logarithm of the bound on its probability
    threshold: Finite
    per_day: Positive  # findings as unlikely that the workload has a day by chance; 0: not left to chance
    others: tuple[TemplateId, ...] = ()  # templates that take part
    season: str = "no"  # seasonality kind behind `expected`: "no", "24" or "168" slots
    run: DailyRun | None = None  # of a silence that is a missed run

    @property
    def cause(self) -> str:
        """The short stable name under which equal detections group."""
        return cause_name(self.kind, self.template_id)


def cause_name(kind: Reason, template_id: int | None) -> str:
    return kind.value if template_id is None else f"{kind.value}:{template_id}"


def cause_of_row(kind: Reason, row: int, ids: Sequence[int]) -> str:
    return cause_name(kind, None if row == TOTAL else ids[row])


class Repeat(NamedTuple):
    repeats: Positive
    quiet_until: Positive  # epoch minute
    alerted: Positive  # epoch minute


PackedCauses = Annotated[dict[Annotated[str, Meta(max_length=40)], Repeat], Meta(max_length=_CAUSES)]


class AlertBackoff:
    """Exponential back-off by cause: each alert doubles the pause after it, quiet days shorten the pause."""

    def __init__(self) -> None:
        self.causes: dict[str, Repeat] = {}

    def admit(self, cause: str, minute: int) -> bool:
        """Whether this cause may alert now; if so, the alert counts."""
        if minute < self.quiet_until(cause):
            return False
        self.causes[cause] = Repeat(self.repeats(cause, minute) + 1.0, 0.0, float(minute))
        if len(self.causes) > _CAUSES:
            for old in sorted(self.causes, key=lambda k: (self.causes[k].alerted, k))[: _CAUSES // 8]:
                del self.causes[old]
        return True

    def admit_group(
        self,
        found: Sequence[tuple[int, Detection]],
        merge: Callable[[list[Detection]], Detection],
        minute: int,
    ) -> tuple[list[int], list[Detection]]:
        """The rows whose episodes are reported now, and the detections that report them.

        More than `TOGETHER` become one of the workload. A row that is not among the returned ones has had no
        alert: the caller leaves it pending and asks again in the next minute."""
        free = [(row, one) for row, one in found if minute >= self.quiet_until(one.cause)]
        reported = merged_group([one for _, one in free], merge)
        if len(free) > TOGETHER and minute < self.quiet_until(reported[0].cause):
            return [], []
        for cause in dict.fromkeys(one.cause for one in [*reported, *(one for _, one in free)]):
            self.admit(cause, minute)
        return [row for row, _ in free], reported

    def ended(self, cause: str, minute: int) -> None:
        """Begin the pause of a cause that is over."""
        if cause in self.causes:
            repeats, until, last = self.causes[cause]
            if until == 0.0 or until < last:
                pause = min(1440.0, _PAUSE * 2.0 ** (repeats - 1.0))
                self.causes[cause] = Repeat(repeats, float(minute) + pause, last)

    def repeats(self, cause: str, minute: int) -> float:
        """The number of earlier alerts of this cause; each quiet day takes one off."""
        repeats, _, last = self.causes.get(cause, Repeat(0.0, 0.0, float(minute)))
        return max(0.0, repeats - max(0.0, minute - last) / 1440)

    def quiet_until(self, cause: str) -> float:
        return self.causes[cause].quiet_until if cause in self.causes else 0.0


def merged_group(found: list[Detection], merge: Callable[[list[Detection]], Detection]) -> list[Detection]:
    """The detections of one minute; more than `TOGETHER` become one of the workload."""
    return [merge(found)] if len(found) > TOGETHER else found


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteContext:
    """Facts that every detector reads of the minute it judges, or of the first of many idle minutes."""

    minute: int
    judged: bool  # False: only learnt
    ids: Sequence[int]  # template by row
    season: Season
    baseline: Baseline
    returns: Floats  # minutes with a line of each template that ended a gap
    dispersion: Floats  # of single minutes
    backoff: AlertBackoff
    alarm_per_day: float  # a finding that comes more often by chance is no alarm yet

    def report(
        self,
        found: Sequence[tuple[int, Detection]],
        known: Collection[int],
        merge: Callable[[list[Detection]], Detection],
    ) -> tuple[dict[int, bool], list[Detection]]:
        """The rows that are reported now, each with whether that is an alarm, and the detections that report
        them. `known`: rows that were found before; they are reported again once they are alarms."""
        rows, detections = self.backoff.admit_group(
            [(row, one) for row, one in found if row not in known], merge, self.minute
        )
        surer = {row: one for row, one in found if row in known and one.per_day <= self.alarm_per_day}
        together = detections[0].per_day if len(rows) > TOGETHER else math.inf
        each = {row: min(one.per_day, together) for row, one in found if row in rows or row in surer}
        alarms = {row: per_day <= self.alarm_per_day for row, per_day in each.items()}
        return alarms, detections + merged_group(list(surer.values()), merge)

    def detection(
        self,
        kind: Reason,
        row: int,
        *,
        began: int,
        expected: float,
        observed: float,
        nats: float,
        threshold: float,
        per_day: float,
    ) -> Detection:
        return Detection(
            kind=kind,
            template_id=None if row == TOTAL else self.ids[row],
            began=began,
            minute=self.minute,
            expected=expected,
            seen=observed,
            nats=nats,
            threshold=threshold,
            per_day=per_day,
            season=KINDS[self.season.kinds()[row]],
        )
