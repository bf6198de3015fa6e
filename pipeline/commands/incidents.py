"""`logweir incidents`: what began together, the newest first; one of them with its causes and samples."""

import argparse
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, cast

from msgspec.structs import asdict
from rich.table import Table
from rich.text import Text

from pipeline.commands.common import (
    NO_TIME,
    cell,
    out,
    print_json,
    printable,
    reached,
    redis_explained,
    settings_of,
)
from pipeline.commands.status import in_flight
from pipeline.errors import BadInput
from pipeline.ledger.ledger import Ledger
from pipeline.marks.marks import Target
from pipeline.records.batch import utc_now
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.units import listed, plural, seconds, time_of
from pipeline.watching.incidents.live import Cause, Incident, Incidents
from pipeline.watching.rows import marked_as

PAGE: Final = 50  # incidents shown at once
TITLE_CHARS: Final = 160
_KINDS: Final = {3: ("error", "bold red"), 2: ("warning", "bold yellow"), 1: ("unusual", "cyan")}


def main(args: argparse.Namespace) -> int:
    own_settings = settings_of(args)
    now = utc_now()
    since = time_of(args.since, now) if args.since else None
    if args.incident is not None and (args.open or since is not None):
        raise BadInput("one incident is shown whole; leave out --open and --since, or its id")
    settings = reached(own_settings)
    with redis_explained():
        found = _incidents(settings, now)
        notes = [] if args.json else _unseen(settings)
    for note in notes:
        out().print(note, style="yellow", markup=False, soft_wrap=True)
    if args.incident is not None:
        return _show(_chosen(found, args.incident), found, as_json=args.json)
    return _list(found, args, since)


def incident_facts(incident: Incident) -> dict[str, Any]:
    """An incident for programs."""
    return {
        "id": incident.id,
        "first": incident.first,
        "last": incident.last,
        "timed": incident.timed,
        "open": incident.open,
        "severity": incident.severity,
        "score": incident.score,
        "title": incident.title,
        "workloads": list(incident.workloads),
        "count": incident.count,
        "seen": incident.seen,
        "seen_before": incident.seen_before,
        "causes": [asdict(cause) | {"mark": _mark(cause)} for cause in incident.causes],
        "more_causes": incident.more,
    }


def _incidents(settings: Settings, now: datetime) -> list[Incident]:
    blob = connect(settings).get(Keys(settings.redis.key_prefix).watching("incidents"))
    state = Incidents.unpack(cast("bytes | None", blob))
    state.close(now)  # of this copy: what is still open is a matter of now, not of the watcher's last look
    return state.all()


def _unseen(settings: Settings) -> list[str]:
    """Accepted lines and batches that may still change incidents, in words."""
    backlog = Ledger(connect(settings), settings).backlog
    totals = backlog.totals().values()
    lines = sum(in_flight(total) for total in totals)
    warming = sum(total.get("warming", 0) for total in totals)
    _, waiting = backlog.observed()
    parts = [plural(lines, "line")] if lines > 0 else []
    parts += [plural(waiting, "stored batch")] if waiting else []
    notes = [f"still looking at {' and '.join(parts)}"] if parts else []
    if warming > 0:
        notes.append(
            f"{plural(warming, 'stored line')} not judged yet; `logweir train` learns a model for them"
        )
    return notes


def _chosen(found: Sequence[Incident], name: str) -> Incident:
    """By its id or the beginning of it. Raises BadInput."""
    matches = [i for i in found if i.id.startswith(name)] if name else []
    if len(matches) > 1:
        raise BadInput(f"{plural(len(matches), 'incident')} begin with {name!r}; write more of the id")
    if not matches:
        raise BadInput(f"there is no incident {name!r}; `logweir incidents` lists them")
    return matches[0]


