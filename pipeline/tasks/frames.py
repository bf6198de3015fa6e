"""Verdicts for frames of records, without a running pipeline: for programs on Ray, Dask or Spark.

    logweir models export --out model        # once, on a host of the pipeline

    from pipeline import score_frame
    judged = score_frame(frame, "model")

The export is frozen: a line of no template in it has a null `template_id`, and nothing is learnt from it.
Marks, sessions and rates belong to a pipeline and are left out.
"""

import functools
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from pipeline import detect
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import DEPTH, PER_WORKLOAD, Template, Templates
from pipeline.errors import BadBundle, BadInput
from pipeline.models import bundle
from pipeline.models.known.patterns import load_known
from pipeline.models.verdict import Knowledge, verdict_of
from pipeline.records.batch import Purpose, utc_now
from pipeline.records.delivery import Meta
from pipeline.records.pushed import PushedRecords
from pipeline.records.schema import raw_frame
from pipeline.records.verdict import Verdict
from pipeline.records.wire import Codec
from pipeline.records.written_levels import level_of
from pipeline.sources.pushed import framed

# The columns that `score_frame` adds to a frame; those of the same names are replaced.
JUDGED_SCHEMA: Final[dict[str, Any]] = {
    "pattern_id": pl.UInt64,
    "template_id": pl.Int64,  # null: no template of the export covers the line
    "template": pl.String,
    "score": pl.Float64,
    "anomalous": pl.Boolean,
    "p_value": pl.Float64,
    "reasons": pl.List(pl.String),
    "model_version": pl.String,
}
_MODEL, _TEMPLATES, _MASKS, _FACTS = "model", "templates.parquet", "masks", "export.json"
_TEMPLATES_SCHEMA: Final = {
    "template_id": pl.Int64, "template": pl.String, "severe": pl.Boolean, "workload": pl.String,
}  # fmt: skip
_LOADED: Final = 4  # exports in the memory of a process


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an export that stand in none of its other files."""

    version: str
    similarity: float  # of the template tree


_CODEC: Final = Codec(_Facts, version=1, what=_FACTS, newer=BadBundle)


def write_export(
    out: Path, *, model: Path, templates: Iterable[Template], masks: Sequence[Path], similarity: float
) -> None:
    """Writes the folder that `score_frame` reads, or none. `model`: a bundle; `masks`: files of the user.

    Raises BadInput where `out` exists, BadBundle, OSError."""
    if out.exists():
        raise BadInput(f"{out} exists; name a folder that does not, or remove it")
    version = bundle.load_manifest(model).version
    try:
        _write(out, model, templates, masks, _Facts(version=version, similarity=similarity))
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _write(
    out: Path, model: Path, templates: Iterable[Template], masks: Sequence[Path], facts: _Facts
) -> None:
    out.mkdir(parents=True)
    shutil.copytree(model, out / _MODEL)
    rows = [(t.template_id, t.text, t.severe, t.workload) for t in templates]
    pl.DataFrame(rows, schema=_TEMPLATES_SCHEMA, orient="row").write_parquet(out / _TEMPLATES)
    (out / _MASKS).mkdir()
    for number, path in enumerate(masks):
        shutil.copyfile(path, out / _MASKS / f"{number:03d}.toml")
    (out / _FACTS).write_text(_CODEC.to_json(facts) + "\n", encoding="utf-8")


def score_frame(frame: Any, export: str | Path) -> Any:
    """The frame with the columns of JUDGED_SCHEMA: its rows in their order, judged by a model version.

    `frame`: a Polars or pandas frame, a pyarrow Table or RecordBatch. The same kind comes back, for a batch
    a table. Each row is a record: `message` with an optional `level`, or `raw`, whose header is parsed. A
    row without text gets nulls. `export`: a folder that `logweir models export` wrote. A process keeps the
    last few in memory.

    Raises BadInput for a frame without text, BadBundle for a folder that is no whole export."""
    rows, back = _polars(frame)
    export = Path(export).absolute()
    facts = export / _FACTS
    judged = judge_records(rows, _loaded(export, facts.stat().st_mtime_ns if facts.is_file() else 0))
    return back(rows.drop(JUDGED_SCHEMA.keys() & set(rows.columns)).hstack(judged.get_columns()))


def _polars(frame: Any) -> tuple[pl.DataFrame, Any]:
    """The frame for Polars, and the way back to its own kind. Raises BadInput."""
    if isinstance(frame, pl.DataFrame):
        return frame, lambda rows: rows
    kind = type(frame).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(frame, "columns"):
        return pl.from_pandas(frame), lambda rows: rows.to_pandas().set_axis(frame.index)
    if kind == "pyarrow" and hasattr(frame, "schema"):
        return pl.DataFrame(pl.from_arrow(frame)), lambda rows: rows.to_arrow()
    raise BadInput(
        f"score_frame takes a Polars or pandas frame, or a pyarrow Table, not {type(frame).__qualname__}"
    )


class ExportedModel:
    """An export in memory. Scoring changes nothing but caches. Its files are not needed any more."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        """`device`: as torch names it. Raises BadBundle."""
        from pipeline.models.line import LineModel  # it imports torch

        try:
            facts = _CODEC.from_json((folder / _FACTS).read_bytes())
            stored = pl.read_parquet(folder / _TEMPLATES)
        except OSError as exc:
            raise BadBundle(
                f"{folder} is no export of a model ({exc.strerror or exc}); "
                "make one with `logweir models export --out DIR`"
            ) from exc
        except (Exception, pl.exceptions.PanicException) as exc:
            raise BadBundle(f"the export {folder} cannot be read: {exc}; export again") from exc
        if dict(stored.schema) != _TEMPLATES_SCHEMA:
            raise BadBundle(f"{folder / _TEMPLATES} has other columns than an export; export again")
        self.masks = MaskSet.load(extra=tuple(sorted((folder / _MASKS).glob("*.toml"))))
        manifest = bundle.load_manifest(folder / _MODEL)
        if manifest.mask_version != self.masks.version:
            raise BadBundle(
                f"{folder} was trained with masks {manifest.mask_version}, this build has "
                f"{self.masks.version}; use the build of the pipeline, or train and export again"
            )
        self.version = manifest.version
        self.network: LineModel = LineModel.load(folder / _MODEL, device)
        patterns = load_known(folder / _MODEL)
        self.knowledge = Knowledge(calibration=manifest.calibration, known=patterns)
        self.texts: dict[int, str] = dict(stored.select("template_id", "template").iter_rows())
        self.templates = Templates(similarity=facts.similarity, depth=DEPTH, per_workload=PER_WORKLOAD)
        self.templates.restore(
            Template(template_id=number, text=text, severe=severe, workload=workload)
            for number, text, severe, workload in stored.iter_rows()
        )

    def verdict(self, row: dict[str, Any]) -> Verdict:
        return verdict_of(row, self.templates.match(row["masked"], severe=row["severe"]), self.knowledge)


@functools.lru_cache(maxsize=_LOADED)
def _loaded(folder: Path, _written_ns: int) -> ExportedModel:
    return ExportedModel(folder)


def judge_records(rows: pl.DataFrame, export: ExportedModel) -> pl.DataFrame:
    """JUDGED_SCHEMA for rows with `message` and an optional `level`, or `raw`. Raises BadInput."""
    records, has_text = _records(rows)
    if records.is_empty():
        return pl.DataFrame(schema=JUDGED_SCHEMA)
    meta = Meta(
        source="frame", source_key="", purpose=Purpose.SCORE, arrived=utc_now(), formats=(), zone="UTC"
    )
    prepared = detect.prepare(records, meta, export.masks)
    work = detect.distinct(prepared, export.version)
    lines = work.unique("pattern_id", keep="first", maintain_order=True)
    evidence = export.network.score(lines["masked"].to_list())
    work = detect.with_evidence(work, dict(zip(lines["pattern_id"].to_list(), evidence, strict=True)))
    work = detect.answer(work, {row["key"]: export.verdict(row) for row in work.iter_rows(named=True)})
    verdicts = work.select(
        "key",
        "template_id",
        pl.col("template_id")
        .replace_strict(export.texts, default=None, return_dtype=pl.String)
        .alias("template"),
        "score",
        "anomalous",
        "p_value",
        "reasons",
        pl.col("version").alias("model_version"),
    )
    judged = prepared.select("key", "pattern_id").join(verdicts, on="key", how="left", maintain_order="left")
    shown = [
        pl.when(has_text).then(pl.col(name)).cast(kind).alias(name) for name, kind in JUDGED_SCHEMA.items()
    ]
    return judged.select(shown)


def _records(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """RAW_SCHEMA records of the rows, and which rows have a text. Raises BadInput."""
    name = next((name for name in ("message", "raw") if name in rows.columns), "")
    if not name or rows.schema[name] not in (pl.String, pl.Null):
        found = (
            f"column {name!r} of {rows.schema[name]}"
            if name
            else f"columns {', '.join(rows.columns) or 'none'}"
        )
        raise BadInput(f"score_frame needs the text of each record in 'message' or 'raw', not {found}")
    text = rows[name].cast(pl.String)
    texts = text.fill_null("").to_list()
    if name == "raw":
        return raw_frame(texts), text.is_not_null()
    levels = None
    if "level" in rows.columns:
        words = {word: level_of(word) for word in rows["level"].unique().to_list()}
        levels = [words[word] for word in rows["level"].to_list()]
    records, _ = framed(PushedRecords(texts, levels=levels))
    return records, text.is_not_null()
