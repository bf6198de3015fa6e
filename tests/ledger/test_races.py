"""Everybody at once on one ledger: workers, zombies, sweepers, operators and a new model, while the sums are
read at one moment, again and again."""

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import pytest
import redis
from crash_points import check_sums, snapshot

from pipeline.errors import ClaimLost
from pipeline.ledger.ledger import Ledger
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Accepted, Claim, Stage
from pipeline.records.schema import raw_frame
from pipeline.redis.connection import connect
from pipeline.settings import Settings

SECONDS = 6.0
BATCHES = 60
# What a worker may do with a batch that it has claimed.
DEEDS = ("advance", "advance", "commit", "warm", "split", "fault", "wait", "die", "stall")


def batch(name: str, workload: str) -> Batch:
    return Batch(
        batch_id=name, workload=workload, source="push", source_key="k", purpose=Purpose.SCORE,
        arrived=datetime(2026, 11, 20, tzinfo=UTC), formats=(), zone="UTC", records=raw_frame(["a", "b", "c"]),
    )  # fmt: skip


class Fire:
    """The threads and what they have done; one that fails is told at the end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings.replace(claim_ttl_ms=1_000, max_attempts=2)
        self.stop = threading.Event()
        self.failures: list[BaseException] = []
        self.done: Counter[str] = Counter()
        self.zombies: list[Claim] = []  # claims that somebody forgot to use in time
        self.known: list[str] = []

    def forever(self, act: Callable[[Ledger, random.Random], None], seed: int) -> threading.Thread:
        def run() -> None:
            client, draw = connect(self.settings), random.Random(seed)
            ledger = Ledger(client, self.settings)
            try:
                while not self.stop.is_set():
                    act(ledger, draw)
            except BaseException as exc:  # noqa: BLE001 - the test raises it in its own thread
                self.failures.append(exc)
                self.stop.set()
            finally:
                client.close()

        return threading.Thread(target=run, name=f"fire-{act.__name__}-{seed}")

    def produce(self, ledger: Ledger, draw: random.Random) -> None:
        if len(self.known) < BATCHES:
            name = uuid.uuid4().hex[:8]
            assert ledger.intake.accept(batch(name, draw.choice(["shop", "bank"]))) == Accepted(batch_id=name)
            self.known.append(name)
        else:
            name = draw.choice(self.known)
            workloads = (ledger.client.hget(ledger.keys.batch(name), "workload") or b"shop").decode()
            assert ledger.intake.accept(batch(name, workloads)) == Accepted(batch_id=name, duplicate=True)
            self.done["duplicate"] += 1

    def work(self, ledger: Ledger, draw: random.Random) -> None:
        waiting = [name.decode() for name in ledger.client.zrange(ledger.keys.due, 0, -1)]
        if not waiting:
            return
        name = draw.choice(waiting)
        state = ledger.state(name)
        if state not in tuple(Stage):
            return
        claim = ledger.claim(name, Stage(state), threading.current_thread().name)
        if not isinstance(claim, Claim):
            self.done[claim] += 1
            return
        self.use(ledger, claim, "split" if claim.exhausted else draw.choice(DEEDS), draw)

    def use(self, ledger: Ledger, claim: Claim, deed: str, draw: random.Random) -> None:
        try:
            match deed:
                case "advance":
                    ledger.advance(claim, draw.choice(list(Stage)), raw_frame(["work"]))
                case "commit" | "warm":
                    ledger.commit(claim, warming=deed == "warm", outcomes={"normal": claim.lines})
                case "split":
                    ledger.give_up(claim, "why")
                case "fault" | "wait":
                    ledger.release(claim, reason="why", delay_s=0.0, counted=deed == "fault")
                case "stall":
                    self.zombies.append(claim)
            self.done[deed] += 1
        except ClaimLost:
            self.done["lost"] += 1

    def wake_the_dead(self, ledger: Ledger, draw: random.Random) -> None:
        """A claim of long ago is used as if nothing had happened since."""
        if self.zombies:
            self.use(ledger, draw.choice(self.zombies), draw.choice(DEEDS[:-2]), draw)

    def operate(self, ledger: Ledger, draw: random.Random) -> None:
        for letter in ledger.dead_letters.newest(limit=5):
            act = draw.choice([ledger.dead_letters.retry, ledger.dead_letters.discard])
            self.done[act.__name__] += act(letter.batch_id)
        self.done["rescored"] += len(ledger.backlog.start_rescoring(5, has_model=lambda _: True))

    def run_out(self, ledger: Ledger, draw: random.Random) -> None:
        """Time is up for some claim, and the sweeper may see it."""
        waiting = ledger.client.zrange(ledger.keys.due, 0, -1)
        if waiting:
            name = draw.choice(waiting).decode()
            ledger.client.hset(ledger.keys.batch(name), "deadline", 1)
            ledger.client.zadd(ledger.keys.due, {name: 1}, xx=True)
        time.sleep(0.002)

    def sweep(self, ledger: Ledger, draw: random.Random) -> None:
        overdue = ledger.backlog.overdue(limit=20)
        ledger.backlog.postpone([name for name, _ in overdue])
        self.done["overdue"] += len(overdue)
        time.sleep(0.005)


@pytest.mark.long
def test_the_sums_hold_at_every_moment_whoever_does_what_at_the_same_time(
    settings: Settings, client: "redis.Redis"
) -> None:
    fire = Fire(settings)
    prefix = fire.settings.redis.key_prefix
    threads = [
        *(fire.forever(fire.work, n) for n in range(4)),
        *(
            fire.forever(act, 9)
            for act in (fire.produce, fire.wake_the_dead, fire.operate, fire.run_out, fire.sweep, fire.sweep)
        ),
    ]
    for thread in threads:
        thread.start()
    looks, end = 0, time.monotonic() + SECONDS
    try:
        while time.monotonic() < end and not fire.stop.is_set():
            check_sums(snapshot(client, prefix))
            looks += 1
    finally:
        fire.stop.set()
        for thread in threads:
            thread.join(20)
    if fire.failures:
        raise fire.failures[0]
    expected = {*DEEDS, "lost", "retry", "discard", "rescored", "held", "overdue", "duplicate"} - {"die"}
    assert expected <= {name for name, count in fire.done.items() if count}, fire.done
    assert looks > 50

    ledger = Ledger(client, fire.settings)
    with suppress(IndexError):  # all that is left is worked off
        while True:
            name = ledger.client.zrange(ledger.keys.due, 0, 0)[0].decode()
            client.hset(ledger.keys.batch(name), mapping={"deadline": 1, "not_before": 0})
            claim = ledger.claim(name, Stage(ledger.state(name)), "last")
            assert isinstance(claim, Claim), claim
            ledger.commit(claim, warming=False, outcomes={})
    found = snapshot(client, prefix)
    check_sums(found)
    assert (found["batches"], found["bytes"], found["works"]) == (0, 0, {})
    # What is scored anew is read from the results, so it has no payload, dead or alive.
    first = {
        i.batch_id
        for i in ledger.dead_letters.newest()
        if client.hget(ledger.keys.batch(i.batch_id), "kind") != b"rescore"
    }
    assert set(found["payloads"]) == first
