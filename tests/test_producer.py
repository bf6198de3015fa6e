"""The way in: what can be a batch, what cannot, and what happens to hostile names."""

import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis
from hypothesis import HealthCheck, example, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from kombu.exceptions import OperationalError

from pipeline.errors import BadInput, RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.messages.routing import QUEUE_INGEST
from pipeline.messages.submit import Submit
from pipeline.producer import MAX_NAME, Producer, workload_of_file
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Accepted, Claim, Full, Stage
from pipeline.records.schema import RAW_SCHEMA, raw_frame
from pipeline.settings import Settings
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.pushed import framed

NOW = datetime(2026, 11, 20, 10, tzinfo=UTC)


def connect(settings: Settings) -> Producer:
    made = Producer.connect(settings)
    made.clock = lambda: NOW
    return made


@pytest.fixture
def producer(settings: Settings) -> Producer:
    return connect(settings)


def id_of(answer: Accepted | Full) -> str:
    assert isinstance(answer, Accepted), answer
    return answer.batch_id


def claim(producer: Producer, batch_id: str) -> Claim:
    got = producer.ledger.claim(batch_id, Stage.INGEST, "w")
    assert isinstance(got, Claim), got
    return got


def awake(producer: Producer) -> set[str]:
    return producer.submit.waiting_ids(Stage.INGEST)


# Lines


def test_lines_are_accepted_and_a_worker_is_woken(producer: Producer) -> None:
    batch_id = id_of(producer.send(["one", "two\n", "three\r\n"], workload="shop"))
    frame, _ = framed(producer.ledger.payload(batch_id))
    assert frame.select("raw", "line", "lines").rows() == [("one", 1, 1), ("two", 2, 1), ("three", 3, 1)]
    assert awake(producer) == {batch_id}
    got = claim(producer, batch_id)
    assert (got.workload, got.meta.source, got.meta.purpose, got.meta.arrived) == (
        "shop",
        "push",
        Purpose.SCORE,
        NOW,
    )


def test_a_push_sends_its_wake_up_and_no_event_beside_it(producer: Producer) -> None:
    with producer.ledger.client.pubsub(ignore_subscribe_messages=True) as events:
        events.psubscribe(f"*{producer.settings.redis.key_prefix}*celeryev*")
        producer.send(["one"], workload="shop")
        assert awake(producer)
        assert events.get_message(timeout=0.2) is None and events.get_message(timeout=0.2) is None


def test_a_stack_trace_becomes_one_record_of_many_lines(producer: Producer) -> None:
    head = "2026-11-20 10:00:00 ERROR boom"
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x'
    frame, formats = framed(
        producer.ledger.payload(
            id_of(producer.send([head, trace, "2026-11-20 10:00:01 INFO next"], workload="shop"))
        )
    )
    assert formats == ("iso",)
    assert frame["lines"].to_list() == [4, 1]
    assert frame["line"].to_list() == [1, 5]


def test_a_batch_id_given_twice_is_one_batch_and_one_wake_up(producer: Producer) -> None:
    assert producer.send(["a"], workload="shop", batch_id="x") == Accepted(batch_id="x")
    producer.ledger.client.delete(f"{producer.settings.redis.key_prefix}:{QUEUE_INGEST}")
    assert producer.send(["a"], workload="shop", batch_id="x") == Accepted(batch_id="x", duplicate=True)
    assert awake(producer) == set(), "the sweeper looks after what was accepted before"
    with pytest.raises(BadInput, match="'x' was accepted before with other content"):
        producer.send(["b"], workload="shop", batch_id="x")


def test_without_an_id_every_call_is_a_new_batch(producer: Producer) -> None:
    assert id_of(producer.send(["a"], workload="shop")) != id_of(producer.send(["a"], workload="shop"))


