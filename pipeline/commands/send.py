"""`logweir send`: a producer for files and standard input; waits when the pipeline is full."""

import argparse
import contextlib
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rich.console import Console

from pipeline.commands.common import err, print_json, reached, settings_of, standard_input
from pipeline.commands.own import LOOK_AT_ONCE, Own, batches
from pipeline.errors import BadInput, BadPayload, RedisUnavailable
from pipeline.ledger import Full
from pipeline.observe import set_up
from pipeline.producer import Producer, workload_of
from pipeline.records import digest
from pipeline.settings import Settings
from pipeline.sources import files, follow
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.stdin import read_stream

SAY_EVERY_S: Final = 2.0
REDIS_RETRY_S: Final = 1.0
WAIT_S: Final = 0.1


def main(args: argparse.Namespace) -> int:
    if args.opensearch:
        from pipeline.commands import poll  # opensearch-py is imported by those who need it

        return poll.main(args)
    if not args.files:
        raise BadInput(
            "nothing is named to send; give a log file, - for standard input, or --opensearch INDEX"
        )
    settings = settings_of(args)
    set_up(settings.log_level)
    if args.follow and len(args.files) > 1:
        raise BadInput("--follow takes one file; start one `logweir send --follow` per file")
    if "-" in args.files and len(args.files) > 1:
        raise BadInput("- (standard input) cannot be mixed with files; send them apart")
    console = err()
    if args.files == ["-"]:
        standard_input()
    elif args.follow:
        _refuse_unfollowable(Path(args.files[0]))
    else:
        for note in filter(None, map(files.check, files.expand(args.files))):
            console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    producer = Producer.connect(reached(settings))
    own = Own(producer.ledger) if args.wait else None
    sender = _Sender(producer, settings, console, own=own)
    try:
        if args.files == ["-"]:
            _standard_input(sender, args.workload)
        elif args.follow:
            _follow(sender, Path(args.files[0]), args.workload)
        else:
            for path in files.expand(args.files):
                _file(sender, path, args.workload)
    finally:
        sender.say(final=True)
    facts = {"lines": sender.lines, "batches": sender.batches, "duplicates": sender.duplicates}
    if own is not None:
        sender.wait_stored(own)
        facts["dead_lines"] = own.dead
    if args.json:
        print_json(facts)
    return 1 if own is not None and own.trouble() else 0


def _refuse_unfollowable(path: Path) -> None:
    """A file that is not there yet is waited for; what is there must be one that grows."""
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise BadInput(f"{path} is no regular file and cannot be followed; read a pipe without --follow")


def _file(sender: "_Sender", path: Path, workload: str | None) -> None:
    """From where an earlier `send` of this file stopped, so that sending it again adds only what is new."""
    workload = workload or workload_of(path)
    cursor_key, stored, place = (
        _cursor_key(path, workload),
        None,
        Cursor(path=str(path), identity=uuid.uuid4().hex),
    )
    if path.is_file():  # a pipe can be read once only, and has no place to go on from
        stored = _stored_cursor(sender, cursor_key)
        with path.open("rb") as file:
            place = files.resume_at(path, file, stored)
    key = digest("file", str(path.absolute()), place.identity, workload)
    start, before = place.offset, sender.batches
    for chunk in files.read(
        path,
        start=stored if place.offset else None,
        max_records=sender.settings.batch_records,
        max_bytes=sender.settings.batch_kib * 1024,
    ):
        sender.send(chunk, start=start, workload=workload, source=str(path), key=key, cursor_key=cursor_key)
        start = chunk.cursor.offset
    if place.offset and sender.batches == before:
        sender.console.print(
            f"{path}: nothing new, its {place.line:,} lines were accepted before",
            markup=False,
            soft_wrap=True,
        )


def _cursor_key(path: Path, workload: str) -> str:
    """One for sending and following: a follower goes on where a sender stopped."""
    return digest("cursor", str(path.absolute()), workload)


def _standard_input(sender: "_Sender", workload: str | None) -> None:
    key, start = digest("stdin", uuid.uuid4().hex), 0
    for chunk in read_stream(
        standard_input(),
        max_records=sender.settings.batch_records,
        max_bytes=sender.settings.batch_kib * 1024,
    ):
        sender.send(chunk, start=start, workload=workload or "stdin", source="stdin", key=key, cursor_key=key)
        start = chunk.cursor.offset


