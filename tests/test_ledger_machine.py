"""The ledger against a plain model of it: whatever happens in whatever order, the sums and the lists agree."""

import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar

import polars as pl
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)  # fmt: skip

from pipeline.errors import BadInput, ClaimLost
from pipeline.ledger import UNFINISHED, Accepted, Claim, Ledger, Stage
from pipeline.records import Batch, Purpose, raw_frame
from pipeline.settings import Settings

ATTEMPTS = 2


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
    texts: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        return sum(self.sizes)


class LedgerMachine(RuleBasedStateMachine):
    """Rules are the moves of workers, operators and time."""

    server: ClassVar[str]
    base: ClassVar[Settings]

    batches = Bundle("batches")
    claims = Bundle("claims")

    @initialize()
    def start(self) -> None:
        own = replace(self.base, key_prefix=f"m{uuid.uuid4().hex[:12]}", max_attempts=ATTEMPTS)
        self.client = redis.Redis.from_url(self.server)
        self.ledger = Ledger(self.client, own)
        self.model: dict[str, Expected] = {}
        self.totals: dict[str, dict[str, int]] = {}
        self.serial = 0

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.close()

    # ---- taking in

    @rule(
        target=batches,
        workload=st.sampled_from(["shop", "{x}:*"]),
        sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    )
    def accept(self, workload: str, sizes: list[int]) -> str:
        self.serial += 1
        name = f"b{self.serial}"
        texts = [f"{name} line {i}" for i in range(len(sizes))]
        self.model[name] = Expected(workload=workload, sizes=sizes, texts=texts)
        assert self.ledger.accept(self._batch(name)) == Accepted(batch_id=name)
        self._count(workload, "accepted", sum(sizes))
        return name

    @rule(name=batches)
    def accept_again(self, name: str) -> None:
        if "~" in name:
            with pytest.raises(BadInput):
                self.ledger.accept(self._batch(name))
        else:
            assert self.ledger.accept(self._batch(name)) == Accepted(batch_id=name, duplicate=True)

    def _batch(self, name: str) -> Batch:
        expected = self.model[name]
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

    @rule(target=claims, name=batches, stage=st.sampled_from([None, *Stage]))
    def claim(self, name: str, stage: Stage | None) -> Any:
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
            expected.seq += 1
            assert answer.exhausted == (expected.attempts >= ATTEMPTS)
            expected.attempts += 1
            expected.claimed = True
            assert (answer.seq, answer.attempts, answer.rescore, answer.lines, answer.records) == (
                str(expected.seq), expected.attempts, expected.rescore, expected.lines, len(expected.sizes),
            )  # fmt: skip
            return answer
        return multiple()

    def _ours(self, claim: Claim) -> bool:
        expected = self.model[claim.batch_id]
        return expected.claimed and str(expected.seq) == claim.seq

    @rule(claim=claims)
    def renew(self, claim: Claim) -> None:
        assert self.ledger.renew(claim) == self._ours(claim)

    @rule(claim=claims, to=st.sampled_from(list(Stage)))
    def advance(self, claim: Claim, to: Stage) -> None:
        if not self._ours(claim):
            with pytest.raises(ClaimLost):
                self.ledger.advance(claim, to)
            return
        self.ledger.advance(claim, to)
        self._left(claim.batch_id, state=to.value).attempts = 0

    @rule(claim=claims, warming=st.booleans())
    def commit(self, claim: Claim, warming: bool) -> None:
        outcomes = {"normal": claim.lines}
        if not self._ours(claim):
            with pytest.raises(ClaimLost):
                self.ledger.commit(claim, warming=warming, outcomes=outcomes)
            return
        self.ledger.commit(claim, warming=warming, outcomes=outcomes)
        expected = self._left(claim.batch_id, state="done")
        expected.warming, expected.has_payload = warming, False
        if not expected.rescore:
            self._count(expected.workload, "stored", expected.lines)
        self._count(expected.workload, "commits", 1)

    @rule(claim=claims, counted=st.booleans())
    def release(self, claim: Claim, counted: bool) -> None:
        ours = self._ours(claim)
        self.ledger.release(claim, reason="why", delay_s=0, counted=counted)
        if ours:
            expected = self._left(claim.batch_id)
            expected.attempts -= not counted

    @rule(target=batches, claim=claims)
    def give_up(self, claim: Claim) -> Any:
        if not self._ours(claim):
            with pytest.raises(ClaimLost):
                self.ledger.give_up(claim, "why")
            return multiple()
        expected = self.model[claim.batch_id]
        halves = self.ledger.give_up(claim, "why")
        if expected.rescore or len(expected.sizes) == 1:
            assert halves == []
            self._left(claim.batch_id, state="dead")
            if not expected.rescore:
                self._count(expected.workload, "dead", expected.lines)
            return multiple()
        assert len(halves) == 2
        self._left(claim.batch_id, state="split").has_payload = False
        middle = len(expected.sizes) // 2
        for half, part in zip(halves, (slice(None, middle), slice(middle, None)), strict=True):
            assert half not in self.model
            sizes = expected.sizes[part]
            self.model[half] = Expected(
                workload=expected.workload,
                sizes=sizes,
                texts=expected.texts[part],
                attempts=ATTEMPTS - 1 if len(sizes) > 1 else 0,
            )
            assert self.ledger.payload(half)["raw"].to_list() == expected.texts[part]
        return multiple(*halves)

    def _left(self, name: str, *, state: str | None = None) -> Expected:
        expected = self.model[name]
        expected.claimed = False
        expected.state = state or expected.state
        return expected

    # ---- time, operators, a new model

    @rule(claim=consumes(claims))
    def time_passes_over_a_claim(self, claim: Claim) -> None:
        if self._ours(claim):
            past = self.ledger.now_ms() - 1
            self.client.hset(self.ledger.keys.batch(claim.batch_id), "deadline", past)
            self.client.zadd(self.ledger.keys.due, {claim.batch_id: past})
            self.model[claim.batch_id].claimed = False

    @rule(name=batches)
    def retry(self, name: str) -> None:
        expected = self.model[name]
        dead = expected.state == "dead"
        assert self.ledger.retry(name) == dead
        if dead:
            expected.state, expected.attempts = "ingest", 0
            if not expected.rescore:
                self._count(expected.workload, "dead", -expected.lines)

    @rule(name=batches)
    def discard(self, name: str) -> None:
        expected = self.model[name]
        dead = expected.state == "dead"
        assert self.ledger.discard(name) == dead
        if dead:
            expected.state, expected.has_payload = "done", False
            if not expected.rescore:
                self._count(expected.workload, "dead", -expected.lines)
                self._count(expected.workload, "discarded", expected.lines)

    @precondition(lambda self: any(e.warming for e in self.model.values()))
    @rule()
    def a_model_arrives(self) -> None:
        waiting = {name for name, e in self.model.items() if e.warming}
        assert set(self.ledger.start_rescoring(1_000)) == waiting
        for name in waiting:
            expected = self.model[name]
            expected.state, expected.attempts = "ingest", 0
            expected.rescore, expected.warming = True, False

    # ---- what must hold after every step

    def _count(self, workload: str, name: str, amount: int) -> None:
        totals = self.totals.setdefault(workload, {})
        totals[name] = totals.get(name, 0) + amount

    @invariant()
    def every_line_is_counted(self) -> None:
        if not hasattr(self, "ledger"):
            return
        found = self.ledger.totals()
        assert set(found) == set(self.totals)
        for workload, totals in found.items():
            for name in ("accepted", "stored", "dead", "discarded", "commits"):
                assert totals.get(name, 0) == self.totals[workload].get(name, 0), name
            in_flight = sum(
                e.lines
                for e in self.model.values()
                if e.workload == workload and e.state in UNFINISHED and not e.rescore
            )
            ended = sum(totals.get(name, 0) for name in ("stored", "dead", "discarded"))
            assert totals["accepted"] == in_flight + ended

    @invariant()
    def the_gauges_and_lists_agree_with_the_batches(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger, keys = self.ledger, self.ledger.keys
        waiting = {name: e for name, e in self.model.items() if e.state in UNFINISHED}
        counts = ledger.counts()
        assert counts.get("batches", 0) == len(waiting)
        for stage in Stage:
            assert counts.get(f"stage:{stage}", 0) == sum(e.state == stage for e in waiting.values())
        payloads = {name: int(self.client.strlen(keys.payload(name))) for name in self.model}
        assert counts.get("bytes", 0) == sum(payloads[name] for name in waiting)
        assert {name for name, size in payloads.items() if size} == {
            name for name, e in self.model.items() if e.has_payload
        }
        members = {x.decode() for x in self.client.zrange(keys.due, 0, -1)}
        assert members == set(waiting), "exactly the unfinished batches are looked after"
        dead = {name for name, e in self.model.items() if e.state == "dead"}
        assert {letter.batch_id for letter in ledger.dead()} == dead
        assert ledger.warming() == sum(e.warming for e in self.model.values())


def test_the_ledger_agrees_with_its_model_whatever_happens(redis_url: str) -> None:
    LedgerMachine.server, LedgerMachine.base = redis_url, Settings(claim_ttl_ms=600_000)
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
