"""What cannot be processed: split until the bad lines stand alone, listed, retried, discarded; and hostile
messages."""

import json
import os
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.harness import Up, ordinary, running, sentence, until
from pipeline.messages.app import make_app
from pipeline.messages.submit import Submit
from pipeline.records.delivery import Stage
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink

# Loaded by every worker's interpreter before anything else: a bug in the parser that one kind of line wakes.
POISON = textwrap.dedent(
    """
    import sys
    if "pipeline.workers.cpu" in sys.orig_argv and "ingest" in sys.orig_argv:
        from pipeline import detect
        prepare_all = detect.prepare_all
        def fragile(several, *rest):
            if any(records["raw"].str.contains("POISON").any() for records in several):
                raise ValueError("this parser cannot read that")
            return prepare_all(several, *rest)
        detect.prepare_all = fragile
    """
)


GARBAGE = (
    b"not json", b"{}", b"[]", b"null", b'{"body": 7}', b"\xff\xfe\x00", b'{"properties": {}}',
    b'{"__type__": "uuid", "__value__": {"hex": 5}}',
    b'{"body": "!", "properties": {"body_encoding": "base64", "delivery_tag": "1", "delivery_info": {"exchange": "",'
    b' "routing_key": "x"}}, "headers": {}, "content-type": "application/x-python-serialize", "content-encoding": "utf-8"}',
)  # fmt: skip


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack whose ingest worker fails on every line with the word POISON."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(POISON)
    with running({"PYTHONPATH": str(folder)}) as up:
        yield up


