"""The detection bench measures what it says: splits that do not leak, rankings that ties cannot help, honest
rows."""

import itertools
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest
import torch

from bench import _baselines as baselines
from bench import _chronological as chronological
from bench._alerts import alarm_rate
from bench._learnt import verdicts
from bench._nulog import NuLog, NuLogConfig
from bench._ranking import auroc, average_precision
from bench._triage_data import PATTERN_SCHEMA, classed
from bench._triage_run import Plan, average
from bench._triage_split import LEAST_TEMPLATES, leave_out, template_ids
from pipeline.models.evidence import Evidence
from pipeline.models.known.patterns import KNOWN_SCHEMA, KnownPatterns
from pipeline.models.threshold import calibrate
from pipeline.models.verdict import Knowledge
from pipeline.records.schema import SAMPLE_SCHEMA

WORDS = ("cache", "disk", "index", "lease", "queue", "shard", "socket", "table", "volume", "worker")


def patterns(normal: int = 40, anomalous: int = 5) -> pl.DataFrame:
    """Normal patterns, two of each of `normal // 2` templates, and anomalous ones of other shapes."""
    shapes = list(itertools.permutations(WORDS, 2))[: normal // 2]
    calm = [f"{a}{b} opened {b}{a} for {n}" for a, b in shapes for n in ("alice", "bob")]
    bad = [f"{a} broke and nobody answers since" for a in WORDS[:anomalous]]
    return pl.DataFrame(
        {
            "masked": [*calm, *bad],
            "severe": [False] * len(calm) + [True] * len(bad),
            "level": ["info"] * len(calm) + ["error"] * len(bad),
            "count": [10] * len(calm) + [1] * len(bad),
            "anomalous": [False] * len(calm) + [True] * len(bad),
        },
        schema=PATTERN_SCHEMA,
    )


# --- splits


@pytest.mark.parametrize("seed", range(5))
def test_a_split_shares_no_template_and_no_line_between_training_and_test(seed: int) -> None:
    whole = patterns()
    split = leave_out(whole, seed=seed)
    assert split is not None
    normal = whole.filter(~pl.col("anomalous"))
    template = dict(
        zip(
            normal["masked"],
            template_ids(normal["masked"].to_list(), normal["severe"].to_list()),
            strict=True,
        )
    )
    learnt = set(split.sample["masked"])
    held = set(split.test.filter(~pl.col("anomalous"))["masked"])
    assert learnt
    assert held
    assert learnt | held == set(normal["masked"])
    assert not {template[m] for m in learnt} & {template[m] for m in held}
    assert split.sample.schema == pl.Schema(SAMPLE_SCHEMA)


def test_nothing_anomalous_is_learnt_and_every_anomaly_is_ranked() -> None:
    whole = patterns()
    split = leave_out(whole, seed=1)
    assert split is not None
    bad = set(whole.filter("anomalous")["masked"])
    assert not bad & set(split.sample["masked"])
    assert set(split.test.filter("anomalous")["masked"]) == bad
    assert set(split.test.filter("anomalous")["template_id"]) == {None}


def test_the_same_seed_gives_the_same_split_and_another_seed_another() -> None:
    def held(seed: int) -> set[str]:
        split = leave_out(patterns(), seed=seed)
        assert split is not None
        return set(split.test["masked"])

    assert held(7) == held(7)
    assert held(7) != held(8)


def test_a_set_too_small_to_be_split_is_refused() -> None:
    few = patterns().filter(pl.col("anomalous") | (pl.int_range(pl.len()) < 2 * (LEAST_TEMPLATES - 1)))
    assert leave_out(few, seed=1) is None
    assert leave_out(patterns(anomalous=1), seed=1) is None


# --- which pattern is which


def test_a_pattern_about_which_the_labels_are_unclear_is_left_out_and_a_hidden_level_is_gone() -> None:
    rows = pl.DataFrame(
        {
            "masked": ["a", "a", "b", "c", "c"],
            "severe": [True, True, False, False, False],
            "level": ["error", "error", "info", "info", "info"],
            "bad": [True, True, False, True, False],
        }
    )
    shown = classed(
        rows, anomalous=pl.col("bad").any(), normal=~pl.col("bad").all(), hide_level=False
    )  # "c" is both
    assert shown.select("masked", "severe", "count", "anomalous").rows() == [
        ("a", True, 2, True),
        ("b", False, 1, False),
    ]
    hidden = classed(rows, anomalous=pl.col("bad").any(), normal=~pl.col("bad").all(), hide_level=True)
    assert hidden["anomalous"].to_list() == [True, False]
    assert not hidden["severe"].any()
    assert hidden["level"].null_count() == 2


# --- rankings


def test_the_bench_asks_the_verdict_of_the_product_about_each_line() -> None:
    calibration = calibrate([], total=10)
    knowledge = Knowledge(calibration=calibration, known=KnownPatterns(pl.DataFrame(schema=KNOWN_SCHEMA)))
    rows = {"pattern_id": [1, 2], "severe": [False, True], "level": [None, "error"], "template_id": [7, 8]}
    calm, failed = verdicts(pl.DataFrame(rows), [Evidence(surprisal=1.0)] * 2, knowledge)
    assert (calm.template_id, calm.anomalous) == (7, False)
    assert (failed.template_id, failed.anomalous) == (8, True)


def test_known_rankings_have_their_known_areas() -> None:
    labels = [True, False, True, False]
    assert auroc([4, 3, 2, 1], labels) == 0.75
    assert average_precision([4, 3, 2, 1], labels) == pytest.approx((1 + 2 / 3) / 2)
    assert auroc([4, 1, 3, 2], labels) == average_precision([4, 1, 3, 2], labels) == 1.0
    assert auroc([1, 4, 2, 3], labels) == 0.0


def test_a_constant_score_is_worth_nothing_in_whatever_order_the_lines_stand() -> None:
    for labels in ([True, False, False, False], [False, False, False, True]):
        assert auroc([1.0] * 4, labels) == 0.5
        assert average_precision([1.0] * 4, labels) == 0.25


def test_equal_scores_count_half_in_the_area() -> None:
    assert auroc([1, 2, 2, 5], [True, False, True, False]) == 0.125
    assert auroc([2.0, 3.0, 1.0, 2.0], [True, True, False, False]) == 0.875


# --- baselines


def test_the_cache_knows_nothing_of_unseen_lines() -> None:
    assert baselines.cache_only(["a", "b"]) == [1.0, 1.0]


def test_trigram_novelty_is_the_share_of_trigrams_that_training_has_not() -> None:
    assert baselines.trigram_novelty(["abcd"], ["abcd", "xabcd", "wxyz", "ABCD", "<IP>"]) == [
        0.0,
        pytest.approx(1 / 3),
        1.0,
        0.0,
        0.0,
    ]


def test_the_rarer_line_ranks_first_and_keywords_or_levels_decide_the_rule() -> None:
    assert baselines.rarity([1, 5]) == [-1.0, -5.0]
    lines = ["request Failed", "all is well", "all is well", "all is well"]
    assert baselines.keyword_rule(lines, [None, "fatal", "warning", None]) == [1.0, 1.0, 0.0, 0.0]


def test_the_peer_finds_a_line_of_words_it_never_saw_stranger_than_one_it_learnt() -> None:
    torch.set_num_threads(1)
    lines = [f"{a} of {b} opened for client" for a, b in itertools.product(WORDS, WORDS)]
    config = NuLogConfig(width=32, feed_forward=32, heads=2, samples=320, epochs=1, top=5)
    nulog = NuLog(config=config).fit(lines, [1] * len(lines), seed=1, budget_s=20.0)
    known, strange, numbers = nulog.score([lines[3], "kernel panic not syncing", "12 345 678"])
    assert known < 1.0
    assert strange == 1.0
    assert numbers == 0.0
    assert nulog.score_line(lines[3]) == known


# --- the average


class Made:
    """What a repeat gave, as far as the average asks."""

    def __init__(self, **areas: float) -> None:
        self.areas = {
            "ours": 0.0,
            "cache_only": 0.5,
            "trigram_novelty": 0.5,
            "rarity": 0.5,
            "keywords": 0.5,
        } | areas

    chance = 0.05

    def calm_shares(self) -> tuple[float, float]:
        return 0.0, 0.0

    def auroc(self) -> dict[str, float]:
        return self.areas

    average_precision = auroc

    @staticmethod
    def flagged_share(*, anomalous: bool) -> float:
        return float(anomalous)


def averaged(*seeds: dict[str, Any]) -> dict[str, Any]:
    """Two sets of one repeat a seed, and one that is only reported beside them."""
    found: dict[str, Any] = {"one": {}, "two": {}, "trainticket_wide": {}}
    for number, areas in enumerate(seeds):
        found["one"][number] = [Made(**areas)]
        found["two"][number] = [Made(**areas)]
        found["trainticket_wide"][number] = [Made(ours=0.0)]
    return average(found, Plan(peers=False))


def test_ahead_means_by_more_than_the_spread_over_the_seeds() -> None:
    close = averaged({"ours": 0.8, "keywords": 0.78}, {"ours": 0.9, "keywords": 0.88})
    assert close["auroc"] == 0.85
    assert close["sets"] == 2
    assert close["baselines"]["keywords"]["ahead_by"] == 0.02
    assert not close["baselines"]["keywords"]["ahead"]
    assert close["baselines"]["cache_only"]["ahead"]
    assert not close["ahead_of_all"]
    assert averaged({"ours": 0.8}, {"ours": 0.82})["ahead_of_all"]


def test_the_repeats_are_spread_over_the_seeds_and_no_split_comes_twice() -> None:
    splits = Plan(seeds=5, repeats=20).splits()
    assert len(splits) == len({split for _, split in splits}) == 20
    assert {seed for seed, _ in splits} == {1, 2, 3, 4, 5}


# --- in the order of time


def test_false_alarms_count_distinct_lines_that_never_carry_an_alert() -> None:
    rows = pl.DataFrame(
        {
            "masked": ["a", "b", "b", "c", "c", "d"],
            "severe": [False] * 6,
            "tag": ["-", "-", "-", "X", "-", "Y"],
            "alert": [False, False, False, True, False, True],
            "after": [False, True, True, True, True, True],
            "timestamp": [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 2, 3, 4, 4)],
        }
    )
    lines = rows.unique("masked", keep="first", maintain_order=True)
    after = chronological.found(rows, lines, [True, True, True, False])["after"]
    assert after["categories"] == 2
    assert after["categories_found"] == 1
    assert after["alert_line_recall"] == 0.5
    assert after["false_alarms_per_day"] == 1  # "b" on the 2nd and "c" on the 4th, in two days
    assert after["distinct_false_alarms"] == 1  # "b"; "a" came before, "c" is an alert elsewhere
    assert after["distinct_false_alarms_per_100k_lines"] == 20_000


def test_false_alarms_of_a_day_count_a_distinct_line_once_a_day_and_workload() -> None:
    day = 86_400
    lines = pl.DataFrame(
        {
            "workload": ["a", "a", "a", "b", "b", "b"],
            "second": [0, 9, 2 * day, day, None, 2 * day],
            "masked": ["x", "x", "x", "x", "y", "z"],
            "flagged": [True, True, True, True, False, False],
        }
    )
    assert alarm_rate(lines) == {"false_alarms": 3, "workload_days": 3.0, "false_per_day": 1.0}
    assert alarm_rate(lines, 3, days=12.0)["false_per_day"] == 0.5
    assert alarm_rate(lines.head(1))["false_per_day"] is None
