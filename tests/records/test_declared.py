"""Formats that a user declares: as data, and as the form of the time alone."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.errors import BadInput
from pipeline.records.declared import Declaration, by_time, choice, read_formats
from pipeline.records.schema import raw_frame
from pipeline.sources import formats
from pipeline.sources.framing import Framer

NOW = datetime(2026, 11, 23, tzinfo=UTC)
OWN = """
[fragments]
SUM = '[0-9]+ EUR'

[[format]]
name = "shop"
pattern = '''
  ^(?P<time>[0-9.]{10} {HMS}){FRACTION} <(?P<level>[A-Z])> (?P<service>[^ ]+) ~
  (?P<message> {SUM}.*)$'''
time = "%d.%m.%Y %H:%M:%S"
zone = "Europe/Berlin"
levels.error = ["X", "Y"]
unless = "Z$"
example = "20.11.2026 10:00:01,123 <X> cart ~ 17 EUR lost"
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("form", "line", "time", "level", "message"),
    [
        (
            "%d.%m.%Y %H:%M:%S,%f",
            "20.11.2026 10:00:01,25 ERROR full",
            "2026-11-20T10:00:01.25",
            "error",
            "full",
        ),
        ("%m/%d/%Y %I:%M:%S %p", "11/20/2026 10:00:01 PM | WARN | x", "2026-11-20T22:00:01", "warning", "x"),
        ("%b %e %H:%M", "Nov  9 10:00 [info] x", "2026-11-09T10:00:00", "info", "x"),
        ("%b %d %H:%M:%S", "Dec 31 10:00:00 x", "2025-12-31T10:00:00", None, "x"),
        ("%H:%M:%S.%f", "10:00:01.5 - fatal - y", "2026-11-22T10:00:01.5", "fatal", "y"),
        ("%d/%b/%Y:%H:%M:%S %z", "[20/Nov/2026:10:00:00 +0100] x", "2026-11-20T09:00:00", None, "x"),
        ("epoch", "1763539200.5 x", "2025-11-19T08:00:00.5", None, "x"),
        ("iso", "2026-11-20T10:00:00.5+01:00 x", "2026-11-20T09:00:00.5", None, "x"),
        ("%Y%m%dT%H%M%S", "20261120T100000: x", "2026-11-20T10:00:00", None, "x"),
    ],
)
def test_the_form_of_the_time_makes_a_format(
    form: str, line: str, time: str, level: str | None, message: str
) -> None:
    names = formats.detect([line] * 3, (by_time(form).pack(),))
    assert names[0] == by_time(form).pack()
    row = formats.parse(raw_frame([line]), names, arrived=NOW).row(0, named=True)
    assert row["timestamp"] == datetime.fromisoformat(time).replace(tzinfo=UTC) and row["timed"]
    assert (row["level"], row["message"]) == (level, message)


def test_a_form_is_detected_inside_a_wrapper_and_beside_a_known_format() -> None:
    own = by_time("%d.%m.%Y %H:%M:%S").pack()
    lines = [f"web-1  | 20.11.2026 10:00:0{n} ERROR a" for n in range(9)]
    lines += [f"db-1   | 2026-11-20T10:00:0{n}Z INFO b" for n in range(9)]
    names = formats.detect(lines, (own,))
    out = formats.parse(raw_frame(lines), names, arrived=NOW)
    assert "compose" in names and own in names
    assert out["timed"].all() and out["level"].to_list() == ["error"] * 9 + ["info"] * 9


def test_a_declaration_travels_as_the_name_of_its_format(own: Path) -> None:
    (found,) = read_formats(own)
    assert Declaration.unpack(found.pack()).pattern == found.pattern
    framer = Framer(choice=choice(files=[own]))
    frame = framer.feed([*[found.example] * 300, "  a second line"])
    out = formats.parse(frame, framer.formats, arrived=NOW)
    assert framer.formats == (found.pack(),)
    assert out.select("timestamp", "level", "service", "message").unique().rows() == [
        (datetime(2026, 11, 20, 9, 0, 1, 123000, tzinfo=UTC), "error", "cart", " 17 EUR lost")
    ]
    assert framer.flush()["raw"].to_list() == [f"{found.example}\n  a second line"]


def test_fragments_and_lines_of_a_pattern_are_put_together(own: Path) -> None:
    (found,) = read_formats(own)
    assert found.pattern.endswith("~(?P<message> [0-9]+ EUR.*)$") and "{HMS}" not in found.pattern
    lines = [found.example, found.example + "Z", found.example.replace("<X>", "<Q>")]
    out = formats.parse(raw_frame(lines), (found.pack(),), arrived=NOW)
    assert out["level"].to_list() == ["error", None, None]
    assert out["message"][1] == lines[1]


def test_a_forced_format_is_not_looked_for(own: Path) -> None:
    framer = Framer(choice=choice(forced="level"))
    framer.feed(["2026-11-20T10:00:00Z INFO a"] * 300)
    assert framer.formats == ("level",)
    assert choice(files=[own], forced="shop").forced == read_formats(own)[0].pack()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "missing required field `format`"),
        ("[[format]\n", "is no TOML file"),
        ("format = 3\n", "Expected `array`, got `int`"),
        ("[[format]]\nname = 'a'\n", "has no 'pattern'"),
        (
            "[[format]]\nname = 'a'\npattern = '(?P<message>.)'\ntimes = 'iso'\n",
            "unknown field `times`",
        ),
        ("[[format]]\nname = 'a'\npattern = 7\n", "Expected `str`, got `int` - at .*pattern"),
        ("[[format]]\nname = 'a'\npattern = 'x'\nwhole = 'yes'\n", "Expected `bool`, got `str`"),
        (
            "[[format]]\nname = 'a'\npattern = 'x'\nlevels = {error = 1}\n",
            "Expected `str . array`, got `int`",
        ),
        (
            "[fragments]\nA = 1\n[[format]]\nname = 'a'\npattern = 'x'\n",
            "Expected `str`, got `int` - at .*fragments",
        ),
        ("format = [1]\n", "Expected `object`, got `int`"),
    ],
)
def test_a_file_that_declares_nothing_sound_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=fault):
        read_formats(path)


@pytest.mark.parametrize("text", ["{", '{"name":"a"}', '{"name":1,"pattern":"x"}', "{}"])
def test_a_batch_with_a_damaged_declaration_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        formats.parse(raw_frame(["a"]), (text,), arrived=NOW)


@pytest.mark.parametrize("form", ["", "%d.%m.%Y", "%Q %H", "today"])
def test_a_form_without_an_hour_or_with_an_unknown_part_is_refused(form: str) -> None:
    with pytest.raises(BadInput, match="the time"):
        by_time(form)
