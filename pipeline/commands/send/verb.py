"""`logweir send`: a producer for files and standard input; waits when the pipeline is full."""

import argparse
import contextlib
import os
import stat
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from rich.console import Console

from pipeline.commands.common import awaited, err, print_json, remark, settings_of, standard_input
from pipeline.commands.recognition import choice_of
from pipeline.commands.send.sender import Sender
from pipeline.commands.send.tracking import BatchTracking
from pipeline.errors import BadInput, CursorMoved
from pipeline.logs import set_up
from pipeline.producer import Producer, check_workload, workload_of_file
from pipeline.records.batch import Purpose, digest
from pipeline.sources import files
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.folders import Filter
from pipeline.sources.follow import Follower
from pipeline.sources.packed.archives import Source
from pipeline.sources.packed.bytestreams import is_packed
from pipeline.sources.stdin import Peeked, read_stream


def main(args: argparse.Namespace) -> int:
    if args.opensearch:
        from pipeline.commands.send import poll

        return poll.main(args)
    if not args.files:
        raise BadInput(
            "nothing is named to send; give a log file, - for standard input, or --opensearch INDEX"
        )
    settings = settings_of(args)
    set_up(settings.stack.log_level)
    purpose, choice = Purpose.BASELINE if args.baseline else Purpose.SCORE, choice_of(args)
    console = err()
    chosen = _chosen(args, console)
    producer = Producer.connect(awaited(settings, console))
    tracking = BatchTracking(producer.ledger) if args.wait else None
    sender = Sender(
        producer,
        settings,
        console,
        tracking=tracking,
        backfill=args.backfill,
        purpose=purpose,
        choice=choice,
    )
    try:
        if args.files == ["-"]:
            _standard_input(sender, args.workload)
        elif args.follow:
            _follow(sender, Path(args.files[0]), args.workload)
        else:
            for path in chosen.paths:
                _file(sender, path, args.workload)
    finally:
        sender.note_times()
        sender.say(final=True)
    facts = {"lines": sender.lines, "batches": sender.batches, "duplicates": sender.duplicates}
    if tracking is not None:
        sender.wait_stored(tracking)
        facts["dead_lines"] = tracking.dead
    if args.json:
        print_json(facts)
    return 1 if sender.gone or (tracking is not None and tracking.unstored()) else 0


def _chosen(args: argparse.Namespace, console: Console) -> files.Chosen:
    """The files to read, none for standard input and a followed file. Raises BadInput."""
    if args.workload:
        check_workload(args.workload)
    if args.follow and len(args.files) > 1:
        raise BadInput("--follow takes one file; start one `logweir send --follow` per file")
    if "-" in args.files and len(args.files) > 1:
        raise BadInput("- (standard input) cannot be mixed with files; send them apart")
    if args.files == ["-"]:
        standard_input()
    elif args.follow:
        _refuse_unfollowable(Path(args.files[0]))
    else:
        chosen = files.choose(args.files, Filter(include=args.include, exclude=args.exclude))
        for note in chosen.notes:
            remark(console, note)
        return chosen
    return files.Chosen(paths=())


def _refuse_unfollowable(path: Path) -> None:
    """A file that is not there yet is waited for; what is there must be one that grows."""
    if path.is_dir():
        raise BadInput(
            f"{path} is a directory, and --follow reads one file; follow a file in it, or send its files or "
            "a glob without --follow"
        )
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise BadInput(f"{path} is no regular file and cannot be followed; read a pipe without --follow")
    if path.exists() and not os.access(path, os.R_OK):
        raise BadInput(f"{path} may not be read by this user; run `chmod +r` on it or change the user")


def _file(sender: Sender, path: Path, workload: str | None) -> None:
    """From where an earlier `send` of this file stopped, so that sending it again adds only what is new."""
    notes: dict[str, None] = {}  # a file may be read again, and its notes come again
    while True:
        try:
            _texts_of(sender, path, workload, notes)
            break
        except CursorMoved:  # read from where it stands now
            continue
        except BadInput as exc:  # it was a log when the command began
            notes.setdefault(f"{exc}; what comes after it is sent")
            break
    for note in notes:
        remark(sender.console, note)


def _texts_of(sender: Sender, path: Path, workload: str | None, notes: dict[str, None]) -> None:
    """The text of a file, or those of an archive. A pipe can be read once only."""
    once = not path.is_file()

    def begin(source: Source) -> Cursor | None:
        name = workload or workload_of_file(source.named)
        return sender.begin(_cursor_key(sender, source, name))

    for reading in files.read_texts(
        path,
        note=notes.setdefault,
        begin=begin,
        max_records=sender.settings.internal.batch_records,
        max_bytes=sender.settings.internal.batch_kib * 1024,
        choice=sender.choice,
    ):
        name = workload or workload_of_file(reading.source.named)
        if once:
            key = digest("pipe", uuid.uuid4().hex)
            _stream(sender, reading.chunks, workload=name, source=reading.source.name, key=key)
        else:
            _rest_of(sender, reading, name)


