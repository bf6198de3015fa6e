"""Which stack and which worker processes are alive, and why work waits: small facts that status and routing read."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import redis

from pipeline.errors import BadInput
from pipeline.logs import logger
from pipeline.redis.keys import TROUBLE_TTL_S, WORKER_TTL_S, Keys, answering, text_map
from pipeline.settings import Settings


def state_file(data_dir: Path) -> Path:
    """Where the embedded stack of a data directory says how it is reached."""
    return data_dir / "stack.json"


def running(data_dir: Path) -> dict[str, object] | None:
    """What the stack of this data directory wrote about itself, None when none runs."""
    try:
        state: dict[str, object] = json.loads(state_file(data_dir).read_text(encoding="utf-8"))
        os.kill(int(str(state["pid"])), 0)
    except (OSError, ValueError, KeyError):
        return None
    return state


def _hidden(data_dir: Path) -> bool:
    """Whether a stack says something there that is not for this user."""
    try:
        state_file(data_dir).read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def attached(settings: Settings) -> Settings:
    """Settings that reach the stack of the data directory, or the Redis of REDIS_URL. Raises BadInput when there is none.

    What all processes must have alike (settings.ALIKE) is the stack's, whatever was set here: a quota that
    one planner does not know is none, nor is a bound that one sender does not keep. With REDIS_URL there is nobody to ask; it has to be set alike everywhere.
    """
    if settings.redis_url is not None:
        return settings
    state = running(settings.data_dir)
    if state is None and _hidden(settings.data_dir):
        raise BadInput(
            f"{state_file(settings.data_dir)} cannot be read: the stack there is another user's; work as that user, or set REDIS_URL"
        )
    if state is None:
        raise BadInput(
            f"no logweir stack runs on {settings.data_dir}; start it with `logweir up`, or set REDIS_URL or --data-dir"
        )
    return replace(
        _under(state.get("policy"), settings),
        data_dir=settings.data_dir.absolute(),
        redis_url=str(state["redis_url"]),
        key_prefix=str(state["key_prefix"]),
    )


def _under(policy: object, settings: Settings) -> Settings:
    """The stack's policy; as it was where an older stack did not write any."""
    if not isinstance(policy, dict):
        return settings
    found, plain = settings.under(policy), Settings()
    for name, value in settings.policy().items():
        if value not in (getattr(plain, name), getattr(found, name)):
            logger(setting=name).warning(
                "setting.of_the_stack",
                why=f"{name} of the running stack counts; to change it, restart `logweir up` with it",
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a heartbeat tells of the work: `quiet_s` since a message was taken or the loop came round, whether something
    is in hand, and for how long work has waited that is not taken."""

    quiet_s: float
    busy: bool
    stalled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker process, as of its last heartbeat (`beat_ms`, Redis time)."""

    name: str
    role: str
    pid: int
    queues: tuple[str, ...]
    beat_ms: int
    progress: Pace | None = None


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
        self.keys = Keys(settings.key_prefix)

    def beat(
        self, *, name: str, role: str, pid: int, queues: Sequence[str], progress: Pace | None = None
    ) -> None:
        """Say that a worker is alive, and how far it has come."""
        view = WorkerView(
            name=name,
            role=role,
            pid=pid,
            queues=tuple(queues),
            beat_ms=self._now_ms(),
            progress=progress,
        )
        with answering():
            self.client.hset(self.keys.workers, name, json.dumps(asdict(view)))

    def leave(self, name: str) -> None:
        """Say that a worker ends."""
        with answering():
            self.client.hdel(self.keys.workers, name)
            self.client.hdel(self.keys.serving, name)

    def serves(self, name: str, versions: Mapping[str, str]) -> None:
        """Say which version of each model a worker answers under from now on."""
        entry = Served(versions=dict(versions), since_ms=self._now_ms())
        with answering():
            self.client.hset(self.keys.serving, name, json.dumps(asdict(entry)))

    def serving(self) -> dict[str, Served]:
        """What each worker said last; a worker that uses no model says nothing."""
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
        now = self._now_ms()
        return [(w, (now - w.beat_ms) / 1000) for w in self._all()]

    def drop_silent(self) -> None:
        """Forget workers that were not heard for ten times WORKER_TTL_S."""
        now = self._now_ms()
        known = set()
        for worker in self._all():
            if now - worker.beat_ms > WORKER_TTL_S * 10_000:
                self.leave(worker.name)
            else:
                known.add(worker.name)
        for name, served in self.serving().items():  # one may speak once more while its worker ends
            if name not in known and now - served.since_ms > WORKER_TTL_S * 10_000:
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

    def _now_ms(self) -> int:
        with answering():
            seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000


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
    )


def _pace(data: Mapping[str, Any] | None) -> Pace | None:
    if data is None:
        return None
    return Pace(quiet_s=data["quiet_s"], busy=data["busy"], stalled_s=data["stalled_s"])
