"""Judging a trained model against the live one: what passes, what fails, and for which reason."""

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
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
from pipeline.models.known.patterns import load_known
from pipeline.models.line import LineModel
from pipeline.models.selection import held_out
from pipeline.models.severity import severity_words
from pipeline.models.trainer import FitRequest, fit
from pipeline.records.schema import SAMPLE_SCHEMA
from pipeline.records.verdict import pattern_ids
from pipeline.training.injection import injected
from pipeline.training.judging import Examinee, Judgement, bounds, judge

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
            "baseline": True,
        }
    )


def sentences() -> list[str]:
    """100 lines of one grammar, in a fixed order."""
    return [
        f"{s} was {v} {PLACES[i % 3]} for tenant <NUM>"
        for i, (s, v) in enumerate(itertools.product(SUBJECTS, VERBS))
    ]


SAMPLE = sample(sentences())


def train(
    frame: pl.DataFrame,
    out: Path,
    *,
    seed: int = 1,
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
            version=out.name,
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


def noisy(model: Examinee, seed: int) -> Examinee:
    """The same with as much noise as weight in every weight, after its calibration."""
    scorer = model.scorer
    assert isinstance(scorer, LineModel)
    network = copy.deepcopy(scorer.network)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weights in network.parameters():
            weights.add_(torch.randn_like(weights) * weights.std(correction=0))
    made = LineModel(
        network,
        scorer.tokenizer,
        scorer.config,
        scorer._words,
        "cpu",
        novelty=scorer._novelty,
        prior=scorer._prior,
    )
    return replace(model, version="noisy", scorer=made)


def judged(candidate: Examinee, live: Examinee | None, stream: pl.DataFrame = SAMPLE) -> Judgement:
    return judge(candidate, live, SAMPLE, stream, seed=SEED)


# --- what passes and what fails -------------------------------------------------------------------


@pytest.mark.long
def test_sound_models_pass_alone_against_themselves_and_against_other_seeds(models: list[Examinee]) -> None:
    first = judged(models[0], None)
    assert first.passed and first.live is None and "no live model" in first.reason
    same = judged(models[0], models[0])
    assert same.passed and same.candidate == same.live and same.lines <= 600 and same.seed == SEED
    assert "no worse than m000000-00000000" in same.reason
    assert same.candidate.network is not None and same.candidate.network > 0.9
    assert same.candidate.held_out_lines == 20 and (same.candidate.alerts_held_out or 0.0) <= 0.05
    verdicts = [judged(a, b) for a, b in itertools.permutations(models, 2)]
    assert [v.reason for v in verdicts if not v.passed] == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_weights_of_noise_are_refused_with_and_without_a_live_model(
    models: list[Examinee], seed: int
) -> None:
    for bad in (untrained(models[0], seed), noisy(models[0], seed)):
        beside, alone = judged(bad, models[1]), judged(bad, None)
        assert not beside.passed and not alone.passed
        assert "held-out normal lines" in alone.reason or "a network of noise" in alone.reason


@pytest.mark.long
def test_a_mute_model_is_refused_also_where_the_live_one_is_mute(models: list[Examinee]) -> None:
    mute = with_threshold(models[0], 90.0, 99.0)
    for live in (None, models[1], with_threshold(models[1], 90.0, 99.0)):
        made = judged(mute, live)
        assert not made.passed and "is mute: it finds 0.0 % of" in made.reason


@pytest.mark.long
def test_a_budget_that_hardly_a_line_passes_makes_no_model_mute(models: list[Examinee]) -> None:
    sound = models[0]
    tight = replace(
        sound.knowledge.calibration,
        threshold=sound.knowledge.calibration.threshold + 6.0,
        scores=(),
        tail=None,
    )
    held = SAMPLE.filter(pl.col("pattern_id").is_in(sorted(sound.held_out)))["masked"].to_list()
    scores = sorted(tight.as_new(evidence, severe=False) for evidence in sound.scorer.score(held))
    knowledge = replace(sound.knowledge, calibration=replace(tight, scores=tuple(scores)))
    made = judged(replace(sound, knowledge=knowledge), None)
    assert made.passed and made.candidate.alerts_held_out == 0.0 and (made.candidate.found or 0.0) > 0.1


@pytest.mark.long
def test_a_threshold_that_flags_everything_is_refused_for_its_alerts(models: list[Examinee]) -> None:
    made = judged(with_threshold(models[0], -9.0, -8.0), models[1])
    assert not made.passed and "alerts on 100.0 % of 20 held-out normal lines" in made.reason
    assert judged(models[0], with_threshold(models[1], -9.0, -8.0)).passed, "and it keeps no sound one out"
    stream = sample([f"{line} again" for line in sentences()]).with_columns(pl.col("template_id") + 1000)
    made = judged(replace(with_threshold(models[0], -9.0, -8.0), held_out=frozenset()), None, stream)
    assert not made.passed and "100.0 % of the current stream's calm records" in made.reason


@pytest.mark.long
def test_a_model_that_finds_much_less_than_the_live_one_is_refused(
    models: list[Examinee], tmp_path: Path
) -> None:
    faults = [i.masked for i in injected(sentences(), seed=SEED) if severity_words(i.masked) is None]
    taught = train(sample([*sentences(), *faults]), tmp_path / "m000009-00000009")
    made = judged(replace(taught, held_out=models[1].held_out), models[1])
    assert made.candidate.found is not None and made.live is not None and made.live.found is not None
    assert not made.passed and made.candidate.found < made.live.found - 0.3


@pytest.mark.long
def test_scores_that_are_not_finite_or_all_the_same_are_refused(models: list[Examinee]) -> None:
    for surprisal in (math.nan, math.inf):
        made = judged(replace(models[0], scorer=Fixed(surprisal)), None)
        assert not made.passed and "not finite" in made.reason
    made = judged(replace(models[0], scorer=Fixed(1.0)), models[1])
    assert not made.passed and "the same surprisal" in made.reason
    made = judged(models[0], replace(models[1], version="gone", scorer=Fixed(1.0)))
    assert made.passed and made.live is None and "gone could not serve as a measure" in made.reason


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_empty_stream_and_a_sample_of_two_templates_still_give_an_answer(
    models: list[Examinee], tmp_path: Path
) -> None:
    made = judged(models[0], models[1], pl.DataFrame(schema=SAMPLE_SCHEMA))
    assert made.passed and made.candidate.alerts_stream is None
    few = sample(sentences()[:2])
    model = train(few, tmp_path / "m000001-00000001", config=QUICK)
    made = judge(model, model, few, few, seed=SEED)
    assert made.passed and made.candidate.alerts_held_out is None


@pytest.mark.long
def test_lines_at_an_error_level_or_with_an_error_word_are_not_shown(models: list[Examinee]) -> None:
    lines = [f"{s} {v} failed" for s, v in itertools.product(SUBJECTS, VERBS)]
    for frame in (sample(lines), sample(sentences(), severe=sentences())):
        assert judge(models[0], None, frame, frame, seed=SEED).candidate.stream_lines == 0


@pytest.mark.long
@pytest.mark.parametrize("sign", [1, -1])
def test_injected_anomalies_belong_to_no_template_whatever_ids_the_model_knows(
    tmp_path: Path, sign: int
) -> None:
    frame = SAMPLE.with_columns(pl.col("template_id") * sign)
    model = train(frame, tmp_path / "m000001-00000001")
    found = judge(model, None, frame, frame.clear(), seed=SEED).candidate.found
    assert found is not None and found > 0.5


# --- holding out ----------------------------------------------------------------------------------


def held_patterns(frame: pl.DataFrame) -> set[int]:
    templates = held_out(frame, SEED)
    return set(frame.filter(pl.col("template_id").is_in(templates))["pattern_id"])


def test_the_same_lines_are_held_out_whatever_the_ids_of_their_templates_and_of_a_later_sample() -> None:
    held = held_patterns(SAMPLE)
    others = dict(zip(range(1, 101), random.Random(1).sample(range(2**50), 100), strict=True))
    assert held_patterns(SAMPLE.with_columns(pl.col("template_id").replace_strict(others))) == held
    assert len(held) == 20 and len(held_patterns(SAMPLE.head(90)) & held) >= 15


def test_a_frequent_template_is_learnt_and_of_few_templates_a_third_is_held_out() -> None:
    held = held_patterns(SAMPLE)
    frame = SAMPLE.with_columns(
        count=pl.when(pl.col("pattern_id").is_in(sorted(held))).then(4_000).otherwise("count").cast(pl.UInt64)
    ).with_columns(
        template_id=pl.when(pl.col("pattern_id").is_in(sorted(held))).then(1000).otherwise("template_id")
    )
    assert not held_patterns(frame) & held
    assert [len(held_out(SAMPLE.head(n), SEED)) for n in (1, 2, 3, 9, 59, 60)] == [0, 0, 1, 3, 19, 20]


def test_held_out_patterns_reach_neither_weights_nor_words_but_are_known(tmp_path: Path) -> None:
    names = [f"zeppelin{chr(97 + i)}" for i in range(10)]
    frame = sample([f"{name} moored quietly" for name in names])
    out = tmp_path / "m000001-00000001"
    model = train(frame, out, config=QUICK, model="shop", workloads=("a/b/c",), query={"from": "now-1h"})
    manifest = bundles.load_manifest(out)
    assert (
        manifest.stats.fitted == 7
        and len(model.held_out) == 3
        and manifest.held_out == tuple(sorted(model.held_out))
    )
    assert (manifest.model, manifest.workloads, manifest.query) == ("shop", ("a/b/c",), {"from": "now-1h"})
    known = load_known(out)
    for pattern, masked in frame.select("pattern_id", "masked").iter_rows():
        novelty = model.scorer.score([masked])[0].novelty
        assert (novelty > 0.0) == (pattern in model.held_out) and known.count(pattern) == 40


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


# --- figures --------------------------------------------------------------------------------------


def test_few_lines_prove_nothing_and_many_do() -> None:
    assert bounds(0, 0) == (0.0, 1.0)
    assert bounds(5, 5)[0] < 0.5 < bounds(60, 80)[0]
    assert bounds(0, 10)[1] > 0.1 > bounds(0, 60)[1]
    for hits, n in ((0, 7), (3, 7), (7, 7)):
        low, high = bounds(hits, n)
        assert 0.0 <= low <= hits / n <= high <= 1.0


@pytest.mark.long
def test_a_judgement_is_repeated_exactly_and_survives_json(models: list[Examinee]) -> None:
    one, other = (replace(judged(models[0], models[1]), seconds=0.0) for _ in range(2))
    assert one == other
    assert msgspec.json.decode(msgspec.json.encode(one), type=Judgement) == one
