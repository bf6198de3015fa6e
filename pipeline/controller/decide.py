"""Whether a model is trained now, and why: a pure function of facts and rules.

One call decides for one model: "shared", or the own model of one workload. Causes, in order:

    addition   Watched workloads with stored lines are in neither the last attempt nor the live model.
    schedule   A time of day has come.
    drift      Novelty, unknown words or scores have moved (drift.py).
    volume     Many lines were stored since the last attempt.
    age        The model, or the last attempt at a better one, is old.

Invariants:

* A training answers every cause that holds at its request. An answered cause asks again only after a failure.
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
    Facts,
    History,
    RetrainRules,
    backoff_s,
    iso,
    truncated,
)
from pipeline.records.batch import digest

_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrain:
    """Ask for a training of `workloads` (all watched ones of the model that have lines)."""

    reason: str  # one sentence for people
    cause: str  # key of the first cause
    answers: tuple[str, ...]  # keys of every cause that holds now; they go into the Attempt
    workloads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do. `until`: when time alone could change that; None when only events can."""

    until: datetime | None
    why: str  # one sentence for people


Decision = Retrain | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    key: str  # the same key means the same cause: an answered one never asks again
    text: str


def decide(facts: Facts, rules: RetrainRules) -> Decision:
    """Pure: equal facts and rules give the equal decision."""
    if not facts.watching:
        why = "nothing is watched, so no model is trained; add workloads with `logweir watch add NAME`"
        return Wait(until=None, why=why)
    if facts.busy:
        return Wait(until=None, why="a training of this model is queued or running")
    usable = tuple(sorted(name for name, lines in facts.workloads.items() if lines > 0))
    if not usable:
        return Wait(until=None, why=_without_lines(facts))
    if facts.lines < rules.min_lines:
        why = (
            f"{_lines(facts.lines)} of {_count(len(usable), 'watched workload')} stored, {rules.min_lines:,} "
            "are needed"
            f" (retrain_min_lines){_quiet(facts)}"
        )
        return Wait(until=None, why=why)
    resume = _back_off(facts.history, rules)
    if resume is not None and facts.now < resume:
        why = f"{_failed(facts.history)}; the next try is not before {_time(resume)}"
        return Wait(until=resume, why=why)
    causes = [cause for cause in _causes(facts, rules) if cause.key not in facts.history.spent]
    if causes:
        after_failure = f" ({_failed(facts.history)})" if facts.history.failures else ""
        return Retrain(
            reason="; ".join(cause.text for cause in causes) + after_failure,
            cause=causes[0].key,
            answers=tuple(cause.key for cause in causes),
            workloads=usable,
        )
    times = [t for t in (_old_at(facts, rules), facts.scheduled_next) if t is not None and t > facts.now]
    return Wait(until=min(times, default=None), why=_nothing_due(facts, rules))


def _causes(facts: Facts, rules: RetrainRules) -> Iterator[_Cause]:
    """Every cause that holds, in order, whether it was answered or not."""
    last = facts.history.last
    # Attempts move this basis, so a key that holds it is outdated by the attempt that answers it.
    basis = iso(facts.since) or "none"
    covered = facts.trained | (last.lines.keys() if last else set())
    added = sorted(name for name, lines in facts.workloads.items() if lines > 0 and name not in covered)
    if added:
        verb = "were" if len(added) > 1 else "was"
        begin = (
            f"{_count(len(added), 'workload')} {verb} added" if covered else "no training has been made yet"
        )
        yield _Cause(key=f"addition:{digest(basis, *added)}", text=f"{begin}: {_names(added)}")
    at = facts.scheduled
    if at is not None and not _trained_since(facts, at):
        yield _Cause(key=f"schedule:{at.isoformat()}", text=f"the time {_time(at)} of retrain_at has come")
    yield from _drift_causes(facts.drift, rules)
    new = facts.new_lines
    if new >= rules.volume_lines:
        text = f"{_lines(new)} were stored since the last training, {rules.volume_lines:,} are worth one"
        yield _Cause(key=f"volume:{basis}", text=text)
    old = _old_at(facts, rules)
    if old is not None and facts.now >= old:
        age = (facts.now - old).total_seconds() + rules.age_s
        text = f"the last training is {_span(age)} old, {_span(rules.age_s)} are allowed"
        yield _Cause(key=f"age:{basis}", text=text)


def _drift_causes(drift: Drift | None, rules: RetrainRules) -> Iterator[_Cause]:
    if drift is None or not drift.ready:
        return
    if drift.novelty > rules.drift_novelty:
        text = (
            f"drift: {_share(drift.novelty_now)} of lines have a new template, {_share(drift.novelty_then)} "
            "when"
            " the model was new"
        )
        yield _Cause(key=f"drift:{drift.version}:novelty", text=text)
    if drift.unknown > rules.drift_unknown:
        text = (
            f"drift: {_share(drift.unknown_now)} of words are unknown, {_share(drift.unknown_then)} when the "
            "model"
            " was new"
        )
        yield _Cause(key=f"drift:{drift.version}:unknown", text=text)
    if drift.score > rules.drift_score:
        text = f"drift: the scores have a stability index of {drift.score:.2f}, "
        text += f"{rules.drift_score:.2f} is allowed"
        yield _Cause(key=f"drift:{drift.version}:score", text=text)


def _old_at(facts: Facts, rules: RetrainRules) -> datetime | None:
    since = facts.since
    return None if since is None else since + timedelta(seconds=rules.age_s)


def _trained_since(facts: Facts, at: datetime) -> bool:
    """Did a training give a model, published or not, after that time? A cancelled one does not count."""
    gave_at = facts.history.gave_at
    return (gave_at is not None and gave_at >= at) or (
        facts.live_since is not None and facts.live_since >= at
    )


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
        "cause": decision.cause,
        "answers": list(decision.answers),
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
            "unknown"
            f" words, stability index {drift.score:.2f}"
        )
    elif drift is not None:
        parts.append(f"drift is measured from {drift.needed:,} lines on, {drift.lines:,} so far")
    answered = [cause.key.partition(":")[0] for cause in _causes(facts, rules)]
    if answered:
        parts.append(f"a training has already answered: {', '.join(sorted(set(answered)))}")
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
