"""Records to verdicts as pure functions: every record once, in order, with an id of its own."""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import detect
from pipeline.detect import WORK_SCHEMA
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.ledger.ledger import Ledger
from pipeline.models.evidence import Evidence, Normal
from pipeline.models.known.patterns import KNOWN_SCHEMA, KnownPatterns
from pipeline.models.threshold import calibrate
from pipeline.models.verdict import Knowledge, verdict_of
from pipeline.records.batch import Batch, Purpose
from pipeline.records.columns import lists_of_text
from pipeline.records.delivery import Claim, Meta, Stage
from pipeline.records.schema import RAW_SCHEMA, RESULT_SCHEMA, pack_frame, raw_frame, unpack_frame
from pipeline.records.verdict import UNCLASSIFIED, Verdict, pattern_ids  # fmt: skip
from pipeline.settings import Settings
from pipeline.sources.framing import Framer

ARRIVED = datetime(2026, 11, 20, 10, tzinfo=UTC)
MASKS = MaskSet.load()
META = Meta(
    batch_id="b",
    source="app.log",
    source_key="00aa",
    purpose=Purpose.SCORE,
    arrived=ARRIVED,
    formats=(),
    zone="UTC",
)
LINES = [
    "2026-11-20 09:00:00 INFO user 17 logged in",
    "2026-11-20 09:00:01 ERROR user 18 logged in",
    "2026-11-20 09:00:02 INFO user 19 logged in",
    "2026-11-20 09:00:03 INFO cache is warm",
]


def verdict(template_id: int, score: float | None = 0.5) -> Verdict:
    return Verdict(
        template_id=template_id, score=score, anomalous=None if score is None else True, reasons=("rare:1/9",)
    )


def answered(work: pl.DataFrame, score: float | None = 0.5) -> pl.DataFrame:
    return detect.answer(
        work, {key: verdict(n, score) for n, key in enumerate(work["key"].to_list(), start=1)}
    )


def results_of(records: pl.DataFrame, meta: Meta = META, version: str = "m1") -> pl.DataFrame:
    prepared = detect.prepare(records, meta, MASKS)
    return detect.result_rows(prepared, answered(detect.distinct(prepared, version)), meta, "shop")


# Preparing


def test_a_line_that_differs_only_in_its_parameters_is_one_distinct_line_per_severity() -> None:
    prepared = detect.prepare(raw_frame(LINES), META, MASKS)
    assert prepared["masked"].to_list() == ["user <NUM> logged in"] * 3 + ["cache is warm"]
    work = detect.distinct(prepared, "m1")
    assert dict(work.schema) == WORK_SCHEMA
    assert work.select("masked", "severe", "level").rows() == [
        ("user <NUM> logged in", False, "info"),
        ("user <NUM> logged in", True, "error"),
        ("cache is warm", False, "info"),
    ]
    assert detect.unknown(work).height == work.height
    assert work["version"].unique().to_list() == ["m1"]


def test_the_key_tells_severe_from_plain_and_only_that() -> None:
    prepared = detect.prepare(raw_frame(LINES), META, MASKS)
    ids, keys = prepared["pattern_id"].to_list(), prepared["key"].to_list()
    assert ids[0] == ids[1] == ids[2] == pattern_ids(["user <NUM> logged in"])[0]
    assert keys[0] == keys[2] == ids[0]
    assert keys[1] == ids[0] ^ 1
    assert keys[3] == ids[3]


def test_a_record_without_a_time_gets_the_time_of_arrival() -> None:
    prepared = detect.prepare(raw_frame(["no header", LINES[0]]), META, MASKS)
    assert prepared["timestamp"].to_list() == [ARRIVED, datetime(2026, 11, 20, 9, tzinfo=UTC)]


