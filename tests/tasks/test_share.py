"""A scoring process's part of a GPU: taken, kept, given back; with a real pool on made-up devices."""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from polling import Clock, wait_until
from pool_devices import put_devices

from pipeline.errors import DeviceFailed, LeaseRefused, LogweirError, RedisUnavailable
from pipeline.gpu.policy.scoring import scoring_device
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode, Need, PoolLease
from pipeline.messages.app import make_app
from pipeline.settings import Settings
from pipeline.tasks import infer
from pipeline.tasks import share as module
from pipeline.tasks.context import Context
from pipeline.tasks.loaded import WorkerProfile
from pipeline.tasks.share import GpuShare, ended_after_loss, enrol, host_locks
from pipeline.workers.stack.stack import Stack

ALONE = Need(mode=LeaseMode.EXCLUSIVE)


@dataclass
class DeviceUser:
    """A device in memory; `began` stays true as CUDA's context does."""

    began: bool = False
    prepared: bool = False
    loaded: int = 0
    ended: int = 0
    begin_fails: bool = False
    unload_fails: bool = False
    calls: list[str] = field(default_factory=list)

    def prepare(self) -> None:
        self.prepared = True

    def begin(self, lease: PoolLease) -> None:
        self.calls.append("begin")
        self.began = True
        if self.begin_fails:
            raise LogweirError("CUDA does not start")
        self.loaded += 1

    def unload(self) -> None:
        self.calls.append("unload")
        if self.unload_fails:
            raise RuntimeError("the driver is in a bad mood")
        self.loaded = 0

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def small(settings: Settings) -> Settings:
    return settings.replace(gpu_infer_mib=2_000, lease_ttl_ms=2_000)


@pytest.fixture
def pool(small: Settings, client: "redis.Redis") -> Pool:
    made = Pool(client, small)
    put_devices(made, n=1, mib=8_000, node=module.this_node())
    return made


@pytest.fixture(autouse=True)
def _own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOST_DIRECTORY", tmp_path / "locks")


@pytest.fixture
def place() -> DeviceUser:
    return DeviceUser()


@pytest.fixture
def share(
    pool: Pool, small: Settings, place: DeviceUser, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuShare]:
    """One whose keeper is called by the test."""
    monkeypatch.setattr(GpuShare, "_keep", lambda self: None)
    made = GpuShare(pool, small, holder="scorer", place=place, clock=clock)
    yield made
    place.unload_fails = False
    made.close()


def token(share: GpuShare) -> int:
    assert share.held is not None
    return share.held.lease.token


def batch(share: GpuShare) -> bool:
    with share.using() as ours:
        return ours


def test_one_lease_serves_many_batches_and_the_device_is_begun_once(
    share: GpuShare, pool: Pool, place: DeviceUser
) -> None:
    assert batch(share)
    first = token(share)
    assert batch(share)
    assert token(share) == first
    assert place.calls == ["begin"]
    assert place.prepared
    (lease,) = pool.snapshot().leases
    assert (lease.holder, lease.parts[0].memory_mib, lease.need.preemptible) == ("scorer", 2_000, True)
    assert lease.pids, "the pool knows which process to look for on the device"


def test_scoring_processes_of_one_machine_take_a_device_each_while_there_is_one(
    pool: Pool, small: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuShare, "_keep", lambda self: None)
    put_devices(pool, n=3, mib=8_000, node=module.this_node(), clear_quarantine=False)
    names = ("infer-gpu.cuda@h:1", "infer-gpu-2.cuda@h:2", "infer-gpu-3.cuda@h:3", "infer-gpu-4.cuda@h:4")
    made = [GpuShare(pool, small, holder=name, place=DeviceUser(), clock=clock) for name in names]
    snapshot = pool.snapshot()
    at_once = {scoring_device(snapshot, one.need, one.holder) for one in made[:3]}
    assert len(at_once) == 3, "also those that ask in the same moment"
    assert all(batch(one) for one in made[:3])
    used = [lease.parts[0].uuid for lease in pool.snapshot().leases]
    assert len(set(used)) == 3
    assert not batch(made[3]), "a device has one copy of a model, in one process"
    assert re.fullmatch(
        r"infer-gpu\S* scores on GPU-\S+ already, and no other device has room", made[3].reports.why
    )
    assert len(pool.snapshot().leases) == 3, "nor does it hold a lease for nothing"
    assert scoring_device(pool.snapshot(), made[3].need, made[3].holder) == ""
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("shown", "wanted", "scoring"), [(1, 4, 1), (8, 4, 4), (2, 64, 2), (0, 4, 1), (3, 1, 1)]
)
def test_a_stack_starts_a_scoring_process_for_each_device(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, shown: int, wanted: int, scoring: int
) -> None:
    stack = Stack(settings.replace(gpu_infer_processes=wanted))
    started: list[tuple[list[str], Path]] = []
    monkeypatch.setattr(stack, "_popen", lambda command, log, fds: started.append((command[2:], log)))
    stack._with_gpu, stack._devices = True, shown
    stack._start_gpu()
    names = ["infer-gpu", *(f"infer-gpu-{n}" for n in range(2, scoring + 1))]
    assert [(words, log.stem) for words, log in started] == [
        (["pipeline.workers.agent", "agent"], "agent"),
        *((["pipeline.workers.gpu", name], name) for name in names),
    ]


