"""Where models go: the decision by itself, and loading under real Redis, also from several processes."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from polling import wait_until

from pipeline.errors import BadInput, DeviceFailed, LeaseRefused, ModelUnavailable, RedisUnavailable
from pipeline.gpu.placement import Placement
from pipeline.gpu.placing import Backoff, Loaded, LoadState, Model, choose_device
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Device, LeasePart, LeaseState, Need, PoolLease, Report
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

OWN = "lease-1"
A, B = "GPU-a", "GPU-b"


def a_model(name: str = "m", mib: int = 100, *, tenant: str = "t") -> Model:
    return Model(name=name, tenant=tenant, memory_mib=mib)


def on(
    uuid: str, model: Model, *, used_ms: int = 0, state: LoadState = LoadState.READY, lease_id: str = OWN
) -> Loaded:
    return Loaded(
        model=model,
        uuid=uuid,
        holder="h",
        lease_id=lease_id,
        claim=f"{uuid}{model.key}",
        state=state,
        used_ms=used_ms,
    )


# The decision


def test_an_exact_fit_is_accepted_and_is_the_best_one() -> None:
    assert choose_device(a_model(mib=100), [], {A: 100}, lease_id=OWN).uuid == A
    assert choose_device(a_model(mib=100), [], {A: 101, B: 100}, lease_id=OWN).uuid == B
    assert choose_device(a_model(mib=101), [], {A: 100}, lease_id=OWN).uuid == ""


def test_the_tightest_room_that_fits_is_taken() -> None:
    loaded = [on(A, a_model("x", 300)), on(B, a_model("y", 600))]
    choice = choose_device(a_model(mib=200), loaded, {A: 1_000, B: 1_000}, lease_id=OWN)
    assert (choice.uuid, choice.unload) == (B, ())


def test_a_model_that_is_ready_anywhere_is_used_and_our_own_first() -> None:
    there = on(A, a_model(), lease_id="other")
    assert choose_device(a_model(), [there], {B: 1_000}, lease_id=OWN).uuid == A
    assert choose_device(a_model(), [there, on(B, a_model())], {B: 1_000}, lease_id=OWN).uuid == B


def test_a_model_that_somebody_loads_is_waited_for() -> None:
    loading = on(A, a_model(), state=LoadState.LOADING, lease_id="other")
    choice = choose_device(a_model(), [loading], {B: 1_000}, lease_id=OWN)
    assert (choice.uuid, choice.ready) == ("", False)
    assert choice.why == "h is loading m on GPU-a"


def test_a_model_that_is_being_unloaded_is_not_loaded_again_beside_itself() -> None:
    leaving = on(A, a_model(), state=LoadState.UNLOADING)
    assert choose_device(a_model(), [leaving], {A: 1_000}, lease_id=OWN).uuid == ""
    assert choose_device(a_model(), [leaving], {A: 1_000, B: 1_000}, lease_id=OWN).uuid == B


def test_the_least_recently_used_idle_models_make_room_and_no_more_of_them_than_needed() -> None:
    loaded = [on(A, a_model(n, 100), used_ms=t) for n, t in (("new", 30), ("old", 10), ("mid", 20))]
    choice = choose_device(a_model(mib=150), loaded, {A: 300}, lease_id=OWN)
    assert [entry.model.name for entry in choice.unload] == ["old", "mid"]
    busy = {loaded[1].key}
    choice = choose_device(a_model(mib=150), loaded, {A: 300}, lease_id=OWN, busy=busy)
    assert [entry.model.name for entry in choice.unload] == ["mid", "new"]


def test_room_is_made_where_the_least_recently_used_models_are() -> None:
    loaded = [on(A, a_model("recent", 100), used_ms=20), on(B, a_model("stale", 100), used_ms=10)]
    choice = choose_device(a_model(mib=100), loaded, {A: 100, B: 100}, lease_id=OWN)
    assert (choice.uuid, [e.model.name for e in choice.unload]) == (B, ["stale"])


def test_nothing_is_unloaded_in_vain_nor_of_another_lease() -> None:
    busy, idle = on(A, a_model("busy", 900)), on(A, a_model("idle", 100))
    choice = choose_device(a_model(mib=500), [busy, idle], {A: 1_000}, lease_id=OWN, busy={busy.key})
    assert (choice.uuid, choice.unload) == ("", ())
    assert "needs 500 MiB" in choice.why
    other = on(A, a_model("x", 100), lease_id="other")
    assert choose_device(a_model(mib=100), [other], {A: 100}, lease_id=OWN).unload == ()


def test_models_of_one_name_of_two_tenants_are_two_models() -> None:
    choice = choose_device(a_model(tenant="t2"), [on(A, a_model(tenant="t1"))], {A: 200}, lease_id=OWN)
    assert (choice.uuid, choice.ready) == (A, False)


entries = st.builds(
    lambda n, uuid, mib, used, state: on(uuid, a_model(f"m{n}", mib), used_ms=used, state=state),
    st.integers(0, 9),
    st.sampled_from([A, B]),
    st.integers(1, 400),
    st.integers(0, 5),
    st.sampled_from(list(LoadState)),
)


@effort(deadline=None)
@given(
    st.lists(entries, max_size=8, unique_by=lambda e: e.key),
    st.integers(1, 1_000),
    st.fixed_dictionaries({A: st.integers(0, 1_000), B: st.integers(0, 1_000)}),
    st.randoms(),
)
def test_a_choice_fits_is_found_when_there_is_one_and_does_not_depend_on_the_order(
    loaded: list[Loaded], mib: int, rooms: dict[str, int], random: "st.randoms"
) -> None:
    model = a_model("new", mib)
    choice = choose_device(model, loaded, rooms, lease_id=OWN)

    def left(uuid: str, without: tuple[Loaded, ...] = ()) -> int:
        return rooms[uuid] - sum(e.model.memory_mib for e in loaded if e.uuid == uuid and e not in without)

    if choice.uuid:
        assert left(choice.uuid, choice.unload) >= mib
        assert all(e.uuid == choice.uuid and e.state is LoadState.READY for e in choice.unload)
        assert not choice.unload or max(left(A), left(B)) < mib
    else:
        idle = tuple(e for e in loaded if e.state is LoadState.READY)
        assert max(left(A, idle), left(B, idle)) < mib
    shuffled = list(loaded)
    random.shuffle(shuffled)
    assert choose_device(model, shuffled, rooms, lease_id=OWN) == choice


def test_waits_double_from_half_a_second_to_two_minutes() -> None:
    backoff = Backoff()
    waits = [backoff.next() for _ in range(12)]
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits[8:] == [120.0] * 4
    assert max(waits) == 120.0


def test_a_further_replica_goes_to_a_device_without_one() -> None:
    two = Model(name="m", tenant="t", memory_mib=100, replicas=2)
    there = on(A, two, lease_id="other")
    choice = choose_device(two, [there], {A: 1_000, B: 1_000}, lease_id=OWN)
    assert (choice.uuid, choice.ready) == (B, False)
    assert choose_device(two, [there], {A: 1_000}, lease_id=OWN).ready, "one device, one copy"
    assert choose_device(two, [there, on(B, two, lease_id="third")], {"GPU-c": 1_000}, lease_id=OWN).ready


# Loading


class Weights:
    """A loader that writes down what it does. `gate`: what a load waits for."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, str]] = []
        self.gate: threading.Event | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self.broken = False

    def load(self, model: Model, uuid: str) -> None:
        if self.gate is not None:
            self.gate.wait(60)
        self.meanwhile()
        if self.broken:
            raise DeviceFailed("out of memory")
        self.done.append(("load", model.name, uuid))

    def unload(self, model: Model, uuid: str) -> None:
        self.done.append(("unload", model.name, uuid))


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def place(client: "redis.Redis", settings: Settings, weights: Weights) -> Callable[..., Placement]:
    """Makes placements under living leases with the given room per device."""

    def make(
        lease_id: str = OWN, rooms: dict[str, int] | None = None, ttl_ms: int = 60_000, **options: object
    ) -> Placement:
        live(client, settings, lease_id, ttl_ms)
        return Placement(
            client,
            settings,
            options.pop("loader", weights),  # type: ignore[arg-type]
            lease=a_lease(lease_id, rooms or {A: 300}, settings),
            **options,  # type: ignore[arg-type]
        )

    return make


