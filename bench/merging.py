"""Many small batches with unknown lines through a scoring worker: merged into full passes, and one by one.

A real context with a real model on a private Redis; the batches wait in the ledger and their messages in the
queue, as ingest leaves them, and are taken as Celery takes them. Both ways are measured in turns in one
process, with lines that nobody has seen; figures are medians by processor time, which other work on the
machine does not change. Celery's own share of a message is in neither. Then two processes take from one
queue, every unknown line standing in four batches."""

import base64
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import polars as pl

from bench._running import scratch
from bench.scoring import messages, sample
from pipeline import detect
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.logs import set_up
from pipeline.messages.app import make_app
from pipeline.messages.routing import QUEUE_CPU
from pipeline.models.evidence import Evidence
from pipeline.models.fitting import TrainConfig
from pipeline.models.trainer import FitRequest, fit
from pipeline.records.batch import Batch, Purpose, utc_now
from pipeline.records.delivery import Accepted, Claim, Stage
from pipeline.records.schema import raw_frame
from pipeline.records.verdict import Verdict
from pipeline.settings import Settings
from pipeline.tasks import infer
from pipeline.tasks.context import Context
from pipeline.tasks.grouping import merging
from pipeline.workers.stack.private_redis import PrivateRedis

TURNS: Final = 5
BATCHES: Final = 400
LINES: Final = 25  # of a batch
UNKNOWN: Final = 10  # of these
SHARED: Final = 4  # batches in which an unknown line stands where two processes work
VERSION: Final = "m000001-00000000"
START_S: Final = 120.0


class Counting(Context):
    """Counts what its model is asked."""

    passes = 0
    lines: Counter[str]

    def count_scoring(self) -> None:
        """Stand in for the network of the context."""
        network = self.models.scorer

        def scorer(version: str) -> Any:
            self.model_of = network(version)
            return self

        setattr(self.models, "scorer", scorer)  # noqa: B010 - mypy refuses a method's assignment

    def score(self, masked: Sequence[str]) -> list[Evidence]:
        self.passes += 1
        self.lines.update(masked)
        found: list[Evidence] = self.model_of.score(masked)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Stint:
    """What one process did; times in seconds."""

    passes: int
    lines: Counter[str]
    cpu: float
    wall: float

    @property
    def scored(self) -> int:
        return self.lines.total()


def measure(data: Path) -> dict[str, Any]:
    masks = MaskSet.load()
    frame = sample(masks, messages(data))
    with scratch() as folder, stack(folder) as settings:
        context = counting(settings)
        for _ in fit(frame, FitRequest(tokens=masks.tokens, mask_version=masks.version, config=TrainConfig(), seed=1,
            out=context.registry.path(VERSION), version=VERSION)):  # fmt: skip
            pass
        source = Source(context, frame["masked"].to_list())
        taken_along = merging.PASS_BATCHES
        turns = []
        for turn in range(TURNS + 1):  # the first one imports, allocates and loads scripts
            ways = {}
            for way, along in (("merged", taken_along), ("alone", 0)):
                merging.PASS_BATCHES = along  # type: ignore[misc]
                source.fill(shared=1)
                ways[way] = worked(context)
            turns += [ways] if turn else []
        merging.PASS_BATCHES = taken_along  # type: ignore[misc]
        source.fill(shared=SHARED)
        both = side_by_side(settings)
    together = sum((stint.lines for stint in both), Counter[str]())
    return {
        "batches": BATCHES,
        "unknown_lines": BATCHES * UNKNOWN,
        "full_pass_lines": merging.PASS_LINES["cpu"],
        **{
            way: {
                "passes": round(median(turn[way].passes for turn in turns)),
                "lines_per_cpu_s": round(median(turn[way].scored / turn[way].cpu for turn in turns)),
                "lines_per_s": round(median(turn[way].scored / turn[way].wall for turn in turns)),
                "lines_scored_twice": sum(twice(turn[way].lines) for turn in turns),
            }
            for way in ("merged", "alone")
        },
        "ratio": round(
            median(
                (t["merged"].scored / t["merged"].cpu) / (t["alone"].scored / t["alone"].cpu) for t in turns
            ),
            2,
        ),
        "two_processes": {
            "lines": len(together),
            "lines_of_each": [stint.scored for stint in both],
            "passes": sum(stint.passes for stint in both),
            "lines_scored_twice": twice(together),
        },
    }


def failed(values: dict[str, Any]) -> bool:
    return any(values[way]["lines_scored_twice"] for way in ("merged", "alone", "two_processes"))


