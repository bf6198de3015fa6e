"""Dead letters: batches that could not be processed, kept with their reason until an operator acts."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pipeline.errors import BadPayload, TooNew
from pipeline.ledger.store import LedgerStore, text
from pipeline.records.delivery import KEEP_DONE_S, DeadLetter, Meta
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.redis.connection import text_map

if TYPE_CHECKING:
    import polars as pl


class DeadLetters:
    """Lists, retries and discards dead letters. `payload` reads the records of a batch."""

    def __init__(self, store: LedgerStore, payload: Callable[[str], "pl.DataFrame | Pushed"]) -> None:
        self.store = store
        self.payload = payload
        self.client, self.keys = store.client, store.keys

    def newest(self, limit: int = 1_000) -> list[DeadLetter]:
        """Dead letters, the newest first."""
        ids = self.store.ask(self.client.zrevrange, self.keys.dead, 0, limit - 1)
        letters = (self.find(text(batch_id)) for batch_id in ids)
        return [letter for letter in letters if letter is not None]

    def find(self, batch_id: str) -> DeadLetter | None:
        """The dead letter of this id, or None."""
        entry = text_map(self.store.ask(self.client.hgetall, self.keys.batch(batch_id)))
        if entry.get("state") != "dead":
            return None
        try:
            records = self.payload(batch_id)
            if isinstance(records, PushedLines | PushedRecords):
                places = records.places if isinstance(records, PushedRecords) else None
                first_line = min(places or (1,))
            else:
                first_line = int(records["line"].min() or 0)  # type: ignore[arg-type]
        except (BadPayload, TooNew):
            first_line = 0
        try:
            source = Meta.load(entry.get("meta", "")).source
        except (BadPayload, TooNew):
            source = "?"
        return DeadLetter(
            batch_id=batch_id,
            workload=entry["workload"],
            source=source,
            first_line=first_line,
            lines=int(entry["lines"]),
            died_in=entry.get("died_in", ""),
            reason=entry.get("error", ""),
            died=datetime.fromtimestamp(int(entry["dead_ms"]) / 1000, UTC),
        )

    def retry(self, batch_id: str) -> bool:
        """Puts a dead letter back to work; False when there is none of this id."""
        k = self.keys
        keys = [k.batch(batch_id), k.due, k.counts, k.totals(self._workload(batch_id)), k.dead]
        args = [batch_id, self.store.settings.internal.overdue_ms]
        return bool(self.store.scripts.run("ledger/retry", keys, args))

    def discard(self, batch_id: str) -> bool:
        """Deletes a dead letter; its lines count as discarded. False when there is none of this id."""
        k = self.keys
        keys = [k.batch(batch_id), k.payload(batch_id), k.totals(self._workload(batch_id)), k.dead, k.counts]
        return bool(self.store.scripts.run("ledger/discard", keys, [batch_id, KEEP_DONE_S]))

    def _workload(self, batch_id: str) -> str:
        return text(self.store.ask(self.client.hget, self.keys.batch(batch_id), "workload") or b"")
