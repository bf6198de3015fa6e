"""Findings: what a person on call should read, and in which order.

A finding is one template of one workload that had anomalous records, with a few of those records as
they were read. Answers over HTTP of several statuses are several findings. Results are read lazily, in
chunks: memory grows with distinct templates, masked lines and reasons, not with records.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.records.levels import ERROR_LEVELS, LEVELS
from pipeline.records.news import NOVEL, is_news
from pipeline.records.schema import is_timed, of_lines
from pipeline.records.verdict import Reason
from pipeline.report.alike import STATUS, common_form
from pipeline.sinks.results import readable, scan
from pipeline.watching.incidents.leading import (
    TEXT_CHARS,
    Grade,
    Sign,
    count_step,
    grade_of,
    lead_order,
    thrown_in,
)
from pipeline.watching.incidents.onsets import BURST_SPAN, GAP, Onset, together

SAMPLES_FIRST: Final = 4  # And the last one: five records show how it began and whether it changed.
# Findings that are shown at first, in all and of each incident; the others mostly followed from them.
SHOWN: Final = 12
SHOWN_OF_EACH: Final = 3
# How long a source is taken to start: a share of its span, of a long one at least a second. Of few records
# the first ones may be all that there is.
STARTING_SHARE: Final = 0.02
LEAST_STARTING_S: Final = 1.0
MOST_STARTING_S: Final = 30.0
LONG_S: Final = 20.0
STARTED_RECORDS: Final = 100
NEWS: Final = 10.0  # strangest calm templates of a run; as the default of `news_per_day`
SAMPLE_CHARS: Final = 8_000  # Of a sample's text. A stack trace fits, a dumped payload does not.
REASONS_OF_A_KIND: Final = 20  # A reader stops earlier.

_CHUNK_ROWS: Final = 50_000
# One template may hold answers of several statuses, which are different faults.
_KEY: Final = ["workload", "template_id", "status", "news"]
_REASON_ORDER: Final = (
    Reason.MARKED,
    Reason.ERROR_SEVERITY,
    Reason.NEW_TEMPLATE,
    Reason.NEVER_SAID,
    Reason.UNLIKELY_TOKENS,
    Reason.RARE,
    Reason.UNCLASSIFIED,
    Reason.WARMING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingSample:
    """One anomalous record as it was read; texts are cut at SAMPLE_CHARS characters."""

    source: str
    line: int  # 1-based, first physical line
    timestamp: datetime
    message: str
    raw: str
    words: tuple[str, ...] = ()  # its surprising words, as the masked line spells them
    timed: bool = True  # false: no time was found in it, and `timestamp` is that of reading
    record_id: str = ""
    before: tuple[str, ...] = ()  # the records before it in its source, as they were read; see around.py
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The anomalous records of one template of one workload."""

    workload: str
    template_id: int  # 0 or negative: unclassified
    template: str  # with `<*>`; the first sample's message where the template is not known
    count: int  # anomalous records
    lines: int  # physical lines of those records
    first_seen: datetime
    last_seen: datetime
    burst_end: datetime  # end of the opening burst: no gap over GAP, at most BURST_SPAN
    level: str | None  # the most severe
    score: float  # the highest
    reasons: tuple[str, ...]  # distinct; kinds in a fixed order, the most frequent of each kind
    samples: tuple[FindingSample, ...]  # the first four and the last
    patterns: int  # distinct masked lines
    p_value: float | None = None  # the smallest; None where nothing was measured
    incident: int = 0  # 1-based, in reading order; 0 until `order` has set it, and without a time
    place: int = 0  # 1-based, in its incident; 0 until `order` has set it
    timed: bool = True  # some record has a time; `first_seen`, `last_seen` and `burst_end` are of those
    alike: tuple[int, ...] = ()  # further templates that differ in user agent, referrer or address alone
    status: str = ""  # of the answers, where its records are requests over HTTP
    starting: bool = False  # it began while its source started
    folded: bool = False  # shown only on demand; findings without a time make no incident to fold
    news: bool = False  # calm lines unlike all that was said: listed, but no incident and no alarm

    @property
    def label(self) -> str:
        """Its number for people, the same in every view: `2.1` is the headline of incident 2, `n1` the
        strangest of the calm lines."""
        if self.news:
            return f"n{self.place}"
        return f"{self.incident}.{self.place}" if self.incident else str(self.place)

    @property
    def entry(self) -> int:
        """The incident that it stands under, 0 without a time, -1 for news."""
        return -1 if self.news else self.incident

    @property
    def template_ids(self) -> tuple[int, ...]:
        return self.template_id, *self.alike


