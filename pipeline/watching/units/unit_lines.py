"""What units say, folded from pages of their lines: how often each pattern, when, and what was flagged.

A unit is what may be unusual as a whole: a host, a pod, a service, a session. Its lines of one window are
folded together. Memory grows with distinct patterns of units, never with lines, and is bounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import polars as pl

from pipeline.errors import BadInput
from pipeline.records.news import is_news
from pipeline.records.schema import is_timed
from pipeline.watching.named_words import LISTENS_ON, SAYS_PORT
from pipeline.watching.rows import NUMBERS
from pipeline.watching.sessions.keys import extract
from pipeline.watching.units.own_time import MAX_SPANS, SPANS, own_times, spans_of

MAX_FLAGS: Final = 200_000  # patterns of occasions; later ones pass no blame on
MAX_PORTS: Final = 10_000  # of units that listen on them
MAX_PAIRS: Final = 1_500_000  # of units and patterns; 60 MB at the very most
TEXT_CHARS: Final = 300
# Of an unusual line that is not flagged: half of the new templates of good times are as unlikely.
UNUSUAL_P: Final = 0.5
_FOLDED: Final = 400_000  # rows that wait before they are folded

# The lines that are folded; findings of the watcher among them have `found`.
UNIT_LINES: Final[dict[str, Any]] = {
    "unit": pl.String,
    "window": pl.Int32,
    "second": pl.Int64,  # since the epoch; null without a time in the record
    "pattern_id": pl.UInt64,
    "template_id": pl.Int64,
    "flagged": pl.Boolean,
    "p_value": pl.Float64,
    "found": pl.Boolean,
    "text": pl.String,  # of a finding, for its reason; of a flagged or unusual line, for the units in it
    "occasion": pl.UInt64,  # of such a line: its trace, else its second; lines of one belong together
    **SPANS,  # of a line that says how long its request took
    "shift": pl.Boolean,  # a finding about numbers
    "port": pl.Int32,  # that a line says its unit listens on
}
_KEY: Final = ("unit", "window")
_PATTERN: Final = (*_KEY, "pattern_id", "template_id")
_FLAG: Final = (*_KEY, "occasion", "pattern_id")
_SPAN: Final = (*_KEY, "template_id", *SPANS)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTable:
    """`units`: unit, window, lines, findings, first, last (seconds since the epoch), in order of unit and
    window.

    `patterns`: at (row of `units`), pattern_id, template_id, n, flagged, p_value (the least flagged), text
    (of one flagged or unusual line). `findings`: at, template_id (below zero, of the cause), n, p_value (the
    least), text; without those about numbers where the unit's own time is known. `flags`: at, occasion,
    pattern_id of flagged and unusual lines, each once. `times`: at, template_id, level, n (own_time.py).
    `ports`: unit, port, of all units that were folded."""

    units: pl.DataFrame
    patterns: pl.DataFrame
    findings: pl.DataFrame
    flags: pl.DataFrame
    times: pl.DataFrame
    ports: pl.DataFrame

    @property
    def size(self) -> int:
        return self.units.height

    def chosen(self, rows: pl.Series) -> "UnitTable":
        """The table of these rows alone, in their order."""
        place = pl.DataFrame({"at": rows.cast(pl.Int64), "new": pl.int_range(len(rows), eager=True)})

        def kept(table: pl.DataFrame) -> pl.DataFrame:
            return table.join(place, on="at").with_columns(at=pl.col("new")).drop("new").sort("at")

        return UnitTable(
            units=self.units[rows],
            patterns=kept(self.patterns),
            findings=kept(self.findings),
            flags=kept(self.flags),
            times=kept(self.times),
            ports=self.ports,
        )

    def with_silent(self, names: Sequence[tuple[str, int]]) -> "UnitTable":
        """With a last row for each unit and window that wrote nothing."""
        silent = [(unit, window, 0, 0, None, None) for unit, window in names]
        rows = pl.DataFrame(silent, schema=self.units.schema, orient="row")
        return replace(self, units=pl.concat([self.units, rows]))


@dataclass(slots=True)
class UnitFold:
    """Folds pages of UNIT_LINES."""

    _patterns: list[pl.DataFrame] = field(default_factory=list)
    _flags: list[pl.DataFrame] = field(default_factory=list)
    _spans: list[pl.DataFrame] = field(default_factory=list)
    _ports: list[pl.DataFrame] = field(default_factory=list)
    _rows: int = 0
    _settled: int = 0

    def add(self, page: pl.DataFrame) -> None:
        """Raises BadInput where units have more patterns than fit."""
        page = page.filter(pl.col("unit").is_not_null()).with_columns(pl.col("shift").fill_null(value=False))
        if page.is_empty():
            return
        flagged = pl.col("flagged").fill_null(value=False)
        self._patterns.append(
            page.group_by(_PATTERN).agg(
                pl.len().cast(pl.Int64).alias("n"),
                flagged.sum().cast(pl.Int64).alias("flagged"),
                pl.col("p_value").filter(flagged).min(),
                pl.col("found", "shift").any(),
                pl.col("text").drop_nulls().first(),
                pl.col("second").min().alias("first"),
                pl.col("second").max().alias("last"),
            )
        )
        flags = page.filter(~pl.col("found") & pl.col("occasion").is_not_null())
        self._flags.append(flags.select(*_FLAG).unique())
        self._spans.append(page.filter(pl.col("request").is_not_null()).select(_SPAN))
        self._ports.append(page.select("unit", "port").drop_nulls().unique())
        self._rows += sum(parts[-1].height for parts in (self._patterns, self._spans))
        if self._rows > max(_FOLDED, self._settled):
            self._fold()

    def table(self) -> UnitTable:
        """All pages so far."""
        if not self._patterns:
            return _EMPTY
        self._fold()
        patterns = self._patterns[0]
        found = pl.col("found")
        units = (
            patterns.group_by(_KEY)
            .agg(
                pl.col("n").filter(~found).sum().alias("lines"),
                pl.col("n").filter(found).sum().alias("findings"),
                pl.col("first").filter(~found).min(),  # a finding comes when it is judged
                pl.col("last").filter(~found).max(),
            )
            .select(list(_EMPTY.units.schema))
            .sort(_KEY)
        )
        places = units.select(_KEY).with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("at"))
        placed = patterns.join(places, on=_KEY).sort("at", "template_id", "pattern_id")
        times = own_times(self._spans[0]).join(places, on=_KEY)
        # A caller of a slow unit is slow too, in more of its numbers. Own time tells them apart.
        timed = pl.col("at").is_in(times["at"].unique().to_list())
        findings = placed.filter(found & ~(pl.col("shift") & timed))
        return UnitTable(
            units=units,
            patterns=placed.filter(~found).select(list(_EMPTY.patterns.schema)),
            findings=findings.select(list(_EMPTY.findings.schema)),
            flags=self._flags[0].join(places, on=_KEY).select(list(_EMPTY.flags.schema)).sort(pl.all()),
            times=times.select(list(_EMPTY.times.schema)).sort(pl.all()),
            ports=self._ports[0],
        )

    def _fold(self) -> None:
        sums = (
            pl.col("n", "flagged").sum(), pl.col("p_value").min(), pl.col("found", "shift").any(),
            pl.col("text").drop_nulls().first(), pl.col("first").min(), pl.col("last").max(),
        )  # fmt: skip
        self._patterns = [pl.concat(self._patterns).group_by(_PATTERN).agg(sums)]
        # Hashes are in no order: the first are drawn by chance, whole occasions and whole traces.
        self._flags = [pl.concat(self._flags).unique().sort("occasion", *_KEY, "pattern_id").head(MAX_FLAGS)]
        self._ports = [pl.concat(self._ports).unique().sort(pl.all()).head(MAX_PORTS)]
        self._spans = [pl.concat(self._spans)]
        if self._spans[0].height > MAX_SPANS:
            self._spans = [self._spans[0].sort(*SPANS, *_KEY).head(MAX_SPANS)]
        if self._patterns[0].height > MAX_PAIRS:
            raise BadInput(
                f"the units have more than {MAX_PAIRS:,} patterns together; ask for a shorter span, or for "
                "fewer workloads"
            )
        self._rows = self._patterns[0].height + self._spans[0].height
        self._settled = 2 * self._rows


def unit_lines(lines: pl.DataFrame, unit: pl.Series, window: pl.Series, found: pl.Series) -> pl.DataFrame:
    """UNIT_LINES of records in RESULT_SCHEMA. `found`: which of them are findings of the watcher."""
    second = pl.col("timestamp").dt.epoch("s")
    flagged = pl.col("anomalous").fill_null(value=False) & ~is_news()
    marked = lines.with_columns(
        unit.alias("unit"), window.cast(pl.Int32).alias("window"), found.alias("found")
    )
    timed = pl.when(is_timed()).then("timestamp").alias("timestamp")
    tells = flagged_or_unusual(flagged)
    marked = marked.with_columns(
        _occasions(marked, marked.select(tells & ~found).to_series()),
        *spans_of(marked.select("message", timed)),
    )
    return marked.select(
        "unit",
        "window",
        pl.when(is_timed()).then(second).alias("second"),
        pl.col("pattern_id").fill_null(0),
        pl.col("template_id").fill_null(0),
        flagged.alias("flagged"),
        "p_value",
        "found",
        pl.when("found")
        .then(pl.col("message").str.head(TEXT_CHARS))
        .when(tells)
        .then(both_ends())
        .alias("text"),
        "occasion",
        *SPANS,
        (pl.col("found") & (pl.col("source") == NUMBERS).fill_null(value=False)).alias("shift"),
        listened_ports(marked["message"]),
    )


def flagged_or_unusual(flagged: pl.Expr) -> pl.Expr:
    """Lines whose text is searched for names: flagged and unusual ones. A caller that only warns of a wrong
    answer writes no flagged line."""
    return flagged | (pl.col("p_value") <= UNUSUAL_P).fill_null(value=False)


def listened_ports(messages: pl.Series) -> pl.Series:
    """The port that a message says its program listens on; null in others."""
    rows = messages.str.contains(SAYS_PORT).fill_null(value=False).arg_true()
    found = messages[rows].str.head(TEXT_CHARS).str.extract(LISTENS_ON).cast(pl.Int32)
    blank = pl.Series("port", [None], dtype=pl.Int32).new_from_index(0, messages.len())
    return blank.scatter(rows, found)


def both_ends() -> pl.Expr:
    """Begin and end of a message: a Python traceback names its error, and often a host, in the last line."""
    message, half = pl.col("message"), TEXT_CHARS // 2
    return (
        pl.when(message.str.len_chars() > TEXT_CHARS)
        .then(pl.concat_str(message.str.head(half), message.str.tail(half), separator=" ... "))
        .otherwise(message)
    )


def _occasions(lines: pl.DataFrame, chosen: pl.Series) -> pl.Series:
    """A hash of the trace or request in the text of the chosen lines, else of their second; others null."""
    rows = chosen.arg_true()
    few = lines.select("message", "timestamp")[rows]
    second = few["timestamp"].dt.epoch("s").cast(pl.String)
    hashes = few.select(pl.coalesce(extract(few), second).hash().alias("occasion"))["occasion"]
    return (
        pl.Series("occasion", [None], dtype=pl.UInt64).new_from_index(0, lines.height).scatter(rows, hashes)
    )


_EMPTY: Final = UnitTable(
    units=pl.DataFrame(
        schema={
            "unit": pl.String, "window": pl.Int32, "lines": pl.Int64, "findings": pl.Int64,
            "first": pl.Int64, "last": pl.Int64,
        }
    ),
    patterns=pl.DataFrame(
        schema={
            "at": pl.Int64, "pattern_id": pl.UInt64, "template_id": pl.Int64, "n": pl.Int64,
            "flagged": pl.Int64, "p_value": pl.Float64, "text": pl.String,
        }
    ),
    findings=pl.DataFrame(
        schema={
            "at": pl.Int64, "template_id": pl.Int64, "n": pl.Int64, "p_value": pl.Float64, "text": pl.String,
        }
    ),
    flags=pl.DataFrame(schema={"at": pl.Int64, "occasion": pl.UInt64, "pattern_id": pl.UInt64}),
    times=pl.DataFrame(schema={"at": pl.Int64, "template_id": pl.Int64, "level": pl.Int32, "n": pl.Int64}),
    ports=pl.DataFrame(schema={"unit": pl.String, "port": pl.Int32}),
)  # fmt: skip
