"""Digits that no pattern tells apart: lines that differ in nothing else are looked at once.

A pattern whose classes hold all ten digits or none, and that names no digit, matches the same places of two lines that
are equal but for which digits stand where digits stand. What such patterns put there is equal then, too, and when they
leave no digit, so is the whole line.
"""

import re
from itertools import pairwise
from typing import Final

import numpy as np
import polars as pl

_DIGITS: Final = frozenset("0123456789")
_ZERO, _ONE, _TEN = np.uint8(ord("0")), np.uint8(ord("1")), np.uint8(10)
_X, _LOWER = np.uint8(ord("x")), np.uint8(0x20)  # the bit that makes a capital small
_NAMED: Final = re.compile(r"\(\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_FLAGS: Final = re.compile(r"\(\?[imsUu-]*[:)]")
_COUNT: Final = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_BOUNDARY: Final = re.compile(r"\\b\{[a-z-]+\}")
# Escapes that mean all digits or none of them. What is left out here (\pN, \x30, \Q) is looked up by nobody.
_ESCAPES: Final = frozenset("bBAzdDsSwWtnrfav") | frozenset(r"\.+*?()|[]{}^$#&-~/\"'<>:=@%,;! _`")
# A whole class in its plainest form: no class in it, no set operation, `]` and `[` only escaped; `[^]...` goes on behind the `]`.
_CLASS: Final = re.compile(r"\[(?!\^\])\^?((?:[^\[\]\\]|\\.)+)\]", re.DOTALL)


def digits_alike(pattern: str) -> bool:
    """Whether a pattern surely sees no difference between two digits. What is not understood counts as one that does."""
    return widened(pattern) == pattern


def widened(pattern: str) -> str | None:
    """A pattern that sees no difference between two digits and matches wherever this one does, or in more places.

    Where it matches nowhere in a line, this one matches nowhere in any line that differs in digits alone. None where
    the pattern is not understood. A class grows by all digits when it has some of them; nothing else is changed, and
    a pattern without look-around that has larger classes matches no less.
    """
    at, parts = 0, []
    while at < len(pattern):
        end, part = _piece(pattern, at)
        if part is None:
            return None
        parts.append(part)
        at = end
    return "".join(parts)


def _piece(pattern: str, at: int) -> tuple[int, str | None]:
    """Where the piece at this place ends, and the piece with digits made alike; None when it is not understood."""
    c = pattern[at]
    found: re.Match[str] | None = None
    if c == "[":
        found = _CLASS.match(pattern, at)
        if found is None or not _class_read(found[1]):
            return at, None
        if not _class_alike(found[1]):
            return found.end(), f"(?:[0-9]|{found[0]})"
    elif c == "(" and pattern.startswith("(?", at):
        found = _FLAGS.match(pattern, at) or _NAMED.match(pattern, at)
        if found is None:
            return at, None
    elif c == "{":
        found = _COUNT.match(pattern, at)
        if found is None:
            return at, None
    elif c == "\\":
        found = _BOUNDARY.match(pattern, at)
        if found is None:
            known = pattern[at + 1 : at + 2] in _ESCAPES
            return at + 2, pattern[at : at + 2] if known else None
    elif c in _DIGITS:
        return at + 1, "[0-9]"
    end = at + 1 if found is None else found.end()
    return end, pattern[at:end]


def alternatives(pattern: str) -> tuple[str, ...]:
    """The pattern cut at its outermost bars; whole where it is not understood, or a flag in it holds for what follows."""
    at, depth, cuts = 0, 0, [-1]
    while at < len(pattern):
        end, part = _piece(pattern, at)
        if part is None or (end - at > 1 and pattern.startswith("(?", at) and pattern[end - 1] == ")"):
            return (pattern,)
        if pattern[at] == "(":
            depth += 1
        elif pattern[at] == ")":
            depth -= 1
        elif pattern[at] == "|" and not depth:
            cuts.append(at)
        at = end
    return tuple(pattern[a + 1 : b] for a, b in pairwise((*cuts, len(pattern))))


def _class_read(inside: str) -> bool:
    """Whether the text between the brackets of a class holds nothing but characters, ranges and known escapes."""
    if any(operation in inside for operation in ("&&", "--", "~~")):
        return False
    return all(escape in _ESCAPES for escape in re.findall(r"\\(.)", inside, re.DOTALL))


def _class_alike(inside: str) -> bool:
    """Whether the text between the brackets of a class that can be read holds digits as the range 0-9 alone.

    Any other range has both ends outside of the digits, so all of them lie in it or none.
    """
    # `x-0-9` would be a range up to 0: such a class is not read
    bare = re.sub(r"(?<!-)0-9(?!-.)", "", inside, flags=re.DOTALL)
    return not _DIGITS & set(bare)


def unsure(pattern: str) -> str | None:
    """A pattern for lines of ones: matches where this one would find a 1, which may stand for any digit, and asks which it is.

    Where it matches nowhere, this one matches the same places of all lines that the line of ones stands for: digits
    other than 1 in it are theirs. None where the pattern is not understood.
    """
    parts: list[str] = []
    asking: list[int | None] = []  # places of pieces that tell digits apart
    at = depth = 0
    while at < len(pattern):
        end, part = _piece(pattern, at)
        if part is None:
            return None
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        if part != pattern[at:end]:
            # what may stand there more than once may find a 1 in one place and something else in another
            asking.append(len(parts) if not depth and pattern[end : end + 1] not in {"*", "+", "{"} else None)
        parts.append(part)
        at = end
    if len(asking) == 1 and asking[0] is not None:
        parts[asking[0]] = "1"
    return "".join(parts)


def with_equal_digits(lines: pl.Series, *, but_hex: bool = False) -> pl.Series:
    """The same lines with a 1 for every ASCII digit, `but_hex`: but a 0 in front of an x. None has a line end in it."""
    if not lines.len():
        return lines
    # All bytes at once, in what a processor does to 32 of them at a time.
    text = np.frombuffer(lines.str.join("\n").cast(pl.Binary).item(), dtype=np.uint8)
    digit = (text - _ZERO) < _TEN
    if but_hex:
        digit[:-1] &= (text[:-1] != _ZERO) | ((text[1:] | _LOWER) != _X)
    alike = pl.Series(lines.name, [(text + (_ONE - text) * digit.view(np.uint8)).tobytes()], dtype=pl.Binary)
    return alike.cast(pl.String).str.split("\n").explode(empty_as_null=False)
