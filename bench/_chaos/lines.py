"""Every line that was accepted is stored once, or dead and then poison; nothing else is there (invariants 1
and 2)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import polars as pl

from bench._chaos.there import MARK_SCHEMA, Letter, Stored, short
from bench._chaos.told import MOST, Answer, Operation, Told, Violation, named, spans


@dataclass(slots=True)
class Lines:
    """The account of all lines."""

    accepted: int = 0
    stored: int = 0
    lost: int = 0
    doubled: int = 0
    dead: int = 0
    dead_poison: int = 0
    violations: list[Violation] = field(default_factory=list)


def expected(told: Told) -> pl.DataFrame:
    """One row per line that anybody tried to send: workload, number, batch ("" of a file), answer, may_die.

    Raises ValueError when two batches send the same line.
    """
    batches = list(told.batches.values())
    pushed = (
        pl.DataFrame(
            {
                "workload": [s.workload for s in batches],
                "batch": [s.batch_id for s in batches],
                "answer": [s.answer.value for s in batches],
                "first": [s.first for s in batches],
                "end": [s.first + s.lines for s in batches],
                "any_dies": [s.poison == "corrupt" for s in batches],
                "dies": [s.poison_line if s.poison else None for s in batches],
            },
            schema_overrides={"workload": pl.String, "batch": pl.String, "answer": pl.String, "first": pl.Int64,
                "end": pl.Int64, "any_dies": pl.Boolean, "dies": pl.Int64},
        )
        .with_columns(number=pl.int_ranges("first", "end"))
        .explode("number")
        .drop_nulls("number")
        .select(
            *("workload", "number", "batch", "answer"),
            may_die=pl.col("any_dies") | (pl.col("number") == pl.col("dies")).fill_null(value=False),
        )
    )  # fmt: skip
    followed = [
        pl.DataFrame({"number": pl.int_range(1, written + 1, eager=True)}).select(
            workload=pl.lit(workload),
            number=pl.col("number").cast(pl.Int64),
            batch=pl.lit(""),
            answer=pl.lit(Answer.OK.value),
            may_die=pl.lit(value=False),
        )
        for workload, written in told.written().items()
    ]
    lines = pl.concat([pushed, *followed])
    twice = lines.filter(pl.struct("workload", "number").is_duplicated())
    if twice.height:
        row = twice.row(0, named=True)
        raise ValueError(f"the history sends line {row['number']} of {row['workload']} in two batches")
    return lines


def account(told: Told, have: Stored, waiting: list[Letter], discarded: Mapping[str, int]) -> Lines:
    """Hold what is there against what should be. `discarded`: lines of dead letters that an operator threw
    away."""
    lines = Lines(stored=sum(have.physical.values()), violations=[*have.violations])
    dead = [letter for letter in waiting if letter.state == "dead" and not letter.rescore]
    flying = [letter for letter in waiting if letter.state != "dead"]
    every = _joined(expected(told), have, dead, [letter for letter in flying if not letter.rescore])
    lines.dead = sum(letter.lines for letter in dead)
    lines.violations += _forgotten(told)
    lines.violations += _doubled(told, every, have, lines)
    lines.violations += _unexpected(told, every, have)
    lines.violations += _missing(told, every, waiting, lines, dict(discarded))
    lines.violations += _dead(told, every, dead, lines)
    lines.violations += _rescoring_died(told, waiting)
    lines.violations += _waiting(told, flying)
    return lines


def _joined(lines: pl.DataFrame, have: Stored, dead: list[Letter], flying: list[Letter]) -> pl.DataFrame:
    """Every line that was sent or is there, with how often it is stored, dead and in flight."""
    key = ["workload", "number"]
    in_files = have.lines.group_by(key).agg(
        pl.len().alias("stored"),
        pl.col("record_id").n_unique().alias("ids"),
        pl.col("file").unique().alias("files"),
    )

    def counted(some: list[Letter], name: str) -> pl.DataFrame:
        frames = [letter.marks for letter in some if letter.marks is not None]
        return pl.concat([pl.DataFrame(schema=MARK_SCHEMA), *frames]).group_by(key).agg(pl.len().alias(name))

    every = lines
    for part in (in_files, counted(dead, "dead"), counted(flying, "flying")):
        every = every.join(part, on=key, how="full", coalesce=True)
    return every.with_columns(pl.col("stored", "dead", "flying", "ids").fill_null(0))


def _forgotten(told: Told) -> Iterator[Violation]:
    """An id is accepted once; after that it is a duplicate."""
    for sent in told.batches.values():
        times = sum(1 for item in sent.operations if item["answer"] == "accepted")
        if times > 1:
            what = f"batch {sent.batch_id} of {sent.workload} was accepted {times} times, so the ledger had forgotten it"
            yield Violation(invariant=1, what=what, trace=told.trace(sent.operations))


def _doubled(told: Told, every: pl.DataFrame, have: Stored, lines: Lines) -> Iterator[Violation]:
    copies = pl.col("stored") + pl.col("dead") + pl.col("flying")
    bad = every.filter(copies > 1).with_columns(copies=copies.cast(pl.Int64))
    lines.doubled = int((bad["copies"] - 1).sum())
    groups = bad.group_by("workload", "batch", "stored", "ids", "dead", "flying", maintain_order=True).agg(
        "number", pl.col("files").first()
    )
    for row in groups.head(MOST).iter_rows(named=True):
        parts = (
            [f"stored {row['stored']} times"] if row["stored"] > 1 else ["stored"] if row["stored"] else []
        )
        parts += [name for name, n in (("dead", row["dead"]), ("in flight", row["flying"])) if n]
        under = f", under {row['ids']} record ids" if row["ids"] > 1 else ""
        where = f", in {', '.join(sorted(map(short, row['files'] or [])))}" if row["files"] else ""
        what = f"{named(row['number'])} of {row['workload']} are {' and '.join(parts)}{under}{where}"
        yield Violation(
            invariant=1, what=what, trace=_trace(told, row["batch"], row["workload"], row["number"][0])
        )
    same = (
        have.lines.group_by("record_id")
        .agg(
            pl.struct("workload", "number").n_unique().alias("marks"),
            pl.col("file").n_unique().alias("files"),
        )
        .filter((pl.col("marks") > 1) & (pl.col("files") > 1))
    )
    if same.height:
        what = f"{same.height} record ids name different lines in different files, the first is {same['record_id'][0]}"
        yield Violation(invariant=1, what=what)


def _unexpected(told: Told, every: pl.DataFrame, have: Stored) -> Iterator[Violation]:
    there = (pl.col("stored") + pl.col("dead") + pl.col("flying")) > 0
    for name, wrong in (
        ("were never sent", pl.col("answer").is_null()),
        ("were refused", pl.col("answer") == Answer.FAIL.value),
    ):
        groups = every.filter(there & wrong).group_by("workload", "batch", maintain_order=True).agg("number")
        for row in groups.head(MOST).iter_rows(named=True):
            what = f"{named(row['number'])} of {row['workload']} are there, but {name}"
            yield Violation(
                invariant=1,
                what=what,
                trace=_trace(told, row["batch"] or "", row["workload"], row["number"][0]),
            )
    strange = have.lines.filter(pl.col("owner") != pl.col("workload"))
    for row in strange.unique(["owner", "workload"], maintain_order=True).head(MOST).iter_rows(named=True):
        what = f"line {row['number']} of {row['workload']} is stored as one of {row['owner']}, in {short(row['file'])}"
        yield Violation(invariant=1, what=what)


def _missing(
    told: Told, every: pl.DataFrame, waiting: list[Letter], lines: Lines, discarded: dict[str, int]
) -> Iterator[Violation]:
    """Lines that are nowhere. Also counts what was accepted."""
    there = (pl.col("stored") + pl.col("dead") + pl.col("flying")) > 0
    damaged: dict[str, int] = {}
    for letter in waiting:
        if letter.marks is None and not letter.rescore:
            damaged[letter.root] = damaged.get(letter.root, 0) + letter.lines
    groups = (
        every.filter(pl.col("answer").is_in([Answer.OK.value, Answer.UNKNOWN.value]))
        .group_by("workload", "batch", "answer", maintain_order=True)
        .agg(
            pl.len().alias("sent"),
            pl.col("number").filter(~there).alias("gone"),
            (~there & pl.col("may_die")).sum().alias("poison"),
        )
    )
    shown = 0
    for row in groups.iter_rows(named=True):
        batch, gone = row["batch"], row["gone"]
        none_there = len(gone) == row["sent"] and not damaged.get(batch)
        if row["answer"] == Answer.UNKNOWN.value and none_there:
            continue  # it was never taken
        lines.accepted += row["sent"]
        thrown_away = min(row["poison"], discarded.get(row["workload"], 0))
        discarded[row["workload"]] = discarded.get(row["workload"], 0) - thrown_away
        lost = max(0, len(gone) - damaged.get(batch, 0) - thrown_away)
        if not lost:
            continue
        lines.lost += lost
        shown += 1
        if shown > MOST:
            continue
        of = f"batch {batch}" if batch else "the followed file"
        how = "accepted" if row["answer"] == Answer.OK.value else "partly stored"
        what = f"{lost} of {row['sent']} lines of {of} are lost: it was {how}, and {row['workload']} lacks {spans(gone)}"
        yield Violation(
            invariant=1 if batch else 2, what=what, trace=_trace(told, batch, row["workload"], gone[0])
        )
    if shown > MOST:
        yield Violation(invariant=1, what=f"{shown - MOST} more batches have lost lines")


def _dead(told: Told, every: pl.DataFrame, dead: list[Letter], lines: Lines) -> Iterator[Violation]:
    reasons = {letter.root: letter.reason for letter in dead}
    for letter in dead:
        if letter.marks is not None:
            continue
        sent = told.batches.get(letter.root)
        if sent is not None and sent.poison == "corrupt" and sent.answer is not Answer.FAIL:
            lines.dead_poison += letter.lines
        else:
            what = f"batch {letter.batch_id} of {letter.workload} is dead, though nobody damaged it: {letter.reason}"
            yield Violation(invariant=1, what=what, trace=_trace(told, letter.root, letter.workload))
    buried = every.filter(pl.col("dead") > 0)
    lines.dead_poison += int(buried.filter(pl.col("may_die")).height)
    wrong = buried.filter(~pl.col("may_die").fill_null(value=False))
    groups = wrong.group_by("workload", "batch", maintain_order=True).agg("number")
    for row in groups.head(MOST).iter_rows(named=True):
        batch = row["batch"] or ""
        reason = reasons.get(batch) or next((x.reason for x in dead if row["workload"] in x.shares), "")
        what = f"{named(row['number'])} of {row['workload']} are dead and no poison: {reason}"
        yield Violation(invariant=1, what=what, trace=_trace(told, batch, row["workload"], row["number"][0]))


def _waiting(told: Told, flying: list[Letter]) -> Iterator[Violation]:
    groups: dict[tuple[str, str], list[Letter]] = {}
    for letter in flying:
        groups.setdefault((letter.workload, letter.state), []).append(letter)
    for (workload, stage), some in groups.items():
        ids = ", ".join(letter.batch_id for letter in some[:3]) + (" ..." if len(some) > 3 else "")
        why = next((f": {letter.reason}" for letter in some if letter.reason), "")
        what = f"{len(some)} batches of {workload} still wait in stage {stage} after settling ({ids}){why}"
        yield Violation(invariant=1, what=what, trace=_trace(told, some[0].root, workload))


def _rescoring_died(told: Told, waiting: list[Letter]) -> Iterator[Violation]:
    for letter in waiting:
        sent = told.batches.get(letter.root)
        if letter.state == "dead" and letter.rescore and not (sent is not None and sent.poison):
            what = f"batch {letter.batch_id} of {letter.workload} is stored, but scoring it again died: {letter.reason}"
            yield Violation(invariant=1, what=what, trace=_trace(told, letter.root, letter.workload))


def _trace(told: Told, batch: str, workload: str, number: int = 1) -> tuple[Operation, ...]:
    sent = told.batches.get(batch)
    return told.trace(sent.operations) if sent is not None else told.trace_of_line(workload, number)
