"""Fragments of the report, as HTML: every text that comes from outside passes `visible` and `escape`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from pipeline.report.findings import Finding, Sample, severity
from pipeline.report.text import begun, clock, explain, place, sample_text, shown, span
from pipeline.units import chance, plural

LISTED: Final = 12  # workloads and levels in the numbers

_HOLE: Final = re.compile(r"<(?:\*|[A-Z][A-Z0-9_]*)>")  # `<*>` and the masks, `<IP>`
# Of the chart, in user units: bars of lines go up from one base, anomalous lines down from the other.
_HEIGHT: Final = 140.0
_LINES_BASE: Final = 92.0
_ODD_BASE: Final = 97.0


def text_html(text: str, chars: int = 500) -> str:
    """Text from outside, made visible, cut and escaped."""
    return escape(shown(text, chars))


def time_html(moment: datetime) -> str:
    return f'<time datetime="{moment.strftime("%Y-%m-%dT%H:%M:%SZ")}">{clock(moment)}</time>'


def marked(text: str, spans: Iterable[tuple[int, int]], tag: str) -> str:
    """The text, escaped, with the spans inside the tag."""
    out, at = [], 0
    close = tag.partition(" ")[0]
    for start, end in spans:
        out += [escape(text[at:start]), f"<{tag}>", escape(text[start:end]), f"</{close}>"]
        at = end
    return "".join([*out, escape(text[at:])])


def incident(findings: Sequence[Finding], cards: Sequence[str]) -> str:
    """An incident with the cards of its findings that fit: the best one to be seen, the others to be opened."""
    name, *facts = begun(findings, len(cards))
    number = findings[0].incident
    best, *others = cards
    rest = ""
    if others:
        more = f"{plural(len(others), 'more finding')} of this incident"
        rest = "\n".join([f'\n<details class="rest"><summary>{more}</summary>', *others, "</details>"])
    return f"""<section class="incident" id="i{number}" aria-labelledby="i{number}-h">
<h3 class="begun" id="i{number}-h"><b>{name}</b> <span>{escape(" · ".join(facts))}</span></h3>
{best}{rest}
</section>"""


def card(number: int, finding: Finding, samples: int, chars: int) -> str:
    """One finding with at most `samples` samples of at most `chars` characters."""
    template = shown(finding.template, chars)
    first, *others = [_sample(s, chars) for s in finding.samples[:samples]]
    if others:
        more = plural(len(others), "more sample")
        first += f"<details><summary>{more}</summary>{''.join(others)}</details>"
    why = "; ".join(explain(finding.reasons, finding.level)) or "the model finds it unlikely"
    facts = [
        f"<b>{plural(finding.count, 'time')}</b>",
        f'<time datetime="{finding.first_seen.strftime("%Y-%m-%dT%H:%M:%SZ")}">{clock(finding.first_seen)}</time>'
        + span(finding.first_seen, finding.last_seen).removeprefix(clock(finding.first_seen))
        + " UTC",
        f"score {finding.score:.2f}",
    ]
    if finding.p_value is not None:
        facts.append(f"p {chance(finding.p_value)}")
    if finding.patterns > 1:
        facts.append(f"{finding.patterns:,} variants")
    if finding.lines > finding.count:
        facts.append(plural(finding.lines, "line"))
    return f"""<article class="finding" id="f{number}" data-first="{int(finding.first_seen.timestamp())}" \
data-last="{int(finding.last_seen.timestamp())}">
<div>
<div class="who"><a class="no" href="#f{number}">{number}</a>\
<span class="chip s{severity(finding)}">{text_html(finding.level or "no level")}</span>\
<span class="wl">{text_html(finding.workload, 200)}</span></div>
<h4 class="template">{marked(template, (m.span() for m in _HOLE.finditer(template)), 'span class="hole"')}</h4>
<p class="why">{escape(why[0].upper() + why[1:])}.</p>
<p class="meta">{" · ".join(facts)}</p>
</div>
<div class="samples">{first}</div>
</article>"""


def _sample(sample: Sample, chars: int) -> str:
    text, spans = sample_text(sample, chars)
    where = f"<b>{escape(place(sample, 300))}</b>"
    return (
        f"<figure><figcaption>{where} · {time_html(sample.timestamp)}</figcaption>"
        f"<pre>{marked(text, spans, 'mark')}</pre></figure>"
    )


def template_row(row: list[Any]) -> str:
    template_id, text, count, first, last, number = row
    when = "".join(f'<td class="when">{time_html(_moment(s))}</td>' for s in (first, last))
    link = f'<a href="#f{number}">{number}</a>' if number else ""
    return (
        f'<tr><td class="text">{escape(text)}</td><td class="num">{count:,}</td>{when}'
        f'<td class="num">{link}</td><td class="num">{template_id}</td></tr>'
    )


def timeline(buckets: Sequence[Sequence[int]], width_s: int) -> str:
    """The chart as SVG; `buckets` are [start in epoch seconds, lines, anomalous lines]."""
    if not buckets:
        return '<p class="note">No lines, so no timeline.</p>'
    most, most_odd = max(b[1] for b in buckets), max(b[2] for b in buckets)
    lines = _bars([b[1] for b in buckets], base=_LINES_BASE, room=-_LINES_BASE, least=1.0)
    # Five units keep a single anomalous line in a busy minute visible.
    odd = _bars([b[2] for b in buckets], base=_ODD_BASE, room=_HEIGHT - _ODD_BASE, least=5.0)
    hits = "".join(
        f'<rect class="hit" x="{at}" y="0" width="1" height="{_HEIGHT:g}"><title>{_bucket_words(b)}</title></rect>'
        for at, b in enumerate(buckets)
    )
    middle = (_LINES_BASE + _ODD_BASE) / 2
    peak = f"One bar is {_duration(width_s)}. Busiest: {plural(most, 'line')}"
    peak += f"; most anomalous: {plural(most_odd, 'line')}" if most_odd else "; nothing anomalous"
    ends = [_moment(buckets[at][0]) for at in (0, len(buckets) // 2, -1)]
    axis = "".join(f"<span>{time_html(moment)}</span>" for moment in ends)
    return f"""<div class="chart">
