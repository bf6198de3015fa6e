"""The findings in a terminal: the answer first, then the incidents, then what was read.

Everything is printed as `Text`, after `visible`: no markup, colour code or cursor movement inside a log
line is obeyed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.report.findings import Finding, by_incident, level_severity
from pipeline.report.text import (
    NO_BASELINE,
    OVERALL,
    all_new,
    common_folder,
    followers,
    headline,
    incident_header,
    sample_place,
    sample_text,
    template_text,
    time_range,
    unit_facts,
    units_section,
    without_baseline,
)
from pipeline.report.why import briefly
from pipeline.units import clipped, line_count, one_line, plural, seconds, visible

TEMPLATE_CHARS: Final = 200
SAMPLE_CHARS: Final = 320
SHORT_CHARS: Final = 220  # of a finding behind the first of its incident: three lines of a terminal
SHORT_PLACE_CHARS: Final = 60
UNITS: Final = 3

_LEVEL_STYLE: Final = {3: "bold red", 2: "bold yellow", 1: "cyan"}
_MARK_STYLE: Final = "bold black on yellow"


def print_findings(
    findings: Sequence[Finding],
    summary: Mapping[str, Any],
    console: Console,
    *,
    limit: int | None = 20,
    context: int = 0,
) -> None:
    """Prints the answer, the first `limit` findings under their incidents, and then what was read.

    Of each incident those that are not folded are printed, the first one in full, and the others counted. A
    limit of None prints all.
    `context` records stand before and after the first sample of each.

    `summary` comes from `summary.run_summary`. With no findings, says whether nothing was unusual or
    nothing could be judged yet.
    """
    console.print(_text(console, headline(findings, summary), "bold"))
    first = list(findings if limit is None else [f for f in findings if not f.folded][:limit])
    folder = common_folder(findings)
    for entry, members in zip(by_incident(first), by_incident(findings), strict=False):
        console.print()
        console.print(_incident(members, console))
        console.print(_blocks(entry, members, folder, console, context))
        if len(members) > len(entry):
            note = f"{followers(members, len(entry))}: --all or the report shows them"
            console.print(_text(console, note, "dim"))
    hidden = len({f.entry for f in findings} - {f.entry for f in first} - {-1})
    if hidden > 0:
        verb = "is" if hidden == 1 else "are"
        note = f"{plural(hidden, 'more incident')} {verb} not shown here; --all or the report shows them"
        console.print()
        console.print(_text(console, note, "dim"))
    facts = summary.get("facts", ())
    if facts:
        console.print()
        console.print(_text(console, OVERALL, "bold"))
    for fact in facts:
        console.print(_text(console, one_line(fact["text"]), ""))
    heading, units = units_section(summary)
    if heading:
        console.print()
        console.print(_text(console, heading, "bold" if units else ""))
    for place, unit in enumerate(units[:UNITS], start=1):
        about = f"{place}. {one_line(clipped(unit['unit'], 120))} · {unit_facts(unit)}"
        console.print(_text(console, about, ""))
        for reason in unit["reasons"][:1]:
            console.print(_text(console, f"   {one_line(reason['text'])}", "dim"))
    if summary["records"]:
        console.print()
        console.print(_text(console, _what_was_read(findings, summary), "dim"))
    if findings and without_baseline(summary):
        console.print(_text(console, f"{NO_BASELINE}.", "dim"))


def _what_was_read(findings: Sequence[Finding], summary: Mapping[str, Any]) -> str:
    read = line_count(summary["lines"], summary["records"])
    parts = [f"{read} of {plural(len(summary['by_workload']), 'workload')}"]
    if summary["first"]:
        first, last = (datetime.fromisoformat(summary[name]) for name in ("first", "last"))
        parts.append(f"{time_range(first, last)} UTC")
    if summary["untimed"]:
        parts.append(f"{plural(summary['untimed_lines'], 'line')} without a time")
    if findings and summary["not_judged"]:
        parts.append(f"{plural(summary['not_judged_lines'], 'line')} not judged by the model")
    took = summary.get("run", {}).get("seconds")
    return f"Read {' · '.join(parts)}" + ("" if took is None else f" · {took:.1f} s")


def _incident(findings: Sequence[Finding], console: Console) -> Text:
    name, *facts = incident_header(findings)
    about = _one_line(" · ".join(["", *facts]))
    return Text.assemble(_text(console, name, "bold"), _text(console, about, ""))


def _blocks(
    findings: Sequence[Finding], members: Sequence[Finding], folder: str, console: Console, context: int
) -> RenderableType:
    """The findings of an incident that are shown, the first one in full; `members`: all of it."""
    new_is_said = all_new(members)
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for finding in findings:
        if (finding is findings[0] and not finding.news) or context:
            lines = _in_full(finding, members, folder, console, context, new_is_said=new_is_said)
        else:
            lines = _in_short(finding, members, folder, console)
        grid.add_row(Text(finding.label), Text("\n").join(lines))
    return grid


def _in_full(
    finding: Finding,
    members: Sequence[Finding],
    folder: str,
    console: Console,
    context: int,
    *,
    new_is_said: bool,
) -> list[Text]:
    facts = ["", _one_line(clipped(finding.workload, 80)), plural(finding.count, "time")]
    if finding.timed:
        facts.append(f"{time_range(finding.first_seen, finding.last_seen)} UTC")
        facts += _later(finding, members)
    reason = briefly(finding, new_is_said=new_is_said)
    around = _around(finding, console, folder, context) if context else _sample(finding, console, folder)
    return [
        Text.assemble(_level(finding, console), _text(console, " · ".join(facts), "dim")),
        _template(finding, console),
        *([_text(console, reason, "dim")] if reason else []),
        *around,
    ]


def _in_short(finding: Finding, members: Sequence[Finding], folder: str, console: Console) -> list[Text]:
    """Its facts on a line, without what the headline says too, and its message."""
    facts = [""]
    if finding.workload != members[0].workload:
        facts.append(_one_line(clipped(finding.workload, 80)))
    facts.append(plural(finding.count, "time"))
    facts += [briefly(finding, new_is_said=False)] if finding.news else _later(finding, members)
    facts += [_one_line(sample_place(sample, SHORT_PLACE_CHARS, folder)) for sample in finding.samples[:1]]
    said = replace(finding, samples=tuple(replace(s, raw=s.message or s.raw) for s in finding.samples))
    return [
        Text.assemble(_level(finding, console), _text(console, " · ".join(facts), "dim")),
        *_sample(said, console, folder, SHORT_CHARS)[1:],
    ]


def _later(finding: Finding, members: Sequence[Finding]) -> list[str]:
    """How long after the headline of its incident it began, where that is a second or more."""
    late = (finding.first_seen - members[0].first_seen).total_seconds()
    if finding.place == 1 or not finding.timed or abs(late) < 1:
        return []
    return [f"{seconds(abs(late))} {'after' if late > 0 else 'before'} {members[0].label}"]


def _text(console: Console, text: str, style: str) -> Text:
    return Text(_encodable(text, console), style=style)


def _encodable(text: str, console: Console) -> str:
    """Escapes characters that the terminal's encoding lacks: a log line must never end the run."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def _level(finding: Finding, console: Console) -> Text:
    return _text(console, visible(finding.level or "no level"), _LEVEL_STYLE[level_severity(finding)])


