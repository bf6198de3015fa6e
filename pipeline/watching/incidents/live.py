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

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec.structs import replace

from pipeline.errors import BadPayload
from pipeline.records.batch import digest
from pipeline.records.wire import Codec
from pipeline.watching.incidents import values
from pipeline.watching.incidents.onsets import GAP, Onset, chains, together
from pipeline.watching.incidents.origins import TraceShape, shape_weight
from pipeline.watching.incidents.values import Cause, Incident, IncidentEvent, Key, YoungCause

__all__ = ["Cause", "Incident", "IncidentEvent", "Incidents"]

WIRE_VERSION: Final = 1
QUIET: Final = timedelta(minutes=15)  # most retries, health checks and cron jobs repeat within that
LATE: Final = timedelta(
    minutes=5
)  # Batches of one moment arrive within that: they wait for seconds, not minutes.
MAX_INCIDENTS: Final = 1_000  # The oldest closed ones go first.
AHEAD: Final = timedelta(days=1)  # The most of a wrong time zone; times further ahead are of a broken clock.
MAX_YOUNG: Final = 600  # Young onsets; past that the oldest are settled early.
RECENT: Final = 16_384  # Event ids that are remembered. An event is delivered again within seconds.
BYTES: Final = 1 << 20
NOISY: Final = 5  # incidents with a cause before it counts as noise
SIMILAR: Final = 0.5  # share of an incident's weighted causes that an earlier one has
COMPARED: Final = 100  # the newest of the similar earlier incidents

_K = TypeVar("_K")


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
        self.shape = TraceShape()  # what traces show of workloads
        self._now: datetime | None = None
        self._recent: dict[bytes, None] = {}  # the newest last
        self._young: dict[Key, list[YoungCause]] = {}  # of one cause more than QUIET apart
        self._groups: list[tuple[str, list[YoungCause]]] = []  # what of them is one incident, by time
        self._settled = _Settled()

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
        for key, several in self._young.items():
            self._young[key] = [y if y.since and y.since <= now else replace(y, since=now) for y in several]
        self._regroup()
        settled = {id(y) for chain in self._chains() if _is_over(chain, now) for y in chain}
        for name, group in self._groups:
            if id(group[0]) in settled:
                self._settle(name, group)
        self._bound()

    def all(self) -> list[Incident]:
        """All incidents, the newest first."""
        stored = self._settled.copy()
        for name, group in self._groups:
            stored.keep(stored.compared(values.make_incident(name, [y.cause for y in group], self.shape)))
        found = (replace(i, open=self._is_open(i)) for i in stored.incidents.values())
        return sorted(found, key=lambda i: (i.first, i.id), reverse=True)

    def pack(self) -> bytes:
        """At most BYTES; the same after `unpack`."""
        young = [y for causes in self._young.values() for y in causes]
        settled = list(self._settled.incidents.values())
        return _STATES.pack(_StateWire(self._now, b"".join(self._recent), young, settled, self.shape))

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
        state._now, state.shape = wire.now, wire.shape
        state._recent = dict.fromkeys(wire.recent[at : at + 8] for at in range(0, len(wire.recent), 8))
        for young in wire.young:
            state._young.setdefault(young.cause.key, []).append(young)
        try:
            for incident in wire.settled:
                state._settled.keep(incident)
        except ValueError as exc:
            raise BadPayload(f"the state of incidents is not readable: {exc}") from exc
        state._regroup()
        return state

    def _take(self, new: YoungCause) -> None:
        """Count it in the incident of its cause, or let it begin one."""
        key = new.cause.key
        if (name := self._settled.home(new.cause)) is not None:
            self._settled.count(name, new.cause)
            # Young ones that were too far from the incident may be near it through this one.
            for other in self._young.pop(key, []):
                self._take(other)
            return
        several = self._young.get(key, [])
        touching = [y for y in several if _adjacent(y.cause, new.cause)]
        distant = [y for y in several if not _adjacent(y.cause, new.cause)]
        self._young[key] = [*distant, values.merge_young([new, *touching])]

    def _regroup(self) -> None:
        """Group young onsets into incidents; each keeps the id under which it was shown, if possible."""
        every = {(y.cause.first, key): y for key, several in self._young.items() for y in several}
        used = set(self._settled.incidents)
        self._groups, self._young = [], {}
        for run in together([self._onset(y) for y in every.values()]):
            group = [every[onset.first, (onset.key[0], onset.key[1])] for onset in run]
            name = next((y.incident for y in group if y.incident and y.incident not in used), "")
            name = name or _new_id(group[0].cause, used)
            used.add(name)
            group = [replace(y, incident=name) if y.incident != name else y for y in group]
            self._groups.append((name, group))
            for y in group:
                self._young.setdefault(y.cause.key, []).append(y)

    def _onset(self, young: YoungCause) -> Onset:
        return young.onset(noise=self._settled.times(young.cause.key) >= NOISY)

    def _chains(self) -> list[list[YoungCause]]:
        """Runs of young onsets whose grouping depends on each other."""
        every = {(y.cause.first, key): y for key, several in self._young.items() for y in several}
        runs = chains([y.onset() for y in every.values()])
        return [[every[onset.first, (onset.key[0], onset.key[1])] for onset in run] for run in runs]

    def _settle(self, name: str, group: Sequence[YoungCause]) -> None:
        for young in group:
            self._young[young.cause.key].remove(young)
            if not self._young[young.cause.key]:
                del self._young[young.cause.key]
        self._settled.keep(
            self._settled.compared(values.make_incident(name, [y.cause for y in group], self.shape))
        )

    def _is_open(self, incident: Incident) -> bool:
        """Whether it goes on, by event time."""
        return self._now is None or self._now - QUIET <= incident.last <= self._now + AHEAD

    def _bound(self) -> None:
        self._regroup()
        waiting = sum(map(len, self._young.values()))
        if waiting > MAX_YOUNG:
            for name, group in list(self._groups):
                if waiting <= MAX_YOUNG // 2:
                    break
                self._settle(name, group)
                waiting -= len(group)
            self._regroup()
        room = BYTES - 64 - 9 * len(self._recent) - shape_weight(self.shape)
        room -= sum(values.weight(y) for _, group in self._groups for y in group)
        self._settled.shrink(MAX_INCIDENTS - len(self._groups), room, self._is_open)


