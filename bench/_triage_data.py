"""The sets that the triage bench ranks: distinct masked lines ("patterns"), each known to be normal or
anomalous.

All pass through the product's own reading, parsing and masking. A pattern about which the labels of its set
say nothing clear is in neither class and is left out."""

import gzip
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import polars as pl

from bench._log_files import read_file
from pipeline.detect import prepare
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Meta
from pipeline.records.levels import ERROR_LEVELS
from pipeline.sources.framing import Framer

SAMPLES: Final = Path(__file__).resolve().parents[1] / "samples"
PATTERN_SCHEMA: Final[dict[str, Any]] = {
    "masked": pl.String,
    "severe": pl.Boolean,  # logged at an error-like level; False wherever the level is hidden
    "level": pl.String,  # null wherever it is hidden
    "count": pl.UInt64,
    "anomalous": pl.Boolean,
}
# loghub systems whose own header has a level; the others have none, or none that is error-like in their 2,000
# lines.
SYSTEMS: Final = ("Android", "Apache", "BGL", "HDFS", "Hadoop", "Windows", "Zookeeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriageSet:
    """`patterns`: PATTERN_SCHEMA, one row per masked line. `foreign`: masked, severe, count of other systems,
    from which the severity prior is learnt; None: it is learnt as the product does, from the training
    lines."""

    name: str
    patterns: pl.DataFrame
    about: str
    foreign: pl.DataFrame | None = None

    @property
    def normal(self) -> int:
        return self.patterns.filter(~pl.col("anomalous")).height

    @property
    def anomalies(self) -> int:
        return self.patterns.filter("anomalous").height


def framed(lines: Sequence[str]) -> pl.DataFrame:
    """RAW_SCHEMA records of the physical lines of one source."""
    framer = Framer()
    return pl.concat([framer.feed(lines), framer.flush()])


def prepared(records: pl.DataFrame, masks: MaskSet) -> pl.DataFrame:
    """`detect.prepare` of the records of one source, formats found in their first lines."""
    arrived = datetime(2026, 1, 1, tzinfo=UTC)  # only fills years that a header leaves out
    meta = Meta(source="", source_key="", purpose=Purpose.SCORE, arrived=arrived, formats=(), zone="UTC")
    return prepare(records, meta, masks)


def classed(rows: pl.DataFrame, *, anomalous: pl.Expr, normal: pl.Expr, hide_level: bool) -> pl.DataFrame:
    """PATTERN_SCHEMA, one row per masked line, from one row per record. The two expressions aggregate the
    rows of a pattern; a pattern for which both or neither hold is left out."""
    few = rows.group_by("masked", maintain_order=True).agg(
        (pl.col("severe").mean() > 0.5).alias("severe"),
        pl.col("level").mode().sort().first().alias("level"),
        pl.len().alias("count"),
        anomalous.alias("anomalous"),
        normal.alias("normal"),
    )
    few = few.filter(pl.col("anomalous") != pl.col("normal"))
    if hide_level:
        few = few.with_columns(severe=pl.lit(value=False), level=pl.lit(None, dtype=pl.String))
    return few.select([pl.col(name).cast(dtype) for name, dtype in PATTERN_SCHEMA.items()])


def bgl(data: Path, masks: MaskSet) -> TriageSet:
    """Alert tags of Blue Gene/L, of the first 100,000 lines and of the 2,000 that loghub drew from all of
    it."""
    with gzip.open(
        data / "bgl" / "BGL_100k.log.gz", "rt", encoding="utf-8", errors="surrogateescape"
    ) as file:
        first = file.read().splitlines()
    drawn = (data / "loghub_2k" / "BGL" / "BGL_2k.log").read_text(encoding="utf-8", errors="surrogateescape")
    rows = [tagged(lines, masks) for lines in (first, drawn.splitlines())]
    return TriageSet(
        name="bgl",
        patterns=classed(
            pl.concat(rows),
            anomalous=pl.col("alert").any(),
            normal=~pl.col("alert").any(),
            hide_level=False,
        ),
        about="anomalous: some line of the pattern carries an alert tag",
    )


def tagged(lines: Sequence[str], masks: MaskSet) -> pl.DataFrame:
    """One row per record of BGL with `tag` and `alert`; the tag is cut off before anything reads the line."""
    cut = [line.split(" ", 1) for line in lines]
    frame = prepared(framed([rest for _, rest in cut]), masks)
    tags = pl.DataFrame(
        {"line": range(1, len(cut) + 1), "tag": [tag for tag, _ in cut]},
        schema={"line": pl.UInt64, "tag": pl.String},
    )
    frame = frame.join(tags, on="line", maintain_order="left")
    return frame.select("masked", "severe", "level", "tag", "host", "timestamp", alert=pl.col("tag") != "-")


def trainticket(data: Path, masks: MaskSet, *, wide: bool = False) -> TriageSet:
    """Faults of TrainTicket against its normal archives.

    Anomalous: logged at error level, more often inside traces with a failed span than outside, never in the
    normal archives. The level defines the label, so nothing that scores sees it. Normal: in a normal archive.
    `wide` adds the patterns of the fault archives that occur outside failed traces (start-up of a service,
    requests that succeeded). What calm lines of failed traces are is not labelled: a trace that fails calls
    the same services as one that does not."""
    root = data / "trainticket"
    rows = [
        _traced(path, masks) for path in (*sorted(root.glob("*.zip")), *sorted(root.glob("normal/*.zip")))
    ]
    frame = pl.concat(rows)
    failed, healthy = pl.col("failed"), pl.col("healthy")
    bad = pl.col("level").is_in(list(ERROR_LEVELS)).any() & (failed.mean() > 0.5) & ~healthy.any()
    calm = ~pl.col("level").is_in(list(ERROR_LEVELS)).any()
    good = healthy.any() | (calm & (~failed & ~healthy).any() if wide else pl.lit(value=False))
    return TriageSet(
        name="trainticket_wide" if wide else "trainticket",
        patterns=classed(frame, anomalous=bad, normal=good, hide_level=True),
        about="anomalous: at error level in failed traces, never in the normal archives; level hidden"
        + ("; normal: also what the fault archives hold outside failed traces" if wide else ""),
    )


def _traced(path: Path, masks: MaskSet) -> pl.DataFrame:
    """One row per record of an archive with `failed` (its trace has a failed span) and `healthy` (a normal
    archive)."""
    frames: list[pl.DataFrame] = []
    with zipfile.ZipFile(path) as archive:
        for folder in sorted({name.split("/")[0] for name in archive.namelist()}):
            names = [name for name in archive.namelist() if name.startswith(folder + "/")]
            bad: set[str] = set()
            for name in names:
                if name.endswith(".csv") and "ERROR" in name:
                    spans = pl.read_csv(archive.read(name), infer_schema_length=0)
                    bad |= set(spans.filter(pl.col("IsError").str.to_lowercase() == "true")["TraceId"])
            for name in names:
                if name.endswith(".log"):
                    lines = archive.read(name).decode("utf-8", "replace").splitlines()
                    frame = prepared(framed(lines), masks)
                    trace = pl.col("raw").str.extract(r"SW_CTX:\[[^,\]]*,[^,\]]*,([^,\]]*)")
                    frames.append(
                        frame.select(
                            "masked",
                            "severe",
                            "level",
                            trace.is_in(sorted(bad)).fill_null(value=False).alias("failed"),
                            pl.lit(path.parent.name == "normal").alias("healthy"),
                        )
                    )
    return pl.concat(frames)


def samples(masks: MaskSet, folder: Path = SAMPLES) -> TriageSet:
    """The recorded faults of this repository.

    Anomalous: a record of the pattern holds a line that the labels name, and the healthy recording has no
    such pattern. Normal: in the healthy recording, or in the other one outside every fault's window. What
    else happened within a window is not labelled."""
    fault, healthy = pl.col("fault").is_not_null().any(), pl.col("healthy").any()
    return TriageSet(
        name="samples",
        patterns=classed(
            recorded(masks, folder),
            anomalous=fault & ~healthy,
            normal=healthy | (~fault & ~pl.col("window").all()),
            hide_level=False,
        ),
        about="anomalous: named by the labels, not in the healthy recording; normal: there or outside fault windows",
    )


def recorded(masks: MaskSet, folder: Path = SAMPLES) -> pl.DataFrame:
    """One row per record: masked, severe, level, timestamp, file, `fault` (the one whose labels
    name a line of it), `healthy` (of the healthy recording) and `window` (within some fault's)."""
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    named = [(Path(at["file"]).name, int(at["line"]), f["id"]) for f in labels["faults"] for at in f["lines"]]
    places = pl.DataFrame(
        named, schema={"file": pl.String, "at": pl.UInt64, "fault": pl.String}, orient="row"
    )
    inside = pl.lit(value=False)
    for fault in labels["faults"]:
        # nginx writes whole seconds: the second in which a window begins belongs to it.
        begin, end = (datetime.fromisoformat(fault[key].replace("Z", "+00:00")) for key in ("start", "end"))
        inside = inside | pl.col("timestamp").is_between(begin.replace(microsecond=0), end)
    frames: list[pl.DataFrame] = []
    for path in sorted(folder.glob("*/*.log.zst")):
        healthy = path.parent.name == "baseline"
        frame = prepared(pl.concat([chunk.records for chunk in read_file(path)]), masks)
        here = places.filter(pl.col("file") == ("" if healthy else path.name.removesuffix(".zst")))
        spans = frame.select("line", "lines").join_where(
            here, pl.col("at") >= pl.col("line"), pl.col("at") < pl.col("line") + pl.col("lines")
        )
        faults = spans.group_by("line").agg(pl.col("fault").first())
        frames.append(
            frame.join(faults, on="line", how="left", maintain_order="left").select(
                "masked",
                "severe",
                "level",
                "fault",
                "timestamp",
                pl.lit(path.name.removesuffix(".log.zst")).alias("file"),
                pl.lit(healthy).alias("healthy"),
                (pl.lit(not healthy) & inside.fill_null(value=True)).alias("window"),
            )
        )
    return pl.concat(frames)


def systems(data: Path, masks: MaskSet) -> Iterator[TriageSet]:
    """Each loghub system with error-like lines: its level is the label and is hidden, the prior is of the
    others."""
    found = {name: _system(data, name, masks) for name in SYSTEMS}
    shown = {
        name: classed(
            rows.drop_nulls("level"),
            anomalous=pl.col("severe").mean() > 0.5,
            normal=pl.col("severe").mean() <= 0.5,
            hide_level=True,
        )
        for name, rows in found.items()
    }
    for name, patterns in shown.items():
        if not patterns["anomalous"].any():
            continue
        others = [p.select("masked", "count", severe="anomalous") for n, p in shown.items() if n != name]
        # A line that two systems share (BGL's sample is of BGL) would carry its own label.
        foreign = pl.concat(others).join(patterns.select("masked"), on="masked", how="anti")
        yield TriageSet(
            name=name.lower() + "_level",
            patterns=patterns,
            about="anomalous: mostly at an error-like level, which is hidden; severity prior of the other systems only",
            foreign=foreign.unique("masked", keep="first", maintain_order=True),
        )


def _system(data: Path, name: str, masks: MaskSet) -> pl.DataFrame:
    path = data / "loghub_2k" / name / f"{name}_2k.log"
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    if name == "BGL":
        lines = [line.split(" ", 1)[1] for line in lines]
    frame = prepared(framed(lines), masks)
    return frame.select("masked", "severe", "level")


def all_sets(data: Path) -> list[TriageSet]:
    """Every set, in the order of the report."""
    masks = MaskSet.load()
    return [
        bgl(data, masks),
        trainticket(data, masks),
        trainticket(data, masks, wide=True),
        samples(masks),
        *systems(data, masks),
    ]
