"""`logweir incidents`: what began together, the newest first; one of them with its causes and samples."""

import argparse
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from pipeline.commands.common import (
    NO_TIME,
    cell,
    err,
    out,
    print_json,
    print_outcome,
    printable,
    reached,
    reading,
    redis_explained,
    remark,
    settings_of,
)
from pipeline.errors import BadInput, LogweirError
from pipeline.records.batch import utc_now
from pipeline.service.handover.values import IncidentNote
from pipeline.service.values import CauseView, Decision, IncidentPage, IncidentView, OneIncident
from pipeline.units import listed, plural, seconds, time_of

if TYPE_CHECKING:
    from pipeline.service.reading import PipelineReader

PAGE: Final = 50  # incidents shown at once
TITLE_CHARS: Final = 160
AHEAD: Final = "ahead of the clock"
_KINDS: Final = {3: ("error", "bold red"), 2: ("warning", "bold yellow"), 1: ("unusual", "cyan")}


def main(args: argparse.Namespace) -> int:
    now = utc_now()
    since = time_of(args.since, now) if args.since else None
    if args.incident is not None and (args.open or since is not None):
        raise BadInput("one incident is shown whole; leave out --open and --since, or its id")
    if args.note is not None:
        return _write(args)
    at = reading(args)
    with redis_explained():
        if args.incident is not None:
            one = at.incident(args.incident)
            _notes(args, one.unseen)
            return _show(one, at.incident_notes(one.incident.id), as_json=args.json)
        page = at.incidents(only_open=args.open, since=since)
    _notes(args, page.unseen)
    code = _list(page, args)
    if not (args.json or args.open):
        day = now - timedelta(days=1)
        _news(at, day if since is None else max(since, day), now)
    return code


def _news(at: "PipelineReader", since: datetime, now: datetime) -> None:
    """What makes no incident: calm lines of a day or less that were never said before, folded to one."""
    try:
        found = at.news(since, now).news
    except LogweirError as exc:
        remark(err(), f"what was never said before is not known now: {exc}")
        return
    if found:
        others = f", and {len(found) - 1:,} more" if len(found) > 1 else ""
        said = _one_line(printable(found[0].message), TITLE_CHARS)
        out().print(
            f"\nnever said before: {said} ({found[0].why}){others}; `logweir results --news` lists them",
            style="dim", markup=False,
        )  # fmt: skip


def _write(args: argparse.Namespace) -> int:
    """Writes a note on an incident, under the name of the user of this machine."""
    from pipeline.redis.connection import connect
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.handover.notes import add_note

    if args.incident is None:
        raise BadInput("--note is of one incident; give its id, which `logweir incidents` lists")
    if args.url is not None:
        raise BadInput("`logweir incidents --note` works on the machine itself; leave out --url")
    settings = reached(settings_of(args))
    with redis_explained():
        note = add_note(connect(settings), settings, args.incident, args.note, by=user_of_machine())
    return print_outcome(args, asdict(note), f"the note of {note.by} is kept")


def _notes(args: argparse.Namespace, unseen: list[str]) -> None:
    for note in [] if args.json else unseen:
        out().print(note, style="yellow", markup=False, soft_wrap=True)


def _list(page: IncidentPage, args: argparse.Namespace) -> int:
    wanted = page.incidents
    if args.json:
        print_json([asdict(i) for i in wanted])
        return 0
    console = out()
    if not wanted:
        which = "open incidents" if args.open else "incidents"
        span = f" in the last {args.since}" if args.since else ""
        console.print(f"no {which}{span}" + (f"; {plural(page.kept, 'other')} kept" if page.kept else ""))
        return 0
    table = Table("incident", "began (UTC)", "for", "what", box=None, pad_edge=False, leading=1)
    for incident in wanted[:PAGE]:
        style = "bold" if incident.open else "dim"
        state = f"[{style}]{incident.state}[/]"
        table.add_row(
            Text.from_markup(f"{incident.id}\n{state}"),
            Text(f"{incident.first:%Y-%m-%d\n%H:%M:%S}" if incident.timed else NO_TIME),
            cell("" if not incident.timed else AHEAD if incident.ahead else lasting(incident)),
            Text("\n").join(_description(incident)),
        )
    console.print(table)
    if len(wanted) > PAGE:
        console.print(
            f"and {plural(len(wanted) - PAGE, 'older incident')}; --json shows all, --since 1h the latest"
        )
    return 0


