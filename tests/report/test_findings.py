"""Findings: what they hold, and the order in which a person reads them."""

import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import detect
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadPayload
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Meta
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.records.verdict import Verdict
from pipeline.report import findings, summary
from pipeline.report.findings import Finding, FindingSample
from pipeline.report.why import why
from pipeline.sources.framing import Framer
from pipeline.watching.incidents import onsets
from pipeline.watching.incidents.leading import Grade

START = datetime(2026, 11, 19, 9, 0, tzinfo=UTC)
TEMPLATES = {"template_id": pl.Int64, "template": pl.String}


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def record(number: int, seconds: float, **changes: Any) -> dict[str, Any]:
    row = {
        "record_id": f"r{number:06}",
        "source": "app.log",
        "line": number,
        "lines": 1,
        "timestamp": at(seconds),
        "workload": "shop",
        "level": "info",
        "message": f"message {number}",
        "pattern_id": 7,
        "template_id": 1,
        "score": 0.9,
        "anomalous": True,
        "reasons": ["unlikely-tokens:message"],
        "model_version": "m1",
        "raw": f"INFO message {number}",
    }
    return row | changes


def store(root: Path, rows: list[dict[str, Any]], files: int = 1) -> Path:
    """The rows, dealt out over files laid out as the sink lays them out."""
    for n in range(files):
        frame = pl.DataFrame(rows[n::files], schema=RESULT_SCHEMA)
        for (workload,), part in frame.group_by("workload"):
            folder = root / "date=2026-11-19" / f"workload={workload}"
            folder.mkdir(parents=True, exist_ok=True)
            part.write_parquet(folder / f"batch{n}.parquet")
    root.mkdir(exist_ok=True)
    return root


def templates(*rows: tuple[int, str]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=TEMPLATES, orient="row")


def finding(template_id: int, seconds: float = 0, **changes: Any) -> Finding:
    base = Finding(
        workload="shop",
        template_id=template_id,
        template=f"template {template_id}",
        count=1,
        lines=1,
        first_seen=at(seconds),
        last_seen=at(seconds),
        burst_end=at(seconds),
        level="error",
        score=0.9,
        reasons=("error-severity:error",),
        samples=(FindingSample(source="app.log", line=1, timestamp=at(seconds), message="m", raw="m"),),
        patterns=1,
    )
    return replace(base, **changes)


def benign(template_id: int, seconds: float) -> Finding:
    return finding(template_id, seconds, level="info", reasons=("unlikely-tokens:odd",), score=0.99)


any_finding = st.builds(
    lambda seconds, burst, level, reasons, score, count, workload: finding(
        0,
        seconds,
        burst_end=at(seconds + burst),
        last_seen=at(seconds + burst),
        level=level,
        reasons=tuple(reasons),
        score=score,
        count=count,
        workload=workload,
    ),
    st.integers(0, 4_000),
    st.integers(0, 120),
    st.sampled_from([None, "debug", "info", "warning", "error", "fatal"]),
    st.lists(st.sampled_from(["new-template", "unlikely-tokens:a b", "rare:1/900", "error-severity:failed"])),
    st.floats(0, 1),
    st.integers(1, 50),
    st.sampled_from(["shop", "bank"]),
)
finding_lists = st.lists(any_finding, max_size=25).map(
    lambda many: [replace(f, template_id=n, template=f"template {n}") for n, f in enumerate(many, start=1)]
)


def test_a_finding_sums_up_the_anomalous_records_of_one_template_of_one_workload(tmp_path: Path) -> None:
    rows = [
        record(1, 0, level="warning", lines=3, pattern_id=1),
        record(2, 10, level="fatal", score=0.97, reasons=["new-template", "error-severity:fatal"]),
        record(3, 20, level="info", anomalous=False, score=0.1, reasons=[]),
        record(4, 30, anomalous=None, score=None, reasons=["warming"], template_id=None, model_version=None),
        record(5, 40, workload="bank"),
    ]
    found = findings.collect(store(tmp_path, rows), templates((1, "message <*>")))
    shop, bank = (next(f for f in found if f.workload == name) for name in ("shop", "bank"))
    assert (shop.count, shop.lines, shop.level, shop.score, shop.patterns) == (2, 4, "fatal", 0.97, 2)
    assert (shop.first_seen, shop.last_seen) == (at(0), at(10))
    assert shop.template == "message <*>"
    assert shop.reasons == ("error-severity:fatal", "new-template", "unlikely-tokens:message")
    assert bank.count == 1


