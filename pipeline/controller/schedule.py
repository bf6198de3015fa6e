"""Times of day at which a training is due."""

from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo


def last_time_of_day(now: datetime, times: Sequence[str], zone: ZoneInfo) -> datetime | None:
    """The latest of these times of day ("HH:MM" in `zone`) not after `now`, in aware UTC; None without times.

    Every time comes once a day. One that the clocks skip comes as much later as they skip; one that they
    repeat is meant the first time.
    """
    return max((at for at in _around(now, times, zone) if at <= now), default=None)


def next_time_of_day(now: datetime, times: Sequence[str], zone: ZoneInfo) -> datetime | None:
    """The earliest of these times of day that is after `now`; otherwise like `last_time_of_day`."""
    return min((at for at in _around(now, times, zone) if at > now), default=None)


def _around(now: datetime, times: Sequence[str], zone: ZoneInfo) -> list[datetime]:
    """All of them from two days before to two days after: more than any zone moves its clocks."""
    today = now.astimezone(zone).date()
    days = [today + timedelta(days=offset) for offset in range(-2, 3)]
    # fold=0: of a repeated time the first, and a skipped one is read with the offset before the skip.
    return [
        datetime.combine(day, time.fromisoformat(text), tzinfo=zone).astimezone(UTC)
        for day in days
        for text in times
    ]
