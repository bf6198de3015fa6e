"""The promise of every source: in whatever order records are fetched, refused and accepted, each fetched
record is accepted once, and no cursor passes a record that is not in."""

import asyncio
import json
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_rotation import Program
from nats.aio.msg import Msg
from nats_server import payload
from rich.console import Console

from bench._rotation import STYLES, Style
from pipeline.commands.send import resend_buffer, verb
from pipeline.commands.send import sender as sender_module
from pipeline.commands.send.sender import Sender
from pipeline.errors import CursorMoved, RedisUnavailable
from pipeline.ledger.intake import CursorStep
from pipeline.nats.payloads import payload_bytes
from pipeline.nats.streams import StreamMessage
from pipeline.opensearch import scan
from pipeline.opensearch.dedup_window import OVERLAP_S
from pipeline.producer import Producer
from pipeline.records.batch import Batch, utc_now
from pipeline.records.delivery import Accepted, Full
from pipeline.settings import Settings
from pipeline.settings.kafka import KafkaSource
from pipeline.settings.nats import NatsSource
from pipeline.sources.chunks import Chunk
from pipeline.sources.flush_policy import FlushPolicy
from pipeline.sources.follow import QUIET_S, Follower
from pipeline.sources.kafka.cursor import PartitionCursor
from pipeline.sources.nats.cursor import StreamCursor
from pipeline.sources.opensearch import Poller, _Shard, deliver
from pipeline.workers.kafka import reader as kafka_module
from pipeline.workers.kafka.partition import Partition
from pipeline.workers.kafka.reader import KafkaReader
from pipeline.workers.nats import reader as nats_module
from pipeline.workers.nats.at_most_once import AtMostOnceReader
from pipeline.workers.nats.reader import NatsReader

Step = int | Literal["full", "unanswered", "accept"]
FETCHES = st.integers(1, 5)
STEPS = st.lists(FETCHES | st.sampled_from(["full", "accept"]), max_size=25)
STEPS_UNANSWERED = st.lists(FETCHES | st.sampled_from(["full", "unanswered", "accept"]), max_size=25)
SETTINGS = Settings(batch_records=2)
POLLED = SETTINGS.replace(opensearch_source="logs", opensearch_url="http://localhost:9200")


class Ledger:
    """Stands for the producer and its ledger: gives the answer that a step asks for."""

    def __init__(self) -> None:
        self.answer: Step = "accept"
        self.taken: dict[str, list[Any]] = {}  # the places of a batch by its id, of a file its lines
        self.cursor = ""
        self.lost = 0
        self.settings = SETTINGS
        intake = SimpleNamespace(cursor=lambda _key: self.cursor or None, move_cursor=self.move_cursor)
        self.ledger = SimpleNamespace(client=None, intake=intake)
        self.clock = utc_now

    def skips(self, _workload: str) -> bool:
        return False

    def is_past(self, _moment: object) -> bool:
        return False

    def accept_all(
        self, batches: Sequence[Batch], _requests: object, *, step: CursorStep | None = None, **_: object
    ) -> Accepted | Full:
        if self.answer == "full":
            return Full(pending_bytes=0, pending_batches=0, retry_after_s=0.0, refused=2)
        for batch in batches:
            self.taken.setdefault(batch.batch_id, list(cast("Any", batch.records).places))
        if self.answer == "unanswered":  # it is in, but the answer is lost
            raise RedisUnavailable("the connection broke")
        if step is not None:
            assert step.after == self.cursor
            self.cursor = step.cursor
        return Accepted(batch_id="")

    def send_chunk(self, chunk: Chunk, *, source_key: str, after: str, **_: object) -> Accepted | Full:
        lines = [line for raw in chunk.records["raw"] for line in raw.split("\n")]
        return self._take(f"{source_key}-{chunk.start:x}", lines, cursor=chunk.cursor.pack(), after=after)

    def accept(self, batch: Batch, *, cursor_key: str, cursor: str, after: str) -> Accepted | Full:
        messages = cast("pl.DataFrame", batch.records)["message"].to_list()
        return self._take(batch.batch_id, messages, cursor=cursor, after=after)

    def _take(self, batch_id: str, places: list[Any], *, cursor: str, after: str) -> Accepted | Full:
        """As `ledger/accept.lua` does."""
        if self.answer == "full":
            return Full(pending_bytes=0, pending_batches=0, retry_after_s=0.01, refused=2)
        if self.cursor == cursor and self.taken.get(batch_id) == places:
            return Accepted(batch_id=batch_id, duplicate=True)
        if self.cursor != after:
            raise CursorMoved("read to another place", self.cursor)
        assert batch_id not in self.taken
        self.taken[batch_id], self.cursor = places, cursor
        if self.answer == "unanswered":
            self.answer = "accept"
            raise RedisUnavailable("the connection broke")
        return Accepted(batch_id=batch_id)

    def move_cursor(self, step: CursorStep, *, lost: int) -> str:
        if self.cursor == step.after:
            self.cursor, self.lost = step.cursor, self.lost + lost
        return self.cursor

    @property
    def places(self) -> list[Any]:
        return [place for places in self.taken.values() for place in places]


