"""A sketch of a distribution: weights by bin, merged by adding them (DDSketch).

A sketch has at most MAX_BINS bins. Past them the lightest ones, which lie in the tails, join their
neighbours.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from pipeline.watching.values.bins import LAST, value_of
from pipeline.watching.values.typed import ValueKind

MAX_BINS: Final = 64

Bin = Annotated[int, msgspec.Meta(ge=0, le=LAST)]
Weight = Annotated[float, msgspec.Meta(ge=0.0, lt=1e15)]
Sketch = Annotated[dict[Bin, Weight], msgspec.Meta(max_length=MAX_BINS)]

_LEAST: Final = 0.01  # weight of a bin; below it, the bin is forgotten
_PACKED: Final = msgspec.msgpack.Decoder(dict[Bin, Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]])


def merged_sketch(sketch: Sketch, counts: Mapping[int, float], remaining: float = 1.0) -> Sketch:
    """The sum of both; the weights of the first one times `remaining`."""
    merged: Sketch = {
        number: weight * remaining for number, weight in sketch.items() if weight * remaining >= _LEAST
    }
    for number, n in counts.items():
        merged[number] = merged.get(number, 0.0) + n
    return merged if len(merged) <= MAX_BINS else _collapsed(merged)


def _collapsed(sketch: Sketch) -> Sketch:
    """The lightest bins join their heavier neighbours until MAX_BINS are left. The highest bin stays."""
    numbers = sorted(sketch)
    weights = [sketch[number] for number in numbers]
    while len(numbers) > MAX_BINS:
        at = min(range(len(numbers) - 1), key=weights.__getitem__)
        below = at > 0 and weights[at - 1] > weights[at + 1]
        weights[at - 1 if below else at + 1] += weights[at]
        del numbers[at], weights[at]
    return dict(zip(numbers, weights, strict=True))


def quantiles(kind: ValueKind, sketch: Mapping[int, float], shares: Sequence[float]) -> list[float]:
    """The values below which these shares of the weight lie, in rising order of the shares. The sketch is not
    empty."""
    total, below, found = sum(sketch.values()), 0.0, []
    wanted = iter(shares)
    share = next(wanted)
    for number in sorted(sketch):
        below += sketch[number]
        while below >= share * total - 1e-9:
            found.append(value_of(kind, number))
            try:
                share = next(wanted)
            except StopIteration:
                return found
    return found + [value_of(kind, max(sketch))] * (len(shares) - len(found))


def pack_sketch(sketch: Mapping[int, float]) -> bytes:
    """Whole weights, which take a fifth of the room."""
    return msgspec.msgpack.encode({number: round(n) for number, n in sketch.items() if n >= 1.0})


def unpack_sketch(blob: bytes) -> Sketch:
    """Raises msgspec.DecodeError."""
    return {number: float(n) for number, n in _PACKED.decode(blob).items()}