def test_one_scoring_process_leaves_the_choice_to_packing(pool: Pool, small: Settings, clock: Clock) -> None:
    one = GpuShare(pool, small.replace(gpu_infer_processes=1), holder="one", place=DeviceUser(), clock=clock)
    assert batch(one)
    assert pool.snapshot().leases[0].need.device == ""
    one.close()


def test_a_batch_in_hand_is_finished_before_the_device_is_given_back(
    share: GpuShare, pool: Pool, place: DeviceUser
) -> None:
    with share.using() as ours:
        assert ours
        assert share.held is not None
        with pytest.raises(LogweirError):
            pool.request(ALONE, holder="trainer", timeout_s=0.3)
        share.tick()
        assert place.loaded, "nothing is taken away under a batch"


def test_an_exclusive_need_gets_the_device_after_the_batch_and_scoring_returns_after_it(
    share: GpuShare, pool: Pool, place: DeviceUser, small: Settings, client: "redis.Redis"
) -> None:
    granted: list[PoolLease] = []
    trainer = Pool(client, small)
    waiter = threading.Thread(
        target=lambda: granted.append(trainer.request(ALONE, holder="trainer", timeout_s=20))
    )
    with share.using() as ours:
        assert ours
        held = share.held
        assert held is not None
        waiter.start()
        assert wait_until(held.asked.is_set, timeout_s=10), "the holder hears of it while it works"
        assert not granted
    waiter.join(10)
    assert granted, "it gave back as soon as the batch was done"
    assert place.loaded == 0
    place.began = False  # a process that began CUDA would have ended here
    share._left_at = None
    assert not batch(share), "training has it: this batch goes to the CPU"
    trainer.release(granted[0])
    assert wait_until(lambda: _after_pause(share) and batch(share), timeout_s=10), (
        "inference returns by itself"
    )


def _after_pause(share: GpuShare) -> bool:
    share._not_before = 0.0
    return True


def test_a_request_to_yield_reaches_a_process_without_work(
    share: GpuShare, pool: Pool, place: DeviceUser, small: Settings, client: "redis.Redis"
) -> None:
    assert batch(share)
    held = share.held
    assert held is not None
    with pytest.raises(LogweirError):
        Pool(client, small).request(ALONE, holder="trainer", timeout_s=0.5)
    assert wait_until(held.asked.is_set, timeout_s=10)
    share.tick()
    assert share.held is None
    assert not pool.snapshot().leases


def test_a_process_without_work_gives_back_after_a_while(share: GpuShare, pool: Pool, clock: Clock) -> None:
    assert batch(share)
    clock.now += share.idle_s - 1
    share.tick()
    assert share.held is not None
    clock.now += 2
    share.tick()
    assert share.held is None
    assert not pool.snapshot().leases


def test_a_process_that_began_cuda_ends_once_it_is_quiet_and_takes_nothing_before(
    share: GpuShare, place: DeviceUser, clock: Clock
) -> None:
    with share.using() as ours:
        assert ours
        assert share.held is not None
        share.held.asked.set()
    assert not batch(share), "its context is to go first"
    share.tick()
    assert not place.ended, "the answer of its last batch may still be on its way"
    clock.now += module.QUIET_S + 0.1
    share.tick()
    assert place.ended == 1


