"""Rates: false alarms a day on untouched streams, and injected faults found, beside 3 sigma and a fixed
factor 3.

The first half of each stream is history for all three, faults are put into the second half; of the made-up
stream all but the last day are history. An alarm on an untouched stream counts as false though the sets hold
real faults. Episodes of the two plain rules that are less than an hour apart count as one. A burst is in
reach where one test of exactly its minutes, by the past of its template, could tell it within the budget
(`_rate_bounds.py`)."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench._rate_bounds import bound_of, table
from bench._rate_streams import MADE_UP, Counts, Fault, Stream, drive, faults, made_up, real
from pipeline.watching.rates.rates import Rates

KINDS: Final = ("x3", "x10", "stop", "mix")
_BURSTS: Final = {"x3": 3.0, "x10": 10.0}
Alarms = list[tuple[int, str]]
_MERGE: Final = 60  # minutes
_AFTER: Final = 15  # minutes after a fault in which it may still be told
_YOUNG: Final = 60


def measure(data: Path) -> dict[str, Any]:
    streams = [*real(data), made_up()]
    sets = {stream.name: _one(stream) for stream in streams}
    totals: dict[str, Any] = {}
    for rule in ("ours", "3_sigma", "factor_3"):
        judged = sum(s["days_judged"] for s in sets.values())
        line: dict[str, Any] = {
            "false_alarms": sum(s["false_alarms"][rule] for s in sets.values()),
            "false_alarms_per_day": round(sum(s["false_alarms"][rule] for s in sets.values()) / judged, 2),
        }
        for kind in KINDS:
            shown = [s[kind][rule] for s in sets.values() if kind in s]
            tried = sum(s[kind]["faults"] for s in sets.values() if kind in s)
            delays = [d for one in shown for d in one["delays"]]
            line[kind] = (
                f"{len(delays)} of {tried}, median delay {int(np.median(delays)) if delays else '-'} min"
            )
        totals[rule] = line
    for kind in _BURSTS:
        some = [s[kind] for s in sets.values() if kind in s]
        reach, found = sum(s["in_reach"] for s in some), sum(s["in_reach_found"] for s in some)
        totals["ours"][f"{kind}_in_reach"] = f"{found} of {reach}"
    return {"sets": sets, "all": totals, "least_multiples": table()}


def _one(stream: Stream) -> dict[str, Any]:
    half = len(stream.counts) - 1440 if stream.name == MADE_UP else len(stream.counts) // 2
    learnt = Rates.unpack(None)
    drive(learnt, stream, 0, half)
    state = learnt.pack()
    rules: dict[str, Callable[[Stream], Alarms]] = {
        "ours": lambda s: drive(Rates.unpack(state), s, half, len(s.counts)),
        "3_sigma": lambda s: list(_plain(s.counts, half, sigma=True)),
        "factor_3": lambda s: list(_plain(s.counts, half, sigma=False)),
    }
    untouched = {name: rule(stream) for name, rule in rules.items()}
    days = (len(stream.counts) - half) / 1440
    shown: dict[str, Any] = {
        "days": round(stream.days, 2),
        "days_judged": round(days, 3),
        "templates": stream.counts.shape[1],
        "lines": int(stream.counts.sum()),
        "state_kib": round(len(state) / 1024, 1),
        "false_alarms": {name: len(alarms) for name, alarms in untouched.items()},
        "ours_by_kind": dict(Counter(cause.split(":")[0] for _, cause in untouched["ours"])),
    }
    for kind in KINDS:
        changed, made = faults(stream, kind, begin=half)
        if not made:
            continue
        shown[kind] = {"faults": len(made)}
        alarms = {name: rule(changed) for name, rule in rules.items()}
        for name in rules:
            delays = _delays(alarms[name], set(untouched[name]), made)
            shown[kind][name] = {"found": len(delays), "delays": delays}
        if kind in _BURSTS:
            reach = [fault for fault in made if bound_of(stream.counts, fault, half) <= _BURSTS[kind]]
            found = _delays(alarms["ours"], set(untouched["ours"]), reach)
            shown[kind] |= {"in_reach": len(reach), "in_reach_found": len(found)}
    return shown


def _delays(alarms: Alarms, before: set[tuple[int, str]], made: list[Fault]) -> list[int]:
    """Minutes from a fault's first minute to the end of the minute that told it, of those that were told."""
    found = []
    for fault in made:
        name = "rate-silence" if fault.kind == "stop" else "rate-burst"
        causes = {name, f"{name}:{fault.template_id}"}
        times = [
            row - fault.start + 1
            for row, cause in alarms
            if fault.start <= row <= fault.end + _AFTER
            and (row, cause) not in before
            and (fault.template_id is None or cause in causes)
        ]
        found += [min(times)] if times else []
    return found


