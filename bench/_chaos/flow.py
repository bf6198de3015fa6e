"""How soon lines flow again after a fault: the first batch that was accepted after it, and stored.

Two kinds of batch are watched apart: one whose lines are all known is stored by the first worker that takes
it, one with new lines needs every stage."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import redis

from bench._chaos.history import History
from bench._chaos.producers import Sent
from pipeline.redis.keys import Keys

POLL_S: Final = 0.1
AT_ONCE: Final = 400
TIMEOUT_S: Final = 45.0  # the longest time-out of the product, and what follows it


@dataclass(slots=True)
class _Wound:
    n: int
    since: float  # monotonic: when lines could flow again
    open: set[bool] = field(default_factory=lambda: {True, False})  # kinds of batch that were not seen yet


class Flow(threading.Thread):
    """Looks at accepted batches until `end`; notes an operation `flow` per fault and kind of batch."""

    def __init__(self, history: History, client: "redis.Redis", prefix: str, *, alone: bool = False) -> None:
        """`alone`: every fault is over before the next begins, so none waits for what another one needs."""
        super().__init__(name="flow", daemon=True)
        self.history = history
        self.client = client
        self.keys = Keys(prefix)
        self.alone = alone
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._sent: deque[Sent] = deque()
        self._wounds: list[_Wound] = []
        self._until = 0.0  # monotonic

    def accepted(self, sent: Sent) -> None:
        with self._lock:
            self._sent.append(sent)

    def watch(self, n: int) -> None:
        """The fault is done: from now on somebody waits until lines flow."""
        with self._lock:
            self._wounds.append(_Wound(n, time.monotonic()))

    def waits(self) -> None:
        """Somebody was hurt after whom a claim or a lease has to run out: whatever flows meanwhile may wait
        for it."""
        with self._lock:
            self._until = time.monotonic() + TIMEOUT_S

    def open(self) -> int:
        """Faults after which no line has flowed yet."""
        with self._lock:
            return len(self._wounds)

    def run(self) -> None:
        while not self._ending.wait(POLL_S):
            with self._lock:
                sent = list(self._sent)[:AT_ONCE]
            try:
                stored = self._stored(sent)
            except redis.RedisError:
                continue
            self._look(stored)

    def end(self) -> None:
        """What has not flowed by now is noted as such."""
        self._ending.set()
        self.join()
        for wound in self._wounds:
            for known in sorted(wound.open):
                after_s = round(time.monotonic() - wound.since, 3)
                self.history.note("flow", n=wound.n, after_s=after_s, known=known, never=True)

    def _stored(self, sent: list[Sent]) -> set[str]:
        pipe = self.client.pipeline(transaction=False)
        for one in sent:
            pipe.hget(self.keys.batch(one.batch_id), "state")
        return {one.batch_id for one, state in zip(sent, pipe.execute(), strict=True) if state == b"done"}

    def _look(self, stored: set[str]) -> None:
        now = time.monotonic()
        with self._lock:
            done = [one for one in self._sent if one.batch_id in stored]
            self._sent = deque(one for one in self._sent if one.batch_id not in stored)
            for wound in self._wounds:
                for known in {one.known for one in done if one.at >= wound.since} & wound.open:
                    wound.open.discard(known)
                    after_s = round(now - wound.since, 3)
                    beside = not self.alone and wound.since < self._until
                    self.history.note(
                        "flow", n=wound.n, after_s=after_s, known=known, never=False, beside=beside
                    )
            self._wounds = [wound for wound in self._wounds if wound.open]
