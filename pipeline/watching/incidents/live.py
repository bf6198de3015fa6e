"""The live state of incidents: groups causes that begin together, keeps incidents, recognises them later.

An event says that one cause of one workload (a template, a rule of a session, a rate) was seen: when, how
often, how bad. Three rules make incidents of events. All read event time, so late or repeated events change
nothing.

* A cause that is seen again within QUIET goes on: it is counted, and neither begins nor lengthens an
  incident. A cause that is seen after a longer silence begins again, which is an onset.
* Onsets that began together, over all workloads, are one incident (`onsets.together`); findings of a run
  group alike. A cause that was part of NOISY incidents leads none: it joins a near one, or stays by itself.
* An incident names the earlier one with the same causes, weighted by their rarity (`seen_before`). Template
  ids never change, so this holds over restarts and trainings.
* An incident names the workloads that it likely began in (`origins.likely_origins`).

Young onsets are grouped anew with every new one. LATE after the last they are settled, and the incident only
counts from then on. Everything is bounded, and the packed state takes at most BYTES.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from pipeline.errors import BadPayload
from pipeline.records.batch import digest
from pipeline.records.left_out import AHEAD
from pipeline.records.wire import Codec
from pipeline.watching.incidents import values
from pipeline.watching.incidents.listing import IncidentListing
from pipeline.watching.incidents.onsets import GAP, Onset, chains, together
from pipeline.watching.incidents.origins import TraceShape, shape_weight
from pipeline.watching.incidents.settled import QUIET, SettledIncidents, adjacent
from pipeline.watching.incidents.values import Cause, Incident, IncidentEvent, Key, YoungCause

__all__ = ["Cause", "Incident", "IncidentEvent", "Incidents"]

WIRE_VERSION: Final = 1
LATE: Final = timedelta(
    minutes=5
)  # Batches of one moment arrive within that: they wait for seconds, not minutes.
MAX_INCIDENTS: Final = 1_000  # The oldest closed ones go first.
MAX_YOUNG: Final = 600  # Young onsets; past that the oldest are settled early.
RECENT: Final = 16_384  # Event ids that are remembered. An event is delivered again within seconds.
BYTES: Final = 1 << 20
NOISY: Final = 5  # incidents with a cause before it counts as noise


class _StateWire(msgspec.Struct, frozen=True, array_like=True):
    now: Annotated[datetime, msgspec.Meta(tz=True)] | None
    recent: bytes  # hashes of eight bytes
    young: list[YoungCause]
    settled: list[Incident]
    shape: TraceShape = TraceShape()

    def __post_init__(self) -> None:
        if self.now is not None and self.now != values.clamped(self.now):
            raise ValueError(f"impossible time {self.now}")


_STATES: Final = Codec(_StateWire, version=WIRE_VERSION, what="the state of incidents")


class Incidents:
    """The incidents of all events so far. Pure: `close` tells the time."""

    def __init__(self) -> None:
        self._shape = TraceShape()
        self._now: datetime | None = None
        self._recent: dict[bytes, None] = {}  # the newest last
        self._young: dict[Key, list[YoungCause]] = {}  # of one cause more than QUIET apart
        self._groups: list[tuple[str, list[YoungCause]]] = []  # what of them is one incident, by time
        self._settled = SettledIncidents()
        self._listing = IncidentListing()
        self._changed = False  # young causes, or what their grouping depends on
        self._facts: dict[int, _Facts] = {}  # by identity of the young cause

    @property
    def shape(self) -> TraceShape:
        """The shape of calls between workloads, as traces show it."""
        return self._shape

    @shape.setter
    def shape(self, shape: TraceShape) -> None:
        if shape is not self._shape and shape != self._shape:  # a new object would be compared each time
            self._shape = shape

    def add(self, events: Iterable[IncidentEvent]) -> None:
        """Add events. Idempotent by event id."""
        for event in events:
            tag = values.hash8(event.event_id)
            if tag in self._recent:
                continue
            self._recent[tag] = None
            self._take(values.young_cause(event, tag))
        while len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        self._bound()

    def close(self, now: datetime) -> None:
        """Settle the young onsets that no later one can join at `now`, and close what ended."""
        # A clock that is set back counts at once; otherwise nothing would be settled until it catches up.
        self._now = now = values.clamped(now)
        for several in self._young.values():
            for at, young in enumerate(several):
                if young.since is None or young.since > now:
                    several[at] = self._same(young, replace(young, since=now))
        self._regroup()
        settled = {id(y) for chain in self._chains() if _is_over(chain, now) for y in chain}
        for name, group in self._groups:
            if id(group[0]) in settled:
                self._settle(name, group)
        self._bound()

    def all(self) -> list[Incident]:
        """All incidents but quiet ones, the newest first."""
        return [one for one in self.every() if not one.quiet]

    def every(self) -> list[Incident]:
        """All incidents, the newest first."""
        self._regroup()
        return self._listing.all(self._settled, self._groups, self._shape, self._open_span())

    def sightings(self, key: Key) -> list[tuple[datetime, int]]:
        """When a cause began, and how often it was seen then, of each incident that lists it."""
        causes = [young.cause for young in self._young.get(key, ())] + self._settled.causes(key)
        return [(cause.first, cause.count) for cause in causes]

    def pack(self) -> bytes:
        """At most BYTES; the same after `unpack`."""
        self._regroup()
        young = [y for causes in self._young.values() for y in causes]
        settled = list(self._settled.incidents.values())
        return _STATES.pack(_StateWire(self._now, b"".join(self._recent), young, settled, self._shape))

    @classmethod
    def unpack(cls, blob: bytes | None) -> "Incidents":
        """None is a state without incidents. Raises BadPayload, TooNew."""
        state = cls()
        if blob is None:
            return state
        if len(blob) > 2 * BYTES:
            raise BadPayload(f"the state of incidents is not readable: it has more than {2 * BYTES} bytes")
        wire = _STATES.unpack(blob)
        if len(wire.recent) % 8:
            raise BadPayload(f"the state of incidents is not readable: {len(wire.recent)} bytes of hashes")
        state._now, state._shape = wire.now, wire.shape
        state._recent = dict.fromkeys(wire.recent[at : at + 8] for at in range(0, len(wire.recent), 8))
        for young in wire.young:
            state._young.setdefault(young.cause.key, []).append(young)
        try:
            for incident in wire.settled:
                state._settled.keep(incident)
        except ValueError as exc:
            raise BadPayload(f"the state of incidents is not readable: {exc}") from exc
        state._changed = True
        state._regroup()
        return state

    def _take(self, new: YoungCause) -> None:
        """Count it in the incident of its cause, or let it begin one."""
        key = new.cause.key
        if (name := self._settled.home(new.cause)) is not None:
            self._settled.count(name, new.cause)
            # Young ones that were too far from the incident may be near it through this one.
            for other in self._young.pop(key, []):
                self._changed = True
                self._take(other)
            return
        self._changed = True
        several = self._young.get(key, [])
        touching = [y for y in several if adjacent(y.cause, new.cause)]
        distant = [y for y in several if not adjacent(y.cause, new.cause)]
        self._young[key] = [*distant, values.merge_young([new, *touching])]

    def _regroup(self) -> None:
        """Group young onsets into incidents; each keeps the id under which it was shown, if possible."""
        if not self._changed:
            return
        facts = [self._facts_of(y) for several in self._young.values() for y in several]
        every = {(one.onset.first, one.onset.key): one.young for one in facts}
        used = set(self._settled.incidents)
        self._groups, self._young = [], {}
        for run in together([self._onset(every[one.onset.first, one.onset.key]) for one in facts]):
            group = [every[onset.first, onset.key] for onset in run]
            name = next((y.incident for y in group if y.incident and y.incident not in used), "")
            name = name or _new_id(group[0].cause, used)
            used.add(name)
            group = [y if y.incident == name else self._same(y, replace(y, incident=name)) for y in group]
            self._groups.append((name, group))
            for y in group:
                self._young.setdefault(y.cause.key, []).append(y)
        current = {id(y) for _, group in self._groups for y in group}
        self._facts = {place: one for place, one in self._facts.items() if place in current}
        self._changed = False

    def _facts_of(self, young: YoungCause) -> "_Facts":
        known = self._facts.get(id(young))
        if known is None:
            known = self._facts[id(young)] = _Facts(young, young.onset(), values.weight(young))
        return known

    def _same(self, young: YoungCause, changed: YoungCause) -> YoungCause:
        """A young cause whose onset and causes did not change with its other fields."""
        self._changed = True
        known = self._facts_of(young)
        self._facts[id(changed)] = _Facts(changed, known.onset, known.weight)
        return changed

    def _onset(self, young: YoungCause) -> Onset:
        onset = self._facts_of(young).onset
        if onset.leads and self._settled.times(young.cause.key) >= NOISY:
            return dataclasses.replace(onset, leads=False)
        return onset

    def _chains(self) -> list[list[YoungCause]]:
        """Runs of young onsets whose grouping depends on each other."""
        facts = [self._facts_of(y) for several in self._young.values() for y in several]
        every = {(one.onset.first, one.onset.key): one.young for one in facts}
        runs = chains([one.onset for one in facts])
        return [[every[onset.first, onset.key] for onset in run] for run in runs]

    def _settle(self, name: str, group: Sequence[YoungCause]) -> None:
        self._changed = True
        for young in group:
            self._young[young.cause.key].remove(young)
            if not self._young[young.cause.key]:
                del self._young[young.cause.key]
        self._settled.keep(
            self._settled.compared(values.make_incident(name, [y.cause for y in group], self._shape))
        )

    def _open_span(self) -> tuple[datetime, datetime] | None:
        """An incident goes on that ends between these times, by event time; None: every one."""
        return None if self._now is None else (self._now - QUIET, self._now + AHEAD)

    def _is_open(self, incident: Incident) -> bool:
        span = self._open_span()
        return span is None or span[0] <= incident.last <= span[1]

    def _bound(self) -> None:
        waiting = sum(map(len, self._young.values()))
        if waiting > MAX_YOUNG:
            self._regroup()
            for name, group in list(self._groups):
                if waiting <= MAX_YOUNG // 2:
                    break
                self._settle(name, group)
                waiting -= len(group)
        groups = waiting  # as many at most
        if len(self._settled.incidents) + groups > MAX_INCIDENTS:
            self._regroup()
            groups = len(self._groups)
        room = BYTES - 64 - 9 * len(self._recent) - shape_weight(self._shape)
        room -= sum(self._facts_of(y).weight for several in self._young.values() for y in several)
        before = self._settled.version
        self._settled.shrink(MAX_INCIDENTS - groups, room, self._is_open)
        self._changed |= self._settled.version != before


class _Facts(NamedTuple):
    """Onset and weight of a young cause, computed once."""

    young: YoungCause
    onset: Onset  # as if it were no noise
    weight: int  # bytes at most


def _is_over(chain: Sequence[YoungCause], now: datetime) -> bool:
    """Whether no onset that arrives in time can begin together with any of these.

    Onsets of a backfill arrive within LATE of each other. An onset in the future waits no longer than QUIET.
    """
    since = max(y.since for y in chain if y.since)
    reach = max(y.onset().burst_end for y in chain) + GAP
    return since + LATE < now and (reach + LATE < now or since + QUIET + LATE < now)


def _new_id(cause: Cause, used: set[str]) -> str:
    """Eight characters of the first cause and its time, so that equal beginnings get equal ids."""
    parts = [*cause.key, cause.first.isoformat()]
    while (name := digest(*parts, size=4)) in used:
        parts.append("again")
    return name