def test_two_workloads_never_share_record_ids(producer: Producer) -> None:
    keys = {
        claim(producer, id_of(producer.send(["a"], workload=w, batch_id=b))).meta.source_key
        for w, b in (("shop", "1"), ("shop", "11"), ("shop1", "2"), ("bank", "3"))
    }
    assert len(keys) == 4


# Records


def test_records_keep_what_the_producer_knows(producer: Producer) -> None:
    at = datetime(2026, 11, 20, 12, tzinfo=timezone(timedelta(hours=2)))
    items: list[dict[str, Any]] = [
        {"message": "a\nb", "timestamp": at, "level": "error", "host": "h", "process": "p", "service": "s"},
        {"message": "c", "timestamp": "2026-11-20T10:00:00.5Z"},
        {"message": ""},
    ]
    frame, _ = framed(producer.ledger.payload(id_of(producer.send(items, workload="shop"))))
    assert dict(frame.schema) == RAW_SCHEMA
    assert frame.row(0, named=True) == {
        "raw": "a\nb", "line": 1, "lines": 2, "timestamp": NOW, "timed": None, "level": "error", "host": "h",
        "process": "p", "service": "s", "message": "a\nb", "source": None,
    }  # fmt: skip
    assert frame["timestamp"].to_list() == [NOW, NOW + timedelta(milliseconds=500), None]
    assert frame["message"].to_list() == ["a\nb", "c", ""]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ("one line", "takes a list of lines"),
        ({"message": "one record"}, "takes a list of lines"),
        (5, "takes a list of lines"),
        ((line for line in ["a"]), "takes a list of lines"),
        (b"one line", "takes a list of lines"),
        ([], "has no lines"),
        (["a", {"message": "b"}], "either lines .* or records"),
        ([1], "either lines .* or records"),
        ([b"a"], "either lines .* or records"),
        ([None], "either lines .* or records"),
        ([{"message": "a"}, {"msg": "a"}], "record 2 has the unknown field 'msg'; the fields are: message"),
        ([{}], "record 1 has no text in 'message'"),
        ([{"message": 5}], "record 1 has no text in 'message'"),
        ([{"message": "a", "level": "loud"}], "the level 'loud'; the levels are: trace"),
        ([{"message": "a", "level": 3}], "the level 3"),
        ([{"message": "a", "level": ["error"]}], "the level"),
        ([{"message": "a", "host": 5}], "host = 5; it must be text"),
        ([{"message": "a", "timestamp": "soon"}], "timestamp 'soon'; give an aware datetime"),
        ([{"message": "a", "timestamp": "2026-11-20T10:00:00"}], "give an aware datetime"),
        ([{"message": "a", "timestamp": datetime(2026, 11, 20)}], "give an aware datetime"),  # noqa: DTZ001
        ([{"message": "a", "timestamp": date(2026, 11, 20)}], "give an aware datetime"),
        ([{"message": "a", "timestamp": 1795190034}], "give an aware datetime"),
        ([{"message": "a", "timestamp": "0001-01-01T00:00:00+14:00"}], "give an aware datetime"),
        (["a\udc80b"], "line 1 .*not text"),
        (["a", "b\udc80"], "line 2 .*not text"),
        ([{"message": "a\udc80"}], "record 1 .*not text"),
        ([{"message": "a", "host": "\udc80"}], "record 1 .*not text"),
    ],
)
def test_what_cannot_be_a_batch_is_refused_with_the_remedy(producer: Producer, items: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        producer.send(items, workload="shop")
    assert producer.ledger.backlog.totals() == {}
    assert awake(producer) == set()


def test_too_many_lines_are_refused_however_they_are_packed(settings: Settings) -> None:
    producer = connect(settings.replace(batch_records=3))
    for items in (["a"] * 4, ["a\nb\nc\nd"], ["a\nb", "c\nd"], [{"message": "a"}] * 4):
        with pytest.raises(BadInput, match="4 lines; send at most 3 at once"):
            producer.send(items, workload="shop")
    id_of(producer.send(["a\nb", "c"], workload="shop"))


def test_a_stack_trace_counts_as_one_record_however_long_it_is(settings: Settings) -> None:
    producer = connect(settings.replace(batch_records=3))
    trace = "Exception in thread main\n" + "\tat a.b(C.java:1)\n" * 40
    assert claim(producer, id_of(producer.send([trace], workload="shop"))).lines == 41
    with pytest.raises(BadInput, match="4 lines; send at most 3 at once"):
        producer.send([trace, "a\nb", "c"], workload="shop")


def test_records_whose_times_are_all_old_wait_behind_fresh_ones(producer: Producer) -> None:
    old = {"message": "a", "timestamp": NOW - timedelta(days=2)}
    for items, backfill in (
        ([old, old], True),
        ([old, {"message": "b"}], False),
        ([old, {"message": "b", "timestamp": NOW}], False),
        (["2001-01-01T00:00:00Z INFO raw lines count as fresh"], False),
    ):
        assert claim(producer, id_of(producer.send(items, workload="shop"))).backfill is backfill


def test_too_many_bytes_are_refused(settings: Settings) -> None:
    producer = connect(settings.replace(batch_kib=64))
    with pytest.raises(BadInput, match="bytes; send at most 256 KiB at once"):
        producer.send(["x" * 300_000], workload="shop")


def test_a_full_pipeline_says_so_and_takes_nothing(settings: Settings) -> None:
    producer = connect(settings.replace(max_pending_batches=1))
    id_of(producer.send(["a"], workload="shop"))
    answer = producer.send(["b"], workload="shop", batch_id="late")
    assert isinstance(answer, Full)
    assert answer.retry_after_s > 0
    assert producer.ledger.claim("late", Stage.INGEST, "w") == "unknown"
    assert "late" not in awake(producer)


def test_a_producer_needs_a_redis_that_is_there(settings: Settings) -> None:
    with pytest.raises(BadInput, match="set REDIS_URL"):
        Producer.connect(settings.replace(redis_url=None))
    client = redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None)
    away = Producer(Ledger(client, settings), Submit(make_app(settings), client, settings), settings)
    with pytest.raises(RedisUnavailable, match="does not answer"):
        away.send(["a"], workload="shop")


