"""Which workload an incident likely began in.

Four pieces of evidence are added:

* **calls** (-3 to 3): the share of the other affected workloads that wait for it, less the share that it
  waits for: errors go from the called to the caller. Who waits for whom is told by errors that name another
  workload; a workload without such errors waits for those that it calls in normal traces, where they have
  errors or shifted numbers too;
* **onset** (0 to 1): how early its first cause at its highest severity came beside the earliest one, on
  clocks that are corrected by what traces show of them, in steps of a second that double;
* **missing** (0 to 1): events that normally follow in its part of a trace, and did not come: a service that
  stopped before its first line has no line that says so. Where an error of its caller names another
  workload, the requests end before;
* **news** (0 to 0.5): the number of its causes that no training has seen.

A workload that errors name is a candidate without a cause of its own. Workloads whose sums are near the
highest one are candidates too. Where the second is as near as EVEN, the incident is not clear. Pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Final

import msgspec

from pipeline.units import listed, plural

MOST: Final = 3  # candidates
EVEN: Final = 0.25  # of the sum: two workloads that are as near as that are even
CALLS: Final = 3.0
NEWS: Final = 0.5
_NEAR: Final = 2.0  # of the sum: a workload further behind the first is no candidate
_SHOWN: Final = 0.25  # of an evidence, to be a reason
_MISSING: Final = "session-missing"
_SHIFT: Final = "number-shift"  # most are durations: who waits for a slow workload is slow too
_ERROR: Final = 3  # severity
_CLOCK_MS: Final = 100  # a smaller difference of clocks is within what a trace shows of them

Text = Annotated[str, msgspec.Meta(max_length=240)]
_Ms = Annotated[int, msgspec.Meta(ge=-(1 << 40), le=1 << 40)]


class Upstream(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """`caller` calls `called`, straight or through others, in so many normal traces."""

    caller: str
    called: str
    traces: Annotated[int, msgspec.Meta(ge=1)]


class TraceShape(msgspec.Struct, frozen=True, array_like=True):
    """What normal traces show of workloads: who calls whom, and how far ahead the clock of each is."""

    upstream: tuple[Upstream, ...] = ()
    ahead_ms: dict[str, _Ms] = {}

    def callers(self) -> Mapping[str, frozenset[str]]:
        """The callers of each workload that is called."""
        found: dict[str, set[str]] = {}
        for one in self.upstream:
            found.setdefault(one.called, set()).add(one.caller)
        return {called: frozenset(callers) for called, callers in found.items()}


def shape_weight(shape: TraceShape) -> int:
    """The most bytes that it takes when packed."""
    pairs = sum(len(one.caller.encode()) + len(one.called.encode()) + 20 for one in shape.upstream)
    return pairs + sum(len(name.encode()) + 20 for name in shape.ahead_ms)


class LikelyOrigin(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A workload that an incident may have begun in, and why; the heaviest reason first."""

    workload: Text
    reasons: Annotated[tuple[Text, ...], msgspec.Meta(max_length=4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """A cause of an incident, as far as its origin goes."""

    workload: str
    kind: str
    first: datetime
    timed: bool
    severity: int
    count: int
    new: bool
    named: tuple[str, ...] = ()  # other workloads that its text names


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """At most MOST candidates, the likeliest first. `clear`: the first is ahead of the second."""

    origins: tuple[LikelyOrigin, ...]
    clear: bool


def likely_origins(clues: Sequence[Clue], shape: TraceShape) -> Likely:
    """Of an incident with these causes, at least one."""
    by_workload: dict[str, list[Clue]] = {}
    for clue in clues:
        by_workload.setdefault(clue.workload, []).append(clue)
    named = {name for clue in clues if clue.severity > 1 for name in clue.named}
    candidates = sorted(by_workload.keys() | named)
    if len(candidates) == 1:
        only = LikelyOrigin(workload=_cut(candidates[0]), reasons=("it alone has causes",))
        return Likely(origins=(only,), clear=True)
    evidence = _evidence(by_workload, candidates, shape)
    sums = {name: math.fsum(value for value, _ in found) for name, found in evidence.items()}
    ordered = sorted(sums, key=lambda name: (-sums[name], name))
    first, second = ordered[:2]
    chosen = [name for name in ordered if sums[first] - sums[name] < _NEAR][:MOST]
    return Likely(
        origins=tuple(LikelyOrigin(workload=_cut(name), reasons=_reasons(evidence[name])) for name in chosen),
        clear=sums[first] - sums[second] > EVEN,
    )


def _evidence(
    by_workload: Mapping[str, Sequence[Clue]], candidates: Sequence[str], shape: TraceShape
) -> dict[str, list[tuple[float, str]]]:
    """For each candidate its values, each with its sentence."""
    named = {name: _named(clues) for name, clues in by_workload.items()}
    by_workload = {name: _unexplained(name, clues, named, shape) for name, clues in by_workload.items()}
    waits = _waiting(by_workload, named, candidates, shape)
    onsets = {name: _onset(clues, shape.ahead_ms.get(name, 0)) for name, clues in by_workload.items()}
    began = min((onset for onset in onsets.values() if onset), default=None)
    missing = {name: _missing(by_workload.get(name, ())) for name in candidates}
    news = {name: sum(clue.new for clue in by_workload.get(name, ())) for name in candidates}
    found = {}
    for name in candidates:
        others = by_workload.keys() - {name}
        above = {other for other in others if name in waits[other]}
        below = waits[name] - {name}
        calls = CALLS * (len(above) - len(below)) / max(1, len(others | below))
        found[name] = [
            _of_onset(onsets.get(name), began, shape.ahead_ms.get(name, 0)),
            (calls, _of_calls(name, above, named)),
            (
                missing[name] / max(1, *missing.values()),
                f"events of it that normally follow did not come, {plural(missing[name], 'time')}",
            ),
            (
                NEWS * math.log1p(news[name]) / math.log1p(max(1, *news.values())),
                f"{plural(news[name], 'cause')} that no training has seen",
            ),
        ]
    return found


def _named(clues: Iterable[Clue]) -> frozenset[str]:
    """The workloads that errors and warnings name."""
    return frozenset(name for clue in clues if clue.severity > 1 for name in clue.named)


def _unexplained(
    name: str, clues: Sequence[Clue], named: Mapping[str, frozenset[str]], shape: TraceShape
) -> list[Clue]:
    """Its causes, without missing events where a caller's errors name another workload: its requests end
    before they come so far."""
    callers = (one.caller for one in shape.upstream if one.called == name)
    ends_before = any(named.get(caller, frozenset()) - {name} for caller in callers)
    return [clue for clue in clues if not (ends_before and clue.kind == _MISSING)]


def _waiting(
    by_workload: Mapping[str, Sequence[Clue]],
    named: Mapping[str, frozenset[str]],
    candidates: Sequence[str],
    shape: TraceShape,
) -> dict[str, set[str]]:
    """For each candidate those that its requests wait for, straight or through others: those that its errors
    name, or else those that normal traces show, where these have errors, shifted numbers or missing events,
    or are named."""
    waits = {name: set(named.get(name, ())) & set(candidates) for name in candidates}
    telling = {name for name in candidates if waits[name]}
    suspect = set(candidates) - by_workload.keys()
    for name, clues in by_workload.items():
        if any(clue.severity == _ERROR or clue.kind in (_MISSING, _SHIFT) for clue in clues):
            suspect.add(name)
    for one in shape.upstream:
        if one.caller in waits and one.caller not in telling and one.called in suspect:
            waits[one.caller].add(one.called)
    for name in candidates:
        reached, waiting = set[str](), list(waits[name])
        while waiting:
            other = waiting.pop()
            if other not in reached:
                reached.add(other)
                waiting += waits[other]
        waits[name] = reached
    return waits


def _onset(clues: Iterable[Clue], ahead_ms: int) -> datetime | None:
    """Of its causes the first at the highest severity: a warning before an error may be any."""
    timed = [clue for clue in clues if clue.timed]
    most = max((clue.severity for clue in timed), default=0)
    first = min((clue.first for clue in timed if clue.severity == most), default=None)
    return None if first is None else first - timedelta(milliseconds=ahead_ms)


def _of_onset(onset: datetime | None, began: datetime | None, ahead_ms: int) -> tuple[float, str]:
    if onset is None or began is None:
        return 0.0, ""
    late_s = (onset - began).total_seconds()
    clock = ""
    if abs(ahead_ms) >= _CLOCK_MS:
        clock = f"; its clock is {abs(ahead_ms) / 1000:.1f} s {'ahead' if ahead_ms > 0 else 'behind'}"
    says = (
        "its first cause came first"
        if late_s == 0
        else f"its first cause came {late_s:.1f} s after the first"
    )
    return 1 / (1 + (int(late_s) + 1).bit_length() - 1), says + clock


def _of_calls(name: str, above: set[str], named: Mapping[str, frozenset[str]]) -> str:
    naming = sorted(one for one in above if name in named[one])
    calling = sorted(above - set(naming))
    parts = [f"named in errors of {listed(naming)}"] if naming else []
    parts += [f"waited for by {listed(calling)}"] if calling else []
    return ", and ".join(parts)


def _missing(clues: Iterable[Clue]) -> int:
    return sum(clue.count for clue in clues if clue.kind == _MISSING)


def _reasons(found: Sequence[tuple[float, str]]) -> tuple[str, ...]:
    shown = sorted((item for item in found if item[0] >= _SHOWN), key=lambda item: -item[0])
    return tuple(_cut(says) for _, says in shown)


def _cut(text: str) -> str:
    return text if len(text) <= 240 else text[:239] + "…"
