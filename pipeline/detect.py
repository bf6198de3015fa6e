"""From records to verdicts: the file to read first.

    records --parse--> columns --mask--> masked lines --distinct--> few lines
        few lines --look up--> known verdicts | unknown: score (models) --> evidence
        evidence + template (drain) --conclude--> verdict --join--> one result row per record

Pure functions over frames for tasks, the command line and benchmarks. Only distinct masked lines leave this
module for a model or the template tree.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.models.evidence import Evidence
from pipeline.models.severity import severity_words
from pipeline.records.batch import digest, file_key
from pipeline.records.columns import FEW_ROWS, gathered, lists_of_text, parted, stacked
from pipeline.records.delivery import Meta
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import RAW_SCHEMA, RESULT_SCHEMA, UTC_US
from pipeline.records.verdict import UNCLASSIFIED, Reason, Verdict, reason
from pipeline.sources import formats

# The distinct masked lines of one batch, through all stages. Verdict columns are null until known.
WORK_SCHEMA: Final[dict[str, Any]] = {
    "key": pl.UInt64,  # of the verdict cache: pattern_id, its lowest bit flipped when severe
    "pattern_id": pl.UInt64,
    "masked": pl.String,
    "severe": pl.Boolean,  # Seen at an error-like level.
    "level": pl.String,  # Of its first record.
    "version": pl.String,  # Model version of the batch, or WARMING_VERSION.
    "formats": pl.String,  # Of the batch's headers, a line each; null until the batch leaves ingest.
    "rows": pl.List(pl.UInt32),  # Of the batch that have this key; null until the batch leaves ingest.
    # evidence (models/evidence.py), filled by infer
    "surprisal": pl.Float64,
    "words": pl.List(pl.String),
    "unseen": pl.List(pl.String),
    "tokens": pl.UInt32,
    "severity": pl.String,
    "novelty": pl.Float64,
    "prior": pl.Float64,
    # verdict, filled by the cache or by drain
    "template_id": pl.Int64,
    "score": pl.Float64,
    "anomalous": pl.Boolean,
    "p_value": pl.Float64,
    "reasons": pl.List(pl.String),
}
_OF_RECORD: Final = ("key", "pattern_id", "masked", "severe", "level")  # the first record of a key has these
_EVIDENCE: Final = ("surprisal", "words", "unseen", "tokens", "severity", "novelty", "prior")
_VERDICT: Final = ("template_id", "score", "anomalous", "p_value", "reasons")


def prepare(records: pl.DataFrame, meta: Meta, masks: MaskSet) -> pl.DataFrame:
    """RAW_SCHEMA -> the same rows with header columns, plus `masked`, `pattern_id`, `severe`, `key`."""
    return _with_keys(_parsed(records, meta), masks)


def prepare_all(
    batches: Sequence[tuple[pl.DataFrame, Meta]], masks: MaskSet, works: Sequence[pl.DataFrame | None] = ()
) -> list[pl.DataFrame]:
    """`prepare` for many batches in one pass.

    `works`: the work of a batch at stage store, else None. Its `rows` tell the key of each record, so those
    records are not masked again, and lack `masked`; they are where `rows` does not name each of them once."""
    parsed = _parsed_all(batches)
    works = works or [None] * len(batches)
    found = [
        None if work is None else _with_keys_of(rows, work) for rows, work in zip(parsed, works, strict=True)
    ]
    new = [rows for rows, keyed_rows in zip(parsed, found, strict=True) if keyed_rows is None]
    prepared = iter(parted(_with_keys(stacked(new), masks), [rows.height for rows in new]) if new else ())
    return [next(prepared) if keyed_rows is None else keyed_rows for keyed_rows in found]


def _with_keys(parsed: pl.DataFrame, masks: MaskSet) -> pl.DataFrame:
    masked = masks.mask(parsed["message"])
    severe = pl.col("level").is_in(list(ERROR_LEVELS)).fill_null(False)
    pattern = masked["pattern_id"]
    return parsed.with_columns(
        masked["masked"],
        pattern,
        severe.alias("severe"),
        pl.lit(pattern).xor(severe.cast(pl.UInt64)).alias("key"),
    )


def _with_keys_of(parsed: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame | None:
    """The records with the keys of `work`, None where its `rows` does not name each of them once."""
    if work["rows"].has_nulls():
        return None
    found = work.select("rows", "pattern_id", "severe", "key").explode("rows").sort("rows")
    if not found["rows"].equals(pl.int_range(parsed.height, dtype=pl.UInt32, eager=True).alias("rows")):
        return None
    return parsed.with_columns(found.drop("rows").get_columns())


def _parsed_all(batches: Sequence[tuple[pl.DataFrame, Meta]]) -> list[pl.DataFrame]:
    """Batches of one zone that arrived within an hour are parsed together.

    The time of arrival completes a time without a year, and no hour changes that. Tables and declared formats
    are not tried in one order everywhere, so each list of these has a pass of its own. So have records with
    messages, which have nothing to parse."""
    groups: dict[object, list[int]] = {}
    for place, (records, meta) in enumerate(batches):
        hour = meta.arrived.replace(minute=0, second=0, microsecond=0)
        if not _is_unparsed(records):
            group: object = (False, meta.zone, hour)
        elif not meta.formats:
            group = place  # its own formats are looked for
        elif formats.are_ordered(meta.formats):
            group = (True, meta.zone, hour)
        else:
            group = (meta.formats, meta.zone, hour)
        groups.setdefault(group, []).append(place)
    parsed: dict[int, pl.DataFrame] = {}
    for places in groups.values():
        several = [batches[place] for place in places]
        rows = [_parsed(*several[0])] if len(several) == 1 else _parsed_together(several)
        parsed |= zip(places, rows, strict=True)
    return [parsed[place] for place in range(len(batches))]


def _parsed_together(batches: Sequence[tuple[pl.DataFrame, Meta]]) -> list[pl.DataFrame]:
    frames = [records for records, _ in batches]
    records = stacked(frames)
    # A line without a time takes that of the line before it: within its source, and within its batch.
    numbers = _numbers(frames)
    batch = pl.Series(numbers).cast(pl.String)
    marked = records.with_columns(
        pl.concat_str(batch, pl.col("source").fill_null(""), separator=" ").alias("source")
    )
    metas = [meta for _, meta in batches]
    newest = max(meta.arrived for meta in metas)
    places = {names: place for place, names in enumerate(dict.fromkeys(meta.formats for meta in metas))}
    which = np.array([places[meta.formats] for meta in metas])[numbers]
    parsed = formats.parse_each(marked, list(places), which, arrived=newest, zone=metas[0].zone)
    arrived = pl.Series([meta.arrived for meta in metas], dtype=UTC_US)[numbers]
    late = records["timestamp"].is_null() & ~parsed["timed"]
    times = arrived.zip_with(late, parsed["timestamp"]).alias("timestamp")
    return list(parted(parsed.with_columns(records["source"], times), [frame.height for frame in frames]))


def _parsed(records: pl.DataFrame, meta: Meta) -> pl.DataFrame:
    names = meta.formats
    if not names and _is_unparsed(records):
        names = formats.detect(records["raw"].head(200).to_list())
    return formats.parse(records, names, arrived=meta.arrived, zone=meta.zone)


def _is_unparsed(records: pl.DataFrame) -> bool:
    """Whether some record has a raw text alone."""
    return bool(records["message"].null_count())


def distinct(prepared: pl.DataFrame, version: str) -> pl.DataFrame:
    """WORK_SCHEMA with one row per distinct (masked line, severe), without answers."""
    few = prepared.select(_OF_RECORD)[prepared["key"].arg_unique()]
    return _unanswered(few, pl.Series("version", [version], dtype=pl.String).new_from_index(0, few.height))


def _unanswered(few: pl.DataFrame, versions: pl.Series) -> pl.DataFrame:
    """WORK_SCHEMA of distinct records."""
    filled = {"version": versions} | {name: few[name] for name in _OF_RECORD}
    blank = (pl.Series(name, [None], dtype=kind) for name, kind in WORK_SCHEMA.items())
    return pl.DataFrame([filled.get(one.name, one.new_from_index(0, few.height)) for one in blank])


def distinct_all(batches: Sequence[pl.DataFrame], versions: Sequence[str]) -> list[pl.DataFrame]:
    """`distinct` for many batches in one pass."""
    if len(batches) == 1:
        return [distinct(batches[0], versions[0])]
    few = (
        gathered(batches, _OF_RECORD)
        .with_columns(pl.Series("batch", _numbers(batches)))
        .unique(["batch", "key"], keep="first", maintain_order=True)
    )
    works = _unanswered(few, pl.Series("version", versions, dtype=pl.String)[few["batch"]])
    return list(parted(works, np.bincount(few["batch"].to_numpy(), minlength=len(batches)).tolist()))


def answer_all(
    works: Sequence[pl.DataFrame], lookup: Callable[[str, list[int]], Mapping[int, Verdict]]
) -> list[pl.DataFrame]:
    """`answer` for many batches: `lookup` is asked once for each version."""
    answered: dict[int, pl.DataFrame] = {}
    versions = [str(work["version"][0]) for work in works]
    for version in dict.fromkeys(versions):
        places = [place for place, one in enumerate(versions) if one == version]
        together = stacked([works[place] for place in places])
        keys = list(dict.fromkeys(together["key"].to_list()))
        parts = parted(answer(together, lookup(version, keys)), [works[place].height for place in places])
        answered |= zip(places, parts, strict=True)
    return [answered[place] for place in range(len(works))]


def _numbers(batches: Sequence[pl.DataFrame]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The number of its batch for each row."""
    return np.repeat(np.arange(len(batches)), [rows.height for rows in batches])


