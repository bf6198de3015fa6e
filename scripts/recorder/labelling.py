"""Cuts the recorded logs into baseline and observed, and finds the lines that each fault caused.

A record is a line with what continues it: the frames of a traceback, PostgreSQL's DETAIL, HINT and
STATEMENT. A record belongs to a fault when it lies in the fault's window, matches the fault's rule for that
log, and has a shape (its text without numbers) that occurs nowhere in the baseline. An answer, in the
access log or in the shop's, belongs when its status is 5xx.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from recorder.faults import STATUS_5XX, Window

_STAMPS: dict[str, tuple[re.Pattern[str], str]] = {
    "nginx-access.log": (re.compile(r"\[(\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d) "), "%d/%b/%Y:%H:%M:%S"),
    "nginx-error.log": (re.compile(r"^(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d) "), "%Y/%m/%d %H:%M:%S"),
    "postgres.log": (re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) UTC "), "%Y-%m-%d %H:%M:%S.%f"),
    "redis.log": (
        re.compile(r"^\d+:[XCSM] (\d\d \w{3} \d{4} \d\d:\d\d:\d\d\.\d{3}) "),
        "%d %b %Y %H:%M:%S.%f",
    ),
    "shop.log": (re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) "), "%Y-%m-%d %H:%M:%S,%f"),
    "payments.log": (re.compile(r"^ts=(\S{23})Z "), "%Y-%m-%dT%H:%M:%S.%f"),
    "worker.log": (re.compile(r'^\{"time": "(\S{23})\+00:00"'), "%Y-%m-%dT%H:%M:%S.%f"),
}
_COMPANION = re.compile(r"^\S+ \S+ UTC \[(\d+)\] (?:\S+ )?(DETAIL|HINT|STATEMENT|CONTEXT|QUERY): ")
_POSTGRES_PID = re.compile(r"^\S+ \S+ UTC \[(\d+)\]")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{8,}\b|\d+")

_REQUEST = re.compile(r", client: .*")  # nginx: whose request it was says nothing about what happened


@dataclass(slots=True, kw_only=True)
class LogRecord:
    """Physical lines that say one thing. `numbers` are 1-based; PostgreSQL's may have gaps."""

    time: float
    numbers: list[int]
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def shape(self) -> str:
        return _NUMBERS.sub("#", _REQUEST.sub("", self.text))


def records(log: str, lines: Iterable[str]) -> list[LogRecord]:
    """Records of one log in order. Lines before the first time stamp take time 0."""
    stamp, form = _STAMPS[log]
    found: list[LogRecord] = []
    latest: dict[str, LogRecord] = {}  # PostgreSQL: the last record of each process
    for number, line in enumerate(lines, 1):
        match = stamp.search(line)
        companion = _COMPANION.match(line) if log == "postgres.log" else None
        if companion and companion[1] in latest:
            owner = latest[companion[1]]
        elif match is None and found:
            owner = found[-1]
        else:
            when = datetime.strptime(match[1], form).replace(tzinfo=UTC).timestamp() if match else 0.0
            found.append(LogRecord(time=when, numbers=[number], lines=[line]))
            if log == "postgres.log" and (process := _POSTGRES_PID.match(line)):
                latest[process[1]] = found[-1]
            continue
        owner.numbers.append(number)
        owner.lines.append(line)
    return found


def cut(content: bytes, offset: int, end: int) -> tuple[bytes, bytes]:
    """The whole lines up to `offset` and from there up to `end`; a line that holds `offset` is of the
    first."""
    content = content[: content.rfind(b"\n", 0, end) + 1]
    at = content.find(b"\n", max(offset - 1, 0)) + 1 if offset else 0
    return content[:at], content[at:]


def line_hash(line: str) -> str:
    """What labels.json keeps of a line: enough to notice that a line moved or changed."""
    return hashlib.sha256(line.encode()).hexdigest()[:12]


def _stamp_precision(log: str) -> float:
    return 1.0 if log.startswith("nginx") else 0.001


@dataclass(slots=True, kw_only=True)
class Attribution:
    """Records of one log by fault, and those that look new but belong to none."""

    caused: dict[str, list[LogRecord]]
    unexplained: list[LogRecord]


def attribute(
    log: str, baseline: Sequence[str], observed: Sequence[str], windows: Sequence[Window]
) -> Attribution:
    known = {record.shape for record in records(log, baseline)}
    caused: dict[str, list[LogRecord]] = {window.fault.id: [] for window in windows}
    unexplained: list[LogRecord] = []
    slack = _stamp_precision(log)  # a stamp of whole seconds may lie just before the window's start
    for record in records(log, observed):
        failed = bool(log in STATUS_5XX and STATUS_5XX[log].search(record.text))
        if not failed and (log == "nginx-access.log" or record.shape in known):
            continue
        for window in windows:
            rule = r"" if failed else window.fault.causes.get(log)
            inside = window.start - slack < record.time <= window.end
            if inside and rule is not None and re.search(rule, record.text):
                caused[window.fault.id].append(record)
                break
        else:
            unexplained.append(record)
    return Attribution(caused=caused, unexplained=unexplained)


def label_entry(window: Window, by_log: dict[str, list[LogRecord]]) -> dict[str, Any]:
    """One fault as labels.json holds it; lines in the order of file and line number."""

    def iso(when: float) -> str:
        return datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    lines = [
        {"file": f"observed/{log}", "line": number, "sha256_12": line_hash(line)}
        for log, found in sorted(by_log.items())
        for number, line in sorted(
            pair for record in found for pair in zip(record.numbers, record.lines, strict=True)
        )
    ]
    return {
        "id": window.fault.id,
        "name": window.fault.name,
        "done": window.fault.done,
        # nginx-access.log and nginx-error.log are both of nginx
        "software": sorted({re.split(r"[-.]", log)[0] for log, found in by_log.items() if found}),
        "start": iso(window.start),
        "repaired": iso(window.repaired),
        "end": iso(window.end),
        "lines": lines,
    }
