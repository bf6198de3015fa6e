"""Training: progress, calibration on held-out templates, what the weights may see."""

import itertools
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
import torch

from pipeline.errors import BadBundle, TrainingFailed
from pipeline.models import bundle as bundles
from pipeline.models.budget import chance_within, errors_per_day, novel_per_day
from pipeline.models.causal import CausalNetwork
from pipeline.models.config import ModelConfig
from pipeline.models.fitting import FusedAdamW, TrainConfig
from pipeline.models.known.patterns import load_known
from pipeline.models.line import LineModel
from pipeline.models.prior import SeverityPrior
from pipeline.models.threshold import CHANCE
from pipeline.models.trainer import FitProgress, FitRequest, fit
from pipeline.models.verdict import Knowledge, verdict_of
from pipeline.records.verdict import pattern_ids

TINY = TrainConfig(model=ModelConfig(hidden=32, feed_forward=64, layers=1), min_steps=20, max_steps=20)
SUBJECTS = ["queue", "cache", "lease", "worker", "batch", "socket", "index", "shard"]
VERBS = ["opened", "closed", "renewed", "flushed", "moved", "merged", "listed", "read"]


def sample(
    lines: list[str],
    counts: list[int] | None = None,
    severe: list[str] | None = None,
    *,
    baseline: bool = True,
) -> pl.DataFrame:
    """Each line is its own template."""
    return pl.DataFrame(
        {
            "masked": lines,
            "pattern_id": pl.Series(pattern_ids(lines), dtype=pl.UInt64),
            "count": pl.Series(counts or [20] * len(lines), dtype=pl.UInt64),
            "severe": [line in (severe or []) for line in lines],
            "template_id": pl.int_range(1, len(lines) + 1, eager=True),
            "baseline": baseline,
        }
    )


def sentences(n: int) -> list[str]:
    return [f"{SUBJECTS[i % 8]} {VERBS[i // 8 % 8]} by <IP> step{'abcdefgh'[i // 64 % 8]}" for i in range(n)]


def run(
    frame: pl.DataFrame,
    out: Path,
    *,
    config: TrainConfig = TINY,
    seed: int = 1,
    known_normal: frozenset[int] = frozenset(),
    mask_version: str = "m1",
    **more: Any,
) -> tuple[list[FitProgress], bundles.Manifest]:
    seen = list(
        fit(
            frame,
            FitRequest(
                tokens=("<IP>", "<NUM>"),
                mask_version=mask_version,
                config=config,
                seed=seed,
                out=out,
                version=out.name,
                known_normal=known_normal,
                **more,
            ),
        )
    )
    return seen, bundles.load_manifest(out)


def learnable(made: bundles.Manifest) -> int:
    """The lines that a model might learn, of templates of one line each: those learnt and those held out."""
    return made.stats.fitted + made.stats.held_out_templates


def test_progress_rises_to_one_hundred_through_the_stages(tmp_path: Path) -> None:
    seen, _ = run(sample(sentences(12)), tmp_path / "v1")
    percents = [p.percent for p in seen]
    assert percents == sorted(percents) and percents[-1] == 100.0
    assert list(dict.fromkeys(p.stage for p in seen)) == ["prepare", "fit", "write"]
    assert seen[-1].remaining_s == 0.0
    assert all(p.remaining_s is None or p.remaining_s >= 0 for p in seen)


def test_the_bundle_appears_only_when_the_training_has_ended(tmp_path: Path) -> None:
    steps = fit(
        sample(sentences(6)),
        FitRequest(
            tokens=("<IP>",),
            mask_version="m1",
            config=TINY,
            seed=1,
            out=tmp_path / "v1",
            version="v1",
        ),
    )
    for progress in steps:
        assert (tmp_path / "v1").exists() == (progress.percent == 100.0)


