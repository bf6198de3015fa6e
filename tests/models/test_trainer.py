"""Training: progress, calibration on held-out templates, what the weights may see."""

import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch

from pipeline.errors import BadBundle, TrainingFailed
from pipeline.models import bundle as bundles
from pipeline.models import trainer
from pipeline.models.budget import chance_within, novel_per_day
from pipeline.models.causal import CausalNetwork
from pipeline.models.config import ModelConfig
from pipeline.models.fitting import Fitted, FusedAdamW, TrainConfig, affordable_steps, fit_network, learnt_by
from pipeline.models.line import LineModel
from pipeline.models.prior import SeverityPrior
from pipeline.models.threshold import CHANCE, Mode
from pipeline.models.trainer import FitProgress, FitRequest, fit
from pipeline.records.verdict import pattern_ids

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
                mode=mode,
                version=out.name,
                time_budget_s=budget,
                known_normal=known_normal,
                **more,
            ),
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
        FitRequest(
            tokens=("<IP>",),
            mask_version="m1",
            config=TINY,
            seed=1,
            out=tmp_path / "v1",
            mode=Mode.BASELINE,
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
            mode=Mode.BASELINE,
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


@pytest.mark.long
def test_an_existing_version_is_not_overwritten(tmp_path: Path) -> None:
    run(sample(sentences(5)), tmp_path / "v1")
    with pytest.raises(BadBundle):
        run(sample(sentences(5)), tmp_path / "v1")


@pytest.mark.long
def test_a_baseline_is_fitted_whole_even_where_it_is_rare_or_severe(tmp_path: Path) -> None:
    lines = [*sentences(10), "disk failed once"]
    _, made = run(sample(lines, [200] * 10 + [1], severe=[lines[0]]), tmp_path / "v1")
    assert made.stats.left_out == 0 and made.stats.fitted == 11


@pytest.mark.long
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
    assert min(e.surprisal for e in scored[20:]) > max(e.surprisal for e in scored[:20])


@pytest.mark.long
def test_self_mode_learns_rare_and_error_like_lines_that_somebody_called_normal(tmp_path: Path) -> None:
    lines = [*sentences(20), "seldom seen thing", "status changed abruptly", "checkpoint failed twice"]
    frame = sample(lines, [200] * 20 + [1, 300, 300], severe=["status changed abruptly"])
    marked = frozenset(frame["pattern_id"][-3:-1])
    _, made = run(frame, tmp_path / "v1", mode=Mode.SELF, known_normal=marked)
    assert made.stats.fitted == 22 and made.stats.left_out == 1
    vocabulary = (tmp_path / "v1" / bundles.TOKENIZER).read_text(encoding="utf-8")
    assert "abruptly" in vocabulary and "seldom" in vocabulary and "twice" not in vocabulary


@pytest.mark.long
def test_self_mode_on_a_log_of_rare_lines_only_learns_from_half_of_it(tmp_path: Path) -> None:
    _, made = run(sample(sentences(40), [1] * 40), tmp_path / "v1", mode=Mode.SELF)
    assert made.stats.fitted == 20


def test_the_manifest_tells_the_watermark_and_the_counts(tmp_path: Path) -> None:
    _, made = run(sample(sentences(7), [10, 20, 30, 40, 50, 60, 70]), tmp_path / "v1")
    assert made.template_watermark == 7
    assert (made.stats.lines, made.stats.distinct, made.calibration.total) == (280, 7, 280)
    assert made.mask_version == "m1" and made.tokens == ("<IP>", "<NUM>")


@pytest.mark.long
def test_a_time_budget_cuts_the_number_of_steps(tmp_path: Path) -> None:
    long = replace(TINY, min_steps=100_000, max_steps=100_000)
    _, made = run(sample(sentences(6)), tmp_path / "v1", config=long, budget=1.0)
    assert 20 <= made.stats.steps < 10_000


def test_half_of_the_budget_is_kept_for_the_fit_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now))
    clock = trainer._TrainingBudget(4, 20.0)
    assert [clock.share_s(i) for i in range(4)] == pytest.approx([3.0, 4.5, 9.0, 18.0])
    now = 112.0
    assert [clock.share_s(i) for i in (2, 3)] == pytest.approx([0.0, 6.0])
    assert trainer._TrainingBudget(1, 20.0).share_s(0) == pytest.approx(18.0)


@pytest.mark.parametrize(
    ("took_s", "left_s", "grace_s", "steps"),
    [
        (0.1, 100.0, 0.0, 800),  # there is time for all
        (1.0, 30.0, 10.0, 310),  # the budget decides
        (1.0, 2.0, 10.0, 120),  # too few, but the grace reaches the least
        (1.0, -5.0, 10.0, 110),  # and no further
        (9.0, 0.0, 2.0, 20),  # never fewer
    ],
)
def test_a_fit_without_time_takes_the_least_steps_as_far_as_the_grace_goes(
    took_s: float, left_s: float, grace_s: float, steps: int
) -> None:
    assert affordable_steps(800, 10, took_s=took_s, left_s=left_s, grace_s=grace_s, minimum=120) == steps


