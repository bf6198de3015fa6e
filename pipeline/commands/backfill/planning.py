"""Makes the plan of a backfill: which objects, in which pieces."""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Final

import msgspec

from pipeline.commands.recognition import choice_of
from pipeline.errors import BadInput
from pipeline.producer import check_workload
from pipeline.records.batch import utc_now
from pipeline.settings import Settings
from pipeline.sources.backfill.archive import Archive, ArchiveObject
from pipeline.sources.backfill.borders import may_cut
from pipeline.sources.backfill.pieces import PIECE_BYTES, BackfillPlan, Piece, cut, plan_name
from pipeline.sources.backfill.plans import Plans
from pipeline.sources.backfill.window import Window
from pipeline.sources.folders import Filter, Skipped
from pipeline.sources.packed.bytestreams import LOOK_BYTES
from pipeline.units import plural, time_of

MOST_NAMED: Final = 3


@dataclass(slots=True)
class Planned:
    """The outcome of planning. `words`: how many objects were new, known, reopened or changed."""

    plan: BackfillPlan
    words: Counter[str] = field(default_factory=Counter)
    changed: list[str] = field(default_factory=list)  # the first few
    skipped: Skipped = field(default_factory=Skipped)

    def notes(self) -> list[str]:
        """Sentences about what is not read."""
        found = []
        if count := self.skipped.count:
            found.append(
                f"left out {plural(count, 'object')}, as links that lead out, unreadable or with characters "
                f"that cannot be shown: {self.skipped.names()}"
            )
        if count := self.words["changed"]:
            names = ", ".join(self.changed) + (
                f" and {count - len(self.changed):,} more" if count > 3 else ""
            )
            found.append(
                f"{plural(count, 'object')} changed since this backfill was planned, nothing new of them is "
                f"read: {names}; send what grows with `logweir send`"
            )
        return found


def planned(args: argparse.Namespace, archive: Archive, plans: Plans, settings: Settings) -> Planned:
    """Lists the archive and writes the plan; the same command again adds what is new. Raises BadInput."""
    wanted = _plan_of(args, archive, settings)
    stands = plans.plan(wanted.name) or wanted  # its moments are those of its beginning
    stands = msgspec.structs.replace(stands, root=archive.root())
    found = Planned(stands)
    counts = Counter[str]()
    window = Window(since=_moment(stands.since_ms), until=_moment(stands.until_ms))
    objects = _in_window(
        archive, Filter(include=stands.include, exclude=stands.exclude), window, counts, found.skipped
    )
    first = next(objects, None)
    if first is None:
        raise BadInput(_nothing(archive, counts["listed"], args))
    plans.begin(stands, parallel=args.parallel)
    names: list[str] = []
    for word in plans.add(stands.name, _with_pieces(archive, chain([first], objects), stands, names)):
        found.words[word] += 1
        name = names.pop(0)
        if word == "changed" and len(found.changed) < MOST_NAMED:
            found.changed.append(name)
    plans.planned(stands.name)
    return found


def _plan_of(args: argparse.Namespace, archive: Archive, settings: Settings) -> BackfillPlan:
    now, choice = utc_now(), choice_of(args)
    since = time_of(args.since, now) if args.since else None
    until = time_of(args.until, now, flag="--until") if args.until else None
    if since is not None and until is not None and since >= until:
        raise BadInput(f"--since {args.since!r} is not before --until {args.until!r}; exchange them")
    workload = check_workload(args.workload) if args.workload else ""
    words = (args.since or "", args.until or "", workload, *args.include, "", *args.exclude)
    return BackfillPlan(
        name=plan_name(archive.url, *words, *choice.declared, choice.forced),
        place=archive.url,
        since=args.since or "",
        until=args.until or "",
        include=tuple(args.include),
        exclude=tuple(args.exclude),
        workload=workload,
        zone=settings.intake.time_zone,
        declared=choice.declared,
        forced=choice.forced,
        since_ms=_ms(since),
        until_ms=_ms(until),
        piece_bytes=PIECE_BYTES,
    )


def _in_window(
    archive: Archive, wanted: Filter, window: Window, counts: Counter[str], skipped: Skipped
) -> Iterator[ArchiveObject]:
    for one in archive.objects(wanted, skipped):
        counts["listed"] += 1
        if window.takes(one.name, one.changed):
            yield one


def _with_pieces(
    archive: Archive, objects: Iterator[ArchiveObject], plan: BackfillPlan, names: list[str]
) -> Iterator[tuple[ArchiveObject, list[Piece]]]:
    """Only large objects are looked at. `names` gets the objects in their order."""
    for one in objects:
        ranges = one.size > plan.piece_bytes and may_cut(archive.read(one, 0, LOOK_BYTES), plan.choice)
        names.append(archive.shown(one.name))
        yield one, list(cut(one, ranges=ranges, piece_bytes=plan.piece_bytes))


def _nothing(archive: Archive, listed: int, args: argparse.Namespace) -> str:
    if not listed:
        globs = " that --include and --exclude leave" if args.include or args.exclude else ""
        return f"{archive.url} has no object{globs}; check the name and what lies there"
    them = "the one object" if listed == 1 else f"the {listed:,} objects"
    return (
        f"none of {them} of {archive.url} lies between --since {args.since or 'the beginning'} and --until "
        f"{args.until or 'now'}; the date in a name counts, else the time of change"
    )


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