def test_findings_without_a_time_come_last_and_are_no_incident(tmp_path: Path) -> None:
    rows = [
        record(1, 0, template_id=1, timed=True, level="error"),
        record(2, 9e6, template_id=2, timed=False, level="fatal"),
        record(3, 60, template_id=3, timed=True, level="error"),
        record(4, 9e6, template_id=3, timed=False),  # read long after the other
    ]
    found = findings.collect(store(tmp_path, rows), templates())
    assert [(f.template_id, f.incident, f.timed) for f in found] == [
        (1, 1, True),
        (3, 1, True),
        (2, 0, False),
    ]
    assert (found[1].first_seen, found[1].last_seen) == (at(60), at(60))
    assert [s.timed for s in found[1].samples] == [True, False]


def test_numbers_are_of_all_records_but_times_of_those_that_have_one(tmp_path: Path) -> None:
    rows = [record(1, 0, timed=True), record(2, 9e6, timed=False)]
    numbers = summary.run_summary(store(tmp_path, rows))
    assert (numbers["records"], numbers["untimed"]) == (2, 1)
    assert numbers["first"] == numbers["last"] == at(0).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert sum(lines for _, lines, _ in numbers["timeline"]["buckets"]) == 1
    alone = summary.run_summary(store(tmp_path / "untimed", rows[1:]))
    assert (alone["records"], alone["first"], alone["timeline"]["buckets"]) == (1, None, [])


def test_samples_are_the_first_four_records_and_the_last_one(tmp_path: Path) -> None:
    rows = [record(n, n * 5) for n in range(1, 41)]
    random.Random(5).shuffle(rows)
    (found,) = findings.collect(store(tmp_path, rows, files=3), templates((1, "message <*>")))
    assert [s.line for s in found.samples] == [1, 2, 3, 4, 40]
    assert found.samples[0] == FindingSample(
        source="app.log",
        line=1,
        timestamp=at(5),
        message="message 1",
        raw="INFO message 1",
        words=("message",),
        record_id=found.samples[0].record_id,
    )


def test_a_record_is_sampled_once_even_when_it_is_both_first_and_last(tmp_path: Path) -> None:
    (found,) = findings.collect(store(tmp_path, [record(1, 0)]), templates())
    assert len(found.samples) == 1


def test_a_template_that_is_not_known_is_shown_by_its_first_message(tmp_path: Path) -> None:
    (found,) = findings.collect(store(tmp_path, [record(1, 0, template_id=-1)]), templates((1, "other")))
    assert (found.template_id, found.template) == (-1, "message 1")


def test_a_very_long_record_is_cut_when_it_is_sampled(tmp_path: Path) -> None:
    rows = [record(1, 0, raw="x" * 70_000, message="x" * 70_000)]
    (found,) = findings.collect(store(tmp_path, rows), templates())
    assert len(found.samples[0].raw) == len(found.samples[0].message) == findings.SAMPLE_CHARS


def test_reasons_are_the_most_frequent_of_each_kind(tmp_path: Path) -> None:
    rows = [record(n, n, reasons=[f"unlikely-tokens:w{n:03}", "rare:1/90"]) for n in range(100)]
    rows += [record(n, n, reasons=["unlikely-tokens:often", "new-template"]) for n in range(100, 103)]
    (found,) = findings.collect(store(tmp_path, rows), templates())
    assert found.reasons[:3] == ("new-template", "unlikely-tokens:often", "unlikely-tokens:w000")
    assert found.reasons[-1] == "rare:1/90"
    assert len(found.reasons) == findings.REASONS_OF_A_KIND + 2


def test_results_that_are_absent_empty_or_half_written_have_no_findings(tmp_path: Path) -> None:
    assert findings.collect(tmp_path / "absent", templates()) == []
    (tmp_path / ".half.parquet").write_bytes(b"PAR1 and no more")
    assert findings.collect(tmp_path, templates()) == []
    store(tmp_path, [record(1, 0, anomalous=False, score=0.1)])
    assert findings.collect(tmp_path, templates()) == []


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"not parquet at all" * 100])
def test_a_damaged_file_is_named_instead_of_being_left_out(tmp_path: Path, content: bytes) -> None:
    store(tmp_path, [record(1, 0)])
    (tmp_path / "damaged.parquet").write_bytes(content)
    with pytest.raises(BadPayload, match=r"damaged\.parquet"):
        findings.collect(tmp_path, templates())
    with pytest.raises(BadPayload, match=r"damaged\.parquet"):
        summary.run_summary(tmp_path)


