"""The steps of `logweir run` on a running stack: send files, wait until nothing is in flight, train a model.

Redis and workers may die meanwhile; the stack brings them back, so every question is asked until it is
answered, and only standing still for long ends the journey."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import polars as pl
import redis

from pipeline.commands.recognition import TimeNotes
from pipeline.commands.run.inputs import RunPlan
from pipeline.commands.run.packs import Pack, packs
from pipeline.commands.run.stdin_copy import STDIN
from pipeline.commands.run.trouble import STUCK_S, StandstillLimit, Troubles
from pipeline.commands.run.workloads import file_workloads
from pipeline.controller.training_status import Status
from pipeline.controller.trainings import TrainingRequest, Trainings
from pipeline.detect import judged_by_words
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadInput, LeaseRefused, RedisUnavailable, SinkUnavailable, StackFailed
from pipeline.ledger.ledger import Ledger
from pipeline.models.config import FIT_MOST_S, MIN_DISTINCT, MIN_RECORDS
from pipeline.observe.presence import Presence
from pipeline.producer import workload_of_file
from pipeline.records.batch import Purpose, digest, file_key
from pipeline.records.delivery import Full
from pipeline.records.schema import of_lines
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.sinks.compaction import vacuum
from pipeline.sources import files
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.framing import MAX_RECORD_BYTES
from pipeline.sources.packed.archives import Source
from pipeline.tasks.context import Context
from pipeline.tasks.watch import watch_stored
from pipeline.units import plural
from pipeline.workers.stack.stack import Stack

# A Redis that died is started again within seconds.
AWAY_S: Final = 60.0
FULL_S: Final = 0.5  # between two tries while the pipeline is full: no other sender competes

T = TypeVar("T")

# (phase, done, total, detail): phases are named for people; total 0 means unknown.
Show = Callable[[str, float, float, str], None]
Progress = Callable[[Path, int, int], None]  # (file, its bytes that were read, lines)


def _cuts(records: pl.DataFrame, was_long: bool) -> tuple[int, bool]:
    """How often a line was cut because it is too long, and whether the last record may be cut. `was_long`:
    that of the records before.

    Records of one line that are short are elements of a document. A piece of an element with escapes may
    have a quarter of the bound."""
    long = records["raw"].str.len_bytes() > MAX_RECORD_BYTES // 4 - 4
    pieces = (records["lines"] == 0) & long.shift(1, fill_value=was_long)
    return int(pieces.sum()), bool(long[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Where the work stands: batches that wait, steps that ended so far, lines in all and lines done with."""

    pending: int
    moves: tuple[int, ...]
    lines: int
    done: int


