"""Values of real logs by minute, template and variable, as a watcher gets them, and latency faults put into
them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.masking.masks import shipped
from pipeline.drain.templates import Templates
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import raw_frame
from pipeline.sources import formats
from pipeline.watching.values.sampling import chosen_rows, value_tables, value_texts

BATCH: Final = 5_000  # records of a batch
ValuesByMinute = dict[tuple[int, int, str, str], dict[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStream:
    """`values`: in the order of minutes; `texts`: of templates."""

    name: str
    values: ValuesByMinute
    texts: dict[int, str]
    lines: int

    @property
    def minutes(self) -> int:
        """From the first value to the last."""
        every = [key[0] for key in self.values]
        return max(every) - min(every) + 1 if every else 0


def value_stream(name: str, lines: Sequence[str]) -> ValueStream:
    """The values of these lines, through Logweir's own parsing, masking, templates and sampling."""
    lines = [line for line in lines if line.strip()]
    names = formats.detect(list(lines[:200]))
    parsed = formats.parse(
        raw_frame(list(lines)), names, arrived=datetime(2026, 1, 1, tzinfo=UTC), zone="UTC"
    )
    masked = MaskSet.load(shipped()).mask(parsed["message"])["masked"]
    severe = parsed["level"].is_in(list(ERROR_LEVELS)).fill_null(False)
    tree = Templates(similarity=0.7, depth=4, per_workload=5000)
    known: dict[tuple[str, bool], int] = {}
    texts: dict[int, str] = {}
    ids = []
    for key in zip(masked.to_list(), severe.to_list(), strict=True):
        if key not in known:
            template, _ = tree.learn(key[0], severe=key[1], workload="w")
            known[key] = template.template_id if template else 0
            texts[known[key]] = template.text if template else ""
        ids.append(known[key])
    template_ids = np.array(ids, dtype=np.int64)
    minutes = (parsed["timestamp"].dt.epoch("s") // 60).fill_null(0).to_numpy()
    timed = parsed["timed"].fill_null(value=False).to_numpy()
    raw = value_texts(parsed)
    values: ValuesByMinute = {}
    for begin in range(0, len(raw), BATCH):
        part = slice(begin, begin + BATCH)
        of = np.zeros(len(raw[part]), dtype=np.int64)
        rows = chosen_rows(of, template_ids[part], timed[part] & (template_ids[part] > 0))
        table = value_tables(
            [raw[part][row] for row in rows.tolist()], of[rows], minutes[part][rows], template_ids[part][rows]
        ).get(0)
        for minute, template_id, variable, kind, bins, counts in table.rows() if table is not None else ():
            sums = values.setdefault((minute, template_id, variable, kind), {})
            for number, n in zip(bins, counts, strict=True):
                sums[number] = sums.get(number, 0) + n
    return ValueStream(name=name, values=dict(sorted(values.items())), texts=texts, lines=len(lines))
