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

from pipeline.models.tokenizer import Ints, LineTokenizer, RaggedRows, head_and_tail

# Cached words and pieces: about 30 MiB. Past that the cache is cleared; an LRU costs more than it saves.
_WORDS_MOST: Final = 100_000
_PIECES_MOST: Final = 1_000_000
# Padding is at most one part in so many of a rectangle. Less padding makes more rectangles, and each costs a
# core as much as some fifty places.
_PADDING: Final = 20
# Attention over a multiple of so many places takes half the time of one over a few less: it leaves no
# remainder for the scalar loop.
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
    marks: Ints  # (M,) those of all words, from `describe`.
    marked: Ints  # (M,) the word of a mark, 0..W-1.

    def batches(self, room: int) -> Iterator[tuple[slice, Ints]]:
        """Consecutive lines: the slice of their pieces, and where each line begins in it (L' + 1,).

        At most `room` pieces each, unless a single line has more.
        """
        begin, lines = 0, len(self.start) - 1
        while begin < lines:
            end = max(begin + 1, int(np.searchsorted(self.start, self.start[begin] + room, side="right")) - 1)
            yield (
                slice(int(self.start[begin]), int(self.start[end])),
                self.start[begin : end + 1] - self.start[begin],
            )
            begin = end


def rectangles(start: Ints, room: int, lengths: Ints | None = None) -> Iterator[tuple[Ints, Bools]]:
    """Packs lines of similar length: the places of their pieces, and which are no padding, both (B, T).

    `start` (L + 1,): where each line begins. `lengths` (L,): how many of its pieces are read, all by default.
    About `room` places each; empty lines are in none.
    """
    lengths = np.diff(start) if lengths is None else lengths
    order = np.argsort(lengths, kind="stable")
    order = order[np.searchsorted(lengths[order], 1) :]
    sizes = lengths[order]
    stop = len(order)
    while stop > 0:  # longest first: the width is then known when one begins
        width = int(sizes[stop - 1])
        limit = max(1, room // width)
        filled = np.cumsum(width - sizes[max(0, stop - limit) : stop][::-1])
        begin = stop - int(np.searchsorted(filled, room // _PADDING, side="right"))
        width += -width % _LANES if -width % _LANES < _LANES // 2 else 0
        real = np.arange(width) < sizes[begin:stop, None]
        yield np.where(real, start[order[begin:stop]][:, None] + np.arange(width), 0), real
        stop = begin


class Lexicon:
    """A cache from words to pieces. Thread-safe.

    `describe` is asked once for each word: an integer of the caller's (W,), the marks of all words one after
    the other (M,), and how many each word has (W,). No two threads are in it at a time.
    """

    def __init__(
        self,
        tokenizer: LineTokenizer,
        describe: Callable[[Sequence[str]], tuple[Ints, Ints, Ints]] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._describe = describe or _undescribed
        self._lock = threading.Lock()
        self._fixed = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
        self._fixed[sorted(tokenizer.fixed)] = True
        self._clear()

    def _clear(self) -> None:
        self._number: dict[str, int] = {}
        self._pieces, self._marks = RaggedRows(), RaggedRows()
        self._flags = np.empty(0, dtype=np.int64)

    def encode(self, lines: Sequence[str]) -> EncodedLines:
        """The lines in order."""
        texts = [head_and_tail(line).split() for line in lines]
        words = list(chain.from_iterable(texts))
        with self._lock:
            if len(self._number) > _WORDS_MOST or len(self._pieces.flat) > _PIECES_MOST:
                self._clear()
            new = [w for w in dict.fromkeys(words) if w not in self._number]
            if new:
                self._learn(new)
            number = np.fromiter(map(self._number.__getitem__, words), dtype=np.int64, count=len(words))
            ids, place, length = self._pieces.take(number)
            marks, marked, _ = self._marks.take(number)
            flags = self._flags[number]
        line = np.repeat(np.arange(len(lines)), [len(t) for t in texts])
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
            flags=flags,
            marks=marks,
            marked=marked,
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
        self._pieces.add_flat(*self.tokenizer.flat_pieces(words))
        flags, marks, length = self._describe(words)
        self._marks.add_flat(marks, length)
        self._flags = np.concatenate([self._flags, flags])
        count = len(self._number)
        self._number.update(zip(words, range(count, count + len(words)), strict=True))


def _undescribed(words: Sequence[str]) -> tuple[Ints, Ints, Ints]:
    none = np.zeros(len(words), dtype=np.int64)
    return none, none[:0], none
