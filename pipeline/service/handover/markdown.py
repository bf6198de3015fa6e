"""An incident as Markdown, for a ticket or a post-mortem.

Text of log lines is whatever somebody wrote. It stands in code spans and fences that it cannot close, so no
reader of Markdown obeys it.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pipeline.service.handover.values import IncidentNote
from pipeline.service.values import CauseView, IncidentView, Line
from pipeline.units import clipped, one_line, plural, visible

CHARS: Final = 2_000  # of a line
SEVERITY: Final = {3: "error", 2: "warning"}
_TICKS: Final = re.compile(r"`+")


def incident_markdown(
    incident: IncidentView,
    causes: Sequence[tuple[CauseView, Sequence[Line]]],
    *,
    before: Sequence[Line] = (),
    notes: Sequence[IncidentNote] = (),
    link: str = "",
) -> str:
    """The text of `incident.md`. `causes`: in the order of their onset, each with lines of it; `before`: the
    lines before the first; `link`: the address of its page."""
    parts = [f"# Incident {incident.id}", code_span(incident.title), _facts(incident, link)]
    if incident.origins:
        parts.append("## Where it began")
        parts.append("\n".join(_origin(one.workload, one.reasons) for one in incident.origins))
    if before:
        parts += ["## Just before", fence([_line(one) for one in before])]
    parts.append("## Causes in the order of their onset")
    for at, (cause, lines) in enumerate(causes, 1):
        parts.append(_cause(at, cause))
        parts.append(fence([_line(one) for one in lines] or [clipped(cause.text, CHARS)]))
    if incident.more_causes:
        parts.append(f"And {plural(incident.more_causes, 'further cause')}.")
    if notes:
        parts.append("## Notes")
        for note in notes:
            parts += [f"{code_span(note.by)}, {_time(note.at)}:", fence([visible(note.text)])]
    return "\n\n".join(parts) + "\n"


def code_span(text: str) -> str:
    """The text as inline code on one line, with more backticks around it than it has in a row."""
    text = one_line(clipped(text, CHARS)).strip()
    ticks = "`" * (_longest(text) + 1)
    pad = " " if "`" in text or not text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fence(lines: Sequence[str]) -> str:
    """Lines in a fence that none of them closes."""
    text = "\n".join(lines)
    ticks = "`" * max(3, _longest(text) + 1)
    return f"{ticks}text\n{text}\n{ticks}"


def _longest(text: str) -> int:
    return max(map(len, _TICKS.findall(text)), default=0)


def _facts(incident: IncidentView, link: str) -> str:
    severity = SEVERITY.get(incident.severity, "unusual")
    facts = [
        f"State: {incident.state}, severity: {severity}",
        f"First line: {_time(incident.first)}" if incident.timed else f"Came: {_time(incident.first)}",
        f"Last line: {_time(incident.last)}",
        f"{plural(incident.count, 'line')} of {plural(len(incident.causes) + incident.more_causes, 'cause')}",
        f"Workloads: {', '.join(map(code_span, incident.workloads))}",
    ]
    if incident.seen:
        facts.append(f"Seen {plural(incident.seen, 'time')} before")
    if incident.decision is not None:
        decision = incident.decision
        why = f": {code_span(decision.why)}" if decision.why else ""
        facts.append(f"{decision.state} by {code_span(decision.by)}, {_time(decision.at)}{why}")
    if link:
        facts.append(f"Page: <{link}>")
    return "\n".join(f"* {fact}" for fact in facts)


def _origin(workload: str, reasons: Sequence[str]) -> str:
    return f"* {code_span(workload)}" + "".join(f"; {code_span(reason)}" for reason in reasons)


def _cause(at: int, cause: CauseView) -> str:
    mark = f", pattern {cause.mark}" if cause.mark else f", {cause.kind}"
    new = ", new" if cause.new else ""
    return (
        f"{at}. {code_span(cause.workload)}: {SEVERITY.get(cause.severity, 'unusual')}, from "
        f"{_time(cause.first)}, {plural(cause.count, 'line')}{mark}{new}"
    )


def _line(line: Line) -> str:
    return f"{_time(line.timestamp)} {one_line(line.level or '-')} {clipped(line.message or '', CHARS)}"


def _time(at: datetime) -> str:
    return at.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")
