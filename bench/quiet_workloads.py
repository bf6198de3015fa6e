"""Processor time of 200 workloads of five lines a second, by stage, in one process on a Redis of its own.

Windows of the intake follow each other as fast as they go. Each is decoded from OTLP and taken in by the
script, and stage ingest answers it with known verdicts. The watcher's rounds are two seconds of the stream
apart. The times of the records make it a stream. Processor time of this process and of Redis is divided by
the seconds of the stream. Listening, Celery and processes at rest are missing: `scripts/bench intake` has
them, and needs quiet cores."""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from bench._decoding import DIALECTS, hints_of
from bench._requests import PROTOCOLS
from bench._running import scratch
from bench._shipper import Request
from bench._traffic import Timetable, read_all
from bench.watching import own_redis
from pipeline.drain.verdicts import Verdicts
from pipeline.producer import Producer
from pipeline.records.batch import utc_now
from pipeline.records.delivery import Accepted, RequestIdentity, Stage
from pipeline.records.verdict import Reason, Verdict, reason
from pipeline.redis.leases import WATCH, granted
from pipeline.settings import Settings
from pipeline.tasks import ingest
from pipeline.tasks.context import Context
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.state import WatcherState
from pipeline.watching.view import View
from pipeline.workers.intake.batches import CountedRecords, lines_and_bytes, window_batches
from pipeline.workers.one_process import LocalSubmit

WORKLOADS: Final = 200
LINES: Final = 5  # a second and workload
SECONDS: Final = 60.0  # of the stream
WARM_UP_S: Final = 5.0
WINDOW_S: Final = 0.19  # between two commits of the intake where each window has as few records as here
EVERY: Final = 20  # one template of so many is anomalous


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of the stream (default {SECONDS:g})")
    parser.add_argument("--workloads", type=int, default=WORKLOADS, help=f"default {WORKLOADS}")
    parser.add_argument("--lines", type=int, default=LINES, help=f"a second and workload (default {LINES})")
    parser.add_argument(
        "--window", type=float, default=WINDOW_S, help=f"seconds between commits (default {WINDOW_S:g})"
    )


class _Known(Verdicts):
    """Knows every line."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.templates: dict[int, Verdict] = {}

    def lookup(self, version: str, keys: Sequence[int]) -> dict[int, Verdict]:  # noqa: ARG002
        return {key: self.templates.get(key) or self._new(key) for key in keys}

    def _new(self, key: int) -> Verdict:
        number = len(self.templates) + 1
        why = () if number % EVERY else (reason(Reason.ERROR_SEVERITY, "failed"),)
        made = Verdict(template_id=number, score=0.9 if why else 0.1, anomalous=bool(why), reasons=why)
        self.templates[key] = made
        return made


class _State(WatcherState):
    """The watcher's clock is that of the stream."""

    now_ms = 0

    def snapshot(self, *args: Any) -> View:
        return replace(super().snapshot(*args), now_ms=self.now_ms)


class _OneContext(Context):
    """One process with all verdicts, and a session model that knows one kind of session."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(None, settings)
        self.submit = LocalSubmit(self.client, settings)
        self.verdicts = _Known(self.client, settings)
        self.rules = SessionModel.fit([[1, 2, 3]] * 50)
        self.watcher.state = _State(self.client, settings)

    def _version_of(self, model: str) -> str:  # noqa: ARG002
        return "m1"

    def session_model(self, workload: str, kind: str) -> tuple[str, SessionModel]:  # noqa: ARG002
        return "m1", self.rules


class _Stream:
    """The windows of a stream on their way, and what each part of it took."""

    def __init__(self, settings: Settings, window_s: float) -> None:
        self.settings, self.window_s = settings, window_s
        self.context = _OneContext(settings)
        self.producer = Producer(self.context.ledger, self.context.submit, settings)
        self.token = granted(self.context.leases.request(WATCH, "bench"), WATCH).token
        self.spent: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.spent[part] += time.process_time() - began
        self.counts[part] += 1

    def run(self, requests: Sequence[Request], begins: float) -> None:
        watched = begins
        for number, window in itertools.groupby(
            requests, key=lambda request: int((request.due - begins) / self.window_s)
        ):
            self._take(list(window))
            now = begins + (number + 1) * self.window_s
            if now - watched >= self.settings.internal.watch_s:
                watched = now
                self._watch(now)

    def _take(self, window: Sequence[Request]) -> None:
        with self.timed("decode"):
            decoded = [
                DIALECTS["otlp"].decode(request.body, hints_of(PROTOCOLS["otlp"], request)).records
                for request in window
            ]
        with self.timed("accept"):
            internal = self.settings.internal
            batches = window_batches(
                [CountedRecords(records, *lines_and_bytes(records)) for records in decoded],
                arrived=utc_now(),
                zone="UTC",
                max_records=internal.batch_records,
                max_bytes=internal.batch_kib * 4096,
            )
            answer = self.producer.accept_all(batches, [RequestIdentity()] * len(window))
            assert isinstance(answer, Accepted)
        submit = self.context.submit
        assert isinstance(submit, LocalSubmit)
        while submit.waiting_ids(Stage.INGEST):
            found = submit.take(0.0)
            assert found is not None
            with self.timed("ingest"):
                ingest.run(self.context, found[1])

    def _watch(self, now: float) -> None:
        state = self.context.watcher.state
        assert isinstance(state, _State)
        state.now_ms = round(now * 1000)
        with self.timed("watch"):
            while self.context.watcher.round(self.token).more:
                self.counts["rounds"] += 1
            self.counts["rounds"] += 1


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder, own_redis(folder) as settings:
        records = read_all(sorted((data / "loghub_2k").glob("*/*_2k.log")))
        stream = _Stream(settings, args.window)
        table = Timetable(workloads=args.workloads, lines=args.lines, every_s=1.0)
        first = time.time() - args.seconds - WARM_UP_S - 60.0
        for begins, seconds in ((first, WARM_UP_S), (first + WARM_UP_S, args.seconds)):
            requests = table.requests(PROTOCOLS["otlp"], records, begins=begins, seconds=seconds)
            stream.spent.clear()
            stream.counts.clear()
            server = psutil.Process(int(stream.context.client.info("server")["process_id"]))
            before = server.cpu_times()
            stream.run(requests, begins)
            after = server.cpu_times()
        stream.spent["redis"] = after.user + after.system - before.user - before.system
        totals = stream.context.ledger.backlog.totals().values()
    lines = sum(request.lines for request in requests)
    cores = {part: spent / args.seconds for part, spent in stream.spent.items()}
    return {
        "lines": lines,
        "lost": sum(one["accepted"] - one.get("stored", 0) for one in totals),
        "windows": stream.counts["accept"],
        "rounds": stream.counts["rounds"],
        "cores": round(sum(cores.values()), 4),
        "of_each": {part: round(some, 4) for part, some in cores.items()},
        "ingest_ms_a_window": round(stream.spent["ingest"] / stream.counts["accept"] * 1000, 2),
    }


def failed(values: dict[str, Any]) -> bool:
    return bool(values["lost"])
