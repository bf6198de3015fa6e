"""Renewal of claims while their holder works, in one thread for any number of claims.

Renewal ends after a limit, so a step that hangs loses its claims. A holder that ignores a lost claim does no
harm, because every move of a batch compares its claim again."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pipeline.errors import RedisUnavailable
from pipeline.records.delivery import Claim
from pipeline.upkeep import FaultSeries, start_thread

_SOONER: Final = 0.25  # of the pause between renewals


class ClaimRenewal:
    """The claims of one step. Thread-safe: the holder adds and drops claims, the thread renews them."""

    def __init__(
        self,
        claims: Iterable[Claim],
        renew: Callable[[Sequence[Claim]], Sequence[bool]],
        *,
        pause_s: float,
        limit_s: float,
        on_timeout: Callable[[list[Claim]], None],
    ) -> None:
        """`renew` answers for each claim whether it is still ours; `on_timeout` gets the claims after
        `limit_s` of work.

        Time in which Redis did not answer, or this process was stopped, does not count.
        """
        self._claims = {claim.batch_id: claim for claim in claims}
        self._since = dict.fromkeys(self._claims, time.monotonic())
        self._lost: set[str] = set()
        self._renew, self._on_timeout = renew, on_timeout
        self._pause_s, self._left_s = pause_s, limit_s
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, claim: Claim) -> None:
        """Renews this claim too from now on."""
        with self._lock:
            self._claims[claim.batch_id] = claim
            self._since[claim.batch_id] = time.monotonic()

    def drop(self, claim: Claim) -> None:
        """Forgets a claim whose batch was handed on or released."""
        with self._lock:
            self._claims.pop(claim.batch_id, None)

    def held_s(self, claim: Claim) -> float:
        """How long the claim has been here, in seconds."""
        return time.monotonic() - self._since[claim.batch_id]

    def owns(self, claim: Claim) -> bool:
        """True when the claim was ours at the last renewal."""
        return claim.batch_id not in self._lost

    def claims(self) -> list[Claim]:
        """The current claims in the order they were added."""
        with self._lock:
            return list(self._claims.values())

    def start(self) -> None:
        self._thread = start_thread("claims", self._beat)

    def stop(self) -> None:
        """Ends renewal; no renewal is under way afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        faults = FaultSeries("claims.not_renewed", RedisUnavailable)
        while self._left_s > 0:
            # Redis may be back just before the claims expire, so failures are tried again sooner.
            wait_s = min(self._pause_s * (_SOONER if faults.failing else 1), self._left_s)
            if self._stop.wait(wait_s):
                return
            self._left_s -= wait_s
            claims = [claim for claim in self.claims() if claim.batch_id not in self._lost]
            with faults.outlived():
                try:
                    answers = self._renew(claims) if claims else ()
                except RedisUnavailable:
                    self._left_s += wait_s
                    raise
                self._lost |= {
                    claim.batch_id for claim, still in zip(claims, answers, strict=True) if not still
                }
        if not self._stop.is_set() and (claims := self.claims()):
            self._on_timeout(claims)
