"""`logweir sessions`: sessions that left the course of the others; with KEY the records of one."""

import argparse
from dataclasses import asdict
from datetime import datetime

from rich.table import Table

from pipeline.commands.common import cell, out, print_json, reading
from pipeline.records.batch import utc_now
from pipeline.service.questions import pattern_span
from pipeline.service.reading import PipelineReader
from pipeline.service.stored.values import SESSION_RECORDS, SessionFinding, SessionRecords
from pipeline.units import listed, plural

SHOWN = 100  # findings, without --limit


def main(args: argparse.Namespace) -> int:
    since, until = pattern_span(args.since, args.until, utc_now(), flags=("--since", "--until"))
    at = reading(args, stored=True)
    if args.session is not None:
        return _show_session(args, at, since, until)
    found = at.sessions(since, until, args.limit or SHOWN)
    if args.json:
        print_json([asdict(one) for one in found])
    elif not found:
        out().print("no session left the course of the others in this span; choose another --since")
    else:
        out().print(_findings(found))
    return 0


def _findings(found: list[SessionFinding]) -> Table:
    table = Table("time (UTC)", "workload", "session", "why", box=None, pad_edge=False)
    for one in found:
        table.add_row(
            *(cell(value) for value in (f"{one.at:%Y-%m-%d %H:%M:%S}", one.workload, one.key, one.why))
        )
    return table


def _show_session(args: argparse.Namespace, at: PipelineReader, since: datetime, until: datetime) -> int:
    found = at.session(args.session, since, until, args.limit or SESSION_RECORDS)
    if args.json:
        print_json(asdict(found))
        return 0
    console = out()
    if found.lines:
        table = Table("time (UTC)", "workload", "level", "message", box=None, pad_edge=False)
        for line in found.lines:
            at_text = f"{line.timestamp:%Y-%m-%d %H:%M:%S}"
            values = (at_text, line.workload, line.level or "", (line.message or "")[:300])
            table.add_row(*(cell(value) for value in values))
        console.print(table)
    for sentence in _about(found):
        console.print(cell(sentence), soft_wrap=True)
    return 0


def _about(found: SessionRecords) -> list[str]:
    if not found.lines:
        return [f"no record holds {found.key!r} in this span; choose another --since or --until"]
    older = "; there are older ones" if found.more else ""
    said = [f"{plural(len(found.lines), 'record')} of {listed(found.workloads, 5)}{older}"]
    said += [f"found in {one.workload}: {one.why}" for one in found.findings]
    said += [f"still open in {one.workload}: {plural(one.events, 'event')} so far" for one in found.in_hand]
    for near in found.nearest:
        for other in near.differences:
            said.append(
                f"the nearest normal session of {near.workload} has {other.there:,} of T{other.template_id} "
                f"{other.template or ''}, this one {other.here:,}"
            )
    return said