@pytest.mark.long
def test_the_model_that_stays_is_fitted_though_the_calibration_used_the_budget_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 0.0
    signs = trainer._signs

    def slowly(*args: Any) -> Any:
        nonlocal late
        late += 1_000.0
        return signs(*args)

    monkeypatch.setattr(trainer, "_signs", slowly)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: monotonic() + late))
    long = replace(TINY, min_steps=150, max_steps=150)
    _, made = run(sample(sentences(6)), tmp_path / "v1", config=long, budget=40.0)
    assert made.stats.steps == long.least_steps == 120


def test_more_lines_than_the_limit_are_drawn_down_and_all_stay_known(tmp_path: Path) -> None:
    _, made = run(sample(sentences(80)), tmp_path / "v1", config=replace(TINY, max_distinct=50))
    assert made.stats.fitted == 50
    assert len(bundles.load_known(tmp_path / "v1")) == 80


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
def test_in_self_mode_neither_novelty_nor_prior_learns_that_a_fault_is_normal(tmp_path: Path) -> None:
    faults = ["zyxw zyxw quotum", "vutsr qponm checkpoint failed"]
    frame = sample([*sentences(30), *faults], [200] * 30 + [1, 300])
    clean = sample(sentences(30), [200] * 30)
    lines = [*faults, "quotum"]
    run(frame, tmp_path / "v1", mode=Mode.SELF)
    run(clean, tmp_path / "v2", mode=Mode.SELF)
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
    _, generous = run(slow, tmp_path / "v1", alerts_per_day=10.0)
    _, strict = run(fast, tmp_path / "v2", alerts_per_day=10.0)
    assert generous.calibration.chance == CHANCE and generous.calibration.method == "conformal"
    assert strict.stats.novel_per_day is not None and strict.stats.novel_per_day > 200
    assert strict.calibration.chance == pytest.approx(10.0 / strict.stats.novel_per_day)
    assert strict.calibration.threshold > generous.calibration.threshold


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


@pytest.mark.long
def test_a_warm_start_takes_fewer_steps_and_begins_where_its_parent_stopped(tmp_path: Path) -> None:
    frame = sample(sentences(12))
    _, parent = run(frame, tmp_path / "v1", config=replace(TINY, min_steps=100, max_steps=100))
    cold, warm = Fitted(), Fitted()
    for made, begin in ((cold, None), (warm, tmp_path / "v1")):
        for _ in fit_network(
            frame, made, tokens=("<IP>",), config=TINY, seed=4, device="cpu", budget_s=None, warm=begin
        ):
            pass
    assert parent.stats.steps == 100
    assert (warm.warm, warm.steps, cold.warm, cold.steps) == (True, 10, False, 20)
    assert warm.loss < cold.loss


@pytest.mark.long
def test_a_parent_that_cannot_be_used_is_a_cold_start(tmp_path: Path) -> None:
    frame = sample(sentences(12))
    run(frame, tmp_path / "v1")
    shutil.copytree(tmp_path / "v1", tmp_path / "damaged")
    (tmp_path / "damaged" / bundles.WEIGHTS).write_bytes(b"garbage")
    other = replace(TINY, model=replace(TINY.model, hidden=48))
    for parent, config in (
        (tmp_path / "damaged", TINY),
        (tmp_path / "absent", TINY),
        (tmp_path / "v1", other),
    ):
        made = Fitted()
        for _ in fit_network(
            frame, made, tokens=("<IP>",), config=config, seed=4, device="cpu", budget_s=None, warm=parent
        ):
            pass
        assert (made.warm, made.steps) == (False, 20)


@pytest.mark.long
def test_what_a_parent_has_learnt_is_not_called_held_out(tmp_path: Path) -> None:
    lines = sentences(30)
    frame = sample(lines)
    first, second, third = (frozenset(pattern_ids(lines[a:b])) for a, b in ((0, 3), (0, 5), (0, 12)))
    run(frame, tmp_path / "v1", held_out=first)
    assert learnt_by(tmp_path / "v1", frame, second) == second - first
    assert learnt_by(tmp_path / "absent", frame, second) == frozenset()
    # Warm: two of five that are held out now are in the weights already.
    _, warm = run(frame, tmp_path / "v2", held_out=second, warm=tmp_path / "v1")
    assert (warm.stats.steps, frozenset(warm.held_out)) == (10, first)
    # Cold: with most of them learnt there would be nothing left to judge by.
    _, cold = run(frame, tmp_path / "v3", held_out=third, warm=tmp_path / "v1")
    assert (cold.stats.steps, frozenset(cold.held_out)) == (20, third)


@pytest.mark.long
def test_a_new_line_of_a_template_that_a_parent_has_learnt_is_learnt(tmp_path: Path) -> None:
    old, new = sample(sentences(30)), sample([f"{line} again" for line in sentences(30)])
    run(old, tmp_path / "v1")
    held_out = frozenset(new["pattern_id"].head(2))
    assert learnt_by(tmp_path / "v1", new, held_out) == held_out
    # Of a template that is held out in part, its lines are still news.
    both = pl.concat([old, new])
    assert learnt_by(tmp_path / "v1", both, held_out) == frozenset()


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
