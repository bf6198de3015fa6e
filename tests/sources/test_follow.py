"""Following files that grow, rotate and are cut; reading streams that pause."""

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import polars as pl
import pytest

from pipeline.errors import BadInput
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.flush_policy import FlushPolicy
from pipeline.sources.follow import follow
from pipeline.sources.stdin import read_stream

DEADLINE_S = 20.0


class Follower:
    """Runs `follow` by hand with a clock that only moves when told, so nothing waits."""

    def __init__(self, path: Path, *, start: Cursor | None = None, from_start: bool = True) -> None:
        self.now = 0.0
        self.stopped = False
        self.chunks: list[Chunk] = []
        self._stream: Iterator[Chunk | None] = follow(
            path,
            start=start,
            stop=lambda: self.stopped,
            from_start=from_start,
            pace=FlushPolicy(clock=lambda: self.now),
            sleep=lambda seconds: None,
        )

    @property
    def raws(self) -> list[str]:
        return [raw for chunk in self.chunks for raw in chunk.records["raw"].to_list()]

    def until_idle(self, seconds_later: float = 0.0) -> list[str]:
        """Turns until there is nothing new; the records so far."""
        self.now += seconds_later
        idle = 0
        end = time.monotonic() + DEADLINE_S
        while idle < 3:  # two turns may be needed to notice a rotation and to open the successor
            assert time.monotonic() < end, "the follower never became idle"
            chunk = next(self._stream)
            if chunk is None:
                idle += 1
            else:
                self.chunks.append(chunk)
                idle = 0
        return self.raws

    def stop(self) -> list[str]:
        self.stopped = True
        self.chunks.extend(chunk for chunk in self._stream if chunk is not None)
        return self.raws


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_lines_come_after_a_pause_and_half_a_line_is_held_back(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "one\ntwo\nthr")
    follower = Follower(path)
    assert follower.until_idle() == []
    assert follower.until_idle(1.5) == ["one", "two"]
    assert follower.until_idle(10) == ["one", "two"]
    append(path, "ee\n")
    follower.until_idle()
    assert follower.until_idle(1.5) == ["one", "two", "three"]
    assert follower.chunks[-1].records["line"].to_list() == [3]


def test_half_a_line_is_left_before_the_cursor_when_following_stops(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "one\nhal")
    follower = Follower(path)
    follower.until_idle()
    assert follower.stop() == ["one"]
    append(path, "f\n")
    again = Follower(path, start=follower.chunks[-1].cursor)
    again.until_idle()
    assert again.until_idle(2) == ["half"]
    assert again.chunks[0].records["line"].to_list() == [2]


def test_a_file_that_appears_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "later.log"
    follower = Follower(path, from_start=False)
    assert follower.until_idle(5) == []
    append(path, "first\n")
    follower.until_idle()
    assert follower.until_idle(2) == ["first"]


def test_following_from_the_end_keeps_true_line_numbers_and_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "old 1\nold 2\nhal")
    follower = Follower(path, from_start=False)
    assert follower.until_idle(2) == []
    append(path, "f\nnew\n")
    follower.until_idle()
    assert follower.until_idle(2) == ["half", "new"]
    assert follower.chunks[0].records["line"].to_list() == [3, 4]


def test_rotation_by_rename_reads_the_old_file_to_its_end_and_then_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "old 1\n")
    follower = Follower(path)
    follower.until_idle()
    path.rename(tmp_path / "app.log.1")
    follower.until_idle()
    append(tmp_path / "app.log.1", "old 2\nold 3 without newline")
    follower.until_idle()
    append(path, "new 1\n")
    follower.until_idle()
    assert follower.until_idle(2) == ["old 1", "old 2", "old 3 without newline", "new 1"]
    assert follower.chunks[-1].records["line"].to_list() == [1]
    assert follower.chunks[-1].cursor.identity != follower.chunks[0].cursor.identity


@pytest.mark.parametrize(
    "after", ["new\n", "rewritten and longer than before\n" * 9], ids=["shorter", "longer"]
)
def test_a_truncated_file_is_read_again_from_its_beginning(tmp_path: Path, after: str) -> None:
    path = tmp_path / "app.log"
    append(path, "old 1\nold 2\n")
    follower = Follower(path)
    follower.until_idle(2)
    follower.until_idle(2)
    with path.open("r+") as file:  # as copytruncate does: the same file, emptied
        file.truncate(0)
        file.write(after)
    follower.until_idle()
    assert follower.until_idle(2) == ["old 1", "old 2", *after.splitlines()]
    assert follower.chunks[-1].records["line"][0] == 1


def test_a_vanished_file_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "one\n")
    follower = Follower(path)
    follower.until_idle()
    path.unlink()
    assert follower.until_idle(2) == ["one"]
    assert follower.until_idle(100) == ["one"]
    append(path, "two\n")
    follower.until_idle()
    assert follower.until_idle(2) == ["one", "two"]


