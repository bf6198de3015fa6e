"""The batches of one `logweir send --wait`: the open ones, counts of the lines that were not stored, and
whether the watcher has looked at the stored ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.ledger.ledger import Ledger
from pipeline.observe.presence import Presence
from pipeline.records.delivery import half_ids
from pipeline.redis.connection import answering
from pipeline.units import plural

LOOK_AT_ONCE: Final = 1_000  # entries in one round trip; some 100 KB of answers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A batch in the ledger; `state` is "" when the ledger does not know the id."""

    state: str
    rescored: bool
    discarded: bool
    lines: int


class BatchTracking:
    """The open batches of this command, and counts of those that were not stored."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.open: list[str] = []
        self.dead = self.discarded = 0  # physical lines
        self._goal: int | None = None  # observations that the watcher takes before it has seen all of these
        self.lost = 0  # batches: how many lines they had is lost with them

    def look(self) -> bool:
        """Asks for every open batch once; True when none is open. After RedisUnavailable no batch is lost."""
        at = 0
        while at < len(self.open):
            part = self.open[at : at + LOOK_AT_ONCE]
            found = self._entries(part)
            remaining = [
                i
                for batch_id, entry in zip(part, found, strict=True)
                for i in self._successors(batch_id, entry)
            ]
            self.open[at : at + len(part)] = remaining
            at += len(remaining)
        return not self.open

    def _entries(self, batch_ids: Sequence[str]) -> list[_Entry]:
        ledger = self.ledger
        with answering():
            pipe = ledger.client.pipeline(transaction=False)
            for batch_id in batch_ids:
                pipe.hmget(ledger.keys.batch(batch_id), "state", "kind", "discarded", "lines")
            found = [[(value or b"").decode() for value in values] for values in pipe.execute()]
        return [
            _Entry(state=state, rescored=kind == "rescore", discarded=bool(discarded), lines=int(lines or 0))
            for state, kind, discarded, lines in found
        ]

    def _successors(self, batch_id: str, entry: _Entry) -> list[str]:
        """The batches to wait for instead of this one."""
        match entry.state:
            case "split":
                return half_ids(batch_id)
            case "":
                self.lost += 1
            case _ if entry.discarded:
                self.discarded += entry.lines
            case _ if entry.state == "done" or entry.rescored:  # a rescored batch was stored before
                pass
            case "dead":
                self.dead += entry.lines
            case _:
                return [batch_id]
        return []

    def waits(self) -> str:
        """That batches are not stored yet, and why, where somebody knows. Raises RedisUnavailable."""
        number = len(self.open)
        trouble = Presence(self.ledger.client, self.ledger.settings).trouble()
        why = f": {trouble.reason}" if trouble else ""
        return f"{plural(number, 'batch')} {'is' if number == 1 else 'are'} not stored yet{why}"

    def unwatched(self) -> int:
        """Stored batches that the watcher has not looked at yet, of those that were stored at the first call.

        Raises RedisUnavailable."""
        observed, waiting = self.ledger.backlog.observed()
        if self._goal is None:
            self._goal = observed + waiting
        # A Redis that lost its last moments counts anew, but what waits is what waits.
        return min(max(0, self._goal - observed), waiting)

    def unstored(self) -> str:
        """A sentence about lines that were not stored; "" when all were."""
        parts = []
        if self.dead:
            them = "it" if self.dead == 1 else "them"
            lines = plural(self.dead, "line")
            parts.append(f"{lines} could not be processed; `logweir dead list` shows {them} and why")
        if self.discarded:
            parts.append(f"{plural(self.discarded, 'line')} discarded by an operator")
        if self.lost:
            parts.append(f"{plural(self.lost, 'batch')} not in Redis any more; send the same files again")
        return "; ".join(parts)
