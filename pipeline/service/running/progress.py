"""How far backfills and sends are, with the time left by their pace as one observer measures it.

A share of the whole is given only where the whole is known. An archive that is still listed grows, and a
sender does not say how much will come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.service.values import WorkloadLines
from pipeline.sources.backfill.pace import WINDOW_S, ReadingPace
from pipeline.sources.backfill.plans import BackfillView

MOST_SENDS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillProgress:
    """A backfill. `percent`: of the bytes of its archive, None where their sum is not known yet. `left_s` and
    `lines_per_s`: None before they were measured."""

    view: BackfillView
    percent: float | None = None
    left_s: float | None = None
    lines_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendProgress:
    """A workload with lines on their way. `left_s`: until those are stored, None before it was measured."""

    workload: str
    accepted: int
    in_flight: int
    left_s: float | None = None


class ProgressWatch:
    """The paces of what one process looks at. Those that nobody looked at for a minute begin anew."""

    def __init__(self) -> None:
        self._paces: dict[tuple[str, str], tuple[float, ReadingPace]] = {}

    def backfills(self, views: Sequence[BackfillView], now: float) -> list[BackfillProgress]:
        """In the order given. `now`: seconds of a monotonic clock."""
        found = []
        for view in views:
            if view.over:
                found.append(BackfillProgress(view=view))
                continue
            pace = self._pace(("backfill", view.name), now)
            pace.see(now, lines=view.lines, bytes_read=view.bytes_read)
            known = view.state == "reading" and view.bytes > 0
            left = pace.left_s(max(0, view.bytes - view.bytes_read)) if known else None
            percent = min(100.0, 100 * view.bytes_read / view.bytes) if known else None
            found.append(
                BackfillProgress(view=view, percent=percent, left_s=left, lines_per_s=pace.lines_per_s)
            )
        return found

    def sends(self, workloads: Mapping[str, WorkloadLines], now: float) -> list[SendProgress]:
        """The workloads with lines on their way, the most first. `now`: as for backfills."""
        moving = sorted(
            ((name, one) for name, one in workloads.items() if one.in_flight > 0),
            key=lambda item: (-item[1].in_flight, item[0]),
        )
        found = []
        for name, one in moving[:MOST_SENDS]:
            pace = self._pace(("send", name), now)
            pace.see(now, lines=one.accepted, bytes_read=one.accepted - one.in_flight)
            left = pace.left_s(one.in_flight)
            found.append(
                SendProgress(workload=name, accepted=one.accepted, in_flight=one.in_flight, left_s=left)
            )
        return found

    def _pace(self, name: tuple[str, str], now: float) -> ReadingPace:
        self._paces = {known: seen for known, seen in self._paces.items() if now - seen[0] < WINDOW_S}
        _, pace = self._paces.get(name, (now, ReadingPace()))
        self._paces[name] = (now, pace)
        return pace
