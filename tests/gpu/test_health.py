"""When a GPU may be leased: faults, probes, trust."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gpu.node.health import (
    IGNORED_XIDS,
    DeviceHealth,
    Patience,
    event_fault,
    next_health,
    reading_fault,
    xid_fault,
)
from pipeline.gpu.node.readings import DriverEvent, Reading

NOON = datetime(2026, 1, 1, 12, 3, tzinfo=UTC)
PATIENCE = Patience(good=3, first_s=10, most_s=60, forget_s=1000)
XID = "XID 79 (fell off the bus)"
ONE = Reading(uuid="GPU-a", index=0, name="Test", total_mib=1, reserved_mib=0, used_mib=0)


def after(*probes: tuple[float, str], health: DeviceHealth | None = None) -> DeviceHealth:
    health = health or DeviceHealth()
    for now_s, fault in probes:
        health = next_health(
            health, fault, now_s=now_s, at=NOON + timedelta(seconds=now_s), patience=PATIENCE
        )
    return health


def recovery_s(health: DeviceHealth, from_s: float) -> float:
    """How long good probes, one a second, have to go on."""
    now_s = from_s
    while health.fault:
        health = after((now_s, ""), health=health)
        now_s += 1
    return now_s - 1 - from_s


def test_a_fault_makes_a_device_unhealthy_at_once_and_says_what_and_when() -> None:
    assert after((0, ""), (1, XID)).why == "XID 79 (fell off the bus) at 12:03 UTC; it is probed again"


def test_it_recovers_after_enough_good_probes_over_a_long_enough_time() -> None:
    assert after((0, XID), (1, ""), (2, ""), (3, "")).fault == XID  # enough probes, not enough time
    assert after((0, XID), (1, ""), (20, "")).fault == XID  # enough time, not enough probes
    assert after((0, XID), (1, ""), (6, ""), (11, "")).fault == ""


def test_one_bad_probe_starts_the_count_again() -> None:
    health = after((0, XID), (1, ""), (6, ""), (10, XID))
    assert recovery_s(health, 11) == 10


def test_each_relapse_doubles_the_wait_up_to_a_bound() -> None:
    health, now_s, waits = DeviceHealth(), 0.0, []
    for _ in range(5):
        health = after((now_s, XID), health=health)
        waits.append(recovery_s(health, now_s + 1))
        health = after(*[(now_s + 1 + n, "") for n in range(int(waits[-1]) + 1)], health=health)
        assert health.fault == ""
        now_s += waits[-1] + 2
    assert waits == [10, 20, 40, 60, 60]


def test_a_device_that_was_well_for_long_is_trusted_as_at_first() -> None:
    healthy = after((0, XID), (1, ""), (6, ""), (11, ""))
    assert recovery_s(after((1011, XID), health=healthy), 1012) == 10
    assert recovery_s(after((1010, XID), health=healthy), 1011) == 20


def test_a_fault_that_lasts_keeps_the_time_when_it_began() -> None:
    assert after((0, XID), (3600, XID)).why.startswith(f"{XID} at 12:03")
    assert after((0, XID), (3600, "another")).why.startswith("another at 13:03")


@given(st.lists(st.tuples(st.floats(0.01, 30), st.booleans()), max_size=60))
def test_a_device_is_only_well_again_after_good_probes_alone(probes: list[tuple[float, bool]]) -> None:
    health, now_s, bad_s, good = DeviceHealth(), 0.0, None, 0
    for pause_s, fails in probes:
        now_s += pause_s
        before = health
        health = after((now_s, XID if fails else ""), health=health)
        bad_s, good = (now_s, 0) if fails else (bad_s, good + 1)
        assert bool(health.fault) or not fails
        if before.fault and not health.fault:
            assert good >= PATIENCE.good
            assert bad_s is not None
            assert now_s - bad_s >= before.wait_s
        assert 0 <= health.wait_s <= PATIENCE.most_s


@pytest.mark.parametrize("xid", sorted(IGNORED_XIDS))
def test_errors_of_a_program_are_not_faults_of_the_device(xid: int) -> None:
    assert xid_fault(xid) == ""


def test_any_other_xid_is_a_fault_also_one_without_words() -> None:
    assert xid_fault(79) == XID
    assert xid_fault(12345) == "XID 12345"
    assert xid_fault(None) == "an uncorrectable memory error"


def test_an_event_concerns_its_gpu_alone() -> None:
    events = [DriverEvent(uuid="GPU-a", xid=43), DriverEvent(uuid="GPU-a", xid=79)]
    assert event_fault("GPU-a", events, ["GPU-a", "GPU-b"]) == XID
    assert event_fault("GPU-b", events, ["GPU-a", "GPU-b"]) == ""


@pytest.mark.parametrize("whose", [None, "GPU-unheard-of"])
def test_an_event_that_names_no_gpu_that_is_known_concerns_all(whose: str | None) -> None:
    for uuid in ("GPU-a", "GPU-b"):
        assert event_fault(uuid, [DriverEvent(uuid=whose, xid=79)], ["GPU-a", "GPU-b"]) == XID


def test_what_a_reading_shows_to_be_wrong() -> None:
    def reading(**values: object) -> Reading:
        return Reading(
            **{
                "uuid": "GPU-a",
                "index": 0,
                "name": "T",
                "total_mib": 1,
                "reserved_mib": 0,
                "used_mib": 0,
                **values,
            }  # type: ignore[arg-type]
        )

    assert reading_fault(ONE, 0) == ""
    assert reading_fault(reading(ecc_errors=3), 3) == ""
    assert reading_fault(reading(ecc_errors=4), 3) == "1 uncorrectable memory error"
    assert reading_fault(reading(ecc_errors=3), 0) == "3 uncorrectable memory errors"
    assert reading_fault(reading(ecc_errors=0), 3) == ""  # a reset counts from 0
    assert reading_fault(reading(recovery=1), 0) == "its driver asks for a reset"
    assert reading_fault(reading(recovery=99), 0) == "its driver asks for recovery action 99"
    assert (
        reading_fault(reading(blind="Unknown Error"), 0)
        == "its error events cannot be watched (Unknown Error)"
    )
