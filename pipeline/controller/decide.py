"""Whether a model is trained now, and why: a pure function of facts and rules.

One call decides for one model: "shared", or the own model of one workload. Causes, in order:

    outdated   An older build made the live model, which this one cannot read.
    addition   Watched workloads with stored lines are in neither the last attempt nor the live model.
    schedule   A time of day has come.
    drift      Novelty, unknown words or scores have moved (drift.py).
    volume     Many lines were stored since the last attempt.
    age        The model, or the last attempt at a better one, is old.

Invariants:

* Every attempt moves what the causes are measured from, so an answered cause asks again only after a failure
  or when it occurs again. What no attempt moves (outdated, drift) and what comes fast (volume) waits for a
  rest after the last attempt, which doubles while such trainings follow one another.
* After a failure nothing is requested before the back-off has passed.
* Removing a workload from the watchlist requests nothing.
* While a training of the model is queued or runs, nothing is requested.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pipeline.controller.drift import Drift
from pipeline.controller.facts import (
    NAME_CHARS,
    NAMES_RECORDED,
    REASON_CHARS,
    RESTING,
    Facts,
    History,
    RetrainRules,
    backoff_s,
    iso,
    truncated,
)

_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrain:
    """Ask for a training of `workloads` (all watched ones of the model that have lines)."""

    reason: str  # one sentence for people
    causes: tuple[str, ...]  # every cause that holds now, the first one decides; they go into the Attempt
    workloads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do. `until`: when time alone could change that; None when only events can."""

    until: datetime | None
    why: str  # one sentence for people
    kind: str = "calm"  # "unwatched", "busy", "few", "failed", "refused", "calm": a new one is worth a record


Decision = Retrain | Wait


def decide(facts: Facts, rules: RetrainRules) -> Decision:
    """Pure: equal facts and rules give the equal decision."""
    if not facts.watching:
        why = "nothing is watched, so no model is trained; add workloads with `logweir watch add NAME`"
        return Wait(until=None, why=why, kind="unwatched")
    if facts.busy:
        return Wait(until=None, why="a training of this model is queued or running", kind="busy")
    usable = tuple(sorted(name for name, lines in facts.workloads.items() if lines > 0))
    if not usable:
        return Wait(until=None, why=_without_lines(facts), kind="few")
    if facts.lines < rules.min_lines:
        why = (
            f"{_lines(facts.lines)} of {_count(len(usable), 'watched workload')} stored, {rules.min_lines:,} "
            f"are needed (retrain_min_lines){_quiet(facts)}"
        )
        return Wait(until=None, why=why, kind="few")
    resume = _back_off(facts.history, rules)
    if resume is not None and facts.now < resume:
        why = f"{_failed(facts.history)}; the next try is not before {_time(resume)}"
        return Wait(until=resume, why=why, kind="failed")
    causes = dict(_causes(facts, rules))
    last = facts.history.last
    rested = last.at + facts.history.rest if last else facts.now
    # Nothing is judged by an unreadable model: its first training does not wait.
    resting = RESTING - ({"outdated"} if last is None or "outdated" not in last.causes else set())
    due = {name: text for name, text in causes.items() if name not in resting or facts.now >= rested}
    if due:
        after_failure = f" ({_failed(facts.history)})" if facts.history.failures else ""
        reason = "; ".join(due.values()) + after_failure
        return Retrain(reason=reason, causes=tuple(due), workloads=usable)
    times = [_old_at(facts, rules), facts.scheduled_next, rested if causes else None]
    until = min((t for t in times if t is not None and t > facts.now), default=None)
    if causes:
        why = f"{'; '.join(causes.values())}; the last training ended lately, the next one is at {_time(rested)}"
        return Wait(until=until, why=why, kind="rests")
    return Wait(until=until, why=_nothing_due(facts, rules))


