"""`python -m pipeline.commands.gpu.job_runner JOB [RANK]`: runs one job, or one rank of a gang, on the node
that has its lease.

It is `logweir gpu run` for a lease that was granted already. The program gets a directory of its own, no
input, and an environment without our addresses and passwords. Its output goes to Redis, the last 256 KiB.
"""

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass, replace
from typing import Final

from pipeline.commands.common import err
from pipeline.commands.gpu.job_results import JobResults
from pipeline.commands.gpu.request import NAME
from pipeline.commands.gpu.run import Run, Stop
from pipeline.errors import BadInput, BadSetting, LeaseRefused, LogweirError, RedisUnavailable
from pipeline.gpu.job_files import UPLOAD, fetch_files
from pipeline.gpu.jobs import JobState, PoolJob, PoolJobs, lost
from pipeline.gpu.node.engine import (
    PLACE,
    VARIABLES_OF_ENGINES,
    JobContainer,
    checked_image,
    container_name,
    container_owner,
    find_engine,
)
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.pool import Pool
from pipeline.gpu.rank_pool import RankPool
from pipeline.gpu.values import PoolLease
from pipeline.logs import logger, set_up
from pipeline.redis.connection import connect, now_ms
from pipeline.settings import Settings, reduced_environment
from pipeline.store.choose import open_store
from pipeline.upkeep import FaultSeries, start_thread

FLUSH_S: Final = 0.5
LAST_S: Final = 60.0  # so long the end of a job is reported to a Redis that is away
DRAIN_S: Final = 2.0  # what the kernel cannot end may keep the output open
# Of this process's environment the program sees these: how to find programs, libraries and its own language.
PASSED: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_MPS_PIPE_DIRECTORY", "VIRTUAL_ENV",
)  # fmt: skip


