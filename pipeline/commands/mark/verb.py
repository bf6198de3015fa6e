"""`logweir mark PATTERN normal | anomalous`, `--list`, `--revoke PATTERN`: operators overrule the model."""

import argparse
import getpass
import os
from datetime import datetime, timedelta
from typing import Any

from pipeline.commands.common import err, out, print_json, printable, reached, redis_explained, settings_of
from pipeline.commands.mark.target import Finder, Named
from pipeline.errors import BadInput
from pipeline.ledger.ledger import Ledger
from pipeline.marks.marks import Kind, Mark, Marked, State, Target
from pipeline.marks.store import Marks
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.units import plural, span

SHOWN_CHARS = 300  # of a line


def main(args: argparse.Namespace) -> int:
    _check(args)
    settings = reached(settings_of(args))
    with redis_explained():
        marks = Marks(connect(settings), settings)
        if args.list:
            return _list(args, marks.look())
        finder = Finder(marks.client, settings)
        return (
            _revoke(args, marks, finder) if args.revoke is not None else _put(args, settings, marks, finder)
        )


def _check(args: argparse.Namespace) -> None:
    """Raises BadInput for arguments that do not belong together."""
    texts = [f"--{name}" for name in ("for", "why") if getattr(args, name) is not None]
    if args.list or args.revoke is not None:
        flag = "--list" if args.list else "--revoke"
        extra = [repr(word) for word in (args.pattern, args.state) if word is not None] + texts
        extra += ["--revoke"] if args.list and args.revoke is not None else []
        extra += ["--workload"] if args.list and args.workload is not None else []
        if extra:
            raise BadInput(f"`logweir mark {flag}` goes without {extra[0]}; leave it out")
    elif args.pattern is None or args.state is None:
        raise BadInput(
            "`logweir mark` needs a PATTERN and `normal` or `anomalous`; --list shows the marks, --revoke "
            "PATTERN takes one back"
        )
    if args.workload == "":
        raise BadInput("--workload is empty; write a whole name, or leave it out for every workload")


def _put(args: argparse.Namespace, settings: Settings, marks: Marks, finder: Finder) -> int:
    lasts = _lasts(getattr(args, "for"))
    named = finder.find(args.pattern)
    remarks = list(named.remarks)
    workload = args.workload or ""
    if workload and workload not in Ledger(marks.client, settings).backlog.totals():
        remarks.append(f"no line of {workload!r} was seen yet; `logweir watch list` shows the names")
    mark, replaced = marks.put(
        named.target,
        State(args.state),
        text=named.text,
        workload=workload,
        lasts=lasts,
        by=_who(),
        why=args.why or "",
    )
    if args.json:
        stored = {
            "records": named.stored.records if named.stored.records or named.stored.complete else None,
            "complete": named.stored.complete,
            "template_id": named.template,
        }
        before = None if replaced is None else mark_facts(replaced)
        print_json({"marked": mark_facts(mark), "replaced": before, "seen": stored, "remarks": remarks})
        return 0
    console = out()
    _show(mark, "marked")
    if replaced is not None:
        console.print(f"  instead of {_mark_text(replaced)}", markup=False, soft_wrap=True)
    console.print(f"  {_how_often(named)}; it counts from the next batch on", markup=False, soft_wrap=True)
    if mark.target.kind is Kind.PATTERN and named.template:
        console.print(
            f"  `logweir mark T{named.template} {mark.state}` marks all lines of its template",
            markup=False,
            soft_wrap=True,
        )
    for remark in remarks:
        err().print(printable(remark), markup=False, soft_wrap=True)
    return 0