def _template(finding: Finding, console: Console) -> Text:
    return _text(console, _one_line(template_text(finding, TEMPLATE_CHARS)), "")


def _one_line(text: str) -> str:
    """Line breaks and tabs as visible as the rest, so that a sample stays one line."""
    return text.replace("\n", " ⏎ ").replace("\t", " ")


def _around(finding: Finding, console: Console, folder: str, records: int) -> list[Text]:
    """The first sample between its neighbours, marked with `>`; a long line is cut."""
    if not finding.samples:
        return []
    first = finding.samples[0]

    def row(text: str, mark: str, style: str) -> Text:
        return _text(console, mark + _one_line(text), style)

    return [
        _text(console, _one_line(sample_place(first, 200, folder)), "underline"),
        *(row(clipped(text, SAMPLE_CHARS), "  ", "dim") for text in first.before[-records:]),
        row(sample_text(first, SAMPLE_CHARS)[0], "> ", "bold"),
        *(row(clipped(text, SAMPLE_CHARS), "  ", "dim") for text in first.after[:records]),
    ]


def _sample(finding: Finding, console: Console, folder: str = "", chars: int = SAMPLE_CHARS) -> list[Text]:
    """Where the sample stands, and its text from a little before the first surprising word."""
    if not finding.samples:
        return []
    # The record that holds the most surprising words shows best why it was found.
    found = [(sample_text(sample, chars), sample) for sample in finding.samples]
    (text, spans), sample = max(found, key=lambda one: (len(one[0][1]), -one[1].line))
    line, at = Text(), 0
    for start, end in spans:
        line.append(_encodable(_one_line(text[at:start]), console))
        line.append(_encodable(_one_line(text[start:end]), console), style=_MARK_STYLE)
        at = end
    line.append(_encodable(_one_line(text[at:]), console))
    return [_text(console, _one_line(sample_place(sample, 200, folder)), "underline"), line]
