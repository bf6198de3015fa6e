"""What `logweir status` knows about the GPUs; the rest of it is tested beside what it shows."""

import io
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import redis
from command_line import command_line
from own_redis import server
from polling import wait_until
from pool_devices import put_devices
from rich.console import Console
from small_bundles import AT, ONE, TWO, make_older, written

from pipeline.commands.status import _gpus, _left_out, _training, _workloads
from pipeline.commands.up import _show_attention
from pipeline.controller.training_status import Status, TrainingState
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Need
from pipeline.models.registry import Registry
from pipeline.models.serving import Serving
from pipeline.observe.presence import Presence
from pipeline.records.left_out import LeftOut
from pipeline.redis.connection import now_ms
from pipeline.redis.keys import Keys
from pipeline.redis.leases import TRAINING, Leases, granted
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
        "redis_loss",
        "watching",
        "dropped",
        "left_out",
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
    unsaved = journal_trouble({"aof_enabled": 0, "rdb_last_bgsave_status": "err"})
    assert unsaved is not None and "could not save its last snapshot" in unsaved.reason


def test_what_only_asks_works_while_redis_takes_no_writes(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    with server(tmp_path, "--dir", str(tmp_path / "sub"), "--save", "3600 1") as client:
        client.set("k", 1)
        shutil.rmtree(tmp_path / "sub")
        client.bgsave()
        assert wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", timeout_s=20)  # type: ignore[index]
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            client.ping()
        full = settings.replace(redis_url=f"unix://{tmp_path}/r.sock")
        with command_line(full, monkeypatch, capsys) as run:
            for verb in (
                "status",
                "incidents",
                "patterns",
                "rates",
                "models list",
                "train --list",
                "dead list",
            ):
                said = run(*verb.split())
                assert said.err == "", (verb, said)
            assert "could not save its last snapshot" in run("status").out
            assert "MISCONF" in run("watch", "add", "shop").err
        client.config_set("save", "")  # else it would not end


def test_status_names_the_workloads_whose_lines_were_left_out_lately(
    settings: Settings, client: "redis.Redis"
) -> None:
    def lines() -> list[str]:
        text = io.StringIO()
        _left_out(Console(width=200, file=text), read_status(settings).left_out)
        return text.getvalue().splitlines()

    key, now = Keys(settings.redis.key_prefix).watching("left_out"), now_ms(client)
    assert lines() == []
    client.hset(key, "shop", LeftOut(ahead=12_345, lead=120).pack(now))
    client.hset(key, "bank", LeftOut(late=7).pack(now))
    client.hset(key, "long ago", LeftOut(late=99_999).pack(now - 2 * 86_400_000))
    assert lines() == [
        "left out  shop: 12,345 lines are up to 2.0 h ahead of the clock; is it the time zone?",
        "left out  bank: 7 lines are not in the rates, because their minute was judged before",
    ]
    for number in range(7):
        client.hset(key, f"w{number}", LeftOut(values=1).pack(now))
    assert lines()[-1] == "left out  and lines of 4 more workloads"


def test_status_up_and_doctor_say_that_an_older_build_made_the_model_and_what_helps(
    settings: Settings,
    client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = Registry(client, settings)
    lease = granted(Leases(client, settings).request(TRAINING, "t"), TRAINING)
    written(registry, ONE)
    registry.publish(ONE, lease, at=AT)
    sentence = f"an older build made the live model, {ONE}, and this one cannot read it; lines are stored "
    sentence += "without a verdict until `logweir train` has learnt a new one"
    with command_line(settings, monkeypatch, capsys) as logweir:
        assert "live model" not in logweir("doctor").out
        make_older(registry, ONE)
        assert Serving(registry, registry.manifest).version() is None
        said = " ".join(logweir("status").out.split())
        assert f"{ONE} cannot be read on {registry.machine}, and no other version serves: an older" in said
        Presence(client, settings).beat(name="a", role="ingest", pid=1, queues=["ingest"])
        Presence(client, settings).serves("a", {"shared": TWO})
        assert "so another version serves there" in " ".join(logweir("status").out.split())
        said = logweir("doctor")
        assert said.code == 1 and f"missing live model: {sentence}" in said.out
    text = io.StringIO()
    _show_attention(Console(width=200, file=text), None, None, registry.outdated())
    assert text.getvalue() == f"attention: {sentence}\n"


def test_status_says_what_was_lost_on_the_way_in_and_on_the_way_to_the_watcher(
    settings: Settings,
    client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = Keys(settings.redis.key_prefix)
    assert read_status(settings, client).dropped == []
    client.hset(keys.metrics("intake"), mapping={
        "logweir_intake_dropped_total|protocol=syslog": 12.0,
        "logweir_intake_dropped_total|protocol=forward": 1.0,
        "logweir_intake_lines_total|protocol=syslog": 99.0,
        "logweir_intake_shortened_total|protocol=syslog": 2.0,
    })  # fmt: skip
    client.hset(keys.metrics("nats"), mapping={
        "logweir_nats_payloads_total|outcome=dropped": 4.0, "logweir_nats_payloads_total|outcome=read": 50.0,
    })  # fmt: skip
    client.hset(keys.counts, "source_lost", 7)
    client.hset(keys.watching(), mapping={"dropped": 5, "workloads": 3})
    with command_line(settings, monkeypatch, capsys) as logweir:
        lines = [line for line in logweir("status").out.splitlines() if line.startswith("dropped")]
    assert lines == [
        "dropped   13 messages to the intake for which there was no room",
        "dropped   2 messages to the intake that were stored without their end",
        "dropped   4 payloads of NATS for which there was no room",
        "dropped   7 records that Kafka or NATS removed before they were read",
        "dropped   5 stored batches that the watcher never saw, because their list was full",
        "dropped   3 workloads whose rates were forgotten for want of room",
    ]
