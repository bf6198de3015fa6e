"""Formats of senders, for `logweir senders`: samples of the intake, taken by the sweep of a worker.

The process of the intake has no parser (service/senders.py). A sample that is lost costs a minute.
"""

import json
from typing import Any, Final

from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.sources.formats import NO_FORMAT, format_counts
from pipeline.tasks.context import Context

# Of one sweep. A sample of 20 lines takes 2 to 5 ms.
AT_ONCE: Final = 20
FIELDS: Final = "fields"  # records whose fields are those of their protocol: nothing is to be recognised
MOST_FORMATS: Final = 8
WINDOW: Final = 400  # lines that the shares of a sender are of


def recognise_samples(context: Context) -> int:
    """Adds the formats of waiting samples; returns how many there were. Raises RedisError."""
    ledger = context.ledger
    samples: Any = ledger.client.lpop(ledger.keys.samples, AT_ONCE) or []
    for packed in samples:
        try:
            name, lines, with_fields = json.loads(packed)
            counts = format_counts(lines) if lines else {}
        except Exception:  # noqa: BLE001 - a line that a parser stumbles over must not stop the sweep
            logger().exception("sender.not_recognised")
            continue
        protocol = name.partition("\x1f")[0]
        metrics.lines_recognised(protocol, FIELDS, with_fields)
        metrics.lines_recognised(protocol, "none", counts.get(NO_FORMAT, 0))
        metrics.lines_recognised(protocol, "format", len(lines) - counts.get(NO_FORMAT, 0))
        if with_fields:
            counts[FIELDS] = with_fields
        pairs = [argument for pair in counts.items() for argument in pair]
        ledger.scripts.run("intake/recognised", [ledger.keys.senders], [name, MOST_FORMATS, WINDOW, *pairs])
    return len(samples)
