"""Values of real logs by minute, template and variable, as a watcher gets them, and latency faults put into
them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Templates
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import raw_frame
from pipeline.sources import formats
from pipeline.watching.numbers.variable import SLOTS
from pipeline.watching.values.bins import bin_of
from pipeline.watching.values.sampling import SLOT_S, ValueSample, value_texts

BATCH_S: Final = 2  # seconds
VALUE_RECORDS: Final = {"at": pl.Int64, "template": pl.Int64, "text": pl.String}  # `at`: epoch milliseconds
ValuesBySlot = dict[tuple[int, int, str, str], dict[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStream:
    """`values`: in the order of their slots; `texts`: of templates. `records`: VALUE_RECORDS of all lines
    with a time."""

    name: str
    values: ValuesBySlot
    texts: dict[int, str]
    lines: int
    records: pl.DataFrame

    @property
    def minutes(self) -> int:
        """From the first value to the last."""
        every = [key[0] for key in self.values]
        return (max(every) - min(every)) // SLOTS + 1 if every else 0


def value_stream(name: str, lines: Sequence[str]) -> ValueStream:
    """The values of these lines, through Logweir's own parsing, masking, templates and sampling."""
    lines = [line for line in lines if line.strip()]
    names = formats.detect(list(lines[:200]))
    parsed = formats.parse(
        raw_frame(list(lines)), names, arrived=datetime(2026, 1, 1, tzinfo=UTC), zone="UTC"
    )
    masked = MaskSet.load().mask(parsed["message"])["masked"]
    severe = parsed["level"].is_in(list(ERROR_LEVELS)).fill_null(False)
    tree = Templates(similarity=0.7, depth=4, per_workload=5000)
    known: dict[tuple[str, bool], int] = {}
    texts_by_id: dict[int, str] = {}
    ids = []
    for key in zip(masked.to_list(), severe.to_list(), strict=True):
        if key not in known:
            template, _ = tree.learn(key[0], severe=key[1], workload="w")
            known[key] = template.template_id if template else 0
            texts_by_id[known[key]] = template.text if template else ""
        ids.append(known[key])
    timed = parsed["timed"].fill_null(value=False)
    records = pl.DataFrame(
        {"at": parsed["timestamp"].dt.epoch("ms"), "template": ids, "text": value_texts(parsed)},
        schema=VALUE_RECORDS,
    ).filter(timed & pl.col("at").is_not_null() & (pl.col("template") > 0))
    return ValueStream(
        name=name, values=values_by_slot(records), texts=texts_by_id, lines=len(lines), records=records
    )


def values_by_slot(records: pl.DataFrame) -> ValuesBySlot:
    """Of VALUE_RECORDS, as a shipper sends them: what came within BATCH_S seconds is stored together."""
    values: ValuesBySlot = {}
    for part in (
        records.with_columns((pl.col("at") // (1000 * BATCH_S)).alias("batch"))
        .sort("at")
        .partition_by("batch", maintain_order=True)
    ):
        texts, slots = part["text"].to_list(), (part["at"] // (1000 * SLOT_S)).to_numpy()
        none = np.zeros(part.height, dtype=np.int64)
        sample = ValueSample(none, slots, part["template"].to_numpy(), none == 0)
        for table in sample.tables(lambda rows, texts=texts: [texts[row] for row in rows.tolist()]).values():  # type: ignore[misc]
            for slot, template_id, variable, kind, bins, counts in table.rows():
                sums = values.setdefault((slot, template_id, variable, kind), {})
                for number, n in zip(bins, counts, strict=True):
                    sums[number] = sums.get(number, 0) + n
    return dict(sorted(values.items()))


def made_up_values(seed: int, days: int, variables: int = 8) -> ValueStream:
    """Durations of templates with a rhythm of the day, levels that wander, and heavy tails: no public log of
    ours holds durations over days. Rates are 0.3 to 50 lines a minute, of which 40 are read."""
    rng = np.random.default_rng(seed)
    made = [
        (10 ** rng.uniform(-3, 0.5), rng.choice([0.3, 0.6, 1.0, 1.4]), 10 ** rng.uniform(-0.5, 1.7),
         rng.choice([0.0, 0.1, 0.25]), rng.choice([0.0, 0.2, 0.5]), rng.choice([0.0, 0.0, 0.01]))
        for _ in range(variables)
    ]  # fmt: skip
    start, levels, values = 28_401_120 // 1440 * 1440, np.zeros(variables), ValuesBySlot()
    for minute in range(days * 1440):
        hour = math.sin(2 * math.pi * minute / 1440)
        for at, (median, spread, rate, wander, rhythm, tail) in enumerate(made):
            levels[at] = 0.97 * levels[at] + 0.243 * wander * rng.standard_normal()
            n = min(40, rng.poisson(rate * (1 + 0.7 * hour)))
            drawn = median * np.exp(levels[at] + rhythm * hour + spread * rng.standard_normal(n))
            drawn = np.where(rng.random(n) < tail, 3 * drawn * (1 + rng.pareto(1.2, n)), drawn)
            bins = Counter(bin_of("duration", float(value)) for value in drawn)
            if bins:
                values[(start + minute) * SLOTS, at + 1, f"duration#{at}", "duration"] = dict(bins)
    return ValueStream(
        name="made_up", values=values, texts={}, lines=0, records=pl.DataFrame(schema=VALUE_RECORDS)
    )
