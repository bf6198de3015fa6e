"""Patterns that see no difference between two digits, and lines whose digits are normalised for them.

A pattern is *digit-invariant* when its character classes hold all ten digits or none, and it names no digit.
It matches at the same places of two lines that differ in digits alone. A digit-invariant pattern puts the
same text there, and when no digit is left, the masked lines are equal."""

import re
from itertools import pairwise
from typing import Final

import numpy as np
import polars as pl

_DIGITS: Final = frozenset("0123456789")
_ZERO, _ONE, _TEN = np.uint8(ord("0")), np.uint8(ord("1")), np.uint8(10)
_X, _LOWER = np.uint8(ord("x")), np.uint8(0x20)  # the bit that makes a capital small
_BLOCK: Final = 1 << 16  # bytes that stay in the cache of a core
_NAMED: Final = re.compile(r"\(\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_FLAGS: Final = re.compile(r"\(\?[imsUu-]*[:)]")
_COUNT: Final = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_BOUNDARY: Final = re.compile(r"\\b\{[a-z-]+\}")
# Escapes that mean all digits or none. Others (\pN, \x30, \Q) count as not understood.
_ESCAPES: Final = frozenset("bBAzdDsSwWtnrfav") | frozenset(r"\.+*?()|[]{}^$#&-~/\"'<>:=@%,;! _`")
# A class in its plainest form: no nested class, no set operation, `]` and `[` only escaped, and no `[^]...`.
_CLASS: Final = re.compile(r"\[(?!\^\])\^?((?:[^\[\]\\]|\\.)+)\]", re.DOTALL)


def is_digit_invariant(pattern: str) -> bool:
    """True when the pattern certainly sees no difference between two digits; False when it is not
    understood."""
    return widened(pattern) == pattern


def widened(pattern: str) -> str | None:
    """A digit-invariant pattern that matches at least where `pattern` matches; None where it is not
    understood.

    Where the wider pattern matches nowhere in a line, `pattern` matches in no line that differs in digits
    alone. A class with some digits gets all digits. Without look-around, a pattern with larger classes
    matches no less."""
    at, parts = 0, []
    while at < len(pattern):
        end, part = _piece(pattern, at)
        if part is None:
            return None
        parts.append(part)
        at = end
    return "".join(parts)


def _piece(pattern: str, at: int) -> tuple[int, str | None]:
    """The end of the piece at this place, and the piece made digit-invariant; None when it is not
    understood."""
    c = pattern[at]
    found: re.Match[str] | None = None
    if c == "[":
        found = _CLASS.match(pattern, at)
        if found is None or not _class_understood(found[1]):
            return at, None
        if not _class_invariant(found[1]):
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
            understood = pattern[at + 1 : at + 2] in _ESCAPES
            return at + 2, pattern[at : at + 2] if understood else None
    elif c in _DIGITS:
        return at + 1, "[0-9]"
    end = at + 1 if found is None else found.end()
    return end, pattern[at:end]


def alternatives(pattern: str) -> tuple[str, ...]:
    """The pattern cut at its outermost bars; whole where it is not understood or a flag applies to what
    follows."""
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


def _class_understood(inside: str) -> bool:
    """Whether the text between the brackets of a class holds only characters, ranges and known escapes."""
    if any(operation in inside for operation in ("&&", "--", "~~")):
        return False
    return all(escape in _ESCAPES for escape in re.findall(r"\\(.)", inside, re.DOTALL))


def _class_invariant(inside: str) -> bool:
    """Whether an understood class holds digits as the range 0-9 alone.

    Any other range has both ends outside of the digits, so it holds all digits or none.
    """
    # `x-0-9` would be a range up to 0: such a class is not understood.
    bare = re.sub(r"(?<!-)0-9(?!-.)", "", inside, flags=re.DOTALL)
    return not _DIGITS & set(bare)


def reads_a_one(pattern: str) -> str | None:
    """A pattern for shapes: matches where `pattern` would read a 1, which may stand for any digit.

    Where it matches nowhere in a shape, `pattern` matches at the same places of all lines of that shape.
    Digits other than 1 in a shape are digits of those lines. None where the pattern is not understood."""
    parts: list[str] = []
    asking: list[int | None] = []  # indices of pieces that tell digits apart
    at = depth = 0
    while at < len(pattern):
        end, part = _piece(pattern, at)
        if part is None:
            return None
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        if part != pattern[at:end]:
            # A repeated piece may read a 1 at one place and another character at the next.
            asking.append(len(parts) if not depth and pattern[end : end + 1] not in {"*", "+", "{"} else None)
        parts.append(part)
        at = end
    if len(asking) == 1 and asking[0] is not None:
        parts[asking[0]] = "1"
    return "".join(parts)


def normalise_digits(lines: pl.Series, *, but_hex: bool = False) -> pl.Series:
    """The shapes of lines: a 1 for every ASCII digit. With `but_hex` a 0 in front of an x stays. No line has
    a line end."""
    if not lines.len():
        return lines
    # On the bytes of all lines: NumPy does 32 of them per instruction.
    text = np.frombuffer(lines.str.join("\n").cast(pl.Binary).item(), dtype=np.uint8)
    result = np.empty_like(text)
    for begin in range(0, text.size, _BLOCK):
        block, shape = text[begin : begin + _BLOCK], result[begin : begin + _BLOCK]
        digit = (block - _ZERO) < _TEN
        if but_hex:
            behind = text[begin + 1 : begin + 1 + _BLOCK]
            digit[: behind.size] &= (block[: behind.size] != _ZERO) | ((behind | _LOWER) != _X)
        np.subtract(_ONE, block, out=shape)
        shape *= digit.view(np.uint8)
        shape += block
    shapes = pl.Series(lines.name, [result.tobytes()], dtype=pl.Binary)
    return shapes.cast(pl.String).str.split("\n").explode(empty_as_null=False)
