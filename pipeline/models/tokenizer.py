"""Byte-pair tokenizer of masked lines.

Mask tokens (`<IP>`) are single ids that no text can split. Other text is cut at spaces, case changes, digits
and punctuation, then byte-pair merged over the full byte alphabet, so that no input is unknown. A line of any
length becomes at most `max_tokens` ids.
"""

import json
import re
import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import BadBundle

PAD, CLS, SEP, MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
SPECIALS: Final = (PAD, CLS, SEP, MASK)
PAD_ID, CLS_ID, SEP_ID, MASK_ID = range(4)

Ints = npt.NDArray[np.int64]


class Specials(NamedTuple):
    """The ids of padding, of both ends of a line, and of a hidden piece."""

    pad: int = PAD_ID
    cls: int = CLS_ID
    sep: int = SEP_ID
    mask: int = MASK_ID


# A leading space stays with its word, as in GPT-2; CamelCase and digit runs are their own pieces.
_PIECES: Final = r" ?[A-Z]?[a-z]+| ?[A-Z]+(?![a-z])| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+"
_STAND_IN: Final = "\n"  # stands for a mask token; no word holds white space
_CUT: Final = re.compile(f" ?{_STAND_IN}|{_PIECES}")
_MAX_PIECE_CHARS: Final = 24  # longer merges only memorise names
# Cached cuts and their pieces: about 10 MiB. Past that the cache is cleared.
_CUTS_MOST: Final = 50_000
_CUT_PIECES_MOST: Final = 250_000
# Of longer lines the head and the tail are read: the verb stands first, the cause last.
_HEAD_CHARS: Final = 900
_TAIL_CHARS: Final = 300
READ_CHARS: Final = _HEAD_CHARS + _TAIL_CHARS


