"""Claims that are renewed while their holder works, by one thread however many they are.

Not for ever: a step that never ends loses them. A holder that ignores what is said here does no harm, since every
move of a batch compares its claim again.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

from pipeline.errors import RedisUnavailable
from pipeline.ledger.batches import Claim


class Holding:
    """The claims of one step. Safe for threads: the holder adds and drops, the thread renews."""

    def __init__(
        self,
        claims: Iterable[Claim],
        renew: Callable[[Sequence[Claim]], Sequence[bool]],
        *,
        pause_s: float,
        at_most_s: float,
        late: Callable[[list[Claim]], None],
    ) -> None:
        """`renew` says of each claim whether it is still ours; `late` gets those in hand after `at_most_s` of work.

        Time in which Redis did not answer, or this process was stopped, is not counted.
        """
        self._claims = {claim.batch_id: claim for claim in claims}
        self._lost: set[str] = set()
        self._renew, self._late = renew, late
        self._pause_s, self._left_s = pause_s, at_most_s
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, claim: Claim) -> None:
        """Renew this one too from now on."""
        with self._lock:
            self._claims[claim.batch_id] = claim

    def drop(self, claim: Claim) -> None:
        """This one is handed on, or given back."""
        with self._lock:
            self._claims.pop(claim.batch_id, None)

    def ours(self, claim: Claim) -> bool:
        """Whether the claim was still ours at the last renewal."""
        return claim.batch_id not in self._lost

    def claims(self) -> list[Claim]:
        """Those in hand, the first one first."""
        with self._lock:
            return list(self._claims.values())

    def start(self) -> None:
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew nothing any more. No renewal is under way afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        while self._left_s > 0:
            waits = min(self._pause_s, self._left_s)
            if self._stop.wait(waits):
                return
            self._left_s -= waits
            ours = [claim for claim in self.claims() if claim.batch_id not in self._lost]
            try:
                held = self._renew(ours) if ours else ()
            except RedisUnavailable:
                self._left_s += waits  # the deadline decides whose they are; Redis may be back before it
                continue
            self._lost |= {claim.batch_id for claim, still in zip(ours, held, strict=True) if not still}
        if not self._stop.is_set() and (late := self.claims()):
            self._late(late)
