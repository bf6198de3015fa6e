"""Labels of Loki as text: `{app="cart", path="C:\\\\logs"}`, values quoted as in Go."""

import re
from collections.abc import Mapping
from typing import Final

from pipeline.records.remembered import remembered

_LONGEST: Final = 65_536  # characters
# Streams that are remembered. Labels of one character take 40 times the memory of their text.
_KEPT: Final = 1_024
_KEPT_CHARS: Final = 1_000
_LABEL: Final = re.compile(
    r"\s*(?P<name>[a-zA-Z_:][a-zA-Z0-9_:.]*)\s*=\s*"
    r'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|`(?P<plain>[^`]*)`)\s*(?P<end>[,}])',
    re.DOTALL,
)
_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL
)
_CHARACTERS: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_SURROGATES: Final = range(0xD800, 0xE000)
_UNICODE: Final = 0x110000


@remembered(_KEPT, _KEPT_CHARS)
def parsed_labels(text: str) -> Mapping[str, str] | None:
    """The labels by name, None for a text that is no set of labels."""
    stripped = text.strip()
    if not stripped.startswith("{") or len(stripped) > _LONGEST:
        return None
    labels: dict[str, str] = {}
    at = 1
    while stripped[at:].strip() != "}":
        label = _LABEL.match(stripped, at)
        if label is None:
            return None
        quoted = label["quoted"]
        labels[label["name"]] = label["plain"] if quoted is None else _ESCAPE.sub(_character, quoted)
        at = label.end()
        if label["end"] == "}":
            return labels if at == len(stripped) else None
    return labels


def _character(escape: re.Match[str]) -> str:
    """The character of an escape. Bytes of UTF-8 beyond ASCII, each escaped, become U+FFFD."""
    byte, short, long, octal, other = escape.groups()
    if other is not None:
        return _CHARACTERS.get(other, other)
    code = int(octal, 8) if octal else int(byte or short or long, 16)
    is_byte = (byte or octal) is not None
    beyond = code > 0x7F if is_byte else code in _SURROGATES or code >= _UNICODE
    return "\ufffd" if beyond else chr(code)
