"""`logweir units`: the most unusual host, pod, service or session first, with its reasons."""

import argparse
from dataclasses import asdict

from pipeline.commands.common import cell, out, print_json, reading
from pipeline.records.batch import utc_now
from pipeline.service.stored.asked_units import UnitsFound, units_asked
from pipeline.units import chance, one_line, plural


def main(args: argparse.Namespace) -> int:
    asked = units_asked(
        args.by,
        args.since,
        args.until,
        args.normal,
        utc_now(),
        workload=args.workload or None,
        limit=args.limit,
    )
    found = reading(args, stored=True).units(asked)
    if args.json:
        print_json(asdict(found))
        return 0
    console = out()
    ranking = found.ranking
    for place, unit in enumerate(ranking.units, start=1):
        state = "unusual, " if unit.unusual else ""
        console.print(
            cell(
                f"{place}. {one_line(unit.unit)}  {state}p {chance(unit.p_value)}, {plural(unit.lines, 'line')}, "
                f"{unit.flagged:,} anomalous"
            ),
            soft_wrap=True,
        )
        for reason in unit.reasons:
            console.print(cell(f"   {one_line(reason.text)}"), soft_wrap=True)
    for sentence in _remarks(found):
        console.print(cell(sentence), soft_wrap=True)
    return 0


def _remarks(found: UnitsFound) -> list[str]:
    """What the order rests on."""
    ranking, noun = found.ranking, found.by
    if not ranking.judged:
        named = f"; {plural(found.unnamed, 'line')} name none" if found.unnamed else ""
        return [f"no line of this span names a {noun}{named}; choose another --by or --since"]
    said = [f"{plural(ranking.judged, 'unit')} by {noun}, beside {plural(ranking.normal, 'normal unit')}"]
    if ranking.among:
        said = [f"{plural(ranking.judged, 'unit')} by {noun}, beside each other: no normal unit was found"]
    elif ranking.unusual is None:
        said.append("too few to say what is normal; give an earlier --normal")
    else:
        said.append(f"{ranking.unusual or 'none'} of them unusual")
    if found.open:
        said.append(f"{plural(found.open, 'session')} may go on and are left out")
    if found.unnamed:
        said.append(f"{plural(found.unnamed, 'line')} name no {noun}")
    return said
