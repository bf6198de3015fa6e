"""Which traces a fault touched: those whose code took the wrong turn, and those that failed or were slow.

A trace fails when a line of it has level error, or its answer at the gateway is 5xx. It is slow when it took
longer than every request of its route in the baseline. Both count between the start of the fault and its
repair only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from recorder.many.injuries import Span

_TRACE = re.compile(r"""trace_id["']?[=:] ?["']?([0-9a-f-]{32,36})""")
_ERROR = re.compile(r'"level": ?(?:"error"|50\b)|level=error| ERROR ')
_BATCH = re.compile(r'^\{"timestamp": "(\S+?)".*"event": "job started"')
_NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f]*")


def affected_traces(
    baseline: Mapping[str, str], observed: Mapping[str, str], spans: Sequence[Span]
) -> list[list[str]]:
    """For each span the affected trace ids, sorted; the logs are whole texts by service."""
    slowest: dict[str, float] = {}
    for _, _, route, seconds, _ in _requests(baseline["gateway"]):
        slowest[route] = max(slowest.get(route, 0.0), seconds)
    failed = {
        match[1]
        for text in observed.values()
        for line in text.splitlines()
        if _ERROR.search(line) and (match := _TRACE.search(line))
    }
    begun: dict[str, float] = {}
    for trace, start, route, seconds, status in _requests(observed["gateway"]):
        begun[trace] = start
        if status >= 500 or status == 0 or seconds > slowest.get(route, float("inf")):
            failed.add(trace)
    for line in observed["batch"].splitlines():
        if (head := _BATCH.match(line)) and (match := _TRACE.search(line)):
            begun[match[1]] = datetime.fromisoformat(head[1]).timestamp()
    found = []
    for span in spans:
        touched = {trace for trace in failed if span.start <= begun.get(trace, 0.0) < span.repaired}
        found.append(sorted(touched | set(span.noted)))
    return found


def _requests(text: str) -> list[tuple[str, float, str, float, int]]:
    """(trace, start, route, seconds, status) of each answer in the gateway's log."""
    found = []
    for line in text.splitlines():
        if not line.startswith('{"ts":'):
            continue  # of the error log
        record = json.loads(line)
        route = f"{record['method']} {_NUMBER.sub('#', record['uri'].partition('?')[0])}"
        spent = float(record["request_time"])
        found.append((record["trace_id"], float(record["ts"]) - spent, route, spent, int(record["status"])))
    return found
