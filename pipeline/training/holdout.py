"""What a training is kept from learning, so that a judge can show it to the model afterwards.

Whole templates at random, and what was first seen in the newest part of the time. The templates are drawn by a hash:
every training with the same seed is kept from the same ones, so that the live model has not learnt them either and
the comparison is fair.
"""

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import polars as pl

from pipeline.models.severity import severity_words
from pipeline.models.threshold import Mode
from pipeline.models.verdict import is_rare
from pipeline.records.batch import digest
from pipeline.records.schema import SAMPLE_SCHEMA

SPLIT_LEAST: Final = 20  # templates; a tenth of fewer is one line, which shows nothing
_SPARE: Final = 0.1  # of templates, patterns and records at most: the fit must hardly notice
_SPARE_RECORDS: Final = 0.05  # a template with more is what the log mostly says; it has to be learnt
_HELD_MOST: Final = 2_000  # patterns; their ids stand in the manifest
_NEWEST: Final = 0.1  # of the time
_SHOWN: Final = 80  # templates each way: a rate of 5 % is then known to about 5 points, in half a second

LEARNT: Final = 60  # lines; a share of 60 is known to about 6 points

_MASK: Final = re.compile(r"<[A-Z0-9_*]+>")
_LINES_SCHEMA: Final[dict[str, Any]] = {
    "masked": pl.String,
    "pattern_id": pl.UInt64,
    "template_id": pl.Int64,
    "whole": pl.Boolean,  # the whole template is held out, so its shape is new to the candidate
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a training must not learn, and the lines of it that the judge shows. Made by `split`.

    `by_time` and `by_template` hold one normal line per held-out template (masked, pattern_id, template_id, whole).
    """

    patterns: frozenset[int]  # for `trainer.fit(held_out=...)`
    templates: frozenset[int]  # held out as a whole
    by_time: pl.DataFrame
    by_template: pl.DataFrame
    learnt: tuple[
        str, ...
    ]  # some frequent calm lines that are not held out: what is damaged to make anomalies
    how: str  # in words
    seed: int


def split(sample: pl.DataFrame, *, seed: int, mode: Mode = Mode.BASELINE) -> HeldOut:
    """Chooses what a training must not learn.

    `sample` has the columns of SAMPLE_SCHEMA and, where the store knows them, the times `first_seen` and `last_seen`.
    At most a tenth of the templates, of the patterns and of the records is held out, only calm ones (no error level, no
    error word; not rare in Mode.SELF), and nothing where there are fewer than 20 templates. The same seed chooses the
    same templates from a later sample, as far as they are still there and their share has not grown.
    """
    frame = sample.filter(pl.all_horizontal(pl.col(list(SAMPLE_SCHEMA)).is_not_null())).unique(
        "pattern_id", keep="first"
    )
    count = frame["template_id"].n_unique()
    if count < SPLIT_LEAST:
        nothing = pl.DataFrame(schema=_LINES_SCHEMA)
        return HeldOut(
            patterns=frozenset(),
            templates=frozenset(),
            by_time=nothing,
            by_template=nothing,
            learnt=_learnt(frame),
            how=f"nothing: the sample has {count} templates, at least {SPLIT_LEAST} are needed to spare any",
            seed=seed,
        )
    total = int(frame["count"].sum())
    rows = frame.group_by("template_id").agg(
        pl.col("count").sum().alias("n"), pl.len().alias("lines"), pl.col("severe").any()
    )
    size = dict(rows.select("template_id", "lines").iter_rows())
    fit_to_hold = [
        t
        for t, n, _, severe in rows.select("template_id", "n", "lines", "severe").iter_rows()
        if not severe and n <= _SPARE_RECORDS * total and not (mode is Mode.SELF and is_rare(n, total))
    ]
    # By a hash of the template, so that the next training draws the same ones.
    order = sorted(fit_to_hold, key=lambda t: digest(str(seed), str(t)))
    room = min(_HELD_MOST, int(_SPARE * frame.height))
    most = min(2 * _SHOWN, int(_SPARE * count))
    newest = _newest(frame)
    heavy = int(_SPARE * total)
    late = _take(newest, order, most=most // 2, room=room // 2, records=heavy // 2)
    used = set(late["template_id"])
    rest = [t for t in order if t not in used]
    whole = _take(
        frame,
        rest,
        most=min(_SHOWN, most - len(used)),
        room=room - late.height,
        records=heavy - int(late["count"].sum()),
    )
    held = late.group_by("template_id").len()
    gone = {t for t, n in held.iter_rows() if n == size[t]} | set(whole["template_id"])
    return HeldOut(
        patterns=frozenset([*late["pattern_id"], *whole["pattern_id"]]),
        templates=frozenset(gone),
        by_time=_spokesmen(late, gone),
        by_template=_spokesmen(whole, gone),
        learnt=_learnt(frame.filter(~pl.col("template_id").is_in(sorted(used | gone)))),
        how=f"{whole['template_id'].n_unique()} of {count} templates at random, and the lines of {len(used)} first seen "
        "in the newest tenth of the time",
        seed=seed,
    )


def _learnt(frame: pl.DataFrame) -> tuple[str, ...]:
    quiet = frame.filter(~pl.col("severe")).sort("count", "pattern_id", descending=[True, False])
    return tuple([m for m in quiet["masked"].head(2 * LEARNT) if calm(m)][:LEARNT])


def _newest(frame: pl.DataFrame) -> pl.DataFrame:
    """The patterns first seen in the newest tenth of the time; none where the times are not known."""
    if "first_seen" not in frame.columns:
        return frame.clear()
    last = "last_seen" if "last_seen" in frame.columns else "first_seen"
    begin, end = frame["first_seen"].min(), frame[last].max()
    if not isinstance(begin, datetime) or not isinstance(end, datetime) or begin >= end:
        return frame.clear()
    return frame.filter(pl.col("first_seen") > end - (end - begin) * _NEWEST)


def _take(frame: pl.DataFrame, order: Sequence[int], *, most: int, room: int, records: int) -> pl.DataFrame:
    """The lines of the first `most` templates, in that order, that are calm and fit into `room` lines of `records`."""
    sizes = dict(frame.group_by("template_id").len().iter_rows())
    # No template is read whose lines would not fit, and not many more than are wanted.
    near = [t for t in order if 0 < sizes.get(t, 0) <= room][: 4 * most]
    groups = frame.filter(pl.col("template_id").is_in(near)).partition_by("template_id", as_dict=True)
    taken: list[pl.DataFrame] = []
    for template in near:
        lines = groups[(template,)]
        count = int(lines["count"].sum())
        if len(taken) == most:
            break
        if lines.height <= room and count <= records and all(map(calm, lines["masked"])):
            taken.append(lines)
            room -= lines.height
            records -= count
    return pl.concat(taken) if taken else frame.clear()


def calm(masked: str) -> bool:
    """Whether a line says something beside mask tokens, and nothing of a fault."""
    return severity_words(masked) is None and any(c.isalpha() for c in _MASK.sub("", masked))


def _spokesmen(lines: pl.DataFrame, gone: Set[int]) -> pl.DataFrame:
    """The most frequent line of each template: lines of one template are flagged together, so more would only pretend
    to be more evidence."""
    few = lines.sort("count", "pattern_id", descending=[True, False]).unique(
        "template_id", keep="first", maintain_order=True
    )
    few = few.with_columns(whole=pl.col("template_id").is_in(sorted(gone)))
    return few.sort("template_id").select([pl.col(n).cast(t) for n, t in _LINES_SCHEMA.items()])