class _Settled:
    """Incidents with final causes, and an index from causes to incidents."""

    def __init__(self) -> None:
        self.incidents: dict[str, Incident] = {}
        self._where: dict[Key, list[str]] = {}
        self._unlisted: dict[bytes, list[str]] = {}

    def copy(self) -> "_Settled":
        other = _Settled()
        other.incidents = dict(self.incidents)
        other._where = {key: list(names) for key, names in self._where.items()}
        return other

    def keep(self, incident: Incident) -> None:
        """Raises ValueError for an id that is taken."""
        if incident.id in self.incidents:
            raise ValueError(f"incident {incident.id} appears twice")
        self.incidents[incident.id] = incident
        for cause in {c.key: c for c in incident.causes}:
            self._where.setdefault(cause, []).append(incident.id)
        for key in incident.unlisted:
            self._unlisted.setdefault(key, []).append(incident.id)

    def times(self, key: Key) -> int:
        """The number of incidents with the cause."""
        return len(self._where.get(key, ()))

    def home(self, cause: Cause) -> str | None:
        """The id of the incident in which the cause goes on."""
        for name in self._where.get(cause.key, ()):
            if any(c.key == cause.key and _adjacent(c, cause) for c in self.incidents[name].causes):
                return name
        for name in self._unlisted.get(values.key_hash(cause.key), ()) if self._unlisted else ():
            if _adjacent(self.incidents[name], cause):
                return name
        return None

    def count(self, name: str, cause: Cause) -> None:
        """Count a cause again in its incident."""
        incident = self.incidents[name]
        causes = [values.add_cause(c, cause) if c.key == cause.key else c for c in incident.causes]
        self.incidents[name] = replace(
            incident,
            first=min(incident.first, cause.first),
            last=max(incident.last, cause.last),
            count=min(incident.count + cause.count, values.MAX_COUNT),
            causes=values.led(causes),
        )

    def compared(self, incident: Incident) -> Incident:
        """The incident with its most similar earlier one.

        An earlier incident is similar if it has at least SIMILAR of the weight of these causes. The most
        similar has the highest weighted Jaccard index, in steps of 0.1, and of those it is the newest. A
        cause of n of N incidents weighs log(1 + N / (1 + n)), smoothed inverse document frequency (Spärck
        Jones, 1972).
        """
        total = self._weight({c.key for c in incident.causes})
        shared: dict[str, float] = {}
        for key in {c.key for c in incident.causes}:
            for name in self._where.get(key, ()):
                shared[name] = shared.get(name, 0.0) + self._weight({key})
        similar = [
            self.incidents[name]
            for name, part in shared.items()
            if part >= SIMILAR * total and self.incidents[name].first < incident.first
        ]
        newest = sorted(similar, key=lambda i: (i.first, i.id), reverse=True)[:COMPARED]

        def similarity(other: Incident) -> tuple[float, datetime, str]:
            both = shared[other.id]
            union = total + self._weight({c.key for c in other.causes}) - both
            return round(both / union, 1), other.first, other.id

        best = max(newest, key=similarity, default=None)
        return replace(incident, seen_before=None if best is None else best.id, seen=len(similar))

    def shrink(self, limit: int, room: int, is_open: Callable[[Incident], bool]) -> None:
        """Forget incidents down to `limit`, and `room` bytes in all: closed ones first, by their end."""
        sizes = {name: values.weight(incident) for name, incident in self.incidents.items()}
        size = sum(sizes.values())
        if len(sizes) <= limit and size <= room:
            return
        for incident in sorted(self.incidents.values(), key=lambda i: (is_open(i), i.last, i.id)):
            if len(self.incidents) <= limit and size <= room:
                return
            size -= sizes[incident.id]
            self._forget(incident)

    def _forget(self, incident: Incident) -> None:
        del self.incidents[incident.id]
        _drop(self._where, {c.key for c in incident.causes}, incident.id)
        _drop(self._unlisted, incident.unlisted, incident.id)

    def _weight(self, keys: Iterable[Key]) -> float:
        return math.fsum(math.log1p(len(self.incidents) / (1 + self.times(key))) for key in sorted(keys))


def _drop(index: dict[_K, list[str]], keys: Iterable[_K], name: str) -> None:
    for key in keys:
        index[key].remove(name)
        if not index[key]:
            del index[key]


def _adjacent(one: Cause | Incident, other: Cause) -> bool:
    return one.first - QUIET <= other.last and other.first - QUIET <= one.last


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
