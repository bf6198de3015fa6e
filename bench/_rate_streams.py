"""Counts of real logs by minute and template, a made-up stream with a season, and faults put into them.

A stream is a dense matrix: one row per minute of event time, one column per template (1..K are their ids).
"""

import gzip
import io
import itertools
import zipfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Templates
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import raw_frame
from pipeline.sources import formats
from pipeline.watching.rates.rates import Rates

Counts = np.ndarray[Any, np.dtype[np.int64]]

# Excerpts without holes of sets whose lines carry a usable time; the other loghub samples span minutes or are
# drawn at random.
LOGHUB: Final = ("Apache", "HealthApp", "Linux", "Mac", "OpenSSH", "Zookeeper")
MAX_COLUMNS: Final = 400  # the rarest templates of a set past it are left out
WEEK: Final = 7 * 1440
MADE_UP: Final = "made_up_weeks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """`counts` (minutes, templates); `start` is the epoch minute of its first row."""

    name: str
    start: int
    counts: Counts

    @property
    def days(self) -> float:
        return len(self.counts) / 1440


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What was changed: rows `start` to `end`, of one template or, for a mix, of all (None)."""

    kind: str
    start: int
    end: int
    template_id: int | None


def real(data: Path) -> list[Stream]:
    """Every real set, through Logweir's own parsing, masking and templates."""
    with gzip.open(data / "bgl" / "BGL_100k.log.gz", "rt", encoding="utf-8", errors="replace") as file:
        bgl = [line.rstrip("\n").split(" ", 1)[1] for line in file]  # without the label
    events = pl.read_csv(data / "hdfs" / "HDFS_2percent_events.csv.gz", infer_schema=False)
    hdfs = events.select(
        pl.concat_str(
            pl.col("date").str.zfill(6), pl.col("time").str.zfill(6), "id", "level", "component", "m_message",
            separator=" ",
        )
    ).to_series().to_list()  # fmt: skip
    found = [_counted("BGL_100k", bgl), _counted("HDFS_2percent", hdfs)]
    with zipfile.ZipFile(data / "trainticket" / "normal" / "F02normal01.zip") as archive:
        name = next(n for n in archive.namelist() if n.endswith(".log"))
        text = io.TextIOWrapper(archive.open(name), encoding="utf-8", errors="replace").read()
    found.append(_counted("TrainTicket_normal", text.splitlines()))
    for system in LOGHUB:
        path = data / "loghub_2k" / system / f"{system}_2k.log"
        found.append(
            _counted(f"{system}_2k", path.read_text(encoding="utf-8", errors="replace").splitlines())
        )
    return found


