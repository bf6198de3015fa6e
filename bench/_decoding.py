"""Processor time of the intake's decoders on one core, from a body to its records."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from bench._requests import Protocol
from bench._shipper import Request
from pipeline.sources.protocols.contract import Hints
from pipeline.workers.intake.dialects import (
    BulkDialect,
    Dialect,
    HecDialect,
    LinesDialect,
    LokiDialect,
    OtlpDialect,
)

ROUNDS: Final = 5
DIALECTS: Final[Mapping[str, Dialect]] = {
    "otlp": OtlpDialect(),
    "bulk": BulkDialect(),
    "loki": LokiDialect(),
    "lines": LinesDialect(),
    "hec": HecDialect(),
}


def decode_us_per_line(protocol: Protocol, requests: Sequence[Request]) -> float:
    """Microseconds of processor time; the median of some rounds over the same requests, uncompressed."""
    dialect = DIALECTS[protocol.dialect]
    hinted = [(request.body, hints_of(protocol, request)) for request in requests]
    lines = sum(request.lines for request in requests)
    spent = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for body, hints in hinted:
            dialect.decode(body, hints)
        spent.append(time.process_time() - began)
    return median(spent) / lines * 1e6


def hints_of(protocol: Protocol, request: Request) -> Hints:
    url = urlsplit(request.path)
    query = dict(parse_qsl(url.query))
    return Hints(
        path=url.path,
        content_type=protocol.content_type,
        query=query,
        headers={name.lower(): value for name, value in request.headers.items()},
        workload=query.get("workload", ""),
        peer="127.0.0.1",
    )
