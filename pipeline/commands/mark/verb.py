"""`logweir mark PATTERN normal | anomalous`, `--list`, `--revoke PATTERN`: operators overrule the model."""

import argparse
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pipeline.commands.common import (
    err,
    out,
    print_json,
    printable,
    reached,
    reading,
    redis_explained,
    settings_of,
    standard_input,
)
from pipeline.errors import BadInput
from pipeline.service.values import MarksView, MarkView
from pipeline.units import plural

if TYPE_CHECKING:
    from pipeline.service.mark_target import Finder, Named

SHOWN_CHARS = 300  # of a line


def main(args: argparse.Namespace) -> int:
    _check(args)
    if args.list:
        with redis_explained():
            return _list(args, reading(args).marks())
    if args.url is not None:
        raise BadInput("`logweir mark` without --list works on the machine itself; leave out --url")
    from pipeline.redis.connection import connect
    from pipeline.service.mark_target import Finder

    settings = reached(settings_of(args))
    with redis_explained():
        finder = Finder(
            connect(settings), settings, looking=lambda: err().status("looking through the stored lines")
        )
        return _revoke(args, finder) if args.revoke is not None else _put(args, finder)


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


def _put(args: argparse.Namespace, finder: "Finder") -> int:
    from pipeline.marks.marks import Kind
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.marks import mark_view, put_mark

    named = finder.find_line(_typed()) if args.pattern == "-" else finder.find(args.pattern)
    new = put_mark(
        finder.client,
        finder.settings,
        named,
        args.state,
        workload=args.workload or "",
        lasts=getattr(args, "for"),
        by=user_of_machine(),
        why=args.why or "",
    )
    remarks = new.remarks
    mark, replaced = mark_view(new.mark), None if new.replaced is None else mark_view(new.replaced)
    if args.json:
        stored = {
            "records": named.stored.records if named.stored.records or named.stored.complete else None,
            "complete": named.stored.complete,
            "template_id": named.template,
        }
        before = None if replaced is None else mark_facts(replaced)
        print_json({"marked": mark_facts(mark), "replaced": before, "seen": stored, "remarks": list(remarks)})
        return 0
    console = out()
    _show(mark, "marked")
    if replaced is not None:
        console.print(f"  instead of {_mark_text(replaced)}", markup=False, soft_wrap=True)
    console.print(f"  {_how_often(named)}; it counts from the next batch on", markup=False, soft_wrap=True)
    if new.mark.target.kind is Kind.PATTERN and named.template:
        console.print(
            f"  `logweir mark T{named.template} {mark.state}` marks all lines of its template",
            markup=False,
            soft_wrap=True,
        )
    for remark in remarks:
        err().print(printable(remark), markup=False, soft_wrap=True)
    return 0


def _revoke(args: argparse.Namespace, finder: "Finder") -> int:
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.marks import bare_target, mark_view, revoke_marks

    wanted = finder.targets_of_line(_typed()) if args.revoke == "-" else finder.targets(args.revoke)
    revoked = revoke_marks(finder.client, finder.settings, wanted, args.workload, by=user_of_machine())
    if not revoked:
        where = "" if args.workload is None else f" in {args.workload!r}"
        raise BadInput(
            f"there is no mark of {_shortly(args.revoke)}{where}; `logweir mark --list` shows what is marked"
        )
    if args.json:
        rows = [
            bare_target(target, whose) | ({} if mark is None else mark_facts(mark_view(mark)))
            for target, whose, mark in revoked
        ]
        print_json({"revoked": rows})
        return 0
    for target, whose, mark in revoked:
        text = (
            f"marked{_whose(whose) if target.of_lines else ''}"
            if mark is None
            else _mark_text(mark_view(mark))
        )
        out().print(f"{target} is not marked any more; it was {text}", markup=False, soft_wrap=True)
    return 0


def _typed() -> str:
    """The text of a record on standard input."""
    from pipeline.sources.framing import MAX_RECORD_BYTES
    from pipeline.sources.lines import decode

    return decode(standard_input().read(4 * MAX_RECORD_BYTES)).replace("\r\n", "\n").rstrip("\r\n")


def _list(args: argparse.Namespace, marked: MarksView) -> int:
    if args.json:
        print_json(asdict(marked))
        return 0
    for mark in marked.marks:
        _show(mark, "ran out:" if mark.expired else "")
    if not marked.marks:
        out().print("nothing is marked; `logweir mark PATTERN normal` marks a line that is", markup=False)
    if marked.unreadable:
        many = plural(len(marked.unreadable), "mark")
        err().print(
            f"{many} cannot be shown: {printable(marked.unreadable[0])}", markup=False, soft_wrap=True
        )
    return 0


def mark_facts(mark: MarkView) -> dict[str, Any]:
    """A mark that was changed now, for programs."""
    facts = asdict(mark)
    del facts["expired"]
    return facts


def _show(mark: MarkView, word: str) -> None:
    console = out()
    # Never cut: an id is there to be copied.
    head = " ".join(part for part in (word, mark.name, _mark_text(mark)) if part)
    console.print(head, style="bold", markup=False, soft_wrap=True)
    if mark.text:
        console.print(f"  {_shortly(mark.text)}", markup=False, soft_wrap=True)
    if mark.why:
        console.print(f"  why: {printable(mark.why)}", markup=False, soft_wrap=True)


def _mark_text(mark: MarkView) -> str:
    until = "" if mark.until is None else f" until {_minute(mark.until)} UTC"
    by = f", by {mark.by}" if mark.by else ""
    whose = _whose(mark.workload) if mark.of_lines else ""
    return printable(f"{mark.state}{whose}{until}{by} on {_minute(mark.at)} UTC")


def _whose(workload: str | None) -> str:
    """Nothing for a finding, which is of one workload by itself."""
    return printable(f" in {workload}" if workload else " in every workload")


def _how_often(named: "Named") -> str:
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
