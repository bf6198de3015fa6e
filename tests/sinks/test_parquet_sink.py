"""The results store: whole files or none, one per batch, and names that stay inside it."""

import errno
import fcntl
import itertools
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.errors import BadPayload, ClaimLost, SinkUnavailable
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks import parquet
from pipeline.sinks.parquet import LOCK, TEMPORARY, ParquetSink
from pipeline.sinks.results import readable

AT = datetime(2026, 11, 20, 23, 59, tzinfo=UTC)


def rows(n: int = 3, *, workload: str = "shop", at: datetime = AT, message: str = "one") -> pl.DataFrame:
    blank: dict[str, Any] = dict.fromkeys(RESULT_SCHEMA)
    row = {
        **blank,
        "record_id": "k-1",
        "workload": workload,
        "timestamp": at,
        "message": message,
        "reasons": ["rare:1/9"],
    }
    return pl.DataFrame([{**row, "line": i} for i in range(n)], schema=RESULT_SCHEMA)


@pytest.fixture
def sink(tmp_path: Path) -> ParquetSink:
    return ParquetSink(tmp_path / "results")


def files(sink: ParquetSink) -> list[str]:
    found = (p for p in sink.root.rglob("*") if p.is_file() and p.name != LOCK)
    return sorted(str(p.relative_to(sink.root)) for p in found)


def test_what_is_written_is_read_back_unchanged(sink: ParquetSink) -> None:
    frame = rows()
    sink.write("b", frame)
    path = sink.path("b", frame)
    assert path.relative_to(sink.root) == Path("date=2026-11-20/workload=shop/b.parquet")
    got = sink.read("b", "shop")
    assert got is not None
    assert got.equals(frame)
    assert dict(got.schema) == RESULT_SCHEMA
    assert sink.scan().collect().equals(frame)
    assert sink.read("b", "other") is None
    assert sink.read("c", "shop") is None


def test_writing_a_batch_again_replaces_it(sink: ParquetSink) -> None:
    sink.write("b", rows(3))
    sink.write("b", rows(5, message="again"))
    assert len(files(sink)) == 1
    assert sink.scan().collect()["message"].to_list() == ["again"] * 5


def test_an_empty_store_has_the_columns_and_no_rows(sink: ParquetSink) -> None:
    for _ in range(2):
        got = sink.scan().collect()
        assert got.is_empty()
        assert dict(got.schema) == RESULT_SCHEMA
        sink.root.mkdir(exist_ok=True)


def test_all_days_and_workloads_are_one_table(sink: ParquetSink) -> None:
    sink.write("a", rows(1))
    sink.write("b", rows(2, workload="bank"))
    sink.write("c", rows(4, at=datetime(2026, 11, 21, tzinfo=UTC)))
    assert sink.scan().collect().height == 7
    assert sorted(sink.scan().collect()["workload"].unique()) == ["bank", "shop"]


def test_columns_of_a_newer_build_are_passed_over(sink: ParquetSink) -> None:
    frame = rows()
    sink.write("b", frame)
    frame.with_columns(pl.lit(1).alias("of tomorrow")).write_parquet(sink.path("b", frame))
    assert dict(sink.scan().collect().schema) == RESULT_SCHEMA


def test_a_file_without_a_column_is_named_as_damaged(sink: ParquetSink) -> None:
    frame = rows()
    for batch in ("a", "b"):
        sink.write(batch, frame)
    lacking = sink.path("b", frame)
    frame.drop("p_value").write_parquet(lacking)
    with pytest.raises(BadPayload, match=str(lacking)), readable(sink.root):
        sink.scan().collect()


