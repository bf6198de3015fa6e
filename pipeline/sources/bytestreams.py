"""The text of plain, gzip, zstd and UTF-16 files as UTF-8 bytes.

Offsets count unpacked UTF-8. The first bytes of a file tell its kind; the name does not matter.
"""

import codecs
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import numpy as np
import zstandard

from pipeline.errors import BadInput

GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_OTHER_PACKED: Final = {
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7-zip",
    b"\x04\x22\x4d\x18": "lz4",
}
_UTF16: Final = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
# The first bytes of files whose offsets in UTF-8 text are not their own.
REWRITTEN_MARKS: Final = (GZIP_MAGIC, ZSTD_MAGIC, *_UTF16)
_LOOK_BYTES: Final = 65536
# A log may hold a few NULs after a crash. Random bytes have 10 % control characters, executables far more.
_MAX_CONTROL_SHARE: Final = 0.05
_TEXT_CONTROLS: Final = (7, 8, 9, 10, 11, 12, 13, 27)  # Bell to carriage return, and ESC of terminal colours.
# One zstd input byte can become 32 KiB at once: a run-length block is 4 bytes for 128 KiB. So input goes in
# by small steps. After a step that expanded by more than 1 MiB the steps are tiny; one tiny step gives at
# most 2 MiB.
_ZSTD_STEP: Final = 1024
_ZSTD_TINY_STEP: Final = 64
_ZSTD_EXPANDING: Final = 1024 * 1024


class Unpacker(Protocol):
    """One way a file is packed."""

    def read(self, size: int) -> bytes:
        """About `size` bytes, b"" at the end; raises BadInput when the file ends too early."""
        ...

    def consumed(self) -> int:
        """Bytes of the file behind us."""
        ...


class _Plain:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._read = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._read += len(data)
        return data

    def skip(self, offset: int) -> None:
        self._file.seek(offset)
        self._read = offset

    def consumed(self) -> int:
        return self._read


class _Gzip:
    """Members one after another; zeros behind the last are padding."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._member = zlib.decompressobj(wbits=31)
        self._input = b""
        self._read = 0
        self._started = False

    def read(self, size: int) -> bytes:
        while True:
            if not self._input:
                self._input = self._file.read(_LOOK_BYTES)
                self._read += len(self._input)
                if not self._input:
                    if self._started:
                        raise _ends_early(self._path)
                    return b""
            if not self._started and not self._input.strip(b"\0"):
                self._input = b""
                continue
            self._started = True
            try:
                data = self._member.decompress(self._input, size)
            except zlib.error as exc:
                raise _damaged(self._path, exc) from exc
            self._input = self._member.unconsumed_tail
            if self._member.eof:
                self._input = self._member.unused_data
                self._member = zlib.decompressobj(wbits=31)
                self._started = False
            if data:
                return data

    def consumed(self) -> int:
        return self._read - len(self._input)


class _Zstd:
    """Frames one after another."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._frame: Any = zstandard.ZstdDecompressor().decompressobj()
        self._step = _ZSTD_TINY_STEP
        self._input = b""
        self._read = 0
        self._started = False

    def read(self, size: int) -> bytes:
        out: list[bytes] = []
        total = 0
        while total < size:
            if not self._input:
                self._input = self._file.read(_LOOK_BYTES)
                self._read += len(self._input)
                if not self._input:
                    if self._started and not out:
                        raise _ends_early(self._path)
                    break
            self._started = True
            step, self._input = self._input[: self._step], self._input[self._step :]
            try:
                data = self._frame.decompress(step)
            except zstandard.ZstdError as exc:
                if out:  # readable bytes first; the same bytes fail again at the next call
                    self._input = step + self._input
                    self._frame = zstandard.ZstdDecompressor().decompressobj()
                    break
                raise _damaged(self._path, exc) from exc
            self._step = _ZSTD_TINY_STEP if len(data) > _ZSTD_EXPANDING else _ZSTD_STEP
            if self._frame.eof:
                self._input = self._frame.unused_data + self._input
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._started = False
            out.append(data)
            total += len(data)
        return b"".join(out)

    def consumed(self) -> int:
        return self._read - len(self._input)


