"""A sealed part leaves out messages that end their `raw`, and every reader gets them back."""

import shutil
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_contract import AT, rows, seal

from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.answers.engine import Engine
from pipeline.sinks.answers.files import FileAnswers
from pipeline.sinks.answers.folder import files_in
from pipeline.sinks.compaction import ORDER, _ordered
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.part_files import FEW_RANGES, MESSAGE_AT, PartFiles
from pipeline.sinks.results import scan
from pipeline.store.folder import Folder

WORDS = [
    "",
    "a",
    "GET /",
    "größe",
    "日本",
    "🦀",
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "\x00",
    "a\nb",
    "'; --",
    "\u2028",
]
texts = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
pairs = st.one_of(
    st.tuples(texts, texts).map(lambda both: (both[0] + both[1], both[1])),  # a header and its message
    st.tuples(st.none() | texts, st.none() | texts),
)


def written(sink: ParquetSink, found: list[tuple[str | None, str | None]]) -> None:
    for number, (raw, message) in enumerate(found):
        at = AT.replace(hour=1) + timedelta(seconds=number)
        sink.write(f"b{number}", rows(1, key=f"k{number}", at=at, raw=raw, message=message))


@given(found=st.lists(pairs, min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_every_reader_gets_raw_and_message_as_they_were_stored(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[str | None, str | None]]
) -> None:
    sink = ParquetSink(tmp_path_factory.mktemp("results"))
    written(sink, found[: len(found) // 2])
    seal(sink)
    written(sink, found)
    wanted = sorted((f"k{n}-0", raw, message) for n, (raw, message) in enumerate(found))
    chosen = ["record_id", "raw", "message"]

    def of(frame: pl.DataFrame) -> list[tuple[Any, ...]]:
        assert dict(frame.schema) == RESULT_SCHEMA
        return sorted(frame.select(chosen).unique().rows())

    assert of(sink.scan().collect()) == wanted
    with closing(FileAnswers(sink)) as answers:
        assert of(answers.lines(ResultQuery(limit=100))) == wanted
    # Files that somebody took out of the store.
    folder = tmp_path_factory.mktemp("taken")
    for number, part in enumerate(sink.parts()):
        shutil.copy(sink.files.file(part), folder / f"{number}.parquet")
    assert of(scan(folder).collect()) == wanted
    with Engine([folder]) as engine, engine.question():
        engine.view("lines", files_in(folder), RESULT_SCHEMA)
        assert of(engine.rows("SELECT * FROM lines", schema=RESULT_SCHEMA)) == wanted


def test_only_a_sealed_part_leaves_messages_out(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    lines = [("12:00 INFO up", "up"), ('{"msg": "down"}', "down")]
    written(sink, lines)
    assert not any(part.elided for part in sink.parts())
    seal(sink)
    (part,) = sink.parts()
    assert part.elided
    stored = pl.read_parquet(sink.files.file(part), hive_partitioning=False).sort("record_id")
    assert stored["message"].to_list() == [None, "down"]
    assert stored[MESSAGE_AT].to_list() == [11, None]


def test_other_programs_read_the_files_as_the_page_says(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    written(sink, [("12:00 größe 1", "größe 1"), ('{"msg": "down"}', "down")])
    seal(sink)
    sink.write("new", rows(1, key="new", raw="12:05 up", message="up"))
    page = (Path(__file__).parents[2] / "docs/howto.md").read_text()
    code = page.split("## Read the results with other programs")[1].split("```")[1].removeprefix("python")
    names: dict[str, Any] = {
        "duckdb": duckdb,
        "pl": pl,
        "files": [str(sink.files.file(part)) for part in sink.parts()],
    }
    exec(code, names)
    wanted = ["down", "größe 1", "up"]
    columns = [one[0] for one in names["found"].description]
    assert sorted(row[columns.index("said")] for row in names["found"].fetchall()) == wanted
    assert sorted(names["rows"].collect()["said"]) == wanted


def test_rows_that_left_a_sealed_part_leave_the_others_whole(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    written(sink, [(f"12:00 INFO line {n}", f"line {n}") for n in range(12)])
    seal(sink)
    (part,) = sink.parts()
    for ranges in (
        [(1, 2)],
        [(0, 1), (11, 12)],
        [(0, 11)],
        [(n, n + 1) for n in range(1, 2 * FEW_RANGES, 2)],
    ):
        dropped = part.dropping(ranges)
        wanted = [f"line {n}" for n in range(12) if not any(a <= n < b for a, b in ranges)]
        assert sink.files.lazy([dropped]).collect()["message"].to_list() == wanted
        assert sink.files.read(dropped)["message"].to_list() == wanted
    assert sink.files.read(part, (1, 3))["message"].to_list() == ["line 1", "line 2"]


def test_a_text_is_found_in_a_message_and_not_in_the_head_of_its_line(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    written(sink, [("12:00 panic-host up and running", "up and running"), ("12:01 web Panic", "Panic")])
    seal(sink)
    with closing(FileAnswers(sink)) as answers:
        assert answers.lines(ResultQuery(text="panic", limit=9))["message"].to_list() == ["Panic"]


places = st.one_of(st.none(), st.integers(-3, 3))


@given(
    found=st.lists(
        st.tuples(st.none() | st.sampled_from("abc"), places, st.none() | st.integers(0, 3)), max_size=20
    )
)
@settings(deadline=None)
def test_rows_are_sorted_by_workload_template_and_time(
    found: list[tuple[str | None, int | None, int | None]],
) -> None:
    schema = {"workload": pl.String, "template_id": pl.Int64, "timestamp": pl.Datetime("us", "UTC")}
    columns = {name: [one[n] for one in found] for n, name in enumerate(schema)}
    frame = pl.DataFrame(columns, schema=schema).with_row_index()
    assert _ordered(frame.clone()).equals(frame.sort(ORDER, nulls_last=False, maintain_order=True))


def test_a_file_without_left_out_messages_is_read_as_before(tmp_path: Path) -> None:
    files = PartFiles(Folder(tmp_path))
    part = files.put(rows(3), day="2026-11-20", level=0, written_ms=0)
    assert files.read(part).equals(rows(3))
