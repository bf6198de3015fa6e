"""What is said of the times of an input: none, no year, no date, no zone."""

import io
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench._log_files import read_file
from pipeline.commands.recognition import TimeNotes, times_found
from pipeline.commands.run.packs import Pack, packs
from pipeline.records.schema import raw_frame
from pipeline.sources import formats
from pipeline.sources.stdin import Peeked, read_stream

NOW = datetime(2026, 1, 20, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "years", "dates", "zones"),
    [
        ("2026-01-19T10:00:00Z INFO a", set(), False, False),
        ("2026-01-19 10:00:00 INFO a", set(), False, True),
        ('{"time":"2026-01-19T10:00:00","level":"info","msg":"a"}', set(), False, True),
        ('{"time":1768816800,"level":"info","msg":"a"}', set(), False, False),
        ("Nov 20 10:00:00 box sshd[7]: a", {2025}, False, True),
        ("Jan 19 10:00:00 box sshd[7]: a", {2026}, False, True),
        ("I0119 10:00:00.000000       1 a.go:5] a", {2026}, False, True),
        ("10:00:00.123 [main] INFO a.B - a", set(), True, True),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Etc/GMT-5"])
def test_guessed_parts_of_a_time_are_told_from_written_ones(
    line: str, years: set[int], dates: bool, zones: bool, zone: str
) -> None:
    found = times_found(raw_frame([line] * 3), formats.detect([line] * 3), arrived=NOW, zone=zone)
    assert (found.records, found.timed) == (3, 3)
    assert (set(found.years), found.dates, found.zones) == (years, dates, zones)


def test_lines_without_a_time_are_not_timed() -> None:
    found = times_found(raw_frame(["a b", "c d"]), (), arrived=NOW, zone="UTC")
    assert (found.timed, len(found.years), found.dates, found.zones) == (0, 0, False, False)


def noted(tmp_path: Path, zone: str = "UTC", **texts: str) -> list[str]:
    notes = TimeNotes(zone=zone)
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        for chunk in read_file(path, max_records=2):
            notes.see(name, chunk)
    return notes.notes()


def test_files_of_one_kind_share_a_sentence(tmp_path: Path) -> None:
    untimed = dict.fromkeys("abcd", "went well\nwent wrong\n")
    (note,) = noted(tmp_path, **untimed, x="2026-01-19T10:00:00Z INFO a\n")
    assert note.startswith("4 files (a, b, c, ...): no time recognised") and note.endswith(
        "`logweir formats a`"
    )


def test_a_table_without_names_of_its_columns_is_told(tmp_path: Path) -> None:
    rows = "".join(f"2026-11-20T10:00:0{n}Z;h{n};ERROR;{n};no stock of {n}\n" for n in range(6))
    headed = f"time;host;level;n;message\n{rows}"
    (note,) = noted(tmp_path, bare=rows, headed=headed)
    assert note.startswith("bare: read as a table by the values of its columns")


def test_standard_input_without_times_is_told_a_command_that_works() -> None:
    notes = TimeNotes(zone="UTC", of_stdin=True)
    for chunk in read_stream(Peeked(io.BytesIO(b"went well\nwent wrong\n")), max_records=2, max_bytes=100):
        notes.see("stdin", chunk)
    (note,) = notes.notes()
    assert note.startswith("stdin: no time recognised") and note.endswith(
        "`logweir formats FILE` for a file of them"
    )


def test_guessed_years_and_zones_are_named(tmp_path: Path) -> None:
    today = datetime.now(tz=UTC)
    other = "Jan 02" if today.month > 6 else "Aug 02"
    lines = [f"{today:%b %d} 00:00:01 box a: x"] * 3 + [f"{other} 10:00:00 box a: x"] * 2
    years, zones = noted(tmp_path, a="\n".join(lines) + "\n")
    assert years.startswith("a: times have no year; ") and str(today.year) in years
    assert zones == "a: times have no zone and are read as UTC; --time-zone names another"
    assert noted(tmp_path, zone="Europe/Berlin", a="\n".join(lines) + "\n") == [years]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_the_files_of_a_pack_are_told_apart_as_those_read_alone(tmp_path: Path, zone: str) -> None:
    kinds = ("Jan 19 10:00:00 box a: x\n", "Aug 02 10:00:00 box a: x\n", "2026-01-19 10:00:00 INFO a\n")
    paths = [tmp_path / f"{n:02d}.log" for n in range(60)]
    for n, path in enumerate(paths):
        path.write_text(kinds[n % 3] * (n % 2 + 1))
    together, alone = TimeNotes(zone=zone), TimeNotes(zone=zone)
    for pack in packs(paths, group=lambda _: ""):
        assert isinstance(pack, Pack)
        together.see_all(pack.records, pack.formats)
    for path in paths:
        (chunk,) = read_file(path)
        alone.see(str(path), chunk)
    assert together.found == alone.found
    assert sorted(together.notes()) == sorted(alone.notes())


def test_complete_times_need_no_note(tmp_path: Path) -> None:
    assert noted(tmp_path, a="2026-01-19T10:00:00Z INFO a\n", empty="") == []


def test_of_many_files_that_are_alike_each_is_told_by_its_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parses = []
    parse = formats.parse
    monkeypatch.setattr(formats, "parse", lambda *args, **more: parses.append(1) or parse(*args, **more))
    texts = {f"f{n}": f"2026-11-{n:02d} 10:00:00 INFO job {n}\n" for n in range(10, 20)}
    (zones,) = noted(tmp_path, **texts)
    assert zones.startswith("10 files") and "no zone" in zones
    assert len(parses) == 3 + 9, "the first one is asked three times, the others once"
    broken = {"f98": "2026-13-98 10:00:00 INFO job 98\n", "f99": "2026-11-20T10:00:00Z INFO job 99\n"}
    notes = noted(tmp_path, **texts, **broken)
    assert any(note.startswith("f98: no time recognised") for note in notes)
    assert any(note.startswith("10 files") and "no zone" in note for note in notes)
