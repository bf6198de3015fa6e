"""The hold-out set: lines that a training must not learn, for a judge to show to the model afterwards.

It holds whole templates at random, and patterns first seen in the newest part of the time. A hash draws the
templates, so that every training with the same seed holds out the same ones. The live model has not learnt
them either, which makes the comparison fair.
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

SPLIT_LEAST: Final = 20  # Templates; a tenth of fewer is one line, which shows nothing.
_SPARE: Final = 0.1  # Of templates, patterns and records at most, so that the fit hardly suffers.
_SPARE_RECORDS: Final = 0.05  # A template with more is typical of the log and must be learnt.
_HELD_MOST: Final = 2_000  # Patterns; the manifest lists their ids.
_NEWEST: Final = 0.1  # Of the time.
_SHOWN: Final = 80  # Templates each way: a rate of 5 % is then known to about 5 points, in half a second.

LEARNT: Final = 60  # lines; a share of 60 is known to about 6 points

_MASK: Final = re.compile(r"<[A-Z0-9_*]+>")
_LINES_SCHEMA: Final[dict[str, Any]] = {
    "masked": pl.String,
    "pattern_id": pl.UInt64,
    "template_id": pl.Int64,
    "whole": pl.Boolean,  # the whole template is held out, so that its shape is new to the candidate
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Patterns that a training must not learn, and the lines that the judge shows of them. Made by `split`.

    `by_time` and `by_template` hold one normal line per held-out template (masked, pattern_id, template_id,
    whole).
    """

    patterns: frozenset[int]  # for `trainer.fit(held_out=...)`
    templates: frozenset[int]  # held out as a whole
    by_time: pl.DataFrame
    by_template: pl.DataFrame
    learnt: tuple[str, ...]  # frequent calm lines that are not held out, for anomaly injection
    how: str  # in words
    seed: int


def split(sample: pl.DataFrame, *, seed: int, mode: Mode = Mode.BASELINE) -> HeldOut:
    """Chooses the hold-out set.

    `sample` has the columns of SAMPLE_SCHEMA and, where the store has them, the times `first_seen` and
    `last_seen`. At most a tenth of the templates, of the patterns and of the records is held out; nothing
    from fewer than 20 templates. Only calm templates qualify: no error level, no error word, not rare in
    Mode.SELF. The same seed chooses the same templates from a later sample, where these still exist and their
    share has not grown.
    """
    frame = sample.filter(pl.all_horizontal(pl.col(list(SAMPLE_SCHEMA)).is_not_null())).unique(
        "pattern_id", keep="first"
    )
    count = frame["template_id"].n_unique()
    if count < SPLIT_LEAST:
        empty = pl.DataFrame(schema=_LINES_SCHEMA)
        return HeldOut(
            patterns=frozenset(),
            templates=frozenset(),
            by_time=empty,
            by_template=empty,
            learnt=_learnt(frame),
            how=f"nothing: the sample has {count} templates, at least {SPLIT_LEAST} are needed to spare any",
            seed=seed,
        )
    total = int(frame["count"].sum())
    rows = frame.group_by("template_id").agg(
        pl.col("count").sum().alias("n"), pl.len().alias("lines"), pl.col("severe").any()
    )
    size = dict(rows.select("template_id", "lines").iter_rows())
    candidates = [
        t
        for t, n, _, severe in rows.select("template_id", "n", "lines", "severe").iter_rows()
        if not severe and n <= _SPARE_RECORDS * total and not (mode is Mode.SELF and is_rare(n, total))
    ]
    # The order of a hash is the same in the next training.
    order = sorted(candidates, key=lambda t: digest(str(seed), str(t)))
    room = min(_HELD_MOST, int(_SPARE * frame.height))
    limit = min(2 * _SHOWN, int(_SPARE * count))
    newest = _newest(frame)
    records = int(_SPARE * total)
    late = _take(newest, order, limit=limit // 2, room=room // 2, records=records // 2)
    used = set(late["template_id"])
    others = [t for t in order if t not in used]
    drawn = _take(
        frame,
        others,
        limit=min(_SHOWN, limit - len(used)),
        room=room - late.height,
        records=records - int(late["count"].sum()),
    )
    late_sizes = late.group_by("template_id").len()
    templates = {t for t, n in late_sizes.iter_rows() if n == size[t]} | set(drawn["template_id"])
    return HeldOut(
        patterns=frozenset([*late["pattern_id"], *drawn["pattern_id"]]),
        templates=frozenset(templates),
        by_time=_representatives(late, templates),
        by_template=_representatives(drawn, templates),
        learnt=_learnt(frame.filter(~pl.col("template_id").is_in(sorted(used | templates)))),
        how=f"{drawn['template_id'].n_unique()} of {count} templates at random, and the lines of {len(used)} "
        "first seen in the newest tenth of the time",
        seed=seed,
    )


def _learnt(frame: pl.DataFrame) -> tuple[str, ...]:
    quiet = frame.filter(~pl.col("severe")).sort("count", "pattern_id", descending=[True, False])
    return tuple([m for m in quiet["masked"].head(2 * LEARNT) if calm(m)][:LEARNT])


def _newest(frame: pl.DataFrame) -> pl.DataFrame:
    """The patterns first seen in the newest tenth of the time; none without times."""
    if "first_seen" not in frame.columns:
        return frame.clear()
    last = "last_seen" if "last_seen" in frame.columns else "first_seen"
    begin, end = frame["first_seen"].min(), frame[last].max()
    if not isinstance(begin, datetime) or not isinstance(end, datetime) or begin >= end:
        return frame.clear()
    return frame.filter(pl.col("first_seen") > end - (end - begin) * _NEWEST)


def _take(frame: pl.DataFrame, order: Sequence[int], *, limit: int, room: int, records: int) -> pl.DataFrame:
    """The lines of the first `limit` calm templates in this order: at most `room` lines, `records`
    records."""
    sizes = dict(frame.group_by("template_id").len().iter_rows())
    # Reads no template that cannot fit, and few more than wanted.
    fitting = [t for t in order if 0 < sizes.get(t, 0) <= room][: 4 * limit]
    groups = frame.filter(pl.col("template_id").is_in(fitting)).partition_by("template_id", as_dict=True)
    groups_taken: list[pl.DataFrame] = []
    for template in fitting:
        lines = groups[(template,)]
        count = int(lines["count"].sum())
        if len(groups_taken) == limit:
            break
        if lines.height <= room and count <= records and all(map(calm, lines["masked"])):
            groups_taken.append(lines)
            room -= lines.height
            records -= count
    return pl.concat(groups_taken) if groups_taken else frame.clear()


def calm(masked: str) -> bool:
    """Whether a line holds text beside mask tokens, and no error word."""
    return severity_words(masked) is None and any(c.isalpha() for c in _MASK.sub("", masked))


def _representatives(lines: pl.DataFrame, templates: Set[int]) -> pl.DataFrame:
    """The most frequent line of each template.

    Lines of one template are flagged together, so that more of them would only feign more evidence.
    """
    few = lines.sort("count", "pattern_id", descending=[True, False]).unique(
        "template_id", keep="first", maintain_order=True
    )
    few = few.with_columns(whole=pl.col("template_id").is_in(sorted(templates)))
    return few.sort("template_id").select([pl.col(n).cast(t) for n, t in _LINES_SCHEMA.items()])
