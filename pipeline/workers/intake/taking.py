"""Who sent a request, for the servers of all protocols."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBy:
    """The protocol, the name of the sender's key, and its address."""

    protocol: str
    key: str
    peer: str
