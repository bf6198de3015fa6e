"""Folders and globs: which files they bring, in which order, and what is left out."""

import os
import socket
import time
from pathlib import Path

import pytest

from pipeline.errors import BadInput
from pipeline.producer import workload_of_file
from pipeline.sources.files import choose
from pipeline.sources.folders import Filter, rotation

LINE = b"2026-11-20 10:00:00 INFO ready\n"


def written(folder: Path, *names: str, data: bytes = LINE) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return paths


def names(folder: Path, *patterns: str, **filters: list[str]) -> list[str]:
    chosen = choose(patterns or (str(folder),), Filter(**filters))
    return [str(path.relative_to(folder)) for path in chosen.paths]


def test_a_folder_is_walked_sorted_without_what_is_hidden(tmp_path: Path) -> None:
    written(
        tmp_path, "z.log", "b/c/deep.log", "b/a.log", ".hidden.log", ".git/config", "CVS/Root", "out/x.html"
    )
    (tmp_path / "out/.logweir").mkdir()  # the results of a run
    written(tmp_path, *(f"logweir-data/{name}" for name in ("lock", "store.json", "api.key", "logs/up.log")))
    assert names(tmp_path) == ["z.log", "b/a.log", "b/c/deep.log"]
    assert names(tmp_path, str(tmp_path / ".git")) == [".git/config"]  # it was named
    assert names(tmp_path, str(tmp_path / "logweir-data/logs")) == ["logweir-data/logs/up.log"]


def test_links_sockets_pipes_and_binary_files_are_left_out_with_one_note(tmp_path: Path) -> None:
    (log,) = written(tmp_path, "app.log")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "again.log").symlink_to(log)
    os.link(log, tmp_path / "hard.log")
    os.mkfifo(tmp_path / "pipe")
    written(tmp_path, "wtmp", data=b"\1\0\0\0" * 96)
    written(tmp_path, "empty.log", data=b"")
    written(tmp_path, "old.7z", data=b"7z\xbc\xaf\x27\x1c" + bytes(99))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        chosen = choose([str(tmp_path)])
    assert [p.name for p in chosen.paths] == ["again.log"]  # the first name of one file
    assert len(chosen.notes) == 1
    assert chosen.notes[0].startswith("skipped 7 files that are no text logs: ")
    assert chosen.notes[0].endswith(f"{tmp_path / 'empty.log'}, {tmp_path / 'loop'} and 5 more")


def test_a_glob_leaves_out_what_is_no_log_and_a_named_file_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "a.log", "b.log")
    (bad,) = written(tmp_path, "wtmp", data=b"\1\0\0\0" * 96)
    chosen = choose([f"{tmp_path}/*"])
    assert [p.name for p in chosen.paths] == ["a.log", "b.log"]
    assert chosen.notes == (f"skipped 1 file that is no text log: {bad}",)
    with pytest.raises(BadInput, match="wtmp is not a text log"):
        choose([str(bad), str(tmp_path)])


def test_files_of_a_folder_in_utf_16_have_one_note(tmp_path: Path) -> None:
    for name, encoding in (("a.log", "utf-16"), ("b.log", "utf-16-be"), ("c.log", "utf-8")):
        (tmp_path / name).write_bytes("2026-11-20 10:00:00 INFO up\n".encode(encoding) * 9)
    found = choose([str(tmp_path)])
    assert len(found.paths) == 3
    assert found.notes == (f"2 files are UTF-16, read as UTF-8: {tmp_path}/a.log, {tmp_path}/b.log",)


@pytest.mark.parametrize("pattern", ["", "/*"])
def test_a_folder_or_glob_without_a_log_is_refused(tmp_path: Path, pattern: str) -> None:
    written(tmp_path, "wtmp", "btmp", data=b"\1\0\0\0" * 96)
    with pytest.raises(BadInput, match=r"has no text log; of 2 files none is one, name a log"):
        choose([f"{tmp_path}{pattern}"])


def test_filters_compare_names_or_paths_and_leave_named_files_alone(tmp_path: Path) -> None:
    (named, *_) = written(tmp_path, "debug.log", "app.log", "app.txt", "old/app.log", "new/deep/app.log")
    assert names(tmp_path, include=["*.log"]) == ["app.log", "debug.log", "new/deep/app.log", "old/app.log"]
    assert names(tmp_path, include=["*.log"], exclude=["old", "debug*"]) == ["app.log", "new/deep/app.log"]
    assert names(tmp_path, include=["new/*"]) == ["new/deep/app.log"]
    assert names(tmp_path, str(named), exclude=["debug*"]) == ["debug.log"]
    with pytest.raises(BadInput, match="has no text log; no file there is wanted"):
        names(tmp_path, include=["*.nothing"])


@pytest.mark.parametrize(
    "oldest_first",
    [
        ["app.log.10", "app.log.3", "app.log.2", "app.log.1", "app.log"],
        ["app-20261118.log", "app-20261119.log", "app.log"],
        ["app.log-20261118", "app.log-20261119-103000", "app.log"],
        ["app.2026-11-18.0.log", "app.2026-11-18.1.log", "app.2026-11-19.0.log", "app.log"],
        ["app.log.2026-11-18_10-30", "app.log.2026-11-19_00-30"],
    ],
)
def test_rotated_files_stand_oldest_first_and_share_a_workload(
    tmp_path: Path, oldest_first: list[str]
) -> None:
    written(tmp_path, *oldest_first)
    assert names(tmp_path) == oldest_first
    given = [str(tmp_path / name) for name in reversed(oldest_first)]
    assert names(tmp_path, *given) == oldest_first
    assert {workload_of_file(Path(name)) for name in oldest_first} == {"app"}


def test_a_mixture_of_numbers_and_dates_follows_the_times_of_the_files(tmp_path: Path) -> None:
    for age, path in enumerate(written(tmp_path, "app.log", "app.log.1", "app.log-20261119", "app.log.2")):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert names(tmp_path) == ["app.log.2", "app.log-20261119", "app.log.1", "app.log"]


@pytest.mark.parametrize(
    ("name", "live"),
    [
        ("app.log.3.gz", "app.log"),
        ("app.log-20261119.xz", "app.log"),
        ("app-20261119.log.zst", "app.log"),
        ("worker-1.log", "worker-1.log"),
        ("id-99999999", "id-99999999"),  # no date
        (".1", ".1"),
        ("0.log.20261119-103000", "0.log"),
    ],
)
def test_the_live_name_of_a_file(name: str, live: str) -> None:
    assert rotation(name).live == live


@pytest.mark.long
def test_a_hundred_thousand_files_are_looked_through_within_seconds(tmp_path: Path) -> None:
    written(tmp_path, "app.log")
    folder = os.open(tmp_path, os.O_RDONLY)
    for number in range(100_000):
        os.close(os.open(f"{number}.log", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    began = time.process_time()
    chosen = choose([str(tmp_path)])
    assert time.process_time() - began < 10
    assert [p.name for p in chosen.paths] == ["app.log"]
    assert chosen.notes[0].startswith("skipped 100,000 files that are no text logs: ")
