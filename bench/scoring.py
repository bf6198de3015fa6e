"""Distinct masked lines per second on two cores: the line model on its real path beside the NuLog-style
scorer.

Both are fitted on the same lines, the distinct masked ones of all real sets. The peer masks every token in
turn and reads one line per forward. A process of ours has met one half of the lines before, drawn anew for
each pass, and is timed with the other: one that has run for a while knows most words of a new line and not
all. How fast it is with every word new and with every word known is measured beside it. The peer remembers
nothing from line to line.

Each side runs in every turn as one process with one thread, as one with two, and as two with one each, the
two sides alternately, so that other work on the machine meets all alike. A figure is the median of its turns,
and of either side the fastest setting counts. Processor time is measured too."""

import csv
import gzip
import io
import multiprocessing
import pickle
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import torch

from bench._nulog import NuLog
from bench._running import scratch
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.models import prior
from pipeline.models.fitting import TrainConfig
from pipeline.models.line import LineModel
from pipeline.models.trainer import FitRequest, fit
from pipeline.records.schema import LEARN_SCHEMA
from pipeline.training.sampling import Sampler
from pipeline.workers.loops import collect_seldom

TURNS = 9
PASSES = 4  # of ours in a turn
PEER_LINES = 150  # of each process in a turn; takes as long as all passes of ours
PEER_SECONDS = 10.0  # of fitting; speed does not depend on it
SETTINGS = {
    "one thread": (1, 1),
    "two threads": (1, 2),
    "two processes": (2, 1),
}  # (processes, threads of each)
START_S = 300.0  # two processes that begin together wait for each other so long


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stint:
    """What one process scored without a pause; times in seconds on the machine's own clock."""

    lines: int
    began: float
    ended: float
    cpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Lines per second of wall time and of processor time."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, passes: Sequence[Sequence[Stint]]) -> "Speed":
        """Of passes one after another, each with stints of processes side by side; what is between is not
        counted."""
        wall = sum(max(s.ended for s in together) - min(s.began for s in together) for together in passes)
        every = [stint for together in passes for stint in together]
        lines = sum(stint.lines for stint in every)
        return cls(wall=lines / wall, cpu=lines / sum(stint.cpu for stint in every))


def timed(score: Callable[[Sequence[str]], object], lines: Sequence[str]) -> Stint:
    began, busy = time.perf_counter(), time.process_time()
    score(lines)
    return Stint(lines=len(lines), began=began, ended=time.perf_counter(), cpu=time.process_time() - busy)


class Scorer:
    """In a process of its own: both sides, and a door at which those of one pass meet."""

    here: "Scorer"

    def __init__(self, bundle: Path, peer: Path, lines: list[str], door: Any) -> None:
        self.bundle, self.lines, self.door = bundle, lines, door
        self.peer: NuLog = pickle.loads(peer.read_bytes())

    @classmethod
    def begin(cls, *args: Any) -> None:
        cls.here = cls(*args)
        collect_seldom()  # as a worker that is ready

    @classmethod
    def ours(cls, seed: int, threads: int, known: float, *, together: bool) -> Stint:
        """`known`: the share of lines whose words were met before. Timed are the others, or all where all
        are."""
        self, rng = cls.here, np.random.default_rng(seed)
        order = [self.lines[i] for i in rng.permutation(len(self.lines))]
        met, asked = order[: round(known * len(order))], order[round(known * len(order)) :]
        prior._features.cache_clear()  # which a process remembers
        model = LineModel.load(self.bundle, threads=threads)
        if met:
            model.score(met)
        return self._at_once(model.score, asked or met, together=together)

    @classmethod
    def peers(cls, seed: int, threads: int, *, together: bool) -> Stint:
        self, rng = cls.here, np.random.default_rng(seed)
        torch.set_num_threads(threads)
        asked = [self.lines[i] for i in rng.choice(len(self.lines), size=PEER_LINES, replace=False)]
        return self._at_once(self.peer.score, asked, together=together)

    def _at_once(
        self, score: Callable[[Sequence[str]], object], lines: list[str], *, together: bool
    ) -> Stint:
        if together:
            self.door.wait(START_S)
        return timed(score, lines)


