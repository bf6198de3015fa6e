"""Zones as programs write them, levels at the beginning of a message, and what is said of a guess."""

from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from pipeline.cli import main
from pipeline.records.schema import raw_frame
from pipeline.sources.formats import detect, parse
from pipeline.sources.times import read_times

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
NOON_IN = {  # 13:17:10 there, in UTC
    "EDT": "17:17:10", "CEST": "11:17:10", "MSK": "10:17:10", "JST": "04:17:10", "BRT": "16:17:10",
    "-04": "17:17:10", "-0400": "17:17:10", "-04:00": "17:17:10", "+0530": "07:47:10", "UTC-4": "17:17:10",
    "GMT+02:00": "11:17:10", "UTC": "13:17:10", "Europe/Berlin": "11:17:10", "America/New_York": "17:17:10",
}  # fmt: skip
PLACES = [
    "2020-10-07 13:17:10 {} INFO audit event",
    "2020-10-07T13:17:10.000 {} INFO audit event",
    "[2020-10-07 13:17:10 {}] INFO audit event",
    "2020-10-07 13:17:10 [{}] INFO audit event",
    "2020/10/07 13:17:10 {} INFO audit event",
    "Wed Oct  7 13:17:10 2020 {} INFO audit event",
    "Wed, 07 Oct 2020 13:17:10 {} INFO audit event",
    "10/27/2020 01:17:10 PM {} INFO audit event",
    "07-Oct-2020 13:17:10 {} INFO audit event",
    "Oct 7, 2020 1:17:10 PM {} - INFO - audit event",
    "20201007131710 {} INFO audit event",
    "app 2020-10-07 13:17:10 {} INFO audit event",
]


def read(lines: list[str], zone: str = "UTC") -> pl.DataFrame:
    return parse(raw_frame(lines), detect(lines), arrived=NOW, zone=zone)


@pytest.mark.parametrize("place", PLACES)
def test_a_written_zone_decides_the_moment_wherever_the_source_is(place: str) -> None:
    for zone, noon in NOON_IN.items():
        winter = zone == "Europe/Berlin" and place.startswith("10/27")
        time = "12:17:10" if winter else noon
        out = read([place.format(zone)] * 3, zone="Asia/Tokyo").row(0, named=True)
        assert out["timed"] and f"{out['timestamp']:%H:%M:%S}" == time, zone
        assert out["level"] == "info" and "audit event" in out["message"], zone


def test_words_that_only_look_like_a_zone_belong_to_the_message() -> None:
    words = ("GET /a", "POST /a", "EXIT now", "BOT joined", "Shop/Cart opened", "RESET by peer", "+1 more")
    for word in words:
        row = read([f"2020-10-07 13:17:10 {word}"] * 3).row(0, named=True)
        assert row["message"] == word and f"{row['timestamp']:%H:%M}" == "13:17"


@pytest.mark.parametrize(
    ("word", "zone", "hour"),
    [
        ("IST", "UTC", 7), ("IST", "Asia/Kolkata", 7), ("IST", "Asia/Jerusalem", 10), ("CST", "UTC", 19),
        ("CST", "Asia/Shanghai", 5), ("CST", "Europe/Berlin", 19), ("EST", "Australia/Sydney", 2),
    ],
)  # fmt: skip
def test_an_abbreviation_of_several_zones_is_that_of_the_source_or_else_the_likeliest(
    word: str, zone: str, hour: int
) -> None:
    assert read([f"2020-10-07 13:17:10 {word} INFO x"] * 3, zone)["timestamp"][0].hour == hour


def test_lines_with_and_without_a_named_zone_stand_side_by_side() -> None:
    lines = ["[07-Oct-2020 13:17:10 Europe/Berlin] PHP Warning:  x", "[07-Oct-2020 13:17:10] NOTICE: y"]
    assert [time.hour for time in read(lines)["timestamp"]] == [11, 13]


def test_values_are_read_with_their_zone() -> None:
    values = [
        "2020-10-07 13:17:10.5 EDT",
        "2020-10-07T13:17:10-04",
        "2020-10-07T13:17:10+02:00[Europe/Paris]",
    ]
    assert [time.hour for time in read_times(pl.Series(values), arrived=NOW, zone="UTC")] == [17, 17, 11]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("ERROR: no disk", "error"), ("error: no disk", "error"), ("[error] no disk", "error"),
        ("<Warning> low", "warning"), ("(WARN) low", "warning"), ("Fatal: gone", "fatal"),
        ("ERROR no disk", "error"), ("E1124 09:00:08.120000    5 a.go:5] bad", "error"),
        ('time="2026-11-24T09:00:08Z" level=error msg="x"', "error"), ("a | b | WARN | low", "warning"),
        ("[main] [ERROR] x", "error"), ("[pool-1] DEBUG x", "debug"), ('{"a":1,"level":"error"}', "error"),
        ("warning/Plugin: late", "warning"), ("error while reading", None), ("information desk", None),
        ("connection error: refused", None), ("Errors: 0", None), ("a level=high tide", None),
    ],
)  # fmt: skip
def test_a_level_at_the_beginning_of_the_text_counts_where_the_header_has_none(
    text: str, level: str | None
) -> None:
    for head in ("Nov 24 09:00:08 node1 app[812]: ", "2026-11-24T09:00:08+00:00 node1 app[812]: "):
        out = read([head + text] * 3).row(0, named=True)
        assert out["level"] == level and out["service"] == "app" and out["message"] == text


def test_the_level_of_a_text_is_nearer_than_the_priority_before_it() -> None:
    lines = ["<14>Nov 24 09:00:08 node1 app: error: x", "<14>Nov 24 09:00:09 node1 app: x"]
    assert read(lines)["level"].to_list() == ["error", "info"]


def test_small_words_without_a_mark_are_levels_where_most_lines_begin_with_one() -> None:
    lines = [f"2026-11-24 09:00:{n:02d} {'error' if n == 9 else 'info'} order {n}" for n in range(10)]
    assert read(lines)["level"].to_list() == ["info"] * 9 + ["error"]
    prose = [f"2026-11-24 09:00:{n:02d} order {n}" for n in range(9)] + [
        "2026-11-24 09:00:09 error while reading"
    ]
    assert read(prose)["level"].null_count() == 10


def test_a_zone_of_several_is_one_note_and_is_shown_by_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"2026-11-24 09:00:{n:02d} CST INFO order {n}\n" for n in range(20)))
    assert main(["formats", str(path)]) == 0
    assert "CST read as UTC-06:00" in capsys.readouterr().out
    assert main(["formats", str(path), "--time-zone", "Asia/Shanghai"]) == 0
    assert "CST read as" not in capsys.readouterr().out
