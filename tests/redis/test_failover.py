"""A Redis whose master dies, freezes or loses its replicas, with three servers and three sentinels."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from polling import wait_until
from pool_devices import put_devices
from sentinel_redis import TAKES_OVER_S, Group, Server, close, sentinel_group

from pipeline.errors import RedisUnavailable
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode, Need, PoolLease
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted
from pipeline.redis import failover
from pipeline.redis.check import check_redis
from pipeline.redis.connection import FAILOVER_S, connect
from pipeline.redis.keys import Keys
from pipeline.redis.sentinels import ASK_S
from pipeline.settings import Settings

pytestmark = pytest.mark.long
# What a producer needs at most once another master takes writes: the end of a command that the old one does
# not answer, and a question to each of the three sentinels. Three times that: its thread may wait for a core.
OWN_S = 3 * (FAILOVER_S + 3 * ASK_S)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with sentinel_group(tmp_path / "group", password="pw-redis", sentinel_password="pw-sentinel") as made:
        yield made


@pytest.fixture
def settings(group: Group, tmp_path: Path) -> Settings:
    return Settings(redis_url=group.url, redis_replicas_ack=1, data_dir=tmp_path / "data")


@dataclass
class Pushing:
    """Pushes one batch after the other, each until it is accepted."""

    producer: Producer
    accepted: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    longest_s: float = 0.0  # from the last answer before a refusal to the next one
    end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        answered = time.monotonic()
        while not self.end.is_set():
            batch_id = f"push-{len(self.accepted):06d}"
            try:
                answer = self.producer.send([f"line {batch_id}"], workload="shop", batch_id=batch_id)
            except RedisUnavailable as exc:
                self.refusals.append(str(exc))
                time.sleep(0.02)
                continue
            assert isinstance(answer, Accepted)
            self.accepted.append(batch_id)
            now = time.monotonic()
            self.longest_s, answered = max(self.longest_s, now - answered), now
            time.sleep(0.002)  # the test shares its cores

    def go_on(self, batches: int, *, within_s: float) -> bool:
        """Whether so many more batches are accepted."""
        until = len(self.accepted) + batches
        return wait_until(lambda: len(self.accepted) >= until, timeout_s=within_s)


@pytest.fixture
def producer(settings: Settings) -> Iterator[Producer]:
    made = Producer.connect(settings)
    yield made
    close(made)


@pytest.fixture
def pushing(producer: Producer) -> Iterator[Pushing]:
    """A producer at work in a thread."""
    found = Pushing(producer)
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found
    found.end.set()
    thread.join(30)
    assert not thread.is_alive()


def goes_on_with_another(group: Group, before: Server, pushing: Pushing) -> None:
    """Sentinels take their time, the more so on a busy machine; the producer follows them within OWN_S."""
    assert wait_until(lambda: group.took_over(before), timeout_s=TAKES_OVER_S)
    assert pushing.go_on(1, within_s=OWN_S)
    assert pushing.go_on(200, within_s=30)
    pushing.end.set()
    print(f"outage {pushing.longest_s:.2f} s, {len(pushing.accepted)} pushes")
    assert _held(group, pushing) == (len(pushing.accepted), 0)


def test_a_killed_master_costs_seconds_and_no_accepted_push(group: Group, pushing: Pushing) -> None:
    assert pushing.go_on(200, within_s=20)
    before = group.master()
    before.send(signal.SIGKILL)
    goes_on_with_another(group, before, pushing)
    assert pushing.refusals


def test_a_frozen_master_that_thaws_keeps_no_push_that_the_new_one_lacks(
    group: Group, pushing: Pushing
) -> None:
    assert pushing.go_on(200, within_s=20)
    before = group.master()
    before.send(signal.SIGSTOP)
    assert wait_until(lambda: group.master() is not before, timeout_s=TAKES_OVER_S)
    before.send(signal.SIGCONT)
    goes_on_with_another(group, before, pushing)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_living_master_that_is_replaced_keeps_no_push_that_the_new_one_lacks(
    group: Group, settings: Settings, replicas: int
) -> None:
    """It goes on with the replica that is not promoted, which acknowledges and then forgets."""
    producer = Producer.connect(settings.replace(redis_replicas_ack=replicas))
    pushing = Pushing(producer)
    thread = threading.Thread(target=pushing.run)
    thread.start()
    try:
        for _ in range(2):
            assert pushing.go_on(100, within_s=30)
            before = group.master()
            assert wait_until(group.ready, timeout_s=30)
            group.sentinels[0].client.sentinel_failover("main")
            assert wait_until(lambda before=before: group.master() is not before, timeout_s=TAKES_OVER_S)
        assert pushing.go_on(100, within_s=30)
    finally:
        pushing.end.set()
        thread.join(30)
    print(f"outage {pushing.longest_s:.2f} s, {len(pushing.accepted)} pushes, {set(pushing.refusals)}")
    assert _held(group, pushing) == (len(pushing.accepted), 0)
    close(producer)


def test_pushes_go_on_without_one_replica_and_one_sentinel(group: Group, pushing: Pushing) -> None:
    assert pushing.go_on(50, within_s=20)
    group.replicas()[0].send(signal.SIGKILL)
    group.sentinels[2].send(signal.SIGKILL)
    began = time.monotonic()
    assert pushing.go_on(200, within_s=30)
    print(f"{200 / (time.monotonic() - began):.0f} pushes/s without one replica, {set(pushing.refusals)}")
    group.sentinels[1].send(signal.SIGKILL)  # the last one is no majority, and nobody could fail over
    pushing.refusals.clear()
    assert wait_until(lambda: bool(pushing.refusals), timeout_s=10)
    assert "most sentinels do not answer" in pushing.refusals[0]


def _held(group: Group, pushing: Pushing) -> tuple[int, int]:
    """The lines that the ledger of the master has accepted, and how many of the accepted batches it lacks."""
    keys, client = pushing.producer.ledger.keys, group.master().client
    # The last call of the thread may be under way.
    time.sleep(0.2)
    count = int(client.hget(keys.totals("shop"), "accepted") or 0)  # type: ignore[arg-type]
    lacking = sum(not client.exists(keys.batch(batch_id)) for batch_id in pushing.accepted)
    return count, lacking


def test_a_push_is_refused_until_a_replica_has_it_and_is_then_a_duplicate(
    group: Group, settings: Settings, producer: Producer
) -> None:
    other = Producer.connect(settings)
    for replica in group.replicas():
        replica.send(signal.SIGSTOP)
    # Before min-replicas refuses it (2 s): the master takes the batch.
    with pytest.raises(RedisUnavailable, match="only 0 of 1 replicas have acknowledged"):
        producer.send(["a line"], workload="shop", batch_id="one")
    # Another connection wrote the batch, and the script writes nothing more.
    with pytest.raises(RedisUnavailable, match="only 0 of 1 replicas have acknowledged"):
        other.send(["a line"], workload="shop", batch_id="one")
    close(other)

    def refused_at_once() -> bool:
        with pytest.raises(RedisUnavailable) as refused:
            producer.send(["a line"], workload="shop", batch_id="one")
        return "NOREPLICAS" in str(refused.value)

    assert wait_until(refused_at_once, timeout_s=15)
    for replica in group.replicas():
        replica.send(signal.SIGCONT)

    def sent() -> bool:
        try:
            return producer.send(["a line"], workload="shop", batch_id="one") == Accepted(
                batch_id="one", duplicate=True
            )
        except RedisUnavailable:
            return False

    assert wait_until(sent, timeout_s=15)
    assert int(group.master().client.hget(producer.ledger.keys.totals("shop"), "accepted") or 0) == 1  # type: ignore[arg-type]


def test_connections_to_a_master_that_was_demoted_are_dropped(
    group: Group, settings: Settings, producer: Producer
) -> None:
    with connect(settings) as client:
        client.set("x", "1")
        producer.send(["before"], workload="w", batch_id="before")
        before = group.master()
        (held,) = client.connection_pool._available_connections
        assert held.port == before.port
        group.sentinels[0].client.sentinel_failover("main")
        assert wait_until(lambda: group.master() is not before, timeout_s=TAKES_OVER_S)

        def sent() -> bool:
            try:
                return isinstance(producer.send(["a"], workload="w", batch_id="a"), Accepted)
            except RedisUnavailable:
                return False

        assert wait_until(sent, timeout_s=15)
        assert client.get("x") == b"1"
        (held,) = client.connection_pool._available_connections
        assert held.port == group.master().port


def test_a_waiting_need_listens_to_the_new_master_though_the_old_one_froze(
    group: Group, settings: Settings
) -> None:
    """A frozen server breaks no connection: a subscription there would hear no grant for ever."""
    settings = settings.replace(lease_ttl_ms=3_000, gpu_node_ttl_ms=60_000)
    with connect(settings) as client, connect(settings) as elsewhere:
        holder, waiter = Pool(client, settings), Pool(elsewhere, settings)
        put_devices(holder, n=1, node="a")
        alone = Need(mode=LeaseMode.EXCLUSIVE)
        held = holder.request(alone, holder="first", ttl_ms=60_000)
        granted: list[tuple[float, PoolLease]] = []

        def wait() -> None:
            lease = waiter.request(alone, holder="second", request_id="second", timeout_s=60)
            granted.append((time.monotonic(), lease))

        thread = threading.Thread(target=wait)
        thread.start()
        channel = Keys(settings.redis.key_prefix).gpu("told:second")

        def listens() -> bool:
            with suppress(redis.RedisError):
                return bool(group.master().client.pubsub_numsub(channel)[0][1])
            return False

        assert wait_until(listens, timeout_s=10)
        before = group.master()
        before.send(signal.SIGSTOP)
        assert wait_until(lambda: group.master() is not before, timeout_s=TAKES_OVER_S)
        began = time.monotonic()
        assert wait_until(listens, timeout_s=20)
        print(f"it listens to the new master {time.monotonic() - began:.2f} s after its promotion")

        def released() -> bool:
            with suppress(RedisUnavailable):
                return holder.release(held) or not holder.snapshot().leases
            return False

        assert wait_until(released, timeout_s=20)
        began = time.monotonic()
        thread.join(20)
        assert granted, "the grant of the new master woke it"
        print(f"granted {granted[0][0] - began:.2f} s after the release")
        before.send(signal.SIGCONT)
        assert holder.release(granted[0][1])


def test_doctor_names_replicas_quorum_and_limits(group: Group, settings: Settings) -> None:
    check_redis(settings)
    with connect(settings) as client:
        rows = {row["what"]: row for row in failover.checks(settings, client)}
    assert not any(row["warning"] for row in rows.values()), rows
    assert rows["sentinels"]["found"].startswith("3 of 3 answer, quorum 2, master 127.0.0.1:")
    assert rows["Redis replicas"]["found"] == "2 follow, redis_replicas_ack 1"
    assert rows["Redis min-replicas"]["found"] == "min-replicas-to-write 1, min-replicas-max-lag 2"
    group.sentinels[2].send(signal.SIGKILL)
    dead = f"127.0.0.1:{group.sentinels[2].port}"
    group.replicas()[0].send(signal.SIGKILL)
    wrong = settings.replace(redis_replicas_ack=2)
    with connect(wrong) as client:
        assert wait_until(lambda: failover.replication(client).online == 1, timeout_s=10)
        rows = {row["what"]: row for row in failover.checks(wrong, client)}
    assert (
        f"2 of 3 answer, quorum 2, master 127.0.0.1:{group.master().port}; {dead} does not answer"
        in (rows["sentinels"]["found"])
    )
    assert "redis_replicas_ack = 2 refuses every push until there are more" in rows["Redis replicas"]["found"]