def test_what_work_says_of_the_records_stands_for_their_masks() -> None:
    records = raw_frame([*LINES, "no header", *LINES[::-1]])
    prepared = detect.prepare(records, META, MASKS)
    work = unpack_frame(pack_frame(detect.with_rows(detect.distinct(prepared, "m1"), prepared)))
    assert dict(work.schema) == WORK_SCHEMA
    blind = MaskSet.of([])  # would give every line a key of its own
    assert detect.prepare_all([records], [META], blind, [work])[0].equals(prepared.drop("masked"))
    work = detect.with_evidence(work, dict.fromkeys(work["pattern_id"].to_list(), Evidence(surprisal=1.0)))
    assert detect.prepare_all([records], [META], blind, [answered(work)])[0].equals(prepared.drop("masked"))


@pytest.mark.parametrize("damage", ["no rows", "too few records", "a row twice"])
def test_records_are_masked_again_where_work_does_not_place_them_all(damage: str) -> None:
    records = raw_frame(LINES)
    prepared = detect.prepare(records, META, MASKS)
    work = detect.distinct(prepared, "m1")
    if damage != "no rows":
        work = detect.with_rows(work, prepared if damage == "a row twice" else prepared.head(2))
    if damage == "a row twice":
        work = work.with_columns(
            pl.Series("rows", [[0, 1, 1]] + [[3]] * (work.height - 1), dtype=work.schema["rows"])
        )
    assert detect.prepare_all([records], [META], MASKS, [work])[0].equals(prepared)


# Answering


def test_answers_fill_their_rows_and_leave_the_others_alone() -> None:
    work = detect.distinct(detect.prepare(raw_frame(LINES), META, MASKS), "m1")
    keys = work["key"].to_list()
    assert detect.answer(work, {}) is work
    some = detect.answer(work, {keys[2]: verdict(9), 12345: verdict(10)})
    assert some.drop("template_id", "score", "anomalous", "reasons").equals(
        work.drop("template_id", "score", "anomalous", "reasons")
    )
    assert some["template_id"].to_list() == [None, None, 9]
    assert detect.unknown(some)["key"].to_list() == keys[:2]
    whole = detect.answer(some, {keys[0]: verdict(1), keys[1]: verdict(2, None)})
    assert whole["template_id"].to_list() == [1, 2, 9]
    assert whole["score"].to_list() == [0.5, None, 0.5]
    assert detect.unknown(whole).is_empty()


def test_evidence_reaches_the_unknown_rows_of_its_pattern_and_no_other() -> None:
    work = detect.distinct(detect.prepare(raw_frame(LINES), META, MASKS), "m1")
    work = detect.answer(work, {work["key"][1]: verdict(5)})
    first = Evidence(surprisal=1.5, words=("user",), unseen=(), tokens=3, severity="failed")
    last = Evidence(surprisal=0.0)
    ids = work["pattern_id"].to_list()
    filled = detect.with_evidence(work, {ids[2]: last, ids[1]: last, ids[0]: first})
    assert filled["surprisal"].to_list() == [1.5, None, 0.0]
    assert filled["words"].to_list() == [["user"], None, []]
    assert filled["severity"].to_list() == ["failed", None, None]
    assert dict(unpack_frame(pack_frame(filled)).schema) == WORK_SCHEMA
    below = detect.with_evidence(pl.concat([work, work.reverse()]), {ids[2]: last, ids[0]: first})
    assert below["surprisal"].to_list() == [1.5, None, 0.0, 0.0, None, 1.5], "of several batches at once"
    with pytest.raises(KeyError):
        detect.with_evidence(work, {ids[0]: first})


# Judging


def row(**changes: Any) -> dict[str, Any]:
    plain = {
        "pattern_id": 7, "surprisal": 0.1, "words": [], "unseen": [], "tokens": 2, "severity": None, "severe": False,
        "level": "info", "novelty": 0.0, "prior": 0.0,
    }  # fmt: skip
    return {**plain, **changes}


KNOWN = KnownPatterns(
    pl.DataFrame(
        [{"pattern_id": 7, "count": 90, "template_id": 3, "severe": False, "baseline": False}],
        schema=KNOWN_SCHEMA,
    )
)
KNOWLEDGE = Knowledge(
    calibration=calibrate([Normal(evidence=Evidence(surprisal=s)) for s in (1.0, 1.1, 1.2)], total=100),
    known=KNOWN,
)