def now_ms(client: "redis.Redis") -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def live(client: "redis.Redis", settings: Settings, lease_id: str, ttl_ms: int) -> None:
    client.zadd(Keys(settings.redis.key_prefix).gpu("deadlines"), {lease_id: now_ms(client) + ttl_ms})


def end(client: "redis.Redis", settings: Settings, lease_id: str) -> None:
    client.zrem(Keys(settings.redis.key_prefix).gpu("deadlines"), lease_id)


def a_lease(lease_id: str, rooms: dict[str, int], settings: Settings) -> PoolLease:
    parts = tuple(
        LeasePart(uuid=uuid, memory_mib=mib + settings.internal.gpu_context_mib, compute_percent=0)
        for uuid, mib in rooms.items()
    )
    return PoolLease(
        lease_id=lease_id,
        holder=f"holder of {lease_id}",
        need=Need(),
        parts=parts,
        state=LeaseState.ACTIVE,
        granted_ms=0,
        deadline_ms=0,
        ttl_ms=60_000,
    )


def test_a_model_is_loaded_once_and_then_used(place: Callable[..., Placement], weights: Weights) -> None:
    placement = place()
    assert placement.ensure(a_model()) == A
    assert placement.ensure(a_model()) == A
    assert weights.done == [("load", "m", A)]
    (entry,) = placement.loaded()
    assert (entry.state, entry.holder) == (LoadState.READY, f"holder of {OWN}")


