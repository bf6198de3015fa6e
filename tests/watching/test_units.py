"""Units ranked: the unusual one first, with its reasons; of normal ones none is unusual."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadInput
from pipeline.watching.units import evidence
from pipeline.watching.units import unit_lines as folding
from pipeline.watching.units.ranking import rank_units
from pipeline.watching.units.tails import (
    conformal_nats,
    conformal_nats_left_out,
    student_nats,
    student_nats_left_out,
    student_tail,
)
from pipeline.watching.units.unit_lines import UNIT_LINES, UnitFold, UnitTable
from pipeline.watching.units.values import UnitEvidence

TEXTS = {1: "asked <*>", 2: "answered <*>", 3: "no answer"}


def table(units: dict[str, list[tuple[int, int]]], *, flagged: int = 3, pages: int = 1) -> UnitTable:
    """Of units that wrote (second, template); lines of one template are flagged."""
    rows = [
        (
            name,
            0,
            at,
            abs(template),
            template,
            template == flagged,
            0.001,
            template < 0,
            *[None] * 8,
        )
        for name, lines in units.items()
        for at, template in lines
    ]
    frame = pl.DataFrame(rows, schema=UNIT_LINES, orient="row", infer_schema_length=None)
    fold = UnitFold()
    for page in np.array_split(np.arange(frame.height), pages):
        fold.add(frame[page.tolist()])
    return fold.table()


def healthy(count: int) -> dict[str, list[tuple[int, int]]]:
    return {f"h{n}": [(10 * i, 1 + i % 2) for i in range(10 + n % 3)] for n in range(count)}


SICK = {"bad": [(10 * i, 1) for i in range(10)] + [(100 + i, 3) for i in range(40)]}


@pytest.mark.parametrize("freedom", [1, 2, 3, 4])
def test_the_tail_of_student_is_right_near_and_far(freedom: int) -> None:
    # Quantiles of 0.975 from any table; far out P(T > t) falls as t ** -freedom.
    quantile = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645}[freedom]
    assert student_tail(np.array([0.0, quantile, -quantile]), freedom) == pytest.approx(
        [0.5, 0.025, 0.975], rel=1e-4
    )
    near, far = student_tail(np.array([1e3, 1e6]), freedom)
    assert near / far == pytest.approx(1e3**freedom, rel=1e-3)


@given(st.lists(st.floats(0, 50), min_size=4, max_size=20))
def test_a_value_left_out_is_judged_as_by_the_others(values: list[float]) -> None:
    found = np.array(values)
    for at in range(found.size):
        one, others = found[at : at + 1], np.delete(found, at)
        assert student_nats_left_out(found, 0.5)[at] == pytest.approx(
            student_nats(one, others, 0.5)[0], rel=1e-4, abs=1e-6
        )
        assert conformal_nats_left_out(found, 1.0)[at] == pytest.approx(conformal_nats(one, others, 1.0)[0])


def test_the_unusual_unit_comes_first_with_three_reasons() -> None:
    found = rank_units(table(healthy(5) | SICK), table(healthy(120)), TEXTS)
    first, *others = found.units
    assert (first.unit, first.unusual, first.lines, first.flagged) == ("bad", True, 50, 40)
    assert not any(unit.unusual for unit in others) and found.unusual == 1
    assert len(first.reasons) == 3
    by_kind = {reason.evidence: reason.text for reason in first.reasons}
    assert by_kind[UnitEvidence.COUNTS] == "40 times, where normal units have it 0 times: `no answer`"
    assert by_kind[UnitEvidence.FLAGGED] == "1 anomalous pattern (p 0.001): `no answer`"


def test_fewer_than_five_normal_units_rank_but_say_of_none_that_it_is_unusual() -> None:
    few = rank_units(table(healthy(3) | SICK), table(healthy(4)), TEXTS)
    assert few.units[0].unit == "bad" and few.units[0].unusual is None and few.unusual is None
    enough = rank_units(table(healthy(3) | SICK), table(healthy(6)), TEXTS)
    assert enough.units[0].unusual and enough.unusual == 1 and enough.units[0].p_value < 0.01


def test_without_normal_units_they_are_compared_with_each_other() -> None:
    found = rank_units(table(healthy(12) | SICK), None, TEXTS)
    assert found.among and found.units[0].unit == "bad" and found.units[0].unusual is None
    assert rank_units(table({}), None, TEXTS).units == ()


def drawn(count: int, chance: np.random.Generator) -> UnitTable:
    """Units alike."""
    units = {
        f"u{n}": [(int(at), int(chance.integers(1, 30))) for at in chance.integers(0, 600, 20)]
        for n in range(count)
    }
    return table(units, flagged=0)


def test_a_p_value_is_the_share_of_normal_units_with_a_smaller_one() -> None:
    chance = np.random.default_rng(5)
    found = rank_units(drawn(2_000, chance), drawn(200, chance), {})
    p_values = np.array([unit.p_value for unit in found.units])
    for asked in (0.01, 0.05):
        assert (p_values <= asked).mean() <= 2 * asked


def test_none_is_unusual_where_all_are_normal() -> None:
    chance = np.random.default_rng(6)
    found = [rank_units(drawn(12, chance), drawn(60, chance), {}, limit=1) for _ in range(60)]
    assert sum(one.unusual > 0 for one in found) <= 6, "5 % was asked"


def test_equal_units_are_unusual_at_no_level() -> None:
    alike = {f"u{n}": [(0, 1), (1, 2)] + [(9, 3)] * (n % 9 == 0) for n in range(200)}
    calm = {f"v{n}": [(0, 1), (1, 2)] for n in range(50)}
    for level in (0.01, 0.05):
        assert rank_units(table(calm), table(alike), TEXTS, level=level).unusual == 0


def test_many_units_are_compared_with_fewer_normal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = table({f"h{n}": [(i, 1 + i % 2) for i in range(5 + n)] for n in range(130)})
    judged = table(healthy(4) | SICK)
    whole = rank_units(judged, normal, TEXTS)
    monkeypatch.setattr(evidence, "WORK", 1)
    few = rank_units(judged, normal, TEXTS)
    assert few.normal == whole.normal == 130 and few.units[0].unit == whole.units[0].unit == "bad"
    assert few.units[0].unusual


def test_findings_in_sessions_are_evidence_and_no_lines() -> None:
    found = rank_units(table(healthy(9) | {"bad": [(10 * i, 1 + i % 2) for i in range(10)] + [(5, -7)]}),
                       table(healthy(120)), TEXTS)  # fmt: skip
    assert (found.units[0].unit, found.units[0].findings, found.units[0].lines) == ("bad", 1, 10)
    assert found.units[0].reasons[0].evidence is UnitEvidence.SESSIONS


def test_pages_and_their_folds_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = table(healthy(20) | SICK)
    monkeypatch.setattr(folding, "_FOLDED", 10)
    parts = table(healthy(20) | SICK, pages=23)
    assert whole.units.equals(parts.units) and whole.patterns.equals(parts.patterns)
    assert whole.units.filter(unit="bad")["last"][0] == 139
    monkeypatch.setattr(folding, "MAX_PAIRS", 30)
    with pytest.raises(BadInput, match="more than 30"):
        table(healthy(20), pages=3)
