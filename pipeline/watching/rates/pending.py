"""Minutes of a workload that wait to be judged, and how far judging has come."""

from dataclasses import dataclass, field
from typing import Any, Final, Self

PENDING: Final = 4096  # (minute, template) counts that wait, of both tracks
LAST_MINUTE: Final = 253_402_300_799 // 60  # of the year 9999
MAX_COUNT: Final = 1 << 36


@dataclass(slots=True)
class Track:
    """Minutes that are not judged yet, of scored or of baseline lines. `closed`: all up to it are done."""

    pending: dict[int, dict[int, int]] = field(default_factory=dict)
    away: dict[int, dict[int, int]] = field(default_factory=dict)  # far behind `closed`
    closed: int | None = None
    fresh: bool = False  # lines came since the last close
    oldest: int = LAST_MINUTE  # minute of those
    newest: int = -1
    away_rounds: int = 0  # closes in a row that found only lines of another time
    until: int | None = None  # minute up to which a close that ran out of time would have judged
    gap: int | None = None  # of empty minutes that it was in: the minute before them

    def entries(self) -> int:
        return sum(map(len, self.pending.values())) + sum(map(len, self.away.values()))

    def pack(self) -> list[Any]:
        """For msgpack."""
        return [
            _sorted(self.pending), _sorted(self.away), self.closed, self.fresh, self.oldest, self.newest,
            self.away_rounds, self.until, self.gap,
        ]  # fmt: skip

    @classmethod
    def unpack(cls, data: Any) -> Self:
        """Raises ValueError or TypeError when it is not what `pack` gives."""
        pending, away, closed, fresh, oldest, newest, away_rounds, *rest = data
        until, gap = rest or (None, None)  # one of an earlier build has neither
        made = cls(
            pending=_held(pending),
            away=_held(away),
            closed=None if closed is None else whole(closed, 0, LAST_MINUTE),
            fresh=bool(fresh),
            oldest=whole(oldest, 0, LAST_MINUTE),
            newest=whole(newest, -1, LAST_MINUTE),
            away_rounds=whole(away_rounds, 0, 9),
            until=None if until is None else whole(until, -64, LAST_MINUTE),
            gap=None if gap is None else whole(gap, 0, LAST_MINUTE),
        )
        if made.entries() > PENDING:
            raise ValueError(f"{made.entries()} counts wait")
        return made


def lines(held: dict[int, dict[int, int]]) -> int:
    return sum(sum(counts.values()) for counts in held.values())


def _sorted(held: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
    return {minute: dict(sorted(held[minute].items())) for minute in sorted(held)}


def whole(value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise TypeError(f"{value!r} is not a whole number from {least} to {most}")
    return value


def _held(data: Any) -> dict[int, dict[int, int]]:
    return {
        whole(minute, 0, LAST_MINUTE): {whole(t): whole(n, 1, MAX_COUNT) for t, n in counts.items()}
        for minute, counts in data.items()
    }