def test_the_context_of_the_process_is_no_room_for_models(place: Callable[..., Placement]) -> None:
    assert place(rooms={A: 300}).ensure(a_model(mib=300)) == A
    with pytest.raises(BadInput, match="needs 301 MiB and the lease has room for 1 to 300 MiB"):
        place("lease-2", rooms={A: 300}).ensure(a_model("bigger", mib=301))
    with pytest.raises(BadInput):
        place("lease-2").ensure(a_model("nothing", mib=0))


RACER = """
import sys, time
import redis
from pipeline.gpu.placement import Placement
from pipeline.gpu.placing import Model
from pipeline.gpu.values import Need, LeasePart, PoolLease, LeaseState
from pipeline.settings import Settings
url, prefix, lease, out = sys.argv[1:]
class Slow:
    def load(self, model, uuid):
        with open(out, "a") as file:
            file.write(f"{uuid}\\n")
        time.sleep(0.3)
    def unload(self, model, uuid): ...
settings = Settings(redis_url=url, key_prefix=prefix)
client = redis.Redis.from_url(url)
parts = (LeasePart(uuid="GPU-a", memory_mib=1_000, compute_percent=0),)
lease = PoolLease(lease_id=lease, holder=lease, need=Need(), parts=parts, state=LeaseState.ACTIVE,
    granted_ms=0, deadline_ms=0, ttl_ms=60_000)
placement = Placement(client, settings, Slow(), lease=lease)
print("there", flush=True)
sys.stdin.readline()
print(placement.ensure(Model(name="m", tenant="t", memory_mib=100), timeout_s=30))
client.close()
"""


