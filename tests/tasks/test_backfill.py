"""Readers of a backfill on a real ledger: each line is accepted once, whoever dies, moves or comes late."""

import argparse
import gzip
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.worker import state as worker_state
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pipeline.commands.backfill import planning
from pipeline.errors import BadInput, RedisUnavailable, StoreUnavailable
from pipeline.messages.app import make_app
from pipeline.messages.routing import QUEUE_BACKFILL
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted, Full
from pipeline.records.payload import unpack
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sources.backfill.archive import FolderArchive, archive_of
from pipeline.sources.backfill.plans import BackfillView
from pipeline.tasks import backfill, periodic
from pipeline.tasks.context import Context
from pipeline.tasks.reader import SlotReader

PIECE = 3_000


class Killed(BaseException):
    """The reader's process ends here."""


@pytest.fixture
def context(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(planning, "PIECE_BYTES", PIECE)
    app = make_app(settings)
    yield Context(app, settings.replace(lease_ttl_ms=60_000))
    app.close()


def wanted(place: Path | str, **flags: Any) -> argparse.Namespace:
    plain = {
        "since": None, "until": None, "workload": None, "include": [], "exclude": [], "parallel": 4,
        "formats": None, "format": None, "time": None,
    }  # fmt: skip
    return argparse.Namespace(place=str(place), **(plain | flags))


def plan(context: Context, place: Path, **flags: Any) -> planning.Planned:
    archive = archive_of(str(place))
    return planning.planned(wanted(place, **flags), archive, context.plans, context.settings)


def view(context: Context, name: str) -> BackfillView:
    found = context.plans.view(name)
    assert found is not None
    return found


def accepted(context: Context) -> Counter[str]:
    """How often each record was accepted."""
    found: Counter[str] = Counter()
    for key in context.client.scan_iter(match=context.ledger.keys.payload("*")):
        blob: Any = context.client.get(key)
        records: Any = unpack(blob, max_bytes=2**30)
        found.update(records["raw"].to_list())
    return found


def expire_leases(context: Context) -> None:
    """As time does after a reader was killed."""
    for key in context.client.scan_iter(match=context.ledger.keys.lease("backfill.*")):
        context.client.hset(key, "deadline", 1)


def read_all(context: Context, name: str, turns: int = 100) -> BackfillView:
    for _ in range(turns):
        backfill.read_turn(context, name)
        if view(context, name).over:
            break
    return view(context, name)


def logs(folder: Path, files: int = 2, lines: int = 60) -> Counter[str]:
    """Text and packed logs; their records."""
    found: Counter[str] = Counter()
    folder.mkdir(exist_ok=True)
    for n in range(files):
        entries = [
            f"2026-11-{n + 1:02d}T10:00:{i % 60:02d}Z ERROR app: request {n}-{i} failed"
            + ("\n  at a.b.C(D.java:1)\n  at e.f.G(H.java:2)" if i % 4 == 0 else "")
            for i in range(lines)
        ]
        text = "".join(entry + "\n" for entry in entries)
        (folder / f"app-2026-11-{n + 1:02d}.log").write_text(text)
        packed = text.replace("app: request", "packed: request")
        (folder / f"packed-2026-11-{n + 1:02d}.log.gz").write_bytes(gzip.compress(packed.encode()))
        found.update(entries)
        found.update(entry.replace("app: request", "packed: request") for entry in entries)
    return found


def test_every_record_of_an_archive_is_accepted_once_as_backfill(context: Context, tmp_path: Path) -> None:
    records = logs(tmp_path / "archive")
    found = plan(context, tmp_path / "archive")
    name = found.plan.name
    assert found.words == {"new": 4} and view(context, name).state == "reading"
    seen = read_all(context, name)
    assert (seen.state, seen.done, seen.failed, seen.skipped) == ("complete", seen.pieces, 0, 0)
    assert seen.pieces > 4 and seen.bytes_read == seen.bytes
    assert accepted(context) == records
    assert seen.lines == sum(text.count("\n") + 1 for text in records)
    ids = [
        key.decode().rpartition(":")[2]
        for key in context.client.scan_iter(match=Keys(context.settings.redis.key_prefix).batch("*"))
    ]
    assert ids and all(context.ledger.backlog.backfills(ids)), "they wait behind fresh batches"
    again = plan(context, tmp_path / "archive")
    assert again.words == {"known": 4}
    assert read_all(context, name).lines == seen.lines and accepted(context) == records


def test_newest_objects_come_first(context: Context, tmp_path: Path) -> None:
    logs(tmp_path / "archive", files=3)
    name = plan(context, tmp_path / "archive", parallel=1).plan.name
    order: list[str] = []
    while (free := backfill._free_slot(context, name)) is not None:
        slot, lease = free
        taken = context.plans.take(name, slot, lease)
        assert taken is not None
        order.append(taken.piece.name[-17:].partition("2026")[2][:6])
        context.plans.finish(name, lease, context.plans.failed(taken, slot, "no", lines=0))
        context.leases.release(lease)
    assert order == sorted(order, reverse=True) and len(set(order)) == 3


@examples(max_examples=12)
@given(st.lists(st.integers(0, 8), max_size=6), st.booleans(), st.integers(1, 4))
def test_killed_readers_lose_and_double_nothing(kills: list[int], after: bool, parallel: int) -> None:
    """Each reader is killed at its n-th batch, before it was accepted or before the answer came."""
    context, folder = CRASHED["context"], CRASHED["folder"]
    records = CRASHED["records"]
    workload = f"w{random.randrange(2**60):x}"
    name = plan(context, folder, parallel=parallel, workload=workload).plan.name
    for number in kills:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Producer, "send_chunk", killing(number, after=after))
            try:
                backfill.read_turn(context, name)
            except Killed:
                expire_leases(context)
    seen = read_all(context, name)
    assert seen.state == "complete" and not seen.failed
    totals = context.ledger.backlog.totals()[workload]
    assert totals["accepted"] == sum(text.count("\n") + 1 for text in records) == seen.lines


