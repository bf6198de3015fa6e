"""The life of a batch on a real Redis: taken in once, claimed, moved, stored once, or dead with its
reason."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest
import redis
from polling import wait_until

from pipeline.errors import BadInput, BadPayload, ClaimLost, RedisUnavailable, TooNew
from pipeline.ledger.ledger import Ledger
from pipeline.records.batch import WIRE_VERSION, Batch, Purpose
from pipeline.records.delivery import KEEP_DONE_S, Accepted, Claim, Full, Meta, Stage
from pipeline.records.schema import RAW_SCHEMA, pack_frame, raw_frame
from pipeline.redis.connection import answering
from pipeline.settings import Settings

ARRIVED = datetime(2026, 11, 20, 10, tzinfo=UTC)


def batch(batch_id: str, lines: list[str] | None = None, **changes: Any) -> Batch:
    fresh = Batch(
        batch_id=batch_id,
        workload="shop",
        source="app.log",
        source_key="00112233aabbccdd",
        purpose=Purpose.SCORE,
        arrived=ARRIVED,
        formats=(),
        zone="UTC",
        records=raw_frame(lines if lines is not None else ["one", "two", "three"]),
    )
    return replace(fresh, **changes)


@pytest.fixture
def ledger(client: "redis.Redis", settings: Settings) -> Ledger:
    return Ledger(client, settings)


def take(ledger: Ledger, batch_id: str = "b", stage: Stage = Stage.INGEST) -> Claim:
    claim = ledger.claim(batch_id, stage, "worker")
    assert isinstance(claim, Claim), claim
    return claim


def expire(ledger: Ledger, batch_id: str = "b") -> None:
    """Let the claim's time pass: its deadline, on Redis time, was a moment ago."""
    past = ledger.store.now_ms() - 1
    ledger.client.hset(ledger.keys.batch(batch_id), "deadline", past)
    ledger.client.zadd(ledger.keys.due, {batch_id: past})


def exhaust(ledger: Ledger, batch_id: str = "b") -> Claim:
    """Workers die with the batch until the ledger says that trying again is over."""
    for _ in range(ledger.settings.internal.max_attempts):
        assert not take(ledger, batch_id).exhausted
        expire(ledger, batch_id)
    claim = take(ledger, batch_id)
    assert claim.exhausted
    return claim


def balance(ledger: Ledger, workload: str = "shop") -> dict[str, int]:
    totals = ledger.backlog.totals().get(workload, {})
    return {name: totals.get(name, 0) for name in ("accepted", "stored", "dead", "discarded")}


def entry(ledger: Ledger, batch_id: str = "b") -> dict[str, str]:
    raw: Any = ledger.client.hgetall(ledger.keys.batch(batch_id))
    return {k.decode(): v.decode() for k, v in raw.items()}


# Taking in


def test_an_accepted_batch_gives_back_the_records_it_was_given(ledger: Ledger) -> None:
    given = batch("b", ["a ü", "b\nc", ""])
    assert ledger.intake.accept(given) == Accepted(batch_id="b")
    assert ledger.payload("b").equals(given.records)
    claim = take(ledger)
    assert (claim.lines, claim.records, claim.workload, claim.attempts) == (3, 3, "shop", 1)
    assert (claim.meta.source, claim.meta.source_key) == ("app.log", "00112233aabbccdd")
    assert (claim.meta.purpose, claim.meta.arrived, claim.meta.zone) == (Purpose.SCORE, ARRIVED, "UTC")


def test_the_same_batch_twice_is_taken_once_even_after_it_is_done(ledger: Ledger) -> None:
    again = Accepted(batch_id="b", duplicate=True)
    assert ledger.intake.accept(batch("b")) == Accepted(batch_id="b")
    counts = ledger.backlog.counts()
    assert ledger.intake.accept(batch("b")) == again
    assert ledger.backlog.counts() == counts
    ledger.commit(take(ledger), warming=False, outcomes={})
    assert ledger.intake.accept(batch("b")) == again
    assert balance(ledger) == {"accepted": 3, "stored": 3, "dead": 0, "discarded": 0}
    assert ledger.backlog.counts() == {"batches": 0, "bytes": 0, "stage:ingest": 0}