def dead(up: Up, *args: str) -> Any:
    done = up.logweir("dead", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def of(up: Up, workload: str) -> list[dict[str, Any]]:
    return [letter for letter in dead(up, "list") if letter["workload"] == workload]


def batch_of(up: Up, workload: str) -> str:
    """The id of the only batch of a workload."""
    with up.client() as client:
        keys = [
            k
            for k in client.scan_iter(match="{logweir}:batch:*")
            if client.hget(k, "workload") == workload.encode()
        ]
    (key,) = keys
    return str(key.decode().rpartition(":")[2])


def test_a_bad_line_ends_alone_as_a_dead_letter_with_its_reason_and_the_others_are_stored(
    fragile: Up,
) -> None:
    lines = ordinary(64)
    lines[9] = "2026-11-20T10:00:00Z INFO app: POISON one"
    lines[40] = "2026-11-20T10:00:00Z INFO app: POISON two"
    fragile.send(lines, "poison")
    t = fragile.settled("poison")
    assert (t["accepted"], t["stored"], t["dead"]) == (64, 62, 2)
    assert set(fragile.rows("poison")["line"]) == set(range(1, 65)) - {10, 41}
    letters = of(fragile, "poison")
    assert {(x["first_line"], x["lines"], x["died_in"]) for x in letters} == {
        (10, 1, "ingest"),
        (41, 1, "ingest"),
    }
    assert all("this parser cannot read that" in x["reason"] for x in letters)
    table = fragile.logweir("dead", "list").stdout
    assert "this parser" in table and letters[0]["batch_id"] in table

    shown = dead(fragile, "show", letters[0]["batch_id"])
    assert "POISON" in shown["records"][0]
    assert dead(fragile, "retry", letters[0]["batch_id"])["action"] == "retry"
    until(lambda: len(of(fragile, "poison")) == 2, what="it is dead again", within_s=40)
    assert dead(fragile, "discard", *(x["batch_id"] for x in letters))["action"] == "discard"
    assert of(fragile, "poison") == []
    t = fragile.totals("poison")
    assert (t["stored"], t["dead"], t["discarded"]) == (62, 0, 2)


def test_a_damaged_payload_is_dead_with_its_reason_and_is_stored_after_repair_and_retry(fragile: Up) -> None:
    with fragile.frozen("ingest-1"):
        done = fragile.logweir("send", fragile.write(ordinary(30)), "--workload", "damaged", "--json")
        assert done.returncode == 0, done.stderr
        with fragile.client() as client:
            key = f"{{logweir}}:payload:{batch_of(fragile, 'damaged')}"
            good = client.get(key)
            client.set(key, os.urandom(500))
    t = fragile.settled("damaged")
    assert (t["accepted"], t.get("stored", 0), t["dead"]) == (30, 0, 30)
    (letter,) = of(fragile, "damaged")
    assert "bytes is damaged" in letter["reason"]
    assert "damaged" in sentence(fragile.logweir("dead", "show", letter["batch_id"]), code=1)
    with fragile.client() as client:
        client.set(key, good)
    assert fragile.logweir("dead", "retry", letter["batch_id"]).returncode == 0
    until(lambda: fragile.totals("damaged").get("stored") == 30, what="it is stored after all")
    assert fragile.totals("damaged")["dead"] == 0
    assert fragile.rows("damaged")["line"].to_list() == list(range(1, 31))


def test_a_batch_that_kills_its_worker_three_times_is_split_and_stored_when_the_killing_ends(
    fragile: Up,
) -> None:
    with fragile.frozen("ingest-1"):
        done = fragile.logweir("send", fragile.write(ordinary(8)), "--workload", "killer", "--json")
        assert done.returncode == 0, done.stderr
        for _ in range(3):  # a claim, and then silence: what a worker leaves that dies at work
            _claim(fragile, batch_of(fragile, "killer"))
    t = fragile.settled("killer")
    assert (t["stored"], t.get("dead", 0)) == (8, 0)
    assert fragile.rows("killer")["line"].to_list() == list(range(1, 9))
    sink = ParquetSink(fragile.data / "results")
    stored = [batch for batch in sink.written(sink.manifest()) if sink.read(batch, "killer") is not None]
    assert len(stored) == 2 and all("~" in batch for batch in stored), "it was split in halves"


def _settings(up: Up) -> Settings:
    state = json.loads((up.data / "stack.json").read_text())
    return Settings(data_dir=up.data, redis_url=state["redis_url"], claim_ttl_ms=1000)


def _claim(up: Up, batch_id: str) -> None:
    from pipeline.ledger.ledger import Ledger
    from pipeline.records.delivery import Claim

    with up.client() as client:
        ledger = Ledger(client, _settings(up))
        claim = until(lambda: _claimed(ledger.claim(batch_id, Stage.INGEST, "victim")), what="the claim")
        assert isinstance(claim, Claim)
        until(lambda: not ledger.renew(claim) or time.sleep(1.1), what="the claim expires")


def _claimed(answer: object) -> object:
    return None if isinstance(answer, str) else answer


def test_repeated_messages_store_once_and_lost_messages_come_back(fragile: Up) -> None:
    with fragile.frozen("ingest-1"):
        done = fragile.logweir("send", fragile.write(ordinary(20)), "--workload", "again", "--json")
        assert done.returncode == 0, done.stderr
        settings = _settings(fragile)
        with fragile.client() as client:
            submit = Submit(make_app(settings), client, settings)
            batch_id = batch_of(fragile, "again")
            for _ in range(20):
                assert submit.wake(Stage.INGEST, batch_id)
    fragile.settled("again")
    until(lambda: not _queued(fragile, "ingest"), what="the repeated messages are gone")
    t = fragile.totals("again")
    assert (t["stored"], t["commits"]) == (20, 1)
    assert fragile.rows("again")["record_id"].n_unique() == fragile.rows("again").height == 20

    with fragile.frozen("ingest-1"):
        done = fragile.logweir("send", fragile.write(ordinary(20)), "--workload", "lost", "--json")
        assert done.returncode == 0, done.stderr
        with fragile.client() as client:
            client.delete("logweir:ingest")
    assert fragile.settled("lost")["stored"] == 20


def _queued(up: Up, queue: str) -> int:
    with up.client() as client:
        return int(client.llen(f"logweir:{queue}"))  # type: ignore[arg-type]


def test_hostile_messages_kill_no_worker_and_stop_no_other_batch(fragile: Up) -> None:
    before = {w["name"]: w["pid"] for w in fragile.status()["workers"]}
    settings = _settings(fragile)
    app = make_app(settings)
    queues = {
        "logweir.ingest": "ingest",
        "logweir.drain": "drain",
        "logweir.store": "store",
        "logweir.infer": "infer.cpu",
    }
    for task, queue in queues.items():
        app.send_task("os.system", args=["true"], queue=queue)
        for args in ([], ["a", "b", "c"], [{"x": 1}], [None], ["../../etc/passwd"], ["x" * 100_000], [[1]]):
            app.send_task(task, args=args, queue=queue)
        app.send_task(task, args=["x"], kwargs={"y": 1}, queue=queue)
        with fragile.client() as client:
            for garbage in (
                b"not json",
                b"{}",
                b"[]",
                b"null",
                b'{"body": 7}',
                b"\xff\xfe\x00",
                b'{"properties": {}}',
            ):
                client.lpush(f"logweir:{queue}", garbage)
    fragile.send(ordinary(20), "hostile")
    assert fragile.totals("hostile")["stored"] == 20
    for queue in queues.values():
        until(lambda q=queue: not _queued(fragile, q), what=f"queue {queue} is worked off")  # type: ignore[misc]
    fragile.send(ordinary(20), "hostile2")
    assert {w["name"]: w["pid"] for w in fragile.status()["workers"]} == before
