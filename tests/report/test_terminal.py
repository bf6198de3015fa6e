"""Findings in the terminal: readable at any width, and obeying nothing a log line says."""

import io
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from pipeline.report import terminal
from pipeline.report.findings import Finding, FindingSample, shown_of_each

START = datetime(2026, 11, 19, 9, 0, tzinfo=UTC)


def finding(number: int, **changes: Any) -> Finding:
    message = f"connection to ledger-{number} refused after 30000 ms"
    sample = FindingSample(
        source="var/log/app.log",
        line=100 + number,
        timestamp=START,
        message=message,
        raw=f"2026-11-19 09:00:00 ERROR {message}",
        words=("refused",),
    )
    base = Finding(
        workload="shop",
        template_id=number,
        template="connection to <*> refused after <NUM> ms",
        count=1_234,
        lines=1_234,
        first_seen=START,
        last_seen=START + timedelta(seconds=90),
        burst_end=START,
        level="error",
        score=0.9,
        reasons=("error-severity:error", "unlikely-tokens:refused"),
        samples=(sample,),
        patterns=1,
        incident=1,
    )
    return replace(base, **changes)


def placed(found: list[Finding]) -> list[Finding]:
    """With their places, as `findings.order` sets them."""
    places: Counter[int] = Counter()
    out = []
    for f in found:
        places[f.incident] += 1
        folded = places[f.incident] > shown_of_each(len({one.incident for one in found}))
        out.append(replace(f, place=places[f.incident], folded=folded))
    return out


def numbers(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "records": 900,
        "lines": 1_000,
        "anomalous": 3,
        "anomalous_lines": 4,
        "not_judged": 0,
        "not_judged_lines": 0,
        "untimed": 0,
        "untimed_lines": 0,
        "first": "2026-11-19T09:00:00Z",
        "last": "2026-11-19T10:00:00Z",
        "by_workload": [{}],
    }
    return base | changes


