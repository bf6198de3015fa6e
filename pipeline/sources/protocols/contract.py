"""Every decoder's contract: the bytes of one request in, its records by column out.

A decoder is a function `decode(body, hints) -> Decoded`. It knows nothing of sockets, answers or Redis, and
needs neither Polars nor torch: it runs in the process that receives. It raises Undecodable, which refuses the
whole request, and takes nothing else for an error: a record that it cannot understand is stored as text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.errors import BadInput
from pipeline.records.pushed import PushedRecords
from pipeline.sources.protocols.rules import NO_RULES, WorkloadRules


class Undecodable(BadInput):
    """A body that is not what its protocol says. The message names the place and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """A request without its body, which is decompressed."""

    path: str = ""
    content_type: str = ""  # in lower case, with its parameters
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    workload: str = ""  # chosen by the sender's key or the request; "" lets the records tell
    peer: str = ""  # address of the sender
    protocol: str = ""
    key: str = ""  # name of the sender's key
    one_by_one: bool = False  # the sender may repeat the records of a request one by one
    rules: WorkloadRules = NO_RULES  # asked where no workload is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The records of one request, in its order.

    `records.workloads` names the workload of each; `records.raws` holds each as it was sent. A message of
    None is parsed from the raw text in stage ingest. No records: the request was empty, which is a success.
    """

    records: PushedRecords
    # The clients' times tell this request from others: an equal body is the same request, sent again.
    distinct: bool
    # Of each record, a text that no other record has: its sender may repeat it with other companions. Empty
    # where records have no such text, or where a sender repeats whole requests.
    apart: Sequence[bytes] = ()


Decoder = Callable[[bytes, Hints], Decoded]
