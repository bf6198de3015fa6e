"""Novelty of a line: the share of its character trigrams that no training line holds.

A new sentence of familiar words and one of unknown words are both a new template; only the second has unseen
trigrams. Out-of-vocabulary trigrams were the best detector trained on normal lines alone over four public
sets (arXiv 2312.01934), at almost no cost. Masks have removed variable parts, so case, digits and punctuation
count. Every mask token is one and the same character. Free of torch; scoring mutates nothing.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.errors import BadBundle

_FORMAT: Final = 1
_GRAMS_MOST: Final = 500_000  # 4 bytes each; large logs were seen to hold 60,000
_FITTED_AT_ONCE: Final = 2048  # lines
_SCORED_AT_ONCE: Final = 256  # some 28,000 trigrams
# Slots for each trigram in the table that finds those of a line twice. It has at most 1 MiB.
_SLOTS: Final = 8
_SLOT_BITS: Final = 18
_GRAM_BITS: Final = np.uint64(32)
_FIBONACCI: Final = np.uint64(0x9E3779B97F4A7C15)  # hashing: the upper bits of a product with 2**64 / phi
_CHARS: Final = 1024  # of a line; the line model does not read more
_MASK: Final = re.compile(r"<[A-Z0-9_*]+>")
_GAP, _MASKED, _SPACE = 1, 2, 32  # characters for the end of a line and for a mask token; no line holds these
_GAP_CHARS: Final = re.compile("[\x00-\x1f]+")

Hashes = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]


class Novelty:
    """The trigrams of a training sample. Immutable."""

    def __init__(self, grams: Hashes) -> None:
        self._grams = grams  # sorted
        # Where the trigrams begin that share their upper bits. Two places for each make most of these one.
        bits = max(1, 2 * len(grams)).bit_length()
        self._shift = _GRAM_BITS - np.uint64(bits)
        begins = np.arange(1 << bits, dtype=np.uint64) << self._shift
        self._first = np.searchsorted(grams, begins.astype(np.uint32)).astype(np.int32)
        self._ended = np.append(grams.astype(np.uint64), np.uint64(1) << _GRAM_BITS)  # above all trigrams

    @classmethod
    def fit(cls, masked: Sequence[str], counts: Sequence[int]) -> "Novelty":
        """From distinct masked lines and counts; past the limit the trigrams of rare lines are dropped."""
        order = np.argsort(-np.asarray(counts, dtype=np.int64), kind="stable").tolist()
        grams: Hashes = np.empty(0, dtype=np.uint32)
        for _, found in _chunks([masked[i] for i in order], _FITTED_AT_ONCE):
            more = np.union1d(grams, found[1].astype(np.uint32))
            if len(more) > _GRAMS_MOST:
                break
            grams = more
        return cls(grams)

    def __len__(self) -> int:
        return len(self._grams)

    def score(self, masked: Sequence[str]) -> list[float]:
        """Per line, in order: 0 (all trigrams known, or no text at all) .. 1 (none known)."""
        out: list[float] = []
        for size, (line, gram) in _chunks(masked, _SCORED_AT_ONCE):
            total = np.bincount(line, minlength=size)
            unseen = np.bincount(line[~self._holds(gram)], minlength=size)
            out += (unseen / np.maximum(total, 1)).round(4).tolist()
        return out

    def _holds(self, grams: Keys) -> npt.NDArray[np.bool_]:
        """Which of these trigrams are known."""
        place = self._first[grams >> self._shift]
        found = self._ended[place]
        holds: npt.NDArray[np.bool_] = found == grams
        below = np.flatnonzero(found < grams)
        while len(below):
            place[below] += 1
            found = self._ended[place[below]]
            holds[below] = found == grams[below]
            below = below[found < grams[below]]
        return holds

    def to_bytes(self) -> bytes:
        """msgpack of format and little-endian sorted hashes."""
        return bytes(msgpack.packb([_FORMAT, self._grams.astype("<u4").tobytes()]))

    @classmethod
    def from_bytes(cls, blob: bytes) -> "Novelty":
        """Raises BadBundle when the bytes are not what `to_bytes` writes."""
        try:
            form, data = msgpack.unpackb(blob)
            if form != _FORMAT:
                raise ValueError(f"format {form!r} is not known")
            grams = np.frombuffer(data, dtype="<u4").astype(np.uint32)
            if len(grams) > _GRAMS_MOST or (np.diff(grams.astype(np.int64)) <= 0).any():
                raise ValueError("its trigrams are too many or not in order")
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise BadBundle(f"the trigrams of a bundle are not readable: {exc}; train again") from exc
        return cls(grams)


def _chunks(masked: Sequence[str], at_once: int) -> Iterator[tuple[int, tuple[Any, Keys]]]:
    """(lines, (line numbers (N,), trigrams (N,))) of slices; each trigram of a line once."""
    for at in range(0, len(masked), at_once):
        lines = masked[at : at + at_once]
        yield len(lines), _trigrams(lines)


def _trigrams(lines: Sequence[str]) -> tuple[Any, Keys]:
    gap = chr(_GAP)
    # A space on both sides, so that the ends of a word show in trigrams.
    texts = [
        text if text.isprintable() else _GAP_CHARS.sub(" ", text) for text in (m[:_CHARS] for m in lines)
    ]
    text = f" {f' {gap} '.join(texts)} "
    text = _MASK.sub(chr(_MASKED), text)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    line = np.cumsum(codes == _GAP)
    if len(codes) < 3:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
    a, b, c = codes[:-2], codes[1:-1], codes[2:]
    inside = (a != _GAP) & (b != _GAP) & (c != _GAP)
    # Trigrams of masks and spaces only do not count.
    inside &= np.maximum(np.maximum(a, b), c) > _SPACE
    key = (a << np.uint64(42)) | (b << np.uint64(21)) | c
    with np.errstate(over="ignore"):
        hashed = (key * _FIBONACCI) >> _GRAM_BITS
        both = _once((hashed << _GRAM_BITS | line[1:-1].astype(np.uint64))[inside])
    return (both & np.uint64(0xFFFFFFFF)).astype(np.int64), both >> _GRAM_BITS


def _once(keys: Keys) -> Keys:
    """The different ones of these keys in any order, in a third of the time of a sort.

    Of the keys of one slot the last is kept. A different key of its slot is found by a sort.
    """
    bits = min(_SLOT_BITS, max(1, _SLOTS * len(keys)).bit_length())
    slot = ((keys ^ keys >> np.uint64(29)) * _FIBONACCI >> np.uint64(64 - bits)).astype(np.int64)
    number = np.arange(len(keys), dtype=np.int32)
    last = np.empty(1 << bits, dtype=np.int32)
    last[slot] = number
    stands = last[slot]
    return np.concatenate([keys[stands == number], np.unique(keys[keys[stands] != keys])])
