"""Periodic work, once per period however many beats ask (idempotent): slots, and times of day.

A schedule has a slot per multiple of its period on Redis time. A beat, or any other caller, begins the
current slot, acts, and finishes the slot. Only a finished slot is done: if its holder dies, the slot expires
and the next caller acts. Missed slots are one slot, the latest.

Why slots and not redbeat: a lock around the beat decides who *sends*, and redbeat's lock does not hold. A
beat whose connection fails while it takes the lock continues without it (redbeat #208, #238). A beat that is
cut off continues to send (#129), and the default lock needs 25 minutes to change hands. A message sent once
can still arrive twice or never. So firing must be idempotent, and the lock has no task left. Any number of
stock beats may ask, and the row in Redis decides, at the cost of one script call for each.

Actions run at least once, so they must be idempotent: a slow holder that is alive can lose its slot to
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
import redis

from pipeline.redis.arguments import named_arguments
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

# A clock that was corrected by less than this is waited for; NTP and failovers step by seconds.
STEP_BACK_MS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The right and the duty to act once for `nominal`."""

    name: str
    nominal: datetime  # aware UTC, a multiple of the period
    seq: int
    missed: int  # slots before this one that nobody finished; they are not repeated


class BeginArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Takes the current slot (training/slot_begin.lua)."""

    name: str
    every_ms: int
    owner: str
    ttl_ms: int
    step_back_ms: int  # that the clock may step back


class FinishArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Finishes a slot (training/slot_finish.lua)."""

    name: str
    seq: str
    nominal_ms: int


class Slots:
    """Begin and finish slots of named schedules. Raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.key = Keys(settings.redis.key_prefix).slots
        self.scripts = Scripts(client)
        self.ttl_ms = settings.internal.lease_ttl_ms

    def begin(self, name: str, every_s: float, owner: str) -> Slot | None:
        """None: the current slot is done, or somebody is at it.

        `owner` (not empty) tells operators who acts. One who is silent for `lease_ttl_ms` loses the slot.
        """
        every_ms = max(1, round(every_s * 1000))
        args = BeginArgs(
            name=name,
            every_ms=every_ms,
            owner=owner or "unnamed",
            ttl_ms=self.ttl_ms,
            step_back_ms=max(STEP_BACK_MS, every_ms),
        )
        answer = self.scripts.run("training/slot_begin", [self.key], [named_arguments(args)])
        if answer[0] != b"yours":
            return None
        nominal = datetime.fromtimestamp(int(answer[1]) // 1000, UTC)
        nominal += timedelta(milliseconds=int(answer[1]) % 1000)
        return Slot(name=name, nominal=nominal, seq=int(answer[2]), missed=int(answer[3]))

    def finish(self, slot: Slot) -> bool:
        """False: the slot was taken over meanwhile; who has it finishes it."""
        nominal_ms = (slot.nominal - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
        args = FinishArgs(name=slot.name, seq=str(slot.seq), nominal_ms=nominal_ms)
        return bool(self.scripts.run("training/slot_finish", [self.key], [named_arguments(args)]))


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
