"""`logweir formats`: the known formats, what a file is recognised as, and whether declared ones are sound."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import polars as pl
from rich.console import Console

from pipeline.commands.common import err, out, print_json, remark, settings_of
from pipeline.commands.recognition import TimesFound, broken, choice_of, offset_text, times_found
from pipeline.records.batch import utc_now
from pipeline.records.declared import Declaration, FormatChoice, read_formats, shipped_formats, shown
from pipeline.records.schema import raw_frame
from pipeline.settings.toml import shipped_file
from pipeline.sources import files, formats
from pipeline.sources.chunks import Chunk
from pipeline.sources.formats_text import NAMES
from pipeline.sources.packed.unpacking import Note
from pipeline.units import listed, one_line, plural

LOOKED_AT: Final = 2_000  # records of a file
MEMBERS: Final = 20  # of an archive
_SHOWN: Final = 3  # records, and lines that were not recognised
_CHARS: Final = 200
_FIELDS: Final = ("timestamp", "level", "host", "service", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """How the first records of a file are read. Shares are of records."""

    file: str
    records: int
    formats: dict[str, float]  # name: share; a record in a wrapper counts for both
    times: TimesFound
    with_level: int
    unrecognised: list[tuple[int, str]]  # line number, text
    parsed: list[dict[str, Any]]


def main(args: argparse.Namespace) -> int:
    if args.check is not None:
        return _check(args.check)
    choice, settings = choice_of(args), settings_of(args)
    if not args.files:
        _list(choice, as_json=args.json)
        return 0
    zone = settings.intake.time_zone
    notes: dict[str, None] = {}
    paths = files.choose(args.files).paths
    found = [facts for path in paths for facts in file_facts(path, choice, zone=zone, note=notes.setdefault)]
    if args.json:
        print_json([_as_json(facts) for facts in found])
        return 0
    console = out()
    for facts in found:
        _print(facts, console, zone)
    for note in notes:
        remark(console, note)
    return 0


def file_facts(path: Path, choice: FormatChoice, *, zone: str, note: Note) -> Iterator[FileFacts]:
    """The first LOOKED_AT records of a file, or of each of the first MEMBERS texts of an archive.

    Raises BadInput for what is no text log."""
    for number, reading in enumerate(
        files.read_texts(path, note=note, max_records=LOOKED_AT, choice=choice), start=1
    ):
        if number > MEMBERS:
            note(f"{path} has more than {MEMBERS} members, the rest is not looked at")
            return
        yield _facts(reading.source.name, next(reading.chunks, None), zone)


def _facts(name: str, chunk: Chunk | None, zone: str) -> FileFacts:
    records, names = (raw_frame([]), ()) if chunk is None else (chunk.records, chunk.formats)
    now = utc_now()
    claimed, counts = formats.format_claims(records["raw"], names)
    shares = {shown(name): count / records.height for name, count in counts.items()}
    parsed = formats.parse(records, names, arrived=now, zone=zone)
    unknown = records.filter(~claimed & records["raw"].str.contains(r"\S")).head(_SHOWN)
    rows = parsed.with_columns(pl.when("timed").then("timestamp").alias("timestamp"))
    return FileFacts(
        file=name,
        records=records.height,
        formats=shares,
        times=times_found(records, names, arrived=now, zone=zone),
        with_level=parsed["level"].drop_nulls().len(),
        unrecognised=list(unknown.select("line", "raw").iter_rows()),
        # a table's header is a record, too, and no example of one
        parsed=rows.filter(claimed)
        .sort("timed", descending=True, maintain_order=True)
        .head(_SHOWN)
        .select(_FIELDS)
        .to_dicts(),
    )


def _list(choice: FormatChoice, *, as_json: bool) -> None:
    declared = [Declaration.unpack(packed) for packed in choice.declared]
    rows = [(found.name, found.pattern) for found in declared]
    rows += [(found.name, found.example) for found in shipped_formats()]
    if as_json:
        print_json([{"name": name, "example": example} for name, example in rows])
        return
    console, width = out(), max(len(name) for name, _ in rows)
    for name, example in rows:
        console.print(f"{name:<{width}}  {one_line(example)[:_CHARS]}", markup=False, soft_wrap=True)


def _print(facts: FileFacts, console: Console, zone: str) -> None:
    def say(text: str) -> None:
        console.print(one_line(text)[: 2 * _CHARS], markup=False, soft_wrap=True)

    say(f"{facts.file}: the first {plural(facts.records, 'record')}")
    shares = [f"{name} {share:.1%}" for name, share in facts.formats.items()]
    say(f"  formats  {', '.join(shares) or 'none of the known ones'}")
    say(f"  time     {_times(facts.times, zone)}")
    say(f"  level    {_share(facts.with_level, facts.records)}")
    if facts.unrecognised:
        say("  not recognised:")
        for line, text in facts.unrecognised:
            say(f"    {line}: {text[:_CHARS]}")
    if facts.parsed:
        say("  read as time, level, host, service, message:")
    for row in facts.parsed:
        time = f"{row['timestamp']:%Y-%m-%d %H:%M:%S.%f}"[:-3] if row["timestamp"] else "-"
        say(f"    {' | '.join([time, *(row[name] or '-' for name in _FIELDS[1:])])}")


def _times(times: TimesFound, zone: str) -> str:
    parts = [_share(times.timed, times.records)]
    if times.years:
        parts.append(f"no year, guessed {listed(map(str, sorted(times.years)))}")
    if times.dates:
        parts.append("no date, the latest was guessed")
    if times.zones:
        parts.append(f"no zone, read as {zone}")
    parts += [f"{word} read as {offset_text(word, zone)}" for word in sorted(times.words)]
    return "; ".join(parts)


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "no records"


def _as_json(facts: FileFacts) -> dict[str, Any]:
    times = asdict(facts.times) | {"years": sorted(facts.times.years), "words": sorted(facts.times.words)}
    lines = [{"line": line, "text": text} for line, text in facts.unrecognised]
    return asdict(facts) | {"times": times, "unrecognised": lines}


def _check(path: Path) -> int:
    shipped = shipped_file("formats.toml")
    ours = path == Path() or (path.exists() and path.samefile(shipped))
    path = shipped if ours else path
    found = shipped_formats() if ours else read_formats(path)
    wrong = check_shipped() if ours else check_declarations(found)
    for fault in wrong:
        err().print(f"{path}: {fault}", markup=False, soft_wrap=True)
    if not wrong:
        out().print(f"{path}: {plural(len(found), 'format')}, nothing is wrong", markup=False, soft_wrap=True)
    return 2 if wrong else 0


def check_declarations(declarations: Sequence[Declaration]) -> list[str]:
    """The faults of these declarations, a sentence each."""
    wrong: list[str] = []
    names = [found.name for found in declarations]
    for at, found in enumerate(declarations):
        faults = broken(found)
        if found.name in NAMES or found.name in names[:at]:
            faults.append("another format has this name; choose another one")
        if not faults:
            faults += _of_examples(found, [o for o in (*declarations, *shipped_formats()) if o is not found])
        wrong += [f"format {found.name!r}: {fault}" for fault in faults]
    return wrong


def check_shipped() -> list[str]:
    """The faults of `config/formats.toml`, a sentence each."""
    wrong: list[str] = []
    for found in shipped_formats():
        names = formats.detect([found.example])
        faults = broken(found) if found.pattern else []
        if found.name not in names:
            faults.append(f"its example is recognised as {listed(names) or 'no format'}")
        faults += _of_expected(found, names)
        wrong += [f"format {found.name!r}: {fault}" for fault in faults]
    return wrong


def _of_examples(found: Declaration, others: Sequence[Declaration]) -> list[str]:
    if not found.example:
        return ["there is no example; add a line of the log, so that the pattern can be checked"]
    packed = found.pack()
    if not _matches(packed, found.example):
        return [f"the pattern does not match its example {found.example!r}"]
    wrong = _of_expected(found, (packed,))
    ambiguous = [other.name for other in others if other.example and _matches(packed, other.example)]
    if ambiguous:
        wrong.append(f"it also matches the example of {listed(ambiguous)}; make the pattern more specific")
    return wrong


def _of_expected(found: Declaration, names: tuple[str, ...]) -> list[str]:
    """What is not read from the example, by these formats, as the declaration expects."""
    expected = dict(found.expect)
    try:
        time = datetime.fromisoformat(expected.pop("time")) if "time" in expected else None
    except ValueError:
        return [
            f"the time {found.expect['time']!r} that it expects is none; write it as 2026-11-20T10:00:01Z"
        ]
    if unknown := set(expected) - set(_FIELDS):
        return [f"{min(unknown)!r} is expected; the keys of expect are time, {', '.join(_FIELDS[1:])}"]
    # A year or a date that the line does not write is the latest.
    arrived = utc_now() if time is None else time + timedelta(hours=1)
    row = formats.parse(raw_frame([found.example]), names, arrived=arrived).row(0, named=True)
    if found.clock is not None and not row["timed"]:
        return [f"the time of its example cannot be read as {found.time!r}"]
    wrong = (
        [] if time in (None, row["timestamp"]) else [f"the time of its example is read as {row['timestamp']}"]
    )
    for name, value in expected.items():
        if row[name] != value and not (name == "message" and row[name].startswith(value)):
            wrong.append(f"the {name} of its example is read as {row[name]!r}")
    return wrong


def _matches(packed: str, line: str) -> bool:
    full = pl.Series([line]).str.contains("(?s)" + Declaration.unpack(packed).pattern)
    # Parsing costs a hundred times as much as the pattern alone, so it comes second.
    return bool(full[0]) and formats.parse(raw_frame([line]), (packed,), arrived=utc_now()).height == 1
