"""One million stored lines to a published model: seconds of reading, fitting and all.

The lines are those of the real sets, cycled, with other numbers in them each time round. They lie in the
results as the store worker writes them; what is timed is the pipeline's own training: read, sample, hold out,
fit, judge, publish, under the training lease of a Redis of its own."""

import re
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from bench._running import scratch
from bench.scoring import messages
from bench.watching import own_redis
from pipeline.controller.training_status import Status, TrainingState
from pipeline.controller.trainings import TrainingRequest
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.models.registry import Registry
from pipeline.records.batch import utc_now
from pipeline.records.query import Query
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.redis.connection import connect
from pipeline.redis.leases import TRAINING, Leases, granted
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.training import training

LINES = 1_000_000
BATCH = 5_000  # batch_records as it was when the figures of docs/benchmarks.md were made
WORKLOADS = 8
SPAN = timedelta(days=7)
_NUMBER = re.compile(r"\d+")
_LEVEL = re.compile(r"\b(ERROR|FATAL|SEVERE|CRITICAL)\b")


def varied(data: Path, lines: int) -> Iterator[list[str]]:
    """Batches of messages, no two rounds with the same numbers."""
    every = list(chain.from_iterable(messages(data)))
    order = np.random.default_rng(0).permutation(len(every))
    for at in range(0, lines, BATCH):
        chosen = [every[order[i % len(every)]] for i in range(at, min(at + BATCH, lines))]
        shift = at // len(every) + 7
        yield [_NUMBER.sub(partial(_moved, shift), text) for text in chosen]


def _moved(shift: int, found: "re.Match[str]") -> str:
    number = found.group()
    return str((int(number[-18:]) + shift) % 10 ** min(len(number), 18)).zfill(len(number))


def store(data: Path, settings: Settings, masks: MaskSet, lines: int) -> None:
    sink = ParquetSink(settings.data.results)
    begin, at = utc_now() - SPAN, 0
    for number, page in enumerate(varied(data, lines)):
        text = pl.Series("message", page, dtype=pl.String)
        frame = pl.DataFrame(
            {
                "message": text,
                "raw": text,
                "line": pl.int_range(at + 1, at + 1 + len(page), eager=True),
                "level": ["error" if _LEVEL.search(m) else "info" for m in page],
                "pattern_id": masks.mask(text)["pattern_id"],
            }
        ).with_columns(
            record_id=pl.format("{}-{}", pl.lit(number), pl.col("line")),
            timestamp=pl.lit(begin) + (pl.col("line") / lines * SPAN.total_seconds() * 1e6).cast(pl.Duration("us")),
            workload=pl.lit(f"shop/api-{number % WORKLOADS}"),
            source=pl.lit("bench"),
            lines=pl.lit(1),
            anomalous=pl.lit(value=False),
            score=pl.lit(0.1),
        )  # fmt: skip
        missing = [pl.lit(None, dtype=t).alias(n) for n, t in RESULT_SCHEMA.items() if n not in frame.columns]
        rows = frame.with_columns(missing).select(pl.col(n).cast(t) for n, t in RESULT_SCHEMA.items())
        sink.write(f"b{number:06}", rows)
        at += len(page)


def measure(data: Path, *, lines: int = LINES) -> dict[str, Any]:
    masks = MaskSet.load()
    with scratch() as folder, own_redis(folder) as settings:
        store(data, settings, masks, lines)
        client = connect(settings)
        leases = Leases(client, settings)
        lease = granted(leases.request(TRAINING, "bench"), TRAINING)
        entered: dict[TrainingState, float] = {}
        began = time.perf_counter()
        with leases.holding(lease) as held:
            query = Query(workloads=tuple(f"shop/api-{n}" for n in range(WORKLOADS)))
            work = training.Training(
                request=TrainingRequest(),
                status=Status(request_id="bench"),
                lines=training.lines_for(query, settings),
                masks=masks,
                templates=(),
                registry=Registry(client, settings),
                settings=settings,
                held=held,
            )
            for status in work.run():
                entered.setdefault(status.state, time.perf_counter() - began)
        seconds = time.perf_counter() - began
        manifest = Registry(client, settings).manifest(status.version)
    if not status.published:
        raise RuntimeError(f"the model was not published: {status.reason}")
    return {
        "lines": status.lines,
        "seconds": round(seconds, 1),
        "read_seconds": round(entered[TrainingState.TRAINING], 1),
        "fit_seconds": round(entered[TrainingState.JUDGING] - entered[TrainingState.TRAINING], 1),
        "judge_seconds": round(entered[TrainingState.PUBLISHING] - entered[TrainingState.JUDGING], 1),
        "patterns": status.patterns,
        "templates": manifest.stats.templates,
        "steps": manifest.stats.steps,
        "loss": manifest.stats.loss,
        "parameters": manifest.stats.parameters,
    }