def test_the_limit_keeps_the_findings_that_come_first(tmp_path: Path) -> None:
    rows = [record(n, n, template_id=n, level="error" if n == 7 else "info") for n in range(1, 9)]
    found = findings.collect(store(tmp_path, rows), templates(), limit=2)
    assert len(found) == 2
    assert found[0].template_id == 7


def test_what_a_program_says_as_it_starts_leads_nothing(tmp_path: Path) -> None:
    calm = [record(n, n / 10, template_id=9, anomalous=False, score=0.1) for n in range(1, 601)]
    early = record(0, 0.2, template_id=1, level="error")
    fault = record(700, 30, template_id=2, level="warning")
    found = findings.collect(store(tmp_path / "long", [*calm, early, fault]), templates())
    assert [(f.template_id, f.starting) for f in found] == [(2, False), (1, True)]
    few = findings.collect(store(tmp_path / "few", [*calm[:50], early, fault]), templates())
    assert [(f.template_id, f.starting) for f in few] == [(1, False), (2, False)]


def test_the_strangest_calm_lines_are_listed_and_make_no_incident(tmp_path: Path) -> None:
    said = [
        record(n, n, template_id=n, score=n / 100, reasons=["never-said:900 saved"]) for n in range(1, 21)
    ]
    fault = record(99, 500, template_id=99, level="error")
    found = findings.collect(store(tmp_path, [*said, fault]), templates(), news=3)
    assert [(f.label, f.template_id, f.incident) for f in found] == [
        ("1.1", 99, 1), ("n1", 20, 0), ("n2", 19, 0), ("n3", 18, 0),
    ]  # fmt: skip
    assert why(found[1]) == "Never seen in 900 lines; usually “saved”"


def test_a_chatty_workload_hides_no_calm_line_of_a_steady_one(tmp_path: Path) -> None:
    said = ["never-said:900"]
    chat = [record(n, n, template_id=n, score=n / 100, reasons=said, workload="chat") for n in range(10, 30)]
    steady = record(1, 50, template_id=1, score=0.01, reasons=said, workload="steady")
    found = findings.collect(store(tmp_path / "both", [*chat, steady]), templates(), news=4)
    assert [(f.label, f.template_id) for f in found] == [("n1", 29), ("n2", 1), ("n3", 28)]
    alone = findings.collect(store(tmp_path / "alone", chat), templates(), news=4)
    assert [f.template_id for f in alone] == [29, 28, 27, 26]


def test_a_calm_new_line_joins_an_incident_but_makes_none() -> None:
    new = ("new-template", "unlikely-tokens:odd")
    near, far = (finding(n, s, level="info", reasons=new) for n, s in ((2, 10), (3, 4_000)))
    found = findings.order(
        [finding(1, 0), near, far, finding(4, 9_000, level="info", reasons=("rate-silence:4",))]
    )
    assert {f.template_id: f.label for f in found} == {1: "1.1", 2: "1.2", 3: "n1", 4: "2.1"}


def test_few_incidents_show_more_findings_of_each() -> None:
    one = findings.order(finding(n, n) for n in range(30))
    assert sum(not f.folded for f in one) == findings.SHOWN
    six = findings.order(finding(10 * n + i, 900 * n + i) for n in range(6) for i in range(9))
    assert Counter(f.incident for f in six if not f.folded) == dict.fromkeys(range(1, 7), 3)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_rows_and_files_does_not_change_the_findings(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        record(
            n,
            (n * 37) % 900,
            template_id=n % 9,
            workload=("shop", "bank")[n % 2],
            level=("info", "warning", "error")[n % 5 % 3],
            pattern_id=n % 20,
            reasons=[f"unlikely-tokens:w{n % 11}"],
        )
        for n in range(300)
    ]
    expected = findings.collect(store(tmp_path / "straight", rows), templates())
    monkeypatch.setattr(findings, "_CHUNK_ROWS", 17)
    random.Random(seed).shuffle(rows)
    assert findings.collect(store(tmp_path / "shuffled", rows, files=seed + 2), templates()) == expected


