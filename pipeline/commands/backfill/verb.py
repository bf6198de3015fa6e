"""`logweir backfill`: plans the reading of an archive, calls readers, and shows how far they are."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console

from pipeline.commands.backfill.planning import Planned, planned
from pipeline.commands.common import (
    cell,
    err,
    out,
    print_json,
    printable,
    reached,
    reading,
    redis_explained,
    remark,
    settings_of,
)
from pipeline.errors import BadInput, Cancelled, RedisUnavailable
from pipeline.logs import set_up
from pipeline.messages.routing import QUEUE_BACKFILL
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sources.backfill.archive import archive_of
from pipeline.sources.backfill.pace import ReadingPace
from pipeline.sources.backfill.plans import MAX_PARALLEL, BackfillView, Plans
from pipeline.units import plural, seconds

LOOK_S: Final = 0.5
SAY_S: Final = 10.0  # where standard error is no terminal
ALONE: Final = "--list and --cancel stand alone; leave the archive and the other one out"
NO_READER: Final = "no reader runs; start `logweir up`, or raise reader_processes where it runs"


def main(args: argparse.Namespace) -> int:
    if args.url is not None and not args.list:
        raise BadInput("`logweir backfill` without --list works on the machine itself; leave out --url")
    if args.list and (args.place or args.cancel is not None):
        raise BadInput(ALONE)
    if args.url is not None:
        return _list(args, reading(args).backfills())
    settings = settings_of(args)
    set_up(settings.stack.log_level)
    if args.list:
        with redis_explained():
            return _list(args, reading(args).backfills())
    if args.cancel is not None:
        if args.place:
            raise BadInput(ALONE)
        settings = reached(settings)
        with redis_explained():
            return _cancel(args, Plans(connect(settings), settings))
    if not args.place:
        raise BadInput("nothing is named to read; give a folder or s3://bucket/prefix, or --list")
    if args.parallel > MAX_PARALLEL:
        raise BadInput(f"--parallel {args.parallel} is more than {MAX_PARALLEL} readers; give fewer")
    archive = archive_of(args.place)
    archive.check()
    settings = reached(settings)
    producer = Producer.connect(settings)
    plans = Plans(producer.ledger.client, settings)
    console = err()
    with redis_explained():
        with console.status(cell(f"listing {archive.url}")):
            found = planned(args, archive, plans, settings)
        for note in found.notes():
            remark(console, note)
        for _slot in plans.free_slots(found.plan.name):
            producer.submit.read(found.plan.name)
        if args.detach:
            return _detached(args, found, plans)
        return _Watching(found, plans, settings, console).until_over(as_json=args.json)


def _detached(args: argparse.Namespace, found: Planned, plans: Plans) -> int:
    view = _view(plans, found.plan.name)
    if args.json:
        print_json(_facts(view))
    else:
        out().print(f"{_title(view)}; `logweir backfill --list` shows it", markup=False, soft_wrap=True)
    return 0


class _Watching:
    """The foreground of a backfill, which only looks on."""

    def __init__(self, found: Planned, plans: Plans, settings: Settings, console: Console) -> None:
        self.name, self.plans, self.console = found.plan.name, plans, console
        self.presence = Presence(plans.client, settings)
        self.pace = ReadingPace()
        self.began, self.said = time.monotonic(), 0.0
        self.first_lines = _view(plans, self.name).lines
        self.shown: set[str] = set()

    def until_over(self, *, as_json: bool) -> int:
        try:
            with self.console.status("planned") as line:
                while not (view := self._look()).over:
                    sentence = self._sentence(view)
                    line.update(cell(sentence))
                    now = time.monotonic()
                    if not self.console.is_terminal and now - self.said >= SAY_S:
                        self.said = now
                        self.console.print(sentence, markup=False, soft_wrap=True)
                    time.sleep(LOOK_S)
        except KeyboardInterrupt as exc:
            raise KeyboardInterrupt(
                f"the backfill {self.name} goes on; the same command shows it again, "
                f"`logweir backfill --cancel {self.name}` ends it"
            ) from exc
        if view.state == "cancelled":
            raise Cancelled(f"the backfill {self.name} was cancelled; the same command goes on with it")
        return self._end(view, as_json=as_json)

    def _look(self) -> BackfillView:
        while True:
            try:
                view = _view(self.plans, self.name)
            except RedisUnavailable as exc:
                self._once(f"waiting: {exc}")
                time.sleep(LOOK_S)
                continue
            self.pace.see(time.monotonic(), lines=view.lines, bytes_read=view.bytes_read)
            for failure in view.failures:
                self._once(f"not read: {failure.why}")
            for note in view.notes:
                self._once(note)
            return view

    def _once(self, note: str) -> None:
        if note not in self.shown:
            self.shown.add(note)
            remark(self.console, note)

    def _sentence(self, view: BackfillView) -> str:
        rate = self.pace.lines_per_s
        remaining_s = self.pace.left_s(view.bytes - view.bytes_read)
        parts = [
            f"{view.done + view.skipped + view.failed:,} of {plural(view.pieces, 'piece')}",
            f"{plural(view.lines, 'line')} accepted",
            "pace not known yet" if rate is None else f"{rate:,.0f} lines/s",
            "time left not known yet" if remaining_s is None else f"about {seconds(remaining_s)} left",
        ]
        waits = view.waits or ("" if view.readers or self._readers() else NO_READER)
        return ", ".join(parts) + (f"; waiting: {waits}" if waits else "")

    def _readers(self) -> int:
        return sum(QUEUE_BACKFILL in worker.queues for worker in self.presence.live())

    def _end(self, view: BackfillView, *, as_json: bool) -> int:
        took = max(0.001, time.monotonic() - self.began)
        new = view.lines - self.first_lines
        if as_json:
            print_json(_facts(view) | {"new_lines": new, "seconds": round(took, 3)})
        elif not new and not view.failed:
            out().print(
                f"complete: {plural(view.lines, 'line')} of {plural(view.objects, 'object')} were accepted "
                "before, nothing is new",
                markup=False, soft_wrap=True,
            )  # fmt: skip
        else:
            failed = f"; {plural(view.failed, 'piece')} could not be read" if view.failed else ""
            out().print(
                f"complete: {plural(new, 'line')} of {plural(view.objects, 'object')} accepted in "
                f"{seconds(took)} ({new / took:,.0f} lines/s){failed}",
                markup=False, soft_wrap=True,
            )  # fmt: skip
        return 1 if view.failed else 0


def _view(plans: Plans, name: str) -> BackfillView:
    view = plans.view(name)
    if view is None:
        raise Cancelled(f"Redis has forgotten the backfill {name}; give the same command again")
    return view


def _list(args: argparse.Namespace, views: Sequence[BackfillView]) -> int:
    if args.json:
        print_json([_facts(view) for view in views])
        return 0
    console = out()
    if not views:
        console.print("no backfills; `logweir backfill s3://bucket/prefix` begins one")
    for view in views:
        created = datetime.fromtimestamp(view.created_ms / 1000, UTC)
        console.print(view.name, style="bold", markup=False, soft_wrap=True)
        console.print(
            f"  {_title(view)}; planned on {created:%Y-%m-%d %H:%M:%S} UTC", markup=False, soft_wrap=True
        )
        waits = [] if view.over else [view.waits]
        if view.state == "planning":
            waits.append("where no command plans it any more, give the same command again")
        for sentence in (*(f.why for f in view.failures), *waits):
            if sentence:
                console.print(f"  {printable(sentence)}", markup=False, soft_wrap=True)
    return 0


def _title(view: BackfillView) -> str:
    ended = view.done + view.skipped + view.failed
    failed = f", {plural(view.failed, 'piece')} failed" if view.failed else ""
    return (
        f"{view.state}: {printable(view.place)}, {ended:,} of {plural(view.pieces, 'piece')}, "
        f"{plural(view.lines, 'line')}{failed}"
    )


def _facts(view: BackfillView) -> dict[str, Any]:
    return asdict(view)


def _cancel(args: argparse.Namespace, plans: Plans) -> int:
    plans.cancel(args.cancel)
    if args.json:
        print_json(_facts(_view(plans, args.cancel)))
    else:
        out().print(
            f"backfill {args.cancel} is cancelled; accepted lines stay, and the same command goes on with it",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    return 0
