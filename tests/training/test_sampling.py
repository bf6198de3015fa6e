"""Records of any number to a sample of bounded size: what is exact, what is drawn, and what a query lets
through."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as quick
from hypothesis import strategies as st

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import FOREIGN_IDS, Template, Templates
from pipeline.errors import BadPayload, SourceUnavailable
from pipeline.records.query import Query
from pipeline.records.schema import LEARN_SCHEMA, RESULT_SCHEMA, SAMPLE_SCHEMA, UTC_US
from pipeline.records.verdict import pattern_ids
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.training import sampling
from pipeline.training.sampling import MAX_TEXT_BYTES, Sampler, TrainingSample, read_parquet

MASKS = MaskSet.load()
NOW = datetime(2026, 11, 20, tzinfo=UTC)
LETTERS = "ghijklmnopqrstuvwxyz"


def word(number: int) -> str:
    """A word of its own for each number, without digits: no mask touches it."""
    out = ""
    for _ in range(5):
        number, letter = divmod(number, len(LETTERS))
        out += LETTERS[letter]
    return out


def record(message: str | None, **more: Any) -> dict[str, Any]:
    known = dict.fromkeys(LEARN_SCHEMA) | {"workload": "shop", "timestamp": NOW, "message": message}
    return known | more


def stored(message: str, **more: Any) -> dict[str, Any]:
    """As our own store keeps it: masked and with a template."""
    return record(message, pattern_id=pattern_ids([MASKS.mask_one(message)])[0], template_id=1) | more


def page(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=LEARN_SCHEMA)


def sampled(*pages: Sequence[dict[str, Any]], limit: int = 100, **options: Any) -> TrainingSample:
    sampler = Sampler(MASKS, limit=limit, **options)
    for rows in pages:
        sampler.add(page(rows))
    return sampler.sample()


def counts(sample: TrainingSample) -> dict[str, int]:
    return dict(sample.frame.select("masked", "count").iter_rows())


# What is counted


def test_a_sample_has_each_pattern_once_with_its_count_most_frequent_first() -> None:
    got = sampled([stored("user 1 in")] * 2 + [stored("user 2 in")] * 3 + [stored("warm")])
    assert dict(got.frame.schema) == SAMPLE_SCHEMA | {
        "first_seen": UTC_US,
        "last_seen": UTC_US,
        "workload": pl.String,
    }
    assert got.frame.select("masked", "count", "severe").rows() == [
        ("user <NUM> in", 5, False),
        ("warm", 1, False),
    ]
    assert got.frame["pattern_id"].to_list() == pattern_ids(["user <NUM> in", "warm"])
    assert (got.lines, got.left_out) == (6, 0)


def test_nothing_read_gives_an_empty_sample() -> None:
    for got in (sampled(), sampled([])):
        assert got.frame.is_empty()
        assert list(got.frame.columns) == [*SAMPLE_SCHEMA, "first_seen", "last_seen", "workload"]
        assert (got.lines, got.workloads) == (0, {})


def test_a_pattern_is_severe_when_any_of_its_lines_was_on_whatever_page() -> None:
    got = sampled(
        [stored("user 1 in", level="info")] * 9 + [stored("warm", level="warning"), stored("cold")],
        [stored("user 2 in", level="fatal")],
    )
    severe = dict(got.frame.select("masked", "severe").iter_rows())
    assert severe == {"user <NUM> in": True, "warm": False, "cold": False}


def test_times_and_workloads_are_those_of_the_records() -> None:
    early, late = NOW - timedelta(hours=2), NOW + timedelta(hours=1)
    got = sampled(
        [stored("warm", timestamp=late, workload="b"), stored("warm", timestamp=early, workload="a")],
        [stored("warm", timestamp=None, workload="b"), stored("cold", timestamp=None, workload=None)],
    )
    assert got.workloads == {"a": 1, "b": 2, "": 1}
    times = {row["masked"]: (row["first_seen"], row["last_seen"]) for row in got.frame.to_dicts()}
    assert times == {"warm": (early, late), "cold": (None, None)}


def test_names_of_workloads_are_bounded_and_their_records_still_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "_WORKLOADS", 3)
    got = sampled(*([stored("warm", workload=f"w{n}")] * 2 for n in range(5)))
    assert got.workloads == {"w0": 2, "w1": 2, "w2": 2}


def test_lines_stored_under_older_masks_that_are_one_pattern_now_are_counted_together() -> None:
    got = sampled(
        [stored("user 1 in", pattern_id=11)] * 4
        + [stored("user 2 in", pattern_id=12, level="error")] * 3
        + [stored("warm")] * 5
    )
    assert got.frame.select("masked", "count", "severe").rows() == [
        ("user <NUM> in", 7, True),
        ("warm", 5, False),
    ]
    assert got.frame["pattern_id"].to_list() == pattern_ids(["user <NUM> in", "warm"])


def test_documents_of_other_programs_are_masked_and_join_the_stored_ones_of_their_pattern() -> None:
    got = sampled(
        [stored("user 1 in"), record("user 7 in")], [record("user 8 in", level="error"), record(None)]
    )
    assert counts(got) == {"user <NUM> in": 3, "<EMPTY>": 1}
    row = got.frame.row(0, named=True)
    assert (row["severe"], row["template_id"]) == (True, 1)
    assert row["pattern_id"] == pattern_ids(["user <NUM> in"])[0]


def test_a_pattern_of_a_baseline_is_as_severe_as_it_was_there_in_whatever_order_pages_come() -> None:
    calm, bad, only = (stored(text, level="info") for text in ("user 1 in", "warm", "cold"))
    error = {"level": "error"}
    pages = [([calm, bad | error], True), ([calm | error, bad], False), ([only | error, bad], False)]
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        sampler = Sampler(MASKS, limit=100)
        for rows, baseline in (pages[at] for at in order):
            sampler.add(page(rows), baseline=baseline)
        rows = sampler.sample().frame.select("masked", "count", "severe", "baseline").sort("masked").rows()
        assert rows == [("cold", 1, True, False), ("user <NUM> in", 2, False, True), ("warm", 3, True, True)]


def test_a_pattern_is_masked_once_however_often_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Counting:
        def mask(self, messages: pl.Series) -> pl.DataFrame:
            asked.extend(messages)
            return MASKS.mask(messages)

    sampler = Sampler(Counting(), limit=100)  # type: ignore[arg-type]
    for _ in range(3):
        sampler.add(page([stored("user 1 in"), stored("user 2 in"), record("loose 5"), record("loose 5")]))
        sampler.sample()
    assert sorted(asked) == ["loose 5", "user 1 in"]


lines_of_any_kind = st.lists(
    st.builds(
        record,
        message=st.sampled_from(["user 1 in", "user 2 in", "warm", "cold 3.5", "", "disk failed"]),
        level=st.sampled_from([None, "info", "error"]),
        workload=st.sampled_from([None, "a", "b"]),
        timestamp=st.sampled_from([None, NOW, NOW + timedelta(hours=1)]),
        pattern_id=st.sampled_from([None]) | st.integers(1, 3),
        template_id=st.sampled_from([None, 0, 4, 9]),
    ).map(
        # What is stored under one id is one pattern.
        lambda row: row if row["pattern_id"] is None else row | {"message": f"kind {word(row['pattern_id'])}"}
    ),
    max_size=40,
)


@quick(deadline=None, max_examples=60)
@given(lines=lines_of_any_kind, cuts=st.lists(st.integers(0, 40), max_size=5), stop=st.booleans())
def test_below_the_limit_counts_are_exact_and_no_cut_into_pages_changes_the_sample(
    lines: list[dict[str, Any]], cuts: list[int], stop: bool
) -> None:
    whole = sampled(lines)
    sampler = Sampler(MASKS, limit=100)
    edges = [0, *sorted(min(cut, len(lines)) for cut in cuts), len(lines)]
    for start, end in pairwise(edges):
        sampler.add(page(lines[start:end]))
        if stop:
            sampler.sample()
    parts = sampler.sample()
    assert parts.frame.equals(whole.frame)
    assert (parts.lines, parts.workloads) == (
        whole.lines, whole.workloads,
    )  # fmt: skip
    assert counts(whole) == Counter(MASKS.mask_one(row["message"]) for row in lines)
    assert (whole.lines, whole.left_out) == (len(lines), 0)


# Past the limit


def flood(*, every: int, singles: int, start: int = 0) -> list[dict[str, Any]]:
    """Ever new lines with a frequent one between them: `every` of them to one of it."""
    rows = []
    for n in range(start, start + singles):
        rows.append(record(f"once {word(n)}"))
        if n % every == 0:
            rows.append(record("steady beat"))
    return rows


@pytest.fixture
def merging_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops happen after a few rows instead of after 65,536."""
    monkeypatch.setattr(sampling, "_MERGE_ROWS", 50)
    monkeypatch.setattr(sampling, "_SLICE_ROWS", 40)