def made(kind: type, source: object, ledger: Ledger) -> Any:
    first = source if kind is KafkaReader else SimpleNamespace(source=source)
    return kind(first, cast("Producer", ledger), holder="one", stop=threading.Event())


@given(steps=STEPS)
def test_a_reader_of_kafka_accepts_each_record_once(steps: list[Step]) -> None:
    ledger, place = Ledger(), ("t", 0)
    reader = made(KafkaReader, KafkaSource.parse("kafka://localhost:9092/t"), ledger)
    begin = PartitionCursor("id", 0)
    reader.partitions[place] = Partition(cluster="c", place=place, cursor=begin)
    ledger.cursor, offset = str(begin), 0

    def message(number: int) -> SimpleNamespace:
        facts = {"topic": "t", "partition": 0, "offset": number, "value": b"line %d" % number, "key": None}
        return SimpleNamespace(
            **{name: lambda value=value: value for name, value in facts.items()},
            headers=list,
            timestamp=lambda: (0, 0),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kafka_module, "HELD_BYTES", 0)  # every record is due at once
        for step in [*steps, "accept", "accept"]:  # the first one may take a refused offer only
            if isinstance(step, int):
                fetched = [message(offset + n) for n in range(step)]
                reader._poll(SimpleNamespace(poll=lambda *_, some=fetched: (some, [])))
                offset += step
                continue
            ledger.answer = step
            reader._take_in(SimpleNamespace())
            assert ledger.places == list(range(PartitionCursor.parse(ledger.cursor).offset))
    assert ledger.places == list(range(offset))


@given(steps=STEPS, per_slot=st.integers(1, 9))
def test_a_reader_of_a_stream_accepts_each_message_once(steps: list[Step], per_slot: int) -> None:
    ledger = Ledger()
    reader = made(NatsReader, NatsSource.parse("nats://localhost:4222/raw_logs?stream=s"), ledger)
    reader.cursor, last = StreamCursor("id", 1), 0
    ledger.cursor = str(reader.cursor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nats_module, "OPEN_S", -1.0)  # the last window is due at once
        for step in [*steps, "accept"]:
            if isinstance(step, int):
                for number in range(last + 1, last + step + 1):
                    nanos, data = number // per_slot * 250_000_000, payload_bytes(payload(number))
                    reader._add(StreamMessage("raw_logs", data, number, nanos, 0, {}))
                last += step
                continue
            ledger.answer = step
            reader._take_in()
            assert ledger.places == list(range(1, StreamCursor.parse(ledger.cursor).sequence))
    assert ledger.places == list(range(1, last + 1))


@given(steps=STEPS_UNANSWERED)
def test_a_reader_of_core_nats_accepts_each_message_once(steps: list[Step]) -> None:
    ledger, count = Ledger(), 0
    reader = made(AtMostOnceReader, NatsSource.parse("nats://localhost:4222/raw_logs?mode=core"), ledger)
    for step in [*steps, "accept", "accept"]:
        if isinstance(step, int):
            for number in range(count, count + step):
                message = SimpleNamespace(subject="raw_logs", data=payload_bytes(payload(number)))
                asyncio.run(reader._on_message(cast("Msg", message)))
            count += step
        elif reader._held:
            ledger.answer = step
            try:
                reader._accept()
            except RedisUnavailable:
                assert step == "unanswered"
    assert sorted(ledger.places) == list(range(1, count + 1))


FORGOTTEN_S = 1.0  # what Redis loses with the power
NOTICED_S = 2.0  # within which a sender sees that


class Killed(Exception):
    """The sender's process ends here."""


class Ended(Exception):
    """Everything was done."""


class Driven:
    """A reader that is run as a whole. The next step is done in each of its pauses: between two looks at its
    source, and while the pipeline is full."""

    def __init__(self, steps: Sequence[str]) -> None:
        self.ledger, self.now = Ledger(), 0.0
        self.history: list[Any] = []
        self.steps = iter(steps)
        self.went_back = 0.0

    def run(self) -> None:
        """Until Killed or Ended."""
        raise NotImplementedError

    def act(self, step: str) -> None:
        """Changes the source."""
        raise NotImplementedError

    def settle(self) -> None:
        """A pause behind the last step. Raises Ended."""
        raise NotImplementedError

    def __call__(self) -> Ledger:
        while True:
            try:
                self.run()
            except Killed:
                continue
            except Ended:
                return self.ledger

    def pause(self, _seconds: float) -> None:
        self.now += 0.3
        self.history = [(at, *stood) for at, *stood in self.history if at >= self.now - FORGOTTEN_S]
        self.history.append((self.now, self.ledger.cursor, len(self.ledger.taken)))
        step = next(self.steps, None)
        if step is None:
            self.ledger.answer = "accept"
            self.settle()
        elif step in ("full", "unanswered", "accept"):
            self.ledger.answer = cast("Step", step)
        elif step == "killed":
            if self.ledger.cursor:  # without any a follower begins with the file that has the name then
                self.history = [stood for stood in self.history if stood[1]]
                raise Killed
        elif step == "back":
            _, cursor, count = self.history[0]
            self.history, self.went_back = self.history[:1], self.now
            self.ledger.taken = dict(list(self.ledger.taken.items())[:count])
            self.ledger.cursor = cursor
        else:
            self.act(step)