def test_a_lease_that_is_revoked_is_not_used_for_another_batch(
    share: GpuShare, pool: Pool, place: DeviceUser, clock: Clock
) -> None:
    assert batch(share)
    held = share.held
    assert held is not None
    pool.revoke(held.lease.lease_id, "an operator said so")
    assert wait_until(held.lost.is_set, timeout_s=10)
    assert not batch(share)
    assert place.loaded == 0
    clock.now += 10
    share.tick()
    assert place.ended == 1, "its context would keep the device closed"


def test_a_lost_lease_ends_a_process_whose_batch_does_not_end(
    share: GpuShare, pool: Pool, place: DeviceUser, clock: Clock
) -> None:
    with share.using() as ours:
        assert ours
        held = share.held
        assert held is not None
        pool.revoke(held.lease.lease_id, "an operator said so")
        assert wait_until(held.lost.is_set, timeout_s=10)
        share.tick()
        assert not place.ended
        clock.now += 0.2 * share.ttl_s
        share.tick()
        assert place.ended == 1


def test_a_device_that_cannot_be_begun_costs_neither_the_batch_nor_the_lease(
    share: GpuShare, pool: Pool, place: DeviceUser, clock: Clock
) -> None:
    place.begin_fails = True
    assert not batch(share)
    assert not pool.snapshot().leases
    assert place.calls == ["begin", "unload"]
    place.began = False
    share._left_at = None
    assert not batch(share)
    assert place.calls == ["begin", "unload"], "it is not tried with every batch"
    place.begin_fails = False
    clock.now += module.BROKEN_S + 1
    assert batch(share)


def test_a_driver_that_fails_at_the_end_does_not_keep_the_lease_alive(
    share: GpuShare, pool: Pool, place: DeviceUser, clock: Clock
) -> None:
    assert batch(share)
    place.unload_fails = True
    clock.now += share.idle_s + 1
    share.tick()
    assert not pool.snapshot().leases


