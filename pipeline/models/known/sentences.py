"""What a log has said: which word follows which, so that a sentence it never said stands out in any language.

A masked line is read as its words; numbers, ids, names in CamelCase and mask tokens are all the same to it.
The strangeness of a line adds up, over the words that never followed the word before them, how surely only
known ones stood there (Witten and Bell 1991): after a word with n followers, T of them different, a new one
has the chance T / (n + T). A word that no line has adds its own chance in the same way. So one word in the
place of another in a line that was written 3,000 times is strange, and a new name where names change is not.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import polars as pl

from pipeline.errors import BadBundle

LEAST: Final = 6.0  # nats; a line below it is never news (chosen by half of the sentences of `bench news`)
ALLOWED: Final = 10.0  # as the default of `news_per_day`
OPEN: Final = 256  # different followers of a word after which anything may stand
WORDS_READ: Final = 64  # of a line
WORDS_MOST: Final = 500_000  # of a bundle, five times those of the largest sample
SCHEMA: Final[dict[str, Any]] = {
    "word": pl.String,
    "count": pl.UInt64,
    "followers": pl.List(pl.String),  # the most frequent first; empty where OPEN or more
    "different": pl.UInt32,
}

_LEAST_KEY: Final = "least"
_LEAST_OF: Final = msgspec.json.Decoder(dict[str, float])
_BEGIN, _END, _OTHER = "^", "$", "#"
_EDGES: Final = "\"'`“”‘’.,;:!?()[]{}|*=…<>"
_MASK: Final = re.compile(r"<[A-Z0-9_]+>")
_PIECES: Final = re.compile(r"[_-]")
_WITHOUT_BLANKS: Final = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]")  # Thai, Lao, kana, Han


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverSaid:
    """How a line differs from all that was said. `usual`: where one word differs, the one that most often
    stood in its place; else ""."""

    nats: float
    usual: str


class Sentences:
    """The words of a training sample, and the words that followed them."""

    def __init__(
        self,
        followers: Mapping[str, tuple[str, ...]],
        counts: Mapping[str, tuple[int, int]],
        least: Mapping[str, float] | None = None,
    ) -> None:
        """`counts`: of each word how often it was followed, and by how many different words. `least`: nats by
        workload; a line below is no news. Other workloads have the bound of ""."""
        self.least = dict(least or {"": LEAST})
        self._usual = {word: after[0] for word, after in followers.items() if after}
        self._followers = {word: frozenset(after) for word, after in followers.items()}
        self._counts = dict(counts)
        self._new_word = _nats_of_a_new_word(counts)

    @classmethod
    def fit(cls, lines: Iterable[tuple[str, int, str]], *, allowed: float = ALLOWED) -> Self:
        """From masked lines, how often each came, and its workload.

        Of the lines that came once, at most `allowed` would have been news before they came: a log that says
        many new things shows only the strangest ones. Each workload has an equal share of them, and what the
        steady ones do not need is left to the chatty ones."""
        pairs: dict[str, Counter[str]] = {}
        once: list[tuple[str, list[str]]] = []
        before: dict[str, list[float]] = {}
        for masked, count, workload in lines:
            said = words_of(masked)
            before.setdefault(workload, [])
            if count == 1:
                once.append((workload, said))
            for word, after in pairwise(said):
                pairs.setdefault(word, Counter())[after] += count
        counts = {w: (c.total(), len(c)) for w, c in pairs.items()}
        new_word = _nats_of_a_new_word(counts)
        for workload, said in once:
            before[workload].append(_before_it_came(said, pairs, counts, new_word))
        return cls(
            {w: tuple(a for a, _ in c.most_common()) if len(c) < OPEN else () for w, c in pairs.items()},
            counts,
            _bounds(before, allowed),
        )

    def news(self, masked: str, workload: str = "") -> NeverSaid | None:
        """None for a line whose words have all followed each other, or nearly so."""
        nats, places, usual = 0.0, 0, ""
        for word, after in _telling(words_of(masked)):
            count, different = self._counts.get(word, (0, 0))
            if different >= OPEN or after in self._followers.get(word, ()):
                continue
            places += 1
            if count:
                nats += _nats_of_a_new_follower(count, different)
                # Behind a number or a name stands what has nothing to do with this sentence.
                usual = usual or ("" if word in (_BEGIN, _OTHER) else self._usual.get(word, ""))
            if after != _END and after not in self._counts:
                nats += self._new_word
        if nats < self.least.get(workload, self.least[""]):
            return None
        one_word = places <= 2 and usual not in (_END, _OTHER) and not _WITHOUT_BLANKS.search(usual)
        return NeverSaid(nats=round(nats, 2), usual=usual if one_word else "")

    def write(self, path: Path) -> None:
        """A Parquet file of SCHEMA."""
        rows = [
            (word, count, list(self._ordered(word)), different)
            for word, (count, different) in self._counts.items()
        ]
        frame = pl.DataFrame(rows[:WORDS_MOST], schema=SCHEMA, orient="row")
        frame.write_parquet(path, metadata={_LEAST_KEY: msgspec.json.encode(self.least).decode()})

    def _ordered(self, word: str) -> Iterable[str]:
        usual = self._usual.get(word)
        others = sorted(self._followers.get(word, frozenset()) - {usual})
        return others if usual is None else [usual, *others]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The inverse of `write`. Raises BadBundle."""
        try:
            frame = pl.read_parquet(path, n_rows=WORDS_MOST + 1)
            least = {"": LEAST} | _LEAST_OF.decode(pl.read_parquet_metadata(path).get(_LEAST_KEY, "{}"))
        # Polars raises several unrelated classes on damaged files, and its panics are not Exceptions.
        except (Exception, pl.exceptions.PanicException) as exc:
            raise BadBundle(f"{path} is not readable: {exc}; publish the bundle again") from exc
        if dict(frame.schema) != SCHEMA or frame.height > WORDS_MOST or any(frame.null_count().row(0)):
            raise BadBundle(f"{path} has other columns, empty fields or too many words; publish it again")
        rows = list(frame.iter_rows())
        return cls(
            {word: tuple(followers) for word, _, followers, _ in rows},
            {word: (count, max(1, different)) for word, count, _, different in rows},
            least,
        )


