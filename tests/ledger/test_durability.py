"""What was acknowledged survives what docs/durability.md says it survives; every promise there names its
test."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis
import structlog
from polling import wait_until
from power_cut import Power, power
from rich.console import Console
from small_bundles import AT, ONE, THREE, TWO, written

from bench._log_files import read_file
from pipeline.commands.send import resend_buffer as kept
from pipeline.commands.send import verb as send
from pipeline.commands.send.sender import Sender
from pipeline.errors import CursorMoved
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.models.registry import Registry
from pipeline.producer import Producer
from pipeline.records.batch import Purpose
from pipeline.records.delivery import UNFINISHED, Accepted, Stage
from pipeline.redis.connection import connect
from pipeline.redis.leases import Leases, granted
from pipeline.sinks import forgotten
from pipeline.sinks.parquet import ParquetSink
from pipeline.sources.chunks import Cursor
from pipeline.sources.packed.archives import Source
from pipeline.sources.pushed import framed
from pipeline.sources.stdin import read_stream
from pipeline.tasks import drain, ingest, store
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Drawing the traceback of a broken line takes seconds. conftest.py sets logging back."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture
def own() -> Iterator[Power]:
    """A server of this test alone; batches of two records."""
    with power(batch_records=2) as running:
        yield running


def lines(ledger: Ledger) -> list[str]:
    """Every line that was accepted."""
    found: list[str] = []
    for key in ledger.client.scan_iter(ledger.keys("payload", "*")):
        found += framed(ledger.payload(key.decode().rpartition(":")[2]))[0]["raw"].to_list()
    return sorted(found)


def said(sender: Sender) -> str:
    stream = sender.console.file
    assert isinstance(stream, StringIO)
    return stream.getvalue()


class Cutting(Producer):
    """A producer that knows when the power goes: after its n-th acknowledgement, and what the disk has
    then."""

    power: Power
    back_to: int
    cut_after: int
    batches = 0

    def accept(self, *args: Any, **more: Any) -> Any:
        answer = super().accept(*args, **more)
        self.batches += 1
        if self.batches == self.cut_after:
            self.power.cut(self.back_to)
        return answer


def sender(own: Power, *, cut_after: int = 0, back_to: int | None = None) -> Sender:
    producer = Cutting.connect(own.settings)
    producer.power, producer.cut_after = own, cut_after
    producer.back_to = own.now() if back_to is None else back_to
    return Sender(producer, own.settings, Console(file=StringIO(), width=200))


def numbered(first: int, last: int) -> list[str]:
    # Long enough for three of them to tell one file from another (files.IDENTITY_BYTES).
    return [f"line {n:03} of a service {'that talks a lot ' * 5}end" for n in range(first, last + 1)]


def log(path: Path, first: int, last: int) -> Path:
    with path.open("a") as file:
        file.writelines(line + "\n" for line in numbered(first, last))
    return path


# ---- sources -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("cut_after", [1, 3, 5], ids=["first", "middle", "last"])
def test_a_running_send_sends_again_what_redis_lost(own: Power, tmp_path: Path, cut_after: int) -> None:
    path = log(tmp_path / "app.log", 1, 10)
    sending = sender(own, cut_after=cut_after)
    send._file(sending, path, "shop")
    ledger = sending.producer.ledger
    assert lines(ledger) == numbered(1, 10)
    assert (sending.lines, sending.batches) == (10, 5)
    stored = ledger.intake.cursor(send._cursor_key(sending, Source(path=path), "shop"))
    assert stored is not None and Cursor.unpack(stored).line == 10


def test_a_running_send_reads_again_what_it_no_longer_keeps(
    own: Power, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "KEEP_BYTES", 0)
    path = log(tmp_path / "app.log", 1, 10)
    sending = sender(own, cut_after=4)
    send._file(sending, path, "shop")
    assert lines(sending.producer.ledger) == numbered(1, 10)


def test_a_file_sent_again_after_the_command_ended_adds_what_redis_lost(own: Power, tmp_path: Path) -> None:
    path = log(tmp_path / "app.log", 1, 4)
    send._file(sender(own), path, "shop")
    before = own.now()
    log(path, 5, 9)
    send._file(sender(own), path, "shop")
    own.cut(before)
    again = sender(own)
    assert lines(again.producer.ledger) == numbered(1, 4)
    send._file(again, path, "shop")
    assert lines(again.producer.ledger) == numbered(1, 9)


def test_waiting_for_results_sends_again_what_redis_lost_meanwhile(own: Power, tmp_path: Path) -> None:
    path = log(tmp_path / "app.log", 1, 4)
    sending = sender(own)
    before = own.now()
    send._file(sending, path, "shop")
    own.cut(before)
    sending.confirm_all()
    assert lines(sending.producer.ledger) == numbered(1, 4)


def test_standard_input_is_sent_again_from_what_is_kept(own: Power) -> None:
    text = "".join(line + "\n" for line in numbered(1, 10)).encode()
    sending = sender(own, cut_after=5)
    chunks = read_stream(BytesIO(text), max_records=2)
    send._stream(sending, chunks, workload="shop", source="stdin", key="stdin-key")
    ledger = sending.producer.ledger
    assert lines(ledger) == numbered(1, 10)
    assert not sending.gone
    assert ledger.intake.cursor("stdin-key") is None, "nobody can go on there"


@pytest.mark.long
def test_standard_input_that_is_not_kept_any_more_is_named_as_lost(
    own: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "KEEP_BYTES", 0)
    text = "".join(line + "\n" for line in numbered(1, 10)).encode()
    sending = sender(own, cut_after=3)
    chunks = read_stream(BytesIO(text), max_records=2)
    send._stream(sending, chunks, workload="shop", source="stdin", key="stdin-key")
    assert lines(sending.producer.ledger) == numbered(7, 10)
    assert sending.gone
    assert "Redis lost lines 1 to 6 of stdin" in said(sending)


def test_of_a_pipe_that_lost_more_than_is_kept_what_is_kept_is_sent_again(
    own: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(line + "\n" for line in numbered(1, 20)).encode()
    chunks = list(read_stream(BytesIO(text), max_records=2))
    monkeypatch.setattr(kept, "KEEP_BYTES", int(chunks[0].records.estimated_size() * 2.6))
    sending = sender(own, cut_after=6)
    send._stream(sending, iter(chunks), workload="shop", source="stdin", key="stdin-key")
    assert lines(sending.producer.ledger) == numbered(9, 20), "the newest two chunks were kept"
    assert sending.gone
    assert "Redis lost lines 1 to 8 of stdin" in said(sending)


@pytest.fixture
def follower(own: Power, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Starts `logweir send --follow` on a file that has lines 1 to 3."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> Path:
        path = log(tmp_path / "live.log", 1, 3)
        env = {
            **os.environ,
            "REDIS_URL": own.server.url,
            "LOGWEIR_KEY_PREFIX": "power",
            "LOGWEIR_DATA_DIR": str(tmp_path / "data"),
        }
        command = [sys.executable, "-m", "pipeline.cli", "send", "--follow", str(path), "--workload", "shop"]
        started.append(
            subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        return path

    yield start
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


@pytest.mark.long
@pytest.mark.parametrize("meanwhile", ["silent", "written", "rotated"])
def test_a_follower_sends_again_what_redis_lost(
    own: Power, follower: Callable[[], Path], meanwhile: str
) -> None:
    path, ledger = follower(), Ledger(connect(own.settings), own.settings)
    assert wait_until(lambda: lines(ledger) == numbered(1, 3), timeout_s=60)
    before = own.now()
    log(path, 4, 6)
    assert wait_until(lambda: lines(ledger) == numbered(1, 6), timeout_s=60)
    expected = numbered(1, 6)
    if meanwhile == "rotated":  # what was lost stands in a file that has another name now
        path.rename(path.with_suffix(".log.1"))
    own.cut(before)
    if meanwhile != "silent":
        log(path, 7, 8)
        expected = numbered(1, 8)

    def there() -> bool:
        try:
            return lines(ledger) == expected
        except redis.RedisError:
            return False

    assert wait_until(there, timeout_s=60), lines(ledger)


def test_two_senders_of_one_file_take_turns_and_double_nothing(own: Power, tmp_path: Path) -> None:
    path = log(tmp_path / "app.log", 1, 8)

    class Meddled(Producer):
        """While it sends, another one sends the same file."""

        done = False

        def accept(self, *args: Any, **more: Any) -> Any:
            answer = super().accept(*args, **more)
            if not self.done:
                self.done = True
                send._file(sender(own), path, "shop")
            return answer

    first = Sender(Meddled.connect(own.settings), own.settings, Console(file=StringIO()))
    send._file(first, path, "shop")
    assert lines(first.producer.ledger) == numbered(1, 8)
    assert first.batches == 1


def test_a_cursor_in_another_form_is_compared_as_it_stands(own: Power, tmp_path: Path) -> None:
    path = log(tmp_path / "app.log", 1, 4)
    first = sender(own)
    send._file(first, path, "shop")
    ledger, key = first.producer.ledger, send._cursor_key(first, Source(path=path), "shop")
    stored = ledger.intake.cursor(key)
    assert stored is not None
    ledger.client.hset(ledger.keys.cursors, key, stored.replace(": ", ":").replace("}", ',"more":1}'))
    log(path, 5, 6)
    send._file(sender(own), path, "shop")
    ledger.client.hset(ledger.keys.cursors, key, "of a build that nobody remembers")
    last = sender(own)
    send._file(last, path, "shop")
    assert lines(ledger) == numbered(1, 6), "read from the beginning; known batches are recognised"


def test_a_batch_from_elsewhere_changes_nothing(own: Power, tmp_path: Path) -> None:
    producer = Producer.connect(own.settings)
    first, second = read_file(log(tmp_path / "app.log", 1, 4), max_records=2)
    given: dict[str, Any] = {"workload": "shop", "source": "app.log", "source_key": "k", "cursor_key": "app"}
    assert producer.send_chunk(first, after="", **given) == Accepted(batch_id="k-0")
    lost_answer = producer.send_chunk(first, after="", **given)
    assert lost_answer == Accepted(batch_id="k-0", duplicate=True)
    before = producer.ledger.backlog.counts()
    for after in ("", "somewhere"):
        with pytest.raises(CursorMoved) as moved:
            producer.send_chunk(second, after=after, **given)
        assert moved.value.cursor == first.cursor.pack()
    assert producer.ledger.backlog.counts() == before
    assert producer.send_chunk(second, after=first.cursor.pack(), **given)
    assert producer.ledger.intake.cursor("app") == second.cursor.pack()


# ---- acknowledged pushes -------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_killing_redis_right_after_an_acknowledgement_loses_none(fsync: str) -> None:
    """What a killed process has written is the system's, synced or not. Under `everysec` a Redis that still
    waits for the disk writes later than it answers."""
    with power(redis_fsync=fsync) as own:
        producer = Producer.connect(own.settings)
        producer.send(["warm"], workload="shop", batch_id="first")
        for n in range(10):
            producer.send([f"line {n:03}"], workload="shop", batch_id=f"b{n}")
            client = producer.ledger.client
            assert wait_until(lambda: not client.info("persistence")["aof_buffer_length"], timeout_s=10)  # noqa: B023
            own.cut()
            assert producer.ledger.state(f"b{n}") == "ingest"
        assert len(lines(producer.ledger)) == 11


def synced_when_answered(own: Power, trace: Path, batches: int) -> list[bool]:
    """For each accepted batch, whether the AOF was synced, as its last change, before Redis wrote the
    answer."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not here")
    producer = Producer.connect(own.settings)
    calls = "trace=write,writev,sendto,fsync,fdatasync"
    # Of the main thread alone: it writes, and answers.
    command = ["strace", "-y", "-e", calls, "-o", str(trace), "-p", str(own.process.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        if "attached" not in (said := strace.stderr.readline()):
            pytest.skip(f"strace is not here for other processes: {said}")
        for n in range(batches):
            producer.send(["x"], workload="shop", batch_id=f"b{n}")
        strace.send_signal(signal.SIGINT)
    synced, found = False, []
    for call in trace.read_text().splitlines():
        if "appendonly" in call:
            synced = call.startswith(("fsync", "fdatasync"))
        elif "accepted" in call:
            found.append(synced)
            synced = False
    return found


@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_always_syncs_before_it_answers(fsync: str, tmp_path: Path) -> None:
    with power(redis_fsync=fsync) as own:
        found = synced_when_answered(own, tmp_path / "trace", batches=5)
        assert found == [fsync == "always"] * 5


def test_a_push_that_redis_lost_is_the_same_batch_when_it_is_sent_again(own: Power) -> None:
    context = Context(make_app(own.settings), own.settings)
    producer = Producer(context.ledger, context.submit, own.settings)
    before = own.now()
    producer.send(["one", "two"], workload="shop", batch_id="mine")
    work_off(context)
    assert messages(context) == ["one", "two"]
    own.cut(before)
    assert context.ledger.state("mine") == ""
    assert producer.send(["one", "two"], workload="shop", batch_id="mine") == Accepted(batch_id="mine")
    work_off(context)
    assert messages(context) == ["one", "two"]
    balanced(context)


# ---- results that are older or newer than the ledger ---------------------------------------------


def context_of(own: Power) -> Context:
    return Context(make_app(own.settings), own.settings)


def work_off(context: Context, *, broken: str = "") -> None:
    """Do every step that waits, as workers would; a step on a batch with a line `broken` fails."""
    steps = {Stage.INGEST: ingest.step, Stage.DRAIN: drain.step, Stage.STORE: store.step}

    def step(stage: Stage) -> Any:
        def fails(context: Context, claim: Any) -> Any:
            if broken and broken in framed(context.ledger.payload(claim.batch_id))[0]["raw"].to_list():
                raise ValueError("broken")
            return steps[stage](context, claim)

        return fails

    ledger = context.ledger
    while waiting := [i.decode() for i in ledger.client.zrange(ledger.keys.due, 0, -1)]:
        for batch_id in waiting:
            ledger.client.hset(ledger.keys.batch(batch_id), mapping={"not_before": 0, "owner": ""})
            state = ledger.state(batch_id)
            if state in UNFINISHED:
                perform(context, Stage(state), batch_id, step(Stage(state)))


def results(context: Context, purpose: Purpose = Purpose.SCORE) -> pl.DataFrame:
    root = context.settings.data.results if purpose is Purpose.SCORE else context.settings.data.baseline
    return ParquetSink(root).scan().collect()


def messages(context: Context) -> list[str]:
    return sorted(results(context)["message"].to_list())


def balanced(context: Context) -> dict[str, int]:
    """Nothing in flight, and every accepted line accounted for."""
    totals = context.ledger.backlog.totals()["shop"]
    assert context.ledger.backlog.counts()["batches"] == 0
    assert totals["accepted"] == sum(totals.get(n, 0) for n in ("stored", "dead", "discarded", "skipped"))
    return totals


@pytest.mark.long
def test_lines_that_are_sent_again_in_other_pieces_stand_in_the_results_once(
    own: Power, tmp_path: Path
) -> None:
    path = log(tmp_path / "app.log", 1, 3)
    context = context_of(own)
    before = own.now()
    for last in (5, 9):  # three batches of three sendings
        send._file(sender(own), path, "shop")
        work_off(context)
        log(path, last - 1, last)
    send._file(sender(own), path, "shop")
    work_off(context)
    there = messages(context)
    own.cut(before)
    whole = own.settings.replace(batch_records=100)
    one = Sender(Producer.connect(whole), whole, Console(file=StringIO()))
    send._file(one, path, "shop")
    assert one.batches == 1
    work_off(context_of(own))  # another process, which has not seen the first Redis
    assert messages(context) == there
    assert results(context)["record_id"].is_unique().all()
    balanced(context)


def test_a_part_of_a_lost_batch_is_taken_over_and_its_rest_stays(own: Power, tmp_path: Path) -> None:
    whole = own.settings.replace(batch_records=100)
    path = log(tmp_path / "app.log", 1, 7)
    context, before = context_of(own), own.now()
    send._file(Sender(Producer.connect(whole), whole, Console(file=StringIO())), path, "shop")
    work_off(context)
    own.cut(before)
    again = sender(own)
    send._file(again, path, "shop")
    ledger = context.ledger
    _, *others = sorted(i.decode() for i in ledger.client.zrange(ledger.keys.due, 0, -1))
    assert len(others) == 3
    perform(context, Stage.INGEST, others[0], ingest.step)
    perform(context, Stage.DRAIN, others[0], drain.step)
    perform(context, Stage.STORE, others[0], store.step)
    assert messages(context) == numbered(1, 7), "nothing was removed before it was stored elsewhere"
    work_off(context)
    assert messages(context) == numbered(1, 7)
    balanced(context)


@pytest.mark.long
def test_halves_that_redis_forgot_give_way_to_their_batch(own: Power) -> None:
    context = context_of(own)
    producer = Producer(context.ledger, context.submit, own.settings.replace(batch_records=100))
    producer.send(["one", "two", "bad", "four"], workload="shop", batch_id="b")
    before = own.now()
    work_off(context, broken="bad")
    assert messages(context) == ["four", "one", "two"]
    assert balanced(context)["dead"] == 1
    own.cut(before)
    work_off(context)  # what was wrong with the line is mended
    assert messages(context) == ["bad", "four", "one", "two"]
    assert balanced(context).get("dead", 0) == 0


def test_a_commit_that_redis_forgot_is_done_again(own: Power) -> None:
    context = context_of(own)
    producer = Producer(context.ledger, context.submit, own.settings)
    producer.send(["one", "two"], workload="shop", batch_id="b")
    before = own.now()
    work_off(context)
    own.cut(before)
    assert context.ledger.state("b") == "ingest"
    work_off(context)
    assert messages(context) == ["one", "two"]
    assert balanced(context)["stored"] == 2


@pytest.mark.long
def test_a_burial_a_retry_and_a_discard_that_redis_forgot_may_be_repeated(own: Power) -> None:
    context = context_of(own)
    ledger = context.ledger
    producer = Producer(ledger, context.submit, own.settings)
    producer.send(["bad"], workload="shop", batch_id="b")
    alive = own.now()
    work_off(context, broken="bad")
    own.cut(alive)
    assert ledger.state("b") == "ingest"
    work_off(context, broken="bad")
    assert balanced(context)["dead"] == 1
    dead = own.now()
    assert ledger.dead_letters.retry("b")
    work_off(context)
    assert messages(context) == ["bad"]
    own.cut(dead)
    assert [letter.batch_id for letter in ledger.dead_letters.newest()] == ["b"]
    producer.send(["other"], workload="shop", batch_id="c")
    work_off(context)
    assert messages(context) == ["other"], "what is dead again stands in no results"
    assert ledger.dead_letters.discard("b")
    assert balanced(context)["discarded"] == 1
    own.cut(dead)
    assert ledger.dead_letters.retry("b")
    work_off(context)
    assert messages(context) == ["bad", "other"]


def test_a_worker_that_outlives_its_batch_in_redis_leaves_no_results(own: Power) -> None:
    context = context_of(own)
    before = own.now()
    Producer(context.ledger, context.submit, own.settings).send(["one"], workload="shop", batch_id="b")
    perform(context, Stage.INGEST, "b", ingest.step)
    perform(context, Stage.DRAIN, "b", drain.step)
    sink = context.sink(Purpose.SCORE)
    write = sink.write_all

    def stalls(*args: Any, **more: Any) -> None:
        write(*args, **more)
        own.cut(before)

    sink.write_all = stalls  # type: ignore[method-assign]
    perform(context, Stage.STORE, "b", store.step)
    assert sink.read("b", "shop") is None


def stopped_before(sink: Any, name: str, meanwhile: Callable[[], None]) -> None:
    """A worker that is stopped before it writes or removes, and goes on after `meanwhile`."""
    real = getattr(sink, name)

    def stopped(*args: Any, **more: Any) -> None:
        setattr(sink, name, real)
        meanwhile()
        real(*args, **more)

    setattr(sink, name, stopped)


def ready_to_store(own: Power, texts: list[str]) -> tuple[Context, Context]:
    """Two workers, and a batch b that one of them has brought to its last stage."""
    slow, quick = context_of(own), context_of(own)
    whole = own.settings.replace(batch_records=100)
    Producer(slow.ledger, slow.submit, whole).send(texts, workload="shop", batch_id="b")
    perform(slow, Stage.INGEST, "b", ingest.step)
    perform(slow, Stage.DRAIN, "b", drain.step)
    return slow, quick


@pytest.mark.long
def test_who_stalls_over_forgotten_files_takes_nothing_out_that_is_stored_meanwhile(own: Power) -> None:
    first = context_of(own)
    whole = own.settings.replace(batch_records=100)
    texts = ["one", "two", "bad", "four"]
    Producer(first.ledger, first.submit, whole).send(texts, workload="shop", batch_id="b")
    before = own.now()
    work_off(first, broken="bad")
    own.cut(before)
    slow, quick = context_of(own), context_of(own)
    perform(slow, Stage.INGEST, "b", ingest.step)
    perform(slow, Stage.DRAIN, "b", drain.step)
    forgotten = slow.forgotten(Purpose.SCORE)
    # It has written, and the halves are stored once more before it looks what to take out.
    stopped_before(forgotten, "taken_over", lambda: work_off(quick, broken="bad"))
    perform(slow, Stage.STORE, "b", store.step)
    assert messages(quick) == ["four", "one", "two"]
    assert balanced(quick)["dead"] == 1


def test_what_another_process_has_stored_is_not_forgotten_any_more(own: Power) -> None:
    first = context_of(own)
    producer = Producer(first.ledger, first.submit, own.settings)
    before = own.now()
    producer.send(["one", "two"], workload="shop", batch_id="b")
    work_off(first)
    rows = results(first)
    own.cut(before)
    slow, quick = context_of(own).forgotten(Purpose.SCORE), context_of(own)
    assert slow is not None
    slow.look()
    producer.send(["one", "two"], workload="shop", batch_id="b")
    work_off(quick)
    slow.taken_over("other", rows)
    assert messages(quick) == ["one", "two"]


def test_who_stalls_before_its_write_does_not_write_over_what_was_scored_again(own: Power) -> None:
    slow, quick = ready_to_store(own, ["one"])
    sink = slow.sink(Purpose.SCORE)

    def scored_again() -> None:
        work_off(quick)
        assert quick.ledger.backlog.start_rescoring(9, has_model=lambda _: True) == ["b"]
        claim = quick.ledger.claim("b", Stage.INGEST, "quick")
        assert not isinstance(claim, str)
        verdict = results(quick).with_columns(score=pl.lit(0.9), anomalous=pl.lit(True))
        quick.sink(Purpose.SCORE).write("b", verdict)
        quick.ledger.commit(claim, warming=False, outcomes={})

    stopped_before(sink, "write_all", scored_again)
    perform(slow, Stage.STORE, "b", store.step)
    assert results(quick)["score"].to_list() == [0.9]


def test_who_cleans_up_removes_nothing_that_was_stored_meanwhile(own: Power) -> None:
    slow, quick = ready_to_store(own, ["one"])
    ledger, sink = slow.ledger, slow.sink(Purpose.SCORE)

    def redis_forgets() -> None:
        own.cut(0)

    def sent_again() -> None:
        Producer(quick.ledger, quick.submit, own.settings).send(["one"], workload="shop", batch_id="b")
        work_off(quick)

    stopped_before(ledger, "commit", redis_forgets)
    stopped_before(sink, "remove", sent_again)
    perform(slow, Stage.STORE, "b", store.step)
    assert quick.ledger.state("b") == "done"
    assert messages(quick) == ["one"]


@pytest.mark.long
def test_rows_of_a_split_batch_whose_writer_was_killed_are_removed_when_redis_comes_back(own: Power) -> None:
    slow, quick = ready_to_store(own, ["one", "two", "bad", "four"])
    # As its writer left it, who had written and was killed before it saw that the batch was split.
    work_off(slow)
    rows = results(slow)
    own.cut(0)
    slow.sink(Purpose.SCORE).remove("b", "shop")
    whole = own.settings.replace(batch_records=100)
    Producer(quick.ledger, quick.submit, whole).send(
        ["one", "two", "bad", "four"], workload="shop", batch_id="b"
    )
    work_off(quick, broken="bad")
    slow.sink(Purpose.SCORE).write("b", rows)
    own.cut()
    producer = Producer(slow.ledger, slow.submit, own.settings)
    producer.send(["other"], workload="shop", batch_id="c")
    work_off(quick)
    assert messages(quick) == ["four", "one", "other", "two"]


def test_a_dead_batch_that_is_retried_while_others_look_keeps_its_results(own: Power) -> None:
    context = context_of(own)
    producer = Producer(context.ledger, context.submit, own.settings)
    producer.send(["bad"], workload="shop", batch_id="b")
    work_off(context, broken="bad")
    dead = own.now()
    assert context.ledger.dead_letters.retry("b")
    work_off(context)
    own.cut(dead)
    slow, quick = context_of(own).forgotten(Purpose.SCORE), context_of(own)
    assert slow is not None

    def retried() -> None:
        assert quick.ledger.dead_letters.retry("b")
        work_off(quick)

    stopped_before(slow._sink, "take_out", retried)
    slow.look()
    assert messages(quick) == ["bad"]


def test_a_damaged_file_of_a_dead_batch_stops_nobody(own: Power) -> None:
    context = context_of(own)
    producer = Producer(context.ledger, context.submit, own.settings)
    producer.send(["bad"], workload="shop", batch_id="b")
    work_off(context, broken="bad")
    dead = own.now()
    assert context.ledger.dead_letters.retry("b")
    work_off(context)
    (file,) = own.settings.data.results.rglob("*.parquet")
    file.write_bytes(b"PAR1 damaged PAR1")
    own.cut(dead)
    producer.send(["other"], workload="shop", batch_id="c")
    work_off(context_of(own))
    assert messages(context) == ["other"]


def test_of_too_many_forgotten_records_the_newest_are_known(
    own: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgotten, "MAX_RECORDS", 2)
    context = context_of(own)
    producer = Producer(context.ledger, context.submit, own.settings)
    before = own.now()
    for n in range(3):
        producer.send([f"first {n}", f"second {n}"], workload="shop", batch_id=f"b{n}")
        work_off(context)
    rows = {n: results(context).filter(pl.col("message").str.contains(str(n))) for n in range(3)}
    own.cut(before)
    process = context_of(own).forgotten(Purpose.SCORE)
    assert process is not None
    process.look()
    process.taken_over("other", rows[0])
    assert len(messages(context)) == 6, "the oldest is left out"
    process.taken_over("other", rows[2])
    assert messages(context) == sorted(t for n in range(2) for t in rows[n]["message"])


def test_a_batch_whose_id_is_no_file_name_is_known_by_it(own: Power) -> None:
    context = context_of(own)
    producer = Producer(context.ledger, context.submit, own.settings)
    names = ["Order-1", "x" * 200]
    for n, name in enumerate(names):
        producer.send([f"line {n}"], workload="shop", batch_id=name)
    work_off(context)
    own.cut()
    process = context_of(own).forgotten(Purpose.SCORE)
    assert process is not None
    process.look()
    assert context.client.hlen(context.ledger.keys.forgotten("score")) == 1, "the start of Redis alone"
    files = ParquetSink(own.settings.data.results)
    assert sorted(files.latest(60, 10)) == names


@pytest.mark.long
def test_a_rescoring_that_redis_forgot_is_done_again(own: Power) -> None:
    context = context_of(own)
    ledger = context.ledger
    Producer(ledger, context.submit, own.settings).send(["one", "two"], workload="shop", batch_id="b")
    work_off(context)
    before, stored = own.now(), balanced(context)
    for _ in range(2):
        assert ledger.backlog.start_rescoring(10, has_model=lambda _: True) == ["b"]
        work_off(context)  # no model after all: it waits for one again
        assert messages(context) == ["one", "two"]
        own.cut(before)
        assert ledger.backlog.warming() == 1
        assert balanced(context) == stored


def test_a_publication_that_redis_forgot_leaves_the_version_before_and_newer_tokens() -> None:
    with power(lease_ttl_ms=2000) as own:
        client = connect(own.settings)
        registry, leases = Registry(client, own.settings), Leases(client, own.settings)

        def publish(version: str) -> int:
            floor = registry.newest_token()
            lease = granted(leases.request("training", "trainer", floor=floor), "training")
            written(registry, version)
            registry.publish(version, lease, at=AT)
            leases.release(lease)
            return lease.token

        assert publish(ONE) == 1
        before = own.now()
        assert publish(TWO) == 2
        own.cut(before)
        live = registry.current()
        assert live is not None and live.version == ONE
        registry.manifest(live.version)
        assert publish(THREE) == 3, "the second token is on the disk, so it is not given again"
        live = registry.current()
        assert live is not None and (live.version, live.previous) == (THREE, ONE)
        assert registry.versions() == [ONE, TWO, THREE]


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "durability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", page)
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 10
    assert not [name for name in named if name not in defined]
    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert all("`test_" in row for row in rows if not row.startswith("| what")), "a promise without a test"
