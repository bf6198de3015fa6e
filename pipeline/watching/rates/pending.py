"""The pending buffer: lines by minute that wait to be judged, and how far judging has come."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Self

from msgspec import Meta

from pipeline.watching.rates.detection import LAST_MINUTE, EpochMinute, TemplateId
from pipeline.watching.rates.sender_clock import SPREAD, SenderClock

PENDING: Final = 4096  # (minute, template) counts that wait, of both buffers
MAX_COUNT: Final = 1 << 36

Lines = dict[EpochMinute, dict[TemplateId, Annotated[int, Meta(ge=1, le=MAX_COUNT)]]]


@dataclass(slots=True)
class PendingBuffer:
    """Counts of scored or of baseline lines. Every minute up to `closed` is judged."""

    pending: Lines = field(default_factory=dict)
    out_of_range: Lines = field(default_factory=dict)  # far behind `closed`
    closed: EpochMinute | None = None
    fresh: bool = False  # lines came since the last close; the oldest and the newest minute of these
    oldest: EpochMinute = LAST_MINUTE
    newest: Annotated[int, Meta(ge=-1, le=LAST_MINUTE)] = -1
    rounds_out_of_range: Annotated[int, Meta(ge=0, le=9)] = 0  # closes in a row with lines out of range only
    until: Annotated[int, Meta(ge=-64, le=LAST_MINUTE)] | None = (
        None  # watermark of a close that ran out of time
    )
    gap: EpochMinute | None = None  # the minute before the empty ones it was in
    clock: SenderClock = field(default_factory=SenderClock)
    latest: Annotated[
        int, Meta(ge=-1, le=LAST_MINUTE)
    ] = -1  # newest minute since the last close, late lines too

    def __post_init__(self) -> None:
        if self.entries() > PENDING:
            raise ValueError(f"{self.entries()} counts wait; the most is {PENDING}")

    def entries(self) -> int:
        return sum(map(len, self.pending.values())) + sum(map(len, self.out_of_range.values()))

    def known(self, now: int) -> list[int]:
        """The waiting minutes that are not further ahead than the lines of this buffer use to be."""
        edge = self.clock.edge(now)
        return [minute for minute in self.pending if minute <= edge]

    def drop_ahead(self, now: int) -> int:
        """Drop the minutes that are further ahead, but those that the clock reaches soon; returns how many
        lines."""
        soon = self.clock.edge(now) + SPREAD
        far = [minute for minute in self.pending if minute > soon]
        return sum(sum(self.pending.pop(minute).values()) for minute in far)

    def drop_out_of_range(self) -> int:
        """Returns how many lines it dropped."""
        dropped = sum(sum(counts.values()) for counts in self.out_of_range.values())
        self.out_of_range = {}
        return dropped

    def ordered(self) -> Self:
        """An equal buffer whose bytes do not depend on the order of arrival."""
        return replace(self, pending=_ordered(self.pending), out_of_range=_ordered(self.out_of_range))


def _ordered(lines: Lines) -> Lines:
    return {minute: dict(sorted(lines[minute].items())) for minute in sorted(lines)}