def _list(found: Sequence[Incident], args: argparse.Namespace, since: datetime | None) -> int:
    wanted = [i for i in found if (i.open or not args.open) and (since is None or i.last >= since)]
    if args.json:
        print_json([incident_facts(i) for i in wanted])
        return 0
    console = out()
    if not wanted:
        which = "open incidents" if args.open else "incidents"
        span = f" in the last {args.since}" if args.since else ""
        console.print(f"no {which}{span}" + (f"; {plural(len(found), 'other')} kept" if found else ""))
        return 0
    table = Table("incident", "began (UTC)", "for", "what", box=None, pad_edge=False, leading=1)
    for incident in wanted[:PAGE]:
        state = "[bold]open[/]" if incident.open else "[dim]closed[/]"
        table.add_row(
            Text.from_markup(f"{incident.id}\n{state}"),
            Text(f"{incident.first:%Y-%m-%d\n%H:%M:%S}" if incident.timed else NO_TIME),
            cell(lasting(incident) if incident.timed else ""),
            Text("\n").join(_description(incident)),
        )
    console.print(table)
    if len(wanted) > PAGE:
        console.print(
            f"and {plural(len(wanted) - PAGE, 'older incident')}; --json shows all, --since 1h the latest"
        )
    return 0


def _description(incident: Incident) -> list[Text]:
    word, style = _KINDS[incident.severity]
    parts = [plural(len(incident.causes) + incident.more, "cause"), plural(incident.count, "time")]
    if incident.seen_before is not None:
        parts.append(f"seen {plural(incident.seen, 'time')} before ({incident.seen_before})")
    return [
        Text.assemble((word, style), " in ", (printable(listed(incident.workloads)), "bold")),
        cell(_one_line(incident.title, TITLE_CHARS)),
        Text(" · ".join(parts), "dim"),
    ]


def _show(incident: Incident, found: Sequence[Incident], *, as_json: bool) -> int:
    if as_json:
        print_json(incident_facts(incident))
        return 0
    console = out()
    word, style = _KINDS[incident.severity]
    state = "open" if incident.open else "closed"
    console.print(
        Text.assemble(
            (incident.id, "bold"), ", ", (state, "bold"), ", ", (word, style), ", ", _when(incident)
        ),
        soft_wrap=True,
    )
    console.print(f"in {', '.join(map(printable, incident.workloads))}", markup=False, soft_wrap=True)
    console.print(_before(incident, found), markup=False, soft_wrap=True)
    console.print()
    causes = len(incident.causes) + incident.more
    console.print(
        f"{plural(causes, 'cause')}, seen {plural(incident.count, 'time')}; what it began with comes first:",
        markup=False,
    )
    for cause in incident.causes:
        word, style = _KINDS[cause.severity]
        console.print(
            Text.assemble(
                (word, style),
                f"  {printable(cause.workload)}  {printable(_mark(cause) or cause.cause)}  ",
                (_cause(cause), "dim"),
            ),
            soft_wrap=True,
        )
        if cause.source:
            console.print(f"    {printable(cause.source)}:{cause.line}", markup=False, soft_wrap=True)
        console.print(Text("    ") + cell(_one_line(cause.text, 1_000)), soft_wrap=True)
    if incident.more:
        console.print(f"and {plural(incident.more, 'cause')} more", markup=False)
    if name := next(filter(None, map(_mark, incident.causes)), None):
        console.print(f"\n`logweir mark {name} normal` if this is nothing to be told of", markup=False)
    return 0


def _mark(cause: Cause) -> str | None:
    """How `logweir mark` names it."""
    number = marked_as(cause.workload, cause.cause)
    return None if number is None else str(Target.template(number))


def _when(incident: Incident | Cause) -> str:
    if not incident.timed:
        return NO_TIME
    first, last = incident.first, incident.last
    end = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
    until = f" to {end} UTC, {lasting(incident)}" if last > first else " UTC"
    return f"{first:%Y-%m-%d %H:%M:%S}{until}"


def lasting(incident: Incident | Cause) -> str:
    return seconds((incident.last - incident.first).total_seconds())


def _cause(cause: Cause) -> str:
    return f"{plural(cause.count, 'time')}, {_when(cause)}, score {cause.score:.2f}"


def _before(incident: Incident, found: Sequence[Incident]) -> str:
    if incident.seen_before is None:
        return "not seen before"
    when = next(
        (f" of {i.first:%Y-%m-%d %H:%M} UTC" for i in found if i.id == incident.seen_before),
        ", no longer kept",
    )
    return f"seen {plural(incident.seen, 'time')} before; most like {incident.seen_before}{when}"


def _one_line(text: str, limit: int) -> str:
    """A stack trace is told by its first line."""
    first, *others = text.strip().splitlines() or [""]
    return first[: limit - 2] + " …" if others or len(first) > limit else first
