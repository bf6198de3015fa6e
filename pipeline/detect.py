"""From records to verdicts: the file to read first.

    records --parse--> columns --mask--> masked lines --distinct--> few lines
        few lines --look up--> known verdicts | unknown: score (models) --> evidence
        evidence + template (drain) --conclude--> verdict --join--> one result row per record

Pure functions over frames for tasks, the command line and benchmarks. Only distinct masked lines leave this
module for a model or the template tree.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.models.evidence import Evidence
from pipeline.models.severity import severity_words
from pipeline.records.batch import digest, file_key
from pipeline.records.columns import lists_of_text
from pipeline.records.delivery import Meta
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import RAW_SCHEMA, RESULT_SCHEMA
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
_EVIDENCE: Final = ("surprisal", "words", "unseen", "tokens", "severity", "novelty", "prior")
_VERDICT: Final = ("template_id", "score", "anomalous", "p_value", "reasons")


def prepare(records: pl.DataFrame, meta: Meta, masks: MaskSet) -> pl.DataFrame:
    """RAW_SCHEMA -> the same rows with header columns, plus `masked`, `pattern_id`, `severe`, `key`."""
    parsed = _parsed(records, meta)
    masked = masks.mask(parsed["message"])
    severe = pl.col("level").is_in(list(ERROR_LEVELS)).fill_null(False)
    pattern = masked["pattern_id"]
    return parsed.with_columns(
        masked["masked"],
        pattern,
        severe.alias("severe"),
        pl.lit(pattern).xor(severe.cast(pl.UInt64)).alias("key"),
    )


def prepared_again(records: pl.DataFrame, meta: Meta, work: pl.DataFrame, masks: MaskSet) -> pl.DataFrame:
    """As `prepare`, without `masked`, for the records of `work`, whose `rows` tell the key of each record.

    Masks the records again where `rows` does not name each record exactly once.
    """
    if work["rows"].has_nulls():
        return prepare(records, meta, masks)
    found = work.select("rows", "pattern_id", "severe", "key").explode("rows").sort("rows")
    if not found["rows"].equals(pl.int_range(records.height, dtype=pl.UInt32, eager=True).alias("rows")):
        return prepare(records, meta, masks)
    return _parsed(records, meta).with_columns(found.drop("rows").get_columns())


def _parsed(records: pl.DataFrame, meta: Meta) -> pl.DataFrame:
    names = meta.formats or formats.detect(records["raw"].head(200).to_list())
    return formats.parse(records, names, arrived=meta.arrived, zone=meta.zone)


def distinct(prepared: pl.DataFrame, version: str) -> pl.DataFrame:
    """WORK_SCHEMA with one row per distinct (masked line, severe), without answers."""
    few = prepared.select("key", "pattern_id", "masked", "severe", "level")[prepared["key"].arg_unique()]
    columns = [
        few[name]
        if name in few.columns
        else pl.Series(name, [None], dtype=kind).new_from_index(0, few.height)
        for name, kind in WORK_SCHEMA.items()
    ]
    return pl.DataFrame(columns).with_columns(pl.lit(version).alias("version"))


def with_rows(work: pl.DataFrame, prepared: pl.DataFrame) -> pl.DataFrame:
    """`work` with the rows of each key, so that the store step need not mask the batch again."""
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
    answered = pl.Series([verdict is not None for verdict in found], dtype=pl.Boolean)
    columns = []
    for name in _VERDICT:
        values: list[Any] = [None if verdict is None else getattr(verdict, name) for verdict in found]
        if name == "reasons":
            column, filled = lists_of_text([value or () for value in values]).alias(name), answered
        else:
            column = pl.Series(name, values, dtype=WORK_SCHEMA[name])
            filled = column.is_not_null()
        columns.append(column.zip_with(filled, work[name]))
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
        pl.when(pl.col("version") == WARMING_VERSION)
        .then(None)
        .otherwise(pl.col("version"))
        .alias("model_version"),
    )
    return frame.select([pl.col(name).cast(dtype) for name, dtype in RESULT_SCHEMA.items()])


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
    if prepared["source"].null_count() < prepared.height:
        place = ["source", "line"]
        keys = {name: file_key(meta.purpose, name) for name in prepared["source"].drop_nulls().unique()}
        key = pl.col("source").replace_strict(keys, default=meta.source_key, return_dtype=pl.String)
    piece = pl.col("line").cum_count().over(place) - 1
    line = pl.col("line").cast(pl.String)
    began_before = pl.col("lines").first().over(place) == 0
    suffix = pl.lit(f".{digest(meta.batch_id)}.") + piece.cast(pl.String)
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


def outcomes(rows: pl.DataFrame) -> dict[str, int]:
    """Physical lines by outcome, for the counters of a commit."""
    lines = rows.select(
        pl.col("lines").filter(pl.col("anomalous")).sum().alias("anomalous"),
        pl.col("lines").filter(~pl.col("anomalous")).sum().alias("normal"),
        pl.col("lines").filter(pl.col("anomalous").is_null()).sum().alias("warming"),
        pl.col("lines").filter(pl.col("template_id") == UNCLASSIFIED).sum().alias("unclassified"),
    ).row(0, named=True)
    return {name: int(count) for name, count in lines.items()}
