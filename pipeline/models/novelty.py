"""Novelty of a line: the mean share of its trigrams, words and pairs of words that no training line holds.

Pairs have half of the weight, because they hold the words and their order. Out-of-vocabulary
character trigrams were the best detector trained on normal lines alone over four public sets
(arXiv 2312.01934), at almost no cost. Masks have removed variable parts, so case, digits and punctuation
count there. A word is foreign even where its trigrams are those of other words. A pair of words is foreign
where familiar words stand in a new order. Compound names are split: `SocketTimeout` is two words. Case counts
in pairs, and not in words. Every mask token is one and the same character, and a word in pairs.
Free of torch; scoring mutates nothing.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.errors import BadBundle

_FORMAT: Final = 2
_GRAMS_MOST: Final = 500_000  # of all kinds, 4 bytes each; large logs were seen to hold 60,000 trigrams
_FITTED_AT_ONCE: Final = 2048  # lines
_SCORED_AT_ONCE: Final = 192  # some 28,000 grams
_WEIGHTS: Final = np.array((1.0, 1.0, 2.0))  # of the kinds: trigrams, words, pairs of words (docs/LOG.md)
_KINDS: Final = len(_WEIGHTS)
# Slots for each gram in the table that finds those of a line twice. It has at most 1 MiB.
_SLOTS: Final = 8
_SLOT_BITS: Final = 18
_GRAM_BITS: Final = np.uint64(32)
_FIBONACCI: Final = np.uint64(0x9E3779B97F4A7C15)  # hashing: the upper bits of a product with 2**64 / phi
_LETTERS: Final = np.uint64(0xD6E8FEB86659FD93)  # odd: the powers of it weigh the letters of a word
_PAIRS: Final = np.uint64(0xA0761D6478BD642F)  # odd: no pair of words is hashed as a word
_CHARS: Final = 1024  # of a line; the line model does not read more
_MASK: Final = re.compile(r"<[A-Z0-9_*]+>")
_GAP, _MASKED, _SPACE = 1, 2, 32  # characters for the end of a line and for a mask token; no line holds these
_CASE: Final = np.uint64(32)  # between a capital letter and its small one
_CAPITAL, _SMALL, _MASK_TOKEN = 1, 2, 3  # sorts of characters in words; 0: all others


def _sorts() -> npt.NDArray[np.uint8]:
    """(129,) the sort of each character up to 127, and of all others."""
    sorts = np.zeros(129, dtype=np.uint8)
    sorts[ord("A") : ord("Z") + 1] = _CAPITAL
    sorts[ord("a") : ord("z") + 1] = _SMALL
    sorts[128] = _SMALL
    sorts[_MASKED] = _MASK_TOKEN
    return sorts


def _beginnings() -> npt.NDArray[np.bool_]:
    """(64,) whether a word begins, by 16 * the sort before + 4 * the sort + the sort behind."""
    before, here, behind = np.meshgrid(*[np.arange(4)] * 3, indexing="ij")
    outside = (before == 0) | (before == _MASK_TOKEN) | (here == _MASK_TOKEN)
    hump = (here == _CAPITAL) & ((before == _SMALL) | (behind == _SMALL))
    return np.asarray(((here > 0) & (outside | hump)).ravel())


_SORTS: Final = _sorts()
_BEGINNINGS: Final = _beginnings()
_GAP_CHARS: Final = re.compile("[\x00-\x1f]+")

Hashes = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint32]  # of characters


class Novelty:
    """The grams of a training sample: trigrams, words, pairs of words. Immutable."""

    def __init__(self, grams: Hashes) -> None:
        self._grams = grams  # sorted
        # Where the grams begin that share their upper bits. Two places for each make most of these one.
        bits = max(1, 2 * len(grams)).bit_length()
        self._shift = _GRAM_BITS - np.uint64(bits)
        begins = np.arange(1 << bits, dtype=np.uint64) << self._shift
        self._first = np.searchsorted(grams, begins.astype(np.uint32)).astype(np.int32)
        self._ended = np.append(grams.astype(np.uint64), np.uint64(1) << _GRAM_BITS)  # above all grams

    @classmethod
    def fit(cls, masked: Sequence[str], counts: Sequence[int]) -> "Novelty":
        """From distinct masked lines and counts; past the limit the grams of rare lines are dropped."""
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
        """Per line, in order: 0 (all grams known, or no text at all) .. 1 (none known).

        The weighted mean over the kinds of grams that a line has.
        """
        out: list[float] = []
        for size, (row, gram) in _chunks(masked, _SCORED_AT_ONCE):
            total = np.bincount(row, minlength=size * _KINDS).reshape(size, _KINDS)
            unseen = np.bincount(row[~self._holds(gram)], minlength=size * _KINDS).reshape(size, _KINDS)
            shares = (unseen / np.maximum(total, 1)) @ _WEIGHTS
            out += (shares / np.maximum((total > 0) @ _WEIGHTS, 1.0)).round(4).tolist()
        return out

    def _holds(self, grams: Keys) -> npt.NDArray[np.bool_]:
        """Which of these grams are known."""
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
                raise ValueError("its grams are too many or not in order")
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise BadBundle(f"the novelty of a bundle is not readable: {exc}; train again") from exc
        return cls(grams)


def _chunks(masked: Sequence[str], at_once: int) -> Iterator[tuple[int, tuple[Any, Keys]]]:
    """(lines, (rows (N,), grams (N,))) of slices; each gram of a line once. A row is a line and a kind."""
    for at in range(0, len(masked), at_once):
        lines = masked[at : at + at_once]
        yield len(lines), _grams(lines)


def _grams(lines: Sequence[str]) -> tuple[Any, Keys]:
    gap = chr(_GAP)
    # A space on both sides, so that the ends of a word show in trigrams.
    texts = [
        text if text.isprintable() else _GAP_CHARS.sub(" ", text) for text in (m[:_CHARS] for m in lines)
    ]
    text = f" {f' {gap} '.join(texts)} "
    text = _MASK.sub(chr(_MASKED), text)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    row = np.cumsum(codes == _GAP, dtype=np.uint64) * np.uint64(_KINDS)
    kinds = (_trigrams(codes.astype(np.uint64)), *_words(codes, row))
    keys = [
        hashed >> _GRAM_BITS << _GRAM_BITS | row[place] + np.uint64(kind)
        for kind, (place, hashed) in enumerate(kinds)
    ]
    both = _once(np.concatenate(keys))
    return (both & np.uint64(0xFFFFFFFF)).astype(np.int64), both >> _GRAM_BITS


def _trigrams(codes: Keys) -> tuple[Any, Keys]:
    """Which characters are the second of a trigram (N,), and the hashes of these."""
    a, b, c = codes[:-2], codes[1:-1], codes[2:]
    inside = np.zeros(len(codes), dtype=np.bool_)
    inside[1:-1] = (a != _GAP) & (b != _GAP) & (c != _GAP)
    # Trigrams of masks and spaces only do not count.
    inside[1:-1] &= np.maximum(np.maximum(a, b), c) > _SPACE
    with np.errstate(over="ignore"):
        hashed = ((a << np.uint64(42)) | (b << np.uint64(21)) | c) * _FIBONACCI
    return inside, hashed[inside[1:-1]]


def _words(codes: Codes, row: Keys) -> tuple[tuple[Any, Keys], tuple[Any, Keys]]:
    """Where each word begins, and its hash; the same for each pair of words.

    `row` (N,): different in each line. A mask stands for a word in pairs; a pair of masks does not count.
    """
    sorts = _SORTS[np.minimum(codes, 128)]
    around = sorts << 2
    around[1:] += sorts[:-1] << 4
    around[:-1] += sorts[1:]
    place = np.flatnonzero(sorts)
    first = np.flatnonzero(_BEGINNINGS[around[place]])
    if not len(first):
        nothing = (place, np.empty(0, dtype=np.uint64))
        return nothing, nothing
    within = np.arange(len(place)) - np.repeat(first, np.diff(first, append=len(place)))
    begins = place[first]
    word = sorts[begins] != _MASK_TOKEN
    pair = (word[:-1] | word[1:]) & (row[begins[:-1]] == row[begins[1:]])
    with np.errstate(over="ignore"):
        power = np.multiply.accumulate(np.full(int(within.max()) + 1, _LETTERS))[within]
        cased = np.add.reduceat(codes[place] * power, first)
        small = cased + np.add.reduceat(power * (sorts[place] == _CAPITAL), first) * _CASE
        pairs = (cased[:-1] * _PAIRS + cased[1:])[pair] * _FIBONACCI
        return (begins[word], small[word] * _FIBONACCI), (begins[:-1][pair], pairs)


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
