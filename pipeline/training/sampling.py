"""Stored records to a training sample, in one pass and in memory that does not grow with their number.

pages of records --group by pattern--> counts of patterns --past the limit: weighted draw--> SAMPLE_SCHEMA

Invariants: `TrainingSample.lines` counts every record read. Up to the limit of patterns nothing is drawn, and
every count is exact for any division into pages. The same pages and seed give the same sample. Only messages
of patterns that are new to this pass are masked.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import DEPTH, Template, Templates, foreign_id
from pipeline.errors import BadPayload, SinkUnavailable, SourceUnavailable
from pipeline.models.selection import lots
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.query import Query
from pipeline.records.schema import (
    LEARN_SCHEMA,
    SAMPLE_SCHEMA,
    UTC_US,
    of_lines,
)
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.sinks.manifest import Part
from pipeline.sinks.parquet import ParquetSink

# SAMPLE_SCHEMA, the times of its records, so that a judge can hold out the newest, and a workload of theirs.
TIMED_SCHEMA: Final[dict[str, Any]] = SAMPLE_SCHEMA | {
    "first_seen": UTC_US,
    "last_seen": UTC_US,
    "workload": pl.String,
}

# Distinct masked lines of one training: a bound of its memory, and more than a fit draws.
MAX_PATTERNS: Final = 100_000
MAX_TEXT_BYTES: Final = 1024  # Of a masked line; the line model reads 128 tokens, rarely more than this.
_SLICE_ROWS: Final = 65_536  # Grouped at once; more rows are not faster per row.
_MERGE_ROWS: Final = 65_536  # Counts before they are added up.
_UNMASKED_CHARS: Final = 32 << 20  # Of messages masked together: one call costs as much as 2,000 lines.
_KNOWN_KEYS: Final = 400_000  # Stored pattern ids -> pattern ids under today's masks, about 60 MB.
_WORKLOADS: Final = 10_000  # Names counted one by one.
_PAGE_FILES: Final = 32  # Of 10,000 records and at most 2 MiB of text each as shipped.
_PAGE_ROWS: Final = 65_536  # A sealed file has more.
_PAGE_BYTES: Final = 8 << 20  # On disk, where repetitive logs are a thirtieth of their size.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """The sample of a training, and its origin.

    `frame` is TIMED_SCHEMA, most frequent first, one row per pattern. `lines` is all records read: the sum of
    its counts plus `left_out`. A pattern that was dropped and came back counts from its return, and its
    earlier records are in `left_out`.
    """

    frame: pl.DataFrame
    lines: int
    left_out: int  # Records whose pattern (or an earlier life of it) is not in `frame`.
    workloads: dict[str, int]  # Records of each workload; those without a name stand under "".


class Sampler:
    """Adds up pages of records. Holds at most 2 x `limit` patterns of 1 KiB at most after each page.

    Past that, `limit` patterns stay. One half are the most frequent ones, so that no pattern with more than
    2/limit of the records read so far is dropped. The other half is drawn without replacement by the square
    root of the counts (A-ES, Efraimidis and Spirakis 2006, as a bottom-k sketch). The random number of a
    pattern is a hash of its id, so that each draw uses the same number. A dropped pattern that comes back
    counts anew. A steady pattern above that share is never dropped; a late one must outgrow the share, or be
    drawn.

    The template id of a pattern is the lowest id stored with any record of it. Else it is the id of the known
    template that the pattern matches, else that of a template from a tree of this sample alone, by its text
    (`foreign_id`). Such an id only groups lines of one shape for the training. A later line of that shape
    gets an id from drain and is judged as a new template, unless its pattern was in the sample.
    Not thread-safe."""

    def __init__(
        self,
        masks: MaskSet,
        *,
        limit: int,
        templates: Sequence[Template] = (),
        seed: int = 0,
        similarity: float = 0.7,  # the default of drain_similarity
    ) -> None:
        self.masks = masks
        self.limit = limit
        self.seed = seed
        self._known = Templates(similarity=similarity, depth=DEPTH, per_workload=limit)
        self._known.restore(templates)
        self._similarity = similarity
        self._lines = self._left_out = 0
        self._workloads: dict[str, int] = {}
        # A key is the stored pattern id, or a hash of the message without one. Colliding keys count as one:
        # at 10 million messages with a chance of 1 in 300,000.
        self._patterns: dict[int, int] = {}  # key -> pattern id under our masks
        self._unmasked: dict[int, str] = {}  # key -> a message of it
        self._unmasked_chars = 0
        self._waiting: list[pl.DataFrame] = []  # counts by key
        self._waiting_rows = 0
        self._counts = pl.DataFrame(schema=_COUNTS)  # counts by pattern id, in no order
        self._text: dict[int, bytes] = {}  # pattern id -> masked line, of those in `_counts`

    @property
    def lines(self) -> int:
        """Records read so far."""
        return self._lines

    def add(self, frame: pl.DataFrame, *, baseline: bool = False) -> None:
        """Count a page of records (LEARN_SCHEMA), of any number of rows; `baseline`: they are of one."""
        for page in frame.iter_slices(_SLICE_ROWS):
            self._tally(page)
            grouped = _grouped(page, baseline=baseline)
            keys = grouped["key"].to_list()
            fresh = [i for i, k in enumerate(keys) if k not in self._patterns and k not in self._unmasked]
            if fresh:
                self._keep([keys[i] for i in fresh], grouped["message"].gather(fresh).fill_null(""))
            self._waiting.append(grouped.drop("message"))
            self._waiting_rows += grouped.height
            if self._waiting_rows >= _MERGE_ROWS:
                self._merge()

    def sample(self) -> TrainingSample:
        """The records read so far, as at most `limit` patterns; more pages may follow."""
        self._merge()
        chosen = self._drawn(self._counts)
        chosen = chosen.sort("count", "key", descending=[True, False])
        left_out = self._left_out + int(self._counts["count"].sum()) - int(chosen["count"].sum())
        masked = [self._text[key].decode(errors="ignore") for key in chosen["key"]]
        framed = chosen.with_columns(
            pl.Series("masked", masked, dtype=pl.String), pl.col("key").alias("pattern_id")
        )
        return TrainingSample(
            frame=self._with_templates(framed).select(
                [pl.col(name).cast(dtype) for name, dtype in TIMED_SCHEMA.items()]
            ),
            lines=self._lines,
            left_out=left_out,
            workloads=dict(sorted(self._workloads.items())),
        )

    def _keep(self, keys: list[int], messages: pl.Series) -> None:
        """Keeps messages of new keys until many of them are masked together."""
        chars = int(messages.str.len_chars().sum())
        if self._unmasked_chars + chars < _UNMASKED_CHARS:
            self._unmasked.update(zip(keys, messages.to_list(), strict=True))
            self._unmasked_chars += chars
            return
        for key, message in zip(keys, messages.to_list(), strict=True):
            self._unmasked[key] = message
            self._unmasked_chars += len(message)
            if self._unmasked_chars >= _UNMASKED_CHARS:
                self._mask()

    def _tally(self, page: pl.DataFrame) -> None:
        self._lines += page.height
        for name, count in page["workload"].fill_null("").value_counts(sort=True).iter_rows():
            if name in self._workloads or len(self._workloads) < _WORKLOADS:
                self._workloads[name] = self._workloads.get(name, 0) + count

    def _merge(self) -> None:
        """Masks pending messages, adds pending counts to the sample, and drops patterns past the limit."""
        if not self._waiting:
            return
        self._mask()
        waiting = pl.concat(self._waiting)
        ids = [self._patterns[key] for key in waiting["key"].to_list()]
        waiting = waiting.with_columns(pl.Series("key", ids, dtype=pl.UInt64))
        self._waiting, self._waiting_rows = [], 0
        self._counts = pl.concat([self._counts, waiting]).group_by("key").agg(*_ADDED)
        if self._counts.height > 2 * self.limit:
            before = int(self._counts["count"].sum())
            self._counts = self._drawn(self._counts)
            self._left_out += before - int(self._counts["count"].sum())
            self._text = {key: self._text[key] for key in self._counts["key"].to_list()}
            # A pattern that comes back must be masked again for its text.
            self._patterns = {k: p for k, p in self._patterns.items() if p in self._text}
        if len(self._patterns) > _KNOWN_KEYS:
            self._patterns = {}

    def _mask(self) -> None:
        if not self._unmasked:
            return
        messages = pl.Series("message", list(self._unmasked.values()), dtype=pl.String)
        masked = self.masks.mask(messages)
        ids = masked["pattern_id"].to_list()
        self._patterns.update(zip(self._unmasked, ids, strict=True))
        for pattern, text in zip(ids, masked["masked"].to_list(), strict=True):
            if pattern not in self._text:
                self._text[pattern] = text.encode()[:MAX_TEXT_BYTES]
        self._unmasked, self._unmasked_chars = {}, 0

    def _drawn(self, counts: pl.DataFrame) -> pl.DataFrame:
        """`limit` rows of it: the most frequent half, and a weighted draw from the others."""
        if counts.height <= self.limit:
            return counts
        keys = counts["key"].to_numpy()
        weights = counts["count"].to_numpy().astype(np.float64)
        # log of u**(1/w), highest stay; without the logarithm heavy patterns round to 1.
        priority = np.log(lots(keys, self.seed)) / np.sqrt(weights)
        by_count = np.lexsort((keys, -priority, -weights))
        sure = by_count[: -(-self.limit // 2)]
        others = by_count[len(sure) :]
        drawn = others[np.lexsort((keys[others], -priority[others]))][: self.limit - len(sure)]
        return counts[np.sort(np.concatenate([sure, drawn]))]

    def _with_templates(self, chosen: pl.DataFrame) -> pl.DataFrame:
        fresh = Templates(similarity=self._similarity, depth=DEPTH, per_workload=self.limit)
        ids: list[int] = []
        placed: dict[int, int] = {}  # row -> template of the fresh tree, which later rows may widen
        rows = chosen.select("template_id", "masked", "severe").iter_rows()
        for row, (stored, masked, severe) in enumerate(rows):
            found = self._known.match(masked, severe=severe) if stored is None else stored
            if found is None:
                found, _ = fresh.place(masked, severe=severe, workload="")
                placed[row] = found
            ids.append(found)
        foreign = {number: foreign_id(fresh.template(number)) for number in set(placed.values())}
        for row, number in placed.items():
            ids[row] = foreign[number]
        return chosen.with_columns(pl.Series("template_id", ids, dtype=pl.Int64))


_COUNTS: Final[dict[str, Any]] = {
    "key": pl.UInt64,
    "count": pl.UInt64,
    "severe": pl.Boolean,
    "template_id": pl.Int64,  # null: none, or past the limit of its workload
    "baseline": pl.Boolean,
    "first_seen": UTC_US,
    "last_seen": UTC_US,
    "workload": pl.String,  # the first by name
}
_ADDED: Final = (
    pl.col("count").sum(),
    # A pattern of a baseline is as severe as it was there, because only that was declared normal.
    (pl.col("severe") & (pl.col("baseline") | ~pl.col("baseline").any())).any(),
    pl.col("template_id").min(),
    pl.col("baseline").any(),
    pl.col("first_seen").min(),
    pl.col("last_seen").max(),
    pl.col("workload").min(),
)


def _grouped(page: pl.DataFrame, *, baseline: bool) -> pl.DataFrame:
    """_COUNTS of a page by key, with one message of each."""
    template = pl.col("template_id")
    return (
        page.with_columns(
            pl.coalesce("pattern_id", pl.col("message").fill_null("").hash()).alias("key"),
            pl.col("level").is_in(list(ERROR_LEVELS)).fill_null(value=False).alias("severe"),
            pl.when(template != UNCLASSIFIED).then(template).alias("template_id"),
        )
        .group_by("key")
        .agg(
            pl.len().cast(pl.UInt64).alias("count"),
            pl.col("severe").any(),
            pl.col("template_id").min(),
            pl.col("timestamp").min().alias("first_seen"),
            pl.col("timestamp").max().alias("last_seen"),
            pl.col("workload").fill_null("").min(),
            pl.col("message").first(),
        )
        .with_columns(pl.lit(baseline).alias("baseline"))
        .select(*_COUNTS, "message")
    )


def read_parquet(sink: ParquetSink, query: Query) -> Iterator[pl.DataFrame]:
    """Pages (LEARN_SCHEMA) of the stored results that answer the query, a bounded number of rows at a time.

    Files whose manifest says that they hold nothing of these workloads or this span are not opened. A record
    without time is in no span; a record without verdict is not anomalous. Results that are stored meanwhile
    are not read. Raises BadPayload that names the damaged file, SourceUnavailable for one that cannot be
    read."""
    wanted = query.selects() & of_lines()
    try:
        parts = sink.parts(since=query.since, until=query.until, workloads=query.workloads or None)
        for page in _pages(parts):
            rows = _read(sink, page, wanted)
            if not rows.is_empty():
                yield rows
    except SinkUnavailable as exc:
        raise SourceUnavailable(f"{exc}; this is tried again") from exc


def _pages(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts that are read together; a part of many rows in pieces."""
    page: list[Part] = []
    rows = size = 0
    for part in parts:
        for piece in _pieces(part):
            if page and (
                len(page) >= _PAGE_FILES or rows + piece.live > _PAGE_ROWS or size + piece.bytes > _PAGE_BYTES
            ):
                yield page
                page, rows, size = [], 0, 0
            page.append(piece)
            rows, size = rows + piece.live, size + piece.bytes
    if page:
        yield page


