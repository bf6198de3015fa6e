"""Alarms about numbers, and their sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.records.verdict import Reason
from pipeline.watching.numbers.variable import Deviation
from pipeline.watching.rates.detection import TOGETHER
from pipeline.watching.values.bins import EXACT
from pipeline.watching.values.typed import ValueKind

EVERY_TEMPLATE: Final = 0  # the id of what all templates of a workload have together
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PLACES: Final = ("median", "90 % quantile")
_UNITS: Final = {
    ValueKind.DURATION: ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    ValueKind.SIZE: ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "B")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberAlarm:
    """A distribution that is another one, or a value far outside. `others`: where it stands for the
    workload, because many variables shifted in one minute, their templates; the surest is the one shown."""

    kind: Reason
    template_id: int
    name: str
    value_kind: ValueKind
    shown: Deviation
    minute: int  # epoch minute
    per_day: float  # findings as unlikely that the workload has a day by chance
    others: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """The short stable name under which equal alarms group."""
        return self.kind.value if self.others else f"{self.kind.value}:{self.template_id}:{self.name}"

    @property
    def at(self) -> datetime:
        """The minute of its window's end."""
        return _EPOCH + timedelta(minutes=self.minute)


def of_one_minute(found: Sequence[NumberAlarm]) -> list[NumberAlarm]:
    """The alarms of one minute; more than TOGETHER of one kind are one of the workload, with the surest in
    front."""
    kept = []
    for kind in (Reason.NUMBER_SHIFT, Reason.NUMBER_OUTLIER):
        same = sorted((alarm for alarm in found if alarm.kind is kind), key=lambda one: -one.shown.nats)
        if len(same) > TOGETHER:
            others = tuple(f"T{one.template_id}" for one in same if one.template_id)
            kept.append(replace(same[0], others=tuple(dict.fromkeys(others))))
        else:
            kept += same
    return kept


def number_sentence(alarm: NumberAlarm, text: str | None) -> str:
    """`took` of `request took <DURATION>`: median 1.8 s, was 40 ms, ... `text`: of its template."""
    shown, kind = alarm.shown, alarm.value_kind
    which = f"`{text}`" if text else f"template {alarm.template_id}"
    if alarm.template_id == EVERY_TEMPLATE:
        which = f"`{alarm.name}` of all templates"
    elif alarm.name != f"{kind.value}#1":
        which = f"`{alarm.name}` of {which}"
    if alarm.others:
        which = f"many values shifted together ({', '.join(alarm.others[:3])} and more), first {which}"
    when = f"in {shown.n:,} values until {alarm.at:%Y-%m-%d %H:%M} UTC"
    if kind in EXACT:
        bad = "statuses from 400 on" if kind is ValueKind.STATUS else "codes other than 0"
        return f"{which}: {shown.now:.0%} {bad}, was {shown.was:.1%}, {when}"
    now, was = quantity(kind, shown.now), quantity(kind, shown.was)
    if alarm.kind is Reason.NUMBER_OUTLIER:
        return f"{which}: a value of {now}, where 99 % are below {was}, {when}"
    return f"{which}: {_PLACES[shown.place]} {now}, was {was}, {when}"


def quantity(kind: ValueKind, value: float) -> str:
    """`1.8 s`, `40 ms`, `1.2 MiB`, `1,234`: two digits, as a bin tells."""
    if kind not in _UNITS:
        return _rounded(value)
    units = _UNITS[kind]
    scale, unit = next(((scale, unit) for scale, unit in units if value >= scale), units[-1])
    return f"{_rounded(value / scale)} {unit}"


def _rounded(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{float(f'{value:.2g}'):,.0f}"
