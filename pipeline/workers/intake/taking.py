from dataclasses import dataclass
from typing import Protocol

from pipeline.records.delivery import Accepted, Full
from pipeline.sources.protocols.contract import Decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBy:
    protocol: str
    key: str
    peer: str


class Door(Protocol):
    async def take(self, decoded: Decoded, *, identity: str, sender: SentBy) -> Accepted | Full: ...
