"""More processes of `ingest` while batches wait for the first and a core is idle.

A flood of known lines is bound by `ingest`, and one process uses one core. So a stack whose number of
processes is not set starts another while the oldest batch waits longer than a small pass may take. A process
that nothing has needed for a minute ends after its step. Where all cores are busy another process would only
take time from the rest of the stack, so none is started.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import psutil  # type: ignore[import-untyped] # it publishes no types
import redis

from pipeline.errors import RedisUnavailable
from pipeline.gpu.node.inventory import usable_cores
from pipeline.ledger.store import LedgerStore
from pipeline.logs import logger
from pipeline.messages.routing import QUEUE_INGEST
from pipeline.messages.submit import Submit
from pipeline.settings import Settings
from pipeline.workers.stack.child import Child, restart_dead
from pipeline.workers.stack.restarts import Crashes

# With more, the one process that merges and watches is the bound.
MOST: Final = 4
LOOK_S: Final = 0.5
# Small passes begin once a second (messages/pace.py), so a younger batch may wait for its pass alone.
LATE_S: Final = 1.5
LATE_LOOKS: Final = 2  # in a row: a batch that is given back is as old as when it was accepted
IDLE_CORES: Final = 0.2
START_S: Final = 4.0  # a new process needs so long before it shows what it does
CALM_S: Final = 60.0


def idle_s() -> float:
    """Seconds that the cores of this machine were idle, all together, since it was started."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


class OldestBatch:
    """How long the next batch of stage ingest has waited."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self._submit = Submit(None, client, settings)
        self._store = LedgerStore(client, settings)

    def waits_s(self) -> float | None:
        """Since its acceptance; 0 where none waits, None where Redis does not tell."""
        try:
            ids = [
                batch_id
                for backfill in (False, True)
                for batch_id in self._submit.next_ids(QUEUE_INGEST, 1, backfill=backfill)
            ]
            accepted = [int(at) for at in self._store.field_of_each(ids, "accepted_ms") if at is not None]
            return (self._store.now_ms() - min(accepted)) / 1000 if accepted else 0.0
        except (RedisUnavailable, redis.RedisError):
            return None


@dataclass(slots=True)
class IngestNeed:
    """Decides from looks whether there should be one process more or less."""

    clock: Callable[[], float] = time.monotonic
    late: int = 0  # looks in a row
    started_at: float = float("-inf")
    calm_since: float = field(init=False)

    def __post_init__(self) -> None:
        self.calm_since = self.clock()

    def look(self, waits_s: float, idle_cores: float, *, extra: int, most: int) -> int:
        """1: start one, -1: end one, 0: neither. `extra`: those that run beside the first."""
        now = self.clock()
        self.late = self.late + 1 if waits_s >= LATE_S else 0
        if waits_s >= LOOK_S:
            self.calm_since = now
        if extra < most and self.late >= LATE_LOOKS and idle_cores >= IDLE_CORES:
            if now - self.started_at < START_S:
                return 0
            self.started_at = now
            return 1
        if extra and now - self.calm_since >= CALM_S:
            self.calm_since = now  # the next one goes as much later
            return -1
        return 0


class MoreIngest:
    """The processes of one stack beside its first."""

    def __init__(
        self,
        oldest: OldestBatch,
        spawn: Callable[[str], Child[Crashes]],
        start_again: "Callable[[Child[Crashes]], subprocess.Popen[bytes]]",
        *,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        idle: Callable[[], float] = idle_s,
    ) -> None:
        """`spawn` starts the process of a name, `start_again` one that has died. `most`: in all, with the
        first; None: one for each core."""
        self.children: list[Child[Crashes]] = []
        self._oldest, self._spawn, self._clock, self._idle = oldest, spawn, clock, idle
        self._start_again = start_again
        self._most = max(1, min(MOST, usable_cores()) if most is None else most) - 1
        self._need = IngestNeed(clock)
        self._ending: list[Child[Crashes]] = []
        self._looked_at, self._idle_then = clock(), idle()

    @property
    def ending(self) -> "list[subprocess.Popen[bytes]]":
        """Processes that finish their step."""
        return [child.process for child in self._ending]

    def check(self) -> bool:
        """Starts or ends one where that is due; starts a dead one again. True if anything changed."""
        self._ending = [child for child in self._ending if child.process.poll() is None]
        dead = restart_dead(self.children, self._start_again)
        if any(child not in self.children for child in dead):
            self._most = 0
        changed = bool(dead)
        now = self._clock()
        if now - self._looked_at < LOOK_S or not (self._most or self.children):
            return changed
        idle = self._idle()
        idle_cores = (idle - self._idle_then) / (now - self._looked_at)
        self._looked_at, self._idle_then = now, idle
        waits_s = self._oldest.waits_s()
        if waits_s is None:
            return changed
        change = self._need.look(waits_s, idle_cores, extra=len(self.children), most=self._most)
        if change > 0:
            self._start(waits_s)
        elif change < 0:
            self._end()
        return changed or change != 0

    def _start(self, waits_s: float) -> None:
        used = {child.name for child in (*self.children, *self._ending)}
        name = next(name for n in count(2) if (name := f"ingest-{n}") not in used)
        logger(worker=name).info("ingest.more", waits_s=round(waits_s, 1))
        try:
            self.children.append(self._spawn(name))
        except OSError as exc:
            logger(worker=name).error("worker.given_up", why=str(exc))
            self._most = 0

    def _end(self) -> None:
        """The newest, after its step."""
        child = self.children.pop()
        logger(worker=child.name).info("ingest.fewer")
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGTERM)
        self._ending.append(child)
