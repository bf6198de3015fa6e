"""Dead letters: batches that could not be processed, kept with their reason until an operator acts."""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pipeline.errors import BadPayload, TooNew
from pipeline.ledger.store import LedgerStore, text
from pipeline.records.delivery import KEEP_DONE_S, DeadLetter, Meta
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.redis.connection import text_map
from pipeline.units import listed

if TYPE_CHECKING:
    import polars as pl


class DeadLetters:
    """Lists, retries and discards dead letters."""

    def __init__(self, store: LedgerStore) -> None:
        self.store = store
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
            source = Meta.load(entry.get("meta", "")).source
        except (BadPayload, TooNew):
            source = "?"
        return DeadLetter(
            batch_id=batch_id,
            workload=listed(sorted(json.loads(entry["shares"]))) if "shares" in entry else entry["workload"],
            source=source,
            first_line=int(entry.get("first_line") or 0),
            lines=int(entry["lines"]),
            died_in=entry.get("died_in", ""),
            reason=entry.get("error", ""),
            died=datetime.fromtimestamp(int(entry["dead_ms"]) / 1000, UTC),
        )

    def retry(self, batch_id: str) -> bool:
        """Puts a dead letter back to work; False when there is none of this id."""
        k = self.keys
        shares = self.store.shares(batch_id)
        keys = [k.batch(batch_id), k.due, k.counts, k.dead, k.in_flight, *map(k.totals, shares)]
        args = [batch_id, self.store.settings.internal.overdue_ms, *shares.values()]
        return bool(self.store.scripts.run("ledger/retry", keys, args))

    def discard(self, batch_id: str) -> bool:
        """Deletes a dead letter; its lines count as discarded. False when there is none of this id."""
        k = self.keys
        shares = self.store.shares(batch_id)
        keys = [k.batch(batch_id), k.payload(batch_id), k.counts, k.dead, *map(k.totals, shares)]
        args = [batch_id, KEEP_DONE_S, *shares.values()]
        return bool(self.store.scripts.run("ledger/discard", keys, args))


def first_line(records: "pl.DataFrame | Pushed") -> int:
    """The number of the first line of these records in their source; 0 if there is none."""
    if isinstance(records, PushedRecords):
        return min(records.places or (1,))
    if isinstance(records, PushedLines):
        return 1
    return int(records["line"].min() or 0)  # type: ignore[arg-type]
