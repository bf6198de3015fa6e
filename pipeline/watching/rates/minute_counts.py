"""The pulse of one workload: how often which template came since the last look at its rates.

The state of rates is large and a minute is long, so counts are gathered here and handed over about once a minute. They
are held back while a batch that was accepted before theirs is still in flight: a minute of which half is missing would
look like a silence.

Rates may take long: a log with a line an hour has years of minutes to be judged in a few batches. So a look at them ends
when its time is up, and is gone on with in the next round; what was not handed over until then waits here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
import polars as pl

from pipeline.errors import BadPayload
from pipeline.watching.observation import RATES_SCHEMA, Lane, Observation
from pipeline.watching.rates.rates import FUTURE, Alarm, GoesOn, Rates

PULSE_VERSION: Final = 1
SILENT_MS: Final = 86_400_000  # after a day without any line its silence is said and no news
# Minutes in which rates are looked at although nothing came: what is read from a file is judged to its end then.
AFTER: Final = 3
ENDS_PART: Final = (
    10  # of a stream so many times as long as a session may be silent, a tenth at most is its end
)
MOST_COUNTS: Final = 2_000  # pairs of minute and template that are gathered; rates take 4,096 at once
# Of one workload; with more, nothing is read until its rates have taken some. A batch may bring twice that at once.
MOST_HELD: Final = 2 * MOST_COUNTS
MOST_AHEAD: Final = 32  # batches whose predecessors are awaited; of more, the newest two become one

# Per lane, when the oldest batch of it in flight was accepted; a lane with none is not in it.
Waiting = Mapping[Lane, int]


@dataclass(slots=True, kw_only=True)
class Pulse:
    """What is known of a workload between two looks at its rates. Minutes and times of lines are event time."""

    at_ms: int | None = None  # newest line before which no batch is missing
    began_ms: int | None = None  # its oldest line that was not only learnt from
    newest_ms: int = 0  # when a batch of it was accepted last
    looked: int = 0  # the minute of Redis time of the last look at its rates
    size: int = 0  # bytes of the state of its rates
    live: bool = False  # silences show without new lines (watching/rates/rates.py)
    after: int = 0  # looks that are still to come although nothing came
    behind: bool = False  # the last look at its rates ran out of time
    ahead: list[tuple[str, int, int]] = field(default_factory=list)  # (lane, accepted, newest line)
    counts: dict[tuple[int, int], int] = field(default_factory=dict)  # (minute, template) -> lines
    learnt: dict[tuple[int, int], int] = field(default_factory=dict)  # of lines that are only learnt from

    def observe(self, seen: Observation, *, judged: bool) -> None:
        """Count a batch. What is only learnt from moves no time: a baseline may be of any."""
        into = self.counts if judged else self.learnt
        for minute, template_id, n in seen.rates.iter_rows():
            into[minute, template_id] = into.get((minute, template_id), 0) + n
        self.newest_ms = max(self.newest_ms, seen.accepted_ms)
        if not judged or seen.rates.is_empty():
            return
        oldest = int(seen.rates["minute"][0]) * 60_000
        self.began_ms = oldest if self.began_ms is None else min(self.began_ms, oldest)
        # One line of a broken clock must not make every minute look complete.
        newest_ms = min(seen.newest_ms, seen.accepted_ms + FUTURE * 60_000)
        self.ahead.append((seen.lane.value, seen.accepted_ms, newest_ms))
        if len(self.ahead) > MOST_AHEAD:
            self.ahead.sort(key=lambda entry: entry[1])
            (_, _, before), (lane, accepted, last) = self.ahead[-2:]
            self.ahead[-2:] = [(lane, accepted, max(before, last))]

    def advance(self, waiting: Waiting) -> None:
        """Take note of which batches are in flight: what came before the oldest of them is complete."""
        rest = []
        for lane, accepted, at_ms in self.ahead:
            if accepted >= waiting.get(Lane(lane), accepted + 1):
                rest.append((lane, accepted, at_ms))
            else:
                self.at_ms = at_ms if self.at_ms is None else max(self.at_ms, at_ms)
        self.ahead = rest

    def breaks_off(self, timeout_ms: int) -> int | None:
        """When it would end now: from then on sessions may miss their end. None where that would be most of them, as a
        stream that is short is all end."""
        last = max((at for _, _, at in self.ahead), default=self.at_ms)
        last = last if self.at_ms is None or last is None else max(last, self.at_ms)
        if last is None or self.began_ms is None or last - self.began_ms < ENDS_PART * timeout_ms:
            return None
        return last - timeout_ms

    @property
    def held(self) -> int:
        """Counts that wait here."""
        return len(self.counts) + len(self.learnt)

    def is_due(self, minute: int, now_ms: int) -> bool:
        """Whether its rates are to be looked at in this minute."""
        if self.behind or self.held > MOST_COUNTS:
            return True
        goes_on = self.live and now_ms - self.newest_ms < SILENT_MS
        return minute > self.looked and bool(self.counts or self.learnt or self.after or goes_on)

    def tell(
        self, rates: Rates, minute: int, *, end: bool = False, goes_on: GoesOn | None = None
    ) -> list[Alarm]:
        """Hand over what was gathered, in this minute of Redis time; what is wrong with it. Minutes of which something
        may be missing stay here, unless nothing more will come (`end`) or too much is there.

        Once `goes_on` says no, the rest is left to the next call, which comes at once (`behind`).
        """
        goes_on = goes_on or _always
        self.looked, handed = max(self.looked, minute), True
        began = not rates.behind
        if began:
            handed = self._hand_over(rates, minute, goes_on, end=end)
        alarms = rates.close(self.looked, goes_on) if handed else []
        # The last minutes too. A look that is gone on with may have come to them already.
        if end and handed and not rates.behind and (began or self.after):
            self.looked, self.after = self.looked + AFTER, 0
            alarms += rates.close(self.looked, goes_on)
        self.behind = rates.behind or not handed
        self.live = rates.live
        return alarms

    def _hand_over(self, rates: Rates, minute: int, goes_on: GoesOn, *, end: bool) -> bool:
        """What is complete, oldest minutes first; False when there was no time for all of it."""
        whole = end or len(self.counts) > MOST_COUNTS
        until = -1 if self.at_ms is None else self.at_ms // 60_000
        # Rates take nothing of the far future, so it does not wait here.
        far = max(minute, self.newest_ms // 60_000) + FUTURE
        complete = sorted(key for key in self.counts if whole or not until < key[0] <= far)
        self.after = AFTER if complete or self.learnt else max(0, self.after - 1)
        for counts, keys, judged in (
            (self.learnt, sorted(self.learnt), False),
            (self.counts, complete, True),
        ):
            at = 0
            while at < len(keys):
                room = rates.room(judged=judged)
                if room:
                    some = keys[at : at + room]
                    rates.observe(_frame([(*key, counts.pop(key)) for key in some]), judged=judged)
                    at += room
                elif goes_on():
                    rates.make_room(goes_on, judged=judged)
                else:
                    return False
        return True

    def forget(self) -> None:
        """Drop what was not handed over."""
        self.counts, self.learnt, self.behind = {}, {}, False

    def pack(self) -> bytes:
        """msgpack of version and fields."""
        counts, learnt = ([[*pair, n] for pair, n in c.items()] for c in (self.counts, self.learnt))
        fields: list[Any] = [
            self.at_ms, self.began_ms, self.newest_ms, self.looked, self.size, self.live, self.after, self.ahead,
        ]  # fmt: skip
        return bytes(msgpack.packb([PULSE_VERSION, *fields, counts, learnt, self.behind]))

    @classmethod
    def unpack(cls, blob: bytes) -> "Pulse":
        """Raises BadPayload."""
        try:
            version, *rest = msgpack.unpackb(blob)
            if version > PULSE_VERSION:
                raise BadPayload(
                    f"a pulse has wire version {version}; this build reads up to {PULSE_VERSION}"
                )
            at_ms, began_ms, newest_ms, looked, size, live, after, ahead, counts, learnt, *more = rest
            return cls(
                at_ms=None if at_ms is None else int(at_ms),
                began_ms=None if began_ms is None else int(began_ms),
                newest_ms=int(newest_ms),
                looked=int(looked),
                size=int(size),
                live=bool(live),
                after=int(after),
                ahead=[(Lane(lane).value, int(accepted), int(at)) for lane, accepted, at in ahead],
                counts={(int(minute), int(template)): int(n) for minute, template, n in counts},
                behind=bool(more and more[0]),  # one of an earlier build does not say
                learnt={(int(minute), int(template)): int(n) for minute, template, n in learnt},
            )
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise BadPayload(f"a pulse of {len(blob)} bytes is not readable: {exc}") from exc


def _frame(rows: Sequence[tuple[int, int, int]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=RATES_SCHEMA, orient="row")


def _always() -> bool:
    return True
