"""An alarm counts as reported only once its back-off admitted it; until then its episode stays pending."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from pipeline.records.verdict import Reason
from pipeline.watching.numbers.alarms import EVERY_TEMPLATE
from pipeline.watching.numbers.numbers import Numbers
from pipeline.watching.rates import rates as module
from pipeline.watching.rates.detection import TOGETHER, AlertBackoff, Detection
from pipeline.watching.rates.minute_counts import SLOTS
from pipeline.watching.rates.rates import Rates
from pipeline.watching.values.bins import bin_of
from pipeline.watching.values.typed import ValueKind, typed_values

START = 28_401_120  # an epoch minute
DAY = 1_440


def _detection(template_id: int | None, minute: int) -> Detection:
    return Detection(
        kind=Reason.RATE_BURST, template_id=template_id, began=minute, minute=minute, expected=1.0, seen=9.0,
        nats=20.0, threshold=10.0, per_day=0.0,
    )  # fmt: skip


def _merged(found: list[Detection]) -> Detection:
    return replace(found[0], template_id=None)


@pytest.mark.parametrize("rows", [1, TOGETHER, TOGETHER + 1, 12])
@pytest.mark.parametrize("paused", [(), (None,), (3,), (None, 3, 4)])
def test_whatever_is_paused_an_episode_that_outlasts_the_pause_is_reported(
    rows: int, paused: tuple[int | None, ...]
) -> None:
    backoff = AlertBackoff()
    for template_id in paused:
        cause = _detection(template_id, START).cause
        assert backoff.admit(cause, START - 10)
        backoff.ended(cause, START)
    pending, alarms = set(range(rows)), 0
    for minute in range(START, START + 31):
        found = [(row, _detection(row, minute)) for row in sorted(pending)]
        reported, detections = backoff.admit_group(found, _merged, minute)
        assert bool(reported) is bool(detections)
        pending -= set(reported)
        alarms += len(detections)
    assert not pending
    assert 1 <= alarms <= rows


def _play(rates: Rates, counts: np.ndarray, start: int) -> list[tuple[Reason, int]]:
    """The kinds and minutes of the alarms of a live stream; a row of `counts` is a minute."""
    alarms = []
    for at, line in enumerate(counts):
        ids = np.flatnonzero(line)
        if len(ids):
            frame = pl.DataFrame(
                {"minute": [start + at] * len(ids), "template_id": ids + 1, "n": line[ids]},
                schema={"minute": pl.Int64, "template_id": pl.Int64, "n": pl.UInt32},
            )
            rates.observe(frame, judged=True)
        alarms += [(a.kind, int(a.at.timestamp()) // 60) for a in rates.close(start + at + 1)]
    return alarms


def test_heartbeats_that_stop_together_in_the_pause_after_an_outage_are_reported() -> None:
    def traffic(seed: int, minutes: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        beats = np.ones((minutes, 5), dtype=np.int64)
        return np.column_stack([rng.poisson(20.0, minutes), rng.poisson(6.0, minutes), beats])

    rates = Rates()
    assert _play(rates, traffic(1, DAY), START) == []
    counts = traffic(2, 200)
    counts[60:90] = 0
    counts[100:, 2:] = 0
    alarms = _play(rates, counts, START + DAY)
    assert [kind for kind, at in alarms if at >= START + DAY + 100] == [Reason.RATE_SILENCE]


def test_what_earlier_alarms_add_to_the_height_of_the_next_one_is_taken_back_by_quiet_days() -> None:
    backoff = AlertBackoff()
    for hour in range(3):
        assert backoff.admit("cause", START + 60 * hour)
    last = START + 120
    assert backoff.repeats("cause", last) == pytest.approx(3.0, abs=0.1)
    assert backoff.repeats("cause", last + DAY) == pytest.approx(2.0, abs=0.1)
    assert backoff.repeats("cause", last + 30 * DAY) == 0.0


def test_one_odd_status_does_not_hide_the_statuses_that_follow() -> None:
    def minute(state: Numbers, at: int, *statuses: int) -> int:
        by_kind: dict[ValueKind, dict[int, int]] = {}
        for status in statuses:
            value = next(v for v in typed_values(f"done status={status}") if v.name == "status")
            counts = by_kind.setdefault(value.kind, {})
            number = bin_of(value.kind, value.value)
            counts[number] = counts.get(number, 0) + 1
        rows = [((4 * (START + at), 7, "status", kind), by_kind[kind]) for kind in sorted(by_kind)]
        return len(state.step(rows, judged=True))

    state = Numbers()
    minute(state, 0, *[200] * 19, 0)
    for at in range(1, DAY, 5):
        assert not minute(state, at, *[200] * 20)
    state = Numbers.unpack(state.pack())
    assert sum(minute(state, at, *[503] * 20) for at in range(DAY + 1, DAY + 30))
    assert state.without == 0


def test_what_all_templates_have_together_is_reported_while_their_own_alarms_are_paused() -> None:
    def minutes(state: Numbers, span: range, ms: int) -> list[tuple[int, Reason]]:
        kind, found = ValueKind.DURATION, []
        for minute in span:
            counts = {bin_of(kind, (ms + minute % 5) / 1000): 20}
            rows = [((SLOTS * (START + minute), template, "took", kind.value), counts) for template in (1, 2)]
            found += [(alarm.template_id, alarm.kind) for alarm in state.step(rows, judged=True)]
        return found

    state = Numbers()
    assert minutes(state, range(200), 40) == []
    for variable in state.variables.values():
        if variable.template_id != EVERY_TEMPLATE:
            cause = f"{Reason.NUMBER_SHIFT.value}:{variable.cause}"
            assert state.backoff.admit(cause, START + 200)
            state.backoff.ended(cause, START + 200)
    assert minutes(state, range(200, 225), 1_800) == [(EVERY_TEMPLATE, Reason.NUMBER_SHIFT)]


def test_no_alarm_is_lost_where_many_minutes_are_judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    counts = rng.poisson(6.0, (DAY + 400, 3))
    for begin in range(DAY, DAY + 400, 100):
        counts[begin : begin + 20, :2] *= 12
    lines = [
        (START + at, column + 1, int(n)) for at, row in enumerate(counts) for column, n in enumerate(row)
    ]

    def judged(most: int) -> tuple[list[str], int]:
        monkeypatch.setattr(module, "_FOUND", most)
        rates, closes = Rates(), 0
        causes: list[str] = []
        for begin in range(0, len(lines), 3_000):
            rates.add([row for row in lines[begin : begin + 3_000] if row[2]], judged=True)
            causes += [alarm.cause for alarm in rates.close(START + 10 * DAY)]
        while closes < 2 or rates.behind:
            causes += [alarm.cause for alarm in rates.close(START + 10 * DAY + closes)]
            closes += 1
        return causes, closes

    causes, closes = judged(64)
    assert len(causes) >= 4
    few, more = judged(1)
    assert few == causes
    assert more > closes