# ---- the two plain rules -----------------------------------------------------------------------------


def _plain(counts: Counts, begin: int, *, sigma: bool) -> Iterator[tuple[int, str]]:
    """What mean + 3 standard deviations of all earlier minutes, or 3 times their mean and 5 lines, would
    tell."""
    x = counts.astype(np.float64)
    n = np.arange(len(x))[:, None]
    mean = (np.cumsum(x, axis=0) - x) / np.maximum(n, 1)
    square = (np.cumsum(x**2, axis=0) - x**2) / np.maximum(n, 1)
    limit = mean + 3 * np.sqrt(np.maximum(square - mean**2, 0)) if sigma else np.maximum(3 * mean, 4.5)
    known = (np.cumsum(x > 0, axis=0) - (x > 0) >= 3) & (n >= _YOUNG)
    high = (x > limit) & known
    for column in range(x.shape[1]):
        rows = np.flatnonzero(high[:, column])
        yield from _merged(rows[rows >= begin], f"rate-burst:{column + 1}")
        yield from _merged(
            _silences(np.flatnonzero(x[:, column]), len(x), begin, sigma), f"rate-silence:{column + 1}"
        )
    yield from _merged(_mixes(x, mean, begin, sigma), "rate-mix")


def _merged(rows: Any, cause: str) -> Iterator[tuple[int, str]]:
    last = -_MERGE - 1
    for row in rows:
        if row - last > _MERGE:
            yield int(row), cause
        last = int(row)


def _silences(active: Any, end: int, begin: int, sigma: bool) -> list[int]:
    """Rows at which a gap outgrew those before it, of templates with at least 20."""
    gaps = np.diff(active)
    rows = []
    for i in range(20, len(active)):
        until = active[i + 1] if i + 1 < len(active) else end
        mean, spread = gaps[:i].mean(), gaps[:i].std()
        row = active[i] + int(max(3, mean + 3 * spread if sigma else 3 * mean)) + 1
        if begin <= row < until:
            rows.append(int(row))
    return rows


def _divergence(seen: Any, expected: Any) -> float:
    """Jensen-Shannon divergence in nats between two mixes, each of any sum above 0."""
    p, q = seen / seen.sum(), expected / expected.sum()
    half = (p + q) / 2

    def one(a: Any) -> float:
        some = a > 0
        return float((a[some] * np.log(a[some] / half[some])).sum())

    return max(0.0, (one(p) + one(q)) / 2)


def _mixes(x: Counts, mean: Any, begin: int, sigma: bool) -> list[int]:
    rows, past = [], []
    for row in range(15, len(x), 15):
        seen, expected = x[row - 15 : row].sum(axis=0), mean[row - 15]
        if seen.sum() < 100 or expected.sum() == 0:
            continue
        far = _divergence(seen, expected)
        if len(past) >= 24 and row >= begin:
            limit = np.mean(past) + 3 * np.std(past) if sigma else 3 * np.mean(past)
            if far > limit:
                rows.append(row - 1)
        past.append(far)
    return rows
