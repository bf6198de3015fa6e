"""Distinct masked lines that 1, 2 and 4 drain shards learn per second, and where the processor time of one
line goes.

Real workers, each a process of its own as compose runs it, on a Redis of their own: claim, learn, judge, fill
the cache, hand on. The lines are masked ones of twelve real systems, in 48 workloads, of which each line has
one word that no other has: all come to the writer, and nearly all into templates that there are. They are
judged under a model of real lines, with made-up evidence, which costs the writer what real evidence does.

The numbers of shards take turns, so that other work on the machine meets all alike. A figure is the median of
its turns. Beside the wall time stands the time of the busiest worker on a processor: what a machine with a
core for each would take."""

import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import polars as pl
import psutil  # type: ignore[import-untyped]

from bench._running import scratch
from bench.scoring import messages, sample
from bench.watching import own_redis
from pipeline import detect
from pipeline.drain import learner
from pipeline.drain.learner import read_templates
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Templates
from pipeline.drain.verdicts import Verdicts
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.messages.routing import stage_queues
from pipeline.messages.submit import Submit
from pipeline.models import verdict
from pipeline.models.fitting import TrainConfig
from pipeline.models.registry import Registry
from pipeline.models.threshold import Mode
from pipeline.models.trainer import FitRequest, fit
from pipeline.observe.presence import Presence
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Claim, Stage
from pipeline.records.schema import raw_frame
from pipeline.records.verdict import Verdict, pattern_ids
from pipeline.redis.connection import connect
from pipeline.redis.leases import Leases
from pipeline.redis.scripts import Scripts
from pipeline.redis.shards import shard_of
from pipeline.settings import Settings
from pipeline.tasks import drain
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

