"""Leases under torture, in small (scripts/bench gpu-lease does 10,000 operations); and the judge of it, who
must not sleep."""

from pathlib import Path
from typing import Any

import pytest

from bench import _evidence, _torture
from bench._evidence import judge
from bench._torture import Torture
from pipeline.gpu.leasing import wire as pool_wire
from pipeline.gpu.values import LeaseMode, LeasePart, LeaseState, Need, PoolLease

DEVICE = _evidence.devices(1)[0].uuid
NOTHING = {"two_holders": 0, "over_capacity": 0, "stale_tokens": 0, "wrong_answers": 0}


@pytest.mark.long
def test_leases_hold_while_processes_are_killed_and_stopped_and_redis_is_restarted(tmp_path: Path) -> None:
    found = _torture.run(
        tmp_path, Torture(operations=400, processes=3, kills=2, stops=1, restarts=1, most_s=60)
    )
    assert {name: found[name] for name in NOTHING} == NOTHING, found
    assert (found["capacity_lost"], found["capacity_late"], found["agent_faults"]) == (0, 0, 0), found
    assert (found["kills"], found["stops"], found["restarts"]) == (2, 1, 1), found
    assert found["operations"] >= 400, found
    # It was torture: somebody died with a lease in hand, and what had ended was tried again.
    assert found["killed_while_holding"] > 0, found
    done = found["operations_by_name"]
    assert found["uses"] > 0, found
    assert all(done.get(f"stale_{name}", 0) > 0 for name in ("renew", "activate", "release")), found
    assert not done.keys() & {"refused", "away", "lost", "too_late"}, found


class Story:
    """Evidence by hand: who used the device when."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def use(self, begin: int, end: int | None, token: int, need: Need, pid: int = 1) -> "Story":
        part = LeasePart(
            uuid=DEVICE,
            memory_mib=need.memory_mib or _evidence.MIB,
            compute_percent=need.compute_percent or 100,
            token=token,
        )
        lease = PoolLease(
            lease_id=f"l{token}-{begin}",
            holder=f"h{pid}",
            need=need,
            parts=(part,),
            state=LeaseState.ACTIVE,
            granted_ms=0,
            deadline_ms=0,
            ttl_ms=1,
        )
        self.lines.append({"t": begin, "pid": pid, "what": "begin", "lease": pool_wire.encode(lease)})
        if end is not None:
            self.lines.append({"t": end, "pid": pid, "what": "end", "lease_id": lease.lease_id})
        self.lines.sort(key=lambda line: line["t"])
        return self


WHOLE = Need(mode=LeaseMode.EXCLUSIVE)
HALF = Need(memory_mib=8_000, compute_percent=50)


def test_the_judge_finds_nothing_where_nothing_is() -> None:
    story = Story().use(1, 5, 1, WHOLE).use(5, 9, 2, HALF).use(6, 8, 3, HALF).use(9, 12, 4, WHOLE)
    assert judge(story.lines, 1) == NOTHING


@pytest.mark.parametrize(
    ("story", "fault"),
    [
        (Story().use(1, 5, 1, WHOLE).use(4, 6, 2, WHOLE), "two_holders"),
        (Story().use(1, 5, 1, WHOLE).use(4, 6, 2, HALF), "two_holders"),
        (Story().use(1, 5, 1, HALF).use(4, 6, 2, WHOLE), "two_holders"),
        (Story().use(1, 9, 1, HALF).use(2, 9, 2, HALF).use(3, 9, 3, HALF), "over_capacity"),
        (Story().use(1, 5, 2, WHOLE).use(6, 7, 1, HALF), "stale_tokens"),
        (Story().use(1, 5, 2, HALF).use(6, 7, 2, WHOLE), "stale_tokens"),
    ],
)
def test_the_judge_finds_what_must_not_be(story: Story, fault: str) -> None:
    assert judge(story.lines, 1)[fault] > 0


def test_a_killed_process_uses_nothing_from_then_on() -> None:
    story = Story().use(1, None, 1, WHOLE, pid=7).use(4, 6, 2, WHOLE, pid=8)
    assert judge(story.lines, 1)["two_holders"] == 1
    story.lines.append({"t": 9, "pid": 0, "what": "killed", "victim": 7, "at": 3})
    assert judge(story.lines, 1) == NOTHING


def test_an_accepted_stale_token_is_counted() -> None:
    said = [{"t": 1, "pid": 1, "what": "op", "name": "stale_renew", "wrong": 1}]
    assert judge(said, 1)["stale_tokens"] == 1