def _counted(name: str, lines: list[str]) -> Stream:
    lines = [line for line in lines if line.strip()]
    records = raw_frame(lines)
    names = formats.detect(lines[:200])
    parsed = formats.parse(records, names, arrived=datetime(2026, 1, 1, tzinfo=UTC), zone="UTC")
    masked = MaskSet.load().mask(parsed["message"])["masked"]
    severe = parsed["level"].is_in(list(ERROR_LEVELS)).fill_null(False)
    frame = pl.DataFrame(
        {"masked": masked, "severe": severe, "minute": parsed["timestamp"].dt.epoch("s") // 60}
    )
    tree = Templates(similarity=0.7, depth=4, per_workload=5000)
    few = frame.unique(["masked", "severe"], keep="first", maintain_order=True).select("masked", "severe")
    ids = []
    for text, is_severe in few.iter_rows():
        template, _ = tree.learn(text, severe=is_severe, workload="w")
        ids.append(template.template_id if template else 0)
    frame = frame.join(few.with_columns(pl.Series("template", ids)), on=["masked", "severe"])
    grouped = frame.group_by("template", "minute").len()
    first, last = int(frame["minute"].min()), int(frame["minute"].max())
    order = (
        grouped.group_by("template")
        .agg(pl.col("len").sum())
        .sort("len", "template", descending=[True, False])
    )
    place = {t: i for i, t in enumerate(order["template"].to_list()[:MAX_COLUMNS])}
    counts = np.zeros((last - first + 1, len(place)), dtype=np.int64)
    for template, minute, n in grouped.iter_rows():
        if template in place:
            counts[minute - first, place[template]] = n
    return Stream(name=name, start=first, counts=counts)


def made_up(seed: int = 0, weeks: int = 3) -> Stream:
    """Three weeks of 24 templates: traffic that follows the hour and the weekday with clumps, and heartbeats.

    Not real: no public set of ours spans weeks. It begins on a Monday, traffic at night is a tenth of that at
    noon, half of it on weekends; counts are negative binomial, two templates come in clumps, four are
    heartbeats."""
    rng = np.random.default_rng(seed)
    minutes = np.arange(weeks * WEEK)
    hour, day = minutes / 60 % 24, minutes // 1440 % 7
    season = (0.1 + 0.9 * np.exp(-(((hour - 14) / 4.5) ** 2))) * np.where(day >= 5, 0.5, 1.0)
    columns = []
    for level in np.exp(np.linspace(np.log(0.05), np.log(120), 18)):
        swell = rng.gamma(20.0, 1 / 20.0, size=len(minutes))  # minutes of 22 % more or less
        columns.append(rng.poisson(level * season * swell))
    for level, clump in ((0.02, 30), (0.005, 200)):
        columns.append(rng.poisson(level, size=len(minutes)) * rng.poisson(clump, size=len(minutes)))
    for period in (1, 1, 5, 60):
        beat = np.zeros(len(minutes), dtype=np.int64)
        beat[rng.integers(period) :: period] = 1
        columns.append(np.where(rng.random(len(minutes)) < 0.001, 0, beat))
    start = 28_401_120 // 1440 * 1440  # of 2024-01-01, a Monday
    return Stream(name=MADE_UP, start=start, counts=np.stack(columns, axis=1).astype(np.int64))


# ---- faults ----------------------------------------------------------------------------------------


def faults(stream: Stream, kind: str, *, begin: int, seed: int = 0) -> tuple[Stream, list[Fault]]:
    """Up to eight faults of a kind after row `begin`, each on a template of its own, two hours or more
    apart."""
    rng = np.random.default_rng(seed)
    counts = stream.counts.copy()
    length = {"stop": 180, "mix": 60}.get(kind, 30)
    made: list[Fault] = []
    used: set[int] = set()
    at = begin + 30
    last = len(counts) - length - 15
    while at < last and len(made) < 8:
        window = counts[at : at + length]
        choice = _choice(counts, at, window, kind=kind, used=used, rng=rng)
        if choice is None:
            at += 30
            continue
        _change(counts, at, length, kind=kind, column=choice, rng=rng)
        if kind != "mix":
            used.add(choice)
        made.append(
            Fault(kind=kind, start=at, end=at + length, template_id=None if kind == "mix" else choice + 1)
        )
        at += length + max(120, (last - begin) // 10)
    return replace(stream, counts=counts), made


def _choice(counts: Counts, at: int, window: Counts, *, kind: str, used: set[int], rng: Any) -> int | None:
    past = counts[max(0, at - 1440) : at]
    if kind == "mix":
        return 0 if window.sum() >= 400 and np.count_nonzero(window.sum(axis=0) >= 10) >= 6 else None
    if kind == "stop":
        # A heartbeat: a line in nine of ten blocks of ten minutes of the past day, and in the window.
        blocks = past[len(past) % 10 :].reshape(-1, 10, past.shape[1]).sum(axis=1) > 0
        fit = (blocks.mean(axis=0) >= 0.9) & (window.sum(axis=0) > 0) & (len(blocks) >= 30)
    else:
        fit = (window.sum(axis=0) >= 15) & ((past > 0).sum(axis=0) >= 20)
    free = [int(j) for j in np.flatnonzero(fit) if int(j) not in used]
    return int(rng.choice(free)) if free else None


def _change(counts: Counts, at: int, length: int, *, kind: str, column: int, rng: Any) -> None:
    part = counts[at : at + length]
    if kind == "stop":
        part[:, column] = 0
    elif kind == "mix":
        # Every other template by size halves, the others gain what is lost: the sum stays about the same.
        order = np.argsort(-part.sum(axis=0), kind="stable")
        less, more = order[::2], order[1::2]
        lost = part[:, less].sum()
        part[:, less] = rng.binomial(part[:, less], 0.5)
        gain = (lost - part[:, less].sum()) / max(1, part[:, more].sum())
        part[:, more] += rng.poisson(part[:, more] * min(gain, 1.2))
    else:
        part[:, column] *= int(kind.removeprefix("x"))


# ---- driving ---------------------------------------------------------------------------------------


def drive(
    rates: Rates, stream: Stream, begin: int, end: int, *, judged: bool = True
) -> list[tuple[int, str]]:
    """Rows `begin` to `end` through the detector as a live stream; the row and the cause of every alarm."""
    rows, columns = np.nonzero(stream.counts[begin:end])
    frame = pl.DataFrame(
        {"minute": rows + (stream.start + begin), "template_id": columns + 1,
         "n": stream.counts[begin:end][rows, columns]},
    )  # fmt: skip
    edges = np.flatnonzero(np.diff(rows, prepend=-1, append=-1))
    told = []
    for first, last in itertools.pairwise(edges.tolist()):
        rates.observe(frame[first:last], judged=judged)
        for alarm in rates.close(int(rows[first]) + stream.start + begin + 1):
            told.append((int(alarm.at.timestamp()) // 60 - stream.start, alarm.cause))
    return told
