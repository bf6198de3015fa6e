"""Values in the text of records, their sketches, and the shifts that are found in them."""

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.records.verdict import Reason
from pipeline.watching.numbers import numbers as module
from pipeline.watching.numbers.alarms import NumberAlarm, number_sentence, quantity
from pipeline.watching.numbers.numbers import MAX_NAMES, MAX_PACKED, MAX_VARIABLES, Numbers
from pipeline.watching.numbers.sketch import MAX_BINS, merged_sketch, quantiles
from pipeline.watching.values.bins import GROWTH, bin_of
from pipeline.watching.values.sampling import MOST_RECORDS, PROBES, ValueSample
from pipeline.watching.values.typed import ValueKind, key_type, typed_values

START = 29_000_000 // 1440 * 1440  # an epoch minute at midnight
Row = tuple[tuple[int, int, str, str], dict[int, int]]
Draw = Callable[[np.random.Generator, int], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


# ---- values in a text --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("request took 12ms", [("duration#1", "duration", 0.012)]),
        ("slept 1.8 s, then 2 minutes", [("duration#1", "duration", 1.8), ("duration#2", "duration", 120.0)]),
        ("up 3h20m1.5s", [("duration#1", "duration", 12_001.5)]),
        ("latency=15us elapsed=120", [("latency", "duration", 15e-6), ("elapsed", "time", 120.0)]),
        ("wrote 12.5 MiB at 3 MB/s", [("size#1", "size", 13_107_200.0), ("size#2", "size", 3e6)]),
        ("read 1,234,567 records of 512 bytes", [("count#1", "count", 1_234_567.0), ("size#1", "size", 512.0)]),
        ('{"status":503, "duration_ms": 12.5}', [("status", "status", 503.0), ("duration_ms", "duration", 0.0125)]),
        ('"GET / HTTP/1.1" 404 512 "-"', [("status#1", "status", 404.0), ("size#1", "size", 512.0)]),
        ("GET /x?y=1 200 12.3 ms", [("status#1", "status", 200.0), ("duration#1", "duration", 0.0123)]),
        ("len: 1893 time: 0.2477829", [("len", "size", 1893.0), ("time", "time", 0.2477829)]),
        ("exited with code: 137, batch_count=3", [("code", "code", 137.0), ("batch_count", "count", 3.0)]),
    ],
)  # fmt: skip
def test_numbers_have_the_type_of_their_unit_their_key_or_their_place(
    text: str, values: list[tuple[str, str, float]]
) -> None:
    assert [(v.name, v.kind, pytest.approx(v.value)) for v in typed_values(text)] == values


@pytest.mark.parametrize(
    "text",
    [
        "10.250.14.38:50010 Served block blk_-1608999687919862906 to /10.251.203.80",
        "2016-09-27 12:30:01,123 woke at 04:47:44 on 27/09/2016",
        "user_id=17 pid=4 port 22 order=58 ts=1700000000.5 seq: 9 offset=12 thread=4",
        "attempt 3rd of v1.2.3, 2x faster on sda1 0x47e9e0 f3d4d4ef-693b-4456",
        "time=1700000000.123",
    ],
)
def test_ids_dates_addresses_and_versions_are_no_values(text: str) -> None:
    assert typed_values(text) == []


@given(st.text(max_size=80), st.text(alphabet='0123456789.,:hms ="', max_size=40))
def test_any_text_is_read_and_no_value_is_negative(a: str, b: str) -> None:
    assert all(value.value >= 0 for value in typed_values(a + b))
    key_type(a)