def _revoke(args: argparse.Namespace, marks: Marks, finder: Finder) -> int:
    targets, text = finder.targets(args.revoke)
    before = {(mark.target, mark.workload): mark for mark in marks.look().marks}
    words = " ".join(text.split())
    # A template has gained wildcards since, or the masks are others now: its text as `--list` shows it still
    # names it.
    targets += [
        target for (target, _), mark in before.items() if words and " ".join(mark.text.split()) == words
    ]
    revoked = marks.revoke(targets, args.workload)
    if not revoked:
        where = "" if args.workload is None else f" in {args.workload!r}"
        raise BadInput(
            f"there is no mark of {_shortly(args.revoke)}{where}; `logweir mark --list` shows what is marked"
        )
    rows = [
        _bare(target, whose) | ({} if (mark := before.get((target, whose))) is None else mark_facts(mark))
        for target, whose in revoked
    ]
    if args.json:
        print_json({"revoked": rows})
        return 0
    for target, whose in revoked:
        mark = before.get((target, whose))
        text = f"marked{_whose(target, whose)}" if mark is None else _mark_text(mark)
        out().print(f"{target} is not marked any more; it was {text}", markup=False, soft_wrap=True)
    return 0


def _list(args: argparse.Namespace, marked: Marked) -> int:
    if args.json:
        marks = [mark_facts(mark) | {"expired": not mark.holds(marked.now)} for mark in marked.marks]
        print_json({"version": marked.version, "marks": marks, "unreadable": list(marked.unreadable)})
        return 0
    for mark in marked.marks:
        _show(mark, "" if mark.holds(marked.now) else "ran out:")
    if not marked.marks:
        out().print("nothing is marked; `logweir mark PATTERN normal` marks a line that is", markup=False)
    if marked.unreadable:
        many = plural(len(marked.unreadable), "mark")
        err().print(
            f"{many} cannot be shown: {printable(marked.unreadable[0])}", markup=False, soft_wrap=True
        )
    return 0


def mark_facts(mark: Mark) -> dict[str, Any]:
    """A mark for programs."""
    return _bare(mark.target, mark.workload) | {
        "state": mark.state.value,
        "text": mark.text,
        "at": mark.at,
        "until": mark.until,
        "by": mark.by,
        "why": mark.why,
    }


def _bare(target: Target, workload: str) -> dict[str, Any]:
    number = {kind: target.number if target.kind is kind else None for kind in Kind}
    return {
        "pattern_id": number[Kind.PATTERN],
        "template_id": number[Kind.TEMPLATE],
        "workload": workload or None,
    }


def _show(mark: Mark, word: str) -> None:
    console = out()
    # Never cut: an id is there to be copied.
    head = " ".join(part for part in (word, str(mark.target), _mark_text(mark)) if part)
    console.print(head, style="bold", markup=False, soft_wrap=True)
    if mark.text:
        console.print(f"  {_shortly(mark.text)}", markup=False, soft_wrap=True)
    if mark.why:
        console.print(f"  why: {printable(mark.why)}", markup=False, soft_wrap=True)


def _mark_text(mark: Mark) -> str:
    until = "" if mark.until is None else f" until {_minute(mark.until)} UTC"
    by = f", by {mark.by}" if mark.by else ""
    whose = _whose(mark.target, mark.workload)
    return printable(f"{mark.state}{whose}{until}{by} on {_minute(mark.at)} UTC")


def _whose(target: Target, workload: str) -> str:
    if not target.of_lines:  # of one workload by itself
        return ""
    return printable(f" in {workload}" if workload else " in every workload")


def _how_often(named: Named) -> str:
    stored = named.stored
    if not stored.records:
        return (
            "no stored line has it yet" if stored.complete else "nobody knows how many stored lines have it"
        )
    count = plural(stored.records, "stored line" if named.target.of_lines else "stored finding")
    return f"{'' if stored.complete else 'at least '}{count} {'has' if stored.records == 1 else 'have'} it"


def _shortly(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + "..."


def _minute(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def _lasts(text: str | None) -> timedelta | None:
    if text is None:
        return None
    try:
        length = span(text)
    except OverflowError:
        length = None
    if not length:
        raise BadInput(
            f"--for {text!r} is no length of time; write 90s, 15m, 1h or 7d, or leave it out for ever"
        )
    return length


def _who() -> str:
    """Whom others may ask about the mark: the user as this machine knows them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user without a name
        return f"uid {os.getuid()}"
