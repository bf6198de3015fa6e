"""Bytes that no decoder reads, as the text of a dead letter."""

import base64


def shown_bytes(value: bytes) -> str:
    """The text, or base64 where the bytes are no text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    return base64.b64encode(value).decode() if "\0" in text else text
