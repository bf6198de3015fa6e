"""The set of twelve services (samples/services): its lines with service and trace, and its faults.

A half is `tuning` or `testing`. Only the figures of `testing` are reported; nothing is chosen on it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import polars as pl

from bench._log_files import read_file
from bench._triage_data import SAMPLES, prepared
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.watching.sessions.keys import extract

SHOP: Final = SAMPLES / "services"
TUNING: Final = "tuning"
TESTING: Final = "testing"
# One row per record. `at`: seconds since the epoch, with fractions; null without a time.
SHOP_LINES: Final[dict[str, Any]] = {
    "service": pl.String,
    "at": pl.Float64,
    "level": pl.String,
    "severe": pl.Boolean,
    "masked": pl.String,
    "message": pl.String,
    "raw": pl.String,
    "trace": pl.String,
    "baseline": pl.Boolean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopFault:
    """A labelled fault; times in seconds since the epoch."""

    id: str
    kind: str
    service: str
    start: float
    repaired: float
    end: float
    traces: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopHalf:
    """`lines`: SHOP_LINES in the order of service, phase and line. `services`: all twelve."""

    lines: pl.DataFrame
    faults: tuple[ShopFault, ...]
    services: tuple[str, ...]


def shop_half(name: str, masks: MaskSet, folder: Path = SHOP) -> ShopHalf:
    """TUNING or TESTING, read and masked as the product does."""
    frames = []
    for path in sorted((folder / name).glob("*/*.log.zst")):
        frame = prepared(pl.concat([chunk.records for chunk in read_file(path)]), masks)
        frames.append(
            frame.select(
                pl.lit(path.name.removesuffix(".log.zst")).alias("service"),
                (pl.col("timestamp").dt.epoch("us") / 1e6).alias("at"),
                "level",
                "severe",
                "masked",
                "message",
                "raw",
                extract(frame).alias("trace"),
                pl.lit(path.parent.name == "baseline").alias("baseline"),
            )
        )
    lines = pl.concat(frames).cast(SHOP_LINES)
    return ShopHalf(
        lines=lines,
        faults=shop_faults(name, folder),
        services=tuple(sorted(lines["service"].unique().to_list())),
    )


def shop_faults(name: str, folder: Path = SHOP) -> tuple[ShopFault, ...]:
    """The labels of TUNING or TESTING, in the order of time."""
    labels = json.loads((folder / name / "labels.json").read_text(encoding="utf-8"))
    return tuple(_fault(entry) for entry in labels["faults"])


def _fault(entry: dict[str, Any]) -> ShopFault:
    start, repaired, end = (_seconds(entry[key]) for key in ("start", "repaired", "end"))
    traces: Sequence[str] = entry["traces"]
    return ShopFault(
        id=entry["id"], kind=entry["kind"], service=entry["service"], start=start, repaired=repaired, end=end,
        traces=frozenset(traces),
    )  # fmt: skip


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
