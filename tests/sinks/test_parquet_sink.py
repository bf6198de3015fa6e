"""The store of results: all of a commit or nothing, whatever fails, and names that stay inside it."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from s3_server import S3Server

from pipeline.errors import BadPayload, ClaimLost, SinkUnavailable, StoreUnavailable, TooNew
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks import parquet, part_files
from pipeline.sinks.compaction import Compactor, Fate
from pipeline.sinks.manifest import KEY, MAX_NAMES, VERSION, merged
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.results import readable
from pipeline.sinks.retention import Round
from pipeline.store import folder as folder_module
from pipeline.store.choose import open_store

AT = datetime(2026, 11, 20, 23, 59, tzinfo=UTC)


def rows(
    n: int = 3, *, key: str = "k", workload: str = "shop", at: datetime = AT, message: str = "one"
) -> pl.DataFrame:
    blank: dict[str, Any] = dict.fromkeys(RESULT_SCHEMA)
    row = {**blank, "workload": workload, "timestamp": at, "message": message, "reasons": ["rare:1/9"]}
    return pl.DataFrame(
        [{**row, "record_id": f"{key}-{i}", "line": i} for i in range(n)], schema=RESULT_SCHEMA
    )


@pytest.fixture
def sink(tmp_path: Path) -> ParquetSink:
    return ParquetSink(tmp_path / "results")


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path) -> Iterator[ParquetSink]:
    with s3_server.credentials():
        yield ParquetSink(open_store(s3_server.new_place()), tmp_path / "cache")


def lines(sink: ParquetSink) -> set[str]:
    return {one.key for one in sink.objects.found("v2/lines/")}


def messages(sink: ParquetSink) -> list[str]:
    return sorted(sink.scan().collect()["message"])


def test_a_batch_is_one_file_that_any_program_reads(sink: ParquetSink) -> None:
    frame = rows()
    sink.write("b", frame)
    (part,) = sink.parts()
    assert part.name.startswith("v2/lines/date=2026-11-20/0-")
    assert (part.rows, part.workloads, part.batches) == (3, ("shop",), (("b", 3),))
    assert part.first_us == part.last_us == round(AT.timestamp() * 1e6)
    assert pl.read_parquet(sink.files.file(part)).select(list(RESULT_SCHEMA)).equals(frame)
    assert sink.scan().collect().equals(frame)


def test_results_that_were_there_and_are_gone_are_no_empty_store(sink: ParquetSink, tmp_path: Path) -> None:
    assert sink.parts() == [] == sink.workloads()
    sink.write("b", rows())
    assert len(sink.parts()) == 1
    there, away = tmp_path / "results", tmp_path / "unmounted"
    there.rename(away)
    for _ in range(2):
        with pytest.raises(SinkUnavailable, match=r"the results in file:.* were there before, and are gone"):
            sink.parts()
    there.write_text("a file where the folder was")
    with pytest.raises(SinkUnavailable, match="are gone"):
        sink.workloads()
    there.unlink()
    away.rename(there)
    assert len(sink.parts()) == 1 and sink.workloads() == ["shop"]


def test_an_empty_store_has_the_columns_and_no_rows(sink: ParquetSink, tmp_path: Path) -> None:
    for _ in range(2):
        assert dict(sink.scan().collect().schema) == RESULT_SCHEMA
        assert (sink.parts(), sink.workloads()) == ([], [])
        (tmp_path / "results").mkdir(exist_ok=True)


def test_readers_open_only_what_may_hold_the_answer(sink: ParquetSink) -> None:
    day = timedelta(days=1)
    sink.write("a", rows(1))
    sink.write("b", rows(1, workload="bank", at=AT + day))
    sink.write_all([("c", rows(1, at=AT - 9 * day)), ("d", rows(1, workload="*", at=AT - 9 * day))])

    def found(**query: Any) -> list[str]:
        return sorted(batch for part in sink.parts(**query) for batch, _ in part.batches)

    assert found() == ["a", "b", "c", "d"]
    assert found(since=AT) == ["a", "b"]
    assert found(until=AT) == ["c", "d"]
    assert found(since=AT, until=AT) == []
    assert found(workloads=["bank"]) == ["b"]
    assert found(workloads=["*"]) == ["c", "d"], "one file holds both"
    assert sink.workloads() == ["*", "bank", "shop"]
    many = pl.concat([rows(1, key=str(n), workload=f"w{n}") for n in range(MAX_NAMES + 1)])
    sink.write("many", many)
    assert "many" in found(workloads=["any"])
    assert len(sink.workloads()) == MAX_NAMES + 4


def test_columns_of_a_newer_build_are_passed_over(sink: ParquetSink) -> None:
    sink.write("b", rows())
    file = sink.files.file(sink.parts()[0])
    rows().with_columns(pl.lit(1).alias("of tomorrow")).write_parquet(file)
    assert dict(sink.scan().collect().schema) == RESULT_SCHEMA


def test_a_file_without_a_column_is_named_as_damaged_and_may_be_removed(sink: ParquetSink) -> None:
    for batch in ("a", "b"):
        sink.write(batch, rows(1, message=batch))
    lacking = sink.files.file(sink.parts()[1])
    rows().drop("p_value").write_parquet(lacking)
    for at in (sink, Path(sink.objects.url.removeprefix("file://"))):
        with pytest.raises(BadPayload, match=f"{lacking}.*remove the damaged file"), readable(at):
            sink.scan().collect()
    lacking.unlink()
    assert messages(sink) == ["a"]


def test_a_manifest_that_is_damaged_or_newer_is_refused_and_not_replaced(sink: ParquetSink) -> None:
    sink.write("a", rows(1))
    newer = b'{"v":%d}' % (VERSION + 1)
    for content, error in ((b"{", BadPayload), (newer, TooNew), (b'{"v":2,"parts":5}', BadPayload)):
        sink.objects.put(KEY, content)
        for call in (sink.scan, lambda: ParquetSink(sink.objects).write("b", rows(1))):
            with pytest.raises(error, match="manifest"):
                call()
        assert sink.objects.get(KEY) == content


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_write_that_fails_leaves_what_was_there_and_says_what_to_do(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    sink.write("b", rows(1, message="old"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(SinkUnavailable, match=r"No space left on device.*free space"):
            sink.write("b", rows(2, message="new"))
        with pytest.raises(SinkUnavailable):
            sink.write("c", rows(2, message="new"))
    assert messages(sink) == ["old"]
    assert not list(Path(sink.objects.url.removeprefix("file://")).rglob("*.part"))
    sink.write("b", rows(2, message="new"))
    assert messages(sink) == ["new", "new"]


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(sink: ParquetSink) -> None:
    noise = [f"{i * 2654435761 % 2**61:x}{i**5 % 2**89:x}" for i in range(40_000)]
    frame = (
        rows(1)
        .select(pl.all().exclude("message").repeat_by(len(noise)).explode())
        .with_columns(pl.Series("message", noise))
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The write itself is cut off, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SinkUnavailable, match="File too large"):
            sink.write("b", frame.select(list(RESULT_SCHEMA)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lines(sink) == set()


def test_a_directory_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(SinkUnavailable, match="results"):
        ParquetSink(tmp_path / "results").write("b", rows())


def test_a_writer_that_was_stopped_makes_the_others_wait_and_not_for_ever(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "LOCK_WAIT_S", 0.05)
    sink.write("a", rows(1))
    place = Path(sink.objects.url.removeprefix("file://")) / KEY
    with folder_module._locked(place):
        for call in (lambda: sink.write("b", rows(2)), lambda: sink.remove("a", "shop")):
            with pytest.raises(SinkUnavailable, match="another process has kept"):
                call()
        assert sink.scan().collect().height == 1, "readers do not wait"
    sink.write("b", rows(2))
    assert sink.scan().collect().height == 3


def test_the_claim_is_asked_for_when_all_is_ready_and_before_each_try(
    sink: ParquetSink, tmp_path: Path
) -> None:
    other = ParquetSink(tmp_path / "results")
    sink.write("a", rows(1))
    asked = []

    def once() -> None:
        asked.append(len(lines(sink)))
        if len(asked) == 1:
            other.write("b", rows(1, key="other", message="of its owner"))

    sink.write("c", rows(1, key="c"), last=once)
    assert asked == [2, 3], "the file was there; the first swap was lost to the other writer"
    assert sink.scan().collect().height == 3

    def no() -> None:
        raise ClaimLost("it is another's")

    before = lines(sink)
    with pytest.raises(ClaimLost):
        sink.write("b", rows(2, message="of who lost it"), last=no)
    with pytest.raises(ClaimLost):
        sink.remove("b", "shop", last=no)
    for ids in (None, ["other-0"]):
        with pytest.raises(ClaimLost):
            sink.take_out("b", ids, last=no)
    assert lines(sink) == before, "no file is left behind"
    assert "of its owner" in messages(sink)


def test_a_stalled_writer_loses_to_whoever_removed_its_batch(sink: ParquetSink, tmp_path: Path) -> None:
    """The claim is checked, the process stops, the batch is given up, and the process goes on."""
    sink.write("a", rows(1))
    other, calls = ParquetSink(tmp_path / "results"), []

    def check() -> None:
        calls.append(1)
        if len(calls) == 1:
            other.remove("b", "shop")  # nothing of it was there
        else:
            raise ClaimLost("it was given up")

    with pytest.raises(ClaimLost):
        sink.write("b", rows(1, key="b"), last=check)
    assert sink.read("b", "shop") is None


def test_a_swap_whose_answer_was_lost_is_recognised(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = sink.objects.swap

    def lossy(key: str, content: bytes, tag: str | None) -> str | None:
        swap(key, content, tag)
        monkeypatch.setattr(sink.objects, "swap", swap)
        return None

    monkeypatch.setattr(sink.objects, "swap", lossy)
    sink.write("b", rows(2))
    assert len(sink.parts()) == 1
    assert sink.scan().collect().height == 2

    def broken(key: str, content: bytes, tag: str | None) -> str | None:
        swap(key, content, tag)
        raise StoreUnavailable("it went away")

    monkeypatch.setattr(sink.objects, "swap", broken)
    with pytest.raises(SinkUnavailable):
        sink.write("c", rows(2, key="c"))
    monkeypatch.setattr(sink.objects, "swap", swap)
    assert sink.scan().collect().height == 4, "its file was not removed: the swap had happened"
    sink.write("c", rows(2, key="c"))
    assert sink.scan().collect().height == 4


@pytest.mark.parametrize("kind", ["sink", "bucket"])
def test_many_writers_at_once_lose_nothing(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    first: ParquetSink = request.getfixturevalue(kind)
    faults: list[BaseException] = []

    def write(n: int) -> None:
        own = ParquetSink(first.objects, tmp_path / "cache")
        try:
            for turn in range(5):
                own.write(f"{n}-{turn}", rows(2, key=f"{n}-{turn}"))
        except BaseException as exc:  # noqa: BLE001 - the test shows it
            faults.append(exc)

    threads = [threading.Thread(target=write, args=[n]) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert first.scan().collect()["record_id"].n_unique() == 60


def test_so_many_writers_that_none_comes_through_are_a_fault_in_one_sentence(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "SWAP_S", 0.0)
    monkeypatch.setattr(sink.objects, "swap", lambda *_: None)
    with pytest.raises(SinkUnavailable, match="use fewer store processes"):
        sink.write("b", rows())


def test_a_damaged_file_is_left_alone_unless_all_of_a_batch_goes(sink: ParquetSink) -> None:
    for damaged in (b"PAR1 damaged PAR1", b""):
        sink.write("b", rows(1))
        file = sink.files.file(sink.parts()[-1])
        file.write_bytes(damaged)
        assert sink.record_ids("b") == []
        assert not sink.take_out("b", ["k-0"])
        assert sink.take_out("b", None)
        assert sink.parts() == []


def test_the_newest_batches_are_told_by_the_time_of_their_commit(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        monkeypatch.setattr(parquet, "_now_ms", lambda n=n: 1_000_000 + 100_000 * n)
        for batch in ("a", "b"):
            sink.write(f"{batch}{n}", rows(1, key=f"{batch}{n}"))
    assert sink.latest(50, 10) == ["a2", "b2"]
    assert sink.latest(150, 10) == ["a1", "b1", "a2", "b2"]
    assert sink.latest(150, 3) == ["b1", "a2", "b2"]
    assert sink.by_age(["a0", "absent", "b2"]) == ["b2", "a0"]


@pytest.mark.parametrize("folder", ["out[1]", "a*b", "what?", "{x}", "ü b"])
def test_a_store_may_have_any_name_itself(tmp_path: Path, folder: str) -> None:
    sink = ParquetSink(tmp_path / folder)
    sink.write("b", rows(2))
    assert sink.scan().collect().height == 2
    assert sink.read("b", "shop") is not None


def test_copies_of_a_bucket_are_fetched_once_and_the_least_used_go_first(
    bucket: ParquetSink, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for n in range(4):
        bucket.write(f"b{n}", rows(1, key=f"k{n}"))
    fetched = []
    fetch = bucket.objects.fetch

    def counted(key: str, to: Path, *, max_bytes: int) -> bool:
        fetched.append(key)
        return fetch(key, to, max_bytes=max_bytes)

    monkeypatch.setattr(bucket.objects, "fetch", counted)
    for _ in range(2):
        assert bucket.scan().collect().height == 4
    assert len(fetched) == 4
    size = max(part.bytes for part in bucket.parts())
    monkeypatch.setattr(part_files, "CACHE_BYTES", 3 * size)
    bucket.write("new", rows(1, key="new"))
    assert bucket.scan().collect().height == 5, "copies in use stay"
    (cache,) = (tmp_path / "cache").iterdir()
    for n, file in enumerate(sorted(cache.iterdir())):
        os.utime(file, (1000 + n, 1000 + n))
    bucket.write("newer", rows(1, key="newer"))
    bucket.files.file(bucket.parts()[-1])
    assert len(list(cache.iterdir())) <= 3
    assert bucket.scan().collect().height == 6


def test_ranges_are_merged() -> None:
    assert merged([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == ((0, 3), (5, 9))


def test_batches_are_read_part_by_part_as_they_are_read_alone(sink: ParquetSink) -> None:
    for n in range(6):
        sink.write(f"b{n}", rows(3, key=f"k{n}"))
    sink.write_all([(f"c{n}", rows(2, key=f"c{n}")) for n in range(3)])
    sink.remove("b1", "shop")
    sink.take_out("b2", ["k2-1"])
    sink.write("c1", rows(4, key="c1", message="two"))
    Compactor(sink, lambda ids: [Fate.WAITS] * len(ids)).merge(list(sink.manifest().parts[:4]), Round())
    sink.take_out("b3", ["k3-0"])
    sink.remove("c2", "shop")
    ids = [f"b{n}" for n in range(5)] + ["c0", "c1", "c2", "unknown"]
    groups = list(sink.by_part(ids))
    found = dict(pair for group in groups for pair in group)
    alone = {name: frame for name in ids if (frame := sink.read(name, "shop")) is not None}
    assert found.keys() == alone.keys() == {"b0", "b2", "b3", "b4", "c0", "c1"}
    assert all(found[name].equals(alone[name]) for name in alone)
    assert len(groups) < len(alone)