def measure(data: Path) -> dict[str, Any]:
    masks = MaskSet.load()
    frame = sample(masks, messages(data))
    lines = frame["masked"].to_list()
    with scratch() as folder:
        for _ in fit(
            frame,
            FitRequest(
                tokens=masks.tokens,
                mask_version=masks.version,
                config=TrainConfig(),
                seed=1,
                out=folder / "v1",
                version="v1",
            ),
        ):
            pass
        peer = NuLog().fit(lines, frame["count"].to_list(), seed=1, budget_s=PEER_SECONDS)
        (folder / "peer").write_bytes(pickle.dumps(peer))
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        begun = (folder / "v1", folder / "peer", lines, context.Barrier(2))
        with ProcessPoolExecutor(2, mp_context=context, initializer=Scorer.begin, initargs=begun) as pool:
            seeds = iter(range(1_000_000))

            def side_by_side(what: Callable[..., Stint], processes: int, *args: float) -> list[Stint]:
                waiting = [
                    pool.submit(what, next(seeds), *args, together=processes > 1) for _ in range(processes)
                ]
                return [stint.result() for stint in waiting]

            def ours(processes: int, threads: int, known: float = 0.5) -> Speed:
                return Speed.of([side_by_side(Scorer.ours, processes, threads, known) for _ in range(PASSES)])

            def its(processes: int, threads: int) -> Speed:
                return Speed.of([side_by_side(Scorer.peers, processes, threads)])

            ours(2, 1), its(2, 1)  # what is imported and allocated once
            turns = [{name: (ours(*how), its(*how)) for name, how in SETTINGS.items()} for _ in range(TURNS)]
            share = {
                name: round(median(ours(1, 1, known).cpu for _ in range(TURNS)))
                for name, known in (("new", 0.0), ("known", 1.0))
            }
            parameters = sum(p.numel() for p in LineModel.load(folder / "v1").network.parameters())
    return {
        "lines": len(lines),
        **compared(turns),
        "lines_per_cpu_s_with_words": share,
        "parameters": parameters,
    }


def compared(turns: Sequence[Mapping[str, tuple[Speed, Speed]]]) -> dict[str, Any]:
    """Of turns with our speed and the peer's in each setting: medians, and those of the fastest settings."""

    def wall(side: int, setting: str) -> float:
        return median(turn[setting][side].wall for turn in turns)

    def cpu(side: int) -> float:
        return max(median(turn[name][side].cpu for turn in turns) for name in turns[0])

    best = max(turns[0], key=lambda name: wall(0, name))
    its_best = max(turns[0], key=lambda name: wall(1, name))
    alone = max(wall(1, name) for name in turns[0] if SETTINGS[name][0] == 1)
    return {
        "lines_per_s": round(wall(0, best)),
        "reference_lines_per_s": round(wall(1, its_best), 1),
        "ratio": round(wall(0, best) / wall(1, its_best), 1),
        "ratio_to_one_process": round(wall(0, best) / alone, 1),  # which is how Opni runs it
        "ratio_of_each_turn": [round(t[best][0].wall / t[its_best][1].wall, 1) for t in turns],
        "setting": best,
        "reference_setting": its_best,
        "lines_per_s_by_setting": {name: round(wall(0, name)) for name in turns[0]},
        "reference_lines_per_s_by_setting": {name: round(wall(1, name), 1) for name in turns[0]},
        "lines_per_cpu_s": round(cpu(0)),
        "reference_lines_per_cpu_s": round(cpu(1), 1),
        "cpu_ratio": round(cpu(0) / cpu(1), 1),
    }
