"""The judge of a chaos run must not sleep: for every invariant a small world that breaks it, made of real
files by the real sink and real keys by the real ledger; and the same world unbroken, in which there is
nothing to find."""

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis
from small_bundles import ONE, TWO, artifact_of, damage, repair, written

from bench._chaos.check import Report, check, explained
from bench._chaos.history import History
from bench._chaos.probe import Probe
from bench._chaos.producers import Sender
from pipeline.errors import RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.models.registry import Registry
from pipeline.records.batch import SEVERAL, Batch, Purpose
from pipeline.records.delivery import Accepted, Claim, Stage
from pipeline.records.pushed import PushedRecords
from pipeline.records.schema import RESULT_SCHEMA, raw_frame
from pipeline.redis.keys import Keys
from pipeline.redis.leases import DRAIN, TRAINING, Lease, Leases
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.sources.chunks import Cursor
from pipeline.sources.pushed import framed

AT = datetime(2026, 11, 20, 10, tzinfo=UTC)
LINES = 10  # of every batch


def text(workload: str, number: int) -> str:
    return f"2026-11-20T10:00:00Z INFO app: request {number} served mark={workload}#{number}"


@dataclass
class World:
    """A run in small. What it does goes through the ledger, the sink and the registry as in a real one."""

    settings: Settings
    client: "redis.Redis"
    history: History
    folder: Path
    ledger: Ledger = field(init=False)
    sink: ParquetSink = field(init=False)
    keys: Keys = field(init=False)
    written: int = 0

    def __post_init__(self) -> None:
        self.ledger, self.sink = Ledger(self.client, self.settings), ParquetSink(self.settings.data.results)
        self.keys = self.ledger.keys
        self.probe = Probe(self.history, self.settings, list)

    # ---- what a run does --------------------------------------------------------------------------

    def tell(self, batch_id: str, first: int, answer: str = "accepted", **facts: Any) -> None:
        self.history.note(
            "send", who="push-1", id=batch_id, first=first, answer=answer,
            **{"workload": "shop", "lines": LINES, "poison": "", "poison_line": None, **facts},
        )  # fmt: skip

    def accept(self, batch_id: str, first: int, *, workload: str = "shop", **cursor: str) -> None:
        records = raw_frame([text(workload, first + n) for n in range(LINES)], first_line=first)
        answer = self.ledger.intake.accept(
            Batch(
                batch_id=batch_id, workload=workload, source="push", source_key=f"key-{batch_id}",
                purpose=Purpose.SCORE, arrived=AT, formats=(), zone="UTC", records=records,
            ),
            **cursor,
        )  # fmt: skip
        assert isinstance(answer, Accepted), answer

    def push(self, batch_id: str, first: int, *, answer: str = "accepted", **facts: Any) -> None:
        self.tell(batch_id, first, answer, **facts)
        self.accept(batch_id, first, workload=facts.get("workload", "shop"))

    def follow(self) -> None:
        """Ten more lines of a file, accepted with their cursor."""
        path = self.folder / "app.log"
        with path.open("a") as file:
            file.writelines(text("followed", self.written + n) + "\n" for n in range(1, LINES + 1))
        batch_id = f"file-{path.stat().st_size:x}"
        cursor = Cursor(path=str(path), identity="i", offset=path.stat().st_size, line=self.written + LINES)
        self.accept(batch_id, self.written + 1, workload="followed", cursor_key="f", cursor=cursor.pack())
        self.written += LINES
        self.history.note("file", who="follow-1", workload="followed", path=str(path), written=self.written)
        self.store(batch_id)

    def claim(self, batch_id: str) -> Claim:
        claim = self.ledger.claim(batch_id, Stage.INGEST, "worker")
        assert isinstance(claim, Claim), claim
        return claim

    def rows(self, batch_id: str, claim: Claim) -> pl.DataFrame:
        frame, _ = framed(self.ledger.payload(batch_id))
        return frame.select(
            pl.when(name == "record_id")
            .then(f"{claim.meta.source_key}-" + pl.col("line").cast(pl.String))
            .alias(name)
            if name == "record_id"
            else pl.lit(claim.workload).alias(name)
            if name == "workload"
            else pl.lit(AT).alias(name)
            if name == "timestamp"
            else pl.col("raw").str.slice(32).alias(name)
            if name == "message"
            else pl.col(name)
            if name in frame.columns
            else pl.lit(None, dtype=kind).alias(name)
            for name, kind in RESULT_SCHEMA.items()
        ).cast(RESULT_SCHEMA)  # type: ignore[arg-type]

    def store(self, batch_id: str) -> None:
        claim = self.claim(batch_id)
        self.sink.write(batch_id, self.rows(batch_id, claim))
        self.ledger.commit(claim, warming=False, outcomes={})

    def split(self, batch_id: str, row: int) -> list[str]:
        """One row apart, as after a refusal: the rest, and the row alone."""
        return self.ledger.give_up(self.claim(batch_id), "it kills", apart=[row])

    def bury(self, batch_id: str) -> None:
        claim = self.claim(batch_id)
        assert self.ledger.give_up(claim, "it kills", apart=range(claim.records)) == []

    def lease(self, resource: str, holder: str = "worker") -> Lease:
        lease = Leases(self.client, self.settings).request(resource, holder)
        assert isinstance(lease, Lease), lease
        return lease

    def publish(self, version: str) -> None:
        lease = self.lease(TRAINING)
        registry = Registry(self.client, self.settings)
        written(registry, version)
        registry.publish(version, lease, at=AT)
        Leases(self.client, self.settings).release(lease)

    def sample(self) -> None:
        self.probe.sample()

    def fault(self, n: int, kind: str, after_s: float, waits_for: str = "") -> None:
        self.history.note("fault", n=n, kind=kind, target="ingest/0", waits_for=waits_for, detail={})
        self.history.note("healed", n=n)
        self.history.note("flow", n=n, after_s=after_s, known=True)

    def over(self, **limits: Any) -> Report:
        """Settle, and ask the judge."""
        self.history.note("settled", after_s=1.0)
        self.history.note("end")
        return check(self.history.path, self.settings, **limits)


