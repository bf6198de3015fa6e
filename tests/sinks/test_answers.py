"""Answers from files are those of a plain model, whatever is sealed, dropped or fetched from a bucket."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import polars as pl
import pytest
from answers_contract import DAY, FIRST, HOUR, LINES, AnswersContract, Ask, Row, frame, row
from hypothesis import given, settings
from hypothesis import strategies as st
from polling import wait_until
from sink_contract import seal

from pipeline.errors import AnswerCancelled, BadInput, BadPayload, SinkUnavailable
from pipeline.records.levels import ERROR_LEVELS, LEVELS
from pipeline.records.pattern_query import PATTERN_ORDERS, PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.settings import Settings
from pipeline.sinks.answers import engine as engines
from pipeline.sinks.answers.around import with_context
from pipeline.sinks.answers.choose import answers_of
from pipeline.sinks.answers.engine import Engine, RowFile
from pipeline.sinks.answers.files import FileAnswers
from pipeline.sinks.answers.indices import IndexAnswers
from pipeline.sinks.parquet import ParquetSink
from pipeline.store.folder import Folder


def kept(sink: ParquetSink, rows: list[Row], sealed: int) -> None:
    """Stores a batch of each row; the first ones are sealed."""
    for number, one in enumerate(rows):
        if number == sealed:
            seal(sink)
        sink.write(f"b{number}", frame([one]))
    if sealed >= len(rows):
        seal(sink)


class FileContract(AnswersContract):
    SEALED = 0

    @pytest.fixture
    def ask(self, tmp_path: Path) -> Iterator[Ask]:
        opened: list[FileAnswers] = []

        def asked(rows: list[Row]) -> FileAnswers:
            sink = ParquetSink(tmp_path / "results")
            half = len(rows) * self.SEALED // 2
            for name, some in (("sealed", rows[:half]), ("open", rows[half:])):
                if some:
                    sink.write(name, frame(some))
                if name == "sealed":
                    seal(sink)
            opened.append(FileAnswers(sink))
            return opened[-1]

        yield asked
        for answers in opened:
            answers.close()


class TestOpenFiles(FileContract):
    pass


class TestSealedFiles(FileContract):
    SEALED = 2


class TestHalfOfTheFilesSealed(FileContract):
    SEALED = 1


# Whole five minutes, so that counts by five minutes and lines fall into the same buckets of a trend.
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "timestamp": st.integers(0, 48 * 12).map(lambda n: FIRST + n * timedelta(minutes=5)),
            "workload": st.sampled_from(["shop", "bank"]),
            "template_id": st.sampled_from([None, 0, 1, 2, -3]),
            "level": st.sampled_from([None, "info", "error", "fatal"]),
            "anomalous": st.sampled_from([None, False, True]),
            "score": st.sampled_from([None, 0.25, 0.75]),
            "message": st.text("aB %_\\'\x00üß", max_size=4),
        }
    ),
    max_size=16,
)
SPANS = st.tuples(st.integers(0, 48 * 12), st.integers(0, 48 * 12)).map(
    lambda span: tuple(FIRST + n * timedelta(minutes=5) for n in sorted(span))
)


def numbered(found: list[Row]) -> list[Row]:
    return [row(n + 1, "k", **one) for n, one in enumerate(found)]


def matches(one: Row, query: ResultQuery) -> bool:
    return (
        (query.since is None or one["timestamp"] >= query.since)
        and (query.until is None or one["timestamp"] < query.until)
        and (query.workloads is None or one["workload"] in query.workloads)
        and (query.level is None or one["level"] in LEVELS[LEVELS.index(query.level) :])
        and (query.template_id is None or (one["template_id"] or 0) == query.template_id)
        and (not query.anomalous or one["anomalous"] is True)
        and (query.text is None or query.text.lower() in one["message"].lower())
    )


@settings(max_examples=25)
@given(
    found=ROWS,
    sealed=st.integers(0, 16),
    removed=st.sets(st.integers(0, 15), max_size=3),
    span=st.none() | SPANS,
    asked=st.fixed_dictionaries(
        {
            "limit": st.integers(1, 6),
            "workloads": st.sampled_from([None, ("shop",), ("bank", "shop")]),
            "level": st.sampled_from([None, "error"]),
            "template_id": st.sampled_from([None, 0, 1]),
            "anomalous": st.booleans(),
            "text": st.none() | st.text("ab%_\\'Üß", min_size=1, max_size=2),
        }
    ),
)
def test_lines_are_those_of_a_plain_model(
    *,
    tmp_path_factory: pytest.TempPathFactory,
    found: list[Row],
    sealed: int,
    removed: set[int],
    span: tuple[Any, Any] | None,
    asked: dict[str, Any],
) -> None:
    rows = numbered(found)
    sink = ParquetSink(tmp_path_factory.mktemp("results"))
    kept(sink, rows, sealed)
    for number in removed:
        sink.remove(f"b{number}", "")
    there = [one for n, one in enumerate(rows) if n not in removed or n < sealed]  # sealed batches stay
    query = ResultQuery(**asked, **dict(zip(("since", "until"), span or (None, None), strict=True)))
    wanted = sorted(
        (one for one in there if matches(one, query)), key=lambda one: (one["timestamp"], one["record_id"])
    )
    with closing(FileAnswers(sink)) as answers:
        assert answers.lines(query).equals(frame(wanted[-query.limit :]))


@settings(max_examples=25)
@given(
    found=ROWS,
    sealed=st.integers(0, 16),
    span=SPANS,
    other=st.none() | SPANS,
    workloads=st.sampled_from([None, ("shop",)]),
    order=st.sampled_from(list(PATTERN_ORDERS)),
)
def test_patterns_are_those_of_a_plain_model(
    *,
    tmp_path_factory: pytest.TempPathFactory,
    found: list[Row],
    sealed: int,
    span: tuple[Any, Any],
    other: tuple[Any, Any] | None,
    workloads: tuple[str, ...] | None,
    order: Any,
) -> None:
    rows = numbered(found)
    sink = ParquetSink(tmp_path_factory.mktemp("results"))
    kept(sink, rows, sealed)
    now, then = (
        [one for one in rows if begin <= one["timestamp"] < end and (one["template_id"] or 0) >= 0]
        for begin, end in (span, other or (FIRST, FIRST))
    )
    since, until = span
    query = PatternQuery(since=since, until=until, against=other, workloads=workloads, order=order, buckets=4)
    wanted = []
    for key in {(one["workload"], one["template_id"] or 0) for one in now + then}:
        mine, before = (
            [one for one in some if (one["workload"], one["template_id"] or 0) == key] for some in (now, then)
        )
        if workloads is not None and key[0] not in workloads:
            continue
        trend = [0] * 4
        for one in mine:
            trend[min(3, (one["timestamp"] - since) // ((until - since) / 4))] += 1
        some = mine or before
        wanted.append(
            {
                "workload": key[0],
                "template_id": key[1],
                "records": len(mine),
                "before": len(before),
                "change": (len(mine) + 1) / (len(before) + 1),
                "anomalous": sum(one["anomalous"] is True for one in mine),
                "severe": sum(one["level"] in ERROR_LEVELS for one in mine),
                "score": max((one["score"] for one in some if one["score"] is not None), default=None),
                "first": min(one["timestamp"] for one in some),
                "last": max(one["timestamp"] for one in some),
                "trend": trend,
            }
        )
    wanted.sort(key=lambda one: (one["workload"], one["template_id"]))
    for column, down in reversed(PATTERN_ORDERS[query.order]):
        wanted.sort(key=lambda one, column=column: one[column], reverse=down)
    with closing(FileAnswers(sink)) as answers:
        page, rates = answers.patterns(query), answers.rates(query)
    for name, records, anomalous, severe, trend in rates.iter_rows():
        mine = [one for one in wanted if one["workload"] == name]
        assert (records, anomalous, severe) == tuple(
            sum(one[column] for one in mine) for column in ("records", "anomalous", "severe")
        )
        assert trend == [sum(column) for column in zip(*(one["trend"] for one in mine), strict=True)]
    assert set(rates["workload"]) == {one["workload"] for one in wanted if one["records"]}
    assert page.drop("sample").to_dicts() == wanted
    # Counts by the hour bring the samples of a part that is cut: such a line may stand before the span.
    hours = [begin.replace(minute=0, second=0, microsecond=0) for begin, _ in (span, other or (FIRST, FIRST))]
    ends = [end for _, end in (span, other or (FIRST, FIRST))]
    messages = {
        one["message"]
        for one in rows
        if any(begin <= one["timestamp"] < end + HOUR for begin, end in zip(hours, ends, strict=True))
    }
    assert set(page["sample"]) <= messages


@given(hits=st.sets(st.integers(0, 60), min_size=1, max_size=6), records=st.integers(1, 5))
def test_context_is_what_is_near_enough_in_the_order_of_lines(hits: set[int], records: int) -> None:
    rows = [row(n) for n in range(61)]
    shown = with_context(frame(rows), frame([rows[n] for n in sorted(hits)]), records)
    expected = [n for n in range(61) if any(abs(n - hit) <= records for hit in hits)]
    assert shown["line"].sort().to_list() == expected
    assert set(shown.filter("hit")["line"]) == hits


def test_without_hits_there_is_no_context() -> None:
    assert with_context(frame(LINES), frame([]), 3).is_empty()


def test_a_level_means_itself_and_the_graver_ones() -> None:
    assert ResultQuery(limit=1, level="error").levels == ("error", "critical", "fatal")
    assert ResultQuery(limit=1).levels == LEVELS


def test_the_settings_choose_the_answers(tmp_path: Path) -> None:
    here = Settings(data_dir=tmp_path, opensearch_url="http://localhost:9")
    for sinks, kind in (
        (("parquet",), FileAnswers),
        (("opensearch", "parquet"), FileAnswers),
        (("opensearch",), IndexAnswers),
    ):
        with closing(answers_of(here.replace(sinks=sinks))) as answers:
            assert isinstance(answers, kind)


def test_old_parts_are_not_read_once_all_hits_are_newer(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    for day in range(9):
        sink.write(f"b{day}", frame([row(n, f"d{day}", timestamp=FIRST + day * DAY) for n in range(5)]))
    for part in sink.parts()[:6]:
        sink.files.file(part).write_bytes(b"damaged")
    with closing(FileAnswers(sink)) as answers:
        assert answers.lines(ResultQuery(limit=5))["record_id"].to_list() == [f"d8-{n}" for n in range(5)]
        with pytest.raises(BadPayload, match="remove the damaged file"):
            answers.lines(ResultQuery(limit=5, text="nowhere"))


def test_a_file_without_rights_is_no_damage(tmp_path: Path) -> None:
    """Root reads every file, so the words are DuckDB's."""
    said = f'IO Error: Cannot open file "{tmp_path}/a.parquet": {os.strerror(13)}'
    with Engine([tmp_path]) as engine:
        with (
            pytest.raises(SinkUnavailable, match="give the right to read them") as refused,
            engine.question(),
        ):
            raise duckdb.IOException(said)
        assert "remove" not in str(refused.value)