class _Utf16:
    """UTF-16 as UTF-8, without its byte order mark."""

    def __init__(self, inner: Unpacker, encoding: str, first: bytes) -> None:
        self._inner = inner
        self._decoder = codecs.getincrementaldecoder(encoding)("backslashreplace")
        self._first = first

    def read(self, size: int) -> bytes:
        while True:
            data, self._first = self._first or self._inner.read(size), b""
            text = self._decoder.decode(data, final=not data)
            # a lone surrogate is written as \udNNN
            out = text.encode("utf-8", "backslashreplace")
            if out or not data:
                return out

    def consumed(self) -> int:
        return self._inner.consumed()


class ByteStream:
    """The text of an open file from an offset on. The caller closes the file.

    Raises BadInput for unknown compression and for binary files.
    """

    def __init__(self, file: BinaryIO, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._plain = _Plain(file)
        self._ahead = memoryview(b"")
        self._source: Unpacker = self._plain
        self._at = 0
        self.encoding = "UTF-8"
        self.packing = ""
        self._open(file)
        if offset:
            self._skip(offset)

    def _open(self, file: BinaryIO) -> None:
        first = self._plain.read(_LOOK_BYTES)
        packed = next((name for magic, name in _OTHER_PACKED.items() if first.startswith(magic)), None)
        if packed is not None:
            raise BadInput(f"{self._path} is {packed}-compressed, which is not read; unpack it first")
        if first.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
            rejoined = _Rejoined(first, file)
            self.packing = "gzip" if first.startswith(GZIP_MAGIC) else "zstd"
            unpacker = _Gzip if self.packing == "gzip" else _Zstd
            self._source = unpacker(rejoined, self._path)  # type: ignore[arg-type]
            first = self._source.read(_LOOK_BYTES)
        for mark, encoding in _UTF16.items():
            if first.startswith(mark):
                self.encoding = encoding.upper()
                self._source = _Utf16(self._source, encoding, first[len(mark) :])
                first = self._source.read(_LOOK_BYTES)
        if share := binary_share(first):
            raise BadInput(
                f"{self._path} is not a text log: {share:.0%} of its first bytes are NUL or control "
                "characters; give the log as text"
            )
        self._ahead = memoryview(first)

    def _skip(self, offset: int) -> None:
        if not self.packing and self.encoding == "UTF-8":
            self._plain.skip(offset)
            self._ahead = memoryview(b"")
            self._at = offset
            return
        while self._at < offset:
            data = self.read(min(_LOOK_BYTES, offset - self._at))
            if not data:
                raise BadInput(
                    f"{self._path} has become shorter than the {offset} bytes already read; read it anew"
                )

    @property
    def offset(self) -> int:
        """Unpacked bytes behind us."""
        return self._at

    def read(self, size: int) -> bytes:
        """Up to `size` bytes of text, b"" at the end; a byte order mark at the start is left out."""
        if not self._ahead:
            self._ahead = memoryview(self._source.read(size))
        data, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        self._at += len(data)
        return data

    def consumed(self) -> int:
        """Bytes of the file itself behind us, for progress."""
        return self._source.consumed()


class _Rejoined:
    """A file with its first bytes put back; pipes cannot seek."""

    def __init__(self, first: bytes, file: BinaryIO) -> None:
        self._first, self._file = first, file

    def read(self, size: int) -> bytes:
        if self._first:
            data, self._first = self._first[:size], self._first[size:]
            return data
        return self._file.read(size)


def binary_share(first: bytes) -> float:
    """Share of control characters when it says "not text", else 0."""
    if not first:
        return 0.0
    counts = np.bincount(np.frombuffer(first, dtype=np.uint8), minlength=256)
    share = float(counts[:32].sum() - counts[list(_TEXT_CONTROLS)].sum()) / len(first)
    return share if share > _MAX_CONTROL_SHARE else 0.0


def _ends_early(path: Path) -> BadInput:
    return BadInput(
        f"{path} ends early: the archive is cut off; what could be read was delivered, copy it again"
    )


def _damaged(path: Path, exc: Exception) -> BadInput:
    return BadInput(f"{path} is damaged: {exc}; what could be read was delivered, copy it again")