def test_a_training_that_is_dropped_midway_leaves_nothing_behind(tmp_path: Path) -> None:
    steps = fit(
        sample(sentences(6)),
        FitRequest(
            tokens=("<IP>",),
            mask_version="m1",
            config=TINY,
            seed=1,
            out=tmp_path / "v1",
            version="v1",
        ),
    )
    for _ in range(3):
        next(steps)
    del steps
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    frame = sample(sentences(10))
    _, first = run(frame, tmp_path / "a")
    _, again = run(frame.sample(fraction=1.0, shuffle=True, seed=5), tmp_path / "b")
    _, other = run(frame, tmp_path / "c", seed=2)
    assert first.files == again.files
    assert first.calibration == again.calibration
    assert first.files[bundles.WEIGHTS] != other.files[bundles.WEIGHTS]


@pytest.mark.long
def test_a_third_of_few_templates_is_held_out_and_a_fifth_of_many(tmp_path: Path) -> None:
    _, few = run(sample(sentences(9)), tmp_path / "few")
    _, many = run(sample(sentences(120)), tmp_path / "many")
    assert few.stats.held_out_templates == 3 and few.calibration.method == "student"
    assert many.stats.held_out_templates == 24 and many.calibration.method == "conformal"
    assert (many.stats.fitted, len(many.held_out)) == (96, 24)


def test_lines_of_one_template_are_never_split_between_fit_and_hold_out(tmp_path: Path) -> None:
    frame = sample(sentences(9)).with_columns(template_id=pl.lit(1, dtype=pl.Int64))
    _, made = run(frame, tmp_path / "v1")
    assert made.calibration.method == "none"
    assert made.stats.held_out_templates == 0
    assert made.held_out == ()


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


@pytest.mark.long
def test_an_existing_version_is_not_overwritten(tmp_path: Path) -> None:
    run(sample(sentences(5)), tmp_path / "v1")
    with pytest.raises(BadBundle):
        run(sample(sentences(5)), tmp_path / "v1")


@pytest.mark.long
def test_a_baseline_is_fitted_whole_even_where_it_is_rare_or_severe(tmp_path: Path) -> None:
    lines = [*sentences(10), "disk failed once"]
    _, made = run(sample(lines, [200] * 10 + [1], severe=[lines[0]]), tmp_path / "v1")
    assert made.stats.left_out == 0 and learnable(made) == 11


@pytest.mark.long
def test_rare_and_error_like_templates_of_results_stay_out_of_the_fit(tmp_path: Path) -> None:
    lines = [*sentences(20), "seldom seen thing", "status changed abruptly", "checkpoint failed twice"]
    frame = sample(lines, [200] * 20 + [1, 300, 300], severe=["status changed abruptly"], baseline=False)
    _, made = run(frame, tmp_path / "v1", config=replace(TINY, min_steps=120, max_steps=120))
    assert learnable(made) == 20 and made.stats.left_out == 3
    vocabulary = (tmp_path / "v1" / bundles.TOKENIZER).read_text(encoding="utf-8")
    assert "abruptly" not in vocabulary and "seldom" not in vocabulary
    known = load_known(tmp_path / "v1")
    assert all(known.count(p) > 0 for p in frame["pattern_id"])
    scored = LineModel.load(tmp_path / "v1").score(lines)
    assert min(e.surprisal for e in scored[20:]) > max(e.surprisal for e in scored[:20])


@pytest.mark.long
def test_rare_and_error_like_lines_of_results_that_somebody_called_normal_are_learnt(tmp_path: Path) -> None:
    lines = [*sentences(20), "seldom seen thing", "status changed abruptly", "checkpoint failed twice"]
    frame = sample(lines, [200] * 20 + [1, 300, 300], severe=["status changed abruptly"], baseline=False)
    marked = frozenset(frame["pattern_id"][-3:-1])
    _, made = run(frame, tmp_path / "v1", known_normal=marked)
    assert learnable(made) == 22 and made.stats.left_out == 1
    vocabulary = (tmp_path / "v1" / bundles.TOKENIZER).read_text(encoding="utf-8")
    assert "abruptly" in vocabulary and "seldom" in vocabulary and "twice" not in vocabulary


