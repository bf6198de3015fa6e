"""A two-generation cache from text to text, bounded in entries and characters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

ENTRIES: Final = 20_000  # of one generation; there are two
MAX_CHARS: Final = 1_024  # longer texts are rare and stay out
# Of one generation. A character takes 1 to 8 bytes, so both generations hold at most 48 MiB of text.
ALL_CHARS: Final = 3_000_000


class Memo:
    """A hit moves an entry to the young generation. When the young generation is full, the old one is
    dropped.

    Lookups run over whole lists, which a per-key LRU cache cannot do. Thread-safe: at worst a text is
    computed twice."""

    __slots__ = ("_chars", "_entries", "_old", "_young", "_young_chars")

    def __init__(self, entries: int = ENTRIES, chars: int = ALL_CHARS) -> None:
        self._entries, self._chars = entries, chars
        self._young_chars = 0
        self._young: dict[str, str] = {}
        self._old: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def recall(self, texts: Sequence[str], compute: Callable[[list[str]], list[str]]) -> list[str]:
        """The results of these texts, in their order; `compute` gives those that are not remembered.

        A text may stand there several times; it is computed once."""
        results = dict(zip(texts, self.recalled(texts), strict=True))
        if missing := [text for text, result in results.items() if result is None]:
            computed = dict(zip(missing, compute(missing), strict=True))
            self.remember(computed)
            results |= computed
        return [results[text] or "" for text in texts]

    def recalled(self, texts: Sequence[str]) -> list[str | None]:
        """The remembered results of these texts, None for the others."""
        young, old = self._young, self._old
        found: list[str | None] = list(map(young.get, texts))
        if old and None in found:
            promoted: dict[str, str] = {}
            for at, text in enumerate(texts):
                if found[at] is None and (before := old.get(text)) is not None:
                    found[at] = promoted[text] = before
            if promoted:
                self._remember(promoted)
        return found

    def remember(self, computed: Mapping[str, str]) -> None:
        """Remembers these results where they are short and there is room."""
        fresh = {t: r for t, r in computed.items() if len(t) <= MAX_CHARS and len(r) <= MAX_CHARS}
        if fresh:
            self._remember(fresh)

    def _remember(self, fresh: dict[str, str]) -> None:
        more = sum(len(text) + len(result) for text, result in fresh.items())
        if len(fresh) > self._entries or more > self._chars:
            return
        if len(self._young) + len(fresh) > self._entries or self._young_chars + more > self._chars:
            self._old, self._young, self._young_chars = self._young, {}, 0
        self._young.update(fresh)
        self._young_chars += more
