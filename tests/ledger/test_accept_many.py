"""Several requests in one step: all or none, each once, under the limits of a single batch."""

import uuid
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import redis
from crash_points import check_sums, snapshot

from pipeline.errors import CursorMoved
from pipeline.ledger import intake
from pipeline.ledger.intake import CursorStep
from pipeline.ledger.ledger import Ledger
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.records.batch import SEVERAL, Batch, Purpose, utc_now
from pipeline.records.delivery import Accepted, Claim, Full, Known, RequestIdentity, Stage
from pipeline.records.pushed import PushedRecords
from pipeline.redis.connection import connect
from pipeline.settings import Settings


def batch(name: str, *messages: str, workload: str = "shop") -> Batch:
    return Batch(
        batch_id=name, workload=workload, source="intake", source_key="0" * 16, purpose=Purpose.SCORE,
        arrived=utc_now(), formats=(), zone="UTC", records=PushedRecords(list(messages or ("a line",))),
    )  # fmt: skip


def waiting(ledger: Ledger) -> set[str]:
    return {name.decode() for name in ledger.client.zrange(ledger.keys.due, 0, -1)}  # type: ignore[union-attr]


def test_batches_of_one_step_are_in_together_and_counted_by_workload(ledger: Ledger) -> None:
    ours = [batch("b1", "x", "y"), batch("b2", workload="till")]
    answer = ledger.intake.accept_all(ours, [RequestIdentity(name="r1"), RequestIdentity(name="r2")])
    assert answer == Accepted(batch_id="b1") and isinstance(answer, Accepted) and answer.pending_batches == 2
    totals = ledger.backlog.totals()
    assert {name: t["accepted"] for name, t in totals.items()} == {"shop": 2, "till": 1}
    assert waiting(ledger) == {"b1", "b2"}


def test_a_known_request_takes_nothing_in_and_is_named(ledger: Ledger) -> None:
    ledger.intake.accept_all([batch("b1")], [RequestIdentity(name="r1", body="one")])
    asked = [
        RequestIdentity(),
        RequestIdentity(name="r1", body="one"),
        RequestIdentity(name="r1", body="other"),
    ]
    assert ledger.intake.accept_all([batch("b2")], asked) == Known(duplicates=(1,), conflicts=(2,))
    assert waiting(ledger) == {"b1"}


def test_the_same_batches_again_are_in_once_although_their_requests_are_known(ledger: Ledger) -> None:
    ours, asked = [batch("b1"), batch("b2")], [RequestIdentity(name="r1"), RequestIdentity()]
    ledger.intake.accept_all(ours, asked)
    assert ledger.intake.accept_all(ours, asked) == Accepted(batch_id="b1", duplicate=True)
    assert ledger.backlog.totals()["shop"]["accepted"] == 2


def test_requests_without_an_identity_are_never_duplicates(ledger: Ledger) -> None:
    for name in ("b1", "b2"):
        assert isinstance(ledger.intake.accept_all([batch(name)], [RequestIdentity()]), Accepted)
    assert waiting(ledger) == {"b1", "b2"} and not ledger.client.exists(ledger.keys.intake("young"))


def test_a_closed_gate_takes_neither_batches_nor_identities(ledger: Ledger) -> None:
    ledger.intake.pause("maintenance")
    answer = ledger.intake.accept_all([batch("b1")], [RequestIdentity(name="r1")])
    assert isinstance(answer, Full) and answer.reason == "closed"
    ledger.intake.resume()
    assert isinstance(ledger.intake.accept_all([batch("b1")], [RequestIdentity(name="r1")]), Accepted)


def test_the_limit_of_waiting_batches_holds_for_all_of_a_step_together(settings: Settings) -> None:
    small = settings.replace(max_pending_batches=3)
    ledger = Ledger(connect(small), small)
    ledger.intake.accept_all([batch("b1"), batch("b2")], [RequestIdentity()])
    answer = ledger.intake.accept_all([batch("b3"), batch("b4")], [RequestIdentity()])
    assert isinstance(answer, Full) and answer.reason == "batches"
    assert waiting(ledger) == {"b1", "b2"}
    assert isinstance(ledger.intake.accept_all([batch("b3")], [RequestIdentity()]), Accepted)


def test_skipped_batches_are_counted_and_do_not_wait(ledger: Ledger) -> None:
    ours = [batch("b1"), batch("b2", workload="noise")]
    ledger.intake.accept_all(ours, [RequestIdentity()], skip={"b2"})
    assert waiting(ledger) == {"b1"}
    assert ledger.backlog.totals()["noise"]["skipped"] == 1