@pytest.mark.long
def test_two_processes_that_race_load_a_model_once(
    client: "redis.Redis", settings: Settings, redis_url: str, tmp_path: Path
) -> None:
    out = tmp_path / "loads"
    racers = []
    for lease_id in ("lease-1", "lease-2"):
        live(client, settings, lease_id, 60_000)
        args = [sys.executable, "-c", RACER, redis_url, settings.redis.key_prefix, lease_id, str(out)]
        racers.append(subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "there\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=60)[0] for racer in racers]
    assert answers == [f"{A}\n", f"{A}\n"]
    assert len(out.read_text().splitlines()) == 1


def test_leases_on_two_devices_load_as_many_copies_as_are_wanted(
    place: Callable[..., Placement], weights: Weights
) -> None:
    """Both decided on an empty pool: the script counts what the other one claimed meanwhile."""
    first, second = place(), place("lease-2", {B: 300})
    assert first.place(a_model(), A)
    assert not second.place(a_model(), B)
    two = Model(name="two", tenant="t", memory_mib=100, replicas=2)
    assert first.place(two, A) and second.place(two, B)
    assert not place("lease-3", {"GPU-c": 300}).place(two, "GPU-c")
    assert [entry.uuid for entry in first.loaded()] == [A, A, B]


def test_a_process_that_leaves_waits_for_its_requests_and_unloads_everything(
    place: Callable[..., Placement], weights: Weights
) -> None:
    placement = place()
    placement.ensure(a_model())
    with placement.request("t", a_model()):
        assert not placement.leave(0)
    assert placement.leave(0)
    assert placement.loaded() == [] and placement.here(a_model().key) is None


def test_idle_models_make_room_and_those_in_use_do_not(
    place: Callable[..., Placement], weights: Weights
) -> None:
    waits: list[float] = []
    placement = place(rooms={A: 300}, pause=waits.append)
    for name in ("m1", "m2", "m3"):
        placement.ensure(a_model(name))
    with placement.request("t", a_model("m1")):
        placement.ensure(a_model("m4"))
    assert weights.done[3:] == [("unload", "m2", A), ("load", "m4", A)]
    with (
        placement.request("t", a_model("m1")),
        pytest.raises(LeaseRefused, match="big could not be loaded"),
    ):
        placement.ensure(a_model("big", 300), timeout_s=0)
    assert placement.ensure(a_model("big", 300)) == A
    assert sorted(e.model.name for e in placement.loaded()) == ["big"]


def test_a_model_that_fits_nowhere_waits_with_back_off_until_it_fits(
    place: Callable[..., Placement], weights: Weights
) -> None:
    waits: list[float] = []
    using = []

    def pause(wait_s: float) -> None:
        waits.append(wait_s)
        if len(waits) == 11:
            using.pop().__exit__(None, None, None)

    placement = place(rooms={A: 100}, pause=pause)
    placement.ensure(a_model("busy"))
    using.append(placement.request("t", a_model("busy")))
    using[0].__enter__()
    assert placement.ensure(a_model("next")) == A
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 64, 120, 120, 120]


def test_a_request_for_another_tenants_model_is_refused(place: Callable[..., Placement]) -> None:
    placement = place()
    placement.ensure(a_model(tenant="t1"))
    with pytest.raises(BadInput, match="t2 has no model m"), placement.request("t2", a_model(tenant="t1")):
        pass
    # A model that calls itself the other tenant's finds its own name empty.
    with pytest.raises(ModelUnavailable), placement.request("t2", a_model(tenant="t2")):
        pass
    with placement.request("t1", a_model(tenant="t1")) as entry:
        assert entry.uuid == A


def test_a_request_to_a_model_of_another_process_names_its_holder(place: Callable[..., Placement]) -> None:
    first, second = place(), place("lease-2", {B: 300})
    assert first.ensure(a_model()) == A == second.ensure(a_model()), "once in the pool"
    said = f"m is loaded by {first.lease.holder} on {A}; send the request there"
    with pytest.raises(ModelUnavailable, match=said), second.request("t", a_model()):
        pass


def test_a_request_counts_as_a_use(place: Callable[..., Placement], client: "redis.Redis") -> None:
    placement = place()
    placement.ensure(a_model())
    before = placement.loaded()[0].used_ms
    assert wait_until(lambda: now_ms(client) > before, timeout_s=5)
    with placement.request("t", a_model()):
        pass
    assert placement.loaded()[0].used_ms > before