def with_rows(work: pl.DataFrame, prepared: pl.DataFrame, names: tuple[str, ...] = ()) -> pl.DataFrame:
    """`work` with the rows of each key and the formats, so that the store step need not find them again."""
    work = work.with_columns(pl.lit("\n".join(names)).alias("formats"))
    rows = (
        prepared.select("key", pl.int_range(pl.len(), dtype=pl.UInt32).alias("rows"))
        .group_by("key")
        .agg("rows")
    )
    return work.drop("rows").join(rows, on="key", how="left", maintain_order="left").select(list(WORK_SCHEMA))


def answer(work: pl.DataFrame, verdicts: Mapping[int, Verdict]) -> pl.DataFrame:
    """`work` with the verdict columns of these keys; other rows are unchanged."""
    if not verdicts:
        return work
    found = [verdicts.get(key) for key in work["key"].to_list()]
    answered = [verdict is not None for verdict in found]
    columns = []
    for name in _VERDICT:
        values: list[Any] = [None if verdict is None else getattr(verdict, name) for verdict in found]
        if name == "reasons":
            column, filled = lists_of_text([value or () for value in values]).alias(name), answered
        else:
            column = pl.Series(name, values, dtype=WORK_SCHEMA[name])
            filled = [value is not None for value in values]
        if not all(filled):
            column = column.zip_with(pl.Series(filled, dtype=pl.Boolean), work[name])
        columns.append(column)
    return work.with_columns(columns)


