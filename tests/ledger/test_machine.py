"""The ledger against a plain model of it: whatever happens in whatever order, the sums and the lists agree.

Every move is made twice, as by somebody who did not get the answer: the second time changes nothing and says
so."""

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

import polars as pl
import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipeline.errors import BadInput, ClaimLost
from pipeline.ledger.ledger import Ledger
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import UNFINISHED, Accepted, Claim, Full, Stage
from pipeline.records.schema import raw_frame
from pipeline.redis.connection import text_map
from pipeline.settings import Settings

ATTEMPTS = 2
# Of which one machine stores more than a few, so that the limits are met.
OBSERVATIONS, OBSERVED_BYTES = 4, 200


@dataclass(slots=True)
class Expected:
    """What the model knows of a batch."""

    workload: str
    sizes: list[int]  # physical lines of each record
    state: str = "ingest"
    attempts: int = 0
    claimed: bool = False
    seq: int = 0
    rescore: bool = False
    warming: bool = False
    has_payload: bool = True
    backfill: bool = False
    texts: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        return sum(self.sizes)


class LedgerMachine(RuleBasedStateMachine):
    """Rules are the moves of workers, operators and time."""

    server: ClassVar[str]
    base: ClassVar[Settings]

    @initialize()
    def start(self) -> None:
        own = self.base.replace(key_prefix=f"m{uuid.uuid4().hex[:12]}", max_attempts=ATTEMPTS)
        self.client = redis.Redis.from_url(self.server)
        self.ledger = Ledger(self.client, own)
        self.model: dict[str, Expected] = {}
        self.totals: dict[str, dict[str, int]] = {}
        self.serial = 0
        self.claims: list[Claim] = []
        self.closed = False
        self.observed: list[bytes] = []
        self.dropped = 0

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.close()

    # ---- taking in

    @precondition(lambda self: len(self.model) < 12)
    @rule(
        workload=st.sampled_from(["shop", "{x}:*"]),
        sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        skip=st.sampled_from([False, False, False, True]),
        backfill=st.booleans(),
    )
    def accept(self, workload: str, sizes: list[int], skip: bool, backfill: bool) -> None:
        self.serial += 1
        name = f"b{self.serial}"
        texts = [f"{name} line {i}" for i in range(len(sizes))]
        expected = Expected(workload=workload, sizes=sizes, texts=texts, backfill=backfill and not skip)
        batch = self._made(name, expected)
        answer = self.ledger.intake.accept(batch, skip=skip, backfill=backfill)
        if self.closed:
            assert isinstance(answer, Full) and answer.reason == "closed"
            return
        self.model[name] = expected
        assert answer == Accepted(batch_id=name, skipped=skip)
        again = self.ledger.intake.accept(batch, skip=skip, backfill=backfill)
        assert again == Accepted(batch_id=name, duplicate=True)
        self._count(workload, "accepted", sum(sizes))
        if skip:
            self.model[name].state, self.model[name].has_payload = "done", False
            self._count(workload, "skipped", sum(sizes))

    def pick(self, data: st.DataObject, *, state: str = "") -> str:
        """Any batch; one in this state if there is one."""
        wanted = sorted(n for n, e in self.model.items() if e.state == state)
        return data.draw(st.sampled_from(wanted or sorted(self.model)))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def accept_again(self, data: st.DataObject) -> None:
        name = self.pick(data)
        if "~" in name:
            with pytest.raises(BadInput):
                self.ledger.intake.accept(self._batch(name))
        else:
            assert self.ledger.intake.accept(self._batch(name)) == Accepted(batch_id=name, duplicate=True)

    @rule()
    def close_or_open_the_door(self) -> None:
        if self.closed:
            assert self.ledger.intake.resume()
            assert not self.ledger.intake.resume()
        else:
            self.ledger.intake.pause("an operator drains")
            self.ledger.intake.pause("another one, too")
        self.closed = not self.closed
        assert self.ledger.intake.paused_because() == ("an operator drains" if self.closed else None)

    @precondition(
        lambda self: any(e.state in ("done", "split") and not e.warming for e in self.model.values())
    )
    @rule(data=st.data())
    def what_is_done_is_forgotten(self, data: st.DataObject) -> None:
        """Its entry has lived for `KEEP_DONE_S`; the same id is a new batch from then on."""
        names = [n for n, e in self.model.items() if e.state in ("done", "split") and not e.warming]
        name = data.draw(st.sampled_from(sorted(names)))
        entry = self.ledger.keys.batch(name)
        assert int(self.client.ttl(entry)) > 0, "nothing but time deletes it"
        self.client.delete(entry)
        expected = self.model.pop(name)
        self.claims = [claim for claim in self.claims if claim.batch_id != name]
        if "~" in name or self.closed:
            return
        halves = [half for half in self.model if half.startswith(f"{name}~")]
        if any(self.model[half].state != "done" or self.model[half].warming for half in halves):
            return  # it takes a batch that is split again longer than that
        self.model[name] = Expected(workload=expected.workload, sizes=expected.sizes, texts=expected.texts)
        assert self.ledger.intake.accept(self._batch(name)) == Accepted(batch_id=name)
        self._count(expected.workload, "accepted", expected.lines)

    def _batch(self, name: str) -> Batch:
        return self._made(name, self.model[name])

    def _made(self, name: str, expected: Expected) -> Batch:
        lines = pl.Series("lines", expected.sizes, dtype=pl.UInt32)
        return Batch(
            batch_id=name,
            workload=expected.workload,
            source="push",
            source_key="k",
            purpose=Purpose.SCORE,
            arrived=datetime(2026, 11, 20, tzinfo=UTC),
            formats=(),
            zone="UTC",
            records=raw_frame(expected.texts).with_columns(lines),
        )

    # ---- workers

    @precondition(lambda self: self.model)
    @rule(data=st.data(), stage=st.sampled_from([None, None, None, *Stage]))
    def claim(self, data: st.DataObject, stage: Stage | None) -> None:
        self._claim(self.pick(data), stage)

    def _claim(self, name: str, stage: Stage | None) -> None:
        expected = self.model[name]
        if stage is None:  # the stage it waits in
            stage = Stage(expected.state) if expected.state in UNFINISHED else Stage.INGEST
        answer = self.ledger.claim(name, stage, "worker")
        if expected.state not in UNFINISHED:
            assert answer == "finished"
        elif expected.state != stage:
            assert answer == "elsewhere"
        elif expected.claimed:
            assert answer == "held"
        else:
            assert isinstance(answer, Claim), answer
            assert int(answer.seq) > expected.seq, "a number is given once"
            expected.seq = int(answer.seq)
            assert answer.exhausted == (expected.attempts >= ATTEMPTS)
            expected.attempts += 1
            expected.claimed = True
            assert (answer.attempts, answer.rescore, answer.lines, answer.records) == (
                expected.attempts, expected.rescore, expected.lines, len(expected.sizes),
            )  # fmt: skip
            self.claims.append(answer)

    def free(self) -> list[str]:
        return sorted(n for n, e in self.model.items() if e.state in UNFINISHED and not e.claimed)

    @precondition(lambda self: self.free())
    @rule(
        data=st.data(),
        deed=st.sampled_from(["advance", "commit", "warm", "split", "split", "fault", "full", "die"]),
    )
    def take_a_batch_and(self, data: st.DataObject, deed: str) -> None:
        """What a worker does in one go; the rules below do it in pieces, with others in between."""
        self._claim(data.draw(st.sampled_from(self.free())), None)
        claim = self.claims[-1]
        if deed == "advance":
            self._advance(claim, data.draw(st.sampled_from(Stage)))
        elif deed in ("commit", "warm"):
            self._commit(claim, deed == "warm")
        elif deed == "split":
            self._give_up(claim)
        elif deed == "die":
            self._time_passes_over_a_claim(claim)
        else:
            self._release(claim, deed == "fault")

    def claimed(self, data: st.DataObject) -> Claim:
        """Any claim ever given; of two tries the one that still holds, so that most moves are moves."""
        first, second = (data.draw(st.sampled_from(self.claims)) for _ in range(2))
        return first if self._ours(first) else second

    def _ours(self, claim: Claim) -> bool:
        expected = self.model[claim.batch_id]
        return expected.claimed and str(expected.seq) == claim.seq

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        self._renew(self.claimed(data))

    def _renew(self, claim: Claim) -> None:
        assert self.ledger.renew(claim) == self._ours(claim)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), to=st.sampled_from(list(Stage)))
    def advance(self, data: st.DataObject, to: Stage) -> None:
        self._advance(self.claimed(data), to)

    def _advance(self, claim: Claim, to: Stage) -> None:
        if not self._ours(claim):
            with pytest.raises(ClaimLost):
                self.ledger.advance(claim, to)
            return
        self.ledger.advance(claim, to, raw_frame(["worked out"]) if to is not Stage.INGEST else None)
        with pytest.raises(ClaimLost):
            self.ledger.advance(claim, to)
        self._left(claim.batch_id, state=to.value).attempts = 0

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), warming=st.booleans())
    def commit(self, data: st.DataObject, warming: bool) -> None:
        self._commit(self.claimed(data), warming)

    def _commit(self, claim: Claim, warming: bool) -> None:
        outcomes = {"normal": claim.lines}
        seen = b"" if claim.lines == 1 else f"{claim.batch_id} {claim.seq}".encode() * claim.lines
        if not self._ours(claim):
            with pytest.raises(ClaimLost):
                self.ledger.commit(claim, warming=warming, outcomes=outcomes, observation=seen)
            return
        self.ledger.commit(claim, warming=warming, outcomes=outcomes, observation=seen)
        with pytest.raises(ClaimLost):
            self.ledger.commit(claim, warming=warming, outcomes=outcomes, observation=seen)
        self.observed += [seen] if seen else []
        while len(self.observed) > OBSERVATIONS or sum(map(len, self.observed)) > OBSERVED_BYTES:
            del self.observed[0]
            self.dropped += 1
        expected = self._left(claim.batch_id, state="done")
        expected.warming, expected.has_payload = warming, False
        if not expected.rescore:
            self._count(expected.workload, "stored", expected.lines)
        self._count(expected.workload, "commits", 1)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), counted=st.booleans())
    def release(self, data: st.DataObject, counted: bool) -> None:
        self._release(self.claimed(data), counted)

    def _release(self, claim: Claim, counted: bool) -> None:
        ours = self._ours(claim)
        for _ in range(2):
            self.ledger.release(claim, reason="why", delay_s=0, counted=counted)
        if ours:
            expected = self._left(claim.batch_id)
            expected.attempts -= not counted

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self._give_up(self.claimed(data))

    def _give_up(self, claim: Claim) -> None:
        if not self._ours(claim):
            with pytest.raises(ClaimLost):
                self.ledger.give_up(claim, "why")
            return
        expected = self.model[claim.batch_id]
        halves = self.ledger.give_up(claim, "why")
        with pytest.raises(ClaimLost):
            self.ledger.give_up(claim, "why")
        if expected.rescore or len(expected.sizes) == 1:
            assert halves == []
            self._left(claim.batch_id, state="dead")
            if not expected.rescore:
                self._count(expected.workload, "dead", expected.lines)
            return
        assert len(halves) == 2
        self._left(claim.batch_id, state="split").has_payload = False
        middle = len(expected.sizes) // 2
        for half, part in zip(halves, (slice(None, middle), slice(middle, None)), strict=True):
            known = self.model.get(half)
            assert known is None or known.state == "done", "of an earlier life of the same id"
            self.claims = [claim for claim in self.claims if claim.batch_id != half]
            assert int(self.client.ttl(self.ledger.keys.batch(half))) == -1, "it lives until it is done"
            sizes = expected.sizes[part]
            self.model[half] = Expected(
                workload=expected.workload,
                sizes=sizes,
                texts=expected.texts[part],
                attempts=ATTEMPTS - 1 if len(sizes) > 1 else 0,
                backfill=expected.backfill,
            )
            assert self.ledger.payload(half)["raw"].to_list() == expected.texts[part]

    def _left(self, name: str, *, state: str | None = None) -> Expected:
        expected = self.model[name]
        expected.claimed = False
        expected.state = state or expected.state
        return expected

    # ---- time, operators, a new model

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def time_passes_over_a_claim(self, data: st.DataObject) -> None:
        self._time_passes_over_a_claim(self.claimed(data))

    def _time_passes_over_a_claim(self, claim: Claim) -> None:
        if self._ours(claim):
            past = self.ledger.store.now_ms() - 1
            self.client.hset(self.ledger.keys.batch(claim.batch_id), "deadline", past)
            self.client.zadd(self.ledger.keys.due, {claim.batch_id: past})
            self.model[claim.batch_id].claimed = False

    @precondition(lambda self: self.model)
    @rule(data=st.data(), aimed=st.booleans())
    def retry(self, data: st.DataObject, aimed: bool) -> None:
        name = self.pick(data, state="dead" if aimed else "")
        expected = self.model[name]
        dead = expected.state == "dead"
        assert self.ledger.dead_letters.retry(name) == dead
        assert not self.ledger.dead_letters.retry(name)
        if dead:
            expected.state, expected.attempts = "ingest", 0
            if not expected.rescore:
                self._count(expected.workload, "dead", -expected.lines)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), aimed=st.booleans())
    def discard(self, data: st.DataObject, aimed: bool) -> None:
        name = self.pick(data, state="dead" if aimed else "")
        expected = self.model[name]
        dead = expected.state == "dead"
        assert self.ledger.dead_letters.discard(name) == dead
        assert not self.ledger.dead_letters.discard(name)
        if dead:
            expected.state, expected.has_payload = "done", False
            if not expected.rescore:
                self._count(expected.workload, "dead", -expected.lines)
                self._count(expected.workload, "discarded", expected.lines)

    @precondition(lambda self: any(e.warming for e in self.model.values()))
    @rule()
    def a_model_arrives(self) -> None:
        waiting = {name for name, e in self.model.items() if e.warming}
        assert set(self.ledger.backlog.start_rescoring(1_000, has_model=lambda _: True)) == waiting
        assert self.ledger.backlog.start_rescoring(1_000, has_model=lambda _: True) == []
        for name in waiting:
            expected = self.model[name]
            expected.state, expected.attempts = "ingest", 0
            expected.rescore, expected.warming, expected.backfill = True, False, True

    # ---- what must hold after every step

    def _count(self, workload: str, name: str, amount: int) -> None:
        totals = self.totals.setdefault(workload, {})
        totals[name] = totals.get(name, 0) + amount

    @invariant()
    def every_line_is_counted(self) -> None:
        if not hasattr(self, "ledger"):
            return
        found = self.ledger.backlog.totals()
        assert set(found) == set(self.totals)
        for workload, totals in found.items():
            for name in ("accepted", "stored", "dead", "discarded", "skipped", "commits"):
                assert totals.get(name, 0) == self.totals[workload].get(name, 0), name
            in_flight = sum(
                e.lines
                for e in self.model.values()
                if e.workload == workload and e.state in UNFINISHED and not e.rescore
            )
            ended = sum(totals.get(name, 0) for name in ("stored", "dead", "discarded", "skipped"))
            assert totals["accepted"] == in_flight + ended

    @invariant()
    def the_gauges_and_lists_agree_with_the_batches(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger, keys = self.ledger, self.ledger.keys
        waiting = {name: e for name, e in self.model.items() if e.state in UNFINISHED}
        counts = ledger.backlog.counts()
        assert counts.get("batches", 0) == len(waiting)
        for stage in Stage:
            assert counts.get(f"stage:{stage}", 0) == sum(e.state == stage for e in waiting.values())
        payloads = {name: int(self.client.strlen(keys.payload(name))) for name in self.model}
        assert counts.get("bytes", 0) == sum(payloads[name] for name in waiting)
        dead_bytes = sum(payloads[name] for name, e in self.model.items() if e.state == "dead")
        assert counts.get("dead_bytes", 0) == dead_bytes
        assert ledger.backlog.backfills(sorted(waiting)) == {
            name for name, e in waiting.items() if e.backfill
        }
        works = {name for name in self.model if self.client.exists(keys.work(name))}
        assert works <= set(waiting), "work that nobody deletes"
        assert {name for name, size in payloads.items() if size} == {
            name for name, e in self.model.items() if e.has_payload
        }
        members = {x.decode() for x in self.client.zrange(keys.due, 0, -1)}
        assert members == set(waiting), "exactly the unfinished batches are looked after"
        held = {
            x.decode(): int(score) for x, score in self.client.zrange(keys.in_flight, 0, -1, withscores=True)
        }
        assert held == {name: self._in_flight_score(name) for name in waiting}, "by lane and age"
        dead = {name for name, e in self.model.items() if e.state == "dead"}
        assert {letter.batch_id for letter in ledger.dead_letters.newest()} == dead
        assert ledger.backlog.warming() == sum(e.warming for e in self.model.values())

    def _in_flight_score(self, name: str) -> int:
        accepted, kind, backfill = self.client.hmget(
            self.ledger.keys.batch(name), "accepted_ms", "kind", "backfill"
        )
        return (2 if kind == b"rescore" else int(backfill == b"1")) * 2**42 + int(accepted)

    @invariant()
    def what_is_stored_is_observed_once_and_the_oldest_are_dropped_at_the_limit(self) -> None:
        if not hasattr(self, "ledger"):
            return
        watching = self.ledger.keys.watching
        assert self.client.lrange(watching("observations"), 0, -1) == self.observed
        numbers = text_map(self.client.hgetall(watching()))
        assert int(numbers.get("bytes", 0)) == sum(map(len, self.observed))
        assert int(numbers.get("dropped", 0)) == int(numbers.get("head", 0)) == self.dropped


@pytest.mark.long
def test_the_ledger_agrees_with_its_model_whatever_happens(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ledger.ledger.MAX_OBSERVATIONS", OBSERVATIONS)
    monkeypatch.setattr("pipeline.ledger.ledger.MAX_OBSERVED_BYTES", OBSERVED_BYTES)
    LedgerMachine.server, LedgerMachine.base = redis_url, Settings(claim_ttl_ms=600_000)
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=50,
            # Shrinking takes minutes on a real server; fifty steps can be read as they are.
            phases=[Phase.generate],
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