@pytest.mark.long
@pytest.mark.usefixtures("merging_often")
def test_past_the_limit_memory_is_bounded_frequent_patterns_stay_and_every_line_is_counted() -> None:
    limit = 60
    sampler = Sampler(MASKS, limit=limit)
    rows = flood(every=10, singles=3000)
    for start in range(0, len(rows), 100):
        sampler.add(page(rows[start : start + 100]))
        assert len(sampler._text) <= 2 * limit + 100
        assert len(sampler._patterns) <= 2 * limit + 100
        assert sampler._counts.height <= 2 * limit
    got = sampler.sample()
    assert got.frame.height == limit
    assert got.frame.row(0, named=True)["masked"] == "steady beat"
    assert got.frame.row(0, named=True)["count"] == 300, "it was never dropped"
    assert got.lines == len(rows) == int(got.frame["count"].sum()) + got.left_out


@pytest.mark.usefixtures("merging_often")
def test_the_same_pages_and_seed_give_the_same_sample_and_another_seed_another() -> None:
    pages = [flood(every=7, singles=150, start=start) for start in range(0, 900, 150)]
    one, two, other = (sampled(*pages, limit=50, seed=seed) for seed in (1, 1, 2))
    assert one.frame.equals(two.frame)
    assert not one.frame.equals(other.frame)
    assert one.frame["masked"][0] == other.frame["masked"][0] == "steady beat"


