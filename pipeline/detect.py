"""From records to verdicts: the file to read first.

    records --parse--> columns --mask--> masked lines --distinct--> few lines
        few lines --look up--> known verdicts | unknown: score (models) --> evidence
        evidence + template (drain) --conclude--> verdict --join--> one result row per record

Pure functions over frames for tasks, the command line and benchmarks. Only distinct masked lines leave this
module for a model or the template tree.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.models.evidence import Evidence
from pipeline.models.severity import severity_words
from pipeline.records.batch import Purpose, digest, file_key
from pipeline.records.columns import (
    Parts,
    any_of_each,
    chosen,
    gathered,
    heights_of,
    lists_of_text,
    nulls_of,
    numbers_of,
    stacked,
)
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
    records: Sequence[pl.DataFrame],
    metas: Sequence[Meta],
    masks: MaskSet,
    works: Sequence[pl.DataFrame | None] = (),
) -> Sequence[pl.DataFrame]:
    """`prepare` for many batches in one pass.

    `works`: the work of a batch at stage store, else None. Its `rows` tell the key of each record, so those
    records are not masked again, and lack `masked`; they are where `rows` does not name each of them once."""
    parsed = _parsed_all(records, metas)
    if not any(work is not None for work in works):
        return Parts(_with_keys(stacked(parsed), masks), heights_of(parsed))
    found = [
        None if work is None else _with_keys_of(rows, work) for rows, work in zip(parsed, works, strict=True)
    ]
    new = [rows for rows, keyed_rows in zip(parsed, found, strict=True) if keyed_rows is None]
    prepared = iter(Parts(_with_keys(stacked(new), masks), heights_of(new)) if new else ())
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


def _parsed_all(records: Sequence[pl.DataFrame], metas: Sequence[Meta]) -> Sequence[pl.DataFrame]:
    """Batches of one zone that arrived within an hour are parsed together.

    The time of arrival completes a time without a year, and no hour changes that. Tables and declared formats
    are not tried in one order everywhere, so each list of these has a pass of its own. So have records with
    messages, which have nothing to parse."""
    heights = heights_of(records)
    unparsed = any_of_each(nulls_of(gathered(records, ["message"])["message"]), heights)
    groups: dict[object, list[int]] = {}
    names: dict[tuple[int, bool], object] = {}  # by the identity of a meta, which parts of a batch share
    for place, (meta, is_unparsed) in enumerate(zip(metas, unparsed, strict=True)):
        group = names.get((id(meta), is_unparsed))
        if group is None:
            group = _parsed_with(meta) if is_unparsed else (False, meta.zone, _hour(meta))
            if group is not None:
                names[id(meta), is_unparsed] = group
        # None: its own formats are looked for
        groups.setdefault(place if group is None else group, []).append(place)
    if len(groups) == 1:
        return _parsed_together(records, metas) if len(records) > 1 else [_parsed(records[0], metas[0])]
    parsed: dict[int, pl.DataFrame] = {}
    for places in groups.values():
        several = chosen(records, places)
        if len(places) == 1:
            parsed[places[0]] = _parsed(several[0], metas[places[0]])
        else:
            rows = _parsed_together(several, [metas[place] for place in places])
            parsed |= zip(places, rows, strict=True)
    return [parsed[place] for place in range(len(records))]


def _parsed_with(meta: Meta) -> object:
    """A name for the batches that this one is parsed with; None if it is parsed alone."""
    if not meta.formats:
        return None
    return (True if formats.are_ordered(meta.formats) else meta.formats, meta.zone, _hour(meta))


def _hour(meta: Meta) -> datetime:
    return meta.arrived.replace(minute=0, second=0, microsecond=0)


def _parsed_together(frames: Sequence[pl.DataFrame], metas: Sequence[Meta]) -> Sequence[pl.DataFrame]:
    records, heights = stacked(frames), heights_of(frames)
    numbers = numbers_of(heights)
    timed = not records["timestamp"].null_count()
    marked = records
    if not timed:
        # A line without a time takes that of the line before it: within its source, and within its batch.
        marks = pl.Series("source", [str(number) for number in range(len(metas))], dtype=pl.String)[numbers]
        if records["source"].null_count() < records.height:
            marks = marks + " " + records["source"].fill_null("")
        marked = records.with_columns(marks)
    newest = max(meta.arrived for meta in metas)
    places: dict[tuple[str, ...], int] = {}
    which = np.array([places.setdefault(meta.formats, len(places)) for meta in metas])[numbers]
    parsed = formats.parse_each(marked, list(places), which, arrived=newest, zone=metas[0].zone)
    if timed:
        return Parts(parsed, heights)
    late = records["timestamp"].is_null() & ~parsed["timed"]
    arrived = pl.Series([meta.arrived for meta in metas], dtype=UTC_US)[numbers]
    times = arrived.zip_with(late, parsed["timestamp"]).alias("timestamp")
    return Parts(parsed.with_columns(records["source"], times), heights)


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
    return distinct_all([prepared], [version])[0]


def distinct_all(batches: Sequence[pl.DataFrame], versions: Sequence[str]) -> Sequence[pl.DataFrame]:
    """`distinct` for many batches in one pass."""
    records = gathered(batches, _OF_RECORD)
    records = records.with_columns(pl.Series("batch", numbers_of(heights_of(batches))))
    few = records.unique(["batch", "key"], keep="first", maintain_order=True)
    which = few["batch"].to_numpy()
    filled = {name: few[name] for name in _OF_RECORD}
    filled["version"] = pl.Series("version", versions, dtype=pl.String)[which]
    blank = (pl.Series(name, [None], dtype=kind) for name, kind in WORK_SCHEMA.items())
    works = pl.DataFrame([filled.get(one.name, one.new_from_index(0, few.height)) for one in blank])
    return Parts(works, np.bincount(which, minlength=len(batches)).tolist())


def answer_all(
    works: Sequence[pl.DataFrame], lookup: Callable[[str, list[int]], Mapping[int, Verdict]]
) -> Sequence[pl.DataFrame]:
    """`answer` for many batches: `lookup` is asked once for each version."""
    versions = work_versions(works)
    several = dict.fromkeys(versions)
    if len(several) == 1:
        return Parts(_answered(stacked(works), versions[0], lookup), heights_of(works))
    answered: dict[int, pl.DataFrame] = {}
    for version in several:
        places = [place for place, one in enumerate(versions) if one == version]
        some = chosen(works, places)
        parts = Parts(_answered(stacked(some), version, lookup), heights_of(some))
        answered |= zip(places, parts, strict=True)
    return [answered[place] for place in range(len(works))]


def unknown_in_each(works: Sequence[pl.DataFrame]) -> list[int]:
    """The rows of each that have no verdict yet."""
    return _nulls_in_each(works, "template_id")


def unscored_in_each(rows: Sequence[pl.DataFrame]) -> list[bool]:
    """Whether some record of each, RESULT_SCHEMA, has no score."""
    return [count > 0 for count in _nulls_in_each(rows, "score")]


def _nulls_in_each(parts: Sequence[pl.DataFrame], name: str) -> list[int]:
    heights = heights_of(parts)
    column = gathered(parts, [name])[name]
    if not column.null_count():
        return [0] * len(heights)
    places = numbers_of(heights)[nulls_of(column)]
    return [int(count) for count in np.bincount(places, minlength=len(heights))]


def work_versions(works: Sequence[pl.DataFrame]) -> list[str]:
    """The model version of each."""
    if isinstance(works, Parts):
        return [str(version) for version in works.whole["version"][works.starts].to_list()]
    return [str(work["version"][0]) for work in works]


def _answered(
    work: pl.DataFrame, version: str, lookup: Callable[[str, list[int]], Mapping[int, Verdict]]
) -> pl.DataFrame:
    return answer(work, lookup(version, list(dict.fromkeys(work["key"].to_list()))))


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
    return result_rows_all(Judged([prepared], [work], [meta], [workload]))[0]


@dataclass(frozen=True, slots=True)
class Judged:
    """Batches whose lines all have their verdict in `works`."""

    prepared: Sequence[pl.DataFrame]
    works: Sequence[pl.DataFrame]
    metas: Sequence[Meta]
    workloads: Sequence[str]


def result_rows_all(batches: Judged) -> Sequence[pl.DataFrame]:
    """`result_rows` for many batches in one pass."""
    heights = heights_of(batches.prepared)
    numbers = numbers_of(heights)
    prepared = gathered(batches.prepared, ["key", "pattern_id", *RAW_SCHEMA])
    works = gathered(batches.works, ["key", *_VERDICT, "version"])
    works = works.with_columns(pl.Series("batch", numbers_of(heights_of(batches.works))))
    frame = prepared.with_columns(pl.Series("batch", numbers))
    frame = frame.join(works, on=["batch", "key"], how="left", maintain_order="left")
    sources = pl.Series([meta.source for meta in batches.metas], dtype=pl.String)[numbers]
    computed = {
        "record_id": _record_ids(prepared, numbers, batches.metas),
        "source": prepared["source"].fill_null(sources) if prepared.height else prepared["source"],
        "workload": pl.Series(batches.workloads, dtype=pl.String)[numbers],
        "model_version": frame["version"].set(frame["version"] == WARMING_VERSION, None),
    }
    columns = [computed.get(name, frame.get_column(name, default=None)) for name in RESULT_SCHEMA]
    rows = [
        one.cast(kind).alias(name) for one, (name, kind) in zip(columns, RESULT_SCHEMA.items(), strict=True)
    ]
    return Parts(pl.DataFrame(rows), heights)


def record_ids(prepared: pl.DataFrame, meta: Meta) -> list[str]:
    """The ids that `result_rows` gives to these records, in their order."""
    return _record_ids(prepared, numbers_of([prepared.height]), [meta]).to_list()


def _record_ids(
    records: pl.DataFrame, batches: "np.ndarray[tuple[int], np.dtype[np.int64]]", metas: Sequence[Meta]
) -> pl.Series:
    """`batches`: the number of the batch for each record. Records with another source are of a
    pack."""

    def of_each(values: Sequence[str]) -> pl.Series:
        return pl.Series(values, dtype=pl.String)[batches]

    keys, place = of_each([meta.source_key for meta in metas]), ["batch", "line"]
    if records["source"].null_count() < records.height:
        marks = of_each([f"{meta.purpose.value}\0" for meta in metas]) + records["source"]
        named = {mark: mark.split("\0", 1) for mark in marks.drop_nulls().unique()}
        found = {mark: file_key(Purpose(purpose), name) for mark, (purpose, name) in named.items()}
        keys = marks.replace_strict(found, default=None, return_dtype=pl.String).fill_null(keys)
        place = ["batch", "source", "line"]
    frame = records.select("source", "line", "lines").with_columns(pl.Series("batch", batches), key=keys)
    if not _in_pieces(frame, place):  # windows take ten times as long
        return frame.select(pl.col("key") + "-" + pl.col("line").cast(pl.String)).to_series()
    suffixes = {meta.batch_id: f".{digest(meta.batch_id)}." for meta in metas}
    return _ids_of_pieces(frame.with_columns(suffix=of_each([suffixes[m.batch_id] for m in metas])), place)


def _in_pieces(frame: pl.DataFrame, place: list[str]) -> bool:
    """Whether some line may be several records. `place`: the columns that identify a line."""
    if frame["lines"].min() == 0:
        return True
    line, batch = frame["line"].to_numpy(), frame["batch"].to_numpy()
    if ((line[1:] > line[:-1]) | (batch[1:] != batch[:-1])).all():
        return False
    return not frame.select(pl.struct(place).is_unique().all()).item()


def _ids_of_pieces(frame: pl.DataFrame, place: list[str]) -> pl.Series:
    piece = pl.col("line").cum_count().over(place) - 1
    line = pl.col("line").cast(pl.String)
    began_before = pl.col("lines").first().over(place) == 0
    ids = (pl.col("key") + "-") + (
        pl.when(began_before)
        .then(line + pl.col("suffix") + piece.cast(pl.String))
        .when(piece == 0)
        .then(line)
        .otherwise(line + "." + piece.cast(pl.String))
    )
    return frame.select(ids).to_series()


def formats_of(work: pl.DataFrame) -> tuple[str, ...] | None:
    """The formats that `with_rows` left there; None where a build before did not."""
    names = work["formats"][0] if "formats" in work.columns and work.height else None
    return None if names is None else tuple(filter(None, str(names).split("\n")))


def stored_records(rows: pl.DataFrame, meta: Meta) -> pl.DataFrame:
    """RAW_SCHEMA: the records of a stored batch, RESULT_SCHEMA, for another judgement."""
    source = pl.col("source")
    of_pack = pl.when(source != meta.source).then(source).alias("source")
    return rows.select(list(RAW_SCHEMA)).with_columns(of_pack)


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
    heights = np.array(heights_of(several))
    starts = np.cumsum(heights) - heights
    lines = rows["lines"].to_numpy().astype(np.int64)
    anomalous = pl.col("anomalous")
    flags = rows.select(
        anomalous.fill_null(value=False).alias("anomalous"),
        (~anomalous.fill_null(value=True)).alias("normal"),
        anomalous.is_null().alias("warming"),
        (pl.col("template_id") == UNCLASSIFIED).fill_null(value=False).alias("unclassified"),
    )
    sums = {
        some.name: np.add.reduceat(lines * some.to_numpy(), starts).tolist() for some in flags.get_columns()
    }
    return [{name: counts[number] for name, counts in sums.items()} for number in range(len(several))]