def test_without_a_model_a_line_is_warming_and_neither_normal_nor_anomalous() -> None:
    answer = verdict_of(row(surprisal=None, words=None), 3, None)
    assert (answer.score, answer.anomalous, answer.reasons, answer.template_id) == (
        None,
        None,
        ("warming",),
        3,
    )
    assert verdict_of(row(), UNCLASSIFIED, None).reasons == ("warming", "unclassified")


def test_a_template_is_new_when_training_has_no_line_of_it() -> None:
    assert "new-template" not in verdict_of(row(), 3, KNOWLEDGE).reasons
    assert "new-template" in verdict_of(row(pattern_id=8), 4, KNOWLEDGE).reasons
    past = verdict_of(row(pattern_id=8), UNCLASSIFIED, KNOWLEDGE)
    assert past.reasons[-1] == "unclassified"
    assert past.score is not None


# Results


def test_results_have_the_public_columns_and_the_verdict_of_each_line() -> None:
    out = results_of(raw_frame(LINES))
    assert dict(out.schema) == RESULT_SCHEMA
    assert out["template_id"].to_list() == [1, 2, 1, 3]
    assert out["record_id"].to_list() == [f"00aa-{n}" for n in range(1, 5)]
    assert out["model_version"].unique().to_list() == ["m1"]
    assert out["workload"].unique().to_list() == ["shop"]
    assert out["source"].unique().to_list() == ["app.log"]
    assert out["raw"].to_list() == LINES


def test_warming_rows_have_no_score_no_answer_and_no_version() -> None:
    prepared = detect.prepare(raw_frame(LINES), META, MASKS)
    work = detect.distinct(prepared, WARMING_VERSION)
    judged = {key: verdict_of({}, n, None) for n, key in enumerate(work["key"].to_list(), start=1)}
    out = detect.result_rows(prepared, detect.answer(work, judged), META, "shop")
    for name in ("score", "anomalous", "model_version"):
        assert out[name].null_count() == out.height
    assert out["reasons"].to_list() == [["warming"]] * out.height
    assert detect.outcomes_all([out])[0] == {"anomalous": 0, "normal": 0, "warming": 4, "unclassified": 0}


def test_outcomes_count_physical_lines() -> None:
    records = raw_frame(LINES).with_columns(pl.Series("lines", [1, 10, 100, 1000], dtype=pl.UInt32))
    prepared = detect.prepare(records, META, MASKS)
    keys = prepared["key"].to_list()
    answers = {keys[0]: verdict(UNCLASSIFIED), keys[1]: verdict(2, None)}
    answers[keys[3]] = Verdict(template_id=3, score=0.1, anomalous=False, reasons=())
    out = detect.result_rows(prepared, detect.answer(detect.distinct(prepared, "m1"), answers), META, "shop")
    assert detect.outcomes_all([out])[0] == {
        "anomalous": 101,
        "normal": 1000,
        "warming": 10,
        "unclassified": 101,
    }


def test_a_stored_batch_scored_again_keeps_its_ids_times_and_messages() -> None:
    records = raw_frame(LINES)
    first = results_of(records, version=WARMING_VERSION)
    again = results_of(detect.stored_records(first, META))
    same = ["record_id", "line", "lines", "timestamp", "level", "message", "pattern_id", "raw"]
    assert again.select(same).equals(first.select(same))
    assert again["model_version"].to_list() == ["m1"] * 4


# Many batches in one pass

TEXTS = (
    "2026-11-20 10:00:0{n} INFO job {n} done",
    "2026-11-20 10:00:0{n} ERROR job {n} failed: disk sda{n}",
    "    at frame {n}",
    "no header and no time in {n}",
    '{"log":"2026-11-20 10:00:0{n} INFO job {n}","kubernetes":{"host":"h{n}"}}',
    '{"level":"warn","msg":"job {n}"}',
    "Nov 20 10:00:0{n} box app[{n}]: job {n}",
    "",
)

