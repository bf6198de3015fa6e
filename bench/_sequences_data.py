"""The labelled sessions that bench/_sequences.py is measured on: HDFS blocks and TrainTicket traces."""

import csv
import gzip
import io
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Templates
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import raw_frame
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.sources import formats
from pipeline.watching.sessions.keys import extract

Session = tuple[int, ...]

NORMAL: Final = ("normal/F02normal01", "normal/normal_put_consign")
FAULTS: Final = ("F05", "F06", "F08")
_SLICE: Final = 20_000
_SILENCE_S: Final = 60  # as session_timeout_s is unless somebody sets it


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """One distinct session, or one trace: its events, whether it is anomalous, how often it is there, where
    from."""

    session: Session
    anomalous: bool
    times: int = 1
    origin: str = ""
    parts: tuple[Session, ...] = ()  # between its silences, where they are known


def hdfs(data: Path) -> tuple[Counter[Session], list[Labelled]]:
    """Training sessions with their counts, and every distinct session of the others with its count.

    The test set is all sessions of the logs less those of the training file, so 553,366 normal and 16,838
    anomalous ones. A sequence that has both labels stands there twice."""
    with (data / "hdfs" / "hdfs_train").open(encoding="utf-8") as lines:
        train = Counter(tuple(map(int, line.split())) for line in lines)
    test = []
    with gzip.open(data / "hdfs" / "hdfs_unique_sequences.tsv.gz", "rt", encoding="utf-8") as rows:
        next(rows)
        for row in rows:
            label, count, text = row.rstrip("\n").split("\t")
            session = tuple(map(int, text.split()))
            left = int(count) - (train[session] if label == "0" and session in train else 0)
            if left > 0:
                test.append(Labelled(session=session, anomalous=label == "1", times=left))
    return train, test


@lru_cache(maxsize=1)
def hdfs_raw(data: Path) -> list[Labelled]:
    """Every block of the 2 % sample, from raw messages through keys, masks and templates; its parts are what
    stands between silences of more than a minute."""
    rows = pl.read_csv(data / "hdfs" / "HDFS_2percent_events.csv.gz", infer_schema=False)
    labels = pl.read_csv(data / "hdfs" / "HDFS_2percent_labels.csv.gz", infer_schema=False)
    message = rows["m_message"]
    moment = ("20" + rows["date"] + rows["time"]).str.to_datetime("%Y%m%d%H%M%S").dt.epoch("s")
    templates = Templates(similarity=0.7, depth=4, per_workload=5_000)
    known: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    seconds: dict[str, list[int]] = {}
    masked = MaskSet.load().mask(message)["masked"]
    for key, line, at in zip(extract(pl.DataFrame({"message": message})), masked, moment, strict=True):
        if line not in known:
            template, _ = templates.learn(line, severe=False, workload="")
            known[line] = template.template_id if template else UNCLASSIFIED
        found.setdefault(key, []).append(known[line])
        seconds.setdefault(key, []).append(at)
    wrong = dict(labels.select("seq_id", "anomaly").iter_rows())
    return [
        Labelled(
            session=tuple(events), anomalous=wrong[key] == "1", parts=tuple(_parts(seconds[key], events))
        )
        for key, events in found.items()
        if key in wrong
    ]


def _parts(seconds: list[int], events: list[int]) -> Iterator[Session]:
    ordered = sorted(zip(seconds, range(len(events)), events, strict=True))
    part: list[int] = []
    for (at, _, event), (then, *_) in zip(
        ordered, [*ordered[1:], (ordered[-1][0] + _SILENCE_S + 1, 0, 0)], strict=True
    ):
        part.append(event)
        if then - at > _SILENCE_S:
            yield tuple(part)
            part = []


@lru_cache(maxsize=1)
def trainticket(data: Path) -> tuple[tuple[Labelled, ...], int]:
    """Every trace of the archives whose spans are known, and the number of templates.

    A trace is anomalous when the span tables of its archive hold a span of it with IsError; else it is
    normal. That is so for every trace of F05 and F06, for 1,091 of the 1,591 of F08, and for none of the
    normal archives. Traces without any span (6 of 8,760) have no label and are left out. Lines are read
    through the pipeline: its format, its masks, its session keys; templates are learnt in the order normal
    archives, then F05, F06, F08. The files stand newest line first, so lines of one millisecond are taken
    from the bottom."""
    templates = Templates(similarity=0.7, depth=4, per_workload=5_000)
    masks = MaskSet.load()
    found: list[Labelled] = []
    for name in (*NORMAL, *FAULTS):
        with zipfile.ZipFile(data / "trainticket" / f"{name}.zip") as archive:
            errors = error_spans(archive)
            traces: dict[str, list[tuple[datetime, int, int]]] = {}
            for at, (trace, when, event) in enumerate(_events(archive, masks, templates)):
                traces.setdefault(trace, []).append((when, -at, event))
        found += [
            Labelled(session=tuple(e for *_, e in sorted(events)), anomalous=errors[trace], origin=name)
            for trace, events in sorted(traces.items())
            if trace in errors
        ]
    return tuple(found), len(templates)


def error_spans(archive: zipfile.ZipFile) -> dict[str, bool]:
    """Whether a span of each trace went wrong."""
    errors: dict[str, bool] = {}
    for name in archive.namelist():
        if "SpanData" in name and name.endswith(".csv"):
            for row in csv.DictReader(io.TextIOWrapper(archive.open(name), encoding="utf-8")):
                errors[row["TraceId"]] = errors.get(row["TraceId"], False) or row["IsError"] == "True"
    return errors


def traced_lines(archive: zipfile.ZipFile, masks: MaskSet) -> Iterator[pl.DataFrame]:
    """session (the trace), timestamp, level and masked of its records, in the order of the files."""
    for name in archive.namelist():
        if not re.search(r"raw_log[^/]*\.log$|normal[^/]*\.log$", name):
            continue
        lines = archive.read(name).decode("utf-8", "replace").splitlines()
        for begin in range(0, len(lines), _SLICE):
            records = raw_frame([line for line in lines[begin : begin + _SLICE] if line.strip()])
            parsed = formats.parse(records, ("skywalking",), arrived=datetime.now(UTC), zone="UTC")
            frame = parsed.with_columns(masks.mask(parsed["message"])["masked"], extract(parsed))
            yield frame.select("session", "timestamp", "level", "masked")


def _events(
    archive: zipfile.ZipFile, masks: MaskSet, templates: Templates
) -> Iterator[tuple[str, datetime, int]]:
    """(trace, time, template id) of each record of a trace, in the order of the files."""
    for frame in traced_lines(archive, masks):
        for trace, when, level, masked in frame.iter_rows():
            if trace is not None:
                template, _ = templates.learn(masked, severe=level in ERROR_LEVELS, workload="")
                yield trace, when, template.template_id if template else UNCLASSIFIED
