"""Learning a line model: one straight loop that yields its progress.

The threshold comes first, the weights second. For the threshold some templates are held out. A calibration
model is fitted without them, with its own tokenizer, grams and severity prior: held-out words are then as
unusual as words of a real new template. Its scores of held-out lines show how a normal line of an unseen
shape scores. The published model is then fitted on everything. Of an unlabelled log (Mode.SELF) neither model
learns rare and error-like templates, so that a fault cannot pass for normal; the severity prior learns them
as its other class.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import polars as pl
import torch
from safetensors.torch import save_file

from pipeline.models import bundle as bundles
from pipeline.models import selection
from pipeline.models.budget import chance_within, novel_per_day
from pipeline.models.causal import CausalNetwork
from pipeline.models.config import ModelConfig, NetworkKind
from pipeline.models.encoder.directory import encoder_shape
from pipeline.models.evidence import Normal
from pipeline.models.fits.state import FitSharing, FitState
from pipeline.models.fits.world import ALONE, World
from pipeline.models.fitting import FitStep, Fitted, TrainConfig, fit_network, learnt_by
from pipeline.models.line import LineModel, normal_words
from pipeline.models.novelty import Novelty
from pipeline.models.prior import SeverityPrior
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Calibration, Mode, calibrate
from pipeline.records.batch import utc_now

_FINE_TUNING_RATE: Final = 1e-4  # the usual one for small encoders; 6e-3 destroys what they know
# Of the transformer edition (docs/LOG.md). A third of the pieces is hidden, so a step needs three times the
# lines, and a line has to come three times as often, to have as many targets.
_SHAPE: Final[dict[str, Any]] = {"groups": 3}
_STEPS: Final[dict[str, Any]] = {"batch": 24, "batch_tokens": 768, "epochs": 120, "min_steps": 300}
_KNOWN_WORDS: Final = 200_000  # stored for "unseen words"; most frequent first


def edition_config(edition: str, encoder: Path | None = None) -> TrainConfig:
    """How to train an edition of the line model: "causal", "transformer", or the latter from a directory.

    Raises BadInput for a directory that cannot be served.
    """
    if encoder is not None:
        return replace(
            TrainConfig(), model=encoder_shape(encoder), encoder=encoder, learning_rate=_FINE_TUNING_RATE
        )
    if edition == NetworkKind.TRANSFORMER:
        return replace(TrainConfig(), model=ModelConfig(kind=NetworkKind.TRANSFORMER, **_SHAPE), **_STEPS)
    return TrainConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """The order for one training."""

    version: str
    out: Path  # the bundle directory to write
    mode: Mode
    config: TrainConfig
    seed: int  # of the weights, the batches and the held-out templates
    tokens: tuple[str, ...]  # mask tokens
    mask_version: str
    device: str = "cpu"
    time_budget_s: float | None = None  # of all fits together; None: as many steps as `config` says
    alerts_per_day: float = (
        math.inf
    )  # false alarms that a workload may raise; needs `first_seen` in the sample
    # Patterns that neither the weights nor the calibration see. The bundle knows them like all others: the
    # judge shows them to the model, and once the model is published they are not news.
    held_out: frozenset[int] = frozenset()
    known_normal: frozenset[int] = (
        frozenset()
    )  # marked as normal: learnt however rare or error-like they look
    # The bundle whose weights the published model begins with. Calibration starts from fresh weights, because
    # the parent has trained on the held-out templates.
    warm: Path | None = None
    extra: Mapping[str, bytes] = field(default_factory=dict)  # further files of the bundle
    # Only for the manifest:
    parent: str | None = None  # the version that this one continues
    model: str = "shared"
    workloads: tuple[str, ...] = ()  # of the training lines
    query: Mapping[str, Any] = field(default_factory=dict)  # that read the sample


@dataclass(frozen=True, slots=True, kw_only=True)
class FitProgress:
    """Progress of a training. `percent` 0..100 of the whole, times in seconds."""

    stage: str  # "prepare", "calibrate", "fit", "write"
    percent: float
    elapsed_s: float
    remaining_s: float | None  # None until there is something to estimate from
    epoch: float
    loss: float | None  # nats per masked token, smoothed
    lines: int  # distinct lines the stage learns from


def fit(
    sample: pl.DataFrame, request: FitRequest, *, world: World = ALONE, state: FitState | None = None
) -> Generator[FitProgress, None, None]:
    """Trains on distinct masked lines (SAMPLE_SCHEMA); when the iterator ends, `request.out` is a bundle.

    The same sample and request give the same weights on a CPU, unless `time_budget_s` cuts the number of
    steps. `world`: the processes that train together, each with the same sample and request; rank 0 alone
    calibrates and writes. `state`: where the training is kept and gone on with. Seeds torch's global
    generator. Raises TrainingFailed when the sample is too small or not of the schema, BadBundle when `out`
    exists.
    """
    if request.config.threads:
        torch.set_num_threads(request.config.threads)
    chosen = _select(sample, request)
    budget = _TrainingBudget(len(chosen.folds) + 1, request.time_budget_s, world, state)
    yield budget.progress("prepare", 0, None, chosen.fitted.height)
    normal = yield from _hold_out(chosen, request, budget)
    if world.rank:
        yield from _fit_published(chosen, request, budget)
        return
    chance = chance_within(request.alerts_per_day, chosen.novel_per_day)
    calibration = calibrate(normal, mode=request.mode, total=chosen.total, chance=chance)
    fitted, learnt = yield from _fit_published(chosen, request, budget)
    stats = _stats(chosen, fitted, normal, calibration, budget, device=request.device)
    _write(chosen, request, fitted, calibration, stats, held_out=request.held_out - learnt)
    yield FitProgress(
        stage="write",
        percent=100.0,
        elapsed_s=round(budget.elapsed(), 2),
        remaining_s=0.0,
        epoch=stats.epochs,
        loss=stats.loss,
        lines=chosen.fitted.height,
    )


class _TrainingBudget:
    """The time budget of a training, shared out over its fits; percent, elapsed and remaining time.

    `world`, `state`: of all its fits."""

    def __init__(
        self, fits: int, budget_s: float | None, world: World = ALONE, state: FitState | None = None
    ) -> None:
        self.world, self.state = world, state
        self.start = time.monotonic()
        self.fits = fits
        self.budget_s = budget_s

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def share_s(self, fit: int) -> float | None:
        """Seconds left to the fit with this index.

        A tenth is reserved for scoring and writing, half of the remainder for the last fit, which is
        published.
        """
        if self.budget_s is None:
            return None
        left_s, last = 0.9 * self.budget_s - self.elapsed(), self.fits - 1
        return max(0.0, left_s if fit == last else (left_s - 0.45 * self.budget_s) / (last - fit))

    def grace_s(self) -> float:
        """Seconds that each fit may exceed its share for its least steps: together the budget once more."""
        return (self.budget_s or 0.0) / self.fits

    def progress(self, stage: str, fit: int, step: FitStep | None, lines: int) -> FitProgress:
        share = (fit + (step.step / step.steps if step else 0.0)) / self.fits
        percent = round(2.0 + 96.0 * share, 1)
        elapsed = self.elapsed()
        return FitProgress(
            stage=stage,
            percent=percent,
            elapsed_s=round(elapsed, 2),
            remaining_s=round(elapsed * (100.0 - percent) / percent, 1) if share > 0 else None,
            epoch=round(step.epoch, 2) if step else 0.0,
            loss=round(step.loss, 4) if step else None,
            lines=lines,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selected:
    """The parts of a sample that a training uses."""

    frame: pl.DataFrame  # the whole sample
    fitted: pl.DataFrame  # that the weights learn
    taught: pl.DataFrame  # that the severity prior learns
    left_out: int  # distinct lines excluded as rare, error-like or without text
    novel_per_day: float | None
    folds: list[list[int]]  # templates held out together for calibration
    hold_out: str  # how, in words

    @property
    def total(self) -> int:
        return int(self.frame["count"].sum())


def _select(sample: pl.DataFrame, request: FitRequest) -> _Selected:
    limit, seed = request.config.max_distinct, request.seed
    frame = selection.checked_sample(sample, request.config)
    learnable = selection.learnable(frame, request.mode, int(frame["count"].sum()), request.known_normal)
    learnable = selection.with_text(learnable, request.tokens)
    fitted = selection.cap(selection.without(learnable, request.held_out), limit, seed)
    marked = pl.col("pattern_id").is_in(sorted(request.known_normal))
    levels = selection.without(frame.with_columns(severe=pl.col("severe") & ~marked), request.held_out)
    folds, hold_out = selection.folds(fitted, seed)
    return _Selected(
        frame=frame,
        fitted=fitted,
        taught=selection.taught(levels, fitted, limit, seed),
        left_out=frame.height - learnable.height,
        novel_per_day=_novel_per_day(sample, frame, request.workloads),
        folds=folds,
        hold_out=hold_out,
    )


def _novel_per_day(sample: pl.DataFrame, frame: pl.DataFrame, workloads: Sequence[str]) -> float | None:
    """New calm templates of a workload a day."""
    if "first_seen" not in sample.columns:
        return None
    normal = frame.filter(~pl.col("severe"))
    normal = normal.filter(pl.Series([severity_words(m) is None for m in normal["masked"]], dtype=pl.Boolean))
    return novel_per_day(sample.join(normal, on="pattern_id", how="semi"), workloads=len(workloads))


def _hold_out(
    chosen: _Selected, request: FitRequest, budget: _TrainingBudget
) -> Generator[FitProgress, None, list[Normal]]:
    """Fits a model without each fold; the fold's lines as that model scores them."""
    finished = [] if budget.state is None else budget.state.folds()
    normal = [one for fold in finished for one in fold]
    for index, templates in list(enumerate(chosen.folds))[len(finished) :]:
        in_fold = pl.col("template_id").is_in(templates)
        inside = chosen.fitted.filter(~in_fold)
        fitted = Fitted()
        yield from _fit(inside, fitted, request, budget, index=index, seed=request.seed + 1 + index)
        if budget.world.rank:
            continue
        novelty, prior = _signs(inside, chosen.taught.filter(~in_fold))
        # The most frequent line of each template stands for it.
        lines = chosen.fitted.filter(in_fold).unique("template_id", keep="first", maintain_order=True)
        assert fitted.tokenizer is not None  # noqa: S101 - narrows the type
        model = LineModel(
            fitted.network,
            fitted.tokenizer,
            request.config.model,
            (),
            request.device,
            novelty=novelty,
            prior=prior,
        )
        rows = zip(model.score(lines["masked"].to_list()), lines["severe"], strict=True)
        shown = [Normal(evidence=e, severe=severe) for e, severe in rows if e.tokens > 0]
        if budget.state is not None:
            budget.state.add_fold(shown)
        normal += shown
    return normal


