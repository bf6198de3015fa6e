"""`logweir formats`: the list, a file's formats, the check of declarations."""

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.commands import formats as verb
from pipeline.records.declared import read_formats
from pipeline.sources.formats_text import BY_NAME, NAMES

SHIPPED = Path(__file__).parents[2] / "config" / "formats.toml"
CHECKS = [
    ("a", "(?P<time>[0-9:]+ (?P<message>.*", "iso", "x", "does not compile: unclosed group"),
    ("iso", "^==(?P<message>.*)$", "iso", "==x", "another format has this name"),
    ("A", "^==(?P<message>.*)$", "iso", "==x", "lower-case"),
    ("a", "^==(?P<when>.)(?P<message>.*)$", "iso", "==x", "the group 'when' is unknown"),
    ("a", "^==(?P<level>.)", "iso", "==x", "no group .*message"),
    ("a", "^==((?P<message>.*))?$", "iso", "==x", "inside of another one"),
    ("a", "^==(?P<message>.*)$", "iso", "", "there is no example"),
    ("a", "^==(?P<message>.*)$", "iso", "x", "does not match its example"),
    ("a", "(?P<message>.*)$", "iso", "x", "also matches the example of"),
    ("a", "^==(?P<time>.*?) (?P<message>.*)$", "%H:%M", "==now x", "cannot be read as '%H:%M'"),
    ("a", "^==(?P<time>.*?) (?P<message>.*)$", "%Q", "==now x", "unknown part '%Q'"),
]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The declaration that the head of the shipped file shows."""
    lines = SHIPPED.read_text().split("# Formats of your own")[0].splitlines()
    path = tmp_path / "own.toml"
    path.write_text("\n".join(line[4:] for line in lines if line.startswith("#   ")))
    return path


def test_the_list_names_every_format(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(NAMES)
    assert main(["formats", "--formats", str(own)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(NAMES) + 1 and shown[0].startswith("shop ")
    assert not any(c in "".join(shown) for c in "\x1b\r")


def test_a_file_is_described_by_shares_guesses_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    syslog = [f"Jan 02 10:00:0{n} box sshd[7]: failed \x1b[2J" for n in range(6)]
    free = ["no header"]
    path.write_text("\n".join([*free, *syslog]) + "\n")
    assert main(["formats", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "formats  syslog 85.7%" in shown and "no year, guessed 20" in shown and "no zone" in shown
    assert "1: no header" in shown and "| box | sshd | failed" in shown and "\x1b" not in shown
    assert main(["formats", str(path), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["records"], facts["times"]["timed"], facts["formats"]) == (7, 6, {"syslog": 6 / 7})
    assert [row["line"] for row in facts["unrecognised"]] == [1]
    assert [row["service"] for row in facts["parsed"]] == ["sshd"] * 3


def test_the_members_of_an_archive_are_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "logs.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, line in (
            ("a.log", BY_NAME["syslog"].example),
            ("b.log", BY_NAME["klog"].example),
            ("c.bin", "\0" * 90),
        ):
            data = f"{line}\n".encode() * 3_000
            (info := tarfile.TarInfo(name)).size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert main(["formats", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(facts["file"], list(facts["formats"]), facts["records"]) for facts in found] == [
        (f"{path}:a.log", ["syslog"], verb.LOOKED_AT),
        (f"{path}:b.log", ["klog"], verb.LOOKED_AT),
    ]
    monkeypatch.setattr(verb, "MEMBERS", 1)
    assert main(["formats", str(path)]) == 0
    said = capsys.readouterr().out
    assert "a.log: the first 2,000 records" in said and "b.log" not in said
    assert "has more than 1 members, the rest is not looked at" in said


def test_a_table_is_described_by_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    rows = [f"2026-11-20T10:00:{n}Z,WARN,cart,sold {n}" for n in range(10, 30)]
    path.write_text("\n".join(["time,level,service,message", *rows]) + "\n")
    assert main(["formats", str(path), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert {row["level"] for row in facts["parsed"]} == {"warning"} and facts["times"]["timed"] >= 20
    assert [name.split(":")[0] for name in facts["formats"]] == ["csv"]


def test_a_file_without_times_shows_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a.log", "one\ntwo\n"), ("empty.log", "")):
        (tmp_path / name).write_text(text)
        assert main(["formats", str(tmp_path / name)]) == 0
        shown = capsys.readouterr().out
        assert "none of the known ones" in shown and "read as" not in shown


def test_wrong_arguments_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text("x\n")
    for wrong in (["--format", "nope"], ["--time", "%d"], ["--formats", str(tmp_path / "none")]):
        assert main(["formats", str(tmp_path / "a.log"), *wrong]) == 2
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == 1 and not said.out


def test_every_shipped_format_reads_its_example_as_it_expects(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(form.example for form in BY_NAME.values())
    assert main(["formats", "--check"]) == 0
    said = capsys.readouterr().out
    assert f"{len(NAMES)} formats, nothing is wrong" in said
    assert main(["formats", "--check", str(SHIPPED)]) == 0
    assert capsys.readouterr().out == said


def test_the_declaration_in_the_head_of_the_shipped_file_is_sound(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["formats", "--check", str(own)]) == 0
    assert "1 format, nothing is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("time", "2026-11-20T10:00:01Z", "the time of its example is read as 2026-11-20 09:00:01"),
        ("time", "at ten", "'at ten' that it expects is none"),
        ("level", "warning", "the level of its example is read as 'error'"),
        ("message", "stock", "the message of its example is read as 'no stock of 17'"),
        ("pid", "7", "the keys of expect are time, level"),
    ],
)
def test_an_example_that_is_read_otherwise_than_expected_is_named(
    own: Path, capsys: pytest.CaptureFixture[str], key: str, value: str, fault: str
) -> None:
    text = own.read_text()
    own.write_text(text[: text.index("expect")] + f'expect.{key} = "{value}"')
    assert main(["formats", "--check", str(own)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert fault in said


@pytest.mark.parametrize("case", CHECKS)
def test_a_faulty_declaration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: tuple[str, ...]
) -> None:
    *values, fault = case
    path = tmp_path / "own.toml"
    entry = zip(("name", "pattern", "time", "example"), values, strict=True)
    path.write_text("\n".join(["[[format]]", *(f"{key} = '{value}'" for key, value in entry)]))
    assert main(["formats", "--check", str(path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(fault, said)
    assert len(verb.check_declarations(read_formats(path) * 2)) > 1  # the same name twice