FORMATS = (
    ("iso",), ("syslog",), ("iso", "syslog"), (), ("envelope", "iso"), ("envelope",),
    ("syslog", "json", "envelope"),
)  # fmt: skip


@pytest.mark.long
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(0, 9)), min_size=1, max_size=6),
            st.sampled_from(FORMATS),
            st.sampled_from(["UTC", "Europe/Berlin"]),
            st.integers(0, 3),  # half hours after the first arrival
            st.booleans(),  # of a pack
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_batches_prepared_together_are_as_each_alone(
    batches: "list[tuple[list[tuple[str, int]], tuple[str, ...], str, int, bool]]",
) -> None:
    asked, metas = [], []
    for number, (texts, names, zone, late, packed) in enumerate(batches):
        records = raw_frame([text.replace("{n}", str(n)) for text, n in texts])
        if packed:
            records = records.with_columns(source=pl.Series([f"f{i % 2}" for i in range(records.height)]))
        meta = Meta(
            batch_id=f"b{number}", source="s", source_key="00aa", purpose=Purpose.SCORE,
            arrived=ARRIVED + timedelta(minutes=30 * late), formats=names, zone=zone,
        )  # fmt: skip
        asked.append(records)
        metas.append(meta)
    together = detect.prepare_all(asked, metas, MASKS)
    alone = [detect.prepare(*one, MASKS) for one in zip(asked, metas, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.equals(other)
    works = [
        detect.with_rows(detect.distinct(rows, "m1"), rows, meta.formats) if n % 2 else None
        for n, (rows, meta) in enumerate(zip(alone, metas, strict=True))
    ]
    assert [None if work is None else detect.formats_of(work) for work in works] == [
        meta.formats if n % 2 else None for n, meta in enumerate(metas)
    ]
    versions = [("m1", "m2", WARMING_VERSION)[n % 3] for n in range(len(alone))]
    distinct = detect.distinct_all(alone, versions)
    for one, rows, version in zip(distinct, alone, versions, strict=True):
        assert one.equals(detect.distinct(rows, version))
    known = {key: verdict(key % 1000) for one in distinct for key in one["key"].to_list()[:2]}
    asked_for = []

    def lookup(version: str, keys: list[int]) -> dict[int, Verdict]:
        asked_for.append(version)
        assert len(set(keys)) == len(keys)
        return {key: known[key] for key in keys if key in known}

    answered = detect.answer_all(distinct, lookup)
    assert sorted(asked_for) == sorted(set(versions))
    for one, other in zip(answered, distinct, strict=True):
        assert one.equals(detect.answer(other, known))
    judged = detect.Judged(alone, answered, metas, [f"w{n % 2}" for n in range(len(alone))])
    for n, rows in enumerate(detect.result_rows_all(judged)):
        assert rows.equals(detect.result_rows(alone[n], answered[n], metas[n], f"w{n % 2}"))
    again = detect.prepare_all(asked, metas, MASKS, works)
    for one, other, work in zip(again, alone, works, strict=True):
        assert one.equals(other if work is None else other.drop("masked").select(one.columns))


# Ids of records


def pieces(cap: int = 2048) -> pl.DataFrame:
    """A line far too long for one record, between two others."""
    framer = Framer(max_record_bytes=cap)
    lines = ["before", "x" * (cap * 5 + 7), "after"]
    return pl.concat([framer.feed(lines), framer.flush()])


def test_the_pieces_of_one_long_line_have_different_ids() -> None:
    frame = pieces()
    assert frame["lines"].sum() == 3
    assert (frame["lines"] == 0).sum() >= 5, "the line must be in pieces"
    ids = results_of(frame)["record_id"].to_list()
    assert len(set(ids)) == len(ids)
    assert ids[:3] == ["00aa-1", "00aa-2", "00aa-2.1"]
    assert results_of(frame)["record_id"].to_list() == ids


def test_pieces_have_the_same_ids_where_several_batches_are_joined() -> None:
    frames = [pieces(), raw_frame(["a", "b"]), pieces().slice(3), pieces()[[0, 0, 1]]]
    prepared, metas = [], []
    for number, records in enumerate(frames):
        meta = Meta(
            batch_id=f"b{number}", source="s", source_key="00aa", purpose=Purpose.SCORE, arrived=ARRIVED,
            formats=(), zone="UTC",
        )  # fmt: skip
        prepared.append(detect.prepare(records, meta, MASKS))
        metas.append(meta)
    works = [detect.distinct(rows, "m1") for rows in prepared]
    judged = detect.Judged(prepared, works, metas, [f"w{number}" for number in range(len(frames))])
    for number, rows in enumerate(detect.result_rows_all(judged)):
        assert rows.equals(detect.result_rows(prepared[number], works[number], metas[number], f"w{number}"))
    # A key without work is no error: its masks may have changed since.
    works[1] = works[1].head(1)
    for number, rows in enumerate(detect.result_rows_all(judged)):
        assert rows.equals(detect.result_rows(prepared[number], works[number], metas[number], f"w{number}"))


def batch(batch_id: str, records: pl.DataFrame) -> Batch:
    return Batch(
        batch_id=batch_id, workload="shop", source="app.log", source_key="00aa", purpose=Purpose.SCORE,
        arrived=ARRIVED, formats=(), zone="UTC", records=records,
    )  # fmt: skip


def ids_through(ledger: Ledger, name: str) -> list[str]:
    claim = ledger.claim(name, Stage.INGEST, "w")
    assert isinstance(claim, Claim)
    return results_of(ledger.payload(name), claim.meta)["record_id"].to_list()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, "a", "b"]), st.integers(1, 6), st.integers(0, 2)),
        min_size=1,
        max_size=8,
    )
)
def test_lines_that_are_not_in_pieces_have_the_ids_that_windows_give(
    rows: list[tuple[str | None, int, int]],
) -> None:
    schema = {"source": pl.String, "line": pl.UInt64, "lines": pl.UInt32}
    frame = pl.DataFrame(rows, schema=schema, orient="row").with_columns(
        batch=pl.lit(0), key=pl.lit("k"), suffix=pl.lit(".b.")
    )
    for place in (["batch", "line"], ["batch", "source", "line"]):
        if not detect._in_pieces(frame, place):
            plain = [f"k-{line}" for line in frame["line"].to_list()]
            assert detect._ids_of_pieces(frame, place).to_list() == plain