@pytest.fixture
def world(settings: Settings, client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    """A run in which all went well: pushed lines, a followed file, one poisoned line, a model."""
    with History(tmp_path / "history.jsonl") as history:
        w = World(settings, client, history, tmp_path)
        history.note("begin", seed=7, minutes=0.1, settings={})
        w.push("a", 1)
        w.sample()
        w.store("a")
        w.fault(1, "kill", 0.5)
        w.follow()
        w.push("p", 11, poison="kill", poison_line=14)
        rest, bad = w.split("p", 3)
        w.sample()
        w.store(rest)
        w.bury(bad)
        w.publish(ONE)
        w.lease(DRAIN)
        w.sample()
        yield w
        w.probe.look.close()
        for key in client.scan_iter(match=f"*{settings.redis.key_prefix}*"):
            client.delete(key)


def found(report: Report) -> str:
    return "\n\n".join(map(explained, report.violations))


# ---- nothing is found where nothing is wrong -------------------------------------------------------


def test_a_run_in_which_all_went_well_has_no_violation(world: World) -> None:
    world.tell("b", 21, "asked")
    world.push("b", 21)
    world.tell("b", 21, "asked")
    world.tell("b", 21, "duplicate")
    world.push("asked", 61, answer="asked")  # the run ended, and it is in
    world.store("asked")
    world.tell("asked too", 71, "asked")  # the run ended, and it is not in
    world.tell("gone", 31, "full")
    world.tell("gone", 31, "unknown")  # nobody knows, and it is not in
    world.push("in", 41, answer="unknown")  # nobody knows, and it is in
    world.tell("refused", 51, "rejected")
    world.store("b")
    world.store("in")
    world.follow()
    world.publish(TWO)
    world.history.note("sample", away=True, rss=[[1, "redis", 5.0]])
    world.sample()
    report = world.over()
    assert not report.violations, found(report)
    assert (report.lost, report.doubled, report.dead, report.dead_poison, report.faults) == (0, 0, 1, 1, 1)
    assert report.accepted_lines == 70  # a, p, b, in and twice ten lines of the file
    assert report.stored_lines == 69
    values = report.to_json()
    assert json.loads(json.dumps(values))["violations"] == 0


def test_a_damaged_payload_may_die_as_a_whole(world: World) -> None:
    world.push("c", 21, poison="corrupt")
    world.client.set(world.keys.payload("c"), b"\0" * 64)
    assert world.ledger.give_up(world.claim("c"), "it cannot be read") == []
    report = world.over()
    assert not report.violations, found(report)
    assert (report.dead, report.dead_poison, report.lost) == (11, 11, 0)


def test_a_batch_of_several_workloads_is_counted_for_each_and_its_parts_are_none_of_a_sender(
    world: World,
) -> None:
    """As the intake makes one of the requests of a moment."""
    names = ("pay", "mail", "web")
    records = PushedRecords(
        [text(name, 1 + n) for name in names for n in range(LINES)],
        workloads=[name for name in names for _ in range(LINES)],
    )
    batch = Batch(
        batch_id="w", workload=SEVERAL, source="intake", source_key="w", purpose=Purpose.SCORE,
        arrived=AT, formats=(), zone="UTC", records=records,
    )  # fmt: skip
    assert isinstance(world.ledger.intake.accept_all([batch], []), Accepted)
    for name in names:
        world.tell(f"w-{name}", 1, workload=name)
    world.sample()
    claim = world.claim("w")
    others = records.take(range(LINES, 3 * LINES), named=True)
    (part,) = world.ledger.separate(claim, {"pay": records.take(range(LINES))}, others)
    due = world.probe.look()["due"]
    assert (due["roots"], due["halves"]) == (1, 1)
    waits = world.over()
    assert [v.what for v in waits.violations] == [
        "1 batches of mail, web still wait in stage ingest after settling (w)",
        f"1 batches of pay still wait in stage ingest after settling ({part})",
    ]
    world.ledger.dead_letter(claim, "it kills")
    world.sample()
    world.store(part)
    report = world.over()
    assert [v.what for v in report.violations] == [
        f"lines 1-10 of {name} are dead and no poison: it kills" for name in ("mail", "web")
    ], found(report)
    assert (report.lost, report.doubled, report.dead) == (0, 0, 2 * LINES + 1)


def test_a_poisoned_line_may_be_discarded_and_is_not_lost(world: World) -> None:
    assert world.ledger.dead_letters.discard("p~1")
    report = world.over()
    assert not report.violations, found(report)
    assert (report.lost, report.dead) == (0, 0)


def test_a_record_of_many_lines_carries_as_many_marks(world: World) -> None:
    world.tell("t", 21)
    world.accept("t", 21)
    claim = world.claim("t")
    rows = world.rows("t", claim)
    trace = "\n".join(rows["raw"][:3])
    joined = rows.head(1).with_columns(
        raw=pl.lit(trace), message=pl.lit(trace), lines=pl.lit(3, dtype=pl.UInt32)
    )
    world.sink.write("t", pl.concat([joined, rows.tail(LINES - 3)]))
    world.ledger.commit(claim, warming=False, outcomes={})
    report = world.over()
    assert not report.violations, found(report)


# ---- each thing that is wrong is found -------------------------------------------------------------


def rewrite(
    world: World, batch_id: str, change: Callable[[pl.DataFrame], pl.DataFrame], to: str = ""
) -> None:
    frame = world.sink.read(batch_id, "shop")
    assert frame is not None
    world.sink.write(to or batch_id, change(frame))


def forget_a_batch(w: World) -> None:
    w.tell("a", 1)


def lose_a_line(w: World) -> None:
    rewrite(w, "a", lambda f: f.filter(pl.col("line") != 3))


def lose_a_file(w: World) -> None:
    w.sink.remove("a", "shop")


def lose_from_the_followed_file(w: World) -> None:
    w.history.note("file", who="f", workload="followed", path=str(w.folder / "app.log"), written=12)


def store_a_half_and_the_whole(w: World) -> None:
    rewrite(w, "a", lambda f: f.head(2), to="a~0")


def store_under_two_record_ids(w: World) -> None:
    rewrite(w, "a", lambda f: pl.concat([f, f.head(1).with_columns(record_id=pl.lit("other-1"))]))


def store_a_dead_line(w: World) -> None:
    dead = (
        pl.col("raw").str.replace(r"mark=.*", "mark=shop#14"),
        pl.col("message").str.replace(r"mark=.*", "mark=shop#14"),
    )
    rewrite(w, "a", lambda f: f.head(1).with_columns(*dead, record_id=pl.lit("x")), to="zombie")


def store_what_nobody_sent(w: World) -> None:
    w.accept("stranger", 9_001)
    w.store("stranger")


def store_what_was_refused(w: World) -> None:
    w.push("refused", 31, answer="full")
    w.store("refused")


def store_a_line_without_a_mark(w: World) -> None:
    rewrite(w, "a", lambda f: f.head(1).with_columns(raw=pl.lit("torn"), message=pl.lit("torn")), to="torn")


def let_a_producer_die(w: World) -> None:
    w.push("d", 31, answer="asked")
    w.store("d")
    w.history.note("died", who="push-1", id="d", why="Traceback ...\nKeyError: 1\n")


def store_an_unknown_batch_in_part(w: World) -> None:
    w.push("u", 31, answer="unknown")
    claim = w.claim("u")
    w.sink.write("u", w.rows("u", claim).head(4))
    w.ledger.commit(claim, warming=False, outcomes={})


def store_under_another_workload(w: World) -> None:
    rewrite(w, "a", lambda f: f.with_columns(workload=pl.lit("pay")))


def give_one_id_to_two_records(w: World) -> None:
    w.push("b", 21)
    w.store("b")
    rewrite(
        w, "b", lambda f: f.with_columns(record_id=pl.lit("key-a-") + (pl.col("line") - 20).cast(pl.String))
    )


def tear_a_file(w: World) -> None:
    path = w.sink.files.file(w.sink.parts()[0])
    path.write_bytes(path.read_bytes()[:100])


def cut_a_message(w: World) -> None:
    rewrite(w, "a", lambda f: f.with_columns(message=pl.lit("cut")))


def say_two_lines_of_one(w: World) -> None:
    rewrite(w, "a", lambda f: f.with_columns(lines=pl.lit(2, dtype=pl.UInt32)))


def bury_what_is_no_poison(w: World) -> None:
    w.push("b", 21)
    w.bury("b")


def bury_a_neighbour_of_poison(w: World) -> None:
    w.push("q", 21, poison="kill", poison_line=24)
    rest, bad = w.split("q", 4)  # line 25
    w.store(rest)
    w.bury(bad)


def damage_what_nobody_poisoned(w: World) -> None:
    w.push("b", 21)
    w.client.set(w.keys.payload("b"), b"\0" * 64)
    w.ledger.give_up(w.claim("b"), "it cannot be read")


def leave_in_flight(w: World) -> None:
    w.push("b", 21)


def forget_in_flight(w: World) -> None:
    """What is not due is never swept again."""
    w.push("b", 21)
    w.client.zrem(w.keys.due, "b")
    w.sample()


def die_while_scored_again(w: World) -> None:
    w.push("b", 21)
    claim = w.claim("b")
    w.sink.write("b", w.rows("b", claim))
    w.ledger.commit(claim, warming=True, outcomes={})
    assert w.ledger.backlog.start_rescoring(9, has_model=lambda _: True) == ["b"]
    w.ledger.give_up(w.claim("b"), "the network is broken")


def leave_the_cursor_behind(w: World) -> None:
    cursor = Cursor(path=str(w.folder / "app.log"), identity="i", offset=77, line=1)
    w.client.hset(w.keys.cursors, "f", cursor.pack())


def lose_the_cursor(w: World) -> None:
    w.client.hdel(w.keys.cursors, "f")


def take_a_token_back(w: World) -> None:
    w.client.hincrby(w.keys.tokens, DRAIN, 4)
    w.sample()
    w.client.hincrby(w.keys.tokens, DRAIN, -4)
    w.sample()


def give_a_token_twice(w: World) -> None:
    w.client.hset(w.keys.lease(DRAIN), "holder", "somebody else")
    w.sample()


def give_an_older_lease(w: World) -> None:
    w.client.hset(w.keys.lease(DRAIN), "token", 0)
    w.sample()


def take_a_gpu_token_back(w: World) -> None:
    w.client.hset(w.keys.gpu("tokens"), "GPU-1", 5)
    w.sample()
    w.client.hset(w.keys.gpu("tokens"), "GPU-1", 4)
    w.sample()


def begin(w: World, name: str, begin_ms: int, end_ms: int | None, token: int) -> None:
    entry = {"state": "training", "started_ms": begin_ms, "token": token}
    w.client.hset(w.keys.training(name), mapping=entry if end_ms is None else {**entry, "ended_ms": end_ms})
    w.client.zadd(w.keys.trainings, {name: begin_ms})


def train_twice_at_a_time(w: World) -> None:
    begin(w, "one", 1_000, 2_000, 1)
    begin(w, "two", 1_900, 3_000, 2)


def train_beside_one_that_never_ended(w: World) -> None:
    begin(w, "one", 1_000, None, 1)
    begin(w, "two", 1_900, None, 2)
    w.sample()


def publish_under_an_older_token(w: World) -> None:
    w.client.hset(w.keys.model(), "token", 0)
    w.sample()


def train_under_an_older_token(w: World) -> None:
    begin(w, "one", 1_000, 2_000, 2)
    begin(w, "two", 2_100, 3_000, 1)


def take_the_model_away(w: World) -> None:
    kept = w.client.hgetall(w.keys.model())
    w.client.delete(w.keys.model())
    w.sample()
    w.client.hset(w.keys.model(), mapping=kept)  # type: ignore[arg-type]


def forget_the_model(w: World) -> None:
    w.client.delete(w.keys.model(), w.keys.model_names)


def take_a_generation_back(w: World) -> None:
    w.client.hset(w.keys.model(), "generation", 0)
    w.sample()


def move_the_pointer_silently(w: World) -> None:
    written(Registry(w.client, w.settings), TWO)
    w.client.hset(w.keys.model(), "version", TWO)
    w.sample()


def damage_the_live_model(w: World) -> None:
    artifact_of(Registry(w.client, w.settings), ONE, "model.safetensors").write_bytes(b"changed")


def remove_the_live_model(w: World) -> None:
    registry = Registry(w.client, w.settings)
    damage(registry, ONE)
    w.sample()
    repair(registry, ONE)


def note_sample(w: World, change: Callable[[dict[str, Any]], object]) -> None:
    """A sample as Redis shows it now, but for one thing that a real one shows only under load."""
    facts = w.probe.look()
    change(facts)
    w.history.note("sample", **facts, rss=[])


def take_too_many(w: World) -> None:
    note_sample(w, lambda s: s["due"].update(roots=w.settings.internal.max_pending_batches + 1))


def take_too_much(w: World) -> None:
    much = w.settings.intake.max_pending_mib * 2**20 + 1
    note_sample(w, lambda s: s["due"].update(roots=2, root_bytes=much))


def split_without_bound(w: World) -> None:
    much = w.settings.intake.max_pending_mib * 2**20 + 10_000
    note_sample(w, lambda s: s["due"].update(roots=2, halves=2, bytes=much))


def keep_too_much_dead(w: World) -> None:
    much = (w.settings.intake.max_dead_mib + w.settings.intake.max_pending_mib) * 2**20 + 1
    note_sample(w, lambda s: s["dead"].update(bytes=much))


def fill_redis(w: World) -> None:
    note_sample(w, lambda s: s.update(memory=[1_001, 1_000]))


def grow(w: World) -> None:
    w.history.note("sample", away=True, rss=[[42, "pipeline.workers ingest", 2_000.0]])


def count_an_accepted_line_twice(w: World) -> None:
    w.client.hincrby(w.keys.totals("shop"), "accepted", 1)
    w.sample()
    w.client.hincrby(w.keys.totals("shop"), "accepted", -1)


def count_a_dead_line_twice(w: World) -> None:
    w.client.hincrby(w.keys.totals("shop"), "dead", 1)
    w.client.hincrby(w.keys.totals("shop"), "stored", -1)
    w.sample()


def count_what_is_not_there(w: World) -> None:
    w.client.hincrby(w.keys.counts, "batches", 1)
    w.sample()


def count_bytes_that_are_not_there(w: World) -> None:
    w.client.hincrby(w.keys.counts, "bytes", -5)
    w.sample()


def count_dead_bytes_that_are_not_there(w: World) -> None:
    w.client.hincrby(w.keys.counts, "dead_bytes", 1_000_000)
    w.sample()


def count_a_stage_wrongly(w: World) -> None:
    w.client.hincrby(w.keys.counts, "stage:drain", 1)
    w.sample()


def take_counted_lines_back(w: World) -> None:
    for name in ("accepted", "stored"):
        w.client.hincrby(w.keys.totals("shop"), name, -10)
    w.sample()
    for name in ("accepted", "stored"):
        w.client.hincrby(w.keys.totals("shop"), name, 10)


def count_stored_lines_wrongly(w: World) -> None:
    for name in ("accepted", "stored"):
        w.client.hincrby(w.keys.totals("shop"), name, 5)


def nobody_watches(w: World) -> None:
    before = w.history.path.read_text().splitlines()
    kept = [line for line in before if '"op":"sample"' not in line]
    w.history.path.write_text("\n".join(kept) + "\n")


def send_a_pickle(w: World) -> None:
    message = {"body": "gAR9lC4=", "content-type": "application/x-python-serialize", "headers": {}}
    w.client.lpush(f"{w.settings.redis.key_prefix}:ingest", json.dumps(message))
    w.sample()


def leave_garbage_in_a_queue(w: World) -> None:
    w.history.note("fault", n=2, kind="garbage", target="")
    w.client.lpush(f"{w.settings.redis.key_prefix}:store", b"\0 no message")
    w.sample()


def send_a_pickle_long_after_garbage(w: World) -> None:
    with w.history.path.open("a") as file:
        file.write('{"t":-100.0,"op":"fault","n":2,"kind":"garbage","target":""}\n')
    send_a_pickle(w)


def send_jsonpickle(w: World) -> None:
    message = {"body": '{"py/object": "os.system"}', "content-type": "application/json", "headers": {}}
    w.client.lpush(f"{w.settings.redis.key_prefix}:drain", json.dumps(message))
    w.sample()


def keep_a_pickle_in_a_file(w: World) -> None:
    w.settings.data.dir.mkdir(exist_ok=True)
    (w.settings.data.dir / "schedule").write_bytes(pickle.dumps({"a": 1}))


def keep_a_pickle_in_redis(w: World) -> None:
    w.client.set(w.keys("trouble"), pickle.dumps({"a": 1}))


def keep_a_pickle_among_templates(w: World) -> None:
    w.client.hset(w.keys.templates, "7", pickle.dumps({"a": 1}))


# What is done, which invariant it breaks, words of the sentence, and (lost, doubled, dead that are no
# poison).
BROKEN: list[tuple[Callable[[World], None], int, str, tuple[int, int, int]]] = [
    (forget_a_batch, 1, "batch a of shop was accepted 2 times", (0, 0, 0)),
    (lose_a_line, 1, "1 of 10 lines of batch a are lost: it was accepted, and shop lacks 3", (1, 0, 0)),
    (lose_a_file, 1, "10 of 10 lines of batch a are lost", (10, 0, 0)),
    (lose_from_the_followed_file, 2, "2 of 12 lines of the followed file are lost", (2, 0, 0)),
    (
        store_a_half_and_the_whole,
        1,
        "lines 1-2 of shop are stored 2 times, in 0-",
        (0, 2, 0),
    ),
    (store_under_two_record_ids, 1, "line 1 of shop are stored 2 times, under 2 record ids", (0, 1, 0)),
    (store_a_dead_line, 1, "line 14 of shop are stored and dead", (0, 1, 0)),
    (store_what_nobody_sent, 1, "lines 9001-9010 of shop are there, but were never sent", (0, 0, 0)),
    (store_what_was_refused, 1, "lines 31-40 of shop are there, but were refused", (0, 0, 0)),
    (
        let_a_producer_die,
        1,
        "the producer push-1 died of what is no error of a producer: Traceback",
        (0, 0, 0),
    ),
    (store_a_line_without_a_mark, 1, "a line that nobody sent is stored", (0, 0, 0)),
    (store_an_unknown_batch_in_part, 1, "6 of 10 lines of batch u are lost: it was partly stored", (6, 0, 0)),
    (store_under_another_workload, 1, "is stored as one of pay", (0, 0, 0)),
    (give_one_id_to_two_records, 1, "10 record ids name different lines", (0, 0, 0)),
    (tear_a_file, 1, "half written", (10, 0, 0)),
    (cut_a_message, 1, "10 records have another message than their line", (0, 0, 0)),
    (say_two_lines_of_one, 1, "10 records hold more or fewer lines than they say", (0, 0, 0)),
    (bury_what_is_no_poison, 1, "lines 21-30 of shop are dead and no poison: it kills", (0, 0, 10)),
    (bury_a_neighbour_of_poison, 1, "line 25 of shop are dead and no poison", (0, 0, 1)),
    (damage_what_nobody_poisoned, 1, "batch b of shop is dead, though nobody damaged it", (0, 0, 10)),
    (leave_in_flight, 1, "1 batches of shop still wait in stage ingest after settling (b)", (0, 0, 0)),
    (forget_in_flight, 6, "has 30 lines accepted, but 19 stored + 0 in flight + 1 dead", (10, 0, 0)),
    (die_while_scored_again, 1, "scoring it again died: the network is broken", (0, 0, 0)),
    (leave_the_cursor_behind, 2, "stands at byte 77 of", (0, 0, 0)),
    (lose_the_cursor, 2, "stands at byte 0 of", (0, 0, 0)),
    (take_a_token_back, 3, "the newest token of drain went from 5 back to 1", (0, 0, 0)),
    (give_a_token_twice, 3, "token 1 of drain is worker's and somebody else's", (0, 0, 0)),
    (give_an_older_lease, 3, "the lease on drain went from token 1 back to 0", (0, 0, 0)),
    (take_a_gpu_token_back, 3, "the newest token of GPU-1 went from 5 back to 4", (0, 0, 0)),
    (publish_under_an_older_token, 3, "model shared was published under token 1 and then 0", (0, 0, 0)),
    (train_twice_at_a_time, 3, "training two began beside one: the first ended 100 ms later", (0, 0, 0)),
    (train_beside_one_that_never_ended, 3, "2 trainings run at the same time", (0, 0, 0)),
    (train_under_an_older_token, 3, "its token is 1, theirs was 2", (0, 0, 0)),
    (take_the_model_away, 4, f"was at {ONE} and is empty now", (0, 0, 0)),
    (forget_the_model, 4, "the model shared was live, and no version of it is at the end", (0, 0, 0)),
    (take_a_generation_back, 4, "the generation of model shared went from 1 to 0", (0, 0, 0)),
    (move_the_pointer_silently, 4, f"from 1 to 1 while {ONE} became {TWO}", (0, 0, 0)),
    (damage_the_live_model, 4, "the live version of the model shared is not whole", (0, 0, 0)),
    (remove_the_live_model, 4, "the live model shared cannot be served", (0, 0, 0)),
    (take_too_many, 5, "batches wait, 10000 may", (0, 0, 0)),
    (take_too_much, 5, "bytes of 2 batches wait", (0, 0, 0)),
    (split_without_bound, 5, "bytes wait with 2 halves", (0, 0, 0)),
    (keep_too_much_dead, 5, "the dead letters hold", (0, 0, 0)),
    (fill_redis, 5, "Redis uses 1,001 bytes, its limit is 1,000", (0, 0, 0)),
    (grow, 5, "process 42 (pipeline.workers ingest) takes 2,000 MiB, 500 may be", (0, 0, 0)),
    (count_an_accepted_line_twice, 6, "shop has 21 lines accepted, but 19 stored", (0, 0, 0)),
    (count_a_dead_line_twice, 6, "shop counts 2 dead lines, but its dead letters hold 1", (0, 0, 0)),
    (count_what_is_not_there, 6, "1 batches are counted in flight, 0 are there", (0, 0, 0)),
    (count_bytes_that_are_not_there, 6, "-5 bytes are counted in flight, 0 are there", (0, 0, 0)),
    (count_dead_bytes_that_are_not_there, 6, "dead_bytes are counted of dead letters", (0, 0, 0)),
    (count_a_stage_wrongly, 6, "1 batches are counted in stage:drain, 0 are there", (0, 0, 0)),
    (take_counted_lines_back, 6, "accepted lines of shop went from 20 back to 10", (0, 0, 0)),
    (count_stored_lines_wrongly, 6, "24 are counted as stored and the files hold 19", (0, 0, 0)),
    (nobody_watches, 6, "nobody watched", (0, 0, 0)),
    (send_a_pickle, 7, "messages of a queue are application/x-python-serialize", (0, 0, 0)),
    (
        send_a_pickle_long_after_garbage,
        7,
        "messages of a queue are application/x-python-serialize",
        (0, 0, 0),
    ),
    (leave_garbage_in_a_queue, 7, "are unreadable are left in the queues at the end", (0, 0, 0)),
    (send_jsonpickle, 7, "messages of a queue are jsonpickle", (0, 0, 0)),
    (keep_a_pickle_in_a_file, 7, "schedule is a pickle", (0, 0, 0)),
    (keep_a_pickle_in_redis, 7, "trouble in Redis is a pickle", (0, 0, 0)),
    (keep_a_pickle_among_templates, 7, "templates 7 in Redis is a pickle", (0, 0, 0)),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("hurt", "invariant", "words", "counts"), BROKEN, ids=[b[0].__name__ for b in BROKEN]
)
def test_what_is_broken_is_found(
    world: World, hurt: Callable[[World], None], invariant: int, words: str, counts: tuple[int, int, int]
) -> None:
    hurt(world)
    report = world.over(rss_mib=500)
    assert any(v.invariant == invariant and words in v.what for v in report.violations), found(report)
    assert (report.lost, report.doubled, report.dead - report.dead_poison) == counts, found(report)


def test_the_first_violation_is_told_with_the_operations_that_concern_it(world: World) -> None:
    world.push("b", 21)
    world.fault(2, "kill_redis", 3.0, waits_for="lease")
    world.tell("b", 21, "duplicate")
    world.push("c", 31)
    world.store("c")
    world.store("b")
    rewrite(world, "b", lambda f: f.filter(pl.col("line") != 27))
    report = world.over()
    words = report.first().splitlines()
    assert "1 of 10 lines of batch b are lost" in words[0]
    assert "shop lacks 27" in words[0]
    told = [
        (item["op"], item.get("id"), item.get("answer"), item.get("n")) for item in report.violations[0].trace
    ]
    assert ("send", "b", "accepted", None) in told
    assert ("send", "b", "duplicate", None) in told
    assert ("fault", None, None, 2) in told
    assert not any(batch in ("a", "c") for _, batch, _, _ in told)
    assert any("kind=kill_redis" in line for line in words)


def test_a_sum_that_is_off_is_told_with_the_samples_around_it(world: World) -> None:
    count_an_accepted_line_twice(world)
    world.sample()
    report = world.over()
    (violation,) = [v for v in report.violations if "shop has 21" in v.what]
    shown = [item["workloads"]["shop"]["accepted"] for item in violation.trace if item["op"] == "sample"]
    assert shown == [20, 21]


def test_many_violations_of_one_kind_are_told_shortly(world: World) -> None:
    for n in range(40):
        world.tell(f"lost-{n}", 100 + 10 * n)
    report = world.over()
    assert report.lost == 400
    assert any("15 more batches have lost lines" in v.what for v in report.violations)
    assert len(report.violations) < 40
    assert all(len(v.trace) <= 40 for v in report.violations)


def test_recovery_is_told_apart_where_a_timeout_must_pass(world: World) -> None:
    for n, after_s in enumerate((1.0, 2.0, 9.0), 2):
        world.fault(n, "cut", after_s)
    world.fault(5, "kill_writer", 30.0, waits_for="lease")
    world.history.note("fault", n=6, kind="drop", target="", waits_for="")
    found = world.over().recovery
    assert (found["n"], found["p50"], found["p99"], found["max"]) == (4, 1.0, 9.0, 9.0)
    assert found["waiting"] == {"n": 1, "p50": 30.0, "p99": 30.0, "max": 30.0}
    assert found["by_kind"]["cut"]["max"] == 9.0
    assert (found["never"], found["unwatched"]) == (0, 1)


def test_a_history_outlives_its_writer_and_takes_notes_of_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with History(path) as history:
        threads = [
            threading.Thread(target=lambda who=who: [history.note("n", who=who, i=i) for i in range(200)])
            for who in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(list(History.read(path))) == 800  # before it is closed
    history.note("late")
    with path.open("a") as file:
        file.write('{"t":9,"op":"cu')
    items = list(History.read(path))
    assert len(items) == 800
    assert [item["t"] for item in items] == sorted(item["t"] for item in items)
    with path.open("a") as file:
        file.write('\n{"t":9.0,"op":"end"}\n')
    with pytest.raises(ValueError, match="line 801"):
        list(History.read(path))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"id": "a", "first": 2}, "other lines under the id 'a'"),
        ({"id": "b", "first": 5}, "line 5 of shop in two batches"),
        ({"id": "f", "first": 1, "workload": "followed"}, "followed is pushed and followed"),
    ],
)
def test_a_history_that_contradicts_itself_is_refused(
    world: World, second: dict[str, Any], words: str
) -> None:
    facts = dict(second)
    world.tell(facts.pop("id"), facts.pop("first"), **facts)
    with pytest.raises(ValueError, match=words):
        world.over()