SHARDS: Final = (1, 2, 4)
TURNS: Final = 3
CLUSTERS: Final = 4  # times twelve systems: workloads
LINES: Final = 750  # of a workload
BATCH: Final = 250
VERSION: Final = "m000001-00000000"
FIRST_WORDS: Final = 4
LONG: Final = 6  # words: five of six are enough for one template
AT: Final = datetime(2026, 11, 20, tzinfo=UTC)
READY_S: Final = 90.0
DONE_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Batches as stage infer hands them on: (workload, work rows)."""

    batches: Sequence[tuple[str, pl.DataFrame]]

    @property
    def lines(self) -> int:
        return sum(work.height for _, work in self.batches)


def systems(data: Path, masks: MaskSet) -> dict[str, list[str]]:
    """The distinct masked messages of every real system."""
    found = {}
    for path in sorted((data / "loghub_2k").glob("*/*_structured.csv")):
        text = pl.read_csv(path, columns=["Content"], infer_schema=False)["Content"].fill_null("")
        found[path.parent.name] = masks.mask(text)["masked"].unique(maintain_order=True).to_list()
    return found


def varied(masked: Sequence[str], lines: int, rng: random.Random) -> list[str]:
    """Lines like these, no two alike: a plain word of each is one that no other line has, behind the words by
    which the tree is searched and in a line long enough to be alike without it."""
    bases = []
    for line in masked:
        words = line.split()
        plain = [i for i, word in enumerate(words) if i >= FIRST_WORDS and word.isalpha()]
        if len(words) >= LONG and plain:
            bases.append((words, plain[-1]))
    made = []
    for _ in range(lines):
        words, at = rng.choice(bases)
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=9))
        made.append(" ".join([*words[:at], word, *words[at + 1 :]]))
    return made


def work_of(lines: Sequence[str], rng: random.Random) -> pl.DataFrame:
    """WORK_SCHEMA of masked lines that a model has looked at and nobody has answered."""
    ids = pl.Series("pattern_id", pattern_ids(lines), dtype=pl.UInt64)
    words = [line.split()[:2] for line in lines]
    nothing = ("severity", "template_id", "score", "anomalous", "p_value", "reasons")
    return pl.DataFrame(
        {
            "key": ids, "pattern_id": ids, "masked": lines, "words": words, "unseen": [w[:1] for w in words],
            "surprisal": [rng.uniform(1, 9) for _ in lines], "tokens": [len(line.split()) for line in lines],
        },
        schema_overrides={n: detect.WORK_SCHEMA[n] for n in ("tokens", "words", "unseen")},
    ).with_columns(
        severe=False, level=pl.lit("info"), version=pl.lit(VERSION), novelty=0.1, prior=-2.0,
        **{name: pl.lit(None, dtype=detect.WORK_SCHEMA[name]) for name in nothing},
    ).select(list(detect.WORK_SCHEMA))  # fmt: skip


def load_of(data: Path, masks: MaskSet) -> Load:
    rng = random.Random(0)
    batches = []
    for name, masked in systems(data, masks).items():
        for cluster in range(CLUSTERS):
            lines = varied(masked, LINES, rng)
            for at in range(0, LINES, BATCH):
                batches.append((f"cluster-{cluster}/{name}", work_of(lines[at : at + BATCH], rng)))
    rng.shuffle(batches)
    return Load(batches=batches)


def put(settings: Settings, load: Load, kind: str = "batch") -> list[tuple[str, str]]:
    """Everything into the ledger, as it waits for stage drain; (batch, workload)."""
    ledger = Ledger(connect(settings), settings)
    names = []
    for number, (workload, work) in enumerate(load.batches):
        name = f"{kind}-{number}"
        ledger.intake.accept(
            Batch(
                batch_id=name, workload=workload, source="bench", source_key="bench", purpose=Purpose.SCORE,
                arrived=AT, formats=(), zone="UTC", records=raw_frame(["a line"]),
            )
        )  # fmt: skip
        claim = ledger.claim(name, Stage.INGEST, "bench")
        if not isinstance(claim, Claim):
            raise RuntimeError(f"batch {name} is {claim}")
        ledger.advance(claim, Stage.DRAIN, work)
        names.append((name, workload))
    return names


# ---- workers -----------------------------------------------------------------------------------------


@contextmanager
def worker(settings: Settings, role: str, folder: Path) -> Iterator[psutil.Process]:
    """A worker process that is ready."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")} | settings.to_environ()
    presence = Presence(connect(settings), settings)
    with (folder / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.cpu", role, role], env=env, stdout=log, stderr=log
        )
    try:
        _until(lambda: any(w.pid == process.pid for w in presence.live()), READY_S, f"{role} is ready")
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _until(there: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not there():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.02)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _redis_cpu(client: Any) -> float:
    told = client.info("cpu")
    return float(told["used_cpu_user"] + told["used_cpu_sys"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One run: seconds of wall time, of processor time of each worker and of Redis."""

    wall: float
    workers: Sequence[float]
    redis: float
    templates: int
    twins: int


def turn(settings: Settings, load: Load, folder: Path) -> Turn:
    """All batches of the load through as many workers as there are shards."""
    client = connect(settings)
    ledger = Ledger(client, settings)
    submit = Submit(make_app(settings), client, settings)

    def idle() -> bool:
        return not ledger.backlog.counts().get("stage:drain", 0)

    with ExitStack() as stack:
        roles = stage_queues(Stage.DRAIN, settings.drain.shards)
        workers = [stack.enter_context(worker(settings, role, folder)) for role in roles]
        # One batch each first: what is loaded once is not counted.
        rng = random.Random(1)
        first = []
        for shard in range(settings.drain.shards):
            mine = next(
                w for i in range(10_000) if shard_of(w := f"warm-{i}", settings.drain.shards) == shard
            )
            first.append((mine, work_of(varied([f"warm up of drain shard number {shard}"], 20, rng), rng)))
        for name, workload in put(settings, Load(batches=first), "first"):
            submit.wake(Stage.DRAIN, name, workload=workload)
        _until(idle, DONE_S, "the first batches are learnt")
        names = put(settings, load)
        before, redis_before = [_cpu(w) for w in workers], _redis_cpu(client)
        began = time.perf_counter()
        for name, workload in names:
            submit.wake(Stage.DRAIN, name, workload=workload)
        _until(idle, DONE_S, "all batches are learnt")
        wall = time.perf_counter() - began
        busy = [_cpu(w) - b for w, b in zip(workers, before, strict=True)]
        redis_busy = _redis_cpu(client) - redis_before
    found = read_templates(client, ledger.keys)
    texts = {(t.text, t.severe) for t in found}
    return Turn(
        wall=wall, workers=busy, redis=redis_busy, templates=len(found), twins=len(found) - len(texts)
    )


# ---- the parts of a line -----------------------------------------------------------------------------


class Parts:
    """Processor time of this thread by what it was spent on; nested calls count for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    def of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner
                self._inner = outer + took

        return timed


def parts(settings: Settings, load: Load) -> dict[str, float]:
    """Microseconds of processor time per line in this process, which does what one writer does."""
    spent = Parts()
    watched: list[tuple[Any, str, str]] = [
        (Templates, "place", "learn"),
        (verdict, "verdict_of", "judge"),
        (Verdict, "pack", "msgpack"),
        (learner, "pack", "msgpack"),
        (Scripts, "run", "Redis: scripts"),
        (Verdicts, "lookup", "Redis: cache asked"),
        (learner.Learner, "_catch_up", "Redis: tree as new as Redis"),
        (Ledger, "work", "work read"),
        (Ledger, "advance", "work written"),
        (detect, "answer", "frames"),
        (detect, "unknown", "frames"),
        (pl.DataFrame, "to_dicts", "rows as dicts"),
        (learner.Learner, "learn", "the loop over the rows"),
        (Submit, "wake", "wake-up of the next stage"),
        (Ledger, "claim", "claim"),
        (Leases, "request", "lease"),
    ]
    gc.collect()
    gc.freeze()  # one full collection of what this process holds besides would cost some part 10 us a line
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in watched]
    context = Context(make_app(settings), settings)
    names = put(settings, load)
    context.models.knowledge(VERSION)
    for owner, name, label in watched:
        setattr(owner, name, spent.of(label, getattr(owner, name)))
    try:
        whole = spent.of("threads that renew, and the rest", perform)
        for name, _ in names:
            if why := whole(context, Stage.DRAIN, name, drain.step):
                raise RuntimeError(f"batch {name} was not learnt: {why}")
    finally:
        for owner, name, call in kept:
            setattr(owner, name, call)
    scale = 1e6 / load.lines
    told = {name: round(seconds * scale, 1) for name, seconds in spent.seconds.items()}
    return {
        "all": round(sum(spent.seconds.values()) * scale, 1),
        **dict(sorted(told.items(), key=lambda x: -x[1])),
    }


# ---- all of it ---------------------------------------------------------------------------------------


def trained(settings: Settings, data: Path, masks: MaskSet) -> None:
    """A version on disk, of real lines. What it is worth does not matter here, how many patterns it knows
    does."""
    frame = sample(masks, messages(data))
    out = Registry(connect(settings), settings).path(VERSION)
    out.parent.mkdir(parents=True, exist_ok=True)
    for _ in fit(frame, FitRequest(tokens=masks.tokens, mask_version=masks.version, config=TrainConfig(), seed=0, out=out,
        mode=Mode.SELF, version=VERSION, time_budget_s=2.0)):  # fmt: skip
        pass


def measure(data: Path) -> dict[str, Any]:
    masks = MaskSet.load()
    load = load_of(data, masks)
    turns: dict[int, list[Turn]] = {n: [] for n in SHARDS}
    with scratch() as folder, own_redis(folder) as settings:
        trained(settings, data, masks)
        own = settings.replace(max_pending_batches=100_000)
        told = parts(own.replace(key_prefix="parts"), load)
        for number in range(TURNS):
            for shards in SHARDS:
                now = own.replace(key_prefix=f"n{shards}t{number}", drain_shards=shards)
                turns[shards].append(turn(now, load, folder))
                connect(own).flushall()
    return {
        "lines": load.lines,
        "workloads": len({workload for workload, _ in load.batches}),
        "load average": round(os.getloadavg()[0], 1),
        "us_per_line": told,
        **{f"{n} shards": _told(load, turns[n], turns[1]) for n in SHARDS},
    }


def _told(load: Load, of: Sequence[Turn], one: Sequence[Turn]) -> dict[str, Any]:
    def speed(turns: Sequence[Turn]) -> float:
        return load.lines / median(t.wall for t in turns)

    def free(turns: Sequence[Turn]) -> float:
        return load.lines / median(max(t.workers) for t in turns)

    return {
        "lines_per_second": round(speed(of)),
        "ratio": round(median(a.wall / b.wall for a, b in zip(one, of, strict=True)), 2),
        "with_a_core_each": round(free(of)),
        "ratio_with_a_core_each": round(free(of) / free(one), 2),
        "worker_us_per_line": round(median(sum(t.workers) for t in of) * 1e6 / load.lines, 1),
        "busiest_share": round(median(max(t.workers) / sum(t.workers) for t in of), 2),
        "redis_us_per_line": round(median(t.redis for t in of) * 1e6 / load.lines, 1),
        "templates": round(median(t.templates for t in of)),
        "twins": round(median(t.twins for t in of)),
    }
