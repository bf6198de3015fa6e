"""Unpackers of gzip, zstd, bzip2 and xz: streams with bounded memory and a bounded result.

Frames may follow one another, as in files that were appended to. Zeros behind the last frame are padding;
anything else there is left out with a note.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Final, Protocol

import zstandard

from pipeline.errors import BadInput

GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_XZ_MAGIC: Final = b"\xfd7zXZ\x00"
_LZMA_MAGIC: Final = b"\x5d\x00\x00"
_BZIP2_MAGIC: Final = tuple(
    b"BZh%d%s" % (level, block) for level in range(1, 10) for block in (b"1AY&SY", b"\x17rE8P\x90")
)
# How a file begins, and the name of its packing.
MAGIC: Final[dict[str, tuple[bytes, ...]]] = {
    "gzip": (GZIP_MAGIC,),
    "zstd": (ZSTD_MAGIC,),
    "xz": (_XZ_MAGIC,),
    "bzip2": _BZIP2_MAGIC,
    "lzma": (_LZMA_MAGIC,),
}
PACKED_MARKS: Final = tuple(mark for marks in MAGIC.values() for mark in marks)
BLOCK_BYTES: Final = 65536
_LONGEST_MARK: Final = 10
_XZ_MEMORY: Final = 256 * 1024 * 1024  # a larger dictionary is refused; `xz -9` takes 65 MiB
# A skippable frame of zstd begins with one of these.
_ZSTD_SKIPPABLE: Final = tuple(bytes((low, 0x2A, 0x4D, 0x18)) for low in range(0x50, 0x60))
# One zstd input byte can become 32 KiB at once: a run-length block is 4 bytes for 128 KiB. So input goes in
# by small steps. After a step that expanded by more than 1 MiB the steps are tiny; one tiny step gives at
# most 2 MiB.
_ZSTD_STEP: Final = 1024
_ZSTD_TINY_STEP: Final = 64
_ZSTD_EXPANDING: Final = 1024 * 1024
# Logs pack to a tenth, repeated lines to a hundredth. Above both bounds a file is taken for a bomb.
FREE_BYTES: Final = 4 * 1024**3
MOST_TIMES: Final = 250

Note = Callable[[str], None]


class Readable(Protocol):
    """A source of bytes."""

    def read(self, size: int, /) -> bytes:
        """About `size` bytes, b"" at the end; raises BadInput where the rest cannot be read."""
        ...


class Budget:
    """How much may come out of one file, in all its layers together."""

    def __init__(self, consumed: Callable[[], int], *, free: int | None = None) -> None:
        """`consumed`: bytes of the file that were read."""
        self._consumed = consumed
        self._free = FREE_BYTES if free is None else free
        self._spent = 0
        self._failure: BadInput | None = None

    def spend(self, size: int, name: str) -> None:
        """Raises BadInput above the bounds, and from then on."""
        self._spent += size
        if self._spent > self._free and self._spent > MOST_TIMES * self._consumed():
            self._failure = BadInput(
                f"{name} unpacks to more than {self._free / 1024**3:.3g} GiB and {MOST_TIMES} times its "
                "size, the rest is left out"
            )
        if self._failure is not None:
            raise self._failure


def packing_of(first: bytes) -> str:
    """`gzip`, `zstd`, `bzip2`, `xz` or `lzma` for the first bytes of a packed file, else ""."""
    return next((name for name, marks in MAGIC.items() if first.startswith(marks)), "")


def unpacker(packing: str, file: Readable, name: str, note: Note) -> Readable:
    """The unpacked bytes of a file. `name` stands in sentences."""
    return _Zstd(file, name, note) if packing == "zstd" else _Frames(packing, file, name, note)


class _Input:
    """Bytes of the packed file that no unpacker has taken yet."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        self.bytes = b""

    def fill(self, least: int = 1) -> bool:
        """Reads until `least` bytes are there; False without any byte."""
        while len(self.bytes) < least:
            more = self._file.read(BLOCK_BYTES)
            if not more:
                break
            self.bytes += more
        return bool(self.bytes)

    def next_frame(self, marks: tuple[bytes, ...], packing: str, name: str, note: Note) -> bool:
        """True where another frame begins; False at the end, which a note says when bytes stand behind it."""
        while self.fill():
            self.bytes = self.bytes.lstrip(b"\0")
            if self.bytes:
                break
        else:
            return False
        self.fill(_LONGEST_MARK)
        if self.bytes.startswith(marks):
            return True
        if any(mark.startswith(self.bytes) for mark in marks):
            raise ends_early(name)
        note(f"{name} has bytes behind its end that are no {packing}; they are left out")
        self.bytes = b""
        return False


