"""Lines to arrays of piece ids, each distinct word tokenized once.

A log repeats its words, so a line costs one look-up per word; all other work is numpy. Runs of white space
count as one space. A line becomes at most `max_tokens - 2` pieces, its head and its tail.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from pipeline.models.tokenizer import Ints, LineTokenizer, head_and_tail

# Cached words and pieces: about 30 MiB. Past that the cache is cleared; an LRU costs more than it saves.
_WORDS_MOST: Final = 100_000
_PIECES_MOST: Final = 1_000_000
# Attention over a multiple of so many places takes half the time of one over a few less.
_LANES: Final = 16

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedLines:
    """Lines as flat arrays: L lines, W words, N pieces. Without [CLS] and [SEP]."""

    ids: Ints  # (N,).
    place: Ints  # (N,) the word of a piece, 0..W-1.
    start: Ints  # (L + 1,) first piece of each line.
    scored: Bools  # (N,) False for mask tokens, which stand for any value.
    words: list[str]  # (W,).
    line: Ints  # (W,) the line of a word.
    flags: Ints  # (W,) from `describe`.

    def rectangles(self, room: int) -> Iterator[tuple[Ints, Bools]]:
        """Lines of similar length: the places of their pieces, and which are not padding, both (B, T).

        About `room` places each; empty lines are in none.
        """
        lengths = np.diff(self.start)
        order = np.argsort(lengths, kind="stable")
        stop, empty = len(order), int((lengths == 0).sum())
        while stop > empty:  # longest first: the width is then known when one begins
            width = int(lengths[order[stop - 1]])
            rows = order[max(empty, stop - max(1, room // width)) : stop]
            width += -width % _LANES if -width % _LANES < _LANES // 2 else 0
            real = np.arange(width) < lengths[rows, None]
            yield np.where(real, self.start[rows][:, None] + np.arange(width), 0), real
            stop -= len(rows)


class Lexicon:
    """A cache from words to pieces. Thread-safe.

    `describe` is asked once for each word, for an integer. No two threads are in it at a time.
    """

    def __init__(self, tokenizer: LineTokenizer, describe: Callable[[str], int] = lambda _: 0) -> None:
        self.tokenizer = tokenizer
        self._describe = describe
        self._lock = threading.Lock()
        self._fixed = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
        self._fixed[sorted(tokenizer.fixed)] = True
        self._known: dict[str, tuple[list[int], int]] = {}  # pieces and what `describe` said
        self._pieces = 0

    def encode(self, lines: Sequence[str]) -> EncodedLines:
        """The lines in order."""
        texts = [head_and_tail(line).split() for line in lines]
        words = list(chain.from_iterable(texts))
        with self._lock:
            self._learn(words)
            found = [self._known[word] for word in words]
        line = np.repeat(np.arange(len(lines)), [len(t) for t in texts])
        length = np.fromiter((len(ids) for ids, _ in found), dtype=np.int64, count=len(words))
        ids = np.fromiter(chain.from_iterable(ids for ids, _ in found), np.int64, int(length.sum()))
        place = np.repeat(np.arange(len(words)), length)
        start = np.zeros(len(lines) + 1, dtype=np.int64)
        np.cumsum(np.bincount(line, weights=length, minlength=len(lines)).astype(np.int64), out=start[1:])
        room = self.tokenizer.max_tokens - 2
        if len(lines) and int(np.diff(start).max()) > room:
            within = self._within(start, room)
            ids, place = ids[within], place[within]
            np.cumsum(np.minimum(np.diff(start), room), out=start[1:])
        return EncodedLines(
            ids=ids,
            place=place,
            start=start,
            scored=~self._fixed[ids],
            words=words,
            line=line,
            flags=np.fromiter((flags for _, flags in found), dtype=np.int64, count=len(words)),
        )

    @staticmethod
    def _within(start: Ints, room: int) -> Bools:
        """The pieces that fit: of a long line the first three quarters of the room, and the last quarter."""
        lengths = np.diff(start)
        at = np.arange(start[-1]) - np.repeat(start[:-1], lengths)
        tail = room // 4
        size = np.repeat(lengths, lengths)
        within: Bools = (size <= room) | (at < room - tail) | (at >= size - tail)
        return within

    def _learn(self, words: Sequence[str]) -> None:
        if len(self._known) > _WORDS_MOST or self._pieces > _PIECES_MOST:
            self._known, self._pieces = {}, 0
        new = [word for word in dict.fromkeys(words) if word not in self._known]
        for word, ids in zip(new, self.tokenizer.pieces(new), strict=True):
            self._known[word] = ids, self._describe(word)
            self._pieces += len(ids)
