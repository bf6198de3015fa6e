"""Words of a text that may name a service or a host: `payments` in "payments POST /charges: refused".

A word of a path, a file, an address of mail, or a key of a field is no name; a host stands behind // too.
An address without a name, as in `connect() to 10.0.0.7:8080 failed`, names the program that said on which
port it listens. Pure.
"""

import re
from collections.abc import Iterator
from typing import Final

LEAST_CHARS: Final = 3  # of a name; a shorter one stands in too many lines
_WORD: Final = re.compile(
    r"(?:(?<![\w/.@-])|(?<=//))([A-Za-z][\w-]*(?:\.[\w-]+)*)(:\d{2,5}\b)?(?![\w/@=-])(?![\"']\s*[:=])"
)
_ADDRESS: Final = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|localhost|\[[\da-fA-F:]+\])"
    # Drivers of databases write `server at "10.0.0.7", port 5432 failed` and `host 10.0.0.7 and port 5432`.
    r"(?::|[\"']?,? (?:and )?port[ =])(\d{2,5})(?!\d|[.:]\d)"  # a full stop may end the sentence
)
SAYS_PORT: Final = r"(?i)\b(?:listen(?:s|ing)?|(?:running|started|serving) (?:on|at|mode))\b"
# `listening port=8080`, `Tomcat started on port(s): 8080`, `Running on http://0.0.0.0:80`, `listening on :80`
_BEFORE_PORT: Final = r"(?:\bport(?:\(s\))?\W{1,3}|(?:\.\d{1,3}|[*\]]|localhost):|\s:)"
LISTENS_ON: Final = SAYS_PORT + r"[^\n]{0,80}?" + _BEFORE_PORT + r"(\d{2,5})(?:\D|$)"


def named_ports(text: str) -> Iterator[int]:
    """The ports of addresses that have no name."""
    return map(int, _ADDRESS.findall(text))


def named_words(text: str) -> Iterator[tuple[str, bool]]:
    """Each word with its domain, in lower case, and whether a port follows it."""
    return ((word.lower(), bool(port)) for word, port in _WORD.findall(text))
