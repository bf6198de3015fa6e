"""Compaction changes the files and never the results, whatever is written, removed or killed meanwhile."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from s3_server import S3Server
from sink_contract import AT, rows

from pipeline.errors import BadPayload
from pipeline.ledger.backlog import BatchEnding
from pipeline.sinks import compaction, retention
from pipeline.sinks.compaction import Compactor, Fate, vacuum
from pipeline.sinks.fates import fate
from pipeline.sinks.manifest import LOOSE, MERGED, ResultTable
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.retention import Retention, Round, long_reading
from pipeline.store.choose import open_store

DAY_S = 86_400.0


@pytest.fixture(params=["folder", "bucket"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ParquetSink]:
    if request.param == "folder":
        yield ParquetSink(tmp_path / "results")
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        with server.credentials():
            yield ParquetSink(open_store(server.new_place()), tmp_path / "cache")


def final(ids: Sequence[str]) -> list[Fate]:
    return [Fate.FINAL] * len(ids)


def ahead(sink: ParquetSink, seconds: float, fates: Any = final, **kept: Any) -> Compactor:
    """A compactor whose clock is so far ahead."""
    return Compactor(sink, fates, Retention(**kept), now=lambda: time.time() + seconds)


def ids_of(sink: ParquetSink) -> list[str]:
    return sorted(sink.scan().collect()["record_id"].to_list())


def levels(sink: ParquetSink) -> list[int]:
    return sorted(part.level for part in sink.parts())


def keys(sink: ParquetSink) -> set[str]:
    return {one.key for folder in (*retention.FOLDERS, "gone") for one in sink.objects.found(f"v2/{folder}/")}


def filled(sink: ParquetSink, n: int, *, at: Any = AT, **columns: Any) -> list[str]:
    for i in range(n):
        sink.write(f"b{i}", rows(2, key=f"k{i}", at=at, **columns))
    return ids_of(sink)


def test_many_commits_become_one_part_that_still_knows_its_batches(sink: ParquetSink) -> None:
    before = filled(sink, compaction.MERGE_PARTS)
    assert ahead(sink, -60).round() == Round(), "the hands of their writers may be on them"
    done = ahead(sink, 10).round()
    assert (done.merged, done.rows) == (compaction.MERGE_PARTS, 2 * compaction.MERGE_PARTS)
    assert levels(sink) == [MERGED]
    assert ids_of(sink) == before
    other = ParquetSink(sink.objects, sink.files._cache and sink.files._cache.parent)
    got = other.read("b7", "shop")
    assert got is not None
    assert got.equals(rows(2, key="k7"))
    other.write("b7", rows(3, key="k7", score=0.5))
    other.remove("b8", "shop")
    assert other.read("b8", "shop") is None
    assert ids_of(sink) == sorted({*before, "k7-2"} - {"k8-0", "k8-1"})
    assert sink.latest(1e6, 3) == [*[b for b in sink.latest(1e6, 3) if b != "b7"], "b7"]
    assert not other.take_out("b9", ["k9-0"])
    assert other.take_out("b9", ["k9-1"])
    assert sink.read("b9", "shop") is None


def test_old_parts_are_sealed_sorted_and_the_replaced_files_go_after_the_grace(sink: ParquetSink) -> None:
    before = filled(sink, 5)
    sink.write("b3", rows(1, key="k3"))
    before.remove("k3-1")
    assert ahead(sink, compaction.SEAL_AGE_S / 2).round() == Round(merged=1), "a part without rows"
    sealing = ahead(sink, compaction.SEAL_AFTER_S + 1)
    assert sealing.round().rows == 9
    assert ids_of(sink) == before
    manifest = sink.manifest()
    assert manifest.parts == ()
    (day,) = manifest.days.values()
    assert (day.parts, day.rows) == (1, 9)
    old = {part for part in keys(sink) if part.startswith("v2/lines/")}
    assert len(old) == 6
    (sealed,) = sink.parts()
    assert sealing.round() == Round(), "a reader may still have them open"
    assert ahead(sink, compaction.SEAL_AFTER_S + retention.GRACE_S + 10).round().removed == 5
    assert keys(sink) == {day.name, *sealed.objects}
    sink.write("later", rows(1, key="late"))
    ahead(sink, compaction.SEAL_AFTER_S + 1).round()
    assert ids_of(sink) == sorted([*before, "late-0"])
    assert sink.manifest().days[day.name.split("/")[-1][:10]].parts == 2


def test_a_reader_that_was_killed_does_not_keep_replaced_files_for_ever(sink: ParquetSink) -> None:
    filled(sink, 5)
    with long_reading(sink):
        (left,) = (one.key for one in sink.objects.found(retention.READERS))
    sink.objects.put(left, b"")
    ahead(sink, compaction.SEAL_AFTER_S + 1).round()
    after = compaction.SEAL_AFTER_S + retention.GRACE_S + 10
    assert ahead(sink, after + retention.READER_S).round().removed == 5
    assert not list(sink.objects.found(retention.READERS))


def test_batches_that_may_still_change_are_not_sealed(sink: ParquetSink) -> None:
    fates = {"b0": Fate.WAITS, "b1": Fate.OPEN}
    before = filled(sink, 4)

    def of(ids: Sequence[str]) -> list[Fate]:
        return [fates.get(one, Fate.FINAL) for one in ids]

    late = compaction.SEAL_AFTER_S + 1
    ahead(sink, late, of).round()
    assert [part.batches[0][0] for part in sink.manifest().parts] == ["b0", "b1"]
    sink.write("b0", rows(2, key="k0", score=0.5))
    fates.clear()
    ahead(sink, late, of).round()
    assert sink.manifest().parts == ()
    assert ids_of(sink) == before
    assert sink.scan().collect()["score"].drop_nulls().len() == 2


def test_batches_that_wait_for_a_model_are_merged_where_there_are_many(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "WAITING_PARTS", 3)
    before = filled(sink, 6)
    late = compaction.SEAL_AFTER_S + 1

    def waits(ids: Sequence[str]) -> list[Fate]:
        return [Fate.WAITS] * len(ids)

    ahead(sink, late, waits).round()
    assert levels(sink) == [MERGED]
    for i in range(5, -1, -1):
        got = sink.read(f"b{i}", "shop")
        assert got is not None
        sink.write(f"b{i}", got.with_columns(score=pl.lit(0.1)))
    assert ids_of(sink) == before
    ahead(sink, 10).round()
    assert [part.level for part in sink.manifest().parts] == [LOOSE] * 6, "nothing is left of the merged part"


def test_rows_of_a_batch_that_was_given_up_are_dropped(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MERGE_PARTS", 2)
    filled(sink, 2)

    def of(ids: Sequence[str]) -> list[Fate]:
        return [Fate.VOID if one == "b0" else Fate.FINAL for one in ids]

    ahead(sink, 10, of).round()
    assert ids_of(sink) == ["k0-0", "k0-1", "k1-0", "k1-1"], "a retry may be under way"
    ahead(sink, compaction.VOID_AFTER_S + 10, of).round()
    assert ids_of(sink) == ["k1-0", "k1-1"]


def test_a_change_meanwhile_wins_over_a_merge(sink: ParquetSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MERGE_PARTS", 2)
    filled(sink, 3)
    other = ParquetSink(sink.objects, sink.files._cache and sink.files._cache.parent)
    put = sink.objects.put

    def meanwhile(key: str, content: Any) -> None:
        put(key, content)
        if "/1-" in key:
            other.write("b1", rows(1, key="new"))

    monkeypatch.setattr(sink.objects, "put", meanwhile)
    assert ahead(sink, 10).round().merged == 0
    assert ids_of(sink) == ["k0-0", "k0-1", "k2-0", "k2-1", "new-0"]
    assert not [key for key in keys(sink) if "/gone/" in key]
    monkeypatch.setattr(sink.objects, "put", put)
    ahead(sink, 10).round()
    assert ids_of(sink) == ["k0-0", "k0-1", "k2-0", "k2-1", "new-0"]


def test_results_past_their_age_or_size_go_and_an_import_of_old_records_stays(sink: ParquetSink) -> None:
    filled(sink, 3, at=AT.replace(year=2020))
    late = compaction.SEAL_AFTER_S + 1
    month = dict.fromkeys(ResultTable, 30 * DAY_S)
    ahead(sink, late, keep_s=month).round()
    assert len(ids_of(sink)) == 6, "it was stored today"
    size = sum(part.stored_bytes for part in sink.parts())
    ahead(sink, late, max_bytes=size).round()
    assert len(ids_of(sink)) == 6
    sink.write("new", rows(1, key="new"))
    ahead(sink, late).round()
    size = sum(part.stored_bytes for part in sink.parts())
    ahead(sink, late, max_bytes=size - 1).round()
    assert ids_of(sink) == ["new-0"], "the oldest day goes first"
    ahead(sink, 31 * DAY_S, keep_s=month).round()
    assert ids_of(sink) == []
    ahead(sink, 32 * DAY_S).round()
    assert keys(sink) == set()


def test_findings_and_rates_outlive_their_lines_table_by_table(sink: ParquetSink) -> None:
    sink.write("a", rows(3, key="a", anomalous=True))
    sink.write("b", rows(2, key="b", anomalous=False))
    ahead(sink, compaction.SEAL_AFTER_S + 1).round()
    day = next(iter(sink.manifest().days.values()))
    assert set(day.tables) == set(ResultTable)
    keep = {
        ResultTable.LINES: 2 * DAY_S, ResultTable.RATES_5M: 3 * DAY_S,
        ResultTable.RATES_1H: 4 * DAY_S, ResultTable.FINDINGS: 5 * DAY_S,
    }  # fmt: skip
    left = []
    for days in range(1, 7):
        ahead(sink, (days + 0.5) * DAY_S, keep_s=keep).round()
        left.append({key.split("/")[1] for key in keys(sink)} - {"days", "gone"})
        assert ids_of(sink) == ([] if days > 1 else ["a-0", "a-1", "a-2", "b-0", "b-1"])
        assert sorted(sink.findings().collect()["record_id"]) == ([] if days > 4 else ["a-0", "a-1", "a-2"])
        assert sink.workloads() == ([] if days > 4 else ["shop"])
    # What has expired leaves with the next round, when the readers of the older manifest are done.
    names = [{str(table) for table in ResultTable}]
    for table in keep:
        names.append(names[-1] - {str(table)})
    assert left == [names[0], *names]
    assert sink.manifest().days == {}


def test_too_many_bytes_take_the_oldest_lines_first_and_then_their_tables(sink: ParquetSink) -> None:
    for year in (2020, 2021):
        sink.write(str(year), rows(3, key=str(year), at=AT.replace(year=year), anomalous=True))
    ahead(sink, compaction.SEAL_AFTER_S + 1).round()
    days = sorted(sink.manifest().days.values(), key=lambda day: day.first_us)
    everything = sum(day.bytes + day.table_bytes for day in days)
    late = compaction.SEAL_AFTER_S + 1
    ahead(sink, late, max_bytes=everything - 1).round()
    assert {one[:4] for one in ids_of(sink)} == {"2021"}
    assert len(sink.findings().collect()) == 6
    ahead(sink, late, max_bytes=sum(day.table_bytes for day in days)).round()
    assert ids_of(sink) == []
    assert len(sink.findings().collect()) == 6
    ahead(sink, late, max_bytes=days[1].table_bytes).round()
    assert sink.findings().collect()["timestamp"].dt.year().unique().to_list() == [2021]


def test_a_day_that_changes_while_its_lines_expire_keeps_what_is_new(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.write("old", rows(2, key="old"))
    late = compaction.SEAL_AFTER_S + 1
    ahead(sink, late).round()
    change = sink.change

    def meanwhile(edit: Any) -> None:
        monkeypatch.setattr(sink, "change", change)
        sink.write("new", rows(2, key="new"))
        ahead(sink, late).round()
        change(edit)

    monkeypatch.setattr(sink, "change", meanwhile)
    ahead(sink, 3 * DAY_S, keep_s={ResultTable.LINES: 2 * DAY_S}).round()
    assert ids_of(sink) == ["new-0", "new-1", "old-0", "old-1"]


def test_files_of_killed_writers_are_removed_and_young_ones_stay(sink: ParquetSink) -> None:
    before = filled(sink, 2)
    left = sink.files.put(rows(1), day="2026-11-20", level=LOOSE, written_ms=0).name
    ahead(sink, 10).round()
    assert left in keys(sink), "its swap may be under way"
    assert ahead(sink, retention.ORPHAN_S + 10, lambda ids: [Fate.OPEN] * len(ids)).round().removed == 1
    assert left not in keys(sink)
    assert ids_of(sink) == before


def test_a_vacuum_leaves_the_results_and_nothing_else(sink: ParquetSink) -> None:
    filled(sink, 3)
    sink.write("b0", rows(1, key="k0"))
    sink.take_out("b1", ["k1-0"])
    sink.files.put(rows(1), day="2026-11-20", level=LOOSE, written_ms=0)
    before = ids_of(sink)
    vacuum(sink)
    assert ids_of(sink) == before
    files = [sink.files.file(part) for part in sink.parts()]
    assert sorted(pl.concat([pl.read_parquet(file) for file in files])["record_id"]) == before
    assert len([key for key in keys(sink) if "/lines/" in key]) == len(files)


def test_an_object_that_the_manifest_names_and_the_store_lacks_is_called_missing(sink: ParquetSink) -> None:
    filled(sink, 3)
    ahead(sink, DAY_S).round()
    (day,) = sink.manifest().days.values()
    sink.objects.delete(day.name)
    with pytest.raises(BadPayload, match=rf"{re.escape(day.name)} of .* is missing; restore it"):
        ParquetSink(sink.objects).sealed(day.name)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ({"state": "done"}, Fate.FINAL),
        ({"state": "done", "warming": True}, Fate.WAITS),
        ({"state": "ingest"}, Fate.OPEN),
        ({"state": "ingest", "rescore": True}, Fate.OPEN),
        ({"state": "dead"}, Fate.VOID),
        ({"state": "split"}, Fate.VOID),
        ({"state": "dead", "rescore": True}, Fate.OPEN),
        ({"state": "done", "discarded": True}, Fate.VOID),
        ({"state": "done", "discarded": True, "rescore": True}, Fate.FINAL),
        ({"state": ""}, Fate.FINAL),
    ],
)
def test_the_ledger_tells_what_may_become_of_a_batch(ending: dict[str, Any], expected: Fate) -> None:
    blank = {"rescore": False, "discarded": False, "warming": False}
    assert fate(BatchEnding(**{**blank, **ending})) is expected


class StoreMachine(RuleBasedStateMachine):
    """Two processes write, remove and compact one store; a dict says what must be there."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory(prefix="logweir-store-")
        self.sinks = [ParquetSink(Path(self.folder.name)) for _ in range(2)]
        self.expected: dict[str, pl.DataFrame] = {}
        self.version = self.sealings = 0

    which = st.integers(0, 1)
    batch = st.sampled_from("abcdef")

    @rule(which=which, batch=batch, n=st.integers(1, 4), day=st.integers(1, 3))
    def write(self, which: int, batch: str, n: int, day: int) -> None:
        if batch in self.expected and day != self.expected[batch]["timestamp"][0].day:
            day = self.expected[batch]["timestamp"][0].day
        self.version += 1
        frame = rows(n, key=batch, at=AT.replace(day=day), model_version=str(self.version))
        self.sinks[which].write(batch, frame)
        self.expected[batch] = frame

    @rule(which=which, names=st.lists(batch, min_size=2, max_size=4, unique=True))
    def write_several(self, which: int, names: list[str]) -> None:
        self.version += 1
        found = [(n, rows(2, key=n, at=AT.replace(day=2), model_version=str(self.version))) for n in names]
        self.sinks[which].write_all(found)
        self.expected |= dict(found)

    @rule(which=which, batch=batch)
    def remove(self, which: int, batch: str) -> None:
        self.sinks[which].remove(batch, "shop")
        self.expected.pop(batch, None)

    @precondition(lambda self: any(not name.startswith("sealed") for name in self.expected))
    @rule(which=which, data=st.data())
    def take_out(self, which: int, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(sorted(n for n in self.expected if not n.startswith("sealed"))))
        out = data.draw(st.lists(st.sampled_from(self.expected[batch]["record_id"].to_list()), unique=True))
        left = self.expected[batch].filter(~pl.col("record_id").is_in(out))
        assert self.sinks[which].take_out(batch, out) == left.is_empty()
        self.expected[batch] = left
        if left.is_empty():
            del self.expected[batch]

    @rule(which=which, later=st.sampled_from([10.0, 700.0]), seed=st.integers(0, 99))
    def compact(self, which: int, later: float, seed: int) -> None:
        draw = random.Random(seed)

        def of(ids: Sequence[str]) -> list[Fate]:
            return [draw.choice([Fate.WAITS, Fate.OPEN, Fate.WAITS]) for _ in ids]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(compaction, "MERGE_PARTS", 3)
            patched.setattr(compaction, "WAITING_PARTS", 2)
            ahead(self.sinks[which], later, of).round()

    @rule(which=which)
    def seal_and_sweep(self, which: int) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(retention, "GRACE_S", 0.0)
            ahead(self.sinks[which], compaction.SEAL_AFTER_S + 5).round()
        self.sealings += 1
        self.expected = {
            name if name.startswith("sealed") else f"sealed {self.sealings} {name}": frame
            for name, frame in self.expected.items()
        }

    @invariant()
    def holds_what_was_written(self) -> None:
        for sink in self.sinks:
            wanted = sorted(
                (row["record_id"], row["model_version"])
                for frame in self.expected.values()
                for row in frame.iter_rows(named=True)
            )
            got = sink.scan().collect()
            assert sorted(zip(got["record_id"], got["model_version"], strict=True)) == wanted
        for batch, frame in self.expected.items():
            if not batch.startswith("sealed"):
                found = self.sinks[0].read(batch, "shop")
                assert found is not None
                assert found.equals(frame)

    def teardown(self) -> None:
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = hypothesis_settings(max_examples=25, stateful_step_count=25, deadline=None)
TestStoreMachine = pytest.mark.long(TestStoreMachine)  # type: ignore[misc]


