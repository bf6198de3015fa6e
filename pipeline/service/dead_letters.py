"""Batches that could not be processed: listed, shown with their records, retried, discarded."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal

import redis

from pipeline.errors import BadPayload, NotFound, TooNew
from pipeline.ledger.ledger import Ledger
from pipeline.records.delivery import DeadLetter
from pipeline.redis.connection import answering
from pipeline.service.access.audit import record_change
from pipeline.service.cursors import cursor_position, cursor_text
from pipeline.service.values import BatchesChanged, DeadBatch, DeadLetterPage
from pipeline.settings import Settings
from pipeline.sources.pushed import framed

SHOWN: Final = 100  # records of a dead batch


def read_dead_letters(
    client: "redis.Redis", settings: Settings, *, limit: int | None, cursor: str | None = None
) -> DeadLetterPage:
    """The newest first; `limit` None: all. Raises RedisUnavailable, BadInput."""
    ledger = Ledger(client, settings)
    with answering():
        total = int(client.zcard(ledger.keys.dead))
        start = 0
        if cursor is not None:
            behind_ms, behind = cursor_position(cursor, tuple[float, str], "dead")
            # Batches that died meanwhile come before it, and it may be gone.
            start = int(client.zcount(ledger.keys.dead, f"({behind_ms}", "+inf"))
            same: Any = client.zrevrangebyscore(ledger.keys.dead, behind_ms, behind_ms)
            start += sum(name.decode() >= behind for name in same)
        size = max(1, total) if limit is None else limit
        names: Any = client.zrevrange(ledger.keys.dead, start, start + size - 1, withscores=True)
    letters = [ledger.dead_letters.find(name.decode()) for name, _ in names]
    following = None
    if names and start + size < total:
        following = cursor_text([names[-1][1], names[-1][0].decode()], "dead")
    return DeadLetterPage(
        batches=[letter for letter in letters if letter is not None], total=total, next=following
    )


def read_dead_batch(client: "redis.Redis", settings: Settings, batch_id: str) -> DeadBatch:
    """One with its first records. Raises BadInput, RedisUnavailable."""
    ledger = Ledger(client, settings)
    (letter,) = chosen_letters(ledger, [batch_id])
    unreadable = None
    records: list[str] = []
    try:
        records = framed(ledger.payload(letter.batch_id))[0]["raw"].head(SHOWN).to_list()
    except (BadPayload, TooNew) as exc:
        unreadable = str(exc)
    return DeadBatch(**asdict(letter), records=records, unreadable=unreadable)


def change_dead_letters(
    client: "redis.Redis",
    settings: Settings,
    batch_ids: Sequence[str],
    action: Literal["retry", "discard"],
    *,
    by: str,
) -> BatchesChanged:
    """Sends batches through the pipeline again, or deletes them. Raises BadInput before anything is done when
    one of them is no dead letter, RedisUnavailable."""
    ledger = Ledger(client, settings)
    act: Callable[[str], bool] = getattr(ledger.dead_letters, action)
    # Another operator may be quicker with a batch.
    changed = [letter.batch_id for letter in chosen_letters(ledger, batch_ids) if act(letter.batch_id)]
    for batch_id in changed[:SHOWN]:
        record_change(client, settings, by=by, action=f"dead_letter.{action}", target=batch_id)
    if len(changed) > SHOWN:
        more = f"{len(changed) - SHOWN} more batches"
        record_change(client, settings, by=by, action=f"dead_letter.{action}", target=more)
    return BatchesChanged(batches=changed, action=action)


def chosen_letters(ledger: Ledger, batch_ids: Sequence[str]) -> list[DeadLetter]:
    """The dead letters of these ids, or those of this moment for "all". Raises BadInput."""
    if list(batch_ids) == ["all"]:
        # The letters of this moment, so that a retried batch that dies again is not taken twice.
        return ledger.dead_letters.newest(limit=max(1, int(ledger.client.zcard(ledger.keys.dead))))
    found = {batch_id: ledger.dead_letters.find(batch_id) for batch_id in batch_ids}
    unknown = [batch_id for batch_id, letter in found.items() if letter is None]
    if unknown:
        undone = "" if len(found) == 1 else ", so nothing was done"
        raise NotFound(f"there is no dead batch {unknown[0][:80]!r}{undone}; `logweir dead list` shows them")
    return [letter for letter in found.values() if letter is not None]
