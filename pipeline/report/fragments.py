"""The HTML fragments of the report: jinja2 with autoescape, so that log text can never become markup."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined

from pipeline.records.levels import LEVELS
from pipeline.report.findings import Finding, FindingSample, finding_severity, level_severity
from pipeline.report.text import (
    clock,
    sample_place,
    sample_text,
    template_text,
    time_range,
    unit_facts,
)
from pipeline.report.why import briefly
from pipeline.units import chance, clipped, plural, visible

# Of the chart, in user units: bars of lines go up from one base, anomalous lines down from the other.
_HEIGHT: Final = 140.0
_LINES_BASE: Final = 92.0
_ODD_BASE: Final = 97.0

_HOLE: Final = re.compile(r"<(?:\*|[A-Z][A-Z0-9_]*)>")  # `<*>` and the masks, `<IP>`


def silencing(template: str) -> str:
    """The shell command that appends the template to a list for `--normal`."""
    return f"printf '%s\\n' {shlex.quote(visible(template))} >> normal.txt"


def resource(name: str) -> str:
    """The text of a file of this package."""
    return files("pipeline.report").joinpath(name).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """Filters take raw text and return raw text; the templates escape it."""
    env = Environment(
        loader=FunctionLoader(resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (
        clipped,
        clock,
        chance,
        plural,
        finding_severity,
        level_severity,
        sample_place,
        sample_text,
        sample_pieces,
        template_pieces,
        silencing,
        level_name,
        level_place,
        workload_name,
        unit_facts,
    )
    env.filters.update(
        {function.__name__: function for function in (*filters, epoch, iso_utc, at_epoch, briefly)}
    )
    env.filters.update(thousands="{:,}".format, until=_until)
    return env


def level_name(finding: Finding) -> str:
    """The level that a finding is filtered by."""
    return clipped(finding.level or "no level", 40)


def workload_name(finding: Finding) -> str:
    """The workload that a finding is filtered by, short enough for a button."""
    return clipped(finding.workload, 80)


def level_place(finding: Finding) -> int:
    """Its level's place among LEVELS, 0 for none."""
    return LEVELS.index(finding.level) + 1 if finding.level in LEVELS else 0


def epoch(at: datetime) -> int:
    return int(at.timestamp())


def at_epoch(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def iso_utc(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _until(finding: Finding) -> str:
    """The end of the time range, "" where it equals the begin."""
    return time_range(finding.first_seen, finding.last_seen).removeprefix(clock(finding.first_seen))


def template_pieces(finding: Finding, chars: int) -> list[tuple[str, bool]]:
    """The pieces of a template as it is shown, True for its wildcards and masks."""
    text = template_text(finding, chars)
    return list(_pieces(text, (match.span() for match in _HOLE.finditer(text))))


def sample_pieces(sample: FindingSample, chars: int) -> list[tuple[str, bool]]:
    """The pieces of a sample, True for its surprising words."""
    return list(_pieces(*sample_text(sample, chars)))


def _pieces(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    at = 0
    for start, end in spans:
        yield text[at:start], False
        yield text[start:end], True
        at = end
    yield text[at:], False


def chart(buckets: Sequence[Sequence[int]], width_s: int) -> dict[str, Any]:
    """The timeline for the template, empty without buckets of [start in epoch seconds, lines, anomalous]."""
    if not buckets:
        return {}
    _, lines, anomalous = zip(*buckets, strict=True)
    peak = f"One bar is {_duration(width_s)}. Busiest: {plural(max(lines), 'line')}"
    peak += f"; most anomalous: {plural(max(anomalous), 'line')}" if max(anomalous) else "; nothing anomalous"
    return {
        "height": f"{_HEIGHT:g}",
        "middle": f"{(_LINES_BASE + _ODD_BASE) / 2:g}",
        "peak": peak,
        "lines": _bars(lines, base=_LINES_BASE, room=-_LINES_BASE, minimum=1.0),
        # Five units keep a single anomalous line in a busy minute visible.
        "anomalous": _bars(anomalous, base=_ODD_BASE, room=_HEIGHT - _ODD_BASE, minimum=5.0),
        "bars": [
            f"{clock(at_epoch(s))} UTC: {plural(n, 'line')}, {odd:,} anomalous" for s, n, odd in buckets
        ],
        "axis": [at_epoch(buckets[at][0]) for at in sorted({0, len(buckets) // 2, len(buckets) - 1})],
    }


def _bars(values: Sequence[int], *, base: float, room: float, minimum: float) -> str:
    """One SVG path of bars that start at `base` and use up to `room` (negative: upwards)."""
    peak = max(values) or 1
    sign = -1.0 if room < 0 else 1.0
    heights = [(at, sign * max(minimum, abs(room) * v / peak)) for at, v in enumerate(values) if v]
    return "".join(f"M{at + 0.08:g} {base:g}v{height:.1f}h.84v{-height:.1f}z" for at, height in heights)


def fact_text(value: object) -> str:
    """A fact of the run in words."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        case datetime():
            return f"{clock(value)} UTC"
        case list() | tuple():
            return ", ".join(map(fact_text, value))
        case None:
            return "none"
        case _:
            return str(value)


def _duration(seconds: int) -> str:
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size and seconds % size == 0:
            return plural(seconds // size, unit)
    return plural(seconds, "second")
