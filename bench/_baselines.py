"""What a detector must beat: simple scorers of unseen lines, each a pure function of training lines and test
lines.

High is anomalous. None of them knows a label.
"""

import re
from collections.abc import Sequence
from typing import Final

from pipeline.records.levels import ERROR_LEVELS

# What Opni keeps out of its training data; a list that others chose, not ours (docs/detection.md).
KEYWORDS: Final = (
    "fail", "error", "fatal", "exception", "timeout", "unavailable", "crash", "connection refused", "network error",
    "deadlock", "out of disk", "high load",
)  # fmt: skip
_MASK: Final = re.compile(r"<[A-Z0-9_*]+>")


def cache_only(lines: Sequence[str]) -> list[float]:
    """A known line is normal, any other new: every unseen line is as anomalous as the next."""
    return [1.0] * len(lines)


def trigram_novelty(train: Sequence[str], lines: Sequence[str]) -> list[float]:
    """The share of a line's distinct character trigrams that no training line holds."""
    known: set[str] = set()
    for line in train:
        known |= _trigrams(line)
    return [len(own - known) / max(1, len(own)) for own in map(_trigrams, lines)]


def rarity(counts: Sequence[int]) -> list[float]:
    """The rarer first: by the line's own occurrences in the whole log that is judged, in hindsight."""
    return [-float(count) for count in counts]


def keyword_rule(lines: Sequence[str], levels: Sequence[str | None]) -> list[float]:
    """1 at level error and above, and where one of the words occurs anywhere; else 0. A hidden level is
    None."""
    return [
        float(level in ERROR_LEVELS or any(word in line.lower() for word in KEYWORDS))
        for line, level in zip(lines, levels, strict=True)
    ]


def _trigrams(line: str) -> set[str]:
    text = _MASK.sub(" ", line).lower()
    return {text[i : i + 3] for i in range(len(text) - 2)}
