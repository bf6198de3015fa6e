"""What `logweir status` knows about the GPUs; the rest of it is tested beside what it shows."""

import io
from dataclasses import asdict, replace

import pytest
import redis
from command_line import command_line
from pool_devices import put_devices
from rich.console import Console

from pipeline.commands.status import _gpus, _training, _workloads
from pipeline.controller.training_status import Status, TrainingState
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Need
from pipeline.observe.presence import Presence
from pipeline.redis.keys import Keys
from pipeline.service.status import journal_trouble, read_status
from pipeline.settings import Settings


def shown(settings: Settings) -> str:
    text = io.StringIO()
    _gpus(Console(width=200, file=text), read_status(settings).gpus)
    return text.getvalue()


def test_status_says_nothing_of_gpus_where_there_are_none(settings: Settings) -> None:
    assert shown(settings) == ""


def test_status_without_a_worker_says_so_and_fails_until_one_is_heard_of(
    settings: Settings,
    client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with command_line(settings, monkeypatch, capsys) as logweir:
        said = logweir("status")
        assert said.code == 1
        assert "no worker is running; start them with `logweir up`" in said.out
        assert logweir("status", "--json").code == 1
        Presence(client, settings).beat(name="a", role="ingest", pid=1, queues=["ingest"])
        said = logweir("status")
        assert (said.code, "no worker" in said.out) == (0, False)


def test_status_counts_gpus_and_leases_and_names_what_is_out_of_order(
    settings: Settings, client: "redis.Redis"
) -> None:
    pool = Pool(client, settings)
    put_devices(pool, 2)
    put_devices(pool, 1, node="node-b", why="XID 79 (fell off the bus)\x1b[2J", clear_quarantine=False)
    pool.request(Need(memory_mib=1_000), holder="somebody")
    text = shown(settings)
    assert "2 of 3 usable, 1 leases" in text
    assert "node-b: XID 79 (fell off the bus)" in text
    assert "\x1b" not in text


def test_what_was_discarded_or_skipped_shows_where_there_is_some(
    settings: Settings, client: "redis.Redis"
) -> None:
    def table() -> str:
        text = io.StringIO()
        _workloads(Console(width=200, file=text), read_status(settings))
        return text.getvalue()

    keys = Keys(settings.redis.key_prefix)
    client.sadd(keys.workloads, "w")
    client.hset(keys.totals("w"), mapping={"accepted": 9, "stored": 4})
    assert "discarded" not in table() and "skipped" not in table()
    client.hset(keys.totals("w"), mapping={"discarded": 2, "skipped": 3})
    assert table().splitlines()[-1].split() == ["w", "9", "4", "0", "0", "2", "3", "0", "0"]
    assert "lines by workload\n" in table()


def test_status_counts_the_records_that_a_training_reads() -> None:
    status = Status(state=TrainingState.TRAINING, lines=2_000, asked_by="tests", why="a test")
    assert _training(status) == "training 0 % after 0 s, 2,000 records, asked by tests: a test"
    assert _training(replace(status, lines=1, ended_ms=1_000, state=TrainingState.FAILED)) == (
        "failed at 1970-01-01 00:00:01 UTC, 1 record"
    )


def test_the_json_of_status_has_the_names_that_programs_read(
    settings: Settings, client: "redis.Redis"
) -> None:
    Presence(client, settings).beat(name="a", role="ingest", pid=1, queues=["ingest"])
    facts = asdict(read_status(settings))
    assert list(facts) == [
        "model",
        "models",
        "model_faults",
        "training",
        "trainings_waiting",
        "decisions",
        "retrained",
        "versions_stored",
        "watchlist",
        "batches",
        "bytes",
        "stages",
        "dead",
        "closed",
        "full",
        "warming_batches",
        "trouble",
        "watching",
        "drain_shards",
        "gpus",
        "flower",
        "metrics",
        "intake",
        "api",
        "workers",
        "workloads",
        "unwatched",
        "results",
        "results_keep",
    ]
    assert list(facts["gpus"]) == ["devices", "usable", "leases", "waiting", "trouble"]
    (worker,) = facts["workers"]
    assert list(worker) == ["name", "role", "pid", "queues", "beat_ms", "progress", "engine", "serves"]


def test_a_redis_that_cannot_write_its_journal_is_a_trouble() -> None:
    full = journal_trouble({"aof_enabled": 1, "aof_last_write_status": "err"})
    assert full is not None and "free some disk space" in full.reason
    assert journal_trouble({"aof_enabled": 1, "aof_last_write_status": "ok"}) is None
    assert journal_trouble({"aof_enabled": 0, "aof_last_write_status": "err"}) is None
    assert journal_trouble({}) is None