def main(argv: list[str]) -> int:
    job_id, rank = argv[0], int(argv[1]) if len(argv) > 1 else 0
    settings = Settings.load()
    set_up("error")
    if not settings.gpu.jobs or not NAME.fullmatch(job_id):
        raise BadSetting(f"job {job_id!r} is not run: gpu_jobs is off here, or that is no id of a job")
    pool = Pool(connect(settings), settings)
    jobs = PoolJobs(pool.client, settings)
    job = jobs.find(job_id)
    mine = job is not None and job.state is JobState.STARTING and this_node() in job.places[rank : rank + 1]
    if job is None or not mine or not jobs.begin(run_id := job.run_id(rank)):
        return 0
    lease = next((x for x in pool.snapshot().leases if x.lease_id == job.lease_id), None)
    try:
        if lease is not None and lease.holder == job.holder:
            if job.gang:
                from pipeline.commands.gpu.gang_runner import GangRun

                GangRun(RankPool(pool, jobs, job, rank, lease), settings).run()
            else:
                JobRun(pool, jobs, settings, job, lease).run()
    finally:
        jobs.leave(run_id)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, for the record of its job."""

    code: int | None = None
    stopped: Stop = Stop.NOT
    failed: str = ""  # it could not be run here
    rank: str = ""  # of a gang, in words

    @property
    def good(self) -> bool:
        return self.code == 0 and not self.stopped

    def of(self, job: PoolJob) -> PoolJob:
        """The job after this run."""
        job = replace(job, exit_code=self.code)
        if self.good:
            return replace(job, state=JobState.SUCCEEDED, why="")
        if job.cancel:
            return replace(job, state=JobState.CANCELLED, why="it was cancelled")
        if self.failed:
            return lost(job, self.failed)
        if self.stopped in (Stop.LOST, Stop.REQUESTED):
            return lost(job, f"its lease on {job.node} was taken away, or had to be given back")
        why = f"{self.rank or 'its program'} ended with {self.code}"
        if self.stopped is Stop.TOO_MUCH:
            why = f"{self.rank or 'its program'} used more memory than it leased"
        elif self.rank and job.attempt <= job.retries:
            # The others fail by the death of one, and the first word of it may be theirs.
            return lost(job, why)
        return replace(job, state=JobState.FAILED, why=why)


def _fault(exc: Exception) -> str:
    """An error in words. One that nobody foresaw has its kind, and its traceback in the log of the node."""
    if isinstance(exc, LogweirError | OSError):
        return str(exc)
    logger().exception("gpu.job_failed", exc_info=exc)
    return f"{type(exc).__name__}: {exc}"


class JobRun:
    """One attempt of a job. A thread reports meanwhile that this process lives."""

    rank = 0
    ready = False  # for the sign of life: its program could start at once
    look_s = math.inf  # between two looks at the record; at the latest with the next sign of life

    def __init__(
        self, pool: Pool, jobs: PoolJobs, settings: Settings, job: PoolJob, lease: PoolLease
    ) -> None:
        self.pool, self.jobs, self.settings = pool, jobs, settings
        self.job, self.lease = job, lease
        name = job.run_id(self.rank).replace(":", ".") if job.gang else job.lease_id
        self.directory = settings.data.dir.absolute() / "gpu-jobs" / name
        self.objects = open_store(settings.data.store)
        self.results = JobResults(jobs, self.objects, job, self.directory / "results", stores=self.rank == 0)
        self.output = bytearray()
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._running: Run | None = None
        self._container: JobContainer | None = None

    def run(self) -> None:
        """Until the outcome stands in the record. Raises RedisUnavailable when it cannot be written."""
        minder = start_thread("gpu-job", self._mind)
        try:
            outcome = self._outcome()
            self._last(self._flush, "output")
            self._last(lambda: self._report(outcome), "outcome")
        finally:
            self._over.set()
            minder.join()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _outcome(self) -> Outcome:
        try:
            self._prepare()
        except Exception as exc:  # noqa: BLE001 - else the job would be tried for ever
            return self._unused(f"node {this_node()} could not prepare it: {_fault(exc)}")
        started = self._begin()
        if started is None or started.cancel:
            return self._unused("it was taken back before it began")
        try:
            with self._captured():
                outcome = self._program()
        except Exception as exc:  # noqa: BLE001 - as above
            return Outcome(failed=f"node {this_node()} could not run it: {_fault(exc)}")
        try:
            self.results.end()
        except (LogweirError, OSError) as exc:
            self._add(f"logweir: its results are not stored: {exc}\n".encode())
        if lacking := self.results.left_out:
            names = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
            why = "a link that leads out of them, or no plain file"
            self._add(f"logweir: its results lack {names}: {why}\n".encode(errors="replace"))
        return outcome

    def _unused(self, why: str) -> Outcome:
        """Give the lease back, since no program began in it."""
        self.pool.ledger.abandon(self.job.lease_id, self.job.holder)
        return Outcome(failed=why)

    def _prepare(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        (self.directory / "results").mkdir(parents=True)
        if self.job.upload is not None:
            fetch_files(self.objects, self.job.job_id, UPLOAD, self.job.upload, self.directory)
        self.results.restore()
        if self.job.image:
            self._container = self._new_container()

    def _new_container(self) -> JobContainer:
        """Raises BadInput where no engine answers, or where one of this name cannot be removed."""
        engine = find_engine()
        if engine is None:
            raise BadInput("no container engine answers there; install Podman or start Docker")
        need, devices = self.job.need, len(self.lease.parts)
        container = JobContainer(
            engine=engine,
            name=container_name(container_owner(self.settings.data.dir), self.job.lease_id),
            image=checked_image(self.job.image),
            directory=self.directory,
            environment=self._own(),
            cpu_milli=need.cpu_milli * devices,
            memory_mib=need.node_memory_mib * devices,
        )
        if not container.remove():  # of an earlier start of this attempt
            raise BadInput(f"container {container.name} is there already; remove it with {engine.kind} rm -f")
        if container.not_bounded:
            self._add(f"logweir: {engine.words} does not bound {container.not_bounded} here\n".encode())
        return container

    def _own(self) -> dict[str, str]:
        """The variables of the job itself."""
        return dict(one.split("=", 1) for one in self.job.environment) | self._variables()

    def _begin(self) -> PoolJob | None:
        """The record once the program may start; None when it may not."""
        return self.jobs.change(self.job.job_id, self._claim)

    def _claim(self, job: PoolJob) -> PoolJob | None:
        """Begin, unless the job was passed on meanwhile."""
        if job.state is not JobState.STARTING or job.attempt != self.job.attempt:
            return None
        return replace(job, state=JobState.RUNNING, started_ms=now_ms(self.pool.client), why="")

    def _program(self) -> Outcome:
        plain = self._container is None
        # Variables of a job must not reach the engine: PATH and others would change what that one does.
        own = self._own() if plain else {}
        passed = PASSED if plain else (*PASSED, *VARIABLES_OF_ENGINES)
        with reduced_environment(passed, own), chdir(self.directory):
            self._running = self._run_of()
            self.results.begin()
            try:
                code = self._running.run(reported=True)
            except LeaseRefused as exc:
                return Outcome(failed=str(exc))
        return Outcome(code=code, stopped=self._running.stopped)

    def _variables(self) -> dict[str, str]:
        """Of the program, beside those of its lease."""
        place = PLACE if self.job.image else str(self.directory)
        return {
            "GPU_JOB": self.job.job_id,
            "GPU_JOB_RESULTS": f"{place}/results",
            "GPU_JOB_TRY": str(self.job.attempt),
        }

    def _run_of(self) -> Run:
        return self._new_run()

    def _new_run(self, *, locked: Collection[str] | None = None) -> Run:
        return Run(
            self.pool, self.lease, settings=self.settings, command=list(self.job.command),
            grace_s=self.job.grace_s, console=err(), allocator=self.job.allocator, locked=locked,
            container=self._container,
        )  # fmt: skip

    @contextmanager
    def _captured(self) -> Iterator[None]:
        """Standard output and error of this process and of the program go to the job's output."""
        reader, writer = os.pipe()
        thread = start_thread("gpu-job-output", self._read, reader)
        saved = os.dup(1), os.dup(2)
        try:
            with ExitStack() as at_end:
                at_end.callback(os.close, writer)
                for number in (1, 2):
                    os.dup2(writer, number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, before in zip((1, 2), saved, strict=True):
                os.dup2(before, number)
                os.close(before)
            thread.join(DRAIN_S)

    def _read(self, reader: int) -> None:
        """The program never waits for Redis: what is too much is dropped here, the oldest first."""
        with os.fdopen(reader, "rb", buffering=0) as file:
            while data := file.read(65536):
                self._add(data)

    def _add(self, data: bytes) -> None:
        with self._guard:
            self.output += data
            del self.output[: max(0, len(self.output) - self.job.kept_bytes(self.rank))]

    def _mind(self) -> None:
        """Says that this process lives, hands the output on, and looks whether the job was cancelled."""
        every_s, beaten, looked = self.jobs.beat_ms / 5000, 0.0, 0.0
        faults = FaultSeries("gpu.job_not_reported", RedisUnavailable, log=logger(job=self.job.job_id))
        while not self._over.wait(FLUSH_S):
            now = time.monotonic()
            with (
                faults.outlived()
            ):  # without Redis the lease is lost before long, and the program ends with it
                self._flush()
                if now - beaten >= every_s:
                    self.jobs.beat(self.job.run_id(self.rank), ready=self.ready)
                    beaten = now
                if now - looked < min(every_s, self.look_s):
                    continue
                job, looked = self.jobs.find(self.job.job_id), now
                if self._running is not None and (why := self._why_over(job)):
                    self._running.cancelled_why = why
                    self._running.cancelled.set()

    def _why_over(self, job: PoolJob | None) -> str:
        """Why the program is to end by the record, "" while it is not."""
        return "it was cancelled" if job is not None and job.cancel else ""

    def _flush(self) -> None:
        with self._guard:
            data = bytes(self.output)
        if data:
            kept = self.job.kept_bytes(self.rank)
            self.jobs.write(self.job.job_id, data, rank=self.rank, kept=kept)
            with self._guard:
                # What came meanwhile stays; what was dropped meanwhile was at the front too.
                del self.output[: min(len(data), len(self.output))]

    def _report(self, outcome: Outcome) -> None:
        def decide(job: PoolJob) -> PoolJob | None:
            ours = job.start_id == self.job.start_id and job.state in (JobState.STARTING, JobState.RUNNING)
            return outcome.of(job) if ours else None

        if self.jobs.change(self.job.job_id, decide) is None:
            logger(job=self.job.job_id).warning("gpu.job_was_over")

    def _last(self, step: Callable[[], None], what: str) -> None:
        """Again while Redis is away, for a bounded time. Raises RedisUnavailable."""
        end = time.monotonic() + LAST_S
        while True:
            try:
                return step()
            except RedisUnavailable:
                if time.monotonic() > end:
                    logger(job=self.job.job_id).error("gpu.job_not_reported", what=what)
                    raise
                time.sleep(FLUSH_S)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
