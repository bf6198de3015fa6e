"""Jobs of the pool: commands that a person submits anywhere, and that run where they get a lease.

A job is one record in Redis. It changes by compare-and-set alone, so whoever reads an older record changes
nothing. Who moves a job on is written in job_keeper.py; who runs it, in commands/gpu/job_runner.py. A gang
is a job with a process for each device of its lease (gang.py). Its ranks share the record: the first that
fails ends a try for all, and the last that succeeds ends the job.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, cast

import redis

from pipeline.errors import BadInput, BadPayload, NotFound
from pipeline.gpu.gang import Rank
from pipeline.gpu.leasing import wire
from pipeline.gpu.values import Need
from pipeline.logs import logger
from pipeline.redis.connection import answering, now_ms
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

KEPT_BYTES: Final = 256 * 1024  # of a job's output
KEPT_RANK_BYTES: Final = 64 * 1024  # of the output of a rank above 0 ...
KEPT_RANKS_BYTES: Final = 1024 * 1024  # ... and of all of them together
KEPT_S: Final = 7 * 86_400
MOST_LIVE: Final = 10_000  # jobs that have not ended: some ten MiB of Redis
TRIES: Final = 8  # a record rarely changes twice between a read and a write
READY: Final = b"ready"


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

    `environment`: NAME=VALUE. `image`: its program runs in a container of it. `retries`: how often a lost job
    is tried again. `attempt` counts from 1. `gang`: a process for each device. `ranks` and `master` (address
    and port of rank 0) are those of the attempt. `results` may be those of an earlier attempt: the next one
    finds them.
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
    image: str = ""
    gang: bool = False
    ranks: tuple[Rank, ...] = ()
    master: str = ""
    attempt: int = 1
    state: JobState = JobState.WAITING
    why: str = ""
    node: str = ""  # where it runs, or ran last; of a gang all its nodes
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

    @property
    def size(self) -> int:
        """How many processes run it."""
        return self.need.devices if self.gang else 1

    @property
    def places(self) -> tuple[str, ...]:
        """The node of each of them."""
        return tuple(rank.node for rank in self.ranks) if self.gang else (self.node,)

    def run_id(self, rank: int) -> str:
        """One process, for its sign of life. Another start of a gang has others: both may live a while."""
        return f"{self.start_id}:{rank}" if self.gang else self.job_id

    @property
    def start_id(self) -> str:
        """An attempt that did not begin together is started again, on other devices perhaps."""
        return f"{self.lease_id}:{self.granted_ms}"

    def kept_bytes(self, rank: int) -> int:
        """Of the output of a rank."""
        return KEPT_BYTES if not rank else min(KEPT_RANK_BYTES, KEPT_RANKS_BYTES // (self.size - 1))


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
        job = self.find(job_id)
        size = 1 if job is None else job.size
        with answering():
            self.client.hdel(self._both[1], job_id)
            self.client.delete(*(self._output_key(job_id, rank) for rank in range(size)))

    def begin(self, run_id: str) -> bool:
        """The calling process is this run of a job from now on; False while another one is."""
        with answering():
            key = self.keys.gpu("job_beat", run_id)
            return bool(self.client.set(key, "1", nx=True, px=self.beat_ms))

    def beat(self, run_id: str, *, ready: bool = False) -> None:
        """The process of this run lives. `ready`: it could start its program at once."""
        with answering():
            self.client.set(self.keys.gpu("job_beat", run_id), READY if ready else "1", px=self.beat_ms)

    def leave(self, run_id: str) -> None:
        """No process is this run any more."""
        with answering():
            self.client.delete(self.keys.gpu("job_beat", run_id))

    def beating(self, job: PoolJob, *, ready: bool = False) -> frozenset[int]:
        """The ranks whose processes live, or those that are ready. Rank 0 is all of a job without a gang."""
        keys = [self.keys.gpu("job_beat", job.run_id(rank)) for rank in range(job.size)]
        with answering():
            words = cast("list[bytes | None]", self.client.mget(keys))
        return frozenset(
            rank for rank, word in enumerate(words) if word is not None and (not ready or word == READY)
        )

    def end_rank(self, job: PoolJob, rank: int, *, clean: bool) -> dict[int, bool]:
        """This rank of a gang is over; `clean`: nothing of it is on its device. All that are over since this
        start."""
        key = self.keys.gpu("job_ends", job.start_id)
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(key, str(rank), "1" if clean else "0")
        pipe.expire(key, KEPT_S)
        pipe.hgetall(key)
        with answering():
            ends = cast("dict[bytes, bytes]", pipe.execute()[-1])
        return {int(number): word == b"1" for number, word in ends.items()}

    def ended_ranks(self, job: PoolJob) -> frozenset[int]:
        """The ranks that are over since this start."""
        with answering():
            names = cast("list[bytes]", self.client.hkeys(self.keys.gpu("job_ends", job.start_id)))
        return frozenset(map(int, names))

    def write(self, job_id: str, output: bytes, *, rank: int = 0, kept: int = KEPT_BYTES) -> None:
        """Adds to the output of a rank; the last `kept` bytes stay."""
        self._output(job_id, rank, output, kept, -1)

    def read(self, job_id: str, since: int, *, rank: int = 0) -> tuple[int, bytes]:
        """The number of the first byte from `since` on that is kept, and the output from there."""
        first, output = self._output(job_id, rank, b"", KEPT_BYTES, since)
        return int(first), cast("bytes", output)

    def _output(self, job_id: str, rank: int, output: bytes, kept: int, since: int) -> list[Any]:
        key = self._output_key(job_id, rank)
        return list(self.scripts.run("jobs/output", [key], [output, kept, KEPT_S, since]))

    def _output_key(self, job_id: str, rank: int) -> str:
        return self.keys.gpu("job_output", job_id, *((str(rank),) if rank else ()))

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
    return replace(
        job, state=JobState.WAITING, attempt=job.attempt + 1, why=again, granted_ms=0, ranks=(), master=""
    )
