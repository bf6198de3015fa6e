"""Training: progress, calibration on held-out templates, what the weights may see."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from pipeline.errors import BadBundle, TrainingFailed
from pipeline.models import bundle as bundles
from pipeline.models.fitting import TrainConfig
from pipeline.models.line import LineModel, ModelConfig
from pipeline.models.threshold import Mode
from pipeline.models.trainer import Progress, fit
from pipeline.records import pattern_ids

TINY = TrainConfig(model=ModelConfig(hidden=32, feed_forward=64, layers=1), min_steps=20, max_steps=20)
SUBJECTS = ["queue", "cache", "lease", "worker", "batch", "socket", "index", "shard"]
VERBS = ["opened", "closed", "renewed", "flushed", "moved", "merged", "listed", "read"]


def sample(
    lines: list[str], counts: list[int] | None = None, severe: list[str] | None = None
) -> pl.DataFrame:
    """Each line is its own template."""
    return pl.DataFrame(
        {
            "masked": lines,
            "pattern_id": pl.Series(pattern_ids(lines), dtype=pl.UInt64),
            "count": pl.Series(counts or [20] * len(lines), dtype=pl.UInt64),
            "severe": [line in (severe or []) for line in lines],
            "template_id": pl.int_range(1, len(lines) + 1, eager=True),
        }
    )


def sentences(n: int) -> list[str]:
    return [f"{SUBJECTS[i % 8]} {VERBS[i // 8 % 8]} by <IP> step{'abcdefgh'[i // 64 % 8]}" for i in range(n)]


def run(
    frame: pl.DataFrame,
    out: Path,
    *,
    mode: Mode = Mode.BASELINE,
    config: TrainConfig = TINY,
    seed: int = 1,
    budget: float | None = None,
) -> tuple[list[Progress], bundles.Manifest]:
    seen = list(
        fit(
            frame,
            tokens=("<IP>", "<NUM>"),
            mask_version="m1",
            config=config,
            seed=seed,
            out=out,
            mode=mode,
            version=out.name,
            time_budget_s=budget,
        )
    )
    return seen, bundles.load_manifest(out)


def test_progress_rises_to_one_hundred_through_the_stages(tmp_path: Path) -> None:
    seen, _ = run(sample(sentences(12)), tmp_path / "v1")
    percents = [p.percent for p in seen]
    assert percents == sorted(percents) and percents[-1] == 100.0
    assert list(dict.fromkeys(p.stage for p in seen)) == ["prepare", "calibrate", "fit", "write"]
    assert seen[-1].remaining_s == 0.0
    assert all(p.remaining_s is None or p.remaining_s >= 0 for p in seen)


def test_the_bundle_appears_only_when_the_training_has_ended(tmp_path: Path) -> None:
    steps = fit(
        sample(sentences(6)),
        tokens=("<IP>",),
        mask_version="m1",
        config=TINY,
        seed=1,
        out=tmp_path / "v1",
        mode=Mode.BASELINE,
        version="v1",
    )
    for progress in steps:
        assert (tmp_path / "v1").exists() == (progress.percent == 100.0)


def test_a_training_that_is_dropped_midway_leaves_nothing_behind(tmp_path: Path) -> None:
    steps = fit(
        sample(sentences(6)),
        tokens=("<IP>",),
        mask_version="m1",
        config=TINY,
        seed=1,
        out=tmp_path / "v1",
        mode=Mode.BASELINE,
        version="v1",
    )
    for _ in range(3):
        next(steps)
    del steps
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    frame = sample(sentences(10))
    _, first = run(frame, tmp_path / "a")
    _, again = run(frame.sample(fraction=1.0, shuffle=True, seed=5), tmp_path / "b")
    _, other = run(frame, tmp_path / "c", seed=2)
    assert first.files == again.files
    assert first.calibration == again.calibration
    assert first.files[bundles.WEIGHTS] != other.files[bundles.WEIGHTS]


def test_few_templates_are_all_held_out_once_and_many_in_part(tmp_path: Path) -> None:
    _, few = run(sample(sentences(9)), tmp_path / "few")
    _, many = run(sample(sentences(120)), tmp_path / "many")
    assert few.stats.held_out_templates == 9 and few.calibration.method == "student"
    assert many.stats.held_out_templates == 24 and many.calibration.method == "conformal"
    assert few.stats.hold_out == "3 folds by template" and many.stats.hold_out == "24 of 120 templates"


def test_lines_of_one_template_are_never_split_between_fit_and_hold_out(tmp_path: Path) -> None:
    frame = sample(sentences(9)).with_columns(template_id=pl.lit(1, dtype=pl.Int64))
    _, made = run(frame, tmp_path / "v1")
    assert made.calibration.method == "none"
    assert made.stats.held_out_templates == 0
    assert "nothing to hold out" in made.stats.hold_out


def test_two_distinct_lines_are_enough_for_a_working_model(tmp_path: Path) -> None:
    _, made = run(sample(["queue opened", "<NUM>"]), tmp_path / "v1")
    found = LineModel.load(tmp_path / "v1").score(["queue opened", "disk failed"])
    assert made.stats.distinct == 2 and len(found) == 2


@pytest.mark.parametrize(
    ("lines", "counts", "words"),
    [
        ([], [], "0 distinct lines in 0 records"),
        (["one line"], [500], "1 distinct lines in 500 records"),
        (["one line", "two lines"], [1, 1], "2 distinct lines in 2 records"),
        (["<NUM>", "<IP> <NUM>"], [50, 50], "holds text beside mask tokens"),
    ],
)
def test_too_small_a_sample_fails_with_what_there_is(
    tmp_path: Path, lines: list[str], counts: list[int], words: str
) -> None:
    with pytest.raises(TrainingFailed, match=words):
        run(sample(lines, counts), tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


def test_a_sample_without_a_column_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="template_id"):
        run(sample(sentences(5)).drop("template_id"), tmp_path / "v1")


def test_an_existing_version_is_not_overwritten(tmp_path: Path) -> None:
    run(sample(sentences(5)), tmp_path / "v1")
    with pytest.raises(BadBundle):
        run(sample(sentences(5)), tmp_path / "v1")


def test_a_baseline_is_fitted_whole_even_where_it_is_rare_or_severe(tmp_path: Path) -> None:
    lines = [*sentences(10), "disk failed once"]
    _, made = run(sample(lines, [200] * 10 + [1], severe=[lines[0]]), tmp_path / "v1")
    assert made.stats.left_out == 0 and made.stats.fitted == 11


def test_self_mode_keeps_rare_and_error_like_templates_out_of_the_fit(tmp_path: Path) -> None:
    lines = [*sentences(20), "seldom seen thing", "status changed abruptly", "checkpoint failed twice"]
    frame = sample(lines, [200] * 20 + [1, 300, 300], severe=["status changed abruptly"])
    _, made = run(frame, tmp_path / "v1", mode=Mode.SELF, config=replace(TINY, min_steps=120, max_steps=120))
    assert made.stats.fitted == 20 and made.stats.left_out == 3
    vocabulary = (tmp_path / "v1" / bundles.TOKENIZER).read_text(encoding="utf-8")
    assert "abruptly" not in vocabulary and "seldom" not in vocabulary
    known = bundles.load_known(tmp_path / "v1")
    assert all(known.count(p) > 0 for p in frame["pattern_id"])
    scored = LineModel.load(tmp_path / "v1").score(lines)
    assert min(e.surprise for e in scored[20:]) > max(e.surprise for e in scored[:20])


def test_self_mode_on_a_log_of_rare_lines_only_learns_from_half_of_it(tmp_path: Path) -> None:
    _, made = run(sample(sentences(40), [1] * 40), tmp_path / "v1", mode=Mode.SELF)
    assert made.stats.fitted == 20


def test_the_manifest_tells_the_watermark_and_the_counts(tmp_path: Path) -> None:
    _, made = run(sample(sentences(7), [10, 20, 30, 40, 50, 60, 70]), tmp_path / "v1")
    assert made.template_watermark == 7
    assert (made.stats.lines, made.stats.distinct, made.calibration.total) == (280, 7, 280)
    assert made.mask_version == "m1" and made.tokens == ("<IP>", "<NUM>")


def test_a_time_budget_cuts_the_number_of_steps(tmp_path: Path) -> None:
    long = replace(TINY, min_steps=100_000, max_steps=100_000)
    _, made = run(sample(sentences(6)), tmp_path / "v1", config=long, budget=1.0)
    assert 20 <= made.stats.steps < 10_000


def test_more_lines_than_the_limit_are_drawn_down_and_all_stay_known(tmp_path: Path) -> None:
    _, made = run(sample(sentences(80)), tmp_path / "v1", config=replace(TINY, max_distinct=50))
    assert made.stats.fitted == 50
    assert len(bundles.load_known(tmp_path / "v1")) == 80
