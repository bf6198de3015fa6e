"""Why the work of a run waits, and when waiting has no use any more."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import redis

from pipeline.errors import SinkUnavailable, StackFailed
from pipeline.observe.presence import Presence
from pipeline.redis.keys import Keys

# Redis tries a failed write to its disk again every second: this is after two more tries.
CERTAIN_S: Final = 2.5
# A wait without progress gives up after this time. Longer than a step may take (tasks/step.py).
STUCK_S: Final = 150.0
# Shorter when the reason is known (a full disk). Longer than a lease takes to expire.
TROUBLE_S: Final = 25.0


class Troubles:
    """Asks Redis and the workers what is wrong. A Redis that takes no writes keeps workers from saying so."""

    def __init__(
        self,
        client: "redis.Redis",
        presence: Presence,
        keys: Keys,
        data_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._presence = presence
        self._probe = keys.probe
        self._data_dir = data_dir
        self._clock = clock
        self._refused_since: float | None = None

    def look(self) -> str:
        """The reason for waiting, "" when none is known.

        Raises SinkUnavailable when Redis could not write to its disk for CERTAIN_S, RedisUnavailable when it
        does not answer."""
        trouble = self._presence.trouble()
        return self.refusal() or ("" if trouble is None else trouble.reason)

    def refusal(self) -> str:
        """Why Redis takes no writes, "" when it does or is away. Raises SinkUnavailable as `look` does."""
        try:
            self._client.set(self._probe, "1", ex=5)
        except redis.ResponseError as exc:
            why = f"Redis takes no writes ({exc}); free disk space at {self._data_dir}, or give it memory"
            if "MISCONF" not in str(exc):  # memory: it comes back when batches are stored
                self._refused_since = None
                return why
            now = self._clock()
            self._refused_since = now if self._refused_since is None else self._refused_since
            if now - self._refused_since > CERTAIN_S:
                raise SinkUnavailable(why) from exc
            return why
        except redis.RedisError:
            pass  # it is being started again
        self._refused_since = None
        return ""


class StandstillLimit:
    """A wait of a run for its workers, which ends with an error once they stand still for too long.

    `what` waits, as the subject and verb of a sentence. `reason`: why, "" when it is not known. `logs`: where
    workers say more."""

    def __init__(
        self,
        what: str,
        reason: Callable[[], str],
        *,
        logs: Path,
        limit_s: float = STUCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._reason = reason
        self._logs = logs
        self._limit_s = limit_s
        self._clock = clock
        self._state: object = None
        self._moved = clock()

    def look(self, state: object) -> str:
        """The reason for waiting, "" when none is known; `state` changes whenever the workers get on.

        Raises SinkUnavailable after TROUBLE_S with a known reason at one state, StackFailed after `limit_s`
        without one, and what `reason` raises."""
        if state != self._state:
            self._state, self._moved = state, self._clock()
        still = self._clock() - self._moved
        reason = self._reason()
        if reason and still > TROUBLE_S:
            raise SinkUnavailable(f"{self._what}: {reason}")
        if still > self._limit_s:
            raise StackFailed(
                f"{self._what} and nothing moved for {self._limit_s:.0f} s; the logs in {self._logs} say why"
            )
        return reason