def unknown(work: pl.DataFrame) -> pl.DataFrame:
    """The rows that have no verdict yet."""
    return work.filter(pl.col("template_id").is_null())


def with_evidence(work: pl.DataFrame, evidence: Mapping[int, Evidence]) -> pl.DataFrame:
    """Fills the evidence of the unknown rows, by `pattern_id`.

    `work` may hold several batches: a key that is unknown in one of them is filled in all. Raises KeyError
    for an unknown row without evidence.
    """
    rows = unknown(work).unique("key")
    found = [evidence[pattern_id] for pattern_id in rows["pattern_id"].to_list()]
    filled = pl.DataFrame(
        {"key": rows["key"]} | {n: [getattr(e, n) for e in found] for n in _EVIDENCE},
        schema={name: WORK_SCHEMA[name] for name in ("key", *_EVIDENCE)},
    )
    return work.update(filled, on="key", how="left")


def without_evidence(work: pl.DataFrame, keys: Collection[int]) -> pl.DataFrame:
    """`work` as if the cache had answered these keys: the batch that scored them has counted their words
    (drift.py).
    """
    if not keys:
        return work
    other = ~pl.col("key").is_in(list(keys))
    return work.with_columns(pl.when(other).then(pl.col(name)).alias(name) for name in _EVIDENCE)


