"""What a process remembers of texts it has worked on: bounded, the least used half goes first."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

ENTRIES: Final = 20_000  # of one generation; there are two
MAX_CHARS: Final = 1_024  # longer texts are rare
# Of one generation. A character takes one byte in plain logs and up to eight, so both have at most 48 MiB of text.
ALL_CHARS: Final = 3_000_000


class Memo:
    """Text to text, in two generations: what is asked for moves to the young one, and when that is full the old one goes.

    Safe to use from several threads: at worst something is worked out twice.
    """

    __slots__ = ("_chars", "_entries", "_held", "_old", "_young")

    def __init__(self, entries: int = ENTRIES, chars: int = ALL_CHARS) -> None:
        self._entries, self._chars = entries, chars
        self._held = 0  # characters of the young generation
        self._young: dict[str, str] = {}
        self._old: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def recall(self, texts: Sequence[str], work: Callable[[list[str]], list[str]]) -> list[str]:
        """The result of every one of these distinct texts; `work` is asked for those that are not remembered."""
        found = self.known(texts)
        missing = [text for text, known in zip(texts, found, strict=True) if known is None]
        if missing:
            done = dict(zip(missing, work(missing), strict=True))
            found = [done[t] if known is None else known for t, known in zip(texts, found, strict=True)]
            self.remember(done)
        return [known for known in found if known is not None]

    def known(self, texts: Sequence[str]) -> list[str | None]:
        """The result of every one of these texts that is remembered, None for the others."""
        young, old = self._young, self._old
        found: list[str | None] = list(map(young.get, texts))
        if old and None in found:
            again: dict[str, str] = {}
            for at, text in enumerate(texts):
                if found[at] is None and (before := old.get(text)) is not None:
                    found[at] = again[text] = before
            if again:
                self._remember(again)
        return found

    def remember(self, done: Mapping[str, str]) -> None:
        """Keeps these results as far as they are short and there is room."""
        fresh = {t: r for t, r in done.items() if len(t) <= MAX_CHARS and len(r) <= MAX_CHARS}
        if fresh:
            self._remember(fresh)

    def _remember(self, fresh: dict[str, str]) -> None:
        more = sum(len(text) + len(result) for text, result in fresh.items())
        if len(fresh) > self._entries or more > self._chars:
            return
        if len(self._young) + len(fresh) > self._entries or self._held + more > self._chars:
            self._old, self._young, self._held = self._young, {}, 0
        self._young.update(fresh)
        self._held += more
