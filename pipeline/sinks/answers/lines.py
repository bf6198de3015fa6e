"""Stored lines from files: the newest that match a question, and those near to hits in their sources."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import polars as pl

from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.answers.around import blocks_of
from pipeline.sinks.answers.engine import KEPT, SEARCHED, Engine, RowFile, cut_message, one_of
from pipeline.sinks.manifest import Part
from pipeline.sinks.part_files import MESSAGE_AT
from pipeline.units import epoch_us

FIRST_PARTS: Final = 2  # of the first screen; each further group has twice as many
MOST_PARTS: Final = 64  # of a group
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES: Final = {name: RESULT_SCHEMA[name] for name in ("timestamp", "workload")}


def newest_lines(
    engine: Engine,
    parts: Sequence[Part],
    files_of: Callable[[Sequence[Part]], list[RowFile]],
    query: ResultQuery,
) -> pl.DataFrame:
    """The newest lines in these parts that match: RESULT_SCHEMA, oldest first.

    The newest parts are read first, and no more of them once all the hits are newer than any other line.
    Upper and lower case of its text are the same. Raises AnswerCancelled, BadInput, BadPayload,
    and the errors of `files_of`."""
    found = pl.DataFrame(schema=RESULT_SCHEMA)
    wanted, parameters = _conditions(query)
    since, until = (None if at is None else epoch_us(at) for at in (query.since, query.end))
    # A bound on the newest so far spares rows where most of them match. Where few do, as of a text, it costs
    # a fifth more: each row's time is read before its text. An expression has no such bound.
    order = '"timestamp"' if query.text is None and query.key is None else 'epoch_us("timestamp")'
    with engine.question():
        for group in _groups(parts):
            if found.height >= query.limit:
                since = epoch_us(found["timestamp"][0])
                if group[0].last_us < since:
                    break
            within, bounds = _within(group, since, until)
            engine.view("lines", files_of(group), RESULT_SCHEMA, searched=True)
            some = engine.rows(
                f"SELECT * EXCLUDE ({', '.join(SEARCHED)}) FROM lines WHERE {' AND '.join([*wanted, *within])} "
                f"ORDER BY {order} DESC, record_id DESC LIMIT $limit",
                parameters | bounds | {"limit": query.limit},
                schema=RESULT_SCHEMA,
            )
            found = pl.concat([found, some]).sort("timestamp", "record_id").tail(query.limit)
    return found


def newest_time(
    engine: Engine,
    parts: Sequence[Part],
    files_of: Callable[[Sequence[Part]], list[RowFile]],
    workloads: tuple[str, ...] | None,
) -> datetime | None:
    """The time of the newest row of these workloads, None without any. Raises as `newest_lines`.

    The manifest answers for a part whose rows are all of these workloads. Other parts are read."""
    wanted, parameters = _conditions(ResultQuery(limit=1, workloads=workloads))
    newest: int | None = None
    with engine.question():
        for part in sorted((part for part in parts if part.live), key=lambda part: -part.last_us):
            if newest is not None and part.last_us <= newest:
                break
            if not part.dropped and (workloads is None or _all_of(part, workloads)):
                newest = part.last_us
                break
            engine.view("lines", files_of([part]), _TIMES)
            found = engine.rows(
                f'SELECT max("timestamp") AS "timestamp" FROM lines WHERE {" AND ".join(wanted)}',
                parameters, schema={"timestamp": _TIMES["timestamp"]},
            )["timestamp"][0]  # fmt: skip
            if found is not None:
                newest = max(newest or 0, epoch_us(found))
    return None if newest is None else _EPOCH + timedelta(microseconds=newest)


def _all_of(part: Part, workloads: tuple[str, ...]) -> bool:
    """Whether a part holds rows of these workloads alone, as far as it is known."""
    return bool(part.workloads) and set(part.workloads) <= set(workloads)


def matching_lines(
    engine: Engine,
    parts: Sequence[Part],
    files_of: Callable[[Sequence[Part]], list[RowFile]],
    query: ResultQuery,
    names: Sequence[str],
) -> pl.DataFrame:
    """All lines of these parts that match, in these columns and in no order. Raises as `newest_lines`."""
    wanted, parameters = _conditions(query)
    since, until = (None if at is None else epoch_us(at) for at in (query.since, query.end))
    within, bounds = _within(parts, since, until)
    columns = ", ".join(f'"{name}"' for name in names)
    with engine.question():
        engine.view("lines", files_of(parts), RESULT_SCHEMA, searched=True)
        return engine.rows(
            f"SELECT {columns} FROM lines WHERE {' AND '.join([*wanted, *within])}",
            parameters | bounds,
            schema=RESULT_SCHEMA,
        )


def _conditions(query: ResultQuery) -> tuple[list[str], dict[str, object]]:
    """The conditions on a line beside its time, and their parameters."""
    wanted, parameters = ["true"], dict[str, object]()
    if query.workloads is not None:
        wanted.append(one_of("workload", query.workloads, parameters))
    if query.level is not None:
        wanted.append(one_of("level", query.levels, parameters))
    if query.template_id is not None:
        unclassified = " OR template_id IS NULL" if query.template_id == 0 else ""
        wanted.append(f"(template_id = $template_id{unclassified})")
        parameters["template_id"] = query.template_id
    if query.anomalous:
        wanted.append("anomalous")
    if query.record_id is not None:
        wanted.append("record_id = $record_id")
        parameters["record_id"] = query.record_id
    if query.before is not None:
        wanted.append(
            '("timestamp" < make_timestamptz($before_us) '
            'OR ("timestamp" = make_timestamptz($before_us) AND record_id < $before_id))'
        )
        parameters |= {"before_us": epoch_us(query.before[0]), "before_id": query.before[1]}
    if query.text is not None:
        wanted.append(_has_text(query.text, parameters))
    if query.key is not None:
        wanted.append(
            f"CASE WHEN {MESSAGE_AT} IS NOT NULL THEN contains(raw, $key) "
            f"ELSE contains({KEPT}, $key) OR contains(raw, $key) END"
        )
        parameters["key"] = query.key
    return wanted, parameters


def _has_text(text: str, parameters: dict[str, object]) -> str:
    """The condition that a message has this text, in upper or lower case.

    Most messages are the end of their raw text and are cut from it, which takes longer than to read it; lower
    case takes as long again. So raw texts without it are left out first: by an expression of RE2, which needs
    no lower case, where the text is ASCII. The columns are those of the files: what a view makes of them is
    made of every row before."""
    parameters["text"] = text
    message = cut_message(KEPT)
    if text.lower() == text.upper():  # numbers and addresses have no case
        found, in_raw = f"contains({message}, $text)", "contains(raw, $text)"
    else:
        found = f"contains(lower({message}), lower($text))"
        if not text.isascii() or "\0" in text:
            return found
        parameters["text_pattern"] = "(?i)" + "".join(map(_in_any_case, text))
        in_raw = "regexp_matches(raw, $text_pattern)"
    return f"CASE WHEN {MESSAGE_AT} IS NOT NULL AND NOT {in_raw} THEN false ELSE {found} END"


def _in_any_case(char: str) -> str:
    """A character of ASCII for RE2, whose folding knows all letters but one with its lower case there."""
    if char in "iI":
        return "[iİ]"
    return char if char.isalnum() else f"\\x{{{ord(char):x}}}"


def _within(
    parts: Sequence[Part], since: int | None, until: int | None
) -> tuple[list[str], dict[str, object]]:
    """The conditions that lines of these parts are in a span, and their parameters.

    Parts that are in it as a whole need none."""
    wanted, parameters = list[str](), dict[str, object]()
    if since is not None and any(part.first_us < since for part in parts):
        wanted.append('"timestamp" >= make_timestamptz($since)')
        parameters["since"] = since
    if until is not None and any(part.last_us >= until for part in parts):
        wanted.append('"timestamp" < make_timestamptz($until)')
        parameters["until"] = until
    return wanted, parameters


def near_lines(
    engine: Engine, files: Sequence[RowFile], hits: pl.DataFrame, records: int, columns: Sequence[str]
) -> pl.DataFrame:
    """The lines in the neighbourhood of the hits, which need the columns record_id, source and line.

    Where the hits have workloads, it is of these. Raises AnswerCancelled, BadInput, BadPayload."""
    schema = {name: RESULT_SCHEMA[name] for name in columns}
    if hits.is_empty() or not files:
        return pl.DataFrame(schema=schema)
    reach, keys, blocks = blocks_of(hits, records)
    parameters: dict[str, object] = {
        "reach": reach,
        "keys": keys,
        "blocks": blocks,
        "lowest": min(blocks) * reach,
        "highest": max(blocks) * reach + reach,
    }
    wanted = [
        one_of("source", hits["source"].unique().to_list(), parameters),
        "line BETWEEN $lowest::UBIGINT AND $highest::UBIGINT",
        "(regexp_replace(record_id, '-[^-]*$', ''), line // $reach::UBIGINT) IN "
        "(SELECT unnest($keys::VARCHAR[]), unnest($blocks::UBIGINT[]))",
    ]
    if "workload" in hits.columns:
        wanted.append(one_of("workload", hits["workload"].unique().to_list(), parameters))
    with engine.question():
        engine.view("lines", files, RESULT_SCHEMA)
        names = ", ".join(f'"{name}"' for name in columns)
        return engine.rows(
            f"SELECT {names} FROM lines WHERE {' AND '.join(wanted)}", parameters, schema=schema
        )


def _groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """The parts with the newest lines first, in groups that grow."""
    ordered = sorted(parts, key=lambda part: -part.last_us)
    start, size = 0, FIRST_PARTS
    while start < len(ordered):
        yield ordered[start : start + size]
        start, size = start + size, min(2 * size, MOST_PARTS)
