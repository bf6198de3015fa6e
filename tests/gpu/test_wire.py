"""The JSON of the pool's values: what goes in comes out, older and newer forms are read, what is broken is
named."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.gpu.leasing import wire
from pipeline.gpu.values import (
    Device,
    Grant,
    LeaseMode,
    LeasePart,
    LeaseState,
    Need,
    Node,
    Orphan,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Process,
    Report,
    Reservation,
    Yield,
)

NEED = Need(
    mode=LeaseMode.EXCLUSIVE,
    devices=2,
    memory_mib=40_000,
    max_duration_s=1 / 3,
    node="knoten-ü",
    preemptible=True,
)
PART = LeasePart(uuid="GPU-1", memory_mib=2048, compute_percent=25, token=7)
DEVICE = Device(
    uuid="MIG-1",
    node="a",
    index=3,
    name="A100",
    total_mib=40_960,
    schedulable_mib=40_000,
    processes=(Process(pid=4), Process(pid=5, used_mib=12)),
    temperature_c=61,
)
LEASE = PoolLease(
    lease_id="r1",
    holder="me@a 'quoted'",
    need=NEED,
    parts=(PART, replace(PART, uuid="GPU-2")),
    state=LeaseState.ACTIVE,
    granted_ms=1_795_289_972_579,
    deadline_ms=1_795_289_987_579,
    ttl_ms=15_000,
    share=0.1 + 0.2,
    prepaid=1e-17,
    yield_by_ms=1_795_289_999_999,
    pids=(1, 2),
)
PLACE = Reservation(request_id="r2", uuids=("GPU-1",), start_ms=None, made_ms=5)
VALUES: list[tuple[Any, Any]] = [
    (Device, DEVICE),
    (Device, replace(DEVICE, processes=None)),
    (Node, Node(name="a", agent="agent-1", beat_ms=12, clock_ahead_ms=-3_600_000)),
    (PoolLease, LEASE),
    (PoolRequest, PoolRequest(request_id="r", holder="h", need=Need(), ttl_ms=1, since_ms=2)),
    (
        Orphan,
        Orphan(
            lease_id="r",
            uuid="u",
            memory_mib=1,
            compute_percent=2,
            exclusive=True,
            pids=(),
            since_ms=1,
            why="because",
        ),
    ),
    (Reservation, PLACE),
    (
        PoolPlan,
        PoolPlan(
            grants=(Grant(request_id="r", parts=(PART,), share=0.5, prepaid=30.0),),
            yields=(Yield(lease_id="l", by_ms=9, why="a \u2603"),),
            reservation=PLACE,
        ),
    ),
    (PoolPlan, PoolPlan()),
    (Report, Report(node="a", agent="b", clock_ms=1, devices=(DEVICE,))),
]


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=lambda x: type(x).__name__)
def test_what_is_written_is_read_back_exactly(kind: Any, value: Any) -> None:
    assert wire.read_json(kind, wire.encode(value)) == value
    assert wire.read_json(kind, wire.encode(value).encode()) == value


@given(st.floats(allow_nan=False), st.floats(min_value=0, allow_nan=False))
def test_floats_lose_nothing(share: float, duration: float) -> None:
    lease = replace(LEASE, share=share, need=replace(NEED, max_duration_s=duration))
    assert wire.read_json(PoolLease, wire.encode(lease)) == lease


@given(st.text())
def test_any_name_is_read_back_and_what_is_no_text_becomes_some(name: str) -> None:
    got = wire.read_json(PoolLease, wire.encode(replace(LEASE, holder=name))).holder
    assert got == name.encode("utf-8", "replace").decode()
    got.encode()


def test_bytes_that_are_no_text_do_not_break_the_wire() -> None:
    assert wire.read_json(PoolLease, wire.encode(replace(LEASE, holder="a\udc80b"))).holder == "a?b"


def test_the_empty_list_of_lua_is_read() -> None:
    text = wire.encode(replace(LEASE, pids=())).replace('"pids":[]', '"pids":{}')
    assert '"pids":{}' in text
    assert wire.read_json(PoolLease, text).pids == ()


def test_fields_that_are_not_known_are_ignored_and_missing_ones_have_their_default() -> None:
    raw = json.loads(wire.encode(DEVICE))
    del raw["temperature_c"], raw["parent"]
    raw["colour"] = "green"
    assert wire.read_json(Device, json.dumps(raw)) == replace(DEVICE, temperature_c=None)


def test_times_that_redis_holds_elsewhere_may_be_missing() -> None:
    text = wire.encode(LEASE, without=("deadline_ms",))
    assert wire.read_json(PoolLease, text) == replace(LEASE, deadline_ms=0)
    node = Node(name="a", agent="b", beat_ms=7)
    assert wire.read_json(Node, wire.encode(node, without=("beat_ms",))) == replace(node, beat_ms=0)


def test_a_text_that_looks_like_the_empty_list_of_lua_stays_as_it_is() -> None:
    for holder in ('a":{}', "\\", '\\":{}', ":{}", '":{},"pids":{}'):
        lease = replace(LEASE, holder=holder, pids=())
        text = wire.encode(lease).replace('"pids":[],', '"pids":{},')
        assert wire.read_json(PoolLease, text) == lease


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"v":1,"uuid":5}',
        wire.encode(DEVICE).replace('"v":1', '"v":2'),
        wire.encode(DEVICE).replace('"index":3', '"index":"x"'),
        b"\xff\xfe",
    ],
)
def test_what_cannot_be_read_is_named(text: str | bytes) -> None:
    with pytest.raises(BadPayload, match="a stored Device cannot be read"):
        wire.read_json(Device, text)
