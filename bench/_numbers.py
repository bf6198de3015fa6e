"""Latency faults found by numbers, and false alarms over normal recordings.

The faults are those of the recorded shop of twelve services (`samples/services`): the testing half where it
is there, else the tuning half (`_shop_numbers`). A fault is found by an alarm of the broken service in a
window that begins before the repair. Normal recordings are the baselines' second halves after their first
ones, and the real logs of other sets, whose first tenth is history. Their faults, if any, count as false
alarms. Four made-up streams of three days stand apart."""

import gzip
import math
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench._number_streams import ValuesBySlot, ValueStream, made_up_values, value_stream
from bench._shop_data import SHOP, TESTING, TUNING
from bench._shop_numbers import ShopStreams, alarms_by_fault, learnt_numbers, number_alarms, shop_streams
from pipeline.watching.values.sampling import SLOT_S

MADE_UP_DAYS: Final = 3
LOGHUB: Final = ("HealthApp", "Mac", "OpenSSH", "Zookeeper", "Linux", "Android", "Hadoop")


def measure(data: Path) -> dict[str, Any]:
    half = next((name for name in (TESTING, TUNING) if (SHOP / name).is_dir()), None)
    shop = shop_streams(half, SHOP) if half is not None else None
    found = {} if shop is None or half is None else {"half": half, **_faults(shop)}
    baselines = {} if shop is None else {name: shop.baseline(name) for name in shop.streams}
    normal = {name: _false_alarms(values, 0.5) for name, values in baselines.items()}
    real = {stream.name: _false_alarms(stream.values, 0.1) for stream in _real(data)}
    made = [_false_alarms(made_up_values(seed, MADE_UP_DAYS).values, 1 / MADE_UP_DAYS) for seed in range(4)]
    alarms = sum(alarms for alarms, _ in (*normal.values(), *real.values()))
    days = sum(days for _, days in (*normal.values(), *real.values()))
    return {
        **found,
        "false_alarms": alarms,
        "workload_days": round(days, 2),
        "false_per_day": round(alarms / days, 3) if days else None,
        "false_per_day_made_up": round(sum(n for n, _ in made) / sum(d for _, d in made), 2),
        "false_in_baselines": [
            sum(n for n, _ in normal.values()),
            round(sum(d for _, d in normal.values()), 3),
        ],
    }


def _faults(shop: ShopStreams) -> dict[str, Any]:
    """Faults of the kind latency, and of the other kinds beside them: alarms of the service, and of any."""
    tried, own, anywhere = Counter[str](), Counter[str](), Counter[str]()
    for fault, alarmed in zip(shop.faults, alarms_by_fault(shop), strict=True):
        tried[fault.kind] += 1
        own[fault.kind] += fault.service in alarmed
        anywhere[fault.kind] += bool(alarmed)
    return {
        "faults": tried["latency"],
        "found": own["latency"],
        "kinds": {
            kind: {"faults": n, "found": own[kind], "in_any_service": anywhere[kind]}
            for kind, n in sorted(tried.items())
        },
    }


def _false_alarms(values: ValuesBySlot, history: float) -> tuple[int, float]:
    """Alarms, and days, after the first part of a stream."""
    if not values:
        return 0, 0.0
    first, last = next(iter(values))[0], max(key[0] for key in values)
    at = first + math.ceil(history * (last - first))
    blob = learnt_numbers({key: counts for key, counts in values.items() if key[0] < at})
    later = {key: counts for key, counts in values.items() if key[0] >= at}
    return len(number_alarms(blob, later)), (last - at) * SLOT_S / 86_400


def _real(data: Path) -> Iterator[ValueStream]:
    """Logs that were not made for this; most hold few values."""
    for name in LOGHUB:
        text = (data / "loghub_2k" / name / f"{name}_2k.log").read_text(encoding="utf-8", errors="replace")
        yield value_stream(f"{name}_2k", text.splitlines())
    with gzip.open(data / "bgl" / "BGL_100k.log.gz", "rt", encoding="utf-8", errors="replace") as file:
        yield value_stream("BGL_100k", [line.rstrip("\n").split(" ", 1)[1] for line in file])
    with zipfile.ZipFile(data / "trainticket" / "normal" / "F02normal01.zip") as archive:
        name = next(n for n in archive.namelist() if n.endswith(".log"))
        yield value_stream("TrainTicket_normal", archive.read(name).decode(errors="replace").splitlines())
