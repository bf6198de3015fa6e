"""The recorded samples are what their README and labels say, and the recorder's cutting and labelling
hold."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zstandard

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "samples"
LABELS: dict[str, Any] = json.loads((SAMPLES / "labels.json").read_text(encoding="utf-8"))
FAULTS: list[dict[str, Any]] = LABELS["faults"]


@pytest.fixture(scope="module")
def labelling() -> Iterator[ModuleType]:
    """`scripts/recorder/labelling.py`, which lies outside the package."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("recorder.labelling")
    finally:
        sys.path.remove(str(ROOT / "scripts"))
        for name in [name for name in sys.modules if name == "recorder" or name.startswith("recorder.")]:
            del sys.modules[name]


@cache
def lines_of(name: str) -> list[str]:
    """Physical lines of `baseline/x.log` or `observed/x.log`; fails on text that is not UTF-8."""
    packed = (SAMPLES / f"{name}.zst").read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        text = reader.read().decode("utf-8")
    assert text.endswith("\n"), f"{name} ends inside a line"
    return text.split("\n")[:-1]


def names(phase: str) -> list[str]:
    return sorted(f"{phase}/{path.name.removesuffix('.zst')}" for path in (SAMPLES / phase).glob("*.zst"))


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def stamps(lines: list[str], log: str, labelling: ModuleType) -> list[float]:
    return [record.time for record in labelling.records(log, lines) if record.time]


def test_the_samples_hold_20_to_100_thousand_lines_in_less_than_4_mb() -> None:
    counts = {name: len(lines_of(name)) for name in names("baseline") + names("observed")}
    assert 20_000 <= sum(counts.values()) <= 100_000
    files = [path for path in SAMPLES.rglob("*") if path.is_file()]
    services = {path for path in files if path.is_relative_to(SAMPLES / "services")}
    assert sum(path.stat().st_size for path in files if path not in services) < 4_000_000
    assert sum(path.stat().st_size for path in services) < 15_000_000
    assert counts == LABELS["lines"]


def test_each_log_was_recorded_in_both_phases() -> None:
    assert [n.partition("/")[2] for n in names("baseline")] == [
        n.partition("/")[2] for n in names("observed")
    ]
    assert len(names("baseline")) >= 6
    assert all(lines_of(name) for name in names("baseline") + names("observed"))


