"""Distinct masked lines per second on two cores: the line model on its real path beside the NuLog-style scorer.

Both are fitted on the same lines, the distinct masked ones of all real sets, and take turns; each figure is a median.
The model is loaded afresh for each turn, so that no word is remembered from the one before. The peer masks every token
in turn and reads one line per forward; it scores a part of the lines that is drawn anew each turn. Each of the two gets
one or two torch threads, whichever is faster for it.
"""

import csv
import gzip
import io
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import torch

from bench._nulog import NuLog
from bench._running import scratch
from pipeline.drain.masking import MaskSet
from pipeline.models.fitting import TrainConfig
from pipeline.models.line import LineModel
from pipeline.models.threshold import Mode
from pipeline.models.trainer import fit
from pipeline.records import LEARN_SCHEMA
from pipeline.sampling import Sampler

TURNS = 7
PEER_LINES = 150  # a turn; takes as long as ours with all lines
PEER_SECONDS = 10.0  # of fitting; speed does not depend on it


def messages(data: Path) -> Iterator[list[str]]:
    """The messages of every real set, a file at a time, without their headers where these are known."""
    with gzip.open(data / "bgl" / "BGL_100k.log.gz", "rt", encoding="utf-8", errors="replace") as file:
        yield [line.rstrip("\n").split(" ", 9)[-1] for line in file]
    for path in sorted((data / "loghub_2k").glob("*/*_structured.csv")):
        with path.open(newline="", encoding="utf-8") as table:
            yield [row["Content"] for row in csv.DictReader(table)]
    for path in sorted((data / "trainticket").rglob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".log")):
                with archive.open(name) as raw:
                    text = io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
                    yield [line.rstrip("\n") for line in text]


def sample(masks: MaskSet, pages: Iterator[list[str]]) -> pl.DataFrame:
    """SAMPLE_SCHEMA of all messages."""
    sampler = Sampler(masks, limit=50_000)
    for page in pages:
        frame = pl.DataFrame({"message": pl.Series(page, dtype=pl.String), "workload": "all"})
        missing = [pl.lit(None, dtype=t).alias(n) for n, t in LEARN_SCHEMA.items() if n not in frame.columns]
        sampler.add(frame.with_columns(missing).select(list(LEARN_SCHEMA)))
    return sampler.sample().frame


def rate(score: Callable[[Sequence[str]], object], lines: Sequence[str]) -> float:
    """Lines per second of wall time."""
    began = time.perf_counter()
    score(lines)
    return len(lines) / (time.perf_counter() - began)


def measure(data: Path) -> dict[str, Any]:
    masks = MaskSet.load()
    frame = sample(masks, messages(data))
    lines = frame["masked"].to_list()
    rng = np.random.default_rng(0)

    def part() -> list[str]:
        return [lines[i] for i in rng.choice(len(lines), size=PEER_LINES, replace=False)]

    with scratch() as folder:
        for _ in fit(
            frame,
            tokens=masks.tokens,
            mask_version=masks.version,
            config=TrainConfig(),
            seed=1,
            out=folder / "v1",
            mode=Mode.BASELINE,
            version="v1",
        ):
            pass  # fmt: skip
        peer = NuLog().fit(lines, frame["count"].to_list(), seed=1, budget_s=PEER_SECONDS)

        def ours(threads: int) -> float:
            model = LineModel.load(folder / "v1", threads=threads)
            return rate(model.score, lines)

        def its(threads: int) -> float:
            torch.set_num_threads(threads)
            return rate(peer.score, part())

        ours(2)  # what is imported and allocated once
        its(2)
        best, peer_best = max((1, 2), key=ours), max((1, 2), key=its)
        turns = [(ours(best), its(peer_best)) for _ in range(TURNS)]
        model = LineModel.load(folder / "v1", threads=best)
        warm = [rate(model.score, lines) for _ in range(TURNS)]
    found, reference = (median(side) for side in zip(*turns, strict=True))
    return {
        "lines": len(lines),
        "lines_per_s": round(found),
        "reference_lines_per_s": round(reference, 1),
        "ratio": round(found / reference, 1),
        "ratio_of_each_turn": [round(a / b, 1) for a, b in turns],
        "known_words_lines_per_s": round(median(warm)),  # in a process that has met the words before
        "threads": best,
        "reference_threads": peer_best,
        "parameters": sum(p.numel() for p in model.network.parameters()),
    }
