"""Open sessions: the events of one session key of one workload, until no more are expected.

Batches arrive out of order and event times jump, so an open session collects events in any order. When it
closes, its events are sorted and cut at gaps. So the verdict does not depend on how lines were cut into
batches, nor on the order in which batches were stored.

Closing follows the clock of batch acceptance: a session closes a session timeout (or longer:
`session_open_s`) and a grace after the newest of its batches. Every batch of its lane that was accepted
before then has to be stored. A stream's event times follow this clock; a file that is read at a thousand
times its speed keeps its sessions open a little longer.

A trace is collected over all workloads, under the name of none (`JOINT`). Once closed it has a part in each
workload, and it is a session of events of all of them (`joint.py`).

A closed session may go on after a gap. Under a stateful session model its events become its history
(`history.py`), and later events within a day are judged together with the history. A session with very many
gaps is judged at some of them, and always at the last.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Annotated, Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec
from pipeline.watching.observation import Lane, Observation
from pipeline.watching.sessions.history import KEEP_MS, SessionHistory
from pipeline.watching.sessions.joint import Places, joint_event
from pipeline.watching.sessions.keys import JOINED, JOINT, SEPARATOR, kind_and_key
from pipeline.watching.sessions.prefixes import MAX_SESSION_PREFIX_EVENTS, thin_out

MAX_SESSION_EVENTS: Final = 2_000  # of one session; HDFS's longest block has 298
GRACE_S: Final = 5.0  # for batches on their way: a producer gathers lines for 1 s, a step takes up to seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The events of a closed session between two gaps, and its history before them."""

    workload: str
    key: str
    source: str  # of its newest batch; "" for a trace as a whole
    at_ms: tuple[int, ...]  # event times, ascending
    lines: tuple[int, ...]
    templates: tuple[int, ...]
    dropped: int  # events past MAX_SESSION_EVENTS
    history: SessionHistory | None = None
    partial: bool = False  # earlier events are missing or out of order
    places: Places = field(default_factory=dict)  # of the events of a trace as a whole

    @property
    def prefix(self) -> tuple[int, ...]:
        """Template ids of the session until the end of this segment, at most MAX_SESSION_EVENTS."""
        return ((self.history.templates if self.history else ()) + self.templates)[:MAX_SESSION_EVENTS]

    def next_history(self, reported: tuple[str, ...] = ()) -> SessionHistory:
        """The session's history after this segment; these causes were reported."""
        history, prefix = self.history, self.prefix
        events = len(self.templates) + self.dropped + (history.events if history else 0)
        return SessionHistory(
            source=history.source if history else self.source,
            line=history.line if history else self.lines[0],
            began_ms=history.began_ms if history else self.at_ms[0],
            until_ms=max(self.at_ms[-1], history.until_ms if history else self.at_ms[-1]),
            dropped=events - len(prefix),
            templates=prefix,
            reported=reported,
            partial=self.partial,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEvents:
    """The events of one session in one batch, in the batch's order."""

    observation: Observation
    at_ms: list[int]
    lines: list[int]
    templates: list[int]


def events_by_session(observed: Iterable[Observation]) -> dict[str, list[BatchEvents]]:
    """The events of every session, by its name."""
    found: dict[str, list[BatchEvents]] = {}
    for observation in observed:
        of_batch: dict[str, BatchEvents] = {}
        for key, at_ms, line, template_id in observation.events.rows():
            events = of_batch.get(key)
            if events is None:
                events = BatchEvents(observation=observation, at_ms=[], lines=[], templates=[])
                of_batch[key] = events
                found.setdefault(session_name(observation.workload, key), []).append(events)
            events.at_ms.append(at_ms)
            events.lines.append(line)
            events.templates.append(template_id)
    return found


_Steps = Annotated[list[int], msgspec.Meta(max_length=MAX_SESSION_EVENTS)]


class _SessionWire(msgspec.Struct, frozen=True, array_like=True):
    """Wire form of an OpenSession. Steps are differences to the value before: one or two bytes, not nine."""

    source: str
    lane: Lane
    accepted_ms: int
    ended: bool
    dropped: int
    at_steps: _Steps
    line_steps: _Steps
    templates: _Steps
    origins: list[tuple[str, str]] = []
    origin_of: _Steps = []


_SESSIONS: Final = Codec(_SessionWire, version=1, what="an open session", newer=BadPayload)


@dataclass(slots=True, kw_only=True)
class OpenSession:
    """One open session; its lists are parallel, in the order in which events arrived."""

    workload: str  # JOINT for a trace, until it is parted
    key: str
    kind: str = ""  # of the key
    source: str = ""  # of its newest batch, as the next two
    lane: Lane = Lane.FRESH
    accepted_ms: int = 0
    ended: bool = False  # its last event is an end event
    dropped: int = 0  # events past MAX_SESSION_EVENTS
    at_ms: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    templates: list[int] = field(default_factory=list)
    # Of a trace: the workloads with the sources of their newest batches, and which of them each event has.
    origins: list[tuple[str, str]] = field(default_factory=list)
    origin_of: list[int] = field(default_factory=list)
    places: Places = field(default_factory=dict)  # of `whole`

    @property
    def entry(self) -> str:
        """Kind and key, as `find_keys` writes them."""
        return self.kind + SEPARATOR + self.key if self.kind else self.key

    def add(self, events: BatchEvents) -> int:
        """Add these events; returns how many there was room for."""
        at_ms = events.at_ms[: MAX_SESSION_EVENTS - len(self.at_ms)]
        self.at_ms += at_ms
        self.lines += events.lines[: len(at_ms)]
        self.templates += events.templates[: len(at_ms)]
        self.dropped += len(events.at_ms) - len(at_ms)
        if self.workload == JOINT:
            self._add_origin(events.observation, len(at_ms))
        self.source, self.lane = events.observation.source, events.observation.lane
        self.accepted_ms = max(self.accepted_ms, events.observation.accepted_ms)
        return len(at_ms)

    def _add_origin(self, observation: Observation, events: int) -> None:
        workloads = [workload for workload, _ in self.origins]
        origin = (observation.workload, observation.source)
        if observation.workload in workloads:
            place = workloads.index(observation.workload)
            self.origins[place] = origin
        else:
            place = len(workloads)
            self.origins.append(origin)
        self.origin_of += [place] * events

    def parts(self) -> dict[str, "OpenSession"]:
        """Its sessions in single workloads, by name."""
        if self.workload != JOINT:
            return {session_name(self.workload, self.entry): self}
        found = {}
        for place, (workload, source) in enumerate(self.origins):
            rows = [row for row, origin in enumerate(self.origin_of) if origin == place]
            found[session_name(workload, self.entry, joined=False)] = replace(
                self,
                workload=workload,
                source=source,
                at_ms=[self.at_ms[row] for row in rows],
                lines=[self.lines[row] for row in rows],
                templates=[self.templates[row] for row in rows],
                origins=[],
                origin_of=[],
            )
        return found

    def whole(self) -> "OpenSession":
        """A trace as one session of events of all of its workloads. Lines of several files have no order, so
        events of one moment stand in the order of their numbers, as in training."""
        pairs = [
            (self.origins[origin][0], template)
            for origin, template in zip(self.origin_of, self.templates, strict=True)
        ]
        events = [joint_event(*pair) for pair in pairs]
        places = dict(zip(events, pairs, strict=True))
        return replace(self, source="", lines=[0] * len(events), templates=events, places=places)

    def ends_with(self, ends: frozenset[int]) -> bool:
        """Whether its last event is one of these."""
        if ends.isdisjoint(self.templates):
            return False
        return max(zip(self.at_ms, self.lines, self.templates, strict=True))[2] in ends

    def due_ms(self, open_ms: int) -> int:
        """When it closes, on the clock of batch acceptance."""
        return self.accepted_ms + round(GRACE_S * 1000) + (0 if self.ended else open_ms)

    def segments(
        self,
        timeout_ms: int,
        *,
        stateful: bool = False,
        history: SessionHistory | None = None,
        lost: bool = False,
    ) -> Iterator[Segment]:
        """Its events in order of time, cut at gaps longer than the timeout.

        `stateful`: each segment has the history of all before it, starting with `history`, until a gap of a
        day; very many segments are thinned out. `lost`: if there is no history, one may have been dropped.
        """
        # In order of lines at equal times: a second is a long time.
        events = sorted(zip(self.at_ms, self.lines, self.templates, strict=True))
        # An older log may have the same keys, so events a day before a history belong to it as little as
        # later ones.
        if history and events and abs(events[0][0] - history.until_ms) > KEEP_MS:
            history, lost = None, False
        at_ms = [at for at, _, _ in events]
        ends = _gaps(at_ms, timeout_ms)
        if stateful:
            ends = _thinned_out(at_ms, ends, before=len(history.templates) if history else 0)
        begin = 0
        for end in ends:
            times, lines, templates = zip(*events[begin:end], strict=True)
            gap_ms = times[0] - history.until_ms if history else 0
            earlier = history if stateful and abs(gap_ms) <= KEEP_MS else None
            segment = Segment(
                workload=self.workload,
                key=self.key,
                source=self.source,
                at_ms=times,
                lines=lines,
                templates=templates,
                dropped=self.dropped if end == len(events) else 0,
                history=earlier,
                partial=earlier.partial or gap_ms < 0 if earlier else lost and not begin,
                places=self.places,
            )
            yield segment
            begin, history = end, segment.next_history() if stateful else None

    def weight(self, timeout_ms: int, before: int) -> int:
        """A lower estimate of the events that judging it takes, with so many events in its history."""
        gaps = _gaps(sorted(self.at_ms), timeout_ms)
        return min(MAX_SESSION_PREFIX_EVENTS, len(gaps) * (before + len(self.at_ms)))

    def pack(self) -> bytes:
        return _SESSIONS.pack(
            _SessionWire(
                self.source,
                self.lane,
                self.accepted_ms,
                self.ended,
                self.dropped,
                _steps(self.at_ms),
                _steps(self.lines),
                self.templates,
                self.origins,
                self.origin_of,
            )
        )

    @classmethod
    def unpack(cls, workload: str, entry: str, blob: bytes) -> "OpenSession":
        """`entry`: kind and key. Raises BadPayload."""
        wire = _SESSIONS.unpack(blob)
        if not len(wire.at_steps) == len(wire.line_steps) == len(wire.templates):
            raise BadPayload("an open session is not readable: its lists have different lengths")
        if workload == JOINT and not (
            len(wire.origin_of) == len(wire.templates)
            and all(0 <= origin < len(wire.origins) for origin in wire.origin_of)
        ):
            raise BadPayload("an open trace is not readable: an event has no workload")
        kind, key = kind_and_key(entry)
        return cls(
            workload=workload,
            key=key,
            kind=kind,
            source=wire.source,
            lane=wire.lane,
            accepted_ms=wire.accepted_ms,
            ended=wire.ended,
            dropped=wire.dropped,
            at_ms=list(accumulate(wire.at_steps)),
            lines=list(accumulate(wire.line_steps)),
            templates=wire.templates,
            origins=wire.origins,
            origin_of=wire.origin_of,
        )


def _gaps(times: Sequence[int], longer_than_ms: int) -> list[int]:
    """The number of events, of these ascending times, before each gap and at the end."""
    gaps = [end for end, (a, b) in enumerate(pairwise(times), 1) if b - a > longer_than_ms]
    return [*gaps, len(times)] if times else []


def _thinned_out(times: Sequence[int], ends: Sequence[int], *, before: int) -> list[int]:
    """The gaps at which a session is judged with all before them, `before` events of a history included.

    After a gap of a day another session begins.
    """
    found: list[int] = []
    begin = 0
    for day in _gaps(times, KEEP_MS):
        lengths = thin_out([end + before - begin for end in ends if begin < end <= day])
        found += [length - before + begin for length in lengths]
        begin, before = day, 0
    return found


def _steps(values: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise((0, *values))]


def session_name(workload: str, entry: str, *, joined: bool = True) -> str:
    """The field name of a session in Redis; the workload has no NUL. `joined`: a trace is of no workload."""
    return f"{JOINT if joined and kind_and_key(entry)[0] in JOINED else workload}{SEPARATOR}{entry}"


def split_name(name: str) -> tuple[str, str]:
    """(workload, kind and key) of a `session_name`."""
    workload, _, entry = name.partition(SEPARATOR)
    return workload, entry
