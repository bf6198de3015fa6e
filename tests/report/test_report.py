"""The report page: complete in itself, safe against hostile log lines, bounded in size."""

import errno
import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.errors import BadInput, SinkUnavailable
from pipeline.records.schema import RESULT_SCHEMA, UTC_US
from pipeline.report import findings, page, text, why
from pipeline.report.findings import Finding, FindingSample, shown_of_each
from pipeline.report.samples import CHARS, first_records
from pipeline.report.summary import run_summary
from pipeline.units import visible

START = datetime(2026, 11, 19, 9, 0, tzinfo=UTC)
LIMIT = 5_000_000
TEMPLATES_SCHEMA = {
    "template_id": pl.Int64,
    "template": pl.String,
    "count": pl.UInt64,
    "first_seen": UTC_US,
    "last_seen": UTC_US,
}
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    '"><img src=x onerror=alert(3)>',
    "<!-- <script> -->]]>",
    "{{js}} {{data}}",
    "before\u2028after\u2029end",
    "nul\x00byte and \x1b[31mcolour\x1b[0m and \x9b31m",
    "user\u202egnp.exe \u2066isolate\u2069",
    "&lt;b&gt; &amp; 'quotes' \"both\"",
]


class Reader(HTMLParser):
    """Collects what a browser would act on."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.blocks: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
            self.blocks.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.blocks[tag][-1] += data


def finding(number: int, message: str = "disk full", **changes: Any) -> Finding:
    seen = START + timedelta(seconds=number)
    sample = FindingSample(
        source="var/app.log", line=40 + number, timestamp=seen, message=message, raw=f"09:00 ERROR {message}"
    )
    base = Finding(
        workload="shop",
        template_id=number,
        template=message,
        count=2,
        lines=2,
        first_seen=seen,
        last_seen=seen + timedelta(seconds=5),
        burst_end=seen,
        level="error",
        score=0.93,
        reasons=("error-severity:error", "new-template"),
        samples=(sample,),
        patterns=1,
        incident=1,
    )
    return replace(base, **changes)


def template_frame(texts: list[str]) -> pl.DataFrame:
    rows = [(n, t, 10 * n, START, START) for n, t in enumerate(texts, start=1)]
    return pl.DataFrame(rows, schema=TEMPLATES_SCHEMA, orient="row")


def sample_frame(texts: list[str]) -> pl.DataFrame:
    """A sample for each template of `template_frame`, with its text and in a source of that name."""
    rows = [(n, text, 7, text) for n, text in enumerate(texts, start=1)]
    schema = {"template_id": pl.Int64, "source": pl.String, "line": pl.UInt64, "raw": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


def numbers(**changes: Any) -> dict[str, Any]:
    counts = {
        "records": 900,
        "lines": 1000,
        "anomalous": 3,
        "anomalous_lines": 4,
        "not_judged": 0,
        "not_judged_lines": 0,
        "untimed": 0,
        "untimed_lines": 0,
    }
    base: dict[str, Any] = {
        **counts,
        "first": "2026-11-19T09:00:00Z",
        "last": "2026-11-19T10:00:00Z",
        "model_versions": ["m1"],
        "by_workload": [{"workload": "shop", **counts}],
        "by_level": [{"level": None, **counts}],
        "timeline": {
            "bucket_s": 1800,
            "buckets": [["2026-11-19T09:00:00Z", 600, 0], ["2026-11-19T09:30:00Z", 400, 4]],
        },
    }
    return base | changes


def test_the_page_shows_no_clock_time_where_none_was_found() -> None:
    found = finding(1, timed=False, incident=0)
    found = replace(found, samples=tuple(replace(s, timed=False, raw="no time") for s in found.samples))
    timeline = {"bucket_s": 0, "buckets": []}
    source = page.render_page(
        findings=[found],
        templates=template_frame(["a"]).with_columns(
            first_seen=pl.lit(None, UTC_US), last_seen=pl.lit(None, UTC_US)
        ),
        summary=numbers(first=None, last=None, untimed=900, untimed_lines=900, timeline=timeline),
        title="a run",
        run={},
    ).decode()
    assert "<time" not in source.split("<script")[0]
    assert "Without a time" in source and "900 lines without a time" in source


def placed(found: list[Finding]) -> list[Finding]:
    """With their places, as `findings.order` sets them."""
    places: Counter[int] = Counter()
    out = []
    for f in found:
        places[f.incident] += 1
        folded = places[f.incident] > shown_of_each(len({one.incident for one in found}))
        out.append(replace(f, place=places[f.incident], folded=folded))
    return out


def rendered(
    found: list[Finding],
    texts: list[str] | None = None,
    title: str = "a run",
    facts: Sequence[Mapping[str, str]] = (),
    **run: object,
) -> tuple[str, Reader]:
    texts = texts or []
    source = page.render_page(
        findings=found,
        templates=template_frame(texts),
        summary=numbers(facts=facts),
        title=title,
        run=run,
        samples=sample_frame(texts),
    )
    html = source.decode()
    return html, Reader(html)


def test_the_page_is_well_formed_and_refers_to_nothing_outside_itself() -> None:
    html, reader = rendered([finding(1), finding(2)], ["disk full"], command="logweir run x.log")
    assert not reader.open
    for tag, name, value in reader.attributes:
        if name in {"src", "href", "action", "srcset", "data", "poster"}:
            assert value.startswith("#"), (tag, name, value)
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(reader.tags)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://", html)


def test_the_policy_allows_exactly_the_style_and_the_script_of_the_page() -> None:
    html, reader = rendered([finding(1)])
    policy = next(v for t, n, v in reader.attributes if (t, n) == ("meta", "content") and "default-src" in v)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    style, script = reader.blocks["style"][0], reader.blocks["script"][-1]
    assert page._csp(style) in policy
    assert page._csp(script) in policy
    assert not re.search(r'<[^>]+ (style|on\w+)="', html.replace(style, "").replace(script, ""))


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_stays_text_wherever_it_stands(hostile: str) -> None:
    plain, _ = rendered([finding(1)], ["disk full"], fact="x")
    expected = Reader(plain).tags
    bad = finding(
        1,
        hostile,
        workload=hostile,
        reasons=(f"unlikely-tokens:{hostile}", f"error-severity:{hostile}", f"{hostile}:x"),
        samples=(
            FindingSample(
                source=hostile,
                line=1,
                timestamp=START,
                message=f"{hostile} tail {hostile}",
                raw=f"{hostile} tail {hostile}",
                words=("tail", *hostile.split()),
            ),
        ),
    )
    html, reader = rendered([bad], [hostile], title=hostile, fact=hostile)
    assert [t for t in reader.tags if t not in {"span", "mark"}] == [
        t for t in expected if t not in {"span", "mark"}
    ]
    assert visible(hostile) in "".join(reader.blocks["pre"])
    assert "tail" in reader.blocks["mark"]
    assert not set("<>&") & set(reader.blocks["script"][0])
    (row,) = json.loads(reader.blocks["script"][0])["templates"]
    assert row[1] == visible(hostile)
    assert row[6:] == [f"{visible(hostile)}:7", visible(hostile)]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", html)


def test_a_finding_shows_its_level_place_count_time_reasons_and_marks_its_words() -> None:
    sample = FindingSample(
        source="var/app.log",
        line=41,
        timestamp=START,
        message="connect refused by db: refused",
        raw="ERROR refused connect refused by db: refusedly refused",
        words=("refused", "absent"),
    )
    sample = replace(sample, raw="refused ERROR " + sample.message)
    _, reader = rendered([finding(1, samples=(sample,), reasons=("unlikely-tokens:refused", "rare:3/9000"))])
    article = reader.blocks["article"][0]
    for part in ("error", "2 times", "2026-11-19 09:00:01 – 09:00:06", "var/app.log:41"):
        assert part in article
    assert "Seen 3 times in 9,000 lines, and “refused” was unexpected after “connect”." in article
    assert reader.blocks["mark"] == ["refused", "refused"]


def test_a_small_chance_is_text_and_no_markup() -> None:
    html, _ = rendered([finding(1, p_value=1e-9)])
    assert "p &lt;0.0001" in html


def test_an_incident_is_one_entry_with_its_best_finding_and_the_others_under_it() -> None:
    found = placed(
        [finding(1), finding(2, incident=2), finding(3, workload="bank"), *map(finding, range(4, 10))]
    )
    html, reader = rendered(found)
    order = "the gravest first; each begins with its likely cause"
    assert reader.blocks["h1"][0] == f"2 incidents, 9 findings in 1,000 lines, {order}"
    first, second = (b for b in reader.blocks["section"] if b.strip().startswith("Incident"))
    assert "Incident 1 2026-11-19 09:00:01 UTC · shop, bank · 8 findings" in first
    assert "and 2 more that followed in shop" in first
    assert "1 finding" in second and "more" not in second
    places = [html.index(f'id="f{label}"') for label in (*(f"1.{n}" for n in range(1, 9)), "2.1")]
    assert places == sorted(places)
    assert places[5] < html.index('<details class="rest">') < places[6]


@pytest.mark.long
def test_an_incident_of_which_not_all_fits_says_so() -> None:
    html, _ = rendered(placed([finding(n) for n in range(1, page.FINDINGS + 11)]))
    assert f"{page.FINDINGS + 10} findings" in html
    assert "10 findings of this incident are not on this page" in html
    assert "10 more findings are not on this page" in html


def test_words_are_marked_whole_and_case_sensitive() -> None:
    line = "timeout timeouts Timeout (timeout) no-timeout $x $xx"
    spans = text.word_spans(line, ["timeout", "$x", "<NUM>", ""])
    assert [line[a:b] for a, b in spans] == ["timeout", "timeout", "timeout", "$x"]


def test_findings_and_numbers_can_be_read_without_scripts() -> None:
    html, reader = rendered(placed([finding(n) for n in range(1, 31)]), [f"template {n}" for n in range(150)])
    assert len(reader.blocks["article"]) == 30
    assert "1 incident, 30 findings in 1,000 lines, its likely cause first" in reader.blocks["h1"][0]
    assert html.count('<rect class="hit"') == 2
    assert reader.blocks["tr"][1].startswith("template 149")
    assert any(tag == "th" and name == "aria-sort" for tag, name, _ in reader.attributes)


@pytest.mark.parametrize(
    ("found", "changes", "sentence"),
    [
        (0, {}, "Nothing unusual in 1,000 lines"),
        (1, {}, "1 incident, 1 finding in 1,000 lines"),
        (0, {"not_judged": 900}, "Nothing in 1,000 lines says that something failed; they were not judged"),
        (
            0,
            {"not_judged": 30, "not_judged_lines": 31},
            "Nothing unusual in the lines judged; 31 of 1,000 lines were not judged",
        ),
        (0, {"records": 0, "lines": 0}, "No lines were read"),
    ],
)
def test_the_headline_says_plainly_what_was_found(found: int, changes: dict[str, Any], sentence: str) -> None:
    assert text.headline([finding(1)] * found, numbers(**changes)).startswith(sentence)


def test_facts_of_the_whole_log_are_text_on_the_page() -> None:
    html, reader = rendered([finding(1)], facts=[{"text": "38 % of <b>400</b> answers"}])
    assert "Of the whole log" in html and "38 % of &lt;b&gt;400&lt;/b&gt; answers" in html and not reader.open
    assert "Of the whole log" not in rendered([finding(1)])[0]


def test_a_page_about_nothing_is_still_a_page(tmp_path: Path) -> None:
    size = page.write_page(
        tmp_path / "r.html",
        findings=[],
        templates=template_frame([]),
        summary=run_summary(tmp_path / "none"),
        title="empty",
        run={},
    )
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert size == (tmp_path / "r.html").stat().st_size
    assert "No lines were read" in html
    assert not Reader(html).open


@pytest.mark.long
@pytest.mark.parametrize("character", ["a", "<", "\x00", "\u20ac", "\U0001f600", "\u202e"])
def test_the_page_stays_under_five_megabytes_whatever_comes(character: str) -> None:
    long = character * 65_536
    sample = FindingSample(
        source=long, line=1, timestamp=START, message=long, raw=long, words=(character * 50,)
    )
    found = [
        finding(
            n, long, samples=(sample,) * 5, workload=f"{n} {long}", reasons=(f"unlikely-tokens:{long}",) * 3
        )
        for n in range(1, 601)
    ]
    # Templates are long enough to fill their share many times over.
    source = page.render_page(
        findings=found,
        templates=template_frame([character * 2_000] * 6_000),
        samples=sample_frame([character * 301] * 6_000),
        summary=numbers(by_workload=[{**numbers()["by_workload"][0], "workload": long}] * 400),
        title=long,
        run={long: long, "list": [long] * 50},
    )
    assert len(source) < LIMIT
    assert b"not on this page" in source
    assert b" of 6,000 templates" in source


@pytest.mark.long
def test_a_million_records_give_findings_and_a_page_under_five_megabytes(tmp_path: Path) -> None:
    n, kinds = 1_000_000, 3_000
    folder = tmp_path / "results" / "date=2026-11-19" / "workload=shop"
    folder.mkdir(parents=True)
    number = pl.int_range(n, eager=True, dtype=pl.Int64)
    message = pl.Series([f"kind {k} " + "payload " * 60 for k in range(kinds)])
    frame = pl.DataFrame({"line": number}).select(
        record_id=pl.col("line").cast(pl.String),
        source=pl.lit("app.log"),
        line=pl.col("line").cast(pl.UInt64) + 1,
        lines=pl.lit(1, pl.UInt32),
        timestamp=pl.lit(START, UTC_US) + pl.duration(milliseconds=pl.col("line") * 20),
        timed=pl.lit(value=True),
        workload=pl.lit("shop"),
        level=pl.when(pl.col("line") % 50 == 0).then(pl.lit("error")).otherwise(pl.lit("info")),
        message=message.gather(number % kinds),
        pattern_id=(pl.col("line") % kinds).cast(pl.UInt64),
        template_id=pl.col("line") % kinds,
        score=pl.lit(0.5),
        anomalous=pl.col("line") % 20 == 0,
        p_value=pl.lit(0.002),
        reasons=pl.concat_list(pl.lit("unlikely-tokens:payload")),
        model_version=pl.lit("m1"),
        host=pl.lit(None, pl.String),
        process=pl.lit(None, pl.String),
        service=pl.lit(None, pl.String),
        raw=message.gather(number % kinds),
    )
    assert frame.schema == pl.Schema(RESULT_SCHEMA)
    for part in range(4):
        frame.slice(part * n // 4, n // 4).write_parquet(folder / f"{part}.parquet", compression="lz4")
    templates = template_frame([f"kind {k} " + "payload " * 60 for k in range(kinds)])
    found = findings.collect(tmp_path / "results", templates)
    summary = run_summary(tmp_path / "results")
    size = page.write_page(
        tmp_path / "r.html", findings=found, templates=templates, summary=summary, title="million", run={}
    )
    assert sum(f.count for f in found) == n // 20 == summary["anomalous"]
    assert summary["lines"] == n
    assert size == (tmp_path / "r.html").stat().st_size < LIMIT
    assert "findings in 1,000,000 lines" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_where_not_all_templates_fit_those_with_a_finding_are_kept() -> None:
    texts = [f"template {n}" for n in range(page.TEMPLATES + 500)]
    _, reader = rendered(placed([finding(3)]), texts)
    rows = json.loads(reader.blocks["script"][0])["templates"]
    assert len(rows) == page.TEMPLATES
    assert [row[:6] for row in rows if row[5]] == [
        [3, "template 2", 30, int(START.timestamp()), int(START.timestamp()), "1.1"]
    ]
    assert [row[2] for row in rows] == sorted((row[2] for row in rows), reverse=True)


def test_records_without_a_template_have_a_row_of_their_own() -> None:
    frame = template_frame(["known", "other"]).with_columns(
        template_id=pl.Series([1, None]), template=pl.Series(["known", None]), count=pl.lit(5, pl.UInt64)
    )
    source = page.render_page(findings=[], templates=frame, summary=numbers(), title="t", run={})
    rows = json.loads(Reader(source.decode()).blocks["script"][0])["templates"]
    assert [row[:3] for row in rows] == [[0, "(unclassified)", 5], [1, "known", 5]]


def test_the_facts_of_the_run_are_printed_by_name() -> None:
    _, reader = rendered([], lines_per_s=81_234, gpu=None, inputs=["a.log", "b.log"], seconds=3.14159)
    facts = dict(zip(reader.blocks["dt"], reader.blocks["dd"], strict=True))
    assert facts["lines per s"] == "81,234"
    assert (facts["gpu"], facts["inputs"], facts["seconds"]) == ("none", "a.log, b.log", "3.142")
    assert facts["model version"] == "m1"


def test_the_same_input_gives_the_same_page() -> None:
    found = [finding(n, f"message {random.Random(n).random()}") for n in range(20)]
    assert rendered(found, ["t"])[0] == rendered(found, ["t"])[0]


@pytest.mark.parametrize(
    ("reasons", "level", "says"),
    [
        (["error-severity:error"], "error", "logged as error"),
        (["error-severity:error"], "fatal", "logged as error"),
        (["error-severity:error"], None, "says “error”"),
        (["error-severity:critical"], "info", "says “critical”"),
        (["error-severity:error", "error-severity:fatal"], "error", "logged as error, says “fatal”"),
        (["error-severity:error", "error-severity:refused"], "error", "logged as error, says “refused”"),
        (["error-severity:info"], "info", "says that something failed"),
        (["error-severity"], "error", "says that something failed"),
    ],
)
def test_a_line_is_logged_as_an_error_only_when_its_level_says_so(
    reasons: list[str], level: str | None, says: str
) -> None:
    assert why.explain(reasons, level) == [says]
    assert "logged as" not in why.explain(reasons)[0]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_report_and_no_half_written_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "report.html"
    target.write_text("old")
    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), full)
    with pytest.raises(SinkUnavailable, match=r"No space left on device.*free space"):
        page.write_page(
            target, findings=[], templates=template_frame([]), summary=numbers(), title="t", run={}
        )
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "old"


def test_a_path_that_cannot_be_written_is_the_users_to_change(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "findings": [],
        "templates": template_frame([]),
        "summary": numbers(),
        "title": "t",
        "run": {},
    }
    with pytest.raises(BadInput, match="absent"):
        page.write_page(tmp_path / "absent" / "r.html", **arguments)
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match="folder"):
        page.write_page(tmp_path / "folder", **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_reader_chooses_by_level_and_workload_and_the_cards_say_what_they_are() -> None:
    found = [
        finding(1),
        finding(2, level=None, workload="bank <b>", count=7),
        finding(3, level="fatal"),
        finding(4, level="warning", reasons=()),
    ]
    html, reader = rendered(placed(found))
    picks = re.findall(r'<button[^>]* data-by="(\w+)" data-value="([^"]*)" aria-pressed="false">', html)
    assert [value for by, value in picks if by == "level"] == ["fatal", "error", "warning", "no level"]
    assert [value for by, value in picks if by == "workload"] == ["shop", "bank &lt;b&gt;"]
    cards = {
        name: [value for tag, key, value in reader.attributes if (tag, key) == ("article", f"data-{name}")]
        for name in ("level", "workload", "urgency", "count")
    }
    assert cards["level"] == ["error", "no level", "fatal", "warning"]
    assert cards["workload"] == ["shop", "bank <b>", "shop", "shop"]
    assert cards["urgency"] == ["36", "30", "38", "25"]
    assert cards["count"] == ["2", "7", "2", "2"]


def test_one_level_and_one_workload_leave_nothing_to_choose() -> None:
    assert "data-by" not in rendered([finding(1), finding(2)])[0].split("<script")[0]
    assert '<div class="tools js" hidden>' in rendered([])[0]


def test_every_template_opens_a_sample_with_and_without_scripts() -> None:
    html, reader = rendered([finding(2)], ["started", "disk full"])
    rows = json.loads(reader.blocks["script"][0])["templates"]
    assert [row[6:] for row in rows] == [["disk full:7", "disk full"], ["started:7", "started"]]
    assert "<details><summary>started</summary><figure><figcaption>started:7</figcaption>" in html


def test_the_sample_of_a_template_is_its_first_record_and_short(tmp_path: Path) -> None:
    texts = ["one first", "two " + "x" * 900, "one second", "in a session", "no template"]
    ids = [1, 2, 1, -5, None]
    frame = pl.DataFrame(
        {"template_id": ids, "line": [4, 5, 6, 0, 8], "raw": texts},
        schema_overrides={"template_id": pl.Int64, "line": pl.UInt64},
    ).with_columns(source=pl.lit("app.log"))
    absent = [pl.lit(None, kind).alias(name) for name, kind in RESULT_SCHEMA.items() if name not in frame]
    frame.with_columns(absent).select(list(RESULT_SCHEMA)).write_parquet(tmp_path / "a.parquet")
    samples = first_records(tmp_path)
    assert samples.drop("raw").rows() == [(0, "app.log", 8), (1, "app.log", 4), (2, "app.log", 5)]
    assert samples["raw"].to_list()[:2] == ["no template", "one first"]
    assert samples["raw"].str.len_chars().max() == CHARS + 1
    assert first_records(tmp_path / "absent").is_empty()


def test_the_line_itself_stands_out_among_the_lines_around_it() -> None:
    sample = replace(finding(1).samples[0], raw="hit <i>", before=("earlier <b>",), after=("later",))
    html, _ = rendered([finding(1, samples=(sample,))])
    around = html.partition('<pre class="lines">')[2].partition("</pre>")[0]
    assert around == "<span>earlier &lt;b&gt;\n</span><b>hit &lt;i&gt;\n</b><span>later\n</span>"


_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.long
@pytest.mark.skipif(_BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize(
    ("fragment", "labels", "state"),
    [
        (
            "level=error&level=fatal&workload=shop&order=severity",
            ["1.3", "1.1"],
            "2 of 4 findings shown: error, fatal, shop",
        ),
        (
            f"text=disk+full&from={int(START.timestamp())}&to={int(START.timestamp()) + 9}&order=count",
            ["1.2", "1.1", "1.3"],
            "3 of 4 findings shown: 2026-11-19 09:00:00 – 09:30:00 UTC, “disk full”",
        ),
        ("f1.4", ["1.1", "1.2", "1.3", "1.4"], ""),
        ("level=absent&order=absent&from=x&=", ["1.1", "1.2", "1.3", "1.4"], ""),
    ],
)
def test_the_address_of_the_page_holds_what_was_chosen(
    tmp_path: Path, fragment: str, labels: list[str], state: str
) -> None:
    late = START + timedelta(minutes=40)
    found = placed(
        [
            finding(1),
            finding(2, workload="bank", count=9),
            finding(3, level="fatal"),
            finding(4, level="warning", workload="bank", first_seen=late, last_seen=late),
        ]
    )
    (tmp_path / "r.html").write_text(rendered(found, ["disk full"])[0], encoding="utf-8")
    command = [str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/b"]
    command += ["--virtual-time-budget=2000", "--dump-dom", f"file://{tmp_path}/r.html#{fragment}"]
    dom = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode()
    cards = re.findall(r'<article class="finding" id="f([\d.]+)"[^>]*?( hidden="")?>', dom)
    assert [label for label, hidden in cards if not hidden] == labels
    assert f'<span id="shown" role="status">{state}</span>' in dom
