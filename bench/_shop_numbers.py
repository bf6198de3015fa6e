"""Findings of numbers in the set of twelve services (samples/services), each fault after the baseline alone.

A state that learnt from a service's baseline judges the lines of each fault by themselves: 40 faults in 17
minutes would hide each other. An alarm counts where its window begins before the repair."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl
import zstandard

from bench._number_streams import ValuesBySlot, ValueStream, value_stream, values_by_slot
from bench._shop_data import ShopFault, shop_faults
from pipeline.watching.numbers.alarms import NumberAlarm
from pipeline.watching.numbers.numbers import Numbers
from pipeline.watching.rows import WatcherFinding
from pipeline.watching.values.sampling import SLOT_S
from pipeline.watching.verdicts import of_numbers

# Of the calm before a fault, so that windows have values as in a stream. The fault before is repaired for
# five seconds then; with values before its repair, findings of that fault count for the next one.
LEAD_S: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopStreams:
    """Of one half. `streams`: by service, baseline and observed; `end`: of the baseline, in seconds since the
    epoch."""

    streams: Mapping[str, ValueStream]
    faults: tuple[ShopFault, ...]
    end: float

    def baseline(self, name: str) -> ValuesBySlot:
        """The values of a service before the first fault."""
        return {key: n for key, n in self.streams[name].values.items() if key[0] * SLOT_S < self.end}


def shop_streams(half: str, folder: Path) -> ShopStreams:
    """TUNING or TESTING of a set in this folder."""
    faults = shop_faults(half, folder)
    streams = {}
    for path in sorted((folder / half / "baseline").glob("*.log.zst")):
        lines = [line for part in (path, folder / half / "observed" / path.name) for line in _lines(part)]
        name = path.name.removesuffix(".log.zst")
        streams[name] = value_stream(name, lines)
    return ShopStreams(streams=streams, faults=faults, end=min(fault.start for fault in faults) - SLOT_S)


def alarms_by_fault(shop: ShopStreams) -> list[dict[str, list[NumberAlarm]]]:
    """For each fault the alarms of each service that has some."""
    learnt = {name: learnt_numbers(shop.baseline(name)) for name in shop.streams}
    found = []
    for fault in shop.faults:
        by_service: dict[str, list[NumberAlarm]] = {}
        for name, stream in shop.streams.items():
            within = pl.col("at").is_between(1000 * (fault.start - LEAD_S), 1000 * fault.end)
            for alarm in number_alarms(learnt[name], values_by_slot(stream.records.filter(within))):
                if alarm.shown.began * SLOT_S < fault.repaired:
                    by_service.setdefault(name, []).append(alarm)
        found.append(by_service)
    return found


def number_findings(shop: ShopStreams) -> list[list[WatcherFinding]]:
    """For each fault the findings of the watcher, in all services."""
    return [
        [
            of_numbers(name, alarm, shop.streams[name].texts)
            for name, alarms in by_service.items()
            for alarm in alarms
        ]
        for by_service in alarms_by_fault(shop)
    ]


def learnt_numbers(values: ValuesBySlot) -> bytes:
    """The packed state after these values."""
    state = Numbers()
    state.step(values.items(), judged=False)
    return state.pack()


def number_alarms(blob: bytes, values: ValuesBySlot) -> list[NumberAlarm]:
    """Those of a packed state, which stays as it is, over these values."""
    return Numbers.unpack(blob).step(values.items(), judged=True)


def _lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read().decode(errors="replace").splitlines()
