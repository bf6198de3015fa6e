"""The values of a template's variables, as some of its lines have them."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_HOLE: Final = re.compile(r"<(\*|[A-Z][A-Z0-9_]*)>")
TOP: Final = 10
MAX_HOLES: Final = 30
MAX_MESSAGE: Final = 4_000  # characters of a message that are looked at
MAX_VALUE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableValues:
    """One variable: its place from 1, its mask ("*" where none is known), and its most frequent values with
    their counts. `distinct`: how many different ones the lines have."""

    place: int
    mask: str
    values: list[tuple[str, int]]
    distinct: int
    lines: int


def values_of(template: str, messages: Sequence[str]) -> list[VariableValues]:
    """The values in these messages of each variable, in the order of the template.

    Messages that the template does not cover as it stands now count for nothing: a template widens."""
    holes = [match[1] for match in _HOLE.finditer(template)][:MAX_HOLES]
    if not holes:
        return []
    fits = _pattern(template)
    counts: list[Counter[str]] = [Counter() for _ in holes]
    matched = 0
    for message in messages:
        found = fits.fullmatch(" ".join(message[:MAX_MESSAGE].split()))
        if found is None:
            continue
        matched += 1
        for counter, value in zip(counts, found.groups(), strict=True):
            counter[value[:MAX_VALUE]] += 1
    return [
        VariableValues(
            place=at, mask=mask, values=counter.most_common(TOP), distinct=len(counter), lines=matched
        )
        for at, (mask, counter) in enumerate(zip(holes, counts, strict=True), 1)
    ]


def _pattern(template: str) -> re.Pattern[str]:
    """Possessive between words, so that no message takes long: a hole holds no space, and what stands behind
    the last hole that counts may be anything."""
    words, groups = [], 0
    for word in template.split():
        parts, at = [], 0
        for match in _HOLE.finditer(word):
            parts.append(re.escape(word[at : match.start()]))
            groups += 1
            parts.append(r"(\S+?)" if groups <= MAX_HOLES else r"\S+?")
            at = match.end()
        parts.append(re.escape(word[at:]))
        words.append("".join(parts))
    return re.compile(" ".join(words))
