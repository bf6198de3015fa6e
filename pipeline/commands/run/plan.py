"""`logweir run`: the whole pipeline on files, then findings. Real Redis, real steps, real Parquet.

Small inputs are worked on in this process (workers/one_process.py), larger ones by a stack of workers.

start the stack -> [baseline: send, store, train] -> send -> [no baseline: train, score what was warming]
  -> every session closed and judged -> findings, templates.parquet, summary.json, report -> stop the stack
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import polars as pl
import redis

from pipeline.commands.run import place
from pipeline.commands.run.inputs import RunPlan, input_bytes
from pipeline.commands.run.journey import Journey, Show
from pipeline.commands.run.normal import NormalList
from pipeline.commands.run.unusual_units import unusual_units
from pipeline.controller.training_status import Status
from pipeline.drain.learner import template_texts
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import RedisUnavailable, SinkUnavailable
from pipeline.records.batch import Purpose, digest
from pipeline.records.left_out import total_left_out, unpack_left_out
from pipeline.records.schema import is_timed, of_lines
from pipeline.redis.check import check_redis
from pipeline.redis.connection import connect
from pipeline.report import findings as finding
from pipeline.report import page
from pipeline.report.around import RECORDS, with_neighbours
from pipeline.report.export import facts
from pipeline.report.overall import overall_facts
from pipeline.report.samples import first_records
from pipeline.report.summary import run_summary
from pipeline.service.trainings import check_encoder
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.sinks.results import readable
from pipeline.sources import files
from pipeline.units import plural
from pipeline.watching.sessions import keys as session_keys
from pipeline.watching.sessions.sampling import KEEP_S
from pipeline.workers.stack.limits import check_disk
from pipeline.workers.stack.private_redis import find_server
from pipeline.workers.stack.stack import Stack

# For the workers of a run whose disk is full: its state is dropped, so they need no more time.
HURRY_S: Final = 0.5
QUEUED_MIB: Final = 64  # packed payloads that wait; the pipeline takes about as many in three seconds
# A run of 1.9 MB of text took 2.2 MB of disk at its peak, queues and model included, and one of 10.6 GB took
# 9.7 GB. The floor is for models, logs and the report.
FLOOR_BYTES: Final = 16 * 2**20
PACKED: Final = frozenset((".gz", ".zst", ".xz", ".bz2"))
PACKED_TIMES: Final = 8  # text is at least so much larger than its archive


@dataclass(slots=True, kw_only=True)
class RunOutcome:
    """Results of a run."""

    out: Path
    findings: list[finding.Finding]
    summary: dict[str, Any]
    report: Path | None
    notes: list[str] = field(default_factory=list)


def run(plan: RunPlan, settings: Settings, show: Show) -> RunOutcome:
    """Do it. Raises BadInput, SinkUnavailable (disk), StackFailed; KeyboardInterrupt stops cleanly."""
    began = time.monotonic()
    # Every refusal comes before anything is written.
    normal = NormalList.load(plan.normal, MaskSet.load(extra=settings.intake.masks))
    session_keys.user_patterns(settings.watch.session_keys)
    check_encoder(settings)
    if settings.redis.url is None:
        find_server()
    else:
        check_redis(settings)
    check_disk(plan.out, _room(plan))
    state = place.open_place(plan.out)
    prefix = settings.redis.key_prefix
    if settings.redis.url is not None:
        # On a shared Redis every run has keys of its own, removed at the end.
        prefix = f"{prefix}-run-{digest(socket.gethostname(), str(plan.out))}"
    settings = settings.replace(
        data_dir=state,
        store_url=None,
        results_dir=place.staging(plan.out) / "results",
        key_prefix=prefix,
        # A run is of its files alone, whatever a pipeline on this machine watches and wherever that one
        # stores.
        unwatched="score",
        own_models=(),
        sinks=("parquet",),
        train_source="results",
        train_span_s=None,
        opensearch_source=None,
        kafka_source=None,
        nats_source=None,
        # A file waits as it is: what waits in Redis is memory.
        max_pending_mib=min(QUEUED_MIB, settings.intake.max_pending_mib),
        # Everything is there: no session has to be judged before its last line, which may stand in another
        # file.
        session_open_s=KEEP_S,
    )
    show("starting", 0, 0, "Redis and workers")
    dead = True
    try:
        with _clean_redis(settings), _stack(plan, settings) as stack:
            journey = Journey(stack.settings, stack, show, plan=plan)
            try:
                outcome = _go(plan, journey, began, normal)
                place.swap(plan.out, plan.report)  # here, where the stack still has the lock
            except SinkUnavailable:
                stack.stop_s = HURRY_S
                raise
            dead = bool(outcome.summary["run"]["dead_lines"])
    finally:
        place.close_place(plan.out, keep_state=dead)  # the logs say why
    return outcome


def _room(plan: RunPlan) -> int:
    """Bytes of disk below which a run is bound to fail."""
    sizes = ((path.suffix in PACKED, files.total_bytes(path)) for path in (*plan.inputs, *plan.baseline))
    return FLOOR_BYTES + sum(size * PACKED_TIMES if packed else size for packed, size in sizes)


def _stack(plan: RunPlan, settings: Settings) -> Stack:
    """One process for small inputs, which takes no time to start; else the workers of a fleet."""
    if input_bytes((*plan.inputs, *plan.baseline)) < settings.internal.one_process_kib * 1024:
        from pipeline.workers.one_process import OneProcess

        return OneProcess(settings)
    return Stack(settings.replace(reader_processes=0))


@contextmanager
def _clean_redis(settings: Settings) -> Iterator[None]:
    """On a shared Redis, leave nothing of this run behind, nor take over what a killed one left."""
    if settings.redis.url is None:
        yield
        return

    def clean() -> None:
        client = connect(settings)
        for pattern in (f"{{{settings.redis.key_prefix}}}:*", f"{settings.redis.key_prefix}:*"):
            for key in client.scan_iter(match=pattern, count=1000):
                client.unlink(key)

    # A Redis that cannot be used is reported by the stack's own check, in one sentence.
    with contextlib.suppress(redis.RedisError):
        clean()
    try:
        yield
    except BaseException:
        with contextlib.suppress(redis.RedisError):  # the user must see the first error
            clean()
        raise
    try:
        clean()
    except redis.RedisError as exc:
        raise RedisUnavailable(f"the keys of this run could not be removed from Redis ({exc})") from exc


def _go(plan: RunPlan, journey: Journey, began: float, normal: NormalList) -> RunOutcome:
    status, learnt_lines = Status(), 0
    if plan.baseline:
        learnt_lines = journey.send(plan.baseline, Purpose.BASELINE)
        journey.settle("learning the baseline")
        status = journey.train(Purpose.BASELINE)
    started = time.monotonic()
    lines = journey.send(plan.inputs, Purpose.SCORE)
    journey.settle("scoring" if plan.baseline else "storing")
    scoring_s = time.monotonic() - started
    if not plan.baseline:
        status = journey.train(Purpose.SCORE)
        started = time.monotonic()
        journey.settle("scoring")
        scoring_s += time.monotonic() - started
    if not status.published:
        journey.judge_by_words()
    journey.watch()
    about = {
        "inputs": [files.shown_name(path, plan.stdin) for path in plan.inputs],
        "baseline": [str(p) for p in plan.baseline],
        "lines_read": lines,
        "baseline_lines": learnt_lines,
        "dead_lines": sum(t.get("dead", 0) for t in journey.asked(journey.ledger.backlog.totals).values()),
        "model_version": status.version or None,
        "training": status.state.value,
        "seconds": round(time.monotonic() - began, 2),
        "lines_per_s": round(lines / max(0.001, scoring_s)),  # reading, scoring and storing, without training
        "ready_seconds": round(journey.stack.ready_s, 2),
    }
    return _write(plan, journey, about, normal)


def _write(plan: RunPlan, journey: Journey, about: dict[str, Any], normal: NormalList) -> RunOutcome:
    """Findings, templates, summary and report. Raises SinkUnavailable."""
    journey.show("writing", 0, 0, "findings and report")
    journey.clear_away()
    results, out = journey.settings.data.results, place.staging(plan.out)
    templates = journey.asked(lambda: _templates(journey))
    silenced: list[finding.Finding] = []

    def silence(one: finding.Finding) -> bool:
        if normal.covers(one):
            silenced.append(one)
            return True
        return False

    found = finding.collect(results, templates, leave_out=silence, news=journey.settings.train.news_per_day)
    found = with_neighbours(results, found, records=max(RECORDS, plan.context))
    about |= {
        "silenced": len(silenced),
        "templates": templates.height,
        "findings": len(found),
        "incidents": len({f.incident for f in found if f.incident}),
        "news": sum(f.news for f in found),
    }
    texts = dict(templates.select("template_id", "template").iter_rows())
    summary = {
        **run_summary(results),
        "run": about,
        "facts": _facts(plan, journey, templates),
        "units": unusual_units(journey.settings, texts) if plan.baseline else None,
        "findings": [facts(one) for one in found],
    }
    try:
        _replace(out / "templates.parquet", lambda p: templates.write_parquet(p, compression="zstd"))
        _replace(
            out / "summary.json",
            lambda p: p.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8"),
        )
        names = ", ".join(dict.fromkeys(p.name for p in plan.inputs))
        page.write_page(
            out / "report.html",
            findings=found,
            templates=templates,
            summary=summary,
            title=names[:200],
            run=about,
            samples=first_records(results),
        )
    except (OSError, pl.exceptions.ComputeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        if (full := os.strerror(errno.ENOSPC)) in why:  # Polars wraps it in words of its own
            why = full
        raise SinkUnavailable(
            f"{plan.out} cannot be written ({why}); free space there and run again"
        ) from exc
    notes = list(dict.fromkeys((*plan.notes, *journey.notes, *journey.times.notes())))
    notes += _left_out_notes(journey)
    if silenced:
        notes.append(f"{plural(len(silenced), 'finding')} left out, as --normal says")
    if about["dead_lines"]:
        notes.append(f"{about['dead_lines']:,} lines could not be processed and are not in the results:")
        notes += [
            f"{letter.source}:{letter.first_line} ({letter.lines} lines): {letter.reason}"
            for letter in journey.asked(lambda: journey.ledger.dead_letters.newest(limit=5))
        ]
    report = plan.report or plan.out / "report.html"
    return RunOutcome(out=plan.out, findings=found, summary=summary, report=report, notes=notes)


def _facts(plan: RunPlan, journey: Journey, templates: pl.DataFrame) -> list[dict[str, Any]]:
    """What holds for the run as a whole, ready for JSON. Raises BadPayload, SinkUnavailable."""
    sink = parquet_of(journey.settings)
    normal = parquet_of(journey.settings, Purpose.BASELINE).scan() if plan.baseline else None
    with readable(sink):
        return [asdict(fact) for fact in overall_facts(sink.scan(), normal, templates)]


def _left_out_notes(journey: Journey) -> list[str]:
    """What rates and numbers of the run could not use as it is."""
    key = journey.keys.watching("left_out")
    blobs = journey.asked(lambda: cast("dict[bytes, bytes]", journey.client.hgetall(key)))
    return total_left_out(unpack_left_out(blobs).values()).sentences()


def _templates(journey: Journey) -> pl.DataFrame:
    """template_id, template, count (records), first_seen, last_seen of this run's results."""
    texts = template_texts(journey.client, journey.keys)
    names = pl.DataFrame(
        {"template_id": list(texts), "template": list(texts.values())},
        schema={"template_id": pl.Int64, "template": pl.String},
    )
    return (
        parquet_of(journey.settings)
        .scan()
        .filter(of_lines())
        .group_by("template_id")
        .agg(
            pl.len().cast(pl.UInt64).alias("count"),
            pl.col("timestamp").filter(is_timed()).min().alias("first_seen"),
            pl.col("timestamp").filter(is_timed()).max().alias("last_seen"),
        )
        .join(names.lazy(), on="template_id", how="left")
        .with_columns(pl.col("template").fill_null("(unclassified)"))
        .select("template_id", "template", "count", "first_seen", "last_seen")
        .sort("count", "template_id", descending=[True, False])
        .collect(engine="streaming")
    )


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a whole file or none."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