def _fit_published(
    chosen: _Selected, request: FitRequest, budget: _TrainingBudget
) -> Generator[FitProgress, None, tuple[Fitted, frozenset[int]]]:
    """Fits the model to publish; also the held-out patterns that its weights know from a warm start."""
    learnt: frozenset[int] = frozenset()
    warm = request.warm
    if warm is not None:
        learnt = learnt_by(warm, chosen.frame, request.held_out)
        # A growing log holds out a few more each time; most of them must remain unseen for the judge.
        warm = warm if 2 * len(learnt) <= len(request.held_out) else None
    fitted = Fitted()
    last = len(chosen.folds)
    yield from _fit(chosen.fitted, fitted, request, budget, index=last, seed=request.seed, warm=warm)
    return fitted, learnt if fitted.warm else frozenset()


def _fit(
    lines: pl.DataFrame,
    fitted: Fitted,
    request: FitRequest,
    budget: _TrainingBudget,
    *,
    index: int,
    seed: int,
    warm: Path | None = None,
) -> Iterator[FitProgress]:
    stage = "fit" if index == budget.fits - 1 else "calibrate"
    for step in fit_network(
        lines,
        fitted,
        tokens=request.tokens,
        config=request.config,
        seed=seed,
        device=request.device,
        budget_s=budget.share_s(index),
        grace_s=budget.grace_s(),
        warm=warm,
        sharing=FitSharing(world=budget.world, kept=None if budget.state is None else budget.state.of(index)),
    ):
        yield budget.progress(stage, index, step, lines.height)


