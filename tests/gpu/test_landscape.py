"""Packing by what later needs could use: the figures of a node, and the choice among nodes."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gpu.policy.demand import FIRST, HALVED, WINDOW, DemandHistory
from pipeline.gpu.policy.difference import difference
from pipeline.gpu.policy.landscape import Landscape
from pipeline.gpu.policy.outlook import Outlook
from pipeline.gpu.policy.shapes import FULL_SHARE, Free, NeedShape, NodeRoom, serves, takes

SIZES = [1000, 400]  # MiB of the devices of each group
WHOLE = Free(1000, 1000, 100, True, 0)
SMALL = Free(1000, 400, 100, True, 1)


def shape(
    devices: int = 1, memory: int = 0, *, cpu: int = 1_000, groups: int = 0b11, percent: int = 0
) -> NeedShape:
    """Exclusive devices where no memory is named."""
    exclusive = devices > 0 and memory == 0
    return NeedShape(devices, memory, percent, exclusive, groups, cpu, 100)


def room(*devices: Free, cpu: int = 8_000, memory: int = 4_000) -> NodeRoom:
    return NodeRoom(cpu, memory, tuple(sorted(devices)))


shapes = st.builds(
    shape,
    st.integers(0, 3),
    st.sampled_from([0, 100, 250, 400]),
    cpu=st.sampled_from([0, 500, 2_000, 6_000]),
    groups=st.sampled_from([0b01, 0b10, 0b11]),
    percent=st.sampled_from([0, 30, 60]),
)
empties = st.builds(
    lambda devices, cpu: room(*devices, cpu=cpu),
    st.lists(st.sampled_from([WHOLE, SMALL]), min_size=1, max_size=4),
    st.sampled_from([2_000, 8_000, 16_000]),
)
forecasts = st.dictionaries(shapes, st.integers(1, 20), min_size=1, max_size=6)


@given(forecasts, st.lists(empties, min_size=1, max_size=5), st.lists(shapes, max_size=25))
def test_a_shape_has_a_node_exactly_when_it_fits_on_one(
    forecast: dict[NeedShape, int], rooms: list[NodeRoom], needs: list[NeedShape]
) -> None:
    land = Landscape(Outlook(forecast, rooms, SIZES), SIZES, dict(enumerate(rooms)))
    now = list(rooms)
    for need in needs:
        fits = [n for n, one in enumerate(now) if list(takes(one, need, SIZES))]
        choice = land.best(need)
        assert (choice is None) == (not fits)
        if choice is None:
            continue
        assert choice.node in fits
        assert len(choice.devices) == need.devices
        assert all(serves(one, need) for one in choice.devices)
        now[choice.node] = dict(takes(now[choice.node], need, SIZES))[choice.devices]
        assert min(now[choice.node].cpu_milli, now[choice.node].memory_mib) >= 0
        assert all(
            min(one.memory_mib, one.compute_percent, one.share) >= 0 for one in now[choice.node].devices
        )
        land.move(choice.node, now[choice.node])


@given(forecasts, st.lists(empties, min_size=1, max_size=5), st.data())
def test_a_landscape_that_followed_every_change_chooses_as_one_that_is_new(
    forecast: dict[NeedShape, int], rooms: list[NodeRoom], data: st.DataObject
) -> None:
    outlook = Outlook(forecast, rooms, SIZES)
    followed, now = Landscape(outlook, SIZES, dict(enumerate(rooms))), dict(enumerate(rooms))
    for _ in range(data.draw(st.integers(1, 12))):
        need = data.draw(shapes)
        fresh = Landscape(Outlook(forecast, rooms, SIZES), SIZES, now)
        assert followed.best(need) == fresh.best(need)
        node = data.draw(st.sampled_from(sorted(now)))
        ways = list(takes(now[node], need, SIZES))
        now[node] = ways[0][1] if ways and data.draw(st.booleans()) else rooms[node]
        followed.move(node, now[node])


@given(forecasts, st.lists(empties, min_size=1, max_size=4), st.lists(shapes, max_size=8))
def test_fragments_and_worth_lie_between_nothing_and_all_that_is_free(
    forecast: dict[NeedShape, int], rooms: list[NodeRoom], needs: list[NeedShape]
) -> None:
    outlook, now = Outlook(forecast, rooms, SIZES), rooms[0]
    for need in needs:
        now = next((after for _, after in takes(now, need, SIZES)), now)
        free = sum(one.share for one in now.devices)
        assert -1e-6 <= outlook.fragments(now) <= free + 1e-6
        assert 0 <= outlook.worth(now) <= free


def test_a_node_without_cpu_has_nothing_but_fragments() -> None:
    outlook = Outlook({shape(cpu=2_000): 3, shape(memory=300, cpu=1_000): 5}, [room(WHOLE, WHOLE)], SIZES)
    assert outlook.fragments(room(WHOLE, WHOLE, cpu=0)) == pytest.approx(2 * FULL_SHARE)
    assert outlook.fragments(room(WHOLE, WHOLE)) == 0
    assert outlook.worth(room(WHOLE, WHOLE, cpu=0)) == 0
    assert outlook.worth(room(WHOLE, WHOLE)) > 0


def test_work_that_needs_little_leaves_the_node_that_only_a_rare_need_can_use() -> None:
    """One need of twenty asks for 7 cores beside its GPU, and one node of two has them."""
    common, rare = shape(memory=400, cpu=1_000), shape(cpu=7_000)
    rooms = [room(WHOLE, cpu=8_000), room(WHOLE, cpu=4_000)]
    land = Landscape(Outlook({common: 19, rare: 1}, rooms, SIZES), SIZES, dict(enumerate(rooms)))
    choice = land.best(common)
    assert choice is not None
    assert choice.node == 1


def test_a_share_goes_to_the_device_that_no_other_need_can_use() -> None:
    """250 fit on the whole device and on the one with 300 left; whole devices are asked for most."""
    used = Free(300, 300, 100, False, 0)
    rooms = [room(WHOLE), room(used)]
    outlook = Outlook({shape(): 10, shape(memory=250): 1}, [room(WHOLE)], SIZES)
    choice = Landscape(outlook, SIZES, dict(enumerate(rooms))).best(shape(memory=250))
    assert choice is not None
    assert (choice.node, choice.devices) == (1, (used,))
    assert choice.fragments < 0


def test_more_kinds_of_node_than_are_remembered_change_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    rooms = [room(WHOLE, WHOLE, SMALL, cpu=chance.randrange(4_000, 64_000)) for _ in range(40)]
    counts = {shape(): 3, shape(memory=250): 5, shape(2): 1, shape(memory=100, cpu=3_000): 4}
    outlook = Outlook(counts, rooms, SIZES)

    def run() -> list[tuple[int, int]]:
        land, chosen = Landscape(outlook, SIZES, dict(enumerate(rooms))), []
        order = random.Random(6)
        for _ in range(150):
            need = order.choice(list(counts))
            choice = land.best(need)
            if choice is not None:
                chosen.append((choice.node, round(choice.loss)))
                land.move(choice.node, dict(takes(land.room(choice.node), need, SIZES))[choice.devices])
        return chosen

    endless = run()
    assert len(endless) > 100
    monkeypatch.setattr("pipeline.gpu.policy.landscape.REMEMBERED", 60)
    assert run() == endless


def test_a_history_learns_soon_changes_seldom_and_forgets() -> None:
    history: DemandHistory[str] = DemandHistory()
    changed = [n for n in range(1, 20_001) if history.add("old" if n <= 10_000 else "new")]
    assert changed[:4] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    assert max(b - a for a, b in pairwise(changed)) == WINDOW
    assert history.counts.total() <= HALVED + WINDOW
    assert history.counts["old"] < 0.02 * history.counts["new"]


def test_a_history_counts_what_came() -> None:
    history: DemandHistory[str] = DemandHistory()
    chance = random.Random(1)
    for _ in range(5_000):
        history.add("a" if chance.random() < 0.9 else "b")
    share = history.counts["a"] / history.counts.total()
    assert share == pytest.approx(0.9, abs=0.03)
    assert Counter(history.window).total() < WINDOW


@given(st.lists(st.integers(0, 40), unique=True, max_size=30), st.data())
def test_the_difference_of_two_sequences_is_told_by_identity(numbers: list[int], data: st.DataObject) -> None:
    before = [object() for _ in numbers]
    now = [one for one in before if data.draw(st.integers(0, 5))]
    for _ in range(data.draw(st.integers(0, 10))):
        now.insert(data.draw(st.integers(0, len(now))), object())
    if data.draw(st.booleans()):
        now = data.draw(st.permutations(now))
    gone, new = difference(before, now)
    assert set(gone) == set(before) - set(now)
    assert set(new) == set(now) - set(before)
    assert len(gone) == len(set(gone))
    assert len(new) == len(set(new))