def _description(incident: IncidentView) -> list[Text]:
    word, style = _KINDS[incident.severity]
    parts = [plural(len(incident.causes) + incident.more_causes, "cause"), plural(incident.count, "time")]
    if incident.seen_before is not None:
        parts.append(f"seen {plural(incident.seen, 'time')} before ({incident.seen_before})")
    began = incident.began_in()
    return [
        Text.assemble((word, style), " in ", (printable(listed(incident.workloads)), "bold")),
        cell(_one_line(incident.title, TITLE_CHARS)),
        *([Text(printable(began))] if began else []),
        Text(" · ".join(parts), "dim"),
    ]


def _show(one: OneIncident, notes: list[IncidentNote], *, as_json: bool) -> int:
    incident = one.incident
    if as_json:
        print_json(asdict(incident) | {"notes": [asdict(note) for note in notes]})
        return 0
    console = out()
    word, style = _KINDS[incident.severity]
    state = str(incident.state)
    console.print(
        Text.assemble(
            (incident.id, "bold"), ", ", (state, "bold"), ", ", (word, style), ", ", _when(incident)
        ),
        soft_wrap=True,
    )
    if incident.decision is not None:
        console.print(_decided(incident.decision), markup=False, soft_wrap=True)
    console.print(f"in {', '.join(map(printable, incident.workloads))}", markup=False, soft_wrap=True)
    console.print(_before(incident, one.like_began), markup=False, soft_wrap=True)
    _origin(incident)
    console.print()
    causes = len(incident.causes) + incident.more_causes
    console.print(
        f"{plural(causes, 'cause')}, seen {plural(incident.count, 'time')}; what it began with comes first:",
        markup=False,
    )
    for cause in incident.causes:
        word, style = _KINDS[cause.severity]
        console.print(
            Text.assemble(
                (word, style),
                f"  {printable(cause.workload)}  {printable(cause.mark or cause.cause)}  ",
                (_cause(cause), "dim"),
            ),
            soft_wrap=True,
        )
        if cause.source:
            console.print(f"    {printable(cause.source)}:{cause.line}", markup=False, soft_wrap=True)
        console.print(Text("    ") + cell(_one_line(cause.text, 1_000)), soft_wrap=True)
    if incident.more_causes:
        console.print(f"and {plural(incident.more_causes, 'cause')} more", markup=False)
    if notes:
        console.print("\nnotes, the oldest first:")
    for note in notes:
        console.print(f"{note.at:%Y-%m-%d %H:%M} UTC, {printable(note.by)}:", markup=False, style="dim")
        for line in note.text.splitlines():
            console.print(f"    {printable(line)}", markup=False, soft_wrap=True)
    if name := next(filter(None, (cause.mark for cause in incident.causes)), None):
        console.print(f"\n`logweir mark {name} normal` if this is nothing to be told of", markup=False)
    return 0


def _origin(incident: IncidentView) -> None:
    """Where it began, and why."""
    if began := incident.began_in():
        out().print(printable(began), style="bold", markup=False, soft_wrap=True)
        for origin in incident.origins:
            why = "; ".join(origin.reasons) or "nothing speaks for another one"
            out().print(printable(f"  {origin.workload}: {why}"), markup=False, soft_wrap=True)


def _decided(decision: Decision) -> str:
    until = f" until {decision.until:%Y-%m-%d %H:%M} UTC" if decision.until else ""
    why = f": {decision.why}" if decision.why else ""
    return printable(f"{decision.state} by {decision.by} at {decision.at:%Y-%m-%d %H:%M} UTC{until}{why}")


def _when(incident: IncidentView | CauseView) -> str:
    if not incident.timed:
        return NO_TIME
    first, last = incident.first, incident.last
    end = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
    until = f" to {end} UTC, {lasting(incident)}" if last > first else " UTC"
    ahead = f", {AHEAD}" if isinstance(incident, IncidentView) and incident.ahead else ""
    return f"{first:%Y-%m-%d %H:%M:%S}{until}{ahead}"


def lasting(incident: IncidentView | CauseView) -> str:
    return seconds((incident.last - incident.first).total_seconds())


def _cause(cause: CauseView) -> str:
    return f"{plural(cause.count, 'time')}, {_when(cause)}, score {cause.score:.2f}"


def _before(incident: IncidentView, like_began: datetime | None) -> str:
    if incident.seen_before is None:
        return "not seen before"
    when = ", no longer kept" if like_began is None else f" of {like_began:%Y-%m-%d %H:%M} UTC"
    return f"seen {plural(incident.seen, 'time')} before; most like {incident.seen_before}{when}"


def _one_line(text: str, limit: int) -> str:
    """A stack trace is told by its first line."""
    first, *others = text.strip().splitlines() or [""]
    return first[: limit - 2] + " …" if others or len(first) > limit else first
