"""Changes of seeds: bytes, tokens and runs, stacked."""

import random
import re
from collections.abc import Callable, Iterator, Sequence

MAX_BYTES = 64 * 1024
_PIECES = (b"\0", b"\xff", b"0", b"-", b"null", b"{}", b"[]", b'"')
_NUMBERS = (b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff", b"9999")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[0-9]+|[A-Za-z]+|[^\sA-Za-z0-9]', re.DOTALL)
_OFFSPRING = 512  # changed inputs that are changed again


def mutations(
    seeds: Sequence[bytes],
    words: Sequence[bytes],
    seed: int,
    made: Callable[[random.Random], bytes] | None = None,
) -> Iterator[bytes]:
    """Inputs without end, the same for the same seed: seeds, cut, repeated, glued, with bytes and tokens
    changed.

    `made` makes one from nothing, as every second input.
    """
    rng = random.Random(seed)
    pieces = (*words, *_PIECES)
    yield from seeds
    offspring: list[bytes] = []
    while True:
        if made is not None:
            yield made(rng)
        parents = offspring if offspring and rng.random() < 0.25 else seeds
        data = bytearray(rng.choice(parents))
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            _change(data, rng, seeds, pieces)
        changed = bytes(data[:MAX_BYTES])
        yield changed
        if len(changed) > 2048:  # else repeated repetition ends in nothing but length
            continue
        if len(offspring) < _OFFSPRING:
            offspring.append(changed)
        else:
            offspring[rng.randrange(_OFFSPRING)] = changed


def _change(data: bytearray, rng: random.Random, seeds: Sequence[bytes], pieces: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(9):
        case 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        case 1:
            data[at : at + rng.randrange(16)] = b""
        case 2:
            data[at:at] = rng.choice(pieces)
        case 3:
            times = rng.choice((1, 1, 2, 2, 5, 50, 500) if rng.random() < 0.1 else (1, 2))
            data[at:at] = data[at : at + rng.randrange(1, 24)] * times
        case 4:
            data[at : at + 4] = rng.choice(_NUMBERS)
        case 5:
            other = rng.choice(seeds)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        case 6 | 7:
            # In place of a whole token, so that what stands around it is still understood.
            if found := _TOKEN.search(data, at):
                data[found.start() : found.end()] = rng.choice(pieces)
        case _:
            other = rng.choice(seeds)
            mine, its = _TOKEN.search(data, at), _TOKEN.search(other, rng.randrange(len(other) + 1))
            if mine and its:
                data[mine.start() : mine.end()] = its[0]