@pytest.mark.long
def test_a_baseline_is_fitted_whole_beside_results_of_which_only_common_calm_lines_are(
    tmp_path: Path,
) -> None:
    lines = sentences(20)
    declared = sample([*lines[:10], "disk failed once"], [200] * 10 + [1], severe=["disk failed once"])
    results = sample([*lines[10:], "fan stopped once", "link failed"], [200] * 10 + [1, 300], baseline=False)
    frame = pl.concat([declared, results.with_columns(pl.col("template_id") + 100)])
    _, made = run(frame, tmp_path / "v1")
    assert (learnable(made), made.stats.left_out) == (21, 2)
    known = load_known(tmp_path / "v1")
    assert [known.in_baseline(p) for p in frame["pattern_id"]] == [True] * 11 + [False] * 12


@pytest.mark.long
def test_half_of_a_log_of_rare_lines_only_is_learnt(tmp_path: Path) -> None:
    _, made = run(sample(sentences(40), [1] * 40, baseline=False), tmp_path / "v1")
    assert learnable(made) == 20


def test_the_manifest_tells_the_counts(tmp_path: Path) -> None:
    _, made = run(sample(sentences(7), [10, 20, 30, 40, 50, 60, 70]), tmp_path / "v1")
    assert (made.stats.lines, made.stats.distinct, made.calibration.total) == (280, 7, 280)
    assert made.mask_version == "m1" and made.tokens == ("<IP>", "<NUM>")


def test_more_lines_than_the_limit_are_drawn_down_and_all_stay_known(tmp_path: Path) -> None:
    _, made = run(sample(sentences(80)), tmp_path / "v1", config=replace(TINY, max_distinct=50))
    assert made.stats.fitted == 50
    assert len(load_known(tmp_path / "v1")) == 80


# --- novelty, prior and the alert budget ---


@pytest.mark.long
def test_a_bundle_holds_what_novelty_and_prior_learnt_and_what_is_handed_to_it(tmp_path: Path) -> None:
    odd = [f"flux {w} beyond horizon" for w in ("north", "south", "east", "west")]
    frame = sample([*sentences(30), *odd], severe=odd)
    run(frame, tmp_path / "v1", extra={bundles.SEQUENCES: b"sessions"})
    assert bundles.optional(tmp_path / "v1", bundles.SEQUENCES) == b"sessions"
    known, foreign, flux = LineModel.load(tmp_path / "v1").score(
        ["queue opened by <IP> stepa", "kernel zombie", "flux renewed"]
    )
    assert known.novelty == 0.0 < foreign.novelty
    assert flux.prior > SeverityPrior.by_words().score(["flux renewed"])[0] > foreign.prior - 1.0


@pytest.mark.long
@pytest.mark.parametrize("name", [bundles.NOVELTY, bundles.PRIOR])
def test_a_bundle_without_one_of_them_is_refused(tmp_path: Path, name: str) -> None:
    _, made = run(sample(sentences(30)), tmp_path / "v1")
    others = sorted(set(made.files) - {name})
    bundles.write_bundle(
        tmp_path / "v0",
        writers={other: partial(shutil.copyfile, tmp_path / "v1" / other) for other in others},
        manifest=lambda files: replace(made, files=files),
    )
    with pytest.raises(BadBundle, match=f"lacks.*{name}"):
        LineModel.load(tmp_path / "v0")


@pytest.mark.long
def test_neither_novelty_nor_prior_learns_from_results_that_a_fault_is_normal(tmp_path: Path) -> None:
    faults = ["zyxw zyxw quotum", "vutsr qponm checkpoint failed"]
    frame = sample([*sentences(30), *faults], [200] * 30 + [1, 300], baseline=False)
    clean = sample(sentences(30), [200] * 30, baseline=False)
    lines = [*faults, "quotum"]
    run(frame, tmp_path / "v1")
    run(clean, tmp_path / "v2")
    mixed, alone = (LineModel.load(tmp_path / v).score(lines) for v in ("v1", "v2"))
    assert [(e.novelty, e.prior) for e in mixed] == [(e.novelty, e.prior) for e in alone]


