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
BLOCK_BYTES: Final = 16_384  # of a packed file at once; thousands of frames may stand in it
OUT_BYTES: Final = 65_536  # of text at once, because a failed call returns none of what it unpacked
LONGEST_WINDOW: Final = 128 << 20
_LONGEST_MARK: Final = 10
_GZIP_END: Final = 8  # bytes of checksum and length behind a member
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


class Unpacked:
    """The unpacked bytes of a file: frames one after another. What stands in front of damage comes before its
    error, but for the last OUT_BYTES at most."""

    def __init__(
        self, packing: str, file: Readable, name: str, note: Note, *, window: int = LONGEST_WINDOW
    ) -> None:
        """`name` stands in sentences. `window`: bytes of memory that a frame of zstd may ask for."""
        self._packing, self._name, self._note, self._window = packing, name, note, window
        self._marks = MAGIC[packing] + (_ZSTD_SKIPPABLE if packing == "zstd" else ())
        self._input = _Input(file)
        self._frame: Any = None
        self._step = _ZSTD_TINY_STEP
        self._failure: BadInput | None = None

    def read(self, size: int, /) -> bytes:
        out: list[bytes] = []
        total = 0
        try:
            while total < size and self._failure is None and (self._frame is not None or self._begin()):
                out.append(self._some(min(size - total, OUT_BYTES)))
                total += len(out[-1])
        except BadInput as exc:
            self._failure = exc
        if self._failure is not None and not total:
            raise self._failure
        return b"".join(out)

    def _begin(self) -> bool:
        if not self._input.next_frame(self._marks, self._packing, self._name, self._note):
            return False
        match self._packing:
            case "gzip":
                self._frame = zlib.decompressobj(wbits=31)
            case "bzip2":
                self._frame = bz2.BZ2Decompressor()
            case "zstd":
                self._frame = zstandard.ZstdDecompressor(max_window_size=self._window).decompressobj()
            case _:
                self._frame = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
        return True

    def _some(self, most: int) -> bytes:
        source, frame = self._input, self._frame
        # A decompressor may hold output back although all its input is taken.
        hungry = getattr(frame, "needs_input", True)
        if hungry and not source.fill(_GZIP_END + 1):
            raise ends_early(self._name)
        # The checksum behind a member of gzip comes by itself: where it is wrong, all text was given.
        step = {"gzip": -_GZIP_END, "zstd": self._step}.get(self._packing, len(source.bytes))
        data = (source.bytes[:step] or source.bytes) if hungry else b""
        behind = source.bytes[len(data) :]
        try:
            found = bytes(frame.decompress(data) if self._packing == "zstd" else frame.decompress(data, most))
        except (OSError, EOFError, MemoryError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as exc:
            raise damaged(self._name, exc) from exc
        self._step = _ZSTD_TINY_STEP if len(found) > _ZSTD_EXPANDING else _ZSTD_STEP
        if frame.eof:
            behind = frame.unused_data + behind
            self._frame = None
        elif self._packing == "gzip":
            behind = frame.unconsumed_tail + behind
        source.bytes = behind
        return found


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