def _byte_letters() -> dict[int, int]:
    """The letter for each byte in a byte-level vocabulary, as in GPT-2 (Radford et al., 2019)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(0x100) if b not in plain]
    return {b: 0x100 + i for i, b in enumerate(others)}


_SPELT: Final = _byte_letters()
_SPELT_SPACE: Final = chr(_SPELT[0x20])  # of printable ASCII only the space is spelt otherwise


class RaggedRows:
    """A growing array of rows of different lengths."""

    def __init__(self) -> None:
        self.flat = np.empty(0, dtype=np.int64)
        self._first = np.empty(0, dtype=np.int64)
        self._length = np.empty(0, dtype=np.int64)

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        self.add_flat(*flattened(rows))

    def add_flat(self, flat: Ints, length: Ints) -> None:
        """Rows of these lengths, one after the other."""
        self._first = np.concatenate([self._first, len(self.flat) + np.cumsum(length) - length])
        self.flat = np.concatenate([self.flat, flat])
        self._length = np.concatenate([self._length, length])

    def take(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """The values of these rows one after the other, which of `rows` each is of, and the lengths."""
        length = self._length[rows]
        before = np.cumsum(length) - length
        of = np.repeat(np.arange(len(rows)), length)
        return self.flat[np.repeat(self._first[rows] - before, length) + np.arange(len(of))], of, length


def flattened(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """The values of all rows one after the other, and how many each row has."""
    length = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(length.sum())), length


class LineTokenizer:
    """Wraps a `tokenizers.Tokenizer`. Immutable but for a cache; threads may share it."""

    def __init__(self, inner: Any, tokens: Sequence[str], max_tokens: int) -> None:
        # A line may hold the text "[MASK]"; only mask tokens are cut out of text, never our specials.
        inner.encode_special_tokens = True
        self._inner = inner
        self._model = inner.model
        self.tokens = tuple(tokens)
        self.max_tokens = max_tokens
        self.specials = Specials()
        self.special_names: tuple[str, ...] = SPECIALS
        self._id_of = {t: inner.token_to_id(t) for t in self.tokens}
        self.fixed = frozenset(self._id_of.values())  # ids of mask tokens
        longest = sorted(self.tokens, key=len, reverse=True)
        self._gaps = re.compile(f"( ?)({'|'.join(map(re.escape, longest)) or '(?!)'})")
        first = {token[:1] for token in self.tokens}
        self.opening = first.pop() if len(first) == 1 else ""  # no word without it holds a mask token
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._number: dict[str, int] = {}
        self._rows = RaggedRows()
        self._begins = np.empty(0, dtype=np.bool_)
        self._add([_STAND_IN, f" {_STAND_IN}"], [[PAD_ID], [PAD_ID]])  # numbers 0 and 1

    @classmethod
    def train(
        cls, lines: Iterable[str], *, tokens: Sequence[str], vocab_size: int, max_tokens: int
    ) -> "LineTokenizer":
        """Learns merges from distinct masked lines. Deterministic."""
        from tokenizers import AddedToken, Regex, Tokenizer
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel, Split
        from tokenizers.pre_tokenizers import Sequence as Steps
        from tokenizers.trainers import BpeTrainer

        names = sorted(set(tokens))
        inner = Tokenizer(BPE())
        inner.pre_tokenizer = Steps(
            [Split(Regex(_PIECES), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        trainer = BpeTrainer(
            vocab_size=vocab_size - len(names),
            min_frequency=1,
            special_tokens=list(SPECIALS),
            initial_alphabet=ByteLevel.alphabet(),
            max_token_length=_MAX_PIECE_CHARS,
            show_progress=False,
        )
        # The trainer does not know added tokens and would learn merges inside `<IP>`.
        gaps = re.compile("|".join(re.escape(t) for t in names) or r"(?!)")
        inner.train_from_iterator(
            (
                part
                for line in lines
                for part in gaps.split(f" {' '.join(head_and_tail(line).split())}")
                if part
            ),
            trainer,
        )
        # A space before a mask token is part of it: alone it would be a piece that says nothing.
        inner.add_tokens([AddedToken(t, normalized=False, special=False, lstrip=True) for t in names])
        return cls(inner, names, max_tokens)

    @classmethod
    def from_file(cls, path: Path, *, tokens: Sequence[str], max_tokens: int) -> "LineTokenizer":
        """Raises BadBundle when the file is no tokenizer, cuts words unlike `pieces`, or lacks a token."""
        from tokenizers import Tokenizer

        try:
            text = path.read_text(encoding="utf-8")
            inner = Tokenizer.from_str(text)
        except Exception as exc:  # the binding raises bare Exception
            raise BadBundle(f"{path} is not a tokenizer: {exc}; publish the bundle again") from exc
        ids = [inner.token_to_id(t) for t in SPECIALS]
        if ids != [PAD_ID, CLS_ID, SEP_ID, MASK_ID]:
            raise BadBundle(f"{path} gives {SPECIALS} the ids {ids}, expected 0..3; train again")
        if json.dumps(_PIECES) not in text:
            raise BadBundle(f"{path} cuts words in another way than this build; train again")
        missing = [t for t in tokens if inner.token_to_id(t) is None]
        if missing:
            raise BadBundle(f"{path} does not know the mask tokens {missing}; train again with these masks")
        # The arrays of a model have one row per piece; an id past them would read outside.
        if max(inner.get_vocab().values()) >= inner.get_vocab_size():
            raise BadBundle(f"{path} has ids past its {inner.get_vocab_size()} pieces; train again")
        return cls(inner, tokens, max_tokens)

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())

    def vocabulary(self) -> dict[str, int]:
        """The id of each piece, mask token and special token."""
        return dict(self._inner.get_vocab())

    def to_json(self) -> str:
        return str(self._inner.to_str())

    def flat_pieces(self, words: Sequence[str]) -> tuple[Ints, Ints]:
        """The ids of all words, each as it stands behind a space, and how many each has.

        Words hold no white space. The same ids as the library's, in a quarter of its time: most cuts of a
        new word (`java`, `.`) are cached.
        """
        # All words at once: a space begins each, and no cut reaches over one. Behind each text but the last
        # stand the space before a mask token, or "", and the token.
        parts = self._gaps.split(f" {' '.join(words)}" if words else "")
        tokens = [self._id_of[token] for token in parts[2::3]]
        parts[2::3] = [_STAND_IN] * len(tokens)
        cuts = _CUT.findall("".join(parts))
        with self._lock:
            if len(self._number) > _CUTS_MOST or len(self._rows.flat) > _CUT_PIECES_MOST:
                self._clear()
            if new := [cut for cut in dict.fromkeys(cuts) if cut not in self._number]:
                self._add(new, [self._merged(cut) for cut in new])
            number = np.fromiter(map(self._number.__getitem__, cuts), dtype=np.int64, count=len(cuts))
            ids, cut_of, length = self._rows.take(number)
            word = np.cumsum(self._begins[number]) - 1
        ids[(number <= 1)[cut_of]] = tokens
        return ids, np.bincount(word, length, len(words)).astype(np.int64)

    def _add(self, cuts: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
        count = len(self._number)
        self._number.update(zip(cuts, range(count, count + len(cuts)), strict=True))
        self._rows.add(rows)
        self._begins = np.append(self._begins, [cut[0] == " " for cut in cuts])

    def _merged(self, cut: str) -> list[int]:
        """The byte pairs of a cut that were merged."""
        if cut.isascii() and cut.isprintable():
            spelt = cut.replace(" ", _SPELT_SPACE)
        else:
            spelt = cut.encode("utf-8", "surrogatepass").decode("latin-1").translate(_SPELT)
        return [token.id for token in self._model.tokenize(spelt)]


def head_and_tail(line: str) -> str:
    """The part of a line that is encoded."""
    if len(line) <= READ_CHARS:
        return line
    return f"{line[:_HEAD_CHARS]} {line[-_TAIL_CHARS:]}"