def printed(
    found: list[Finding], width: int = 80, limit: int | None = 20, colour: bool = False, **changes: Any
) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colour, color_system="standard" if colour else None
    )
    terminal.print_findings(found, numbers(**changes), console, limit=limit)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_fact_of_a_finding_is_printed_at_every_width(width: int) -> None:
    text = printed([finding(1)], width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    flat = " ".join(text.split())
    for fact in (
        "error",
        "1,234",
        "09:00:00",
        "09:01:30",
        "was unexpected after",
        "app.log:101",
        "<*>",
        "shop",
    ):
        assert fact in flat, fact


@pytest.mark.parametrize("width", [80, 200])
def test_no_clock_time_is_printed_where_none_was_found(width: int) -> None:
    untimed = replace(finding(1).samples[0], timed=False)
    found = finding(1, timed=False, incident=0, samples=(untimed,))
    text = printed([found], width=width, first=None, last=None, untimed=900, untimed_lines=900)
    assert text.startswith("1 finding in 1,000 lines") and "900 lines without a time" in text
    assert "Without a time" in text and "Incident" not in text and "app.log:101" in text
    assert "2026-11-19 09:00:00" not in text.replace("2026-11-19 09:00:00 ERROR", "")


def test_the_answer_comes_first_and_what_was_read_last() -> None:
    about = {"baseline": [], "seconds": 5.7}
    lines = printed(placed([finding(1), finding(2, incident=2)]), 120, run=about).splitlines()
    assert lines[0].startswith("2 incidents, 2 findings in 1,000 lines, the gravest first")
    assert "Incident 1" in lines[2] and "1.1 error" in lines[3]
    assert "connection to <*> refused" in lines[4]
    assert lines[-2].startswith("Read 1,000 lines of 1 workload · 2026-11-19 09:00:00 – 10:00:00 UTC · 5.7 s")
    assert lines[-1].startswith("No --baseline: rare and error-like lines are shown")


RANKED = {
    "by": "workload", "judged": 8, "normal": 9, "level": 0.01, "unusual": 5,
    "units": [
        {"unit": f"pod-{n}\x1b[2J", "p_value": 0.001, "unusual": True, "lines": 1_200, "flagged": 7,
         "reasons": [{"text": f"{n} patterns that none of 9 normal units has: `went\nout`"}]}
        for n in range(1, 6)
    ] + [{"unit": "well", "p_value": 1.0, "unusual": False, "lines": 9, "flagged": 0, "reasons": []}],
}  # fmt: skip


def test_unusual_units_stand_behind_the_findings_with_their_first_reason() -> None:
    lines = printed([finding(1)], 120, units=RANKED).splitlines()
    at = lines.index("Unusual compared with the baseline: 5 of 8 files")
    assert lines[at + 1].startswith("1. pod-1") and "p 0.001, 1,200 lines, 7 anomalous" in lines[at + 1]
    assert lines[at + 2] == "   1 patterns that none of 9 normal units has: `went␊out`"
    assert lines[at + 3].startswith("2. pod-2")
    assert "\x1b" not in "".join(lines) and not lines[at + 7]


def test_that_no_unit_is_unusual_is_said_where_enough_are_known() -> None:
    calm = RANKED | {"unusual": 0, "units": RANKED["units"][-1:]}
    assert "No file is unusual: 8 compared with the baseline" in printed([finding(1)], 120, units=calm)
    assert "nusual" not in printed([finding(1)], 120, units=calm | {"unusual": None})


def test_facts_of_the_whole_log_stand_behind_the_findings() -> None:
    facts = [{"text": "38 % of the 400 answers have a status of 500 or more in a\nb.log"}]
    lines = printed([finding(1)], 120, facts=facts).splitlines()
    at = lines.index("Of the whole log")
    assert lines[at + 1].endswith("in a␊b.log") and any("connection to" in row for row in lines[:at])
    assert printed([], 120, facts=facts).startswith("No line stands out in 1,000 lines")


def test_what_holds_for_a_whole_incident_is_said_once() -> None:
    new = ("new-template", "error-severity:error", "unlikely-tokens:refused")
    failed = ("new-template", "error-severity:failed")
    found = placed([finding(1, reasons=new), finding(2, reasons=failed)])
    text = printed(found)
    assert "2 findings, none seen before" in text
    assert "ever seen" not in text and "Logged as" not in text
    assert "Never seen before" in printed(placed([finding(1, reasons=new), finding(2)]))


def test_a_finding_says_how_long_after_the_headline_it_began() -> None:
    late = START + timedelta(seconds=7)
    text = printed(placed([finding(1), finding(2, first_seen=late, last_seen=late)]), width=120)
    assert "error · 1,234 times · 7 s after 1.1 · …/app.log:102" in text and text.count("after 1.1") == 1


@pytest.mark.parametrize(("level", "style"), [("info", "36"), ("warning", "1;33"), ("fatal", "1;31")])
def test_the_colour_of_a_level_is_that_of_the_level(level: str, style: str) -> None:
    text = printed([finding(1, level=level, reasons=("error-severity:failed",))], colour=True)
    assert f"\x1b[{style}m{level}" in text


@pytest.mark.parametrize("width", [80, 160])
def test_the_surprising_word_is_highlighted_in_the_sample(width: int) -> None:
    assert "\x1b[1;30;43mrefused\x1b[0m" in printed([finding(1)], width=width, colour=True)


@pytest.mark.parametrize("width", [80, 160])
def test_nothing_in_a_log_line_is_obeyed(width: int) -> None:
    evil = "[bold red]x[/] [link=file:///etc]y[/link] :boom: \x1b[2J\x1b]0;t\x07 \r\x00 \u202eend \x9b31m"
    sample = FindingSample(
        source=evil, line=1, timestamp=START, message=evil, raw=evil, words=("[bold", "\x1b[2J")
    )
    text = printed(
        [finding(1, template=evil, workload=evil, reasons=(f"unlikely-tokens:{evil}",), samples=(sample,))],
        width=width,
    )
    assert "[bold red]x[/]" in text
    assert ":boom:" in text
    assert not {c for c in text if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 or c == "\u202e"}
    assert "␛[2J" in "".join(text.split())


def test_a_long_line_is_cut_around_its_surprising_word() -> None:
    message = "padding " * 400 + "refused " + "padding " * 400
    sample = replace(finding(1).samples[0], message=message, raw=message[3_200 - 600 :], words=("refused",))
    text = printed([finding(1, template="t", reasons=(), samples=(sample,))], width=200)
    assert "refused" in text
    assert text.count("padding") < 40
    assert text.count("…") == 3  # one is of its folder


def test_a_stack_trace_is_one_line_long() -> None:
    raw = "Boom\n\tat a.b(C.java:1)\n\tat d.e(F.java:2)"
    sample = replace(finding(1).samples[0], message=raw, raw=raw)
    assert "Boom ⏎  at a.b(C.java:1) ⏎  at d.e(F.java:2)" in printed([finding(1, samples=(sample,))])


@pytest.mark.parametrize("width", [80, 160])
def test_a_line_break_in_a_name_does_not_break_the_line_of_the_place(width: int) -> None:
    sample = replace(finding(1).samples[0], source="app\nERROR forged.log", message="m", raw="m")
    text = printed([finding(1, samples=(sample,), workload="shop\nforged")], width=width)
    assert "app ⏎ ERROR forged.log:101" in text
    assert "shop ⏎ forged" in text


def test_a_word_is_no_level_where_the_line_has_none() -> None:
    assert "Says “error”" in " ".join(printed([finding(1, level=None)]).split())
    assert "Logged as error" in printed([finding(1, level="fatal")])


def test_it_says_how_many_more_findings_there_are() -> None:
    found = placed([finding(n) for n in range(1, 26)])
    assert "and 13 more that followed in shop: --all or the report shows them" in printed(found)
    assert "and 24 more that followed in shop" in printed(found, limit=1)
    assert "more" not in printed(found, limit=None)
    several = placed([finding(n, incident=n) for n in range(1, 26)])
    assert "5 more incidents are not shown here; --all or the report shows them" in printed(several)


@pytest.mark.parametrize("width", [80, 160])
def test_findings_stand_under_their_incident_with_their_place_in_the_whole(width: int) -> None:
    found = placed([finding(1), finding(2, incident=2, workload="bank"), finding(3), finding(4, incident=2)])
    text = printed(found, width=width, limit=3)
    assert "2 incidents, 4 findings in 1,000 lines" in text
    assert "Incident 1 · 2026-11-19 09:00:00 UTC · shop · 2 findings" in text
    assert "Incident 2 · 2026-11-19 09:00:00 UTC · bank, shop · 2 findings" in text
    places = [text.index(word) for word in ("Incident 1", "ledger-1", "ledger-3", "Incident 2", "ledger-2")]
    assert places == sorted(places)
    assert "ledger-4" not in text
    for label in ("1.1", "1.2", "2.1"):
        assert label in text


def test_it_says_plainly_when_there_is_nothing_to_read() -> None:
    assert "Nothing unusual in 1,000 lines" in printed([])
    assert "they were not judged by the model" in " ".join(printed([], not_judged=900).split())
    assert printed([], records=0, lines=0, first=None, last=None) == "No lines were read\n"


def test_a_terminal_that_cannot_show_a_character_gets_its_escape() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    sample = replace(finding(1).samples[0], message="caf\u00e9 \U0001f525", raw="caf\u00e9 \U0001f525")
    for width in (80, 160):
        terminal.print_findings(
            [finding(1, samples=(sample,))] * 2, numbers(), Console(file=out, width=width), limit=1
        )
    out.flush()
    assert b"caf\\xe9 \\U0001f525" in raw.getvalue()
