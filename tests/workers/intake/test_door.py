"""The door: requests gather, are in once, and are answered only when they are decided."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.records.batch import SEVERAL, digest, utc_now
from pipeline.records.delivery import NO_IDENTITY, Accepted, Full
from pipeline.records.pushed import PushedRecords, column_of
from pipeline.redis.connection import connect
from pipeline.service.senders import SentBy
from pipeline.settings import Settings
from pipeline.sources.protocols.contract import Decoded, Undecodable
from pipeline.workers.intake import door as door_module
from pipeline.workers.intake import identity
from pipeline.workers.intake.batches import CountedRecords, lines_and_bytes, window_batches
from pipeline.workers.intake.door import Door, IdentityConflict
from pipeline.workers.intake.taking import Turns

NOW = utc_now()
SENDER = SentBy(protocol="lines", key="", peer="")


def decoded(*messages: str, workload: str = "shop") -> Decoded:
    return Decoded(
        records=PushedRecords(list(messages), workloads=[workload] * len(messages)), distinct=False
    )


def counted(*requests: PushedRecords) -> list[CountedRecords]:
    return [CountedRecords(records, *lines_and_bytes(records)) for records in requests]


def door_of(settings: Settings) -> Door:
    ledger = Ledger(connect(settings), settings)
    return Door(Producer(ledger, Submit(None, ledger.client, settings), settings))


def with_door(settings: Settings, use: Callable[[Door], Awaitable[Any]]) -> Any:
    """Everything that `use` answers, on a door of its own that is closed afterwards."""

    async def run() -> Any:
        door = door_of(settings)
        try:
            return await use(door)
        finally:
            await door.close()

    return asyncio.run(run())


def accepted(settings: Settings, workload: str = "shop") -> int:
    ledger = Ledger(connect(settings), settings)
    return ledger.backlog.totals().get(workload, {}).get("accepted", 0)


def batches(settings: Settings) -> int:
    ledger = Ledger(connect(settings), settings)
    return int(ledger.client.zcard(ledger.keys.due))  # type: ignore[arg-type]


def test_requests_of_a_moment_become_one_batch_whatever_their_workloads(settings: Settings) -> None:
    async def use(door: Door) -> Any:
        return await asyncio.gather(
            *(door.take(decoded(f"line {n}"), sender=SENDER) for n in range(20)),
            door.take(decoded("x", workload="till"), sender=SENDER),
        )

    answers = with_door(settings, use)
    assert all(isinstance(answer, Accepted) for answer in answers)
    assert (accepted(settings), accepted(settings, "till"), batches(settings)) == (20, 1, 1)


def test_a_lone_request_does_not_wait_for_a_window(settings: Settings) -> None:
    async def use(door: Door) -> float:
        await door.take(decoded("warm"), sender=SENDER)  # loads the script
        assert door._window is not None
        door._window.committed = float("-inf")
        began = time.monotonic()
        await door.take(decoded("x"), sender=SENDER)
        return time.monotonic() - began

    assert with_door(settings, use) < door_module.WINDOW_S


def test_commits_of_few_records_and_those_of_a_pipeline_that_lags_are_further_apart(
    settings: Settings,
) -> None:
    async def use(door: Door) -> list[float]:
        pauses = []
        for records in (1, 500, *[1_000] * 17):
            await door.take(decoded(*map(str, range(records))), sender=SENDER)
            window = door._window
            assert window is not None
            window.committed = float("-inf")
            pauses.append(window.pause_s)
        return pauses

    few, some, *many = with_door(settings, use)
    assert few == pytest.approx(0.25, rel=0.01) and some == pytest.approx(0.125)
    assert door_module.SHORT_S < many[0] < 0.1 and many == sorted(many) and 0.15 < many[-1] < 0.25


def test_a_request_that_comes_again_is_a_duplicate_whatever_its_window(settings: Settings) -> None:
    one = identity.of_body(b"body", distinct=True)

    async def use(door: Door) -> Any:
        first = await asyncio.gather(
            door.take(decoded("a"), identity=one, sender=SENDER), door.take(decoded("b"), sender=SENDER)
        )
        again = await asyncio.gather(
            door.take(decoded("c"), sender=SENDER), door.take(decoded("a"), identity=one, sender=SENDER)
        )
        other_process = await door_of(settings).take(decoded("a"), identity=one, sender=SENDER)
        return [answer.duplicate for answer in (*first, *again, other_process)]

    assert with_door(settings, use) == [False, False, False, True, True]
    assert accepted(settings) == 3


def test_two_equal_requests_in_one_window_are_in_once(settings: Settings) -> None:
    one = identity.of_body(b"body", distinct=True)

    async def use(door: Door) -> Any:
        return await asyncio.gather(*(door.take(decoded("a"), identity=one, sender=SENDER) for _ in range(3)))

    assert sorted(answer.duplicate for answer in with_door(settings, use)) == [False, True, True]
    assert accepted(settings) == 1


def test_records_that_come_again_with_others_are_left_out(settings: Settings) -> None:
    def take(door: Door, *messages: str) -> Awaitable[Any]:
        own = identity.of_records([message.encode() for message in messages])
        return door.take(decoded(*messages), identity=own, sender=SENDER)

    async def use(door: Door) -> Any:
        answers = [
            await take(door, "a", "b"),
            await take(door, "b", "c"),
            await take(door_of(settings), "c"),
            # Records of one request may be equal, and two requests of a window may share some.
            *await asyncio.gather(take(door, "d", "d"), take(door, "d", "d", "d"), take(door, "e")),
        ]
        return [answer.duplicate for answer in answers]

    assert with_door(settings, use) == [False, False, True, False, False, False]
    ledger = Ledger(connect(settings), settings)
    ids = [name.decode() for name in ledger.client.zrange(ledger.keys.due, 0, -1)]
    texts = [text for batch_id in ids for text in ledger.payload(batch_id).texts]  # type: ignore[union-attr]
    assert sorted(texts) == ["a", "b", "c", "d", "d", "d", "e"]


def test_equal_records_are_told_apart_by_their_order_alone() -> None:
    def named(*texts: bytes, key: str = "k", path: str = "/_bulk") -> tuple[bytes, ...]:
        return identity.of_records(texts, key=key, path=path).records

    first, other, second, third = named(b"a", b"b", b"a", b"a")
    assert len({first, other, second, third}) == 4
    assert named(b"a", b"a", b"b") == (first, second, other) and named(b"a") == (first,)
    assert named(b"a", key="l") != named(b"a") != named(b"a", path="/relp")
    # The bytes are those of an earlier build's names, which stand in another key and are not read.
    assert second.hex() == digest("record", "k", "/_bulk", "1", b"a", size=16)
    assert first.hex() == digest("record", "k", "/_bulk", "0", b"a", size=16)


def test_a_request_of_many_records_has_the_identity_of_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MOST_APART", 2)
    for count, found in ((0, (0, True)), (1, (1, False)), (2, (2, False)), (3, (0, True))):
        apart = [str(n).encode() for n in range(count)]
        request = Decoded(records=PushedRecords([""] * count), distinct=True, apart=apart)
        of_request = identity.of_request(request, b"body")
        assert (len(of_request.records), bool(of_request.name)) == found
    nothing = identity.of_request(Decoded(records=PushedRecords(["a"]), distinct=False), b"body")
    assert nothing == NO_IDENTITY


def test_a_declared_key_with_another_body_is_a_conflict(settings: Settings) -> None:
    async def use(door: Door) -> Any:
        await door.take(decoded("a"), identity=identity.declared("k", b"a"), sender=SENDER)
        same = await door.take(decoded("a"), identity=identity.declared("k", b"a"), sender=SENDER)
        with pytest.raises(IdentityConflict, match="used for another body"):
            await door.take(decoded("b"), identity=identity.declared("k", b"b"), sender=SENDER)
        other_sender = identity.declared("k", b"b", key="ours")
        return same, await door.take(decoded("b"), identity=other_sender, sender=SENDER)

    same, other = with_door(settings, use)
    assert same.duplicate and not other.duplicate and accepted(settings) == 2


def test_full_is_answered_after_two_seconds_of_patience_and_room_ends_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = settings.replace(max_pending_batches=1)
    waiting_for = 0.4
    monkeypatch.setattr(door_module, "PATIENCE_S", waiting_for)
    monkeypatch.setattr(door_module, "RETRY_S", 0.02)

    async def use(door: Door) -> Any:
        await door.take(decoded("first"), sender=SENDER)
        began = time.monotonic()
        full = await door.take(decoded("second"), sender=SENDER)
        patience = time.monotonic() - began
        again = asyncio.ensure_future(door.take(decoded("third"), sender=SENDER))
        await asyncio.sleep(0)
        keys = door.producer.ledger.keys
        door.producer.ledger.client.hset(keys.counts, mapping={"batches": 0, "bytes": 0})
        return full, patience, await again

    full, patience, again = with_door(small, use)
    assert isinstance(full, Full) and full.reason == "batches" and patience >= waiting_for
    assert isinstance(again, Accepted) and accepted(settings) == 2


def test_a_closed_gate_is_answered_at_once(settings: Settings) -> None:
    async def use(door: Door) -> Any:
        door.producer.ledger.intake.pause("maintenance")
        began = time.monotonic()
        return await door.take(decoded("x"), sender=SENDER), time.monotonic() - began

    answer, seconds = with_door(settings, use)
    assert answer.reason == "closed" and seconds < door_module.PATIENCE_S


def test_a_lost_answer_of_redis_repeats_the_same_batches(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "RETRY_S", 0.01)

    async def use(door: Door) -> Any:
        accept_all, lost = door.producer.accept_all, []

        def loses_the_first(*args: Any, **kwargs: Any) -> Any:
            answer = accept_all(*args, **kwargs)
            if not lost:
                lost.append(answer)
                raise RedisUnavailable("the answer was lost")
            return answer

        monkeypatch.setattr(door.producer, "accept_all", loses_the_first)
        return await asyncio.gather(
            door.take(decoded("a"), sender=SENDER),
            door.take(decoded("b"), identity=identity.of_body(b"b", distinct=True), sender=SENDER),
        )

    assert [answer.duplicate for answer in with_door(settings, use)] == [False, False]
    assert accepted(settings) == 2


def test_a_process_holds_a_bounded_number_of_bytes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "HELD_BYTES", 100)

    async def use(door: Door) -> Any:
        blocked = threading.Event()
        accept_all = door.producer.accept_all

        def waits(*args: Any, **kwargs: Any) -> Any:
            blocked.wait(10)
            return accept_all(*args, **kwargs)

        monkeypatch.setattr(door.producer, "accept_all", waits)
        first = asyncio.ensure_future(door.take(decoded("x" * 90), sender=SENDER))
        while not door.held:
            await asyncio.sleep(0)
        second = await door.take(decoded("y" * 90), sender=SENDER)
        blocked.set()
        return await first, second

    first, second = with_door(settings, use)
    assert isinstance(first, Accepted) and isinstance(second, Full) and second.reason == "process"
    assert "send again in a moment" in str(second)


def test_text_that_is_none_is_refused_and_spoils_no_other_request(settings: Settings) -> None:
    async def use(door: Door) -> Any:
        return await asyncio.gather(
            door.take(decoded("fine"), sender=SENDER),
            door.take(decoded("bad \ud800"), sender=SENDER),
            return_exceptions=True,
        )

    fine, bad = with_door(settings, use)
    assert isinstance(fine, Accepted) and isinstance(bad, Undecodable)


def test_one_request_that_cannot_be_packed_does_not_spoil_its_window(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(requests: Sequence[CountedRecords], **limits: Any) -> Any:
        if any("poison" in (records.messages[0] or "") for records, *_ in requests):
            raise ValueError("it cannot be packed")
        return window_batches(requests, **limits)

    monkeypatch.setattr(door_module, "window_batches", fails)

    async def use(door: Door) -> Any:
        return await asyncio.gather(
            door.take(decoded("fine"), sender=SENDER),
            door.take(decoded("poison"), sender=SENDER),
            return_exceptions=True,
        )

    fine, bad = with_door(settings, use)
    assert isinstance(fine, Accepted) and isinstance(bad, ValueError) and accepted(settings) == 1


def test_an_empty_request_is_a_success_without_a_batch(settings: Settings) -> None:
    assert isinstance(with_door(settings, lambda d: d.take(decoded(), sender=SENDER)), Accepted)
    assert batches(settings) == 0


def test_records_keep_their_columns_and_order_when_they_are_grouped_and_cut() -> None:
    first = PushedRecords(["a1", "b1", "a2"], levels=["info", None, "error"], workloads=["a", "b", "a"])
    second = PushedRecords([None, "a3"], raws=["raw b2", None], workloads=["b", "a"])
    found = window_batches(counted(first, second), arrived=NOW, zone="UTC", max_records=3, max_bytes=10**6)
    columns = ("messages", "levels", "raws", "workloads", "places")
    assert [(b.workload, *(getattr(b.records, name) for name in columns)) for b in found] == [
        (SEVERAL, ["a1", "b1", "a2"], ["info", None, "error"], [None] * 3, ["a", "b", "a"], None),
        (SEVERAL, [None, "a3"], [None, None], ["raw b2", None], ["b", "a"], None),
    ]
    assert len({b.batch_id for b in found}) == len({b.source_key for b in found}) == 2


def test_a_workload_of_many_records_and_one_that_is_skipped_have_batches_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.workers.intake.batches.OWN_RECORDS", 3)
    one = PushedRecords(list("abcdef"), workloads=["many", "few", "many", "off", "many", "other"])
    found = window_batches(
        counted(one),
        arrived=NOW,
        zone="UTC",
        max_records=9,
        max_bytes=10**6,
        alone=lambda name: name == "off",
    )
    assert [(b.workload, b.records.messages, b.records.workloads) for b in found] == [  # type: ignore[union-attr]
        ("many", ["a", "c", "e"], None),
        ("off", ["d"], None),
        (SEVERAL, ["b", "f"], ["few", "other"]),
    ]


def test_a_group_larger_than_a_batch_may_be_is_cut_by_bytes() -> None:
    wide = PushedRecords(["x" * 400, "y" * 400, "z" * 400], workloads=["w"] * 3)
    found = window_batches(counted(wide), arrived=NOW, zone="UTC", max_records=100, max_bytes=900)
    assert [len(b.records.messages) for b in found] == [2, 1]  # type: ignore[union-attr]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5), st.booleans()), min_size=1, max_size=8))
def test_requests_of_one_workload_each_make_the_same_batches_as_their_records_one_by_one(
    several: list[tuple[str, int, bool]],
) -> None:
    requests = counted(
        *(
            PushedRecords(
                [None if parsed_later else f"{name} {n}\nat {row}" for row in range(height)],
                raws=[f"raw {name} {n} {row}" for row in range(height)] if parsed_later else None,
                hosts=[name] * height if n % 2 else None,
                workloads=[name] * height,
            )
            for n, (name, height, parsed_later) in enumerate(several)
        )
    )

    # Where only some have raw texts, messages count twice beside a foreign raw text.
    alike = len({parsed_later for *_, parsed_later in several}) == 1

    def batches_of() -> list[tuple[Any, ...]]:
        found = window_batches(
            requests,
            arrived=NOW,
            zone="UTC",
            max_records=9,
            max_bytes=200 if alike else 10**6,
            alone=lambda name: name == "d",
        )
        return [(one.workload, one.records, one.physical_lines) for one in found]

    def filled(records: PushedRecords) -> list[Any]:
        return [records.messages, *(column and column_of(list(column)) for column in records.columns)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.workers.intake.batches.OWN_RECORDS", 6)
        as_whole = batches_of()
        patch.setattr("pipeline.workers.intake.batches._whole_requests", lambda *_: None)
        one_by_one = batches_of()
    for (name, records, lines), (expected, others, counted_lines) in zip(as_whole, one_by_one, strict=True):
        assert (name, filled(records), lines) == (expected, filled(others), counted_lines)
    assert all(lines == records.lines for _, records, lines in as_whole)


def test_a_name_that_cannot_be_a_key_is_made_one(settings: Settings) -> None:
    odd = decoded("x", workload="shop\n" + "w" * 300)
    with_door(settings, lambda door: door.take(odd, sender=SENDER))
    assert accepted(settings, "shop_" + "w" * 195) == 1


def test_small_requests_begin_in_one_iteration_of_the_loop_when_their_window_ends() -> None:
    async def use() -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + 0.05
        turns = Turns(lambda: due)
        iterations, ended = 0, False
        began: list[tuple[int, float]] = []

        async def count() -> None:
            nonlocal iterations
            while not ended:
                iterations += 1
                await asyncio.sleep(0)

        async def request() -> None:
            await turns.begin(100)
            began.append((iterations, loop.time()))

        counting = asyncio.create_task(count())
        await asyncio.gather(*(request() for _ in range(10)))
        ended = True
        await counting
        assert len({iteration for iteration, _ in began}) == 1 and len(began) == 10
        assert min(at for _, at in began) >= due

    asyncio.run(use())


@pytest.mark.parametrize(("requests", "size"), [(64, 100), (8, 32 << 10), (1, 256 << 10)])
def test_a_turn_of_many_requests_or_bytes_waits_for_no_window(requests: int, size: int) -> None:
    async def use() -> None:
        turns = Turns(lambda: float("inf"))
        few = asyncio.gather(*(turns.begin(size - 1) for _ in range(requests - 1)))
        await asyncio.sleep(0)
        assert requests == 1 or not few.done()
        async with asyncio.timeout(5):
            await asyncio.gather(turns.begin(size + requests), few)

    asyncio.run(use())


def test_no_request_waits_for_its_turn_while_the_process_ends() -> None:
    async def use() -> None:
        turns = Turns(lambda: float("inf"))
        waits = asyncio.create_task(turns.begin(100))
        await asyncio.sleep(0)
        turns.close()
        async with asyncio.timeout(5):
            await waits
            await turns.begin(100)

    asyncio.run(use())


def test_requests_that_wait_for_their_turn_come_to_the_window_that_ends(settings: Settings) -> None:
    async def use(door: Door) -> None:
        door.turns._due = lambda: float("inf")

        async def small(text: str) -> None:
            await door.turns.begin(100)
            await door.take(decoded(text), sender=SENDER)

        await asyncio.gather(small("a"), small("b"), door.take(decoded("large"), sender=SENDER))

    with_door(settings, use)
    assert (accepted(settings), batches(settings)) == (3, 1)


def test_a_request_is_answered_whatever_the_wait_for_a_full_pipeline_raises(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(door: Door) -> tuple[object, int]:
        door.producer.send(["one"], workload="w", batch_id="b")  # the pipeline is full now

        def broken() -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(door.producer.ledger.intake, "full", broken)
        async with asyncio.timeout(10):
            with pytest.raises(OSError, match="Too many open files"):
                await door.take(decoded("two"), sender=SENDER)
            again = asyncio.gather(door.take(decoded("three"), sender=SENDER), return_exceptions=True)
            return (await again)[0], door.held

    error, held = with_door(settings.replace(max_pending_batches=1), use)
    assert isinstance(error, OSError) and held == 0