def _rest_of(sender: Sender, reading: files.TextReading, workload: str) -> None:
    source, place = reading.source, reading.place
    cursor_key = _cursor_key(sender, source, workload)
    key = _source_key(sender, source, place.identity, workload)
    before = sender.batches
    for chunk in reading.chunks:
        sender.send(chunk, workload=workload, source=source.name, key=key, cursor_key=cursor_key)
    if place.offset and sender.batches == before:
        sender.console.print(
            f"{source.name}: nothing new, its {place.line:,} lines were accepted before",
            markup=False,
            soft_wrap=True,
        )
    sender.confirm(cursor_key)


def _source_key(sender: Sender, source: Source, identity: str, workload: str) -> str:
    """Tells a file from its successor after a rotation, and a member from another one of its name."""
    member = ("member", source.member) if source.member else ()
    return digest("file", str(source.path.absolute()), identity, workload, *member, *_purpose_key(sender))


def _cursor_key(sender: Sender, source: Source, workload: str) -> str:
    """One for sending and following: a follower goes on where a sender stopped."""
    member = ("member", source.member) if source.member else ()
    return digest("cursor", str(source.path.absolute()), workload, *member, *_purpose_key(sender))


def _purpose_key(sender: Sender) -> tuple[str, ...]:
    """A file may be sent as baseline and to be judged: each has batch ids and a cursor of its own."""
    return () if sender.purpose is Purpose.SCORE else (sender.purpose.value,)


def _standard_input(sender: Sender, workload: str | None) -> None:
    stream = Peeked(standard_input())
    sender.times.of_stdin = True
    if is_packed(stream.first):
        _packed_input(sender, stream, workload)
        return
    chunks = read_stream(
        stream,
        pace=sender.pace,
        max_records=sender.settings.internal.batch_records,
        max_bytes=sender.settings.internal.batch_kib * 1024,
        choice=sender.choice,
    )
    key = digest("stdin", uuid.uuid4().hex)
    _stream(sender, chunks, workload=workload or "stdin", source="stdin", key=key)


def _packed_input(sender: Sender, stream: Peeked, workload: str | None) -> None:
    """The text of packed standard input, or those of an archive."""
    notes: dict[str, None] = {}
    for reading in files.read_packed(
        stream,
        "stdin",
        note=notes.setdefault,
        max_records=sender.settings.internal.batch_records,
        max_bytes=sender.settings.internal.batch_kib * 1024,
        choice=sender.choice,
    ):
        source = reading.source
        name = workload or (workload_of_file(source.named) if source.member else "stdin")
        key = digest("stdin", uuid.uuid4().hex)
        _stream(sender, reading.chunks, workload=name, source=source.name, key=key)
    for note in notes:
        remark(sender.console, note)


def _stream(sender: Sender, chunks: Iterable[Chunk], *, workload: str, source: str, key: str) -> None:
    """Sends an input that cannot be read twice. Its cursor only shows a loss in Redis; it is deleted at the
    end."""
    sender.begin(key)
    for chunk in chunks:
        send = partial(sender.send, chunk, workload=workload, source=source, key=key, cursor_key=key)
        sender.saving_the_rest(send, source, key)
    sender.saving_the_rest(partial(sender.confirm, key), source, key)
    sender.forget(key)


def _follow(sender: Sender, path: Path, workload: str | None) -> None:
    """Until Ctrl-C, from where the last sender or follower of this file stopped."""
    workload = workload or workload_of_file(path)
    cursor_key = _cursor_key(sender, Source(path=path), workload)
    sender.console.print(f"following {path}; Ctrl-C stops", markup=False, soft_wrap=True)
    follower = Follower(
        path,
        pace=sender.pace,
        quiet_s=sender.settings.intake.follow_quiet_s,
        max_records=sender.settings.internal.batch_records,
        max_bytes=sender.settings.internal.batch_kib * 1024,
        choice=sender.choice,
    )
    sender.while_waiting = partial(_look, follower)
    while True:
        try:
            return _follow_from(sender, follower, path, workload, cursor_key)
        except CursorMoved:  # read on from where it stands now
            continue


def _look(follower: Follower) -> None:
    with contextlib.suppress(BadInput):  # it is raised again when chunks are asked for
        follower.look()


def _follow_from(sender: Sender, follower: Follower, path: Path, workload: str, cursor_key: str) -> None:
    trouble = ""
    for found in follower.chunks(sender.begin(cursor_key), stop=lambda: False):
        if isinstance(found, Chunk):
            key = _source_key(sender, Source(path=path), found.cursor.identity, workload)
            sender.send(found, workload=workload, source=str(path), key=key, cursor_key=cursor_key)
            sender.note_times()
            continue
        if found is not None:
            sender.pass_over(found.sentence, found.cursor, cursor_key)
            continue
        sender.say()
        sender.confirm_at_times(cursor_key)
        if follower.trouble and follower.trouble != trouble:
            sender.console.print(follower.trouble, markup=False, soft_wrap=True)
        trouble = follower.trouble
