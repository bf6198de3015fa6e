"""Byte-pair tokenizer of masked lines.

Mask tokens (`<IP>`) are single ids that no text can split. Other text is cut at spaces, case changes, digits
and punctuation, then byte-pair merged over the full byte alphabet, so that no input is unknown. A line of any
length becomes at most `max_tokens` ids.
"""

import re
from collections.abc import Iterable, Sequence
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
_MAX_PIECE_CHARS: Final = 24  # longer merges only memorise names
# Of longer lines the head and the tail are read: the verb stands first, the cause last.
_HEAD_CHARS: Final = 900
_TAIL_CHARS: Final = 300
READ_CHARS: Final = _HEAD_CHARS + _TAIL_CHARS


class LineTokenizer:
    """Wraps a `tokenizers.Tokenizer`. Immutable; threads may share it."""

    def __init__(self, inner: Any, tokens: Sequence[str], max_tokens: int) -> None:
        # A line may hold the text "[MASK]"; only mask tokens are cut out of text, never our specials.
        inner.encode_special_tokens = True
        self._inner = inner
        self.tokens = tuple(tokens)
        self.max_tokens = max_tokens
        self.specials = Specials()
        self.special_names: tuple[str, ...] = SPECIALS
        self._id_of = {t: inner.token_to_id(t) for t in self.tokens}
        self.fixed = frozenset(self._id_of.values())  # ids of mask tokens
        first = {token[:1] for token in self.tokens}
        self.opening = first.pop() if len(first) == 1 else ""  # no word without it holds a mask token

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
        """Raises BadBundle when the file is not a tokenizer or lacks a token."""
        from tokenizers import Tokenizer

        try:
            inner = Tokenizer.from_file(str(path))
        except Exception as exc:  # the binding raises bare Exception
            raise BadBundle(f"{path} is not a tokenizer: {exc}; publish the bundle again") from exc
        ids = [inner.token_to_id(t) for t in SPECIALS]
        if ids != [PAD_ID, CLS_ID, SEP_ID, MASK_ID]:
            raise BadBundle(f"{path} gives {SPECIALS} the ids {ids}, expected 0..3; train again")
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

    def pieces(self, words: Sequence[str]) -> list[list[int]]:
        """The ids of each word as it stands behind a space. Words hold no white space."""
        # The library takes no half of a surrogate pair.
        texts = [f" {word}".encode("utf-8", "replace").decode() for word in words]
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def to_json(self) -> str:
        return str(self._inner.to_str())


def head_and_tail(line: str) -> str:
    """The part of a line that is encoded."""
    if len(line) <= READ_CHARS:
        return line
    return f"{line[:_HEAD_CHARS]} {line[-_TAIL_CHARS:]}"
