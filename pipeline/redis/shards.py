"""The shards of stage drain: which of them learns a workload, what its queue and lease are called, which ids
it gives.

Shard 0 is what there was before there were several: its names carry no number, its ids begin at 1. So one
shard is no special case, and more can be added while batches wait. The number of shards is the setting
`drain_shards`."""

import zlib
from typing import Final

from pipeline.settings import MAX_SHARDS

# Ids of one shard. No deployment makes a thousand million templates, and those of 64 shards are whole numbers
# in the floats of JSON readers (2**53) as well.
IDS: Final = 10**9


def shard_of(workload: str, shards: int) -> int:
    """The shard that learns the lines of a workload: the same in every process and build."""
    return zlib.crc32(workload.encode("utf-8", "surrogatepass")) % shards


def of_shard(name: str, shard: int) -> str:
    """The name in a shard of something with this name in shard 0: `drain`, `drain.1`, `drain.2`."""
    return name if shard == 0 else f"{name}.{shard}"


def shard_named(text: str, name: str) -> int | None:
    """The inverse of `of_shard`: the number in `drain.2`, None where the text is no shard's name."""
    if text == name:
        return 0
    number = text.removeprefix(f"{name}.")
    found = int(number) if number.isascii() and number.isdecimal() and len(number) <= 2 else 0
    return found if 0 < found < MAX_SHARDS and text == of_shard(name, found) else None


def ids_of(shard: int) -> range:
    """The template ids that a shard gives: 1, 2, 3 ... of shard 0; 1,000,000,001 ... of shard 1."""
    return range(shard * IDS + 1, (shard + 1) * IDS + 1)