def _bounds(before: Mapping[str, Sequence[float]], allowed: float) -> dict[str, float]:
    """The least nats of news by workload; that of "" is as if all lines were of one. `before`: of the lines
    that came once."""
    strange = {workload: [one for one in nats if one > LEAST] for workload, nats in before.items()}
    bounds = {"": _bound([one for nats in strange.values() for one in nats], allowed)}
    left = allowed
    for done, workload in enumerate(sorted(strange, key=lambda name: (len(strange[name]), name))):
        share = left / (len(strange) - done)
        left -= min(share, len(strange[workload]))
        bounds[workload] = _bound(strange[workload], share)
    return bounds


def _bound(nats: Sequence[float], allowed: float) -> float:
    """Of these lines at most `allowed` lie above it."""
    return sorted(nats, reverse=True)[int(allowed)] if allowed < len(nats) else LEAST


def _before_it_came(
    said: Sequence[str],
    pairs: Mapping[str, Counter[str]],
    counts: Mapping[str, tuple[int, int]],
    new_word: float,
) -> float:
    """The strangeness in nats of a line of the sample that came once, as if it had not come."""
    own, words = Counter(pairwise(said)), Counter(said[:-1])
    nats = 0.0
    for word, after in _telling(said):
        followers = pairs[word]
        if len(followers) >= OPEN or followers[after] > own[word, after]:
            continue
        count = counts[word][0] - words[word]
        if count:
            alone = sum(followers[one] == n for (first, one), n in own.items() if first == word)
            nats += _nats_of_a_new_follower(count, max(1, len(followers) - alone))
        if after != _END and counts[after][0] <= words[after]:
            nats += new_word
    return nats


def _telling(said: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The pairs of a line that may be news: numbers, ids and names may stand anywhere, also at the end."""
    for word, after in pairwise(said):
        if after != _OTHER and (after != _END or word not in (_BEGIN, _OTHER)):
            yield word, after


def _nats_of_a_new_follower(count: int, different: int) -> float:
    return math.log((count + different) / different)


def _nats_of_a_new_word(counts: Mapping[str, tuple[int, int]]) -> float:
    said = sum(count for word, (count, _) in counts.items() if word not in (_BEGIN, _OTHER))
    return math.log((said + len(counts)) / len(counts)) if said else 0.0


def words_of(masked: str) -> list[str]:
    """The words of a masked line between a begin and an end; everything else in it is the same sign."""
    found = [_BEGIN]
    for token in masked.split()[:WORDS_READ]:
        if _MASK.search(token):
            found.append(_OTHER)
            continue
        pieces = _PIECES.split(token.strip(_EDGES))
        if pieces == [""]:
            continue
        if not all(map(_is_word, pieces)):
            found.append(_OTHER)
            continue
        for piece in pieces:
            found += piece if _WITHOUT_BLANKS.search(piece) else [piece.lower()]
    return [*found, _END]


def _is_word(piece: str) -> bool:
    # Combining marks are no letters, and an apostrophe belongs to its word.
    letters = piece.replace("'", "").replace("’", "")
    if not letters.isascii():
        return not any(c.isascii() and not c.isalpha() for c in letters)
    return letters.isalpha() and (letters.islower() or letters.istitle() or letters.isupper())