class Following(Driven):
    """`send --follow` of a program's log."""

    def __init__(self, program: Program, steps: Sequence[str]) -> None:
        super().__init__(steps)
        self.program = program
        self.turns = 40  # after the last step

    def run(self) -> None:
        follower = Follower(self.program.path, pace=FlushPolicy(clock=lambda: self.now), max_records=3)
        follower.chunks = partial(follower.chunks, sleep=self.pause)  # type: ignore[method-assign]
        sender = Sender(
            cast("Producer", self.ledger), SETTINGS, Console(file=StringIO()), clock=lambda: self.now
        )
        sender.while_waiting = self.program.meanwhile = partial(verb._look, follower)
        try:
            while True:
                with suppress(CursorMoved):
                    verb._follow_from(sender, follower, self.program.path, "shop", "c")
        finally:
            follower.close()

    def act(self, step: str) -> None:
        if step != "quiet":
            getattr(self.program, step)()
            return
        self.program.reopen()
        if self.now - self.went_back > NOTICED_S:
            self.now += QUIET_S

    def settle(self) -> None:
        self.program.reopen()
        self.turns -= 1
        if self.turns == 20:
            self.now += QUIET_S
        if not self.turns:
            raise Ended


WORLD = (
    "write",
    "write",
    "write_late",
    "rotate",
    "reopen",
    "quiet",
    "killed",
    "back",
    "full",
    "accept",
    "unanswered",
)


@given(
    style=st.sampled_from(STYLES),
    compress=st.booleans(),
    banner=st.sampled_from(["", "a banner of more than 256 bytes " * 9]),
    keep=st.sampled_from([0, 2**20]),
    steps=st.lists(st.sampled_from(WORLD), max_size=40),
)
def test_a_follower_accepts_each_line_once(
    style: Style, compress: bool, banner: str, keep: int, steps: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        program = Program(Path(folder), style, compress=compress, banner=banner)
        following = Following(program, steps)
        patch.setattr(resend_buffer, "KEEP_BYTES", keep)
        patch.setattr(sender_module, "time", SimpleNamespace(sleep=following.pause, monotonic=lambda: 0.0))
        ledger = following()
        program.close()
    assert sorted(ledger.places) == sorted(program.lines)
    assert ledger.lost == 0


class Polling(Driven):
    """The poller of an index of two shards that other programs write."""

    def __init__(self, steps: Sequence[str]) -> None:
        super().__init__(steps)
        self.shards: list[list[str]] = [[], []]  # messages by their number
        self.hidden: set[str] = set()  # written, and not visible yet
        self.turns = 5

    def run(self) -> None:
        clock = lambda: datetime.fromtimestamp(1_795_000_000 + self.now, UTC)  # noqa: E731
        poller = Poller(cast("Any", None), POLLED, clock=clock)
        shards = [_Shard(index="logs", number=n, key=f"uuid/{n}") for n in range(len(self.shards))]
        poller._shards = lambda: shards  # type: ignore[method-assign]
        poller._moved = lambda *_: shards  # type: ignore[method-assign]
        while True:
            with suppress(RedisUnavailable):
                deliver(poller, self.ledger.cursor or None, self.ledger.accept, wait=self.pause)
            self.pause(0.0)

    def pages(self, _client: object, _index: str, *, query: Any, preference: str, **_: object) -> Any:
        """What a point in time shows, five documents a page."""
        shard = int(preference.rpartition(":")[2])
        place = query["range"][scan.SEQ]["gt"]
        shown = [(n, text) for n, text in enumerate(self.shards[shard]) if text not in self.hidden]
        view = [(n, text) for n, text in shown if n > place]
        for at in range(0, len(view), 5):
            hits = [
                {"_index": "logs", "_id": text, "sort": [n], "_source": {"message": text}}
                for n, text in view[at : at + 5]
            ]
            yield scan.loose(json.dumps({"hits": {"hits": hits}}))

    def act(self, step: str) -> None:
        if step == "show":
            self.hidden.clear()
            return
        if step == "quiet":  # longer than a write may be late
            self.hidden.clear()
            self.now += OVERLAP_S
            return
        shard = self.shards[len(self.all) % 2]
        shard.append(f"document {len(self.all)}")
        if step == "write_late":
            self.hidden.add(shard[-1])

    @property
    def all(self) -> list[str]:
        return sorted(text for shard in self.shards for text in shard)

    def settle(self) -> None:
        self.hidden.clear()
        self.turns -= 1
        if not self.turns:
            raise Ended


INDEX = (
    "write",
    "write",
    "write",
    "write_late",
    "show",
    "quiet",
    "killed",
    "back",
    "full",
    "accept",
    "unanswered",
)


@given(steps=st.lists(st.sampled_from(INDEX), max_size=60))
def test_a_poller_accepts_each_document_once(steps: list[str]) -> None:
    polling = Polling(steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "pages", polling.pages)
        ledger = polling()
    assert sorted(ledger.places) == polling.all