@pytest.mark.long
def test_one_lost_line_among_hundreds_of_thousands_is_found(world: World) -> None:
    batches, lines = 1_000, 200
    for n in range(batches):
        world.tell(f"big-{n}", 1_000 + n * lines, lines=lines)
    numbers = pl.int_range(1_000, 1_000 + batches * lines, dtype=pl.UInt64, eager=True).alias("line")
    template = world.sink.read("a", "shop")
    assert template is not None
    mark = pl.concat_str(pl.lit("served mark=shop#"), pl.col("line"))
    own = {"line": pl.col("line"), "record_id": pl.concat_str(pl.lit("big-"), pl.col("line")), "raw": mark}
    frame = template.head(1).drop("line", "record_id", "raw", "message").join(numbers.to_frame(), how="cross")
    frame = frame.with_columns(**own, message=mark).filter(pl.col("line") != 77_777)
    for n, part in enumerate(frame.iter_slices(batches * lines // 50)):
        world.sink.write(f"big-{n}", part)
    report = world.over()
    assert (report.lost, report.doubled) == (1, 0)
    assert "shop lacks 77777" in report.first()


class Dies:
    """A producer that takes one batch and then is no more."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def send(self, *_: Any, **__: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_a_producer_notes_a_batch_before_it_sends_it_and_its_death_with_the_traceback(tmp_path: Path) -> None:
    answers = [Accepted(batch_id="p-1"), RedisUnavailable("away"), KeyError("odd")]
    with History(tmp_path / "history.jsonl") as history:
        sender = Sender("p", "shop", history, Dies(answers))  # type: ignore[arg-type]
        sender.stop.wait = lambda _: False  # type: ignore[method-assign, assignment]
        assert sender.send(["a"]) == "p-1"
        with pytest.raises(KeyError):
            sender.send(["b", "c"])
    noted = list(History.read(tmp_path / "history.jsonl"))
    assert [(item["op"], item["id"], item.get("answer")) for item in noted] == [
        ("send", "p-1", "asked"), ("send", "p-1", "accepted"), ("send", "p-2", "asked"), ("send", "p-2", "unknown"),
        ("send", "p-2", "asked"), ("died", "p-2", None),
    ]  # fmt: skip
    assert "KeyError: 'odd'" in noted[-1]["why"]
    assert (noted[-2]["first"], noted[-2]["lines"]) == (2, 2)
