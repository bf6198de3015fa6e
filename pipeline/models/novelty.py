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
_LINES_AT_ONCE: Final = 2048
_CHARS: Final = 1024  # of a line; the line model does not read more
_MASK: Final = re.compile(r"<[A-Z0-9_*]+>")
_GAP, _MASKED, _SPACE = 1, 2, 32  # characters for the end of a line and for a mask token; no line holds these
_GAP_CHARS: Final = re.compile("[\x00-\x1f]+")

Hashes = npt.NDArray[np.uint32]


class Novelty:
    """The trigrams of a training sample. Immutable."""

    def __init__(self, grams: Hashes) -> None:
        self._grams = grams  # sorted

    @classmethod
    def fit(cls, masked: Sequence[str], counts: Sequence[int]) -> "Novelty":
        """From distinct masked lines and counts; past the limit the trigrams of rare lines are dropped."""
        order = np.argsort(-np.asarray(counts, dtype=np.int64), kind="stable").tolist()
        grams: Hashes = np.empty(0, dtype=np.uint32)
        for _, found in _chunks([masked[i] for i in order]):
            more = np.union1d(grams, found[1])
            if len(more) > _GRAMS_MOST:
                break
            grams = more
        return cls(grams)

    def __len__(self) -> int:
        return len(self._grams)

    def score(self, masked: Sequence[str]) -> list[float]:
        """Per line, in order: 0 (all trigrams known, or no text at all) .. 1 (none known)."""
        out: list[float] = []
        for size, (line, gram) in _chunks(masked):
            total = np.bincount(line, minlength=size)
            unseen = np.bincount(line[~self._holds(gram)], minlength=size)
            out += (unseen / np.maximum(total, 1)).round(4).tolist()
        return out

    def _holds(self, grams: Hashes) -> npt.NDArray[np.bool_]:
        """Which of these ascending trigrams are known; each distinct one is looked up once."""
        if not len(self._grams) or not len(grams):
            return np.zeros(len(grams), dtype=np.bool_)
        first = np.append(True, grams[1:] != grams[:-1])
        different = grams[first]
        places = np.minimum(np.searchsorted(self._grams, different), len(self._grams) - 1)
        holds: npt.NDArray[np.bool_] = (self._grams[places] == different)[np.cumsum(first) - 1]
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


def _chunks(masked: Sequence[str]) -> Iterator[tuple[int, tuple[Any, Hashes]]]:
    """(lines, (line numbers (N,), ascending trigrams (N,))) of slices; each trigram of a line once."""
    for at in range(0, len(masked), _LINES_AT_ONCE):
        lines = masked[at : at + _LINES_AT_ONCE]
        yield len(lines), _trigrams(lines)


def _trigrams(lines: Sequence[str]) -> tuple[Any, Hashes]:
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
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32)
    a, b, c = codes[:-2], codes[1:-1], codes[2:]
    inside = (a != _GAP) & (b != _GAP) & (c != _GAP)
    # Trigrams of masks and spaces only do not count.
    inside &= np.maximum(np.maximum(a, b), c) > _SPACE
    key = (a << np.uint64(42)) | (b << np.uint64(21)) | c
    with np.errstate(over="ignore"):  # Fibonacci hashing: the upper half of the product
        hashed = (key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    both = np.sort(
        (hashed << np.uint64(32) | line[1:-1].astype(np.uint64))[inside]
    )  # np.unique takes thrice as long
    if len(both):
        both = both[np.append(True, both[1:] != both[:-1])]
    return (both & np.uint64(0xFFFFFFFF)).astype(np.int64), (both >> np.uint64(32)).astype(np.uint32)