<svg viewBox="0 0 {len(buckets)} {_HEIGHT:g}" preserveAspectRatio="none" role="img" \
aria-label="Lines and anomalous lines over time. {peak}.">
<rect class="picked" x="0" y="0" width="0" height="{_HEIGHT:g}"/>
<path class="lines" d="{lines}"/>
<line class="rule" x1="0" x2="{len(buckets)}" y1="{middle:g}" y2="{middle:g}"/>
<path class="odd" d="{odd}"/>
{hits}
</svg>
<p class="axis">{axis}</p>
<p class="read" id="read" role="status">{peak}.</p>
</div>"""


def _bars(values: Sequence[int], *, base: float, room: float, least: float) -> str:
    """One SVG path of bars that start at `base` and use up to `room` (negative: upwards)."""
    peak = max(values) or 1
    sign = -1.0 if room < 0 else 1.0
    heights = [(at, sign * max(least, abs(room) * v / peak)) for at, v in enumerate(values) if v]
    return "".join(f"M{at + 0.08:g} {base:g}v{height:.1f}h.84v{-height:.1f}z" for at, height in heights)


def _bucket_words(bucket: Sequence[int]) -> str:
    start, lines, odd = bucket
    return f"{clock(_moment(start))} UTC: {plural(lines, 'line')}, {odd:,} anomalous"


def numbers(findings: int, templates: int, summary: Mapping[str, Any], run: Mapping[str, object]) -> str:
    """The counts of the run, its workloads and levels, and the further facts in `run`."""
    counts = {
        "Lines": summary["lines"],
        "Records": summary["records"],
        "Anomalous records": summary["anomalous"],
        "Findings": findings,
        "Templates": templates,
        "Warming up": summary["warming"],
    }
    big = "".join(f"<div><dt>{name}</dt><dd>{value:,}</dd></div>" for name, value in counts.items())
    facts = {name.replace("_", " "): _fact(value) for name, value in run.items()}
    if summary["model_versions"]:
        facts.setdefault("model version", ", ".join(summary["model_versions"][:5]))
    listed = "".join(
        f"<div><dt>{text_html(name)}</dt><dd>{text_html(value, 500)}</dd></div>"
        for name, value in facts.items()
    )
    tables = _counts_table("Workload", summary["by_workload"]) + _counts_table("Level", summary["by_level"])
    if listed:
        tables += f'<div class="scroll"><h3>The run</h3><dl class="facts">{listed}</dl></div>'
    return f'<dl class="big">{big}</dl>\n<div class="tables">{tables}</div>'


def _counts_table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    body = "".join(
        f"<tr><td>{text_html(row[name.lower()] or 'none', 120)}</td>"
        f'<td class="num">{row["lines"]:,}</td><td class="num">{row["anomalous"]:,}</td></tr>'
        for row in rows[:LISTED]
    )
    if len(rows) > LISTED:
        left = sum(row["lines"] for row in rows[LISTED:]), sum(row["anomalous"] for row in rows[LISTED:])
        body += (
            f'<tr><td>{len(rows) - LISTED:,} more</td><td class="num">{left[0]:,}</td>'
            f'<td class="num">{left[1]:,}</td></tr>'
        )
    head = f'<th scope="col">{name}</th><th scope="col" class="num">Lines</th><th scope="col" class="num">Anomalous</th>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _fact(value: object) -> str:
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
            return ", ".join(_fact(item) for item in value)
        case None:
            return "none"
        case _:
            return str(value)


def _duration(seconds: int) -> str:
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size and seconds % size == 0:
            return plural(seconds // size, unit)
    return plural(seconds, "second")


def _moment(epoch: int) -> datetime:
    return datetime.fromtimestamp(epoch, UTC)
