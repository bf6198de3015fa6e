"""From stored lines to a training sample, and from a sample to a published model.

stored results --group by pattern--> distinct masked lines with counts --fit--> bundle --publish(fence)--> live
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import polars as pl

from pipeline.drain.masking import MaskSet
from pipeline.errors import StaleToken, TrainingFailed
from pipeline.gpu.leases import Held
from pipeline.keyspace import text_map
from pipeline.models.threshold import Mode
from pipeline.records import ERROR_LEVELS, SAMPLE_SCHEMA, digest
from pipeline.registry import Registry
from pipeline.settings import Settings


class State(StrEnum):
    """Where a training is."""

    NONE = "none"
    QUEUED = "queued"
    FETCHING = "fetching"
    TRAINING = "training"
    PUBLISHING = "publishing"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a user sees of a training. Times in seconds."""

    state: State = State.NONE
    request_id: str = ""
    reason: str = ""
    percent: float = 0.0
    elapsed_s: float = 0.0
    remaining_s: float = 0.0
    epoch: int = 0
    loss: float = 0.0
    lines: int = 0
    patterns: int = 0
    version: str = ""

    def to_redis(self) -> dict[Any, Any]:
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_redis(cls, raw: Any) -> "Status":
        entry = text_map(raw)
        if not entry:
            return cls()
        return cls(
            state=State(entry["state"]),
            request_id=entry["request_id"],
            reason=entry["reason"],
            percent=float(entry["percent"]),
            elapsed_s=float(entry["elapsed_s"]),
            remaining_s=float(entry["remaining_s"]),
            epoch=int(entry["epoch"]),
            loss=float(entry["loss"]),
            lines=int(entry["lines"]),
            patterns=int(entry["patterns"]),
            version=entry["version"],
        )

    @property
    def ended(self) -> bool:
        return self.state in (State.COMPLETED, State.FAILED)


def sample(stored: pl.LazyFrame, masks: MaskSet, *, limit: int) -> pl.DataFrame:
    """SAMPLE_SCHEMA: the `limit` most frequent patterns of stored results (RESULT_SCHEMA).

    One streaming pass; only distinct patterns are held. The masked line is made again from one message of each
    pattern: results do not store it, and masking the same message gives the same line.
    """
    grouped = (
        stored.group_by("pattern_id")
        .agg(
            pl.len().cast(pl.UInt64).alias("count"),
            pl.col("message").first(),
            pl.col("level").is_in(list(ERROR_LEVELS)).fill_null(False).any().alias("severe"),
            pl.col("template_id").first(),
        )
        .sort("count", "pattern_id", descending=[True, False])
        .head(limit)
        .collect(engine="streaming")
    )
    if grouped.is_empty():
        return pl.DataFrame(schema=SAMPLE_SCHEMA)
    masked = masks.mask(grouped["message"])
    # Lines that older masks kept apart can be one pattern now.
    return (
        grouped.with_columns(masked["masked"], masked["pattern_id"])
        .group_by("pattern_id", maintain_order=True)
        .agg(
            pl.col("masked", "template_id").first(),
            pl.col("count").sum(),
            pl.col("severe").any(),
        )
        .sort("count", descending=True, maintain_order=True)
        .select([pl.col(name).cast(dtype) for name, dtype in SAMPLE_SCHEMA.items()])
    )


def train(
    stored: pl.LazyFrame,
    *,
    mode: Mode,
    masks: MaskSet,
    registry: Registry,
    settings: Settings,
    held: Held,
    request_id: str,
    device: str,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[Status]:
    """Sample, fit, publish; yields what to show. The last status is COMPLETED, with the version.

    Raises TrainingFailed (too few lines), StaleToken (the lease was lost: nothing was published).
    """
    from pipeline.models import trainer  # torch

    started = time.monotonic()
    status = Status(state=State.FETCHING, request_id=request_id)
    yield status
    chosen = sample(stored, masks, limit=settings.train_max_patterns)
    lines = int(chosen["count"].sum())
    status = replace(status, state=State.TRAINING, lines=lines, patterns=chosen.height)
    yield status
    version = registry.name(held.lease.token, digest(request_id, str(lines), masks.version))
    out = registry.path(version)
    for step in trainer.fit(
        chosen,
        tokens=masks.tokens,
        mask_version=masks.version,
        config=trainer.TrainConfig(),
        seed=settings.seed,
        out=out,
        mode=mode,
        version=version,
        device=device,
        time_budget_s=settings.train_seconds,
    ):
        if held.lost.is_set():
            raise StaleToken(
                f"the training lease (token {held.lease.token}) was lost; {version} is not published"
            )
        yield replace(
            status,
            percent=step.percent,
            elapsed_s=time.monotonic() - started,
            remaining_s=step.remaining_s or 0.0,
            epoch=int(step.epoch),
            loss=step.loss or 0.0,
        )
    yield replace(status, state=State.PUBLISHING, percent=99.0, version=version)
    if not out.is_dir():
        raise TrainingFailed(f"the training of {version} ended without a model")
    registry.publish(version, held.lease, at=clock())
    yield replace(
        status, state=State.COMPLETED, percent=100.0, version=version, elapsed_s=time.monotonic() - started
    )
