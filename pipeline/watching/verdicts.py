"""Verdicts on sessions and rates, in the words of whoever reads findings and as events of incidents."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.records.batch import digest
from pipeline.records.verdict import Reason
from pipeline.units import plural
from pipeline.watching.incidents.live import AHEAD
from pipeline.watching.incidents.values import Event
from pipeline.watching.observation import Observation
from pipeline.watching.rates.rates import Alarm
from pipeline.watching.rows import RATES, SESSIONS, Found
from pipeline.watching.sessions.model import SessionVerdict
from pipeline.watching.sessions.open_sessions import Part

KEY_CHARS: Final = 80  # of a session key in a sentence
TEXT_CHARS: Final = 120  # of a template in a sentence
SHOWN: Final = 20  # events of a session that are shown: the first and the last of them
SEVERITY: Final = 2  # as a warning (findings.severity)
AHEAD_MS: Final = AHEAD // timedelta(milliseconds=1)


def of_session(part: Part, verdict: SessionVerdict, version: str, texts: Mapping[int, str]) -> Found:
    """A session that went wrong, with what happened in it."""
    fault = _fault(part, verdict)
    whole = part.then()
    where = f" from line {whole.line:,} of {whole.source}" if whole.source else ""
    events = plural(len(part.whole) + whole.left_out, "event")
    span = f" in {(whole.until_ms - whole.began_ms) / 1000:,.0f} s" if len(part.whole) > 1 else ""
    key = _cut(part.key, KEY_CHARS)
    return Found(
        source=SESSIONS,
        workload=part.workload,
        cause=verdict.cause,
        subject=f"{part.key} {whole.began_ms} {whole.line} {whole.source}",
        at=_moment(part.at_ms[fault]),
        message=f"{_why(verdict, texts)}: session {key}, {events}{span}{where}",
        detail=_events(part, texts),
        reasons=verdict.reasons,
        score=verdict.score,
        p_value=verdict.p_value,
        version=version,
        line=part.lines[fault],
    )


def _fault(part: Part, verdict: SessionVerdict) -> int:
    """The event at which it went wrong: the first of those that the first reason names, else the last of all. A block
    may have been written for an hour before; what else happened then has nothing to do with it."""
    named = verdict.reasons[0].partition(":")[2].split()
    event = int(named[0]) if named and named[0].isdecimal() else -1
    return part.templates.index(event) if event in part.templates else len(part.templates) - 1


def holds_unfinished(verdict: SessionVerdict) -> bool:
    """Whether it holds whatever comes: an event that no normal session has stays one; a number may still be reached."""
    return verdict.reasons[0].partition(":")[0] == Reason.SESSION_EVENT


def named_in(part: Part, verdict: SessionVerdict) -> frozenset[int]:
    """The templates whose texts say what went wrong: one that is missing is in the reasons alone."""
    named = set(part.templates)
    for reason in verdict.reasons:
        words = reason.partition(":")[2].split()
        named |= {int(word) for word in (words[:1] + words[2:3]) if word.isdecimal()}
    return frozenset(named)


def _why(verdict: SessionVerdict, texts: Mapping[int, str]) -> str:
    """The first reason in words; what cannot be read of it stands as it is."""
    name, _, data = verdict.reasons[0].partition(":")
    match name, data.replace("/", " ").split():
        case Reason.SESSION_EVENT, [event]:
            return f"{_named(event, texts)} is in no normal session"
        case Reason.SESSION_COUNTS, [event, seen, usual]:
            comes = f"comes {plural(int(seen), 'time')}" if int(seen) else "does not come"
            normal = f"has it {plural(int(usual), 'time')}" if int(usual) else "has none"
            return f"{_named(event, texts)} {comes}, where the most similar normal session {normal}"
        case Reason.SESSION_LENGTH, [seen, usual]:
            return f"{seen} events, where normal sessions have {usual.replace('-', ' to ')}"
        case Reason.SESSION_ORDER, [event, ("first" | "last") as place]:
            return f"{_named(event, texts)} comes {place}, as in no normal session"
        case Reason.SESSION_ORDER, [event, "after", before]:
            return (
                f"{_named(event, texts)} comes right after {_named(before, texts)}, as in no normal session"
            )
    return verdict.reasons[0]


def _named(event: str, texts: Mapping[int, str]) -> str:
    """A template as people know it."""
    text = texts.get(int(event)) if event.isdecimal() else None
    return f"T{event} `{_cut(text, TEXT_CHARS)}`" if text else f"T{event}"


def _events(part: Part, texts: Mapping[int, str]) -> str:
    """A line per event since the session was judged last, those in the middle of many left out."""
    rows = [
        f"{_moment(at):%Y-%m-%d %H:%M:%S}  T{template_id}  {_cut(texts.get(template_id, ''), TEXT_CHARS)}".rstrip()
        for at, template_id in zip(part.at_ms, part.templates, strict=True)
    ]
    if len(rows) > SHOWN:
        left = len(rows) - SHOWN + part.left_out
        rows[SHOWN // 2 : -SHOWN // 2] = [f"... {plural(left, 'event')} more ..."]
    if part.past:
        before = len(part.past.templates) + part.past.left_out
        rows.insert(
            0, f"... {plural(before, 'event')} until {_moment(part.past.until_ms):%Y-%m-%d %H:%M:%S} ..."
        )
    return "\n".join(rows)


def of_alarm(workload: str, alarm: Alarm, texts: Mapping[int, str]) -> Found:
    """A rate that is not what it was."""
    text = texts.get(alarm.template_id or 0)
    return Found(
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
        version="",
    )


def events_of(observed: Iterable[Observation], found: Sequence[Found]) -> list[Event]:
    """Everything of a round that incidents are made of."""
    events = [
        Event(
            event_id=f"{seen.batch_id} {row['template_id']} {seen.version}",
            workload=seen.workload,
            cause=f"template:{row['template_id']}",
            kind="template",
            first=_moment(row["first"]),
            # One line with a broken date must not make of its template something that lasts until then.
            last=_moment(min(row["last"], max(row["first"], seen.accepted_ms + AHEAD_MS))),
            count=row["n"],
            score=row["score"],
            severity=row["severity"],
            text=row["text"],
        )
        for seen in observed
        for row in seen.anomalies.iter_rows(named=True)
    ]
    groups: dict[tuple[str, str, str], list[Found]] = {}
    for item in found:
        groups.setdefault((item.workload, item.source, item.cause), []).append(item)
    for (workload, source, cause), items in groups.items():
        first = min(items, key=lambda item: item.at)
        events.append(
            Event(
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
            )
        )
    return events


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"