def test_a_wake_up_that_cannot_be_sent_does_not_lose_the_batch(settings: Settings) -> None:
    good = connect(settings)
    broken = make_app(settings.replace(redis_url="unix:///nowhere/redis.sock"))
    producer = Producer(good.ledger, Submit(broken, good.ledger.client, settings), settings)
    batch_id = id_of(producer.send(["a"], workload="shop"))
    assert awake(good) == set()
    assert claim(good, batch_id).lines == 1


FAULTS = [
    redis.exceptions.InvalidResponse("Protocol Error"),
    redis.exceptions.NoScriptError("No matching script"),
    redis.ResponseError("WRONGTYPE"),
    redis.RedisError("?"),
    BrokenPipeError(32, "Broken pipe"),
]


def after(run: Callable[..., Any], fault: Exception) -> Callable[..., Any]:
    """`run`, whose answer is lost on the way back."""

    def done(*args: Any, **kwargs: Any) -> Any:
        run(*args, **kwargs)
        raise fault

    return done


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_an_answer_of_redis_that_is_none_is_one_documented_error(
    producer: Producer, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    scripts = producer.ledger.scripts
    with monkeypatch.context() as patch:
        patch.setattr(scripts, "run", after(scripts.run, fault))
        with pytest.raises(RedisUnavailable, match="send the batch again under its id"):
            producer.send(["a"], workload="shop", batch_id="b")
    assert producer.send(["a"], workload="shop", batch_id="b") == Accepted(batch_id="b", duplicate=True)
    assert producer.ledger.backlog.totals()["shop"]["accepted"] == 1


@pytest.mark.parametrize("fault", [*FAULTS, RedisUnavailable("away")], ids=repr)
def test_a_watchlist_that_cannot_be_read_is_one_documented_error(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    producer = connect(settings.replace(unwatched="skip"))
    monkeypatch.setattr(producer.watchlist, "look", after(producer.watchlist.look, fault))
    with pytest.raises(RedisUnavailable):
        producer.send(["a"], workload="shop")
    assert producer.ledger.backlog.totals() == {}


@pytest.mark.parametrize(
    "fault",
    [
        *FAULTS,
        OperationalError("broker"),
        AttributeError("'NoneType' object has no attribute 'sendall'"),
        KeyError("x"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("sent", [True, False], ids=["sent", "not sent"])
def test_after_a_batch_is_in_nothing_is_raised(
    producer: Producer, monkeypatch: pytest.MonkeyPatch, fault: Exception, sent: bool
) -> None:
    app = producer.submit.app
    send_task = app.send_task if sent else lambda *_, **__: None
    monkeypatch.setattr(app, "send_task", after(send_task, fault))
    assert producer.send(["a"], workload="shop", batch_id="b") == Accepted(batch_id="b")
    assert claim(producer, "b").lines == 1


def test_a_log_that_cannot_be_written_does_not_hide_that_a_batch_is_in(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr("pipeline.messages.submit.logger", closed)
    monkeypatch.setattr(producer.submit.app, "send_task", after(lambda *_, **__: None, OSError("away")))
    assert producer.send(["a"], workload="shop", batch_id="b") == Accepted(batch_id="b")


# Names


@pytest.mark.parametrize(
    "name", ["", "x" * 300, "a\nb", "a\tb", "\x00", "a\x7f", "\u200b", "\udc80", None, 5, b"x", ["x"]]
)
def test_a_name_that_cannot_be_shown_is_refused(producer: Producer, name: Any) -> None:
    for names in ({"workload": name}, {"workload": "shop", "batch_id": name if name is not None else 5}):
        with pytest.raises(BadInput, match="is not usable; use 1 to 200 printable characters"):
            producer.send(["a"], **names)
    assert producer.ledger.backlog.totals() == {}


@pytest.mark.parametrize("name", ["*", "shop/*", "a?"])
def test_no_workload_is_called_like_a_pattern(producer: Producer, name: str) -> None:
    with pytest.raises(BadInput, match=r"printable characters without \* and \?"):
        producer.send(["a"], workload=name)
    assert workload_of_file(Path(f"{name}.log")) == name.rpartition("/")[2].replace("*", "_").replace(
        "?", "_"
    )


def test_the_mark_of_halves_cannot_stand_in_an_id(producer: Producer) -> None:
    with pytest.raises(BadInput, match="~"):
        producer.send(["a"], workload="shop", batch_id="x~0")


def test_a_source_that_is_no_text_is_shown_and_does_not_stop_its_batch(producer: Producer) -> None:
    batch_id = id_of(producer.send(["a"], workload="shop", source="caf\udce9.log"))
    source = claim(producer, batch_id).meta.source
    assert source.encode()  # it can be stored
    assert source.startswith("caf")
    assert source.endswith(".log")
    with pytest.raises(BadInput, match="source"):
        producer.send(["a"], workload="shop", source=5)  # type: ignore[arg-type]


HOSTILE = [
    "../x",
    "..",
    ".",
    "a/b",
    "/etc/passwd",
    "C:\\x",
    "a:b",
    "{x}",
    "a}b{c",
    "[x]",
    "%2e%2e",
    "a=b",
    "日本/ü",
    "due",
    "~",
    "a b",
    "-rf",
    "$(x)",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_a_name(producer: Producer, name: str) -> None:
    batch_id = id_of(producer.send(["a"], workload=name, batch_id=name.replace("~", "-")))
    assert claim(producer, batch_id).workload == name
    assert producer.ledger.backlog.totals() == {name: producer.ledger.backlog.totals()[name]}
    prefix = "{" + producer.settings.redis.key_prefix + "}:"
    keys = [
        k.decode() for k in producer.ledger.client.scan_iter(match=f"{producer.settings.redis.key_prefix}*")
    ]
    ours = [k.decode() for k in producer.ledger.client.scan_iter(match=f"{prefix}*")]
    assert ours
    assert all(k.startswith(prefix) for k in ours)
    assert all(k.startswith(producer.settings.redis.key_prefix + ":") for k in keys)


PRINTABLE = st.characters(
    codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ", exclude_characters="~*?"
)
NAMES = st.text(PRINTABLE, min_size=1, max_size=MAX_NAME)


@profile(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(NAMES, NAMES)
@example("shop", "shop:1")
@example("a:b", "c")
def test_two_workloads_keep_two_accounts(settings: Settings, one: str, other: str) -> None:
    producer = connect(settings.replace(key_prefix=f"t{uuid.uuid4().hex[:12]}"))
    for n, name in enumerate((one, other), start=1):
        id_of(producer.send(["a"] * n, workload=name, batch_id=f"{n}{name}"[:MAX_NAME]))
    accepted = {name: totals["accepted"] for name, totals in producer.ledger.backlog.totals().items()}
    assert accepted == ({one: 3} if one == other else {one: 1, other: 2})


# Chunks of a source


def chunk(start: int, offset: int, lines: list[str]) -> Chunk:
    cursor = Cursor(path="app.log", identity="i", offset=offset, line=len(lines))
    return Chunk(records=raw_frame(lines), formats=("iso",), start=start, cursor=cursor, position=offset)


@pytest.fixture
def send_chunk(producer: Producer) -> Callable[..., Accepted | Full]:
    def send(at: int, lines: list[str], **changes: Any) -> Accepted | Full:
        given = {"workload": "shop", "source": "app.log", "source_key": "00aa", "cursor_key": "app"}
        return producer.send_chunk(chunk(at, at + 10, lines), **{**given, **changes})

    return send


def test_reading_a_place_again_gives_the_same_batch_and_the_cursor_moves_with_it(
    producer: Producer, send_chunk: Callable[..., Accepted | Full]
) -> None:
    assert send_chunk(31, ["a"]) == Accepted(batch_id="00aa-1f")
    stored = producer.ledger.intake.cursor("app")
    assert stored is not None
    assert Cursor.unpack(stored).offset == 41
    assert send_chunk(31, ["a"]) == Accepted(batch_id="00aa-1f", duplicate=True)
    assert send_chunk(41, ["a"]) == Accepted(batch_id="00aa-29")
    assert claim(producer, "00aa-1f").meta.formats == ("iso",)


def test_a_push_waits_for_replicas_and_a_source_that_sends_again_does_not(settings: Settings) -> None:
    alone = connect(settings.replace(redis_replicas_ack=1))  # this server has no replica
    for _ in range(2):
        with pytest.raises(RedisUnavailable, match="only 0 of 1 replicas have acknowledged"):
            alone.send(["a"], workload="shop", batch_id="push")
    given = {"workload": "shop", "source": "app.log", "source_key": "00aa"}
    assert alone.send_chunk(chunk(0, 10, ["a"]), cursor_key="app", **given) == Accepted(
        batch_id="00aa-0", pending_batches=2
    )
    # Without the promise the push is known: it was taken in once, and is in the master.
    assert connect(settings).send(["a"], workload="shop", batch_id="push") == Accepted(
        batch_id="push", duplicate=True
    )


def test_a_file_whose_name_is_no_text_is_read_like_any_other(
    producer: Producer, send_chunk: Callable[..., Accepted | Full]
) -> None:
    path = str(Path("caf\udce9.log"))
    batch_id = id_of(send_chunk(0, ["a"], source=path))
    frame = pl.DataFrame({"source": [claim(producer, batch_id).meta.source]})
    assert frame["source"][0].startswith("caf")
