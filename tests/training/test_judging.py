"""Judging a trained model against the live one: what passes, what fails, and for which reason."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
import torch

from pipeline.models import bundle as bundles
from pipeline.models.causal import CausalNetwork
from pipeline.models.config import ModelConfig
from pipeline.models.evidence import Evidence
from pipeline.models.fitting import TrainConfig
from pipeline.models.line import LineModel
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Mode
from pipeline.models.trainer import FitRequest, fit
from pipeline.records.schema import SAMPLE_SCHEMA
from pipeline.records.verdict import pattern_ids
from pipeline.training.comparison import auc, auc_falls, auc_upper, more_often, spearman, wilson_lower
from pipeline.training.holdout import split
from pipeline.training.injection import injected
from pipeline.training.judging import Examinee, Judgement, judge

SMALL = TrainConfig(model=ModelConfig(hidden=48, feed_forward=96, layers=1), min_steps=120, max_steps=120)
QUICK = replace(SMALL, min_steps=20, max_steps=20)  # where the weights do not matter
SUBJECTS = ["queue", "cache", "lease", "worker", "batch", "socket", "index", "shard", "session", "cursor"]
VERBS = ["opened", "closed", "renewed", "flushed", "moved", "merged", "listed", "read", "sorted", "packed"]
PLACES = ["on <HOST>", "by <IP>", "after <NUM> ms"]
SEED = 7


def sample(lines: Sequence[str], *, count: int = 40, severe: Sequence[str] = ()) -> pl.DataFrame:
    """Each line is its own template."""
    return pl.DataFrame(
        {
            "masked": list(lines),
            "pattern_id": pl.Series(pattern_ids(lines), dtype=pl.UInt64),
            "count": pl.Series([count] * len(lines), dtype=pl.UInt64),
            "severe": [line in severe for line in lines],
            "template_id": pl.int_range(1, len(lines) + 1, eager=True),
        }
    )


def sentences() -> list[str]:
    """100 lines of one grammar, in a fixed order."""
    return [
        f"{s} was {v} {PLACES[i % 3]} for tenant <NUM>"
        for i, (s, v) in enumerate(itertools.product(SUBJECTS, VERBS))
    ]


SAMPLE = sample(sentences())
HELD = split(SAMPLE, seed=SEED)


def train(
    frame: pl.DataFrame,
    out: Path,
    *,
    seed: int = 1,
    held: frozenset[int] = HELD.patterns,
    config: TrainConfig = SMALL,
    **more: Any,
) -> Examinee:
    for _ in fit(
        frame,
        FitRequest(
            tokens=("<IP>", "<NUM>", "<HOST>"),
            mask_version="m1",
            config=config,
            seed=seed,
            out=out,
            mode=Mode.BASELINE,
            version=out.name,
            held_out=held,
            **more,
        ),
    ):
        pass
    return Examinee.load(out)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Examinee]:
    """Sound models of one sample that differ in nothing but the seed."""
    folder = tmp_path_factory.mktemp("models")
    return [train(SAMPLE, folder / f"m{seed:06d}-0000000{seed}", seed=seed) for seed in range(3)]


class Silent:
    """Trigrams or a severity prior that say nothing of any line."""

    def score(self, masked: Sequence[str], _named: Any = None) -> list[float]:
        return [0.0] * len(masked)

    def score_spoken(self, masked: Sequence[str], *_: Any) -> list[float]:
        return [0.0] * len(masked)


def untrained(model: Examinee, seed: int = 0) -> Examinee:
    """The same with random weights."""
    scorer = model.scorer
    assert isinstance(scorer, LineModel)
    torch.manual_seed(seed)
    network = CausalNetwork(scorer.config, scorer.tokenizer.vocab_size)
    made = LineModel(network, scorer.tokenizer, scorer.config, [], "cpu", novelty=Silent(), prior=Silent())
    return replace(model, version="damaged", scorer=made)


def with_threshold(model: Examinee, median: float, threshold: float) -> Examinee:
    calibration = replace(model.knowledge.calibration, median=median, threshold=threshold)
    return replace(model, version="pushed", knowledge=replace(model.knowledge, calibration=calibration))


class Fixed:
    """A scorer that gives every line the same answer."""

    def __init__(self, surprisal: float) -> None:
        self.surprisal = surprisal

    def score(self, masked: Sequence[str]) -> list[Evidence]:
        return [Evidence(surprisal=self.surprisal, tokens=3, severity=severity_words(m)) for m in masked]


# --- what passes and what fails -------------------------------------------------------------------


@pytest.mark.long
def test_a_sound_model_passes_against_itself_with_full_rank_agreement(models: list[Examinee]) -> None:
    made = judge(models[0], models[0], HELD, SAMPLE)
    assert made.passed, made.reason
    assert made.rank_agreement == pytest.approx(1.0)
    assert made.candidate == made.live
    assert "no worse than m000000-00000000" in made.reason
    assert made.lines <= 400 and made.seed == SEED


@pytest.mark.long
def test_equal_models_of_other_seeds_are_never_refused(models: list[Examinee]) -> None:
    verdicts = [judge(a, b, HELD, SAMPLE) for a, b in itertools.permutations(models, 2)]
    assert [v.reason for v in verdicts if not v.passed] == []


@pytest.mark.long
def test_a_first_model_passes_without_a_live_one(models: list[Examinee]) -> None:
    made = judge(models[0], None, HELD, SAMPLE)
    assert made.passed and made.live is None and made.rank_agreement is None
    assert "no live model" in made.reason


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_random_weights_are_refused_with_and_without_a_live_model(models: list[Examinee], seed: int) -> None:
    bad = untrained(models[0], seed)
    beside, alone = judge(bad, models[1], HELD, SAMPLE), judge(bad, None, HELD, SAMPLE)
    assert not beside.passed and not alone.passed
    assert "held-out normal lines" in alone.reason or "cannot tell faults" in alone.reason


@pytest.mark.long
def test_random_weights_with_a_threshold_of_their_own_are_refused_too(models: list[Examinee]) -> None:
    bad = untrained(models[0])
    usual = sorted(e.surprisal for e in bad.scorer.score(sentences()))
    bad = with_threshold(bad, usual[50], usual[95])
    made = judge(bad, models[1], HELD, SAMPLE)
    assert not made.passed and made.candidate.alert_rate_template in (0.0, 0.1, 0.2)


@pytest.mark.long
def test_a_threshold_that_flags_everything_is_refused_for_its_alerts(models: list[Examinee]) -> None:
    made = judge(with_threshold(models[0], -9.0, -8.0), models[1], HELD, SAMPLE)
    assert not made.passed
    assert "alerts on 100.0 % of 10 held-out normal lines" in made.reason
    assert made.candidate.calibration == 1.0


@pytest.mark.long
def test_a_threshold_that_flags_nothing_is_refused_for_what_it_misses(models: list[Examinee]) -> None:
    made = judge(with_threshold(models[0], 90.0, 99.0), models[1], HELD, SAMPLE)
    assert not made.passed
    assert "finds 0.0 % of" in made.reason and "the live model m000001-00000001" in made.reason
    assert made.candidate.calibration == 0.0


@pytest.mark.long
def test_a_model_that_learnt_the_faults_as_normal_is_refused(models: list[Examinee], tmp_path: Path) -> None:
    faults = [i.masked for i in injected([], seed=SEED)]
    taught = train(sample([*sentences(), *faults]), tmp_path / "m000009-00000009")
    made = judge(taught, models[1], HELD, SAMPLE)
    assert not made.passed
    assert "injected anomalies" in made.reason
    assert made.candidate.injected_recall is not None and made.live is not None
    assert made.live.injected_recall is not None
    assert made.candidate.injected_recall < made.live.injected_recall - 0.15


@pytest.mark.long
@pytest.mark.parametrize("surprisal", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(models: list[Examinee], surprisal: float) -> None:
    made = judge(replace(models[0], scorer=Fixed(surprisal)), None, HELD, SAMPLE)
    assert not made.passed and "not finite" in made.reason


@pytest.mark.long
def test_weights_that_are_not_numbers_are_refused(models: list[Examinee]) -> None:
    bad = untrained(models[0])
    assert isinstance(bad.scorer, LineModel)
    for parameter in bad.scorer.network.parameters():
        parameter.data.fill_(math.nan)
    assert not judge(bad, None, HELD, SAMPLE).passed


@pytest.mark.long
def test_one_surprise_for_all_lines_is_refused(models: list[Examinee]) -> None:
    made = judge(replace(models[0], scorer=Fixed(1.0)), models[1], HELD, SAMPLE)
    assert not made.passed and "the same surprisal" in made.reason


@pytest.mark.long
def test_a_useless_live_model_is_no_measure(models: list[Examinee]) -> None:
    made = judge(models[0], replace(models[1], version="gone", scorer=Fixed(1.0)), HELD, SAMPLE)
    assert made.passed and made.live is None
    assert "gone was no measure" in made.reason


@pytest.mark.long
def test_alerts_on_most_of_the_stream_refuse_a_first_model(models: list[Examinee]) -> None:
    stream = sample([f"{line} again" for line in sentences()]).with_columns(pl.col("template_id") + 1000)
    made = judge(with_threshold(models[0], -9.0, -8.0), None, split(SAMPLE.head(5), seed=1), stream)
    assert not made.passed and "100.0 % of the current stream's calm records" in made.reason


@pytest.mark.long
def test_a_live_model_that_has_learnt_the_held_out_lines_has_no_advantage(
    models: list[Examinee], tmp_path: Path
) -> None:
    live = train(SAMPLE, tmp_path / "m000008-00000008", held=frozenset())
    made = judge(models[0], live, HELD, SAMPLE)
    assert made.passed, made.reason


@pytest.mark.long
def test_a_live_model_that_alerts_on_everything_does_not_keep_a_sound_one_out(models: list[Examinee]) -> None:
    assert judge(models[0], with_threshold(models[1], -9.0, -8.0), HELD, SAMPLE).passed


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_empty_stream_still_gives_an_answer(models: list[Examinee]) -> None:
    made = judge(models[0], models[1], HELD, pl.DataFrame(schema=SAMPLE_SCHEMA))
    assert made.passed and made.candidate.alert_rate_recent is None


def test_a_sample_of_two_templates_is_not_split_and_its_model_can_still_be_judged(tmp_path: Path) -> None:
    few = sample(sentences()[:2])
    held = split(few, seed=SEED)
    assert held.patterns == frozenset() and "nothing: the sample has 2 templates" in held.how
    model = train(
        few,
        tmp_path / "m000001-00000001",
        held=held.patterns,
        config=replace(SMALL, min_steps=60, max_steps=60),
    )
    made = judge(model, model, held, few)
    assert made.passed and made.candidate.alert_rate_template is None


@pytest.mark.long
def test_a_sample_of_faults_only_gives_nothing_to_hold_out(models: list[Examinee]) -> None:
    lines = [f"{s} {v} failed" for s, v in itertools.product(SUBJECTS, VERBS)]
    for frame in (sample(lines), sample(sentences(), severe=sentences())):
        held = split(frame, seed=SEED)
        assert held.patterns == frozenset() and held.by_template.is_empty()
        assert judge(models[0], models[1], held, frame).candidate.recent_lines == 0


# --- holding out ----------------------------------------------------------------------------------


def dated(frame: pl.DataFrame, late: Sequence[str]) -> pl.DataFrame:
    begin = datetime(2026, 11, 1, tzinfo=UTC)
    seen = [begin + timedelta(hours=95 if m in late else 1) for m in frame["masked"]]
    return frame.with_columns(
        first_seen=pl.Series(seen),
        last_seen=pl.lit(begin + timedelta(hours=100), dtype=pl.Datetime("us", "UTC")),
    )


def test_held_out_patterns_reach_neither_weights_nor_words_but_are_known(tmp_path: Path) -> None:
    lines = [*sentences(), "zeppelin moored quietly"]
    frame = sample(lines)
    out = tmp_path / "m000001-00000001"
    held = frozenset(pattern_ids(["zeppelin moored quietly"]))
    train(frame, out, held=held, config=QUICK, model="shop", workloads=("a/b/c",), query={"from": "now-1h"})
    manifest = bundles.load_manifest(out)
    assert manifest.stats.fitted == 100 and manifest.held_out == tuple(held)
    assert (manifest.model, manifest.workloads, manifest.query) == ("shop", ("a/b/c",), {"from": "now-1h"})
    assert "zeppelin" not in (out / bundles.TOKENIZER).read_text(encoding="utf-8")
    known = bundles.load_known(out)
    assert all(known.count(p) == 40 for p in frame["pattern_id"])
    hidden = known.without(held, frozenset({1}))
    assert (len(known), len(hidden), hidden.template_count(1)) == (101, 99, 0)


def test_a_manifest_of_before_these_fields_is_still_read(tmp_path: Path) -> None:
    train(SAMPLE, tmp_path / "v1", config=QUICK)
    text = bundles.load_manifest(tmp_path / "v1").to_json()
    old = json.loads(text)
    for name in ("model", "workloads", "query", "held_out"):
        del old[name]
    found = bundles.Manifest.from_json(json.dumps(old))
    assert (found.model, found.workloads, found.query, found.held_out) == ("shared", (), {}, ())
    assert bundles.Manifest.from_json(text).held_out == tuple(sorted(HELD.patterns))


def test_at_most_a_tenth_is_held_out_and_the_same_again_from_a_later_sample() -> None:
    assert len(HELD.patterns) == len(HELD.templates) == HELD.by_template.height == 10
    assert HELD.by_time.is_empty()
    later = split(
        SAMPLE.with_columns(pl.col("count") * 2).sample(fraction=1.0, shuffle=True, seed=3), seed=SEED
    )
    assert later.patterns == HELD.patterns
    assert split(SAMPLE, seed=SEED + 1).patterns != HELD.patterns


def test_lines_first_seen_lately_are_held_out_by_time() -> None:
    late = sentences()[40:44]
    held = split(dated(SAMPLE, late), seed=SEED)
    assert set(held.by_time["masked"]) == set(late)
    assert held.by_time["whole"].all() and held.by_template.height == 6
    assert not set(held.by_time["pattern_id"]) & set(held.by_template["pattern_id"])


def test_a_late_line_of_an_old_template_does_not_hide_its_template() -> None:
    late = sentences()[40]
    frame = SAMPLE.with_columns(
        template_id=pl.when(pl.col("masked") == late).then(1).otherwise(pl.col("template_id")).cast(pl.Int64)
    )
    held = split(dated(frame, [late]), seed=SEED)
    assert held.by_time["masked"].to_list() == [late]
    assert not held.by_time["whole"].any() and 1 not in held.templates


def test_frequent_severe_and_worded_templates_are_never_held_out() -> None:
    lines = [*sentences()[:40], *(f"{s} {v} failed" for s, v in zip(SUBJECTS, VERBS, strict=True))]
    frame = sample(lines, severe=lines[:20]).with_columns(
        count=pl.when(pl.col("masked") == lines[20]).then(5000).otherwise(pl.col("count")).cast(pl.UInt64)
    )
    drawn: set[int] = set()
    for seed in range(40):
        drawn |= split(frame, seed=seed).templates
    assert drawn == set(range(22, 41))


def test_rare_templates_are_not_held_out_of_an_unlabelled_log() -> None:
    frame = SAMPLE.with_columns(
        count=pl.when(pl.col("template_id") <= 60).then(1).otherwise(200).cast(pl.UInt64)
    )
    drawn = {t for seed in range(10) for t in split(frame, seed=seed, mode=Mode.SELF).templates}
    assert drawn and min(drawn) > 60


# --- injected anomalies ---------------------------------------------------------------------------


def test_injected_anomalies_are_distinct_of_every_kind_and_repeatable() -> None:
    made = injected(sentences(), seed=1)
    lines = [i.masked for i in made]
    assert {i.kind for i in made} == {"fault", "swapped", "truncated", "unknown-words"}
    assert len(set(lines)) == len(lines) and not set(lines) & set(sentences())
    assert made == injected(sentences()[::-1], seed=1) != injected(sentences(), seed=2)
    faults = [i.masked for i in made if i.kind == "fault"]
    assert 20 <= len(faults) <= 40
    assert sum(severity_words(f) is None for f in faults) >= 15


def test_lines_too_short_to_be_damaged_leave_the_faults() -> None:
    assert {i.kind for i in injected(["<NUM>", "", "ready", "x"], seed=1)} == {"fault"}


# --- statistics -----------------------------------------------------------------------------------


def test_few_lines_prove_nothing_and_many_do() -> None:
    assert wilson_lower(0, 0) == 0.0 and wilson_lower(5, 5) < 0.5 < wilson_lower(6, 6)
    assert wilson_lower(60, 400) < 0.15 < wilson_lower(80, 400)
    assert not more_often([True] * 6, [False] * 6) and more_often([True] * 7, [False] * 7)
    assert not more_often([True] * 20 + [False] * 15, [False] * 20 + [True] * 15)
    assert not more_often([], [])


def test_auc_counts_pairs_and_its_test_sees_a_clear_fall_only() -> None:
    assert auc([1.0, 2.0], [0.0, 1.0]) == pytest.approx(7 / 8)
    good, bad = [float(i) for i in range(20, 40)], [float(i % 20) for i in range(20)]
    low = [float(i) for i in range(20)]
    assert auc(bad, low) == pytest.approx(0.5) and auc_upper(bad, low) > 0.6
    assert auc_falls(bad, low, good, low)
    assert not auc_falls(good, low, good, low) and not auc_falls(good, low, bad, low)


def test_rank_agreement_is_spearmans_with_mean_ranks_for_ties() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert spearman([1, 1, 1], [1, 2, 3]) is None and spearman([1, 2], [1, 2]) is None


# --- stored ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_judgement_is_repeated_exactly_and_survives_json(models: list[Examinee]) -> None:
    first, again = (judge(models[0], models[1], HELD, SAMPLE) for _ in range(2))
    assert replace(first, seconds=0.0) == replace(again, seconds=0.0)
    assert msgspec.json.decode(msgspec.json.encode(first), type=Judgement) == first
    alone = judge(models[0], None, HELD, SAMPLE)
    assert msgspec.json.decode(msgspec.json.encode(alone), type=Judgement) == alone


class Lenient:
    """A scorer that finds nothing in the lines that its weights have learnt, and much in all others."""

    def __init__(self, model: Examinee, learnt: Sequence[str]) -> None:
        self.model, self.learnt = model, frozenset(learnt)

    def score(self, masked: Sequence[str]) -> list[Evidence]:
        seen = self.model.scorer.score(masked)
        held = set(HELD.by_template["masked"])
        return [
            msgspec.structs.replace(e, surprisal=99.0 * (m not in self.learnt), novelty=0.0, prior=0.0)
            if m in held
            else e
            for e, m in zip(seen, masked, strict=True)
        ]


@pytest.mark.long
def test_what_a_parent_has_learnt_of_the_held_out_lines_does_not_make_a_model_look_better(
    models: list[Examinee],
) -> None:
    """Half of what is held out now had been learnt by the version whose weights the candidate began with."""
    lines = HELD.by_template
    scorer = Lenient(models[0], lines["masked"].tail(5).to_list())
    warm = replace(
        with_threshold(models[0], 0.0, 0.1), scorer=scorer, held_out=frozenset(lines["pattern_id"].head(5))
    )
    assert judge(replace(warm, held_out=HELD.patterns), None, HELD, SAMPLE).candidate.calibration == 0.5
    assert judge(warm, None, HELD, SAMPLE).candidate.calibration == 1.0