def _signs(fitted: pl.DataFrame, taught: pl.DataFrame) -> tuple[Novelty, SeverityPrior]:
    """The cheap measurements beside the network."""
    novelty = Novelty.fit(fitted["masked"].to_list(), fitted["count"].to_list())
    return novelty, SeverityPrior.fit(*(taught[n].to_list() for n in ("masked", "severe", "count")))


def _stats(
    chosen: _Selected,
    fitted: Fitted,
    normal: Sequence[Normal],
    calibration: Calibration,
    budget: _TrainingBudget,
    *,
    device: str,
) -> bundles.TrainingStats:
    calm = [calibration.normalised_score(n.evidence) for n in normal if n.calm]
    above = sum(score > calibration.threshold for score in calm) / max(1, len(calm))
    return bundles.TrainingStats(
        lines=chosen.total,
        distinct=chosen.frame.height,
        fitted=chosen.fitted.height,
        templates=chosen.frame["template_id"].n_unique(),
        held_out_templates=len(normal),
        left_out=chosen.left_out,
        hold_out=chosen.hold_out,
        seconds=round(budget.elapsed(), 2),
        epochs=round(fitted.epochs, 2),
        steps=fitted.steps,
        loss=round(fitted.loss, 4),
        held_out_above=round(above, 4),
        parameters=sum(p.numel() for p in fitted.network.parameters()),
        device=device,
        novel_per_day=chosen.novel_per_day,
    )


