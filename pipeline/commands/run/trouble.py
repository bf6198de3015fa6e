"""Why the work of a run waits, and when waiting has no use any more."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import redis

from pipeline.errors import SinkUnavailable
from pipeline.observe.presence import Presence
from pipeline.redis.keys import Keys

# Redis tries a failed write to its disk again every second: this is after two more tries.
CERTAIN_S: Final = 2.5


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
