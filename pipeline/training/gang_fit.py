"""A fit by a gang: one process on each of several devices, on the nodes of the pool that take jobs.

The trainer stays where it is. It sends sample and request as a job of the pool, shows the progress of rank 0
and fetches the bundle; judging and publishing are its own, under its lease. The ranks (rank_fit.py) reach
neither Redis nor the store. A rank that dies costs a try, and the next one goes on from the state of rank 0.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import polars as pl

from pipeline.errors import (
    BadBundle,
    DeviceFailed,
    LeaseRefused,
    RedisUnavailable,
    StoreUnavailable,
    TooNew,
    TrainingFailed,
)
from pipeline.gpu.job_files import RESULTS, UPLOAD, drop_files, fetch_files, put_files
from pipeline.gpu.jobs import ENDED, FIT, JobState, PoolJob, PoolJobs
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseKind, LeaseMode, Need
from pipeline.logs import logger
from pipeline.models.trainer import FitProgress, FitRequest
from pipeline.records.wire import Codec
from pipeline.store.choose import open_store

RETRIES: Final = 2
PATIENCE_S: Final = 60.0  # for the devices, beyond the time that their holders have to give them back
POLL_S: Final = 0.5
# Names in the directory of a rank.
SAMPLE: Final = "sample.parquet"
REQUEST: Final = "request"
WARM: Final = "warm"
ENCODER: Final = "encoder"
# Names among the results of rank 0.
BUNDLE: Final = "bundle"
STATE: Final = "state"

CODEC: Final = Codec(FitRequest, version=1, what="the request of a fit", newer=TooNew)


class RankWord(msgspec.Struct, frozen=True, kw_only=True):
    """A line that rank 0 prints: how far it is, or why it fails."""

    progress: FitProgress | None = None
    failed: str = ""


def pack_order(sample: pl.DataFrame, request: FitRequest, directory: Path) -> None:
    """Writes all that a rank needs. Paths become those below its directory. Raises OSError."""
    sample.write_parquet(directory / SAMPLE)
    config = request.config
    if request.warm is not None:
        shutil.copytree(request.warm, directory / WARM)
        request = replace(request, warm=Path(WARM))
    if config.encoder is not None:
        shutil.copytree(config.encoder, directory / ENCODER)
        request = replace(request, config=replace(config, encoder=Path(ENCODER)))
    (directory / REQUEST).write_bytes(CODEC.pack(request))


def read_order(directory: Path) -> tuple[pl.DataFrame, FitRequest]:
    """The inverse of `pack_order`. Raises BadPayload, TooNew, OSError."""
    return pl.read_parquet(directory / SAMPLE), CODEC.unpack((directory / REQUEST).read_bytes())


@dataclass(slots=True, kw_only=True)
class GangFit:
    """Fits on `devices` devices. `nodes`: those that take jobs now."""

    pool: Pool
    jobs: PoolJobs
    nodes: Callable[[], Collection[str]]
    devices: int
    _read: int = 0  # bytes of the output of rank 0
    _line: bytes = b""
    _shown: FitProgress | None = field(default=None)

    def fit(self, sample: pl.DataFrame, request: FitRequest) -> Generator[FitProgress, None, None]:
        """As models/trainer.py. Raises LeaseRefused when the devices are not to be had in time,
        TrainingFailed as a fit does, DeviceFailed when all tries were lost."""
        began = time.monotonic()
        internal = self.pool.settings.internal
        # A node that starts has reported by then.
        reported = began + internal.gpu_node_ttl_ms / 1000 + 2 * internal.gpu_beat_s
        job = self._job(request)
        while why := self._refusal(job.need):
            if time.monotonic() > reported:
                raise LeaseRefused(f"no training on {self.devices} devices: {why}")
            yield self._word(began)
            time.sleep(POLL_S)
        store = open_store(self.pool.settings.data.store)
        with tempfile.TemporaryDirectory(prefix="logweir-gang-") as folder:
            pack_order(sample, request, Path(folder))
            job = replace(job, upload=put_files(store, job.job_id, UPLOAD, Path(folder)))
        try:
            self._cancel_orphans()
            self.jobs.submit(job)
            yield from self._until_ended(job.job_id)
            self._fetch(self.jobs.known(job.job_id), request)
        finally:
            with suppress(RedisUnavailable, StoreUnavailable):  # else the keeper of jobs forgets it in time
                self.jobs.change(job.job_id, lambda now: replace(now, cancel=True))
                assert job.upload is not None  # noqa: S101 - narrows the type
                drop_files(store, job.job_id, UPLOAD, job.upload)

    def _refusal(self, need: Need) -> str:
        """Why the pool, as it is now, can never run the job; "" when it can."""
        nodes = sorted(self.nodes())
        return self.pool.refusal(replace(need, node="|".join(nodes))) if nodes else "no node takes jobs"

    def _job(self, request: FitRequest) -> PoolJob:
        need = Need(
            mode=LeaseMode.EXCLUSIVE,
            devices=self.devices,
            max_duration_s=60 + 3 * (request.time_budget_s or 0.0),
            kind=LeaseKind.TRAIN,
        )
        return PoolJob(
            job_id=f"train-{request.version}",
            user=f"logweir@{this_node()}",
            command=(FIT,),
            program=FIT,
            need=need,
            retries=RETRIES,
            gang=True,
        )

    def _cancel_orphans(self) -> None:
        """One training runs at a time, so every other fit belongs to a trainer that died."""
        for other in self.jobs.live():
            if other.program == FIT:
                self.jobs.change(other.job_id, lambda now: replace(now, cancel=True))

    def _until_ended(self, job_id: str) -> Iterator[FitProgress]:
        """The progress of rank 0; of a gang that waits, none."""
        began = time.monotonic()
        latest = began + self.pool.settings.gpu.yield_s + PATIENCE_S
        while True:
            with suppress(RedisUnavailable):  # for a moment: whoever is away for longer loses its lease
                job = self.jobs.known(job_id)
                self._listen(job_id)
                if job.state in ENDED:
                    return self._judge_end(job)
                waits = job.state in (JobState.WAITING, JobState.STARTING) and job.attempt == 1
                if waits and time.monotonic() > latest:
                    why = job.why or "they are not free"
                    raise LeaseRefused(f"no training on {self.devices} devices: {why}")
            yield self._word(began)
            time.sleep(POLL_S)

    def _listen(self, job_id: str) -> None:
        """Reads the newest words of rank 0. Raises TrainingFailed where one says why the fit fails."""
        first, output = self.jobs.read(job_id, self._read)
        self._read = first + len(output)
        *lines, self._line = (self._line + output).split(b"\n")
        for line in lines:
            word = said_by_rank(line)
            if word is not None and word.failed:
                raise TrainingFailed(word.failed)
            if word is not None and word.progress is not None:
                self._shown = word.progress

    def _word(self, began: float) -> FitProgress:
        """The last word of rank 0, again and again: the trainer looks at its own lease with each."""
        return self._shown or FitProgress(
            stage="prepare", percent=0.0, elapsed_s=round(time.monotonic() - began, 2), remaining_s=None,
            epoch=0.0, loss=None, lines=0,
        )  # fmt: skip

    def _judge_end(self, job: PoolJob) -> None:
        """Raises TrainingFailed, DeviceFailed."""
        if job.state is JobState.FAILED:
            raise TrainingFailed(f"{job.why}; `logweir gpu logs {job.job_id}` shows what it said")
        if job.state is not JobState.SUCCEEDED:
            raise DeviceFailed(f"the training on {self.devices} devices was {job.state.value}: {job.why}")

    def _fetch(self, job: PoolJob, request: FitRequest) -> None:
        """Puts the bundle where the request wants it. Raises TrainingFailed, StoreUnavailable."""
        if job.results is None:
            raise TrainingFailed(f"rank 0 of {job.job_id} left no model")
        request.out.parent.mkdir(parents=True, exist_ok=True)
        store = open_store(self.pool.settings.data.store)
        with tempfile.TemporaryDirectory(prefix=".gang-", dir=request.out.parent) as folder:
            try:
                fetch_files(store, job.job_id, RESULTS, job.results, Path(folder))
                (Path(folder) / BUNDLE).rename(request.out)
            except (BadBundle, OSError) as exc:
                raise TrainingFailed(f"the model of {job.job_id} cannot be fetched: {exc}") from exc
        logger(job=job.job_id).info("training.gang_ended", nodes=job.node, tries=job.attempt)


def said_by_rank(line: bytes) -> RankWord | None:
    """A line of the output of rank 0; None for those of libraries and of `gpu run`."""
    if not line.startswith(b"{"):
        return None
    try:
        return msgspec.json.decode(line, type=RankWord)
    except msgspec.DecodeError:
        return None