def _causes(facts: Facts, rules: RetrainRules) -> Iterator[tuple[str, str]]:
    """Name and sentence of every cause that holds, in order."""
    last = facts.history.last
    if facts.outdated:
        yield "outdated", "an older build made the live model, which this one cannot read"
    covered = facts.trained | (last.lines.keys() if last else set())
    added = sorted(name for name, lines in facts.workloads.items() if lines > 0 and name not in covered)
    if added:
        verb = "were" if len(added) > 1 else "was"
        begin = (
            f"{_count(len(added), 'workload')} {verb} added" if covered else "no training has been made yet"
        )
        yield "addition", f"{begin}: {_names(added)}"
    at = facts.scheduled
    if at is not None and (facts.since is None or facts.since < at):
        yield "schedule", f"the time {_time(at)} of retrain_at has come"
    if drift := "; ".join(_moved(facts.drift, rules)):
        yield "drift", f"drift: {drift}"
    new = facts.new_lines
    if new >= rules.volume_lines:
        yield (
            "volume",
            f"{_lines(new)} were stored since the last training, {rules.volume_lines:,} are worth one",
        )
    old = _old_at(facts, rules)
    if old is not None and facts.now >= old:
        age = (facts.now - old).total_seconds() + rules.age_s
        yield "age", f"the last training is {_span(age)} old, {_span(rules.age_s)} are allowed"


def _moved(drift: Drift | None, rules: RetrainRules) -> Iterator[str]:
    if drift is None or not drift.ready:
        return
    for name, rise, then, now, allowed in (
        (
            "lines have a new template",
            drift.novelty,
            drift.novelty_then,
            drift.novelty_now,
            rules.drift_novelty,
        ),
        ("words are unknown", drift.unknown, drift.unknown_then, drift.unknown_now, rules.drift_unknown),
    ):
        if rise > allowed:
            yield f"{_share(now)} of {name}, {_share(then)} when the model was new"
    if drift.score > rules.drift_score:
        yield f"the scores have a stability index of {drift.score:.2f}, {rules.drift_score:.2f} is allowed"


def _old_at(facts: Facts, rules: RetrainRules) -> datetime | None:
    since = facts.since
    return None if since is None else since + timedelta(seconds=rules.age_s)


def _back_off(history: History, rules: RetrainRules) -> datetime | None:
    if history.failures == 0 or history.failed_at is None:
        return None
    return history.failed_at + timedelta(seconds=backoff_s(history.failures, rules.backoff_s))


# Records of decisions


def to_json(decision: Decision) -> dict[str, Any]:
    """For the record and for status; bounded. The full list of workloads is `Retrain.workloads`."""
    if isinstance(decision, Wait):
        return {"decision": "wait", "until": iso(decision.until), "why": decision.why}
    return {
        "decision": "retrain",
        "reason": decision.reason,
        "causes": list(decision.causes),
        "workloads": [truncated(name, NAME_CHARS) for name in decision.workloads[:NAMES_RECORDED]],
        "workload_count": len(decision.workloads),
    }


# Words


def _without_lines(facts: Facts) -> str:
    workloads = sorted(facts.workloads)
    if not workloads and not facts.silent:
        return "no watched workload belongs to this model"
    return f"no line of a watched workload is stored yet: {_names([*workloads, *facts.silent])}"


def _quiet(facts: Facts) -> str:
    names = [*sorted(n for n, lines in facts.workloads.items() if lines <= 0), *facts.silent]
    return f"; no logs yet from {_names(names)}" if names else ""


def _nothing_due(facts: Facts, rules: RetrainRules) -> str:
    parts = [f"{facts.new_lines:,} of {rules.volume_lines:,} new lines"]
    since = facts.since
    if since is not None:
        age = max(0.0, (facts.now - since).total_seconds())
        parts.append(f"the last training is {_span(age)} of {_span(rules.age_s)} old")
    drift = facts.drift
    if drift is not None and drift.ready:
        parts.append(
            f"drift: {_share(drift.novelty)} more lines with a new template, {_share(drift.unknown)} more "
            f"unknown words, stability index {drift.score:.2f}"
        )
    elif drift is not None:
        parts.append(
            f"drift is measured from {drift.needed:,} lines and two days on, {drift.lines:,} lines so far"
        )
    if facts.history.failures:
        parts.append(_failed(facts.history))
    return "nothing is due: " + "; ".join(parts) + _quiet(facts)


def _failed(history: History) -> str:
    which = "the last training" if history.failures == 1 else f"the last {history.failures:,} trainings"
    return f"{which} failed: {truncated(history.failure or 'no reason was given', REASON_CHARS)}"


def _names(names: list[str]) -> str:
    shown = ", ".join(truncated(name, NAME_CHARS) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _lines(number: int) -> str:
    return _count(number, "line")


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _span(seconds: float) -> str:
    for unit, size in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