class _Frames:
    """gzip, bzip2 and xz."""

    def __init__(self, packing: str, file: Readable, name: str, note: Note) -> None:
        self._packing, self._name, self._note = packing, name, note
        self._input = _Input(file)
        self._frame: Any = None
        self._failure: BadInput | None = None
        self._ended = False

    def read(self, size: int, /) -> bytes:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._ended or (self._frame is None and not self._begin()):
                self._ended = True
                return b""
            # A decompressor may hold output back although all its input is taken.
            hungry = self._packing == "gzip" or self._frame.needs_input
            if hungry and not self._input.fill():
                raise ends_early(self._name)
            data = self._gunzip(size) if self._packing == "gzip" else self._decompress(size)
            if self._frame is not None and self._frame.eof:
                self._input.bytes = self._frame.unused_data
                self._frame = None
            if data:
                return data

    def _begin(self) -> bool:
        if not self._input.next_frame(MAGIC[self._packing], self._packing, self._name, self._note):
            return False
        match self._packing:
            case "gzip":
                self._frame = zlib.decompressobj(wbits=31)
            case "bzip2":
                self._frame = bz2.BZ2Decompressor()
            case _:
                self._frame = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
        return True

    def _gunzip(self, size: int) -> bytes:
        before = self._frame.copy()
        try:
            data = bytes(self._frame.decompress(self._input.bytes, size))
        except zlib.error as exc:
            self._failure = damaged(self._name, exc)
            return self._before_the_damage(before, size)
        self._input.bytes = self._frame.unconsumed_tail
        return data

    def _before_the_damage(self, frame: Any, size: int) -> bytes:
        """The text in front of the damage: a failed call returns none of what it unpacked."""
        self._frame, data = None, b""
        try:
            for at in range(len(self._input.bytes)):
                data += frame.decompress(self._input.bytes[at : at + 1], size)
        except zlib.error:
            pass
        return data

    def _decompress(self, size: int) -> bytes:
        piece, self._input.bytes = (
            (self._input.bytes, b"") if self._frame.needs_input else (b"", self._input.bytes)
        )
        try:
            # Little at once: a failed call returns none of what it unpacked.
            return bytes(self._frame.decompress(piece, min(size, BLOCK_BYTES)))
        except (OSError, EOFError, lzma.LZMAError, MemoryError) as exc:
            self._failure = damaged(self._name, exc)
            raise self._failure from exc


class _Zstd:
    """Frames one after another."""

    def __init__(self, file: Readable, name: str, note: Note) -> None:
        self._name, self._note = name, note
        self._input = _Input(file)
        self._frame: Any = None
        self._step = _ZSTD_TINY_STEP
        self._failure: BadInput | None = None
        self._ended = False

    def read(self, size: int, /) -> bytes:
        out: list[bytes] = []
        total = 0
        while total < size and not self._ended:
            try:
                if self._failure is not None:
                    raise self._failure
                data = self._some()
            except BadInput as exc:
                self._failure = exc
                if total:  # readable bytes first, the failure at the next call
                    break
                raise
            out.append(data)
            total += len(data)
        return b"".join(out)

    def _some(self) -> bytes:
        source = self._input
        if self._frame is None:
            if not source.next_frame((ZSTD_MAGIC, *_ZSTD_SKIPPABLE), "zstd", self._name, self._note):
                self._ended = True
                return b""
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        if not source.fill():
            raise ends_early(self._name)
        step = source.bytes[: self._step]
        try:
            data = bytes(self._frame.decompress(step))
        except zstandard.ZstdError as exc:
            raise damaged(self._name, exc) from exc
        source.bytes = source.bytes[self._step :]
        self._step = _ZSTD_TINY_STEP if len(data) > _ZSTD_EXPANDING else _ZSTD_STEP
        if self._frame.eof:
            source.bytes = self._frame.unused_data + source.bytes
            self._frame = None
        return data


class Rejoined:
    """A source with bytes put back in front; pipes cannot seek. `failure` comes behind them."""

    def __init__(self, first: bytes, file: "Readable | BinaryIO", failure: BadInput | None = None) -> None:
        self._first, self._file, self._failure = first, file, failure

    def read(self, size: int, /) -> bytes:
        if self._first:
            data, self._first = self._first[:size], self._first[size:]
            return data
        if self._failure is not None:
            raise self._failure
        return self._file.read(size)


class Limited:
    """A layer whose bytes count for the budget, and come in the sizes that were asked for."""

    def __init__(self, inner: Readable, budget: Budget, name: str) -> None:
        self._inner, self._budget, self._name = inner, budget, name
        self._ahead = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes."""
        if not self._ahead:
            data = self._inner.read(size)
            self._budget.spend(len(data), self._name)
            if len(data) <= size:
                return data
            self._ahead = memoryview(data)
        data, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        return data


def ends_early(name: str) -> BadInput:
    return BadInput(f"{name} ends early")


def damaged(name: str, exc: Exception) -> BadInput:
    return BadInput(f"{name} is damaged ({exc})")
