"""Open sessions as they grow: each round adds packed events, and reads none of those before.

A session of a thousand events is touched in hundreds of rounds. A head of some numbers tells a round how many
events there are, which is the last, and when the session closes. `OpenSession` (open_sessions.py) has all
events, once the session closes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import sub
from typing import Annotated, Any, Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec
from pipeline.watching.observation import Lane, Observation
from pipeline.watching.sessions.joint import joint_event
from pipeline.watching.sessions.keys import JOINT, kind_and_key

MAX_SESSION_EVENTS: Final = 2_000  # of one session; HDFS's longest block has 298
GRACE_S: Final = 5.0  # for batches on their way: a producer gathers lines for 1 s, a step takes up to seconds
_GRACE_MS: Final = round(GRACE_S * 1000)


class BatchEvents(msgspec.Struct, frozen=True, gc=False):
    """The events of one session in one batch, in the batch's order."""

    observation: Observation
    at_ms: list[int]
    lines: list[int]
    templates: list[int]


def batch_events(observation: Observation) -> dict[str, BatchEvents]:
    """The events of every session of a batch, by its kind and key."""
    found: dict[str, BatchEvents] = {}
    before: str | None = None
    at: list[int] = []
    lines: list[int] = []
    templates: list[int] = []
    for entry, at_ms, line, template_id in observation.events.rows():
        if entry != before:  # a session often has several lines in a row
            before, events = entry, found.get(entry)
            if events is None:
                at, lines, templates = [at_ms], [line], [template_id]
                found[entry] = BatchEvents(observation, at, lines, templates)
                continue
            at, lines, templates = events.at_ms, events.lines, events.templates
        at.append(at_ms)
        lines.append(line)
        templates.append(template_id)
    return found