def test_the_records_that_are_read_are_fair_to_each_template_that_has_values() -> None:
    template = np.array([1] * 9_000 + [2] * 900 + [3] * 5 + [4] * 3_000)
    none, all_of_them = np.zeros(template.size, dtype=np.int64), np.ones(template.size, dtype=bool)
    asked: list[int] = []

    def texts_of(chosen: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[str]:
        asked.extend(chosen.tolist())
        return ["it is so" if template[row] == 4 else "took 5 ms" for row in chosen.tolist()]

    table = ValueSample(none, none, template, all_of_them).tables(texts_of)[0]
    read = {t: sum(counts) for _, t, _, _, _, counts in table.rows()}
    assert sum(read.values()) <= MOST_RECORDS and read[3] == 5 and min(read[1], read[2]) >= MOST_RECORDS // 4
    assert len(asked) <= MOST_RECORDS + 4 * PROBES and 4 not in read


# ---- sketches ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=200), st.sampled_from((0.5, 0.9, 1.0)))
def test_a_quantile_of_a_sketch_is_within_a_bin_of_the_quantile(values: list[float], share: float) -> None:
    sketch: dict[int, float] = {}
    for value in values:
        place = bin_of("duration", value)
        sketch[place] = sketch.get(place, 0.0) + 1.0
    exact = sorted(values)[int(np.ceil(share * len(values) - 1e-9)) - 1]
    (found,) = quantiles(ValueKind.DURATION, sketch, (share,))
    assert exact / GROWTH <= found <= exact * GROWTH


@given(st.lists(st.dictionaries(st.integers(0, 900), st.integers(1, 9), max_size=60), max_size=5))
def test_a_sketch_is_bounded_and_loses_neither_weight_nor_its_highest_bin(
    parts: list[dict[int, int]],
) -> None:
    sketch: dict[int, float] = {}
    for part in parts:
        sketch = merged_sketch(sketch, part)
    assert len(sketch) <= MAX_BINS
    assert sum(sketch.values()) == pytest.approx(sum(sum(part.values()) for part in parts))
    assert max(sketch, default=0) == max((max(part, default=0) for part in parts), default=0)


# ---- shifts ------------------------------------------------------------------------------------------


def counted(kind: str, values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> dict[int, int]:
    numbers, counts = np.unique([bin_of(kind, float(value)) for value in values], return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def rows(
    minutes: range,
    *,
    draw: Draw,
    template: int = 7,
    name: str = "duration#1",
    kind: str = "duration",
    n: int = 20,
) -> Iterator[Row]:
    rng = np.random.default_rng(minutes.start)
    for minute in minutes:
        yield (4 * (START + minute), template, name, kind), counted(kind, draw(rng, n))


def usual(rng: np.random.Generator, n: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return 0.04 * np.exp(0.4 * rng.standard_normal(n))


def slow(rng: np.random.Generator, n: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return 45.0 * usual(rng, n)


def restarted(state: Numbers) -> Numbers:
    """As the next round of any process finds it."""
    return Numbers.unpack(state.pack())


def test_a_latency_fault_is_one_alarm_that_names_both_medians() -> None:
    state, alarms = Numbers(), list[NumberAlarm]()
    for part, draw in ((range(30), usual), (range(30, 40), slow), (range(40, 60), usual)):
        alarms += state.step(rows(part, draw=draw), judged=True)
        state = restarted(state)
    (alarm,) = alarms
    assert alarm.kind is Reason.NUMBER_SHIFT and alarm.minute == START + 30
    sentence = number_sentence(alarm, "request took <DURATION>")
    pattern = r"`request took <DURATION>`: median (1\.[6-9]|2(\.[01])?) s, was (3[7-9]|4[0-3]) ms, in 20 values until "
    assert re.match(pattern, sentence), sentence
    assert not any(variable.episode for variable in state.variables.values())


def test_two_days_of_ordinary_values_with_a_rhythm_are_no_alarm() -> None:
    def daily(rng: np.random.Generator, n: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return usual(rng, n) * (1.0 + 0.5 * np.sin(2 * np.pi * clock[0] / 1440))

    clock, state, alarms = [0], Numbers(), list[NumberAlarm]()
    rng = np.random.default_rng(5)
    for minute in range(0, 2 * 1440, 3):
        clock[0] = minute
        key = (4 * (START + minute), 7, "duration#1", "duration")
        alarms += state.step([(key, counted("duration", daily(rng, 20)))], judged=True)
    assert alarms == []


def test_a_shift_that_stays_is_learnt_as_the_new_level() -> None:
    state = Numbers()
    first = state.step(rows(range(60), draw=usual), judged=True)
    first += state.step(rows(range(60, 900, 2), draw=slow), judged=True)
    again = state.step(rows(range(900, 930), draw=slow), judged=True)
    back = state.step(rows(range(930, 935), draw=usual), judged=True)
    assert [len(first), again, len(back)] == [1, [], 1]


def test_what_is_only_learnt_is_never_an_alarm_and_counts_as_the_past() -> None:
    state = Numbers()
    assert state.step(rows(range(30), draw=usual), judged=False) == []
    assert state.step(rows(range(30, 33), draw=slow), judged=False) == []
    assert len(state.step(rows(range(40, 43), draw=slow), judged=True)) <= 1
    fresh = Numbers()
    fresh.step(rows(range(30), draw=usual), judged=False)
    assert len(fresh.step(rows(range(30, 33), draw=slow), judged=True)) == 1


def test_a_rare_value_that_becomes_frequent_is_judged_from_its_first_full_window_on() -> None:
    state = Numbers()
    assert state.step(rows(range(0, 240, 120), draw=usual, n=3), judged=True) == []
    assert state.step(rows(range(240, 300), draw=usual), judged=True) == []
    assert len(state.step(rows(range(300, 303), draw=slow), judged=True)) == 1


def test_one_value_far_above_all_others_is_an_alarm_of_its_own() -> None:
    def one_far(rng: np.random.Generator, n: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return np.append(usual(rng, n - 1), 600.0)

    state = Numbers()
    state.step(rows(range(60), draw=usual), judged=True)
    (alarm,) = state.step(rows(range(60, 61), draw=one_far), judged=True)
    assert alarm.kind is Reason.NUMBER_OUTLIER and "a value of 10 min" in number_sentence(alarm, None)


def test_errors_among_statuses_are_told_as_shares() -> None:
    def statuses(share: float) -> Draw:
        return lambda rng, n: np.where(rng.random(n) < share, 503.0, 200.0)

    state = Numbers()
    state.step(rows(range(40), draw=statuses(0.01), name="status", kind="status"), judged=True)
    (alarm,) = state.step(rows(range(40, 45), draw=statuses(0.7), name="status", kind="status"), judged=True)
    assert "statuses from 400 on, was" in number_sentence(alarm, "GET <PATH>")


def test_many_variables_that_shift_at_once_are_one_alarm_of_the_workload() -> None:
    def every(minutes: range, draw: Draw) -> list[Row]:
        return sorted(
            (row for t in range(1, 7) for row in rows(minutes, draw=draw, template=t)), key=lambda r: r[0]
        )

    state = Numbers()
    state.step(every(range(30), usual), judged=True)
    (alarm,) = state.step(every(range(30, 33), slow), judged=True)
    assert alarm.cause == "number-shift" and len(alarm.others) == 6
    assert number_sentence(alarm, None).startswith("many values shifted together (T")


def test_a_number_that_jumps_as_an_id_does_is_not_followed() -> None:
    def ids(rng: np.random.Generator, n: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return np.full(n, 10.0 ** rng.uniform(0, 9))

    state = Numbers()
    state.step(rows(range(60), draw=ids, kind="count", name="items"), judged=True)
    assert state.variables == {} and list(state.wild) == [(7, "items")]
    assert restarted(state).wild == state.wild


# ---- bounds ------------------------------------------------------------------------------------------


def test_variables_names_and_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    state, counts = Numbers(), {300 + at: 9 for at in range(60)}
    for minute in range(3):
        names = [(4 * (START + 60 * minute), t, f"k{k}", "count") for t in range(40) for k in range(20)]
        state.step([(key, counts) for key in names], judged=True)
    assert len(state.variables) == MAX_VARIABLES and state.without > 0
    assert all(sum(t == at for t, _, _ in state.variables) <= MAX_NAMES for at in range(40))
    assert len(state.pack()) <= MAX_PACKED
    monkeypatch.setattr(module, "MAX_PACKED", len(state.pack()) // 2)
    assert len(state.pack()) <= module.MAX_PACKED and 0 < len(state.variables) < MAX_VARIABLES


@pytest.mark.parametrize("blob", [b"", b"\xc1", b"\x92\x01\x90", b"\x92\x01\xc0"])
def test_a_damaged_state_is_refused_with_a_sentence(blob: bytes) -> None:
    with pytest.raises(BadPayload):
        Numbers.unpack(blob)


def test_quantities_are_written_with_two_digits_and_a_fitting_unit() -> None:
    said = [
        quantity(kind, value)
        for kind, value in (
            (ValueKind.DURATION, 0.0412), (ValueKind.DURATION, 1.83), (ValueKind.DURATION, 7_300.0),
            (ValueKind.DURATION, 0.0), (ValueKind.SIZE, 1_300_000.0), (ValueKind.COUNT, 12_345.0),
        )
    ]  # fmt: skip
    assert said == ["41 ms", "1.8 s", "2 h", "0 ns", "1.2 MiB", "12,000"]
