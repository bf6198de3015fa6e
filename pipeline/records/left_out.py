"""What was left out of the rates and numbers of a workload, and its lines whose times are ahead of the clock.

The counts only grow. Redis keeps them by workload; `status`, the metrics, the console and `run` read them.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec
from pipeline.units import plural, seconds

LEFT_OUT: Final = ("ahead", "late", "out_of_range", "values", "session_events", "failed")
KEPT_BACK: Final = "kept_back"  # findings that opened no incident (watching/alarm_budget.py)
MOST_LEAD: Final = 26 * 60  # minutes between the clocks of two time zones, at most
AHEAD: Final = timedelta(minutes=MOST_LEAD)  # times further ahead of the clock are of a broken one


class LeftOut(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of one workload since its first line: lines, but `values` are values of numbers."""

    ahead: int = 0  # more than ten minutes ahead of the clock when they came, whatever became of them
    lead: int = 0  # the most minutes that they were ahead, of those that a time zone explains
    late: int = 0  # came after their minute was judged
    out_of_range: int = 0  # have a time that cannot be
    values: int = 0  # had no place, or a time that cannot be
    session_events: int = 0  # past a limit: of a batch, of a session, or of all open sessions
    failed: int = 0  # lines, events of sessions and findings that were lost with a failure
    at_ms: int = 0  # when one of these last grew
    written: dict[str, int] = {}  # the counts as Redis has them

    def count_ahead(self, lines: int, minutes: int) -> None:
        """Lines so many minutes ahead of the clock."""
        self.ahead += lines
        if minutes <= MOST_LEAD:
            self.lead = max(self.lead, minutes)

    @property
    def lines(self) -> int:
        """How many lines it tells of."""
        return self.ahead + self.late + self.out_of_range

    def growth(self) -> dict[str, int]:
        """By kind, how much was added since `pack`; empty if nothing was."""
        grown = {kind: getattr(self, kind) - self.written.get(kind, 0) for kind in LEFT_OUT}
        return {kind: n for kind, n in grown.items() if n}

    def pack(self, now_ms: int) -> bytes:
        """The bytes for Redis, once something was added."""
        self.written = {kind: n for kind in LEFT_OUT if (n := getattr(self, kind))}
        self.at_ms = now_ms
        return _CODEC.pack(self)

    def sentences(self) -> list[str]:
        """What people should know of it, each without a period."""
        found = []
        if self.ahead:
            by = f"up to {seconds(60 * self.lead)}" if self.lead else "days"
            hint = "; is it the time zone?" if self.lead else ""
            found.append(f"{_lines(self.ahead)} {by} ahead of the clock{hint}")
        if self.out_of_range:
            found.append(f"{_lines(self.out_of_range)} not in the rates, because their time cannot be right")
        if self.late:
            found.append(f"{_lines(self.late)} not in the rates, because their minute was judged before")
        if self.values:
            found.append(f"{plural(self.values, 'value')} of numbers could not be followed")
        if self.session_events:
            found.append(
                f"{plural(self.session_events, 'event')} of sessions had no room or were judged without the rest"
            )
        if self.failed:
            lost = f"{self.failed:,} lines, events of sessions or findings"
            found.append(f"{lost} were lost with a failure; the logs say `watch.failed`")
        return found


_CODEC: Final = Codec(LeftOut, version=1, what="the lines that a workload's rates left out")


def unpack_left_out(blobs: Mapping[bytes, bytes]) -> dict[str, LeftOut]:
    """By workload; those that cannot be read are missing."""
    found = {}
    for name, blob in blobs.items():
        try:
            found[str(name, "utf-8", "replace")] = _CODEC.unpack(blob)
        except BadPayload:
            continue
    return found


def total_left_out(of_workloads: Iterable[LeftOut]) -> LeftOut:
    """The sums of these, and the largest lead."""
    found = LeftOut()
    for one in of_workloads:
        for kind in LEFT_OUT:
            setattr(found, kind, getattr(found, kind) + getattr(one, kind))
        found.lead, found.at_ms = max(found.lead, one.lead), max(found.at_ms, one.at_ms)
    return found


def _lines(count: int) -> str:
    return f"{plural(count, 'line')} {'is' if count == 1 else 'are'}"
