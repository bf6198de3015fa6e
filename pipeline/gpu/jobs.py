"""Jobs of the pool: commands that a person submits anywhere, and that run where they get a lease.

A job is one record in Redis. It changes by compare-and-set alone, so whoever reads an older record changes
nothing. Who moves a job on is written in job_keeper.py; who runs it, in commands/gpu/job_runner.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, cast

import redis

from pipeline.errors import BadInput, BadPayload, NotFound
from pipeline.gpu.leasing import wire
from pipeline.gpu.values import Need
from pipeline.logs import logger
from pipeline.redis.connection import answering, now_ms
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

KEPT_BYTES: Final = 256 * 1024  # of a job's output
KEPT_S: Final = 7 * 86_400
MOST_LIVE: Final = 10_000  # jobs that have not ended: some ten MiB of Redis
TRIES: Final = 8  # a record rarely changes twice between a read and a write


class JobState(StrEnum):
    """The life of a job. It moves to the right; a lost job with tries left waits again."""

    WAITING = "waiting"  # for a lease
    STARTING = "starting"  # its node was called
    RUNNING = "running"
    SUCCEEDED = "succeeded"  # its program ended with 0
    FAILED = "failed"  # it ended with another code, or could not be started
    CANCELLED = "cancelled"
    LOST = "lost"  # its node died, or its lease was taken away


ENDED: Final = frozenset((JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.LOST))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """Files of a job in the store: the hash and the bytes of one archive."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJob:
    """A submitted command. Times are milliseconds of the Redis clock, 0 where they have not come.

    `environment`: NAME=VALUE. `retries`: how often a lost job is tried again. `attempt` counts from 1.
    """

    job_id: str
    user: str  # as `name@machine`
    command: tuple[str, ...]
    need: Need
    environment: tuple[str, ...] = ()
    retries: int = 0
    upload: JobFiles | None = None
    grace_s: float = 10.0
    allocator: bool = True  # torch's variable for its limit is set
    attempt: int = 1
    state: JobState = JobState.WAITING
    why: str = ""
    node: str = ""  # where it runs, or ran last
    cancel: bool = False
    exit_code: int | None = None
    results: JobFiles | None = None
    submitted_ms: int = 0
    granted_ms: int = 0
    started_ms: int = 0
    ended_ms: int = 0

    @property
    def lease_id(self) -> str:
        """Each attempt is a lease of its own, so each has its usage record."""
        return f"{self.job_id}.{self.attempt}"

    @property
    def holder(self) -> str:
        return f"{self.user}:job"


