"""The metrics: what workers count survives them, one endpoint shows it all, and its labels are closed
sets."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import redis
from polling import wait_until
from pool_devices import put_devices
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.errors import BadInput, RedisUnavailable, SinkUnavailable
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Device, Need
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.observe import counters as metrics
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Claim, Stage
from pipeline.records.schema import raw_frame
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.redis.leases import DRAIN, Leases
from pipeline.settings import Settings
from pipeline.tasks import drain, ingest
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform
from pipeline.workers import agent, gauges, roles, sockets, source
from pipeline.workers import metrics as exporter_process
from pipeline.workers.gauges import LINES_TOTAL, SHOWN
from pipeline.workers.intake import server as intake_process
from pipeline.workers.kafka import process as kafka
from pipeline.workers.kafka.progress import PartitionProgress, report
from pipeline.workers.nats import process as nats
from pipeline.workers.nats import progress as nats_progress
from pipeline.workers.scrape import Scrape
from pipeline.workers.serve import server as serve_process
from pipeline.workers.stack.private_redis import PrivateRedis

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ENDS_S = 10.0


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read(client: "redis.Redis", settings: Settings) -> Samples:
    """One scrape in this process."""
    return scraped(Scrape(client, settings))


def scraped(scrape: Scrape) -> Samples:
    scrape._read_at = float("-inf")  # as if a second had passed
    registry = CollectorRegistry(auto_describe=False)
    registry.register(scrape)
    return parsed(generate_latest(registry).decode())


def at(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"logweir_{name}", tuple(sorted(labels.items()))))


def accept(ledger: Ledger, batch_id: str, *, backfill: bool = False, workload: str = "shop") -> None:
    ledger.intake.accept(
        Batch(
            batch_id=batch_id,
            workload=workload,
            source="app.log",
            source_key="00112233aabbccdd",
            purpose=Purpose.SCORE,
            arrived=datetime(2026, 11, 20, 10, tzinfo=UTC),
            formats=(),
            zone="UTC",
            records=raw_frame(["one", "two", "three"]),
        ),
        backfill=backfill,
    )


@pytest.fixture
def counting(client: "redis.Redis", settings: Settings) -> Iterator[metrics.Pusher]:
    """This process counts for a worker of a role, as one does that has just begun."""
    pusher = metrics.push(connect(settings, timeout_s=1), Keys(settings.redis.key_prefix), "ingest")
    yield pusher
    metrics.flush()
    metrics._pushers.clear()
    pusher.join(ENDS_S)


# ---- counting and pushing ------------------------------------------------------------------------


def test_what_is_pushed_twice_is_counted_once(
    counting: metrics.Pusher, client: "redis.Redis", settings: Settings
) -> None:
    metrics.step_ended("ingest", "done")
    counting.push()
    metrics.step_ended("ingest", "done")
    counting.push()
    counting.push()
    assert at(read(client, settings), "steps_total", stage="ingest", outcome="done") == 2


@pytest.mark.long
def test_a_counter_outlives_its_process_and_its_pool_children(
    client: "redis.Redis", settings: Settings
) -> None:
    code = """
        import atexit, os, sys
        from pipeline.observe import counters as metrics
        from pipeline.redis.connection import connect
        from pipeline.redis.keys import Keys
        from pipeline.settings import Settings

        settings = Settings.load()
        def begin():
            metrics.push(connect(settings, timeout_s=1), Keys(settings.redis.key_prefix), "infer-cpu")
        begin()
        metrics.scored(5, 0.2, "cpu")
        if (child := os.fork()) == 0:
            begin()
            metrics.scored(7, 0.2, "cuda:1")
            metrics.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        metrics.flush()
    """
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
            env={**os.environ, **settings.to_environ()}, check=True, timeout=60,
        )  # fmt: skip
    samples = read(client, settings)
    assert at(samples, "scored_lines_total", device="cpu") == 10
    assert at(samples, "scored_lines_total", device="cuda") == 14
    assert at(samples, "score_seconds_count", device="cpu") == 2
    assert at(samples, "score_seconds_bucket", device="cpu", le="0.1") == 0
    assert at(samples, "score_seconds_bucket", device="cpu", le="0.25") == 2
    assert at(samples, "score_seconds_sum", device="cpu") == pytest.approx(0.4)


def test_a_redis_that_is_away_delays_what_was_counted_and_loses_none(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    server = PrivateRedis(settings)
    process = server.start()
    settings = settings.replace(redis_url=server.url)
    pusher = metrics.push(connect(settings, timeout_s=1), Keys(settings.redis.key_prefix), "store")
    try:
        metrics.step_ended("store", "done")
        pusher.push()
        process.terminate()
        process.wait(ENDS_S)
        metrics.step_ended("store", "done")
        with pytest.raises(RedisUnavailable):
            pusher.push()
        metrics.step_ended("store", "done")
        process = server.start()
        pusher.push()
        with connect(settings) as client:
            assert at(read(client, settings), "steps_total", stage="store", outcome="done") == 3
    finally:
        metrics.flush()
        metrics._pushers.clear()
        pusher.join(ENDS_S)
        process.terminate()
        process.wait(ENDS_S)


def test_a_word_that_is_not_in_its_set_is_counted_as_other(
    counting: metrics.Pusher, client: "redis.Redis", settings: Settings
) -> None:
    metrics.waited("store", "no space left on /srv/shop/../results")
    counting.push()
    samples = read(client, settings)
    assert at(samples, "waits_total", stage="store", reason="other") == 1
    assert not any("shop" in str(key) for key in samples)


def test_the_hash_of_a_role_stays_as_small_as_its_labels_allow(
    counting: metrics.Pusher, client: "redis.Redis", settings: Settings
) -> None:
    for n in range(500):
        metrics.waited(f"stage-{n}", f"reason-{n}")
        metrics.lease_waited(f"kind-{n}", n)
    counting.push()
    # waits 1, and of the histogram 9 buckets with +Inf, count and sum.
    assert client.hlen(Keys(settings.redis.key_prefix).metrics("ingest")) <= 1 + 9 + 1 + 2


@pytest.mark.long
def test_steps_are_counted_by_how_they_end(
    counting: metrics.Pusher, client: "redis.Redis", settings: Settings
) -> None:
    context = Context(make_app(settings), settings)
    producer = Producer(context.ledger, context.submit, settings)
    producer.send(["one", "two"], workload="shop", batch_id="b")
    producer.send(["poison"], workload="shop", batch_id="p")
    entry = context.ledger.keys.batch

    def full(_context: Context, _claim: Claim) -> None:
        raise SinkUnavailable("the disk is full; free some space")

    def fails(_context: Context, _claim: Claim) -> None:
        raise ValueError("no")

    perform(context, Stage.INGEST, "b", ingest.step)
    perform(context, Stage.INGEST, "b", ingest.step)  # it has moved on
    perform(context, Stage.DRAIN, "b", full)
    client.hset(entry("b"), "not_before", 0)
    perform(context, Stage.DRAIN, "b", drain.step)
    for _ in range(settings.internal.max_attempts):
        client.hset(entry("p"), "not_before", 0)
        perform(context, Stage.INGEST, "p", fails)
    counting.push()
    samples = read(client, settings)
    counted = {
        (dict(labels)["stage"], dict(labels)["outcome"]): value
        for (name, labels), value in samples.items()
        if name == "logweir_steps_total" and value
    }
    assert counted == {
        ("ingest", "done"): 1,
        ("ingest", "skipped"): 1,
        ("drain", "waits"): 1,
        ("drain", "done"): 1,
        ("ingest", "failed"): settings.internal.max_attempts - 1,
        ("ingest", "dead"): 1,
    }
    assert at(samples, "waits_total", stage="drain", reason="sink") == 1
    assert at(samples, "verdict_lookups_total", result="miss") == 2
    assert at(samples, "step_seconds_count", stage="drain") == 2
    assert at(samples, "dead_batches") == 1 and at(samples, "lines", state="dead") == 1


# ---- the state at the moment of a scrape ---------------------------------------------------------


def test_the_age_of_the_oldest_batch_is_told_for_fresh_ones_and_backfill(
    client: "redis.Redis", settings: Settings
) -> None:
    ledger = Ledger(client, settings)
    for name in ("old", "new", "late", "again", "retried"):
        accept(ledger, name, backfill=name == "late")
    now = ledger.store.now_ms()
    client.hset(ledger.keys.batch("old"), "accepted_ms", now - 60_000)
    client.hset(ledger.keys.batch("late"), "accepted_ms", now - 600_000)
    # These were accepted long ago, and wait since a moment only.
    client.hset(ledger.keys.batch("again"), mapping={"accepted_ms": 1, "kind": "rescore"})
    client.hset(ledger.keys.batch("retried"), mapping={"accepted_ms": 1, "dead_ms": 2})
    scrape = Scrape(client, settings)
    samples = scraped(scrape)
    assert at(samples, "oldest_pending_seconds", priority="fresh") == pytest.approx(60, abs=5)
    assert at(samples, "oldest_pending_seconds", priority="backfill") == pytest.approx(600, abs=5)
    assert at(samples, "pending_batches", stage="ingest") == 5
    client.zrem(ledger.keys.due, "old", "late")
    samples = scraped(scrape)
    assert at(samples, "oldest_pending_seconds", priority="fresh") == pytest.approx(0, abs=5)
    assert at(samples, "oldest_pending_seconds", priority="backfill") == 0


def test_a_scrape_asks_redis_twice_however_many_batches_wait(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(client, settings)
    for n in range(50):
        accept(ledger, f"b{n}", workload=f"shop-{n}")
    trips = []
    execute = redis.client.Pipeline.execute

    def noted(self: "redis.client.Pipeline", *args: object, **kwargs: object) -> object:
        trips.append(len(self))
        return execute(self, *args, **kwargs)

    monkeypatch.setattr(redis.client.Pipeline, "execute", noted)
    scrape = Scrape(client, settings)
    assert at(scraped(scrape), "workloads") == 50
    assert len(trips) == 2
    scraped(scrape)
    assert trips[3] == trips[1] - 50  # the ages of the batches are known already
    registry = CollectorRegistry(auto_describe=False)
    registry.register(scrape)
    generate_latest(registry)
    assert len(trips) == 4  # within a second it is not asked again


def test_a_redis_that_lost_its_last_second_is_not_taken_for_a_counter_that_began_anew(
    client: "redis.Redis", settings: Settings
) -> None:
    keys, scrape = Keys(settings.redis.key_prefix), Scrape(client, settings)
    client.sadd(keys.workloads, "shop")

    def stored(lines: int) -> float | None:
        client.hset(keys.totals("shop"), "stored", lines)
        return at(scraped(scrape), "lines_total", outcome="stored")

    assert [stored(1000), stored(990), stored(1010)] == [1000, 1000, 1010]
    assert stored(3) == 3  # a Redis that was emptied


def test_who_leads_who_works_and_what_is_wrong_is_told(client: "redis.Redis", settings: Settings) -> None:
    presence = Presence(client, settings)
    presence.beat(name="ingest-1", role="ingest", pid=1, queues=())
    presence.beat(name="x", role="a role of a newer build", pid=2, queues=())
    samples = read(client, settings)
    assert at(samples, "workers", role="ingest") == 1 and at(samples, "workers", role="store") == 0
    assert at(samples, "workers", role="other") == 1
    assert at(samples, "drain_leader") == 0 and at(samples, "trouble", stage="source") == 0
    presence.complain("source", "the log index does not answer")
    Leases(client, settings).request(DRAIN, "drain:1")
    Ledger(client, settings).intake.pause("maintenance")
    samples = read(client, settings)
    assert at(samples, "drain_leader") == 1 and at(samples, "door_closed") == 1
    assert at(samples, "trouble", stage="source") == 1 and at(samples, "trouble", stage="store") == 0
    assert not any("maintenance" in str(key) for key in samples)


def test_the_labels_know_every_role_and_every_stage() -> None:
    others = {
        "beat",
        agent.ROLE,
        exporter_process.ROLE,
        intake_process.ROLE,
        serve_process.ROLE,
        source.ROLE,
        kafka.ROLE,
        nats.ROLE,
    }
    assert set(metrics.ROLES) == {*roles.ROLES, *others, metrics.OTHER}
    assert tuple(Stage) == metrics.STAGES


def test_a_meter_is_a_counter_where_its_name_says_total_and_a_histogram_where_it_has_buckets() -> None:
    for meter in (*metrics.METERS, *SHOWN):
        assert (meter.kind is metrics.MeterKind.COUNTER) == meter.name.endswith("_total"), meter.name
        assert (meter.kind is metrics.MeterKind.HISTOGRAM) == bool(meter.buckets), meter.name


def lagging(topic: str) -> PartitionProgress:
    now_ms = round(time.time() * 1000)
    return PartitionProgress(
        topic=topic,
        partition=0,
        servers="secret",
        offset=1,
        end=2,
        lines=0,
        reader="secret",
        token=1,
        at_ms=now_ms,
    )


def stream(name: str) -> nats_progress.StreamProgress:
    return nats_progress.StreamProgress(
        stream=name,
        subjects="secret",
        servers="secret",
        sequence=1,
        end=2,
        lines=0,
        reader="secret",
        at_ms=round(time.time() * 1000),
    )


def test_every_label_is_of_a_closed_set_whatever_redis_holds(
    counting: metrics.Pusher, client: "redis.Redis", settings: Settings
) -> None:
    ledger, keys = Ledger(client, settings), Keys(settings.redis.key_prefix)
    accept(ledger, "id-secret", workload='we"ird\n{x}/app-secret')
    metrics.step_ended("secret-stage", "secret-outcome")
    metrics.started("secret-role")
    counting.push()
    client.hset(keys.metrics("ingest"), "logweir_steps_total|stage=secret|outcome=secret", 5)
    client.hset(keys.metrics("ingest"), "secret_total|x=secret", "no number")
    client.hset(keys.counts, "stage:secret", 1)
    Presence(client, settings).complain("secret", "secret")
    Presence(client, settings).beat(name="secret", role="secret", pid=1, queues=("secret",))
    client.hset(keys.workers, "broken", "{")
    client.hset(keys.model(), mapping={"version": "m000001-0a1b2c3d", "published_ms": ledger.store.now_ms()})
    client.hset(keys.model("own/secret"), mapping={"version": "m000002-0a1b2c3d"})
    report(client, settings, {"of app": lagging("app")})
    client.hset(keys.kafka, "broken", "secret")
    nats_progress.report_stream(client, settings, "in", stream("logweir-in"))
    client.hset(keys.nats, "broken", "secret")
    # Versions and the topics that an operator names are no closed sets.
    a_device = ("node-a", *(device.uuid for device in busy_devices(client, settings)))
    unbounded = {
        **dict.fromkeys(
            (meter.name for meter in SHOWN if meter.name.startswith("logweir_gpu_device_")), a_device
        ),
        "logweir_model_info": ("m000001-0a1b2c3d",),
        "logweir_kafka_lag_records": ("app", "0"),
        "logweir_nats_lag_messages": ("logweir-in",),
    }
    samples = read(client, settings)
    known = {meter.name: meter.labels for meter in (*metrics.METERS, *SHOWN)}
    for name, labels in samples:
        base = next(b for b in (name, name.rsplit("_", 1)[0]) if b in known)
        assert {label for label, _ in labels} - {"le"} == set(known[base])
        for label, value in labels:
            allowed = known[base].get(label)
            assert label == "le" or value in (allowed or unbounded[base]), (name, label, value)
    assert not any("secret" in str(key) for key in samples)
    assert {name for name, _ in samples} >= {
        meter.name for meter in (*SHOWN, *metrics.METERS) if not meter.buckets and meter is not LINES_TOTAL
    }


def busy_devices(client: "redis.Redis", settings: Settings) -> tuple[Device, ...]:
    return put_devices(Pool(client, settings), 2, utilisation_percent=87, temperature_c=61)


def test_each_device_has_its_own_numbers_less_what_a_silent_node_does_not_say(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(client, settings)
    one, two = (device.uuid for device in busy_devices(client, settings))
    pool.request(Need(memory_mib=1_000, device=one), holder="a")

    def numbers() -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for (name, labels), value in read(client, settings).items():
            if name.startswith("logweir_gpu_device_"):
                found.setdefault(dict(labels)["device"], {})[name.removeprefix("logweir_gpu_device_")] = value
        return found

    full = {"leased_bytes": 0.0, "used_bytes": 0.0, "busy_ratio": 0.87, "temperature_celsius": 61.0}
    assert numbers() == {one: full | {"leased_bytes": 1_000 * 2.0**20}, two: full}
    client.zadd(pool.ledger.keys.gpu("beats"), {"node-a": 1})
    assert numbers() == {one: {"leased_bytes": 1_000 * 2.0**20}, two: {"leased_bytes": 0.0}}
    monkeypatch.setattr(gauges, "LISTED", 1)
    assert set(numbers()) == {one}


# ---- the process ---------------------------------------------------------------------------------


@dataclass
class Exporter:
    url: str
    process: "subprocess.Popen[bytes]"

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read().decode()

    def scrape(self) -> Samples:
        status, text = self.get("/metrics")
        assert status == 200
        return parsed(text)


@contextmanager
def exporter(settings: Settings) -> Iterator[Exporter]:
    """A real one on a socket that we keep, as the stack starts it."""
    with sockets.listen("metrics", "127.0.0.1", 20_000) as opened:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.metrics", f"--fd={opened.fileno()}"],
            env={**os.environ, **settings.to_environ()}, pass_fds=(opened.fileno(),),
        )  # fmt: skip
        try:
            yield Exporter(sockets.url(opened), process)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(ENDS_S) == 0


@pytest.mark.long
def test_the_exporter_answers_whatever_redis_does(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    server = PrivateRedis(settings)
    process = server.start()
    settings = settings.replace(redis_url=server.url)
    try:
        with exporter(settings) as seen:
            with connect(settings) as client:
                accept(Ledger(client, settings), "b")
            samples = seen.scrape()
            assert at(samples, "redis_up") == 1 and at(samples, "pending_batches", stage="ingest") == 1
            assert seen.get("/readyz") == (200, "Redis answers\n")
            assert seen.get("/nothing")[0] == 404
            assert wait_until(lambda: at(seen.scrape(), "workers", role="metrics") == 1, timeout_s=10)

            process.kill()
            process.wait(ENDS_S)
            assert wait_until(lambda: at(seen.scrape(), "redis_up") == 0, timeout_s=10)
            samples = seen.scrape()
            local = {
                "redis_up",
                "scrape_seconds",
                "disk_free_bytes",
                "disk_size_bytes",
                "model_max_age_seconds",
            }
            limits = {
                "pending_limit_batches",
                "pending_limit_bytes",
                "dead_limit_bytes",
                "intake_identities_max",
            }
            assert {name for name, _ in samples} == {f"logweir_{name}" for name in local | limits}
            status, reason = seen.get("/readyz")
            assert status == 503 and "Redis does not answer" in reason and str(tmp_path) not in reason
            assert seen.get("/healthz") == (200, "it lives\n")

            process = server.start()
            assert wait_until(lambda: at(seen.scrape(), "redis_up") == 1, timeout_s=10)
            assert at(seen.scrape(), "pending_batches", stage="ingest") == 1
            assert seen.get("/readyz")[0] == 200
    finally:
        process.terminate()
        process.wait(ENDS_S)


def test_a_taken_port_gives_the_next_one_and_a_wrong_address_a_sentence() -> None:
    with sockets.listen("metrics", "127.0.0.1", 20_000) as one:
        port = one.getsockname()[1]
        with sockets.listen("metrics", "127.0.0.1", port) as two:
            assert port < two.getsockname()[1] < port + sockets.TRIES
    with pytest.raises(BadInput, match=r"Metrics cannot listen on 192\.0\.2\.1 .*metrics_address"):
        sockets.listen("metrics", "192.0.2.1", 20_000)