WRITER = """
import random, sys, time
sys.path[:0] = [{tests!r}]
from pathlib import Path
from sink_contract import rows
from pipeline.sinks.parquet import ParquetSink
sink = ParquetSink(Path({root!r}))
n = {first}
while True:
    batch = f"{{n}}"
    sink.write(batch, rows(3, key=batch))
    print(batch, flush=True)
    n += 1
"""
COMPACTOR = """
import time
from pathlib import Path
from pipeline.sinks import compaction, retention
from pipeline.sinks.compaction import Compactor, Fate
from pipeline.sinks.parquet import ParquetSink
compaction.MERGE_PARTS, compaction.SEAL_AFTER_S, compaction.SEAL_AGE_S = 8, 1.0, 0.5
compaction.MERGE_AGE_S, retention.GRACE_S, retention.ORPHAN_S = 0.1, 3.0, 5.0
sink = ParquetSink(Path({root!r}))
while True:
    Compactor(sink, lambda ids: [Fate.FINAL] * len(ids)).round()
    print("round", flush=True)
"""


@pytest.mark.long
def test_killed_writers_and_compactors_lose_and_double_nothing(tmp_path: Path) -> None:
    """Two writers and two compactors on one folder, killed again and again."""
    root = tmp_path / "results"
    acknowledged: set[str] = set()
    reader = ParquetSink(root)
    running: list[subprocess.Popen[str]] = []
    outs: list[tuple[Path, str]] = []
    counter = 0

    def start(kind: int) -> subprocess.Popen[str]:
        nonlocal counter
        counter += 1
        code = (WRITER if kind < 2 else COMPACTOR).format(
            tests=str(Path(__file__).parent.parent), root=str(root), first=counter * 100_000
        )
        path = tmp_path / f"out{counter}"
        outs.append((path, "writer" if kind < 2 else "compactor"))
        with path.open("w") as out:
            return subprocess.Popen(
                [sys.executable, "-c", code], stdout=out, stderr=subprocess.STDOUT, text=True
            )

    running = [start(kind) for kind in range(4)]
    draw = random.Random(1)
    began, least, kills = time.monotonic(), 0, 0

    def rounds() -> int:
        return sum(path.read_text().count("round\n") for path, kind in outs if kind == "compactor")

    try:
        while time.monotonic() < began + 60 and not (kills >= 8 and rounds() >= 8 and least > 100):
            time.sleep(0.3)
            ids = reader.scan().collect()["record_id"]
            assert ids.n_unique() == ids.len(), "a record is there twice"
            assert ids.len() >= least, "records are gone"
            least = ids.len()
            if draw.random() < 0.3:
                kills += 1
                kind = draw.randrange(4)
                os.kill(running[kind].pid, signal.SIGKILL)
                running[kind].wait()
                running[kind] = start(kind)
    finally:
        for process in running:
            process.kill()
            process.wait()
    for path, kind in outs:
        lines = path.read_text().split("\n")[:-1]
        if kind == "writer":
            assert all(line.isdecimal() for line in lines), lines[-5:]
            acknowledged |= set(lines)
        else:
            assert set(lines) <= {"round"}, lines[-5:]
    assert rounds() >= 8
    stored = reader.scan().collect()["record_id"].to_list()
    assert len(stored) == len(set(stored))
    missing = {f"{batch}-{i}" for batch in acknowledged for i in range(3)} - set(stored)
    assert not missing
    assert acknowledged