def test_only_idle_models_are_unloaded(place: Callable[..., Placement], weights: Weights) -> None:
    placement = place()
    placement.ensure(a_model("one"))
    placement.ensure(a_model("two"))
    assert placement.unload_idle(3_600) == []
    with placement.request("t", a_model("one")):
        assert [e.model.name for e in placement.unload_idle(0)] == ["two"]
    assert [e.model.name for e in placement.loaded()] == ["one"]
    with pytest.raises(ModelUnavailable), placement.request("t", a_model("two")):
        pass


def test_models_of_another_process_are_left_alone(place: Callable[..., Placement], weights: Weights) -> None:
    place("lease-2").ensure(a_model())
    placement = place()
    assert placement.unload_idle(0) == []
    (entry,) = placement.loaded()
    assert not placement.unload(entry)
    assert placement.ensure(a_model()) == A
    with pytest.raises(ModelUnavailable), placement.request("t", a_model()):
        pass
    assert weights.done == [("load", "m", A)]


def test_a_load_that_never_ends_is_given_up_and_its_memory_stays_counted_until_it_does(
    place: Callable[..., Placement], weights: Weights
) -> None:
    weights.gate = threading.Event()
    placement = place(rooms={A: 100}, load_timeout_s=0.05)
    with pytest.raises(DeviceFailed, match=r"m was not loaded on GPU-a within 0\.05 s"):
        placement.ensure(a_model())
    assert placement.loaded() == []
    with pytest.raises(LeaseRefused):
        placement.ensure(a_model("next"), timeout_s=0)
    weights.gate.set()  # what came too late is taken back
    assert wait_until(lambda: weights.done == [("load", "m", A), ("unload", "m", A)], timeout_s=10)
    placement.load_timeout_s = 30
    assert placement.ensure(a_model("next"), timeout_s=30) == A


def test_a_load_that_fails_leaves_nothing_behind(place: Callable[..., Placement], weights: Weights) -> None:
    weights.broken = True
    placement = place()
    with pytest.raises(DeviceFailed, match="out of memory"):
        placement.ensure(a_model())
    assert placement.loaded() == []
    weights.broken = False
    assert placement.ensure(a_model()) == A


def test_the_claim_of_a_dead_loader_ends_with_its_lease(
    place: Callable[..., Placement], weights: Weights, client: "redis.Redis", settings: Settings
) -> None:
    dead = place("lease-dead", load_timeout_s=3_600)
    assert dead._claim(a_model(), A, 300) is not None  # and then it was killed
    placement = place()
    with pytest.raises(LeaseRefused, match="holder of lease-dead is loading m"):
        placement.ensure(a_model(), timeout_s=0)
    live(client, settings, "lease-dead", -1)  # expired, and nobody has swept yet
    assert placement.ensure(a_model(), timeout_s=0) == A
    assert weights.done == [("load", "m", A)]


def test_a_loader_that_lives_but_hangs_loses_its_claim_after_its_time(
    place: Callable[..., Placement], client: "redis.Redis", settings: Settings
) -> None:
    frozen = place("lease-frozen", load_timeout_s=-4.9)  # the claim lives 5 s longer than the load may take
    assert frozen._claim(a_model(), A, 300) is not None
    assert wait_until(lambda: frozen.loaded() == [], timeout_s=10)
    assert place().ensure(a_model(), timeout_s=0) == A


def test_a_load_that_outlives_its_lease_is_taken_back(
    place: Callable[..., Placement], weights: Weights, client: "redis.Redis", settings: Settings
) -> None:
    placement = place()
    weights.meanwhile = lambda: end(client, settings, OWN)
    with pytest.raises(LeaseRefused, match="after its lease had gone"):
        placement.ensure(a_model())
    assert weights.done == [("load", "m", A), ("unload", "m", A)]
    with pytest.raises(ModelUnavailable), placement.request("t", a_model()):
        pass
    with pytest.raises(LeaseRefused, match="lease-1 is gone"):
        placement.ensure(a_model())


