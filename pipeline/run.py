"""`logweir run`: the whole pipeline on files, then findings. Real Redis, real Celery workers, real Parquet.

start the stack -> [baseline: send, store, train] -> send -> [no baseline: train, score what was warming]
  -> findings, templates.parquet, summary.json, report -> stop the stack
"""

import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import polars as pl
import redis

from pipeline import findings as finding
from pipeline.drain.learner import read_templates
from pipeline.errors import BadInput, RedisUnavailable, SinkUnavailable, StackFailed
from pipeline.keyspace import Keys
from pipeline.ledger import Full, Ledger
from pipeline.presence import Presence
from pipeline.producer import Producer, check_name
from pipeline.records import Purpose, digest
from pipeline.report import page
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.sources import files
from pipeline.tasks.context import connect
from pipeline.training import State, Status
from pipeline.workers.local import Stack, lock

# A directory with this file in it was made by `logweir run`; any other non-empty directory is left alone.
MARKER: Final = ".logweir"
# With a sink or Redis in trouble for so long and nothing moving, a run gives up; what was accepted stays.
STUCK_S: Final = 60.0
# When the reason is known (a full disk, say) nobody needs to wait so long; longer than a lease takes to expire.
TROUBLE_S: Final = 25.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the user asked for, checked."""

    inputs: tuple[Path, ...]
    baseline: tuple[Path, ...]
    out: Path
    workload: str | None
    report: Path | None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came out."""

    out: Path
    findings: list[finding.Finding]
    summary: dict[str, Any]
    report: Path | None
    notes: list[str] = field(default_factory=list)


# (phase, done, total, detail): phases are named for people; total 0 means unknown.
Show = Callable[[str, float, float, str], None]


def plan(
    inputs: Sequence[str], baseline: Sequence[str], *, out: Path, workload: str | None, report: Path | None
) -> Plan:
    """Look at everything before anything starts. Raises BadInput."""
    if not inputs:
        raise BadInput("no log file is named; give at least one, for example: logweir run /var/log/syslog")
    if workload is not None:
        check_name("workload", workload)
    chosen, normal = tuple(files.expand(inputs)), tuple(files.expand(baseline)) if baseline else ()
    for path in (*chosen, *normal):
        files.check(path)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file; name a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_dir():
        raise BadInput(f"--out {out} is not empty and was not made by logweir; choose another directory")
    if report is not None and not report.absolute().parent.is_dir():
        raise BadInput(
            f"--report {report}: the directory {report.absolute().parent} does not exist; create it first"
        )
    return Plan(inputs=chosen, baseline=normal, out=out.absolute(), workload=workload, report=report)


def run(plan: Plan, settings: Settings, show: Show) -> Outcome:
    """Do it. Raises BadInput, SinkUnavailable (disk), StackFailed; KeyboardInterrupt stops cleanly."""
    began = time.monotonic()
    state = _fresh(plan.out)
    prefix = settings.key_prefix
    if settings.redis_url is not None:
        # On a shared Redis every run has keys of its own, removed at the end.
        prefix = f"{prefix}-run-{digest(str(plan.out))}"
    settings = replace(settings, data_dir=state, results_dir=plan.out / "results", key_prefix=prefix)
    show("starting", 0, 0, "Redis and workers")
    with _clean_redis(settings), Stack(settings) as stack:
        journey = _Journey(plan, stack.settings, stack, show)
        outcome = journey.go(began)
    if not outcome.summary["run"]["dead_lines"]:
        _empty(state)
    return outcome


def _fresh(out: Path) -> Path:
    """An output directory without the results of an earlier run; returns the directory for the run's state.

    Raises BadInput when it cannot be written, or when another run or stack works in it: nothing is removed then.
    """
    state = out / MARKER
    try:
        state.mkdir(parents=True, exist_ok=True)
        with lock(
            state
        ):  # the stack takes it again; a run that comes in between finds everything removed already
            _empty(state)
            if (out / "results").exists():
                shutil.rmtree(out / "results")
            for name in ("templates.parquet", "summary.json", "report.html"):
                (out / name).unlink(missing_ok=True)
    except OSError as exc:
        raise BadInput(
            f"--out {out} cannot be written ({exc.strerror}); choose another directory or fix its rights"
        ) from exc
    return state


def _empty(state: Path) -> None:
    """Remove everything but the lock, which somebody may hold; the directory stays as the mark that it is ours."""
    for path in state.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink(missing_ok=True)