@pytest.mark.parametrize(
    "fault",
    [
        duckdb.IOException('IO Error: Could not write file "/cache/x.tmp": No space left on device'),
        duckdb.InternalException("INTERNAL Error: Attempted to access index 3 within vector of size 3"),
        duckdb.IOException("IO Error: Could not read from file: Input/output error"),
    ],
    ids=["disk full", "a fault of DuckDB", "a transient error"],
)
def test_nobody_is_told_to_remove_files_that_are_whole(tmp_path: Path, fault: duckdb.Error) -> None:
    ParquetSink(tmp_path).write("a", frame([row(1)]))
    with (
        Engine([tmp_path]) as engine,
        pytest.raises(SinkUnavailable, match="cannot be answered now") as refused,
        engine.question(),
    ):
        raise fault
    assert "remove the" not in str(refused.value)


@pytest.mark.parametrize("harm", [b"", b"PAR1 no parquet PAR1", None])
def test_a_damaged_file_is_named(tmp_path: Path, harm: bytes | None) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("a", frame([row(1)]))
    sink.write("b", frame([row(2)]))
    file = sink.files.file(sink.parts()[1])
    file.write_bytes(file.read_bytes()[:-40] if harm is None else harm)
    with closing(FileAnswers(sink)) as answers:
        questions = (
            lambda: answers.lines(ResultQuery(limit=5)),
            lambda: answers.context(frame([row(1)]), 2),
            lambda: answers.patterns(PatternQuery(since=FIRST, until=FIRST + DAY)),
        )
        for question in questions:
            with pytest.raises(BadPayload, match=f"results cannot be read from {file} "):
                question()
        file.unlink()
        assert answers.lines(ResultQuery(limit=5))["line"].to_list() == [1], "as the error says"