def _write(
    chosen: _Selected,
    request: FitRequest,
    fitted: Fitted,
    calibration: Calibration,
    stats: bundles.TrainingStats,
    *,
    held_out: frozenset[int],
) -> None:
    frame, tokenizer = chosen.frame, fitted.tokenizer
    assert tokenizer is not None  # noqa: S101 - narrows the type
    words: dict[str, int] = {}
    for masked, count in frame.select("masked", "count").iter_rows():
        for word in normal_words(masked):
            words[word] = words.get(word, 0) + count
    frequent = sorted(words, key=lambda w: (-words[w], w))[:_KNOWN_WORDS]
    novelty, prior = _signs(chosen.fitted, chosen.taught)
    contents = {
        bundles.NOVELTY: novelty.to_bytes(),
        bundles.PRIOR: prior.to_bytes(),
        bundles.TOKENIZER: tokenizer.to_json().encode(),
        **request.extra,
    }
    writers: dict[str, Callable[[Path], Any]] = {
        **_network_writers(fitted),
        bundles.KNOWN_FILE: frame.select(list(bundles.KNOWN_SCHEMA)).write_parquet,
        bundles.WORDS: pl.DataFrame({"word": frequent}, schema={"word": pl.String}).write_parquet,
        **{name: partial(_write_bytes, content) for name, content in contents.items()},
    }
    bundles.write_bundle(
        request.out,
        writers=writers,
        manifest=lambda files: bundles.Manifest(
            files=files,
            version=request.version,
            created=utc_now(),
            mode=request.mode,
            mask_version=request.mask_version,
            tokens=tuple(sorted(set(request.tokens))),
            config=asdict(request.config) | {"encoder": str(request.config.encoder or "")},
            calibration=calibration,
            stats=stats,
            seed=request.seed,
            template_watermark=max(0, int(frame["template_id"].max() or 0)),  # type: ignore[arg-type]
            parent=request.parent,
            model=request.model,
            workloads=request.workloads,
            query=request.query,
            held_out=tuple(sorted(held_out & set(frame["pattern_id"]))),
        ),
    )


def _network_writers(fitted: Fitted) -> dict[str, Callable[[Path], Any]]:
    if isinstance(fitted.network, CausalNetwork):
        state = {k: v.detach().cpu().contiguous() for k, v in fitted.network.state_dict().items()}
        return {bundles.WEIGHTS: partial(save_file, state)}
    from pipeline.models.encoder.files import encoder_writers

    assert fitted.tokenizer is not None  # noqa: S101 - narrows the type
    return {**encoder_writers(fitted.network, fitted.tokenizer)}


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


__all__ = ["FitProgress", "FitRequest", "TrainConfig", "fit"]
