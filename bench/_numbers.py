"""Latency faults found by numbers, and false alarms over normal recordings.

The faults are those of the recorded shop of twelve services (`samples/services`): the testing half where it
is there, else the tuning half. The state learnt from a service's baseline judges each fault by itself: 40
faults in 17 minutes would hide each other. A fault is found by an alarm of the broken service in a window
that begins before the repair. Normal recordings are the baselines' second halves after their first ones, and
the real logs of other sets, whose first tenth is history. Their faults, if any, count as false alarms. Four
made-up streams of three days stand apart."""

import gzip
import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import zstandard

from bench._number_streams import ValuesBySlot, ValueStream, made_up_values, value_stream
from pipeline.watching.numbers.alarms import NumberAlarm
from pipeline.watching.numbers.numbers import Numbers
from pipeline.watching.values.sampling import SLOT_S

SERVICES: Final = Path(__file__).resolve().parents[1] / "samples" / "services"
MADE_UP_DAYS: Final = 3
GRACE_S: Final = 20  # behind a fault's recovery, so that a window that began in it is complete
LOGHUB: Final = ("HealthApp", "Mac", "OpenSSH", "Zookeeper", "Linux", "Android", "Hadoop")


def measure(data: Path) -> dict[str, Any]:
    half = next((SERVICES / name for name in ("testing", "tuning") if (SERVICES / name).is_dir()), None)
    streams = _services(half) if half is not None else {}
    found = {} if half is None else _faults(half, streams)
    normal = {name: _false_alarms(stream.values, 0.5) for name, (stream, _) in _baselines(streams).items()}
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


def _services(half: Path) -> dict[str, tuple[ValueStream, float]]:
    """The stream of each service, baseline and observed, and when the baseline ends."""
    labels = json.loads((half / "labels.json").read_text(encoding="utf-8"))
    end = min(_seconds(fault["start"]) for fault in labels["faults"]) - SLOT_S
    found = {}
    for path in sorted((half / "baseline").glob("*.log.zst")):
        lines = [line for part in (path, half / "observed" / path.name) for line in _lines(part)]
        name = path.name.removesuffix(".log.zst")
        found[name] = (value_stream(name, lines), end)
    return found


def _baselines(streams: dict[str, tuple[ValueStream, float]]) -> dict[str, tuple[ValueStream, float]]:
    return {
        name: (
            ValueStream(
                name=name,
                values={key: counts for key, counts in stream.values.items() if key[0] * SLOT_S < end},
                texts=stream.texts,
                lines=stream.lines,
            ),
            end,
        )
        for name, (stream, end) in streams.items()
    }


def _faults(half: Path, streams: dict[str, tuple[ValueStream, float]]) -> dict[str, Any]:
    """Faults of the kind latency, and of the other kinds beside them: alarms of the service, and of any."""
    learnt = {name: _learnt(stream.values, end) for name, (stream, end) in streams.items()}
    tried, own, anywhere = Counter[str](), Counter[str](), Counter[str]()
    for fault in json.loads((half / "labels.json").read_text(encoding="utf-8"))["faults"]:
        begin, repaired, end = (_seconds(fault[name]) for name in ("start", "repaired", "end"))
        alarmed = set()
        for name, (stream, _) in streams.items():
            part = {
                key: counts
                for key, counts in stream.values.items()
                if begin - SLOT_S < key[0] * SLOT_S <= end + GRACE_S
            }
            for alarm in _judged(learnt[name], part):
                if alarm.shown.began * SLOT_S < repaired:
                    alarmed.add(name)
        kind = fault["kind"]
        tried[kind] += 1
        own[kind] += fault["service"] in alarmed
        anywhere[kind] += bool(alarmed)
    return {
        "half": half.name,
        "faults": tried["latency"],
        "found": own["latency"],
        "kinds": {
            kind: {"faults": n, "found": own[kind], "in_any_service": anywhere[kind]}
            for kind, n in sorted(tried.items())
        },
    }


def _learnt(values: ValuesBySlot, end: float) -> bytes:
    state = Numbers()
    state.step(((key, counts) for key, counts in values.items() if key[0] * SLOT_S < end), judged=False)
    return state.pack()


def _judged(blob: bytes, values: ValuesBySlot) -> list[NumberAlarm]:
    return Numbers.unpack(blob).step(values.items(), judged=True)


def _false_alarms(values: ValuesBySlot, history: float) -> tuple[int, float]:
    """Alarms, and days, after the first part of a stream."""
    if not values:
        return 0, 0.0
    first, last = next(iter(values))[0], max(key[0] for key in values)
    at = first + math.ceil(history * (last - first))
    blob = _learnt(values, at * SLOT_S)
    later = {key: counts for key, counts in values.items() if key[0] >= at}
    return len(_judged(blob, later)), (last - at) * SLOT_S / 86_400


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


def _lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read().decode(errors="replace").splitlines()


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
