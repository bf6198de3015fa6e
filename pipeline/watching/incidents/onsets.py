"""Onsets: when causes began, and which of them began together.

One fault shows in several services and templates within a minute or two. So onsets that are close in time
make one incident, over all workloads. A cause that goes on for hours has one onset, and joins nothing after
it. Both the report of a run (`findings.order`) and the live state (`live.Incidents`) group with `together`,
which depends on the set of onsets alone, not on their order.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

GAP: Final = timedelta(seconds=60)  # Services retry and time out within a minute as a rule.
BURST_SPAN: Final = timedelta(seconds=120)  # The longest that one onset keeps its incident open.
SPAN: Final = timedelta(seconds=180)  # A longer chain of onsets is more than one incident.
SHORTEST_GAP: Final = timedelta(seconds=5)  # Below this, order in time tells nothing of cause and effect.


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """The beginning of one cause."""

    first: datetime
    burst_end: datetime  # End of the opening burst: no gap over GAP, at most BURST_SPAN after `first`.
    leads: bool  # It may make an incident; another onset joins a near incident, or makes one of its own.
    key: tuple[Any, ...]  # Orders onsets of one moment; different for every onset.


def together(onsets: Sequence[Onset]) -> list[list[Onset]]:
    """Incidents by time of their first onset, each with its onsets by time.

    An incident stays open for GAP after the last onset or the end of an opening burst. An incident that spans
    more than SPAN is cut at half the gap, recursively. If no gap is wider than twice SHORTEST_GAP, it is cut
    after every SPAN. A lone onset after a cut rejoins its nearer neighbour if both fit in SPAN: equal gaps
    are no sign of two incidents. Onsets that do not lead join a near incident, or make incidents of their
    own. So a harmless one-off never joins two.
    """
    incidents = _runs([o for o in onsets if o.leads], GAP)
    starts, ends = [run[0].first for run in incidents], [max(o.burst_end for o in run) for run in incidents]
    alone = []
    for onset in _by_time([o for o in onsets if not o.leads]):
        # Incidents are sorted by time and bounded in length: of thousands only a few can be near.
        nearby = range(
            bisect_left(starts, onset.first, key=lambda start: start + SPAN + BURST_SPAN + GAP),
            bisect_right(starts, onset.first + GAP),
        )
        distance = {at: max(starts[at] - onset.first, onset.first - ends[at], timedelta(0)) for at in nearby}
        nearest = min(nearby, key=distance.__getitem__, default=None)
        if nearest is None or distance[nearest] > GAP:
            alone.append(onset)
        else:
            incidents[nearest].append(onset)
    return sorted(map(_by_time, [*incidents, *_runs(alone, GAP)]), key=lambda run: (run[0].first, run[0].key))


def _by_time(onsets: Sequence[Onset]) -> list[Onset]:
    return sorted(onsets, key=lambda o: (o.first, o.key))


def chains(onsets: Sequence[Onset], gap: timedelta = GAP) -> list[list[Onset]]:
    """Runs with at most `gap` between an onset and the bursts before it, of any length."""
    runs: list[list[Onset]] = []
    reach = datetime.min.replace(tzinfo=UTC)
    for onset in _by_time(onsets):
        if not runs or onset.first > reach:
            runs.append([])
            reach = onset.first + gap
        runs[-1].append(onset)
        # At a shorter gap onsets alone decide, because bursts made the chain too long.
        reach = max(reach, (onset.burst_end if gap == GAP else onset.first) + gap)
    return runs


def _runs(onsets: Sequence[Onset], gap: timedelta) -> list[list[Onset]]:
    bounded: list[list[Onset]] = []
    for run in chains(onsets, gap):
        if run[-1].first - run[0].first <= SPAN:
            bounded.append(run)
        elif gap / 2 < SHORTEST_GAP:
            bounded += _stretches(run)
        else:
            bounded += _rejoined(_runs(run, gap / 2))
    return bounded


def _stretches(run: list[Onset]) -> list[list[Onset]]:
    """A run without a gap to cut at, in pieces of SPAN."""
    pieces: list[list[Onset]] = []
    for onset in run:
        if not pieces or onset.first - pieces[-1][0].first > SPAN:
            pieces.append([])
        pieces[-1].append(onset)
    return pieces


def _rejoined(pieces: list[list[Onset]]) -> list[list[Onset]]:
    """Consecutive pieces of one run, with lone onsets joined to a neighbour across the narrowest gap."""
    home = list(range(len(pieces)))  # union-find: joined pieces are a stretch, named by its first piece

    def stretch(at: int) -> int:
        while home[at] != at:
            home[at] = at = home[home[at]]
        return at

    joined = [list(piece) for piece in pieces]
    gaps = [(later[0].first - earlier[-1].first, at) for at, (earlier, later) in enumerate(pairwise(pieces))]
    # Stretches only grow, so a gap that was not joined once never will be: one pass is enough.
    for gap, at in sorted(gaps):
        earlier, later = joined[stretch(at)], joined[at + 1]
        lone = len(earlier) == 1 or len(later) == 1
        if gap <= GAP and lone and later[-1].first - earlier[0].first <= SPAN:
            earlier += later
            home[at + 1] = stretch(at)
    return [joined[at] for at in range(len(pieces)) if home[at] == at]