def test_models_go_with_the_lease_that_they_were_loaded_under(
    place: Callable[..., Placement], client: "redis.Redis", settings: Settings
) -> None:
    placement = place("lease-2")
    placement.ensure(a_model())
    end(client, settings, "lease-2")
    assert placement.loaded() == []
    with pytest.raises(ModelUnavailable, match="gone with its lease"), placement.request("t", a_model()):
        pass


def test_under_a_lease_of_the_pool_models_come_and_go_with_it(
    client: "redis.Redis", settings: Settings, weights: Weights
) -> None:
    pool = Pool(client, settings)
    pool.ledger.clear_quarantine()
    device = Device(uuid=A, node="n", index=0, name="T4", total_mib=16_384, schedulable_mib=16_000)
    assert pool.ledger.report(Report(node="n", agent="a", clock_ms=0, devices=(device,))) == ""
    lease = pool.request(Need(memory_mib=2_048), holder="h", timeout_s=30)
    placement = Placement(client, settings, weights, lease=lease)
    assert placement.ensure(a_model(mib=2_048 - settings.internal.gpu_context_mib)) == A
    assert pool.ledger.release(lease)
    assert placement.loaded() == []


def test_redis_checks_the_room_again(place: Callable[..., Placement]) -> None:
    placement = place(rooms={A: 150})
    assert placement._claim(a_model("one"), A, 150) is not None
    assert placement._claim(a_model("two"), A, 150) is None
    assert placement._claim(a_model("small", 50), A, 150) is not None


def test_models_of_all_leases_on_a_device_never_exceed_it_whatever_the_leases_say(
    place: Callable[..., Placement], client: "redis.Redis", settings: Settings
) -> None:
    context = settings.internal.gpu_context_mib
    device = Device(uuid=A, node="n", index=0, name="T4", total_mib=9_000, schedulable_mib=2 * context + 500)
    assert (
        Pool(client, settings).ledger.report(Report(node="n", agent="a", clock_ms=0, devices=(device,))) == ""
    )
    served, scoring = place("lease-serve", {A: 9_000}), place("lease-scoring", {A: 9_000})
    assert served._claim(a_model("served", 300), A, 9_000) is not None
    assert scoring._claim(a_model("scoring", 201), A, 9_000) is None
    assert scoring._claim(a_model("scoring", 200), A, 9_000) is not None
    assert served._claim(a_model("more", 1), A, 9_000) is None


def test_an_unload_that_fails_keeps_its_memory_counted(
    place: Callable[..., Placement], monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    placement = place(rooms={A: 100})
    placement.ensure(a_model())

    def fails(model: Model, uuid: str) -> None:
        raise RuntimeError("stuck")

    monkeypatch.setattr(weights, "unload", fails)
    assert placement.unload_idle(0) == []
    assert [e.state for e in placement.loaded()] == [LoadState.UNLOADING]
    with pytest.raises(LeaseRefused):
        placement.ensure(a_model("next"), timeout_s=0)


def test_what_redis_could_not_be_told_is_told_later(
    place: Callable[..., Placement], weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = place()
    placement.ensure(a_model())
    step = placement._step

    def away(verb: str, entry: Loaded) -> bool:
        if verb == "drop":
            raise RedisUnavailable("away")
        return step(verb, entry)

    monkeypatch.setattr(placement, "_step", away)
    assert [e.model.name for e in placement.unload_idle(0)] == ["m"]
    monkeypatch.undo()
    assert placement.loaded() == []


def test_a_model_stays_usable_when_redis_is_away_at_its_unloading(
    place: Callable[..., Placement], weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = place()
    placement.ensure(a_model())
    (entry,) = placement.loaded()

    def away(verb: str, entry: Loaded) -> bool:
        raise RedisUnavailable("away")

    monkeypatch.setattr(placement, "_step", away)
    with pytest.raises(RedisUnavailable):
        placement.unload(entry)
    monkeypatch.undo()
    assert weights.done == [("load", "m", A)]
    with placement.request("t", a_model()) as again:
        assert again.claim == entry.claim
