"""When the oldest batch of each lane was accepted, however many wait and whenever the sweep looks."""

import redis
from ledger.test_ledger import batch, take

from pipeline.ledger.in_flight import BACKFILL, FRESH, OldestInFlight
from pipeline.ledger.ledger import Ledger
from pipeline.records.delivery import Stage

MINUTE_MS = 60_000


def in_flight(ledger: Ledger) -> OldestInFlight:
    return OldestInFlight(ledger.client, ledger.keys)


def accepted_ms(ledger: Ledger, batch_id: str) -> int:
    return int(ledger.client.hget(ledger.keys.batch(batch_id), "accepted_ms") or 0)


def test_nothing_in_flight_has_no_oldest(ledger: Ledger) -> None:
    assert in_flight(ledger).oldest() == {}


def test_the_oldest_is_seen_behind_thousands_that_the_sweep_looks_at_earlier(ledger: Ledger) -> None:
    ledger.intake.accept(batch("old"))
    pipe = ledger.client.pipeline(transaction=False)
    now = accepted_ms(ledger, "old")
    for number in range(5_000):  # as accepted a minute later
        name = f"b{number}"
        pipe.hset(ledger.keys.batch(name), mapping={"state": "ingest", "accepted_ms": now + MINUTE_MS})
        pipe.zadd(ledger.keys.due, {name: now})
        pipe.zadd(ledger.keys.in_flight, {name: now + MINUTE_MS})
    pipe.execute()
    take(ledger, "old")
    ledger.backlog.postpone(["old"])
    assert in_flight(ledger).oldest() == {FRESH: now}


def test_each_lane_has_its_own_and_what_ended_is_in_none(ledger: Ledger) -> None:
    ledger.intake.accept(batch("a"))
    ledger.intake.accept(batch("b"), backfill=True)
    assert in_flight(ledger).oldest() == {FRESH: accepted_ms(ledger, "a"), BACKFILL: accepted_ms(ledger, "b")}
    ledger.commit(take(ledger, "a"), warming=False, outcomes={})
    ledger.dead_letter(take(ledger, "b"), "damaged")
    assert in_flight(ledger).oldest() == {}
    ledger.dead_letters.retry("b")
    assert in_flight(ledger).oldest() == {BACKFILL: accepted_ms(ledger, "b")}, "as old as it is"


def test_batches_of_a_build_that_knew_due_alone_are_found_and_those_it_ended_are_not(
    ledger: Ledger, client: "redis.Redis"
) -> None:
    for name in ("a", "b", "c"):
        ledger.intake.accept(batch(name))
        client.hincrby(ledger.keys.batch(name), "accepted_ms", -MINUTE_MS)
    client.delete(ledger.keys.in_flight)
    look = in_flight(ledger)
    assert look.oldest() == {FRESH: accepted_ms(ledger, "a")}
    assert client.zcard(ledger.keys.in_flight) == 3
    # The earlier build ends one and takes another one in: the numbers are equal again.
    client.zrem(ledger.keys.due, "a")
    client.zadd(ledger.keys.due, {"d": 1})
    client.hset(ledger.keys.batch("d"), mapping={"state": "ingest", "accepted_ms": 7, "kind": "fresh"})
    assert look.oldest() == {FRESH: 7}
    assert client.zscore(ledger.keys.in_flight, "a") is None


def test_a_batch_that_due_holds_and_nobody_knows_does_not_hold_time_up(ledger: Ledger) -> None:
    ledger.intake.accept(batch("a"))
    ledger.client.zadd(ledger.keys.due, {"vanished": 1})
    assert in_flight(ledger).oldest() == {FRESH: accepted_ms(ledger, "a")}
    assert ledger.claim("vanished", Stage.INGEST, "w") == "unknown"
    assert ledger.client.zcard(ledger.keys.due) == ledger.client.zcard(ledger.keys.in_flight) == 1