def test_pieces_of_one_line_in_different_batches_have_different_ids(
    client: "redis.Redis", settings: Settings
) -> None:
    ledger, frame = Ledger(client, settings), pieces()
    for cut in range(1, frame.height):
        names = [f"00aa-{cut}-0", f"00aa-{cut}-1"]
        for name, part in zip(names, (frame[:cut], frame[cut:]), strict=True):
            ledger.intake.accept(batch(name, part))
        ids = [i for name in names for i in ids_through(ledger, name)]
        assert len(set(ids)) == frame.height, cut


def test_the_halves_of_a_split_batch_have_different_ids(client: "redis.Redis", settings: Settings) -> None:
    ledger, frame = Ledger(client, settings), pieces()
    waiting, ids = ["b"], []
    ledger.intake.accept(batch("b", frame[2:]))  # begins inside the long line
    while waiting:
        name = waiting.pop()
        claim = ledger.claim(name, Stage.INGEST, "w")
        assert isinstance(claim, Claim)
        halves = ledger.give_up(claim, "died") if claim.records > 1 else []
        waiting += halves
        if not halves:
            ids += results_of(ledger.payload(name), claim.meta)["record_id"].to_list()
    assert len(set(ids)) == len(ids) == frame.height - 2


# Whatever the lines

TEXT = st.sampled_from(
    [
        "",
        " ",
        "user 1 in",
        "user 2 in",
        "ERROR boom",
        "2026-11-20 09:00:00 ERROR user 3 in",
        "\tat x(y)",
        "ü\x00",
        "a\nb",
    ]
) | st.text(max_size=12)


