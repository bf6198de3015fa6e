"""The incidents of a state as they are shown: those that are settled, and the groups of young causes.

A group is compared with all incidents before it, so a change of one may change those behind it. A listing
remembers its groups. It makes and compares again only the groups from the first changed one on.
"""

from collections.abc import Sequence
from datetime import datetime

from msgspec.structs import replace

from pipeline.watching.incidents import values
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.incidents.settled import SettledIncidents
from pipeline.watching.incidents.values import Cause, Incident, YoungCause


class IncidentListing:
    """Remembers the groups that it listed last. Its result depends on its arguments alone."""

    def __init__(self) -> None:
        self._settled: SettledIncidents | None = None  # the incidents that the next ones are compared with
        self._version = -1  # of those that are settled
        self._shape: TraceShape | None = None
        self._groups: list[tuple[str, list[Cause]]] = []
        self._shown: dict[str, tuple[Incident, Incident]] = {}  # by id: with `open` as it was, and as shown

    def all(
        self,
        settled: SettledIncidents,
        groups: Sequence[tuple[str, Sequence[YoungCause]]],
        shape: TraceShape,
        goes_on: tuple[datetime, datetime] | None,
    ) -> list[Incident]:
        """All incidents, the newest first. `goes_on`: an incident is open whose end is between these times;
        every one where it is None."""
        stored = self._compared(settled, [(name, [y.cause for y in group]) for name, group in groups], shape)
        shown: dict[str, tuple[Incident, Incident]] = {}
        for name, incident in stored.incidents.items():
            is_open = goes_on is None or goes_on[0] <= incident.last <= goes_on[1]
            as_shown = incident
            if incident.open is not is_open:
                known = self._shown.get(name)
                as_shown = known[1] if known is not None and known[0] is incident else incident
                if as_shown.open is not is_open:
                    as_shown = replace(incident, open=is_open)
            shown[name] = incident, as_shown
        self._shown = shown
        return sorted((one for _, one in shown.values()), key=lambda i: (i.first, i.id), reverse=True)

    def _compared(
        self, settled: SettledIncidents, groups: list[tuple[str, list[Cause]]], shape: TraceShape
    ) -> SettledIncidents:
        """The settled incidents with these groups behind them, each compared with all before it."""
        stored, same = self._settled, 0
        if stored is None or self._version != settled.version or self._shape != shape:
            stored = self._settled = settled.copy()
            self._version, self._shape = settled.version, shape
        else:
            stored.incidents.update(settled.incidents)  # their counts may have grown
            for before, now in zip(self._groups, groups, strict=False):
                if before[0] != now[0] or len(before[1]) != len(now[1]):
                    break
                if any(one is not other for one, other in zip(before[1], now[1], strict=True)):
                    break
                same += 1
            for name, _ in reversed(self._groups[same:]):
                stored.forget(stored.incidents[name])
        self._groups = groups
        for name, causes in groups[same:]:
            stored.keep(stored.compared(values.make_incident(name, causes, shape)))
        return stored
