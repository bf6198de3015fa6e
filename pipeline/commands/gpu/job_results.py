"""The files of a job in $GPU_JOB_RESULTS go to the store: after its end and, as checkpoints, while it runs.

The next try begins with the files of the last one. An archive is named by its hash and the record of the job
names the archive, so a process that dies while it stores leaves the archive before.
"""

import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from pipeline.errors import LogweirError, StoreUnavailable
from pipeline.gpu.job_files import RESULTS, drop_files, fetch_files, put_files
from pipeline.gpu.jobs import JobFiles, JobState, PoolJob, PoolJobs
from pipeline.logs import logger
from pipeline.store.objects import Objects
from pipeline.upkeep import FaultSeries, UpkeepThread

EVERY_S: Final = 10.0  # between two checkpoints
SHARE: Final = 0.1  # of the time of a program that storing may take
LOOK_S: Final = 1.0

Signature = tuple[tuple[str, int, int], ...]


class JobResults:
    """The results of one attempt. A thread stores them meanwhile, between `begin` and `end`.

    `stores` False: they are only restored, as for the ranks above 0."""

    def __init__(
        self, jobs: PoolJobs, objects: Objects, job: PoolJob, directory: Path, *, stores: bool = True
    ) -> None:
        self.jobs, self.objects, self.job, self.directory = jobs, objects, job, directory
        self.stores = stores
        self.left_out: list[str] = []  # links and FIFOs that the archive of the results lacks
        self._stored = job.results
        self._seen: Signature = ()
        self._over = threading.Event()
        self._thread = UpkeepThread("gpu-job-results", self._run)

    def restore(self) -> None:
        """Make the directory, with the files of the attempt before. Raises BadBundle, StoreUnavailable,
        OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.job.results is not None:
            fetch_files(self.objects, self.job.job_id, RESULTS, self.job.results, self.directory)
        self._seen = self._signature()

    def begin(self) -> None:
        if self.stores:
            self._thread.start()

    def end(self) -> None:
        """Store what is there now. Raises BadInput, StoreUnavailable, RedisUnavailable, OSError."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.stores:
            self.store()

    def store(self) -> None:
        """Store the directory if it has changed. Raises as `end` does."""
        signature = self._signature()
        if signature == self._seen:
            return
        files = put_files(self.objects, self.job.job_id, RESULTS, self.directory, left_out=self.left_out)

        def decide(job: PoolJob) -> PoolJob | None:
            # While the next attempt waits, none of its processes has read the record yet.
            runs = job.attempt == self.job.attempt and job.state is JobState.RUNNING
            waits = job.attempt == self.job.attempt + 1 and job.state is JobState.WAITING
            return replace(job, results=files) if runs or waits else None

        recorded = self.jobs.change(self.job.job_id, decide) is not None
        surplus: JobFiles | None = files
        if recorded:
            surplus, self._stored, self._seen = self._stored, files, signature
        if surplus is not None and surplus != self._stored:
            with suppress(StoreUnavailable):  # it goes when the job is forgotten
                drop_files(self.objects, self.job.job_id, RESULTS, surplus)

    def _run(self) -> None:
        log = logger(job=self.job.job_id)
        faults = FaultSeries("gpu.job_no_checkpoint", LogweirError, OSError, log=log)
        next_s = time.monotonic() + EVERY_S
        while not self._over.wait(LOOK_S):
            began = time.monotonic()
            if began < next_s:
                continue
            with faults.outlived():  # a file that went meanwhile, or a store that is away
                self.store()
            took_s = time.monotonic() - began
            next_s = time.monotonic() + max(EVERY_S, took_s / SHARE)

    def _signature(self) -> Signature:
        """Names, sizes and times of all files."""
        found = []
        for path in sorted(self.directory.rglob("*")):
            with suppress(OSError):
                facts = path.lstat()
                found.append((str(path), facts.st_size, facts.st_mtime_ns))
        return tuple(found)
