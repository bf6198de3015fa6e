"""Traces as wholes: a trace is a session of events of all workloads that it goes through.

Templates are common to all workloads, so an event of a trace is a workload and a template. A number stands
for both, so that the session model learns and judges traces as it does other sessions. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from pipeline.records.batch import digest
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.watching.sessions.model import SessionVerdict

# (workload, template id) of events, by their numbers.
Places = Mapping[int, tuple[str, int]]
_BITS: Final = 62  # of the number of an event, as the wire form of a session model has room for


@lru_cache(maxsize=1 << 16)
def joint_event(workload: str, template_id: int) -> int:
    """The number of an event of a trace; lines past a template limit are one event."""
    if template_id <= UNCLASSIFIED:
        return UNCLASSIFIED
    return int(digest(workload, str(template_id)), 16) >> (64 - _BITS) | 1


@dataclass(frozen=True, slots=True)
class EventNames:
    """The words for events: texts by template id, and the places of events of a trace."""

    texts: Mapping[int, str]
    places: Places = field(default_factory=dict)

    def template(self, event: int) -> int | None:
        """The template id of an event; None for an event of a trace that nothing tells of."""
        place = self.places.get(event)
        if place is not None:
            return place[1]
        return None if self.places and event > UNCLASSIFIED else event

    def workload(self, event: int) -> str | None:
        """Of an event of a trace."""
        place = self.places.get(event)
        return None if place is None else place[0]

    def text(self, event: int) -> str:
        """The text of an event's template, "" if it is unknown."""
        template = self.template(event)
        return "" if template is None else self.texts.get(template, "")


def localised(verdict: SessionVerdict, places: Places) -> SessionVerdict:
    """A verdict on a trace with template ids in place of the numbers of events."""
    if not places:
        return verdict

    def words(text: str) -> str:
        name, colon, data = text.partition(":")
        parts = data.replace("-", " - ").split(" ")
        found = [str(places[int(p)][1]) if p.isdecimal() and int(p) in places else p for p in parts]
        return name + colon + " ".join(found).replace(" - ", "-")

    return replace(verdict, reasons=tuple(map(words, verdict.reasons)), cause=words(verdict.cause))