@pytest.mark.long
def test_the_lease_lives_on_while_the_device_is_begun_for_longer_than_its_ttl(
    share: GpuShare, pool: Pool, place: DeviceUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(lease: PoolLease) -> None:
        first = {held.lease_id: held.deadline_ms for held in pool.snapshot().leases}[lease.lease_id]
        assert wait_until(lambda: pool.snapshot().now_ms > first, timeout_s=10)

    monkeypatch.setattr(place, "begin", begin)
    assert batch(share)


def test_a_lease_that_is_asked_for_while_the_device_is_begun_serves_no_batch(
    share: GpuShare, pool: Pool, place: DeviceUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = place.begin

    def asked(lease: PoolLease) -> None:
        begin(lease)
        assert share.held is not None
        share.held.asked.set()

    monkeypatch.setattr(place, "begin", asked)
    assert not batch(share)
    assert not pool.snapshot().leases
    assert place.loaded == 0


def test_a_process_whose_lease_is_lost_while_cuda_begins_ends_by_itself(
    share: GpuShare, pool: Pool, place: DeviceUser, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(lease: PoolLease) -> None:
        assert share.held is not None
        pool.revoke(lease.lease_id, "an operator said so")
        assert wait_until(share.held.lost.is_set, timeout_s=10)
        share.tick()
        clock.now += share.ttl_s
        share.tick()  # the keeper's, while the thread that works sits in the driver
        assert place.ended == 1
        place.began = True

    monkeypatch.setattr(place, "begin", hangs)
    assert not batch(share)
    clock.now += 10
    share.tick()
    assert place.ended == 2, "what was begun goes only with the process"


def test_a_device_that_fails_in_a_batch_is_given_back_and_left_alone(
    share: GpuShare, pool: Pool, place: DeviceUser, clock: Clock
) -> None:
    with share.using() as ours:
        assert ours
        share.fail(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert share.held is None
    assert not pool.snapshot().leases
    assert pool.snapshot().orphans, "its process may still be there"
    assert not batch(share)
    clock.now += 10
    share.tick()
    assert place.ended == 1


def test_a_process_that_only_waits_to_end_does_so_under_any_load(
    share: GpuShare, place: DeviceUser, clock: Clock
) -> None:
    with share.using() as ours:
        assert ours
        assert share.held is not None
        share.held.asked.set()
    for _ in range(30):
        assert not batch(share)
        share.tick()
        clock.now += 0.1
    assert place.ended


def test_a_process_keeps_its_host_lock_until_cuda_has_gone_with_it(
    share: GpuShare, pool: Pool, place: DeviceUser, clock: Clock
) -> None:
    assert batch(share)
    clock.now += share.idle_s + 1
    place.began = True
    share.tick()
    lease = pool.request(ALONE, holder="trainer")
    with pytest.raises(LeaseRefused, match="in use on this host"):
        host_locks(lease, wait_s=0)
    share._locks.close()  # as the kernel does at its end
    with host_locks(lease, wait_s=0):
        pass
    pool.release(lease)


def test_a_device_that_somebody_outside_the_pool_uses_is_left_alone_for_a_while(
    share: GpuShare, pool: Pool, place: DeviceUser
) -> None:
    lease = pool.request(ALONE, holder="another stack")
    with host_locks(lease, wait_s=0):
        pool.release(lease)
        assert not batch(share)
        assert share._not_before - share.clock() > module.REFUSED_S
    assert not place.calls or place.calls == ["unload"]
    assert not pool.snapshot().leases


def test_a_training_that_lost_its_gpu_and_does_not_stop_ends_with_its_process(pool: Pool) -> None:
    ended = threading.Event()
    lease = pool.request(ALONE, holder="trainer")
    enrol(pool, lease)
    with pool.holding(lease) as held, ended_after_loss(held, ended.set):
        pool.revoke(lease.lease_id, "an operator said so")
        assert ended.wait(10)


@pytest.mark.long
def test_who_stops_in_time_after_a_loss_is_not_ended(pool: Pool) -> None:
    ended = threading.Event()
    lease = pool.request(ALONE, holder="trainer")
    with pool.holding(lease) as held, ended_after_loss(held, ended.set):
        pool.revoke(lease.lease_id, "an operator said so")
        assert held.lost.wait(10)
    assert not ended.wait(1)


def test_a_need_that_fits_nowhere_sends_batches_to_the_cpu(
    pool: Pool, small: Settings, place: DeviceUser, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuShare, "_keep", lambda self: None)
    large = GpuShare(pool, small.replace(gpu_infer_mib=9_000), holder="large", place=place, clock=clock)
    assert not batch(large)
    assert not place.calls


def test_without_redis_a_batch_goes_on_without_the_gpu(
    small: Settings, place: DeviceUser, clock: Clock
) -> None:
    away = redis.Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.2)
    alone = GpuShare(Pool(away, small), small, holder="alone", place=place, clock=clock)
    assert not batch(alone)
    alone.close()


@pytest.mark.long
def test_while_redis_is_away_scoring_goes_on_with_what_it_holds_and_stops_before_that_expires(
    share: GpuShare, pool: Pool, place: DeviceUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch(share)
    held = share.held
    assert held is not None

    def away(*_: object, **__: object) -> None:
        raise RedisUnavailable("Redis does not answer; it is tried again")

    for name in ("renew", "release", "request"):
        monkeypatch.setattr(pool, name, away)
    assert batch(share), "what it holds is still its own"
    assert place.loaded
    assert wait_until(held.lost.is_set, timeout_s=10)
    assert pool.snapshot().now_ms < next(x.deadline_ms for x in pool.snapshot().leases), (
        "before others may have it"
    )
    assert not batch(share)
    assert place.loaded == 0


class Broken:
    """A network on a device that has just failed."""

    def score(self, masked: list[str]) -> list[object]:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_what_a_gpu_raises_is_no_fault_of_the_lines(
    small: Settings, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(small)
    context = Context(app, small, WorkerProfile(leased=True))
    monkeypatch.setattr(context.models, "begin", lambda lease: setattr(context.models, "place", "cuda:0"))
    monkeypatch.setattr(context.models, "prepare", lambda: None)
    monkeypatch.setattr(context.models, "scorer", lambda version: Broken())
    assert context.share is not None
    with context.share.using() as ours:
        assert ours
        with pytest.raises(DeviceFailed, match="the GPU failed"):  # Retryable: the attempt is not counted
            infer._score(context, "m1", ["a line"])
    assert context.share.held is None
    assert not batch(context.share), "the next ones go to the CPU"
    context.share.close()
    app.close()


def test_what_the_cpu_raises_stays_a_fault_of_the_batch(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(settings)
    context = Context(app, settings)
    monkeypatch.setattr(context.models, "scorer", lambda version: Broken())
    with pytest.raises(RuntimeError, match="CUDA error"):
        infer._score(context, "m1", ["a line"])
    app.close()