def test_a_stack_trace_written_in_two_goes_is_one_record(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "2026-11-20 10:00:00 ERROR broken\n")
    follower = Follower(path)
    follower.until_idle(0.2)
    append(path, "\tat a.B.c(B.java:1)\n")
    follower.until_idle(0.2)
    assert follower.until_idle(2) == ["2026-11-20 10:00:00 ERROR broken\n\tat a.B.c(B.java:1)"]


def test_a_record_is_not_closed_while_half_a_line_of_it_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "2026-11-20 10:00:00 ERROR broken\n\tat a.B")
    follower = Follower(path)
    follower.until_idle()
    assert follower.until_idle(0.9) == []
    append(path, ".c(B.java:1)\n")
    follower.until_idle()
    assert follower.until_idle(0.3) == ["2026-11-20 10:00:00 ERROR broken\n\tat a.B.c(B.java:1)"]


def test_what_is_finished_goes_soon_and_the_record_that_may_grow_stays(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    head = "2026-11-20 10:00:00 INFO line {}\n"
    append(path, "".join(head.format(n) for n in range(200)))  # then the format is known
    follower = Follower(path)
    follower.until_idle()
    follower.until_idle(2)
    for number in range(200, 203):  # never silent
        append(path, head.format(number))
        follower.until_idle(0.15)
    append(path, "\tat a.B.c(B.java:1)\n")
    follower.until_idle(0.15)
    assert [raw[-8:] for raw in follower.raws[200:]] == ["line 200", "line 201"]
    append(path, "\tat a.B.d(B.java:9)\n")
    follower.until_idle(0.15)
    whole = "2026-11-20 10:00:00 INFO line 202\n\tat a.B.c(B.java:1)\n\tat a.B.d(B.java:9)"
    assert follower.until_idle(0.3)[202:] == [whole]


def test_a_steady_trickle_does_not_hold_records_back(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    path.touch()
    follower = Follower(path)
    for number in range(10):
        append(path, f"line {number}\n")
        follower.until_idle(0.4)
    assert len(follower.raws) >= 5
    assert follower.raws == [f"line {i}" for i in range(len(follower.raws))]


def test_a_compressed_file_cannot_be_followed(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    path.write_bytes(b"\x1f\x8b" + b"\0" * 20)
    with pytest.raises(BadInput, match="without --follow"):
        next(follow(path, stop=lambda: False, from_start=True))


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb", buffering=0) as sink:
        yield source, sink


def test_a_paused_pipe_hands_over_what_it_has_and_goes_on(pipe: tuple[BinaryIO, BinaryIO]) -> None:
    source, sink = pipe
    chunks = read_stream(source, pace=FlushPolicy(least_s=0.05, quiet_s=0.05))
    sink.write(b"one\ntwo\nthr")
    assert next(chunks).records["raw"].to_list() == ["one", "two"]
    sink.write(b"ee\n")
    assert next(chunks).records["raw"].to_list() == ["three"]
    sink.write(b"last")
    sink.close()
    rest = list(chunks)
    assert [c.records["raw"].to_list() for c in rest] == [["last"]]
    assert rest[0].records["line"].to_list() == [4]
    assert rest[0].cursor.offset == rest[0].position == len(b"one\ntwo\nthree\nlast")


def test_a_stream_without_descriptor_is_read_to_its_end() -> None:
    text = "".join(f"line {i}\n" for i in range(12000))
    chunks = list(read_stream(io.BytesIO(text.encode()), name="upload", max_records=5000))
    assert [c.records.height for c in chunks] == [5000, 5000, 2000]
    assert pl.concat([c.records for c in chunks])["raw"].to_list() == text.splitlines()
    assert chunks[-1].cursor == Cursor(path="upload", identity="stream", offset=len(text), line=12000)


class Broken(io.RawIOBase):
    def __init__(self) -> None:
        self._left = [b"one\ntwo\n"]

    def read(self, size: int = -1) -> bytes:
        if self._left:
            return self._left.pop()
        raise OSError(5, "Input/output error")


def test_a_broken_stream_says_so_after_handing_over_what_came() -> None:
    got: list[str] = []

    def run() -> None:
        for chunk in read_stream(Broken()):  # type: ignore[arg-type]
            got.extend(chunk.records["raw"].to_list())

    with pytest.raises(BadInput, match="stdin broke after 8 bytes: Input/output error"):
        run()
    assert got == ["one", "two"]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def test_leaving_an_endless_stream_ends_its_thread(pipe: tuple[BinaryIO, BinaryIO]) -> None:
    source, sink = pipe
    chunks = read_stream(source, name="endless", pace=FlushPolicy(least_s=0.05, quiet_s=0.05))
    sink.write(b"one\n")
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    sink.write(b"two\n")
    wait_for(lambda: "read-endless" not in {t.name for t in threading.enumerate()})