CRASHED: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _crashed(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.function is test_killed_readers_lose_and_double_nothing:
        context = request.getfixturevalue("context")
        folder = request.getfixturevalue("tmp_path") / "archive"
        context.settings = context.settings.replace(batch_records=10)
        CRASHED.update(context=context, folder=folder, records=logs(folder))
    yield
    CRASHED.clear()


def killing(number: int, *, after: bool) -> Callable[..., Accepted | Full]:
    real, left = Producer.send_chunk, [number]

    def send(self: Producer, *args: Any, **kwargs: Any) -> Accepted | Full:
        left[0] -= 1
        if left[0] < 0 and not after:
            raise Killed
        answer = real(self, *args, **kwargs)
        if left[0] < 0:
            raise Killed
        return answer

    return send


def test_a_reader_that_was_stopped_for_long_changes_nothing_when_it_goes_on(
    context: Context, tmp_path: Path
) -> None:
    records = logs(tmp_path / "archive", files=1)
    name = plan(context, tmp_path / "archive", parallel=1).plan.name
    real, other = Producer.send_chunk, Context(context.app, context.settings)

    def late(self: Producer, *args: Any, **kwargs: Any) -> Accepted | Full:
        """Meanwhile the lease expires, and another reader reads all."""
        with pytest.MonkeyPatch.context() as undone:
            undone.setattr(Producer, "send_chunk", real)
            expire_leases(context)
            assert read_all(other, name).state == "complete"
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Producer, "send_chunk", late)
        backfill.read_turn(context, name)
    assert accepted(context) == records
    assert view(context, name).state == "complete"


def test_two_backfills_of_the_same_objects_send_them_once(context: Context, tmp_path: Path) -> None:
    records = logs(tmp_path / "archive")
    first = plan(context, tmp_path / "archive", include=["app-*"]).plan.name
    second = plan(context, tmp_path / "archive").plan.name
    assert first != second
    read_all(context, first)
    seen = read_all(context, second)
    assert seen.state == "complete" and accepted(context) == records


def test_lost_wake_ups_and_dead_readers_are_called_again_by_the_sweep(
    context: Context, tmp_path: Path
) -> None:
    logs(tmp_path / "archive")
    name = plan(context, tmp_path / "archive", parallel=3).plan.name

    def waiting() -> int:
        return context.submit.readers_called(name)

    periodic.sweep(context)
    assert waiting() == 3
    periodic.sweep(context)
    assert waiting() == 3, "those that wait are not sent again"
    context.client.delete(context.submit.keys.kombu(QUEUE_BACKFILL))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Producer, "send_chunk", killing(0, after=True))
        with pytest.raises(Killed):
            backfill.read_turn(context, name)
    expire_leases(context)
    periodic.sweep(context)
    assert waiting() == 3
    read_all(context, name)
    context.client.delete(context.submit.keys.kombu(QUEUE_BACKFILL))
    periodic.sweep(context)
    assert waiting() == 0


