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
from functools import lru_cache
from itertools import chain
from typing import Final, cast

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.errors import BadBundle
from pipeline.models.severity import (
    FAILURE_WORDS,
    GRAVE_WORDS,
    all_well,
    is_sign,
    may_be_severe,
    names_failure,
    severity_words,
    trouble,
)
from pipeline.models.tokenizer import RaggedRows

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
_LINES_AT_ONCE: Final = 2048
WORDS_MOST: Final = 64  # of a line
_KIND_BITS: Final = 29  # of a mark; the bits above hold the kind of sign
_STEM: Final = 5  # letters: connect, connection, connected
OUTER_PUNCTUATION: Final = "\"'`.,:;!?()[]{}=|#*"  # of a word
_PIECE: Final = re.compile(r"<[A-Z0-9_*]+>|[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PIECE_OR_GAP: Final = re.compile(f"{_PIECE.pattern}| ")
_PIECES_MOST: Final = 65_536  # cached

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bag = tuple[tuple[int, float], ...]  # (feature, value) of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The marks of the words of lines, from `PieceMarks`, and how much prose the lines are."""

    line: Ints  # (M,) the line of a mark, ascending.
    mark: Ints  # (M,).
    pieces: Ints  # (L,) at least as many as each line has different ones.
    prose: Floats  # (L,) from `prose_shares`.


class SeverityPrior:
    """Weights of words. Immutable."""

    def __init__(self, weights: Floats) -> None:
        self._weights = weights  # (_SIZE,)

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
            key = (_bag(line[:_CHARS], _named(line)), bool(bad))
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
        for at in range(0, len(masked), _LINES_AT_ONCE):
            lines = masked[at : at + _LINES_AT_ONCE]
            texts = [line[:_CHARS] for line in lines]
            faults = [
                named[at + i] if named is not None and len(line) <= _CHARS else _named(line)
                for i, line in enumerate(lines)
            ]
            out += _rounded(self._logits(texts, faults, _spoken(texts)))
        return out

    def score_spoken(
        self, masked: Sequence[str], named: Sequence[str | None], spoken: "Spoken"
    ) -> list[float]:
        """As `score`, for a caller that has met the words of the lines before."""
        out = _rounded(self._logits(masked, named, spoken))
        for i in [i for i, line in enumerate(masked) if len(line) > _CHARS]:
            out[i] = self.score([masked[i]])[0]
        return out

    def _logits(self, texts: Sequence[str], named: Sequence[str | None], spoken: "Spoken") -> Floats:
        """The weights of the bags of these lines, added up without building the bags."""
        weights, count = self._weights, len(texts)
        of_prose = _PROSE * (spoken.prose - 0.5)
        logits: Floats = weights[_BIAS] + of_prose
        for i, name in enumerate(named):
            if name is not None:
                logits[i] += weights[_WORD] + weights[_GRAVE] * (name in GRAVE_WORDS)
        both = np.sort(spoken.line << 32 | spoken.mark)
        both = both[np.diff(both, prepend=-1) > 0]  # each mark once per line
        of, mark = both >> 32, both & 0xFFFFFFFF
        places = mark < _SIZE
        logits += np.bincount(of[places], weights[mark[places]], count)
        for kind in (_TROUBLE, _WELL):
            signs = np.bincount(of[mark >> _KIND_BITS == kind], minlength=count)
            logits += weights[kind] * np.minimum(signs, _MOST_OF_A_KIND)
        for i in np.flatnonzero(spoken.pieces > WORDS_MOST).tolist():
            bag = _bag(texts[i][:_CHARS], named[i])  # only the first pieces of such a line count
            logits[i] = sum(value * weights[place] for place, value in bag) + of_prose[i]
        return logits

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


def _bag(text: str, named: str | None) -> Bag:
    pieces = dict.fromkeys(p for p in _PIECE.findall(text) if p[0] != "<")
    bag: dict[int, float] = {_BIAS: 1.0}
    signs = [0, 0]
    for mark in chain.from_iterable(map(_features, list(pieces)[:WORDS_MOST])):
        if mark < _SIZE:
            bag[mark] = 1.0
        else:
            signs[mark >> _KIND_BITS == _WELL] += 1
    if named is not None:
        bag[_WORD] = 1.0
        if named in GRAVE_WORDS:
            bag[_GRAVE] = 1.0
    for place, count in zip((_TROUBLE, _WELL), signs, strict=True):
        if count:
            bag[place] = float(min(count, _MOST_OF_A_KIND))
    return tuple(sorted(bag.items()))


def is_prose(word: str) -> bool:
    """Whether a word is nothing but letters within its outer punctuation. A mask token is not.

    Combining marks belong to letters, as the vowels of Hindi, Thai and Arabic do."""
    text = word.strip(OUTER_PUNCTUATION)
    if text.isalpha():
        return True
    if text.isascii() or not text[0].isalpha():
        return False
    return all(letter.isalpha() or unicodedata.category(letter)[0] == "M" for letter in text)


def prose_shares(line: Ints, prose: Bools, count: int) -> Floats:
    """Of `count` lines: the share of neighbouring words that are both prose, 0 for a single word.

    `line` (W,): the line of each word, ascending. `prose` (W,): `is_prose` of the words.
    """
    within = line[1:] == line[:-1]
    pairs = np.bincount(line[1:][within], minlength=count)
    both = np.bincount(line[1:][within & prose[1:] & prose[:-1]], minlength=count)
    shares: Floats = both / np.maximum(pairs, 1)
    return shares


def _named(line: str) -> str | None:
    text = line[:_CHARS]
    return severity_words(text) if may_be_severe(text) else None


def _spoken(texts: Sequence[str]) -> Spoken:
    by_line = [text.split() for text in texts]
    line = np.repeat(np.arange(len(texts)), [len(of_line) for of_line in by_line])
    words = list(chain.from_iterable(by_line))
    pieces, _, marks, length = PieceMarks().read(words)
    return Spoken(
        line=np.repeat(line, length),
        mark=marks,
        pieces=np.bincount(line, pieces, len(texts)).astype(np.int64),
        prose=prose_shares(line, np.fromiter(map(is_prose, words), np.bool_, len(words)), len(texts)),
    )


def _rounded(logits: Floats) -> list[float]:
    return cast("list[float]", np.clip(logits, -_LOGIT_MOST, _LOGIT_MOST).round(4).tolist())


class PieceMarks:
    """The marks of the pieces of words. Each distinct piece is read once. One thread at a time."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._number: dict[str, int] = {}
        self._marks = RaggedRows()
        self._fails = self._masks = np.empty(0, dtype=np.bool_)
        self._learn([" "])  # number 0, the gap between two words

    def read(self, words: Sequence[str]) -> tuple[Ints, Bools, Ints, Ints]:
        """The number of pieces of each word (W,), whether one `names_failure` (W,), the marks of all words
        one after the other (M,), and how many each word has (W,). Words hold no white space.
        """
        count = len(words)
        pieces = _PIECE_OR_GAP.findall(" ".join(words))  # no piece reaches over white space
        if len(self._number) > _PIECES_MOST:
            self._clear()
        if new := [piece for piece in dict.fromkeys(pieces) if piece not in self._number]:
            self._learn(new)
        number = np.fromiter(map(self._number.__getitem__, pieces), dtype=np.int64, count=len(pieces))
        word = np.cumsum(number == 0)
        marks, of, _ = self._marks.take(number)
        speaks = np.bincount(word[number > 0], minlength=count)
        return (
            speaks - np.bincount(word[self._masks[number]], minlength=count),
            np.bincount(word[self._fails[number]], minlength=count) > 0,
            marks,
            np.bincount(word[of], minlength=count),
        )

    def _learn(self, pieces: Sequence[str]) -> None:
        count = len(self._number)
        self._number.update(zip(pieces, range(count, count + len(pieces)), strict=True))
        self._marks.add([() if piece[0] in "< " else _features(piece) for piece in pieces])
        # A mask of an unknown kind may hold such a word: `<ERR*>`.
        fails = [names_failure(p) if p[0] == "<" else p.lower() in FAILURE_WORDS for p in pieces]
        self._fails = np.append(self._fails, fails)
        self._masks = np.append(self._masks, [piece[0] == "<" for piece in pieces])


@lru_cache(maxsize=65_536)
def _features(piece: str) -> tuple[int, ...]:
    """The marks of a piece: buckets of its word and stem, and each kind of sign with a hash of the piece."""
    word = piece.lower()
    marks = []
    if len(word) > 1:
        marks.append(_FIXED + zlib.crc32(f"w:{word}".encode()) % _HASHED)
    if len(word) > _STEM:
        marks.append(_FIXED + zlib.crc32(f"s:{word[:_STEM]}".encode()) % _HASHED)
    if is_sign(word):
        this = zlib.crc32(piece.encode()) >> (32 - _KIND_BITS)
        if trouble(word):
            marks.append(_TROUBLE << _KIND_BITS | this)
        if all_well(word):
            marks.append(_WELL << _KIND_BITS | this)
    return tuple(marks)
