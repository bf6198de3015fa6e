"""Which service of the shop is sick: for each fault, all twelve services are ranked over its window.

A ranking sees the lines of the half up to the repair, its fault-free part as the normal past, and no label.
A service is compared with its own normal windows of the same length. Rankings are functions in RANKINGS, each
from judged lines to scores, so another one joins by a line there. Ties count as a draw by lot."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from bench._alerts import alarm_rate
from bench._baselines import keyword_rule, trigram_novelty
from bench._ranking import auroc
from bench._shop_data import SHOP, TESTING, ShopFault, ShopHalf, shop_half
from bench._shop_numbers import number_findings, shop_streams
from bench._units_data import UnitSet, judged_lines
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.watching.rows import WatcherFinding, finding_rows
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.units.evidence import surprises
from pipeline.watching.units.own_time import spans_of
from pipeline.watching.units.ranking import rank_units, weigh_units
from pipeline.watching.units.unit_lines import (
    UNIT_LINES,
    UnitFold,
    UnitTable,
    both_ends,
    flagged_or_unusual,
    listened_ports,
    unit_lines,
)

WINDOW_S: Final = 15.0  # of the normal windows: as long as most faults last
FAULTS_FROM: Final = 1_000  # windows of faults; those below are normal
_CAUSE: Final = -2  # template of findings in sessions
IN_THREE: Final = 3
OURS: Final = "units"
RULES: Final = ("count", "novelty", "trigram_novelty", "keywords")

Scores = dict[str, float]  # by service; high is sick


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopJudged:
    """`lines`: UNIT_LINES with service, at, trace, message, masked, level, score; a `window` is normal below
    FAULTS_FROM, else that of fault `window - FAULTS_FROM`. `found`: UNIT_LINES of findings in sessions and of
    numbers."""

    lines: pl.DataFrame
    found: pl.DataFrame
    services: tuple[str, ...]
    faults: tuple[ShopFault, ...]

    @property
    def windows(self) -> list[int]:
        """Of the faults, in their order."""
        return [FAULTS_FROM + n for n in range(len(self.faults))]


def measure(folder: Path = SHOP, half: str = TESTING, *, more: Sequence[str] = ()) -> dict[str, Any]:
    """`shop`: the figures of one set of units; `origin`: how often the sick service came first."""
    recorded = shop_half(half, MaskSet.load(), folder)
    judged = judge(recorded, number_findings(shop_streams(half, folder)))
    found = {name: RANKINGS[name](judged) for name in (OURS, "pooled", *RULES, *more)}
    places = {name: _places(judged, by_window) for name, by_window in found.items()}
    areas = {name: _area(judged, by_window) for name, by_window in found.items()}
    first = {name: sum(p.first for p in row) for name, row in places.items()}
    best = max(RULES, key=lambda name: first[name])
    return {
        "shop": {
            "auroc": areas[OURS],
            "count_auroc": areas["count"],
            "rules": {name: areas[name] for name in RULES if name != "count"},
            "units": {"judged": len(judged.faults) * len(judged.services), "sick": len(judged.faults)},
            "alerts": alerts(judged, recorded),
            "calm": none_unusual(judged),
        },
        "origin": {
            "faults": len(judged.faults),
            "first": round(first[OURS], 2),
            "in_three": round(sum(p.in_three for p in places[OURS]), 2),
            "best_rule": best,
            "best_rule_first": round(first[best], 2),
            "rankings": {
                name: {"first": round(first[name], 2), "in_three": round(sum(p.in_three for p in row), 2)}
                for name, row in places.items()
            },
            "by_kind": _by_kind(judged, places[OURS]),
        },
    }


def alerts(judged: ShopJudged, half: ShopHalf) -> dict[str, Any]:
    """False alarms in every other normal window, by what the lines of the windows between teach, and the
    share of faults of whose service something is found."""
    lines = _windowed(half).filter(pl.col("window") < FAULTS_FROM)
    odd = pl.col("window") % 2 == 1
    lines = lines.select(
        pl.when(odd).then(pl.lit("judged")).otherwise(pl.lit("learnt")).alias("unit"),
        pl.col("at").floor().cast(pl.Int64).alias("second"),
        pl.col("service").alias("workload"),
        "masked",
        "level",
    )
    units = UnitSet(lines=lines, sick={"judged": False, "learnt": False}, learnt=frozenset({"learnt"}))
    calm = judged_lines(units, seed=1).lines.filter(pl.col("unit") == "judged")
    normal = judged.found.filter(pl.col("window") < FAULTS_FROM)
    windows = judged.lines.filter(pl.col("window") < FAULTS_FROM, odd)["window"].n_unique()
    rate = alarm_rate(
        calm.select("workload", "second", "masked", "flagged"),
        normal.filter(odd).height,
        days=len(judged.services) * windows * WINDOW_S / 86_400,
    )
    flagged = judged.lines.filter("flagged").select("unit", "window")
    told = set(pl.concat([flagged, judged.found.select("unit", "window")]).unique().iter_rows())
    pairs = zip(judged.faults, judged.windows, strict=True)
    found = sum((fault.service, window) in told for fault, window in pairs)
    return rate | {"recall": round(found / len(judged.faults), 4)}


def none_unusual(judged: ShopJudged) -> dict[str, int]:
    """Of the normal windows, each beside the others, those in which no service is called unusual."""
    normal = pl.col("window") < FAULTS_FROM
    windows = judged.lines.filter(normal)["window"].unique().to_list()
    found = [
        rank_units(
            _folded(judged, pl.col("window") == window),
            _folded(judged, normal & (pl.col("window") != window)),
            {},
            limit=0,
        ).unusual
        for window in windows
    ]
    return {"windows": len(windows), "none_unusual": found.count(0)}


def judge(half: ShopHalf, numbers: Sequence[Sequence[WatcherFinding]]) -> ShopJudged:
    """Templates and verdicts by what the fault-free part teaches, findings in its sessions, and those of
    numbers by fault; the fault-free part has none."""
    lines = _windowed(half)
    units = pl.concat_str("service", "window", separator="/")
    lines = lines.with_columns(units.alias("unit"), pl.col("at").floor().cast(pl.Int64).alias("second"))
    normal = lines.filter(pl.col("window") < FAULTS_FROM)
    learnt = frozenset(normal["unit"].unique().to_list())
    where = lines["window"]
    judged = judged_lines(
        UnitSet(lines=lines.drop("window"), sick=dict.fromkeys(lines["unit"].unique(), False), learnt=learnt),
        seed=1,
    )
    occasion = pl.coalesce("trace", pl.col("second").cast(pl.String)).hash()
    tells = flagged_or_unusual(pl.col("flagged"))
    every = judged.lines.with_columns(
        pl.col("service").alias("unit"),
        where.cast(pl.Int32).alias("window"),
        pl.when(tells).then(both_ends()).alias("text"),
        pl.when(tells).then(occasion).alias("occasion"),
        *spans_of(
            judged.lines.select(
                "message", (pl.col("at") * 1e6).cast(pl.Int64).cast(pl.Datetime("us")).alias("timestamp")
            )
        ),
        listened_ports(judged.lines["message"]),
    )
    found = [_found(every), *(_of_numbers(at, items) for at, items in enumerate(numbers) if items)]
    return ShopJudged(lines=every, found=pl.concat(found), services=half.services, faults=half.faults)


def _windowed(half: ShopHalf) -> pl.DataFrame:
    """The lines of a window, with its number."""
    rows = half.lines.drop_nulls("at")
    baseline = rows.filter("baseline")
    begin = float(baseline["at"].min())  # type: ignore[arg-type]
    number = ((pl.col("at") - begin) // WINDOW_S).cast(pl.Int64)
    last = int((float(baseline["at"].max()) - begin) // WINDOW_S)  # type: ignore[arg-type]
    # The first window has the start-up, the last one is cut short.
    frames = [baseline.with_columns(number.alias("window")).filter(pl.col("window").is_between(1, last - 1))]
    observed = rows.filter(~pl.col("baseline"))
    for at, fault in enumerate(half.faults):
        inside = observed.filter(pl.col("at").is_between(fault.start, fault.repaired))
        frames.append(inside.with_columns(pl.lit(FAULTS_FROM + at, pl.Int64).alias("window")))
    return pl.concat(frames)


def _found(lines: pl.DataFrame) -> pl.DataFrame:
    """Traces of one service that are anomalous; each half of the normal windows is judged by the other."""
    found: list[tuple[str, int, float]] = []
    for (service,), rows in lines.drop_nulls("trace").group_by(["service"], maintain_order=True):
        sessions = (
            rows.sort("at", maintain_order=True)
            .group_by("window", "trace", maintain_order=True)
            .agg("template_id")
        )
        normal = sessions.filter(pl.col("window") < FAULTS_FROM)
        odd = pl.col("window") % 2 == 1
        faults = sessions.filter(pl.col("window") >= FAULTS_FROM)
        for taught, asked in (
            (normal.filter(odd), normal.filter(~odd)),
            (normal.filter(~odd), normal.filter(odd)),
            (normal, faults),
        ):
            if taught.height < 2 or asked.is_empty():
                continue
            model = SessionModel.fit(map(tuple, taught["template_id"].to_list()))
            verdicts = model.judge(asked["template_id"].to_list())
            found += [
                (str(service), window, verdict.p_value)
                for window, verdict in zip(asked["window"], verdicts, strict=True)
                if verdict.anomalous
            ]
    rows_ = [
        (service, window, None, 0, _CAUSE, True, p_value, True, *[None] * 8)
        for service, window, p_value in found
    ]
    return pl.DataFrame(rows_, schema=UNIT_LINES, orient="row")


def _of_numbers(at: int, found: Sequence[WatcherFinding]) -> pl.DataFrame:
    """UNIT_LINES of the findings within a fault, as `logweir units` reads them from the store."""
    rows = pl.concat([rows for _, _, rows in finding_rows(found)])
    window = pl.Series([FAULTS_FROM + at]).new_from_index(0, rows.height)
    return unit_lines(rows, rows["workload"], window, pl.Series([True]).new_from_index(0, rows.height))


# -- rankings ------------------------------------------------------------------------------------


def by_units(judged: ShopJudged) -> dict[int, Scores]:
    """The order of `logweir units --by service`, asked for each fault by itself."""
    normal = _folded(judged, pl.col("window") < FAULTS_FROM)
    found: dict[int, Scores] = {}
    for window in judged.windows:
        asked = _folded(judged, pl.col("window") == window)
        weighed = weigh_units(asked, normal)
        found[window] = dict.fromkeys(judged.services, 0.0)
        found[window] |= zip(weighed.beside.judged.units["unit"], weighed.values.tolist(), strict=True)
    return found


def by_pooled(judged: ShopJudged) -> dict[int, Scores]:
    """As `units`, but each service beside the windows of all, and without the names in flagged lines."""
    normal = _folded(judged, pl.col("window") < FAULTS_FROM)
    found = {window: dict.fromkeys(judged.services, 0.0) for window in judged.windows}
    table = _folded(judged, pl.col("window") >= FAULTS_FROM)
    nats, _ = surprises(table, normal)
    sums = np.sum(list(nats.values()), axis=0).tolist()
    for (service, window), value in zip(table.units.select("unit", "window").iter_rows(), sums, strict=True):
        found[window][service] = value
    return found


def _folded(judged: ShopJudged, chosen: pl.Expr) -> UnitTable:
    fold = UnitFold()
    for rows in (judged.lines.select(list(UNIT_LINES)), judged.found):
        fold.add(rows.filter(chosen))
    return fold.table()


def by_count(judged: ShopJudged) -> dict[int, Scores]:
    """Flagged lines and findings in sessions and of numbers."""
    flagged = judged.lines.filter("flagged").select("unit", "window")
    return _counted(judged, pl.concat([flagged, judged.found.select("unit", "window")]))


def by_novelty(judged: ShopJudged) -> dict[int, Scores]:
    """Distinct patterns that the service never wrote in normal windows."""
    key = ["unit", "pattern_id"]
    normal = judged.lines.filter(pl.col("window") < FAULTS_FROM).select(key).unique()
    new = judged.lines.filter(pl.col("window") >= FAULTS_FROM).join(normal, on=key, how="anti")
    return _counted(judged, new.unique(["unit", "window", "pattern_id"]))


def by_trigrams(judged: ShopJudged) -> dict[int, Scores]:
    """The line with the largest share of trigrams that no normal line of any service holds."""
    normal = judged.lines.filter(pl.col("window") < FAULTS_FROM)["masked"].unique().to_list()
    few = judged.lines.filter(pl.col("window") >= FAULTS_FROM).select("masked").unique()
    few = few.with_columns(score=pl.Series(trigram_novelty(normal, few["masked"].to_list())))
    most = (
        judged.lines.filter(pl.col("window") >= FAULTS_FROM)
        .drop("score")
        .join(few, on="masked")
        .group_by("unit", "window")
        .agg(pl.col("score").max())
    )
    return _scores(judged, most, "score")


def by_keywords(judged: ShopJudged) -> dict[int, Scores]:
    """Lines at an error level or with one of the words."""
    few = judged.lines.select("masked", "level").unique()
    few = few.with_columns(named=pl.Series(keyword_rule(few["masked"].to_list(), few["level"].to_list())) > 0)
    rows = judged.lines.join(few, on=["masked", "level"], nulls_equal=True).filter("named")
    return _counted(judged, rows.select("unit", "window"))


def _counted(judged: ShopJudged, rows: pl.DataFrame) -> dict[int, Scores]:
    return _scores(judged, rows.group_by("unit", "window").agg(pl.len().alias("n")), "n")


def _scores(judged: ShopJudged, rows: pl.DataFrame, column: str) -> dict[int, Scores]:
    found = {window: dict.fromkeys(judged.services, 0.0) for window in judged.windows}
    for service, window, value in rows.select("unit", "window", column).iter_rows():
        if window in found:
            found[window][service] = float(value)
    return found


RANKINGS: Final[dict[str, Callable[[ShopJudged], dict[int, Scores]]]] = {
    OURS: by_units,
    "pooled": by_pooled,
    "count": by_count,
    "novelty": by_novelty,
    "trigram_novelty": by_trigrams,
    "keywords": by_keywords,
}


# -- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Chances that the sick service comes first, and among three, where ties are drawn by lot."""

    first: float
    in_three: float