def test_no_reader_sees_a_file_before_it_is_whole(sink: ParquetSink, monkeypatch: pytest.MonkeyPatch) -> None:
    sink.write("a", rows(1))
    real, seen = os.replace, []

    def replace(source: Any, target: Any) -> None:
        seen.append((sink.scan().collect().height, sink.read("b", "shop"), Path(source).stat().st_size))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    sink.write("b", rows(2))
    ((before, unfinished, size),) = seen
    assert (before, unfinished) == (1, None)
    assert size > 0
    assert sink.scan().collect().height == 3


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_write_that_fails_leaves_what_was_there_and_says_what_to_do(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    sink.write("b", rows(1, message="old"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(SinkUnavailable, match=r"No space left on device.*free space or fix the rights"):
            sink.write("b", rows(2, message="new"))
        with pytest.raises(SinkUnavailable):
            sink.write("c", rows(2, message="new"))
    assert files(sink) == ["date=2026-11-20/workload=shop/b.parquet"]
    assert sink.scan().collect()["message"].to_list() == ["old"]
    sink.write("b", rows(2, message="new"))
    assert sink.scan().collect()["message"].to_list() == ["new", "new"]


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(sink: ParquetSink) -> None:
    noise = [f"{i * 2654435761 % 2**61:x}{i**5 % 2**89:x}" for i in range(40_000)]
    frame = (
        rows(1)
        .select(pl.all().exclude("message").repeat_by(len(noise)).explode())
        .with_columns(pl.Series("message", noise))
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, hard)
    )  # the write itself is cut off, as on a full disk
    try:
        with pytest.raises(SinkUnavailable, match="File too large"):
            sink.write("b", frame.select(list(RESULT_SCHEMA)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(sink) == []


def test_a_directory_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(SinkUnavailable, match="results"):
        ParquetSink(tmp_path / "results").write("b", rows())


def test_sweeping_removes_what_killed_writers_left_and_nothing_else(sink: ParquetSink) -> None:
    sink.write("b", rows())
    path = sink.path("b", rows())
    left = path.with_name(f".b.parquet.4711{TEMPORARY}")
    left.write_bytes(b"half a file")
    assert sink.scan().collect().height == 3
    assert sink.sweep() == 1
    assert sink.sweep() == 0
    assert files(sink) == ["date=2026-11-20/workload=shop/b.parquet"]


# Locks


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process, stopped while it held the folder's lock."""
    with (folder / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_writer_that_was_stopped_makes_the_others_wait_and_not_for_ever(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "LOCK_WAIT_S", 0.05)
    sink.write("a", rows(1))
    folder, elsewhere = place(sink, "shop", "a").parent, rows(1, workload="bank")
    name = sink.name("a", rows(1))
    with held(folder):
        calls: list[Callable[[], object]] = [
            lambda: sink.write("b", rows(2)),
            lambda: sink.remove("a", "shop"),
            lambda: sink.take_out(name, None),
        ]
        for call in calls:
            with pytest.raises(SinkUnavailable, match=r"another process has kept \.lock"):
                call()
        sink.write("c", elsewhere)
    assert [p.name for p in folder.iterdir() if p.name != LOCK] == ["a.parquet"]
    sink.write("b", rows(2))
    assert sink.scan().collect().height == 4


def test_a_lock_that_was_removed_with_its_folder_holds_nobody_up(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "LOCK_WAIT_S", 0.05)
    sink.write("a", rows(1))
    folder = place(sink, "shop", "a").parent
    with held(folder):
        shutil.rmtree(folder)
        sink.write("b", rows(2))
    assert files(sink) == ["date=2026-11-20/workload=shop/b.parquet"]


def test_the_last_question_is_asked_of_a_whole_file_and_under_the_lock(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "LOCK_WAIT_S", 0.05)
    sink.write("b", rows(1, message="of its owner"))
    asked = []

    def no() -> None:
        asked.append([len(pl.read_parquet(p)) for p in sink.root.rglob(f".*{TEMPORARY}")])
        with pytest.raises(SinkUnavailable):
            sink.write("c", rows(1))
        raise ClaimLost("it is another's")

    with pytest.raises(ClaimLost):
        sink.write("b", rows(2, message="of who lost it"), last=no)
    with pytest.raises(ClaimLost):
        sink.remove("b", "shop", last=no)
    for ids in (None, ["k-1"]):
        with pytest.raises(ClaimLost):
            sink.take_out(sink.name("b", rows(1)), ids, last=no)
    assert asked == [[2], [], [], []]
    assert sink.scan().collect()["message"].to_list() == ["of its owner"]
    assert files(sink) == ["date=2026-11-20/workload=shop/b.parquet"]


def test_a_damaged_file_is_left_alone_unless_all_of_it_goes(sink: ParquetSink) -> None:
    sink.write("b", rows(1))
    path, name = place(sink, "shop", "b"), sink.name("b", rows(1))
    for damaged in (b"PAR1 damaged PAR1", b"", path.read_bytes()[:-9]):
        path.write_bytes(damaged)
        assert sink.record_ids(name) == []
        assert not sink.take_out(name, ["k-1"])
        assert path.read_bytes() == damaged
        assert sink.take_out(name, None)
        assert not path.exists()


def test_the_newest_files_are_told_by_their_own_time(sink: ParquetSink) -> None:
    at = time.time() - 1000
    for n, day in enumerate((20, 21, 22)):
        for batch in ("a", "b"):
            frame = rows(1, at=datetime(2026, 11, day, tzinfo=UTC))
            sink.write(f"{batch}{day}", frame)
            os.utime(sink.path(f"{batch}{day}", frame), (at + 100 * n, at + 100 * n))
        os.utime(sink.path("a", frame).parent, (at + 100 * n, at + 100 * n))
    (sink.root / "date=2026-11-20/workload=shop/a20.parquet").unlink()  # a retention job
    assert [batch_id for _, batch_id in sink.latest(50, 10)] == ["a22", "b22"]
    assert [batch_id for _, batch_id in sink.latest(150, 10)] == ["a21", "b21", "a22", "b22"]
    assert [batch_id for _, batch_id in sink.latest(150, 3)] == ["b21", "a22", "b22"]


# Names

NAMES = [
    "shop", "Shop", "SHOP", "shop/checkout", "shop%2Fcheckout", "shop=checkout", "shop%3Dcheckout", "..", "../x", ".", ".x",
    "%2E", "%2E.", "/etc", "C:\\x", "*", "?", "[s]hop", "s[!x]op", "**", "a b", "a~b", "a%7Eb", "ü", "日本", "x" * 200,
    "x" * 199 + "y", "ü" * 200, "ü" * 199 + "x", "date=2026-11-20", "-", "~", "null", " ", "x.parquet",
]  # fmt: skip


def test_different_workloads_have_different_directories_inside_the_store(sink: ParquetSink) -> None:
    for name in NAMES:
        sink.write("b", rows(1, workload=name))
    where = {name: place(sink, name, "b").parent for name in NAMES}
    assert len(set(where.values())) == len(NAMES)
    for name, folder in where.items():
        assert folder.parent == sink.root / "date=2026-11-20", name
        assert not folder.name.startswith(".")
        assert len(os.fsencode(folder.name)) <= 255
        got = sink.read("b", name)
        assert got is not None, name
        assert got["workload"].to_list() == [name]
    assert sink.scan().collect().height == len(NAMES)


def test_different_batches_have_different_files(sink: ParquetSink) -> None:
    ids = [*NAMES, "x" * 200 + "~0", "x" * 200 + "~1", "ü" * 200 + "~0", "ü" * 200 + "~01"]
    for name in ids:
        sink.write(name, rows(1, message=name))
    paths = [place(sink, "shop", name) for name in ids]
    folded = {str(path).casefold() for path in paths}
    assert len(folded) == len(ids), "also where the file system does not tell upper from lower case"
    for name, path in zip(ids, paths, strict=True):
        assert path.parent == paths[0].parent
        assert len(os.fsencode(path.name)) <= 255 - len(f"..{2**22}{TEMPORARY}")
        got = sink.read(name, "shop")
        assert got is not None, name
        assert got["message"].to_list() == [name]


PRINTABLE = st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ")
names = st.text(PRINTABLE, min_size=1, max_size=200)


def place(sink: ParquetSink, workload: str, batch_id: str) -> Path:
    return sink.path(batch_id, rows(1, workload=workload))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names, names, names, names)
@example("x" * 200, "a", "x" * 201, "a")
def test_no_name_leaves_the_store_or_meets_another_one(
    sink: ParquetSink, workload: str, batch_id: str, other: str, other_id: str
) -> None:
    one, two = place(sink, workload, batch_id), place(sink, other, other_id)
    assert (one == two) == ((workload, batch_id) == (other, other_id))
    for path in (one, two):
        assert Path(os.path.normpath(path)) == path
        assert path.parent.parent.parent == sink.root


def test_a_long_name_never_meets_the_name_that_looks_like_its_short_form(sink: ParquetSink) -> None:
    for long in ("x" * 300, "ü" * 200):
        short = place(sink, long, long)
        for twin in itertools.chain(
            [short.parent.name.removeprefix("workload=")], [short.name.removesuffix(".parquet")]
        ):
            assert place(sink, twin, "b").parent != short.parent
            assert place(sink, "shop", twin).name != short.name


@pytest.mark.parametrize("folder", ["out[1]", "a*b", "what?", "{x}"])
def test_a_store_may_have_any_name_itself(tmp_path: Path, folder: str) -> None:
    sink = ParquetSink(tmp_path / folder)
    sink.write("b", rows(2))
    assert sink.scan().collect().height == 2
    assert sink.read("b", "shop") is not None


def test_a_batch_id_that_begins_with_a_dot_is_read_like_any_other(sink: ParquetSink) -> None:
    sink.write(".hidden", rows(2))
    assert sink.scan().collect().height == 2
    assert sink.read(".hidden", "shop") is not None