def result_rows(prepared: pl.DataFrame, work: pl.DataFrame, meta: Meta, workload: str) -> pl.DataFrame:
    """RESULT_SCHEMA: every record of the batch exactly once.

    `record_id` derives from the source and the line, so that reading the same lines again gives the same ids.
    The pieces of a line longer than a record (lines = 0 after the first) are numbered; pieces of a line that
    began in another batch carry their batch as well.
    """
    verdicts = work.select("key", *_VERDICT, "version")
    frame = prepared.join(verdicts, on="key", how="left", maintain_order="left")
    frame = frame.with_columns(
        _record_id(meta, prepared).alias("record_id"),
        pl.col("source").fill_null(meta.source),
        pl.lit(workload).alias("workload"),
    )
    return _results(frame)


@dataclass(frozen=True, slots=True)
class Judged:
    """A batch whose lines all have their verdict in `work`."""

    prepared: pl.DataFrame
    work: pl.DataFrame
    meta: Meta
    workload: str


def result_rows_all(batches: Sequence[Judged]) -> list[pl.DataFrame]:
    """`result_rows` for many batches in one pass."""
    found: dict[int, pl.DataFrame] = {}
    plain = [place for place, one in enumerate(batches) if not _is_pack(one.prepared)]
    if len(plain) > 1:
        several = [batches[place] for place in plain]
        parts = parted(_results_together(several), [one.prepared.height for one in several])
        found = dict(zip(plain, parts, strict=True))
    for place, one in enumerate(batches):
        if place not in found:
            found[place] = result_rows(one.prepared, one.work, one.meta, one.workload)
    return [found[place] for place in range(len(batches))]


def _results_together(batches: Sequence[Judged]) -> pl.DataFrame:
    numbers = _numbers([one.prepared for one in batches])
    of = {
        "source": [one.meta.source for one in batches],
        "workload": [one.workload for one in batches],
        "source_key": [one.meta.source_key for one in batches],
        "suffix": [f".{digest(one.meta.batch_id)}." for one in batches],
    }
    columns = [pl.Series(name, values, dtype=pl.String)[numbers] for name, values in of.items()]
    needed = ["key", "pattern_id", *(name for name in RAW_SCHEMA if name != "source")]
    prepared = gathered([one.prepared for one in batches], needed)
    prepared = prepared.with_columns(pl.Series("batch", numbers), *columns)
    works = gathered([one.work for one in batches], ["key", *_VERDICT, "version"])
    of_work = _numbers([one.work for one in batches])
    frame = _joined_in_python(prepared, numbers, works, of_work) if prepared.height < FEW_ROWS else None
    if frame is None:
        works = works.with_columns(pl.Series("batch", of_work))
        frame = prepared.join(works, on=["batch", "key"], how="left", maintain_order="left")
    in_pieces = _in_pieces(frame, ["batch", "line"])
    ids = _ids(pl.col("source_key"), pl.col("suffix"), ["batch", "line"], in_pieces=in_pieces)
    return _results(frame.with_columns(ids.alias("record_id")))


