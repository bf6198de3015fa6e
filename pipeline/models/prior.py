"""Severity prior: the log odds that a line is an error, from its words.

A logistic regression over the words of a masked line, fitted by maximum a posteriori. The Gaussian prior of
its weights has the word lists of `severity.py` as its mean (Chelba and Acero 2006 adapted models the same
way). The level column of the log moves the weights: words at error levels gain, words at calm levels lose.
Without levels, or with one level only, the weights stay at the word lists. Prose is a sign of its own: a
failure is told in a sentence, and most calm lines list names and values. Free of torch; deterministic;
scoring mutates nothing.
"""

import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Final

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.errors import BadBundle
from pipeline.models.severity import all_well, may_be_severe, severity_words, trouble, words
from pipeline.records.remembered import remembered

_FORMAT: Final = 1
_HASHED: Final = 1 << 15  # buckets for words; logs were seen to have some thousand
_BIAS, _WORD, _GRAVE, _TROUBLE, _WELL = range(5)
_FIXED: Final = 5  # features in front of the hashed ones
_SIZE: Final = _FIXED + _HASHED
# Logits: a named fault outweighs all else; three words of trouble together are nearly one.
_MEAN: Final = {_BIAS: -1.5, _WORD: 3.0, _GRAVE: 0.5, _TROUBLE: 0.8, _WELL: -0.5}
# Logits between a line of values alone and a whole sentence, half of them on either side; not learnt. 0.5 to
# 1.5 rank alike (docs/LOG.md).
_PROSE: Final = 1.0
_MOST_OF_A_KIND: Final = 3  # Words of trouble in a line; a stack trace is not worse than a sentence.
_CLASS_LEAST: Final = 3  # Different lines of either class; fewer show the words of one incident.
# Of the Gaussian: some ten lines move a word by a logit, thirty lines a word list, which is right more often
# than the levels of one log. With a tenth of it, words of a topic passed for words of trouble (docs/LOG.md).
_PRECISION: Final = 10.0
_FIXED_PRECISION: Final = 30.0
_LOGIT_MOST: Final = 8.0
_NEWTON_STEPS: Final = 10  # converges after five or six
_CG_STEPS: Final = 20
_CHARS: Final = 1024
_PIECES_MOST: Final = 64  # different ones of a line
_WORD_CHARS: Final = 64  # of words whose features are remembered
_STEM: Final = 5  # letters: connect, connection, connected
OUTER_PUNCTUATION: Final = "\"'`.,:;!?()[]{}=|#*"  # of a word
_PIECE: Final = re.compile(r"<[A-Z0-9_*]+>|[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bag = tuple[tuple[int, float], ...]  # (feature, value) of a line


class SeverityPrior:
    """Weights of words. Immutable."""

    def __init__(self, weights: Floats) -> None:
        self._weights = weights  # (_SIZE,)
        self._table: list[float] = weights.tolist()  # quicker, one by one

    @classmethod
    def by_words(cls) -> "SeverityPrior":
        """The word lists alone."""
        return cls(_mean())

    @classmethod
    def fit(cls, masked: Sequence[str], severe: Sequence[bool], counts: Sequence[int]) -> "SeverityPrior":
        """From distinct masked lines, whether each was seen at an error-like level, and their counts.

        Both classes weigh as much as the rarer class has distinct lines. So a log with three errors teaches
        little, and a million calm lines do not outweigh the errors. Lines that differ only in values count as
        one.
        """
        bags: dict[tuple[Bag, bool], float] = {}
        for line, bad, count in zip(masked, severe, counts, strict=True):
            text = line[:_CHARS]
            key = (tuple(sorted(_bag(text, _named(text)).items())), bool(bad))
            bags[key] = bags.get(key, 0.0) + count
        labels = np.array([bad for _, bad in bags], dtype=np.float64)
        errors = int(labels.sum())
        fewer = min(errors, len(labels) - errors)
        if fewer < _CLASS_LEAST:
            return cls.by_words()
        # Between one vote per line and one per record, as the weights of the line model are drawn.
        weights = np.sqrt(np.fromiter(bags.values(), dtype=np.float64))
        for label in (0.0, 1.0):
            weights[labels == label] *= fewer / weights[labels == label].sum()
        return cls(_posterior(_Rows.of([bag for bag, _ in bags]), labels, weights))

    def score(self, masked: Sequence[str], named: Sequence[str | None] | None = None) -> list[float]:
        """Logit per line, in order, within -8..8: above 0 where the words are rather those of an error.

        `named`: `severity_words` of each line, where the caller knows them.
        """
        out: list[float] = []
        for i, line in enumerate(masked):
            text = line[:_CHARS]
            fault = named[i] if named is not None and text == line else _named(text)
            logit = sum(value * self._table[place] for place, value in _bag(text, fault).items())
            logit += _PROSE * (_prose_share(text) - 0.5)
            out.append(round(max(-_LOGIT_MOST, min(_LOGIT_MOST, logit)), 4))
        return out

    def to_bytes(self) -> bytes:
        """msgpack of format, places and values (float32) of the weights that are not zero."""
        places = np.flatnonzero(self._weights)
        values = self._weights[places]
        return bytes(msgpack.packb([_FORMAT, places.astype("<u4").tobytes(), values.astype("<f4").tobytes()]))

    @classmethod
    def from_bytes(cls, blob: bytes) -> "SeverityPrior":
        """Raises BadBundle when the bytes are not what `to_bytes` writes."""
        try:
            form, places_data, values_data = msgpack.unpackb(blob)
            if form != _FORMAT:
                raise ValueError(f"format {form!r} is not known")
            places = np.frombuffer(places_data, dtype="<u4")
            values = np.frombuffer(values_data, dtype="<f4").astype(np.float64)
            if len(places) != len(values) or (places >= _SIZE).any() or not np.isfinite(values).all():
                raise ValueError("its weights are damaged")
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise BadBundle(f"the severity prior of a bundle is not readable: {exc}; train again") from exc
        weights = np.zeros(_SIZE)
        weights[places] = values
        return cls(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A sparse matrix (lines, _SIZE) in coordinates."""

    lines: int
    row: Ints
    column: Ints
    value: Floats

    @classmethod
    def of(cls, bags: Sequence[Bag]) -> "_Rows":
        flat = [pair for bag in bags for pair in bag]
        return cls(
            lines=len(bags),
            row=np.repeat(np.arange(len(bags)), [len(bag) for bag in bags]),
            column=np.fromiter((c for c, _ in flat), dtype=np.int64, count=len(flat)),
            value=np.fromiter((v for _, v in flat), dtype=np.float64, count=len(flat)),
        )

    def times(self, weights: Floats) -> Floats:
        """(lines,)"""
        return np.bincount(self.row, self.value * weights[self.column], self.lines).astype(np.float64)

    def back(self, errors: Floats) -> Floats:
        """(_SIZE,)"""
        return np.bincount(self.column, self.value * errors[self.row], _SIZE).astype(np.float64)


def _mean() -> Floats:
    weights = np.zeros(_SIZE)
    weights[list(_MEAN)] = list(_MEAN.values())
    return weights


def _posterior(rows: _Rows, labels: Floats, weights: Floats) -> Floats:
    """The most probable weights: Newton's method, each step by conjugate gradients."""
    mean = _mean()
    precision = np.full(_SIZE, _PRECISION)
    precision[:_FIXED] = _FIXED_PRECISION
    found = mean.copy()
    for _ in range(_NEWTON_STEPS):
        chance = 1.0 / (1.0 + np.exp(-np.clip(rows.times(found), -30.0, 30.0)))
        slope = rows.back(weights * (chance - labels)) + precision * (found - mean)
        if np.abs(slope).max() < 1e-4:
            break
        curve = weights * chance * (1.0 - chance)
        step = np.zeros(_SIZE)
        residual = slope.copy()
        direction = residual.copy()
        size = float(residual @ residual)
        for _ in range(_CG_STEPS):
            bent = rows.back(curve * rows.times(direction)) + precision * direction
            length = size / float(direction @ bent)
            step += length * direction
            residual -= length * bent
            last, size = size, float(residual @ residual)
            if size < 1e-10:
                break
            direction = residual + (size / last) * direction
        found -= step
    return found


def _bag(text: str, named: str | None) -> dict[int, float]:
    """The features of a line and their values."""
    pieces = [piece for piece in dict.fromkeys(_PIECE.findall(text)) if piece[0] != "<"]
    places = list(chain.from_iterable(map(_features, pieces[:_PIECES_MOST])))
    bag = dict.fromkeys(places, 1.0)
    bag[_BIAS] = 1.0
    for kind in (_TROUBLE, _WELL):
        if kind in bag:
            bag[kind] = float(min(places.count(kind), _MOST_OF_A_KIND))
    if named is not None:
        bag[_WORD] = 1.0
        if named in words().grave:
            bag[_GRAVE] = 1.0
    return bag


@remembered(65_536, _WORD_CHARS)
def _features(piece: str) -> tuple[int, ...]:
    """Of a piece: the buckets of its word and stem, and the kinds of sign that it is."""
    word = piece.lower()
    places = []
    if len(word) > 1:
        places.append(_FIXED + zlib.crc32(f"w:{word}".encode()) % _HASHED)
    if len(word) > _STEM:
        places.append(_FIXED + zlib.crc32(f"s:{word[:_STEM]}".encode()) % _HASHED)
    places += [kind for kind, says in ((_TROUBLE, trouble), (_WELL, all_well)) if says(word)]
    return tuple(places)


def _named(text: str) -> str | None:
    return severity_words(text) if may_be_severe(text) else None


@remembered(65_536, _WORD_CHARS)
def is_prose(word: str) -> bool:
    """Whether a word is nothing but letters within its outer punctuation. A mask token is not.

    Combining marks belong to letters, as the vowels of Hindi, Thai and Arabic do."""
    text = word.strip(OUTER_PUNCTUATION)
    if text.isalpha():
        return True
    if text.isascii() or not text[0].isalpha():
        return False
    return all(letter.isalpha() or unicodedata.category(letter)[0] == "M" for letter in text)


def _prose_share(text: str) -> float:
    """The share of neighbouring words that are both prose, 0 for a single word."""
    prose = [is_prose(word) for word in text.split()]
    return sum(a and b for a, b in pairwise(prose)) / max(1, len(prose) - 1)