def test_an_object_that_changes_or_goes_fails_alone_with_a_sentence(context: Context, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    logs(folder, files=1)
    (folder / "gone.log").write_text("2026-11-20T10:00:00Z INFO app: gone\n")
    (folder / "grows.log").write_text("2026-11-20T10:00:00Z INFO app: grows\n")
    name = plan(context, folder).plan.name
    (folder / "gone.log").unlink()
    with (folder / "grows.log").open("a") as file:
        file.write("2026-11-20T10:00:01Z INFO app: more\n")
    seen = read_all(context, name)
    assert seen.state == "complete" and seen.failed == 2 and seen.done == seen.pieces - 2
    whys = {failure.name: failure.why for failure in seen.failures}
    assert "does not exist any more" in whys["gone.log"] and "changed since" in whys["grows.log"]
    again = plan(context, folder)
    assert again.words["changed"] == 1 and "grows.log" in again.notes()[0]


def test_what_failed_is_read_when_it_is_there_again(context: Context, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    (folder / "a.log").write_text("2026-11-20T10:00:00Z INFO app: a\n")
    name = plan(context, folder).plan.name
    (folder / "a.log").rename(tmp_path / "a.log")
    assert read_all(context, name).failed == 1
    (tmp_path / "a.log").rename(folder / "a.log")
    assert plan(context, folder).words == {"reopened": 1}
    seen = read_all(context, name)
    assert (seen.done, seen.failed, seen.lines) == (1, 0, 1)


def test_damage_is_a_note_and_what_is_no_log_is_skipped(context: Context, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    text = "".join(f"2026-11-20T10:00:00Z INFO app: request {i * i * 7919}\n" for i in range(2_000))
    (folder / "cut.log.gz").write_bytes(gzip.compress(text.encode())[:-2_000])
    (folder / "program").write_bytes(bytes(range(256)) * 20)
    seen = read_all(context, plan(context, folder).plan.name)
    assert (seen.done, seen.skipped, seen.failed) == (1, 1, 0)
    notes = " ".join(seen.notes)
    assert "cut.log.gz ends early" in notes and "program is not a text log" in notes
    assert 0 < seen.lines < 2_000


def test_an_archive_that_is_away_waits_and_fails_nothing(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = logs(tmp_path / "archive", files=1)
    name = plan(context, tmp_path / "archive").plan.name
    (tmp_path / "archive").rename(tmp_path / "elsewhere")
    for _ in range(10):
        backfill.read_turn(context, name)
    seen = view(context, name)
    assert (seen.state, seen.failed) == ("reading", 0) and "mount the folder" in seen.waits
    (tmp_path / "elsewhere").rename(tmp_path / "archive")
    assert read_all(context, name).state == "complete" and accepted(context) == records


@pytest.mark.parametrize("mount_point", [False, True])
def test_an_archive_that_goes_away_while_it_is_read_loses_nothing(
    context: Context, tmp_path: Path, mount_point: bool
) -> None:
    context.settings = context.settings.replace(batch_records=10)
    records = logs(tmp_path / "archive", files=1)
    name = plan(context, tmp_path / "archive").plan.name
    real, left = FolderArchive.read, [3]

    def read(self: FolderArchive, one: Any, offset: int, size: int) -> bytes:
        left[0] -= 1
        if left[0] == 0:
            (tmp_path / "archive").rename(tmp_path / "elsewhere")
            if mount_point:
                (tmp_path / "archive").mkdir()
        return real(self, one, offset, size)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FolderArchive, "read", read)
        backfill.read_turn(context, name)
    seen = view(context, name)
    assert (seen.failed, seen.skipped, seen.state) == (0, 0, "reading") and "mount the " in seen.waits
    if mount_point:
        (tmp_path / "archive").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "archive")
    seen = read_all(context, name)
    assert (seen.failed, seen.skipped, seen.state) == (0, 0, "complete") and accepted(context) == records


@pytest.mark.parametrize("code", [0, 1])
def test_a_worker_that_is_to_end_leaves_its_piece_to_the_next_one(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    context.settings = context.settings.replace(batch_records=10)
    records = logs(tmp_path / "archive", files=1)
    name = plan(context, tmp_path / "archive").plan.name
    real = Producer.send_chunk

    def send(self: Producer, *args: Any, **kwargs: Any) -> Accepted | Full:
        monkeypatch.setattr(worker_state, "should_stop", code)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Producer, "send_chunk", send)
    backfill.read_turn(context, name)
    before = sum(accepted(context).values())
    assert 0 < before <= 10
    held = [context.leases.holder_of(context.plans.resource(name, str(n))) for n in range(4)]
    assert held == [None] * 4, "the lease was given back"
    monkeypatch.setattr(Producer, "send_chunk", real)
    monkeypatch.setattr(worker_state, "should_stop", None)
    assert read_all(context, name).state == "complete" and accepted(context) == records


def test_an_object_that_cannot_be_read_fails_after_some_tries_and_others_go_on(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs(tmp_path / "archive", files=2)
    name = plan(context, tmp_path / "archive").plan.name
    real = FolderArchive.read

    def read(self: FolderArchive, one: Any, offset: int, size: int) -> bytes:
        if one.name == "app-2026-11-02.log":
            raise StoreUnavailable("the disk has a bad block there")
        return real(self, one, offset, size)

    monkeypatch.setattr(FolderArchive, "read", read)
    monkeypatch.setattr("pipeline.tasks.reader.AWAY_S", 0.01)
    seen = read_all(context, name)
    assert seen.state == "complete" and {f.name for f in seen.failures} == {"app-2026-11-02.log"}
    assert "bad block" in seen.failures[0].why and seen.done == seen.pieces - seen.failed


def test_a_piece_whose_readers_die_without_a_line_more_is_given_up(context: Context, tmp_path: Path) -> None:
    logs(tmp_path / "archive", files=1)
    name = plan(context, tmp_path / "archive", include=["packed*"]).plan.name
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Producer, "send_chunk", killing(0, after=False))
        for _ in range(4):
            with pytest.raises(Killed):
                backfill.read_turn(context, name)
            expire_leases(context)
        backfill.read_turn(context, name)
    seen = view(context, name)
    assert seen.failed == 1 and "readers ended here without a line more, 4 in a row" in seen.failures[0].why


def test_a_cancelled_backfill_stops_and_the_same_command_goes_on(context: Context, tmp_path: Path) -> None:
    records = logs(tmp_path / "archive")
    name = plan(context, tmp_path / "archive").plan.name
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.tasks.backfill.TURN_S", 0.0)
        backfill.read_turn(context, name)
    context.plans.cancel(name)
    before = accepted(context)
    assert before and read_all(context, name).state == "cancelled" and accepted(context) == before
    periodic.sweep(context)
    assert plan(context, tmp_path / "archive").words == {"known": 4}
    assert read_all(context, name).state == "complete" and accepted(context) == records
    with pytest.raises(BadInput, match="logweir backfill --list"):
        context.plans.cancel("nothing")


def test_a_full_pipeline_and_a_silent_redis_only_delay(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = logs(tmp_path / "archive", files=1)
    name = plan(context, tmp_path / "archive").plan.name
    monkeypatch.setattr("pipeline.tasks.reader.AWAY_S", 0.01)
    real, answers = Producer.send_chunk, iter([*"FUF"] * 3)

    def send(self: Producer, *args: Any, **kwargs: Any) -> Accepted | Full:
        match next(answers, ""):
            case "F":
                return Full(pending_bytes=1, pending_batches=1, reason="bytes", retry_after_s=0.01, refused=1)
            case "U":
                real(self, *args, **kwargs)  # only the answer is lost
                raise RedisUnavailable("it was away")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Producer, "send_chunk", send)
    assert read_all(context, name).state == "complete" and accepted(context) == records


def test_a_window_or_globs_that_leave_nothing_are_refused_and_make_no_plan(
    context: Context, tmp_path: Path
) -> None:
    logs(tmp_path / "archive")
    for flags, word in (
        ({"until": "2026-10-01"}, "none of the 4 objects"),
        ({"include": ["*.json"]}, "no object that --include"),
        ({"since": "yesterday"}, "neither a span nor a time"),
        ({"since": "2026-11-20", "until": "2026-11-19"}, "exchange them"),
    ):
        with pytest.raises(BadInput, match=word):
            plan(context, tmp_path / "archive", **flags)
    assert context.plans.names() == []
    found = plan(context, tmp_path / "archive", since="2026-11-02", until="2026-11-03")
    assert found.words == {"new": 2}


def test_a_plan_and_all_its_keys_are_forgotten_some_time_after_its_end(
    context: Context, tmp_path: Path
) -> None:
    logs(tmp_path / "archive", files=1)
    name = plan(context, tmp_path / "archive").plan.name
    read_all(context, name)
    keys = list(context.client.scan_iter(match=context.ledger.keys.backfill(name, "*")))
    assert keys
    for key in (*keys, *context.client.scan_iter(match=context.ledger.keys.lease("backfill.*"))):
        assert int(context.client.ttl(key)) > 0, key
    context.client.delete(*keys)
    assert context.plans.names() == []


def test_what_a_dead_reader_waited_for_is_not_shown(context: Context, tmp_path: Path) -> None:
    logs(tmp_path / "archive", files=1)
    name = plan(context, tmp_path / "archive").plan.name
    real = Producer.send_chunk

    def full(_self: Producer, *_args: Any, **_kwargs: Any) -> Full:
        return Full(pending_bytes=1, pending_batches=1, reason="closed", retry_after_s=0.01, refused=1)

    def shown(self: SlotReader, seconds: float) -> None:
        self._report(self.plans.take(name, self.slot.name, self.slot.holding.lease).piece, again=True)  # type: ignore[union-attr]
        waits.append(view(context, name).waits)
        raise Killed

    waits: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Producer, "send_chunk", full)
        patched.setattr(SlotReader, "_pause", shown)
        with pytest.raises(Killed):
            backfill.read_turn(context, name)
    assert "drained" in waits[0]
    expire_leases(context)
    assert (view(context, name).waits, view(context, name).readers) == ("", 0)
    assert Producer.send_chunk is real and read_all(context, name).state == "complete"
