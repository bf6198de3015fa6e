"""How fast masking is, and what each mask costs: `python bench/masking.py --loghub DIR --bgl FILE`.

DIR holds `<system>/*_structured.csv` of Loghub; FILE is a raw Blue Gene/L log, gzipped. Each row gives
distinct masked lines, true events, purity (share of lines whose masked line means one event), and
lines per second of a batch, beside the masks that come with Drain3's example, applied line by line.
"""

import argparse
import csv
import gzip
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl
from drain3.masking import LogMasker, MaskingInstruction

from pipeline.drain.masking import MaskSet

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


def row(name: str, masks: MaskSet, messages: list[str], events: Sequence[str] | None) -> None:
    drain3 = LogMasker([MaskingInstruction(pattern, word) for pattern, word in DRAIN3], "<", ">")
    column = pl.Series(messages, dtype=pl.String)
    ours = len(messages) / best(lambda: masks.mask(column))
    sample = messages[:10000]
    theirs = len(sample) / best(lambda: [drain3.mask(message) for message in sample])
    lines = masks.mask(column)["masked"].to_list()
    found, share = purity(lines, events or lines)
    other, other_share = purity([drain3.mask(m) for m in messages], events) if events else (0, 0.0)
    print(
        f"{name:12} {column.n_unique():7} {found:6} {len(set(events)) if events else 0:6} {share:8.4f} {ours:11,.0f}"
        f" {other:8} {other_share:8.4f} {theirs:9,.0f}"
    )


def shares(masks: MaskSet, messages: pl.Series) -> None:
    """Prints what each pass costs over the distinct messages, and how many of them it changes."""
    lines, spent = messages.unique(), []
    for step in masks.passes:
        took = best(lambda step=step, lines=lines: step.run(lines))
        after = step.run(lines)
        spent.append((took, int((after != lines).sum()), step.pattern))
        lines = after
    total = sum(took for took, _, _ in spent)
    for took, changed, pattern in spent:
        names = [m.name for m in masks.masks if m.enabled and f"(?:{m.pattern})" in pattern]
        print(f"{took * 1e3:8.2f} ms {took / total:6.1%} {changed:8} changed  {' '.join(names)}")


def hostile(masks: MaskSet) -> None:
    """Prints milliseconds per MiB of ordinary and of hostile lines of 64 KiB."""
    units = {"ordinary": "served block blk_-123 to 10.0.0.1:80 in 5 ms; ", "numbers": "1 ", "emoji": "😀"}
    units |= {unit: unit for unit in ("a", "/", "\\", '"', "\0", "1,", "a@", "a.", "user=", "<NUM> ")}
    for name, unit in units.items():
        size = len(unit.encode())
        lines = pl.Series([f"{n} " + unit * (65536 // size) for n in range(16)])
        print(f"{name!r:12} {best(lambda lines=lines: masks.mask(lines)) * 1e3:8.1f} ms per MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loghub", type=Path, help="folder of <system>/*_structured.csv")
    parser.add_argument("--bgl", type=Path, help="gzipped raw BGL log")
    args = parser.parse_args()
    masks = MaskSet.load()
    print(
        f"{pl.thread_pool_size()} threads; messages, masked, events, purity, lines/s | Drain3: masked, purity, lines/s"
    )
    for path in sorted(args.loghub.glob("*/*_structured.csv")) if args.loghub else []:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        row(path.parent.name, masks, [r["Content"] for r in rows], [r["EventId"] for r in rows])
    if args.bgl:
        with gzip.open(args.bgl, "rt", encoding="utf-8", errors="replace") as file:
            parts = [line.rstrip("\n").split(" ", 9) for line in file]
        messages = [part[9] if len(part) > 9 else "" for part in parts]
        row(args.bgl.name, masks, messages, None)
        shares(masks, pl.Series(messages))
    hostile(masks)


if __name__ == "__main__":
    main()