@given(many=finding_lists, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_order_is_a_permutation_that_does_not_depend_on_the_order_of_the_input(
    many: list[Finding], seed: int
) -> None:
    ordered = findings.order(many)
    shuffled = many.copy()
    random.Random(seed).shuffle(shuffled)
    assert findings.order(shuffled) == ordered
    assert sorted(f.template_id for f in ordered) == [f.template_id for f in many]
    assert findings.order(ordered) == ordered


@given(many=finding_lists)
@settings(max_examples=60, deadline=None)
def test_the_best_of_each_incident_comes_before_the_second_of_any(many: list[Finding]) -> None:
    incidents = [f.incident for f in findings.order(many) if f.incident]
    distinct = set(incidents)
    assert set(incidents[: len(distinct)]) == distinct
    assert distinct == set(range(1, len(distinct) + 1))


@given(many=finding_lists)
@settings(max_examples=60, deadline=None)
def test_incidents_are_numbered_in_the_order_of_their_gravest_findings(many: list[Finding]) -> None:
    ordered = findings.order(many)
    entries = [entry for entry in findings.by_incident(ordered) if entry[0].incident]
    most_urgent = [min(map(findings.rank, entry)) for entry in entries]
    assert most_urgent == sorted(most_urgent)
    assert [entry[0].incident for entry in entries] == list(range(1, len(entries) + 1))
    for entry in entries:
        assert [f.place for f in entry] == list(range(1, len(entry) + 1))
        grades = [min(findings.grade(f), Grade.FAILING) for f in entry]
        assert grades == sorted(grades, reverse=True)


def test_the_cause_leads_and_its_consequences_follow() -> None:
    killed = FindingSample(
        source="db.log", line=9, timestamp=at(0.03), message="was killed", raw="was killed"
    )
    new = ("error-severity:error", "new-template")
    cause = finding(
        1, 0.03, level="info", reasons=("error-severity:killed", "new-template"), samples=(killed,)
    )
    state = finding(2, 0.6, level="fatal", count=4, reasons=new, template="the system is in recovery mode")
    client = finding(3, 0.2, workload="shop", count=40, reasons=new, template="request failed")
    ordered = findings.order([state, client, cause])
    assert [f.template_id for f in ordered] == [1, 2, 3]
    assert [f.label for f in ordered] == ["1.1", "1.2", "1.3"]


def test_findings_that_differ_in_user_agent_alone_are_one() -> None:
    def access(number: int, agent: str, seconds: float, status: int = 502) -> Finding:
        line = f'"GET /a HTTP/1.1" {status} 157 "-" "{agent}"'
        sample = FindingSample(source="a.log", line=number, timestamp=at(seconds), message=line, raw=line)
        template = f'"GET <PATH> HTTP/1.1" <*> <NUM> "-" "{agent}"'
        return finding(number, seconds, template=template, samples=(sample,), count=number)

    found = findings.order([access(3, "okhttp", 1), access(5, "Mozilla", 2), access(7, "okhttp", 3, 500)])
    assert [(f.template_id, f.alike, f.count) for f in found] == [(7, (), 7), (5, (3,), 8)]
    merged = next(f for f in found if f.alike)
    assert (merged.first_seen, merged.last_seen) == (at(1), at(2))
    assert [s.line for s in merged.samples] == [3, 5]
    assert findings.order(found) == found


def test_answers_of_two_statuses_under_one_template_are_two_findings(tmp_path: Path) -> None:
    def answer(number: int, status: int, agent: str, template: int) -> dict[str, Any]:
        line = f'"POST /a HTTP/1.1" {status} 157 "-" "{agent}"'
        return record(number, number, message=line, raw=line, template_id=template, level="error")

    rows = [answer(1, 502, "a", 1), answer(2, 500, "a", 1), answer(3, 502, "b", 2), answer(4, 502, "a", 1)]
    known = templates(
        (1, '"POST <PATH> HTTP/1.1" <*> <NUM> <*> "a"'), (2, '"POST <PATH> HTTP/1.1" 502 <NUM> "<URL>" "b"')
    )
    found = findings.collect(store(tmp_path / "r", rows), known)
    assert [(f.status, f.count, f.template_ids, f.label) for f in found] == [
        ("502", 3, (1, 2), "1.1"),
        ("500", 1, (1,), "1.2"),
    ]


def test_one_fault_that_shows_in_two_services_is_one_incident() -> None:
    ordered = findings.order([finding(1, 0), finding(2, 45, workload="bank"), finding(3, 600)])
    assert {f.template_id: f.incident for f in ordered} == {1: 2, 2: 2, 3: 1}


def test_a_burst_keeps_its_incident_open_but_a_line_that_returns_all_day_does_not() -> None:
    burst = finding(1, 0, burst_end=at(120), last_seen=at(120))
    assert {f.incident for f in findings.order([burst, finding(2, 170)])} == {1}
    returning = finding(1, 0, last_seen=at(80_000), count=9_000)
    assert {f.incident for f in findings.order([returning, finding(2, 170)])} == {1, 2}


def test_a_long_chain_of_onsets_is_cut_where_the_gaps_are_wide() -> None:
    chain = [finding(n, seconds) for n, seconds in enumerate([0, 10, 60, 70, 120, 130, 180, 190], start=1)]
    assert [f.incident for f in sorted(findings.order(chain), key=lambda f: f.template_id)] == [
        *(4, 4, 3, 3, 2, 2, 1, 1)
    ]


def test_onsets_that_are_as_far_apart_as_all_others_are_not_cut_into_single_ones() -> None:
    ordered = findings.order(finding(n, 20 * n) for n in range(30))
    assert Counter(f.incident for f in ordered) == {1: 10, 2: 10, 3: 10}


def test_onsets_without_any_gap_do_not_make_one_incident_of_a_day() -> None:
    ordered = findings.order(finding(n, 4 * n) for n in range(1, 1_000))
    for incident in {f.incident for f in ordered}:
        began = [f.first_seen for f in ordered if f.incident == incident]
        assert max(began) - min(began) <= onsets.SPAN


@given(many=finding_lists)
@settings(max_examples=60, deadline=None)
def test_entries_of_incidents_hold_every_finding_once(many: list[Finding]) -> None:
    ordered = findings.order(many)
    entries = findings.by_incident(ordered)
    assert sorted(f.label for entry in entries for f in entry) == sorted(f.label for f in ordered)
    assert len({f.label for f in ordered}) == len(ordered) == len(many)
    heads = [entry[0] for entry in entries if not entry[0].news]
    assert heads == ordered[: len(heads)]


def test_a_stack_trace_is_one_finding_however_deep_it_is(tmp_path: Path) -> None:
    lines = [
        "2026-11-20 10:00:00,123 ERROR [main] shop.Cart: payment failed",
        "shop.pay.PaymentException: card refused",
        "\tat shop.pay.Gateway.charge(Gateway.java:41)",
        "Caused by: java.net.SocketTimeoutException: Read timed out",
        "\t... 12 more",
        "2026-11-20 10:00:07,456 ERROR [main] shop.Cart: payment failed",
        "shop.pay.PaymentException: card refused",
        "\tat shop.pay.Gateway.charge(Gateway.java:44)",
        "\tat shop.pay.Retry.run(Retry.java:7)",
        "Caused by: java.net.SocketTimeoutException: Read timed out",
        "\t... 9 more",
    ]
    framer = Framer()
    records = pl.concat([framer.feed(lines), framer.flush()])
    meta = Meta(
        batch_id="b",
        source="app.log",
        source_key="00aa",
        purpose=Purpose.SCORE,
        arrived=START,
        formats=(),
        zone="UTC",
    )
    prepared = detect.prepare(records, meta, MaskSet.load())
    work = detect.distinct(prepared, "m1")
    verdict = Verdict(template_id=1, score=0.9, anomalous=True, reasons=("new-template",))
    rows = detect.result_rows(
        prepared, detect.answer(work, dict.fromkeys(work["key"].to_list(), verdict)), meta, "shop"
    )
    (tmp_path / "workload=shop").mkdir()
    rows.write_parquet(tmp_path / "workload=shop" / "b.parquet")
    (found,) = findings.collect(tmp_path, templates((1, "payment failed")))
    assert (work.height, found.patterns, found.count, found.lines) == (1, 1, 2, 11)
    assert found.samples[0].raw == "\n".join(lines[:5])


def test_a_harmless_line_between_two_incidents_does_not_join_them() -> None:
    ordered = findings.order([finding(1, 0), benign(2, 50), finding(3, 100)])
    assert [f.template_id for f in ordered] == [3, 1, 2]


def test_every_fault_stands_in_the_first_ten_among_thirty_other_templates() -> None:
    draw = random.Random(11)
    services = ["gate", "shop", "bank", "mail"]
    faults = []
    for fault in range(8):
        begin = 600 + fault * 420
        for n in range(draw.randint(2, 5)):
            faults.append(
                finding(
                    100 + fault * 10 + n,
                    begin + n * draw.randint(1, 25),
                    workload=services[(fault + n) % 4],
                    level=draw.choice(["warning", "error"]) if n else "error",
                    count=draw.randint(1, 60),
                    score=draw.uniform(0.85, 1),
                )
            )
    others = [benign(n, draw.uniform(0, 4_200)) for n in range(1, 31)]
    first = findings.order(faults + others)[:10]
    assert {f.template_id // 10 - 10 for f in first if f.template_id >= 100} == set(range(8))


def test_the_opening_burst_ends_at_the_first_quiet_minute(tmp_path: Path) -> None:
    rows = [record(n, s) for n, s in enumerate([3600, 3650, 3700, 3770, 3800], start=1)]
    rows.append(record(6, 0, template_id=2, level="error"))
    earlier, found = findings.collect(store(tmp_path, rows), templates())
    assert (earlier.burst_end, found.burst_end) == (at(0), at(3700))
    rows = [record(n, n * 30) for n in range(100)]
    (found,) = findings.collect(store(tmp_path / "long", rows), templates())
    assert found.burst_end == at(0) + onsets.BURST_SPAN


def test_the_summary_counts_every_line_once(tmp_path: Path) -> None:
    rows = [record(n, n, anomalous=n % 10 == 0, score=0.5, lines=2) for n in range(100)]
    rows += [
        record(200, 300, workload="bank", level=None, anomalous=None, score=None, model_version=None),
        record(201, 301, workload="bank", level="error"),
    ]
    numbers = summary.run_summary(store(tmp_path, rows, files=3))
    assert [numbers[k] for k in ("records", "lines", "anomalous", "anomalous_lines", "not_judged")] == [
        *(102, 202, 11, 21, 1)
    ]
    assert (numbers["first"], numbers["last"]) == ("2026-11-19T09:00:00Z", "2026-11-19T09:05:01Z")
    assert numbers["model_versions"] == ["m1"]
    assert [(row["workload"], row["lines"]) for row in numbers["by_workload"]] == [("shop", 200), ("bank", 2)]
    assert {row["level"]: row["anomalous"] for row in numbers["by_level"]} == {
        "info": 10,
        "error": 1,
        None: 0,
    }
    assert sum(lines for _, lines, _ in numbers["timeline"]["buckets"]) == 202
    assert sum(odd for _, _, odd in numbers["timeline"]["buckets"]) == 21


@pytest.mark.parametrize("days", [0, 0.001, 0.7, 3, 40, 2_000])
def test_the_timeline_has_no_holes_and_at_most_240_buckets(tmp_path: Path, days: float) -> None:
    rows = [record(1, 0.5), record(2, 0.5 + days * 86_400, anomalous=False)]
    timeline = summary.run_summary(store(tmp_path, rows))["timeline"]
    starts = [datetime.fromisoformat(start) for start, _, _ in timeline["buckets"]]
    width = timedelta(seconds=timeline["bucket_s"])
    assert 1 <= len(starts) <= summary.TIMELINE_BUCKETS
    assert all(b - a == width for a, b in pairwise(starts))
    assert starts[0] <= rows[0]["timestamp"]
    assert rows[1]["timestamp"] < starts[-1] + width
    assert sum(odd for _, _, odd in timeline["buckets"]) == 1


def test_the_summary_of_nothing_is_zero(tmp_path: Path) -> None:
    numbers = summary.run_summary(tmp_path)
    assert (numbers["records"], numbers["first"], numbers["by_workload"]) == (0, None, [])
    assert numbers["timeline"] == {"bucket_s": 0, "buckets": []}


def test_a_workload_whose_name_looks_like_a_file_is_counted_once(tmp_path: Path) -> None:
    rows = pl.DataFrame([{"workload": "x.parquet", "lines": 1}], schema=RESULT_SCHEMA)
    folder = tmp_path / "date=2026-11-20" / "workload=x.parquet"
    folder.mkdir(parents=True)
    rows.write_parquet(folder / "b.parquet")
    assert summary.run_summary(tmp_path)["records"] == 1
