"""The first screen of `logweir run`, and standard input as a file."""

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import polars as pl
import pytest

from pipeline.commands.run import stdin_copy
from pipeline.commands.run.first_screen import look, rows
from pipeline.commands.run.inputs import plan_run
from pipeline.commands.run.journey import _cuts
from pipeline.errors import BadInput
from pipeline.records.schema import raw_frame
from pipeline.settings import Settings
from pipeline.sources.framing import MAX_RECORD_BYTES

TRACE = """2026-11-20 10:00:09 ERROR app: request failed
Traceback (most recent call last):
  File "/srv/app.py", line 7, in main
    pay()
ValueError: no amount
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "app.log"
    calm = "".join(f"2026-11-20 10:00:0{i} INFO app: request {i} served\n" for i in range(9))
    path.write_text(calm + TRACE + "2026-11-20 10:00:10 INFO kernel: Out of memory: Killed process 12\n")
    return path


def test_the_first_screen_counts_levels_words_traces_and_patterns(log: Path) -> None:
    found = look([log], Settings())
    assert (found.lines, found.records, found.whole, found.traces) == (15, 11, True, 1)
    assert found.levels == {"info": 10, "error": 1}
    assert found.words["out of memory"] == 1
    assert {p.place for p in found.error_like} == {"app.log:10", "app.log:15"}
    screen = rows(found, width=100)
    assert screen[0] == "15 lines at first sight: 1 error, 10 info"
    assert "2 error-like records · 1 stack trace" in screen[1]
    assert any(row.endswith(" 9 app: request <NUM> served") for row in screen)
    assert max(map(len, screen)) <= 100


def test_the_first_screen_reads_a_bounded_part_and_says_so(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.log", "b.log")]
    for path in paths:
        path.write_text("".join(f"line {i}\n" for i in range(1_000)))
    found = look(paths, Settings(), records=200)
    assert (found.records, found.whole) == (200, False)
    assert "the beginning" in rows(found, width=100)[0]


def test_the_first_screen_leaves_pipes_and_damaged_files_to_the_run(tmp_path: Path, log: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "cut.gz").write_bytes(b"\x1f\x8b\x08\x00cut")
    found = look([tmp_path / "pipe", tmp_path / "cut.gz", log], Settings())
    assert (found.records, found.whole) == (11, False)
    empty = tmp_path / "empty.log"
    empty.touch()
    assert rows(look([empty], Settings()), width=80) == []


def test_no_line_of_the_first_screen_steers_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J.log"
    path.write_text("ERROR \x1b]0;title\x07 failed\x9b2J\n")
    for row in rows(look([path], Settings()), width=80):
        assert row.isprintable()


@pytest.mark.long
def test_the_first_screen_imports_no_redis_celery_or_torch() -> None:
    code = (
        "import sys, pipeline.commands.run.verb;"
        "print([m for m in ('redis', 'celery', 'torch', 'rich.progress') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_pipe_that_does_not_end_is_named_and_its_copy_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    said = threading.Event()

    def endless() -> None:
        assert said.wait(10)
        with pytest.raises(BrokenPipeError):
            while True:  # until the reader leaves
                os.write(writer, b"one line\n")
        os.close(writer)

    def say() -> None:
        say_it()
        said.set()

    say_it = stdin_copy._say_that_it_reads
    monkeypatch.setattr(stdin_copy, "PATIENCE_S", 0.01)
    monkeypatch.setattr(stdin_copy, "_say_that_it_reads", say)
    stdin = io.TextIOWrapper(os.fdopen(reader, "rb"))
    monkeypatch.setattr(sys, "stdin", stdin)
    thread = threading.Thread(target=endless)
    thread.start()
    with stdin_copy.stdin_as_file(["-", "other"], most_bytes=1_000) as given:
        assert given.stdin is not None and given.files == (str(given.stdin.path), "other")
        copied = given.stdin.path.read_bytes()
    thread.join(10)
    stdin.close()
    assert copied == b"one line\n" * 111
    assert len(given.notes) == 1 and "its first 999 bytes were judged" in given.notes[0]
    assert "logweir send -" in capfd.readouterr().err
    assert not given.stdin.path.exists()


def test_a_pipe_that_ends_is_copied_whole_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb")))
    with stdin_copy.stdin_as_file(["-"]) as given:
        assert given.stdin is not None and given.stdin.path.read_bytes() == b"a\nb"
    assert given.notes == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "^stdin is empty$"), ("a\n".encode("utf-16"), "^stdin is UTF-16"), (b"\x00\x01" * 99, "^stdin ")],
)
def test_what_is_odd_about_standard_input_names_no_file_that_nobody_knows(
    content: bytes, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    with stdin_copy.stdin_as_file(["-"]) as given:
        try:
            plan = plan_run(given.files, [], out=tmp_path, workload=None, report=None, stdin=given.stdin)
            (note,) = plan.notes
        except BadInput as exc:
            note = str(exc)
    assert re.search(said, note) and "/" not in note


def test_of_a_pattern_only_the_error_like_records_are_counted_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(
        "".join(f"2026-11-20 10:00:{n % 60:02d} {'ERROR' if n == 38 else 'INFO'} t {n}\n" for n in range(90))
    )
    shown = rows(look([path], Settings()), width=120)
    assert any("1 error-like record" in line for line in shown)
    assert any(line.startswith("        1 a.log:39: ") for line in shown)


def test_elements_of_a_document_on_one_line_are_no_pieces_of_a_long_line() -> None:
    frame = raw_frame(["x"] * 3).with_columns(pl.Series("lines", [1, 0, 0], dtype=pl.UInt32))
    assert _cuts(frame, was_long=False) == (0, False)
    whole = "y" * MAX_RECORD_BYTES
    cut = raw_frame([whole, whole, "z"]).with_columns(pl.Series("lines", [1, 0, 0], dtype=pl.UInt32))
    assert _cuts(cut, was_long=False) == (2, False)
    assert _cuts(cut[1:2], was_long=True) == (1, True)
