"""The least multiple of a burst that can be told at all, as `bench rates` shows it beside what is found."""

import numpy as np
import pytest

from bench._rate_bounds import asked, bound_of, least_multiple, nats
from bench._rate_streams import Fault


@pytest.mark.parametrize("mean", [1.0, 10.0, 100.0])
def test_lines_by_themselves_follow_the_formula_of_the_docs(mean: float) -> None:
    k = least_multiple(mean, 1.0, 9.2)
    assert mean * (k * np.log(k) - k + 1) == pytest.approx(9.2, rel=1e-3)


def test_clumps_and_few_lines_need_more() -> None:
    multiples = [least_multiple(10.0, phi, 9.2) for phi in (1.0, 2.0, 5.0, 20.0)]
    assert multiples == sorted(multiples)
    assert least_multiple(1.0, 1.0, 9.2) > 3 > least_multiple(10.0, 1.0, 9.2)


def test_an_even_line_is_in_reach_and_a_clumpy_one_of_the_same_level_is_not() -> None:
    rng = np.random.default_rng(0)
    even = rng.poisson(1.0, size=2 * 1440)
    clumps = rng.poisson(0.02, size=2 * 1440) * 50
    clumps[1500:1530] = 1
    counts = np.column_stack([even, clumps])
    bounds = [bound_of(counts, Fault(kind="x3", start=1500, end=1530, template_id=t), 1440) for t in (1, 2)]
    assert bounds[0] < 3 < bounds[1]


def test_the_multiple_is_of_the_lines_that_came() -> None:
    counts = np.random.default_rng(1).poisson(1.0, size=(2 * 1440, 1))
    fault = Fault(kind="x3", start=1500, end=1530, template_id=1)
    lines = counts[1500:1530].sum()
    bound = bound_of(counts, fault, 1440)
    assert nats(bound * lines, 30.0, 1.0) == pytest.approx(asked(30, 1), rel=0.5)
