"""Which objects of an archive lie between --since and --until, by the date in their name or the time of their
change."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

# app-2026-11-20.log, 2026/11/20/app.log, app.20261120T10.gz, dt=2026-11-20/hour=10/part-0.gz
_DATE: Final = re.compile(
    r"(?<!\d)(?P<year>(?:19|20)\d\d)(?P<between>[-_/.]?)(?P<month>0[1-9]|1[0-2])(?P=between)"
    r"(?P<day>0[1-9]|[12]\d|3[01])(?!\d{3})"
    r"(?:[-_/.T]?(?:hour=|h=)?(?P<hour>[01]\d|2[0-3])(?!\d{3}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From `since` up to `until`; None: without a bound."""

    since: datetime | None = None
    until: datetime | None = None

    def takes(self, name: str, changed: float) -> bool:
        """True where the time of an object overlaps the window."""
        begin, end = time_of_object(name, changed)
        return (self.since is None or end > self.since) and (self.until is None or begin < self.until)


def time_of_object(name: str, changed: float) -> tuple[datetime, datetime]:
    """Begin and end: the day or hour (UTC) that the name says last, else the moment of the last change."""
    for found in reversed(list(_DATE.finditer(name))):
        year, month, day, hour = found.group("year", "month", "day", "hour")
        try:
            begin = datetime(int(year), int(month), int(day), int(hour or 0), tzinfo=UTC)
        except ValueError:  # the 31st of a shorter month
            continue
        return begin, begin + (timedelta(hours=1) if hour else timedelta(days=1))
    moment = datetime.fromtimestamp(changed, UTC)
    return moment, moment + timedelta(microseconds=1)