def test_no_part_of_the_stream_is_favoured_among_lines_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_MERGE_ROWS", 500)
    monkeypatch.setattr(sampling, "_SLICE_ROWS", 500)
    rows = [record(f"once {word(n)}", timestamp=NOW + timedelta(seconds=n)) for n in range(6000)]
    got = sampled(rows, limit=1000)
    middle = NOW + timedelta(seconds=3000)
    late = got.frame.filter(pl.col("first_seen") >= middle).height
    assert 420 <= late <= 580, "five standard errors around the half"


def test_the_limit_keeps_the_most_frequent_half_and_draws_the_rest() -> None:
    got = sampled(*([record(f"kind {word(n)}")] * n for n in range(1, 41)), limit=10)
    kept = got.frame["count"].to_list()
    assert kept[:5] == [40, 39, 38, 37, 36]
    assert kept[5:] != [35, 34, 33, 32, 31], "the rest is a draw"
    assert len(kept) == 10
    assert got.lines == 820
    assert got.left_out == 820 - sum(kept)


def test_a_heavier_pattern_is_drawn_more_often_by_the_root_of_its_count() -> None:
    chosen = Counter[str]()
    sampler = Sampler(MASKS, limit=2)
    for n in range(400):
        # One sure place; of the two others the second is met four times as often, so it weighs twice as much.
        held = pl.DataFrame(
            {"key": pl.Series([n * 3, n * 3 + 1, n * 3 + 2], dtype=pl.UInt64), "count": [100, 4, 1]}
        )
        chosen[str(sampler._drawn(held)["count"].to_list()[1])] += 1
    assert 220 <= chosen["4"] <= 313, "two of three, give or take five standard errors"


def test_a_long_line_is_cut_but_its_pattern_is_that_of_the_whole() -> None:
    tail = "ü" * 1500
    got = sampled([record(tail + " red"), record(tail + " blue"), record(tail + " red")])
    assert got.frame["count"].to_list() == [2, 1]
    assert all(len(m.encode()) <= MAX_TEXT_BYTES and m.startswith("üü") for m in got.frame["masked"])
    assert got.frame["pattern_id"].to_list() == pattern_ids([tail + " red", tail + " blue"])