def _follow(sender: "_Sender", path: Path, workload: str | None) -> None:
    """Until Ctrl-C, from where the last sender or follower of this file stopped."""
    workload = workload or workload_of(path)
    cursor_key = _cursor_key(path, workload)
    start = _stored_cursor(sender, cursor_key)
    place = (start.identity, start.offset) if start else ("", 0)
    sender.console.print(f"following {path}; Ctrl-C stops", markup=False, soft_wrap=True)
    for chunk in _chunks(sender, path, start):
        if place[0] != chunk.cursor.identity and place[1] and chunk.records["line"].min() == 1:
            place = ("", 0)  # rotated or truncated: a file of its own, from its beginning
        key = digest("file", str(path.absolute()), chunk.cursor.identity, workload)
        sender.send(
            chunk,
            start=place[1],
            workload=workload,
            source=str(path),
            key=key,
            cursor_key=cursor_key,
        )
        place = (chunk.cursor.identity, chunk.cursor.offset)


def _chunks(sender: "_Sender", path: Path, start: Cursor | None) -> Iterator[Chunk]:
    absent = False
    for chunk in follow.follow(
        path,
        start=start,
        stop=lambda: False,
        from_start=True,
        max_records=sender.settings.batch_records,
        max_bytes=sender.settings.batch_kib * 1024,
    ):
        if chunk is not None:
            yield chunk
            continue
        sender.say()
        if not absent and not path.exists():
            sender.console.print(f"waiting for {path} to appear", markup=False, soft_wrap=True)
        absent = not path.exists()


def _stored_cursor(sender: "_Sender", cursor_key: str) -> Cursor | None:
    stored = sender.producer.ledger.cursor(cursor_key)
    if stored is None:
        return None
    try:
        return Cursor.unpack(stored)
    except BadPayload:
        return None  # from the beginning: what was accepted before is recognised by its batch ids


class _Sender:
    """Sends chunks one after another; says now and then how far it is."""

    def __init__(
        self,
        producer: Producer,
        settings: Settings,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        own: Own | None = None,
    ) -> None:
        self.producer = producer
        self.settings = settings
        self.console = console
        self.clock = clock
        self.own = own
        self.lines = self.batches = self.duplicates = 0
        self.told = (0, 0)
        self.began = self.said = clock()

    def send(
        self, chunk: Chunk, *, start: int, workload: str, source: str, key: str, cursor_key: str
    ) -> None:
        """Until it is accepted; Redis being away or full only makes it wait."""
        while True:
            try:
                answer = self.producer.send_chunk(
                    chunk,
                    start=start,
                    workload=workload,
                    source=source,
                    source_key=key,
                    cursor_key=cursor_key,
                )
            except RedisUnavailable as exc:
                self._wait(f"waiting: {exc}", REDIS_RETRY_S)
                continue
            if isinstance(answer, Full):
                self._wait(
                    f"waiting: the pipeline is full ({answer.pending_batches:,} batches)",
                    answer.retry_after_s,
                )
                continue
            break
        self.batches += 1
        self.duplicates += answer.duplicate
        self.lines += 0 if answer.duplicate else int(chunk.records["lines"].sum())
        if self.own is not None:
            self.own.open.append(answer.batch_id)
            if self.batches % LOOK_AT_ONCE == 0:  # those that have ended need not be remembered
                with contextlib.suppress(RedisUnavailable):
                    self.own.look()
        self.say()

    def say(self, *, final: bool = False) -> None:
        """How much was sent, every few seconds and at the end."""
        now = self.clock()
        told = (self.lines, self.duplicates)
        if not final and (now - self.said < SAY_EVERY_S or told == self.told):
            return
        self.said, self.told = now, told
        rate = self.lines / max(0.001, now - self.began)
        again = f", {self.duplicates} batches were there already" if self.duplicates else ""
        self.console.print(f"{self.lines:,} lines accepted ({rate:,.0f} lines/s){again}", markup=False)

    def wait_stored(self, own: Own) -> None:
        """Until every batch of this command has ended; one that waits for a model is stored, too."""
        while True:
            try:
                if own.look():
                    break
            except RedisUnavailable as exc:
                self._wait(f"waiting: {exc}", REDIS_RETRY_S)
                continue
            self._wait(
                f"{batches(len(own.open))} {'is' if len(own.open) == 1 else 'are'} not stored yet", WAIT_S
            )
        said = own.trouble()
        if not self.batches:
            said = "this command sent nothing new, so there is nothing to wait for"
        self.console.print(said or "everything accepted is stored", markup=False, soft_wrap=True)

    def _wait(self, why: str, seconds: float) -> None:
        if self.clock() - self.said >= SAY_EVERY_S:
            self.said = self.clock()
            self.console.print(why, markup=False)
        time.sleep(seconds)