def structured(level: str) -> pl.DataFrame:
    return raw_frame(["one"]).with_columns(pl.lit(level).alias("level"), pl.lit("one").alias("message"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (batch("b"), batch("b", ["one", "two", "four"])),
        (batch("b"), batch("b", ["one", "two"])),
        (batch("b"), batch("b", records=raw_frame(["one", "two", "three"], first_line=2))),
        (batch("b"), batch("b", workload="other")),
        (batch("b", records=structured("info")), batch("b", records=structured("error"))),
    ],
    ids=["text", "fewer", "place", "workload", "level"],
)
def test_other_content_under_a_known_id_is_refused(ledger: Ledger, first: Batch, second: Batch) -> None:
    ledger.intake.accept(first)
    with pytest.raises(BadInput, match="use a new id"):
        ledger.intake.accept(second)
    assert ledger.backlog.counts()["batches"] == 1


def test_the_cursor_moves_with_its_batch_and_with_a_repetition(ledger: Ledger) -> None:
    assert ledger.intake.cursor("file") is None
    ledger.intake.accept(batch("b"), cursor_key="file", cursor="10")
    assert ledger.intake.cursor("file") == "10"
    ledger.client.hdel(ledger.keys.cursors, "file")  # as after a Redis that lost it
    ledger.intake.accept(batch("b"), cursor_key="file", cursor="10")
    assert ledger.intake.cursor("file") == "10"
    with pytest.raises(BadInput):
        ledger.intake.accept(batch("b", ["other"]), cursor_key="file", cursor="20")
    assert ledger.intake.cursor("file") == "10"


def test_too_many_batches_are_refused_until_one_is_done(client: "redis.Redis", settings: Settings) -> None:
    ledger = Ledger(client, settings.replace(max_pending_batches=2))
    ledger.intake.accept(batch("a"))
    ledger.intake.accept(batch("b"))
    answer = ledger.intake.accept(batch("c"), cursor_key="file", cursor="9")
    assert isinstance(answer, Full)
    assert answer.pending_batches == 2
    assert answer.retry_after_s > 0
    assert ledger.intake.cursor("file") is None
    assert ledger.intake.accept(batch("a")) == Accepted(batch_id="a", duplicate=True), (
        "a repetition needs no room"
    )
    ledger.commit(take(ledger, "a"), warming=False, outcomes={})
    assert ledger.intake.accept(batch("c")) == Accepted(batch_id="c")


def noise(seed: int) -> list[str]:
    """Lines that do not compress: about 700 KiB packed."""
    return [
        f"{(seed * 7919 + i) * 2654435761 % 2**64:x}{(i * 40503 + seed) ** 7 % 2**128:x}"
        for i in range(30_000)
    ]


def test_too_many_bytes_are_refused_but_a_batch_above_the_limit_gets_in_alone(
    client: "redis.Redis", settings: Settings
) -> None:
    ledger = Ledger(client, settings.replace(max_pending_mib=1))
    big = [batch("a", noise(1) + noise(2)), batch("b", noise(3))]
    assert ledger.intake.accept(big[0]) == Accepted(batch_id="a")
    assert ledger.backlog.counts()["bytes"] > 2**20, "the first batch must be above the whole limit"
    answer = ledger.intake.accept(big[1])
    assert isinstance(answer, Full)
    assert answer.pending_bytes == ledger.backlog.counts()["bytes"]
    ledger.commit(take(ledger, "a"), warming=False, outcomes={})
    assert ledger.intake.accept(big[1]) == Accepted(batch_id="b")


def test_a_stack_trace_counts_as_its_physical_lines(ledger: Ledger) -> None:
    frame = raw_frame(["head\n  at x\n  at y", "next"]).with_columns(
        pl.Series("lines", [3, 1], dtype=pl.UInt32)
    )
    ledger.intake.accept(batch("b", records=frame))
    ledger.commit(take(ledger), warming=False, outcomes={"normal": 4})
    assert balance(ledger)["accepted"] == balance(ledger)["stored"] == 4
    assert ledger.backlog.totals()["shop"]["stored_records"] == 2


# Claims


