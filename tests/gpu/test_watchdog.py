"""Used against leased: what is warned about, what is ended, and what cannot be judged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pipeline.errors import RedisUnavailable
from pipeline.gpu.node.watchdog import UsageVerdict, Watchdog, Word, fresh, judge_usage, used_by
from pipeline.gpu.values import Device, Node, Process, Snapshot

OURS = {10, 11}


def a_device(*processes: Process, listed: bool = True, node: str = "n") -> Device:
    return Device(
        uuid="GPU-a",
        node=node,
        index=0,
        name="T4",
        total_mib=16_384,
        schedulable_mib=16_000,
        processes=processes if listed else None,
    )


def using(mib: int | None, pid: int = 10) -> Device:
    return a_device(Process(pid=pid, used_mib=mib), Process(pid=99, used_mib=9_000))


def a_verdict(device: Device | None, *, over_s: float | None = None, grace_s: float = 10.0) -> UsageVerdict:
    return judge_usage(
        "GPU-a", device, pids=OURS, leased_mib=4_096, tolerance_mib=256, over_s=over_s, grace_s=grace_s
    )


class Watched:
    """A watchdog over what a test sets."""

    def __init__(self) -> None:
        self.device: Device | None = using(100)
        self.away = False
        self.dog = Watchdog(lambda: OURS, {"GPU-a": 4_096}, self.reading, tolerance_mib=256, grace_s=10.0)

    def reading(self) -> list[Device]:
        if self.away:
            raise RedisUnavailable("away")
        return [] if self.device is None else [self.device]

    def word(self, now: float) -> Word:
        (verdict,) = self.dog.check(now)
        return verdict.word


def test_only_the_processes_of_the_lease_count() -> None:
    device = a_device(Process(pid=10, used_mib=3), Process(pid=11, used_mib=4), Process(pid=99, used_mib=50))
    assert used_by(device, OURS) == 7
    assert used_by(device, {1}) == 0


def test_the_lease_and_the_tolerance_may_be_used_to_the_last_mib() -> None:
    assert a_verdict(using(4_096 + 256)).word is Word.OK
    assert a_verdict(using(4_096 + 257)).word is Word.WARN


def test_a_warning_comes_first_even_without_grace_and_gives_the_figures() -> None:
    verdict = a_verdict(using(6_000), over_s=None, grace_s=0)
    assert verdict.word is Word.WARN
    assert "6000 MiB are used of GPU-a and 4096 MiB are leased" in verdict.why
    assert "lease at least 6000 MiB" in verdict.why


def test_an_excess_that_stays_beyond_the_grace_is_ended() -> None:
    assert a_verdict(using(6_000), over_s=9.9).word is Word.WARN
    verdict = a_verdict(using(6_000), over_s=10.0)
    assert verdict.word is Word.KILL
    assert "for 10 s" in verdict.why


@pytest.mark.parametrize("device", [None, using(None), a_device(listed=False)])
def test_what_the_driver_does_not_say_is_never_a_reason_to_end(device: Device | None) -> None:
    verdict = a_verdict(device, over_s=1_000)
    assert (verdict.word, verdict.used_mib) == (Word.UNKNOWN, None)


def test_a_peak_shorter_than_the_grace_ends_nothing() -> None:
    watched = Watched()
    words = []
    for now, mib in ((0, 100), (1, 6_000), (8, 6_000), (9, 100), (10, 6_000), (19, 6_000), (20, 6_000)):
        watched.device = using(mib)
        words.append(watched.word(now))
    assert words == [Word.OK, Word.WARN, Word.WARN, Word.OK, Word.WARN, Word.WARN, Word.KILL]


def test_an_excess_counts_only_while_it_is_seen() -> None:
    watched = Watched()
    watched.device = using(6_000)
    assert watched.word(0) is Word.WARN
    watched.away = True
    assert watched.word(5) is Word.UNKNOWN
    watched.away = False
    assert watched.word(100) is Word.WARN
    assert watched.word(110) is Word.KILL


def test_that_it_cannot_judge_is_said_once() -> None:
    watched = Watched()
    watched.device = None
    with capture_logs() as logs:
        for now in range(5):
            watched.word(now)
        watched.device = using(6_000)
        watched.word(6)
        watched.word(7)
        watched.device = using(1)
        watched.word(8)
    assert [entry["event"] for entry in logs] == ["gpu.watch_unknown", "gpu.watch_warn", "gpu.within_lease"]


def test_every_device_of_a_lease_is_judged_by_itself() -> None:
    dog = Watchdog(lambda: OURS, {"GPU-b": 10, "GPU-a": 4_096}, lambda: [using(6_000)])
    assert [(v.uuid, v.word) for v in dog.check(0)] == [("GPU-b", Word.UNKNOWN), ("GPU-a", Word.WARN)]


def test_the_figures_of_a_silent_node_are_not_fresh() -> None:
    nodes = (Node(name="n", agent="a", beat_ms=0), Node(name="m", agent="a", beat_ms=0, silent=True))
    devices = (a_device(node="n"), a_device(node="m"))
    assert fresh(Snapshot(epoch=0, now_ms=0, nodes=nodes, devices=devices)) == [devices[0]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 5), st.integers(0, 6_000)), max_size=30))
def test_nothing_is_ended_that_was_within_its_lease_during_the_grace(steps: list[tuple[float, int]]) -> None:
    watched, now = Watched(), 0.0
    within = 0.0  # when it was last seen within the lease
    for wait_s, mib in steps:
        now += wait_s
        watched.device = using(mib)
        word = watched.word(now)
        if mib <= 4_096 + 256:
            within = now
            assert word is Word.OK
        else:
            assert word is not Word.KILL or now - within >= 10.0
