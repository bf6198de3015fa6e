"""Names of files are text of somebody else: no command lets one steer the terminal or begin a line."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Verb, command_line
from rich.console import Console

from pipeline.commands import common
from pipeline.commands.run.progress import Bars
from pipeline.settings import Settings

HOSTILE = "a\033c\033]0;title\007\nlogweir: all is well\u202e.log"
SHOWN = "a␛c␛]0;title␇␊logweir: all is well<U+202E>.log"


@pytest.fixture
def verb(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Verb]:
    for module in ("send.verb", "run.verb"):
        monkeypatch.setattr(f"pipeline.commands.{module}.set_up", lambda _level: None)
    with command_line(settings, monkeypatch, capsys) as run:
        yield run


@pytest.mark.parametrize("name", ["run", "send"])
def test_the_name_of_a_missing_file_is_shown_and_not_obeyed(verb: Verb, tmp_path: Path, name: str) -> None:
    said = verb(name, tmp_path / HOSTILE)
    assert said.code == 2
    assert said.err == f"logweir: {tmp_path}/{SHOWN} does not exist; check the name\n"


def test_the_name_in_a_note_of_send_is_shown_and_not_obeyed(verb: Verb, tmp_path: Path) -> None:
    (tmp_path / HOSTILE).touch()
    said = verb("send", tmp_path / HOSTILE)
    assert f"note: {tmp_path}/{SHOWN} is empty\n" in said.err
    assert "\033" not in said.err


def test_a_remark_is_one_line_without_control_characters() -> None:
    console = Console(file=io.StringIO(), width=200)
    common.remark(console, f"{HOSTILE} is empty")
    assert console.file.getvalue() == f"note: {SHOWN} is empty\n"  # type: ignore[attr-defined]


def test_the_row_of_progress_shows_the_name_and_does_not_obey_it(capsys: pytest.CaptureFixture[str]) -> None:
    bars = Bars()
    with bars:
        bars.show("reading", 0, 10, f"{HOSTILE}, 5 lines/s")
        bars.said -= 60
        bars.show("reading", 5, 10, f"{HOSTILE}, 5 lines/s")
    assert {task.fields["detail"] for task in bars.progress.tasks} == {f"{SHOWN}, 5 lines/s"}
    assert "\033" not in capsys.readouterr().err
