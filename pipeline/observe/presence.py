"""Which stack and which worker processes are alive, and why work waits: small facts that status and routing
read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis

from pipeline.redis.connection import answering, now_ms, text_map
from pipeline.redis.keys import TROUBLE_TTL_S, WORKER_TTL_S, Keys
from pipeline.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The work in a heartbeat: `quiet_s` since a message was taken or the loop came round, whether
    something is in hand, and for how long work has waited that is not taken."""

    quiet_s: float
    busy: bool
    stalled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker process, as of its last heartbeat (`beat_ms`, Redis time). `engine`: the container engine
    for jobs, of a node that takes them and has one."""

    name: str
    role: str
    pid: int
    queues: tuple[str, ...]
    beat_ms: int
    progress: Pace | None = None
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The version of each model that a worker answers under, and since when (Redis time)."""

    versions: Mapping[str, str]
    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that heals by itself or by an operator, and keeps batches waiting meanwhile."""

    stage: str
    reason: str


class Presence:
    """Heartbeats and troubles. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)

    def beat(
        self,
        *,
        name: str,
        role: str,
        pid: int,
        queues: Sequence[str],
        progress: Pace | None = None,
        engine: str = "",
    ) -> None:
        """Say that a worker is alive, and how far it has come."""
        view = WorkerView(
            name=name,
            role=role,
            pid=pid,
            queues=tuple(queues),
            beat_ms=now_ms(self.client),
            progress=progress,
            engine=engine,
        )
        with answering():
            self.client.hset(self.keys.workers, name, json.dumps(asdict(view)))

    def leave(self, name: str) -> None:
        """Say that a worker ends."""
        with answering():
            self.client.hdel(self.keys.workers, name)
            self.client.hdel(self.keys.serving, name)

    def serves(self, name: str, versions: Mapping[str, str]) -> None:
        """Say which version of each model a worker answers under from now on; without any, its last report
        goes."""
        if not versions:
            with answering():
                self.client.hdel(self.keys.serving, name)
            return
        entry = Served(versions=dict(versions), since_ms=now_ms(self.client))
        with answering():
            self.client.hset(self.keys.serving, name, json.dumps(asdict(entry)))

    def serving(self) -> dict[str, Served]:
        """The last report of each worker; a worker without a model reports nothing."""
        with answering():
            raw = text_map(self.client.hgetall(self.keys.serving))
        found = {}
        for name, text in raw.items():
            data = json.loads(text)
            found[name] = Served(versions=dict(data["versions"]), since_ms=int(data["since_ms"]))
        return found

    def live(self) -> list[WorkerView]:
        """Workers that were heard within WORKER_TTL_S."""
        return [w for w, silent_s in self.heard() if silent_s < WORKER_TTL_S]

    def heard(self) -> list[tuple[WorkerView, float]]:
        """Every worker that is not forgotten yet, and for how many seconds it has been silent."""
        now = now_ms(self.client)
        return [(w, (now - w.beat_ms) / 1000) for w in self._all()]

    def drop_silent(self) -> None:
        """Forget workers that were not heard for ten times WORKER_TTL_S."""
        now = now_ms(self.client)
        reported = set()
        for worker in self._all():
            if now - worker.beat_ms > WORKER_TTL_S * 10_000:
                self.leave(worker.name)
            else:
                reported.add(worker.name)
        for name, served in self.serving().items():  # one may speak once more while its worker ends
            if name not in reported and now - served.since_ms > WORKER_TTL_S * 10_000:
                self.leave(name)

    def complain(self, stage: str, reason: str) -> None:
        """Record why a batch had to wait; it is forgotten when nothing repeats it."""
        with answering():
            self.client.set(
                self.keys.trouble, json.dumps({"stage": stage, "reason": reason[:500]}), ex=TROUBLE_TTL_S
            )

    def trouble(self) -> Trouble | None:
        """The newest complaint, None when all is well."""
        with answering():
            raw = self.client.get(self.keys.trouble)
        if raw is None:
            return None
        data = json.loads(raw)
        return Trouble(stage=data["stage"], reason=data["reason"])

    def _all(self) -> list[WorkerView]:
        with answering():
            entries = self.client.hvals(self.keys.workers)
        return sorted(map(_view, entries), key=lambda w: w.name)


def _view(raw: str | bytes) -> WorkerView:
    data = json.loads(raw)
    # By name: a worker of a newer build may say more about itself.
    return WorkerView(
        name=data["name"],
        role=data["role"],
        pid=data["pid"],
        queues=tuple(data["queues"]),
        beat_ms=data["beat_ms"],
        progress=_pace(data.get("progress")),
        engine=data.get("engine", ""),
    )


def _pace(data: Mapping[str, Any] | None) -> Pace | None:
    if data is None:
        return None
    return Pace(quiet_s=data["quiet_s"], busy=data["busy"], stalled_s=data["stalled_s"])