def _joined_in_python(
    prepared: pl.DataFrame,
    of_record: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    works: pl.DataFrame,
    of_work: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> pl.DataFrame | None:
    """Each record with its row of `works`, by batch and key; None where some have none.

    For few rows a dict takes a third of a join."""
    rows = {pair: row for row, pair in enumerate(zip(of_work.tolist(), works["key"].to_list(), strict=True))}
    try:
        which = [rows[pair] for pair in zip(of_record.tolist(), prepared["key"].to_list(), strict=True)]
    except KeyError:
        return None
    return prepared.hstack(works.drop("key")[which])


def _results(frame: pl.DataFrame) -> pl.DataFrame:
    version = pl.col("version")
    frame = frame.with_columns(
        pl.when(version == WARMING_VERSION).then(None).otherwise(version).alias("model_version")
    )
    return frame.select([pl.col(name).cast(dtype) for name, dtype in RESULT_SCHEMA.items()])


def _is_pack(records: pl.DataFrame) -> bool:
    return records["source"].null_count() < records.height


def formats_of(work: pl.DataFrame) -> tuple[str, ...] | None:
    """The formats that `with_rows` left there; None where a build before did not."""
    names = work["formats"][0] if "formats" in work.columns and work.height else None
    return None if names is None else tuple(filter(None, str(names).split("\n")))


def stored_records(rows: pl.DataFrame, meta: Meta) -> pl.DataFrame:
    """RAW_SCHEMA: the records of a stored batch, RESULT_SCHEMA, for another judgement."""
    source = pl.col("source")
    of_pack = pl.when(source != meta.source).then(source).alias("source")
    return rows.select(list(RAW_SCHEMA)).with_columns(of_pack)


def record_ids(prepared: pl.DataFrame, meta: Meta) -> list[str]:
    """The ids that `results` gives to these records, in their order."""
    return prepared.select(_record_id(meta, prepared)).to_series().to_list()


def _record_id(meta: Meta, prepared: pl.DataFrame) -> pl.Expr:
    place, key = ["line"], pl.lit(meta.source_key)
    if _is_pack(prepared):
        place = ["source", "line"]
        keys = {name: file_key(meta.purpose, name) for name in prepared["source"].drop_nulls().unique()}
        key = pl.col("source").replace_strict(keys, default=meta.source_key, return_dtype=pl.String)
    return _ids(key, pl.lit(f".{digest(meta.batch_id)}."), place, in_pieces=_in_pieces(prepared, place))


def _in_pieces(records: pl.DataFrame, place: list[str]) -> bool:
    """Whether some line may be several records. `place`: the columns that tell a line."""
    if records["lines"].min() == 0:
        return True
    if place == ["line"]:
        line = records["line"].to_numpy()
        if (line[1:] > line[:-1]).all():
            return False
    return not records.select(pl.struct(place).is_unique().all()).item()


def _ids(key: pl.Expr, batch_suffix: pl.Expr, place: list[str], *, in_pieces: bool) -> pl.Expr:
    """`place`: the columns that tell a line."""
    if not in_pieces:  # windows take ten times as long
        return key + "-" + pl.col("line").cast(pl.String)
    piece = pl.col("line").cum_count().over(place) - 1
    line = pl.col("line").cast(pl.String)
    began_before = pl.col("lines").first().over(place) == 0
    suffix = batch_suffix + piece.cast(pl.String)
    return (key + "-") + pl.when(began_before).then(line + suffix).when(piece == 0).then(line).otherwise(
        line + "." + piece.cast(pl.String)
    )


def judged_by_words(rows: pl.DataFrame, masks: MaskSet) -> pl.DataFrame:
    """RESULT_SCHEMA, where error-like records without a verdict are anomalous: for lines that no model will
    judge.

    An error-like record has an error level, or an error word in its masked line. Its score stays null."""
    severe = {}
    masked = masks.mask(rows["message"].fill_null(""))["masked"]
    for place, (judged, level, line) in enumerate(
        zip(rows["anomalous"].is_not_null(), rows["level"], masked, strict=True)
    ):
        if not judged and (data := level if level in ERROR_LEVELS else severity_words(line)):
            severe[place] = [reason(Reason.ERROR_SEVERITY, data)]
    if not severe:
        return rows
    places = pl.Series(list(severe), dtype=pl.UInt32)
    reasons = rows["reasons"].to_list()
    for place, why in severe.items():
        reasons[place] = why
    return rows.with_columns(
        rows["anomalous"].clone().scatter(places, True),
        pl.Series("reasons", reasons, dtype=rows.schema["reasons"]),
    )


def outcomes_all(several: Sequence[pl.DataFrame]) -> list[dict[str, int]]:
    """Physical lines by outcome of each, for the counters of a commit. None of them is empty."""
    rows = gathered(several, ["lines", "anomalous", "template_id"])
    heights = np.array([one.height for one in several])
    starts = np.cumsum(heights) - heights
    lines = rows["lines"].to_numpy().astype(np.int64)
    anomalous = pl.col("anomalous")
    chosen = rows.select(
        anomalous.fill_null(value=False).alias("anomalous"),
        (~anomalous.fill_null(value=True)).alias("normal"),
        anomalous.is_null().alias("warming"),
        (pl.col("template_id") == UNCLASSIFIED).fill_null(value=False).alias("unclassified"),
    )
    sums = {
        some.name: np.add.reduceat(lines * some.to_numpy(), starts).tolist() for some in chosen.get_columns()
    }
    return [{name: counts[number] for name, counts in sums.items()} for number in range(len(several))]