def _pieces(part: Part) -> Iterator[Part]:
    """The part as parts of at most _PAGE_ROWS live rows each, by dropping the other rows."""
    if part.rows <= _PAGE_ROWS:
        yield part
        return
    for at in range(0, part.rows, _PAGE_ROWS):
        stop = min(part.rows, at + _PAGE_ROWS)
        piece = part.dropping([(0, at), (stop, part.rows)])
        yield msgspec.structs.replace(piece, bytes=part.bytes * (stop - at) // part.rows)


def _read(sink: ParquetSink, parts: list[Part], wanted: pl.Expr) -> pl.DataFrame:
    columns = [pl.col(name).cast(dtype) for name, dtype in LEARN_SCHEMA.items()]
    try:
        return sink.lazy(parts).filter(wanted).select(columns).collect()
    except FileNotFoundError:  # removed since it was listed: a person has removed a damaged file
        return _one_by_one(sink, parts, wanted)
    except OSError as exc:
        raise SourceUnavailable(
            f"results cannot be read from {sink.objects.url} ({exc}); give the right to read them, "
            "this is tried again"
        ) from exc
    except pl.exceptions.PolarsError as exc:
        if len(parts) > 1:  # finds the damaged file, and reads files whose column types differ
            return _one_by_one(sink, parts, wanted)
        raise BadPayload(
            f"results cannot be read from {sink.files.file(parts[0])} ({exc}); remove the damaged file and "
            "run again"
        ) from exc


def _one_by_one(sink: ParquetSink, parts: list[Part], wanted: pl.Expr) -> pl.DataFrame:
    empty = pl.DataFrame(schema=LEARN_SCHEMA)
    there = [part for part in parts if sink.files.file(part).exists()]
    return pl.concat([empty, *(_read(sink, [part], wanted) for part in there)])
