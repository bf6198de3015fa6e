"""`logweir gpu ...` in this process: what people are shown of a pool, and what bad input is answered with."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from command_line import Said, Verb, command_line
from fake_mps import control_program
from hypothesis import given
from hypothesis import strategies as st
from pool_devices import put_devices
from rich.console import Console

from pipeline.commands.gpu import top as gpu_top
from pipeline.commands.gpu.top import EMPTY, cropped, picture
from pipeline.gpu.node import mps
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.policy import policy
from pipeline.gpu.policy.explain import device_views, open_door, short, why_it_waits
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import (
    Device,
    DeviceKind,
    LeaseMode,
    LeasePart,
    LeaseState,
    MpsUse,
    Need,
    Node,
    Orphan,
    PoolLease,
    PoolRequest,
    Process,
    Report,
    Reservation,
    Snapshot,
    Tenant,
)
from pipeline.service.access.keys import SenderKeys, key_digest
from pipeline.service.pool_facts import lease_rows, pool_facts, tenant_rows
from pipeline.settings import Settings
from pipeline.units import seconds, size

NOW = 1_000_000_000
HOSTILE = "[/red]x\x1b[2J\ny"


def device(number: int, **changes: Any) -> Device:
    plain = Device(
        uuid=f"GPU-{number}aaaaaaa-1111", node="big", index=number, name="NVIDIA A100", total_mib=81_920,
        schedulable_mib=80_640, used_mib=900, utilisation_percent=17, temperature_c=40,
    )  # fmt: skip
    return replace(plain, **changes)


def leased(name: str, on: Device, memory_mib: int = 4096, percent: int = 25, **changes: Any) -> PoolLease:
    mode = changes.pop("mode", LeaseMode.SHARED)
    lease = PoolLease(
        lease_id=name, holder="ann@big:7", need=Need(memory_mib=memory_mib, mode=mode),
        parts=(LeasePart(uuid=on.uuid, memory_mib=memory_mib, compute_percent=percent, token=7),), state=LeaseState.ACTIVE,
        granted_ms=NOW - 125_000, deadline_ms=NOW + 12_000, ttl_ms=15_000, host="big", pids=(100,),
    )  # fmt: skip
    return replace(lease, **changes)


def waits(name: str, **need: Any) -> PoolRequest:
    return PoolRequest(
        request_id=name,
        holder="bob@big:9",
        need=Need(**need),
        ttl_ms=15_000,
        since_ms=NOW - 70_000,
    )


def snapshot(*devices: Device, **changes: Any) -> Snapshot:
    nodes = (Node(name="big", agent="a", beat_ms=NOW - 400),)
    return Snapshot(epoch=1, now_ms=NOW, nodes=nodes, devices=devices, **changes)


def drawn(s: Snapshot, width: int = 160) -> str:
    console = Console(width=width, highlight=False, force_terminal=False, color_system=None)
    with console.capture() as said:
        console.print(picture(pool_facts(s), width))
    return said.get()


# One snapshot in words


def test_a_device_shows_what_is_leased_beside_what_is_used_there_and_by_whom() -> None:
    on = device(
        0, used_mib=6_000, processes=(Process(pid=100, used_mib=3_800), Process(pid=999, used_mib=1_229))
    )
    shown = drawn(snapshot(on, leases=(leased("job", on),)))
    assert re.search(
        r"big:0  GPU-0aaaaaaa +A100 +4\.0/80\.0 +25% +5\.9 +17% +40 +open, 74\.8 GiB free, 1\.2 GiB used outside",
        shown,
    )
    assert re.search(r"job +ann@big:7, logweir, shared +4\.0 +25% +3\.7 +2 min old, expires in 12 s", shown)


def test_a_device_shows_how_many_processes_run_under_its_mps_daemon() -> None:
    own, shared = MpsUse(own=True, clients=2), MpsUse(own=False)
    s = snapshot(device(0, mps=own), device(1, mps=shared), device(2))
    for number, column in enumerate(("2", r"\? shared", "")):
        assert re.search(rf"GPU-{number}aaaaaaa .* 40 +{column} *free", drawn(s)), drawn(s)
    assert [one["mps"] for one in pool_facts(s)["devices"]] == [
        {"own": True, "clients": 2}, {"own": False, "clients": None}, None,
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 110, 200])
def test_the_picture_keeps_to_the_width_of_the_terminal(width: int) -> None:
    on = device(0, processes=None)
    lease = leased(
        "a-long-name-of-a-lease-" * 3, on, yield_by_ms=NOW + 42_000, yield_why="train-1 needs it whole"
    )
    s = snapshot(
        on, device(1, why="its node is silent"), leases=(lease,), waiting=(waits("w" * 60, memory_mib=90_000),),
        orphans=(Orphan(lease_id="old", uuid=on.uuid, memory_mib=9, compute_percent=0, exclusive=False, pids=(5,), since_ms=0, why="x"),),
    )  # fmt: skip
    lines = drawn(s, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "gives back" in drawn(s, width)


def test_names_from_elsewhere_cannot_steer_the_terminal() -> None:
    on = device(0, name=HOSTILE, node=HOSTILE)
    lease = leased(HOSTILE, on, holder=HOSTILE, yield_by_ms=NOW, yield_why=HOSTILE)
    request = replace(waits("w", memory_mib=90_000, tenant=HOSTILE, node=HOSTILE), holder=HOSTILE)
    shown = drawn(snapshot(on, leases=(lease,), waiting=(request,)), 200)
    assert "\x1b" not in shown and "[/red]x" in shown
    assert not any(line.startswith("y") for line in shown.splitlines())


def test_an_empty_pool_says_what_to_do() -> None:
    assert drawn(Snapshot(epoch=0, now_ms=NOW), 300).strip() == EMPTY


def test_a_live_view_shows_what_fits_and_says_how_much_is_left_out() -> None:
    devices = tuple(device(n) for n in range(300))
    busy = tuple(leased(f"job{n}", devices[0]) for n in range(50))
    needs = tuple(waits(f"w{n}", memory_mib=90_000) for n in range(90))
    shown = cropped(pool_facts(snapshot(*devices, leases=busy, waiting=needs)), 24)
    assert [len(shown["devices"]), len(shown["waiting"])] == [1, 5]
    assert shown["more"] == "299 GPUs and 85 waiting needs"
    small = pool_facts(snapshot(devices[0]))
    assert cropped(small, 24) == small | {"more": ""}


def test_a_closed_door_names_whom_the_device_is_kept_for() -> None:
    on = device(0)
    lease = leased("infer", on, yield_by_ms=NOW + 42_000)
    s = snapshot(
        on, leases=(lease,), waiting=(waits("train-9", mode=LeaseMode.EXCLUSIVE),),
        reservation=Reservation(request_id="train-9", uuids=(on.uuid,)),
    )  # fmt: skip
    shown = drawn(s)
    assert "door closed to new leases: GPU-0aaaaaaa kept for train-9" in shown
    assert (
        "needs 1 whole device; GPU-0aaaaaaa is kept for it, 1 holder asked to give back within 42 s" in shown
    )
    assert pool_facts(s)["summary"]["free_mib"] == 0


def left_of(on: Device, **changes: Any) -> Orphan:
    plain = Orphan(
        lease_id="old", uuid=on.uuid, memory_mib=40_960, compute_percent=10, exclusive=False, pids=(123,),
        since_ms=NOW - 9_000, why="it was not renewed",
    )  # fmt: skip
    return replace(plain, **changes)


def test_what_is_left_of_a_shared_lease_counts_as_taken_and_the_device_stays_open() -> None:
    on = device(0)
    s = snapshot(on, leases=(leased("job", on),), orphans=(left_of(on),))
    [shown] = pool_facts(s)["devices"]
    assert shown["state"] == "open, 34.8 GiB free, 40.0 GiB still taken by process 123 of lease old"
    assert (shown["leased_mib"], shown["leased_percent"], shown["free_mib"]) == (45_056, 35, 35_584)
    assert pool_facts(s)["summary"]["free_mib"] == 35_584
    more = left_of(on, lease_id="older", pids=())
    unknown = pool_facts(snapshot(on, orphans=(more, left_of(on, memory_mib=1_024))))["devices"][0]["state"]
    assert unknown == "open, 37.8 GiB free, 41.0 GiB still taken by whoever used lease older and 1 more"


def test_what_is_left_of_an_exclusive_lease_closes_its_device() -> None:
    on = device(0)
    s = snapshot(on, orphans=(left_of(on, exclusive=True, memory_mib=80_640, compute_percent=100),))
    [shown] = pool_facts(s)["devices"]
    assert shown["state"] == "closed: process 123 of lease old may still be there"
    assert shown["free_mib"] == 0 == pool_facts(s)["summary"]["free_mib"]


def test_what_opens_a_device_again_is_told() -> None:
    on = device(0)
    shown = drawn(snapshot(on, orphans=(left_of(on),))).replace("\n", " ")
    assert "it opens by itself then" in shown
    blind = drawn(snapshot(replace(on, processes=None), orphans=(left_of(on),))).replace("\n", " ")
    assert "`logweir gpu clear GPU-0aaaaaaa` then" in blind


PARTS = st.tuples(
    st.sampled_from(["shared", "exclusive", "shared left", "exclusive left"]),
    st.integers(1, 60_000),
    st.integers(0, 70),
)


@given(st.lists(PARTS, max_size=4), st.booleans(), st.integers(1, 90_000), st.integers(0, 100))
def test_what_is_shown_as_free_is_what_a_plan_would_grant(
    parts: list[tuple[str, int, int]], kept: bool, memory_mib: int, percent: int
) -> None:
    on = device(0)
    held, gone = [], []
    for number, (kind, some_mib, some_percent) in enumerate(parts):
        alone = "exclusive" in kind
        mib, share = (80_640, 100) if alone else (some_mib, some_percent)
        if "left" in kind:
            gone.append(left_of(on, memory_mib=mib, compute_percent=share, exclusive=alone))
        else:
            mode = LeaseMode.EXCLUSIVE if alone else LeaseMode.SHARED
            held.append(leased(f"job{number}", on, mib, share, mode=mode))
    door = Reservation(request_id="r", uuids=(on.uuid,)) if kept else None
    s = snapshot(on, leases=tuple(held), orphans=tuple(gone), reservation=door)
    [room] = device_views(s)
    fits = memory_mib <= room.free_mib and percent <= room.free_percent
    need = Need(memory_mib=memory_mib, compute_percent=percent)
    assert (open_door(s, room) and fits) == policy.open_to_shared(s, need)


def test_a_silent_node_and_a_wrong_clock_are_told() -> None:
    node = Node(name="big", agent="a", beat_ms=NOW - 42_000, silent=True, clock_ahead_ms=-70_000)
    shown = drawn(replace(snapshot(device(0, why="its node is silent")), nodes=(node,)))
    assert (
        "big has been silent for 42 s" in shown
        and "the clock of big is 70 s behind the one of Redis" in shown
    )


def test_a_report_that_was_long_under_way_does_not_make_a_clock_wrong() -> None:
    node = Node(name="big", agent="a", beat_ms=NOW - 100, clock_ahead_ms=-17_000)
    assert "clock" not in drawn(replace(snapshot(device(0)), nodes=(node,)))


def test_devices_that_cannot_be_used_are_counted_in_the_headline() -> None:
    shown = drawn(snapshot(device(0, why="lost"), device(1, why="lost")))
    assert "2 GPUs on 1 machine, 0 usable, 0 MiB of" in shown


def test_an_endless_name_does_not_fill_the_picture() -> None:
    long = "x" * 10_000
    on = device(0, name=long, node=long)
    request = replace(waits("w", memory_mib=90_000, tenant=long), holder=long)
    shown = drawn(snapshot(on, leases=(leased(long, on, holder=long),), waiting=(request,)))
    assert len(shown) < 6_000


@pytest.mark.parametrize(
    ("need", "why"),
    [
        ({"mode": LeaseMode.EXCLUSIVE, "node": "big"}, "needs 1 GPU of big; none of its 2 can be used: GPU-0aaaaaaa: lost, GPU-1aaaaaaa: lost"),
        ({"memory_mib": 1, "device": "GPU-0aaaaaaa-1111"}, "needs the GPU GPU-0aaaaaaa: lost"),
        ({"memory_mib": 1, "devices": 2}, "needs 2 GPUs; none of 2 can be used: GPU-0aaaaaaa: lost, GPU-1aaaaaaa: lost"),
    ],
)  # fmt: skip
def test_a_need_that_waits_for_devices_out_of_order_names_their_reasons(need: Any, why: str) -> None:
    request = waits("w", **need)
    s = snapshot(device(0, why="lost"), device(1, why="lost"), waiting=(request,))
    assert why_it_waits(s, request, device_views(s)) == why


@pytest.mark.parametrize("kept", [False, True])
def test_a_whole_device_that_only_an_ended_lease_keeps_back_names_the_remedy(kept: bool) -> None:
    on, request = device(0), waits("w", mode=LeaseMode.EXCLUSIVE)
    door = Reservation(request_id="w", uuids=(on.uuid,)) if kept else None
    s = snapshot(on, orphans=(left_of(on),), waiting=(request,), reservation=door)
    why = why_it_waits(s, request, device_views(s))
    assert "process 123 of lease old" in why and "`logweir gpu clear GPU-0aaaaaaa`" in why


@pytest.mark.parametrize(
    ("need", "changes", "why"),
    [
        ({"memory_mib": 80_000}, {}, r"needs 78\.1 GiB; the most that is free on one is 74\.8 GiB and 75 %"),
        ({"memory_mib": 1_024, "compute_percent": 90}, {}, r"needs 1\.0 GiB and 90 %; the most .* 75 %"),
        ({"mode": LeaseMode.EXCLUSIVE}, {}, "needs 1 whole device; none is free"),
        ({"mode": LeaseMode.EXCLUSIVE, "devices": 2}, {}, "needs 2 GPUs; 1 of 1 can be used"),
        ({"memory_mib": 1, "node": "gone"}, {}, "there is no GPU gone in the pool now"),
        ({"memory_mib": 1}, {"quarantine_ms": 9_000}, "nothing is granted for 9 s more"),
        ({"memory_mib": 1}, {"reservation": Reservation(request_id="r", uuids=("GPU-0aaaaaaa-1111",))}, "is kept for r"),
        ({"memory_mib": 1}, {"waiting": (waits("w"), waits("first"))}, "others come first"),
        ({"memory_mib": 1}, {}, "has just become free"),
        (
            {"memory_mib": 2_048},
            {"tenants": {"logweir": Tenant(name="logweir", quota_mib=5_000)}},
            r"its tenant logweir holds 4\.0 GiB of its quota of 4\.9 GiB",
        ),
    ],
)  # fmt: skip
def test_a_need_that_waits_says_what_it_waits_for(need: Any, changes: Any, why: str) -> None:
    on = device(0)
    request = waits("w", **need)
    s = snapshot(on, leases=(leased("job", on),), **{"waiting": (request,), **changes})
    assert re.search(why, why_it_waits(s, request, device_views(s)))


def test_use_is_unknown_where_the_driver_does_not_say() -> None:
    silent, vague = device(0, processes=None), device(1, processes=(Process(pid=100),))
    on_both = leased("job", silent)
    on_both = replace(on_both, parts=(*on_both.parts, replace(on_both.parts[0], uuid=vague.uuid)))
    assert [
        part["used_mib"] for part in lease_rows(snapshot(silent, vague, leases=(on_both,)))[0]["parts"]
    ] == [
        None,
        None,
    ]
    assert "?" in drawn(snapshot(silent, leases=(leased("job", silent),)))


def test_whose_processes_are_of_another_machine_are_not_counted() -> None:
    on = device(0, processes=(Process(pid=100, used_mib=3_800),))
    found = lease_rows(snapshot(on, leases=(leased("job", on, host="other"),)))
    assert found[0]["parts"][0]["used_mib"] is None


def test_an_exclusive_lease_takes_all_of_a_device_whatever_it_asked_for() -> None:
    on = device(0)
    s = snapshot(on, leases=(leased("fit", on, memory_mib=1, percent=0, mode=LeaseMode.EXCLUSIVE),))
    shown = pool_facts(s)["devices"][0]
    assert (shown["leased_mib"], shown["leased_percent"], shown["state"]) == (80_640, 100, "taken whole")


def test_a_device_that_shrank_below_its_leases_has_less_than_nothing_free() -> None:
    on = device(0, schedulable_mib=1_024)
    shown = pool_facts(snapshot(on, leases=(leased("job", on),)))
    assert shown["devices"][0]["free_mib"] == -3_072
    assert shown["summary"]["free_mib"] == 0


def test_tenants_show_what_they_hold_in_the_order_in_which_they_are_served() -> None:
    on = device(0)
    known = {"a": Tenant(name="a"), "logweir": Tenant(name="logweir", quota_mib=8_192)}
    found = tenant_rows(snapshot(on, leases=(leased("job", on),), tenants=known))
    assert [t["tenant"] for t in found] == ["a", "logweir"]
    assert (found[1]["held_mib"], found[1]["leases"], found[1]["quota_mib"]) == (4_096, 1, 8_192)


def test_sizes_and_times_are_said_as_people_say_them() -> None:
    assert [size(n) for n in (0, 1023, 1024, 81_920)] == ["0 MiB", "1023 MiB", "1.0 GiB", "80.0 GiB"]
    assert [seconds(n) for n in (-3, 12, 99, 180, 7_200, 4 * 86_400)] == [
        "0 s",
        "12 s",
        "99 s",
        "3 min",
        "2.0 h",
        "4 d",
    ]
    assert [short(u) for u in ("GPU-1a2b3c4d-11", "MIG-1a2b3c4d-11", "strange")] == [
        "GPU-1a2b3c4d",
        "MIG-1a2b3c4d",
        "strange",
    ]


# The verbs, on a real Redis with made-up devices


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace(gpu_tenants=("logweir", "research=2:40GiB"))


@pytest.fixture
def verb(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Verb]:
    with command_line(settings, monkeypatch, capsys, "gpu", columns=120) as run:
        yield run


@pytest.fixture
def pool(client: "redis.Redis", settings: Settings) -> Pool:
    """Two devices of this machine."""
    made = Pool(client, settings)
    made.ledger.clear_quarantine()
    tell(made)
    return made


UUIDS = tuple(f"GPU-{n}{uuid.uuid4().hex[:7]}-test" for n in range(2))


def tell(pool: Pool, **changes: Any) -> None:
    devices = tuple(device(n, uuid=u, node=this_node(), processes=(), **changes) for n, u in enumerate(UUIDS))
    pool.report(Report(node=this_node(), agent="a", clock_ms=int(time.time() * 1000), devices=devices))


def sentence(said: Said, code: int) -> str:
    assert said.code == code, said
    assert said.out == "" and said.err.startswith("logweir: ") and said.err.count("\n") == 1, said
    return said.err


def asked(said: Said) -> dict[str, Any]:
    assert said.code == 0, said
    return dict(json.loads(said.out))


def test_a_lease_is_lent_listed_and_given_back(verb: Verb, pool: Pool) -> None:
    lent = asked(verb("request", "--memory", "4GiB", "--name", "job", "--json"))
    assert lent["environment"]["CUDA_VISIBLE_DEVICES"] == UUIDS[0]
    assert lent["environment"]["GPU_LEASE"] == "job"
    listed = verb("leases")
    assert "job" in listed.out and f"token {lent['token']}" in listed.out
    assert verb("release", "job", "--token", str(lent["token"])).out == "released job\n"
    assert verb("leases").out.startswith("no leases")


def test_the_flags_of_a_need_say_kind_model_node_and_its_resources(verb: Verb, pool: Pool) -> None:
    flags = [
        "--memory",
        "4GiB",
        "--device-kind",
        "gpu",
        "--model",
        "A100",
        "--cpu",
        "1.5",
        "--node-memory",
        "2GiB",
        "--same-node",
    ]
    asked(verb("request", *flags, "--name", "job", "--json"))
    need = pool.snapshot().leases[0].need
    assert (need.device_kind, need.model, need.same_node) == (DeviceKind.GPU, "A100", True)
    assert (need.cpu_milli, need.node_memory_mib) == (1_500, 2_048)
    other = sentence(verb("request", *flags, "--cpu", "2", "--name", "job"), 2)
    assert "with 1.5 cores and 2.0 GiB of its node, not" in other


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "H100"), "no device of model H100"),
        (("--model", "A100;"), "'A100;' is no model"),
        (("--device-kind", "slice"), "there is no MIG slice"),
        (("--node-memory", "4 apples"), "--node-memory"),
    ],
)
def test_a_need_that_no_device_serves_is_refused_in_a_sentence(
    verb: Verb, pool: Pool, flags: tuple[str, ...], words: str
) -> None:
    assert words in sentence(verb("request", "--memory", "1GiB", *flags), 2)


@pytest.mark.parametrize("cores", ["x", "-1", "nan", "inf"])
def test_cores_are_a_number(verb: Verb, pool: Pool, cores: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        verb("request", "--memory", "1GiB", f"--cpu={cores}")
    assert ended.value.code == 2
    assert "write 4 or 0.5" in capsys.readouterr().err


def test_why_shows_the_recent_needs_and_where_the_next_ones_would_go() -> None:
    first, second = device(0), device(1)
    demand = {Need(memory_mib=4096, compute_percent=25): 30, Need(mode=LeaseMode.EXCLUSIVE, model="H100"): 10}
    s = snapshot(first, second, leases=(leased("job", first),), demand=demand)
    console = Console(width=150, highlight=False, force_terminal=False, color_system=None)
    with console.capture() as said:
        console.print(picture(pool_facts(s), 150, why=True))
    shown = said.get()
    assert "packing looks ahead by 40 recent needs" in shown
    assert re.search(r"75% +4\.0 GiB and 25 % +big +\d\.\d\d GPU; fragments [+-]\d\.\d\d GPU", shown)
    assert re.search(r"25% +1 whole device of model H100 +it fits nowhere now", shown)
    assert "packing" not in drawn(s)
    with console.capture() as said:
        console.print(picture(pool_facts(snapshot(first)), 150, why=True))
    assert "packing: best fit" in said.get()


def test_asking_again_under_a_name_gives_the_same_lease(verb: Verb, pool: Pool) -> None:
    first = asked(verb("request", "--memory", "4GiB", "--name", "job", "--json"))
    again = asked(verb("request", "--memory", "4GiB", "--name", "job", "--json"))
    assert (first["lease"], first["token"]) == (again["lease"], again["token"])
    assert len(pool.snapshot().leases) == 1


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--memory", "8GiB"), "has 4.0 GiB, not 8.0 GiB"),
        (("--memory", "4097MiB"), "has 4096 MiB, not 4097 MiB"),
        (("--memory", "4GiB", "--compute", "50"), "not 4.0 GiB and 50 %"),
        (("--memory", "4GiB", "--devices", "2"), "on each of 2 devices"),
        (("--exclusive",), "has 4.0 GiB, not 1 whole device"),
        (("--memory", "4GiB", "--tenant", "research"), "has tenant logweir, not research"),
        (("--memory", "4GiB", "--priority", "3"), "has priority 0, not 3"),
        (("--memory", "4GiB", "--preemptible"), "has no --preemptible"),
        (("--memory", "4GiB", "--device", "1"), "has GPU-"),
    ],
)
def test_asking_for_something_else_under_the_same_name_is_refused(
    verb: Verb, pool: Pool, args: tuple[str, ...], why: str
) -> None:
    asked(verb("request", "--memory", "4GiB", "--name", "job", "--json"))
    args = (*args[:-1], UUIDS[1]) if "--device" in args else args
    said = sentence(verb("request", *args, "--name", "job", "--for", "7h"), 2)
    assert why in said and "release it first or ask under another --name" in said
    [lease] = pool.snapshot().leases
    assert lease.ttl_ms == 3_600_000


def test_asking_again_for_another_time_says_how_long_it_has(verb: Verb, pool: Pool) -> None:
    asked(verb("request", "--memory", "4GiB", "--name", "job", "--json"))
    said = verb("request", "--memory", "4GiB", "--name", "job", "--for", "3h")
    [lease] = pool.snapshot().leases
    assert f"expires  in {seconds(lease.ttl_ms / 1000)}; nobody renews it" in said.out


def test_a_name_of_somebody_else_is_refused(verb: Verb, pool: Pool) -> None:
    pool.request(Need(memory_mib=4096), holder="ann@elsewhere", request_id="job")
    assert "belongs to ann@elsewhere" in sentence(verb("request", "--memory", "4GiB", "--name", "job"), 2)


def test_export_lines_survive_a_shell(verb: Verb, pool: Pool) -> None:
    said = verb("request", "--memory", "4GiB", "--shell", "--name", "job")
    assert said.code == 0
    form = r"""export [A-Za-z_]+=([\w@%+=:,./-]*|'"device=[\w,-]+"')"""
    assert all(re.fullmatch(form, line) for line in said.out.splitlines()), said.out
    assert "export GPU_LEASE=job" in said.out.splitlines()


@pytest.mark.parametrize(
    ("args", "code"),
    [(("--memory", "900GiB"), 2), (("--memory", "4GiB"), 75), (("--memory", "4GiB", "--name", "full"), 2)],
)
def test_what_a_shell_evaluates_fails_when_there_is_no_lease(
    verb: Verb, pool: Pool, args: tuple[str, ...], code: int
) -> None:
    pool.request(Need(mode=LeaseMode.EXCLUSIVE, devices=2), holder="ann@elsewhere", request_id="full")
    said = verb("request", *args, "--shell")
    assert (said.code, said.out) == (code, "false\n") and said.err.count("\n") == 1, said


def test_a_lease_with_a_process_closes_the_device_until_that_has_gone(verb: Verb, pool: Pool) -> None:
    asked(verb("request", "--memory", "4GiB", "--name", "job", "--json", "--pid", str(os.getpid())))
    [lease] = pool.snapshot().leases
    assert (lease.pids, lease.host) == ((os.getpid(),), this_node())


def test_a_lent_lease_ends_by_itself_after_the_time_it_was_asked_for(verb: Verb, pool: Pool) -> None:
    asked(verb("request", "--memory", "4GiB", "--for", "2h", "--json"))
    [lease] = pool.snapshot().leases
    assert lease.ttl_ms == 7_200_000 and lease.need.max_duration_s == 7_200


def test_revoking_tells_why_and_needs_a_lease(verb: Verb, pool: Pool) -> None:
    asked(verb("request", "--memory", "4GiB", "--name", "job", "--json"))
    assert verb("revoke", "job", "--why", "maintenance").code == 0
    assert pool.snapshot().leases == ()
    assert "there is no lease 'job'" in sentence(verb("revoke", "job", "--why", "maintenance"), 2)


def test_a_closed_device_is_cleared_only_with_yes_while_processes_are_seen(verb: Verb, pool: Pool) -> None:
    lease = pool.request(Need(memory_mib=4096, device=UUIDS[0]), holder="h", request_id="job")
    pool.activate(lease, pids=(4711,))
    devices = [device(0, uuid=UUIDS[0], node=this_node(), processes=(Process(pid=4711, used_mib=9),))]
    pool.report(Report(node=this_node(), agent="a", clock_ms=0, devices=tuple(devices)))
    pool.release(lease, clean=False)
    assert "4711" in sentence(verb("clear", UUIDS[0][:8]), 2)
    assert "is free" in verb("clear", UUIDS[0][:8], "--yes").out
    assert "nothing is left" in sentence(verb("clear", UUIDS[0]), 2)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--memory", "0"), "needs memory"),
        (("--memory", "1.5GiB"), "1.5GiB"),
        (("--memory", "900GiB"), "fit on no device"),
        (("--memory", "4GiB", "--compute", "101"), "101"),
        (("--memory", "4GiB", "--compute", "-1"), "-1"),
        (("--memory", "4GiB", "--devices", "0"), "0"),
        (("--memory", "4GiB", "--devices", "3"), "3"),
        (("--memory", "4GiB", "--tenant", "stranger"), "stranger"),
        (("--memory", "50GiB", "--tenant", "research"), "research"),
        (("--memory", "4GiB", "--device", "GPU-nosuch"), "GPU-nosuch"),
        (("--memory", "4GiB", "--node", "nosuch"), "nosuch"),
        (("--memory", "4GiB", "--name", "a b"), "a b"),
        (("--memory", "4GiB", "--name", "x" * 64), "63"),
        (("--memory", "4GiB", "--for", "8d"), "7d"),
        (("--memory", "4GiB", "--for", "0s"), "0s"),
        (("--memory", "4GiB", "--for", "soon"), "soon"),
        (("--memory", "4GiB", "--wait", "soon"), "soon"),
        (("--memory", "4GiB", "--pid", "0"), "process 0"),
        (("--exclusive", "--compute", "5"), "--compute"),
        ((), "--memory"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    verb: Verb, pool: Pool, args: tuple[str, ...], why: str
) -> None:
    assert why in sentence(verb("request", *args), 2)
    look = pool.snapshot()
    assert look.leases == () and look.waiting == ()


def test_a_need_that_cannot_be_met_now_says_what_stands_in_the_way(verb: Verb, pool: Pool) -> None:
    asked(verb("request", "--exclusive", "--devices", "2", "--json"))
    why = sentence(verb("request", "--memory", "4GiB"), 75)
    assert "every device is taken whole" in why
    assert pool.snapshot().waiting == ()


def test_the_wrong_token_or_an_unknown_lease_releases_nothing(verb: Verb, pool: Pool) -> None:
    lent = asked(verb("request", "--memory", "4GiB", "--name", "job", "--json"))
    assert "is not the token" in sentence(verb("release", "job", "--token", str(lent["token"] + 1)), 2)
    assert "there is no lease 'nosuch'" in sentence(verb("release", "nosuch", "--token", "1"), 2)
    assert len(pool.snapshot().leases) == 1


def test_top_prints_one_picture_where_no_terminal_is(verb: Verb, pool: Pool) -> None:
    asked(verb("request", "--memory", "4GiB", "--name", "job", "--json"))
    said = verb("top")
    assert said.code == 0 and "2 GPUs on 1 machine" in said.out and "job" in said.out
    shown = asked(verb("top", "--json"))
    assert shown["summary"]["leases"] == 1 and shown["devices"][0]["leased_mib"] == 4096
    assert [x["lease"] for x in json.loads(verb("leases", "--json").out)] == ["job"]
    assert "research" in verb("tenants").out


def test_a_budget_is_set_shown_and_taken_away(verb: Verb, pool: Pool) -> None:
    assert (
        "research has 1.5/week; needs beyond it wait"
        in verb("tenants", "set", "research", "--gpu-hours", "1.5/week").out
    )
    said = asked(verb("tenants", "set", "logweir", "--gpu-hours", "0/day", "--over", "refuse", "--json"))
    assert said == {"tenant": "logweir", "gpu_hours": "0/day", "over": "refuse"}
    assert "0.00 of 1.5 GPU-hours this week" in verb("tenants").out
    shown = {one["tenant"]: one["budget"] for one in json.loads(verb("tenants", "--json").out)}
    assert shown["logweir"] == {"gpu_hours": 0.0, "per": "day", "used_gpu_hours": 0.0, "over": "refuse"}
    assert "its tenant logweir has used 0.00 of its 0 GPU-hours" in sentence(
        verb("request", "--memory", "1GiB"), 75
    )
    assert asked(verb("request", "--memory", "1GiB", "--tenant", "research", "--json"))
    assert verb("tenants", "set", "logweir", "--gpu-hours", "none").out == "logweir has no budget\n"
    assert asked(verb("request", "--memory", "1GiB", "--json"))
    for wrong, why in (
        (("tenants", "set"), "name a tenant and its budget"),
        (
            ("tenants", "set", "nobody", "--gpu-hours", "1/day"),
            "there is no tenant 'nobody'; known are logweir",
        ),
        (("tenants", "set", "research", "--gpu-hours", "many"), "'many' is no budget"),
    ):
        assert why in sentence(verb(*wrong), 2)


def test_a_tenant_is_added_with_a_key_and_taken_away(verb: Verb, pool: Pool, settings: Settings) -> None:
    added = asked(verb("tenants", "add", "guests", "--weight", "3", "--json"))
    assert (added["tenant"], added["name"]) == ("guests", "gpu:guests")
    (key,) = SenderKeys(pool.client, settings).look()
    assert (key.scopes, key.tenant, key.bound_tenant, key.digest) == (
        ("gpu",),
        "guests",
        "guests",
        key_digest(added["key"]),
    )
    shown = {one["tenant"]: one for one in json.loads(verb("tenants", "--json").out)}
    assert (shown["guests"]["weight"], shown["guests"]["known"]) == (3.0, True)
    verb("tenants", "set", "guests", "--gpu-hours", "2/day")
    assert "of 2 GPU-hours this day" in verb("tenants").out
    assert "there is a key 'gpu:guests' already" in sentence(verb("tenants", "add", "guests"), 2)
    assert "guests gets no new lease by its key" in verb("tenants", "remove", "guests").out
    assert "guests" not in verb("tenants").out and SenderKeys(pool.client, settings).look() == []
    for wrong, why in (
        (("tenants", "add"), "name the tenant"), (("tenants", "add", "a b"), "'a b' is no name of a tenant"),
        (("tenants", "add", "a", "--weight", "-1"), "is no weight"), (("tenants", "remove", "guests"), "no key 'gpu:guests'"),
        (("agents", "token"), "name the agent"),
    ):  # fmt: skip
        assert why in sentence(verb(*wrong), 2)


def test_an_agent_gets_a_token_that_ends_with_it(verb: Verb, settings: Settings, pool: Pool) -> None:
    made = asked(verb("agents", "token", "b", "--json"))
    try:
        assert f"{settings.redis.key_prefix}-agent-b:" in made["redis_url"]
        assert redis.Redis.from_url(made["redis_url"]).hlen(pool.ledger.keys.gpu("nodes")) == 1
        assert "b" in verb("agents").out
    finally:
        assert "b is refused" in verb("agents", "remove", "b").out
    assert json.loads(verb("agents", "--json").out) == []


def test_a_daemon_of_mps_is_started_shown_and_stopped_with_care(
    verb: Verb, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", control_program(tmp_path))
    monkeypatch.setattr(mps.find, "__kwdefaults__", {**mps.find.__kwdefaults__, "root": tmp_path / "mps"})
    monkeypatch.setattr(
        mps.start_daemon, "__kwdefaults__", {**mps.start_daemon.__kwdefaults__, "root": tmp_path / "mps"}
    )
    gpu = UUIDS[0]
    assert "no MPS daemon serves" in verb("mps", "status", gpu).out
    assert "has no MPS daemon of its own" in sentence(verb("mps", "stop", gpu), 2)
    lent = asked(verb("request", "--memory", "1GiB", "--device", gpu, "--name", "job", "--json"))
    assert "lease job lives on" in sentence(verb("mps", "start", gpu), 2)
    verb("release", "job", "--token", str(lent["token"]))
    assert asked(verb("mps", "start", gpu, "--json"))["running"] is True
    place = tmp_path / f"mps-{gpu}"
    (place / "servers").write_text("100\n")
    (place / "clients-100").write_text("4711\n")
    assert "processes under it: 4711" in verb("mps", "status", gpu).out
    assert "process 4711 runs under" in sentence(verb("mps", "stop", gpu), 2)
    assert "has ended" in verb("mps", "stop", gpu, "--yes").out
    assert asked(verb("mps", "status", gpu, "--json"))["running"] is False
    put_devices(pool, 1, node="far", clear_quarantine=False)
    assert "run `logweir gpu mps` on that machine" in sentence(verb("mps", "start", "GPU-far"), 2)


def test_top_of_a_pool_without_devices_is_no_error(verb: Verb, client: "redis.Redis") -> None:
    said = verb("top")
    assert said.code == 0 and "no GPUs in the pool" in said.out
    assert sentence(verb("request", "--memory", "4GiB"), 2)


@pytest.mark.parametrize("interval", ["0s", "2h", "fast"])
def test_an_interval_that_is_none_is_refused(verb: Verb, pool: Pool, interval: str) -> None:
    assert interval in sentence(verb("top", "--interval", interval), 2)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("top",), 2),
        (("leases",), 2),
        (("request", "--memory", "1GiB"), 75),
        (("run", "--memory", "1GiB", "--", "true"), 75),
    ],
)
def test_a_redis_that_does_not_answer_is_one_sentence(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: int
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    assert "does not answer" in sentence(verb(*args), code)


def test_without_a_stack_the_verbs_say_how_to_start_one(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL")
    assert "logweir up" in sentence(verb("top"), 2)


# From Python


@pytest.mark.long
def test_the_example_holds_a_lease_while_it_works(pool: Pool, settings: Settings) -> None:
    program = Path(__file__).resolve().parents[2] / "examples" / "gpu_lease.py"
    with subprocess.Popen(
        [sys.executable, program, settings.data.dir],
        env={**os.environ, **settings.to_environ()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as example:
        assert example.stdout is not None
        assert example.stdout.readline() == f"working on {UUIDS[0]}\n"
        [lease] = pool.snapshot().leases
        assert (lease.parts[0].memory_mib, lease.pids, lease.host) == (4096, (example.pid,), this_node())
        _, said = example.communicate(timeout=60)
    assert (example.returncode, said) == (0, "")
    assert pool.snapshot().leases == () == pool.snapshot().orphans


# The live view


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Our end and the program's."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def reads(ours: int, text: str, within_s: float = 60) -> bool:
    """Whether the terminal shows the text in time; what comes meanwhile is read, so that nobody waits for
    us."""
    shown, deadline = b"", time.monotonic() + within_s
    while text.encode() not in shown and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 65536)
    return text.encode() in shown


@pytest.mark.long
@pytest.mark.parametrize("end", ["xQ", "ctrl-c"])
def test_the_live_view_ends_with_q_or_ctrl_c_and_gives_the_terminal_back(
    settings: Settings, pool: Pool, terminal: tuple[int, int], end: str
) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    command = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "gpu", "top"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, **settings.to_environ(), "TERM": "xterm"},
        start_new_session=True,
    )
    try:
        assert reads(ours, "q ends")
        assert termios.tcgetattr(theirs)[3] != before[3]
        if end == "ctrl-c":
            command.send_signal(signal.SIGINT)
        else:
            os.write(ours, end.encode())
        assert reads(ours, "\x1b[?1049l")  # the screen from before
        assert command.wait(30) == 0
    finally:
        command.kill()
        _, said = command.communicate()
    assert said == b""
    assert termios.tcgetattr(theirs) == before


def test_the_live_view_says_for_how_long_a_hanging_redis_has_been_silent(
    monkeypatch: pytest.MonkeyPatch, terminal: tuple[int, int]
) -> None:
    ours, theirs = terminal
    monkeypatch.setattr("pipeline.commands.gpu.top.SILENT_S", 0.1)
    hangs, answers = threading.Event(), iter([pool_facts(snapshot(device(0)))])

    def look() -> Mapping[str, Any]:
        for answer in answers:
            return answer
        hangs.wait(60)
        return pool_facts(snapshot(device(0), device(1)))

    def act() -> None:
        seen.append(reads(ours, "no answer from Redis for"))
        hangs.set()
        seen.append(reads(ours, "2 GPUs on 1 machine"))
        os.write(ours, b"q")

    seen: list[bool] = []
    person = threading.Thread(target=act)
    with open(theirs, closefd=False) as keys, open(theirs, "w", closefd=False) as screen:
        monkeypatch.setattr("sys.stdin", keys)
        person.start()
        gpu_top._watch(Console(file=screen, force_terminal=True, width=100, height=24), look, 0.1)
        person.join()
    assert seen == [True, True]