@contextmanager
def _clean_redis(settings: Settings) -> Iterator[None]:
    """On a shared Redis, leave nothing of this run behind, nor take over what a killed one left."""
    if settings.redis_url is None:
        yield
        return

    def clean() -> None:
        client = connect(settings)
        for pattern in (f"{{{settings.key_prefix}}}:*", f"{settings.key_prefix}:*"):
            for key in client.scan_iter(match=pattern, count=1000):
                client.unlink(key)

    # A Redis that cannot be used is reported by the stack's own check, in one sentence.
    with contextlib.suppress(redis.RedisError):
        clean()
    try:
        yield
    except BaseException:
        with contextlib.suppress(redis.RedisError):  # what went wrong first is what the user must hear
            clean()
        raise
    try:
        clean()
    except redis.RedisError as exc:
        raise RedisUnavailable(f"the keys of this run could not be removed from Redis ({exc})") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Where the work stands: batches that wait, steps that ended so far, lines in all and lines done with."""

    pending: int
    moves: int
    lines: int
    done: int


class _Journey:
    """One run's steps on a running stack."""

    def __init__(self, plan: Plan, settings: Settings, stack: Stack, show: Show) -> None:
        self.plan = plan
        self.settings = settings
        self.stack = stack
        self.show = show
        client = connect(settings)
        self.client = client
        self.keys = Keys(settings.key_prefix)
        self.ledger = Ledger(client, settings)
        self.presence = Presence(client, settings)
        self.producer = Producer.connect(settings)
        self.sent_lines = 0
        self.baseline_lines = 0
        self.notes: list[str] = []

    def go(self, began: float) -> Outcome:
        status = Status()
        if self.plan.baseline:
            self.send(self.plan.baseline, Purpose.BASELINE)
            self.settle("learning the baseline")
            self.baseline_lines = self.sent_lines
            status = self.train()
        started = time.monotonic()
        self.send(self.plan.inputs, Purpose.SCORE)
        self.settle("scoring" if self.plan.baseline else "storing")
        if not self.plan.baseline:
            status = self.train()
            self.settle("scoring")
        scored_s = time.monotonic() - started
        return self.write(status, elapsed_s=time.monotonic() - began, scored_s=scored_s)

    # ---- sending ---------------------------------------------------------------------------------

    def send(self, paths: Sequence[Path], purpose: Purpose) -> None:
        """Read and send every file; waits when the ledger says full."""
        total = float(sum(max(1, files.total_bytes(p)) for p in paths))
        before, began, lines = 0.0, time.monotonic(), 0
        word = "reading the baseline" if purpose is Purpose.BASELINE else "reading"
        for path in paths:
            workload = self.plan.workload or workload_of(path)
            key, start = digest("file", purpose.value, str(path)), 0
            empty = True
            for chunk in files.read(
                path, max_records=self.settings.batch_records, max_bytes=self.settings.batch_kib * 1024
            ):
                empty = False
                accept = partial(
                    self.producer.send_chunk,
                    chunk,
                    start=start,
                    workload=workload,
                    source=str(path),
                    source_key=key,
                    cursor_key=key,
                    purpose=purpose,
                )
                while isinstance(answer := self.asked(accept), Full):
                    self.pause(answer.retry_after_s)
                start = chunk.cursor.offset
                lines += int(chunk.records["lines"].sum())
                rate = lines / max(0.001, time.monotonic() - began)
                self.show(word, before + chunk.position, total, f"{path.name}, {rate:,.0f} lines/s")
                self.stack.check()
            before += max(1, files.total_bytes(path))
            if empty:
                self.notes.append(f"{path} is empty")
        self.sent_lines += lines

    def pause(self, seconds: float) -> None:
        self.stack.check()
        time.sleep(seconds)

    def asked(self, question: Callable[[], T]) -> T:
        """Redis' answer. One that dies is started again by the stack, so it is asked until it is back; accepting
        a batch twice is accepting it once. Raises RedisUnavailable."""
        deadline = time.monotonic() + STUCK_S
        while True:
            try:
                return question()
            except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
                if time.monotonic() > deadline:
                    raise RedisUnavailable(str(exc)) from exc
            self.pause(0.2)

    # ---- waiting ---------------------------------------------------------------------------------

    def settle(self, word: str) -> None:
        """Until nothing is in flight and nothing waits for a model that exists. Raises when it is stuck."""
        live = bool(self.asked(lambda: self.client.exists(self.keys.model)))
        view = self.asked(lambda: self._view(live))
        first, began = view.done, time.monotonic()
        last, last_move = view, began

        def rate() -> str:
            return f"{(view.done - first) / max(0.001, time.monotonic() - began):,.0f} lines/s"

        while view.pending:
            trouble = self._trouble()
            self.show(word, view.done, view.lines, trouble or rate())
            self.pause(0.05)
            view = self.asked(lambda: self._view(live))
            if view.moves != last.moves:
                last, last_move = view, time.monotonic()
            still = time.monotonic() - last_move
            if trouble and still > TROUBLE_S:
                raise SinkUnavailable(f"{view.pending} batches wait: {trouble}")
            if still > STUCK_S:
                raise StackFailed(
                    f"{view.pending} batches wait and nothing moved for {STUCK_S:.0f} s; the logs in "
                    f"{self.settings.data_dir / 'logs'} say why"
                )
        self.show(word, view.done, view.lines, rate())

    def _trouble(self) -> str:
        """Why work waits, "" when nothing is known. A Redis that takes no writes keeps the workers from saying so."""
        told = self.asked(self.presence.trouble)
        try:
            self.client.set(self.keys("probe"), "1", ex=5)
        except redis.ResponseError as exc:
            return f"Redis takes no writes ({exc}); free disk space at {self.settings.data_dir}, or give it memory"
        except redis.RedisError:
            return ""  # it is being started again
        return "" if told is None else told.reason

    def _view(self, live: bool) -> "_View":
        """Where the work stands; `live`: there is a model, so that lines without a verdict still wait."""
        totals = self.ledger.totals().values()
        lines, over, warming, moves = (
            sum(t.get(name, 0) for t in totals for name in names)
            for names in (("accepted",), ("stored", "dead"), ("warming",), ("commits", "dead"))
        )
        pending = self.ledger.counts().get("batches", 0) + (self.ledger.warming() if live else 0)
        return _View(pending=pending, moves=moves, lines=lines, done=max(0, over - (warming if live else 0)))

    def train(self) -> Status:
        """Ask for a training and wait for its end. A failed one leaves everything warming, which is said."""
        stored = ParquetSink(self.settings.baseline if self.plan.baseline else self.settings.results)
        if stored.scan().head(1).collect().is_empty():
            return Status()
        request = uuid.uuid4().hex
        asked = Status(state=State.QUEUED, request_id=request)
        self.asked(lambda: self.client.hset(self.keys.training, mapping=asked.to_redis()))
        self.producer.submit.train(request)
        began = time.monotonic()
        while not (status := self.asked(self._training)).ended:
            self.stack.check()
            detail = f"{status.patterns:,} distinct lines" if status.patterns else str(status.state)
            self.show("training", status.percent, 100.0, detail)
            if time.monotonic() - began > STUCK_S + self.settings.train_seconds * 10:
                raise StackFailed(
                    f"the training did not end; the log {self.settings.data_dir / 'logs/train.log'} says why"
                )
            time.sleep(0.1)
        self.show("training", 100.0, 100.0, "")
        if status.state is State.FAILED:
            self.notes.append(f"no model could be trained, so nothing is judged: {status.reason}")
        return status

    def _training(self) -> Status:
        return Status.from_redis(self.client.hgetall(self.keys.training))

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, status: Status, *, elapsed_s: float, scored_s: float) -> Outcome:
        self.show("writing", 0, 0, "findings and report")
        results = self.settings.results
        templates = self.asked(self.templates)
        found = finding.collect(results, templates)
        summary = finding.summary(results)
        dead = sum(t.get("dead", 0) for t in self.asked(self.ledger.totals).values())
        about = {
            "inputs": [str(p) for p in self.plan.inputs],
            "baseline": [str(p) for p in self.plan.baseline],
            "lines_read": self.sent_lines - self.baseline_lines,
            "baseline_lines": self.baseline_lines,
            "dead_lines": dead,
            "templates": templates.height,
            "findings": len(found),
            "model_version": status.version or None,
            "training": status.state.value,
            "seconds": round(elapsed_s, 2),
            "lines_per_s": round((self.sent_lines - self.baseline_lines) / max(0.001, scored_s)),
            "ready_seconds": round(self.stack.ready_s, 2),
        }
        summary = {**summary, "run": about}
        out = self.plan.out
        report = self.plan.report or out / "report.html"
        try:
            _replace(out / "templates.parquet", lambda p: templates.write_parquet(p, compression="zstd"))
            _replace(
                out / "summary.json",
                lambda p: p.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8"),
            )
            names = ", ".join(dict.fromkeys(p.name for p in self.plan.inputs))
            page.write(
                report, findings=found, templates=templates, summary=summary, title=names[:200], run=about
            )
        except (OSError, pl.exceptions.ComputeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            raise SinkUnavailable(
                f"{out} or {report} cannot be written ({why}); free space there and run again"
            ) from exc
        if dead:
            self.notes.append(
                f"{dead:,} lines could not be processed; see them with: "
                f"logweir up --data-dir {self.settings.data_dir} and logweir dead list"
            )
        return Outcome(out=out, findings=found, summary=summary, report=report, notes=self.notes)

    def templates(self) -> pl.DataFrame:
        """template_id, template, count (records), first_seen, last_seen of this run's results."""
        texts = {t.template_id: t.text for t in read_templates(self.client, self.keys)}
        names = pl.DataFrame(
            {"template_id": list(texts), "template": list(texts.values())},
            schema={"template_id": pl.Int64, "template": pl.String},
        )
        return (
            ParquetSink(self.settings.results)
            .scan()
            .group_by("template_id")
            .agg(
                pl.len().cast(pl.UInt64).alias("count"),
                pl.col("timestamp").min().alias("first_seen"),
                pl.col("timestamp").max().alias("last_seen"),
            )
            .join(names.lazy(), on="template_id", how="left")
            .with_columns(pl.col("template").fill_null("(unclassified)"))
            .select("template_id", "template", "count", "first_seen", "last_seen")
            .sort("count", "template_id", descending=[True, False])
            .collect(engine="streaming")
        )


def workload_of(path: Path) -> str:
    """A file's workload when none is given: its name without endings that only say how it is stored."""
    name = path.name
    for ending in (".gz", ".zst", ".log", ".txt", ".jsonl", ".json"):
        if name.endswith(ending) and len(name) > len(ending):
            name = name.removesuffix(ending)
    return "".join(c if c.isprintable() else "_" for c in name)[:100]


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a whole file or none."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
