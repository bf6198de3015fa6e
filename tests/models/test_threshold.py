"""Calibration, thresholds and p-values."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadBundle
from pipeline.models.bundle import Manifest
from pipeline.models.evidence import Evidence, Normal
from pipeline.models.prediction_bounds import ParetoTail, conformal, fit_pareto, student, upper_bound
from pipeline.models.threshold import Calibration, Scale, calibrate
from pipeline.models.verdict import Past, conclude
from pipeline.records.verdict import Verdict
from tests.models.test_bundle import manifest_of

NATS = st.floats(0.0, 60.0)
NORMALS = st.lists(
    st.builds(
        Normal,
        evidence=st.builds(
            Evidence,
            surprisal=NATS,
            novelty=st.floats(0.0, 1.0),
            prior=st.floats(-8.0, 8.0),
            severity=st.sampled_from([None, None, "failed", "panic"]),
        ),
        severe=st.booleans(),
    ),
    max_size=60,
)


def normal(
    surprisal: float = 5.0, prior: float = -1.5, *, severe: bool = False, word: str | None = None
) -> Normal:
    return Normal(evidence=Evidence(surprisal=surprisal, prior=prior, severity=word), severe=severe)


def made_of(priors: list[float], chance: float = 0.05) -> Calibration:
    """Calibration whose normalised_score rises with the prior and with nothing else."""
    return calibrate([normal(prior=p) for p in priors], total=1, chance=chance)


BASELINE = calibrate([normal(4.0 + 0.1 * i) for i in range(40)], total=4000)


def through_json(made: Calibration) -> Calibration:
    return Manifest.from_json(replace(manifest_of({}), calibration=made).to_json()).calibration


def verdict(made: Calibration, evidence: Evidence, *, severe: bool = False) -> Verdict:
    past = Past(count=0, in_baseline=False, template_new=True, template_in_baseline=False)
    return conclude(evidence, calibration=made, past=past, severe=severe, level=None, template_id=1)


# --- thresholds ---


def test_about_one_in_twenty_held_out_templates_lies_above_a_conformal_threshold() -> None:
    made = made_of([-0.01 * i for i in range(100)])
    assert made.method == "conformal"
    assert sum(-0.01 * i >= made.threshold for i in range(100)) in (4, 5)


def test_few_held_out_templates_give_a_wider_bound_than_their_largest() -> None:
    made = made_of([0.0, 1.0, 2.0])
    assert made.method == "student"
    assert made.threshold > 2.0


@pytest.mark.parametrize("count", [0, 1])
def test_without_held_out_templates_strangeness_alone_flags_nothing(count: int) -> None:
    made = made_of([0.0] * count)
    assert made.method == "none"
    found = verdict(made, Evidence(surprisal=1e6, novelty=1.0, prior=8.0))
    assert found.anomalous is False and found.p_value is None


def test_equal_held_out_templates_leave_room_above_them() -> None:
    made = calibrate([normal(2.0)] * 30, total=1)
    assert verdict(made, Evidence(surprisal=2.1, prior=-1.5)).anomalous is False


def test_a_smaller_chance_never_lowers_the_threshold() -> None:
    priors = [math.sin(i) for i in range(300)]
    thresholds = [made_of(priors, chance).threshold for chance in (0.05, 0.02, 0.004, 0.001, 0.0001)]
    assert thresholds == sorted(thresholds)
    methods = [made_of(priors, chance).method for chance in (0.004, 0.001)]
    assert methods == ["conformal", "pot"]
    assert made_of(priors[:50], 0.01).method == "student"


def test_templates_with_an_error_sign_have_no_part_in_the_threshold_of_calm_ones() -> None:
    calm = [normal(prior=-1.5 + 0.01 * i) for i in range(40)]
    bad = [normal(prior=3.0, severe=True), normal(prior=4.0, word="failed")] * 10
    with_bad = calibrate([*calm, *bad], total=1)
    assert with_bad.threshold == pytest.approx(calibrate(calm, total=1).threshold)
    assert with_bad.held_out == 60


def test_a_measurement_past_its_scale_counts_on_but_never_again_as_fast() -> None:
    scale = Scale(centre=4.0, spread=2.0)
    assert [scale.of(v) for v in (0.0, 3.0, 4.0, 6.0)] == [-2.0, -0.5, 0.0, 1.0]
    assert 1.0 < scale.of(8.0) < scale.of(40.0) < 3.0


def test_a_word_of_trouble_counts_in_full_in_a_novel_line_and_by_half_in_a_familiar_one() -> None:
    made = replace(BASELINE, novelty=Scale(centre=0.4, spread=0.2))

    def added(novelty: float, prior: float) -> float:
        calm, worded = (made.normalised_score(Evidence(surprisal=5.0, novelty=novelty, prior=p))
                        for p in (0.0, prior))  # fmt: skip
        return worded - calm

    assert [added(novelty, 2.0) for novelty in (0.0, 0.3, 0.6, 1.0)] == pytest.approx([1.0, 1.5, 2.0, 2.0])
    assert [added(novelty, -2.0) for novelty in (0.0, 0.6)] == pytest.approx([-2.0, -2.0])


def test_novelty_weighs_three_times_as_much_as_surprisal() -> None:
    made = replace(BASELINE, surprisal=Scale(), novelty=Scale())
    at_rest = made.normalised_score(Evidence(surprisal=0.0))
    assert made.normalised_score(Evidence(surprisal=1.0)) - at_rest == pytest.approx(0.25)
    assert made.normalised_score(Evidence(surprisal=0.0, novelty=1.0)) - at_rest == pytest.approx(0.75)


def test_a_line_of_learnt_words_is_as_calm_however_unlikely_held_out_lines_are() -> None:
    made = replace(BASELINE, surprisal=Scale(centre=9.0, spread=1.0))
    assert made.normalised_score(Evidence(surprisal=0.0)) == made.normalised_score(Evidence(surprisal=8.0))


# --- p-values ---


@given(NORMALS, st.floats(-12, 12), st.floats(-12, 12))
def test_p_values_are_probabilities_that_fall_with_the_score(
    normals: list[Normal], a: float, b: float
) -> None:
    made = calibrate(normals, total=9)
    high, low = made.p_value(max(a, b)), made.p_value(min(a, b))
    if len(normals) < 2:
        assert high is None and low is None
    else:
        assert high is not None and low is not None
        assert 0.0 < high <= low <= 1.0


@pytest.mark.parametrize("count", [5, 40, 199])
def test_p_values_of_lines_like_the_held_out_ones_are_super_uniform(count: int) -> None:
    rng = random.Random(count)
    drawn: list[float] = []
    for _ in range(200):
        values = [rng.gauss(0.0, 1.0) for _ in range(count + 10)]
        made = made_of(values[:count])
        found = [verdict(made, Evidence(surprisal=5.0, prior=p)).p_value for p in values[count:]]
        drawn += [p for p in found if p is not None]
    for level in (0.01, 0.05, 0.1, 0.25, 0.5, 0.9):
        share = sum(p <= level for p in drawn) / len(drawn)
        assert share <= level + 4 * math.sqrt(level * (1 - level) / 200 / 3)


@pytest.mark.parametrize("kind", ["normal", "exponential", "uniform", "lognormal"])
def test_beyond_the_held_out_templates_p_values_are_small_and_not_too_small(kind: str) -> None:
    rng = random.Random(kind)
    draws: dict[str, Callable[[], float]] = {
        "normal": lambda: rng.gauss(0.0, 1.0),
        "exponential": lambda: rng.expovariate(1.0),
        "uniform": rng.random,
        "lognormal": lambda: rng.lognormvariate(0.0, 0.5),
    }
    draw = draws[kind]
    below, tried = 0, 0
    for _ in range(150):
        values = sorted(draw() for _ in range(250))
        tail = fit_pareto(values)
        assert tail is not None
        for x in (draw() for _ in range(400)):
            p = conformal(values, x)
            p = min(p, tail.chance(x)) if x > values[-1] else p
            below += p <= 0.001
            tried += 1
        assert tail.chance(values[-1] + 20 * tail.scale) < 0.001
    # The tail is fitted, so this is an approximation: at most three times what is said.
    assert below / tried <= 0.003


def test_a_tail_is_fitted_to_two_hundred_templates_and_only_then() -> None:
    rng = random.Random(3)
    values = sorted(rng.gauss(0.0, 1.0) for _ in range(200))
    assert fit_pareto(values) is not None and fit_pareto(values[1:]) is None
    assert fit_pareto([1.0] * 500) is None
    made = made_of(values)
    assert made.tail is not None
    far = made.p_value(made.scores[-1] + 5.0)
    assert far is not None and far < 1 / 201


def test_a_bound_from_a_tail_has_the_chance_that_was_asked_for() -> None:
    tail = ParetoTail(start=2.0, share=0.1, scale=1.5, shape=0.2)
    assert tail.chance(tail.quantile(0.001)) == pytest.approx(0.001)
    straight = replace(tail, shape=0.0)
    assert straight.chance(straight.quantile(1e-6)) == pytest.approx(1e-6)


# From standard tables of Student's t, one-sided.
@pytest.mark.parametrize(
    ("p", "df", "t"),
    [(0.95, 1, 6.314), (0.95, 2, 2.920), (0.95, 3, 2.353), (0.95, 10, 1.812), (0.95, 18, 1.734), (0.99, 10, 2.764),
     (0.999, 5, 5.893), (0.999, 30, 3.385), (0.975, 100, 1.984)],
)  # fmt: skip
def test_quantiles_of_students_t_are_those_of_the_tables(p: float, df: int, t: float) -> None:
    assert student(p, df) == pytest.approx(t, abs=0.002)


def test_a_bound_says_how_it_was_found() -> None:
    values = [float(i) for i in range(250)]
    assert upper_bound(values, 0.05)[1] == "conformal"
    assert upper_bound(values, 0.001)[1] == "pot" and upper_bound(values, 0.001)[0] >= 249.0
    assert upper_bound(values[:18], 0.05)[1] == "student" and upper_bound(values[:19], 0.05) == (
        18.0,
        "conformal",
    )


# --- wire form ---


@given(NORMALS, st.sampled_from([0.05, 0.01, 0.0001]))
def test_a_calibration_survives_its_json(normals: list[Normal], chance: float) -> None:
    made = calibrate(normals, total=9, chance=chance)
    assert through_json(made) == made


def test_a_calibration_with_a_tail_survives_its_json() -> None:
    rng = random.Random(5)
    made = made_of([rng.gauss(0, 1) for _ in range(400)])
    assert made.tail is not None and len(made.scores) == 400
    assert through_json(made) == made


@pytest.mark.parametrize(
    "change",
    [
        {"method": "magic"}, {"median": "x"}, {"threshold": float("nan")}, {"surprisal": [1.0]},
        {"surprisal": {"centre": 1.0, "spread": 0.0}}, {"novelty": {"centre": 0.0, "spread": float("inf")}},
        {"novelty": None}, {"scores": [2.0, 1.0]}, {"scores": "ab"}, {"tail": 3},
        {"tail": {"start": 0.0, "share": 2.0, "scale": 1.0, "shape": 0.0}}, {"threshold": "1e999"}, {"median": None},
    ],
    ids=repr,
)  # fmt: skip
def test_a_damaged_calibration_is_a_bad_bundle(change: dict[str, object]) -> None:
    data = json.loads(manifest_of({}).to_json())
    data["calibration"] |= change
    with pytest.raises(BadBundle, match="not readable"):
        Manifest.from_json(json.dumps(data))


# --- what calibration promises ---------------------------------------------------------------------


def drawn(rng: random.Random) -> Normal:
    """Evidence of a normal template of some log: skewed, and of three parts that go together."""
    base = rng.expovariate(1.0)
    novelty = min(1.0, 0.1 * base + rng.uniform(0.0, 0.3))
    return normal_of(
        surprisal=base + rng.expovariate(2.0), novelty=novelty, prior=rng.gauss(-1.5, 0.4) + 0.1 * base
    )


def normal_of(**evidence: float) -> Normal:
    return Normal(evidence=Evidence(**evidence))  # type: ignore[arg-type]


@pytest.mark.parametrize(("held_out", "chance"), [(20, 0.05), (60, 0.05), (120, 0.01), (400, 0.01)])
def test_new_normal_lines_are_flagged_at_most_twice_as_often_as_was_asked(
    held_out: int, chance: float
) -> None:
    rng = random.Random(7)
    flagged = small = total = 0
    for _ in range(60):
        made = calibrate([drawn(rng) for _ in range(held_out)], total=10_000, chance=chance)
        assert made.method == "conformal"
        for _ in range(200):
            new = verdict(made, drawn(rng).evidence)
            flagged += bool(new.anomalous)
            small += new.p_value is not None and new.p_value <= chance
            total += 1
    assert flagged / total <= 2 * chance and small / total <= 2 * chance