def test_a_bucket_is_answered_from_copies(tmp_path: Path) -> None:
    class Remote:
        """Objects that are no folder of this machine."""

        def __init__(self, folder: Folder) -> None:
            self._folder = folder

        def __getattr__(self, name: str) -> Any:
            return getattr(self._folder, name)

    sink = ParquetSink(Remote(Folder(tmp_path / "far")), tmp_path / "cache")  # type: ignore[arg-type]
    sink.write("b", frame(LINES))
    seal(sink)
    with closing(FileAnswers(sink)) as answers:
        assert answers.lines(ResultQuery(limit=9)).equals(frame(LINES))
        assert answers.patterns(PatternQuery(since=FIRST, until=FIRST + DAY)).height == 4


def test_names_of_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "it's [a]* date=1?")
    sink.write("b", frame(LINES))
    with closing(FileAnswers(sink)) as answers:
        assert answers.lines(ResultQuery(limit=9)).height == 5


# Seconds of work for two threads, in a memory that suffices.
ENDLESS = "SELECT count(*) AS line FROM range(1_000_000_000_000) AS numbers(n) WHERE sqrt(n) = 0.5"


def asked(engine: Engine, said: list[Any], question: str = ENDLESS) -> None:
    try:
        with engine.question():
            said.append(engine.rows(question, schema={"line": pl.Int64}).item())
    except AnswerCancelled as exc:
        said.append(exc)