def finding_severity(finding: Finding) -> int:
    """3: error-like by level or by a reason, 2: warning, or somebody marked it as anomalous, 1: neither."""
    if finding.level in ERROR_LEVELS or _has(finding, Reason.ERROR_SEVERITY):
        return 3
    return 2 if finding.level == "warning" or _has(finding, Reason.MARKED) else 1


def level_severity(finding: Finding) -> int:
    """3: an error level, 2: warning, 1: other and none. The colour of a level."""
    return 3 if finding.level in ERROR_LEVELS else 2 if finding.level == "warning" else 1


def grade(finding: Finding) -> Grade:
    """How grave it is, by the gravest of its samples: the level of a log weighs more than its words."""
    severity = finding_severity(finding)
    grades = (grade_of(finding.level, severity, s.message, s.raw) for s in finding.samples)
    found = max(grades, default=Grade.CALM)
    return min(found, Grade.WORDED) if finding.starting else found


def is_new(finding: Finding) -> bool:
    """Whether no training has seen its template."""
    return _has(finding, Reason.NEW_TEMPLATE)


def rank(finding: Finding) -> tuple[Any, ...]:
    """Sort key without regard to incidents, the gravest first.

    By grade; then what no training has seen, then the rarer, then the latest: what a program says last is
    nearest to why it failed. Names settle ties."""
    return (
        -grade(finding),
        not is_new(finding),
        count_step(finding.count),
        -finding.first_seen.timestamp(),
        finding.workload,
        finding.template_id,
        finding.status,
    )


def order(findings: Iterable[Finding], *, news_of_each: float = math.inf) -> list[Finding]:
    """The findings in reading order, their `incident` and `place` set.

    The reader should meet every incident before the second line of any. So findings are grouped into
    incidents, and the list takes turns: the headline of each incident, then its second finding, and so on.
    Incidents stand, and are numbered, in the order of their gravest findings (`rank`); one without any error
    or warning therefore comes after all that have one. Inside an incident `leading.lead_order` decides: of
    the gravest lines the rarest and earliest comes first, its consequences after it.

    Findings group by their first record, over all workloads (`onsets.together`). A template that keeps
    coming back belongs to its first incident, so it cannot glue a whole day together. Errors and
    warnings make the incidents, the others join one that is near. Findings of one incident that differ in
    user agent, referrer or address alone are one. Findings without any time are in no incident: they come
    then, by `rank`, with the number 0. News come last: the strangest of each workload, then the second of
    each, and so on up to `news_of_each`, so that a chatty workload hides no other. Calm lines that are no
    more than new are news too where no error or warning is near."""
    findings = list(findings)
    every = sorted((f for f in findings if not f.news), key=rank)
    ranked = [f for f in every if f.timed]
    onsets = [
        Onset(first=f.first_seen, burst_end=f.burst_end, leads=finding_severity(f) > 1, key=(place,))
        for place, f in enumerate(ranked)
    ]
    # The places of one run are those of its onsets: the smallest is the most urgent.
    groups = sorted(sorted(onset.key[0] for onset in run) for run in together(onsets))
    runs: list[list[int]] = []
    alone = [f for f in every if not f.timed and _is_novel(f)]
    for group in groups:
        if all(_is_novel(ranked[at]) for at in group):
            alone += [ranked[at] for at in group]
        else:
            runs.append(group)
    incidents = [
        [
            replace(f, incident=number, place=place, folded=place > shown_of_each(len(runs)))
            for place, f in enumerate(_led(_folded([ranked[at] for at in run])), start=1)
        ]
        for number, run in enumerate(runs, start=1)
    ]
    turns = [f for turn in zip_longest(*incidents) for f in turn if f is not None]
    untimed = _folded(f for f in every if not f.timed and not _is_novel(f))
    news = _in_turns(
        [*(f for f in findings if f.news), *(replace(f, news=True) for f in alone)], news_of_each
    )
    shown = SHOWN_OF_EACH if turns or untimed else SHOWN
    return [
        *turns,
        *(replace(f, incident=0, place=n) for n, f in enumerate(untimed, 1)),
        *(replace(f, incident=0, place=n, folded=n > shown) for n, f in enumerate(news, 1)),
    ]


def _is_novel(finding: Finding) -> bool:
    """Whether it says no more than that training has not seen the like."""
    kinds = {text.partition(":")[0] for text in finding.reasons}
    return finding_severity(finding) == 1 and bool(kinds) and kinds <= NOVEL


