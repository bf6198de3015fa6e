"""The findings in a terminal: a table where there is room, blocks where there is not.

Everything is printed as `Text`, after `visible`: no markup, colour code or cursor movement inside a log
line is obeyed.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.report.findings import Finding, by_incident, finding_severity
from pipeline.report.text import (
    NO_BASELINE,
    clipped,
    clock,
    common_folder,
    followers,
    headline,
    incident_header,
    sample_place,
    sample_text,
    time_range,
    without_baseline,
)
from pipeline.report.why import why
from pipeline.units import plural, visible

TABLE_WIDTH: Final = 120  # below this, columns would break words
TEMPLATE_CHARS: Final = 200
SAMPLE_CHARS: Final = 240
LEAD_CHARS: Final = 60  # shown before the first surprising word when a long line is cut

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
    """Prints the first `limit` findings under their incidents, at most FOLD of each, and counts the others.

    A limit of None prints all findings. `context` records stand before and after the first sample of each.

    `summary` comes from `summary.run_summary`. With no findings, says whether nothing was unusual or
    nothing could be judged yet.
    """
    console.print(_text(console, headline(findings, summary), "bold"))
    if summary["records"]:
        console.print(_text(console, _sub(findings, summary), "dim"))
    if findings and without_baseline(summary):
        console.print(_text(console, f"{NO_BASELINE}.", "dim"))
    first = list(findings if limit is None else [f for f in findings if not f.folded][:limit])
    wide = console.width >= TABLE_WIDTH and not context
    folder = common_folder(findings)
    for entry, members in zip(by_incident(first), by_incident(findings), strict=False):
        console.print()
        console.print(_incident(members, console))
        console.print(_table(entry, console) if wide else _blocks(entry, folder, console, context))
        if len(members) > len(entry):
            note = f"{followers(members, len(entry))}: --all or the report shows them"
            console.print(_text(console, note, "dim"))
    hidden = len({f.incident for f in findings} - {f.incident for f in first})
    if hidden > 0:
        verb = "is" if hidden == 1 else "are"
        note = f"{plural(hidden, 'more incident')} {verb} not shown here; --all or the report shows them"
        console.print()
        console.print(_text(console, note, "dim"))


def _sub(findings: Sequence[Finding], summary: Mapping[str, Any]) -> str:
    parts = [plural(len(summary["by_workload"]), "workload")]
    if summary["first"]:
        first, last = (datetime.fromisoformat(summary[name]) for name in ("first", "last"))
        parts.insert(0, f"{time_range(first, last)} UTC")
    if summary["untimed"]:
        parts.append(f"{plural(summary['untimed_lines'], 'line')} without a time")
    if findings and summary["not_judged"]:
        parts.append(f"{plural(summary['not_judged_lines'], 'line')} not judged by the model")
    return " · ".join(parts)


def _incident(findings: Sequence[Finding], console: Console) -> Text:
    name, *facts = incident_header(findings)
    about = _one_line(" · ".join(["", *facts]))
    return Text.assemble(_text(console, name, "bold"), _text(console, about, ""))


def _table(findings: Sequence[Finding], console: Console) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), show_lines=True, pad_edge=False)
    # Widths that hold for the tables of all incidents.
    table.add_column("#", justify="right", no_wrap=True, min_width=3)
    table.add_column("level", no_wrap=True, min_width=8)
    table.add_column("count", justify="right", no_wrap=True, min_width=7)
    table.add_column("first and last seen, UTC", no_wrap=True)
    table.add_column("template and reason", ratio=5, overflow="fold")
    table.add_column("sample", ratio=6, overflow="fold")
    for finding in findings:
        text = Text("\n").join(
            [
                _template(finding, console),
                _text(console, why(finding), "dim"),
            ]
        )
        times = dict.fromkeys(clock(at) for at in (finding.first_seen, finding.last_seen) if finding.timed)
        table.add_row(
            Text(finding.label),
            _level(finding, console),
            Text(f"{finding.count:,}"),
            _text(console, "\n".join(times), ""),
            Text("\n").join([_text(console, _one_line(clipped(finding.workload, 80)), "bold"), text]),
            Text("\n").join(_sample(finding, console)),
        )
    return table


def _blocks(findings: Sequence[Finding], folder: str, console: Console, context: int = 0) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for finding in findings:
        facts = [
            "",
            _one_line(clipped(finding.workload, 80)),
            plural(finding.count, "time"),
        ]
        if finding.timed:
            facts.append(f"{time_range(finding.first_seen, finding.last_seen)} UTC")
        lines = [
            Text.assemble(_level(finding, console), _text(console, " · ".join(facts), "dim")),
            _template(finding, console),
            _text(console, why(finding), "dim"),
            *(_around(finding, console, folder, context) if context else _sample(finding, console, folder)),
            Text(),
        ]
        grid.add_row(Text(finding.label), Text("\n").join(line for line in lines))
    return grid


def _text(console: Console, text: str, style: str) -> Text:
    return Text(_encodable(text, console), style=style)


def _encodable(text: str, console: Console) -> str:
    """Escapes characters that the terminal's encoding lacks: a log line must never end the run."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def _level(finding: Finding, console: Console) -> Text:
    return _text(console, visible(finding.level or "no level"), _LEVEL_STYLE[finding_severity(finding)])


def _template(finding: Finding, console: Console) -> Text:
    return _text(console, _one_line(clipped(finding.template, TEMPLATE_CHARS)), "")


def _one_line(text: str) -> str:
    """Line breaks and tabs as visible as the rest, so that a sample stays one line."""
    return text.replace("\n", " ⏎ ").replace("\t", " ")


def _around(finding: Finding, console: Console, folder: str, records: int) -> list[Text]:
    """The first sample between its neighbours, marked with `>`; a long line is cut."""
    if not finding.samples:
        return []
    first = finding.samples[0]

    def row(text: str, mark: str, style: str) -> Text:
        return _text(console, mark + _one_line(clipped(text, SAMPLE_CHARS)), style)

    return [
        _text(console, _one_line(sample_place(first, 200, folder)), "underline"),
        *(row(text, "  ", "dim") for text in first.before[-records:]),
        row(first.raw, "> ", "bold"),
        *(row(text, "  ", "dim") for text in first.after[:records]),
    ]


def _sample(finding: Finding, console: Console, folder: str = "") -> list[Text]:
    """Where the sample stands, and its text from a little before the first surprising word."""
    if not finding.samples:
        return []
    # The record that holds the most surprising words shows best why it was found.
    sample = max(finding.samples, key=lambda s: (len(sample_text(s, SAMPLE_CHARS * 8)[1]), -s.line))
    text, spans = sample_text(sample, SAMPLE_CHARS * 8)
    begin = 0
    if len(text) > SAMPLE_CHARS and spans and spans[0][0] > LEAD_CHARS:
        begin = min(spans[0][0] - LEAD_CHARS, len(text) - SAMPLE_CHARS)
    line = Text(_encodable("…" if begin else "", console))
    at = begin
    for start, end in [(s, e) for s, e in spans if e <= begin + SAMPLE_CHARS]:
        line.append(_encodable(_one_line(text[at:start]), console))
        line.append(_encodable(_one_line(text[start:end]), console), style=_MARK_STYLE)
        at = end
    line.append(_encodable(_one_line(text[at : begin + SAMPLE_CHARS]), console))
    if begin + SAMPLE_CHARS < len(text):
        line.append(_encodable("…", console))
    return [_text(console, _one_line(sample_place(sample, 200, folder)), "underline"), line]