def timed(days: float, late: int) -> pl.DataFrame:
    """120 templates, `late` of them first seen in the second half of the span."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    span = timedelta(days=days)
    first = [start] * (120 - late) + [start + span * (0.5 + 0.5 * (i + 1) / late) for i in range(late)]
    return sample(sentences(120)).with_columns(first_seen=pl.Series(first), last_seen=pl.lit(start + span))


def test_a_log_that_grows_faster_than_the_budget_gets_a_stricter_threshold(tmp_path: Path) -> None:
    slow, fast = timed(30.0, 10), timed(0.1, 60)
    _, generous = run(slow, tmp_path / "v1", news_per_day=10.0)
    _, strict = run(fast, tmp_path / "v2", news_per_day=10.0)
    assert generous.calibration.chance == CHANCE and generous.calibration.method == "conformal"
    assert strict.stats.novel_per_day is not None and strict.stats.novel_per_day > 200
    assert strict.calibration.chance == pytest.approx(10.0 / strict.stats.novel_per_day)
    assert strict.calibration.threshold > generous.calibration.threshold


def test_errors_that_come_all_the_time_are_known_with_their_lines_a_day(tmp_path: Path) -> None:
    start, day = datetime(2026, 1, 1, tzinfo=UTC), timedelta(days=1)
    lines = [
        *sentences(30),
        "user gave a bad password",
        "table is locked",
        "disk failed once",
        "job failed for an hour",
    ]
    counts = [100] * 30 + [140, 60, 1, 500]
    last = [start + 2 * day] * 31 + [start + 1.5 * day, start, start + day / 24]
    frame = sample(lines, counts, severe=lines[30:]).with_columns(
        first_seen=pl.lit(start), last_seen=pl.Series(last)
    )
    known = dict(frame.select("masked", "template_id").iter_rows())
    expected = {known["user gave a bad password"]: 70.0, known["table is locked"]: 30.0}
    assert errors_per_day(frame) == expected
    _, manifest = run(frame, tmp_path / "v1")
    assert dict(manifest.daily) == expected
    assert errors_per_day(frame.drop("first_seen")) == {}
    far = pl.when(pl.int_range(pl.len()) == 0).then(pl.lit(start + 900 * day)).otherwise(pl.col("last_seen"))
    assert errors_per_day(frame.with_columns(last_seen=far)) == expected, (
        "one line has the time of its arrival"
    )
    assert errors_per_day(frame.with_columns(last_seen=pl.col("first_seen"))) == {}


def test_errors_that_came_for_more_than_half_a_day_of_a_long_sample_are_known() -> None:
    start, day = datetime(2026, 1, 1, tzinfo=UTC), timedelta(days=1)
    lines = [*sentences(30), "table is locked", "job failed for some hours"]
    last = [start + 20 * day] * 30 + [start + 0.6 * day, start + 0.4 * day]
    frame = sample(lines, [100] * 30 + [40, 40], severe=lines[30:]).with_columns(
        first_seen=pl.lit(start), last_seen=pl.Series(last)
    )
    known = dict(frame.select("masked", "template_id").iter_rows())
    assert errors_per_day(frame) == {known["table is locked"]: 2.0}


def test_new_templates_a_day_are_those_of_one_workload_and_unknown_without_times() -> None:
    frame = timed(10.0, 40)
    one, four = (novel_per_day(frame, workloads=n) for n in (1, 4))
    # 120 * ((1 + 1/10) ** log2(120/80) - 1)
    assert (
        one is not None
        and one == pytest.approx(6.878, abs=0.01)
        and four == pytest.approx(one / 4, abs=0.001)
    )
    assert novel_per_day(sample(sentences(120)), workloads=1) is None
    assert novel_per_day(frame.with_columns(first_seen=pl.lit(None, dtype=pl.Datetime)), workloads=1) is None
    assert novel_per_day(frame.head(10), workloads=1) is None


@pytest.mark.parametrize(
    ("novel", "chance"),
    [(None, 0.05), (0.0, 0.05), (100.0, 0.05), (200.0, 0.05), (1000.0, 0.01), (1e6, 1e-5)],
)
def test_a_budget_of_ten_alerts_a_day_asks_for_a_chance(novel: float | None, chance: float) -> None:
    assert chance_within(10.0, novel) == pytest.approx(chance)


def test_the_optimizer_takes_the_steps_of_torch_bit_by_bit() -> None:
    networks = []
    for _ in range(2):
        torch.manual_seed(3)
        networks.append(CausalNetwork(TINY.model, 300))
    theirs = torch.optim.AdamW(networks[0].parameters(), lr=6e-3, weight_decay=0.01, fused=True)
    ours = FusedAdamW(networks[1].parameters())
    for step in range(20):
        rate = 6e-3 * (1 - step / 20)
        ids = torch.randint(3, 300, (8, 12), generator=torch.Generator().manual_seed(step))
        for network, optimizer in zip(networks, (theirs, ours), strict=True):
            optimizer.zero_grad()
            network.loss(ids)[0].backward()  # type: ignore[no-untyped-call]
        theirs.param_groups[0]["lr"] = rate
        theirs.step()
        ours.step(rate)
    for one, other in zip(*(n.parameters() for n in networks), strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
def test_fitting_and_loading_import_no_compiler(tmp_path: Path) -> None:
    """torch._dynamo takes 1.8 s to import, more than a small training; transformers takes longer."""
    code = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from safetensors.torch import save_file
from pipeline.models.bundle import WEIGHTS
from pipeline.models.causal import CausalNetwork
from pipeline.models.config import ModelConfig
from pipeline.models.fitting import FusedAdamW
from pipeline.models.line import loaded
import pipeline.models.trainer
network = CausalNetwork(ModelConfig(), 300)
optimizer = FusedAdamW(network.parameters())
for parameter in optimizer.parameters:
    parameter.grad = parameter.detach().clone()
optimizer.step(0.001)
path = Path({str(tmp_path)!r})
save_file({{k: v.contiguous() for k, v in network.state_dict().items()}}, path / WEIGHTS)
again = loaded(ModelConfig(), SimpleNamespace(vocab_size=300), path)
assert all(a.equal(b) for a, b in zip(network.state_dict().values(), again.state_dict().values()))
print([m for m in ("torch._dynamo", "sympy", "transformers") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
def test_a_model_flags_new_templates_of_its_own_log_as_seldom_as_it_says(tmp_path: Path) -> None:
    """What is published is what was calibrated: at 1 % asked at most 2 % got, and at 5 % at most 10 %."""
    parts = (
        ["queue", "cache", "lease", "worker", "batch", "socket", "index", "shard", "session", "cursor"],
        ["opened", "closed", "renewed", "flushed", "moved", "merged", "listed", "read", "sorted", "packed"],
        ["on <IP>", "by <IP>", "after <NUM> ms", "with <NUM> rows", "for tenant <NUM>", "of group <NUM>"],
        ["at start", "again", "in time", "as planned", "for now", "by hand"],
    )
    lines = [" ".join(words) for words in itertools.product(*parts)]
    random.Random(3).shuffle(lines)
    learnt, new = lines[:1_000], lines[1_000:]
    _, made = run(sample(learnt), tmp_path / "v1")
    assert made.calibration.held_out == 200
    knowledge = Knowledge(calibration=made.calibration, known=load_known(tmp_path / "v1"))
    judged = [
        verdict_of(
            {**msgspec.structs.asdict(e), "pattern_id": n, "severe": False, "level": "info"}, None, knowledge
        )
        for n, e in enumerate(LineModel.load(tmp_path / "v1").score(new))
    ]
    assert sum(bool(v.anomalous) for v in judged) <= 0.1 * len(new)
    assert sum((v.p_value or 1.0) <= 0.01 for v in judged) <= 0.02 * len(new)