def twice(lines: Counter[str]) -> int:
    return lines.total() - len(lines)


@contextmanager
def stack(folder: Path) -> Iterator[Settings]:
    """A private Redis and nothing else."""
    settings = Settings(data_dir=folder / "data", key_prefix="bench")
    server = PrivateRedis(settings)
    process = server.start()
    try:
        yield settings.replace(redis_url=server.url)
    finally:
        process.terminate()
        process.wait(20)


def counting(settings: Settings) -> Counting:
    context = Counting(make_app(settings), settings)
    context.lines = Counter()
    context.count_scoring()
    return context


class Source:
    """Fills the queue with batches that ingest has seen."""

    def __init__(self, context: Counting, lines: list[str]) -> None:
        self.context, self.lines = context, [line for line in lines if len(line.split()) > 2]
        self.draw = random.Random(1)
        self.number = 0
        self.known = [self.line() for _ in range(500)]
        work = self.work(self.known)
        verdict = Verdict(template_id=1, score=0.1, anomalous=False, reasons=(), p_value=0.5)
        context.verdicts.learn(VERSION, dict.fromkeys(work["key"].to_list(), verdict))

    def line(self) -> str:
        """Words of real lines in an order of its own, and one that no other line has."""
        one, other = self.draw.choice(self.lines).split(), self.draw.choice(self.lines).split()
        self.number += 1
        own = "".join(chr(97 + self.number // 26**k % 26) for k in range(5))
        return " ".join([*one[: len(one) // 2], own, *other[len(other) // 2 :]])

    def work(self, lines: list[str]) -> pl.DataFrame:
        frame = pl.DataFrame({"masked": lines}).with_columns(
            pl.col("masked").hash(7).and_(pl.lit(2**64 - 2, dtype=pl.UInt64)).alias("pattern_id"),
            pl.lit(False).alias("severe"),
            pl.lit("INFO").alias("level"),
        )
        return detect.distinct(frame.with_columns(pl.col("pattern_id").alias("key")), VERSION)

    def fill(self, *, shared: int) -> None:
        """BATCHES batches, each unknown line in `shared` of them."""
        context, unknown = self.context, [self.line() for _ in range(BATCHES * UNKNOWN // shared)]
        for n in range(BATCHES):
            own = [unknown[(n * UNKNOWN + k) % len(unknown)] for k in range(UNKNOWN)]
            lines = [*own, *self.draw.sample(self.known, LINES - UNKNOWN)]
            self.number += 1
            batch = Batch(
                batch_id=f"b{self.number}", workload="shop", source="bench", source_key="k", purpose=Purpose.SCORE,
                arrived=utc_now(), formats=(), zone="UTC", records=raw_frame(lines),
            )  # fmt: skip
            assert isinstance(context.ledger.intake.accept(batch), Accepted)
            claim = context.ledger.claim(batch.batch_id, Stage.INGEST, "ingest")
            assert isinstance(claim, Claim)
            work = self.work(lines)
            work = detect.answer(work, context.verdicts.lookup(VERSION, work["key"].to_list()))
            context.ledger.advance(claim, Stage.INFER, work)
            context.submit.wake(Stage.INFER, batch.batch_id, queue=QUEUE_CPU)


def worked(context: Counting) -> Stint:
    """Take messages until none is left."""
    context.passes, context.lines = 0, Counter()
    queue = context.ledger.keys.kombu(QUEUE_CPU)
    busy, began = time.process_time(), time.perf_counter()
    while (raw := context.client.rpop(queue)) is not None:
        infer.run(context, json.loads(base64.b64decode(json.loads(raw)["body"]))[0][0])  # type: ignore[arg-type]
    wall, cpu = time.perf_counter() - began, time.process_time() - busy
    return Stint(passes=context.passes, lines=context.lines, cpu=cpu, wall=wall)


class Taker:
    """In a process of its own."""

    context: Counting
    door: Any

    @classmethod
    def begin(cls, settings: Settings, door: Any) -> None:
        set_up("error")
        cls.context, cls.door = counting(settings), door
        cls.context.models.network(VERSION)

    @classmethod
    def take(cls) -> Stint:
        cls.door.wait(START_S)
        return worked(cls.context)


def side_by_side(settings: Settings) -> list[Stint]:
    context = multiprocessing.get_context("spawn")
    begun = (settings, context.Barrier(2))
    with ProcessPoolExecutor(2, mp_context=context, initializer=Taker.begin, initargs=begun) as pool:
        return [found.result() for found in [pool.submit(Taker.take) for _ in range(2)]]
