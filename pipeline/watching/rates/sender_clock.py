"""How far the times of a workload's lines are ahead of the clock: plain local times read in another zone.

A line ahead of the clock has either a wrong time, or the time of a sender whose lines are all ahead. The
majority of the lines decides after some minutes; until then such lines wait. Where they are the majority, the
clock by which the workload is judged goes ahead with them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from itertools import accumulate
from typing import Annotated, Final

from msgspec import Meta, Struct

FUTURE: Final = 10  # minutes that clocks of other machines may be ahead of ours
LIVE: Final = 15  # Minutes of lag up to which a stream is live.
MOST_MINUTES: Final = 1 << 40
_ROUNDS: Final = 3  # closes after which a majority decides
SPREAD: Final = 3  # different minutes that lines ahead need: one line of a broken clock has a single one
_TOGETHER: Final = 1440  # minutes between two lines of one log, at most

Minutes = Annotated[int, Meta(ge=0, le=MOST_MINUTES)]


class Ahead(Enum):
    """What becomes of the lines that are ahead of the clock."""

    WAIT = auto()
    FOLLOW = auto()  # the clock goes ahead with them
    DROP = auto()


class SenderClock(Struct, array_like=True):
    """Minutes by which the lines of one buffer are ahead, and what was seen of lines further ahead."""

    ahead: Minutes = 0
    rounds: Minutes = 0  # closes since lines further ahead began to wait
    lines: Minutes = 0  # that came since, with the waiting ones
    behind: Minutes = 0  # closes in a row whose newest line was too old for `ahead`

    def edge(self, now: int) -> int:
        """The last minute that is not further ahead, at this minute of the caller's clock."""
        return now + self.ahead + FUTURE

    def decide(self, now: int, waiting: Mapping[int, int], closed: int | None) -> Ahead:
        """`waiting`: lines by minute, none of them judged. `closed`: the last judged minute. FOLLOW changes
        `ahead`."""
        edge = self.edge(now)
        far = {minute: n for minute, n in waiting.items() if minute > edge}
        if not far:
            self.rounds = self.lines = 0
            return Ahead.WAIT
        self.rounds += 1
        count = sum(far.values())
        most = 2 * count > self.lines
        run = self._goes_on(max((minute for minute in waiting if minute <= edge), default=closed), far)
        if most and len(run) < SPREAD:
            middle = middle_minute(far.items())
            run = next(one for one in _runs(far, _TOGETHER) if middle in one)
        if len(run) >= SPREAD:
            self.ahead, self.rounds, self.lines, self.behind = run[-1] - now, 0, 0, 0
            return Ahead.FOLLOW
        if most or self.rounds < _ROUNDS:
            return Ahead.WAIT
        self.rounds = self.lines = 0
        return Ahead.DROP

    @staticmethod
    def _goes_on(last: int | None, far: Iterable[int]) -> list[int]:
        """The minutes ahead in which the log goes on from its minute `last` without a break."""
        return [] if last is None else _runs([last, *far], FUTURE)[0][1:]

    def falls_back(self, now: int, newest: int) -> bool:
        """Whether the lines are no longer that far ahead, as after their sender was corrected; then `ahead`
        has changed. `newest`: the newest minute since the last close, also of lines that came too late."""
        if not self.ahead or newest < 0:
            return False
        self.behind = self.behind + 1 if newest < now + self.ahead - LIVE else 0
        if self.behind < _ROUNDS:
            return False
        lead = newest - now
        self.ahead, self.behind = lead if lead > FUTURE else 0, 0
        return True


def _runs(minutes: Iterable[int], step: int) -> list[list[int]]:
    """These minutes in order, divided where two neighbours are more than `step` apart."""
    runs: list[list[int]] = []
    for minute in sorted(minutes):
        if runs and minute - runs[-1][-1] <= step:
            runs[-1].append(minute)
        else:
            runs.append([minute])
    return runs


def middle_minute(lines: Iterable[tuple[int, int]]) -> int:
    """The minute of the middle line of these (minute, lines), at least one."""
    rows = sorted(lines)
    ends = list(accumulate(n for _, n in rows))
    return rows[bisect_left(ends, ends[-1] / 2)][0]
