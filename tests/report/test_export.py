"""Findings as JSON and CSV, and when they make a run fail."""

import csv
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import BadInput, SinkUnavailable
from pipeline.report.export import check_csv, facts, fails, write_csv
from pipeline.report.findings import Finding, FindingSample
from pipeline.report.fragments import silencing

NOW = datetime(2026, 11, 20, 10, tzinfo=UTC)


def finding(**changes: Any) -> Finding:
    sample = FindingSample(
        source="app.log", line=7, timestamp=NOW, message="disk full", raw="10:00 disk full", before=("a",),
        after=("b", "c"),
    )  # fmt: skip
    known: dict[str, Any] = {
        "workload": "app", "template_id": 4, "template": "disk <*>", "count": 2, "lines": 3,
        "first_seen": NOW, "last_seen": NOW, "burst_end": NOW, "level": "error", "score": 0.98765,
        "reasons": ("error-severity:error",), "samples": (sample,), "patterns": 1, "incident": 1, "place": 2,
    }  # fmt: skip
    return Finding(**(known | changes))


def test_the_facts_of_a_finding_are_json_with_its_neighbours() -> None:
    shown = json.loads(json.dumps(facts(finding())))
    assert (shown["label"], shown["incident"], shown["severity"], shown["score"]) == (
        "1.2",
        1,
        "error",
        0.9877,
    )
    assert shown["first_seen"] == "2026-11-20T10:00:00+00:00"
    assert shown["why"]
    (sample,) = shown["samples"]
    assert (sample["before"], sample["raw"], sample["after"]) == (["a"], "10:00 disk full", ["b", "c"])


def test_a_finding_without_a_time_has_none() -> None:
    shown = facts(finding(timed=False, incident=0))
    assert (shown["first_seen"], shown["last_seen"], shown["incident"]) == (None, None, None)


def test_csv_has_a_row_for_each_finding_and_no_formula(tmp_path: Path) -> None:
    path = tmp_path / "findings.csv"
    write_csv(path, [finding(), finding(template='=HYPERLINK("http://x")\n\x1b[2J', samples=())])
    first, second = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    assert (first["template"], first["line"], first["sample"]) == ("disk <*>", "7", "10:00 disk full")
    assert second["template"].startswith("'=HYPERLINK") and "\x1b" not in second["template"]
    check_csv(path)  # findings may take the place of findings


def test_csv_replaces_nothing_else(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("a line of a log\n")
    for place, why in ((log, "holds no findings"), (tmp_path, "is not a file")):
        with pytest.raises(BadInput, match=why):
            check_csv(place)
    with pytest.raises(SinkUnavailable, match="cannot be written"):
        write_csv(tmp_path / "a" / "b.csv", [])
    assert log.read_text() == "a line of a log\n"


@pytest.mark.parametrize(
    ("level", "reasons", "failing"),
    [
        ("fatal", (), {"fatal", "error", "any"}),
        ("critical", (), {"fatal", "error", "any"}),
        ("error", (), {"error", "any"}),
        (None, ("error-severity:failed",), {"error", "any"}),
        ("warning", (), {"any"}),
        (None, ("new-template",), {"any"}),
    ],
)
def test_fail_on_counts_the_limit_and_what_is_graver(
    level: str | None, reasons: tuple[str, ...], failing: set[str]
) -> None:
    found = [finding(level=level, reasons=reasons)]
    assert {limit for limit in ("fatal", "error", "any") if fails(found, limit)} == failing
    assert not fails(found, None)
    assert not fails([], "any")


def test_the_command_that_silences_is_safe_to_paste() -> None:
    assert silencing("disk <*> is full") == r"printf '%s\n' 'disk <*> is full' >> normal.txt"
    assert silencing("it's $(rm -rf /)") == r"""printf '%s\n' 'it'"'"'s $(rm -rf /)' >> normal.txt"""
