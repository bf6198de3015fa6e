"""What the watcher is told of a batch: counts by minute and template."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records.batch import Purpose
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.watching.observation import RATES, Observation, observe, observe_all

START = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
BATCH = SimpleNamespace(
    batch_id="b", workload="shop", rescore=False, backfill=False, accepted_ms=0,
    meta=SimpleNamespace(purpose=Purpose.SCORE, source="a.log"),
)  # fmt: skip

# Seconds after START, None for a record without a time; and a template, None for one that was not looked for.
RECORDS = st.lists(
    st.tuples(
        st.none() | st.integers(-90, 90), st.none() | st.sampled_from((UNCLASSIFIED, 1, 2, 2**40)), st.booleans()
    ),
    min_size=1,
    max_size=30,
)  # fmt: skip


def test_lines_without_a_time_of_their_own_are_in_no_rate() -> None:
    blank = dict.fromkeys(RESULT_SCHEMA)
    rows = pl.DataFrame(
        [
            blank | {"lines": 1, "template_id": 1, "timestamp": START, "timed": timed}
            for timed in (True, False)
        ],
        schema=RESULT_SCHEMA,
    )
    found = observe(BATCH, rows, None)  # type: ignore[arg-type]
    assert found is not None and found.rates["n"] == [1]


def test_an_anomaly_has_the_time_of_its_timed_records_alone() -> None:
    blank = dict.fromkeys(RESULT_SCHEMA) | {"lines": 1, "anomalous": True, "score": 0.9}
    rows = pl.DataFrame(
        [
            blank | {"template_id": template, "timestamp": START + timedelta(seconds=at), "timed": timed}
            for template, at, timed in ((1, 60, False), (1, 5, True), (1, 0, False), (2, 9, False))
        ],
        schema=RESULT_SCHEMA,
    )
    seen = observe(BATCH, rows, None)  # type: ignore[arg-type]
    assert seen is not None
    begin = int(START.timestamp() * 1000)
    assert seen.anomalies.frame().sort("template_id").select(
        "template_id", "first", "last", "timed"
    ).rows() == [
        (1, begin + 5_000, begin + 5_000, True),
        (2, begin + 9_000, begin + 9_000, False),
    ]


def test_news_is_no_anomaly_unless_a_person_marked_it() -> None:
    blank = dict.fromkeys(RESULT_SCHEMA) | {"lines": 1, "anomalous": True, "score": 0.5, "timestamp": START}
    said = "never-said:900 saved"
    reasons = ([said], ["new-template"], ["marked:anomalous by ann", said], None)
    rows = [blank | {"template_id": number, "reasons": why} for number, why in enumerate(reasons, start=1)]
    seen = observe(BATCH, pl.DataFrame(rows, schema=RESULT_SCHEMA), None)  # type: ignore[arg-type]
    assert seen is not None and sorted(seen.anomalies["template_id"]) == [2, 3, 4]


def test_workloads_that_are_observed_together_have_what_each_has_alone() -> None:
    blank = dict.fromkeys(RESULT_SCHEMA) | {"lines": 1, "timed": True, "reasons": [], "model_version": "v1"}
    several = []
    for number in range(5):
        rows = pl.DataFrame(
            [
                blank
                | {"template_id": at % 3, "score": 0.1 * at, "anomalous": number != 1 and at % 2 == 0}
                | {"timestamp": START + timedelta(seconds=at), "line": at, "message": f"{number} {at}"}
                for at in range(6)
            ],
            schema=RESULT_SCHEMA,
        )
        lists = [[None if number == 2 or at == 3 else f"s{at % 2}"] for at in range(6)]
        keys = pl.Series(lists, dtype=pl.List(pl.String))
        several.append((BATCH, rows, None if number == 4 else keys))
    together = observe_all(*zip(*several, strict=True))  # type: ignore[arg-type]
    for one, found in zip(several, together, strict=True):
        alone = observe(*one)  # type: ignore[arg-type]
        assert found is not None and alone is not None
        assert found.pack() == alone.pack()
    sizes = [(found.events.height, found.anomalies.height) for found in together if found]
    assert sizes == [(5, 3), (5, 0), (0, 3), (5, 3), (0, 3)]


@given(RECORDS)
def test_lines_are_counted_by_minute_and_template(records: list[tuple[int | None, int | None, bool]]) -> None:
    blank = dict.fromkeys(RESULT_SCHEMA)
    rows = pl.DataFrame(
        [
            blank
            | {"lines": int(whole), "template_id": template}
            | {"timestamp": None if at is None else START + timedelta(seconds=at)}
            for at, template, whole in records
        ],
        schema=RESULT_SCHEMA,
    )
    wanted = Counter(
        (int(START.timestamp() + at) // 60, template)
        for at, template, whole in records
        if whole and at is not None and template not in (None, UNCLASSIFIED)
    )
    seen = observe(BATCH, rows, None)  # type: ignore[arg-type]
    rates = RATES.empty() if seen is None else seen.rates
    assert list(rates.rows()) == [(*at, n) for at, n in sorted(wanted.items())]


def test_values_are_counted_by_variable_and_survive_packing() -> None:
    blank = dict.fromkeys(RESULT_SCHEMA)
    rows = pl.DataFrame(
        [
            blank
            | {
                "lines": 1,
                "template_id": 1 + at % 40,
                "timestamp": START + timedelta(minutes=at % 8),
                "timed": True,
            }
            | {
                "raw": f'{{"ms": {at % 3}.5, "msg": "done"}}' if at % 2 else f"app: took {at % 3} s",
                "message": "done",
            }
            for at in range(320)
        ],
        schema=RESULT_SCHEMA,
    )
    seen = observe(BATCH, rows, None)  # type: ignore[arg-type]
    assert seen is not None and seen.values.height > 0
    read = Counter({key: sum(counts) for *key, _, counts in seen.values.rows() for key in [tuple(key)]})
    assert sum(read.values()) == 320
    assert {(name, kind) for _, _, name, kind in read} == {("ms", "duration"), ("duration#1", "duration")}
    assert list(Observation.unpack(seen.pack()).values.rows()) == list(seen.values.rows())
