"""Small charts as SVG: bars of a trend, and the lanes of an incident. Each has its values in words, too."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from markupsafe import Markup

HEIGHT: Final = 26
LANE: Final = 20


def bars(values: Sequence[int], *, label: str, odd: Sequence[int] = ()) -> Markup:
    """A bar for each value. `odd`: of each, so many are drawn as anomalous. `label`: the chart in words."""
    peak = max(values, default=0) or 1
    shapes = []
    for at, value in enumerate(values):
        if value:
            height = max(1.5, HEIGHT * value / peak)
            shapes.append(f"M{at + 0.1:g} {HEIGHT}v-{height:.1f}h.8v{height:.1f}z")
    marks = []
    for at, value in enumerate(odd):
        if value:
            height = max(2.5, HEIGHT * min(value, peak) / peak)
            marks.append(f"M{at + 0.1:g} {HEIGHT}v-{height:.1f}h.8v{height:.1f}z")
    return Markup(
        '<svg class="bars" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<path class="b" d="{}"/><path class="o" d="{}"/></svg>'
    ).format(max(1, len(values)), HEIGHT, label, "".join(shapes), "".join(marks))


class CauseLane(NamedTuple):
    """One row of a chart of lanes: from when to when, and how grave."""

    first: datetime
    last: datetime
    severity: int


def lane(row: CauseLane, begin: datetime, end: datetime) -> Markup:
    """The bar of one cause over the time of its incident, in percent of the width."""
    whole = max((end - begin).total_seconds(), 1e-9)
    left = 100 * (row.first - begin).total_seconds() / whole
    width = max(0.8, 100 * (row.last - row.first).total_seconds() / whole)
    return Markup(
        '<svg class="lane" viewBox="0 0 100 {}" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="s{}" x="{:.2f}" y="4" width="{:.2f}" height="{}" rx="1"/></svg>'
    ).format(LANE, row.severity, min(left, 99.2), min(width, 100 - min(left, 99.2)), LANE - 8)
