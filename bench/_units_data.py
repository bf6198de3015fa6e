"""Units whose health is known, with their lines and the verdicts of these lines.

HDFS blocks (labels of blocks), nodes of Blue Gene/L (sick: a line of it has an alert tag), traces of
TrainTicket (sick: a span with an error), and the samples in windows of ten seconds of a file (sick: a line
that the labels name). One line model is learnt from the lines of learnt units, and judges all lines. Sessions
are judged by a model of the learnt ones; each half of those is judged by the other half."""

import gzip
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from bench import _sequences_data as sequences
from bench._learnt import learn_and_score, verdicts
from bench._triage_data import recorded, tagged
from bench._triage_split import template_ids
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.verdict import pattern_ids
from pipeline.watching.sessions.keys import extract
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.units.own_time import SPANS
from pipeline.watching.units.unit_lines import UNIT_LINES

MOST_LEARNT: Final = 3_000  # units
WINDOW_S: Final = 10  # of the samples
_CAUSE: Final = -2  # template of findings in sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSet:
    """`lines`: unit, second, masked, level. `sick`: by unit. `learnt`: normal ones; the others are judged."""

    lines: pl.DataFrame
    sick: Mapping[str, bool]
    learnt: frozenset[str]
    sessions: bool = False  # a unit is a session


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLines:
    """UNIT_LINES with score, masked, level."""

    lines: pl.DataFrame
    found: pl.DataFrame  # UNIT_LINES of findings in sessions


def unit_sets(data: Path, seed: int) -> Iterator[tuple[str, UnitSet]]:
    """Each set by name. `seed`: of the draw of learnt units."""
    masks = MaskSet.load()
    for name, load in _LOADERS.items():
        yield name, load(data, masks, seed)


def taught_verdicts(few: pl.DataFrame, sample: pl.DataFrame, *, seed: int) -> pl.DataFrame:
    """Distinct lines (masked, severe, level) with template_id, pattern_id, new, flagged, p_value, score and
    reasons, by what a sample of them (masked, severe, count) teaches."""
    keys = ["masked", "severe"]
    masked = few["masked"].to_list()
    few = few.with_columns(
        template_id=pl.Series(template_ids(masked, few["severe"].to_list()), dtype=pl.Int64),
        pattern_id=pl.Series(pattern_ids(masked), dtype=pl.UInt64),
    )
    sample = sample.join(few.drop("level"), on=keys, maintain_order="left")
    evidence, knowledge = learn_and_score(sample, masked, seed=seed, baseline=True)
    known = pl.col("template_id").is_in(sample["template_id"].unique().to_list())
    placed = few.with_columns(pl.when(known).then("template_id"))
    judged = verdicts(placed, evidence, knowledge)
    return few.with_columns(
        new=~known,
        flagged=pl.Series([bool(v.anomalous) for v in judged]),
        p_value=pl.Series([v.p_value for v in judged], dtype=pl.Float64),
        score=pl.Series([v.score for v in judged], dtype=pl.Float64),
        reasons=pl.Series([list(v.reasons) for v in judged], dtype=pl.List(pl.String)),
    )


def judged_lines(units: UnitSet, *, seed: int) -> JudgedLines:
    """Templates and verdicts of all lines, by what the lines of the learnt units teach."""
    keys = ["masked", "severe"]
    severe = pl.col("level").is_in(list(ERROR_LEVELS)).fill_null(value=False).alias("severe")
    lines = units.lines.with_columns(severe)
    taught = lines.filter(pl.col("unit").is_in(units.learnt)).group_by(keys, maintain_order=True)
    sample = taught.agg(pl.len().alias("count"))
    few = pl.concat([sample.select(keys), lines.select(keys)]).unique(keys, keep="first", maintain_order=True)
    few = few.join(lines.unique(keys).select(*keys, "level"), on=keys, how="left", maintain_order="left")
    few = taught_verdicts(few, sample, seed=seed)
    blank = {
        "window": pl.lit(0),
        "found": pl.lit(value=False),
        "text": pl.lit(None),
        "occasion": pl.lit(None),
        "shift": pl.lit(value=False),
        "port": pl.lit(None),
    } | {name: pl.lit(None) for name in SPANS}
    every = lines.join(
        few.drop("level", "new", "reasons"), on=keys, how="left", maintain_order="left"
    ).with_columns(**blank)
    every = every.cast({name: kind for name, kind in UNIT_LINES.items() if name != "unit"})
    return JudgedLines(
        lines=every, found=_found(every, units) if units.sessions else every.clear().select(list(UNIT_LINES))
    )