@st.composite
def frames(draw: st.DrawFn) -> pl.DataFrame:
    rows = draw(
        st.lists(
            st.tuples(TEXT, st.sampled_from([0, 1, 1, 1, 3]), st.none() | st.integers(0, 9)),
            min_size=1,
            max_size=25,
        )
    )
    sizes = [n for _, n, _ in rows]
    # a piece (lines = 0) has the number of the line that it continues
    ends = list(itertools.accumulate(sizes))
    starts = [max(1, end if size == 0 else end - size + 1) for end, size in zip(ends, sizes, strict=True)]
    times = [None if t is None else ARRIVED + timedelta(seconds=t) for _, _, t in rows]
    return raw_frame([text for text, _, _ in rows]).with_columns(
        pl.Series("line", starts, dtype=pl.UInt64),
        pl.Series("lines", sizes, dtype=pl.UInt32),
        pl.Series("timestamp", times, dtype=RAW_SCHEMA["timestamp"]),
    )


@settings(max_examples=40, deadline=None)
@given(frames(), st.integers(0, 25))
def test_every_record_comes_out_exactly_once_and_in_order(records: pl.DataFrame, known: int) -> None:
    prepared = detect.prepare(records, META, MASKS)
    assert prepared.select("raw", "line", "lines").equals(records.select("raw", "line", "lines"))
    work = detect.distinct(prepared, "m1")
    keys = work["key"].to_list()
    assert set(keys) == set(prepared["key"].to_list())
    assert len(set(keys)) == len(keys)
    part = detect.answer(work, {key: verdict(n) for n, key in enumerate(keys[:known], start=1)})
    rest = detect.unknown(part)["key"].to_list()
    assert rest == keys[known:]
    whole = detect.answer(
        part, {key: verdict(n) for n, key in enumerate(rest, start=len(keys) - len(rest) + 1)}
    )
    assert whole["key"].to_list() == keys
    out = detect.result_rows(prepared, whole, META, "shop")
    assert out.select("raw", "line", "lines").equals(records.select("raw", "line", "lines"))
    template_of = {key: n for n, key in enumerate(keys, start=1)}
    assert out["template_id"].to_list() == [template_of[key] for key in prepared["key"].to_list()]
    assert out["record_id"].n_unique() == records.height
    assert (
        sum(detect.outcomes_all([out])[0][name] for name in ("anomalous", "normal", "warming"))
        == records["lines"].sum()
    )


@pytest.mark.parametrize("rows", [0, 1, 199, 200, 1_000])
def test_a_column_of_lists_is_what_polars_makes_of_them(rows: int) -> None:
    lists = [("new-template", f"words:ü {i}")[: i % 3] for i in range(rows)]
    made = lists_of_text(lists)
    assert made.dtype == pl.List(pl.String)
    assert made.to_list() == [list(texts) for texts in lists]
    assert lists_of_text([()] * rows).to_list() == [[]] * rows


def test_without_a_model_records_are_judged_by_their_level_and_words_alone() -> None:
    lines = [
        "2026-11-20 09:00:00 INFO user 17 logged in",
        "2026-11-20 09:00:01 ERROR user 18 logged in",
        "2026-11-20 09:00:02 INFO kernel: Out of memory: killed process 7",
        "2026-11-20 09:00:03 CRITICAL judged before",
    ]
    prepared = detect.prepare(raw_frame(lines), META, MASKS)
    warming = {
        key: Verdict(template_id=n, score=None, anomalous=None, reasons=("warming",))
        for n, key in enumerate(prepared["key"].to_list(), start=1)
    }
    work = detect.answer(detect.distinct(prepared, WARMING_VERSION), warming)
    rows = detect.result_rows(prepared, work, META, "app")
    rows = rows.with_columns(rows["anomalous"].scatter(3, False))
    judged = detect.judged_by_words(rows, MASKS)
    assert dict(judged.schema) == RESULT_SCHEMA
    assert judged["anomalous"].to_list() == [None, True, True, False]
    assert judged["reasons"].to_list() == [
        ["warming"],
        ["error-severity:error"],
        ["error-severity:out of memory"],
        ["warming"],
    ]
    assert judged["score"].null_count() == 4
    assert detect.judged_by_words(judged, MASKS).equals(judged)
