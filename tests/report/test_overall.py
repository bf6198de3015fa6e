"""What holds for a log as a whole: slow requests, and files without times of which much is bad."""

import random
from typing import Any

import polars as pl
import pytest
from answers_contract import frame, row

from pipeline.report.overall import LEAST, LEAST_DURATIONS, Fact, overall_facts

REQUEST = "GET /checkout <*> in <DURATION>"
NO_TEMPLATES: dict[int, str] = {1: "started"}


def facts(
    found: list[dict[str, Any]],
    texts: dict[int, str] = NO_TEMPLATES,
    baseline: list[dict[str, Any]] | None = None,
) -> list[Fact]:
    rows = frame([row(n, **one) for n, one in enumerate(found, start=1)])
    templates = pl.DataFrame(
        [(number, text, sum(one.get("template_id", 1) == number for one in found)) for number, text in texts.items()],
        schema={"template_id": pl.Int64, "template": pl.String, "count": pl.UInt64},
        orient="row",
    )  # fmt: skip
    normal = (
        None if baseline is None else frame([row(n, "b", **one) for n, one in enumerate(baseline)]).lazy()
    )
    return overall_facts(rows.lazy(), normal, templates)


def took(said: str, values: list[float], template_id: int = 1) -> list[dict[str, Any]]:
    texts = [said.format(value) for value in values]
    return [{"raw": f"12:00:00 {text}", "message": text, "template_id": template_id} for text in texts]


def untimed(n: int, of: int = 200, **bad: Any) -> list[dict[str, Any]]:
    """`of` lines of a file without times, `n` of them `bad`."""
    return [{"timed": False, **(bad if at < n else {})} for at in range(of)]


SPREAD = [1.0, 2.6, 3.1, 3.4, 9.0] * 8


def test_a_median_above_two_seconds_is_a_fact_with_its_template() -> None:
    (fact,) = facts(took("GET /checkout 200 in {} s", SPREAD), {1: REQUEST})
    assert (fact.kind, fact.workload, fact.template_id, fact.value, fact.of) == (
        "slow",
        "shop/web",
        1,
        3.1,
        40,
    )
    assert fact.text == f"requests of shop/web take 3.1 s, the median of 40 durations in `{REQUEST}`"


@pytest.mark.parametrize(
    ("said", "values", "template"),
    [
        ("GET /checkout 200 in {} s", [v / 2 for v in SPREAD], REQUEST),
        ("GET /checkout 200 in {}", SPREAD, "GET /checkout <*> in <NUM>"),  # no unit
        ("backup of shop took {} s", SPREAD, "backup of shop took <DURATION>"),  # no request
        ("request refused, timeout={}s", SPREAD, "request refused, timeout=<DURATION>"),
        ("request gives up after {} s", [30.0] * 40, "request gives up after <DURATION>"),  # a setting
        ("GET /checkout 200 in {} s", SPREAD[: LEAST_DURATIONS - 1], REQUEST),
    ],
)
def test_other_durations_are_no_facts(said: str, values: list[float], template: str) -> None:
    assert facts(took(said, values), {1: template}) == []


def test_the_slowest_template_comes_first_and_a_sample_is_enough() -> None:
    draw = random.Random(3)
    slow = took("request served, duration={:.3f}s", [draw.lognormvariate(1.5, 0.3) for _ in range(9_000)], 2)
    texts = {1: REQUEST, 2: "request served, duration=<DURATION>"}
    second, first = facts(took("GET /checkout 200 in {} s", SPREAD) + slow, texts)[::-1]
    assert (first.template_id, second.template_id) == (2, 1)
    assert first.value == pytest.approx(4.48, rel=0.1) and 600 < first.of < 1_100


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"level": "error"}, "40 % of the 200 lines are at error levels in a.log"),
        ({"raw": '1.2.3.4 "GET / HTTP/1.1" 502 17'}, "100 % of the 80 answers have a status of 500 or more in a.log"),
        ({"raw": "POST /cart 503 in 2 ms"}, "100 % of the 80 answers have a status of 500 or more in a.log"),
        ({"raw": '{"status": 500, "path": "/"}'}, "100 % of the 80 answers have a status of 500 or more in a.log"),
    ],
)  # fmt: skip
def test_a_file_without_times_says_how_much_of_it_is_bad(bad: dict[str, Any], text: str) -> None:
    (fact,) = facts(untimed(80, **bad))
    assert fact.text == text and fact.source == "a.log"


def test_a_small_share_few_lines_and_lines_with_a_time_are_no_facts() -> None:
    assert facts(untimed(30, level="error")) == []
    assert facts(untimed(40, of=LEAST - 1, level="error")) == []
    assert facts([one | {"timed": True} for one in untimed(150, level="error")]) == []
    assert facts(untimed(150, level="warning")) == facts(untimed(150, raw="GET /old 404 in 1 ms")) == []


@pytest.mark.parametrize("level", ["error", "warning"])
def test_with_a_baseline_only_a_clear_rise_is_a_fact(level: str) -> None:
    usual = untimed(60, level=level)
    assert facts(untimed(70, level=level), baseline=usual) == []
    (fact,) = facts(untimed(140, level=level), baseline=usual)
    assert fact.text.startswith("70 % of the 200 lines are ") and fact.text.endswith(", 30 % in the baseline")
    assert (fact.value, fact.baseline) == (0.7, 0.3)


def answers(bad: int, good: int) -> list[dict[str, Any]]:
    said = ["GET / 404 in 1 ms"] * bad + ["GET / 200 in 1 ms"] * good
    return [{"timed": False, "raw": text} for text in said]


def test_a_rise_of_few_answers_may_be_chance() -> None:
    usual = answers(20, 180)
    assert facts(answers(15, 45), baseline=usual) == []
    (fact,) = facts(answers(120, 360), baseline=usual)
    assert (fact.kind, fact.value, fact.baseline) == ("4xx", 0.25, 0.1)


def test_a_workload_is_measured_by_its_own_baseline() -> None:
    other = [one | {"workload": "shop/db"} for one in untimed(100, level="error")]
    (fact,) = facts(untimed(100, level="error"), baseline=other + untimed(2, level="error"))
    assert fact.baseline == 0.01
    assert facts(untimed(100, level="error"), baseline=other) == []
