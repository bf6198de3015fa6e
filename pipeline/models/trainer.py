"""Learning a line model: one straight loop that yields its progress.

First the threshold, then the weights. For the threshold, templates are held out, a model (with its
own tokenizer, trigrams and severity prior, so that held-out words are as strange as words of a real
new template) is fitted without them, and what it says of them is what a normal line of an unseen
shape looks like. Then the model that is kept is fitted on everything. When the sample is the very
log to be scored (Mode.SELF), rare and error-like templates stay out of both, so that a fault cannot
teach the model that it is normal; of the severity prior they are the other class.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import polars as pl
import torch
from safetensors.torch import save_file

from pipeline.models import bundle as bundles
from pipeline.models import selection
from pipeline.models.budget import chance_within, novel_per_day
from pipeline.models.evidence import Normal
from pipeline.models.fitting import FitStep, Fitted, TrainConfig, fit_network, learnt_by
from pipeline.models.line import LineModel, normal_words, stored_state
from pipeline.models.novelty import Novelty
from pipeline.models.prior import SeverityPrior
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Mode, calibrate
from pipeline.records.batch import utc_now
from pipeline.records.schema import SAMPLE_SCHEMA

_KNOWN_WORDS: Final = 200_000  # kept for "unseen words"; most frequent first


@dataclass(frozen=True, slots=True, kw_only=True)
class FitProgress:
    """Where a training stands. `percent` 0..100 of the whole, times in seconds."""

    stage: str  # "prepare", "calibrate", "fit", "write"
    percent: float
    elapsed_s: float
    remaining_s: float | None  # None until there is something to estimate from
    epoch: float
    loss: float | None  # nats per masked token, smoothed
    lines: int  # distinct lines the stage learns from


class _Clock:
    """Percent, elapsed and remaining over all fits of a training."""

    def __init__(self, fits: int, budget_s: float | None) -> None:
        self.start = time.monotonic()
        self.fits = fits
        self.budget_s = budget_s

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def share_s(self, fit: int) -> float | None:
        """Seconds the fit with this index may still take; a tenth is kept for scoring and writing, half of the rest
        for the last fit, whose model stays."""
        if self.budget_s is None:
            return None
        left, last = 0.9 * self.budget_s - self.elapsed(), self.fits - 1
        return max(0.0, left if fit == last else (left - 0.45 * self.budget_s) / (last - fit))

    def grace_s(self) -> float:
        """Seconds each fit may take beyond that for its least steps: all together the budget once more."""
        return (self.budget_s or 0.0) / self.fits

    def progress(self, stage: str, fit: int, step: FitStep | None, lines: int) -> FitProgress:
        done = (fit + (step.step / step.steps if step else 0.0)) / self.fits
        percent = round(2.0 + 96.0 * done, 1)
        elapsed = self.elapsed()
        return FitProgress(
            stage=stage,
            percent=percent,
            elapsed_s=round(elapsed, 2),
            remaining_s=round(elapsed * (100.0 - percent) / percent, 1) if done > 0 else None,
            epoch=round(step.epoch, 2) if step else 0.0,
            loss=round(step.loss, 4) if step else None,
            lines=lines,
        )


def fit(
    sample: pl.DataFrame,
    *,
    tokens: tuple[str, ...],
    mask_version: str,
    config: TrainConfig,
    seed: int,
    out: Path,
    mode: Mode,
    version: str,
    device: str = "cpu",
    time_budget_s: float | None = None,
    parent: str | None = None,
    model: str = "shared",
    workloads: tuple[str, ...] = (),
    query: Mapping[str, Any] | None = None,
    held_out: frozenset[int] = frozenset(),
    known_normal: frozenset[int] = frozenset(),
    alerts_per_day: float = math.inf,
    extra: Mapping[str, bytes] | None = None,
    warm: Path | None = None,
) -> Iterator[FitProgress]:
    """Trains on distinct masked lines (SAMPLE_SCHEMA); when the iterator ends, `out` is a bundle.

    Same sample, configuration and seed give the same weights on a CPU, unless `time_budget_s`
    cuts the number of steps. Seeds torch's global generator. The patterns in `held_out` reach neither
    the weights nor the calibration, but the bundle knows them like all others: the judge shows them to
    the model, and once it is published they are not news. Those in `known_normal` are learnt however rare or
    error-like they look, because somebody said that they are normal. `alerts_per_day`: false alarms that a workload
    may raise, where the sample has times (`first_seen`) that tell how often new templates come. `extra`: further
    files of the bundle. `warm`: the bundle whose weights the kept model begins with; the threshold is found without
    it, as it has seen what is held out; what it has seen of `held_out` the manifest does not call held out, and where that
    is more than half the start is cold. `model`, `workloads` and `query` only go into the manifest.

    Raises TrainingFailed when the sample is too small or not of the schema, BadBundle when `out` exists.
    """
    frame = selection.checked(sample, config)
    if config.threads:
        torch.set_num_threads(config.threads)
    total = int(frame["count"].sum())
    fitted = selection.with_text(selection.learnable(frame, mode, total, known_normal), tokens)
    left_out = frame.height - fitted.height
    fitted = selection.without(fitted, held_out)
    fitted = selection.cap(fitted, config.max_distinct, seed)
    pattern = pl.col("pattern_id")
    said = frame.with_columns(severe=pl.col("severe") & ~pattern.is_in(sorted(known_normal)))
    taught = selection.taught(selection.without(said, held_out), fitted, config.max_distinct, seed)
    novel = _novel(sample, frame, workloads)
    folds, hold_out = selection.folds(fitted, seed)
    clock = _Clock(len(folds) + 1, time_budget_s)
    yield clock.progress("prepare", 0, None, fitted.height)
    common: dict[str, Any] = {
        "tokens": tokens,
        "config": config,
        "device": device,
        "grace_s": clock.grace_s(),
    }

    normal: list[Normal] = []
    for index, held in enumerate(folds):
        inside = fitted.filter(~pl.col("template_id").is_in(held))
        outside = fitted.filter(pl.col("template_id").is_in(held))
        made = Fitted()
        budget = clock.share_s(index)
        for step in fit_network(inside, made, seed=seed + 1 + index, budget_s=budget, **common):
            yield clock.progress("calibrate", index, step, inside.height)
        signs = _Signs.of(inside, taught.filter(~pl.col("template_id").is_in(held)))
        normal += _held_out(outside, made, signs, config, device)
    calibration = calibrate(normal, mode=mode, total=total, chance=chance_within(alerts_per_day, novel))

    made = Fitted()
    last = len(folds)
    seen: frozenset[int] = frozenset()
    if warm is not None:
        seen = learnt_by(warm, frame, held_out)
        # A log that grows holds out a few more each time; the judge has to have the better part left.
        common["warm"] = warm if 2 * len(seen) <= len(held_out) else None
    for step in fit_network(fitted, made, seed=seed, budget_s=clock.share_s(last), **common):
        yield clock.progress("fit", last, step, fitted.height)
    signs = _Signs.of(fitted, taught)

    calm = [calibration.normalised_score(n.evidence) for n in normal if n.calm]
    above = sum(s > calibration.threshold for s in calm) / max(1, len(calm))
    stats = bundles.TrainingStats(
        lines=total,
        distinct=frame.height,
        fitted=fitted.height,
        templates=frame["template_id"].n_unique(),
        held_out_templates=len(normal),
        left_out=left_out,
        hold_out=hold_out,
        seconds=round(clock.elapsed(), 2),
        epochs=round(made.epochs, 2),
        steps=made.steps,
        loss=round(made.loss, 4),
        held_out_above=round(above, 4),
        parameters=sum(p.numel() for p in made.network.parameters()),
        device=device,
        novel_per_day=novel,
    )
    _write(
        out,
        made,
        frame,
        {bundles.NOVELTY: signs.novelty.to_bytes(), bundles.PRIOR: signs.prior.to_bytes()}
        | dict(extra or {}),
        version=version,
        created=utc_now(),
        mode=mode,
        mask_version=mask_version,
        tokens=tuple(sorted(set(tokens))),
        config=asdict(config),
        calibration=calibration,
        stats=stats,
        seed=seed,
        template_watermark=max(0, int(frame["template_id"].max() or 0)),  # type: ignore[arg-type]
        parent=parent,
        model=model,
        workloads=workloads,
        query=dict(query or {}),
        held_out=tuple(sorted((held_out - seen if made.warm else held_out) & set(frame["pattern_id"]))),
    )
    yield FitProgress(
        stage="write",
        percent=100.0,
        elapsed_s=round(clock.elapsed(), 2),
        remaining_s=0.0,
        epoch=stats.epochs,
        loss=stats.loss,
        lines=fitted.height,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signs:
    """What stands beside the network: cheap signs that a line is strange or bad."""

    novelty: Novelty
    prior: SeverityPrior

    @classmethod
    def of(cls, fitted: pl.DataFrame, taught: pl.DataFrame) -> "_Signs":
        return cls(
            novelty=Novelty.fit(fitted["masked"].to_list(), fitted["count"].to_list()),
            prior=SeverityPrior.fit(*(taught[n].to_list() for n in ("masked", "severe", "count"))),
        )


def _novel(sample: pl.DataFrame, frame: pl.DataFrame, workloads: Sequence[str]) -> float | None:
    """New calm templates a day of a workload."""
    if "first_seen" not in sample.columns:
        return None
    normal = frame.filter(~pl.col("severe"))
    normal = normal.filter(pl.Series([severity_words(m) is None for m in normal["masked"]], dtype=pl.Boolean))
    return novel_per_day(sample.join(normal, on="pattern_id", how="semi"), workloads=len(workloads))


def _held_out(
    lines: pl.DataFrame, made: Fitted, signs: _Signs, config: TrainConfig, device: str
) -> list[Normal]:
    """The most frequent line of each template, as a model sees it that has not learnt the template."""
    head = lines.unique("template_id", keep="first", maintain_order=True)
    masked = head["masked"].to_list()
    assert made.tokenizer is not None  # noqa: S101 - narrows the type; fit_network has filled it
    scored = LineModel(made.network, made.tokenizer, config.model, (), device).score(masked)
    rows = zip(scored, signs.novelty.score(masked), signs.prior.score(masked), head["severe"], strict=True)
    return [
        Normal(evidence=replace(e, novelty=novelty, prior=prior), severe=severe)
        for e, novelty, prior, severe in rows
        if e.tokens > 0
    ]


def _write(
    out: Path, made: Fitted, frame: pl.DataFrame, more: Mapping[str, bytes], **facts: Any
) -> bundles.Manifest:
    tokenizer, state = made.tokenizer, stored_state(made.network)
    assert tokenizer is not None  # noqa: S101 - narrows the type
    text = tokenizer.to_json()
    known = frame.select(list(bundles.KNOWN_SCHEMA))
    words: dict[str, int] = {}
    for masked, count in frame.select("masked", "count").iter_rows():
        for word in normal_words(masked):
            words[word] = words.get(word, 0) + count
    kept = sorted(words, key=lambda w: (-words[w], w))[:_KNOWN_WORDS]
    return bundles.write_bundle(
        out,
        writers={name: _holding(content) for name, content in more.items()}
        | {
            bundles.WEIGHTS: lambda p: save_file(state, p),
            bundles.TOKENIZER: lambda p: _text(p, text),
            bundles.KNOWN: known.write_parquet,
            bundles.WORDS: lambda p: pl.DataFrame({"word": kept}, schema={"word": pl.String}).write_parquet(
                p
            ),
        },
        manifest=lambda files: bundles.Manifest(files=files, **facts),
    )


def _holding(content: bytes) -> Callable[[Path], None]:
    return lambda path: _bytes(path, content)


def _bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


__all__ = ["SAMPLE_SCHEMA", "FitProgress", "TrainConfig", "fit"]
