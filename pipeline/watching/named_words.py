"""Words of a text that may name a service or a host: `payments` in "payments POST /charges: refused".

A word of a path, a file, an address of mail, or a key of a field is no name; a host stands behind // too.
Pure.
"""

import re
from collections.abc import Iterator
from typing import Final

LEAST_CHARS: Final = 3  # of a name; a shorter one stands in too many lines
_WORD: Final = re.compile(
    r"(?:(?<![\w/.@-])|(?<=//))([A-Za-z][\w-]*(?:\.[\w-]+)*)(:\d{2,5}\b)?(?![\w/@=-])(?![\"']\s*[:=])"
)


def named_words(text: str) -> Iterator[tuple[str, bool]]:
    """Each word with its domain, in lower case, and whether a port follows it."""
    return ((word.lower(), bool(port)) for word, port in _WORD.findall(text))
