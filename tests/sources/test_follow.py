"""Following files that grow, rotate and are cut; reading streams that pause."""

import contextlib
import gzip
import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
import pytest

from pipeline.errors import BadInput
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.flush_policy import FlushPolicy
from pipeline.sources.follow import MOST_FILES, QUIET_S, Gap
from pipeline.sources.follow import Follower as FilesOfName
from pipeline.sources.follow import Follower as FollowerOfName
from pipeline.sources.stdin import read_stream

DEADLINE_S = 20.0


def following(
    path: Path, start: Cursor | None = None, *, pace: FlushPolicy | None = None, **how: Any
) -> Iterator[Chunk | Gap | None]:
    with contextlib.closing(FollowerOfName(path, pace=pace)) as follower:
        yield from follower.chunks(start, **how)


class Follower:
    """Runs a follower by hand with a clock that only moves when told, so nothing waits."""

    def __init__(self, path: Path, *, start: Cursor | None = None) -> None:
        self.now = 0.0
        self.stopped = False
        self.chunks: list[Chunk] = []
        self.gaps: list[str] = []
        self._stream = following(
            path,
            start,
            pace=FlushPolicy(clock=lambda: self.now),
            stop=lambda: self.stopped,
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
            idle = idle + 1 if (found := next(self._stream)) is None else 0
            self._keep(found)
        return self.raws

    def _keep(self, found: Chunk | Gap | None) -> None:
        if isinstance(found, Chunk):
            self.chunks.append(found)
        elif found is not None:
            self.gaps.append(found.sentence)

    def stop(self) -> list[str]:
        self.stopped = True
        for found in self._stream:
            self._keep(found)
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
    follower = Follower(path)
    assert follower.until_idle(5) == []
    append(path, "first\n")
    follower.until_idle()
    assert follower.until_idle(2) == ["first"]


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
    assert follower.until_idle(2) == ["old 1", "old 2", "new 1"]
    assert follower.chunks[-1].records["line"].to_list() == [1]
    assert follower.chunks[-1].cursor.identity != follower.chunks[0].cursor.identity
    assert follower.until_idle(QUIET_S) == ["old 1", "old 2", "new 1", "old 3 without newline"]
    assert follower.gaps == []


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


def test_a_file_that_was_let_go_is_read_on_at_the_next_rotation(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "one\n")
    follower = Follower(path)
    follower.until_idle()
    path.rename(tmp_path / "app.log.1")
    append(path, "two\n")
    follower.until_idle()
    follower.until_idle(QUIET_S)
    append(tmp_path / "app.log.1", "late\n")
    assert follower.until_idle(2) == ["one", "two"]
    (tmp_path / "app.log.1").rename(tmp_path / "app.log.2")
    path.rename(tmp_path / "app.log.1")
    append(path, "three\n")
    follower.until_idle()
    assert follower.until_idle(2) == ["one", "two", "late", "three"]
    assert follower.gaps == []


def test_an_old_file_is_read_while_it_is_written_to_however_long(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    with path.open("a", buffering=1) as old:
        old.write("old 0\n")
        follower = Follower(path)
        follower.until_idle()
        path.rename(tmp_path / "app.log.1")
        path.touch()
        for number in range(1, 6):
            follower.until_idle(QUIET_S * 0.7)
            old.write(f"old {number}\n")
            follower.until_idle()
    assert follower.until_idle(2) == [f"old {number}" for number in range(6)]


def test_more_rotations_than_files_may_be_open_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "line 0\n")
    follower = Follower(path)
    follower.until_idle()
    for number in range(1, 3 * MOST_FILES):
        path.rename(tmp_path / f"app.log-202611{number // 24 + 1:02}-{number % 24:02}")
        append(path, f"line {number}\n")
    follower.until_idle()
    found = follower.until_idle(2)
    assert found == [f"line {number}" for number in range(3 * MOST_FILES)]
    assert follower.gaps == []


def test_targets_that_a_link_had_between_two_looks_are_read(tmp_path: Path) -> None:
    """As the kubelet links the log of a container: `0.log`, then `1.log` after a restart."""
    path, pod = tmp_path / "web.log", tmp_path / "pod"
    pod.mkdir()
    append(pod / "0.log", "zero\n")
    path.symlink_to(pod / "0.log")
    follower = Follower(path)
    follower.until_idle()
    append(pod / "1.log", "one\n")
    (pod / "1.log").rename(pod / "1.log.20261120-101112")
    append(pod / "1.log", "one again\n")
    append(pod / "2.log", "two\n")
    append(pod / "other.log", "of somebody else\n")
    path.unlink()
    path.symlink_to(pod / "2.log")
    follower.until_idle()
    assert follower.until_idle(2) == ["zero", "one again", "two"]


def test_a_damaged_copy_is_read_up_to_the_damage_and_said(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    append(path, "one\n")
    follower = Follower(path)
    follower.until_idle()
    path.rename(tmp_path / "app.log-20261119")
    packed = gzip.compress("".join(f"line {number} {hash(number)}\n" for number in range(50_000)).encode())
    (tmp_path / "app.log-20261120.gz").write_bytes(packed[: len(packed) // 2])
    append(path, "three\n")
    follower.until_idle()
    found = follower.until_idle(2)
    assert found[:2] == ["one", "line 0 0"] and found[-1] == "three" and len(found) < 50_000
    assert len(follower.gaps) == 1 and follower.gaps[0].endswith("its rest is lost")


@pytest.mark.parametrize("read", [True, False])
def test_a_truncation_within_a_look_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """The copy is complete when the look begins, and the file is emptied before the look ends."""
    path, looks = tmp_path / "app.log", []
    append(path, "zero\n" if read else "")
    follower = Follower(path)
    follower.until_idle()
    append(path, "".join(f"line {number}\n" for number in range(50)))
    folders_changed = FilesOfName._folders_changed

    def truncated(self: FilesOfName) -> bool:
        if not looks:
            shutil.copy2(path, tmp_path / "app.log.1")
            os.truncate(path, 0)
        looks.append(True)
        return folders_changed(self)

    monkeypatch.setattr(FilesOfName, "_folders_changed", truncated)
    follower.until_idle()
    append(path, "after\n")
    follower.until_idle()
    expected = [f"line {number}" for number in range(50)]
    assert follower.until_idle(2) == [*(["zero"] if read else []), *expected, "after"]
    assert follower.gaps == []


def test_a_file_that_is_emptied_unread_while_a_chunk_waits_is_read_from_its_copy(tmp_path: Path) -> None:
    path, now = tmp_path / "app.log", [0.0]
    follower = FilesOfName(path, pace=FlushPolicy(clock=lambda: now[0]), max_records=2)
    stream = follower.chunks(stop=lambda: False, sleep=lambda _: None)
    raws: list[str] = []

    def turn() -> list[str]:
        now[0] += 0.3
        found = next(stream)
        assert not isinstance(found, Gap)
        raws.extend(found.records["raw"].to_list() if found is not None else [])
        return raws

    def copy_and_truncate(older: str, copy: str) -> None:
        if (tmp_path / copy).exists():
            (tmp_path / copy).rename(tmp_path / older)
        shutil.copy2(path, tmp_path / copy)
        os.truncate(path, 0)

    header = "2026-11-20 10:00:00 INFO line {}\n"
    append(path, "".join(header.format(n) for n in range(300)))
    while len(raws) < 200:
        turn()
    copy_and_truncate("app.log.2", "app.log.1")
    follower.look()
    while len(raws) < 300:
        turn()
    append(tmp_path / "app.log.1", "".join(header.format(n) for n in range(300, 310)))
    append(path, header.format("in between"))
    follower.look()
    while len(raws) == 300:  # until a chunk of the first copy waits; the file itself is unread
        turn()
    copy_and_truncate("app.log.2", "app.log.1")
    follower.look()
    while len(raws) < 311:
        turn()
    follower.close()
    assert raws == [header.format(n)[:-1] for n in (*range(310), "in between")]


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
        next(following(path, stop=lambda: False))


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
