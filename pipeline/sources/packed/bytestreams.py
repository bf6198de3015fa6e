"""The text of plain, packed and UTF-16 files as UTF-8 bytes.

Offsets count unpacked UTF-8. The first bytes of a file tell its kind; the name does not matter.
"""

import codecs
import os
import stat
from typing import BinaryIO, Final, Literal

import numpy as np

from pipeline.errors import BadInput
from pipeline.sources.packed.unpacking import (
    PACKED_MARKS,
    Budget,
    Limited,
    Note,
    Readable,
    Rejoined,
    Unpacked,
    packing_of,
)

# Packings that are not read.
_OTHER_PACKED: Final = {
    b"7z\xbc\xaf": "7-zip",
    b"\x04\x22\x4d\x18": "lz4",
    b"Rar!\x1a\x07": "rar",
    b"\x1f\x9d": "compress (.Z)",
}
_ZIP: Final = (b"PK\x03\x04", b"PK\x05\x06")
_TAR_AT: Final = 257
_UTF16: Final = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
LOOK_BYTES: Final = 65536
# Of UTF-16 without a mark, nearly every second byte of a log is NUL. A guess needs a few characters.
_NUL_SHARE: Final = 0.9
_GUESS_BYTES: Final = 8
# A log may hold a few NULs after a crash. Random bytes have 10 % control characters, executables far more.
_MAX_CONTROL_SHARE: Final = 0.05
_TEXT_CONTROLS: Final = (7, 8, 9, 10, 11, 12, 13, 27)  # Bell to carriage return, and ESC of terminal colours.
_TEXT_BYTES: Final = bytes(c for c in range(256) if c >= 32 or c in _TEXT_CONTROLS)
_MARKS: Final = (*PACKED_MARKS, *_UTF16, *_OTHER_PACKED, *_ZIP)
# A file may be packed, hold an archive, and its members again, so often and no deeper.
MAX_DEPTH: Final = 3

Kind = Literal["text", "tar", "zip"]


class _Plain:
    """The file itself, which counts what was read."""

    def __init__(self, file: "BinaryIO | Readable") -> None:
        self._file = file
        self.read_bytes = 0

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self.read_bytes += len(data)
        return data

    def skip(self, offset: int) -> None:
        self._file.seek(offset)  # type: ignore[union-attr]
        self.read_bytes = offset


class _Utf16:
    """UTF-16 as UTF-8, without its byte order mark."""

    def __init__(self, inner: Readable, encoding: str) -> None:
        self._inner = inner
        self._decoder = codecs.getincrementaldecoder(encoding)("backslashreplace")

    def read(self, size: int, /) -> bytes:
        while True:
            data = self._inner.read(size)
            text = self._decoder.decode(data, final=not data)
            # a lone surrogate is written as \udNNN
            out = text.encode("utf-8", "backslashreplace")
            if out or not data:
                return out


class Layers:
    """An open file without its packings. `kind` tells what is inside: text, or an archive of members.

    Raises BadInput for an unknown packing, and for one within another more than MAX_DEPTH times.
    """

    def __init__(
        self,
        file: "BinaryIO | Readable",
        name: str,
        *,
        note: Note = lambda _note: None,
        outer: "Layers | None" = None,
    ) -> None:
        """`outer`: the archive that this file is a member of; both share a budget and notes."""
        self.name = name
        self.plain = _Plain(file)
        self.outermost: Layers = self if outer is None else outer.outermost
        self.note: Note = note if outer is None else outer.note
        size = _size_on_disk(file)
        budget = Budget(lambda: size or self.plain.read_bytes)
        self.budget: Budget = budget if outer is None else outer.budget
        depth: int = 0 if outer is None else outer.level
        self.packing = ""
        source: Readable = self.plain
        # A pipe may give its first bytes long before the next ones.
        if depth:
            first, source = _looked_at(source)
        else:
            first = source.read(LOOK_BYTES)
            source = Rejoined(first, source)
        level = depth
        while packing := packing_of(first):
            level += 1
            _refuse_depth(level, name)
            self.packing = packing
            unpacked = Limited(Unpacked(packing, source, name, note), self.budget, name)
            first, source = _looked_at(unpacked)
        packed = next((other for magic, other in _OTHER_PACKED.items() if first.startswith(magic)), None)
        if packed is not None:
            raise BadInput(f"{name} is {packed}-compressed, which is not read; unpack it first")
        self.first = first
        self.source = source
        self.kind: Kind = "zip" if first.startswith(_ZIP) else "tar" if _is_tar(first) else "text"
        # The packing of an archive and the archive count as one.
        self.level: int = max(level, depth + 1)
        if self.kind != "text":
            _refuse_depth(self.level, name)

    def consumed(self) -> int:
        """Bytes of the outermost file that were read, for progress."""
        return self.outermost.plain.read_bytes


def _size_on_disk(file: "BinaryIO | Readable") -> int:
    """0 for a pipe and for a member of an archive."""
    try:
        info = os.fstat(file.fileno())  # type: ignore[union-attr]
    except (AttributeError, OSError):
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


def _refuse_depth(level: int, name: str) -> None:
    if level > MAX_DEPTH:
        raise BadInput(
            f"{name} is packed more than {MAX_DEPTH} times over, which is not read; unpack it first"
        )