def test_a_question_is_cancelled_from_another_thread_and_the_next_one_is_answered(tmp_path: Path) -> None:
    said: list[Any] = []
    with Engine([tmp_path]) as engine:
        thread = threading.Thread(target=asked, args=(engine, said))
        thread.start()

        def ended() -> bool:
            engine.cancel()
            return not thread.is_alive()

        assert wait_until(ended, timeout_s=10)
        assert [str(one) for one in said] == ["the question was cancelled"]
        with engine.question():
            assert engine.rows("SELECT 1 AS line", schema={"line": pl.Int64}).item() == 1


def test_a_question_is_cancelled_while_its_answer_is_on_its_way_to_polars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Engine([]) as engine:

        def interrupted(_table: object) -> pl.DataFrame:
            engine.cancel()
            raise pl.exceptions.ComputeError("got external error: INTERRUPT Error: Interrupted!")

        said: list[Any] = []
        frames = SimpleNamespace(DataFrame=interrupted, exceptions=pl.exceptions)
        with monkeypatch.context() as patched:
            patched.setattr(engines, "pl", frames)
            with pytest.raises(AnswerCancelled), engine.question():
                engine.table("large", "SELECT 1 AS line")
                engine.rows("SELECT line FROM large", schema={"line": pl.Int64})
        asked(engine, said, "SELECT count(*) AS line FROM duckdb_tables() WHERE table_name = 'large'")
        assert said == [0], "no table of a cancelled question takes memory"


def test_a_question_ends_at_its_limit(tmp_path: Path) -> None:
    said: list[Any] = []
    with Engine([tmp_path], limit_s=0.1) as engine:
        asked(engine, said)
    assert str(said[0]).startswith("the answer takes longer than 0.1 s; ask for a shorter span")


@pytest.mark.parametrize("spills", [False, True])
def test_memory_is_bounded_and_temporary_files_go_with_the_engine(tmp_path: Path, spills: bool) -> None:
    big = "SELECT n AS line FROM range(8_000_000) AS numbers(n) ORDER BY hash(n)"
    with Engine([], cache=tmp_path if spills else None, memory="64MB") as engine, engine.question():
        if spills:
            assert engine.rows(big, schema={"line": pl.Int64}).height == 8_000_000
            assert list(tmp_path.glob("answers-*"))
        else:
            with pytest.raises(engines.duckdb.OutOfMemoryException):
                engine.rows(big, schema={"line": pl.Int64})
    assert list(tmp_path.iterdir()) == []


def test_more_memory_than_there_is_becomes_a_sentence(tmp_path: Path) -> None:
    with (
        Engine([]) as engine,
        pytest.raises(BadInput, match=r"needs more than 512MB of memory .*; ask for a shorter span"),
        engine.question(),
    ):
        raise engines.duckdb.OutOfMemoryException


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / "answers-1-a", tmp_path / "answers-2-b"
    for folder, age in ((old, 2 * engines.STALE_S), (young, 60)):
        folder.mkdir()
        changed = time.time() - age
        engines.os.utime(folder, (changed, changed))
    Engine([], cache=tmp_path).close()
    assert list(tmp_path.iterdir()) == [young]


def test_files_of_other_folders_are_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "a.parquet"
    outside.parent.mkdir()
    frame(LINES).write_parquet(outside)
    for folders, seen in ([tmp_path / "outside"], 5), ([tmp_path / "out"], None):
        with Engine(folders) as engine:
            if seen is None:
                with pytest.raises(SinkUnavailable, match="disabled by configuration"), engine.question():
                    engine.view("lines", [RowFile(path=outside)], RESULT_SCHEMA)
            else:
                with engine.question():
                    engine.view("lines", [RowFile(path=outside)], RESULT_SCHEMA)
                    assert engine.rows("SELECT line FROM lines", schema=RESULT_SCHEMA).height == seen


def test_dropped_rows_are_no_answer(tmp_path: Path) -> None:
    rows = [row(n) for n in range(50)]
    frame(rows).write_parquet(tmp_path / "a.parquet", row_group_size=7)
    out = sorted(random.Random(1).sample(range(50), 20))
    ranges = tuple((n, n + 1) for n in out)
    with Engine([tmp_path]) as engine, engine.question():
        engine.view("lines", [RowFile(path=tmp_path / "a.parquet", dropped=ranges)], RESULT_SCHEMA)
        found = engine.rows("SELECT line FROM lines", schema=RESULT_SCHEMA)
    assert sorted(found["line"]) == [n for n in range(50) if n not in out]