class Journey:
    """One run's steps on a running stack."""

    def __init__(self, settings: Settings, stack: Stack, show: Show, *, plan: RunPlan) -> None:
        self.workload, self.choice, self.stdin = plan.workload, plan.choice, plan.stdin
        paths = [path for path in (*plan.inputs, *plan.baseline) if not self._is_stdin(path)]
        self.by_file, note = file_workloads(paths)
        self.settings = settings
        self.stack = stack
        self._show = show
        self._shown: tuple[str, float, float] = "", 0.0, 0.0
        client = connect(settings)
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.ledger = Ledger(client, settings)
        self.troubles = Troubles(client, Presence(client, settings), self.keys, settings.data.dir)
        self.trainings = Trainings(client, settings)
        self.producer = stack.producer()
        self.notes: list[str] = [note] if note and self.workload is None else []
        # Of the baseline and the input together.
        self.times = TimeNotes(zone=settings.intake.time_zone, of_stdin=plan.stdin is not None)
        self.no_model = ""  # why there is none

    def show(self, phase: str, done: float, total: float, detail: str) -> None:
        """How far the run is, for people."""
        self._shown = phase, done, total
        self._show(phase, done, total, detail)

    # ---- sending ---------------------------------------------------------------------------------

    def send(self, paths: Sequence[Path], purpose: Purpose) -> int:
        """Read and send every file, waiting when the ledger says full; returns the physical lines sent."""
        total = float(sum(max(1, files.total_bytes(p)) for p in paths))
        before, began, lines = 0.0, time.monotonic(), 0
        word = "reading the baseline" if purpose is Purpose.BASELINE else "reading"
        self.show(word, 0, total, "")

        def progress(path: Path, position: int, count: int) -> None:
            nonlocal lines
            lines += count
            if lines >= MIN_RECORDS:
                self.stack.expect_training()
            rate = lines / max(0.001, time.monotonic() - began)
            self.show(word, before + position, total, f"{path.name}, {rate:,.0f} lines/s")
            self.stack.check()

        for found in packs(
            paths,
            group=self._pack_of,
            max_records=self.settings.internal.batch_records,
            max_bytes=self.settings.internal.batch_kib * 1024,
            choice=self.choice,
        ):
            read = found.paths if isinstance(found, Pack) else (found,)
            try:
                if isinstance(found, Pack):
                    self._send_pack(found, purpose, progress)
                else:
                    self._send_file(found, purpose, progress)
            except BadInput as exc:  # it was a log when the run began
                self.notes.append(f"{exc}; the run went on without it")
            before += sum(max(1, files.total_bytes(path)) for path in read)
        return lines

    def _workload_of(self, source: Source) -> str:
        """By the name of a member; a file of its own has that of the rule for all files."""
        if self.workload is not None:
            return self.workload
        own = source.member or source.path == Path(STDIN)
        return workload_of_file(source.named) if own else self.by_file(source.path)

    def _is_stdin(self, path: Path) -> bool:
        return self.stdin is not None and path == self.stdin.path

    def _pack_of(self, path: Path) -> str:
        """Files of one name may be read together."""
        return STDIN if self._is_stdin(path) else f"workload {self._workload_of(Source(path=path))}"

    def _send_pack(self, pack: Pack, purpose: Purpose, progress: Progress) -> None:
        self.times.see_all(pack.records, pack.formats)
        first = pack.paths[0]
        key = digest("pack", purpose.value, *(str(path) for path in pack.paths))
        chunk = Chunk(
            records=pack.records,
            formats=pack.formats,
            start=0,
            cursor=Cursor(path=str(first), identity=key),
            position=0,
        )
        self._accept(
            chunk,
            workload=self._workload_of(Source(path=first)),
            source=f"{first.parent} ({len(pack.paths):,} files)",
            source_key=key,
            purpose=purpose,
        )
        progress(pack.paths[-1], 0, int(pack.records["lines"].sum()))

    def _send_file(self, path: Path, purpose: Purpose, progress: Progress) -> None:
        """The text of a file, or those of an archive. Raises BadInput where it cannot be read at all."""
        empty, notes = True, len(self.notes)
        for reading in files.read_texts(
            path,
            note=self.notes.append,
            max_records=self.settings.internal.batch_records,
            max_bytes=self.settings.internal.batch_kib * 1024,
            choice=self.choice,
            name=STDIN if self._is_stdin(path) else "",
        ):
            source, cut, was_long = reading.source, 0, False
            workload = self._workload_of(source)
            for chunk in reading.chunks:
                empty = False
                self.times.see(source.name, chunk)
                self._accept(
                    chunk,
                    workload=workload,
                    source=source.name,
                    source_key=file_key(purpose, source.name),
                    purpose=purpose,
                )
                cuts, was_long = _cuts(chunk.records, was_long)
                cut += cuts
                progress(path, chunk.position, int(chunk.records["lines"].sum()))
            if cut:
                size = f"{MAX_RECORD_BYTES // 1024} KiB"
                self.notes.append(f"{source.name}: lines longer than {size} are cut, {plural(cut, 'time')}")
        if empty and len(self.notes) == notes:
            self.notes.append(f"{files.shown_name(path, self.stdin)} is empty")

    def _accept(self, chunk: Chunk, *, workload: str, source: str, source_key: str, purpose: Purpose) -> None:
        """Waits while the ledger says full. Raises StackFailed, SinkUnavailable."""
        accept = partial(
            self.producer.send_chunk,
            chunk,
            workload=workload,
            source=source,
            source_key=source_key,
            cursor_key="",  # a run begins at the beginning
            purpose=purpose,
            backfill=False,  # nothing else is in its way
        )
        limit = self._limit("no room becomes free for more lines")
        while isinstance(answer := self.asked(accept), Full):
            if answer.reason == "dead":  # no operator reads them before the run ends
                raise StackFailed(
                    f"dead letters fill {self.settings.intake.max_dead_mib:,} MiB, so no more of "
                    f"{source} is taken in; "
                    f"the logs in {self.settings.data.dir / 'logs'} say why, max_dead_mib is the "
                    "limit"
                )
            reason = limit.look(self.asked(lambda: self._view(live=False)).moves)
            self._show(*self._shown, reason or "waiting until earlier lines are stored")
            self.pause(min(answer.retry_after_s, FULL_S))

    def pause(self, seconds: float) -> None:
        self.stack.check()
        time.sleep(seconds)

    def asked(self, question: Callable[[], T]) -> T:
        """Redis' answer. One that dies is started again by the stack, so it is asked until it is back;
        accepting a batch twice is accepting it once. Raises RedisUnavailable, SinkUnavailable."""
        deadline = time.monotonic() + AWAY_S
        while True:
            try:
                return question()
            except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
                self.troubles.refusal()  # a full disk ends the run sooner
                if time.monotonic() > deadline:
                    raise RedisUnavailable(str(exc)) from exc
            self.pause(0.2)

    # ---- waiting ---------------------------------------------------------------------------------

    def _limit(self, what: str, limit_s: float = STUCK_S) -> StandstillLimit:
        return StandstillLimit(
            what,
            lambda: self.asked(self.troubles.look),
            logs=self.settings.data.dir / "logs",
            limit_s=limit_s,
        )

    def settle(self, word: str) -> None:
        """Until nothing is in flight and nothing waits for a model that exists. Raises when it is stuck."""
        live = bool(self.asked(lambda: self.client.exists(self.keys.model())))
        view = self.asked(lambda: self._view(live))
        first, began = view.done, time.monotonic()
        limit = self._limit("lines wait to be stored")

        def rate() -> str:
            return f"{(view.done - first) / max(0.001, time.monotonic() - began):,.0f} lines/s"

        while view.pending:
            self.show(word, view.done, view.lines, limit.look(view.moves) or rate())
            self.pause(0.05)
            view = self.asked(lambda: self._view(live))
        self.show(word, view.done, view.lines, rate())

    def _view(self, live: bool) -> "_View":
        """Where the work stands; `live`: there is a model, so that lines without a verdict still wait."""
        totals = self.ledger.backlog.totals().values()
        lines, over, warming, ended = (
            sum(t.get(name, 0) for t in totals for name in names)
            for names in (("accepted",), ("stored", "dead"), ("warming",), ("commits", "dead"))
        )
        stages = self.ledger.backlog.counts()
        moves = (ended, *(stages[name] for name in sorted(stages)))
        batches, waiting = self.ledger.backlog.pending()
        pending = batches + (waiting if live else 0)
        return _View(pending=pending, moves=moves, lines=lines, done=max(0, over - (warming if live else 0)))

    def watch(self) -> None:
        """Until all that is stored was looked at, every session is judged and every minute is complete:
        nothing more will come. Raises StackFailed, SinkUnavailable."""
        context = Context(self.producer.submit.app, self.settings)
        limit = self._limit("sessions and rates wait to be looked at", STUCK_S + self.settings.stack.step_s)

        def once() -> bool:
            try:
                return watch_stored(context, end=True)
            except LeaseRefused:  # a worker that was at it had been stopped for long
                return False

        def progress() -> tuple[str, int]:
            """The name of the last round, and what was not looked at; rates say nothing of how far they
            are."""
            state = self.ledger.backlog.watching()
            last_round = cast("bytes | None", self.client.hget(self.keys.watching(), "round")) or b""
            return last_round.decode(), int(state["observations"] + state["sessions"])

        _, total = self.asked(progress)
        self.show("watching", 0, total, "sessions and rates")
        while not self.asked(once):
            last_round, open_count = self.asked(progress)
            reason = limit.look(last_round)
            self.show("watching", max(0, total - open_count), total, reason or "sessions and rates")
            self.pause(0.05)

    def train(self, purpose: Purpose) -> Status:
        """Ask for a training on what is stored there; wait for its end. None is asked for where the lines are
        too few."""
        stored = parquet_of(self.settings, purpose).scan().filter(of_lines())
        records, distinct = stored.select(pl.len(), pl.col("pattern_id").n_unique()).collect().row(0)
        if records < MIN_RECORDS or distinct < MIN_DISTINCT:
            few = plural(distinct, "distinct line") if records >= MIN_RECORDS else plural(records, "line")
            self.no_model = f"{few} {'is' if few.startswith('1 ') else 'are'} too few to learn what is normal"
            return Status()
        request = TrainingRequest(asked_by="run", why="logweir run")
        request_id, _ = self.asked(lambda: self.trainings.request(request))
        self.producer.submit.train(request_id)
        limit = self._limit("the training waits", STUCK_S + FIT_MOST_S)
        while not (status := self.asked(lambda: self.trainings.followed(request_id))).ended:
            detail = f"{status.patterns:,} distinct lines" if status.patterns else str(status.state)
            reason = limit.look((status.state, status.percent, status.attempt))
            self.show("training", status.percent, 100.0, reason or detail)
            self.pause(0.1)
        self.show("training", 100.0, 100.0, "")
        if not status.published:
            self.no_model = f"no model could be trained: {status.reason}"
        self.notes += status.not_judged
        return status

    def clear_away(self) -> None:
        """Leaves the files that are the results, and no others: people read all that are in the folder.

        The workers end first, so that nobody compacts meanwhile or later. Raises SinkUnavailable."""
        self.stack.end_workers()
        sink = parquet_of(self.settings)
        vacuum(sink)
        if missing := sink.missing_rows():
            raise SinkUnavailable(
                f"{missing:,} stored lines are gone from {sink.objects.url}: their files were removed while "
                "the run worked; keep other programs out of that folder and run again"
            )

    def judge_by_words(self) -> None:
        """Makes the error-like records among those without a verdict anomalous: no model will come."""
        masks = MaskSet.load(extra=self.settings.intake.masks)
        sink = parquet_of(self.settings)
        waiting = cast("list[bytes]", self.asked(lambda: self.client.zrange(self.keys.warming, 0, -1)))
        ids = [name.decode() for name in waiting]
        workloads = self.asked(lambda: self.ledger.backlog.workloads_of(ids))
        for group in sink.by_part(workloads):
            judged = judged_by_words(pl.concat([rows for _, rows in group]), masks)
            changed, at = [], 0
            for batch_id, rows in group:
                now = judged.slice(at, rows.height)
                at += rows.height
                if not now["anomalous"].equals(rows["anomalous"], null_equal=True):
                    changed.append((batch_id, now))
            if changed:
                sink.write_all(changed)
        if ids:
            self.notes.append(f"judged by words alone: {self.no_model or 'there is no model'}")
