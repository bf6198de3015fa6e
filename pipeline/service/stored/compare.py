"""Two spans, or two workloads, beside each other: patterns that are new, gone, more or fewer in the first.

Each difference has the chance of it where nothing but luck has changed. Counts are negative binomial: lines
come in clumps, whose size the parts of both spans show beside the other patterns. The chance is a bound
(`rates/tail_bounds.py`), times the number of patterns that are compared. So one among a thousand equal
patterns is not taken for a change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
import redis

from pipeline.drain.learner import template_texts
from pipeline.errors import BadInput
from pipeline.records.pattern_query import PatternQuery
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.lines import chosen_names
from pipeline.service.questions import PatternsAsked, pattern_span
from pipeline.service.stored.values import Certainty, ChangeKind, ComparedSide, Comparison, Difference
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.watching.rates.tail_bounds import Floats, deviance, size_of

PARTS: Final = 12  # of a span, whose counts show how lines clump
CLEAR: Final = 0.001
LIKELY: Final = 0.05
TWICE: Final = 2.0  # a burst is shown where it made the pattern so much more or less frequent
MAX_COMPARED: Final = 100_000  # patterns of a span


@dataclass(slots=True)
class _Count:
    """A pattern on one side."""

    records: int
    anomalous: int
    severe: int
    first: datetime
    last: datetime
    sample: str | None
    trend: list[int]

    def add(self, other: "_Count") -> None:
        self.records += other.records
        self.anomalous += other.anomalous
        self.severe += other.severe
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.trend = [x + y for x, y in zip(self.trend, other.trend, strict=True)]


_Key = tuple[str, int]


def compared_sides(
    a: str, b: str | None, now: datetime, *, workload: str | None = None, other: str | None = None
) -> tuple[ComparedSide, ComparedSide]:
    """The sides of the texts `1h` and `2h..1h`, or of times. Without `b`: the same span before, or the same
    span where another workload is compared. Raises BadInput."""
    since, until = _span(a, now, "a")
    if b is not None:
        before, end = _span(b, now, "b")
    elif other is not None:
        before, end = since, until
    else:
        before, end = PatternsAsked(since=since, until=until, workload=workload).other
    sides = (
        ComparedSide(since=since, until=until, workload=workload),
        ComparedSide(since=before, until=end, workload=workload if other is None else other),
    )
    for side in sides:
        PatternsAsked(since=side.since, until=side.until, workload=side.workload)  # checks it
    return sides


def compare_stored(
    answers: Answers,
    client: "redis.Redis",
    settings: Settings,
    sides: tuple[ComparedSide, ComparedSide],
    *,
    only: tuple[str, ...] = (),
    kind: ChangeKind | None = None,
    limit: int | None = None,
) -> Comparison:
    """The differences of a kind; None: of all. Raises BadInput, RedisUnavailable, and as `Answers` does."""
    a, b = sides
    across = a.workload != b.workload
    counts = [_counted(answers, side, only, across=across) for side in sides]
    keys = sorted(counts[0].keys() | counts[1].keys())
    with answering():
        texts = template_texts(client, Keys(settings.redis.key_prefix))
    ratio = (a.until - a.since) / (b.until - b.since)
    chances = _chances(keys, counts, ratio)
    found = [
        _difference(key, counts, ratio, chance, texts.get(key[1]))
        for key, chance in zip(keys, chances, strict=True)
    ]
    rank = {kind: at for at, kind in enumerate(ChangeKind)}
    differences = sorted(
        (one for one in found if one is not None),
        key=lambda one: (rank[one.kind], one.certainty is Certainty.FEW, not one.severe, one.p_value, -one.a),
    )
    chosen = [one for one in differences if kind in (None, one.kind)][:limit]
    sums = tuple(sum(one.records for one in side.values()) for side in counts)
    return Comparison(
        a=a, b=b, differences=chosen, compared=len(keys), alike=len(keys) - len(differences),
        lines=(sums[0], sums[1]),
    )  # fmt: skip


def _span(text: str, now: datetime, name: str) -> tuple[datetime, datetime]:
    begin, dots, end = text.strip().partition("..")
    if not begin or (dots and not end):
        raise BadInput(f"{name} {text[:60]!r} is no span; write 1h, 2h..1h, or TIME..TIME")
    return pattern_span(begin, end or None, now, flags=("the beginning", "the end"))


def _counted(
    answers: Answers, side: ComparedSide, only: tuple[str, ...], *, across: bool
) -> dict[_Key, _Count]:
    query = PatternQuery(
        since=side.since,
        until=side.until,
        workloads=chosen_names(answers, side.workload, only),
        limit=MAX_COMPARED,
        buckets=PARTS,
    )
    columns = ("records", "anomalous", "severe", "first", "last", "sample", "trend")
    found: dict[_Key, _Count] = {}
    for workload, template_id, *values in (
        answers.patterns(query).select("workload", "template_id", *columns).iter_rows()
    ):
        count = _Count(*values)
        known = found.setdefault(("" if across else workload, template_id), count)
        if known is not count:
            known.add(count)
    return found


def _chances(
    keys: Sequence[_Key], counts: Sequence[dict[_Key, _Count]], ratio: float
) -> list[tuple[float, float]]:
    """The chance of each count of the first side, given that of the second and no change of the rate; and the
    same as if lines came alone.

    With b lines behind it, the expected count is (b + 1) times the ratio of the lengths, with a shape of
    b + 1: the posterior of a Poisson rate under a flat prior. Clumps of D lines leave (b + 1) / D of it."""
    if not keys:
        return []
    first, second = (_column(keys, side, lambda one: [one.records])[:, 0] for side in counts)
    clumps = _clumps([_column(keys, side, lambda one: one.trend, PARTS) for side in counts])
    mean = (second + 1.0) * ratio

    def chances(clumps: Floats) -> Floats:
        lines = np.maximum((second + 1.0) / clumps - 1.0, 0.0)
        nats = deviance(first, mean, size_of(mean, lines, np.zeros_like(mean), clumps))
        found: Floats = np.minimum(1.0, len(keys) * np.exp(-nats))
        return found

    return list(zip(chances(clumps).tolist(), chances(np.ones_like(clumps)).tolist(), strict=True))


def _column(keys: Sequence[_Key], side: dict[_Key, _Count], values: Any, width: int = 1) -> Floats:
    nothing = [0] * width
    rows = [values(side[key]) if key in side else nothing for key in keys]
    return np.asarray(rows, dtype=np.float64).reshape(len(keys), width)


def _clumps(trends: Iterable[Floats]) -> Floats:
    """The dispersion of each row on both sides, variance over mean; at least 1.

    Its lines are expected where the other rows have theirs: an idle hour of all is no clump of each."""
    squares, sides = [], []
    for parts in trends:
        own = parts.sum(axis=1, keepdims=True)
        others = parts.sum(axis=0) - parts + 1.0
        mean = np.maximum(own * others / others.sum(axis=1, keepdims=True), 1e-9)
        squares.append(((parts - mean) ** 2 / mean).sum(axis=1))  # 0 where the side has no line
        sides.append(own[:, 0] > 0)
    freedom = np.sum(sides, axis=0) * (PARTS - 1.0)
    clumps: Floats = np.maximum(1.0, np.sum(squares, axis=0) / np.maximum(freedom, 1.0))
    return clumps


def _difference(
    key: _Key,
    counts: Sequence[dict[_Key, _Count]],
    ratio: float,
    chance: tuple[float, float],
    template: str | None,
) -> Difference | None:
    sides = [side.get(key) for side in counts]
    a, b = (0 if side is None else side.records for side in sides)
    shown = sides[0] or sides[1]
    if shown is None or not (a or b):
        return None
    certainty, change = _certainty(chance), (a + 1) / (b * ratio + 1)
    if not b:
        kind = ChangeKind.NEW
    elif not a:
        kind = ChangeKind.GONE
    elif certainty is Certainty.FEW or (certainty is Certainty.BURST and 1 / TWICE < change < TWICE):
        return None
    else:
        kind = ChangeKind.MORE if a > b * ratio else ChangeKind.FEWER
    return Difference(
        kind=kind,
        workload=key[0],
        template_id=key[1],
        template=template,
        sample=shown.sample,
        a=a,
        b=b,
        change=change,
        p_value=chance[0],
        certainty=certainty,
        anomalous=shown.anomalous,
        severe=shown.severe,
        first=shown.first,
        last=shown.last,
    )


def _certainty(chance: tuple[float, float]) -> Certainty:
    clumped, alone = chance
    if clumped <= LIKELY:
        return Certainty.CLEAR if clumped <= CLEAR else Certainty.LIKELY
    return Certainty.BURST if alone <= CLEAR else Certainty.FEW
