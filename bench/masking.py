"""Masking in columns beside Drain3's own masks line by line: lines/s, distinct masked lines, purity.

Purity is the share of lines whose masked line means one true event. Messages are those of the twelve loghub
systems (headers cut off by their authors) and of the Blue Gene/L log."""

import csv
import gzip
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import polars as pl
from drain3.masking import LogMasker, MaskingInstruction

from pipeline.drain.masking.mask_set import MaskSet

# examples/drain3.ini of Drain3 0.9.11
DRAIN3 = (
    (r"((?<=[^A-Za-z0-9])|^)(([0-9a-f]{2,}:){3,}([0-9a-f]{2,}))((?=[^A-Za-z0-9])|$)", "ID"),
    (r"((?<=[^A-Za-z0-9])|^)(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})((?=[^A-Za-z0-9])|$)", "IP"),
    (r"((?<=[^A-Za-z0-9])|^)([0-9a-f]{6,} ?){3,}((?=[^A-Za-z0-9])|$)", "SEQ"),
    (r"((?<=[^A-Za-z0-9])|^)([0-9A-F]{4} ?){4,}((?=[^A-Za-z0-9])|$)", "SEQ"),
    (r"((?<=[^A-Za-z0-9])|^)(0x[a-f0-9A-F]+)((?=[^A-Za-z0-9])|$)", "HEX"),
    (r"((?<=[^A-Za-z0-9])|^)([\-\+]?\d+)((?=[^A-Za-z0-9])|$)", "NUM"),
    (r"(?<=executed cmd )(\".+?\")", "CMD"),
)


def best(work: Callable[[], object], times: int = 3) -> float:
    """Shortest of some runs, in seconds."""
    spans = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        spans.append(time.perf_counter() - start)
    return min(spans)


def purity(masked: Sequence[str], events: Sequence[str]) -> tuple[int, float]:
    """Distinct masked lines, and the share of lines that agree with the commonest event of theirs."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for line, event in zip(masked, events, strict=True):
        seen[line][event] += 1
    return len(seen), sum(max(counts.values()) for counts in seen.values()) / len(masked)


def compare(masks: MaskSet, messages: list[str], events: Sequence[str] | None) -> dict[str, Any]:
    """Both maskers on the same messages in this process."""
    drain3 = LogMasker([MaskingInstruction(pattern, word) for pattern, word in DRAIN3], "<", ">")
    column = pl.Series(messages, dtype=pl.String)
    sample = messages[:10_000]
    ours = len(messages) / best(lambda: masks.mask(column))
    theirs = len(sample) / best(lambda: [drain3.mask(message) for message in sample])
    lines = masks.mask(column)["masked"].to_list()
    found, share = purity(lines, events or lines)
    other, other_share = purity([drain3.mask(m) for m in messages], events or messages)
    values: dict[str, Any] = {
        "lines": len(messages),
        "masked": found,
        "drain3_masked": other,
        "lines_per_s": round(ours),
        "drain3_lines_per_s": round(theirs),
        "ratio": round(ours / theirs, 1),
    }
    if events:
        values |= {
            "events": len(set(events)),
            "purity": round(share, 4),
            "drain3_purity": round(other_share, 4),
        }
    return values


def measure(data: Path) -> dict[str, Any]:
    masks = MaskSet.load()
    found: dict[str, Any] = {}
    for path in sorted((data / "loghub_2k").glob("*/*_structured.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        found[path.parent.name] = compare(masks, [r["Content"] for r in rows], [r["EventId"] for r in rows])
    with gzip.open(data / "bgl" / "BGL_100k.log.gz", "rt", encoding="utf-8", errors="replace") as file:
        parts = [line.rstrip("\n").split(" ", 9) for line in file]
    found["BGL_100k"] = compare(masks, [p[9] if len(p) > 9 else "" for p in parts], None)
    purities = [f["purity"] for f in found.values() if "purity" in f]
    return {"threads": pl.thread_pool_size(), "mean_purity": round(mean(purities), 4), "datasets": found}
