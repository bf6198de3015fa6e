"""The live state of incidents: one entry for all that began together, kept while it goes on, known again when it returns.

An event says that one cause of one workload (a template, a rule of a session, a rate) was seen: when, how often, how
bad. Three rules make incidents of events. All read event time, so what arrives late or twice changes nothing.

* A cause that is seen again within QUIET is still the same trouble: it is counted, and neither begins nor lengthens
  anything. Only a cause that was silent for longer begins anew, which is an onset.
* Onsets that began together, over all workloads, are one incident (`onsets.together`): findings of a run group alike.
  A cause that was part of NOISY incidents already leads none: it joins one that is near, or stays by itself.
* An incident says which earlier one had the same causes, weighed by how rare they are (`seen_before`). Ids of templates
  never change, so this holds over restarts and trainings.

Young onsets are grouped anew whenever one comes. Once no more company can come (LATE after the last) they are settled,
and the incident only counts from then on. Everything is bounded, and what is packed takes at most BYTES.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final, TypeVar

import msgpack

from pipeline.errors import BadPayload, TooNew
from pipeline.records.batch import digest
from pipeline.watching.incidents import values
from pipeline.watching.incidents.onsets import GAP, Onset, chains, together
from pipeline.watching.incidents.values import Cause, Event, Incident, Key, Young

__all__ = ["Cause", "Event", "Incident", "Incidents"]

WIRE_VERSION: Final = 1
QUIET: Final = timedelta(minutes=15)  # most retries, health checks and cron jobs come round within that
LATE: Final = timedelta(
    minutes=5
)  # batches of one moment arrive within that: they wait for seconds, not minutes
KEPT: Final = 1_000  # incidents; the oldest closed ones go first
AHEAD: Final = timedelta(
    days=1
)  # the most that a wrong time zone makes; what lies further ahead is a broken clock
YOUNG: Final = 600  # onsets that wait for company; past that the oldest are settled early
RECENT: Final = 16_384  # event ids remembered; an event is delivered again within seconds if at all
BYTES: Final = 1 << 20
NOISY: Final = 5  # incidents that a cause was part of before it is taken for noise
ALIKE: Final = 0.5  # at least half of what is wrong now was wrong then
COMPARED: Final = 100  # of the earlier incidents that are alike, the newest are compared

_K = TypeVar("_K")


class Incidents:
    """What `add` was told so far. Pure: time comes in by `close`."""

    def __init__(self) -> None:
        self._now: datetime | None = None
        self._recent: dict[bytes, None] = {}  # the newest last
        self._young: dict[Key, list[Young]] = {}  # of one cause more than QUIET apart
        self._groups: list[tuple[str, list[Young]]] = []  # what of them is one incident, by time
        self._settled = _Settled()

    def add(self, events: Iterable[Event]) -> None:
        """Take in what was seen. An event whose id was taken in already changes nothing."""
        for event in events:
            tag = values.hash8(event.event_id)
            if tag in self._recent:
                continue
            self._recent[tag] = None
            self._take(values.young(event, tag))
        while len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        self._bound()

    def close(self, now: datetime) -> None:
        """Settle what can have no more company at `now`, and see what is still open."""
        # A clock that was ahead and is set right counts again at once: else nothing would be open or settled until then.
        self._now = now = values.moment(now)
        for key, several in self._young.items():
            self._young[key] = [y if y.since and y.since <= now else replace(y, since=now) for y in several]
        self._regroup()
        settled = {id(y) for chain in self._chains() if _is_over(chain, now) for y in chain}
        for name, group in self._groups:
            if id(group[0]) in settled:
                self._settle(name, group)
        self._bound()

    def all(self) -> list[Incident]:
        """Every incident that is kept, the newest first."""
        seen = self._settled.copy()
        for name, group in self._groups:
            seen.keep(seen.compared(values.incident(name, [y.cause for y in group])))
        found = (replace(i, open=self._is_open(i)) for i in seen.incidents.values())
        return sorted(found, key=lambda i: (i.first, i.id), reverse=True)

    def pack(self) -> bytes:
        """At most BYTES; the same after `unpack`."""
        return bytes(
            msgpack.packb(
                [
                    WIRE_VERSION,
                    None if self._now is None else values.number_of(self._now),
                    b"".join(self._recent),
                    [values.young_wire(y) for several in self._young.values() for y in several],
                    [values.incident_wire(i) for i in self._settled.incidents.values()],
                ]
            )
        )

    @classmethod
    def unpack(cls, blob: bytes | None) -> "Incidents":
        """None is a state without incidents. Raises BadPayload for what is no such state, TooNew."""
        state = cls()
        if blob is None:
            return state
        try:
            if len(blob) > 2 * BYTES:
                raise ValueError(f"more than {2 * BYTES} bytes")
            version, *rest = msgpack.unpackb(blob)
            if version > WIRE_VERSION:
                raise TooNew(
                    f"the state of incidents has wire version {version}; this build reads up to {WIRE_VERSION}: update it"
                )
            now, recent, young, settled = rest
            state._now = None if now is None else values.time_of(now)
            state._recent = dict.fromkeys(values.hashes(recent))
            for one in map(values.read_young, young):
                state._young.setdefault(one.cause.key, []).append(one)
            for incident in map(values.read_incident, settled):
                state._settled.keep(incident)
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as exc:
            raise BadPayload(f"a state of incidents of {len(blob)} bytes is not readable: {exc}") from exc
        state._regroup()
        return state

    def _take(self, new: Young) -> None:
        """Count it where its cause is known, or let it begin something."""
        key = new.cause.key
        if (name := self._settled.home(new.cause)) is not None:
            self._settled.count(name, new.cause)
            # What was too far from the incident until now may be near it through this one.
            for other in self._young.pop(key, []):
                self._take(other)
            return
        several = self._young.get(key, [])
        touching = [y for y in several if _near(y.cause, new.cause)]
        apart = [y for y in several if not _near(y.cause, new.cause)]
        self._young[key] = [*apart, values.merged([new, *touching])]

    def _regroup(self) -> None:
        """Which young onsets are one incident; each keeps the id under which it was shown, as far as it can."""
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

    def _onset(self, young: Young) -> Onset:
        return young.onset(noise=self._settled.times(young.cause.key) >= NOISY)

    def _chains(self) -> list[list[Young]]:
        """Young onsets that could still be grouped otherwise if one of them, or one near them, were different."""
        every = {(y.cause.first, key): y for key, several in self._young.items() for y in several}
        runs = chains([y.onset() for y in every.values()])
        return [[every[onset.first, (onset.key[0], onset.key[1])] for onset in run] for run in runs]

    def _settle(self, name: str, group: Sequence[Young]) -> None:
        for young in group:
            self._young[young.cause.key].remove(young)
            if not self._young[young.cause.key]:
                del self._young[young.cause.key]
        self._settled.keep(self._settled.compared(values.incident(name, [y.cause for y in group])))

    def _is_open(self, incident: Incident) -> bool:
        """Whether it still goes on, as far as its own time can tell."""
        return self._now is None or self._now - QUIET <= incident.last <= self._now + AHEAD

    def _bound(self) -> None:
        self._regroup()
        waiting = sum(map(len, self._young.values()))
        if waiting > YOUNG:
            for name, group in list(self._groups):
                if waiting <= YOUNG // 2:
                    break
                self._settle(name, group)
                waiting -= len(group)
            self._regroup()
        room = BYTES - 64 - 9 * len(self._recent)
        room -= sum(values.weight(y) for _, group in self._groups for y in group)
        self._settled.shrink(KEPT - len(self._groups), room, self._is_open)


class _Settled:
    """Incidents whose causes are certain, and where each cause was."""

    def __init__(self) -> None:
        self.incidents: dict[str, Incident] = {}
        self._where: dict[Key, list[str]] = {}
        self._untold: dict[bytes, list[str]] = {}

    def copy(self) -> "_Settled":
        other = _Settled()
        other.incidents = dict(self.incidents)
        other._where = {key: list(names) for key, names in self._where.items()}
        return other

    def keep(self, incident: Incident) -> None:
        """Raises ValueError when there is one of that name."""
        if incident.id in self.incidents:
            raise ValueError(f"incident {incident.id} is there twice")
        self.incidents[incident.id] = incident
        for cause in {c.key: c for c in incident.causes}:
            self._where.setdefault(cause, []).append(incident.id)
        for key in incident.untold:
            self._untold.setdefault(key, []).append(incident.id)

    def times(self, key: Key) -> int:
        """Of how many incidents the cause was part."""
        return len(self._where.get(key, ()))

    def home(self, cause: Cause) -> str | None:
        """The incident in which the cause is still going on."""
        for name in self._where.get(cause.key, ()):
            if any(c.key == cause.key and _near(c, cause) for c in self.incidents[name].causes):
                return name
        for name in self._untold.get(values.key_hash(cause.key), ()) if self._untold else ():
            if _near(self.incidents[name], cause):
                return name
        return None

    def count(self, name: str, cause: Cause) -> None:
        """Count a cause once more in its incident."""
        known = self.incidents[name]
        told = [values.added(c, cause) if c.key == cause.key else c for c in known.causes]
        self.incidents[name] = replace(
            known,
            first=min(known.first, cause.first),
            last=max(known.last, cause.last),
            count=min(known.count + cause.count, values.COUNT),
            causes=tuple(sorted(told, key=lambda c: c.urgency)),
        )

    def compared(self, incident: Incident) -> Incident:
        """The incident, with the earlier one that is most like it.

        An earlier one is alike when its causes are at least ALIKE of the weight of these; most alike is the one with
        the highest weighted Jaccard index, in steps of 0.1, and of those the newest. The weight of a cause that was
        part of n of N incidents is log(1 + N / (1 + n)), smoothed inverse document frequency (Spärck Jones, 1972).
        """
        total = self._weight({c.key for c in incident.causes})
        shared: dict[str, float] = {}
        for key in {c.key for c in incident.causes}:
            for name in self._where.get(key, ()):
                shared[name] = shared.get(name, 0.0) + self._weight({key})
        alike = [
            self.incidents[name]
            for name, part in shared.items()
            if part >= ALIKE * total and self.incidents[name].first < incident.first
        ]
        newest = sorted(alike, key=lambda i: (i.first, i.id), reverse=True)[:COMPARED]

        def likeness(other: Incident) -> tuple[float, datetime, str]:
            both = shared[other.id]
            union = total + self._weight({c.key for c in other.causes}) - both
            return round(both / union, 1), other.first, other.id

        best = max(newest, key=likeness, default=None)
        return replace(incident, seen_before=None if best is None else best.id, seen=len(alike))

    def shrink(self, most: int, room: int, is_open: Callable[[Incident], bool]) -> None:
        """Forget incidents until at most `most` are left and take at most `room` bytes: closed ones first, by their end."""
        sizes = {name: values.weight(incident) for name, incident in self.incidents.items()}
        left = sum(sizes.values())
        if len(sizes) <= most and left <= room:
            return
        for incident in sorted(self.incidents.values(), key=lambda i: (is_open(i), i.last, i.id)):
            if len(self.incidents) <= most and left <= room:
                return
            left -= sizes[incident.id]
            self._forget(incident)

    def _forget(self, incident: Incident) -> None:
        del self.incidents[incident.id]
        _drop(self._where, {c.key for c in incident.causes}, incident.id)
        _drop(self._untold, incident.untold, incident.id)

    def _weight(self, keys: Iterable[Key]) -> float:
        return math.fsum(math.log1p(len(self.incidents) / (1 + self.times(key))) for key in sorted(keys))


def _drop(index: dict[_K, list[str]], keys: Iterable[_K], name: str) -> None:
    for key in keys:
        index[key].remove(name)
        if not index[key]:
            del index[key]


def _near(one: Cause | Incident, other: Cause) -> bool:
    return one.first - QUIET <= other.last and other.first - QUIET <= one.last


def _is_over(chain: Sequence[Young], now: datetime) -> bool:
    """Nothing that arrives in time can begin together with any of these.

    What arrives after its time (a backfill) brings its company within LATE; what claims a time to come waits no longer
    than QUIET after it arrived.
    """
    since = max(y.since for y in chain if y.since)
    reach = max(y.onset().burst_end for y in chain) + GAP
    return since + LATE < now and (reach + LATE < now or since + QUIET + LATE < now)


def _new_id(cause: Cause, used: set[str]) -> str:
    """Eight characters made of the first cause and its time, so the same beginning gets the same name."""
    parts = [*cause.key, cause.first.isoformat()]
    while (name := digest(*parts, size=4)) in used:
        parts.append("again")
    return name