def test_long_messages_are_masked_before_many_of_them_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_UNMASKED_CHARS", 400)
    sampler = Sampler(MASKS, limit=100)
    sampler.add(page([record(f"{word(n)} " + "long " * 30) for n in range(20)]))
    assert sum(map(len, sampler._unmasked.values())) < 400
    assert sampler.sample().frame["count"].to_list() == [1] * 20


# Templates


def test_template_ids_are_the_stored_else_the_matching_else_those_of_the_shape() -> None:
    known = [
        Template(template_id=5, text="session of <*> opened now", severe=False, workload="shop"),
        Template(template_id=6, text="session of <*> opened now", severe=True, workload="shop"),
    ]
    got = sampled(
        [
            stored("warm", template_id=3),
            record("session of ann opened now"),
            record("session of bob opened now", level="error"),
            record("queue of red lamps is full"),
            record("queue of blue lamps is full"),
            record("unheard"),
        ],
        templates=known,
    )
    ids = dict(got.frame.select("masked", "template_id").iter_rows())
    assert ids["warm"] == 3
    assert (ids["session of ann opened now"], ids["session of bob opened now"]) == (5, 6)
    assert ids["queue of red lamps is full"] == ids["queue of blue lamps is full"]
    assert ids["unheard"] != ids["queue of red lamps is full"]
    assert ids["queue of red lamps is full"] in FOREIGN_IDS and ids["unheard"] in FOREIGN_IDS


def test_a_shape_that_no_shard_has_made_has_one_id_in_all_trainings() -> None:
    def ids(*rows: dict[str, Any]) -> dict[str, int]:
        return dict(sampled(rows).frame.select("masked", "template_id").iter_rows())

    queue = [record("queue of red lamps is full"), record("queue of blue lamps is full")]
    first = ids(*queue, record("unheard"))
    other = ids(*[record("something else came first")] * 9, record("unheard"), *queue * 2)
    assert {line: other[line] for line in first} == first
    assert ids(record("unheard", level="error"))["unheard"] != first["unheard"], "severe templates are apart"


def test_lines_past_a_template_limit_are_not_one_template() -> None:
    got = sampled([stored("warm and dry", template_id=0), stored("cold", template_id=0)])
    ids = got.frame["template_id"].to_list()
    assert len(set(ids)) == 2 and all(number in FOREIGN_IDS for number in ids)


def test_a_known_template_wins_over_unclassified_and_the_oldest_over_newer_ones() -> None:
    got = sampled(
        [stored("warm", template_id=0), stored("cold", template_id=0)],
        [stored("warm", template_id=9), stored("warm", template_id=8), stored("warm", template_id=None)],
    )
    ids = dict(got.frame.select("masked", "template_id").iter_rows())
    assert ids["warm"] == 8 and ids["cold"] in FOREIGN_IDS


def test_matching_a_line_changes_no_template() -> None:
    templates = Templates(similarity=0.5, depth=4, per_workload=10)
    first, _ = templates.learn("session of ann opened", severe=False, workload="shop")
    assert first is not None
    assert templates.match("session of bob opened", severe=False) == first.template_id
    assert templates.match("session of bob opened", severe=True) is None
    assert templates.match("nothing alike", severe=False) is None
    assert len(templates) == templates.newest_id == 1
    assert templates.learn("session of ann opened", severe=False, workload="shop")[0] == first


def test_shapes_are_told_apart_as_the_settings_ship_them() -> None:
    assert Sampler(MASKS, limit=1)._similarity == Settings().drain.similarity


# Reading the results store


def keep(root: Path, batch: str, *rows: dict[str, Any]) -> Path:
    filled = [dict.fromkeys(RESULT_SCHEMA) | {"lines": 1} | row for row in rows]
    sink = ParquetSink(root)
    sink.write(batch, pl.DataFrame(filled, schema=RESULT_SCHEMA))
    return next(sink.files.file(part) for part in sink.parts() if part.batches[0][0] == batch)