def test_identities_outlive_one_rotation_and_their_number_is_bounded(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_IDENTITIES", 4)  # three, and when the slot began

    def send(name: str) -> Accepted | Full | Known:
        return ledger.intake.accept_all([batch(uuid.uuid4().hex)], [RequestIdentity(name=name)])

    for name in ("r1", "r2", "r3"):
        assert isinstance(send(name), Accepted)
    assert send("r1") == send("r3") == Known(duplicates=(0,), conflicts=())
    for name in ("r4", "r5", "r6", "r7"):
        send(name)
    assert isinstance(send("r1"), Accepted)
    early = ledger.client.hget(ledger.keys.counts, "identities_early")
    assert early is not None and int(early) == 2  # type: ignore[arg-type]
    ttl = ledger.client.pttl(ledger.keys.intake("young"))
    assert 0 < int(ttl) <= 2 * intake.IDENTITY_SLOT_MS  # type: ignore[arg-type]


def test_a_slot_that_is_over_becomes_the_old_one(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "IDENTITY_SLOT_MS", 1)
    ledger.intake.accept_all([batch("b1")], [RequestIdentity(name="r1")])
    # Redis forgets both by itself, two slots after they began.
    deadline = ledger.client.time()
    while ledger.client.exists(ledger.keys.intake("young")):
        assert ledger.client.time()[0] - deadline[0] < 10  # type: ignore[index]
    assert isinstance(ledger.intake.accept_all([batch("b2")], [RequestIdentity(name="r1")]), Accepted)


def of_records(*numbers: int) -> RequestIdentity:
    return RequestIdentity(records=tuple(number.to_bytes(16, "big") for number in numbers))


def test_records_that_are_in_are_named_by_their_places_among_those_of_all_requests(ledger: Ledger) -> None:
    ledger.intake.accept_all([batch("b1")], [of_records(1, 2), RequestIdentity(name="r1")])
    asked = [of_records(3, 2), RequestIdentity(name="r1"), of_records(), of_records(4, 1)]
    answer = ledger.intake.accept_all([batch("b2")], asked)
    assert isinstance(answer, Known) and waiting(ledger) == {"b1"}
    assert (answer.duplicates, answer.conflicts, set(answer.records)) == ((1,), (), {1, 3})
    assert isinstance(ledger.intake.accept_all([batch("b2")], [of_records(3), of_records(4)]), Accepted)


# Requests of some windows: the numbers of their records, of which no request has one twice.
_WINDOWS = st.lists(
    st.lists(st.integers(0, 9), max_size=12, unique=True).map(lambda numbers: [numbers[:5], numbers[5:]]),
    min_size=2,
    max_size=8,
)


@hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(windows=_WINDOWS)
def test_a_record_is_in_once_in_whatever_company_it_comes_again(
    ledger: Ledger, settings: Settings, windows: list[list[list[int]]]
) -> None:
    other = Ledger(connect(settings), settings)
    own = uuid.uuid4().int >> 8 << 8  # each example has records of its own
    stored: set[int] = set()
    for window, process in zip(windows, [ledger, other] * len(windows), strict=False):
        asked = [of_records(*(own + number for number in numbers)) for numbers in window]
        flat = [number for numbers in window for number in numbers]
        answer = process.intake.accept_all([batch(uuid.uuid4().hex)], asked)
        if known := stored.intersection(flat):
            assert isinstance(answer, Known) and {flat[place] for place in answer.records} == known
            asked = [of_records(*(own + number for number in flat if number not in known))]
            answer = process.intake.accept_all([batch(uuid.uuid4().hex)], asked)
        assert isinstance(answer, Accepted)
        stored.update(flat)


def test_a_record_and_a_request_of_one_name_are_not_the_same(ledger: Ledger) -> None:
    name = "r" * 16
    ledger.intake.accept_all([batch("b1")], [RequestIdentity(name=name)])
    record = RequestIdentity(records=(name.encode(),))
    assert isinstance(ledger.intake.accept_all([batch("b2")], [record]), Accepted)


def test_more_identities_than_lua_takes_in_one_call_are_each_known(ledger: Ledger) -> None:
    records, count = of_records(*range(9_001)), 5_003
    named = [RequestIdentity(name=f"r{n}", body=f"b{n}") for n in range(count)]
    assert isinstance(ledger.intake.accept_all([batch("b1")], [records, *named]), Accepted)
    again = ledger.intake.accept_all([batch("b2")], [*named, records])
    assert isinstance(again, Known) and not again.conflicts
    assert again.duplicates == tuple(range(count)) and again.records == tuple(range(9_001))
    # One alone, behind the end of the first calls and among new ones.
    new = [RequestIdentity(name=f"n{n}") for n in range(4_000)]
    other = replace(named[-1], body="other")
    asked = [of_records(*range(20_000, 25_000), 9_000), *new, named[-1], other]
    answer = ledger.intake.accept_all([batch("b2")], asked)
    assert answer == Known(duplicates=(4_001,), conflicts=(4_002,), records=(5_000,))
    assert waiting(ledger) == {"b1"}


def test_identities_of_records_and_requests_rotate_together(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_IDENTITIES", 6)  # five, and when the slot began

    def send(*asked: RequestIdentity) -> Accepted | Full | Known:
        return ledger.intake.accept_all([batch(uuid.uuid4().hex)], asked)

    declared = RequestIdentity(name="r1", body="one")
    assert isinstance(send(declared, of_records(1, 2, 3, 4)), Accepted)
    assert isinstance(send(of_records(5)), Accepted)  # the first five become the old ones
    assert send(of_records(4, 6, 5)) == Known(records=(2, 0)), "the young ones are asked first"
    assert send(replace(declared, body="other")) == Known(conflicts=(0,))
    assert isinstance(send(of_records(7, 8, 9, 10, 11)), Accepted)
    assert isinstance(send(declared, of_records(1)), Accepted), "they are forgotten together"
    for kind in (ledger.keys.intake, ledger.keys.intake_records):
        for slot in ("young", "old"):
            ttl = ledger.client.pttl(kind(slot))
            assert 0 < int(ttl) <= 2 * intake.IDENTITY_SLOT_MS  # type: ignore[arg-type]


def test_a_slot_without_records_forgets_those_before_the_last_one(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_IDENTITIES", 2)  # one, and when the slot began

    def send(asked: RequestIdentity) -> Accepted | Full | Known:
        return ledger.intake.accept_all([batch(uuid.uuid4().hex)], [asked])

    assert isinstance(send(of_records(1)), Accepted)
    assert isinstance(send(RequestIdentity(name="r1")), Accepted)
    assert send(of_records(1)) == Known(records=(0,))
    assert isinstance(send(RequestIdentity(name="r2")), Accepted)
    assert not ledger.client.exists(ledger.keys.intake_records("old"))
    assert isinstance(send(of_records(1)), Accepted)


def test_a_producer_skips_unwatched_workloads_of_a_step(settings: Settings, client: "redis.Redis") -> None:
    skipping = settings.replace(unwatched="skip")
    ledger = Ledger(connect(skipping), skipping)
    producer = Producer(ledger, Submit(None, ledger.client, skipping), skipping)
    producer.watchlist.add("shop")
    answer = producer.accept_all([batch("b1"), replace(batch("b2"), workload="noise")], [RequestIdentity()])
    assert isinstance(answer, Accepted)
    totals = ledger.backlog.totals()
    assert (totals["shop"].get("skipped", 0), totals["noise"]["skipped"]) == (0, 1)


# ---- batches of a place in a source ---------------------------------------------------------------


def step(cursor: str, after: str = "") -> CursorStep:
    return CursorStep(key="s", cursor=cursor, after=after)


def test_a_cursor_moves_with_all_batches_of_its_step(ledger: Ledger) -> None:
    ours = [batch("b1"), batch("b2", workload="till")]
    assert isinstance(ledger.intake.accept_all(ours, (), step=step("10")), Accepted)
    assert ledger.intake.cursor("s") == "10" and waiting(ledger) == {"b1", "b2"}
    again = ledger.intake.accept_all(ours, (), step=step("10"))  # only the answer was lost
    assert again == Accepted(batch_id="b1", duplicate=True)
    assert isinstance(ledger.intake.accept_all([batch("b3")], (), step=step("20", "10")), Accepted)
    assert ledger.intake.cursor("s") == "20"


def test_a_step_from_another_place_takes_nothing_in(ledger: Ledger) -> None:
    ledger.intake.accept_all([batch("b1")], (), step=step("10"))
    for wrong in (step("10"), step("30", "20")):
        with pytest.raises(CursorMoved) as caught:
            ledger.intake.accept_all([batch("b2")], (), step=wrong)
        assert caught.value.cursor == "10"
    assert waiting(ledger) == {"b1"} and ledger.intake.cursor("s") == "10"


def test_a_full_pipeline_keeps_the_cursor(ledger: Ledger) -> None:
    ledger.intake.pause("a test")
    assert isinstance(ledger.intake.accept_all([batch("b1")], (), step=step("10")), Full)
    assert ledger.intake.cursor("s") is None


def test_a_source_that_was_set_back_takes_in_what_is_new(ledger: Ledger) -> None:
    ledger.intake.accept_all([batch("b1")], (), step=step("10"))
    ledger.intake.forget_cursor("s")
    ledger.intake.accept_all([batch("b1"), batch("b2")], (), step=step("20"))
    assert waiting(ledger) == {"b1", "b2"} and ledger.intake.cursor("s") == "20"
    assert ledger.backlog.totals()["shop"]["accepted"] == 2


def test_a_batch_that_cannot_be_read_is_a_dead_letter_at_once(ledger: Ledger) -> None:
    answer = ledger.intake.accept_all(
        [batch("good"), batch("bad", "x", "y")], (), dead={"bad": "offset 3: no text"}, step=step("10")
    )
    assert isinstance(answer, Accepted) and answer.pending_batches == 1 and waiting(ledger) == {"good"}
    (letter,) = ledger.dead_letters.newest()
    assert (letter.batch_id, letter.reason, letter.lines) == ("bad", "offset 3: no text", 2)
    totals = ledger.backlog.totals()["shop"]
    assert (totals["accepted"], totals["dead"]) == (3, 2)
    counts = ledger.client.hgetall(ledger.keys.counts)
    assert int(counts[b"dead_bytes"]) > 0 and int(counts[b"batches"]) == 1  # type: ignore[index]
    assert ledger.dead_letters.retry("bad") and waiting(ledger) == {"good", "bad"}
    assert ledger.backlog.totals()["shop"]["dead"] == 0
    counts = ledger.client.hgetall(ledger.keys.counts)
    assert (int(counts[b"dead_bytes"]), int(counts[b"batches"])) == (0, 2)  # type: ignore[index]


@pytest.mark.parametrize("left", [[], ["a"]])
def test_a_batch_of_several_workloads_that_nobody_can_read_is_counted_for_each_of_them(
    ledger: Ledger, settings: Settings, left: list[str]
) -> None:
    """`left`: workloads whose records have become batches of their own before."""
    names = ["a", "b", "b", "c"]
    records = PushedRecords(["x", "y\nz", "y", "x"], workloads=names)
    ledger.intake.accept_all([replace(batch("x"), workload=SEVERAL, records=records)], ())
    lines = {"a": 1, "b": 3, "c": 1}

    def check(word: str) -> None:
        """The lines that did not leave are counted under this word, and the others are in flight."""
        found = snapshot(ledger.client, settings.redis.key_prefix)
        check_sums(found)
        counted = {name: sums.get(word, 0) for name, sums in found["totals"].items()}
        assert counted == {name: 0 if name in left else count for name, count in lines.items()}

    def die() -> None:
        claim = ledger.claim("x", Stage.INGEST, "me")
        assert isinstance(claim, Claim)
        if left and claim.records == len(names):
            ledger.separate(claim, {"a": records.take([0])}, records.take([1, 2, 3], named=True))
        ledger.client.set(ledger.keys.payload("x"), b"damaged")
        ledger.give_up(claim, "its payload is damaged")

    die()
    check("dead")
    assert ledger.dead_letters.newest()[0].workload == ("b, c" if left else "a, b, c")
    assert ledger.dead_letters.retry("x")
    die()
    check("dead")
    assert ledger.dead_letters.discard("x")
    check("discarded")


def test_a_discarded_unreadable_batch_is_counted(ledger: Ledger) -> None:
    ledger.intake.accept_all([batch("bad")], (), dead={"bad": "no text"}, step=step("1"))
    assert ledger.dead_letters.discard("bad")
    totals = ledger.backlog.totals()["shop"]
    assert (totals["accepted"], totals["dead"], totals["discarded"]) == (1, 0, 1)


def test_a_cursor_moves_alone_by_compare_and_set_and_counts_what_is_lost(ledger: Ledger) -> None:
    assert ledger.intake.move_cursor(step("5")) == "5"
    assert ledger.intake.move_cursor(step("9"), lost=4) == "5"
    assert ledger.intake.move_cursor(step("9", "5"), lost=4) == "9"
    assert int(ledger.client.hget(ledger.keys.counts, "source_lost") or 0) == 4  # type: ignore[arg-type]
