"""Learning a line model: one straight loop that yields its progress.

Some templates are held out of everything that a model learns: its weights, its grams and its severity prior.
Held-out words are then as unusual as words of a real new template, and the scores that the model gives these
lines show how a normal line of an unseen shape scores. The threshold is found on them, so what is published
is what was calibrated. Of results, which no person declared normal, the model does not learn rare and
error-like templates, so that a fault cannot pass for normal; the severity prior learns them as its other
class. A sample may hold both, and its column `baseline` says which line is which.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import polars as pl
import torch
from safetensors.torch import save_file

from pipeline.models import bundle as bundles
from pipeline.models import selection
from pipeline.models.budget import chance_within, errors_per_day, novel_per_day, span_s
from pipeline.models.causal import CausalNetwork
from pipeline.models.config import ModelConfig, NetworkKind
from pipeline.models.encoder.directory import encoder_shape
from pipeline.models.evidence import Normal
from pipeline.models.fitting import FitStep, Fitted, TrainConfig, fit_network
from pipeline.models.known.patterns import KNOWN_SCHEMA
from pipeline.models.known.sentences import Sentences
from pipeline.models.line import LineModel, normal_words
from pipeline.models.novelty import Novelty
from pipeline.models.prior import SeverityPrior
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Calibration, calibrate
from pipeline.records.batch import LearntFrom, utc_now

_FINE_TUNING_RATE: Final = 1e-4  # the usual one for small encoders; 6e-3 destroys what they know
# Of the transformer edition (docs/LOG.md). A third of the pieces is hidden, so a step needs three times the
# lines, and a line has to come three times as often, to have as many targets.
_SHAPE: Final[dict[str, Any]] = {"groups": 3}
_STEPS: Final[dict[str, Any]] = {"batch": 24, "batch_tokens": 768, "epochs": 120, "min_steps": 300}
_PREPARED, _FITTED = 0.02, 0.98  # of the time of a training, roughly
_FINE_TUNED: Final[dict[str, Any]] = {
    "min_steps": 120,
    "max_steps": 120,
}  # BERT takes seconds a step on a CPU
_KNOWN_WORDS: Final = 200_000  # stored for "unseen words"; most frequent first


def edition_config(edition: str, encoder: Path | None = None) -> TrainConfig:
    """How to train an edition of the line model: "causal", "transformer", or the latter from a directory.

    Raises BadInput for a directory that cannot be served.
    """
    if encoder is not None:
        return replace(
            TrainConfig(),
            model=encoder_shape(encoder),
            encoder=encoder,
            learning_rate=_FINE_TUNING_RATE,
            **_FINE_TUNED,
        )
    if edition == NetworkKind.TRANSFORMER:
        return replace(TrainConfig(), model=ModelConfig(kind=NetworkKind.TRANSFORMER, **_SHAPE), **_STEPS)
    return TrainConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """The order for one training."""

    version: str
    out: Path  # the bundle directory to write
    config: TrainConfig
    seed: int  # of the weights, the batches and the held-out templates
    tokens: tuple[str, ...]  # mask tokens
    mask_version: str
    device: str = "cpu"
    news_per_day: float = math.inf  # false alarms that a workload may raise; needs `first_seen` in the sample
    known_normal: frozenset[int] = (
        frozenset()
    )  # marked as normal: learnt however rare or error-like they look
    extra: Mapping[str, bytes] = field(default_factory=dict)  # further files of the bundle
    # Only for the manifest:
    parent: str | None = None  # the version that this one continues
    model: str = "shared"
    workloads: tuple[str, ...] = ()  # of the training lines
    learnt_from: Mapping[str, LearntFrom] = field(default_factory=dict)  # of each of these workloads
    query: Mapping[str, Any] = field(default_factory=dict)  # that read the sample


@dataclass(frozen=True, slots=True, kw_only=True)
class FitProgress:
    """Progress of a training. `percent` 0..100 of the whole, times in seconds."""

    stage: str  # "prepare", "fit", "write"
    percent: float
    elapsed_s: float
    remaining_s: float | None  # None until there is something to estimate from
    epoch: float
    loss: float | None  # nats per masked token, smoothed
    lines: int  # distinct lines the stage learns from


def fit(sample: pl.DataFrame, request: FitRequest) -> Generator[FitProgress, None, None]:
    """Trains on distinct masked lines (SAMPLE_SCHEMA); when the iterator ends, `request.out` is a bundle.

    The same sample and request give the same weights on a CPU. Seeds torch's global generator. Raises
    TrainingFailed when the sample is too small or not of the schema, BadBundle when `out` exists.
    """
    began = time.monotonic()
    config = request.config
    if config.threads:
        torch.set_num_threads(config.threads)
    chosen = _select(sample, request)

    def progress(stage: str, share: float, step: FitStep | None = None) -> FitProgress:
        elapsed = time.monotonic() - began
        return FitProgress(
            stage=stage,
            percent=round(100.0 * share, 1),
            elapsed_s=round(elapsed, 2),
            remaining_s=round(elapsed * (1.0 - share) / share, 1) if step or stage == "write" else None,
            epoch=round(step.epoch, 2) if step else 0.0,
            loss=round(step.loss, 4) if step else None,
            lines=chosen.fitted.height,
        )

    yield progress("prepare", _PREPARED)
    fitted = Fitted()
    for step in fit_network(
        chosen.fitted, fitted, tokens=request.tokens, config=config, seed=request.seed, device=request.device
    ):
        yield progress("fit", _PREPARED + (_FITTED - _PREPARED) * step.step / step.steps, step)
    novelty = Novelty.fit(chosen.fitted["masked"].to_list(), chosen.fitted["count"].to_list())
    prior = SeverityPrior.fit(*(chosen.taught[n].to_list() for n in ("masked", "severe", "count")))
    assert fitted.tokenizer is not None  # noqa: S101 - narrows the type
    model = LineModel(
        fitted.network, fitted.tokenizer, config.model, (), request.device, novelty=novelty, prior=prior
    )
    evidence = model.score(chosen.held_out["masked"].to_list())
    rows = zip(evidence, chosen.held_out["severe"], strict=True)
    normal = [Normal(evidence=e, severe=severe) for e, severe in rows if e.tokens > 0]
    chance = chance_within(request.news_per_day, chosen.novel_per_day)
    calibration = calibrate(normal, total=chosen.total, chance=chance)
    seconds = time.monotonic() - began
    stats = _stats(chosen, fitted, normal, calibration, seconds=seconds, device=request.device)
    _write(chosen, request, fitted, stats, novelty=novelty, prior=prior, calibration=calibration)
    yield progress("write", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selected:
    """The parts of a sample that a training uses."""

    frame: pl.DataFrame  # the whole sample
    fitted: pl.DataFrame  # that the weights learn
    taught: pl.DataFrame  # that the severity prior learns
    held_out: pl.DataFrame  # the most frequent line of each held-out template
    held_out_patterns: frozenset[int]  # all lines of these
    left_out: int  # distinct lines excluded as rare, error-like or without text
    novel_per_day: float | None
    days: float  # that the sample spans, 1 at least
    workloads: dict[int, str]  # of the patterns, where the sample knows them
    daily: dict[int, float]  # lines a day of error-like templates that come all the time

    @property
    def total(self) -> int:
        return int(self.frame["count"].sum())


def _select(sample: pl.DataFrame, request: FitRequest) -> _Selected:
    limit, seed = request.config.max_distinct, request.seed
    frame = selection.checked_sample(sample, request.config)
    learnable = selection.learnable(frame, int(frame["count"].sum()), request.known_normal)
    learnable = selection.with_text(learnable, request.tokens)
    in_held_out = pl.col("template_id").is_in(selection.held_out(learnable, seed))
    fitted = selection.cap(learnable.filter(~in_held_out), limit, seed)
    marked = pl.col("pattern_id").is_in(sorted(request.known_normal))
    levels = frame.filter(~in_held_out).with_columns(severe=pl.col("severe") & ~marked)
    return _Selected(
        frame=frame,
        fitted=fitted,
        taught=selection.taught(levels, fitted, limit, seed),
        held_out=learnable.filter(in_held_out).unique("template_id", keep="first", maintain_order=True),
        held_out_patterns=frozenset(frame.filter(in_held_out)["pattern_id"]),
        left_out=frame.height - learnable.height,
        novel_per_day=_novel_per_day(sample, frame, request.workloads),
        days=max(1.0, span_s(sample) / 86_400),
        workloads=dict(sample.select("pattern_id", "workload").iter_rows())
        if "workload" in sample.columns
        else {},
        daily=errors_per_day(sample),
    )


def _novel_per_day(sample: pl.DataFrame, frame: pl.DataFrame, workloads: Sequence[str]) -> float | None:
    """New calm templates of a workload a day."""
    if "first_seen" not in sample.columns:
        return None
    normal = frame.filter(~pl.col("severe"))
    normal = normal.filter(pl.Series([severity_words(m) is None for m in normal["masked"]], dtype=pl.Boolean))
    return novel_per_day(sample.join(normal, on="pattern_id", how="semi"), workloads=len(workloads))


def _stats(
    chosen: _Selected,
    fitted: Fitted,
    normal: Sequence[Normal],
    calibration: Calibration,
    *,
    seconds: float,
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
        seconds=round(seconds, 2),
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
    stats: bundles.TrainingStats,
    *,
    novelty: Novelty,
    prior: SeverityPrior,
    calibration: Calibration,
) -> None:
    frame, tokenizer = chosen.frame, fitted.tokenizer
    assert tokenizer is not None  # noqa: S101 - narrows the type
    words: dict[str, int] = {}
    for masked, count in frame.select("masked", "count").iter_rows():
        for word in normal_words(masked):
            words[word] = words.get(word, 0) + count
    frequent = sorted(words, key=lambda w: (-words[w], w))[:_KNOWN_WORDS]
    contents = {
        bundles.NOVELTY: novelty.to_bytes(),
        bundles.PRIOR: prior.to_bytes(),
        bundles.TOKENIZER: tokenizer.to_json().encode(),
        **request.extra,
    }
    writers: dict[str, Callable[[Path], Any]] = {
        **_network_writers(fitted),
        bundles.KNOWN_FILE: frame.select(list(KNOWN_SCHEMA)).write_parquet,
        bundles.SENTENCES: Sentences.fit(
            (
                (masked, count, chosen.workloads.get(pattern, ""))
                for masked, count, pattern in frame.select("masked", "count", "pattern_id").iter_rows()
            ),
            allowed=request.news_per_day * chosen.days,
        ).write,
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
            mask_version=request.mask_version,
            tokens=tuple(sorted(set(request.tokens))),
            config=asdict(request.config) | {"encoder": str(request.config.encoder or "")},
            calibration=calibration,
            stats=stats,
            seed=request.seed,
            parent=request.parent,
            model=request.model,
            workloads=request.workloads,
            learnt_from=request.learnt_from,
            query=request.query,
            daily=tuple(chosen.daily.items()),
            held_out=tuple(sorted(chosen.held_out_patterns)),
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
