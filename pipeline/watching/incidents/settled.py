"""Incidents whose causes are final, and an index from causes to incidents."""

import math
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Final, TypeVar

from msgspec.structs import replace

from pipeline.watching.incidents import values
from pipeline.watching.incidents.values import Cause, Incident, Key

QUIET: Final = timedelta(minutes=15)  # most retries, health checks and cron jobs repeat within that
SIMILAR: Final = 0.5  # share of an incident's weighted causes that an earlier one has
COMPARED: Final = 100  # the newest of the similar earlier incidents

_K = TypeVar("_K")


class SettledIncidents:
    """By id. `version` changes with what a comparison depends on: which there are, and when they began."""

    def __init__(self) -> None:
        self.version = 0
        self.incidents: dict[str, Incident] = {}
        # Incidents whose listed causes were ordered among themselves. Until then the order of one with more
        # causes than it lists is that of all of them.
        self._led: set[str] = set()
        self._sizes: dict[str, tuple[Incident, int]] = {}  # the bytes that each takes at most
        self._where: dict[Key, list[str]] = {}
        self._unlisted: dict[bytes, list[str]] = {}

    def copy(self) -> "SettledIncidents":
        other = SettledIncidents()
        other.incidents = dict(self.incidents)
        other._where = {key: list(names) for key, names in self._where.items()}
        return other

    def keep(self, incident: Incident) -> None:
        """Raises ValueError for an id that is taken."""
        if incident.id in self.incidents:
            raise ValueError(f"incident {incident.id} appears twice")
        self.version += 1
        self.incidents[incident.id] = incident
        for cause in {c.key: c for c in incident.causes}:
            self._where.setdefault(cause, []).append(incident.id)
        for key in incident.unlisted:
            self._unlisted.setdefault(key, []).append(incident.id)

    def times(self, key: Key) -> int:
        """The number of incidents with the cause."""
        return len(self._where.get(key, ()))

    def causes(self, key: Key) -> list[Cause]:
        """The cause in each incident that lists it."""
        incidents = (self.incidents[name] for name in self._where.get(key, ()))
        return [cause for incident in incidents for cause in incident.causes if cause.key == key]

    def home(self, cause: Cause) -> str | None:
        """The id of the incident in which the cause goes on."""
        for name in self._where.get(cause.key, ()):
            if any(c.key == cause.key and adjacent(c, cause) for c in self.incidents[name].causes):
                return name
        for name in self._unlisted.get(values.key_hash(cause.key), ()) if self._unlisted else ():
            if adjacent(self.incidents[name], cause):
                return name
        return None

    def count(self, name: str, cause: Cause) -> None:
        """Count a cause again in its incident."""
        incident = self.incidents[name]
        before = incident.causes
        causes = [values.add_cause(c, cause) if c.key == cause.key else c for c in before]
        ordered = not incident.more or name in self._led
        ordered = ordered and all(map(values.in_one_place, before, causes))
        self._led.add(name)
        self.version += cause.first < incident.first
        self.incidents[name] = replace(
            incident,
            first=min(incident.first, cause.first),
            last=max(incident.last, cause.last),
            count=min(incident.count + cause.count, values.MAX_COUNT),
            causes=tuple(causes) if ordered else values.led(causes),
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
        """Forget incidents down to `limit`, and `room` bytes in all: quiet ones beyond half of the limit, and
        then closed ones, by their end."""
        size = sum(self._size(incident) for incident in self.incidents.values())
        if len(self.incidents) <= limit and size <= room:
            return
        order = sorted(self.incidents.values(), key=lambda i: (is_open(i), i.last, i.id))
        quiet = [incident for incident in order if incident.quiet]
        quiet = quiet[: max(0, len(quiet) - limit // 2)]
        names = {incident.id for incident in quiet}
        for incident in [*quiet, *(one for one in order if one.id not in names)]:
            if len(self.incidents) <= limit and size <= room:
                return
            size -= self._size(incident)
            self.forget(incident)

    def forget(self, incident: Incident) -> None:
        """Forget one that is here."""
        self.version += 1
        del self.incidents[incident.id]
        self._sizes.pop(incident.id, None)
        self._led.discard(incident.id)
        _drop(self._where, {c.key for c in incident.causes}, incident.id)
        _drop(self._unlisted, incident.unlisted, incident.id)

    def _size(self, incident: Incident) -> int:
        known = self._sizes.get(incident.id)
        if known is None or known[0] is not incident:
            known = self._sizes[incident.id] = incident, values.weight(incident)
        return known[1]

    def _weight(self, keys: Iterable[Key]) -> float:
        return math.fsum(math.log1p(len(self.incidents) / (1 + self.times(key))) for key in sorted(keys))


def _drop(index: dict[_K, list[str]], keys: Iterable[_K], name: str) -> None:
    for key in keys:
        index[key].remove(name)
        if not index[key]:
            del index[key]


def adjacent(one: Cause | Incident, other: Cause) -> bool:
    """Whether the other is less than QUIET apart, so that it goes on."""
    return one.first - QUIET <= other.last and other.first - QUIET <= one.last