def test_a_batch_has_one_claim_at_a_time(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    take(ledger)
    assert ledger.claim("b", Stage.INGEST, "other") == "held"
    assert ledger.claim("b", Stage.DRAIN, "other") == "elsewhere"
    assert ledger.claim("nobody", Stage.INGEST, "other") == "unknown"


def test_a_finished_batch_is_left_alone(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    ledger.commit(take(ledger), warming=False, outcomes={})
    assert ledger.claim("b", Stage.INGEST, "other") == "finished"


def test_a_silent_claim_expires_by_itself(client: "redis.Redis", settings: Settings) -> None:
    ledger = Ledger(client, settings.replace(claim_ttl_ms=1000))
    ledger.intake.accept(batch("b"))
    first = take(ledger)
    assert ledger.renew(first)
    assert wait_until(lambda: bool(ledger.backlog.overdue()), timeout_s=10)
    assert not ledger.renew(first)
    assert take(ledger).attempts == 2


def test_who_asks_for_a_first_attempt_gets_no_batch_that_has_failed_before(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    claim = ledger.claim("b", Stage.INGEST, "one", first=True)
    assert isinstance(claim, Claim) and claim.attempts == 1
    ledger.release(claim, reason="it waits", delay_s=0, counted=False)
    claim = ledger.claim("b", Stage.INGEST, "one", first=True)
    assert isinstance(claim, Claim) and claim.attempts == 1, "what was not counted was no attempt"
    expire(ledger)
    assert ledger.claim("b", Stage.INGEST, "one", first=True) == "tried"
    assert int(entry(ledger)["attempts"]) == 1
    assert take(ledger).attempts == 2


@pytest.mark.long
def test_holding_renews_those_that_are_added_and_no_more_those_that_are_dropped(
    client: "redis.Redis", settings: Settings
) -> None:
    ledger = Ledger(client, settings.replace(claim_ttl_ms=1000))
    claims = []
    for name in ("a", "b", "c"):
        ledger.intake.accept(batch(name))
        claim = ledger.claim(name, Stage.INGEST, "w")
        assert isinstance(claim, Claim)
        claims.append(claim)
    late: list[str] = []

    def told(left: list[Claim]) -> None:
        late.extend(claim.batch_id for claim in left)

    with ledger.holding(claims[0], limit_s=1.5, on_timeout=told) as held:
        held.add(claims[1])
        held.add(claims[2])
        held.drop(claims[1])
        client.hset(ledger.keys.batch("c"), "deadline", 1)
        assert wait_until(lambda: not held.owns(claims[2]), timeout_s=10)
        assert held.owns(claims[0])
        assert wait_until(lambda: bool(late), timeout_s=10)
    assert late == ["a", "c"], "those in hand, the first one first"


def test_holding_renews_a_claim_until_the_work_is_over(client: "redis.Redis", settings: Settings) -> None:
    ledger = Ledger(client, settings.replace(claim_ttl_ms=1000))
    ledger.intake.accept(batch("b"))
    claim = take(ledger)
    first = int(entry(ledger)["deadline"])
    with ledger.holding(claim, limit_s=30) as held:
        assert wait_until(lambda: int(entry(ledger)["deadline"]) > first, timeout_s=10)
        assert held.owns(claim)
        expire(ledger)
        assert wait_until(lambda: not held.owns(claim), timeout_s=10)
    with pytest.raises(ClaimLost):
        ledger.advance(claim, Stage.DRAIN)


def test_a_step_that_never_ends_loses_its_claim(client: "redis.Redis", settings: Settings) -> None:
    ledger = Ledger(client, settings.replace(claim_ttl_ms=1000))
    ledger.intake.accept(batch("b"))
    with ledger.holding(take(ledger), limit_s=0):
        assert wait_until(lambda: isinstance(ledger.claim("b", Stage.INGEST, "other"), Claim), timeout_s=10)


MOVES: dict[str, Callable[[Ledger, Claim], object]] = {
    "advance": lambda ledger, claim: ledger.advance(claim, Stage.DRAIN, pl.DataFrame({"a": [1]})),
    "commit": lambda ledger, claim: ledger.commit(claim, warming=False, outcomes={"normal": 3}),
    "split": lambda ledger, claim: ledger.give_up(claim, "late"),
}


@pytest.mark.parametrize("move", MOVES, ids=str)
@pytest.mark.parametrize("taken", [False, True], ids=["expired", "taken over"])
def test_a_stale_claim_moves_nothing(ledger: Ledger, move: str, taken: bool) -> None:
    ledger.intake.accept(batch("b"))
    stale = take(ledger)
    expire(ledger)
    if taken:
        take(ledger)
    before = entry(ledger), ledger.backlog.counts(), ledger.backlog.totals(), ledger.backlog.overdue()
    with pytest.raises(ClaimLost):
        MOVES[move](ledger, stale)
    assert (
        entry(ledger),
        ledger.backlog.counts(),
        ledger.backlog.totals(),
        ledger.backlog.overdue(),
    ) == before
    assert ledger.payload("b").height == 3


@pytest.mark.parametrize("taken", [False, True], ids=["expired", "taken over"])
def test_a_stale_claim_can_neither_bury_nor_give_back(ledger: Ledger, taken: bool) -> None:
    ledger.intake.accept(batch("b", ["alone"]))
    stale = take(ledger)
    expire(ledger)
    if taken:
        take(ledger)
    before = entry(ledger), ledger.backlog.counts(), ledger.backlog.totals()
    with pytest.raises(ClaimLost):
        ledger.give_up(stale, "late")
    ledger.release(stale, reason="late", delay_s=60, counted=False)
    assert not ledger.renew(stale)
    assert (entry(ledger), ledger.backlog.counts(), ledger.backlog.totals()) == before
    assert ledger.dead_letters.newest() == []


def test_an_attempt_counts_when_it_begins_and_not_when_the_surroundings_failed(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    assert take(ledger).attempts == 1
    expire(ledger)
    second = take(ledger)
    assert second.attempts == 2
    ledger.release(second, reason="disk full", delay_s=0, counted=False)
    third = take(ledger)
    assert third.attempts == 2
    assert third.error == "disk full"
    ledger.release(third, reason="bad line", delay_s=0, counted=True)
    assert take(ledger).attempts == 3


def test_a_batch_given_back_waits_for_its_time(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    ledger.release(take(ledger), reason="disk full", delay_s=60, counted=False)
    assert ledger.claim("b", Stage.INGEST, "worker") == "early"
    assert ledger.backlog.overdue() == []
    ledger.client.hset(ledger.keys.batch("b"), "not_before", 0)
    ledger.client.zadd(ledger.keys.due, {"b": 1})
    assert ledger.backlog.overdue() == [("b", Stage.INGEST)]
    assert take(ledger).attempts == 1


def test_the_next_stage_begins_with_fresh_attempts_and_the_work_so_far(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    take(ledger)
    expire(ledger)
    ledger.advance(take(ledger), Stage.DRAIN, pl.DataFrame({"key": [7]}))
    assert ledger.work("b")["key"].to_list() == [7]
    assert ledger.backlog.counts()["stage:ingest"] == 0
    assert ledger.backlog.counts()["stage:drain"] == 1
    claim = take(ledger, stage=Stage.DRAIN)
    assert claim.attempts == 1
    ledger.advance(claim, Stage.STORE)
    assert ledger.work("b")["key"].to_list() == [7]


# Storing


def test_a_batch_is_counted_as_stored_once(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    claim = take(ledger)
    ledger.commit(claim, warming=False, outcomes={"normal": 2, "anomalous": 1, "warming": 0})
    with pytest.raises(ClaimLost):
        ledger.commit(claim, warming=False, outcomes={"normal": 2, "anomalous": 1})
    totals = ledger.backlog.totals()["shop"]
    assert (totals["stored"], totals["normal"], totals["anomalous"], totals["commits"]) == (3, 2, 1, 1)
    assert "warming" not in totals
    with pytest.raises(BadPayload, match="not in Redis"):
        ledger.payload("b")


def test_a_done_batch_is_remembered_for_a_time_and_a_warming_one_until_it_is_rescored(ledger: Ledger) -> None:
    for name, warming in (("plain", False), ("warm", True)):
        ledger.intake.accept(batch(name))
        ledger.commit(take(ledger, name), warming=warming, outcomes={})
    ttl = ledger.client.ttl
    assert 0 < int(ttl(ledger.keys.batch("plain"))) <= KEEP_DONE_S
    assert ttl(ledger.keys.batch("warm")) == -1


def has_model(workload: str) -> bool:
    return workload == "shop"


def test_a_rescored_batch_is_stored_once_and_leaves_the_waiting_list(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    ledger.commit(take(ledger), warming=True, outcomes={"warming": 3})
    assert ledger.backlog.warming() == 1
    assert ledger.backlog.start_rescoring(10, has_model=lambda _: False) == []
    assert ledger.backlog.start_rescoring(10, has_model=has_model) == ["b"]
    assert ledger.backlog.start_rescoring(10, has_model=has_model) == []
    assert (
        ledger.backlog.warming(),
        ledger.backlog.counts()["batches"],
        ledger.backlog.counts()["stage:ingest"],
    ) == (0, 1, 1)
    claim = take(ledger)
    assert claim.rescore
    ledger.commit(claim, warming=False, outcomes={"warming": -3, "normal": 3})
    totals = ledger.backlog.totals()["shop"]
    assert (totals["accepted"], totals["stored"], totals["warming"], totals["normal"]) == (3, 3, 0, 3)
    assert ledger.backlog.counts() == {"batches": 0, "bytes": 0, "stage:ingest": 0}
    assert int(ledger.client.ttl(ledger.keys.batch("b"))) > 0


def test_batches_without_a_model_do_not_hide_those_with_one(ledger: Ledger) -> None:
    for n in range(25):
        ledger.client.zadd(ledger.keys.warming, {f"other-{n}": n})
        ledger.client.hset(ledger.keys.batch(f"other-{n}"), mapping={"workload": "other", "state": "done"})
    ledger.intake.accept(batch("b"))
    ledger.commit(take(ledger), warming=True, outcomes={})
    sent = [ledger.backlog.start_rescoring(1, has_model=has_model) for _ in range(4)]
    assert sent == [[], [], ["b"], []]
    assert ledger.backlog.warming() == 25


def test_a_rescoring_that_fails_leaves_the_lines_counted_as_stored(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    ledger.commit(take(ledger), warming=True, outcomes={})
    ledger.backlog.start_rescoring(10, has_model=has_model)
    assert ledger.give_up(take(ledger), "the stored results are gone") == []
    assert [d.reason for d in ledger.dead_letters.newest()] == ["the stored results are gone"]
    assert balance(ledger) == {"accepted": 3, "stored": 3, "dead": 0, "discarded": 0}
    assert ledger.dead_letters.retry("b")
    assert take(ledger).rescore
    expire(ledger)
    ledger.give_up(take(ledger), "again")
    assert ledger.dead_letters.discard("b")
    assert balance(ledger) == {"accepted": 3, "stored": 3, "dead": 0, "discarded": 0}
    assert ledger.backlog.counts() == {"batches": 0, "bytes": 0, "dead_bytes": 0, "stage:ingest": 0}


# Giving up


def test_a_batch_that_kills_its_workers_is_split_into_halves_with_all_its_lines(ledger: Ledger) -> None:
    frame = raw_frame(["a", "b\nc", "d", "e", "f"]).with_columns(
        pl.Series("lines", [1, 2, 1, 1, 1], dtype=pl.UInt32)
    )
    ledger.intake.accept(batch("b", records=frame))
    claim = exhaust(ledger)
    assert claim.error == "the worker died or hung in stage ingest"
    left, right = ledger.give_up(claim, claim.error)
    assert pl.concat([ledger.payload(left), ledger.payload(right)]).equals(frame)
    assert (entry(ledger, left)["lines"], entry(ledger, right)["lines"]) == ("3", "3")
    assert ledger.claim("b", Stage.INGEST, "worker") == "finished"
    counts = ledger.backlog.counts()
    assert (counts["batches"], counts["stage:ingest"]) == (2, 2)
    assert counts["bytes"] == int(entry(ledger, left)["bytes"]) + int(entry(ledger, right)["bytes"])
    assert ledger.intake.accept(batch("b", records=frame)) == Accepted(batch_id="b", duplicate=True)


def test_a_half_of_many_records_gets_one_attempt_and_a_single_record_all_of_them(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b", ["a", "b", "c"]))
    left, right = ledger.give_up(exhaust(ledger), "died")
    assert take(ledger, left).attempts == 1, "one record"
    last = take(ledger, right)
    assert last.attempts == ledger.settings.internal.max_attempts, "two records"
    assert not last.exhausted
    expire(ledger, right)
    assert take(ledger, right).exhausted


def test_one_bad_record_ends_alone_as_a_dead_letter_and_the_rest_is_stored(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b", [f"line {i}" for i in range(11)] + ["POISON"] + ["more"] * 5))
    waiting, rounds = ["b"], 0
    while waiting:
        rounds += 1
        assert rounds < 200, "splitting must come to an end"
        name = waiting.pop()
        claim = take(ledger, name)
        bad = "POISON" in ledger.payload(name)["raw"].to_list()
        if claim.exhausted:
            waiting += ledger.give_up(claim, claim.error)
        elif bad:
            ledger.release(claim, reason="ValueError: bad line", delay_s=0, counted=True)
            waiting.append(name)
        else:
            ledger.commit(claim, warming=False, outcomes={})
    (letter,) = ledger.dead_letters.newest()
    assert (letter.lines, letter.first_line, letter.workload, letter.source) == (1, 12, "shop", "app.log")
    assert (letter.reason, letter.died_in) == ("ValueError: bad line", "ingest")
    assert ledger.payload(letter.batch_id)["raw"].to_list() == ["POISON"]
    assert balance(ledger) == {"accepted": 17, "stored": 16, "dead": 1, "discarded": 0}
    held = int(entry(ledger, letter.batch_id)["bytes"])
    assert ledger.backlog.counts() == {"batches": 0, "bytes": 0, "dead_bytes": held, "stage:ingest": 0}


def test_a_list_of_dead_letters_reads_no_payload(ledger: Ledger) -> None:
    for n in range(5):
        records = raw_frame([f"{n} {k} {'x' * 50} {k * k}" for k in range(1_000)], first_line=7)
        assert ledger.intake.accept(batch(f"b{n}", records=records))
        claim = ledger.claim(f"b{n}", Stage.INGEST, "me")
        assert isinstance(claim, Claim)
        ledger.dead_letter(claim, "a test")
        ledger.client.delete(ledger.keys.payload(f"b{n}"))
    assert [letter.first_line for letter in ledger.dead_letters.newest()] == [7] * 5


def test_a_pause_that_meets_the_end_of_a_shorter_one_closes_the_gate(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.intake.pause("stop", for_s=90)
    pttl = ledger.client.pttl

    def runs_out(name: str) -> Any:
        ledger.client.delete(name)
        return pttl(name)

    monkeypatch.setattr(ledger.client, "pttl", runs_out)
    ledger.intake.pause("drain")
    assert ledger.intake.paused_because() == "drain"


def test_a_dead_letter_can_be_tried_again(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b", ["alone"]))
    ledger.give_up(take(ledger), "no luck")
    assert ledger.claim("b", Stage.INGEST, "worker") == "finished"
    assert balance(ledger)["dead"] == 1
    assert ledger.dead_letters.retry("b")
    assert not ledger.dead_letters.retry("b")
    assert ledger.dead_letters.newest() == []
    claim = take(ledger)
    assert (claim.attempts, claim.error) == (1, "")
    ledger.commit(claim, warming=False, outcomes={})
    assert balance(ledger) == {"accepted": 1, "stored": 1, "dead": 0, "discarded": 0}
    assert int(ledger.client.ttl(ledger.keys.batch("b"))) > 0


def test_a_discarded_dead_letter_stays_counted_and_is_not_accepted_again(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b", ["alone"]))
    ledger.give_up(take(ledger), "no luck")
    assert ledger.dead_letters.discard("b")
    assert not ledger.dead_letters.discard("b")
    assert not ledger.dead_letters.retry("b")
    assert balance(ledger) == {"accepted": 1, "stored": 0, "dead": 0, "discarded": 1}
    assert ledger.intake.accept(batch("b", ["alone"])) == Accepted(batch_id="b", duplicate=True)
    assert not ledger.client.exists(ledger.keys.payload("b"))


def test_nothing_but_a_dead_letter_can_be_retried_or_discarded(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    for name in ("b", "nobody"):
        assert not ledger.dead_letters.retry(name)
        assert not ledger.dead_letters.discard(name)
        assert ledger.dead_letters.find(name) is None


def test_halves_never_take_the_id_of_another_batch(ledger: Ledger) -> None:
    others = {f"app.log.{n}": [f"rotated {n}", "more"] for n in range(2)}
    ledger.intake.accept(batch("app.log", ["a", "b"]))
    for name, lines in others.items():
        ledger.intake.accept(batch(name, lines))
    halves = ledger.give_up(take(ledger, "app.log"), "died")
    assert not set(halves) & set(others)
    for name, lines in others.items():
        assert ledger.payload(name)["raw"].to_list() == lines
    with pytest.raises(BadInput, match="~"):
        ledger.intake.accept(batch(halves[0], ["x"]))


# What cannot be read


@pytest.mark.parametrize(
    "meta",
    ["", "{", "[]", "{}", '{"wire": "new"}', '{"wire": 1, "source": "x"}', '{"wire":1,"a":' + "[" * 50_000],
    ids=lambda text: text[:20],
)
def test_a_batch_with_an_unreadable_entry_is_buried_and_does_not_come_back(ledger: Ledger, meta: str) -> None:
    ledger.intake.accept(batch("b"))
    ledger.client.hset(ledger.keys.batch("b"), "meta", meta)
    assert ledger.claim("b", Stage.INGEST, "worker") == "unreadable"
    assert ledger.claim("b", Stage.INGEST, "worker") == "finished"
    (letter,) = ledger.dead_letters.newest()
    assert "not readable" in letter.reason
    assert letter.source == "?"
    assert balance(ledger) == {"accepted": 3, "stored": 0, "dead": 3, "discarded": 0}
    assert ledger.backlog.overdue() == []


def test_an_entry_without_its_description_is_buried_too(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    ledger.client.hdel(ledger.keys.batch("b"), "meta")
    assert ledger.claim("b", Stage.INGEST, "worker") == "unreadable"
    assert [d.batch_id for d in ledger.dead_letters.newest()] == ["b"]


def test_a_newer_wire_version_is_refused_with_its_number(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    meta = entry(ledger)["meta"].replace(f'"wire":{WIRE_VERSION}', f'"wire":{WIRE_VERSION + 1}')
    with pytest.raises(TooNew, match=f"wire version {WIRE_VERSION + 1}; this build reads up to"):
        Meta.load(meta)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(None, id="gone"),
        pytest.param(b"not arrow", id="damaged"),
        pytest.param("columns", id="other columns"),
    ],
)
def test_a_batch_whose_records_cannot_be_read_is_buried_with_both_reasons(
    ledger: Ledger, damage: bytes | str | None
) -> None:
    ledger.intake.accept(batch("b"))
    key = ledger.keys.payload("b")
    if damage is None:
        ledger.client.delete(key)
    elif damage == "columns":
        ledger.client.set(key, pack_frame(pl.DataFrame({"raw": ["a", "b"]})))
    else:
        ledger.client.set(key, damage)
    assert ledger.give_up(take(ledger), "ValueError: it failed") == []
    (letter,) = ledger.dead_letters.newest()
    assert letter.reason.startswith("ValueError: it failed; ")
    assert letter.lines == 3
    assert balance(ledger)["dead"] == 3


def test_the_records_of_a_batch_keep_their_columns_and_types(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    assert dict(ledger.payload("b").schema) == RAW_SCHEMA


# Looking after


def test_only_batches_whose_time_has_come_are_overdue(ledger: Ledger) -> None:
    for name in ("early", "late", "done"):
        ledger.intake.accept(batch(name))
    assert ledger.backlog.overdue() == []
    ledger.client.zadd(ledger.keys.due, {"late": 1})
    ledger.commit(take(ledger, "done"), warming=False, outcomes={})
    ledger.client.zadd(ledger.keys.due, {"done": 1, "vanished": 1})  # as left by a Redis that rolled back
    assert ledger.backlog.overdue() == [("late", Stage.INGEST)]
    assert ledger.client.zscore(ledger.keys.due, "done") is None
    ledger.backlog.postpone(["late"])
    assert ledger.backlog.overdue() == []
    ledger.backlog.postpone(["vanished"])
    assert ledger.client.zcard(ledger.keys.due) == 2


def test_an_expired_claim_is_overdue(ledger: Ledger) -> None:
    ledger.intake.accept(batch("b"))
    take(ledger)
    assert ledger.backlog.overdue() == []
    expire(ledger)
    assert ledger.backlog.overdue() == [("b", Stage.INGEST)]


def test_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    away = Ledger(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    for ask in (
        away.backlog.counts,
        away.backlog.overdue,
        away.store.now_ms,
        away.dead_letters.newest,
        lambda: away.intake.accept(batch("b")),
    ):
        with pytest.raises(RedisUnavailable, match="does not answer"):
            ask()


@pytest.fixture
def full_redis(client: "redis.Redis") -> Iterator[None]:
    """The server refuses everything that needs memory, for this test."""
    limit = client.config_get("maxmemory")["maxmemory"]
    client.config_set("maxmemory", 1)
    yield
    client.config_set("maxmemory", limit)


@pytest.mark.usefixtures("full_redis")
def test_a_redis_without_memory_is_said_so_by_scripts_and_plain_commands(ledger: Ledger) -> None:
    with pytest.raises(RedisUnavailable, match="give it memory or disk space"):
        ledger.intake.accept(batch("b"))
    with pytest.raises(RedisUnavailable, match="give it memory or disk space"), answering():
        ledger.client.set(ledger.keys("probe"), "x")


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
        redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        redis.ResponseError(
            "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist"
        ),
        redis.ResponseError("NOREPLICAS Not enough good replicas to write."),
        redis.TimeoutError("Timeout reading from socket"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_what_heals_by_itself_or_by_an_operator_is_retryable(error: Exception) -> None:
    with pytest.raises(RedisUnavailable), answering():
        raise error


def test_a_fault_of_ours_is_not_called_a_fault_of_redis() -> None:
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"), answering():
        raise redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")


@pytest.mark.parametrize("forgot", ["the claim", "the batch"])
def test_a_claim_number_is_not_given_again_whatever_redis_forgot(ledger: Ledger, forgot: str) -> None:
    key, key_due = ledger.keys.batch("b"), ledger.keys.due
    ledger.intake.accept(batch("b"))
    before: Any = ledger.client.dump(key)
    first = take(ledger)
    if forgot == "the claim":
        ledger.client.restore(key, 0, before, replace=True)
    else:
        ledger.client.delete(key, key_due, ledger.keys.payload("b"), ledger.keys.counts)
        ledger.intake.accept(batch("b"))
    assert wait_until(lambda: ledger.store.now_ms() > int(first.seq), timeout_s=5)
    second = take(ledger)
    assert int(second.seq) > int(first.seq)
    assert not ledger.renew(first), "its holder is a zombie"
    assert ledger.renew(second)


def test_of_what_has_ended_only_that_is_kept_which_readers_need(ledger: Ledger) -> None:
    """At 5 batches/s they are three million in KEEP_DONE_S."""
    kept = {"state", "hash", "lines", "records", "workload", "kind", "seq", "accepted_ms", "done_ms"}
    for name in ("done", "halved"):
        ledger.intake.accept(batch(name))
    claim = take(ledger, "done")
    ledger.commit(claim, warming=False, outcomes={})
    ledger.give_up(take(ledger, "halved"), "why")
    for name, state in (("done", "done"), ("halved", "split")):
        assert entry(ledger, name).keys() == kept
        assert ledger.state(name) == state
        assert int(ledger.client.memory_usage(ledger.keys.batch(name)) or 0) < 500
        assert ledger.intake.accept(batch(name)) == Accepted(batch_id=name, duplicate=True)
        with pytest.raises(BadInput, match="other content"):
            ledger.intake.accept(batch(name, ["else"]))
        assert ledger.claim(name, Stage.INGEST, "w") == "finished"
    with pytest.raises(ClaimLost):
        ledger.commit(claim, warming=False, outcomes={})
    assert not ledger.renew(claim)
    ledger.release(claim, reason="late", delay_s=0, counted=True)
    assert entry(ledger, "done").keys() == kept