def place(scores: Mapping[str, float], sick: str) -> Place:
    """Of the sick service in one window."""
    above = sum(value > scores[sick] for value in scores.values())
    level = sum(value == scores[sick] for value in scores.values())
    return Place(
        first=1 / level if above == 0 else 0.0,
        in_three=min(1.0, max(0.0, (IN_THREE - above) / level)),
    )


def _places(judged: ShopJudged, by_window: Mapping[int, Scores]) -> list[Place]:
    pairs = zip(judged.windows, judged.faults, strict=True)
    return [place(by_window[window], fault.service) for window, fault in pairs]


def _area(judged: ShopJudged, by_window: Mapping[int, Scores]) -> float:
    """Mean over the faults of the share of healthy services that rank below the sick one."""
    areas = []
    for window, fault in zip(judged.windows, judged.faults, strict=True):
        scores = by_window[window]
        areas.append(
            auroc([scores[s] for s in judged.services], [s == fault.service for s in judged.services])
        )
    return round(statistics.fmean(areas), 4)


def _by_kind(judged: ShopJudged, places: Sequence[Place]) -> dict[str, dict[str, float]]:
    kinds: dict[str, list[Place]] = {}
    for fault, found in zip(judged.faults, places, strict=True):
        kinds.setdefault(fault.kind, []).append(found)
    return {
        kind: {
            "faults": len(found),
            "first": round(sum(p.first for p in found), 2),
            "in_three": round(sum(p.in_three for p in found), 2),
        }
        for kind, found in sorted(kinds.items())
    }