_Steps = Annotated[list[int], msgspec.Meta(max_length=MAX_SESSION_EVENTS)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class AddedEvents(msgspec.Struct, frozen=True, array_like=True):
    """Events that were added together, of one workload. Steps are differences to the value before: one or two
    bytes, not nine."""

    origin: _Count  # place among the origins of its session
    at_steps: _Steps
    line_steps: _Steps
    templates: _Steps


class SessionWire(msgspec.Struct, array_like=True, kw_only=True, gc=False):
    """Wire form of an open session."""

    source: str = ""  # of its newest batch, as the next two
    lane: Lane = Lane.FRESH
    accepted_ms: int = 0
    ended: bool = False  # its last event is an end event
    dropped: int = 0  # events past MAX_SESSION_EVENTS
    events: _Count = 0  # that it has
    last: tuple[int, int, int] | None = None  # (at ms, line, template) of its last event
    # (at ms, number) of the last event of a trace. Its lines come from several files, which have no order.
    last_joint: tuple[int, int] | None = None
    # Of a trace: its workloads with the sources of their newest batches.
    origins: list[tuple[str, str]] = []
    pieces: Annotated[list[bytes], msgspec.Meta(max_length=MAX_SESSION_EVENTS)] = []
    timed: bool = True  # false: some batch of it had no line with a time

    def pack(self) -> bytes:
        """The bytes of an open session in Redis."""
        return _SESSIONS.pack(self)


_SESSIONS: Final = Codec(SessionWire, version=2, what="an open session", newer=BadPayload)
_PACKED: Final = msgspec.msgpack.Encoder()


@dataclass(slots=True, kw_only=True)
class GrowingSession:
    """One open session. `was`: the lane in which Redis has it, None for a new one."""

    workload: str  # JOINT for a trace, until it is parted
    key: str
    kind: str = ""  # of the key
    wire: SessionWire = field(default_factory=SessionWire)
    was: Lane | None = None

    @property
    def lane(self) -> Lane:
        return self.wire.lane

    def add(self, found: BatchEvents) -> int:
        """Add these events; returns how many there was room for."""
        wire, observation = self.wire, found.observation
        room = MAX_SESSION_EVENTS - wire.events
        at_ms, lines, templates = found.at_ms, found.lines, found.templates
        if len(at_ms) > room:
            wire.dropped += len(at_ms) - room
            at_ms, lines, templates = at_ms[:room], lines[:room], templates[:room]
        if at_ms:
            joined = self.workload == JOINT
            origin = self._origin(observation) if joined else 0
            wire.pieces.append(_packed(origin, at_ms, lines, templates))
            wire.events += len(at_ms)
            last = _last(at_ms, lines, templates)
            wire.last = last if wire.last is None else max(wire.last, last)
            if joined:
                joint = _last_joint(observation.workload, last[0], at_ms, templates)
                wire.last_joint = joint if wire.last_joint is None else max(wire.last_joint, joint)
        wire.source, wire.lane = observation.source, observation.lane
        wire.accepted_ms = max(wire.accepted_ms, observation.accepted_ms)
        wire.timed &= observation.newest_ms > 0
        return len(at_ms)

    def _origin(self, observation: Observation) -> int:
        """The place of the observation's workload among the origins."""
        origins, origin = self.wire.origins, (observation.workload, observation.source)
        for place, (workload, _) in enumerate(origins):
            if workload == observation.workload:
                origins[place] = origin
                return place
        origins.append(origin)
        return len(origins) - 1

    def ends_with(self, ends: frozenset[int], *, joint: bool = False) -> bool:
        """Whether its last event is one of these. `joint`: numbers of events of a trace as a whole."""
        last = self.wire.last_joint if joint else self.wire.last
        return last is not None and last[-1] in ends

    def due_ms(self, open_ms: int) -> int:
        """When it closes, on the clock of batch acceptance."""
        return due_ms(self.wire.accepted_ms, open_ms, ended=self.wire.ended)

    def pack(self) -> bytes:
        return self.wire.pack()

    @classmethod
    def unpack(cls, workload: str, entry: str, blob: bytes) -> "GrowingSession":
        """`entry`: kind and key. Raises BadPayload; damage of events is found once they are read."""
        kind, key = kind_and_key(entry)
        wire = _SESSIONS.unpack(blob)
        return cls(workload=workload, key=key, kind=kind, wire=wire, was=wire.lane)


def due_ms(accepted_ms: int, open_ms: int, *, ended: bool) -> int:
    """When a session closes whose newest batch was accepted then."""
    return accepted_ms + _GRACE_MS + (0 if ended else open_ms)


def wire_of(
    rows: Sequence[tuple[int, int, int]],
    origin_of: Sequence[int],
    origins: list[tuple[str, str]],
    **more: Any,
) -> SessionWire:
    """The wire form of these events: (at ms, line, template). `origin_of`: of each event of a trace its place
    among `origins`; `more`: the fields that tell nothing of events."""
    wire = SessionWire(events=len(rows), last=max(rows, default=None), origins=origins, **more)
    if origin_of:
        numbered = zip(rows, origin_of, strict=True)
        wire.last_joint = max((row[0], joint_event(origins[at][0], row[2])) for row, at in numbered)
    places = [row for row in range(1, len(origin_of)) if origin_of[row] != origin_of[row - 1]]
    for begin, end in pairwise([0, *places, len(rows)]):
        if begin < end:
            at_ms, lines, templates = map(list, zip(*rows[begin:end], strict=True))
            wire.pieces.append(_packed(origin_of[begin] if origin_of else 0, at_ms, lines, templates))
    return wire


def _last(at_ms: Sequence[int], lines: Sequence[int], templates: Sequence[int]) -> tuple[int, int, int]:
    if len(at_ms) == 1:
        return at_ms[0], lines[0], templates[0]
    newest, last = max(at_ms), max(lines)
    if at_ms[-1] == newest and lines[-1] == last:  # as nearly always
        return newest, last, templates[-1]
    return max(zip(at_ms, lines, templates, strict=True))


def _last_joint(
    workload: str, newest: int, at_ms: Sequence[int], templates: Sequence[int]
) -> tuple[int, int]:
    if at_ms[-1] == newest and at_ms.count(newest) == 1:
        return newest, joint_event(workload, templates[-1])
    rows = zip(at_ms, templates, strict=True)
    return newest, max(joint_event(workload, template) for at, template in rows if at == newest)


def _packed(origin: int, at_ms: list[int], lines: list[int], templates: list[int]) -> bytes:
    """The bytes of AddedEvents."""
    if len(at_ms) == 1:
        return _PACKED.encode((origin, at_ms, lines, templates))
    return _PACKED.encode((origin, _steps(at_ms), _steps(lines), templates))


def _steps(values: Sequence[int]) -> list[int]:
    """The first value, and the differences of the others to the value before."""
    return [values[0], *map(sub, islice(values, 1, None), values)]
