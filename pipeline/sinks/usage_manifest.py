"""The manifest of the table `usage` (usage.py): which files are the table."""

from collections.abc import Iterable
from typing import Final

import msgspec

from pipeline.sinks.manifest import PREFIX, VERSION, versioned

FOLDER: Final = f"{PREFIX}usage/"
KEY: Final = f"{FOLDER}manifest.json"


class UsagePart(msgspec.Struct, frozen=True, kw_only=True):
    """One file. Times in microseconds since 1970: the first grant, the last end."""

    name: str
    day: str
    rows: int
    bytes: int
    first_us: int
    last_us: int


class ReplacedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that is no part any more, and since when, in milliseconds since 1970."""

    name: str
    at_ms: int


class UsageManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Which files are the table. `edits` counts the swaps."""

    v: int = VERSION
    edits: int = 0
    parts: tuple[UsagePart, ...] = ()
    replaced: tuple[ReplacedFile, ...] = ()

    def edited(self, parts: Iterable[UsagePart], replaced: Iterable[ReplacedFile]) -> "UsageManifest":
        """The next manifest."""
        return UsageManifest(edits=self.edits + 1, parts=tuple(parts), replaced=tuple(replaced))


_decoder: Final = msgspec.json.Decoder(UsageManifest)


def usage_manifest(blob: bytes | None, where: str) -> UsageManifest:
    """The manifest as it is stored; a new one for a store without. Raises BadPayload, TooNew."""
    return UsageManifest() if blob is None else versioned(_decoder, blob, f"{KEY} of {where}")