def _looked_at(source: Readable) -> tuple[bytes, Readable]:
    """The first bytes, and the source with them. Damage behind them is left to the reader."""
    first = b""
    while len(first) < LOOK_BYTES:
        try:
            more = source.read(LOOK_BYTES - len(first))
        except BadInput as exc:
            if not first:
                raise BadInput(f"{exc}, before anything can be read; copy the file again") from exc
            return first, Rejoined(first, source, exc)
        if not more:
            break
        first += more
    return first, Rejoined(first, source)


class ByteStream:
    """The text of an open file. The caller closes the file.

    Raises BadInput for unknown compression, archives and binary files.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.name = layers.name
        self._ahead = memoryview(b"")
        self._source = layers.source
        self._at = 0
        self.encoding = "UTF-8"
        self.guessed = False  # the encoding, by the places of NULs
        self._returns = False  # lines end with a carriage return alone, as on an old Mac
        self._open(layers.first)

    def _open(self, first: bytes) -> None:
        name = self._layers.name
        if self._layers.kind != "text":
            raise BadInput(f"{name} is a {self._layers.kind} archive; unpack it and name its members")
        mark = next((mark for mark in _UTF16 if first.startswith(mark)), b"")
        encoding = _UTF16.get(mark) or _utf16_of(first)
        if encoding:
            self.encoding, self.guessed = encoding.upper(), not mark
            self._source.read(len(mark))
            self._source = _Utf16(self._source, encoding)
            first = self._source.read(LOOK_BYTES)
            self._ahead = memoryview(first)
        if share := binary_share(first):
            raise BadInput(
                f"{name} is not a text log: {share:.0%} of its first bytes are NUL or control "
                "characters; give the log as text"
            )
        # A carriage return at the end may be half of a line end.
        self._returns = b"\n" not in first and b"\r" in first.rstrip(b"\r")

    def skip(self, offset: int) -> None:
        """Goes on at an offset, for a file that can seek. Raises BadInput for a text that is shorter."""
        if not self._layers.packing and self.encoding == "UTF-8":
            self._layers.plain.skip(offset)
            self._ahead = memoryview(b"")
            self._source = self._layers.plain
            self._at = offset
            return
        while self._at < offset:
            data = self.read(min(LOOK_BYTES, offset - self._at))
            if not data:
                raise BadInput(
                    f"{self._layers.name} has become shorter than the {offset} bytes already read; "
                    "read it anew"
                )

    @property
    def offset(self) -> int:
        """Unpacked bytes behind us."""
        return self._at

    def peek(self) -> bytes:
        """The next bytes, which stay unread."""
        if not self._ahead:
            self._ahead = memoryview(self._source.read(LOOK_BYTES))
        return self._ended(bytes(self._ahead))

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes of text, b"" at the end; a byte order mark at the start is left out."""
        if not self._ahead:
            self._ahead = memoryview(self._source.read(size))
        data, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        self._at += len(data)
        return self._ended(data)

    def _ended(self, data: bytes) -> bytes:
        return data.replace(b"\r", b"\n") if self._returns else data

    def consumed(self) -> int:
        """Bytes of the file itself behind us, for progress."""
        return self._layers.consumed()


def is_plain(first: bytes) -> bool:
    """True for text that needs no closer look: no control characters, no mark of a packing."""
    return bool(first) and not first.translate(None, _TEXT_BYTES) and not first.startswith(_MARKS)


def is_packed(first: bytes) -> bool:
    """True for the first bytes of what must be unpacked before it is text, or cannot be."""
    return first.startswith((*PACKED_MARKS, *_OTHER_PACKED, *_ZIP)) or _is_tar(first)


def is_rewritten(first: bytes) -> bool:
    """True for the first bytes of a file whose offsets in UTF-8 text are not its own."""
    return first.startswith((*PACKED_MARKS, *_UTF16)) or bool(_utf16_of(first))


def binary_share(first: bytes) -> float:
    """Share of control characters when it says "not text", else 0."""
    if not first:
        return 0.0
    counts = np.bincount(np.frombuffer(first, dtype=np.uint8), minlength=256)
    share = float(counts[:32].sum() - counts[list(_TEXT_CONTROLS)].sum()) / len(first)
    return share if share > _MAX_CONTROL_SHARE else 0.0


def _utf16_of(first: bytes) -> str:
    """The encoding of UTF-16 without a byte order mark, guessed by the places of NULs; "" for any other."""
    if len(first) < _GUESS_BYTES:
        return ""
    data = np.frombuffer(first[: len(first) & ~1], dtype=np.uint8) == 0
    even, odd = float(data[::2].mean()), float(data[1::2].mean())
    if odd >= _NUL_SHARE and even <= 1 - _NUL_SHARE:
        return "utf-16-le"
    return "utf-16-be" if even >= _NUL_SHARE and odd <= 1 - _NUL_SHARE else ""


def _is_tar(first: bytes) -> bool:
    """POSIX, GNU, and the header before both, whose checksum is all that tells it from text."""
    header = first[:512]
    if len(header) < 512:
        return False
    if header[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return True
    digits = header[148:156].strip(b" \0")
    if b"\0" not in header or not digits.isdigit() or not header[0]:
        return False
    try:
        return sum(header[:148]) + sum(header[156:]) + 8 * 32 == int(digits, 8)
    except ValueError:
        return False