def read(root: Path, **query: Any) -> list[str]:
    return sorted(m for frame in read_parquet(ParquetSink(root), Query(**query)) for m in frame["message"])


def test_no_results_give_no_page(tmp_path: Path) -> None:
    assert list(read_parquet(ParquetSink(tmp_path / "absent"), Query())) == []
    keep(tmp_path, "b1", stored("warm"))
    assert list(read_parquet(ParquetSink(tmp_path), Query(workloads=("other",)))) == []


def test_pages_have_the_schema_and_all_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_PAGE_FILES", 2)
    for n in range(5):
        keep(tmp_path, f"b{n}", stored(f"user {n} in"), stored("warm"))
    pages = list(read_parquet(ParquetSink(tmp_path), Query()))
    assert [frame.height for frame in pages] == [4, 4, 2]
    assert all(dict(frame.schema) == LEARN_SCHEMA for frame in pages)
    sampler = Sampler(MASKS, limit=10)
    for frame in pages:
        sampler.add(frame)
    assert counts(sampler.sample()) == {"user <NUM> in": 5, "warm": 5}


def test_a_page_of_large_files_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = max(keep(tmp_path, f"b{n}", stored("warm")).stat().st_size for n in range(4))
    monkeypatch.setattr(sampling, "_PAGE_BYTES", size * 2)
    assert [frame.height for frame in read_parquet(ParquetSink(tmp_path), Query())] == [2, 2]
    monkeypatch.setattr(sampling, "_PAGE_BYTES", 1)
    assert [frame.height for frame in read_parquet(ParquetSink(tmp_path), Query())] == [1, 1, 1, 1]


NAMES = ("a", "A", "a/b", "*", "x.parquet", ".hidden", "ü" * 90, "a" * 300, "date=2026-11-20", "a b", "[a]")


def test_workloads_are_exact_names_whatever_is_in_them(tmp_path: Path) -> None:
    for n, name in enumerate(NAMES):
        keep(tmp_path, f"b{n}", stored(f"of {word(n)}", workload=name))
    for n, name in enumerate(NAMES):
        assert read(tmp_path, workloads=(name,)) == [f"of {word(n)}"]
    assert read(tmp_path, workloads=("a", "*")) == sorted([f"of {word(0)}", f"of {word(3)}"])
    assert read(tmp_path, workloads=("a*",)) == read(tmp_path, workloads=("",)) == []
    assert len(read(tmp_path)) == len(NAMES)


def test_a_span_has_its_start_and_not_its_end_whatever_folder_a_record_lies_in(tmp_path: Path) -> None:
    hour = timedelta(hours=1)
    # The batch lies in the folder of its first record's day; the others are of the days before and after.
    keep(
        tmp_path,
        "b1",
        stored("own", timestamp=NOW + hour),
        stored("before", timestamp=NOW - 40 * hour),
        stored("start", timestamp=NOW - 2 * hour),
        stored("end", timestamp=NOW + 48 * hour),
    )
    assert read(tmp_path, since=NOW - 2 * hour, until=NOW) == ["start"]
    assert read(tmp_path, until=NOW - 2 * hour) == ["before"]
    assert read(tmp_path, since=NOW + 48 * hour) == ["end"]
    assert read(tmp_path, since=NOW + hour, until=NOW + hour) == []
    elsewhere = (NOW + 48 * hour).astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert read(tmp_path, since=elsewhere) == ["end"]


def test_only_what_was_judged_anomalous_is_left_out(tmp_path: Path) -> None:
    keep(
        tmp_path,
        "b1",
        stored("odd", anomalous=True),
        stored("usual", anomalous=False),
        stored("not judged yet", anomalous=None),
    )
    assert read(tmp_path, exclude_anomalous=True) == ["not judged yet", "usual"]
    assert len(read(tmp_path)) == 3


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ((".*",), {"ERROR code=5", "Überlauf [x", "a+b", "plain"}),
        (("error",), {".* literally", "Überlauf [x", "a+b", "plain"}),
        (("ERR", "A+B"), {".* literally", "Überlauf [x", "plain"}),
        (("überlauf",), {".* literally", "ERROR code=5", "a+b", "plain"}),
        (("ÜBER", "PLAIN"), {".* literally", "ERROR code=5", "a+b"}),
        (("[", "(?i)error", "^a", "$"), {".* literally", "ERROR code=5", "a+b", "plain"}),
        (("",), {".* literally", "ERROR code=5", "Überlauf [x", "a+b", "plain"}),
    ],
)
def test_excluded_words_are_literal_and_of_either_case(
    tmp_path: Path, words: tuple[str, ...], kept: set[str]
) -> None:
    messages = (".* literally", "ERROR code=5", "Überlauf [x", "a+b", "plain")
    keep(tmp_path, "b1", *(stored(message) for message in messages))
    assert set(read(tmp_path, exclude_words=words)) == kept


