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
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Final

import msgpack

from pipeline.errors import BadBundle

_FORMAT: Final = 3
_GRAMS_MOST: Final = 500_000  # of all kinds, 40 MiB; large logs were seen to hold 60,000 trigrams
_TEXT_MOST: Final = 8 << 20  # characters of all grams
_WEIGHTS: Final = (1.0, 1.0, 2.0)  # of the kinds: trigrams, words, pairs of words (docs/LOG.md)
_CHARS: Final = 1024  # of a line; the line model does not read more
# No text has control characters, so they separate the kinds of grams.
_CONTROL: Final = re.compile("[\x00-\x1f]")
_WORD, _MASKED, _PAIR = "\x01", "\x02", "\x03"
_MASK: Final = re.compile(r"<[A-Z0-9_*]+>")
_WORDS: Final = re.compile("\x02|[A-Z]?[a-z\x80-\U0010ffff]+|[A-Z]+(?![a-z\x80-\U0010ffff])")
_WITHOUT_TEXT: Final = frozenset(map("".join, product(f" {_MASKED}", repeat=3)))


class Novelty:
    """The grams of a training sample: trigrams, words, pairs of words. Immutable."""

    def __init__(self, grams: frozenset[str]) -> None:
        self._grams = grams

    @classmethod
    def fit(cls, masked: Sequence[str], counts: Sequence[int]) -> "Novelty":
        """From distinct masked lines and counts; past the limit the grams of rare lines are dropped."""
        grams: set[str] = set()
        chars = 0
        for _, line in sorted(zip(counts, masked, strict=True), key=lambda pair: -pair[0]):
            new = set().union(*_grams(line)) - grams
            chars += sum(map(len, new))
            if len(grams) + len(new) > _GRAMS_MOST or chars > _TEXT_MOST:
                break
            grams |= new
        return cls(frozenset(grams))

    def __len__(self) -> int:
        return len(self._grams)

    def score(self, masked: Sequence[str]) -> list[float]:
        """Per line, in order: 0 (all grams known, or no text at all) .. 1 (none known).

        The weighted mean over the kinds of grams that a line has.
        """
        return [self._share(line) for line in masked]

    def _share(self, line: str) -> float:
        share = total = 0.0
        for weight, grams in zip(_WEIGHTS, _grams(line), strict=True):
            if grams:
                share += weight * len(grams - self._grams) / len(grams)
                total += weight
        return round(share / max(total, 1.0), 4)

    def to_bytes(self) -> bytes:
        """msgpack of format and sorted grams."""
        return bytes(msgpack.packb([_FORMAT, sorted(self._grams)], unicode_errors="surrogatepass"))

    @classmethod
    def from_bytes(cls, blob: bytes) -> "Novelty":
        """Raises BadBundle when the bytes are not what `to_bytes` writes."""
        try:
            form, grams = msgpack.unpackb(blob, unicode_errors="surrogatepass")
            if form != _FORMAT:
                raise ValueError(f"format {form!r} is not known")
            if len(grams) > _GRAMS_MOST or not all(type(gram) is str for gram in grams):
                raise ValueError("its grams are too many or no texts")
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise BadBundle(f"the novelty of a bundle is not readable: {exc}; train again") from exc
        return cls(frozenset(grams))


def _grams(line: str) -> tuple[set[str], set[str], set[str]]:
    """The different trigrams, words and pairs of words of a line."""
    text = line[:_CHARS]
    if not text.isprintable():
        text = _CONTROL.sub(" ", text)
    # A space on both sides, so that the ends of a word show in trigrams.
    text = f" {_MASK.sub(_MASKED, text) if '<' in text else text} "
    words = _WORDS.findall(text)
    # Trigrams and pairs of masks only do not count.
    return (
        {text[i : i + 3] for i in range(len(text) - 2)} - _WITHOUT_TEXT,
        {_WORD + word.lower() for word in words if word != _MASKED},
        {f"{a}{_PAIR}{b}" for a, b in pairwise(words) if a != _MASKED or b != _MASKED},
    )