class PoolJobs:
    """All jobs of one pool. Every method raises RedisUnavailable. An unreadable record raises BadPayload
    where it is asked for by its id, and is left out of lists."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.beat_ms = settings.internal.lease_ttl_ms
        self._both = [self.keys.gpu("jobs"), self.keys.gpu("jobs_ended")]

    def submit(self, job: PoolJob) -> PoolJob:
        """A new job. Raises BadInput when its id is in use, or when too many jobs wait."""
        job = replace(job, submitted_ms=now_ms(self.client))
        if self.count() >= MOST_LIVE:
            raise BadInput(f"{MOST_LIVE:,} jobs have not ended; cancel some with `logweir gpu cancel JOB`")
        if not self._swap(job, b""):
            raise BadInput(f"there is a job {job.job_id!r} already; take another --name")
        return job

    def count(self) -> int:
        """How many have not ended."""
        with answering():
            return int(self.client.hlen(self._both[0]))

    def live(self) -> list[PoolJob]:
        """Jobs that have not ended, the oldest first."""
        return self._all(self._both[0])

    def ended(self) -> list[PoolJob]:
        """Jobs that have ended, the oldest first."""
        return self._all(self._both[1])

    def find(self, job_id: str) -> PoolJob | None:
        raw = self._raw(job_id)
        return None if raw is None else wire.read_json(PoolJob, raw)

    def known(self, job_id: str) -> PoolJob:
        """As `find`. Raises NotFound."""
        job = self.find(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id[:80]!r}; `logweir gpu jobs` shows those there are")
        return job

    def change(self, job_id: str, decide: Callable[[PoolJob], PoolJob | None]) -> PoolJob | None:
        """Puts what `decide` makes of the record of now; None where it makes nothing, or the job ended."""
        for _ in range(TRIES):
            raw = self._raw(job_id)
            job = None if raw is None else wire.read_json(PoolJob, raw)
            if raw is None or job is None or job.state in ENDED:
                return None
            changed = decide(job)
            if changed is None:
                return None
            if changed.state in ENDED:
                changed = replace(changed, ended_ms=now_ms(self.client))
            if changed == job or self._swap(changed, raw):
                return changed
        return None

    def forget(self, job_id: str) -> None:
        """Removes a job that has ended."""
        with answering():
            self.client.hdel(self._both[1], job_id)
            self.client.delete(self.keys.gpu("job_output", job_id))

    def begin(self, job_id: str) -> bool:
        """The calling process runs this job from now on; False while another one does."""
        with answering():
            key = self.keys.gpu("job_beat", job_id)
            return bool(self.client.set(key, "1", nx=True, px=self.beat_ms))

    def beat(self, job_id: str) -> None:
        """The process that runs this job lives."""
        with answering():
            self.client.set(self.keys.gpu("job_beat", job_id), "1", px=self.beat_ms)

    def leave(self, job_id: str) -> None:
        """No process runs this job any more."""
        with answering():
            self.client.delete(self.keys.gpu("job_beat", job_id))

    def beats(self, job_id: str) -> bool:
        with answering():
            return bool(self.client.exists(self.keys.gpu("job_beat", job_id)))

    def write(self, job_id: str, output: bytes) -> None:
        """Adds to the output; the last KEPT_BYTES stay."""
        self._output(job_id, output, -1)

    def read(self, job_id: str, since: int) -> tuple[int, bytes]:
        """The number of the first byte from `since` on that is kept, and the output from there."""
        first, output = self._output(job_id, b"", since)
        return int(first), cast("bytes", output)

    def _output(self, job_id: str, output: bytes, since: int) -> list[Any]:
        key = self.keys.gpu("job_output", job_id)
        return list(self.scripts.run("jobs/output", [key], [output, KEPT_BYTES, KEPT_S, since]))

    def _all(self, key: str) -> list[PoolJob]:
        with answering():
            texts = cast("list[bytes]", self.client.hvals(key))
        found = []
        for text in texts:
            try:
                found.append(wire.read_json(PoolJob, text))
            except BadPayload as exc:  # of a newer build, or damaged: it must not stop all the others
                logger().warning("gpu.job_unreadable", why=str(exc))
        return sorted(found, key=lambda job: (job.submitted_ms, job.job_id))

    def _raw(self, job_id: str) -> bytes | None:
        for key in self._both:
            with answering():
                raw = cast("bytes | None", self.client.hget(key, job_id))
            if raw is not None:
                return raw
        return None

    def _swap(self, job: PoolJob, before: bytes) -> bool:
        ended = "1" if job.state in ENDED else "0"
        args = [job.job_id, before, wire.encode(job), ended]
        return bool(self.scripts.run("jobs/swap", self._both, args))


def lost(job: PoolJob, why: str) -> PoolJob:
    """The job after its run came to nothing: it waits again where it has tries left."""
    if job.cancel:
        return replace(job, state=JobState.CANCELLED, why="it was cancelled")
    if job.attempt > job.retries:
        return replace(job, state=JobState.LOST, why=why)
    again = f"{why}; try {job.attempt + 1} of {job.retries + 1}"
    return replace(job, state=JobState.WAITING, attempt=job.attempt + 1, why=again, granted_ms=0)
