"""Log text and reasons made fit to show to a person.

Log lines are hostile input: everything that a terminal or a browser would obey instead of showing is
turned into something visible (`units.visible`), before any other code sees it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any, Final

from pipeline.records.verdict import OURS
from pipeline.report.alike import request_alone
from pipeline.report.excerpt import shortened, telling
from pipeline.report.findings import Finding, FindingSample, is_new
from pipeline.units import chance, clipped, line_count, listed, plural, visible

MARKED: Final = 3  # words of a line that are marked: more of them point nowhere
NO_BASELINE: Final = "No --baseline: rare and error-like lines are shown, not new ones"
UNTIMED: Final = "Without a time"  # heads the findings whose records have none
NEWS: Final = "Never said before"  # heads calm lines unlike all that was learnt
OVERALL: Final = "Of the whole log"  # heads facts that no single line shows

EDGES: Final = "\"'`“”‘’.,;:!?()[]{}|*=…"
# fmt: off
_STOP_WORDS: Final = frozenset((
    "a", "about", "after", "all", "also", "an", "and", "any", "are", "as", "at", "be", "been", "before",
    "but", "by", "can", "could", "did", "do", "does", "for", "from", "had", "has", "have", "he", "her",
    "here", "his", "how", "i", "if", "in", "into", "is", "it", "its", "just", "may", "me", "more",
    "most", "my", "no", "not", "of", "on", "once", "only", "or", "other", "our", "out", "over",
    "please", "she", "should", "so", "some", "such", "than", "that", "the", "their", "them", "then",
    "there", "these", "they", "this", "those", "to", "too", "under", "until", "up", "us", "was", "we",
    "were", "what", "when", "where", "which", "while", "who", "why", "will", "with", "would", "yet",
    "you", "your",
))
# fmt: on


def meaningful(words: Iterable[str]) -> list[str]:
    """The words that are worth marking, in their order, without punctuation around them; MARKED at most.

    Stop words, placeholders and parts of a token that was masked say nothing to a reader.
    """
    found: dict[str, None] = {}
    for word in words:
        bare = word.strip(EDGES)
        if "<" in word or len(word) > 200 or len(bare) < 2 or bare.lower() in _STOP_WORDS:
            continue
        if any(c.isalnum() for c in bare):
            found[bare] = None
    return list(found)[:MARKED]


def word_spans(text: str, words: Iterable[str]) -> list[tuple[int, int]]:
    """Where the words stand in the text: (start, end) of each, in order, never overlapping.

    Whole words only, case-sensitive; a word of the masked line that the text does not hold is skipped.
    """
    # No word of a log is this long, nor does anyone look at that many.
    wanted = sorted({visible(w) for w in list(words)[:50] if 0 < len(w) <= 200}, key=lambda w: (-len(w), w))
    if not wanted:
        return []
    # Only where a word ends in a letter or digit can more of them follow and make it another word.
    edged = [
        (r"(?<!\w)" if re.match(r"\w", w) else "")
        + re.escape(w)
        + (r"(?!\w)" if re.search(r"\w$", w) else "")
        for w in wanted
    ]
    return [m.span() for m in re.finditer("|".join(edged), text)]


def sample_text(sample: FindingSample, chars: int) -> tuple[str, list[tuple[int, int]]]:
    """The raw record as it may be shown, and where its most surprising words stand in its message.

    MARKED of them at most. A longer record is cut around what is unusual in it."""
    text = visible(sample.raw)
    if len(text) > chars:
        text = shortened(text, telling(sample.message, meaningful(sample.words)), chars)
    # The header before the message has words of its own that surprised nobody.
    message = visible(sample.message[:100])
    begin = max(text.find(message), 0) if message else 0
    spans = word_spans(text, meaningful(sample.words))
    return text, [(start, end) for start, end in spans if start >= begin][:MARKED]


def template_text(finding: Finding, chars: int) -> str:
    """The template, of a long one the part around what is unusual; of an access log the request alone."""
    template = request_alone(finding.template, finding.status) or finding.template
    text = visible(template.replace(" <NL> ", "\n"))
    if len(text) <= chars:
        return text
    words = meaningful(word for sample in finding.samples for word in sample.words)
    return shortened(text, telling(finding.template, words), chars)


def common_folder(findings: Iterable[Finding]) -> str:
    """The path that the sources of all samples begin with, "" where it says something."""
    folders = [s.source.split("/")[:-1] for f in findings for s in f.samples if not s.source.startswith(OURS)]
    shared = [
        names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*folders, strict=False))
    ]
    return "/".join(shared) + "/" if any(shared) else ""


def sample_place(sample: FindingSample, chars: int, folder: str = "") -> str:
    """Where the record stands; what was found in no single line names its lines itself.

    `folder` is a path of which an ellipsis is shown alone.
    """
    if sample.source.startswith(OURS):
        return f"found in {sample.source.removeprefix(OURS)}"
    source = sample.source
    if folder and source.startswith(folder):
        source = f"…/{source.removeprefix(folder)}"
    return f"{clipped(source, chars)}:{sample.line}"


def headline(findings: Sequence[Finding], summary: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    records, not_judged = summary["records"], summary["not_judged"]
    lines = line_count(summary["lines"], records)
    if not records:
        return "No lines were read"
    if findings:
        news = sum(f.news for f in findings)
        incidents = len({f.incident for f in findings if f.incident})
        parts = [plural(incidents, "incident")] if incidents else []
        if len(findings) > news:
            parts.append(plural(len(findings) - news, "finding"))
        if news:
            parts.append(f"{plural(news, 'calm line')} never said before")
        found = f"{', '.join(parts)} in {lines}"
        if len(findings) - news <= 1:
            return found
        return f"{found}, {_order(incidents, learnt=not without_baseline(summary))}"
    if not_judged == records:
        return f"Nothing in {lines} says that something failed; they were not judged by the model"
    if not_judged:
        return (
            f"Nothing unusual in the lines judged; {summary['not_judged_lines']:,} of {lines} "
            "were not judged by the model"
        )
    return f"No line stands out in {lines}" if summary.get("facts") else f"Nothing unusual in {lines}"


def _order(incidents: int, *, learnt: bool) -> str:
    """Without a baseline the gravest line is the cause too seldom to be called so."""
    if not incidents or not learnt:
        return "the gravest first"
    return (
        "its likely cause first" if incidents == 1 else "the gravest first; each begins with its likely cause"
    )


def units_section(summary: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """How the units of a run compare with the baseline, as a sentence or a heading, and the unusual ones.

    "" where none was compared, or too few to say so."""
    ranked = summary.get("units")
    if not ranked or ranked["unusual"] is None:
        return "", []
    kind = {"workload": "file"}.get(ranked["by"], ranked["by"])
    if not ranked["unusual"]:
        return f"No {kind} is unusual: {ranked['judged']:,} compared with the baseline", []
    units = [unit for unit in ranked["units"] if unit["unusual"]]
    return (
        f"Unusual compared with the baseline: {ranked['unusual']:,} of {plural(ranked['judged'], kind)}",
        units,
    )


def unit_facts(unit: Mapping[str, Any]) -> str:
    """How surprising a unit is, how many lines it has, and what they say of it."""
    return f"p {chance(unit['p_value'])}, {plural(unit['lines'], 'line')}, {unit['flagged']:,} anomalous"


def without_baseline(summary: Mapping[str, Any]) -> bool:
    """Whether a run learnt from the lines that it judged, so that no line is new."""
    return bool(summary.get("run", {}).get("baseline") == [])


def all_new(findings: Sequence[Finding]) -> bool:
    """Whether training has seen no line of an incident, which its header says once for several."""
    return len(findings) > 1 and all(is_new(finding) for finding in findings)


def incident_header(findings: Sequence[Finding]) -> list[str]:
    """Name, begin, workloads and number of findings of an incident; `findings`: all of them.

    Findings without a time and news have only a name. A last part says where all of them are new."""
    first, *_ = hit = sorted(findings, key=lambda f: (f.first_seen, f.workload))
    names = dict.fromkeys(clipped(f.workload, 80) for f in hit)
    if first.news:
        return [NEWS, listed(names)]
    return [
        *([f"Incident {first.incident}", f"{clock(first.first_seen)} UTC"] if first.timed else [UNTIMED]),
        listed(names),
        plural(len(findings), "finding") + (", none seen before" if all_new(findings) else ""),
    ]


def followers(findings: Sequence[Finding], shown: int) -> str:
    """The findings of an incident behind the first `shown` ones, in words: how many, and where."""
    others = findings[shown:]
    # A log in whole seconds writes the begin of the second.
    began = findings[0].first_seen.replace(microsecond=0)
    followed = all(f.timed and not f.news and f.first_seen >= began for f in others)
    names = dict.fromkeys(clipped(f.workload, 80) for f in others)
    return f"and {len(others):,} more{' that followed' if followed else ''} in {listed(names)}"


def clock(moment: datetime) -> str:
    """`2026-11-20 10:32:11`, UTC."""
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def time_range(first: datetime, last: datetime) -> str:
    """First and last seen; the date of the last only where it differs."""
    if last.replace(microsecond=0) == first.replace(microsecond=0):
        return clock(first)
    end = last.strftime("%H:%M:%S") if first.date() == last.date() else clock(last)
    return f"{clock(first)} – {end}"
