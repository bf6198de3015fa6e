"""Sources whose clock differs from that of the other lines of their workload: their lines are moved to the
workload's time, because the clock of a workload follows the majority (sender_clock.py).

Only sources that differ are remembered, 64 of a workload.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from pipeline.watching.rates.sender_clock import FUTURE, LIVE

MOST_SOURCES: Final = 64
_ROUNDS: Final = 6  # of differing lines before they move: longer than the workload's clock takes to follow


class SourceClock(Struct, array_like=True):
    """A source that differs from its workload. `lead`: minutes ahead of the clock."""

    lead: int
    round: int  # the last one with lines of it
    rounds: Annotated[int, Meta(ge=0)] = 0


SourceClocks = dict[str, SourceClock]


def minutes_to_move(clocks: SourceClocks, source: str, *, lead: int, ahead: int, round_minute: int) -> int:
    """Notes that new lines of this source are `lead` minutes ahead of the clock and those of its workload
    `ahead`; returns the minutes to add to their times."""
    if -LIVE <= lead - ahead <= FUTURE:
        clocks.pop(source, None)
        return 0
    if lead < -LIVE:  # an old log says nothing of a clock
        return 0
    known = clocks.get(source)
    if known is None or abs(known.lead - lead) > FUTURE:
        if known is None and len(clocks) >= MOST_SOURCES:
            del clocks[min(clocks, key=lambda name: clocks[name].round)]
        known = clocks[source] = SourceClock(lead=lead, round=round_minute)
    known.lead = max(known.lead, lead)
    if known.round != round_minute:
        known.round, known.rounds = round_minute, known.rounds + 1
    return ahead - known.lead if known.rounds >= _ROUNDS else 0