def _found(lines: pl.DataFrame, units: UnitSet) -> pl.DataFrame:
    rows = lines.sort("second", maintain_order=True).group_by("unit", maintain_order=True).agg("template_id")
    sessions = {unit: tuple(events) for unit, events in rows.iter_rows()}
    learnt = sorted(units.learnt)
    halves = learnt[::2], learnt[1::2]
    others = sorted(set(sessions) - units.learnt)
    found: dict[str, float] = {}
    for taught, judged in ((halves[0], halves[1]), (halves[1], halves[0]), (learnt, others)):
        model = SessionModel.fit(sessions[unit] for unit in taught)
        verdicts_ = model.judge([sessions[unit] for unit in judged])
        found |= {u: v.p_value for u, v in zip(judged, verdicts_, strict=True) if v.anomalous}
    return pl.DataFrame(
        [(unit, 0, None, 0, _CAUSE, True, p, True, *[None] * 8) for unit, p in sorted(found.items())],
        schema=UNIT_LINES,
        orient="row",
    )


def _half(sick: Mapping[str, bool], seed: int) -> frozenset[str]:
    """Half of the normal units, at most MOST_LEARNT."""
    normal = sorted(unit for unit, bad in sick.items() if not bad)
    drawn = np.random.default_rng(seed).permutation(len(normal))[: min(MOST_LEARNT, len(normal) // 2)]
    return frozenset(normal[at] for at in drawn.tolist())


def _hdfs(data: Path, masks: MaskSet, seed: int) -> UnitSet:
    rows = pl.read_csv(data / "hdfs" / "HDFS_2percent_events.csv.gz", infer_schema=False)
    labels = pl.read_csv(data / "hdfs" / "HDFS_2percent_labels.csv.gz", infer_schema=False)
    sick = {unit: label == "1" for unit, label in labels.select("seq_id", "anomaly").iter_rows()}
    moment = ("20" + pl.col("date") + pl.col("time")).str.to_datetime("%Y%m%d%H%M%S").dt.epoch("s")
    lines = rows.select(
        extract(rows.select(pl.col("m_message").alias("message"))).alias("unit"),
        moment.alias("second"),
        masks.mask(rows["m_message"])["masked"],
        pl.col("level").str.to_lowercase().replace("warn", "warning"),
    ).filter(pl.col("unit").is_in(list(sick)))
    return UnitSet(lines=lines, sick=sick, learnt=_half(sick, seed), sessions=True)


def _bgl(data: Path, masks: MaskSet, seed: int) -> UnitSet:
    path = data / "bgl" / "BGL_100k.log.gz"
    with gzip.open(path, "rt", encoding="utf-8", errors="surrogateescape") as file:
        rows = tagged(file.read().splitlines(), masks).drop_nulls("host")
    sick = dict(rows.group_by("host").agg(pl.col("alert").any()).iter_rows())
    lines = rows.select(
        pl.col("host").alias("unit"), pl.col("timestamp").dt.epoch("s").alias("second"), "masked", "level"
    )
    return UnitSet(lines=lines, sick=sick, learnt=_half(sick, seed))


def _trainticket(data: Path, masks: MaskSet, seed: int) -> UnitSet:
    frames: list[pl.DataFrame] = []
    sick: dict[str, bool] = {}
    for name in (*sequences.NORMAL, *sequences.FAULTS):
        with zipfile.ZipFile(data / "trainticket" / f"{name}.zip") as archive:
            errors = sequences.error_spans(archive)
            lines = pl.concat(list(sequences.traced_lines(archive, masks)))
        frames.append(lines.filter(pl.col("session").is_in(list(errors))))
        sick |= errors
    lines = pl.concat(frames).select(
        pl.col("session").alias("unit"), pl.col("timestamp").dt.epoch("s").alias("second"), "masked", "level"
    )
    seen = set(lines["unit"].to_list())
    sick = {unit: bad for unit, bad in sick.items() if unit in seen}
    return UnitSet(lines=lines, sick=sick, learnt=_half(sick, seed), sessions=True)


def _samples(_data: Path, masks: MaskSet, _seed: int) -> UnitSet:
    rows = recorded(masks).with_columns(pl.col("timestamp").dt.epoch("s").alias("second"))
    which = pl.when("healthy").then(pl.lit("healthy")).otherwise(pl.lit("observed"))
    window = (pl.col("second") // WINDOW_S).cast(pl.String)
    rows = rows.with_columns(pl.concat_str(which, "file", window, separator="/").alias("unit"))
    sick = dict(rows.group_by("unit").agg(pl.col("fault").is_not_null().any()).iter_rows())
    learnt = frozenset(rows.filter("healthy")["unit"].unique().to_list())
    return UnitSet(lines=rows.select("unit", "second", "masked", "level"), sick=sick, learnt=learnt)


_LOADERS: Final[dict[str, Callable[[Path, MaskSet, int], UnitSet]]] = {
    "hdfs": _hdfs,
    "bgl_nodes": _bgl,
    "trainticket": _trainticket,
    "samples": _samples,
}
