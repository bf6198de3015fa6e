"""Verdicts on sessions and alarms of rates as findings in words, and as events of incidents."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from pipeline.records.batch import digest
from pipeline.records.left_out import AHEAD
from pipeline.records.verdict import Reason
from pipeline.units import plural
from pipeline.watching.alarm_budget import GRAVE, ChanceRate
from pipeline.watching.callbacks import Expected
from pipeline.watching.incidents.leading import grade_of, thrown_in
from pipeline.watching.incidents.named import by_last_part, named_in_text
from pipeline.watching.incidents.starts import NEW_VERSION
from pipeline.watching.incidents.values import TEMPLATE, IncidentEvent
from pipeline.watching.numbers import scores
from pipeline.watching.numbers.alarms import NumberAlarm, number_sentence
from pipeline.watching.observation import Observation
from pipeline.watching.rates import thresholds as rates
from pipeline.watching.rates.rates import Alarm
from pipeline.watching.rows import NUMBERS, RATES, SESSIONS, WatcherFinding
from pipeline.watching.sessions.joint import EventNames, localised
from pipeline.watching.sessions.model import LEVEL, SessionVerdict
from pipeline.watching.sessions.open_sessions import Segment

KEY_CHARS: Final = 80  # Of a session key in a sentence.
TEXT_CHARS: Final = 120  # Of a template in a sentence.
MAX_SHOWN: Final = 20  # Events of a session: the first and the last of them.
MARKED_SCORE: Final = 1.0  # of lines that a person marked as anomalous
SEVERITY: Final = 2  # As of a warning (findings.finding_severity).
AHEAD_MS: Final = AHEAD // timedelta(milliseconds=1)


def of_session(
    segment: Segment, verdict: SessionVerdict, version: str, names: EventNames, *, per_day: float
) -> WatcherFinding:
    """An anomalous session, with its events. A trace as a whole counts for the workload of the event that the
    reason names. `per_day`: sessions of its kind."""
    fault = _fault(segment, verdict)
    plain = localised(verdict, names.places)
    until_now = segment.next_history()
    where = f" from line {until_now.line:,} of {until_now.source}" if until_now.source else ""
    events = plural(until_now.events, "event")
    seconds = (until_now.until_ms - until_now.began_ms) / 1000
    span = f" in {seconds:,.0f} s" if segment.timed and len(until_now.templates) > 1 else ""
    key = _cut(segment.key, KEY_CHARS)
    return WatcherFinding(
        source=SESSIONS,
        workload=_blamed(segment, verdict, names),
        cause=plain.cause,
        subject=f"{segment.key} {until_now.began_ms} {until_now.line} {until_now.source}",
        at=_moment(segment.at_ms[fault]),
        message=f"{'; '.join(_sentences(verdict, names))}: session {key}, {events}{span}{where}",
        detail=_events(segment, names),
        reasons=plain.reasons,
        score=verdict.score,
        p_value=verdict.p_value,
        chance=ChanceRate(per_day=per_day * verdict.p_value, found_per_day=per_day * LEVEL),
        version=version,
        line=segment.lines[fault] if until_now.source else 0,  # of a pack, it is one of any of its files
        timed=segment.timed,
    )


def _fault(segment: Segment, verdict: SessionVerdict) -> int:
    """The index of the first event that the first reason names, otherwise of the last event.

    A block may have been written for an hour before the fault; those events have nothing to do with it.
    """
    name, _, data = verdict.reasons[0].partition(":")
    named = data.split()[2 if name == Reason.SESSION_MISSING else 0 :]
    event = int(named[0]) if named and named[0].isdecimal() else -1
    return segment.templates.index(event) if event in segment.templates else len(segment.templates) - 1


def _blamed(segment: Segment, verdict: SessionVerdict, names: EventNames) -> str:
    """The workload of a finding: of a trace, that of the first event that the reason names."""
    if not segment.places:
        return segment.workload
    words = verdict.reasons[0].partition(":")[2].split()
    named = [names.workload(int(word)) for word in words if word.isdecimal()]
    last = names.workload(segment.templates[-1]) or segment.workload
    return next((workload for workload in named if workload), last)


def holds_unfinished(verdict: SessionVerdict) -> bool:
    """Whether no later event can change it: an unknown event stays unknown, a count may still be reached."""
    return verdict.reasons[0].partition(":")[0] == Reason.SESSION_EVENT


def named_in(segment: Segment, verdict: SessionVerdict) -> frozenset[int]:
    """The templates whose texts the finding needs; the reasons alone name a missing event."""
    named = set(segment.templates)
    for reason in verdict.reasons:
        words = reason.partition(":")[2].split()
        named |= {int(word) for word in (words[:1] + words[2:3]) if word.isdecimal()}
    return frozenset(named)


def _sentences(verdict: SessionVerdict, names: EventNames) -> list[str]:
    """The first reason, and the first follow-up that did not come in time."""
    missing = [one for one in verdict.reasons if one.partition(":")[0] == Reason.SESSION_MISSING]
    others = [one for one in verdict.reasons if one not in missing]
    shown = sorted([*missing[:1], *others[:1]], key=verdict.reasons.index)
    return [_why(one, names) for one in shown]


def _why(reason: str, names: EventNames) -> str:
    """A reason in words, as it is if it has another form."""
    name, _, data = reason.partition(":")
    match name, data.replace("/", " ").split():
        case Reason.SESSION_EVENT, [event]:
            return f"{_named(event, names)} is in no normal session"
        case Reason.SESSION_COUNTS, [event, n, usual]:
            comes = f"comes {plural(int(n), 'time')}" if int(n) else "does not come"
            normal = f"has it {plural(int(usual), 'time')}" if int(usual) else "has none"
            return f"{_named(event, names)} {comes}, where the most similar normal session {normal}"
        case Reason.SESSION_ORDER, [event, ("first" | "last") as place]:
            return f"{_named(event, names)} comes {place}, as in no normal session"
        case Reason.SESSION_ORDER, [event, "after", before]:
            return (
                f"{_named(event, names)} comes right after {_named(before, names)}, as in no normal session"
            )
        case Reason.SESSION_MISSING, [event, "after", before, usual_ms, within, parts, *late]:
            share = 100 * int(within) / int(parts)
            usual = f"within {_seconds(int(usual_ms))} in {share:.{0 if share == 100 else 1}f} %"
            here = f"here after {_seconds(int(late[1]))}" if late else "not here"
            return f"{_named(before, names)} is followed by {_named(event, names)} {usual}; {here}"
    return reason


def _seconds(ms: int) -> str:
    return f"{ms / 1000:,.0f} s" if ms % 1000 == 0 or ms >= 10_000 else f"{ms / 1000:.1f} s"


def _named(event: str, names: EventNames) -> str:
    """A template with its text, and its workload in a trace."""
    if not event.isdecimal():
        return f"T{event}"
    template, text, workload = names.template(int(event)), names.text(int(event)), names.workload(int(event))
    label = _label(template)
    words = f"{label} `{_cut(text, TEXT_CHARS)}`" if text else label
    return f"{words} of {workload}" if workload else words


def _label(template: int | None) -> str:
    return "an earlier event" if template is None else f"T{template}"


def _events(segment: Segment, names: EventNames) -> str:
    """A line per event of the segment; of many only the first and the last."""
    rows = [
        "  ".join(
            filter(
                None,
                [
                    f"{_moment(at):%Y-%m-%d %H:%M:%S}" if segment.timed else "",
                    names.workload(event) or "",
                    _label(names.template(event)),
                    _cut(names.text(event), TEXT_CHARS),
                ],
            )
        )
        for at, event in zip(segment.at_ms, segment.templates, strict=True)
    ]
    if len(rows) > MAX_SHOWN:
        hidden = len(rows) - MAX_SHOWN + segment.dropped
        rows[MAX_SHOWN // 2 : -MAX_SHOWN // 2] = [f"... {plural(hidden, 'event')} more ..."]
    if history := segment.history:
        until = _moment(history.until_ms)
        rows.insert(0, f"... {plural(history.events, 'event')} until {until:%Y-%m-%d %H:%M:%S} ...")
    return "\n".join(rows)


def of_alarm(workload: str, alarm: Alarm, texts: Mapping[int, str]) -> WatcherFinding:
    """An alarm of a rate."""
    text = texts.get(alarm.template_id or 0)
    return WatcherFinding(
        source=RATES,
        workload=workload,
        cause=alarm.cause,
        subject=f"{alarm.began.isoformat()} {alarm.at.isoformat()}",
        at=alarm.at,
        message=f"{alarm.sentence}: `{_cut(text, TEXT_CHARS)}`" if text else alarm.sentence,
        detail="",
        reasons=(f"{alarm.kind.value}:{alarm.template_id}" if alarm.template_id else alarm.kind.value,),
        score=alarm.score,
        p_value=alarm.p_value,
        chance=ChanceRate(per_day=alarm.per_day, found_per_day=rates.FOUND_PER_DAY[alarm.kind]),
        version="",
    )


def of_numbers(workload: str, alarm: NumberAlarm, texts: Mapping[int, str]) -> WatcherFinding:
    """An alarm of numbers."""
    text = texts.get(alarm.template_id)
    nats, found_per_day = alarm.shown.nats, scores.FOUND_PER_DAY[alarm.kind]
    # A finding at its threshold has half a point.
    threshold = max(nats - math.log(found_per_day / max(alarm.per_day, sys.float_info.min)), 1e-9)
    return WatcherFinding(
        source=NUMBERS,
        workload=workload,
        cause=alarm.cause,
        subject=alarm.at.isoformat(),
        at=alarm.at,
        message=number_sentence(alarm, _cut(text, TEXT_CHARS) if text else None),
        detail="",
        reasons=(alarm.kind.value if alarm.others else f"{alarm.kind.value}:{alarm.template_id}",),
        score=round(nats / (nats + threshold), 6),
        p_value=math.exp(-min(nats, 690.0)),
        chance=ChanceRate(per_day=alarm.per_day, found_per_day=found_per_day),
        version="",
    )


class Familiarity(StrEnum):
    """Why an anomalous template is no event of its own in incidents."""

    EVERY_DAY = "every-day"  # a known error no oftener than the workload usually writes it: no event
    NEW_VERSION = NEW_VERSION  # a new calm pattern after a start: one cause with all others


def events_of(
    observed: Iterable[Observation],
    found: Sequence[WatcherFinding],
    workloads: Iterable[str] = (),
    *,
    familiar: Mapping[tuple[str, int], Familiarity] | None = None,
    expected: Mapping[str, Expected] | None = None,
) -> list[IncidentEvent]:
    """The events of incidents of one round: anomalous templates and findings. `workloads`: all that may be
    named in texts. `familiar`: by batch id and template. `expected`: by workload."""
    known, familiar, expected = by_last_part(workloads), familiar or {}, expected or {}
    unknown = Expected()
    events = [
        IncidentEvent(
            event_id=f"{observation.batch_id} {row['template_id']} {observation.version}",
            workload=observation.workload,
            cause=NEW_VERSION if part is Familiarity.NEW_VERSION else f"template:{row['template_id']}",
            kind=NEW_VERSION if part is Familiarity.NEW_VERSION else TEMPLATE,
            first=_moment(row["first"]),
            # One line with a broken date must not make its template last until that date.
            last=_moment(min(row["last"], max(row["first"], observation.accepted_ms + AHEAD_MS))),
            count=row["n"],
            score=row["score"],
            severity=row["severity"],
            text=f"new version: {row['text']}" if part is Familiarity.NEW_VERSION else row["text"],
            source=row["source"] or "",
            line=row["line"] or 0,
            new=row["new"],
            timed=row["timed"],
            grade=grade_of(row["level"], row["severity"], row["text"], row["raw"] or row["text"]),
            thrown=thrown_in(row["raw"] or ""),
            chance=_chance(row, expected.get(observation.workload, unknown).novel),
            named=named_in_text(row["raw"] or row["text"], observation.workload, known),
        )
        for observation in observed
        for row in observation.anomalies.named_rows()
        for part in [familiar.get((observation.batch_id, row["template_id"]))]
        if part is not Familiarity.EVERY_DAY
    ]
    groups: dict[tuple[str, str, str], list[WatcherFinding]] = {}
    for item in found:
        groups.setdefault((item.workload, item.source, item.cause), []).append(item)
    for (workload, source, cause), items in groups.items():
        first = min(items, key=lambda item: item.at)
        events.append(
            IncidentEvent(
                event_id=digest(workload, source, cause, *(item.subject for item in items), size=16),
                workload=workload,
                cause=cause,
                kind=first.kind,
                first=first.at,
                last=max(item.at for item in items),
                count=len(items),
                score=max(item.score for item in items),
                severity=SEVERITY,
                text=first.message,
                timed=first.timed,
                chance=min((item.chance for item in items), key=lambda one: one.per_day),
            )
        )
    return events


def _chance(row: Mapping[str, Any], novel_per_day: float) -> ChanceRate:
    """Errors and what a person marked are no matter of chance; a warning is as likely as a calm new line."""
    if row["severity"] > SEVERITY or row["score"] is None or row["score"] >= MARKED_SCORE:
        return GRAVE
    p_value = 1.0 if row["p_value"] is None else row["p_value"]
    return ChanceRate(per_day=p_value * novel_per_day, found_per_day=math.inf)


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"
