"""Learning a line model: one straight loop that yields its progress.

First the threshold, then the weights. For the threshold, templates are held out, a model (with its
own tokenizer, so that held-out words are as strange as words of a real new template) is fitted
without them, and their surprise is what a normal line of an unseen shape looks like. Then the model
that is kept is fitted on everything. When the sample is the very log to be scored (Mode.SELF), rare
and error-like templates stay out of both, so that a fault cannot teach the model that it is normal.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import torch
from safetensors.torch import save_file

from pipeline.errors import TrainingFailed
from pipeline.models import bundle as bundles
from pipeline.models.fitting import Fitted, Step, TrainConfig, fit_network
from pipeline.models.line import normal_words, stored_state, summarise, token_surprises
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Mode, calibrate, is_rare
from pipeline.records import SAMPLE_SCHEMA, utc_now

_HOLD_OUT: Final = 20  # templates; a 5 % quantile needs 19
_FOLDS_BELOW: Final = 60  # templates; with fewer, holding out 20 would leave too little to learn from
_HOLD_OUT_MOST: Final = 200  # scoring more would cost seconds and move the quantile by little
_LINES_PER_TEMPLATE: Final = 4  # scored per held-out template; its median stands for it
_KNOWN_WORDS: Final = 200_000  # kept for "unseen words"; most frequent first


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
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
        """Seconds the fit with this index may still take; a tenth is kept for scoring and writing."""
        if self.budget_s is None:
            return None
        return max(0.0, 0.9 * self.budget_s - self.elapsed()) / (self.fits - fit)

    def progress(self, stage: str, fit: int, step: Step | None, lines: int) -> Progress:
        done = (fit + (step.step / step.steps if step else 0.0)) / self.fits
        percent = round(2.0 + 96.0 * done, 1)
        elapsed = self.elapsed()
        return Progress(
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
) -> Iterator[Progress]:
    """Trains on distinct masked lines (SAMPLE_SCHEMA); when the iterator ends, `out` is a bundle.

    Same sample, configuration and seed give the same weights on a CPU, unless `time_budget_s`
    cuts the number of steps. Seeds torch's global generator. The patterns in `held_out` reach neither
    the weights nor the calibration, but the bundle knows them like all others: the judge shows them to
    the model, and once it is published they are not news. `model`, `workloads` and `query` only go into
    the manifest. Raises TrainingFailed when the sample is too small or not of the schema, BadBundle
    when `out` exists.
    """
    frame = _check(sample, config)
    if config.threads:
        torch.set_num_threads(config.threads)
    total = int(frame["count"].sum())
    fitted = _with_text(_choose(frame, mode, total), tokens)
    left_out = frame.height - fitted.height
    fitted = _without(fitted, held_out)
    fitted = _cap(fitted, config.max_distinct, seed)
    folds, hold_out = _folds(fitted, seed)
    clock = _Clock(len(folds) + 1, time_budget_s)
    yield clock.progress("prepare", 0, None, fitted.height)
    common: dict[str, Any] = {"tokens": tokens, "config": config, "device": device}

    surprises: list[float] = []
    for index, held in enumerate(folds):
        inside = fitted.filter(~pl.col("template_id").is_in(held))
        outside = fitted.filter(pl.col("template_id").is_in(held))
        made = Fitted()
        budget = clock.share_s(index)
        for step in fit_network(inside, made, seed=seed + 1 + index, budget_s=budget, **common):
            yield clock.progress("calibrate", index, step, inside.height)
        surprises += _held_out(outside, made, config, device)
    calibration = calibrate(surprises, mode=mode, total=total)

    made = Fitted()
    last = len(folds)
    for step in fit_network(fitted, made, seed=seed, budget_s=clock.share_s(last), **common):
        yield clock.progress("fit", last, step, fitted.height)

    above = sum(s > calibration.threshold for s in surprises) / max(1, len(surprises))
    stats = bundles.TrainingStats(
        lines=total,
        distinct=frame.height,
        fitted=fitted.height,
        templates=frame["template_id"].n_unique(),
        held_out_templates=len(surprises),
        left_out=left_out,
        hold_out=hold_out,
        seconds=round(clock.elapsed(), 2),
        epochs=round(made.epochs, 2),
        steps=made.steps,
        loss=round(made.loss, 4),
        held_out_above=round(above, 4),
        parameters=sum(p.numel() for p in made.network.parameters()),
        device=device,
    )
    _write(
        out,
        made,
        frame,
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
        held_out=tuple(sorted(held_out & set(frame["pattern_id"]))),
    )
    yield Progress(
        stage="write",
        percent=100.0,
        elapsed_s=round(clock.elapsed(), 2),
        remaining_s=0.0,
        epoch=stats.epochs,
        loss=stats.loss,
        lines=fitted.height,
    )


def _check(sample: pl.DataFrame, config: TrainConfig) -> pl.DataFrame:
    missing = [c for c in SAMPLE_SCHEMA if c not in sample.columns]
    if missing:
        raise TrainingFailed(
            f"the training sample lacks the columns {missing}; it needs {list(SAMPLE_SCHEMA)}"
        )
    frame = sample.select([pl.col(c).cast(t) for c, t in SAMPLE_SCHEMA.items()]).drop_nulls()
    frame = frame.unique("pattern_id", keep="first").sort("count", "pattern_id", descending=[True, False])
    total = int(frame["count"].sum())
    if frame.height < config.min_distinct or total < config.min_records:
        raise TrainingFailed(
            f"the sample holds {frame.height} distinct lines in {total} records; at least {config.min_distinct} "
            f"distinct lines and {config.min_records} records are needed: collect more lines and train again"
        )
    return frame


def _choose(frame: pl.DataFrame, mode: Mode, total: int) -> pl.DataFrame:
    """What the weights may see: all of a baseline; of an unlabelled log only common calm templates."""
    if mode is Mode.BASELINE:
        return frame
    # A fault may be logged at a calm level; its words give it away.
    worded = pl.Series([severity_words(m) is not None for m in frame["masked"]], dtype=pl.Boolean)
    templates = (
        frame.with_columns(bad=pl.col("severe") | worded)
        .group_by("template_id")
        .agg(pl.col("count").sum().alias("n"), pl.col("bad").any(), pl.len().alias("lines"))
    )
    templates = templates.sort("bad", "n", "template_id", descending=[False, True, False])
    rows = templates.to_dicts()
    common = [r for r in rows if not r["bad"] and not is_rare(r["n"], total)]
    # A log of rare or error lines only: its most frequent half stands for normal, calm ones first.
    enough = max(5, frame.height // 10)
    kept = sum(r["lines"] for r in common)
    if kept < enough:
        for row in rows[len(common) :]:
            if kept >= max(frame.height // 2, 2):
                break
            common.append(row)
            kept += row["lines"]
    return frame.filter(pl.col("template_id").is_in([r["template_id"] for r in common]))


def _with_text(frame: pl.DataFrame, tokens: tuple[str, ...]) -> pl.DataFrame:
    """Without the lines of nothing but mask tokens: they teach nothing and cannot be surprising."""
    bare = pl.col("masked").str.replace_many(list(tokens), [""] * len(tokens))
    kept = frame.filter(bare.str.contains(r"\S"))
    if kept.is_empty():
        raise TrainingFailed(
            f"none of the {frame.height} distinct lines holds text beside mask tokens; check the masks"
        )
    return kept


def _without(frame: pl.DataFrame, held_out: frozenset[int]) -> pl.DataFrame:
    kept = frame.filter(~pl.col("pattern_id").is_in(sorted(held_out))) if held_out else frame
    if kept.is_empty():
        raise TrainingFailed(
            f"all {frame.height} lines that could be learnt are held out for the judge; hold out fewer"
        )
    return kept


def _cap(frame: pl.DataFrame, most: int, seed: int) -> pl.DataFrame:
    """At most `most` lines, drawn without replacement by sqrt(count) (Efraimidis and Spirakis 2006)."""
    if frame.height <= most:
        return frame
    draw = np.random.default_rng(seed).random(frame.height)
    keys = draw ** (1.0 / np.sqrt(frame["count"].to_numpy().astype(np.float64)))
    chosen = np.sort(np.argsort(-keys)[:most])
    return frame[chosen]


def _folds(frame: pl.DataFrame, seed: int) -> tuple[list[list[int]], str]:
    """Template ids to hold out together, and how that was done in words."""
    ids = np.random.default_rng(seed).permutation(frame["template_id"].unique().sort().to_numpy())
    if len(ids) < 2:
        return [], "one template: nothing to hold out, surprise flags no line by itself"
    if len(ids) >= _FOLDS_BELOW:
        count = min(_HOLD_OUT_MOST, max(_HOLD_OUT, len(ids) // 5))
        return [ids[:count].tolist()], f"{count} of {len(ids)} templates"
    count = min(3, len(ids))
    return [ids[i::count].tolist() for i in range(count)], f"{count} folds by template"


def _held_out(lines: pl.DataFrame, made: Fitted, config: TrainConfig, device: str) -> list[float]:
    """One surprise per template: the median of its most frequent lines."""
    head = lines.group_by("template_id", maintain_order=True).head(_LINES_PER_TEMPLATE)
    assert made.tokenizer is not None  # noqa: S101 - narrows the type; fit_network has filled it
    encoded = made.tokenizer.encode(head["masked"].to_list())
    values = token_surprises(made.network, encoded, groups=config.model.groups, device=torch.device(device))
    scored = [summarise(v, config.model) for v in values]
    frame = pl.DataFrame(
        {
            "template_id": head["template_id"],
            "surprise": [s for s, _ in scored],
            "tokens": [n for _, n in scored],
        }
    ).filter(pl.col("tokens") > 0)
    return [
        float(v)
        for v in frame.group_by("template_id", maintain_order=True).agg(pl.col("surprise").median())[
            "surprise"
        ]
    ]


def _write(out: Path, made: Fitted, frame: pl.DataFrame, **facts: Any) -> bundles.Manifest:
    tokenizer, state = made.tokenizer, stored_state(made.network)
    assert tokenizer is not None  # noqa: S101 - narrows the type
    text = tokenizer.to_json()
    known = frame.select(list(bundles.KNOWN_SCHEMA))
    words: dict[str, int] = {}
    for masked, count in frame.select("masked", "count").iter_rows():
        for word in normal_words(masked):
            words[word] = words.get(word, 0) + count
    kept = sorted(words, key=lambda w: (-words[w], w))[:_KNOWN_WORDS]
    return bundles.write(
        out,
        writers={
            bundles.WEIGHTS: lambda p: save_file(state, p),
            bundles.TOKENIZER: lambda p: _text(p, text),
            bundles.KNOWN: known.write_parquet,
            bundles.WORDS: lambda p: pl.DataFrame({"word": kept}, schema={"word": pl.String}).write_parquet(
                p
            ),
        },
        manifest=lambda files: bundles.Manifest(files=files, **facts),
    )


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


__all__ = ["SAMPLE_SCHEMA", "Progress", "TrainConfig", "fit"]