@quick(deadline=None, max_examples=30)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(-3, 3), st.sampled_from([True, False, None])),
        min_size=1,
        max_size=12,
    ),
    workloads=st.sampled_from([(), ("a",), ("a", "b")]),
    span=st.tuples(st.none() | st.integers(-3, 3), st.none() | st.integers(-3, 3)),
    calm=st.booleans(),
)
def test_what_is_read_is_what_a_plain_filter_lets_through(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, int, bool | None]],
    workloads: tuple[str, ...],
    span: tuple[int | None, int | None],
    calm: bool,
) -> None:
    root, (since, until) = tmp_path_factory.mktemp("results"), span
    day = timedelta(days=1)
    for name in ("a", "b"):
        own = [
            stored(f"n {word(i)}", workload=w, timestamp=NOW + d * day, anomalous=odd)
            for i, (w, d, odd) in enumerate(rows)
            if w == name
        ]
        if own:
            keep(root, f"b-{name}", *own)
    got = read(
        root,
        workloads=workloads,
        since=None if since is None else NOW + since * day,
        until=None if until is None else NOW + until * day,
        exclude_anomalous=calm,
    )
    assert got == sorted(
        f"n {word(i)}"
        for i, (w, d, odd) in enumerate(rows)
        if (not workloads or w in workloads)
        and (since is None or d >= since)
        and (until is None or d < until)
        and not (calm and odd)
    )


@pytest.mark.parametrize("damage", ["cut short", "empty", "body"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    keep(tmp_path, "b1", stored("warm"))
    broken = keep(tmp_path, "b2", *(record(f"cold {word(n)}") for n in range(500)))
    content = bytearray(broken.read_bytes())
    if damage == "body":
        content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    broken.write_bytes(b"" if damage == "empty" else content[: -20 if damage == "cut short" else None])
    with pytest.raises(BadPayload, match=rf"{broken.name}.*remove the damaged file"):
        list(read_parquet(ParquetSink(tmp_path), Query()))


def test_files_of_no_manifest_and_files_that_a_person_removed_are_passed_over(tmp_path: Path) -> None:
    file = keep(tmp_path, "b1", stored("warm"))
    file.with_name(".b9.parquet.part").write_bytes(b"half")
    file.with_name("0-b9.parquet").write_bytes(b"half")
    sink = ParquetSink(tmp_path)
    removed = keep(tmp_path, "b2", stored("cold"))
    parts = sink.parts()
    removed.unlink()
    assert sampling._read(sink, parts, pl.lit(value=True))["message"].to_list() == ["warm"]
    assert read(tmp_path) == ["warm"]
    file.unlink()
    assert sampling._read(sink, parts, pl.lit(value=True)).is_empty()


def test_files_with_more_columns_are_read_with_the_rest(tmp_path: Path) -> None:
    keep(tmp_path, "b1", stored("warm"))
    newer = keep(tmp_path, "b2", stored("cold"))
    frame = pl.read_parquet(newer, hive_partitioning=False)
    frame.with_columns(pl.lit(1).alias("added later")).write_parquet(newer)
    assert read(tmp_path) == ["cold", "warm"]


def test_results_that_may_not_be_read_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, "b1", stored("warm"))

    def refused(*_: Any, **__: Any) -> pl.LazyFrame:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pl, "scan_parquet", refused)
    with pytest.raises(SourceUnavailable, match="give the right to read"):
        list(read_parquet(ParquetSink(tmp_path), Query()))
