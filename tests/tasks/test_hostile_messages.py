"""Hostile messages in a queue: nothing of them is executed, none ends the worker, and good work goes on
beside them."""

import base64
import bz2
import contextlib
import json
import lzma
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from polling import wait_until
from structlog.testing import capture_logs

from pipeline.messages import filter as guard
from pipeline.messages import submit as sending
from pipeline.messages.app import make_app
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.records.batch import Batch, Purpose, utc_now
from pipeline.records.delivery import Accepted, Stage
from pipeline.records.pushed import PushedRecords
from pipeline.settings import Settings

TASKS = frozenset(("logweir.ingest", "logweir.sweep"))
SECRET = "hunter2-content-of-a-message"


class Run:
    """What unpickling would do: leave a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def message(
    args: object = ("b-1",), *, kwargs: object = None, embed: object = None, **other: Any
) -> dict[str, Any]:
    """A message as Celery sends it; `headers` and `properties` are put over its own, the rest over its
    top."""
    body = json.dumps(
        [args, kwargs or {}, embed or dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))]
    )
    made: dict[str, Any] = {
        "body": base64.b64encode(body.encode()).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {
            "lang": "py", "task": "logweir.ingest", "id": "5f3a07", "eta": None, "expires": None, "group": None, "retries": 0,
            "timelimit": [None, None], "root_id": "5f3a07", "parent_id": None, "argsrepr": "x", "kwargsrepr": "{}", "origin": "t",
            "ignore_result": True,
        } | other.pop("headers", {}),
        "properties": {
            "correlation_id": "5f3a07", "reply_to": "r", "delivery_mode": 2, "priority": 0, "body_encoding": "base64",
            "delivery_tag": "7c1e", "delivery_info": {"exchange": "", "routing_key": "ingest"},
        } | other.pop("properties", {}),
    }  # fmt: skip
    return made | other


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def hostile(trace: Path) -> dict[str, bytes]:
    """One message of each kind, as it would lie in the list."""
    signature = {
        "task": "logweir.sweep",
        "args": [],
        "kwargs": {},
        "options": {"queue": "periodic"},
        "subtask_type": None,
    }
    bomb = b"[" + b" " * 50_000_000 + b"]"
    cycle = pickle.dumps(Run(trace))
    kinds: dict[str, dict[str, Any]] = {
        "pickle": message(body=packed(cycle), **{"content-type": "application/x-python-serialize", "content-encoding": "binary"}),
        "pickle as json": message(body=packed(cycle)),
        "yaml": message(body=packed(b"!!python/object/apply:os.mkdir [x]"), **{"content-type": "application/x-yaml"}),
        "msgpack": message(body=packed(b"\x93\x90\x80\x80"), **{"content-type": "application/x-msgpack", "content-encoding": "binary"}),
        "unknown encoding": message(**{"content-encoding": "rot13"}),
        "unknown task": message(headers={"task": "os.system"}),
        "other task of ours": message(headers={"task": "logweir.train"}),
        "task that is a list": message(headers={"task": ["logweir.ingest"]}),
        "no task": {**message(), "headers": {"id": "1"}},
        "version 1 of the protocol": {**message(), "headers": {}, "body": packed(b'{"task": "logweir.ingest", "id": "1", "args": ["x"]}')},
        "args that are a map": message({"a": 1}),
        "args that are a text": message("abc"),
        "ids that are numbers": message([1, 2]),
        "ids that are lists": message([["a"]]),
        "too many ids": message(["a"] * 50),
        "an id of control characters": message(["a\x00\x1b[2J\r\nb"]),
        "an id of half a character": message(["\ud800"]),
        "an id that is too long": message(["x" * 2000]),
        "keyword arguments": message(kwargs={"context": 1}),
        "callbacks": message(embed={"callbacks": [signature], "errbacks": None, "chain": None, "chord": None}),
        "errbacks": message(embed={"callbacks": None, "errbacks": [signature], "chain": None, "chord": None}),
        "a chain": message(embed={"callbacks": None, "errbacks": None, "chain": [signature], "chord": None}),
        "a chord": message(embed={"callbacks": None, "errbacks": None, "chain": None, "chord": signature}),
        "no embed": message(body=packed(b'[["a"], {}]')),
        "a body that is a number": message(body=packed(b"7")),
        "a body that is no base64": message(body="%%%"),
        "a number of ten thousand digits": message(body=packed(b"[[" + b"9" * 10_000 + b"],{},{}]")),
        "deep lists in the body": message(body=packed(b"[" * 10_000 + b"]" * 10_000)),
        "eta": message(headers={"eta": "2099-01-01T00:00:00+00:00"}),
        "eta that is no time": message(headers={"eta": {"a": 1}}),
        "expiry that is no time": message(headers={"expires": "soon"}),
        "expiry that is a list": message(headers={"expires": [1]}),
        "expiry outside of time": message(headers={"expires": "0001-01-01T00:00:00+23:59"}),
        "time limits": message(headers={"timelimit": [1, 0.001]}),
        "time limits that are none": message(headers={"timelimit": "never"}),
        "retries": message(headers={"retries": 10**30}),
        "group": message(headers={"group": "g", "chord": signature}),
        "an id that is a map": message(headers={"id": {"a": 1}}),
        "stamps": message(headers={"stamped_headers": ["a"], "stamps": {"a": 1}}),
        "zlib bomb": message(body=packed(zlib.compress(bomb)), headers={"compression": "application/x-gzip"}),
        "bz2 bomb": message(body=packed(bz2.compress(bomb)), headers={"compression": "bzip2"}),
        "lzma bomb": message(body=packed(lzma.compress(bomb, preset=0)), headers={"compression": "xz"}),
        "unknown compression": message(headers={"compression": "../../x"}),
        "a delivery tag that is a list": message(properties={"delivery_tag": ["a"]}),
        "a delivery tag of control characters": message(properties={"delivery_tag": "\x00" * 50}),
        "an unknown body encoding": message(properties={"body_encoding": "uu"}),
        "no delivery info": message(properties={"delivery_info": None}),
        "headers that are a list": {**message(), "headers": []},
        "properties that are a text": {**message(), "properties": "x"},
        "a body that is a list": message(body=[1]),
        "a type that kombu decodes": message(body={"__type__": "uuid", "__value__": "not one"}),
    }  # fmt: skip
    raw = {name: json.dumps(m | {"note": SECRET}).encode() for name, m in kinds.items()}
    return raw | {
        "nothing": b"",
        "no JSON": b"\x80\x04\x95 " + SECRET.encode(),
        "null": b"null",
        "a text": json.dumps(SECRET).encode(),
        "no UTF-8": b'{"body": "\xff\xfe"}',
        "deep lists": b"[" * 20_000 + b"]" * 20_000,
        "deep maps": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        "huge": b'{"body": "' + SECRET.encode() * 400_000 + b'"}',
        "huge and valid": json.dumps(message(["b"], headers={"argsrepr": "x" * 5_000_000})).encode(),
    }


def dropped(raw: bytes) -> str:
    """Why guard drops this message; "" when it lets it through."""
    answer = guard.bounded((b"ingest", raw))
    assert answer is not None
    try:
        value = guard.transport.loads(answer[1].decode())
    except Exception as exc:  # noqa: BLE001 - Channel._read drops whatever decoding raises
        return type(exc).__name__
    return guard.fault(value) or guard.unwanted(value, TASKS)


@pytest.mark.long
def test_each_hostile_message_is_dropped_and_nothing_of_it_stands_in_the_reason(tmp_path: Path) -> None:
    for name, raw in hostile(tmp_path / "trace").items():
        why = dropped(raw)
        assert why, name
        assert SECRET not in why
    assert not (tmp_path / "trace").exists()


def test_what_celery_sees_holds_only_what_was_checked() -> None:
    raw = message(
        ["b-1"],
        headers={
            "shadow": "x",
            "hostname": "elsewhere",
            "called_directly": True,
            "replaced_task_nesting": 10**9,
        },
        properties={
            "reply_to": "q",
            "priority": 9,
            "delivery_info": {"exchange": "e", "routing_key": "train"},
        },
    )
    assert not guard.fault(raw) and not guard.unwanted(raw, TASKS)
    made = guard.wake_up(raw, "ingest")
    assert json.loads(made["body"])[0] == ["b-1"]
    assert not {"shadow", "hostname", "called_directly", "replaced_task_nesting"} & set(made["headers"])
    assert made["properties"]["delivery_info"] == {"exchange": "", "routing_key": "ingest"}
    assert "reply_to" not in made["properties"] and guard.is_message(made)


def test_a_wake_up_is_small_and_one_with_the_longest_id_still_passes(
    settings: Settings, client: "redis.Redis"
) -> None:
    submit = Submit(make_app(settings), client, settings)
    queue = f"{settings.redis.key_prefix}:ingest"
    try:
        for batch_id, most in (
            ("0123456789abcdef-1f4", 4096),
            ("\U0001f600" * guard.MAX_ID, guard.MAX_MESSAGE),
        ):
            assert submit.wake(Stage.INGEST, batch_id, workload="\U0001f600" * 200, lines=5000)
            raw = client.rpop(queue)
            assert isinstance(raw, bytes) and len(raw) < most
            assert dropped(raw) == ""
    finally:
        client.delete(queue, f"{settings.redis.key_prefix}:_kombu.binding.ingest")


def test_wake_ups_by_one_command_lie_in_order_in_the_form_that_celery_sees(
    settings: Settings, client: "redis.Redis"
) -> None:
    submit = Submit(make_app(settings), client, settings)
    ids = ["a", "b", "\U0001f600" * guard.MAX_ID]
    new = [
        Batch(
            batch_id=name, workload="\U0001f600" * 200, source="intake", source_key="0" * 16,
            purpose=Purpose.SCORE, arrived=utc_now(), formats=(), zone="UTC", records=PushedRecords(["one", "two"]),
        )
        for name in ids
    ]  # fmt: skip
    for backfill, queue in ((False, "ingest"), (True, "ingest.backfill")):
        key = f"{settings.redis.key_prefix}:{queue}"
        try:
            assert submit.wake_new(new, backfill=backfill)
            assert submit.next_ids("ingest", 9, backfill=backfill) == ids
            raws = [client.rpop(key) for _ in ids]
        finally:
            client.delete(key)
        for raw, name in zip(raws, ids, strict=True):
            assert isinstance(raw, bytes) and dropped(raw) == ""
            made = guard.wake_up(json.loads(raw), queue)
            assert made == json.loads(raw) and guard.message_ids(made) == [name]
            assert "2 lines" in made["headers"]["argsrepr"]


def new_batch() -> Batch:
    return Batch(
        batch_id="b", workload="shop", source="intake", source_key="0" * 16, purpose=Purpose.SCORE,
        arrived=utc_now(), formats=(), zone="UTC", records=PushedRecords(["one"]),
    )  # fmt: skip


class FailingPush:
    """A client of Redis whose first pushes raise `fault`."""

    def __init__(self, faults: int, fault: Exception) -> None:
        self.faults, self.fault = faults, fault
        self.pushed: list[bytes] = []

    def lpush(self, _key: str, *messages: bytes) -> None:
        if self.faults:
            self.faults -= 1
            raise self.fault
        self.pushed += messages


def test_wake_ups_by_one_command_are_tried_again_as_others_are(
    settings: Settings, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Submit(make_app(settings), client, settings)
    policy = sending.RETRY
    paused: list[float] = []
    monkeypatch.setattr(sending.time, "sleep", paused.append)
    for faults, sent in ((0, True), (2, True), (3, False)):
        failing = FailingPush(faults, redis.exceptions.ConnectionError("away"))
        submit.client = failing  # type: ignore[assignment]
        assert submit.wake_new([new_batch()]) is sent and len(failing.pushed) == sent
        assert paused == list(sending.RETRY_PAUSES_S[:faults])
        paused.clear()
    steps = range(int(policy["max_retries"]))
    pauses = [policy["interval_start"] + step * policy["interval_step"] for step in steps]
    assert pauses == pytest.approx(list(sending.RETRY_PAUSES_S))


def test_a_failure_of_any_kind_to_wake_by_one_command_is_logged_and_not_raised(
    settings: Settings, client: "redis.Redis"
) -> None:
    submit = Submit(make_app(settings), client, settings)
    submit.client = FailingPush(9, TypeError("no bytes"))  # type: ignore[assignment]
    with capture_logs() as logs:
        assert not submit.wake_new([new_batch()])
    assert [(one["event"], one["why"], one["batches"]) for one in logs] == [
        ("message.not_sent", "TypeError: no bytes", 1)
    ]


def test_a_worker_sends_its_own_tasks_to_others_without_its_time_limits(
    settings: Settings, client: "redis.Redis"
) -> None:
    """A GPU worker hands a batch to the CPU queue: the same task, which is registered with a limit in
    both."""
    app = make_app(settings)

    @app.task(name="logweir.ingest", shared=False, lazy=False, time_limit=300)  # type: ignore[untyped-decorator]
    def ingest(_batch_id: str) -> None: ...

    queue = f"{settings.redis.key_prefix}:ingest"
    try:
        assert Submit(app, client, settings).wake(Stage.INGEST, "b-1")
        assert dropped(client.rpop(queue)) == ""
    finally:
        client.delete(queue, f"{settings.redis.key_prefix}:_kombu.binding.ingest")


# ---- a real worker -----------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(settings: Settings, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A real ingest worker on these settings."""
    env = {k: v for k, v in os.environ.items() if k != "REDIS_URL" and not k.startswith("LOGWEIR_")}
    env |= {
        "REDIS_URL": str(settings.redis.url),
        "LOGWEIR_KEY_PREFIX": settings.redis.key_prefix,
        "LOGWEIR_DATA_DIR": str(settings.data.dir),
        "POLARS_MAX_THREADS": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.cpu", "ingest", "ingest-1"],
            env=env,
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.long
def test_a_worker_drops_hundreds_of_hostile_messages_and_goes_on_working(
    settings: Settings, client: "redis.Redis", tmp_path: Path
) -> None:
    producer = Producer.connect(settings)
    queue, log, trace = f"{settings.redis.key_prefix}:ingest", tmp_path / "log", tmp_path / "trace"
    messages = list(hostile(trace).values())

    def done(batch_id: str) -> bool:
        return producer.ledger.state(batch_id) == "drain"  # there is no model: ingest has done its part

    with worker(settings, log) as process:
        answer = producer.send(["a line"], workload="w", batch_id="before")
        assert isinstance(answer, Accepted)
        assert wait_until(lambda: done("before"), timeout_s=30), log.read_text()
        before = psutil.Process(process.pid).memory_info().rss
        for _ in range(6):
            client.lpush(queue, *messages)
        producer.send(["a line"], workload="w", batch_id="after")
        assert wait_until(lambda: done("after"), timeout_s=30), log.read_text()
        assert process.poll() is None
        grown = psutil.Process(process.pid).memory_info().rss - before
        assert client.llen(queue) == 0
        # The last good one is acknowledged a moment after it is done.
        assert wait_until(lambda: client.hlen(f"{settings.redis.key_prefix}:unacked") == 0, timeout_s=10)
        # What a callback or a chain would have sent.
        assert client.llen(f"{settings.redis.key_prefix}:periodic") == 0
    text = log.read_text(errors="replace")
    assert grown < 100 * 2**20
    assert not trace.exists()
    assert "Traceback" not in text and SECRET not in text
    told = [json.loads(line) for line in text.splitlines() if '"message.dropped"' in line]
    kinds = [event["why"] for event in told]
    assert len(kinds) == len(set(kinds)) and len(kinds) >= 8
    for name in client.scan_iter(f"*{settings.redis.key_prefix}*"):
        client.delete(name)


def test_what_was_to_be_restored_and_cannot_be_read_is_let_go(
    settings: Settings, client: "redis.Redis"
) -> None:
    app = make_app(settings)
    tag, held = "t-1", f"{settings.redis.key_prefix}:unacked"
    channel = app.connection_for_read().default_channel
    kept = guard.QoS(channel)
    try:
        client.hset(held, tag, b"[" * 5000)
        client.zadd(f"{held}_index", {tag: 1.0})
        kept.restore_by_tag(tag)
        assert client.hlen(held) == 0 and client.zcard(f"{held}_index") == 0
    finally:
        channel.connection.client.close()
        client.delete(held, f"{held}_index")
