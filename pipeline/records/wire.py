"""One way to write values for Redis and files, and to read them back: msgspec with a version in front.

A value is a msgspec struct or a dataclass; its type annotations are the schema, bounds included
(`Annotated[int, msgspec.Meta(ge=0)]`). A reader refuses newer versions and damaged bytes with one sentence.
"""

from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from pipeline.errors import BadPayload, LogweirError, TooNew

T = TypeVar("T")
_PAIR: Final = b"\x92"  # how an array of two begins, and the largest number that is its own byte
_MOST_SHORT: Final = 127
SHOWN: Final = 80  # characters of damaged JSON that an error message quotes


class _Versioned(msgspec.Struct):
    v: int


def _text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no form on the wire")


def _path(kind: type[Any], value: Any) -> Path:
    if issubclass(kind, Path) and isinstance(value, str):
        return kind(value)
    raise NotImplementedError(f"{kind.__name__} has no form on the wire")


class Codec(Generic[T]):
    """Packs and reads one kind of value. `what` names the value in error messages, as in "the mark of T5".

    `newer` is the error that a newer version raises: TooNew where a newer worker can do the work instead.
    A path travels as its text.
    """

    def __init__(self, kind: type[T], *, version: int, what: str, newer: type[LogweirError] = TooNew) -> None:
        self.version = version
        self.what = what
        self.newer = newer
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_text)
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_path)
        self._frame = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
        self._json = msgspec.json.Decoder(kind, dec_hook=_path)

    def pack(self, value: T) -> bytes:
        """The value as msgpack `[version, value]`."""
        return self._encoder.encode((self.version, value))

    def unpack(self, blob: bytes, *, what: str = "") -> T:
        """The inverse of `pack`. Raises BadPayload for damaged bytes, `newer` for a newer version."""
        # To look for the end of the value takes a sixth of reading it, and the decoder finds it too.
        if blob[:1] == _PAIR and len(blob) > 2 and blob[1] <= min(self.version, _MOST_SHORT):
            return self._decoded(memoryview(blob)[2:], what)
        try:
            version, raw = self._frame.decode(blob)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise self._damaged(what, exc) from exc
        self._check(version, what)
        return self._decoded(raw, what)

    def _decoded(self, raw: "memoryview | msgspec.Raw", what: str) -> T:
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as exc:
            raise self._damaged(what, exc) from exc

    def to_json(self, value: T) -> str:
        """The value as a JSON object whose first field `v` is the version."""
        return msgspec.json.encode({"v": self.version, **msgspec.to_builtins(value)}).decode()

    def from_json(self, text: str | bytes, *, what: str = "") -> T:
        """The inverse of `to_json`; unknown fields are ignored. Raises BadPayload, `newer`."""
        try:
            self._check(msgspec.json.decode(text, type=_Versioned).v, what)
            return self._json.decode(text)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as exc:
            raise self._damaged(what, exc, text) from exc

    def _check(self, version: int, name: str) -> None:
        if version > self.version:
            raise self.newer(
                f"{name or self.what} has wire version {version}; "
                f"this build reads up to {self.version}: update it"
            )

    def _damaged(self, name: str, exc: Exception, text: Any = b"") -> BadPayload:
        shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        begins = f"; it begins with {shown[:SHOWN]!r}" if shown else ""
        return BadPayload(f"{name or self.what} is not readable: {exc}{begins}")
