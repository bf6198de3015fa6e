"""Anomaly injection: known anomalies for judging a model without labels.

Classic faults in the words of many programs (`config/words.toml`), and damaged normal lines.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pipeline.models.severity import words

# For words that no log has: pronounceable, so that a tokenizer cuts them like words.
_SYLLABLES: Final = ("zur", "kex", "plo", "vim", "qua", "dro", "thy", "bux", "nef", "jil", "gorm", "wesk")
_BASES: Final = 60  # damaged lines; a share of 60 is known to about 6 points
_MASK: Final = re.compile(r"<[A-Z0-9_*]+>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """An injected anomaly: a masked line, and how it was made."""

    masked: str
    kind: str  # "fault", "swapped", "truncated", "unknown-words"


def injected(normals: Sequence[str], *, seed: int) -> list[Injected]:
    """Classic faults, then damaged normal masked lines; distinct, and none of them among `normals`.

    At most 60 lines are damaged, in turn by words of other lines, by a cut in the middle of a word, and by
    invented words. The same lines and seed give the same anomalies.
    """
    rng = np.random.default_rng(seed)
    normal = set(normals)
    usable = sorted(line for line in normal if len(_words(line)) >= 2)
    bases = [usable[i] for i in rng.permutation(len(usable))[:_BASES].tolist()]
    anomalies = [Injected(masked=line, kind="fault") for line in words().faults]
    for i, line in enumerate(bases):
        if i % 3 == 0:
            anomalies.append(Injected(masked=_swapped(line, usable, rng), kind="swapped"))
        elif i % 3 == 1:
            anomalies.append(Injected(masked=_truncated(line, rng), kind="truncated"))
        else:
            anomalies.append(Injected(masked=_unknown(line, rng), kind="unknown-words"))
    return list({m.masked: m for m in anomalies if m.masked not in normal}.values())


def _words(line: str) -> list[int]:
    """The positions of words that are more than masks and punctuation."""
    return [i for i, w in enumerate(line.split()) if any(c.isalpha() for c in _MASK.sub("", w))]


def _swapped(line: str, others: Sequence[str], rng: np.random.Generator) -> str:
    """Half of the words, two at least, replaced by words of other lines."""
    words, places = line.split(), _words(line)
    for place in rng.permutation(places)[: max(2, len(places) // 2)].tolist():
        other = others[int(rng.integers(len(others)))]
        words[place] = other.split()[int(rng.choice(_words(other)))]
    return " ".join(words)


def _truncated(line: str, rng: np.random.Generator) -> str:
    """The line ends in the middle of a word, as when a writer dies; the next line begins there."""
    words, places = line.split(), _words(line)
    place = int(rng.choice(places[1:]))
    word = words[place]
    return " ".join([*words[:place], word[: max(1, len(word) // 2)] + words[0]])


def _unknown(line: str, rng: np.random.Generator) -> str:
    """A third of the words, two at least, replaced by invented words."""
    words, places = line.split(), _words(line)
    for place in rng.permutation(places)[: max(2, len(places) // 3)].tolist():
        words[place] = "".join(rng.choice(_SYLLABLES, size=3).tolist())
    return " ".join(words)