def _in_turns(news: Iterable[Finding], of_each: float) -> list[Finding]:
    """The strangest of each workload, then the second of each, and so on."""
    turns: Counter[str] = Counter()
    kept: list[tuple[int, Finding]] = []
    for finding in sorted(news, key=_strangeness):
        turns[finding.workload] += 1
        if turns[finding.workload] <= of_each:
            kept.append((turns[finding.workload], finding))
    return [finding for _, finding in sorted(kept, key=lambda one: one[0])]


def _strangeness(finding: Finding) -> tuple[Any, ...]:
    return -finding.score, *rank(finding)


def shown_of_each(incidents: int) -> int:
    """How many findings of each of so many incidents are shown at first."""
    return max(SHOWN_OF_EACH, SHOWN // max(1, incidents))


def _folded(findings: Iterable[Finding]) -> list[Finding]:
    """The findings of one incident, those that are one to a reader as one."""
    kinds: dict[tuple[Any, ...], list[Finding]] = {}
    for at, finding in enumerate(findings):
        form = common_form(finding.template, (sample.message for sample in finding.samples))
        # Findings in sessions and rates, and unclassified lines, are no templates.
        single = () if finding.template_id > 0 else (at,)
        kinds.setdefault((finding.workload, *form, *single), []).append(finding)
    return [_merged(kind) if len(kind) > 1 else kind[0] for kind in kinds.values()]


def _merged(several: Sequence[Finding]) -> Finding:
    """Several findings of one incident as one, under the most frequent template."""
    by_time = sorted(several, key=lambda f: (f.first_seen, f.template_id, f.status))
    lead = min(several, key=lambda f: (-f.count, f.template_id, f.status))
    samples = sorted(
        {sample for f in several for sample in f.samples}, key=lambda s: (s.timestamp, s.source, s.line)
    )
    kinds = dict.fromkeys(text for f in by_time for text in f.reasons)
    return replace(
        by_time[0],
        template_id=lead.template_id,
        template=lead.template,
        count=sum(f.count for f in several),
        lines=sum(f.lines for f in several),
        last_seen=max(f.last_seen for f in several),
        level=max((f.level for f in several), key=_level_rank),
        score=max(f.score for f in several),
        reasons=tuple(sorted(kinds, key=_reason_place)),
        samples=(*samples[:SAMPLES_FIRST], *samples[SAMPLES_FIRST:][-1:]),
        patterns=sum(f.patterns for f in several),
        p_value=min((f.p_value for f in several if f.p_value is not None), default=None),
        alike=tuple(sorted({i for f in several for i in f.template_ids} - {lead.template_id})),
    )


def _led(findings: Sequence[Finding]) -> list[Finding]:
    """The findings of one incident, its headline first."""
    return [findings[at] for at in lead_order([_sign(f) for f in findings])]


def _sign(finding: Finding) -> Sign:
    first = finding.samples[0] if finding.samples else None
    return Sign(
        grade=grade(finding),
        workload=finding.workload,
        new=_has(finding, Reason.NEW_TEMPLATE),
        first=finding.first_seen,
        last=finding.last_seen,
        count=finding.count,
        text=(first.message if first else finding.template)[:TEXT_CHARS],
        thrown=thrown_in(first.raw) if first else (),
        tie=(
            first.source if first else "",
            first.line if first else 0,
            finding.workload,
            finding.template_id,
            finding.status,
        ),
    )


def by_incident(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings that are given in reading order, an entry for each incident, in that order."""
    entries: dict[int, list[Finding]] = {}
    for finding in findings:
        entries.setdefault(finding.entry, []).append(finding)
    return list(entries.values())


def collect(
    results: Path,
    templates: pl.DataFrame,
    *,
    limit: int | None = None,
    leave_out: Callable[[Finding], bool] | None = None,
    news: float = NEWS,
) -> list[Finding]:
    """The findings of a results folder, in reading order; at most `limit` of them.

    Findings that `leave_out` answers with True are in no incident and have no place. `news`: how many of the
    strangest calm templates, which training never saw, are findings as well. Of several workloads each has at
    most half of them.

    `results` holds Parquet files of RESULT_SCHEMA at any depth; a folder that is absent or empty has no
    findings. `templates` needs `template_id` and `template`. Raises BadPayload when a file is damaged.
    """
    parts: list[dict[str, pl.DataFrame]] = []
    pending = settled = 0
    with readable(results):
        anomalous = scan(results).filter("anomalous")
        for chunk in anomalous.collect_batches(chunk_size=_CHUNK_ROWS, maintain_order=False):
            parts.append(_parts(chunk))
            pending += chunk.height
            # Folding as often as the totals double keeps the work linear when every line is different.
            if pending > max(settled, 4 * _CHUNK_ROWS):
                parts = [_fold(parts)]
                pending, settled = 0, max(frame.height for frame in parts[0].values())
    if not parts:
        return []
    totals = _fold(parts)
    texts = dict(templates.select("template_id", "template").iter_rows())
    found = [f for f in _build(totals, texts) if leave_out is None or not leave_out(f)]
    starts = _starts(results, {f.samples[0].source for f in found})
    found = [replace(f, starting=_is_starting(f, starts)) for f in found]
    ordered = order(
        (f for f in found if not (f.news and f.starting)),
        news_of_each=news if _workloads(results) == 1 else math.ceil(news / 2),
    )
    return [f for f in ordered if not f.news or f.place <= news][:limit]


def _workloads(results: Path) -> int:
    with readable(results):
        return int(scan(results).filter(of_lines()).select(pl.col("workload").n_unique()).collect().item())


def _starts(results: Path, sources: set[str]) -> dict[str, tuple[datetime, int]]:
    """Until when each of these sources is taken to start, and its first line with a time."""
    spans = (
        scan(results)
        .filter(is_timed() & pl.col("source").is_in(list(sources)))
        .group_by("source")
        .agg(
            pl.col("timestamp").min().alias("first"),
            pl.col("timestamp").max().alias("last"),
            pl.col("line").min(),
            pl.len(),
        )
        .filter(pl.col("len") >= STARTED_RECORDS)
        .select("source", "first", "last", "line")
    )
    found: dict[str, tuple[datetime, int]] = {}
    with readable(results):
        for source, first, last, line in spans.collect(engine="streaming").iter_rows():
            span_s = (last - first).total_seconds()
            length_s = max(STARTING_SHARE * span_s, LEAST_STARTING_S if span_s > LONG_S else 0)
            found[source] = (first + timedelta(seconds=min(length_s, MOST_STARTING_S)), line)
    return found


def _is_starting(finding: Finding, starts: dict[str, tuple[datetime, int]]) -> bool:
    first = finding.samples[0]
    if first.source not in starts:
        return False
    until, line = starts[first.source]
    return finding.first_seen < until if finding.timed else first.line < line


def _has(finding: Finding, name: Reason) -> bool:
    return any(text.partition(":")[0] == name for text in finding.reasons)


def _level_rank(level: str | None) -> int:
    return LEVELS.index(level) if level in LEVELS else -1


def _parts(chunk: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The contribution of one chunk of anomalous records to each total."""
    levels = pl.col("level").replace_strict({name: at for at, name in enumerate(LEVELS)}, default=-1)
    rows = chunk.with_columns(
        pl.col("template_id").fill_null(0),
        levels.cast(pl.Int64).alias("level_rank"),
        pl.col("timestamp").dt.epoch("s").alias("second"),
        is_timed().alias("timed"),
        is_news().alias("news"),
        pl.col("message").str.head(SAMPLE_CHARS).str.extract(STATUS).fill_null("").alias("status"),
    )
    by_time = ["timestamp", "source", "line", "record_id"]
    sampled = [*_KEY, *by_time, "message", "raw", "reasons", "timed"]
    stamped = pl.col("timestamp").filter(pl.col("timed"))
    at = rows.select(*_KEY, *by_time).with_row_index("at").sort(by_time)
    heads = at.group_by(_KEY).head(SAMPLES_FIRST)["at"]
    tails = at.group_by(_KEY).tail(1)["at"]
    texts = pl.col("message", "raw").str.head(SAMPLE_CHARS)
    return {
        "groups": rows.group_by(_KEY).agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("lines").cast(pl.Int64).sum(),
            stamped.min().alias("first_seen"),
            pl.col("timestamp").min().alias("first_read"),
            stamped.max().alias("last_seen"),
            pl.col("level_rank").max(),
            pl.col("score").max(),
            pl.col("p_value").min(),
        ),
        "patterns": rows.select(*_KEY, "pattern_id").unique(),
        "seconds": rows.filter("timed").select(*_KEY, "second").unique(),
        "reasons": rows.select(*_KEY, "reasons")
        .explode("reasons")
        .drop_nulls("reasons")
        .group_by(*_KEY, "reasons")
        .agg(pl.len().cast(pl.Int64).alias("n")),
        "heads": rows.select(sampled)[heads].with_columns(texts),
        "tails": rows.select(sampled)[tails].with_columns(texts),
    }


def _fold(several: Sequence[dict[str, pl.DataFrame]]) -> dict[str, pl.DataFrame]:
    """Several parts as one; neither their order nor how they were folded before changes the result."""
    parts = {name: pl.concat([part[name] for part in several]) for name in several[0]}
    by_time = ["timestamp", "source", "line", "record_id"]
    groups = (
        parts["groups"]
        .group_by(_KEY)
        .agg(
            pl.col("count", "lines").sum(),
            pl.col("first_seen", "first_read").min(),
            pl.col("last_seen", "level_rank", "score").max(),
            pl.col("p_value").min(),
        )
    )
    # The first record seen so far can only move back, so a second later than its burst stays useless.
    seconds = (
        parts["seconds"]
        .unique()
        .filter(pl.col("second") <= pl.col("second").min().over(_KEY) + int(BURST_SPAN.total_seconds()))
    )
    return {
        "groups": groups,
        "patterns": parts["patterns"].unique(),
        "seconds": seconds,
        "reasons": parts["reasons"].group_by(*_KEY, "reasons").agg(pl.col("n").sum()),
        "heads": parts["heads"].sort(by_time).group_by(_KEY).head(SAMPLES_FIRST),
        "tails": parts["tails"].sort(by_time).group_by(_KEY).tail(1),
    }


def _build(totals: dict[str, pl.DataFrame], texts: dict[int, str]) -> Iterator[Finding]:
    seconds = totals["seconds"].sort(*_KEY, "second")
    quiet = pl.col("second").diff().fill_null(0) > int(GAP.total_seconds())
    bursts = (
        seconds.with_columns(quiet.cum_sum().over(_KEY).alias("run"))
        .filter(pl.col("run") == 0)
        .group_by(_KEY)
        .agg(pl.col("second").max().alias("burst"))
    )
    patterns = totals["patterns"].group_by(_KEY).agg(pl.len().alias("patterns"))
    reasons = (
        totals["reasons"]
        .with_columns(pl.col("reasons").str.extract("^([^:]*)").alias("kind"))
        .sort(["n", "reasons"], descending=[True, False])
        .group_by(*_KEY, "kind", maintain_order=True)
        .agg(pl.col("reasons").head(REASONS_OF_A_KIND))
        .explode("reasons")
        .group_by(_KEY, maintain_order=True)
        .agg("reasons")
    )
    samples: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    chosen = pl.concat([totals["heads"], totals["tails"]]).unique(["record_id", "source", "line"])
    for row in chosen.sort("timestamp", "source", "line", "record_id").iter_rows():
        samples.setdefault(row[: len(_KEY)], []).append(row)

    groups = totals["groups"].join(bursts, on=_KEY, how="left", nulls_equal=True)
    groups = groups.join(patterns, on=_KEY, nulls_equal=True)
    groups = groups.join(reasons, on=_KEY, how="left", nulls_equal=True)
    for group in groups.iter_rows(named=True):
        shown = tuple(_sample(row) for row in samples[tuple(group[name] for name in _KEY)])
        level_rank, template_text = group["level_rank"], texts.get(group["template_id"])
        timed = group["first_seen"] is not None
        first = group["first_seen"] if timed else group["first_read"]
        yield Finding(
            workload=group["workload"] or "",
            template_id=group["template_id"],
            status=group["status"],
            news=group["news"],
            template=shown[0].message if template_text is None else template_text,
            count=group["count"],
            lines=group["lines"],
            first_seen=first,
            last_seen=group["last_seen"] if timed else first,
            burst_end=max(first, datetime.fromtimestamp(group["burst"], UTC)) if timed else first,
            timed=timed,
            level=LEVELS[level_rank] if level_rank >= 0 else None,
            score=group["score"] or 0.0,
            reasons=tuple(sorted(group["reasons"] or (), key=_reason_place)),
            samples=shown,
            patterns=group["patterns"],
            p_value=group["p_value"],
        )


def _sample(row: tuple[Any, ...]) -> FindingSample:
    timestamp, source, line, record_id, message, raw, reasons, timed = row[len(_KEY) :]
    prefix = f"{Reason.UNLIKELY_TOKENS}:"
    words = [w for text in reasons or () if text.startswith(prefix) for w in text[len(prefix) :].split()]
    return FindingSample(
        source=source or "",
        line=line or 0,
        timestamp=timestamp,
        message=message or "",
        raw=raw or message or "",
        words=tuple(words),
        timed=timed,
        record_id=record_id or "",
    )


def _reason_place(text: str) -> int:
    """Reasons by kind; `sorted` keeps the more frequent first inside a kind."""
    name = text.partition(":")[0]
    return next(
        (at for at, template_text in enumerate(_REASON_ORDER) if template_text == name), len(_REASON_ORDER)
    )