def test_there_are_fewer_than_ten_faults_and_their_windows_are_in_order_and_disjoint() -> None:
    assert 5 <= len(FAULTS) < 10
    assert len({fault["id"] for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert instant(fault["start"]) < instant(fault["repaired"]) <= instant(fault["end"])
    for before, after in itertools.pairwise(FAULTS):
        quiet = instant(after["start"]) - instant(before["end"])
        assert quiet.total_seconds() >= 30, f"{before['id']} and {after['id']} lie {quiet} apart"


@pytest.mark.parametrize("fault", FAULTS, ids=[fault["id"] for fault in FAULTS])
def test_a_fault_has_labels_and_each_points_to_the_line_it_was_made_from(
    fault: dict[str, Any], labelling: ModuleType
) -> None:
    assert fault["lines"]
    for label in fault["lines"]:
        line = lines_of(label["file"])[label["line"] - 1]
        assert labelling.line_hash(line) == label["sha256_12"], f"{label['file']}:{label['line']}"


def test_no_line_is_labelled_twice() -> None:
    places = [(label["file"], label["line"]) for fault in FAULTS for label in fault["lines"]]
    assert len(places) == len(set(places))
    assert {file for file, _ in places} <= set(names("observed"))


@pytest.mark.long
@pytest.mark.parametrize("name", names("observed"))
def test_labelled_lines_carry_a_time_within_their_fault(name: str, labelling: ModuleType) -> None:
    log = name.partition("/")[2]
    times = {number: r.time for r in labelling.records(log, lines_of(name)) for number in r.numbers}
    for fault in FAULTS:
        start, end = instant(fault["start"]).timestamp(), instant(fault["end"]).timestamp()
        for label in (label for label in fault["lines"] if label["file"] == name):
            # nginx writes whole seconds
            assert start - 1.0 <= times[label["line"]] <= end, f"{name}:{label['line']} of {fault['id']}"


@pytest.mark.long
@pytest.mark.parametrize("name", names("baseline"))
def test_the_baseline_ends_before_the_first_fault(name: str, labelling: ModuleType) -> None:
    log = name.partition("/")[2]
    first = instant(FAULTS[0]["start"]).timestamp()
    assert max(stamps(lines_of(name), log, labelling)) < first - 5


@pytest.mark.long
@pytest.mark.parametrize("log", [name.partition("/")[2] for name in names("observed")])
def test_a_labelled_record_is_a_5xx_answer_or_has_a_shape_that_the_baseline_never_shows(
    log: str, labelling: ModuleType
) -> None:
    known = {record.shape for record in labelling.records(log, lines_of(f"baseline/{log}"))}
    labelled = {x["line"] for f in FAULTS for x in f["lines"] if x["file"] == f"observed/{log}"}
    failed = re.compile(r'(" 5\d\d \d+ "| -> 5\d\d in )')
    assert not any(failed.search(line) for line in lines_of(f"baseline/{log}"))
    for record in labelling.records(log, lines_of(f"observed/{log}")):
        if record.numbers[0] in labelled:
            assert failed.search(record.text) or record.shape not in known, record.text[:200]


def test_the_logs_name_no_place_but_the_recorders_own() -> None:
    allowed = re.compile(r"/(tmp/shop|usr/lib/python3|usr/lib/postgresql)")
    foreign = re.compile(r"(?<![\w.])/(home|root|work|opt|srv|var|usr|tmp)/[\w./-]+")
    for name in names("baseline") + names("observed"):
        for line in lines_of(name):
            for match in foreign.finditer(line):
                assert allowed.match(match[0]), f"{name}: {line[:200]}"


def test_the_readme_tells_the_times_and_counts_of_these_very_samples() -> None:
    text = (SAMPLES / "README.md").read_text(encoding="utf-8")
    for fault in FAULTS:
        times = [fault[key][11:19] for key in ("start", "repaired", "end")]
        row = " | ".join([f"`{fault['id']}`", *times, str(len(fault["lines"]))])
        assert f"| {row} |" in text
    for name in names("baseline"):
        log = name.partition("/")[2]
        counts = f"| {LABELS['lines'][name]:,} | {LABELS['lines'][f'observed/{log}']:,} |"
        assert any(line.startswith(f"| `{log}`") and line.endswith(counts) for line in text.splitlines())


def test_a_cut_falls_behind_the_line_that_holds_the_offset(labelling: ModuleType) -> None:
    assert labelling.cut(b"one\ntwo\nthree\n", 4, 14) == (b"one\n", b"two\nthree\n")
    assert labelling.cut(b"one\ntwo\nthree\n", 5, 14) == (b"one\ntwo\n", b"three\n")
    assert labelling.cut(b"one\ntwo\nunfini", 0, 14) == (b"", b"one\ntwo\n")
    assert labelling.cut(b"one\ntwo\nthree\n", 4, 10) == (b"one\n", b"two\n")


def test_a_traceback_and_the_companions_of_a_database_error_are_one_record(labelling: ModuleType) -> None:
    shop = [
        "2026-01-02 03:04:05,006 ERROR shop.web: failed",
        "Traceback (most recent call last):",
        "  File x",
    ]
    (record,) = labelling.records("shop.log", shop)
    assert record.numbers == [1, 2, 3]
    stamp = "2026-01-02 03:04:05.006 UTC"
    database = [
        f"{stamp} [7] shop@shop ERROR:  canceling statement due to statement timeout",
        f"{stamp} [8] LOG:  checkpoint starting: time",
        f"{stamp} [7] shop@shop STATEMENT:  SELECT 1",
    ]
    first, second = labelling.records("postgres.log", database)
    assert (first.numbers, second.numbers) == ([1, 3], [2])
    assert first.time == datetime(2026, 1, 2, 3, 4, 5, 6000, UTC).timestamp()


def test_a_record_belongs_to_a_fault_only_when_new_in_its_window_and_matched_by_its_rule(
    labelling: ModuleType,
) -> None:
    faults = sys.modules["recorder.faults"]
    fault = next(f for f in faults.FAULTS if f.id == "connection-limit")
    begin = datetime(2026, 1, 2, 3, 4, 0, tzinfo=UTC).timestamp()
    window = faults.Window(fault=fault, start=begin, repaired=begin + 10, end=begin + 16)

    def line(second: int, text: str) -> str:
        return f"2026-01-02 03:04:{second:02d}.000 UTC [{second}] {text}"

    baseline = [line(0, "LOG:  checkpoint starting: time")]
    observed = [
        line(5, "FATAL:  sorry, too many clients already"),  # all three: labelled
        line(6, "LOG:  checkpoint starting: time"),  # known shape
        line(7, "LOG:  something else that is new"),  # no rule
        line(40, "FATAL:  sorry, too many clients already"),  # outside the window
    ]
    found = labelling.attribute("postgres.log", baseline, observed, [window])
    assert [r.numbers for r in found.caused["connection-limit"]] == [[1]]
    assert [r.numbers for r in found.unexplained] == [[3], [4]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "path", "expected"),
    [(["--minutes", "1"], None, "--minutes"), ([], "/nowhere", "apt-get install")],
    ids=["too short", "no programs"],
)
def test_the_recorder_refuses_in_one_sentence_with_the_remedy(
    arguments: list[str], path: str | None, expected: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "record_samples", *arguments, "--out", tmp_path],
        env=os.environ | ({} if path is None else {"PATH": path}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    assert not list(tmp_path.iterdir())
